"""Runs whose weights, tokenizer and teacher are repositories of the hub, or in a bucket."""

import json

import jax
import pytest
from runs.test_start import SMALL, same
from support import command_line, fake_hub, toy_qwen3
from support.configs import config_of

from configs import common, tiny
from gspo_jax import export, sft
from gspo_jax.data import tokenizer
from gspo_jax.inputs import read_inputs
from gspo_jax.models import hf, transformer
from gspo_jax.run import open_run
from gspo_jax.runs import weight_source

ID = "org/model"
FEWER = SMALL | dict(sft__steps=2, checkpoint__every=1, data__max_prompt_tokens=64)
TAUGHT = {"job": "rl", "objective.name": "gspo_token"}


def config(**changes):
  return config_of(tiny.get_config, **FEWER | changes)


MODEL = config().model


def publish(server, directory, seed=0):
  params = transformer.init(MODEL, jax.random.key(seed))
  hf.save(directory, params, MODEL)
  toy_qwen3.write_tokenizer(directory)
  return server.push(ID, directory), params


@pytest.fixture
def server(tmp_path, monkeypatch):
  opened = fake_hub.FakeHub()
  opened.use(monkeypatch, tmp_path / "cache")
  yield opened
  opened.close()


def provenance_of(workdir):
  return json.loads((workdir / "config.json").read_text())["provenance"]


@pytest.mark.long
def test_a_run_keeps_its_first_commit(server, tmp_path, capsys):
  first, params = publish(server, tmp_path / "source")
  with open_run(read_inputs(config(weights=ID), tmp_path / "run")) as run:
    assert same(run.initial_params(), params)
    assert run.tokenizer.path == f"{ID}@{first}"  # unset, that of the weights
    sft.sft(run)
  origin = provenance_of(tmp_path / "run")
  assert origin["start"] == dict(directory=f"{ID}@{first}")
  assert origin["tokenizer"] == f"{ID}@{first}"
  second, changed = publish(server, tmp_path / "source", seed=1)
  assert "is now" not in capsys.readouterr().err
  with open_run(read_inputs(config(weights=ID), tmp_path / "run")) as run:
    assert same(run.initial_params(), params)
  message = f"warning: weights={ID} is now {ID}@{second}; this run still uses {ID}@{first}\n"
  assert message in capsys.readouterr().err
  with open_run(read_inputs(config(weights=ID), tmp_path / "later")) as run:
    assert same(run.initial_params(), changed)
  # What it has learned, and a run that begins with that, have its tokenizer.
  export.export(str(tmp_path / "run"), tmp_path / "out")
  assert tokenizer.load(str(tmp_path / "out")).chat(
    [tokenizer.user_turn("q")]
  ) == run.tokenizer.chat([tokenizer.user_turn("q")])
  with open_run(
    read_inputs(config(weights=str(tmp_path / "run"), job="rl"), tmp_path / "next")
  ) as run:
    assert run.tokenizer.path == f"{ID}@{first}"


def test_a_run_keeps_its_first_tokenizer(server, tmp_path, capsys):
  first, _ = publish(server, tmp_path / "source")
  second = None
  for _ in range(2):
    with open_run(read_inputs(config(tokenizer=ID), tmp_path / "run")) as run:
      assert run.tokenizer.path == f"{ID}@{first}"
    second = second or publish(server, tmp_path / "source", seed=1)[0]
  assert f"tokenizer={ID} is now {ID}@{second}" in capsys.readouterr().err
  with open_run(read_inputs(config(tokenizer=ID), tmp_path / "later")) as run:
    assert run.tokenizer.path == f"{ID}@{second}"


def test_a_continued_run_needs_no_network(server, tmp_path, monkeypatch, capsys):
  _, params = publish(server, tmp_path / "source")
  with open_run(read_inputs(config(weights=ID), tmp_path / "run")) as run:
    run.initial_params()
  server.use(monkeypatch, tmp_path / "cache", offline=True)
  server.requests.clear()
  with open_run(read_inputs(config(weights=ID), tmp_path / "run")) as run:
    assert same(run.initial_params(), params)
  assert not server.requests


def test_a_check_reads_configuration_tokenizer_and_headers(server, tmp_path):
  """--dry_run: configuration, tokenizer and headers."""
  commit, _ = publish(server, tmp_path / "source")
  checked = read_inputs(config(weights=ID))
  assert checked.source.name == f"{ID}@{commit}"
  assert not list((tmp_path / "cache").rglob("*.safetensors"))
  assert server.read() <= 2**18
  assert common.size(ID) == MODEL


