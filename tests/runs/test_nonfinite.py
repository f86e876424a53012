"""NaN stops a run before it does harm, and can be reproduced."""

import dataclasses
import json
import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from support.command_line import SMALL, SMALL_VALUES, called, rows_of, run
from support.configs import config_of
from support.small_models import SMALLER_DENSE, initial
from support.small_updates import learner

from configs import tiny
from gspo_jax import sharding
from gspo_jax.learner import optimizer
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.learner.summary import summarize
from gspo_jax.models.params import abstract
from gspo_jax.replay import main as replay_main
from gspo_jax.runs import nonfinite
from gspo_jax.runs.checkpoint import restore_state
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.structs import ModelInputs, TrainBatch

TX = optax.adam(1e-2)


def batch(seed=0, bad=False):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(1, 32, (8, 6)).astype(np.int32)
  mask = np.ones((8, 6), np.float32)
  if bad:
    mask[3, 2] = np.inf
  zeros = np.zeros((8, 6), np.float32)
  inputs = ModelInputs(tokens, np.ones((8, 6), np.int32))
  return TrainBatch(inputs, mask, zeros[:, 0], zeros, zeros)


def update(on_nonfinite, microbatches=1):
  settings = dict(microbatches=microbatches, on_nonfinite=on_nonfinite)
  return train_step.make_sft_step(learner(SMALLER_DENSE, **settings), TX)


def start():
  return new_state(initial(SMALLER_DENSE), TX)


def after(step, batches, state=None):
  """The state after these updates, and after each of them how many were left out."""
  state, skipped = state or start(), []
  for each in batches:
    state, metrics = step(state, each)
    skipped.append(int(summarize((metrics,))["updates_skipped"]))
  return state, skipped


@pytest.mark.parametrize(
  "on_nonfinite, microbatches, applied, skips",
  [
    pytest.param("skip", 1, (0, 2), [0, 1, 1], id="skip-1-applied0-skips0"),
    pytest.param("stop", 1, (0,), [0, 1, 2], id="stop-1-applied2-skips2"),
    pytest.param("skip", 4, (0, 2), [0, 1, 1], marks=pytest.mark.long, id="skip-4-applied1-skips1"),
  ],
)
def test_a_bad_update_is_skipped_and_with_stop_all_later_ones(
  on_nonfinite, microbatches, applied, skips
):
  step = update(on_nonfinite, microbatches)
  state, skipped = after(step, [batch(0), batch(1, bad=True), batch(2)])
  expected, _ = after(step, map(batch, applied))
  assert skipped == skips
  chex.assert_trees_all_equal(state.replace(skipped=expected.skipped), expected)


def guard_of(workdir, on_nonfinite, **options):
  values = dataclasses.asdict(config_of(tiny.get_config))
  return nonfinite.Guard(epath.Path(workdir), values, on_nonfinite, **options)


def row(step, **metrics):
  return dict(phase="sft", step=step, updates_skipped=0.0) | metrics


def test_the_guard_dumps_state_and_batch_of_the_first_bad_update(tmp_path):
  step, state = update("stop"), start()
  guard = guard_of(tmp_path, "stop", updates=1, keep=4)
  for number, bad in (1, False), (2, True), (3, False):
    guard.keep_batches(number, [batch(number, bad)])
    state, _ = step(state, batch(number, bad))
  guard.check(row(1, loss=1.0), state)
  with pytest.raises(
    nonfinite.NonFiniteError, match="sft step 2: its update was skipped"
  ) as caught:
    guard.check(row(3, loss=2.0, updates_skipped=2.0), state)  # rows of 1 and 3 only were logged
  assert str(tmp_path / "failures" / "sft_000002") in str(caught.value)
  about, batches = nonfinite.load(tmp_path / "failures" / "sft_000002")
  assert (about["phase"], about["step"]) == ("sft", 2)
  (dumped,) = batches
  chex.assert_trees_all_equal(dumped, batch(2, bad=True))
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  like = abstract(jax.eval_shape(lambda: state), mesh)
  restored = restore_state(tmp_path / "failures" / "sft_000002" / "state", like)
  assert int(restored.step) == 1
  chex.assert_trees_all_equal(restored.params, after(update("stop"), [batch(1)])[0].params)


