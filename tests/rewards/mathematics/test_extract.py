"""Where an answer begins and ends in a sentence: no part of a formula stands for all of it."""

import re

import pytest

from gspo_jax.rewards import math_answer
from gspo_jax.rewards.math_answer import Outcome
from gspo_jax.rewards.mathematics.extract import extract


def says(response: str, answer: str, finished: bool = True) -> bool:
  """Whether a response gives the answer."""
  ours = extract(response, finished)
  outcome = math_answer.quick_judge(ours, answer) or math_answer.judge(ours, answer)
  return outcome is Outcome.RIGHT


def says_one_of(response: str, numbers: str) -> bool:
  """Whether it gives one of the numbers that stand in a text."""
  return any(says(response, number) for number in re.findall(r"\d+", numbers))


STATED = [  # what follows "The answer is "
  (r"5\sqrt{2} cm.", r"5\sqrt{2}"),
  ("10^6 people", "10^6"),
  ("2^5 ways", "2^5"),
  (r"3\pi square units.", r"3\pi"),
  ("3π cm", "3π"),
  ("5√2 cm", "5√2"),
  ("3:4 in simplest form", "3:4"),
  ("2x+1, where x is the number of apples", "2x+1"),
  ("2xy+3 apples", "2xy+3"),
  ("minus 3", "-3"),
  ("negative 3 dollars", "-3"),
  ("x = 3 and y = 4 metres", "x = 3 and y = 4"),
  ("(3, 4) in the plane.", "(3, 4)"),
  ("[0,1) as an interval", "[0,1)"),
  (r"\(5\sqrt{2}\) cm.", r"5\sqrt{2}"),
  (r"$\$18$ per day.", "18"),
  (r"\frac{1}{2} of the pie", r"\frac{1}{2}"),
  ("$18 per day.", "18"),
  ("$28/month", "28"),
  ("60 miles/hour", "60"),
  ("**18** because 9*2=18.", "18"),
  ("18 - because 9*2 is", "18"),
  ("18 (eighteen)", "18"),
  ("(18 dollars)", "18"),
  ("18 a day", "18"),
  ("18. We add 9 and 9.", "18"),
  ("18, I am sure. I hope so.", "18"),
  ("70,000, as shown", "70,000"),
  ("still 18.", "18"),
  ("**B**: 5 apples", "5"),
  ("2**3 apples", "2**3"),
  (r"therefore $\frac{3}{4}$, i.e. 75% of it", r"\frac{3}{4}"),
  ("18cm long", "18cm"),
  ("option (B) 18.", "(B) 18"),
  ("C. 18", "C. 18"),
  ("5 dozen eggs", "5 dozen"),
  ("3 times as many", "3"),
  ("15 gallons * 8 pints / gallon = 120 pints", "120"),
  ("this: Mr. Smith has 7 apples.", "7"),
  ("20% of 50 = 10.", "10"),
  ("3 times 5 = 15 apples", "15"),
  ("18 apples in 2 years", "18"),
  ("simple: the sum of its digits is 18.", "18"),
]


@pytest.mark.parametrize("sentence, answer", STATED)
def test_what_is_announced_is_taken_whole(sentence, answer):
  assert says(f"We count 5 apples.\nThe answer is {sentence}", answer)
  assert says(f"The answer is {sentence}\nI hope it is correct.", answer, finished=False)


@pytest.mark.parametrize(
  "sentence",
  ["not 18 but 20.", "either 18 or 19.", "18 or maybe 19", "18 apples or 19", "between 18 and 20",
   "definitely less than 18", "more than 18", "18 more than 5", "one of 18, 19, 20", "about 18",
   "10 plus 8", "3 times 6", "5 squared", "half of 36", "the sum of 10 and 8", "3 and a half",
   "6 hours and 30 minutes",
   "2 hours 30 minutes", "5 feet 6 inches", "20% of 50", "2 out of 5", "3 remainder 1",
   "18 + something", "B because 5 is wrong", "15 apples + 3 pears", "1" + "+1" * 300],
)  # fmt: skip
def test_a_hedge_is_no_answer_and_nor_is_a_part(sentence):
  assert not says_one_of(f"The answer is {sentence}", sentence)


@pytest.mark.parametrize(
  "announced, answer",
  [
    (r"5\sqrt{2}.", r"5\sqrt{2}"),
    ("6.", "6"),
    ("$6$. I hope it is correct.", "6"),
    ("6 apples. Sorry.", "6"),
    ("2 dozen.", "2 dozen"),
    ("$x$.", "x"),
    # The box stays where more is said than a value.
    ("6 because I miscounted.", "1"),
    ("6 or 7.", "6 or 7"),
    ("6 apples or 7.", "1"),
    ("6 (for a) and 3 (for b).", "1"),
    ("18:", "18"),
    ("B.", "1"),
    ("7th", "1"),
    ("therefore 6.", "1"),
  ],
)
def test_what_replaces_a_box(announced, answer):
  assert says(rf"So $\boxed{{1}}$. The final answer is {announced}", answer)


