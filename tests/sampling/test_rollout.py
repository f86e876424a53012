"""Responses can be believed: their log-probs are the trainer's, and only what should matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import PROMPTS
from support.sampling import sample as engine_sample
from support.small_models import MOE, initial, logits

from gspo_jax.sampling import generate

PARAMS = initial(MOE)
STOP = (1, 2, 3)


def sample(prompts=PROMPTS, params=PARAMS, **changes):
  options = dict(group_size=4, max_new_tokens=6, stop_ids=STOP, seed=7) | changes
  return generate(params, MOE, prompts, **options)


def test_rows_hold_prompt_then_response_then_padding():
  out = sample(group_size=np.int64(4), max_new_tokens=np.int64(6))
  assert out.tokens.shape == (16, 11)
  for row in range(16):
    prompt, length = PROMPTS[row // 4], out.lengths[row]
    end = len(prompt) + length
    assert out.tokens[row, : len(prompt)].tolist() == list(prompt)
    expected = np.zeros(11)
    expected[len(prompt) : end] = 1
    np.testing.assert_array_equal(out.mask[row], expected)
    assert (out.logp[row][out.mask[row] == 0] == 0).all()
    assert out.response(row) == out.tokens[row, len(prompt) : end].tolist()


def test_the_stop_token_ends_a_response_and_belongs_to_it():
  for seed in range(4):
    out = sample(seed=seed)
    assert 0 < out.stopped.sum() < len(out.stopped)
    for row in range(len(out.lengths)):
      response = out.response(row)
      assert not set(response[:-1]) & set(STOP)
      assert out.stopped[row] == (response[-1] in STOP)
      assert out.stopped[row] or len(response) == 6


@pytest.mark.long
def test_truncated_logp_is_renormalised():
  out = sample(top_k=3)
  logits_BTV = logits(PARAMS, MOE, out.tokens)[:, :-1]
  top_logits = jax.lax.top_k(logits_BTV, 3)[0]
  target = jnp.take_along_axis(logits_BTV, jnp.asarray(out.tokens)[:, 1:, None], -1)[..., 0]
  expected = target - jax.nn.logsumexp(top_logits, axis=-1)
  np.testing.assert_allclose(out.logp[:, 1:], expected * out.mask[:, 1:], atol=1e-4)


@pytest.mark.parametrize(
  "changes", [{}, pytest.param(dict(truncation=(3, 1.0, 0.0), support=3), marks=pytest.mark.long)]
)
def test_ids_that_the_tokenizer_has_not_are_not_sampled(changes):
  """And log-probs stay the trainer's, which has the whole vocabulary or the support."""
  options = dict(prompts=PROMPTS, group_size=16, max_new_tokens=6, seed=7) | changes
  assert sample().tokens.max() >= 40
  out = engine_sample(PARAMS, MOE, vocabulary=40, **options)
  sampled = out.tokens[out.mask > 0]
  assert sampled.max() < 40 and len(set(sampled.tolist())) > 10
  if changes:
    assert out.support.max() < 40
  else:
    logp_BTV = jax.nn.log_softmax(logits(PARAMS, MOE, out.tokens)[:, :-1])
    expected = jnp.take_along_axis(logp_BTV, jnp.asarray(out.tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(out.logp[:, 1:], expected * out.mask[:, 1:], atol=1e-4)


def test_greedy_is_the_argmax_of_the_plain_forward():
  out = sample(group_size=1, temperature=0.0, stop_ids=())
  for row, prompt in enumerate(PROMPTS):
    tokens = list(prompt)
    for _ in range(6):
      padded = np.array([tokens + [0] * (11 - len(tokens))])  # one shape, so one compilation
      tokens.append(int(logits(PARAMS, MOE, padded)[0, len(tokens) - 1].argmax()))
    assert out.tokens[row, : len(tokens)].tolist() == tokens


def test_a_response_depends_on_seed_prompt_and_index_only():
  base = sample()
  shuffled = sample([PROMPTS[i] for i in (2, 0, 3, 1)])
  for new, old in enumerate((2, 0, 3, 1)):
    for g in range(4):
      assert shuffled.response(4 * new + g) == base.response(4 * old + g)
  alone = sample([PROMPTS[1]], group_size=2, max_new_tokens=4)
  for g in range(2):
    assert alone.response(g) == base.response(4 + g)[:4]
  np.testing.assert_array_equal(sample().tokens, base.tokens)
  assert (sample(seed=8).tokens != base.tokens).any()
  assert len({tuple(base.response(g)) for g in range(4)}) > 1


@pytest.mark.long
def test_groups_of_the_same_prompt_are_one_larger_group():
  prompt, other = PROMPTS[0], PROMPTS[2]
  twice = sample([prompt, other, prompt, other])
  whole = sample([prompt, other], group_size=8)
  rows = [0, 1, 2, 3, 8, 9, 10, 11]
  assert [twice.response(row) for row in rows] == [whole.response(g) for g in range(8)]
  assert len({tuple(twice.response(row)) for row in rows}) > 4


@pytest.mark.parametrize(
  "prompts, changes, message",
  [
    ([[1], []], {}, "prompt 1 is empty"),
    ([], {}, "0 prompts"),
    ([[1, 64]], {}, "token ids from 1 to 64: the model has 0 to 63"),
    ([[1]], dict(max_new_tokens=4096), "max_position_embeddings=2048"),
    ([[1]], dict(seed=-1), "seed=-1: it must be at least 0"),
    ([[1]], dict(stop_ids=(-1,)), r"stop_ids=\(-1,\): outside the vocabulary"),
  ],
)
def test_bad_prompts_are_named(prompts, changes, message):
  with pytest.raises(ValueError, match=message):
    sample(prompts, **changes)


@pytest.mark.parametrize("prompts", [["1+1="], "1+1=", [1, 2], [[1.5]], [[[1]]], [[1], ["1"]]])
def test_prompts_are_token_ids(prompts):
  with pytest.raises(TypeError, match="is no list of token ids"):
    sample(prompts)


def test_prompts_may_be_arrays():
  out = sample([jnp.array(prompt) for prompt in PROMPTS])
  np.testing.assert_array_equal(out.tokens, sample().tokens)