def test_the_guard_finds_it_after_batches_without_a_token(tmp_path):
  """Batches without a token have no update, as with responses that were all cut off."""
  step, state = update("stop"), start()
  guard = guard_of(tmp_path, "stop", updates=2, keep=2)
  nothing = batch(0).replace(mask_BT=np.zeros((8, 6), np.float32))
  for number, second in (1, nothing), (2, nothing), (3, batch(3, bad=True)):
    batches = [batch(number), second]
    guard.keep_batches(number, batches)
    state, (_, skipped) = after(step, batches, state)
    if number < 3:
      guard.check(row(number, loss=1.0, updates_skipped=skipped), state)
  with pytest.raises(nonfinite.NonFiniteError, match="sft step 3: its update was skipped"):
    guard.check(row(3, loss=1.0, updates_skipped=skipped), state)
  _, dumped = nonfinite.load(tmp_path / "failures" / "sft_000003")
  chex.assert_trees_all_equal(dumped, [second])


def test_mini_batches_come_back_in_the_order_of_their_updates(tmp_path):
  batches = [batch(number) for number in range(12)]
  directory = nonfinite.dump(epath.Path(tmp_path), {}, row(1), "", start(), batches)
  _, dumped = nonfinite.load(directory)
  chex.assert_trees_all_equal(dumped, batches)
  nonfinite.dump(epath.Path(tmp_path), {}, row(1), "", start(), batches[7:8])  # After a resume.
  _, dumped = nonfinite.load(directory)
  chex.assert_trees_all_equal(dumped, batches[7:8])


def test_the_batch_of_a_cold_start_is_on_every_host_and_is_dumped_once(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)

  def write(directory, state):
    directory.mkdir(parents=True)

  monkeypatch.setattr(nonfinite.checkpoint, "save_state", write)
  directory = nonfinite.dump(epath.Path(tmp_path), {}, row(1), "not finite", None, [batch()])
  with np.load(directory / "batch_0.npz") as arrays:
    np.testing.assert_array_equal(arrays["tokens_BT"], batch().inputs.tokens_BT)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_any_other_metric_that_is_not_finite_stops_the_run(on_nonfinite, tmp_path):
  guard = guard_of(tmp_path, on_nonfinite, updates=1, keep=2)
  guard.keep_batches(5, [batch(5)])
  guard.check(row(5, loss=1e30), start())
  with pytest.raises(nonfinite.NonFiniteError, match="sft step 5: entropy is inf") as caught:
    guard.check(row(5, loss=1.0, entropy=jnp.inf), start())
  assert caught.value.names == ("entropy",)


def test_skip_says_so_and_lets_the_row_pass(tmp_path, capsys):
  guard = guard_of(tmp_path, "skip", updates=2, keep=2)
  guard.check(row(5, loss=np.nan, grad_norm=np.nan, updates_skipped=2.0), start())
  assert "sft step 5: updates: 2 not finite (loss, grad_norm) and skipped" in (
    capsys.readouterr().err
  )
  guard.check(row(6, loss=1.0, updates_skipped=2.0), start())
  assert capsys.readouterr().err == "" and not (tmp_path / "failures").exists()


def test_the_limit_of_skips_in_a_row_ends_the_run(tmp_path):
  guard = guard_of(tmp_path, "skip", updates=2, keep=2, limit=4)
  skipped = 0
  for step, added in enumerate((1, 2, 1, 2), start=1):  # an update was made in between
    skipped += added
    guard.check(row(step, loss=np.nan if added else 1.0, updates_skipped=skipped), start())
    guard.check(dict(phase="sft", step=step, sampler_logp=0.0), start())
  guard.keep_batches(5, [batch(5)])
  with pytest.raises(nonfinite.NonFiniteError, match="step 5: loss is nan; 4 updates in a row"):
    guard.check(row(5, loss=np.nan, updates_skipped=skipped + 2), start())
  assert len(nonfinite.load(tmp_path / "failures" / "sft_000005")[1]) == 1


def test_updates_between_rows_are_in_the_row_of_skips(tmp_path):
  guard = guard_of(tmp_path, "skip", updates=1, keep=2, limit=8)
  guard.check(row(1, loss=1.0), start())
  guard.check(row(11, loss=np.nan, updates_skipped=9.0), start())  # one of ten was made
  with pytest.raises(nonfinite.NonFiniteError, match="10 updates in a row"):
    guard.check(row(21, loss=np.nan, updates_skipped=19.0), start())


