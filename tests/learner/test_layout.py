"""Trees: responses to one prompt share it in the update, which stays the same."""

import dataclasses

import jax
import numpy as np
import pytest
from support.small_models import SHALLOW, SHALLOW_HYBRID, SHALLOW_MOE, initial
from support.small_updates import (
  ALL_TERMS,
  MICROBATCHES,
  MODELS,
  SGD,
  B,
  T,
  after,
  assert_same_update,
  learner,
  make_batch,
  old_policy,
  rl_step,
  score_pass,
  with_inputs,
)

from gspo_jax.learner import layout, packing, passes
from gspo_jax.models import transformer
from gspo_jax.models.experts import routing
from gspo_jax.settings.model import REFERENCE

MODELS = MODELS | dict(shallow_hybrid=SHALLOW_HYBRID)
GROUP, PROMPT = 4, 8  # responses to a prompt, tokens of the longest prompt
PROMPTS = (3, 8, 1, 0)  # the last group is missing
# With the prompt. A blank sequence, whose sampling failed, has no prompt either.
LENGTHS = ((0, 15, 4, 3), (20, 9, 8, 11), (2, 13, 5, 1), (0, 0, 0, 0))
LENGTH_B, PROMPT_B = np.array(sum(LENGTHS, ())), np.repeat(np.array(PROMPTS, np.int32), GROUP)
PROMPT_B[LENGTH_B == 0] = 0
LONGEST_B = LENGTH_B - PROMPT_B == T - PROMPT  # the last token of these responses is not read
UNREAD_BT = LONGEST_B[:, None] & (np.arange(T)[None] == LENGTH_B[:, None] - 1)


def grouped_batch(model):
  """Some responses have no tokens, one group has none at all."""
  batch = make_batch(model, lengths=sum(LENGTHS, ()))
  in_prompt_BT = np.arange(T)[None] < PROMPT_B[:, None]

  def alike(x):  # Lies in the prompt.
    inside = in_prompt_BT.reshape(B, T, *(1,) * (x.ndim - 2))
    return np.where(inside, np.repeat(x[::GROUP], GROUP, axis=0), x)

  mask_BT = np.where(in_prompt_BT, 0, batch.inputs.segments_BT).astype(np.float32)
  tokens_BT = alike(batch.inputs.tokens_BT)
  batch = with_inputs(batch, tokens_BT=tokens_BT, prompt_B=PROMPT_B).replace(
    mask_BT=mask_BT,
    old_logp_BT=-4.2 * mask_BT,
    sampler_logp_BT=-4.3 * mask_BT,
    ref_logp_BT=-4.1 * mask_BT,
  )
  if batch.old_experts_BTlk is None:
    return batch
  batch = with_inputs(batch, sampler_experts_BTlk=alike(batch.inputs.sampler_experts_BTlk))
  return batch.replace(old_experts_BTlk=alike(batch.old_experts_BTlk))


def sharing(model, microbatches=1, group_size=GROUP, **compute):
  compute = dataclasses.replace(REFERENCE, **compute)
  shared = dict(group_size=group_size, response_tokens=T - PROMPT)
  return learner(model, microbatches=microbatches, compute=compute, **shared)