def test_a_model_of_another_shape_is_refused(server, tmp_path):
  publish(server, tmp_path / "source")
  with pytest.raises(ValueError, match=rf"--config\.weights={ID} are another model .*num_layers"):
    read_inputs(config(weights=ID, model__num_layers=2))


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(weights="org/nothing"), r"--config\.weights=org/nothing: org/nothing is neither a"),
    (dict(weights=f"{ID}@v9"), rf"--config\.weights={ID}@v9: {ID} has no revision 'v9'"),
    (dict(tokenizer="org/nothing"), r"--config\.tokenizer=org/nothing: org/nothing is neither a"),
    (
      TAUGHT | {"distillation.teacher": "org/nothing"},
      r"--config\.distillation\.teacher=org/nothing: org/nothing is neither a",
    ),
  ],
)
def test_the_key_of_an_unreadable_repository_is_named(changes, message, server, tmp_path):
  publish(server, tmp_path / "source")
  with pytest.raises(ValueError, match=message):
    read_inputs(config(**changes))


def test_adapters_are_named_with_their_commit(server, tmp_path):
  (tmp_path / "adapter_config.json").write_text("{}")
  commit = server.push("org/adapter", tmp_path)
  message = rf"^lora\.adapter=org/adapter may change .*, lora\.adapter=org/adapter@{commit}$"
  with pytest.raises(ValueError, match=message):
    read_inputs(config(job="rl", lora__rank=2, lora__adapter="org/adapter"))


def test_a_run_keeps_its_first_teacher(server, tmp_path):
  first, params = publish(server, tmp_path / "source")
  taught = config(**TAUGHT | {"distillation.teacher": ID, "tokenizer": ID})
  with open_run(read_inputs(taught, tmp_path / "run")) as run:
    assert same(run.teacher.source.load(run.teacher.model, run.mesh, taught.compute.dtype), params)
  assert provenance_of(tmp_path / "run")["teacher"] == dict(directory=f"{ID}@{first}")
  publish(server, tmp_path / "source", seed=1)
  with open_run(read_inputs(taught, tmp_path / "run")) as run:
    assert same(run.teacher.source.load(run.teacher.model, run.mesh, taught.compute.dtype), params)


def test_weights_are_read_from_a_bucket(server, tmp_path, monkeypatch):
  _, params = publish(server, tmp_path / "bucket/model")
  fake_hub.bucket(monkeypatch, tmp_path)
  with open_run(read_inputs(config(weights="gs://bucket/model"), tmp_path / "run")) as run:
    assert same(run.initial_params(), params)
    assert run.tokenizer.path == "gs://bucket/model"
  with pytest.raises(ValueError, match=r"--config\.weights=gs://bucket/none is not a directory"):
    read_inputs(config(weights="gs://bucket/none"))


@pytest.mark.long
def test_the_tokenizer_of_random_weights_and_of_a_run_is_bytes(tmp_path):
  plain = config_of(tiny.get_config, **SMALL)  # The cold start of other tests.
  with open_run(read_inputs(plain, tmp_path / "run")) as run:
    assert run.tokenizer.path == "bytes"
    sft.sft(run)
  source = weight_source.resolve("weights", str(tmp_path / "run"), {})
  assert source.tokenizer == "bytes"
  assert weight_source.resolve_tokenizer("", source, {}) == "bytes"


def test_weights_without_a_tokenizer_are_refused(server, tmp_path):
  """Bytes are not taken instead: they would be read without an error, and as nonsense."""
  publish(server, tmp_path / "source")
  (tmp_path / "source/tokenizer.json").unlink()
  server.push(ID, tmp_path / "source")
  with pytest.raises(ValueError, match=f"no tokenizer.json in '{ID}@.*or to 'bytes'"):
    read_inputs(config(weights=ID))


@pytest.mark.long
def test_the_command_line(server, tmp_path):
  """Uses the library's environment variables; a failure is one line."""
  publish(server, tmp_path / "source")
  flags = [f"{k.replace('__', '.')}={v}" for k, v in FEWER.items()]
  environment = server.environment(tmp_path / "cache")
  command_line.run(tmp_path / "run", *flags, f"weights={ID}", "job=eval", **environment)
  assert (tmp_path / "run/metrics.jsonl").exists()
  output = command_line.run(
    tmp_path / "no", *flags, "weights=org/none", ok=False, HF_HUB_OFFLINE="1", **environment
  )
  last = output.splitlines()[-1]
  assert last.startswith(
    "gspo_jax: --config.weights=org/none: org/none is not completely in the cache"
  )
