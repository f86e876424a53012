"""Embedded task for pretrained models: word problems in English, of one or two steps.

A problem is a few sentences with numbers, and a question. Some numbers may be irrelevant. A
response is an expression for the answer, such as `(24 - 6) / 3`. The verifier of mathematics
compares it with the answer (reward.name=math). Demonstrations are always right.

The two splits have different templates of problems, but may share single sentences. Each operation
occurs in both splits.
"""

import random
from pathlib import Path

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems

SIZES = TEACHER = ()  # No key of section `data` changes problems or demonstrations.
NAMES = """Ada Ben Carla David Ella Farid Grace Hugo Ines Jonas Kira Liam Maya Noah Olga Pedro Rosa
  Sam Tara Uma Victor Wendy""".split()
THINGS = """apples books marbles stamps pencils cookies shells stickers balloons coins buttons cards
  flowers oranges beads photos tickets eggs""".split()
# Each line of word_problems.txt is a template: text of a problem, " | ", and expression of its
# answer. In the text, {n} and {m} are names, {x} and {y} things, and {a} to {d} numbers. An empty
# line separates the two splits.
TRAIN, HELD_OUT = (
  [tuple(line.split(" | ")) for line in part.splitlines()]
  for part in Path(__file__).with_suffix(".txt").read_text("utf-8").split("\n\n")
)
INSTANCES = 250  # Number of problems from each template.
MOST, LARGEST = 60, 500  # Largest random number in a problem, and largest answer.
_TEMPLATES = (*TRAIN, *HELD_OUT)
_CODE = [compile(expression, expression, "eval") for _, expression in _TEMPLATES]


def problems(split: str) -> Problems:
  """Returns the problems of a split, "train" or "heldout", template by template."""
  templates = np.arange(len(_TEMPLATES) * INSTANCES) // INSTANCES
  return Problems("word_problems", split, templates >= len(TRAIN), _make)


def _make(number: int) -> Problem:
  """Returns a problem by its number.

  This number is the seed of the names, things and numbers in the problem.
  """
  rng, (text, expression) = random.Random(number), _TEMPLATES[number // INSTANCES]
  answer = 0
  while not (1 < answer <= LARGEST and answer == int(answer)):  # The answer must be whole.
    numbers = {letter: rng.randint(2, MOST) for letter in "abcd"}
    if numbers["a"] > numbers["b"] or "a - b" not in expression:  # A difference must be positive.
      answer = eval(_CODE[number // INSTANCES], {}, numbers)
  (n, m), (x, y) = rng.sample(NAMES, 2), rng.sample(THINGS, 2)
  return dict(
    id=f"{number // INSTANCES}:{number % INSTANCES}",
    question=text.format(n=n, m=m, x=x, y=y, **numbers),
    answer=str(int(answer)),
    expression="".join(str(numbers.get(letter, letter)) for letter in expression),
  )


def demonstration(problem: Problem, seed: int) -> str:
  """Returns the expression of a problem's answer. `seed` is not used."""
  return problem["expression"]
