"""Responses that are carried over iterations are the ones that would have been sampled at once."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from gspo_jax import minibatches, partial
from gspo_jax.models import transformer
from gspo_jax.models.sizes import REFERENCE, tiny_dense
from gspo_jax.sampling import SamplingConfig, Usage, generate
from gspo_jax.sampling.requests import DEFAULT
from gspo_jax.structs import Prompt, TrainBatch

MODEL = dataclasses.replace(
  tiny_dense(64), hidden_size=32, num_layers=2, num_heads=2, head_dim=16, intermediate_size=48
)
PARAMS, OTHER = (transformer.init(MODEL, jax.random.key(i)) for i in range(2))
STOP = (1, 2, 3, 4)
NEW = 24


def context(**changes):
  rl = dict(prompts=4, group_size=3, extra_prompts=4, token_budget=0, minibatches=2) | changes
  config = SimpleNamespace(
    model=MODEL,
    compute=REFERENCE,
    rl=SimpleNamespace(**rl),
    data=SimpleNamespace(max_prompt_tokens=4),
    sampling=SamplingConfig(1.0, 0, 1.0, 0.0, NEW),
    engine=dataclasses.replace(DEFAULT, slots=6, steps=2),
  )
  tokenizer = SimpleNamespace(stop_ids=STOP, pad_id=0)
  return SimpleNamespace(config=config, tokenizer=tokenizer, seed=lambda *names: 100 + names[-1])


def prompts():
  number = 0
  while True:
    number += 1
    yield Prompt(str(number), "q", "a", (8 + number % 50, 9, 10), info=(("rating", "7"),))


def iterate(
  steps, params=lambda step: PARAMS, in_flight=None, source=None, first=1, born=None, **changes
):
  """Prompts and rollout of each iteration, and what is under way after the last."""
  in_flight, source = in_flight or partial.InFlight(), source or prompts()
  born = {} if born is None else born  # iteration in which a prompt was drawn
  out = []

  def take(count):
    drawn = [next(source) for _ in range(count)]
    born.update({prompt.id: step for prompt in drawn})
    return drawn

  for step in range(first, first + steps):
    usage = Usage()
    out.append((*in_flight.sample(context(**changes), params(step), take, usage, step), usage))
  return out, in_flight


CASES = [dict(), dict(extra_prompts=0, token_budget=90), dict(extra_prompts=9, token_budget=120)]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_with_the_same_weights_they_are_those_of_one_go(changes):
  born, carried = {}, 0
  out, _ = iterate(6, born=born, **changes)
  for done, rollout, _ in out:
    for i, prompt in enumerate(done):
      mine = range(3 * i, 3 * i + 3)
      whole = generate(
        PARAMS, MODEL, [prompt.tokens], group_size=3, max_new_tokens=NEW, stop_ids=STOP,
        seed=100 + born[prompt.id], prompt_length=4,
      )  # fmt: skip
      for row in mine:
        assert rollout.response(row) == whole.response(row - 3 * i)
        assert rollout.stopped[row] == whole.stopped[row - 3 * i]
        sampled = rollout.mask[row] > 0
        np.testing.assert_allclose(
          rollout.logp[row][sampled],
          whole.logp[row - 3 * i][whole.mask[row - 3 * i] > 0],
          atol=1e-5,
        )
        versions = rollout.version[row][sampled]
        assert (np.diff(versions) >= 0).all()
        carried += versions.min() < versions.max()
      assert (rollout.version[rollout.mask == 0] == -1).all()
  assert carried > 3
  ids = [prompt.id for done, _, _ in out for prompt in done]
  assert len(ids) == len(set(ids))


def test_every_token_has_the_log_prob_of_the_weights_that_sampled_it():
  weights = lambda step: PARAMS if step % 2 else OTHER  # noqa: E731
  out, _ = iterate(5, weights)
  both = 0
  for _, rollout, _ in out:
    logits = {
      p: transformer.logits(q, MODEL, rollout.tokens) for p, q in enumerate((OTHER, PARAMS))
    }
    logp = {p: np.asarray(jax.nn.log_softmax(x))[:, :-1] for p, x in logits.items()}
    chosen = {
      p: np.take_along_axis(x, rollout.tokens[:, 1:, None], 2)[..., 0] for p, x in logp.items()
    }
    version = rollout.version[:, 1:]
    expected = np.where(version % 2, chosen[1], chosen[0])
    sampled = rollout.mask[:, 1:] > 0
    np.testing.assert_allclose(rollout.logp[:, 1:][sampled], expected[sampled], atol=1e-4)
    both += sum(len(set((v[v >= 0] % 2).tolist())) == 2 for v in version)
  assert both > 3


def test_an_iteration_ends_with_enough_groups_or_with_its_budget():
  out, left = iterate(4)
  assert [len(done) for done, _, _ in out] == [4] * 4
  assert len(left.groups) == 4
  free = np.mean([usage.tokens for _, _, usage in out])
  out, left = iterate(6, token_budget=60)
  assert {len(done) for done, _, _ in out} <= {2, 3, 4}  # one for every mini-batch at least
  assert min(len(done) for done, _, _ in out) < 4
  assert np.mean([usage.tokens for _, _, usage in out]) < 0.8 * free


def test_the_state_of_a_checkpoint_goes_on_in_the_same_way():
  expected, _ = iterate(5)
  source = prompts()
  before, left = iterate(2, source=source)
  state = json.loads(json.dumps(left.get_state()))
  again = partial.InFlight()
  again.set_state(state)
  after, _ = iterate(3, in_flight=again, source=source, first=3)
  for (done, rollout, _), (other, same, _) in zip(before + after, expected, strict=True):
    assert done == other
    for field in ("tokens", "logp", "mask", "version", "stopped"):
      np.testing.assert_array_equal(getattr(rollout, field), getattr(same, field))


def test_metrics_count_stale_tokens():
  out, left = iterate(3)
  _, rollout, _ = out[-1]
  row = partial.metrics(rollout, left, 3)
  stale = rollout.version[rollout.mask > 0] < 3
  assert 0 < row["partial/stale_tokens"] == stale.mean() < 1
  assert row["partial/oldest"] >= 1 and row["partial/tokens_in_flight"] > 0
  plain = dataclasses.replace(rollout, version=None)
  assert partial.metrics(plain, left, 3) == {}


def test_missing_groups_are_padding_in_every_mini_batch():
  rl = context(prompts=6, minibatches=3).config.rl
  groups, G, T = 4, 3, 5
  rows = np.arange(groups * G, dtype=np.float32)
  tokens = np.repeat(rows[:, None], T, 1)
  batch = TrainBatch(
    tokens_BT=tokens.astype(np.int32), segments_BT=np.ones((12, T), np.int32), advantage_B=rows + 1,
    mask_BT=np.ones((12, T), np.float32), old_logp_BT=tokens, sampler_logp_BT=tokens,
  )  # fmt: skip
  parts = minibatches.split(minibatches.fill_up(batch, rl), 3)
  groups_of = [sorted({int(a - 1) // G for a in part.advantage_B if a > 0}) for part in parts]
  assert groups_of == [[0, 3], [1], [2]]
  for part in parts:
    assert part.mask_BT.shape == (6, T)
    np.testing.assert_array_equal(part.mask_BT.any(1), part.advantage_B > 0)
    np.testing.assert_array_equal(part.segments_BT.any(1), part.advantage_B > 0)


def test_log_ratios_come_back_in_the_order_of_the_rollout():
  rl = context(prompts=6, minibatches=3).config.rl
  rows, T = 4 * 3, 5  # two groups are missing
  old = np.arange(rows * T, dtype=np.float32).reshape(rows, T)
  zeros, ones = np.zeros((rows, T), np.float32), np.ones((rows, T), np.float32)
  batch = TrainBatch(zeros.astype(np.int32), ones.astype(np.int32), ones, zeros[:, 0], old, zeros)
  parts = minibatches.split(minibatches.fill_up(batch, rl), 3)
  new = [3 * part.old_logp_BT + 1 for part in parts]
  found = minibatches.log_ratios(parts, new, rows, rl)
  np.testing.assert_array_equal(found, 2 * old + 1)
