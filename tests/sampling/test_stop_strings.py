"""Where a stop string ends a response does not depend on how many tokens come at once."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.sampling import stop_strings
from gspo_jax.sampling.requests import Request


def metaspace(ids):
  """Leaves out a space at the beginning."""
  vocab = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "<s>": 4}
  tok = tokenizers.Tokenizer(models.BPE(vocab, []))
  tok.decoder = decoders.Metaspace()
  tok.add_special_tokens(["<s>"])
  return tok.decode(list(ids), skip_special_tokens=True)


CASES = [
  (ByteTokenizer().decode, [*b"ab", 256, 258, 300], ("ab",)),
  (ByteTokenizer().decode, [*b"ab", *"é".encode(), 256], ("aéb", "bb")),
  (metaspace, [0, 1, 2, 3, 4], (" a b", "b  a")),
]


@pytest.mark.parametrize("begun", [0, 9])
@pytest.mark.parametrize("decode, alphabet, strings", CASES)
def test_the_first_token_that_completes_one(decode, alphabet, strings, begun):
  rng = np.random.default_rng(0)
  ended = 0
  for _ in range(64):
    # Tokens without a text are frequent, so that many of them stand within a stop string.
    tokens = rng.choice([*alphabet, *alphabet[-1:] * 6], 48).tolist()
    texts = [decode(tokens[:n]) for n in range(49)]
    first = next((n for n in range(49) if any(s in texts[n] for s in strings)), None)
    if first is not None and first <= begun:
      continue
    request = Request(
      (7,), 100, stop_strings=strings, prior=tuple(tokens[:begun]), unfinished=begun
    )
    for size in (1, 3, 64):
      tail, place = None, begun
      while place < 48:
        end, tail = stop_strings.end(request, tail, tokens[place : place + size], decode)
        if end is not None:
          place += end
          break
        place += size
      assert (place if end is not None else None) == first
    ended += first is not None
  assert ended > 5
