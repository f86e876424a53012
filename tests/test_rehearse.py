"""A dry run refuses what a run refuses, in the same words, and both leave nothing."""

import dataclasses
import json
import sys

import pytest
from support.command_line import SMALL_VALUES
from support.configs import config_of

from configs import common, tiny
from gspo_jax import run
from gspo_jax.aot import plan
from gspo_jax.inputs import read_inputs
from gspo_jax.system import lock

RL = SMALL_VALUES | dict(job="rl", eval__problems=8, eval__samples=2)
OFFLINE = dict(job="offline", objective__name="rft", objective__volatility=False, rl__group_size=4)
PAGES = dict(engine__cache="paged", engine__page_tokens=8, engine__cache_tokens=8 * 16)
REFUSED = {
  "a package that is not there": (dict(wandb="project"), r"wandb=project needs the package"),
  "batches that are not on record": (
    dict(rl__replay="HERE/batches", rl__iterations=3),
    r"rl\.replay=.*batches has no file 000002\.json: lower rl\.iterations from 3 to 1,",
  ),
  "pages of an iteration": (
    PAGES | dict(sampling__max_new_tokens=100, eval__max_new_tokens=4),
    r"engine\.cache_tokens=128 is 2 pages",
  ),
  "pages of an evaluation": (
    PAGES | dict(eval__max_new_tokens=100),
    r"cache_tokens=128 is 2 pages",
  ),
  "pages of an evaluation alone": (
    PAGES | dict(job="eval", eval__max_new_tokens=100),
    r"cache_tokens=128 is 2 pages",
  ),
  "demonstrations that are too long": (
    dict(job="sft", sft__steps=2, sft__max_tokens=12),
    r"take \d+ tokens, more than sft\.max_tokens=12",
  ),
  "a verifier that is not there": (
    dict(reward__name="verifiers_of_a_test:missing", reward__workers=1),
    r"reward\.name='verifiers_of_a_test:missing': .*verifiers_of_a_test has no missing",
  ),
  "a signal that is not there": (
    dict(
      constraints__costs__other__signal="verifiers_of_a_test:missing",
      constraints__costs__other__bound="at_most",
      constraints__costs__other__limit=0.5,
      reward__workers=1,
    ),
    r"constraints: signal='verifiers_of_a_test:missing': .*verifiers_of_a_test has no missing",
  ),
  "a conversation that cannot begin": (
    dict(job="eval", environment__name="verifiers_of_a_test:Long"),
    r"environment\.name='verifiers_of_a_test:Long' fails .*Long\.reset\(\) begins with 9 tokens",
  ),
  "an environment that takes no turn": (
    dict(job="eval", environment__name="verifiers_of_a_test:Text"),
    r"environment\.name='verifiers_of_a_test:Text' fails on problem .* gold answer returned 'well'",
  ),
  "weights that servers cannot take": (
    dict(engine__name="server", engine__urls=("http://a:1",), model__sliding_window=8)
    | dict(model__sliding_window_pattern=2),
    r"no Hugging Face architecture has",
  ),
  "a token that no header can have": (
    dict(engine__name="server", engine__urls=("http://a:1",)),
    r"the token of GSPO_ENGINE_TOKEN must be of printable ASCII",
  ),
  "checkpoints below a file": (
    dict(checkpoint__directory="HERE/file/checkpoints"),
    r"checkpoint\.directory=.*file is not a directory",
  ),
  "a run that replays itself": (
    dict(rl__replay="HERE/run/batches", rl__iterations=1),
    r"rl\.replay=.*lies in the workdir",
  ),
  "metrics that are damaged": ({}, r"metrics\.jsonl:1 is not a JSON object with a step"),
  "another run": ({}, r"another run is in .*run \(process"),
  "another run of this name": (
    dict(engine__name="server", engine__urls=("http://a:1",), engine__server__directory="HERE/mnt"),
    r"another run is in .*mnt/run-[0-9a-f]{8} \(process .* set another --workdir",
  ),
  "a format that does not fit": (
    dict(reward__format="think_answer", reward__format_weight=0.1),
    r"reward\.format='think_answer': its tags alone take 25 tokens",
  ),
  "a reward function of one argument": (
    dict(reward__name="verifiers_of_a_test:one", reward__workers=1),
    r"reward\.name='verifiers_of_a_test:one' fails on problem 100\+100: on its gold .*TypeError"
    r".*; a function takes the response and a dict",
  ),
  "a signal of one argument": (
    dict(
      constraints__rewards__extra__signal="verifiers_of_a_test:one",
      constraints__rewards__extra__weight=0.5,
      reward__workers=1,
    ),
    r"constraints: signal='verifiers_of_a_test:one' fails on problem .*TypeError",
  ),
  "a benchmark's function of one argument": (
    dict(
      eval__benchmarks=dict(
        extra=common.benchmark(1, data="arithmetic:heldout", reward="verifiers_of_a_test:one")
      ),
      reward__workers=1,
    ),
    r"eval\.benchmarks\.extra\.reward='verifiers_of_a_test:one' fails on problem .*TypeError",
  ),
  "answers that do not fit": (
    dict(sampling__max_new_tokens=2),
    r"sampling\.max_new_tokens=2.*no answer of a source fits.*data\.train: 0%",
  ),
}

MODULE = """
def one(response): return 1.0

class Long:
  def __init__(self, prompt, tokenizer): pass
  def reset(self): return [65] * 9

class Text(Long):
  def reset(self): return [65]
  def step(self, response): return "well"

class Hint(Text):
  def step(self, response): return [72, 105], 0.5, len(response) > 1
"""


