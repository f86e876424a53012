"""Configurations: every key has a range and is refused by name; what follows from others."""

import dataclasses
import functools
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
from support.configs import VARIANTS, values_of

from configs import common, tiny_tools
from gspo_jax import train
from gspo_jax.inputs import devices
from gspo_jax.settings import other_names, ranges, reading
from gspo_jax.settings import run as configuration
from gspo_jax.settings.reading import from_dict

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARK = "eval.benchmarks.aime"
ENTRIES = {  # An entry of each section of named sections.
  "eval.benchmarks": BENCHMARK,
  "constraints.rewards": "constraints.rewards.extra",
  "constraints.costs": "constraints.costs.length",
}


@functools.cache
def base():
  values = common.base()
  values.eval.benchmarks = dict(aime=common.benchmark(samples=2))
  return values


def values():
  return base().to_dict()


def kinds(kind=configuration.RunConfig, key=""):
  """The declared type of each key, sections included."""
  yield key, kind
  if typing.get_origin(kind) is dict:
    yield from kinds(typing.get_args(kind)[1], ENTRIES[key])
  if dataclasses.is_dataclass(kind):
    for name, declared in ranges.kinds(kind).items():
      yield from kinds(declared, f"{key}.{name}".lstrip("."))


KINDS = dict(kinds())
KEYS = [key for key in KINDS if key]


def changed(key, value):
  result = owner = values()
  *path, name = key.split(".")
  for part in path:
    owner = owner[part]
  owner[name] = value
  return result


def outside(limits):
  """The numbers next to a range, and far from any."""
  yield from limits.excluded
  yield limits.low - 1 if limits.low - 1 != limits.also else limits.low - 2
  yield from (limits.high + 1, 10**20, -(10**20))


FLOATS = [math.nan, math.inf, -math.inf, 1e300, 1e39, 1e-50, -1e-50]  # None of them is a float32.


def wrong(kind):
  """Invalid values of a type."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated and arguments[0] is str:
    return ["none of them", "a:b:c", "a.b", 3, True, None]
  if origin is Annotated:
    return [*wrong(arguments[0]), *map(arguments[0], outside(arguments[1]))]
  if origin is Literal:
    return ["none of them", 3, None]
  if origin is tuple:
    return [3, None, "text", *((value,) for value in wrong(arguments[0]))]
  if origin in (typing.Union, types.UnionType):
    return [value for value in wrong(arguments[0]) if value is not None]
  if kind is dict:
    return [3, "text", None, dict(a={1}), dict(a=float("nan"))]
  if dataclasses.is_dataclass(kind) or origin is dict:
    return [3, "text", None]
  return {
    int: ["text", 1.5, True, None],
    float: ["text", True, None, 10**400, *FLOATS],
    bool: ["text", 1, None],
    str: [3, True, None, "\0", "a\udcff"],
  }[kind]


@pytest.mark.parametrize("key", KEYS)
def test_error_of_an_invalid_value_names_the_key(key):
  """Each key is tested with a third of the values."""
  invalid = wrong(KINDS[key])
  assert_refused(key, invalid[KEYS.index(key) % min(3, len(invalid)) :: 3])


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS)
def test_errors_of_all_invalid_values_name_the_key(key):
  assert_refused(key, wrong(KINDS[key]))


def assert_refused(key, invalid):
  for value in invalid:
    with pytest.raises(ValueError, match=rf"{re.escape(key)}[ =.]") as error:
      from_dict(changed(key, value))
    assert "\n" not in str(error.value), value


SECTIONS = [key for key, kind in KINDS.items() if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("section", SECTIONS)
def test_error_names_an_unknown_or_missing_key(section):
  key = f"{section}.no_such_key".lstrip(".")
  with pytest.raises(ValueError, match=f"^unknown config key {re.escape(key)}"):
    from_dict(changed(key, 1))
  owner = every = values()
  for part in filter(None, section.split(".")):
    owner = owner[part]
  name = next(iter(owner))
  del owner[name]
  with pytest.raises(ValueError, match=re.escape(f"{section}.{name}".lstrip("."))):
    from_dict(every)


@dataclasses.dataclass(frozen=True)
class Careless:
  slots: ranges.PositiveInt
  rates: tuple[float, ...] | None  # No range.


def test_declared_numbers_need_a_range():
  with pytest.raises(TypeError, match=r"Careless\.rates: a number needs a range"):
    ranges.kinds(Careless)
  with pytest.raises(TypeError, match="high"):
    ranges.Range(0)


def test_ranges_describe_their_values():
  share = ranges.Range(0, 1, excluded=(0,), also=-1, reason="it is a share")
  assert 0.5 in share and 1 in share and -1 in share
  assert not any(value in share for value in (0, 1.1, -0.5, math.nan, -math.inf))
  assert 1 - 1e-10 not in ranges.FractionBelowOne.__metadata__[0], "float32 has it as 1"
  assert 0.01 in ranges.Range(0.01, 0.1) and 0.1 in ranges.Range(0.01, 0.1)
  assert 0.01 - 1e-12 not in ranges.Range(0.01, 1) and 0.1 + 1e-12 not in ranges.Range(0, 0.1)
  assert str(share) == "above 0 and at most 1, or -1: it is a share"
  assert str(ranges.Range(1, 2e6)) == "at least 1 and at most 2,000,000"


def test_bounds_are_inside():
  """Also without an equal float32, as the least temperature."""
  for name, kind in KINDS.items():
    for bounds in (x for x in getattr(kind, "__metadata__", ()) if isinstance(x, ranges.Range)):
      for bound in {bounds.low, bounds.high} - {*bounds.excluded}:
        assert bound in bounds, name


@dataclasses.dataclass(frozen=True)
class Section:
  rate: ranges.PositiveFloat | None
  sizes: tuple[ranges.PositiveInt, ...]
  kind: Literal["a", "b"]


def test_check_of_a_section_raises_for_its_fields():
  ranges.check(Section(None, (1, 2), "a"), "section")
  for section, message in (
    (Section(0.0, (), "a"), r"section\.rate=0\.0 must be above 0"),
    (Section(1.0, (1, 0), "a"), r"section\.sizes=0 must be at least 1"),
    (Section(1.0, (), "c"), r"section\.kind='c' is not one of a, b"),
  ):
    with pytest.raises(ValueError, match=message):
      ranges.check(section, "section")


COMMAND_LINE = """
import contextlib, functools, io, json, pickle, sys
from absl import flags
from ml_collections.config_flags.config_flags import ConfigFileFlagParser
from gspo_jax import main
from gspo_jax.settings import run as config
from gspo_jax.cli import flags as config_flag
config_flag.read_config_file = functools.cache(config_flag.read_config_file)
parse = ConfigFileFlagParser.parse
pickled = functools.cache(lambda parser, path: pickle.dumps(parse(parser, path)))
ConfigFileFlagParser.parse = lambda parser, path: pickle.loads(pickled(parser, path))
for argument in json.load(sys.stdin):
  sys.argv = ["main", "--config=configs/eval_suite.py:tiny", "--workdir=none", *argument.split("|")]
  said, code = io.StringIO(), 0
  with contextlib.redirect_stderr(said):
    try:
      main.parse(sys.argv)
      main.read_config(lambda config: config.model)
    except SystemExit as end:
      code = end.code
  print(json.dumps([code, said.getvalue()]))
  for name in list(flags.FLAGS):
    if name.startswith("config."):
      delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
