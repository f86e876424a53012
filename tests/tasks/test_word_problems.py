"""The embedded task of word problems: their expressions answer them, and held-out texts are new."""

import re
import string

import pytest
from support.data_cases import BYTES, config

from gspo_jax.data import sources
from gspo_jax.tasks import word_problems
from gspo_jax.tasks.word_problems import HELD_OUT, INSTANCES, LARGEST, TRAIN
from gspo_jax.verifiers import math_answer


def some_of_each(split):
  problems = word_problems.problems(split)
  return [problems[i] for i in range(0, len(problems), INSTANCES // 5)]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_verifier_takes_the_expressions(split):
  for row in some_of_each(split):
    assert math_answer.judge(row["expression"], row["answer"]) == "right", row
    assert 1 < int(row["answer"]) <= LARGEST
    numbers = set(re.findall(r"\d+", row["question"]))
    assert numbers >= set(re.findall(r"\d+", row["expression"])), row
    assert not set("{}") & set(row["question"])


def test_held_out_texts_and_numbers_are_their_own():
  assert not {text for text, _ in TRAIN} & {text for text, _ in HELD_OUT}
  shape = str.maketrans(dict.fromkeys(string.digits, "#"))
  train, heldout = (
    {re.sub("#+", "#", row["question"].translate(shape)) for row in some_of_each(split)}
    for split in ("train", "heldout")
  )
  assert not train & heldout
  assert {e for _, e in HELD_OUT} <= {e for _, e in TRAIN}, "what is to be done is known"


def test_templates_use_all_that_they_name():
  for text, expression in (*TRAIN, *HELD_OUT):
    fields = {field for _, field, _, _ in string.Formatter().parse(text) if field}
    assert {c for c in expression if c.isalpha()} == fields & set("abc"), text


def test_a_source_of_them_is_the_same_whenever_it_is_read():
  first, again = (
    sources.load(config(train="word_problems:train", max_prompt_tokens=200), BYTES, "train")
    for _ in range(2)
  )
  assert len(first) == len(TRAIN) * INSTANCES
  prompt = first[7]
  assert prompt == again[7] and prompt.demonstration and prompt.demonstration != prompt.answer
  with pytest.raises(ValueError, match="word_problems:train and word_problems:heldout"):
    word_problems.problems("test")
