"""Length buckets of prompts: no more than they need, and few lengths."""

import pytest
from support.rollouts import NEW, G, P, collector, iterate, settings

from gspo_jax.data.sources import Mixture, Prompts
from gspo_jax.rollouts.schedules import bucket_length, length_buckets
from gspo_jax.structs import Prompt


def of_lengths(*lengths):
  return Prompts([Prompt(str(i), "q", "a", (9,) * n) for i, n in enumerate(lengths)])


TAIL = of_lengths(*[20] * 800, *[60] * 190, *[500] * 10)


def test_buckets_are_quantiles_of_the_lengths_of_a_batch():
  config = settings(prompts=4, data__max_prompt_tokens=1024)
  assert length_buckets(config, [TAIL]) == (64, 512), (
    "with 4 prompts, 0.41 of iterations have none over 20"
  )
  assert length_buckets(settings(prompts=2, data__max_prompt_tokens=1024), [TAIL]) == (32, 64, 512)
  mixed = Mixture((TAIL, of_lengths(700)), (1.0, 1.0))
  assert length_buckets(config, [mixed]) == (64, 704)
  assert length_buckets(config, [TAIL, of_lengths(700)]) == (64, 704)
  assert length_buckets(config, [of_lengths(*range(90, 101))]) == (112,), "96 would bring little"
  assert length_buckets(settings(data__max_prompt_tokens=100), [of_lengths(100)]) == (100,)


@pytest.mark.parametrize("source, changes", [
  (TAIL, dict(packed=True, microbatches=2)),
  (TAIL, dict(environment__name="calculator", environment__max_turns=4)),
  ((), {}),  # made as they are read, or in files that grow
])  # fmt: skip
def test_there_is_one_bucket_where_rows_are_not_a_prompt_and_its_response(source, changes):
  assert length_buckets(settings(data__max_prompt_tokens=600, **changes), [source]) == (600,)


def test_a_prompt_of_other_data_has_a_bucket():
  assert [bucket_length(n, (32, 64), 1024) for n in (1, 32, 33, 64, 65)] == [32, 32, 64, 64, 1024]


def test_a_rollout_is_as_long_as_its_prompts_need(capsys):
  """In few lengths, which are named at the start: each is a program of every pass and update."""
  source = of_lengths(*[5] * 60, *[33] * 6)
  out, _ = iterate(5, collector(source, extra_prompts=0, data__max_prompt_tokens=100))
  assert "updates pad prompts to 16 or 48 tokens" in capsys.readouterr().err
  observed = set()
  for collected in out:
    rollout = collected.rollout
    room = 16 if rollout.prompt_lengths.max() == 5 else 48
    assert rollout.tokens.shape == rollout.logp.shape == (P * G, room + NEW)
    observed.add(room)
  assert observed == {16, 48}
