"""The letters of array axes, and the structs of a run: prompts, rollouts, batches and states.

Each axis has one letter, in array suffixes, einsum strings, the parameter table and the sharding
rules. `logp_BT` has shape [B, T].

  P  prompts in a batch                D  model width
  G  responses per prompt (group)      N  query heads
  B  sequences, usually P·G            K  key/value heads
  T  time (query positions)            H  head width
  S  cache positions (keys)            F  feed-forward width
  V  vocabulary                        E  experts
  l  layers                            k  experts per token
  r  rank of an adapter                L  tokens of a rollout's row (T in a batch)
                                       X  maximum tokens of a support

`logp_BT` is the natural logarithm of the probability of the token at position t given all earlier
tokens. `mask_BT` is 1 on trained tokens, and 0 on prompt, padding, tool and environment tokens. In
RL, trained tokens are sampled by a policy. |y_i| is the sum of sequence i's mask. A sequence with a
mask of zeros is not trained, and no loss includes it: padding, a response without a verdict, or a
truncated one if `rl.mask_truncated` is set.
"""

import dataclasses
import zlib
from typing import Any, ClassVar

import flax.struct
import jax
import numpy as np

Array = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One problem, on the host."""

  id: str
  question: str
  answer: str
  tokens: tuple[int, ...]  # token ids of the rendered question
  # Target response of supervised fine-tuning; "" if there is none. For several turns, a tuple in
  # which responses and observations alternate.
  demonstration: str | tuple[str, ...] = ""
  info: tuple[tuple[str, str], ...] = ()  # further fields of the data row: rating, tolerance, ...
  thinks: bool = False  # the rendered question ends with <think>

  @property
  def content(self) -> str:
    """Returns the id with a checksum of question and answer.

    An edited data row has the same id, but another content.
    """
    return f"{self.id} {zlib.crc32(f'{self.question}{chr(0)}{self.answer}'.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Trajectories as arrays on the host: B = P·G rows in prompt order, G rows per prompt."""

  tokens: np.ndarray  # int32 [B, L]: prompt, then response or conversation, right-padded
  mask: np.ndarray  # float32 [B, L]: 1 on sampled tokens, the stop token included
  turns: np.ndarray  # int32 [B, L]: turn of each sampled token, 0, 1, ...; -1 elsewhere
  # float32 [B, L]: log-prob of each sampled token, normalised over its support (see `support`); 0
  # elsewhere
  logp: np.ndarray
  full_logp: np.ndarray  # float32 [B, L]: log-prob in the whole vocabulary; NaN if unknown
  version: np.ndarray  # int32 [B, L]: version of the weights that sampled each token; -1 elsewhere
  rewards: np.ndarray  # float32 [B, L]: reward of a turn or line at its last token; 0 elsewhere
  prompt_lengths: np.ndarray  # int32 [B]
  lengths: np.ndarray  # int32 [B]: number of sampled tokens, |y_i|
  ends: np.ndarray  # int32 [B]: number of tokens before the padding
  stopped: np.ndarray  # bool [B]: ended by a stop token or stop string; False if truncated
  # int8 or int16 [B, L, l, k]: experts chosen by the sampler, -1 for a token without a forward pass
  # (padding and each row's last token). None if not recorded, or if the model has no experts
  routing: np.ndarray | None = None
  # int32 [B, L, X]: support of each sampled token, the token ids that top-k, top-p and min-p keep,
  # padded to X with -1. All X entries are -1 if the support is the whole vocabulary, or if no token
  # was sampled at the position. None if not recorded
  support: np.ndarray | None = None

  def response(self, row: int) -> list[int]:
    """Returns the tokens after the prompt of one row, observations included."""
    return self.tokens[row, self.prompt_lengths[row] : self.ends[row]].tolist()


@flax.struct.dataclass
class Places:
  """Places of B sequences in packed rows (`learner.packing.plan`).

  A packed row has several sequences. For example, if two sequences of 6 and 5 tokens are in row 0,
  `row_B` is [0, 0] and `start_B` is [0, 6].

  Sequences with the same prompt may share one copy of the prompt in the packed row. This copy has
  all tokens but the last, and is called the trunk. The rest of each sequence begins with its own
  copy of the prompt's last token. Attention reads a longer row, in which each sequence is whole.
  For example, let the two sequences have one prompt of 3 tokens. In the packed row, the trunk takes
  positions 0 and 1, and the rests begin at 2 and 6. In attention's row, the sequences begin at 0
  and 6. So `trunk_B` is [0, 0], `start_B` is [2, 6], and `path_B` is [0, 6].
  """

  order_B: Array  # int32: index of the sequence before packing
  row_B: Array  # int32: packed row, numbered from 0 on each device; -1 for no row
  start_B: Array  # int32: position of the sequence's first token in the packed row
  # The next two fields are None if no prompts can be shared (`packing.shares`). Otherwise `start_B`
  # is the position of the sequence's own copy of the prompt's last token.
  trunk_B: Array | None = None  # int32: position of the prompt's first token in the packed row
  path_B: Array | None = None  # int32: position of the sequence's first token in attention's row


