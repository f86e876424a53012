"""Where a stop string ends a response does not depend on how many tokens come at once."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from gspo_jax.data import tokenizer
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.requests import Request


def pieces(directory):
  """A tokenizer as that of Mistral, where characters outside the vocabulary are byte tokens."""
  vocab = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "<s>": 4} | {f"<0x{i:02X}>": 5 + i for i in range(256)}
  tok = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
  tok.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      decoders.Strip(" ", 1, 0),
    ]
  )
  tok.add_special_tokens(["<s>"])
  tok.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
  return tokenizer.load(str(directory))


EMOJI = [5 + byte for byte in "🙂\n".encode()]  # Few sequences of these are valid UTF-8.
CASES = [
  ("bytes", [*b"ab", 256, 258, 300], ("ab",)),
  ("bytes", [*b"ab", *"é".encode(), 256], ("aéb", "bb")),
  ("pieces", [0, 1, 2, 3, 4], ("a b", "b  a")),
  ("pieces", [*EMOJI, EMOJI[-1], 4], ("\n\n",)),
]


@pytest.mark.parametrize("boundary", range(1, 8))
@pytest.mark.parametrize("text, first", [("a🙂\n\nbb", 7), ("a\n\n🙂bb", 3)])
def test_characters_in_several_tokens(text, first, boundary, tmp_path):
  tok = pieces(tmp_path)
  text_bytes = stop_strings.text_bytes(tok)
  tokens = [1, *(5 + byte for byte in text[1:-2].encode()), 2, 2]
  assert tok.decode(tokens) == text
  request, tail, place = Request((7,), 100, stop_strings=("\n\n",)), None, 0
  for part in tokens[:boundary], tokens[boundary:]:
    end, tail = stop_strings.end(request, tail, part, text_bytes)
    if end is not None:
      break
    place += len(part)
  assert place + end == first


@pytest.mark.parametrize("begun", [0, 9])
@pytest.mark.parametrize("kind, alphabet, strings", CASES)
def test_the_first_token_that_completes_one(kind, alphabet, strings, begun, tmp_path):
  text_bytes = stop_strings.text_bytes(ByteTokenizer() if kind == "bytes" else pieces(tmp_path))
  rng = np.random.default_rng(0)
  ended = 0
  for _ in range(64):
    # Tokens without a text are frequent, so that many of them stand within a stop string.
    tokens = rng.choice([*alphabet, *alphabet[-1:] * 6], 48).tolist()
    known = [text_bytes[i] if i < len(text_bytes) else b"" for i in tokens]
    texts = [b"".join(known[:n]) for n in range(49)]
    first = next((n for n in range(49) if any(s.encode() in texts[n] for s in strings)), None)
    if first is not None and first <= begun:
      continue
    request = Request(
      (7,), 100, stop_strings=strings, prior=tuple(tokens[:begun]), unfinished=begun
    )
    for size in (1, 3, 64):
      tail, place = None, begun
      while place < 48:
        end, tail = stop_strings.end(request, tail, tokens[place : place + size], text_bytes)
        if end is not None:
          place += end
          break
        place += size
      assert (place if end is not None else None) == first
    ended += first is not None
  assert ended > 5
