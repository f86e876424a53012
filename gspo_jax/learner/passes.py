"""Log-probabilities of a batch, and passes without gradients of parameters.

The passes before the updates fill fields of the mini-batches, such as the old policy's
log-probabilities (`fill`). The pass after the updates is for the samples log (`make_review`).

If rows are packed, a pass reads one micro-batch at a time, as an update does. Otherwise the pass
reads the whole mini-batch at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.learner import layout, packing, programs
from gspo_jax.learner.adaptive_clip import scale_ranges
from gspo_jax.learner.layout import Rows, by_sequence, forward
from gspo_jax.learner.metrics import token_gradient
from gspo_jax.learner.objective import configured_loss
from gspo_jax.models import transformer
from gspo_jax.models.experts import routing
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.objective import ObjectiveConfig
from gspo_jax.settings.passes import Pass
from gspo_jax.settings.run import RunConfig
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import ModelInputs, TrainBatch


@dataclasses.dataclass(frozen=True)
class Learner:
  """Static settings of updates and passes."""

  model: ModelConfig
  compute: ComputeConfig
  temperature: float  # Divisor of the logits, in sampling and in log-probs.
  # Number of micro-batches in a mini-batch. If rows are packed, this is the maximum number.
  microbatches: int
  load_balance_coef: float
  # An update with a non-finite loss or gradient is skipped. If this key is "skip", later updates
  # continue. If it is "stop", all later updates are skipped too, so parameters stay unchanged.
  on_nonfinite: str = "stop"
  group_size: int = 1  # Number of sequences with the same prompt.
  # Maximum response length; some losses divide by it. In SFT it is 0, and log-probs of all tokens
  # are computed, since prompt lengths are unknown.
  response_tokens: int = 0
  # Number of classes of the metrics `by_age/...` (metrics.py). 0 means no such metrics.
  ages: int = 0


def learner_of(c: RunConfig, phase: str) -> Learner:
  """Returns the settings of updates of phase "sft" or "rl"."""
  common = dict(model=c.model, compute=c.compute, on_nonfinite=c.on_nonfinite)
  if phase == "sft":
    balance = c.sft.load_balance_coef
    return Learner(
      temperature=1.0, microbatches=c.sft.microbatches, load_balance_coef=balance, **common
    )
  return Learner(
    temperature=c.sampling.temperature,
    microbatches=c.rl.microbatches,
    load_balance_coef=c.objective.load_balance_coef,
    group_size=c.rl.group_size,
    response_tokens=c.sampling.max_new_tokens,
    ages=c.rl.ages,
    **common,
  )


def log_probs(
  params: Any,
  inputs: ModelInputs,
  learner: Learner,
  replay: str = "none",
  old_experts_BTlk: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, transformer.Output, Rows]:
  """Returns log-probs and entropies [B, T], the model's output and the rows.

  The log-prob at position t is log π(token t | tokens before t), and the entropy is that of the
  same distribution. The values at position 0 are 0. If the head reads only the positions before
  response tokens (layout.py), the values at prompt tokens are 0 too. The support of a token is the
  set of tokens within top-k, top-p and min-p. If a support is recorded, π is normalised over the
  support instead of the vocabulary.

  Args:
    params: parameters of the model.
    replay: source of the experts. "none" is the router, "R2" the old policy in the trainer, and
      "R3" the sampler. The router computes the gate weights in any case.
    old_experts_BTlk: experts of the old policy in the trainer. None if not recorded.

  Raises:
    ValueError: the batch has no recorded experts for `replay`.
  """
  rows = rows_of(inputs, learner, old_experts_BTlk)
  replayed_experts_RTlk = experts_to_replay(rows, replay)
  out = forward(params, rows, learner.model, learner.compute, replayed_experts_RTlk)
  by_position = out.hidden_BTD, rows.targets_RT, rows.support_RTX
  hidden_BUD, targets_BU, support_BUX = jax.tree.map(
    lambda x_RT: layout.before_responses(x_RT, rows), by_position
  )
  results_BU = transformer.token_logp(
    params,
    learner.model,
    hidden_BUD,
    targets_BU,
    temperature=learner.temperature,
    compute=learner.compute,
    support_BTX=support_BUX,
  )
  logp_BT, entropy_BT = (shift_right(layout.in_rows(x_BU, rows), rows) for x_BU in results_BU)
  return logp_BT, entropy_BT, out, rows


def shift_right(x_RT: jax.Array, rows: Rows) -> jax.Array:
  """Moves values to the position of the predicted token, [B, T].

  The model predicts token t + 1 at position t of a row, so values move from t to t + 1. The result
  is by sequence, and is 0 at position 0.
  """
  return jnp.pad(by_sequence(x_RT, rows)[:, :-1], ((0, 0), (1, 0)))


def rows_of(
  inputs: ModelInputs, learner: Learner, old_experts_BTlk: jax.Array | None = None
) -> Rows:
  """Arranges a batch or micro-batch in model rows: packed, trees or plain."""
  if inputs.places:
    R = len(inputs.tokens_BT) // learner.microbatches
    return layout.packed(inputs, R, old_experts_BTlk, learner.response_tokens)
  if inputs.prompt_B is not None:
    return layout.trees(inputs, learner.group_size, learner.response_tokens, old_experts_BTlk)
  return layout.plain(inputs, old_experts_BTlk)


def experts_to_replay(rows: Rows, replay: str) -> jax.Array | None:
  """Returns the recorded experts for `replay`, "R2" or "R3"; None for "none".

  Raises ValueError if the batch has no such experts.
  """
  if replay == "none":
    return None
  name = dict(R2="old_experts", R3="sampler_experts")[replay]
  replayed_experts_RTlk = getattr(rows, f"{name}_RTlk")
  if replayed_experts_RTlk is None:
    raise ValueError(
      f"objective.replay={replay!r} replays recorded experts, but the batch has no {name}_BTlk. R2 "
      "needs objective.old_logp=recompute or behaviour; R3 needs a sampler that records experts"
    )
  return replayed_experts_RTlk


def make_score(learner: Learner) -> Callable[[Any, ModelInputs], jax.Array]:
  """Builds the jitted pass (params, inputs) -> log-probs [B, T]."""

  def logp(params: Any, inputs: ModelInputs) -> jax.Array:
    return log_probs(params, inputs, learner)[0]

  return programs.jit(by_part(logp, learner), learner.compute)


class OldPolicy(NamedTuple):
  """Log-probs and experts of the old policy, the weights before an iteration's updates."""

  old_logp_BT: jax.Array
  # Experts chosen by the trainer's router, for replay R2. If there is no replay, they are for the
  # metrics of `objective.volatility`. In all other cases they are None.
  old_experts_BTlk: jax.Array | None