@pytest.mark.parametrize("name, shape, replay, microbatches, compute", [
  ("dense", None, "none", MICROBATCHES, {}),
  pytest.param(
    "dense", None, "none", 4, dict(attention="blockwise", logits_chunk=3), marks=pytest.mark.long
  ),
  pytest.param(
    "dense", (2, 2, 1, 2), "none", 1, dict(remat="full"), marks=pytest.mark.long
  ),
  # Windows reach across trunk and branch.
  pytest.param("gemma", None, "none", 2, dict(attention="blockwise"), marks=pytest.mark.long),
  # Branches begin at the state of their trunk.
  pytest.param("hybrid", None, "none", 1, {}, marks=pytest.mark.long),
  pytest.param("hybrid_moe", (1, 2, 2, 2), "R3", 2, {}, marks=pytest.mark.long),
  pytest.param("hybrid", (2, 2, 1, 2), "none", 1, dict(remat="full"), marks=pytest.mark.long),
  # The head reads less all the same.
  pytest.param("gemma", None, "none", 1, dict(group_size=1), marks=pytest.mark.long),
  pytest.param("dense", (2, 2, 1, 2), "none", 1, dict(group_size=1), marks=pytest.mark.long),
  pytest.param("moe", None, "R2", 2, {}, marks=pytest.mark.long),
  # Two responses on each device: half of a group.
  pytest.param("shallow_moe", (1, 2, 2, 2), "R3", 2, {}, marks=pytest.mark.long),
  pytest.param("moe", (1, 2, 2, 2), "R3", 2, {}, marks=pytest.mark.long),
])  # fmt: skip
def test_update_with_shared_prompts_equals_the_plain_update(
  name, shape, replay, microbatches, compute
):
  model = MODELS[name]
  batch = grouped_batch(model)
  objective = dataclasses.replace(ALL_TERMS, replay=replay)
  shared = rl_step(sharing(model, microbatches, **compute), objective, SGD)
  whole = rl_step(sharing(model), objective, SGD)
  expected = after(whole, model, with_inputs(batch, prompt_B=None))
  # A prompt's tokens count once in metrics of routers.
  assert_same_update(after(shared, model, batch, shape), expected, ("router/", "padding"))


@pytest.mark.parametrize("name, shape, replay, compute", [
  pytest.param("dense", None, "none", {}, marks=pytest.mark.long),
  ("shallow_hybrid", None, "none", {}),
  pytest.param("hybrid", None, "none", {}, marks=pytest.mark.long),
  pytest.param("hybrid_moe", (1, 2, 2, 2), "R3", {}, marks=pytest.mark.long),
  pytest.param("gemma", None, "none", dict(attention="blockwise"), marks=pytest.mark.long),
  pytest.param("gemma", None, "none", dict(attention="splash"), marks=pytest.mark.long),
  pytest.param("dense", (2, 2, 1, 2), "none", dict(remat="full"), marks=pytest.mark.long),
  pytest.param("moe", None, "R2", {}, marks=pytest.mark.long),
  ("shallow_moe", (1, 2, 2, 2), "R3", {}),
  pytest.param("moe", (1, 2, 2, 2), "R3", {}, marks=pytest.mark.long),
])  # fmt: skip
def test_packed_update_with_shared_prompts_equals_the_plain_update(name, shape, replay, compute):
  model, shards = MODELS[name], 1 if shape is None else 4
  batch = grouped_batch(model)
  objective = dataclasses.replace(ALL_TERMS, replay=replay)
  planned = packing.plan(batch, shards, GROUP, T - PROMPT)
  step = rl_step(sharing(model, MICROBATCHES, **compute), objective, SGD)
  actual = after(step, model, planned, shape)
  whole = rl_step(sharing(model), objective, SGD)
  expected = after(whole, model, with_inputs(batch, prompt_B=None))
  assert_same_update(actual, expected, ("router/", "padding"))


@pytest.mark.parametrize(
  "shape", [None, pytest.param((1, 2, 2, 2), marks=pytest.mark.long)], ids=str
)
def test_pass_with_shared_prompts_gives_the_same_old_policy(shape):
  batch = grouped_batch(SHALLOW_MOE)
  expected = old_policy(learner(SHALLOW_MOE), with_inputs(batch, prompt_B=None))
  actual = old_policy(sharing(SHALLOW_MOE), batch, shape)
  trained = batch.mask_BT > 0
  assert trained.sum() > 40
  logp, expected_logp = (x.old_logp_BT[trained] for x in (actual, expected))
  np.testing.assert_allclose(logp, expected_logp, atol=2e-5)
  read_BT = (batch.inputs.segments_BT > 0) & ~UNREAD_BT
  routes, expected_routes = (np.asarray(x.old_experts_BTlk) for x in (actual, expected))
  np.testing.assert_array_equal(routes[read_BT], expected_routes[read_BT])
  assert (routes[~read_BT] == routing.NO_EXPERT).all()