def test_stop_forgets_earlier_skips(tmp_path):
  """A step has two updates. One of step 1 was skipped; the next bad one is the second of step 4."""
  step, stop = update("skip"), update("stop")
  state, _ = after(step, [batch(0), batch(1, bad=True)])
  guard = guard_of(tmp_path, "stop", updates=2, keep=2)
  state = guard.start(state)
  assert int(state.skipped) == 0 and int(state.step) == 1
  for number, bad in (2, False), (3, False), (4, True):
    batches = [batch(2 * number), batch(2 * number + 1, bad)]
    guard.keep_batches(number, batches)
    state, (_, skipped) = after(stop, batches, state)
    row_of = row(number, updates_skipped=skipped)
    if not bad:
      guard.check(row_of, state)
      guard.check_saved("sft", number, state)
  for check in (lambda: guard.check_saved("sft", 4, state), lambda: guard.check(row_of, state)):
    with pytest.raises(nonfinite.NonFiniteError, match="sft step 4: its update was skipped"):
      check()
  _, dumped = nonfinite.load(tmp_path / "failures" / "sft_000004")
  chex.assert_trees_all_equal(dumped, [batches[1]])


def test_after_a_skipped_update_the_dump_is_still_of_the_step_that_is_not_finite(tmp_path):
  state, _ = after(update("skip"), [batch(0), batch(1, bad=True)])
  guard = guard_of(tmp_path, "skip", updates=2, keep=2)
  guard.start(state)
  guard.keep_batches(2, [batch(2), batch(3)])
  guard.keep_batches(3, [batch(4), batch(5)])
  guard.check_saved("sft", 2, state)
  with pytest.raises(nonfinite.NonFiniteError, match="sft step 3: entropy is inf"):
    guard.check(dict(phase="sft", step=3, entropy=jnp.inf), state)
  _, dumped = nonfinite.load(tmp_path / "failures" / "sft_000003")
  chex.assert_trees_all_equal(dumped, [batch(4), batch(5)])


def test_a_row_that_is_reported_after_a_resume_may_have_a_skipped_update(tmp_path, capsys):
  """Its evaluation was interrupted, and the checkpoint has counted the update already."""
  state, _ = after(update("skip"), [batch(0), batch(1, bad=True)])
  guard = guard_of(tmp_path, "skip", updates=2, keep=2)
  guard.start(state)
  guard.check(row(1, loss=np.nan, updates_skipped=1.0), state)
  assert "sft step 1: updates: 1 not finite (loss) and skipped" in capsys.readouterr().err


def test_skips_of_earlier_rows_do_not_count_again_after_a_resume(tmp_path, capsys):
  """Eight scattered skips, all in earlier rows, are no eight updates in a row."""
  state, _ = after(update("skip"), [batch(0)])
  guard = guard_of(tmp_path, "skip", updates=1, keep=1)
  rows = [row(2 * n, updates_skipped=float(n)) for n in range(9)]
  guard.start(state.replace(skipped=state.skipped + 8), rows)
  guard.check(row(17, updates_skipped=8.0), state)
  assert not capsys.readouterr().err


def test_a_host_without_rows_has_the_skips_of_the_first_hosts_rows(tmp_path, monkeypatch, capsys):
  guard, state = guard_of(tmp_path, "skip", updates=1, keep=1), after(update("skip"), [batch(0)])[0]
  monkeypatch.setattr(nonfinite.hosts, "broadcast", lambda _: (8, 0, 8))
  guard.start(state.replace(skipped=state.skipped + 8))
  guard.check(row(9, updates_skipped=8.0), state)
  assert not capsys.readouterr().err


def test_a_checkpoint_between_two_rows_counts_with_the_next_row(tmp_path):
  """Updates 6 to 10 and 16 to 20 were skipped, and the checkpoint is of update 15."""
  state, _ = after(update("skip"), [batch(0)])
  guard = guard_of(tmp_path, "skip", updates=1, keep=1)
  rows = [row(5, updates_skipped=0.0), row(10, loss=np.nan, updates_skipped=5.0)]
  guard.start(state.replace(skipped=state.skipped + 5), rows)
  guard.check(row(20, loss=np.nan, updates_skipped=10.0), state)


def test_skips_in_a_row_continue_after_a_resume(tmp_path):
  """Otherwise a run with frequent preemptions would diverge without an end."""
  state, _ = after(update("skip"), [batch(0)])
  rows = [row(1, updates_skipped=0.0), row(2, loss=np.nan, updates_skipped=2.0)]
  rows.append(row(3, loss=np.nan, updates_skipped=4.0))
  guard = guard_of(tmp_path, "skip", updates=2, keep=1)
  guard.start(state.replace(skipped=state.skipped + 4), rows)
  guard.check(row(4, loss=np.nan, updates_skipped=6.0), state)
  with pytest.raises(nonfinite.NonFiniteError, match="8 updates in a row"):
    guard.check(row(5, loss=np.nan, updates_skipped=8.0), state)


