"""Held-out problems that are trained on as well are found."""

import pytest
from support.data_cases import BYTES, config, write

from gspo_jax.data import sources
from gspo_jax.data.overlap import shared_prompts


def shared(train, held_out, chosen=slice(None)):
  data = config(train=train, eval=held_out, digits=1)
  trained, held = (sources.load(data, BYTES, split) for split in ("train", "eval"))
  return shared_prompts(trained, held, [held[i] for i in range(len(held))][chosen])


def file(path, questions):
  return write(path, [dict(question=text, answer="0") for text in questions])


LONG = "The first eight words of these are alike:"


@pytest.mark.parametrize("first, count", [(0, 20), (15, 5), (20, 0)])
def test_the_same_questions_are_counted(first, count, tmp_path):
  train = file(tmp_path / "a.jsonl", [f"{LONG} what is {i}+1?" for i in range(20)])
  held_out = [f" {LONG}\nwhat  is {i}+1?\r\n" for i in range(first, first + 20)]
  assert shared(train, file(tmp_path / "b.jsonl", held_out)) == count
  assert shared(train, train, slice(3, 10)) == 7


def test_mixtures_and_embedded_tasks(tmp_path):
  sums = [f"{i}+{i}=" for i in range(1, 10)] + ["What is 1+1?"]
  file_of_sums = file(tmp_path / "a.jsonl", sums)
  train, held_out = "arithmetic:train", "arithmetic:heldout"
  assert shared(train, held_out) == 0 and shared(held_out, train) == 0
  assert shared("calculator:train", held_out) == 0
  everything = shared(held_out, held_out)
  assert everything == len(sources.load(config(eval=held_out, digits=1), BYTES, "eval"))
  assert shared(f"{file_of_sums},{held_out}", held_out) == everything  # whatever else is trained on
  assert (
    shared(train, file_of_sums) + shared(held_out, file_of_sums) == 9
  )  # a sum is in one of the splits
  three = file(tmp_path / "b.jsonl", ["What is 1+1?", "3+3=", "Who?"])
  assert shared(f"{file_of_sums}:0.5,{three}:0.5", three) == 3
  assert shared(file_of_sums, f"{file_of_sums}:0.5,{three}:0.5") == 12
