"""Configurations: every key has a range and is refused by name; what follows from others."""

import dataclasses
import importlib
import json
import math
import pathlib
import re
import subprocess
import sys
import types
import typing
from typing import Annotated, Literal

import pytest
from support.configs import values_of

from configs import common, tiny_tools
from gspo_jax import config as configuration
from gspo_jax import ranges

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py") if path.stem != "common")
BENCHMARK = "eval.benchmarks.aime"


def values():
  values = common.base()
  values.eval.benchmarks = dict(aime=common.benchmark(samples=2))
  return values.to_dict()


def kinds(kind=configuration.RunConfig, key=""):
  """The declared type of each key, sections included."""
  yield key, kind
  if typing.get_origin(kind) is dict:
    yield from kinds(typing.get_args(kind)[1], BENCHMARK)
  if dataclasses.is_dataclass(kind):
    for name, declared in ranges.kinds(kind).items():
      yield from kinds(declared, f"{key}.{name}".lstrip("."))


KINDS = dict(kinds())
KEYS = [key for key in KINDS if key]


def changed(key, value, given=None):
  result = owner = given or values()
  *path, name = key.split(".")
  for part in path:
    owner = owner[part]
  owner[name] = value
  return result


def outside(limits):
  """The numbers next to a range."""
  yield from limits.excluded
  for bound, way in (limits.low, -1), (limits.high, 1):
    if bound not in limits.excluded and math.isfinite(bound):
      yield bound + way


def wrong(kind):
  """Values that a key of this type must not have."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    return [*wrong(arguments[0]), *map(arguments[0], outside(arguments[1]))]
  if origin is Literal:
    return ["none of them", 3, None]
  if origin is tuple:
    return [3, None, "text", *((value,) for value in wrong(arguments[0]))]
  if origin in (typing.Union, types.UnionType):
    return [value for value in wrong(arguments[0]) if value is not None]
  if dataclasses.is_dataclass(kind) or origin is dict:
    return [3, "text", None]
  return {
    int: ["text", 1.5, True, None],
    float: ["text", True, None, math.nan, math.inf, -math.inf, 10**400],
    bool: ["text", 1, None],
    str: [3, True, None],
  }[kind]


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_is_refused_by_name(key):
  for value in wrong(KINDS[key]):
    with pytest.raises(ValueError, match=rf"{re.escape(key)}[ =.]") as error:
      configuration.from_dict(changed(key, value))
    assert "\n" not in str(error.value), value


SECTIONS = [key for key, kind in KINDS.items() if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_or_missing_key_is_named(section):
  key = f"{section}.no_such_key".lstrip(".")
  with pytest.raises(ValueError, match=f"^unknown config key {re.escape(key)}"):
    configuration.from_dict(changed(key, 1))
  owner = every = values()
  for part in filter(None, section.split(".")):
    owner = owner[part]
  name = next(iter(owner))
  del owner[name]
  with pytest.raises(ValueError, match=re.escape(f"{section}.{name}".lstrip("."))):
    configuration.from_dict(every)


def test_every_number_has_a_range():
  """But for the objective's, whose ranges are those of the losses."""
  of_entries = lambda kind: typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind  # noqa: E731
  without = [key for key, kind in KINDS.items() if of_entries(kind) in (int, float)]
  assert [key for key in without if not key.startswith("objective.")] == []


def test_ranges_say_what_they_allow():
  share = ranges.Range(0, 1, excluded=(0,), also=-1, why="it is a share")
  assert 0.5 in share and 1 in share and -1 in share
  assert not any(value in share for value in (0, 1.1, -0.5, math.nan, -math.inf))
  assert math.nan not in ranges.Range(0)
  assert str(share) == "above 0 and at most 1, or -1: it is a share"


@dataclasses.dataclass(frozen=True)
class Section:
  rate: ranges.PositiveFloat | None
  sizes: tuple[ranges.PositiveInt, ...]
  kind: Literal["a", "b"]


def test_a_section_checks_itself():
  ranges.check(Section(None, (1, 2), "a"), "section")
  for section, message in (
    (Section(0.0, (), "a"), r"section\.rate=0\.0 must be above 0"),
    (Section(1.0, (1, 0), "a"), r"section\.sizes=0 must be at least 1"),
    (Section(1.0, (), "c"), r"section\.kind='c' is not one of a, b"),
  ):
    with pytest.raises(ValueError, match=message):
      ranges.check(section, "section")


