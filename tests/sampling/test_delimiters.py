"""Steps that texts end: found in the bytes of tokens, whatever the tokens are."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from data import test_tokenizer
from support.configs import config_of
from tokenizers import decoders, models

from configs import common, tiny_segments, tiny_tools
from gspo_jax.data import tokenizer
from gspo_jax.inputs import read_inputs
from gspo_jax.learner.batch import segments_of
from gspo_jax.sampling import delimiters as steps
from gspo_jax.sampling.parts import segment_ids
from gspo_jax.structs import Rollout

BYTES = tokenizer.ByteTokenizer()
STOP = BYTES.stop_ids[0]


def table(delimiters, vocabulary, stop_ids=()):
  """Bytes of a vocabulary of bytes."""
  fake = SimpleNamespace(token_bytes=lambda: vocabulary, stop_ids=stop_ids)
  return steps.delimiters(delimiters, fake)


def slow_ends(delimiters, vocabulary, stop_ids, tokens, turns):
  """By the definition, one byte after another."""
  ends, text, turn = [], b"", None
  for i, token in enumerate(tokens):
    if turns[i] != turn:
      text, turn = b"", turns[i]
    result = False
    for byte in vocabulary[token] if 0 <= token < len(vocabulary) else b"":
      text += bytes([byte])
      result |= any(text.endswith(d.encode()) for d in delimiters)
    ends.append(result)
    if token in stop_ids and i and turns[i - 1] == turn:
      ends[i - 1] = False
  return ends


VOCABULARY = [
  b"<", b"/", b"</", b"think", b">", b"</think>", b"x</think>y", b"]", b"]]", b"a]b]", b"", b"\n",
  "é".encode()[:1], "é".encode()[1:], "é".encode(), b"<stop>", b"nk>",
]  # fmt: skip
STOPS = (15, 10)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
  "delimiters", [("</think>",), ("]",), ("]]", "é"), ("</think>", ">", "x</"), ("<stop>", "thi")]
)
def test_steps_against_a_slow_reference(delimiters, turns):
  rng, (B, T) = np.random.default_rng(len(delimiters) + turns), (60, 50)
  tokens_BT = rng.integers(-3, len(VOCABULARY) + 6, (B, T))  # and some beyond the vocabulary
  tokens_BT[:20] = rng.integers(0, 5, (20, T))  # where tags are likely
  mask_BT = (rng.random((B, T)) < 0.8) & (np.arange(T) >= 4)
  mask_BT[5] = False
  turn_BT = np.where(mask_BT, np.cumsum(rng.random((B, T)) < 0.1, axis=1), -1)
  spec = turn_BT if turns else None
  found_BT = steps.step_ends(table(delimiters, VOCABULARY, STOPS), tokens_BT, mask_BT, spec)
  expected_BT = np.zeros((B, T), bool)
  for row, mask_T in enumerate(mask_BT):
    row_turns = turn_BT[row, mask_T] if turns else np.zeros(mask_T.sum())
    arguments = delimiters, VOCABULARY, STOPS, tokens_BT[row, mask_T], row_turns
    expected_BT[row, mask_T] = slow_ends(*arguments)
  np.testing.assert_array_equal(found_BT, expected_BT)
  assert 10 < found_BT.sum() < 0.9 * mask_BT.sum()
  ids_BT = segment_ids(mask_BT, turn_BT=spec, ends_BT=found_BT)
  for row, mask_T in enumerate(mask_BT):  # one more behind each end, and with each turn
    ids = ids_BT[row, mask_T]
    new = expected_BT[row, mask_T][:-1]
    if turns:
      new = new | (np.diff(turn_BT[row, mask_T]) != 0)
    np.testing.assert_array_equal(np.diff(ids), new)
    assert not ids[:1].any() and not ids_BT[row, ~mask_T].any()


@pytest.mark.parametrize(
  "text, delimiters, lengths",
  [
    ("[37*58]", ("]",), [8]),  # the stop token belongs to what it ends
    ("[37*58]", ("*", "]"), [4, 4]),
    ("a]b", ("]",), [2, 2]),
    ("aaaa", ("aa",), [2, 1, 2]),  # they may overlap
    ("<think>é</think>\nyes", ("</think>",), [17, 5]),
    ("日本。語", ("。",), [9, 4]),
    ("", ("]",), [1]),
  ],
)
def test_steps_of_bytes_by_hand(text, delimiters, lengths):
  tokens_BT = np.array([[*BYTES.encode(text), STOP]])
  mask_BT = np.ones_like(tokens_BT)
  ends_BT = steps.step_ends(steps.delimiters(delimiters, BYTES), tokens_BT, mask_BT)
  ids = segment_ids(mask_BT, ends_BT=ends_BT)[0]
  assert np.bincount(ids).tolist() == lengths


def test_what_an_environment_says_is_no_part_of_a_delimiter():
  """`]` of an observation ends nothing, and one that two turns make together is none."""
  text, observed = "ab]c" + "]" + "]d]", [4]
  tokens_BT = np.array([BYTES.encode(text)])
  turn_BT = np.array([[0, 0, 0, 0, -1, 1, 1, 1]])
  mask_BT = np.where(np.isin(np.arange(8), observed), 0, 1)[None]
  for delimiters, expected in (("]", [0, 0, 0, 1, 0, 2, 3, 3]), ("c]", [0, 0, 0, 0, 0, 1, 1, 1])):
    spec = steps.delimiters((delimiters,), BYTES)
    ends_BT = steps.step_ends(spec, tokens_BT, mask_BT, turn_BT)
    ids_BT = segment_ids(mask_BT, turn_BT=turn_BT, ends_BT=ends_BT)
    assert ids_BT.tolist() == [expected]


@pytest.mark.parametrize("unit", ["turn", "step", "line", "tokens"])
def test_segments_of_a_run_with_observations_and_several_versions(unit):
  """A trajectory has the segments of its text, under any versions."""
  changes = dict(objective__name="segment", objective__segment_unit=unit)
  changes |= dict(step=dict(objective__segment_delimiters=("]",))).get(unit, {})
  changes |= dict(tokens=dict(objective__segment_tokens=3)).get(unit, {})
  config = config_of(tiny_tools.get_config, **changes)
  text, turns = "3=[3*2]x6;[6\n2]12", [-1] * 2 + [0] * 6 + [-1] * 2 + [1] * 7
  tokens = np.array([BYTES.encode(text)] * 2)
  turns_BL = np.array([turns] * 2)
  mask_BL = (turns_BL >= 0).astype(np.float32)
  zeros_BL, pair = np.zeros_like(mask_BL), lambda n: np.array([n] * 2)
  version_BL = np.where(turns_BL >= 0, np.array([[5], [1]]) + (np.arange(17) > 12), -1)
  rollout = Rollout(
    tokens=tokens, logp=zeros_BL, full_logp=zeros_BL, mask=mask_BL, turns=turns_BL,
    rewards=zeros_BL, version=version_BL, routing=None, prompt_lengths=pair(2), lengths=pair(13),
    ends=pair(17), stopped=np.array([True, False]),
  )  # fmt: skip
  breaks_V = np.array([BYTES.decode([i]).count("\n") for i in range(BYTES.vocab_size)])
  delimiters = steps.delimiters(("]", "x["), BYTES)  # one that two turns make together
  expected = dict(
    turn=[0] * 8 + [0, 0] + [1] * 7,
    step=[0] * 7 + [1] + [0, 0] + [2] * 5 + [3, 3],
    line=[0] * 8 + [0, 0] + [1, 1, 1, 2, 2, 2, 2],
    tokens=[0] * 5 + [1, 1, 1] + [0, 0] + [2, 2, 2, 3, 3, 3, 4],
  )
  ids_BL = segments_of(config.objective, rollout, breaks_V, delimiters)
  assert ids_BL.tolist() == [expected[unit]] * 2


def test_the_configuration_and_its_variants():
  gspo = {"": (0.03, 0.04), "steps": (0.03, 0.04), "long": (3e-4, 4e-4)}
  units = {"": "turn", "steps": "step", "long": "line"}
  for variant, ranges in gspo.items():
    objective = config_of(lambda v=variant: tiny_segments.get_config(v)).objective
    assert (objective.name, objective.segment_unit) == ("segment", units[variant])
    assert (objective.clip_low, objective.clip_high) == ranges and objective.clip_exponent == 0.5
    assert objective.segment_delimiters == (("*", "+", "]") if variant == "steps" else None)


def test_hostile_responses_take_linear_time():
  spec = steps.delimiters(("</think>", "<" * 50), BYTES)

  def seconds(size):
    tokens_BT = np.full((1, size), ord("<"))
    start = time.thread_time()  # Others may be busy.
    ends_BT = steps.step_ends(spec, tokens_BT, np.ones_like(tokens_BT))
    assert ends_BT.sum() == size - 49
    return time.thread_time() - start

  seconds(1000)
  once, often = (min(seconds(size) for _ in range(3)) for size in (50_000, 400_000))
  assert often < 40 * max(once, 1e-3)


# --- tokenizers


def with_tags(tmp_path, special):
  """Qwen's tokenizer: its chat template has tags, tokens of their own with `special`."""
  template = test_tokenizer.CHAT_TEMPLATE + "{# content.split('</think>') </tool_call> #}"
  config = test_tokenizer.QWEN | dict(chat_template=template)
  tok = test_tokenizer.write_checkpoint(tmp_path, config)
  if special is not None:
    tags = [tokenizers.AddedToken(tag, special=special) for tag in steps.TAGS[:2]]
    (tok.add_special_tokens if special else tok.add_tokens)(tags)
    tok.save(str(tmp_path / "tokenizer.json"))
  return tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("special", [None, False, True])
