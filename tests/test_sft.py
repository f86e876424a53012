"""The cold start: when it ends, what it holds out, what it says, how it goes on."""

import contextlib
import io
import os
import re
import shutil

import jax
import numpy as np
import pytest
from support.command_line import SMALL_MODEL, figures, rows_of
from support.configs import config_of

from configs import tiny
from gspo_jax import sft, sharding
from gspo_jax.data.sources import Batches
from gspo_jax.inputs import read_inputs
from gspo_jax.run import open_run
from gspo_jax.settings.data import DataError
from gspo_jax.system import preemption

MODEL = {key.replace(".", "__"): int(value) for key, value in (s.split("=") for s in SMALL_MODEL)}
SMALL = MODEL | dict(
  job="sft",
  model__num_layers=1,
  data__digits=1,
  sft__steps=40,
  sft__batch=16,
  sft__log_every=4,
  sft__check_every=2,
  checkpoint__every=3,
  sft_optimizer__learning_rate=1e-2,
  sft_optimizer__warmup_steps=0,
)


@pytest.fixture(autouse=True, scope="module")
def few_held_out():
  """More than a batch, and not a multiple of it; on one device, which compiles sooner."""
  make_mesh = sharding.make_mesh
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sft, "HELD_OUT", 20)
    patch.setattr(sharding, "make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))
    yield


@contextlib.contextmanager
def opened(workdir, **changes):
  with open_run(read_inputs(config_of(tiny.get_config, **SMALL | changes), workdir)) as run:
    yield run


def losses(workdir):
  """Held-out loss by update."""
  rows = rows_of(workdir, "sft")
  return {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
  """A sufficient cold start: its directory, target and parameters."""
  workdir, target = tmp_path_factory.mktemp("learned"), 3.0
  log = io.StringIO()
  with opened(workdir, sft__target_loss=target) as run, contextlib.redirect_stderr(log):
    params = jax.device_get(sft.sft(run))
  assert (workdir / "report.html").exists()  # It is written while the cold start goes on.
  end = r"cold start: ended after \d+ updates, with a held-out loss of \S+, at most .*=3"
  assert re.search(end, log.getvalue())
  return workdir, target, params


def same(a, b):
  return jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(a), jax.device_get(b)))


def test_it_ends_with_the_first_look_that_finds_the_target_reached(learned, capfd):
  workdir, target, params = learned
  *before, last = losses(workdir).items()
  assert before and all(loss > target for _, loss in before)
  assert last[1] <= target and last[0] < SMALL["sft__steps"]
  assert [step for step, _ in before] == list(range(2, last[0], 2))
  with opened(workdir, sft__target_loss=target) as run:
    assert sft.finished(run)
    assert same(sft.params_after(run), params)
    assert same(sft.sft(run), params)  # the same command again makes no further update
  assert max(losses(workdir)) == last[0]
  assert "warning: the cold start" not in capfd.readouterr().err


@pytest.mark.long
def test_interrupted_anywhere_it_ends_as_if_it_had_not_been(learned, tmp_path, monkeypatch):
  workdir, target, params = learned
  last = max(losses(workdir))
  for step in (3, last):
    countdown = iter(range(step))

    def check(countdown=countdown):
      if next(countdown, None) is None:
        raise preemption.Preempted

    monkeypatch.setattr(preemption, "check", check)
    with opened(tmp_path / str(step), sft__target_loss=target) as run:
      with pytest.raises(preemption.Preempted):
        sft.sft(run)
      assert sft.finished(run) == (step == last)
      monkeypatch.setattr(preemption, "check", lambda: None)
      assert same(sft.sft(run), params)
    assert figures(tmp_path / str(step)) == figures(workdir)


def test_with_a_damaged_checkpoint_it_has_not_ended(learned, tmp_path):
  """Training resumes from the checkpoint before it."""
  workdir, target, _ = learned
  shutil.copytree(workdir, tmp_path / "copy")
  newest = max((tmp_path / "copy/checkpoints/sft").iterdir(), key=lambda path: int(path.name))
  host = newest / "host/metadata"
  for changed in False, True:
    if changed:
      host.write_text(host.read_text().replace("step", "stop"))
    with opened(tmp_path / "copy", sft__target_loss=target) as run:
      assert sft.finished(run) != changed


def test_without_a_target_it_makes_all_its_updates(tmp_path, monkeypatch, capfd):
  """And has ended where it is now asked to make fewer; none of them leaves a batch on the devices.
  Batches for a failure report are on the host, in any number."""
  alive, pack = [], sft.train_batch

  def counted(*args):
    batch = pack(*args)
    alive.append(sum(x.shape == batch.inputs.tokens_BT.shape for x in jax.live_arrays()))
    return batch

  monkeypatch.setattr(sft, "train_batch", counted)
  options = dict(sft__target_loss=0.0, sft__log_every=12)
  with opened(tmp_path, sft__steps=12, **options) as run:
    params = sft.sft(run)
    assert sft.finished(run)
  assert not losses(tmp_path) and rows_of(tmp_path, "sft")[-1]["step"] == 12
  assert "warning: the cold start" not in capfd.readouterr().err
  assert len(alive) == 12 and max(alive[1:]) == alive[1]
  with opened(tmp_path, sft__steps=11, resume="force", **options) as run:
    assert sft.finished(run) and same(sft.params_after(run), params)


