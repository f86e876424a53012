"""A pretrained model for slow tests."""

import os
from pathlib import Path

import pytest

from experiments import smollm2

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gspo_jax/smollm2"


def weights() -> Path:
  """Directory of SmolLM2-135M-Instruct, fetched once; skips without a download."""
  try:
    return smollm2.fetch(CACHE)
  except RuntimeError as error:
    pytest.skip(str(error))
