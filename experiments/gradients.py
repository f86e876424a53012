"""Measures E6: gradients of single groups, of several losses, at frozen (θ, θ_old).

θ_old are the initial weights of the run. Each of 16 updates of the configured objective, on
`rl.prompts` groups in `rl.minibatches` parts, gives a θ. Gradients of `rl.prompts` other samples of
θ_old are compared with the on-policy gradient, of twice as many samples of θ.
"""

from collections.abc import Sequence
from typing import Any

import jax

from experiments import group_gradients
from gspo_jax import objectives as O
from gspo_jax.learner import batch as batches
from gspo_jax.learner import optimizer
from gspo_jax.learner.passes import learner_of
from gspo_jax.learner.state import new_state
from gspo_jax.learner.step import make_rl_step
from gspo_jax.learner.summary import summarize
from gspo_jax.models.flops import forward_flops
from gspo_jax.run import Run
from gspo_jax.runs.metrics import Stopwatch, Totals, compute
from gspo_jax.structs import TrainBatch
from gspo_jax.system import preemption

UPDATES = (1, 4, 16)  # Numbers of updates before a comparison.
ON_POLICY = 2  # Groups of the on-policy gradient, in multiples of rl.prompts.


def on_batch(loss: Any, advantage: str = "advantage_B") -> group_gradients.GroupLoss:
  """Converts a loss of `objectives` to a loss of a batch."""

  def applied(logp_BT: jax.Array, batch: TrainBatch):
    return loss(logp_BT, batch.old_logp_BT, getattr(batch, advantage), batch.mask_BT)

  return applied


# Losses with their published ranges. On policy they have equal gradients.
LOSSES: dict[str, group_gradients.GroupLoss] = dict(
  gspo=on_batch(O.gspo_loss),
  grpo=on_batch(O.grpo_loss),
  dapo=on_batch(O.dapo_loss),
  raw=group_gradients.raw_product_loss,
)


def measure(run: Run) -> None:
  """Writes a row of gradient statistics after each of UPDATES.

  It has `gradient/LOSS/STATISTIC` from `group_gradients.compare`, and metrics of the updates since
  the previous row.
  """
  c, collector = run.config, run.collector()
  learner, tx = learner_of(c, "rl"), optimizer.make(c.rl_optimizer, c.rl.minibatches)
  update = make_rl_step(learner, c.objective, tx)
  group_moments = group_gradients.make_group_moments(learner, [*LOSSES.values()])
  on_policy = group_gradients.make_group_moments(learner, [group_gradients.raw_product_loss])
  state = new_state(run.initial_params(), tx)
  run.writer.truncate("sft", -1)  # Removes all rows: nothing is resumed.

  total = Totals()

  def sampled(params: Any, version: int, parts: int, passes: int) -> Sequence[TrainBatch]:
    """Samples groups of these weights in parts; counts `passes` forward passes."""
    nonlocal total
    run.engine.load(params, version)
    collected = collector.collect(version, Stopwatch())
    run.engine.release()
    prompt_B, end_B = collected.rollout.prompt_lengths, collected.rollout.ends
    flops = forward_flops(c.model, prompt_B[:: c.rl.group_size], prompt_B, end_B)
    total = total.plus(collected.usage.tokens, collected.usage.flops + passes * flops)
    whole = batches.train_batch(collected.rollout, collected.advantage_PG, shared_prompts=True)
    sizes = parts, c.rl.prompts, c.rl.group_size
    minibatches = batches.minibatches(whole, *sizes, run.mesh, packed=False)
    return [x.replace(first_B=None) for x in minibatches]

  looks = sum(number <= c.rl.minibatches for number in UPDATES)
  making = sampled(state.params, 1, c.rl.minibatches, passes=3)
  (probe,) = sampled(state.params, 2, 1, passes=looks * (1 + 2 * len(LOSSES)))
  version, moved = 2, []
  for number, minibatch in enumerate(making, 1):
    preemption.check()
    state, metrics = update(state, minibatch)
    moved.append(metrics)
    if number not in UPDATES:
      continue
    truth = None
    for _ in range(ON_POLICY):
      version += 1
      (batch,) = sampled(state.params, version, 1, passes=3)
      part = on_policy(state.params, batch)
      truth = part if truth is None else group_gradients.add(truth, part)
    estimates = jax.device_get(group_gradients.compare(group_moments(state.params, probe), truth))
    row = {
      f"gradient/{loss}/{statistic}": float(value_X[i])
      for statistic, value_X in estimates.items()
      for i, loss in enumerate(LOSSES)
    }
    row["gradient/on_policy/snr"] = float(
      (group_gradients.signal(truth) / group_gradients.noise(truth))[0]
    )
    row |= compute(summarize(tuple(moved))) | total.metrics()
    run.writer.write(dict(phase="rl", step=number) | row)
    moved.clear()