def make_old_policy(
  learner: Learner, objective: ObjectiveConfig
) -> Callable[[Any, ModelInputs], OldPolicy]:
  """Builds the jitted pass of the old policy, (params, inputs) -> `OldPolicy`.

  If `objective.replay` is R3, the pass replays the sampler's experts. Otherwise, the trainer's
  router chooses the experts. The first update of an iteration has the same weights and experts as
  this pass. So the log-probs of that update and of this pass differ by rounding errors only
  (`step.with_own_logp`).
  """
  keeps_experts = objective.replay == "R2" or (objective.replay == "none" and objective.volatility)

  def old_policy(params: Any, inputs: ModelInputs) -> OldPolicy:
    replay = "R3" if objective.replay == "R3" else "none"
    logp_BT, _, out, rows = log_probs(params, inputs, learner, replay)
    if not keeps_experts or out.routing_lBTk is None:
      return OldPolicy(logp_BT, None)
    experts_RTlk = routing.by_row(out.routing_lBTk, learner.model.num_experts)
    return OldPolicy(logp_BT, by_sequence(experts_RTlk, rows, routing.NO_EXPERT))

  return programs.jit(by_part(old_policy, learner), learner.compute)


def make_review(
  learner: Learner,
  objective: ObjectiveConfig,
  old_policy: Callable[[Any, ModelInputs], OldPolicy],
) -> Callable[..., dict[str, jax.Array]]:
  """Builds the pass for the samples log, after an iteration's updates.

  The pass is a function of (params, batch, clip_factor), with the new parameters. `clip_factor`
  scales the clip ranges; None means fixed ranges. The pass returns a dict of arrays [B, T]:

  - `log_ratio_BT`: log-prob under the new parameters minus that of the old policy.
  - `clipped_BT`: mask of the tokens clipped by the loss at the new parameters.
  - `gradient_BT`: gradient of the loss's numerator with respect to log-probs (`token_gradient`).
    The dict has this array only if each segment has an importance ratio.

  Args:
    old_policy: pass of `make_old_policy`. The review calls this pass with the new parameters. Only
      R2 needs a separate program, which replays the old policy's experts.
  """

  def replay_pass(params: Any, old_experts_BTlk: jax.Array, inputs: ModelInputs) -> jax.Array:
    return log_probs(params, inputs, learner, objective.replay, old_experts_BTlk)[0]

  replay_pass = programs.jit(by_part(replay_pass, learner), learner.compute)
  measure = _reviewer(objective.static, learner.response_tokens)

  def review(
    params: Any, batch: TrainBatch, clip_factor: jax.Array | None = None
  ) -> dict[str, jax.Array]:
    if objective.replay == "R2":
      logp_BT = replay_pass(params, batch.old_experts_BTlk, batch.inputs)
    else:
      logp_BT = old_policy(params, batch.inputs).old_logp_BT
    hyperparameters = scale_ranges(objective.hyperparameters(), clip_factor)
    return measure(logp_BT, batch, hyperparameters)

  return review


