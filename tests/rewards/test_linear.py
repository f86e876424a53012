"""Whatever reads a response in the trainer's process takes time that grows with its length only."""

import numpy as np
import pytest
from support.cost import LEAST, assert_linear, seconds
from support.prompts import prompts

from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.report import page, rollouts
from gspo_jax.rewards import shaping
from gspo_jax.sampling.local.responses import LiveResponse
from gspo_jax.sampling.requests import Request
from gspo_jax.tasks import arithmetic
from gspo_jax.tasks.calculator import Calculator
from gspo_jax.verifiers import math_answer, string_match, thought
from gspo_jax.verifiers.programs import cases, extraction

TESTS = cases.Tests("check", function="f", preamble="def f():\n", code="assert f()")

REPEATED = """
~ ` ```¶ ```python¶ ~~~x¶ ␣ ¶ { } ( [ $ \\( \\[ 9 9␣ 1,000 1. - / 5% = : :␣1 answer␣ answer␣is␣ the␣
the␣final␣ Final␣Answer:␣ ####␣ \\boxed{ \\boxed{1} \\frac{ \\text{ \\frac{1}{ <think> </think>
<think></think> <answer> </answer> <answer>x</answer> </think><answer> </think><answer></answer> <
<|im_end|> def␣ f¶ f␣( async␣ return¶ é ﷺ \u0f73 \\ " &lt; [1+ [1+1]
answer␣is␣a␣ answer␣is␣not␣5, 5^ √5␣ 3:4 x+5_ ####␣5¶ ####␣5␣a␣
"""
SPACED = """
<think>|</think>x </think>| </think>|<answer>x</answer> x</think><answer>|</answer> ```|python
~~~|x` answer|x the|x the|final \\boxed|x \\frac|x \\frac{1}|x 1|x 5|% async|x async|def␣x def|x f|x
:|1x $|$
"""
HOSTILE = [  # Prefix, repeated unit and suffix.
  *[("", unit, "") for unit in REPEATED.split()],
  *[(first, "␣", last) for first, _, last in (ends.partition("|") for ends in SPACED.split())],
  *[("", unit, "") for unit in ("\r", "\t ", "\0", "\u0345\u0301", "\u1100\u1161")],
  *[("~~~", "x", "`"), ("```python¶", "x¶", ""), ("```python¶", "x¶", "```"), ("$", "x", "")],
  # Words that only a form with an equals sign or a unit reads, and what keeps them from fitting it.
  *[("", "a", " b 1+1 = 5"), ("9", "ab ", "? 1 = 5"), ("She has 9 cups of ", "a", "!")],
  *[("</think><answer>", "a", ""), ("x</think><answer>", "a ", "</answer>"), ("<think>", "a", "")],
  *[("<answer>", "a", ""), (r"\boxed{", "x", "}"), (r"\(", "x", ""), ("a", "\u0301", "")],
]


def text_of(hostile, length):
  first, unit, last = (part.replace("¶", "\n").replace("␣", " ") for part in hostile)
  return first + unit * ((length - len(first) - len(last)) // len(unit)) + last


def stop_strings(text):
  """Searches a whole response for a stop string, by 16 tokens, as engines do."""
  tokens = np.array(ByteTokenizer().encode(text), np.int32)
  live = LiveResponse(Request((1,), 1 << 30, stop_strings=("</end>", "\n\n\n")), 0, 0, [])
  for start in range(0, len(tokens), 16):
    live.parts.append((tokens[start : start + 16],))
    live.count += len(live.parts[-1][0])
    live.stopped_by(ByteTokenizer().token_bytes())


def shown_in_the_report(text):
  tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
  record = dict(prompt="", response=text, tokens=tokens, log_ratio=[0.1] * len(tokens))
  samples = [rollouts._color(record), rollouts._plain(record)]
  page._embed(dict(samples=samples, whole=text))


def decode(text):
  tokenizer = ByteTokenizer()
  tokenizer.decode(tokenizer.encode(text))


READERS = {
  "thought": thought.after,
  "code": extraction.extract,
  "code of base models": lambda text: extraction.extract(text, fences=False),
  "code that goes on": lambda text: extraction.completes(text, TESTS),
  "printed text": lambda text: cases.same_text(text, text + "x"),
  "think": lambda text: shaping.keeps_format(text, "think"),
  "think_answer": lambda text: shaping.keeps_format(text, "think_answer"),
  "noise": lambda text: shaping.flipped(np.ones(1), [text], ["5"], 0.1, 0.1),
  "string": lambda text: string_match.verify(text, "5"),
  "string, to a long answer": lambda text: string_match.verify(text, text + "5"),
  "math": lambda text: math_answer.quick_judge(math_answer.extract(text), "5"),
  "math, cut off": lambda text: math_answer.extract(text, finished=False),
  "arithmetic": lambda text: arithmetic.verify(text, "5"),
  "calculator": lambda text: Calculator(prompts("5")[0], ByteTokenizer()).step(text.encode()),
  "stop strings": stop_strings,
  "report": shown_in_the_report,
  "tokens": decode,
}


# Of the texts these readers take one in so many: their cost is nearly the same for all.
SLOW = {
  "string": 8, "string, to a long answer": 8, "calculator": 8, "stop strings": 16, "report": 16,
  "tokens": 16,
}  # fmt: skip


def assert_linear_cost(reader, texts):
  for hostile in texts:
    assert_linear(READERS[reader], lambda n, hostile=hostile: (text_of(hostile, n),))


@pytest.mark.parametrize("reader", READERS)
def test_cost_is_linear(reader):
  assert_linear_cost(reader, HOSTILE[:: SLOW.get(reader, 1)])


# A sentence is searched for in the last 2,000 characters, and a box has at most 1,000. So longer
# texts show no growth, and have no first line.
SEARCHED = [("We think.¶" + first, unit, last) for first, unit, last in HOSTILE] + [
  *[("We think.¶", "␣", "so it is 5."), ("We think.¶5^", "␣", "x"), (r"\boxed{5^", "␣", "x}")],
  *[("We think.¶It is 1", unit, "x") for unit in ("␣", "~", r"\,")],
  *[("It is it x", "␣", "ab= 5+5 =10 ?"), ("√", "is␣", "5"), ("x", "is␣a␣", "5")],
  *[(r"\text{because␣", "~", "{5"), ("Since␣", ",␣", "the answer is 5")],
  *[("", "number␣of␣who␣", "is 5"), ("number of a ", "who␣", "is 5"), ("other", "␣", "x is 5")],
]


@pytest.mark.parametrize("reader", ["math", "math, cut off"])
def test_cost_of_a_search_is_linear(reader):
  """Four times the length may take at most eight times as long."""
  for hostile in SEARCHED:
    times = [LEAST]
    for length in (500, 1000, 2000):
      text = (text_of(hostile, length),)
      times.append(min(seconds(READERS[reader], text) for _ in range(3)))
      bound = length / 250 * max(times[:2])
      assert times[-1] <= bound, f"{hostile}: {length} characters take {times[-1]:.3f} s"


@pytest.mark.long
@pytest.mark.parametrize("reader", [reader for reader in SLOW if reader != "stop strings"])
def test_cost_is_linear_for_all_texts(reader):
  assert_linear_cost(reader, HOSTILE)
