"""Metrics of the distance between sampler and trainer, by the version of what sampled."""

import jax

from gspo_jax import objectives as O
from gspo_jax.objectives.reductions import Mean, Metrics
from gspo_jax.structs import TrainBatch


def metrics(batch: TrainBatch, current_BT: jax.Array) -> Metrics:
  """`mismatch/current/...` and `mismatch/older/...`, of the trainer before the updates: of tokens
  that its own weights sampled, where `current_BT` is 1, and of the other trained ones. And their
  share."""
  older_BT, found = batch.mask_BT - current_BT, {}
  for name, mask_BT in (("current", current_BT), ("older", older_BT)):
    sums = O.mismatch.sums(batch.own_logp_BT, batch.sampler_logp_BT, mask_BT)
    found |= {key.replace("/", f"/{name}/", 1): value for key, value in sums.items()}
  return found | {"mismatch/older/tokens": Mean(older_BT.sum(), batch.mask_BT.sum())}
