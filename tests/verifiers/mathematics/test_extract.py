"""Which part of a response is its answer; stated.txt and denied.txt have the forms of sentences."""

from pathlib import Path

import pytest
from support import tables

from gspo_jax.verifiers.mathematics.extract import extract


@pytest.mark.parametrize(
  "response, whole, cut_off", tables.read(Path(__file__).parent / "extracted.txt")
)
def test_extraction(response, whole, cut_off):
  answers = extract(response), extract(response, finished=False)
  assert [answer or "nothing" for answer in answers] == [whole, cut_off]


@pytest.mark.parametrize("response", ["", "\x00\ufffd}{"])
def test_nothing_is_found_in_nothing(response):
  assert extract(response) is None
