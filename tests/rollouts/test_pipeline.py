"""Batches that are collected ahead: which weights sample them, on one mesh and on two, and that a
run which is interrupted goes on as if nothing had happened."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rollouts.test_partial_rollouts import surplus
from support.cases import long
from support.rollouts import (
  MODEL,
  OTHER,
  PARAMS,
  Counting,
  alternating,
  assert_same,
  collector,
  groups,
  iterate,
)

from gspo_jax import sharding
from gspo_jax.learner.batch import optional_fields, place, sample_arrays
from gspo_jax.learner.passes import learner_of, log_probs
from gspo_jax.models import publication, transformer
from gspo_jax.rollouts import pipeline
from gspo_jax.rollouts.groups import Group, filled
from gspo_jax.rollouts.pipeline import Pipeline, read
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.sampling import SingleTurn
from gspo_jax.settings.mesh import MeshConfig, RolloutMeshConfig
from gspo_jax.system import preemption

LAST = 6
WHOLE = dict(extra_prompts=0)  # iterations end with all of their responses


def elsewhere():
  """A mesh of a device that nothing else is on, and what brings weights there."""
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[-1:])
  layout = transformer.shardings(MODEL, sharding.ROLLOUT, mesh)
  read = transformer.dtypes(MODEL, "float32")
  return dict(mesh=mesh, publish=publication.publisher_to(layout, read))


ARRANGEMENTS = dict(one_mesh=dict, two_meshes=elsewhere)


def opened(
  lag, arrangement=dict, made=None, last=0, workdir=None, record=False, replay="", **changes
):
  """A pipeline around a collector, which comes with its engine."""
  made, engine = made or collector(**changes)
  more = dict(lag=lag, iterations=LAST, record=record, replay=replay)
  rl = dataclasses.replace(made.config.rl, **more)
  batches = Path(workdir or "nowhere") / "batches"
  return Pipeline(made, engine, rl, Stopwatch(), last, batches=batches, **arrangement())


def train(sampling, first=1, last=LAST):
  """Batches of the iterations of a run that has alternating weights in the place of updates."""
  sampling.publish(alternating(first), first)
  out = []
  for step in range(first, last + 1):
    out.append(sampling.next(step))
    sampling.release()
    sampling.publish(alternating(step + 1), step + 1)
  return out


@pytest.mark.parametrize(
  "arrangement", ["one_mesh", pytest.param("two_meshes", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("lag", [*long((0, 1)), 3])
def test_weights_are_as_old_as_the_lag_says(lag, arrangement):
  """Those that a collector has that is told the version of each iteration."""
  collecting, engine = collector(**WHOLE)
  with opened(lag, ARRANGEMENTS[arrangement], **WHOLE) as sampling:
    out = train(sampling)
  for step, batch in enumerate(out, 1):
    version = max(1, step - lag)
    engine.load(alternating(version), version)
    assert_same(batch, collecting.collect(step, Stopwatch(), version))
    assert set(batch.rollout.version[batch.rollout.mask > 0]) == {version}


@pytest.mark.parametrize(
  "arrangement", ["one_mesh", pytest.param("two_meshes", marks=pytest.mark.long)]
)
def test_a_response_that_is_carried_over_goes_on_under_newer_weights(arrangement):
  """In-flight updates at counted points: each token has its version, and is of these weights."""
  lag = 2
  with opened(lag, ARRANGEMENTS[arrangement]) as sampling:
    out = train(sampling)
  mixed = 0
  for batch in out:
    assert batch.version == max(1, batch.step - lag)
    for row in batch.rollout.version:
      versions = row[row >= 0]
      assert (np.diff(versions) >= 0).all() and versions.max() <= batch.version
      mixed += len(set(versions)) > 1
    newest = batch.rollout.version.max()
    stale = batch.rollout.version[batch.rollout.mask > 0] < batch.version
    assert newest <= batch.version and batch.metrics["partial/stale_tokens"] == stale.mean()
  assert mixed > 3
  if arrangement == "two_meshes":
    with opened(lag) as sampling:
      for mine, same in zip(out, train(sampling), strict=True):
        assert_same(mine, same)


def test_what_is_left_over_is_no_more_than_half_of_a_batch_while_versions_stand_still():
  """The first batches are all of the first weights: what one leaves is old for the next."""
  collecting, old = surplus(6, extra_prompts=8)
  collecting[0]._batches.take(8)  # their prompts
  with opened(3, made=collecting) as sampling:
    out = train(sampling)
  counts = [sum(group.prompt.id in old for group in batch.groups) for batch in out]
  assert counts == [2, 2, 2, 0, 0, 0] and all(batch.usage.tokens > 0 for batch in out)
  assert out[1].version == 1 and out[1].metrics["partial/finished_groups"] <= 4


CASES = dict(
  whole=WHOLE,
  partial={},
  rounds=dict(extra_rounds=2, extra_prompts=0),
  turns=dict(environment=Counting, extra_prompts=3),
)


@pytest.mark.parametrize(
  "case",
  [
    *("whole", "turns"),
    *long(("partial", "rounds")),
  ],
)
def test_a_checkpoint_has_what_was_collected_and_not_trained_on(case):
  options, lag, cut = CASES[case], 2, 2
  with opened(lag, **options) as sampling:
    before = train(sampling, last=cut)
    position = sampling.position()
    expected = before + train(sampling, first=cut + 1)
  state = json.loads(json.dumps(position()))  # what was remembered has not gone on
  assert [batch["step"] for batch in state["ahead"]] == [3, 4]
  again = opened(lag, last=cut, **options)
  again.set_position(state)
  with again as sampling:
    after = train(sampling, first=cut + 1)
  assert len(after) == LAST - cut
  for mine, same in zip(before + after, expected, strict=True):
    assert_same(mine, same)


def test_recorded_batches_are_trained_on_again(tmp_path):
  with opened(2, workdir=tmp_path, record=True) as sampling:
    out = train(sampling)
  batches = tmp_path / "batches"
  with opened(2, replay=str(batches)) as sampling:
    again = train(sampling)
  for mine, same in zip(again, out, strict=True):
    assert_same(mine, same)
  (batches / "000003.json").write_text('{"step": 3}')
  (batches / "000004.json").unlink()
  with opened(2, replay=str(batches)) as sampling:
    train(sampling, last=2)
    for step, why in {
      3: "is no batch of this configuration",
      4: "cannot be read: No such file",
    }.items():
      with pytest.raises(ValueError, match=rf"rl\.replay: .*{step:06d}\.json {why}"):
        sampling.next(step)


def test_every_response_replays_the_experts_that_its_own_prompt_had():
  """Servers take new weights while a group is sampled, so its prompt has other experts for some."""
  old, new = (iterate(1, weights=lambda _, p=p: p, routing=True, **WHOLE) for p in (OTHER, PARAMS))
  (collecting, _), first, second = new[1], old[0][0].groups, new[0][0].groups
  for group, newer in zip(first, second):
    assert group.prompt == newer.prompt
    group.trajectories[1:] = newer.trajectories[1:]
  config = collecting.config
  config = dataclasses.replace(
    config,
    rl=dataclasses.replace(config.rl, lag=2),
    objective=dataclasses.replace(config.objective, replay="R3"),
  )
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  mixed = dataclasses.replace(new[0][0], groups=first, rollout=collecting.rollout(first))
  score = jax.jit(lambda inputs: log_probs(PARAMS, inputs, learner_of(config, "rl"), "R3")[0])
  with jax.set_mesh(mesh):
    for batch in place(config, mesh, mixed):
      alone = score(batch.inputs.replace(prompt_B=None))
      result, alone = (np.where(batch.mask_BT > 0, x, 0) for x in (score(batch.inputs), alone))
      np.testing.assert_allclose(result, alone, atol=1e-5)


@pytest.mark.parametrize(
  "section, changes, message",
  [
    ("objective", dict(advantage="none"), r"estimator of advantages=std, this run has none"),
    ("sampling", dict(temperature=0.5), r"sampling\.temperature=1\.0, this run has 0\.5"),
    ("rl", dict(mask_truncated=True), r"rl\.mask_truncated=False, this run has True"),
  ],
)
def test_a_batch_with_other_log_probs_or_advantages_is_not_replayed(
  section, changes, message, tmp_path
):
  with opened(2, workdir=tmp_path, record=True) as sampling:
    train(sampling, last=1)
  collector = opened(2)._collector
  changed = dataclasses.replace(getattr(collector.config, section), **changes)
  collector.config = dataclasses.replace(collector.config, **{section: changed})
  with pytest.raises(ValueError, match=rf"1\.json is no batch .*: it was recorded with {message}"):
    read(tmp_path / "batches", 1, collector)


@pytest.mark.parametrize("wrong", [dict(prompts=2), dict(group_size=2)])
def test_a_batch_of_another_size_is_not_gone_on_with(wrong, tmp_path):
  with opened(2, workdir=tmp_path, record=True, **WHOLE) as sampling:
    train(sampling, last=2)
    state = sampling.position()()
  again = opened(2, last=2, **WHOLE)
  collecting = again._collector
  rl = dataclasses.replace(collecting.config.rl, **wrong)
  collecting.config = dataclasses.replace(collecting.config, rl=rl)
  message = r"4 groups of 3 responses do not fit rl\.prompts=\d and rl\.group_size=\d: set"
  with pytest.raises(ValueError, match=f"has a batch that is not trained on yet: {message}"):
    again.set_position(state)
  file = r"rl\.replay: \S*1\.json is no batch of this configuration"
  with pytest.raises(ValueError, match=f"{file}: {message}"):
    read(tmp_path / "batches", 1, collecting)


@pytest.mark.parametrize("lag, versions", [(0, [1, 2, 5, 6]), (1, [1, 2, 4, 5]), (3, [1, 2, 3, 3])])
def test_another_lag_goes_on_with_what_is_there(lag, versions):
  """From 2: more is begun at once; or batches that are further ahead are trained on first."""
  with opened(2, **WHOLE) as sampling:
    train(sampling, last=2)
    state = sampling.position()()
  again = opened(lag, last=2, **WHOLE)
  again.set_position(state)
  with again as sampling:
    result = [batch.version for batch in train(sampling, first=3)]
  assert result == versions


@pytest.mark.parametrize("made_by", [dict(lag=2, extra_prompts=0), dict(lag=0, token_budget=40)])
def test_tokens_of_older_weights_are_not_compared_as_current_without_a_lag(made_by):
  """A run without one meets some where it goes on with another run, or trains on its record."""
  with opened(**made_by) as sampling:
    out = train(sampling)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  plain = collector(**WHOLE)[0].config
  assert not (plain.rl.lag or plain.rl.partial)
  compared, current = [], []
  for collected in out:
    rollout = collected.rollout
    batches = place(plain, mesh, collected)
    currents = [b.metric_inputs.current_BT for b in batches]
    masks = [b.mask_BT * (1 if x_BT is None else x_BT) for b, x_BT in zip(batches, currents)]
    compared.append(sum(int(mask_BT.sum()) for mask_BT in masks))
    current.append(int((rollout.version == collected.step).sum()))
    assert (currents[0] is None) == (current[-1] == rollout.lengths.sum())
  assert compared == current and min(current) < max(current)


def test_without_a_lag_a_checkpoint_is_what_it_was():
  collecting, engine = collector()
  with opened(0, made=(collecting, engine)) as sampling:
    train(sampling, last=2)
    mine = sampling.position()()
  _, (same, _) = iterate(2, weights=alternating)
  assert mine == same.position()() | dict(temperature=1.0)


@pytest.mark.parametrize("lag, extra_prompts", [(0, 0), (0, 4), (1, 0)])
def test_a_checkpoint_with_responses_keeps_their_temperature(lag, extra_prompts):
  options = dict(extra_prompts=extra_prompts)
  with opened(lag, made=collector(**options)) as sampling:
    train(sampling, last=2)
    state = json.loads(json.dumps(sampling.position()()))
  refused = pytest.raises(ValueError, match=r"responses of sampling\.temperature=1\.0, and")
  with (
    opened(lag, made=collector(**options, sampling__temperature=0.5)) as sampling,
    refused if lag or extra_prompts else contextlib.nullcontext(),
  ):
    sampling.set_position(state)


def test_a_scored_group_survives_a_checkpoint():
  """With its verdicts, also those that are missing, and rows of padding."""
  (group,) = groups(a=[1, 0, 1])
  group.unknown = {1: "timeout"}
  group.signals = dict(length=np.float32([3, 0.1, 3]))
  group.value_G = np.float32([0.1, 0, 0.9])
  group = filled(group, 5)
  state = json.loads(json.dumps(group.get_state()))
  again = Group.from_state(state, lambda prompt: SingleTurn(prompt.tokens))
  for field in ("reward_G", "correct_G", "value_G", "known_G"):
    mine, theirs = getattr(again, field), getattr(group, field)
    assert mine.dtype == theirs.dtype and mine.tolist() == theirs.tolist()
  assert again.unknown == group.unknown and again.responses == group.responses
  assert again.signals["length"].tolist() == group.signals["length"].tolist()
  assert again.mixed == group.mixed and again.prompt == group.prompt
  for mine, theirs in zip(again.trajectories, group.trajectories, strict=True):
    assert mine.prompt == theirs.prompt and mine.stopped == theirs.stopped
    assert mine.tag == group.prompt.id  # what is wrong with it later names it
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)


def sampler_threads():
  return [thread for thread in threading.enumerate() if thread.name.startswith("sampler")]


@pytest.mark.parametrize("longest", [20, 32])
def test_a_saved_batch_of_turns_fits_another_row_length(longest):
  options = dict(environment=Counting, objective__name="gspo_token", extra_prompts=0)
  (batch,), _ = iterate(1, **options)
  state = json.loads(json.dumps(pipeline.get_state(batch)))
  used = int(batch.rollout.ends.max()) - 3
  running, _ = collector(**options, sampling__max_new_tokens=max(longest, used))
  restored = pipeline.from_state(state, running)
  assert restored.advantage_BL.shape == restored.rollout.tokens.shape
  expected, actual = (x.advantage_BL[x.rollout.mask > 0] for x in (batch, restored))
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("loss", ["gspo", "gspo_token"])
def test_the_samples_log_has_the_advantages_of_the_loss(loss):
  (batch,), (running, _) = iterate(1, environment=Counting, objective__name=loss)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    batches = place(running.config, mesh, batch)
    zeros = [dict(log_ratio_BT=np.zeros(x.mask_BT.shape, np.float32)) for x in batches]
    arrays = sample_arrays(running.config, batch.rollout, batches, zeros)
  if loss == "gspo":  # It takes one advantage per response, `advantage_PG`.
    assert not {"advantage_B", "advantage_BT"} & arrays.keys()
    return
  mask_BL = batch.rollout.mask > 0
  for logged, advantage, mask in zip(arrays["advantage_BT"], batch.advantage_BL, mask_BL):
    np.testing.assert_allclose(logged[: len(mask)][mask], advantage[mask], rtol=1e-6)


def test_a_critic_has_the_rewards_of_turns_with_any_estimator_on_the_host():
  options = dict(environment=Counting, objective__name="ppo_clip", critic__name="head")
  (batch,), (running, _) = iterate(1, **options)
  whole = dataclasses.replace(batch, advantage_BL=None)  # As of an estimator of whole responses.
  fields = [optional_fields(running.config, x, x.rollout) for x in (batch, whole)]
  np.testing.assert_array_equal(fields[0]["reward_BT"], batch.rollout.rewards)
  np.testing.assert_array_equal(fields[1]["reward_BT"], batch.rollout.rewards)


def test_what_fails_in_the_thread_is_raised_where_the_batch_is_missed():
  collecting, engine = collector(**WHOLE)
  judge, steps = collecting._score_groups, []

  def fails(groups):
    steps.append(len(steps) + 1)
    if len(steps) == 3:
      raise ValueError("the third batch is broken")
    return judge(groups)

  collecting._score_groups = fails
  with opened(2, elsewhere, (collecting, engine)) as sampling:
    assert [batch.step for batch in train(sampling, last=2)] == [1, 2]
    with pytest.raises(ValueError, match="the third batch is broken"):
      sampling.next(3)
    with pytest.raises(preemption.Preempted):  # what comes after it would be no batch of this run
      sampling._jobs[0].result()
    with pytest.raises(preemption.Preempted):
      sampling.position()()
  assert steps == [1, 2, 3] and not sampler_threads()


class Slow:
  """An engine that waits in each step for leave to go on."""

  def __init__(self, engine):
    self._engine, self.go, self.steps = engine, threading.Event(), 0

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def step(self):
    preemption.check()
    self.steps += 1
    assert self.go.wait(60)
    return self._engine.step()


def test_a_notice_ends_the_wait_and_what_was_begun_is_saved():
  """The batches that were begun are finished for the checkpoint: the weights that they are sampled
  with are in none."""
  with opened(1, **WHOLE) as sampling:
    expected = train(sampling)
  collecting, engine = collector(**WHOLE)
  slow = Slow(engine)
  collecting._engine = slow
  with (
    pytest.raises(preemption.Preempted),  # as at every check
    preemption.watch(grace_s=60),
    opened(1, elsewhere, (collecting, slow)) as sampling,
  ):
    sampling.publish(alternating(1), 1)
    position = sampling.position()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(preemption.Preempted):
      sampling.next(1)
    unfinished = sampling.position()
    slow.go.set()
    state = json.loads(json.dumps(unfinished()))
    assert "ahead" not in position()  # where it stood before the iteration
  assert [batch["step"] for batch in state["ahead"]] == [2]  # the first was being waited for
  again = opened(1, last=1, **WHOLE)
  again.set_position(state)
  with again as sampling:
    for mine, same in zip(train(sampling, first=2), expected[1:], strict=True):
      assert_same(mine, same)


class Away(Slow):
  """One that is beside the trainer and has to be found again, by whom a notice ends."""

  loads_beside_steps = True

  def load(self, params, version):
    preemption.check()
    self._engine.load(params, version)

  def revive(self):
    preemption.check()
    self.go.set()


def test_a_notice_while_weights_are_published_is_left_to_the_next_check():
  """What is to be saved is the state that they are of, with the batches that were begun."""
  collecting, engine = collector(**WHOLE)
  away = Away(engine)
  collecting._engine = away
  with (
    pytest.raises(preemption.Preempted),  # as at every check
    preemption.watch(grace_s=600),
    opened(1, made=(collecting, away)) as sampling,
  ):
    sampling.publish(alternating(1), 1)
    sampling._jobs.append(sampling._begin(1))
    os.kill(os.getpid(), signal.SIGTERM)
    sampling.publish(alternating(2), 2)
    state = sampling.position()()
    with pytest.raises(preemption.Preempted):
      preemption.check()
  assert [batch["step"] for batch in state["ahead"]] == [1]


def test_nothing_goes_on_after_the_end():
  collecting, engine = collector(**WHOLE)
  slow = Slow(engine)
  collecting._engine = slow
  with pytest.raises(KeyboardInterrupt), opened(2, elsewhere, (collecting, slow)) as sampling:
    sampling.publish(alternating(1), 1)
    sampling._jobs.append(sampling._begin(1))
    sampling._jobs.append(sampling._begin(2))
    while not slow.steps:
      time.sleep(0.01)
    threading.Timer(0.2, slow.go.set).start()
    raise KeyboardInterrupt
  assert not sampler_threads() and slow.steps <= 2


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_evaluation_has_the_weights_of_now_to_itself(arrangement):
  with opened(2, ARRANGEMENTS[arrangement], **WHOLE) as sampling:
    before = train(sampling, last=2)
    with sampling.engine() as engine:
      assert engine._version == 3 and not engine.busy
      if arrangement == "two_meshes":
        assert all(job.done() for job in sampling._jobs)
    after = train(sampling, first=3)
  with opened(2, **WHOLE) as sampling:
    for mine, same in zip(before + after, train(sampling), strict=True):
      assert_same(mine, same)


def test_the_sampler_has_stages_of_its_own():
  with opened(1, elsewhere, **WHOLE) as sampling:
    row = train(sampling)[-1].metrics
  beside = {name for name in row if name.startswith("time/sampler/")}
  names = "sample score load wait_for_learner".split()
  assert beside == {f"time/sampler/{name}" for name in names}
  assert row["time/sampler/sample"] > 0 and "time/wait_for_sampler" in sampling._stages.lap()


DEVICES = list(range(8))


@pytest.mark.parametrize(
  "mesh, rollout, expected",
  [
    ((1, -1, 1, 1), (1, 0, 1, 1), (8, 0)),
    ((1, -1, 1, 1), (1, 2, 1, 1), (6, 2)),
    ((1, 4, 1, 1), (1, -1, 1, 1), (4, 4)),
    ((2, 2, 1, 1), (1, 1, 1, 2), (4, 2)),
  ],
)
def test_the_trainer_has_the_first_devices(mesh, rollout, expected):
  total = MeshConfig(*mesh), RolloutMeshConfig(*rollout)
  trainer, sampler = sharding.make_meshes(*total)
  if not expected[1]:
    assert sampler is trainer and trainer.size == 8
    return
  first, others = (list(m.devices.flat) for m in (trainer, sampler))
  assert (len(first), len(others)) == expected
  assert sorted(first + others, key=lambda d: d.id) == jax.devices()[: sum(expected)]
  assert max(d.id for d in first) < min(d.id for d in others)


@pytest.mark.parametrize(
  "mesh, rollout, message",
  [
    ((1, -1, 1, 1), (-1, 1, 1, 1), "mesh.fsdp=-1.*rollout_mesh.data=-1.*one size may be -1"),
    ((1, -1, 1, 1), (1, 8, 1, 1), "have 0 and 8 devices, but 8 exist"),
    ((1, 6, 1, 1), (1, 3, 1, 1), "rollout_mesh.fsdp=3.*have 6 and 3 devices, but 8 exist"),
    ((1, 6, 1, 1), (-1, 4, 1, 1), "rollout_mesh.data=-1"),
  ],
)
def test_meshes_that_are_not_there_are_refused(mesh, rollout, message):
  total = MeshConfig(*mesh), RolloutMeshConfig(*rollout)
  with pytest.raises(ValueError, match=message):
    sharding.make_meshes(*total)
