"""Cases of parametrized tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def long(values: Iterable[Any]) -> list[Any]:
  """Marks values of one parameter as `long`."""
  return [pytest.param(value, marks=pytest.mark.long) for value in values]