COMMAND_LINE = """
import contextlib, io, json, sys
from absl import flags
from gspo_jax import config, main
for argument in json.load(sys.stdin):
  sys.argv = ["main", "--config=configs/eval_suite.py:tiny", "--workdir=none", argument]
  said = io.StringIO()
  try:
    with contextlib.redirect_stderr(said):
      main.parse(sys.argv)
    config.from_dict(main._CONFIG.value.to_dict())
  except (SystemExit, ValueError) as error:
    said.write(str(error))
  print(json.dumps(said.getvalue()))
  for name in list(flags.FLAGS):
    if name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
"""


def flags(kind):
  """Wrong values as they are written on the command line, where any text is a str, 3 is a tuple of
  one, and 1 is a bool."""
  if str in (kind, *typing.get_args(kind)[:1]) or dataclasses.is_dataclass(kind):
    return []
  if typing.get_origin(kind) is tuple:
    return flags(typing.get_args(kind)[0])
  a_bool = lambda value: value is True or (kind is bool and value == 1)  # noqa: E731
  return {str(value) for value in wrong(kind) if value is not None and not a_bool(value)}


def test_the_command_line_refuses_the_same():
  cases = {}
  for key, kind in KINDS.items():
    key = key.replace(BENCHMARK, "eval.benchmarks.math")
    cases |= {f"--config.{key}={flag}": key for flag in flags(kind)}
  for section in SECTIONS:
    key = f"{section}.no_such_key".lstrip(".").replace(BENCHMARK, "eval.benchmarks.math")
    cases[f"--config.{key}=1"] = "no_such_key"
  script = [sys.executable, "-c", COMMAND_LINE]
  done = subprocess.run(
    script, input=json.dumps([*cases]), cwd=ROOT, capture_output=True, text=True, check=True
  )
  said = dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))
  for flag, key in cases.items():
    assert key in said[flag] and "Traceback" not in said[flag], (flag, said[flag])


VARIANTS = [(file, arg) for file in FILES for arg in (None, "tiny")]
VARIANTS = [entry for entry in VARIANTS if entry not in [("tiny", "tiny"), ("tiny_tools", "tiny")]]


@pytest.mark.parametrize("file, arg", VARIANTS)
def test_every_file_is_a_configuration(file, arg):
  given = importlib.import_module(f"configs.{file}").get_config(arg)
  config = configuration.from_dict(given.to_dict())
  assert configuration.from_dict(dataclasses.asdict(config)) == config  # as config.json has it


def test_the_base_is_a_run():
  assert configuration.from_dict(common.base().to_dict()).job == "rl"


def test_an_unknown_variant_is_refused():
  with pytest.raises(ValueError, match="config variant 'tny' is not one of: tiny"):
    importlib.import_module("configs.moe_aime").get_config("tny")


def test_lengths_follow_from_others():
  config = configuration.from_dict(values())
  assert config.sampling.max_new_tokens == 10 and config.data.max_prompt_tokens == 8
  assert config.eval.max_new_tokens == config.reward.overlong_max == 10
  assert config.sft.max_tokens == 18
  assert configuration.from_dict(changed("sampling.max_new_tokens", 12)).eval.max_new_tokens == 12
  assert configuration.from_dict(changed("eval.max_new_tokens", 30)).eval.max_new_tokens == 30
  assert configuration.from_dict(changed("sft.max_tokens", 15)).sft.max_tokens == 15


def test_the_overlong_buffer_is_compared_with_the_length_that_follows():
  given = changed("reward.overlong_weight", 1.0)
  given["reward"]["overlong_buffer"] = 10
  assert configuration.from_dict(given).reward.overlong_max == 10
  given["reward"]["overlong_buffer"] = 11
  with pytest.raises(ValueError, match=r"reward\.overlong_buffer=11.*reward\.overlong_max=10"):
    configuration.from_dict(given)


@pytest.mark.parametrize(
  "key, value, message",
  [
    ("environment.max_turns", 0, r"environment\.max_turns=0"),
    ("environment.max_turn", 1, r"unknown config key environment\.max_turn.*max_turns"),
    ("reward.overlong_weight", 0.5, r"reward\.overlong_weight=0\.5.*environment\.name"),
    ("distributed", True, r"environment\.workers=2.*distributed"),
  ],
)
def test_what_does_not_go_with_an_environment(key, value, message):
  given = values_of(
    tiny_tools.get_config,
    reward__overlong_max=36,
    reward__overlong_buffer=8,
    environment__workers=2,
  )
  assert configuration.from_dict(given).environment.name
  with pytest.raises(ValueError, match=message):
    configuration.from_dict(changed(key, value, given))
