"""The tables of checks: their keys are there, and a section that is off is refused key by key."""

import re
import typing
from typing import Literal

import pytest
from support.configs import config_of

from configs import common
from gspo_jax.settings import checks, page, ranges
from gspo_jax.settings.reading import default

KEYS = page.by_name()
OFF = (
  "critic",
  "critic_optimizer",
  "distillation",
  "engine.server",
  "lora",
  "objective.adaptive_clip",
)
SWITCHES = ("lora.rank", "critic.name", "distillation.teacher", "objective.adaptive_clip.target")
OF_OFF = [
  name for name in KEYS if name.rpartition(".")[0] in OFF and name not in SWITCHES
]  # fmt: skip


def another(key):
  """A value that a key may have and by default has not."""
  if typing.get_origin(key.kind) is Literal:
    return next(word for word in typing.get_args(key.kind) if word != key.default)
  if isinstance(key.default, tuple):
    return key.default[:1]
  if isinstance(key.default, bool | str):
    return not key.default if isinstance(key.default, bool) else "x"
  return key.default + 1 if isinstance(key.default, int) else key.default / 2 + 0.07


@pytest.mark.parametrize("name", OF_OFF)
def test_a_section_that_is_off_is_as_it_is_by_default(name):
  value = another(KEYS[name])
  with pytest.raises(
    ValueError, match=rf"^{re.escape(f'{name}={value!r}')} has no effect"
  ) as error:
    config_of(common.base, **{name.replace(".", "__"): value})
  assert str(KEYS[name].default).removesuffix(".0") in str(error.value)


@pytest.mark.parametrize("row", checks.DEFAULTS, ids=lambda row: f"{row.keys} {row.when}")
def test_the_keys_of_a_row_are_there(row):
  assert not list(checks._changed(default(), row.keys))
  assert isinstance(checks._holds(default(), row.when), str)
  assert "{" not in row.why.format(when="")


def test_the_keys_of_a_message_are_there():
  assert not any(wrong(default()) for wrong in checks.RELATIONS.values())
  for message in checks.RELATIONS:
    assert "{" not in ranges.told(default(), "", message, it="it")