def test_the_model_reads_every_prompt_once():
  """Covers shorter rows, and all hidden states before a token."""
  batch = grouped_batch(SHALLOW)
  actual = layout.trees(batch.inputs, GROUP, T - PROMPT)
  assert actual.tree == (8, GROUP)  # seven tokens, in rows of the same length
  assert actual.tokens_RT.shape == (B, (T - 8) + 8 // GROUP)
  lengths = [[length for length in group if length] for group in LENGTHS]
  distinct = sum(sum(g) - (len(g) - 1) * max(p - 1, 0) for p, g in zip(PROMPTS, lengths) if g)
  distinct -= UNREAD_BT.sum()
  assert (actual.segments_RT > 0).sum() == distinct < batch.inputs.segments_BT.sum()
  read_BT = (batch.inputs.segments_BT > 0) & ~UNREAD_BT
  assert UNREAD_BT.sum() == 3  # Prompts of 3, 8 and 1 tokens.
  for row_values, batch_values in (
    (actual.tokens_RT, batch.inputs.tokens_BT),
    (actual.targets_RT, np.pad(batch.inputs.tokens_BT[:, 1:], ((0, 0), (0, 1)))),
  ):
    np.testing.assert_array_equal(
      np.where(read_BT, layout.by_sequence(row_values, actual), 0),
      np.where(read_BT, batch_values, 0),
    )
  _, row = after(rl_step(sharing(SHALLOW, MICROBATCHES), ALL_TERMS, SGD), SHALLOW, batch)
  assert row["padding"] == pytest.approx(1 - distinct / actual.tokens_RT.size)


@pytest.mark.parametrize("group_size", [GROUP, 1])
def test_head_reads_states_before_response_tokens_alone(group_size, monkeypatch):
  batch, learner = grouped_batch(SHALLOW), sharing(SHALLOW, group_size=group_size)
  rows = passes.rows_of(batch.inputs, learner)
  read = [np.asarray(layout.before_responses(x, rows)) for x in (rows.tokens_RT, rows.targets_RT)]
  assert read[0].shape == (B, T - PROMPT)
  for b, (start, end) in enumerate(zip(PROMPT_B, np.minimum(LENGTH_B, PROMPT_B + T - PROMPT))):
    if end > start:
      tokens_T = batch.inputs.tokens_BT[b]
      np.testing.assert_array_equal(read[1][b, : end - start], tokens_T[start:end])
      np.testing.assert_array_equal(read[0][b, : end - start], tokens_T[start - 1 : end - 1])
  back_BT = passes.shift_right(layout.in_rows(read[1], rows), rows)
  np.testing.assert_array_equal(back_BT * batch.mask_BT, batch.inputs.tokens_BT * batch.mask_BT)
  hidden, token_logp = [], transformer.token_logp
  monkeypatch.setattr(
    transformer, "token_logp", lambda *args, **kw: hidden.append(args[2]) or token_logp(*args, **kw)
  )
  jax.eval_shape(
    lambda params: passes.log_probs(params, batch.inputs, learner)[0], initial(SHALLOW)
  )
  assert hidden[0].shape[:2] == (B, T - PROMPT)


def test_responses_are_independent():
  batch = grouped_batch(SHALLOW_MOE)
  score = score_pass(sharing(SHALLOW_MOE))
  tokens_BT = np.array(batch.inputs.tokens_BT)
  tokens_BT[1, PROMPTS[0] : 15] = (tokens_BT[1, PROMPTS[0] : 15] + 1) % 64
  before, after = (
    np.where(batch.mask_BT, score(initial(SHALLOW_MOE), b.inputs), 0)
    for b in (batch, with_inputs(batch, tokens_BT=tokens_BT))
  )
  changed = np.abs(before - after).max(1) > 0
  assert changed.tolist() == [row == 1 for row in range(B)]