def test_tags_of_the_chat_template_are_found_as_one_token_or_several(tmp_path, special):
  tok = with_tags(tmp_path, special)
  assert steps.choose(None, tok) == ("</think>", "</tool_call>")
  assert steps.choose(("x",), tok) == ("x",)
  parts = ["<think>the answer é</think>", "\n<tool_call>42</tool_call>", "is 42.<|im_end|>"]
  ids = tok.encode("".join(parts))
  assert (len(tok.encode("</think>")) == 1) == (special is not None)
  assert b"".join(tok.token_bytes()[i] for i in ids) == "".join(parts).encode()
  tokens_BT = np.array([ids])
  mask_BT = np.ones_like(tokens_BT)
  ends_BT = steps.step_ends(steps.delimiters(None, tok), tokens_BT, mask_BT)
  result = np.array(segment_ids(mask_BT, ends_BT=ends_BT)[0])
  texts = [
    b"".join(tok.token_bytes()[i] for i in tokens_BT[0][result == n]).decode() for n in range(3)
  ]
  assert texts == parts and result.max() == 2


def test_bytes_of_tokens_that_are_spelt_in_other_ways():
  def bytes_of(decoder, vocabulary):
    collecting = tokenizers.Tokenizer(
      models.WordLevel({t: i for i, t in enumerate(vocabulary)}, "a")
    )
    collecting.decoder = decoder
    size = len(vocabulary)
    return tokenizer.HFTokenizer("", collecting, "", {}, False, 0, (0,), size).token_bytes()

  sentencepiece = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  )
  words = ["a", "▁the", "<0xE2>", "Ġthe"]
  assert bytes_of(sentencepiece, words) == [b"a", b" the", b"\xe2", "Ġthe".encode()]
  assert bytes_of(decoders.Metaspace(), words)[1:3] == [b" the", b"<0xE2>"]
  assert bytes_of(decoders.ByteLevel(), words)[3] == b" the"
  assert bytes_of(None, words)[1] == "▁the".encode()
  pieces = bytes_of(decoders.WordPiece(), ["a", "think", "##ing"])
  assert pieces == [b" a", b" think", b"ing"]  # as they are spelt behind others
  assert bytes_of(decoders.BPEDecoder("</w>"), ["a", "think", "ing</w>"])[1:] == [b"think", b"ing"]


def test_every_byte_has_its_token():
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  assert sorted(tokenizer._BYTE_OF) == alphabet
  assert sorted(tokenizer._BYTE_OF.values()) == [bytes([i]) for i in range(256)]
  assert BYTES.token_bytes()[:256] == [bytes([i]) for i in range(256)]
  assert BYTES.token_bytes()[256:] == [b""] * 3


def test_without_tags_the_key_is_named(tmp_path):
  message = r"objective\.segment_delimiters.*has no chat template that names them"
  changes = dict(objective__name="segment", objective__segment_unit="step")
  with pytest.raises(ValueError, match=message):
    read_inputs(config_of(common.base, **changes))
  read_inputs(config_of(common.base, **changes, objective__segment_delimiters=("]",)))
  test_tokenizer.write_checkpoint(tmp_path, test_tokenizer.QWEN)
  with pytest.raises(ValueError, match=r"segment_delimiters.*chat template has no such tag"):
    steps.choose(None, tokenizer.load(str(tmp_path)))