"""


def run_command_line(arguments):
  """Exit code and standard error by argument, up to the start of a run, in one process."""
  process = subprocess.run(
    [sys.executable, "-c", COMMAND_LINE],
    input=json.dumps([*arguments]), cwd=ROOT, capture_output=True, text=True, check=True,
  )  # fmt: skip
  return dict(zip(arguments, map(json.loads, process.stdout.splitlines()), strict=True))


TEXTS = [
  "0",
  "-1",
  "1.5",
  "1" + "0" * 20,
  "1e39",
  "1e-50",
  "nan",
  "-inf",
  "text",
  "",
  "[1",
  "1" * 5000,
]


def allowed(kind, text):
  """Whether the text is a valid value of the type, None if unknown."""
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin in (typing.Union, types.UnionType):
    return allowed(arguments[0], text)
  if origin is Annotated and arguments[0] is not str:
    try:
      return arguments[0](text) in arguments[1]
    except ValueError:
      return False
  return text in arguments if origin is Literal else None  # None: unknown.


def test_command_line_reports_invalid_values_in_one_line():
  """Each key is tested with a third of the texts."""
  cases = {}
  for i, (key, kind) in enumerate(KINDS.items()):
    key = key.replace(BENCHMARK, "eval.benchmarks.math")
    for text in TEXTS[i % 3 :: 3]:
      cases[f"--config.{key}={text}"] = key, allowed(kind, text)
  for section in SECTIONS:
    key = f"{section}.no_such_key".lstrip(".").replace(BENCHMARK, "eval.benchmarks.math")
    cases[f"--config.{key}=1"] = f"unknown config key {key}", False
  refused = 0
  for flag, (code, text) in run_command_line(cases).items():
    key, may = cases[flag]
    assert code in (0, 2) and "Traceback" not in text, (flag, text)
    assert text.count("\n") == (code != 0), (flag, text)
    assert not code or key in text, (flag, text)
    assert may is not False or code == 2, f"{flag} is accepted"
    refused += code == 2
  assert refused > 400


@pytest.mark.parametrize("file, arg", VARIANTS)
def test_every_file_is_a_configuration(file, arg):
  config = from_dict(importlib.import_module(f"configs.{file}").get_config(arg).to_dict())
  assert from_dict(dataclasses.asdict(config)) == config  # The mapping of config.json.


def test_base_is_a_configuration():
  assert from_dict(common.base().to_dict()).job == "rl"


def test_an_unknown_variant_is_refused():
  with pytest.raises(ValueError, match="config variant 'tny' is not one of: tiny"):
    importlib.import_module("configs.moe_aime").get_config("tny")


def test_lengths_of_0_are_derived_from_others():
  config = from_dict(values())
  assert config.sampling.max_new_tokens == 10 and config.data.max_prompt_tokens == 8
  assert config.eval.max_new_tokens == config.reward.overlong_max == 10
  assert config.sft.max_tokens == 18
  assert from_dict(changed("sampling.max_new_tokens", 12)).eval.max_new_tokens == 12
  assert from_dict(changed("eval.max_new_tokens", 30)).eval.max_new_tokens == 30
  assert from_dict(changed("sft.max_tokens", 15)).sft.max_tokens == 15


def test_overlong_buffer_is_checked_against_the_derived_length():
  settings = changed("reward.overlong_weight", 1.0)
  settings["reward"]["overlong_buffer"] = 10
  assert from_dict(settings).reward.overlong_max == 10
  settings["reward"]["overlong_buffer"] = 11
  with pytest.raises(ValueError, match=r"reward\.overlong_buffer=11.*reward\.overlong_max=10"):
    from_dict(settings)


def test_only_rows_of_the_job_must_divide_over_devices():
  sft = dict(sft__batch=60, sft__microbatches=1)
  rl = dict(rl__prompts=2, rl__group_size=2, rl__minibatches=1)

  def config(**changes):
    return from_dict(values_of(common.base, **dict(sft__steps=3) | changes))

  devices.check_devices(config(job="rl", **sft), 8)
  devices.check_devices(config(job="sft", **rl), 8)
  devices.check_devices(config(job="eval", **rl, **sft), 8)
  thirds = dict(rl__prompts=6, rl__group_size=3, rl__minibatches=3)
  cases = (sft, "sft.batch", 8), (rl, "rl.prompts", 4), (thirds, "rl.prompts", 24)
  for changes, key, unit in cases:
    message = f"^{key}.* do not divide over the 8 devices .*: set {key} to a multiple of {unit}$"
    with pytest.raises(ValueError, match=message):
      devices.check_devices(config(job="sft+rl", **changes), 8)


def test_conversations_share_no_prompts():
  tools = values_of(tiny_tools.get_config)
  assert from_dict(values_of(common.base)).shares_prompts
  for settings in (
    tools,
    values_of(common.base, rl__packed=True, rl__microbatches=2),
    values_of(common.base, job="eval"),
  ):
    assert not from_dict(settings).shares_prompts


@pytest.mark.parametrize(
  "best",
  [
    *("eval/accuracy", "eval/aime/pass@2/low", "eval/verifier/right", "reward/mean"),
    *("eval/reward/mean", "eval/aime/reward/mean"),
  ],
)
def test_best_checkpoint_accepts_any_metric(best):
  base = common.base()
  base.eval.benchmarks = dict(aime=common.benchmark(samples=8, pass_at=(2,)))
  config = from_dict(values_of(lambda: base, checkpoint__best=best))
  assert config.checkpoint.best == best


@pytest.mark.parametrize("limit", [-3.0, 0.0, 50.0])
def test_limit_of_a_function_has_any_range(limit):
  cost = dict(bound="at_most", signal="my_module:judge", limit=limit)
  entries = {f"constraints__costs__length__{key}": value for key, value in cost.items()}
  config = from_dict(values_of(common.base, reward__workers=1, **entries))
  assert config.constraints.active_costs["length"].limit == limit


def test_unknown_best_metric_ends_the_first_iteration():
  train.check_best("eval/accuracy", {"step": 0, "eval/accuracy": 0.5}, evaluated=True)
  train.check_best("eval/accuracy", {"step": 1, "reward/mean": 0.5}, evaluated=False)
  train.check_best("reward/mean", {"step": 0, "eval/accuracy": 0.5}, evaluated=True)
  for best, step, near in ("reward/men", 1, "reward/mean"), ("eval/tool_us", 0, "eval/tool_use"):
    message = f"best='{best}' is no metric of this run; did you mean {near}"
    with pytest.raises(ValueError, match=message):
      train.check_best(best, {"step": step, near: 0.5}, evaluated=True)


def test_other_libraries_names_lead_to_keys():
  for name, keys in other_names.KEYS.items():
    assert all(reading.kind_of(key) for key in keys.split()), name
    assert f"did you mean {keys.replace(' ', ' or ')}?" in reading.unknown_key_message("", name, ())
  sections = ranges.kinds(configuration.RunConfig)
  for name, keys in (
    ("actor_rollout_ref.rollout.n", "rl.group_size"),
    ("actor_rollout_ref.rollout.temperature", "sampling.temperature or eval.temperature"),
    ("rewards.name", "reward.name"),
    ("tokeniser", "tokenizer"),
  ):
    assert f"did you mean {keys}?" in reading.unknown_key_message("", name, sections)
