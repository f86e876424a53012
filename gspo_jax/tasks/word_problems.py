"""The embedded task for pretrained models: word problems in English, of one step or two.

A problem is a few sentences with numbers in them, of which some may not matter, and a question. A
response is the expression that answers it, `(24 - 6) / 3`: what it is worth is for the verifier
of mathematics to say. Demonstrations are right.

Problems that are held out have templates of their own, so that what is measured is whether the
model reads, and not whether it knows the sentences. Each operation occurs in both splits.
"""

import random

import numpy as np

from gspo_jax.tasks.problems import Problem, Problems

SIZES = TEACHER = ()  # keys of `data` that it depends on
NAMES = (
  *("Ada", "Ben", "Carla", "David", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kira"),
  *("Liam", "Maya", "Noah", "Olga", "Pedro", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy"),
)
THINGS = (
  *("apples", "books", "marbles", "stamps", "pencils", "cookies", "shells", "stickers", "balloons"),
  *("coins", "buttons", "cards", "flowers", "oranges", "beads", "photos", "tickets", "eggs"),
)
# What is told, and the expression for what is asked. {n} and {m} are names, {x} and {y} things.
TRAIN = (
  ("{n} has {a} {x} and buys {b} more. How many {x} does {n} have now?", "a + b"),
  ("There are {a} {x} on the table and {b} in the cupboard. How many {x} are there?", "a + b"),
  ("{n} gave {a} {x} to {m} and kept {b}. How many {x} did {n} have at first?", "a + b"),
  ("{n} has {a} {x} and {d} {y}. Then {n} finds {b} {x}. How many {x} does {n} have?", "a + b"),
  ("{m} is {a} years old. {n} is {b} years older than {m}. How old is {n}?", "a + b"),
  ("After {n} spent {a} dollars, {b} dollars were left. How much was there before?", "a + b"),
  ("{n} found {a} {x} in the morning and {b} in the afternoon. How many {x} is that?", "a + b"),
  ("{n} ate {a} {x}. There are {b} left. How many {x} were there in the beginning?", "a + b"),
  ("{n} and {m} put their {x} together. {n} had {a} and {m} {b}. How many are there?", "a + b"),
  ("A train has {a} seats in the first car and {b} in the second. How many seats are there?",
   "a + b"),
  ("{n} had {a} {x} and lost {b} of them. How many {x} are left?", "a - b"),
  ("A box holds {a} {x}. {b} of them are red, the others blue. How many {x} are blue?", "a - b"),
  ("{n} has {a} {x}, {m} has {b}. How many more {x} does {n} have than {m}?", "a - b"),
  ("{n} needs {a} dollars and has saved {b}. How many dollars are missing?", "a - b"),
  ("{n} had {a} {x} and {d} {y} and sold {b} {x}. How many {x} does {n} still have?", "a - b"),
  ("A rope of {a} meters is cut, and {b} meters are used. How many meters remain?", "a - b"),
  ("Together {n} and {m} have {a} {x}. {n} has {b}. How many does {m} have?", "a - b"),
  ("{n} is {a} years old and {m} is {b} years younger. How old is {m}?", "a - b"),
  ("A book has {a} pages. {n} has read {b} of them. How many pages are left to read?", "a - b"),
  ("Of {a} {x} that {n} carried home, {b} broke. How many {x} are whole?", "a - b"),
  ("{n} wants to collect {a} {x} and has {b}. How many {x} must {n} still find?", "a - b"),
  ("{n} had {a} dollars. A ticket was {b} dollars. How much money does {n} have left?", "a - b"),
  ("{n} fills {a} bags with {b} {x} each. How many {x} is that?", "a * b"),
  ("There are {a} rows of chairs with {b} chairs in each row. How many chairs are there?", "a * b"),
  ("One ticket costs {b} dollars. How much do {a} tickets cost?", "a * b"),
  ("{n} reads {a} pages a day. How many pages does {n} read in {b} days?", "a * b"),
  ("{n} has {a} {x}. {m} has {b} times as many. How many {x} does {m} have?", "a * b"),
  ("{n} packs {a} boxes of {b} {x} and eats {d} cookies. How many {x} are packed?", "a * b"),
  ("Each of {a} children brings {b} {x}. How many {x} do they bring?", "a * b"),
  ("A printer prints {a} pages in a minute. How many pages are that in {b} minutes?", "a * b"),
  ("{n} runs {a} kilometers every day. How many kilometers are that in {b} days?", "a * b"),
  ("On each of {a} shelves there are {b} {x} and {d} {y}. How many {x} are there?", "a * b"),
  ("A pack has {b} {x}. How many {x} are in {a} packs?", "a * b"),
  ("{n} shares {a} {x} equally among {b} children. How many does each child get?", "a / b"),
  ("{a} {x} are put into bags of {b}. How many bags are filled?", "a / b"),
  ("{n} paid {a} dollars for {b} books of the same price. What does a book cost?", "a / b"),
  ("{n} walks {a} kilometers in {b} days, each day as far. How far is it in a day?", "a / b"),
  ("A team of {d} players won {a} points in {b} games, the same in each. What did one game bring?",
   "a / b"),
  ("{n} has {a} {x}, which is {b} times as many as {m} has. How many {x} does {m} have?", "a / b"),
  ("{n} cuts a ribbon of {a} meters into {b} equal pieces. How long is a piece?", "a / b"),
  ("{a} pupils sit in {b} rows, as many in each row. How many sit in a row?", "a / b"),
  ("A box has room for {b} {x}. How many boxes are needed for {a} {x}?", "a / b"),
  ("{n} saves {b} dollars a week. After how many weeks does {n} have {a} dollars?", "a / b"),
  ("{b} cars bring {a} people, the same number in each. How many people are in a car?", "a / b"),
  ("{n} had {a} {x}, bought {b} and gave away {c}. How many {x} does {n} have now?", "a + b - c"),
  ("{n} got {a} {x} from {m} and {b} from a friend, and lost {c}. How many {x} are left?",
   "a + b - c"),
  ("A farm has {a} cows. {b} are born and {c} are sold. How many cows does it have now?",
   "a + b - c"),
  ("A bus has {a} people on it. {b} get off and {c} get on. How many are on it now?", "a - b + c"),
  ("{n} had {a} dollars, paid {b} and earned {c}. How many dollars does {n} have?", "a - b + c"),
  ("{n} had {a} {x}. {m} took {b} and then {c} more. How many {x} are left?", "a - b - c"),
  ("Of {a} {x} {b} are green and {c} are white. The others are black. How many are black?",
   "a - b - c"),
  ("{n} buys {a} boxes of {b} {x} and has {c} {x} at home. How many {x} is that in all?",
   "a * b + c"),
  ("{n} buys {a} pens for {b} dollars each and a bag for {c} dollars. What is the total?",
   "a * b + c"),
  ("{a} tables have {b} chairs each, and there are {c} chairs more. How many chairs are there?",
   "a * b + c"),
  ("{n} sold {b} {x} a day for {a} days, and then {c} more. How many {x} were sold?", "a * b + c"),
  ("{n} bakes {a} trays of {b} cookies. {c} are eaten. How many cookies are left?", "a * b - c"),
  ("{n} earns {b} dollars an hour, works {a} hours and spends {c} dollars. How much is left?",
   "a * b - c"),
  ("{n} had {a} bags of {b} {x} and gave {c} {x} to {m}. How many {x} does {n} have left?",
   "a * b - c"),
  ("{n} has {a} dollars and buys {b} {x} for {c} dollars each. How many dollars remain?",
   "a - b * c"),
  ("There were {a} {x}. {b} children took {c} each. How many {x} are left?", "a - b * c"),
  ("{a} red and {b} blue {x} are shared equally by {c} friends. How many does each get?",
   "(a + b) / c"),
  ("{n} has {a} {x} and {m} has {b}. They put them into {c} equal piles. How many are in a pile?",
   "(a + b) / c"),
  ("{n} had {a} {x}, lost {b}, and put the rest into {c} equal piles. How many are in a pile?",
   "(a - b) / c"),
  ("{n} had {a} dollars, kept {b} and divided the rest among {c} friends. What did each get?",
   "(a - b) / c"),
  ("From {a} {x} {b} are taken. What is left fills bags of {c}. How many bags are there?",
   "(a - b) / c"),
  ("Each of {a} boys and {b} girls gets {c} {x}. How many {x} are needed?", "(a + b) * c"),
  ("{n} works {a} hours on one day and {b} on the next, for {c} dollars an hour. What is earned?",
   "(a + b) * c"),
  ("Of {a} pupils {b} are ill. Each of the others gets {c} {x}. How many {x} are given out?",
   "(a - b) * c"),
  ("{n} had {a} {x} and kept {b}. The others were sold for {c} dollars each. How much was earned?",
   "(a - b) * c"),
  ("{n} puts {a} {x} into bags of {b}, and then fills {c} more bags. How many bags are there?",
   "a / b + c"),
  ("{n} shares {a} {x} among {b} children. Each child had {c} before. How many does each have?",
   "a / b + c"),
  ("{a} {x} are packed in boxes of {b}. {c} boxes are sold. How many boxes are left?",
   "a / b - c"),
  ("{a} {x} are shared by {b} friends. Each friend eats {c}. How many does each have left?",
   "a / b - c"),
  ("There are {a} shelves with {b} boxes each, and {c} {x} in every box. How many {x} are there?",
   "a * b * c"),
)  # fmt: skip
HELD_OUT = (
  ("{n} picked {a} {x} and {m} picked {b}. How many {x} did they pick together?", "a + b"),
  ("{n} now has {b} {x} after giving away {a} {x} and {d} {y}. How many {x} were there before?",
   "a + b"),
  ("A tree was {a} feet tall and has grown {b} feet. How tall is it now?", "a + b"),
  ("There were {a} {x} in a shop. In the evening {b} were left. How many {x} were sold?", "a - b"),
  ("{n} has {a} {x}. {m} has {b} {x} fewer and {d} {y}. How many {x} does {m} have?", "a - b"),
  ("{n} jumped {a} inches and {m} jumped {b} inches. How much farther did {n} jump?", "a - b"),
  ("A machine makes {a} {x} per minute. How many does it make in {b} minutes?", "a * b"),
  ("A garden has {a} beds with {b} flowers in each, and {d} trees. How many flowers does it have?",
   "a * b"),
  ("{n} drinks {a} glasses of water a day. How many glasses are that in {b} days?", "a * b"),
  ("{n} needs {a} {x}. They come in packs of {b}. How many packs must {n} buy?", "a / b"),
  ("{b} friends rent a boat for {a} dollars and pay the same. What does each of them pay?",
   "a / b"),
  ("{n} reads {b} pages a day. In how many days does {n} finish a book of {a} pages?", "a / b"),
  ("A library had {a} books. It got {b} new ones and lent out {c}. How many books are there now?",
   "a + b - c"),
  ("{n} had {a} {x}, gave {b} to {m} and found {c}. How many {x} does {n} have now?", "a - b + c"),
  ("{n} collects {a} {x} a week for {b} weeks, and {m} adds {c}. How many {x} is that?",
   "a * b + c"),
  ("A farmer fills {a} crates with {b} {x} each. {c} of the {x} are bad. How many are good?",
   "a * b - c"),
  ("{n} has {a} {x}. {b} are broken; the others are put on {c} plates, the same on each. How many"
   " are on a plate?", "(a - b) / c"),
  ("In a class are {a} boys and {b} girls. Each brings {c} {x}. How many {x} do they bring?",
   "(a + b) * c"),
  ("{n} spends {a} dollars on {x} of {b} dollars each, and gets {c} more as a present. How many"
   " {x} is that?", "a / b + c"),
  ("{n} had {a} dollars and bought {b} {x} for {c} dollars each. What is left?", "a - b * c"),
)  # fmt: skip
INSTANCES = 250  # problems of a template
MOST, LARGEST = 60, 500  # of the numbers told, and of the answer
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
  """The expression that answers a problem."""
  return problem["expression"]