@functools.cache
def _reviewer(objective: ObjectiveConfig, max_length: int) -> Callable:
  """Builds the part of `make_review` after the log-probs."""

  def measure(
    logp_BT: jax.Array, batch: TrainBatch, hyperparameters: Mapping[str, Any]
  ) -> dict[str, Any]:
    entropy_BT = jnp.zeros_like(logp_BT)  # Entropy affects neither clipping nor this gradient.

    def loss(logp_BT: jax.Array) -> tuple:
      return configured_loss(objective, logp_BT, entropy_BT, batch, max_length, hyperparameters)

    fields = dict(log_ratio_BT=logp_BT - batch.old_logp_BT, clipped_BT=loss(logp_BT)[2])
    if batch.unit_BT is not None:
      fields |= dict(gradient_BT=token_gradient(lambda x_BT: loss(x_BT)[0], logp_BT))
    return fields

  return jax.jit(measure)


def fill(
  passes: Sequence[tuple[Pass, Callable]], params: Mapping[str, Any], batch: TrainBatch
) -> TrainBatch:
  """Runs the passes before the updates, and fills the batch's fields.

  Args:
    passes: pairs of a declaration and its program. The program's arguments are the parameters
      named in `Pass.reads` and `batch.inputs`. Its results are the fields named in `Pass.fills`.
    params: parameters by their name in `Pass.reads`.
  """
  for declared, program in passes:
    fields = program(*(params[name] for name in declared.reads), batch.inputs)
    fields = fields if isinstance(fields, tuple) else (fields,)
    batch = batch.with_fields(**dict(zip(declared.fills, fields, strict=True)))
  return batch


def by_part(function: Callable, learner: Learner) -> Callable:
  """Wraps a pass to read packed rows one micro-batch at a time.

  The wrapped pass needs no more memory than an update. Inputs without packing are read at once.

  Args:
    function: pass of (*params, inputs), which returns a tree of arrays [B, ...].
  """

  def whole(*arguments: Any) -> Any:
    *params, inputs = arguments
    if not inputs.places:
      return function(*arguments)
    R = len(inputs.tokens_BT) // learner.microbatches

    def run_part(i):
      part = packing.part(inputs, i, R)
      return part.places.row_B >= 0, function(*params, part)

    def merge_rows(total, new):
      (_, old), (inside_B, new) = total, new

      def choose(new, old):
        return jnp.where(inside_B.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

      return inside_B, jax.tree.map(choose, new, old)

    number = packing.count(inputs, R)
    return accumulate(run_part, number, merge_rows, learner.microbatches)[1]

  return whole


def parts(
  batch: TrainBatch, learner: Learner
) -> tuple[int | jax.Array, Callable[[Any], TrainBatch]]:
  """Returns the number of micro-batches, and a function i -> micro-batch i.

  If rows are not packed, the number is `learner.microbatches`. If rows are packed, only
  micro-batches with tokens count. Each of these has all sequences of the mini-batch, and its mask
  is 0 on sequences that are in rows of other micro-batches.
  """
  number = learner.microbatches
  if batch.inputs.places:
    R = len(batch.mask_BT) // number

    def packed_part(i):
      inputs = packing.part(batch.inputs, i, R)
      mask_BT = jnp.where(inputs.places.row_B[:, None] >= 0, batch.mask_BT, 0)
      return batch.replace(inputs=inputs, mask_BT=mask_BT)

    return packing.count(batch.inputs, R), packed_part

  def on_each_device(batch):  # A micro-batch is a block of each device's rows, so no row moves.
    return jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)

  stacked = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(None, BATCH))(batch)
  return number, lambda i: jax.tree.map(lambda x: x[i], stacked)


def accumulate(
  function: Callable, number: int | jax.Array, combine: Callable, max_number: int
) -> Any:
  """Computes combine(combine(function(0), function(1)), function(2)), and so on.

  Args:
    function: function of an index, which returns a tree of arrays.
    number: number of results to combine, at least 1. It may be a traced value.
    combine: function of the total so far and the next result, which returns the new total.
    max_number: upper limit of `number`, static. If it is 1, `function` runs outside a loop.
  """
  if max_number == 1:
    return function(0)
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding), jax.eval_shape(function, 0)
  )

  def unfinished(carry):
    i, _ = carry
    # The bound `max_number` is redundant, but `aot/hlo_costs.py` reads it from the compiled loop.
    return (i < number) & (i < max_number)

  def body(carry):
    i, total = carry
    new = function(i)
    return i + 1, jax.tree.map(lambda a, b: jnp.where(i == 0, a, b), new, combine(total, new))

  return jax.lax.while_loop(unfinished, body, (jnp.zeros((), jnp.int32), zeros))[1]
