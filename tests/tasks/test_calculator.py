"""The embedded task with a calculator: problems, demonstrations, and what the environment says."""

import collections
import zlib

import pytest
from support.data_cases import config

from gspo_jax.data import sources
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.structs import Prompt
from gspo_jax.tasks import arithmetic, calculator, environments

TOK = ByteTokenizer()


def environment(question="37*58+46=", answer="2192"):
  prompt = Prompt("37*58+46", question, answer, tuple(TOK.encode(question)))
  return environments.find("calculator", TOK)(prompt)


def ask(talk, text):
  observation, reward, done = talk.step([*TOK.encode(text), *TOK.stop_ids])
  return TOK.decode(observation), reward, done


def test_the_splits_are_apart_and_whole():
  train, heldout = (calculator.problems(split, 1) for split in ("train", "heldout"))
  ids = [{source[i]["id"] for i in range(len(source))} for source in (train, heldout)]
  assert len(ids[0]) + len(ids[1]) == 9**3 and not ids[0] & ids[1] and ids[1]
  assert {f"{i[2]}*{i[0]}{i[3:]}" for i in ids[1]} == ids[1], "with 3*4+5, 4*3+5 is held out"
  with pytest.raises(ValueError, match="digits=3"):
    calculator.problems("train", 3)
  with pytest.raises(ValueError, match="calculator:train and calculator:heldout"):
    calculator.problems("test", 2)


def test_demonstrations_are_conversations_that_the_environment_would_have_had():
  source = calculator.problems("train", 2)
  turns, right = collections.Counter(), collections.Counter()
  for i in range(0, len(source), 3001):
    row = source[i]
    pieces = calculator.demonstration(row, 0.5, seed=i)
    assert pieces == calculator.demonstration(row, 0.5, seed=i)
    talk = environment(row["question"], row["answer"])
    for request, reply in zip(pieces[:-1:2], pieces[1::2]):
      assert ask(talk, request) == (reply, 0.0, False)
    _, reward, done = ask(talk, pieces[-1])
    assert done and reward == arithmetic.verify(pieces[-1], row["answer"])
    turns[len(pieces)] += 1
    right[len(pieces)] += int(reward)
    careful = calculator.demonstration(row, 0.0, seed=i)
    assert careful[-1] == row["answer"]
  assert set(turns) == {1, 3, 5} and right[5] == turns[5]
  assert right[1] < 0.6 * turns[1] and right[3] < 0.8 * turns[3]
  assert turns[1] > turns[3] > turns[5]


def test_a_pupil_who_checks_asks_twice_and_answers_as_he_would_have():
  source = calculator.problems("train", 2)
  rows = [source[i] for i in range(0, len(source), 3001)]
  plain = [calculator.demonstration(row, 0.5, seed=i) for i, row in enumerate(rows)]
  # The pupil without checks: cold starts of configs/tiny_tools.py learned from it.
  assert zlib.crc32(repr(plain).encode()) == 3962201812
  share = collections.Counter()
  for i, row in enumerate(rows):
    pieces = calculator.demonstration(row, 0.5, seed=i, checks=0.75)
    assert pieces == calculator.demonstration(row, 0.5, seed=i, checks=0.75)
    talk, requests = environment(row["question"], row["answer"]), []
    for request, reply in zip(pieces[:-1:2], pieces[1::2]):
      assert ask(talk, request) == (reply, 0.0, False)
      requests.append(request)
    assert ask(talk, pieces[-1])[2]
    assert all(requests.count(request) <= 2 for request in requests) and requests == sorted(
      requests, key=requests.index
    )
    share.update(requests.count(request) for request in set(requests))
    always = calculator.demonstration(row, 0.0, seed=i, checks=1.0)[:-1]
    assert always[::4] == always[2::4] and always[1::4] == always[3::4]
  assert share[2] / (share[1] + share[2]) == pytest.approx(0.75, abs=0.07)


def test_the_calculator_answers_and_judges():
  talk = environment()
  assert TOK.decode(talk.reset()) == "37*58+46="
  assert talk.figures() == dict(correct=False, tool_use=False, tool_calls=0)
  assert ask(talk, "[37*58]") == ("2146;", 0.0, False)
  assert ask(talk, "[12-15]") == ("-3;", 0.0, False)
  assert ask(talk, "[2146+46]") == ("2192;", 0.0, False)
  assert ask(talk, "2192") == ("", 1.0, True)
  assert talk.figures() == dict(correct=True, tool_use=True, tool_calls=3) and talk.tool_calls == 3
  for text in ("[37*58", "[37**58]", "[a]", "[1+2+3]", "[1234567+1]", "[37*58]2192"):
    assert ask(environment(), text) == ("?;", calculator.NOT_UNDERSTOOD, False)
  for text in ("2191", "", "37*58", "2146;2192"):
    talk = environment()
    assert ask(talk, text) == ("", 0.0, True)
    assert not talk.figures()["correct"] and not talk.figures()["tool_use"]


def test_a_cold_start_learns_the_turns_and_not_what_the_calculator_says():
  source = sources.load(config(train="calculator:train", carry_errors=0.5), TOK, "train")
  prompt = next(p for p in map(source.__getitem__, range(999)) if len(p.demonstration) == 5)
  texts = ["", ""]
  tokens, mask = sources.pack_demonstrations([prompt], TOK, 60)
  for token, sampled in zip(tokens[0, len(prompt.tokens) :], mask[0, len(prompt.tokens) :]):
    texts[int(sampled)] += "|" if token == TOK.stop_ids[0] else TOK.decode([token])
  request, first, again, second, answer = prompt.demonstration
  assert texts == [first + second, f"{request}|{again}|{answer}|"]
  with pytest.raises(sources.DataError, match=r"data\.digits=3"):
    sources.load(config(train="calculator:train", digits=3), TOK, "train")
  checking = sources.load(config(train="calculator:train", checks=1.0), TOK, "train")
  lengths = [len(p.demonstration) for p in map(checking.__getitem__, range(99))]
  assert set(lengths) == {1, 5, 9}
