"""The estimate of an iteration, on cases that can be calculated by hand."""

import math

import numpy as np
import pytest

from configs import moe_aime
from gspo_jax import sharding
from gspo_jax.aot import iteration, programs
from gspo_jax.aot.lengths import Lengths, default_mean
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.reading import from_dict


def test_lengths_have_the_mean_that_was_asked_for():
  for lengths in (Lengths(8192, 30_720), Lengths(100, 10_000), Lengths(29_000, 30_720)):
    actual = np.array(lengths.sample(20_000))
    assert actual.max() <= lengths.most and actual.min() >= 1
    assert actual.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert (actual.astype(float) ** 2).mean() == pytest.approx(lengths.mean_square, rel=0.02)
  assert set(Lengths(24, 24).sample(5)) == {24}
  assert Lengths(24, 24).filled(10) == 10 + 12
  # Memoryless and hardly ever cut off, E[L²] is 2 E[L]²: a slot is a whole mean length long.
  assert Lengths(100, 100_000).filled(7) == pytest.approx(107)
  assert default_mean(30_720) == 8192 and default_mean(24) == 12
  with pytest.raises(ValueError, match="--mean_response=25"):
    Lengths(25, 24)


def test_steps_are_those_of_the_slot_that_is_done_last():
  lengths = [3, 1, 4, 1, 5]
  # two slots: 3+1, 1+4, and 5 after the one that is free at step 4
  assert iteration.decode_steps(lengths, 2) == 9
  assert iteration.decode_steps(lengths, 5) == iteration.decode_steps(lengths, 9) == 5
  assert iteration.decode_steps(lengths, 2, tail=False) == 7  # 14 tokens, two at a time


def test_slots_that_are_not_in_use_read_no_pages():
  # Ten steps of which all slots are busy in four: the other six have nothing but the weights.
  assert iteration.decode_seconds(10, 4, dict(serial_s=5.0, idle_s=2.0)) == 4 * 5 + 6 * 2
  assert iteration.decode_seconds(10, 4, dict(serial_s=5.0)) == 50  # rows of whole windows


def test_packed_rows_are_those_that_the_learner_fills():
  # On each of two devices: 6 + 4, 5 + 5 in rows of 10; one row of each at once.
  lengths = np.array([6, 6, 5, 5, 5, 5, 4, 4])
  assert iteration.packed_microbatches(lengths, 10, 2, 1) == 2
  assert iteration.packed_microbatches(lengths, 10, 2, 2) == 1
  assert iteration.packed_microbatches(np.array([10, 10, 10, 10]), 10, 2, 1) == 2


def flagship(changes=None, /, **rl):
  config = moe_aime.get_config("tiny")
  config.sampling.max_new_tokens = 24
  config.data.max_prompt_tokens = 8
  config.rl.update(rl)
  config.update(changes or {})
  return from_dict(config.to_dict())


SIZES = dict(prompts=16, group_size=8, minibatches=4, microbatches=2, packed=False)


def test_an_iteration_is_the_sum_of_its_parts():
  config = flagship(**SIZES)
  case = programs.make_case(config, slots=64, mean_response=24)  # all of them are cut off
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  seconds = dict(train=10.0, score=3.0, publish=1.0, prefill=0.5, decode=0.25)
  rows = {name: dict(serial_s=s, binds="hbm") for name, s in seconds.items()}
  actual = iteration.estimate(case, mesh, 8, rows)
  assert actual.tokens == 128 * 24
  parts = {part.name: (part.calls, part.seconds) for part in actual.parts}
  assert parts["decode"] == (48, 12.0)  # two rounds of 64 slots, 24 steps each
  assert parts["train"] == (4, 40.0)
  assert parts["publish"] == (1, 1.0)
  # 64 slots are 8 of a device, one group: 16 prompts take two calls of 8 devices.
  assert parts["prefill"] == (2, 1.0)
  scored = parts.get("score", (0, 0.0))[1]
  assert actual.seconds == 54 + scored
  assert actual.speed == actual.tokens / actual.seconds / 8
  assert actual.binds.name == "train"
  again = programs.make_case(flagship(**SIZES, epochs=3), slots=64, mean_response=24)
  parts = {part.name: part.calls for part in iteration.estimate(again, mesh, 8, rows).parts}
  assert (parts["train"], parts["decode"]) == (12, 48)
  text = "train takes most of the time, bound by hbm"
  assert any(text in line for line in iteration.lines(actual, case))


def test_recorded_responses_are_not_sampled():
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  rows = {name: dict(serial_s=1.0, idle_s=0.5, binds="hbm") for name in programs.PROGRAMS}

  def decoded(fresh):
    objective = dict(name="rft", old_logp="recompute", volatility=False)
    offline = dict(job="offline", offline=dict(data="x", fresh=fresh), objective=objective)
    config = flagship(offline, **SIZES)
    case = programs.make_case(config, slots=64, mean_response=24)
    actual = iteration.estimate(case, mesh, 8, rows)
    assert iteration.lines(actual, case)
    return {part.name: (part.calls, part.seconds) for part in actual.parts}.get("decode")

  assert decoded(0.5) == (24, 24.0)
  assert decoded(0.25) == (12, 12.0)
  assert decoded(0.0) is None


def test_a_microbatch_has_a_row_of_each_device_at_least():
  config = flagship(prompts=16, group_size=4, minibatches=4, microbatches=4, packed=True)
  case = programs.make_case(config, 8, 32)
  lengths = case.lengths.sample(64)
  assert iteration.positions(case, lengths, 8) % (8 * 32) == 0  # 16 rows / 4, and 8 devices


def test_short_responses_leave_packed_microbatches_out():
  config = flagship(prompts=16, group_size=8, minibatches=2, microbatches=4, packed=True)
  mesh = sharding.make_mesh(MeshConfig(1, 2, 4, 1))
  rows = {name: dict(serial_s=1.0, binds="hbm") for name in programs.PROGRAMS}

  def updates(mean):
    case = programs.make_case(config, mean_response=mean, mean_prompt=4)
    actual = {part.name: part.calls for part in iteration.estimate(case, mesh, 8, rows).parts}
    return actual["train"]

  # 64 sequences on 8 devices: of 28 positions each has a row of 32 of its own, 8 rows in 4
  # micro-batches; of 8 positions in the mean, about a quarter of that.
  assert updates(24) == 2.0
  assert updates(4) <= 1.0
  assert math.isclose(updates(4) % 0.25, 0)  # whole micro-batches, two updates
