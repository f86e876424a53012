"""The alphabet, and the structs of a training run: prompts, rollouts, batches and states.

One letter per axis, in array suffixes, einsum strings, the parameter table and the sharding rules:

  P  prompts in a batch                D  model width
  G  responses per prompt (group)      N  query heads
  B  sequences, usually P·G            K  key/value heads
  T  time (query positions)            H  head width
  S  cache positions (keys)            F  feed-forward width
  V  vocabulary                        E  experts
  l  layers                            k  experts per token
  r  rank of an adapter

`logp_BT` is the natural-log probability of the token *sampled at* position t given everything
before it. `mask_BT` is 1 on tokens that the policy sampled and that are trained on, and 0 on
prompt, padding, tool and environment tokens. |y_i| is the row sum of the mask; a row with an empty
mask is padding and is in no numerator and in no denominator.
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
  tokens: tuple[int, ...]  # the rendered question, ready to be prefilled
  # Target of supervised fine-tuning, "" for none. Of several turns: response, observation, ...
  demonstration: str | tuple[str, ...] = ""
  info: tuple[tuple[str, str], ...] = ()  # further fields of the row: rating, tolerance, ...
  thinks: bool = False  # the text ends with <think>: a response begins with a thought

  @property
  def content(self) -> str:
    """Returns the id with a checksum of the texts, which tells an edited row from the old one."""
    return f"{self.id} {zlib.crc32(f'{self.question}{chr(0)}{self.answer}'.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Trajectories as arrays on the host: P·G rows in the prompts' order, G rows per prompt."""

  tokens: np.ndarray  # int32 [B, L]: prompt, then response or conversation, right-padded
  mask: np.ndarray  # float32 [B, L]: 1 on sampled tokens, the stop token included
  turns: np.ndarray  # int32 [B, L]: turn of each sampled token, 0, 1, ...; -1 elsewhere
  logp: np.ndarray  # float32 [B, L]: log-prob under the sampling distribution, 0 off the mask
  full_logp: np.ndarray  # float32 [B, L]: log-prob without top-k, top-p and min-p
  version: np.ndarray  # int32 [B, L]: version of the sampling weights; -1 off the mask
  rewards: np.ndarray  # float32 [B, L]: reward of each turn, at its last token; 0 elsewhere
  prompt_lengths: np.ndarray  # int32 [B]
  lengths: np.ndarray  # int32 [B]: sampled tokens, |y_i|
  ends: np.ndarray  # int32 [B]: tokens of the prompt and of everything after it
  stopped: np.ndarray  # bool [B]: ended by a stop token; False: cut off at max_new_tokens
  # int8 or int16 [B, L, l, k]: experts chosen by the sampler, -1 where it fed no token (padding and
  # each row's last token); None if they were not recorded, and for a model without experts
  routing: np.ndarray | None = None
  # int32 [B, L, X]: tokens kept by top-k, top-p and min-p where each one was sampled, -1 where they
  # are fewer; -1 alone: all were kept, or nothing was sampled. None if they were not recorded
  support: np.ndarray | None = None

  def response(self, row: int) -> list[int]:
    """Returns the tokens after the prompt of one row, observations included."""
    return self.tokens[row, self.prompt_lengths[row] : self.ends[row]].tolist()


@flax.struct.dataclass
class Places:
  """Place of each of B sequences in packed rows (`packing.plan`)."""

  order_B: Array  # int32: number of the sequence before packing
  row_B: Array  # int32: packed row, of those of its device; -1 for a sequence without tokens
  start_B: Array  # int32: position of its first token in that row
  # With shared prompts `start_B` is the position of the prompt's last token; None for both if every
  # sequence has its own prompt
  trunk_B: Array | None = None  # int32: position of the prompt's first token, in the same row
  path_B: Array | None = None  # int32: position of its first token in the row of attention


@flax.struct.dataclass
class ModelInputs:
  """Inputs of the model for B sequences, known before the first pass of the trainer."""

  tokens_BT: Array  # int32
  segments_BT: Array  # int32: 0 is padding; tokens attend within their own segment only
  # int8 or int16, -1 for none: experts chosen by the sampler; None if they were not recorded
  sampler_experts_BTlk: Array | None = None
  # int32 [B, T, X]: tokens over which log-probs are normalised (models/head.py); None for the whole
  # vocabulary
  support_BTX: Array | None = None
  # int32: tokens of the prompt, shared by all sequences of a group; None if nothing is shared
  prompt_B: Array | None = None
  places: Places | None = None  # None: each sequence has a row of its own


