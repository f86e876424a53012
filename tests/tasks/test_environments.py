"""Environments: by name, as documentation has them, and in a whole run."""

import json
import re

import pytest
from support.command_line import ROOT, SMALL_MODEL, modules_in, rows_of, run

from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.structs import Prompt
from gspo_jax.tasks import environments

TOK = ByteTokenizer()


def test_environments_by_name(tmp_path, monkeypatch):
  assert environments.find("", TOK) is None
  (tmp_path / "my_game.py").write_text("make = lambda prompt, tok: (prompt.id, tok)")
  monkeypatch.syspath_prepend(tmp_path)
  prompt = Prompt("x", "q", "a", (1,))
  assert environments.find("my_game:make", TOK)(prompt) == ("x", TOK)
  for name in ("calculater", "my_game:", "no_such_module:make", "my_game:other"):
    with pytest.raises(ValueError, match=r"environment\.name"):
      environments.find(name, TOK)


def test_the_time_limit_is_that_of_the_class(tmp_path, monkeypatch):
  text = "class {}:\n  time_limit_s = {}\n  def __init__(self, prompt, tokenizer): pass\n"
  kinds = dict(Quick=0.5, Slow=7200, Text="'1'", Zero=0, Endless="float('inf')")
  (tmp_path / "my_tools.py").write_text("".join(text.format(*kind) for kind in kinds.items()))
  (tmp_path / "my_exit.py").write_text("raise SystemExit(3)")
  monkeypatch.syspath_prepend(tmp_path)
  for name in ("Quick", "Slow"):
    make = environments.find(f"my_tools:{name}", TOK)
    assert environments.time_limit(make) == kinds[name]
  assert environments.time_limit(environments.find("calculator", TOK)) == 30
  for name in ("my_tools:Text", "my_tools:Zero", "my_tools:Endless", "my_exit:make"):
    with pytest.raises(ValueError, match=rf"environment\.name='{name}'"):
      environments.find(name, TOK)


def test_the_environment_in_the_documentation():
  page = (ROOT / "docs" / "multi_turn.md").read_text()
  scope, tok = {}, TOK
  exec(re.search(r"```python\n(.*?)```", page, re.S).group(1), scope)
  talk = scope["Guess"](Prompt("x", "?", "42", (1,)), tok)
  steps = [talk.step([*tok.encode(text), *tok.stop_ids]) for text in ("forty", "40", "50", "42")]
  assert [(tok.decode(o), r, d) for o, r, d in steps] == [
    ("A number, please. ", -0.1, False), ("Low. ", 0.0, False), ("High. ", 0.0, False),
    ("", 1.0, True),
  ]  # fmt: skip


FLAGS = (
  SMALL_MODEL
  + """
  sft.steps=2 sft.batch=8 sft_optimizer.warmup_steps=1
  rl.iterations=2 rl.prompts=8 rl.group_size=4 rl_optimizer.warmup_steps=1 eval.problems=8
  eval.every=1 eval.samples=2 eval.batch=4 objective.replay=R3
""".split()
)


@pytest.mark.long
def test_a_run_with_an_environment_of_ones_own(tmp_path):
  """Random weights give random bytes; this environment takes three turns of any."""
  (tmp_path / "my_game.py").write_text(
    """
class Game:
  def __init__(self, prompt, tok):
    self.prompt, self.tok, self.turns = prompt, tok, 0
  def reset(self):
    return [dict(role="user", content=self.prompt.question)]
  def step(self, response):
    self.turns += 1
    return self.tok.encode("go on"), len(response) % 5 / 5, self.turns == 3
  def figures(self):
    return dict(correct=self.turns == 3, turns_taken=self.turns)
"""
  )
  options = ("environment.name=my_game:Game", "sampling.stop_strings=('a','e')")
  run(tmp_path / "run", *FLAGS, *options, config="configs/tiny_tools.py", **modules_in(tmp_path))
  rows = rows_of(tmp_path / "run", "rl")
  assert [row["step"] for row in rows] == [0, 1, 2]
  for row in rows:
    assert 0 <= row["eval/accuracy"] <= 1 and row["eval/turns_taken"] >= 1
    assert row["eval/accuracy"] == pytest.approx(1 - row["eval/truncated_fraction"], abs=0.3)
  for row in rows[1:]:
    assert row["environment/turns"] == row["environment/turns_taken"] > 1
    assert row["environment/observation_fraction"] > 0
    assert row["mismatch/abs/max"] < 1e-4 and row["minibatch/0/ratio/deviation"] < 1e-5
  record = json.loads((tmp_path / "run/rollouts/rl_000001.jsonl").read_text().splitlines()[0])
  assert {"response", "reward", "length"} <= record.keys()
  texts = (tmp_path / "run/rollouts/rl_000001.jsonl").read_text()
  assert "go on" in texts