@flax.struct.dataclass
class ModelInputs:
  """Inputs of the model for B sequences."""

  tokens_BT: Array  # int32
  segments_BT: Array  # int32: segment number, 0 for padding; attention stays within a segment
  # int8 or int16: experts chosen by the sampler, -1 for a token without them. None if not recorded
  sampler_experts_BTlk: Array | None = None
  # int32 [B, T, X]: token ids over which log-probs are normalised, padded with -1 (models/head.py).
  # None for the whole vocabulary
  support_BTX: Array | None = None
  # int32: length of the prompt shared by a group's sequences. None if prompts, or their recorded
  # experts, may differ within a group, or if lengths are unknown
  prompt_B: Array | None = None
  places: Places | None = None  # None if each row is one sequence


@flax.struct.dataclass
class CriticTargets:
  """Targets of a critic's loss, float32; position t is the state before token t."""

  old_value_BT: Array | None = None  # critic's values before the updates; None: no critic
  return_BT: Array | None = None  # None until advantages are computed


@flax.struct.dataclass
class AdvantageInputs:
  """Inputs of advantages on the devices, dropped once the advantages are computed.

  A field is None if the configured estimator does not need it.
  """

  reward_BT: Array | None = None  # float32: reward, at the last token of a response, turn or line
  teacher_logp_BT: Array | None = None  # float32: teacher's log-probs, for distillation
  last_value_B: Array | None = None  # float32: value of the state after the last token
  # bool: whether the response is truncated. Its advantages then use `last_value_B`
  cut_off_B: Array | None = None
  turn_BT: Array | None = None  # int32: turn of each token


@flax.struct.dataclass
class MetricInputs:
  """Inputs of metrics alone; no loss uses them."""

  # float32: 1 on tokens sampled with the weights before this iteration's updates. If the sampler's
  # experts are replayed, rows with an older token are 0. None if these weights sampled all tokens
  current_BT: Array | None = None
  # int32: age, in iterations, of the oldest weights that sampled tokens of the response; -1 if the
  # response has no version. None if no metric needs the age
  age_B: Array | None = None


@flax.struct.dataclass
class TrainBatch:
  """Inputs of an update on B sequences; position t of every [B, T] field is token t."""

  inputs: ModelInputs
  mask_BT: Array  # float32: 1 on trained tokens
  advantage_B: Array  # float32
  # float32: log-probs of the old policy, the denominator of importance ratios. They are those of
  # the sampler, unless a pass of the trainer replaces them before the iteration's first update
  old_logp_BT: Array
  sampler_logp_BT: Array  # float32: log-probs returned by the sampler
  ref_logp_BT: Array | None = None  # float32: reference policy's log-probs. None if not needed
  # float32: trainer's log-probs before the updates, if `old_logp_BT` has the sampler's log-probs
  # (objective.old_logp=behaviour). None if not needed
  own_logp_BT: Array | None = None
  # float32: advantage of each token. None if all tokens of a response have `advantage_B`
  advantage_BT: Array | None = None
  # int32: number of the part of the response to which each token belongs, from 0: a turn, step,
  # line or block (sampling/parts.py). In objective "segment", each part has its own importance
  # ratio. None for losses without parts
  unit_BT: Array | None = None
  # bool: whether an advantage in the sequence's group is not 0. The KL penalty applies only to
  # sequences for which this is True. None if the penalty applies to all sequences
  mixed_B: Array | None = None
  # int8 or int16: experts that the trainer chose before the updates, -1 for a token without them.
  # None if not needed
  old_experts_BTlk: Array | None = None
  # bool: whether the mini-batch is the first of its iteration, before any update. None if unknown
  first_B: Array | None = None
  critic_targets: CriticTargets = CriticTargets()
  advantage_inputs: AdvantageInputs = AdvantageInputs()
  metric_inputs: MetricInputs = MetricInputs()

  @property
  def order_B(self) -> Array | None:
    """Returns the index of each sequence before packing; None if not packed."""
    return self.inputs.places and self.inputs.places.order_B

  def with_fields(self, **fields: Any) -> "TrainBatch":
    """Returns the batch with replaced fields.

    Fields inside `critic_targets`, `advantage_inputs` and `metric_inputs` are named directly, such
    as `return_BT`.
    """
    parts = {}
    for name in ("critic_targets", "advantage_inputs", "metric_inputs"):
      part = getattr(self, name)
      declared = vars(part).keys() & fields.keys()
      parts[name] = part.replace(**{field: fields.pop(field) for field in declared})
    return self.replace(**parts, **fields)


@flax.struct.dataclass
class TrainState:
  """All arrays that updates change.

  PRNG keys are not among them, since they are derived from seed and step.
  """

  step: Array  # int32 []: number of applied updates
  params: Any  # models.transformer.Params
  opt_state: Any  # optax state
  # int32 []: number of updates skipped because loss or gradient is not finite. If
  # on_nonfinite=stop, all updates after the first skipped one are skipped too
  skipped: Array
  # float32 []: factor of the clip ranges (learner/adaptive_clip.py). None for fixed clip ranges
  clip_factor: Array | None = None
  # Only `StateWithCritic` has this field in checkpoints.
  critic: ClassVar[None] = None


@flax.struct.dataclass
class CriticState:
  """All arrays of a critic that updates change."""

  params: Any  # models.head.Critic
  opt_state: Any  # optax state


@flax.struct.dataclass
class StateWithCritic(TrainState):
  """Training state of a policy and its critic."""

  critic: CriticState | None = None
