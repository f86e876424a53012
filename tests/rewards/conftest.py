"""Both isolations, for every test that asks for one."""

import pytest
from support.sandboxes import ISOLATIONS, LIMITS

from gspo_jax.rewards.programs.verifier import CodeVerifier


@pytest.fixture(scope="module", params=ISOLATIONS)
def verifier(request):
  with CodeVerifier(1, LIMITS, request.param) as verifier:
    yield verifier


@pytest.fixture(scope="module", params=ISOLATIONS)
def isolation(request):
  return request.param
