"""What the tests of verifiers share."""

import pytest
from support.sandboxes import LIMITS, available

from gspo_jax.verifiers.programs.verifier import CodeVerifier


@pytest.fixture(scope="module")
def verifier():
  if not available():
    pytest.skip("no namespaces here")
  with CodeVerifier(1, LIMITS, "namespaces") as verifier:
    yield verifier