@pytest.mark.long
def test_a_run_that_diverges_stops_and_is_replayed(tmp_path):
  """A learning rate of 1e10 breaks the model in the first of two updates."""
  wild = [*SMALL, "job=rl", "eval.greedy=False", "rl_optimizer.learning_rate=1e10"]
  wild += ["rl.epochs=2", "objective.adaptive_clip.target=0.2"]  # whose factor is in the state
  stderr = run(tmp_path, *wild, ok=False)
  assert "Traceback" not in stderr
  (path,) = re.findall(r"python -m gspo_jax.replay (\S+)", stderr)
  assert "not finite at rl step 1: " in stderr and "grad_norm is nan" in stderr
  assert [r["step"] for r in rows_of(tmp_path, "rl")] == [0]
  replayed = called([sys.executable, "-m", "gspo_jax.replay", path])
  assert replayed.returncode == 1, replayed.stderr[-2000:]
  assert re.search("mini-batch 0: .*grad_norm", replayed.stdout)
  assert len(nonfinite.load(path)[1]) == 7  # the first of eight updates was sound


@pytest.mark.long
def test_a_run_may_skip_bad_updates(tmp_path):
  wild = [*SMALL, "job=sft", "sft_optimizer.learning_rate=1e10", "on_nonfinite=skip"]
  stderr = run(tmp_path, *wild)
  assert "warning at sft step 2" in stderr
  last = rows_of(tmp_path, "sft")[-1]
  assert last["step"] == 8 and last["updates_skipped"] == 7 and last["grad_norm"] is None


def test_a_cold_start_replays_no_experts(tmp_path, capsys):
  """Its demonstrations have none on record, whatever RL is to replay."""
  config = config_of(
    tiny.get_config, objective__replay="R3", **SMALL_VALUES | dict(model__num_layers=1)
  )
  tx = optimizer.make(config.sft_optimizer, config.sft.steps)
  state = new_state(initial(config.model), tx)
  about = dataclasses.asdict(config), dict(phase="sft", step=1), "not finite"
  directory = nonfinite.dump(epath.Path(tmp_path), *about, state, [batch(bad=True)])
  assert replay_main([str(directory)]) == 1
  assert re.search("mini-batch 0: .*grad_norm", capsys.readouterr().out)


def damaged(directory, name, content):
  """Writes a dump with one changed file."""
  values = dataclasses.asdict(config_of(tiny.get_config))
  about = dict(phase="sft", step=2, why="not finite", config=values)
  (directory / "state").mkdir(parents=True)
  (directory / nonfinite.ABOUT).write_text(json.dumps(about))
  (directory / name).write_bytes(content)
  return directory


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("other", b"", "state cannot be restored: "),
    (nonfinite.ABOUT, b"{", "failure.json: it is not JSON"),
    (nonfinite.ABOUT, b"[]", "failure.json: it is not a JSON object"),
    (
      nonfinite.ABOUT,
      b'{"phase": "eval", "config": {}}',
      "lacks the configuration, or its phase is neither",
    ),
    (nonfinite.ABOUT, b'{"phase": "rl", "config": {}}', "failure.json: "),
    (nonfinite.ABOUT, b'{"phase": "rl", "config": {"objective": 7}}', "failure.json: "),
    (nonfinite.ABOUT, b'{"phase": "rl", "config": {"objective": {"tuned": 7}}}', "failure.json: "),
    ("batch_0.npz", b"", "batch_0.npz is not a mini-batch of a run"),
    ("batch_0.npz", b"PK\x03\x04 and no more", "batch_0.npz is not a mini-batch of a run"),
  ],
)
def test_replay_names_a_damaged_file(tmp_path, capsys, name, content, message):
  directory = damaged(tmp_path / "failures" / "sft_000002", name, content)
  with pytest.raises(SystemExit) as ended:
    replay_main([str(directory)])
  assert ended.value.code == 2 and message in capsys.readouterr().err


def test_replay_names_missing_files(tmp_path, capsys):
  with pytest.raises(SystemExit) as ended:
    replay_main([str(tmp_path)])
  assert ended.value.code == 2 and "it has no failure.json" in capsys.readouterr().err