def files_of(folder):
  return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.long) if name == "a signal that is not there" else name
    for name in REFUSED
  ],
)
def test_a_dry_run_refuses_what_a_run_refuses(name, tmp_path, monkeypatch):
  changes, message = REFUSED[name]
  for folder in "batches", "run/batches":
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "000001.json").write_text("{}")
  (tmp_path / "file").write_text("")
  (tmp_path / "verifiers_of_a_test.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
  monkeypatch.setitem(sys.modules, "wandb", None)
  monkeypatch.setenv("GSPO_ENGINE_TOKEN", "ü")
  if name == "metrics that are damaged":
    (tmp_path / "run" / "metrics.jsonl").write_text("[]\n")
  changes = {
    key: value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
    for key, value in (RL | changes).items()
  }
  config, messages = config_of(tiny.get_config, **changes), []
  occupied = run.locked_directories(config, tmp_path / "run") if "another run" in name else []
  with lock.alone_in(*occupied[-2:]):
    before = files_of(tmp_path)
    for start in (rehearsed, opened):
      with pytest.raises(ValueError, match=message) as error:
        start(config, tmp_path / "run")
      messages.append(str(error.value))
      assert start is opened or files_of(tmp_path) == before
  assert messages[0] == messages[1]


def rehearsed(config, workdir):
  return run.rehearse(read_inputs(config, workdir))


def opened(config, workdir):
  with run.open_run(read_inputs(config, workdir)):
    pass


@pytest.mark.parametrize("changes", [dict(job="sft", sft__steps=2), OFFLINE])
def test_a_job_without_scoring_does_not_try_the_reward_function(changes, tmp_path, monkeypatch):
  (tmp_path / "verifiers_of_a_test.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
  rows = [dict(prompt=f"{n}+1=", response=str(n), reward=float(n % 2)) for n in (2, 3) * 8]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  failing = dict(reward__name="verifiers_of_a_test:one", reward__workers=1)
  if changes is not OFFLINE:
    signal = dict(signal="verifiers_of_a_test:one", weight=0.5)
    failing |= {f"constraints__rewards__extra__{key}": value for key, value in signal.items()}
  else:
    failing |= dict(offline__data=str(tmp_path / "rows.jsonl"))
  config = config_of(tiny.get_config, **RL | changes | failing)
  assert rehearsed(config, tmp_path / "run") == []


def test_a_dry_run_shows_the_reason_of_a_function_that_fails_once(tmp_path, monkeypatch):
  function = (
    "def misspelt(response, prompt):\n  return float(response == prompt['gold']) if response else 0"
  )
  (tmp_path / "verifiers_of_a_test.py").write_text(function)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
  changes = dict(reward__name="verifiers_of_a_test:misspelt", reward__workers=1)
  config = config_of(tiny.get_config, **RL | changes)
  gold, empty = rehearsed(config, tmp_path / "run")
  assert gold == "no verdict (crash: KeyError: 'gold' (verifiers_of_a_test.py, line 2))"
  assert empty == "0"
  assert gold in plan.first_problem(read_inputs(config), [gold, empty])[-1]


def test_a_dry_run_shows_the_prompt_and_answers_of_an_environment(tmp_path, monkeypatch):
  (tmp_path / "verifiers_of_a_test.py").write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  config = config_of(tiny.get_config, **RL | dict(environment__name="verifiers_of_a_test:Hint"))
  first, *rest = plan.first_problem(read_inputs(config), ())
  assert first.endswith("a prompt of 1 tokens:") and rest[0] == "  | A"
  reward = "the environment gives 0.5 and"
  turns = [f"  on this answer as a turn {reward} ends", f"  on an empty turn {reward} answers:"]
  assert rest[2:] == [*turns, "  | Hi"]
  sampling = dataclasses.replace(config.sampling, max_new_tokens=2)
  short = dataclasses.replace(config, sampling=sampling)
  lines = plan.first_problem(read_inputs(short), ())
  assert any("does not fit into sampling.max_new_tokens, which ends" in line for line in lines)


def test_held_out_rows_need_no_demonstration(tmp_path):
  for name, more in dict(train={"work": "1+1=2"}, eval={}).items():
    rows = [dict(id=str(i), question=f"{i}+1=", answer=str(i + 1)) | more for i in range(8)]
    (tmp_path / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
  files = {f"data__{name}": str(tmp_path / f"{name}.jsonl") for name in ("train", "eval")}
  fields = dict(data__demonstration_field="work", data__max_prompt_tokens=8)
  cold_start = dict(job="sft+rl", sft__steps=1, sft__target_loss=0.0)
  data = read_inputs(config_of(common.base, **files, **fields, **cold_start)).data
  assert len(data.held_out[0].problems) and data.demonstrations[0].demonstration == "1+1=2"


def test_both_say_what_can_hardly_be_meant(tmp_path, capsys):
  config = config_of(
    common.base, **RL | dict(rl_optimizer__learning_rate=1.0, data__eval="arithmetic:train")
  )
  messages = []
  for start in (rehearsed, opened):
    start(config, tmp_path / "run")
    messages.append([line for line in capsys.readouterr().err.splitlines() if "warning" in line])
  assert messages[0] == messages[1]
  for part in (
    "rl_optimizer.learning_rate=1.0",
    "weights='random', job='rl'",
    "held-out problems are in data.train",
  ):
    assert any(line.startswith("warning: ") and part in line for line in messages[0])
