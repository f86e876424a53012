"""Which part of a response is its answer; stated.txt and denied.txt have the forms of sentences."""

import pytest

from gspo_jax.rewards.mathematics.extract import extract


def test_a_heading_at_which_a_response_was_cut_off_is_no_answer():
  assert extract("We add 5 and 3.\n#### Step 2", finished=False) is None
  assert extract("#### 18 dollars", finished=False) == "18 dollars"


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