@flax.struct.dataclass
class CriticTargets:
  """Targets of a critic's loss, float32; position t is the state before token t."""

  old_value_BT: Array | None = None  # values of the critic before the updates; None: no critic
  return_BT: Array | None = None  # None until there are advantages


@flax.struct.dataclass
class AdvantageInputs:
  """Inputs of the devices' part of advantages, dropped once there are advantages.

  None stands for an input that the configured estimator does not need.
  """

  reward_BT: Array | None = None  # float32: at the last token of a response, turn or line
  teacher_logp_BT: Array | None = None  # float32: teacher's log-probs, for distillation
  last_value_B: Array | None = None  # float32: value of the state after the last token
  cut_off_B: Array | None = None  # bool: cut off there, so that `last_value_B` counts
  turn_BT: Array | None = None  # int32: turn of each token


@flax.struct.dataclass
class MetricInputs:
  """Inputs of metrics alone: no loss reads them."""

  # float32: 1 on tokens sampled by the policy before the updates; None if it sampled all of them
  current_BT: Array | None = None
  # int32: iterations since the oldest weights that sampled a response, -1 for no such weights; None
  # if metrics are not split by age
  age_B: Array | None = None


@flax.struct.dataclass
class TrainBatch:
  """Inputs of an update on B sequences; position t of every [B, T] field is token t."""

  inputs: ModelInputs
  mask_BT: Array  # float32: 1 on trained tokens
  advantage_B: Array  # float32
  # float32: denominator of the ratio, fixed before the updates: the sampler's log-probs unless a
  # pass replaces them
  old_logp_BT: Array
  sampler_logp_BT: Array  # float32: returned by the sampler
  ref_logp_BT: Array | None = None  # float32: reference policy; None without a KL penalty
  # float32: trainer's log-probs before the updates; None if `old_logp_BT` already holds them
  own_logp_BT: Array | None = None
  # float32: advantage of each token; None if all tokens of a response have `advantage_B`
  advantage_BT: Array | None = None
  # int32: part of its response with an importance ratio of its own, in objective "segment"
  # (sampling/parts.py); None if a response is one part
  unit_BT: Array | None = None
  # bool: the KL penalty holds this sequence, since rewards of its group differ; None: all of them
  mixed_B: Array | None = None
  # int8 or int16, -1 for none: experts chosen by the old policy in the trainer; None if not needed
  old_experts_BTlk: Array | None = None
  # bool: first mini-batch of an iteration, before any update; None: unknown
  first_B: Array | None = None
  critic_targets: CriticTargets = CriticTargets()
  advantage_inputs: AdvantageInputs = AdvantageInputs()
  metric_inputs: MetricInputs = MetricInputs()

  @property
  def order_B(self) -> Array | None:
    """Returns the number of each sequence before packing; None if it was not packed."""
    return self.inputs.places and self.inputs.places.order_B

  def with_fields(self, **fields: Any) -> "TrainBatch":
    """Returns the batch with these fields, each in the struct that declares it."""
    parts = {}
    for name in ("critic_targets", "advantage_inputs", "metric_inputs"):
      part = getattr(self, name)
      declared = vars(part).keys() & fields.keys()
      parts[name] = part.replace(**{field: fields.pop(field) for field in declared})
    return self.replace(**parts, **fields)


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes. The PRNG needs no state: keys derive from (seed, step)."""

  step: Array  # int32 []: gradient updates made
  params: Any  # models.transformer.Params
  opt_state: Any  # optax state
  skipped: Array  # int32 []: updates left out because they would not have been finite
  # float32 []: factor of the clip ranges (learner/adaptive_clip.py); None if they are fixed
  clip_factor: Array | None = None
  # Only `StateWithCritic` has this field: checkpoints of other runs hold no critic.
  critic: ClassVar[None] = None


@flax.struct.dataclass
class CriticState:
  """Everything of a critic that an update changes."""

  params: Any  # models.head.Critic
  opt_state: Any  # optax state


@flax.struct.dataclass
class StateWithCritic(TrainState):
  """Training state of a policy and its critic."""

  critic: CriticState | None = None
