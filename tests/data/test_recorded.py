"""Recorded responses: what a row may be, and what is refused by file and line."""

import json
import re

import numpy as np
import pytest
from support.cost import assert_linear

from gspo_jax.data import recorded, tokenizer
from gspo_jax.settings.data import DataError

TOK = tokenizer.load("bytes")
STOP = TOK.stop_ids[0]
LIMITS = recorded.Limits(group_size=3, prompt_tokens=8, response_tokens=6, vocabulary=264)
ROW = dict(prompt="1+2=", response="3", reward=1.0)


def load(tmp_path, *rows, on_error="raise", template="{question}"):
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path = tmp_path / "recorded.jsonl"
  path.write_text("\n".join(lines))
  return recorded.load(str(path), TOK, template, LIMITS, on_error)


def test_responses_to_one_prompt_are_groups_in_their_order(tmp_path):
  """Rows between them do not matter; more than a group's responses make several groups."""
  rows = [ROW | dict(response=str(i)) for i in range(5)]
  nine = dict(prompt="4+5=", response="9", reward=0)
  recordings = load(tmp_path, *rows[:2], nine, *rows[2:])
  texts = [
    [TOK.decode(response.tokens) for response in group.responses] for group in recordings.rows
  ]
  assert texts == [["0", "1", "2"], ["3", "4"], ["9"]]
  assert [group.prompt.tokens for group in recordings.rows] == [tuple(b"1+2=")] * 2 + [
    tuple(b"4+5=")
  ]
  assert (
    len({group.id for group in recordings.rows}) == 3 == len(recordings) == len(recordings.prompts)
  )
  assert recordings[2].responses[0].reward == 0.0 and recordings[2].prompt.question == "4+5="


def test_a_text_ends_with_the_stop_token_unless_it_was_cut_off(tmp_path):
  rows = [ROW, ROW | dict(truncated=True), ROW | dict(response="")]
  first, second, third = load(tmp_path, *rows)[0].responses
  assert first.tokens.tolist() == [ord("3"), STOP] and first.stopped
  assert second.tokens.tolist() == [ord("3")] and not second.stopped
  assert third.tokens.tolist() == [STOP] and third.stopped


def test_token_ids_go_before_texts(tmp_path):
  """A broken character is not encoded to the byte that it was."""
  row = dict(prompt="\7\b", prompt_ids=[7, 8], response_ids=[200, STOP], response="\ufffd")
  row |= dict(length=2)
  group = load(tmp_path, ROW | row)[0]
  assert group.prompt.tokens == (7, 8) and group.responses[0].tokens.tolist() == [200, STOP]
  assert load(tmp_path, ROW, template="{question}?")[0].prompt.tokens == tuple(b"1+2=?")


def test_what_nobody_could_judge_is_left_out(tmp_path):
  recordings = load(tmp_path, ROW, ROW | dict(reward=None, unknown="timeout"))
  assert recordings.left_out() == {"recorded/unknown_rows": 1} and len(recordings[0].responses) == 1


BAD = {
  "no object": ("[1]", "object"),
  "no JSON": ("{", "not JSON"),
  "too deep": ("[" * 100_000, "nested"),
  "no prompt": (dict(response="3", reward=1), "prompt=None"),
  "no response": (dict(prompt="1+2=", reward=1), "response=None"),
  "a response that is no text": (ROW | dict(response=3), "response=3"),
  "a huge text": (ROW | dict(response="3" * (1 << 21)), "2,097,152 characters"),
  "a response that is too long": (ROW | dict(response="333333"), "7 tokens.*max_new_tokens=6"),
  "a prompt that is too long": (ROW | dict(prompt="1" * 9), "9 tokens.*max_prompt_tokens=8"),
  "an empty prompt": (ROW | dict(prompt=""), "prompt has no token"),
  "nothing before it was cut off": (ROW | dict(response="", truncated=True), "has no token"),
  "no reward": (dict(prompt="1+2=", response="3"), "no reward"),
  "a reward that is NaN": ('{"prompt": "1", "response": "3", "reward": NaN}', "reward=nan"),
  "an infinite reward": ('{"prompt": "1", "response": "3", "reward": 1e999}', "reward=inf"),
  "a reward out of range": (ROW | dict(reward=1e16), r"reward=1e\+16"),
  "a reward that is a text": (ROW | dict(reward="1"), "reward='1'"),
  "a reward of four hundred digits": (ROW | dict(reward=10**400), "reward=1000"),
  "half of a character": (ROW | dict(response="\ud800"), "response has half"),
  "half of a character in the prompt": (ROW | dict(prompt="\ud800"), "prompt has half"),
  "cut off, perhaps": (ROW | dict(truncated="no"), "truncated='no'"),
  "a reward that is true": (ROW | dict(reward=True), "reward=True"),
  "ids of another text": (
    ROW | dict(response_ids=[ord("4"), STOP]),
    "response_ids decode to '4'.*'3'",
  ),
  "ids beyond the tokenizer": (
    ROW | dict(response_ids=[262, STOP]),
    "response_ids decode to ''.*'3'",
  ),
  "ids of half of the text": (
    ROW | dict(response="34", response_ids=[ord("3"), STOP]),
    "another tokenizer",
  ),
  "ids of more than the text": (
    ROW | dict(response_ids=[ord("3"), ord("4"), STOP]),
    "another tokenizer",
  ),
  "ids of another prompt": (
    ROW | dict(prompt_ids=[7, 8]),
    "prompt_ids decode to.*prompt is '1.2='",
  ),
  "ids of half of the prompt": (ROW | dict(prompt_ids=[*b"1+2"]), "prompt_ids decode to '1.2'"),
  "an id beyond the vocabulary": (ROW | dict(response_ids=[264, STOP]), "from 0 to 263"),
  "a negative id": (ROW | dict(response_ids=[-1, STOP]), "from 0 to 263"),
  "an id that is true": (ROW | dict(response_ids=[True, STOP]), "from 0 to 263"),
  "ids that are no list": (ROW | dict(response_ids="33"), "no token ids"),
  "a million ids": (ROW | dict(response_ids=[1] * 1_000_000), "1000000 tokens"),
  "a stop token inside": (ROW | dict(response_ids=[STOP, 3, STOP]), f"stop token {STOP}"),
  "a text that is not what was sampled": (ROW | dict(response="\ufffd", length=2), "length=2"),
  "half of a character in its answer": (ROW | dict(answer="ok \ud83d"), "answer has half of a"),
  "half of a character in its name": (ROW | dict(prompt_id="\ud83d"), "prompt_id has half of a"),
  "a held-out problem": (ROW | dict(eval=True), "evaluation"),
  "a conversation": (ROW | dict(turns=[dict(role="policy", text="3", length=2)]), "several turns"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_or_counted(tmp_path, name):
  row, why = BAD[name]
  with pytest.raises(DataError) as error:
    load(tmp_path, ROW, row)
  assert re.search(rf"recorded\.jsonl, line 2: .*{why}.*data\.on_error=skip", str(error.value))
  assert len(str(error.value)) < 400
  recordings = load(tmp_path, ROW, row, on_error="skip")
  assert recordings.left_out() == {"recorded/skipped_rows": 1} and len(recordings[0].responses) == 1


def test_several_files_and_none(tmp_path):
  for name in "ab":
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROW | dict(prompt=name)))
  paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
  recordings = recorded.load(", ".join(paths), TOK, "{question}", LIMITS, "raise")
  assert [group.prompt.question for group in recordings.rows] == ["a", "b"]
  same = recorded.load(str(tmp_path / "*.jsonl"), TOK, "{question}", LIMITS, "raise")
  for a, b in zip(recordings.rows, same.rows):
    np.testing.assert_array_equal(a.responses[0].tokens, b.responses[0].tokens)
  refused = {f"{paths[0]},": "empty part", f"{tmp_path}/c.jsonl": "offline.data: there is no file"}
  for spec, why in refused.items():
    with pytest.raises(DataError, match=why):
      recorded.load(spec, TOK, "{question}", LIMITS, "raise")
  with pytest.raises(DataError, match=r"no usable response \(0 bad rows, 1 with reward null"):
    load(tmp_path, ROW | dict(reward=None))


