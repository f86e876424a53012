"""Verifiers as a user would write them, for test_composition.py."""

import os
import time


def by_length(response: str, answer: str) -> float:
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
    return "right"
  return min(1.0, len(response) / len(answer))


def is_equal(response: str, answer: str) -> bool:
  return response == answer
