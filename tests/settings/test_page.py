"""docs/keys.md and the defaults: what the declarations give."""

import dataclasses
import pathlib

import pytest

from configs import common
from gspo_jax.settings import page, ranges
from gspo_jax.settings.reading import default, from_dict
from gspo_jax.settings.run import RunConfig

KEYS = page.by_name()


def test_page_of_keys_is_up_to_date():
  committed = pathlib.Path(__file__).parents[2] / "docs" / "keys.md"
  assert committed.read_text(encoding="utf-8") == page.page(), (
    "python -m gspo_jax.settings.page > docs/keys.md"
  )


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_a_meaning_and_a_valid_default(name):
  key = KEYS[name]
  assert key.meaning
  ranges.check_value(key.kind, key.default, name)


def test_base_has_the_declared_defaults():
  base, declared = common.base().to_dict(), dataclasses.asdict(RunConfig())
  assert base["objective"].pop("tuned") == {} and base == declared
  assert from_dict(common.base().to_dict()) == from_dict(declared) == default()