def test_ids_and_texts_may_differ_in_what_decoding_leaves_out(tmp_path):
  """White space, special tokens, a template around the prompt."""
  rows = [
    ROW | dict(prompt_ids=[*b"1+2="], response_ids=[*b" 3", STOP], response="3\n"),
    ROW | dict(prompt_ids=[258, *b"Q 1+2="], response_ids=[*b"3", STOP]),
    {k: v for k, v in ROW.items() if k != "response"} | dict(response_ids=[*b"5", STOP]),
    ROW | dict(response=None, response_ids=[*b"6", STOP]),
    ROW | dict(response="", response_ids=[STOP]),
  ]
  assert sum(len(group.responses) for group in load(tmp_path, *rows).rows) == len(rows)


def test_comparing_ids_with_texts_is_linear():
  def arguments(n):
    row = dict(prompt="1+2=", prompt_ids=[*b"1+2=", *b"a" * n], reward=1.0)
    row |= dict(response="a" * n, response_ids=[*b"a" * n])
    return row, TOK, "{question}", recorded.Limits(3, n + 9, n + 9, 264, ("ab",))

  assert_linear(recorded._read, arguments)


def finishes(tmp_path, stop_strings, *rows):
  """Whether each response stopped, and its tokens."""
  path = tmp_path / "recorded.jsonl"
  path.write_text("\n".join(json.dumps(ROW | row) for row in rows))
  limits = recorded.Limits(len(rows), 8, 6, 264, stop_strings)
  (group,) = recorded.load(str(path), TOK, "{question}", limits, "raise").rows
  return [(response.stopped, response.tokens.tolist()) for response in group.responses]


def test_a_response_that_ended_with_a_stop_string_was_not_cut_off(tmp_path):
  ids, text = [*b"3;"], dict(response="3;")
  rows = [
    text | dict(response_ids=ids, truncated=False),  # A run's samples log.
    text | dict(response_ids=ids),
    text,
    text | dict(length=2),
    text | dict(response_ids=ids, truncated=True),
    text | dict(truncated=True),
    dict(response="3;4"),  # Not of this run: text goes on after it.
    dict(response="3"),
  ]
  expected = [(True, ids)] * 4 + [(False, ids)] * 2
  expected += [(True, [*b"3;4", STOP]), (True, [*b"3", STOP])]
  assert finishes(tmp_path, (";",), *rows) == expected


def test_without_stop_strings_the_record_says_how_a_response_ended(tmp_path):
  ids = [*b"3;"]
  rows = [dict(response="3;", response_ids=ids, truncated=cut) for cut in (False, True, None)]
  rows.append(dict(response="3;", response_ids=[*ids, STOP], truncated=False))
  assert [stopped for stopped, _ in finishes(tmp_path, (), *rows)] == [True, False, False, True]
  rows = [dict(response="3;", length=n, truncated=False) for n in (2, 3)]
  assert finishes(tmp_path, (), *rows) == [(True, ids), (True, [*ids, STOP])]
  with pytest.raises(DataError, match="length=2, but its text is encoded as 3 tokens"):
    finishes(tmp_path, (), dict(response="3;", length=2))
  with pytest.raises(DataError, match="truncated='no'"):
    finishes(tmp_path, (), dict(response="3;", response_ids=ids, truncated="no"))
