"""Verifiers as a user would write them, for test_composition.py."""

import os
import time


def by_length(response, prompt) -> float:
  """Right if as long as the answer; half a point if half as long."""
  if response == "raise":
    raise KeyError(response)
  if response == "hang":
    time.sleep(60)
  if response == "die":
    os._exit(0)
  if response == "nan":
    return float("nan")
  if response == "text":
    return "0.5"
  if response == "none":
    return None
  if response == "rows":
    return type("Rows", (), {"__repr__": lambda _: "[0,\n 1]"})()
  return min(1.0, len(response) / len(prompt["answer"]))


def is_equal(response, prompt) -> bool:
  return response == prompt["answer"]


def sign(response, prompt) -> float:
  return 1.0 if response == prompt["answer"] else -1.0


def is_close(response, prompt) -> bool:
  """Right within the tolerance of the data set's row."""
  assert prompt["id"] == "own" and prompt["question"] == "π?"
  return abs(float(response) - float(prompt["answer"])) <= float(prompt["tolerance"])
