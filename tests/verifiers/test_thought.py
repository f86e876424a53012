"""A thought is no answer, for any verifier."""

import pytest

from gspo_jax.verifiers import math_answer, string_match, thought
from gspo_jax.verifiers.programs import extraction

CODE = "```python\nprint(18)\n```"
EXTRACTED = {  # An answer outside of a thought; within an open thought it is none.
  math_answer.extract: "so it is 18",
  string_match.extract: "18",
  extraction.extract: CODE,
}


@pytest.mark.parametrize("extract", EXTRACTED, ids=lambda extract: extract.__module__)
@pytest.mark.parametrize("boxed", [False, True])
def test_an_open_thought_gives_no_answer(extract, boxed):
  text = EXTRACTED[extract]
  text = rf"{text}, \boxed{{18}}" if boxed and text is not CODE else text
  assert extract(text) is not None
  assert extract(f"<think>hm</think>{text}") is not None
  assert extract(f"{text}</think>{text}") is not None
  assert extract(f"<think>{text}") is None
  assert extract(f"<think>hm</think>{text}<think>{text}") is None
  assert extract(f"<think>{text}</think>") is None


def test_thought():
  assert thought.after("a</think>b") == thought.after("<think>a</think>b") == "b"
  assert thought.after("a") == "a" and thought.after("<think>a") == ""
  assert thought.with_opening("a</think>b", True) == "a</think>b"
  assert thought.with_opening("a", True) == "<think>a" and thought.with_opening("a", False) == "a"
