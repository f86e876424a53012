"""Verdicts on compiled programs, and signs of life while they are compiled."""

import dataclasses
import time

import pytest
from support.configs import config_of

from configs import common
from gspo_jax.aot import verdict
from gspo_jax.aot.compiler import announce
from gspo_jax.aot.programs import make_case
from gspo_jax.aot.search import Search, changed, name_of

ARGUMENTS = ["--config=own file.py"]
COMMAND = "next: python -m gspo_jax.aot '--config=own file.py'"


def row(program, peak, fits=True, **more):
  return dict(program=program, fits=fits, hbm_gib=16.0, peak_gib=peak, held_gib=1.0) | more


def verdict_of(*rows, shards=1, options=(), **changes):
  case = make_case(config_of(common.base, **changes))
  return verdict.lines(rows, case, "v5e:2x2", shards, [*ARGUMENTS, *options])


def test_programs_that_fit_have_room_bounds_and_a_search():
  rows = row("train", 13.0, binds="compute"), row("decode", 9.0, binds="hbm")
  assert verdict_of(*rows) == [
    "verdict: fits v5e:2x2, with 2.0 GiB of 16 left (train)",
    "bound: train by compute, decode by HBM",
    f"{COMMAND} --search",
  ]
  *_, command = verdict_of(row("score", 13.0, binds="interconnect"))
  assert command == f"{COMMAND} --programs=train,decode --search"
  for options in ["--programs", "score"], ["--programs=score"]:
    *_, again = verdict_of(row("score", 13.0, binds="interconnect"), options=options)
    assert again == command
  *_, bound, after = verdict_of(row("train", 13.0))  # A GPU's times are unknown.
  assert bound.startswith("bound: unknown")
  assert after.endswith("python -m gspo_jax.main '--config=own file.py' --workdir=DIR")
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python" in after


def test_a_run_on_gpus_has_the_compiled_slots_and_batch():
  def next_command(*options, **changes):
    case = make_case(config_of(common.base), **changes)
    *_, command = verdict.lines([row("train", 13.0)], case, "a100-40:1", 1, [*ARGUMENTS, *options])
    return command

  run = next_command("--slots=16", slots=16)
  assert run.endswith("gspo_jax.main '--config=own file.py' --config.engine.slots=16 --workdir=DIR")
  compiled = next_command("--slots=16", "--sequences=2", slots=16, sequences=2)
  assert compiled == f"{COMMAND} --slots=16"  # The run's batch was not compiled.


def test_no_change_helps_if_the_arrays_beside_a_program_do_not_fit():
  large = row("score", 2.0, fits=False, held_gib=40.0)
  assert verdict_of(large)[-1] == "next: take a larger topology"


@pytest.mark.parametrize(
  "program, changes, shards, command",
  [
    ("train", dict(rl__microbatches=2), 1, f"{COMMAND} --config.rl.microbatches=4"),
    ("train", dict(), 4096, f"{COMMAND} --config.compute.remat=full"),
    ("train", dict(compute__remat="full"), 4096, "next: take a larger topology"),
    ("decode", dict(engine__slots=64), 8, f"{COMMAND} --config.engine.slots=32"),
    ("decode", dict(engine__slots=64), 64, "next: take a larger topology"),
    ("decode", dict(engine__cache_tokens=8192), 1, f"{COMMAND} --config.engine.cache_tokens=4096"),
    ("decode", dict(engine__cache_tokens=256), 1, "next: take a larger topology"),
    ("publish", dict(), 1, "next: take a larger topology"),
  ],
)
def test_programs_that_do_not_fit_get_the_next_command(program, changes, shards, command):
  rows = row("score", 1.0, binds="hbm"), dict(program=program, fits=False, hbm_gib=16.0)
  lines = verdict_of(*rows, shards=shards, **changes)
  assert lines == [f"verdict: v5e:2x2 is too small for {program}", command]


def test_the_next_command_replaces_flags_of_this_one():
  tight = dict(program="decode", fits=False, hbm_gib=16.0)
  case = dataclasses.replace(make_case(config_of(common.base)), slots=64)
  *_, command = verdict.lines([tight], case, "v5e:2x2", 8, [*ARGUMENTS, "--slots", "64"])
  assert command == f"{COMMAND} --config.engine.slots=32"
  case, tight = make_case(config_of(common.base), sequences=64), tight | dict(program="train")
  *_, command = verdict.lines([tight], case, "v5e:2x2", 8, [*ARGUMENTS, "--sequences=64"])
  assert command == f"{COMMAND} --sequences=32"


def search_of(program, *candidates):
  """Returns a search over a configuration with 64 slots and candidates of (changes, row)."""
  first, search = make_case(config_of(common.base, engine__slots=64)), Search(program, 16.0)
  for changes, found in candidates:
    case = changed(first, **changes)
    search.cases[name_of(program, case)] = case
    search.rows[name_of(program, case)] = found
  return search


def test_a_search_ends_with_a_verdict_on_its_best_settings():
  slow, fast = (row("name", 13.0, binds="hbm", search_s=s, error="") for s in (2.0, 1.0))
  train = search_of("train", ({}, slow), (dict(compute=dict(remat="full")), fast))
  decode = search_of("decode", ({}, slow), (dict(engine=dict(slots=128)), fast))
  options = ["--search", "--slots=64", "--tries=3", *ARGUMENTS]
  command, again = (COMMAND.replace("aot", f"aot {x}--tries=3") for x in ("", "--slots=64 "))
  assert verdict.search_lines([train, decode], "v5e:2x2", options) == [
    "verdict: fits v5e:2x2, with 2.0 GiB of 16 left (train)",
    "bound: train by HBM, decode by HBM",
    f"{command} --config.compute.remat=full --config.engine.slots=128",
  ]
  best = search_of("train", ({}, fast))
  assert verdict.search_lines([best], "v5e:2x2", options)[-1] == again
  apart = ["--search", "--slots", "64", "--tries", "3", *ARGUMENTS]
  assert verdict.search_lines([best], "v5e:2x2", apart)[-1] == again
  large = search_of("decode", ({}, dict(fits=False, error="too large")))
  assert verdict.search_lines([best, large], "v5e:2x2", options) == [
    "verdict: v5e:2x2 is too small for decode, with any settings of the search",
    "next: take a larger topology",
  ]


def test_a_compilation_is_announced_until_its_end(capsys):
  with announce("train", interval=0.01):
    time.sleep(0.1)
  assert capsys.readouterr().err.startswith("train: compiling, 0:00 so far\ntrain: ")
  time.sleep(0.05)
  assert not capsys.readouterr().err
