"""The verifier of texts, by a table."""

from pathlib import Path

import pytest
from support import tables

from gspo_jax.verifiers import string_match

TABLE = Path(__file__).parent / "string_match.txt"


@pytest.mark.parametrize("response, answer, outcome", tables.read(TABLE))
def test_string_match(response, answer, outcome):
  assert string_match.verify(response, answer) == outcome
