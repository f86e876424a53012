"""The embedded task for pretrained models: word problems in English, of one step or two.

A problem is a few sentences with numbers in them, of which some may not matter, and a question. A
response is the expression that answers it, `(24 - 6) / 3`: what it is worth is for the verifier
of mathematics to say. Demonstrations are right.

Problems that are held out have templates of their own, so that what is measured is whether the
model reads, and not whether it knows the sentences. Each operation occurs in both splits.
"""

import random
from pathlib import Path

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems

SIZES = TEACHER = ()  # Keys of `data` for problems and demonstrations.
NAMES = """Ada Ben Carla David Ella Farid Grace Hugo Ines Jonas Kira Liam Maya Noah Olga Pedro Rosa
  Sam Tara Uma Victor Wendy""".split()
THINGS = """apples books marbles stamps pencils cookies shells stickers balloons coins buttons cards
  flowers oranges beads photos tickets eggs""".split()
# Templates: what is told, and the expression for what is asked. {n} and {m} are names, {x} and {y}
# things. Those of the problems that are held out come behind the empty line of the file.
TRAIN, HELD_OUT = (
  [tuple(line.split(" | ")) for line in part.splitlines()]
  for part in Path(__file__).with_suffix(".txt").read_text("utf-8").split("\n\n")
)
INSTANCES = 250  # problems of a template
MOST, LARGEST = 60, 500  # Largest number in a problem, and in an answer.
_TEMPLATES = (*TRAIN, *HELD_OUT)
_CODE = [compile(expression, expression, "eval") for _, expression in _TEMPLATES]


def problems(split: str) -> Problems:
  """INSTANCES of each template of a split, "train" or "heldout"."""
  templates = np.arange(len(_TEMPLATES) * INSTANCES) // INSTANCES
  return Problems("word_problems", split, templates >= len(TRAIN), _make)


def _make(number: int) -> Problem:
  rng, (text, expression) = random.Random(number), _TEMPLATES[number // INSTANCES]
  answer = 0
  while not (1 < answer <= LARGEST and answer == int(answer)):  # no rests
    numbers = {letter: rng.randint(2, MOST) for letter in "abcd"}
    if numbers["a"] > numbers["b"] or "a - b" not in expression:  # no debts
      answer = eval(_CODE[number // INSTANCES], {}, numbers)
  (n, m), (x, y) = rng.sample(NAMES, 2), rng.sample(THINGS, 2)
  return dict(
    id=f"{number // INSTANCES}:{number % INSTANCES}",
    question=text.format(n=n, m=m, x=x, y=y, **numbers),
    answer=str(int(answer)),
    expression="".join(str(numbers.get(letter, letter)) for letter in expression),
  )


def demonstration(problem: Problem, seed: int) -> str:
  """Returns the expression for a problem's answer."""
  return problem["expression"]