@pytest.mark.parametrize(
  "text, answer",
  [
    (r"The area is 5\pi", r"5\pi"),
    ("Therefore the area equals 5π.", "5π"),
    ("So we get x^2+5", "x^2+5"),
    (r"Hence the result is \sqrt{2}.", r"\sqrt{2}"),
    ("Hence sqrt(2).", "sqrt(2)"),
    ("Thus the value is -√5", "-√5"),
    ("Thus x = 2^{10}", "2^{10}"),
    ("The area is 18 cm^2.", "18 cm^2"),
    ("The ratio is 3:4", "3:4"),
    ("It is 1011_2", "1011_2"),
    (r"It equals \pi/2.", r"\pi/2"),
    ("It is log 5", "log 5"),
    ("It is 3x", "3x"),
    # These stand alone:
    ("It is 18km.", "18"),
    (r"It is 90^\circ", "90"),
    ("She has 10 - 3 = 7 apples", "7"),
    ("He ends with $12 500.", "$12 500"),
    ("He ends with 12\u202f500 dollars.", "12\u202f500"),
    ("So x = - 2.", "-2"),
    ("It is negative 5.", "-5"),
    ("It is 10**5.", "10**5"),
    ("It is 5 * 6.", "5 * 6"),
    ("It is 5 x 6.", "5 x 6"),
    ("It is 2pi/3", "2pi/3"),
    ("She has **18** apples.", "18"),
  ],
)
def test_the_last_number_is_no_part_of_a_formula(text, answer):
  assert says(text, answer) if answer else not says_one_of(text, text)


@pytest.mark.parametrize(
  "text, answer",
  [
    ("It is not 7.", None),
    ("It can't be 7.", None),
    ("It lies between 5 and 6.", None),
    ("It is about 5.", None),
    ("She has at least 5 apples.", None),
    ("It is not $7$.", None),
    (r"It lies between \(5\) and \(6\).", None),
    ("It is half of $10$.", None),
    ("It is the sum of $2$ and $3$.", None),
    ("It is minus $5$.", "-5"),
    ("She has $2$ dozen.", "2 dozen"),
    # What an equation ends with stands, and so does another sentence.
    ("The sum of the roots is 7.", "7"),
    ("The sum of 2 and $5$ equals $7$.", "7"),
    ("The sum of their ages is 2 + 5 = 7.", "7"),
    ("That is not right. She has 7 apples.", "7"),
    ("It is not 5.\nShe has 7 apples.", "7"),
  ],
)
def test_a_last_number_that_is_hedged_is_no_answer(text, answer):
  assert says(text, answer) if answer else not says_one_of(text, text)


@pytest.mark.parametrize(
  "text, answer",
  [
    ("#### Final Answer\n18", "18"),
    ("#### Final Answer: 18", "18"),
    ("#### Step 4: Add\nSo 10 and 8 are 18", "18"),
    ("#### Step 1\nWe have 5.\n#### Step 2\nSo there are 5+3 = 8 apples", "8"),
    ("#### 4. Conclusion\nShe has 8 apples left.", "8"),
    ("#### 4: Conclusion\nShe has 8 apples left.", "8"),
    ("#### Conclusion 2\nHence \\(8\\).", "8"),
    # GSM8K's marker, and what stands in its place:
    ("#### 18\nbye, 5", "18"),
    ("#### 18 dollars\nbye, 5", "18"),
    ("#### **$18**\nbye, 5", "$18"),
    ("#### 1.5 million\nbye, 5", "1.5 million"),
    ("#### 3\\pi cm\nbye, 5", r"3\pi"),
    ("#### no solution\nbye, 5", "no solution"),
    ("####\n18\nbye, 5", "18"),
    ("5 it is not.\n#### unknown", None),
  ],
)
def test_headings_are_no_markers(text, answer):
  assert says(text, answer) if answer else not says_one_of(text, text)


def test_a_heading_at_which_a_response_was_cut_off_is_no_answer():
  assert extract("We add 5 and 3.\n#### Step 2", finished=False) is None
  assert says("#### 18 dollars", "18", finished=False)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
  "text, answer",
  [
    ("<answer>18</answer>", "18"),
    (r"We get 5. <answer> \sqrt{2} </answer> Or 7?", r"\sqrt{2}"),
    ("<answer>B</answer><|im_end|>", "B"),
    ("<answer>1, 2, 3</answer>", "1, 2, 3"),
    ("<answer>18 is wrong</answer>", "18 is wrong"),
    ("<answer>The answer is 18.</answer>", "18"),
    ("<answer>5</answer> No: <answer>6</answer>", "6"),
    ("The answer is 7. <answer>6</answer>", "6"),
    (r"<answer>So \boxed{5}, from 6</answer>", "5"),
    (r"\boxed{5} <answer>6</answer>", "5"),
    ("<answer></answer>", None),
    ("<think><answer>5</answer></think>", None),
  ],
)
def test_the_whole_of_a_tag_is_the_answer(text, answer, finished):
  assert extract(text, finished) == answer