def test_the_checkpoint_with_the_best_held_out_loss_is_kept(tmp_path):
  """The largest one here, since the loss falls."""
  best = dict(checkpoint__best="held_out_loss", checkpoint__best_is="largest")
  often = dict(checkpoint__every=2, checkpoint__keep=1, sft__target_loss=1e-3)
  with opened(tmp_path, sft__steps=8, **best, **often) as run:
    sft.sft(run)
    steps = os.listdir(run.config.checkpoint.phase_directory(run.workdir, "sft"))
  loss = losses(tmp_path)
  assert {*steps} == {"8", str(max(loss, key=loss.get))} and loss[8] < max(loss.values())


def test_what_is_held_out_is_not_trained_on(tmp_path, monkeypatch, capfd):
  """Data of 30 rows, of which 144 are drawn: all that are not held out come up. One that has not
  worked says so in one line."""
  (tmp_path / "data.jsonl").write_text(
    "".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(30))
  )
  monkeypatch.setattr(sft, "HELD_OUT", 10)
  batches, pack = [], sft.train_batch
  monkeypatch.setattr(
    sft, "train_batch", lambda prompts, *rest: (batches.append(prompts), pack(prompts, *rest))[1]
  )
  data = dict(data__train=str(tmp_path / "data.jsonl"), sft__steps=9)
  with opened(tmp_path / "run", sft__target_loss=0.01, **data) as run:
    sft.sft(run)
    assert sft.finished(run)
  held_out = {prompt.id for prompt in batches[0][:10]}
  trained = {prompt.id for batch in batches[1:] for prompt in batch}
  assert len(held_out) == 10 and len(trained) == 20 and not held_out & trained
  line = [line for line in capfd.readouterr().err.splitlines() if "cold start" in line]
  assert len(line) == 1
  assert "after 9 updates the held-out loss is" in line[0] and "sft.target_loss=0.01" in line[0]
  assert max(losses(tmp_path / "run")) == 9  # looked at last, whatever check_every says


def test_after_a_change_of_data_what_is_held_out_stays_so(tmp_path, monkeypatch):
  """Other demonstrations may have been trained on."""
  monkeypatch.setattr(sft, "HELD_OUT", 10)
  rows = [f'{{"question": "{n}+1=", "answer": "{n + 1}"}}' for n in range(30)]
  data = tmp_path / "data.jsonl"
  settings = dict(sft__target_loss=0.01, data__train=str(data))
  held = []
  for first in 0, 1:
    data.write_text("\n".join(rows[first:]))
    with opened(tmp_path / f"run{first}", **settings) as run:
      before = [*held[0].values()] if held else ()
      held.append(sft.held_out(run, run.inputs.data.demonstrations, before)[0])
      assert len(sft.held_out(run, run.inputs.data.demonstrations, [1])[0]) == 10
  lines = [{int(name.rpartition(":")[2]) for name in ids} for ids in held]  # From 1 on.
  assert len(lines[0]) == 10 and {line + 1 for line in lines[1]} == lines[0] - {1}


def test_a_small_source_with_a_large_weight_is_trained_on(tmp_path, monkeypatch):
  monkeypatch.setattr(sft, "HELD_OUT", 16)
  for name, count in ("small", 8), ("big", 120):
    rows = [
      f'{{"id": "{name}{n}", "question": "{n}+1=", "answer": "{n + 1}"}}' for n in range(count)
    ]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
  spec = ",".join(f"{tmp_path}/{name}.jsonl:0.5" for name in ("small", "big"))
  with opened(tmp_path / "run", sft__target_loss=0.1, data__train=spec) as run:
    ids, _ = sft.held_out(run, run.inputs.data.demonstrations)
  assert len(ids) == 16 and sum(x.startswith("small") for x in ids) <= 4


def test_too_few_to_hold_out_is_an_error(tmp_path):
  (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
  with (
    pytest.raises(
      DataError, match=r"sft\.target_loss=.* holds out some demonstrations, so it needs at least 2"
    ),
    opened(tmp_path / "run", sft__target_loss=0.1, data__train=str(tmp_path / "data.jsonl")),
  ):
    pass


@pytest.fixture
def nine_rows(tmp_path):
  path = tmp_path / "data.jsonl"
  rows = [f'{{"question": "{n}+1=", "answer": "{n + 1}"}}' for n in range(9)]
  path.write_text("\n".join(rows))
  return str(path)


@pytest.mark.parametrize("spec", ["arithmetic:train", "FILE"])
def test_it_trains_on_the_demonstrations_it_may_have(spec, nine_rows, tmp_path):
  spec, chosen = spec.replace("FILE", nine_rows), []
  for seed in 0, 1:
    options = dict(seed=seed, data__train=spec, sft__demonstrations=5)
    with opened(tmp_path / f"run{seed}", **options) as run:
      source = run.inputs.data.demonstrations
      batches = Batches(source, 20, seed=seed)
      chosen.append({prompt.id for prompt in source})
      assert {prompt.id for prompt in next(batches)} == chosen[-1]
  assert chosen[0] == chosen[1] and len(chosen[0]) == 5


@pytest.mark.parametrize(
  "count, loss, message",
  [
    (10, 0.0, r"sft\.demonstrations=10: data\.train has 9 that fit"),
    (1, 0.1, r"needs at least 2; sft\.demonstrations=1, and data\.train has 9"),
  ],
)
def test_a_number_of_demonstrations_that_is_not_there_is_an_error(
  count, loss, message, nine_rows, tmp_path
):
  options = dict(sft__target_loss=loss, sft__demonstrations=count, data__train=nine_rows)
  with pytest.raises(DataError, match=message), opened(tmp_path / "run", **options):
    pass
