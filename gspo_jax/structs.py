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

`logp_BT` is the natural-log probability of the token at position t given all earlier tokens.
`mask_BT` is 1 on trained tokens, which the policy sampled, and 0 on prompt, padding, tool and
environment tokens. |y_i| is the sum of sequence i's mask. A sequence with an empty mask is padding
and contributes to no numerator and no denominator.
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
  # Target of supervised fine-tuning; "": no target. Several turns: response, observation, ...
  demonstration: str | tuple[str, ...] = ""
  info: tuple[tuple[str, str], ...] = ()  # further fields of the data row: rating, tolerance, ...
  thinks: bool = False  # the rendered question ends with <think>

  @property
  def content(self) -> str:
    """Returns the id with a checksum of the texts, different for an edited data row."""
    return f"{self.id} {zlib.crc32(f'{self.question}{chr(0)}{self.answer}'.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Trajectories as arrays on the host: B = P·G rows in prompt order, G rows per prompt."""

  tokens: np.ndarray  # int32 [B, L]: prompt, then response or conversation, right-padded
  mask: np.ndarray  # float32 [B, L]: 1 on sampled tokens, the stop token included
  turns: np.ndarray  # int32 [B, L]: turn of each sampled token, 0, 1, ...; -1 elsewhere
  logp: np.ndarray  # float32 [B, L]: log-prob under the sampling distribution, 0 off the mask
  full_logp: np.ndarray  # float32 [B, L]: log-prob without top-k, top-p and min-p
  version: np.ndarray  # int32 [B, L]: version of each token's sampling weights; -1 off the mask
  rewards: np.ndarray  # float32 [B, L]: reward of each turn, at its last token; 0 elsewhere
  prompt_lengths: np.ndarray  # int32 [B]
  lengths: np.ndarray  # int32 [B]: sampled tokens, |y_i|
  ends: np.ndarray  # int32 [B]: number of tokens before the padding
  stopped: np.ndarray  # bool [B]: ended by a stop token; False: truncated at max_new_tokens
  # int8 or int16 [B, L, l, k]: experts chosen by the sampler, -1 for a token without a forward pass
  # (padding and each row's last token); None: not recorded, or a model without experts
  routing: np.ndarray | None = None
  # int32 [B, L, X]: each sampled token's support, the tokens kept by top-k, top-p and min-p, padded
  # with -1. Only -1: the whole vocabulary was kept, or nothing was sampled. None: not recorded
  support: np.ndarray | None = None

  def response(self, row: int) -> list[int]:
    """Returns the tokens after the prompt of one row, observations included."""
    return self.tokens[row, self.prompt_lengths[row] : self.ends[row]].tolist()


@flax.struct.dataclass
class Places:
  """Places of B sequences in packed rows (`packing.plan`)."""

  order_B: Array  # int32: index of the sequence before packing
  row_B: Array  # int32: packed row, numbered on each device; -1 for a sequence without tokens
  start_B: Array  # int32: position of the sequence's first token in the packed row
  # With shared prompts, `start_B` is the position of the prompt's last token. The next two fields
  # are None if every sequence has its own prompt.
  trunk_B: Array | None = None  # int32: position of the prompt's first token in the packed row
  path_B: Array | None = None  # int32: position of the sequence's first token in attention's row


@flax.struct.dataclass
class ModelInputs:
  """Inputs of the model for B sequences, known before the trainer's first pass."""

  tokens_BT: Array  # int32
  segments_BT: Array  # int32: segment number, 0 for padding; attention stays within a segment
  # int8 or int16, -1 for no expert: experts chosen by the sampler; None: not recorded
  sampler_experts_BTlk: Array | None = None
  # int32 [B, T, X]: tokens over which log-probs are normalised (models/head.py); None: the whole
  # vocabulary
  support_BTX: Array | None = None
  # int32: length of the prompt shared by a group's sequences; None: nothing is shared
  prompt_B: Array | None = None
  places: Places | None = None  # None: one sequence per row


@flax.struct.dataclass
class CriticTargets:
  """Targets of a critic's loss, float32; position t is the state before token t."""

  old_value_BT: Array | None = None  # critic's values before the updates; None: no critic
  return_BT: Array | None = None  # None until advantages are computed


@flax.struct.dataclass
class AdvantageInputs:
  """Inputs of advantages on the devices, dropped after their computation.

  None means an input unused by the configured estimator.
  """

  reward_BT: Array | None = None  # float32: reward, at the last token of a response, turn or line
  teacher_logp_BT: Array | None = None  # float32: teacher's log-probs, for distillation
  last_value_B: Array | None = None  # float32: value of the state after the last token
  cut_off_B: Array | None = None  # bool: the response is truncated, so `last_value_B` counts
  turn_BT: Array | None = None  # int32: turn of each token


@flax.struct.dataclass
class MetricInputs:
  """Inputs of metrics alone; no loss uses them."""

  # float32: 1 on tokens sampled by the weights before the updates; None: all tokens
  current_BT: Array | None = None
  # int32: age in iterations of a response's oldest sampling weights, -1 without a version; None:
  # metrics are not split by age
  age_B: Array | None = None


@flax.struct.dataclass
class TrainBatch:
  """Inputs of an update on B sequences; position t of every [B, T] field is token t."""

  inputs: ModelInputs
  mask_BT: Array  # float32: 1 on trained tokens
  advantage_B: Array  # float32
  # float32: old policy's log-probs, the ratio's denominator, fixed before the updates. They are the
  # sampler's unless a pass replaces them.
  old_logp_BT: Array
  sampler_logp_BT: Array  # float32: log-probs returned by the sampler
  ref_logp_BT: Array | None = None  # float32: reference policy's log-probs; None: not needed
  # float32: trainer's log-probs before the updates, if `old_logp_BT` has the sampler's; None: not
  # needed
  own_logp_BT: Array | None = None
  # float32: advantage of each token; None: all tokens of a response have `advantage_B`
  advantage_BT: Array | None = None
  # int32: segment number of each token. Segments have separate importance ratios in objective
  # "segment" (sampling/parts.py). None: a response is one segment
  unit_BT: Array | None = None
  # bool: the sequence's group has advantages, so the KL penalty applies; None: to all sequences
  mixed_B: Array | None = None
  # int8 or int16, -1 for no expert: experts of the old policy in the trainer; None: not needed
  old_experts_BTlk: Array | None = None
  # bool: first mini-batch of an iteration, before any update; None: unknown
  first_B: Array | None = None
  critic_targets: CriticTargets = CriticTargets()
  advantage_inputs: AdvantageInputs = AdvantageInputs()
  metric_inputs: MetricInputs = MetricInputs()

  @property
  def order_B(self) -> Array | None:
    """Returns the index of each sequence before packing; None: not packed."""
    return self.inputs.places and self.inputs.places.order_B

  def with_fields(self, **fields: Any) -> "TrainBatch":
    """Replaces fields of the batch, or of the nested struct that declares them."""
    parts = {}
    for name in ("critic_targets", "advantage_inputs", "metric_inputs"):
      part = getattr(self, name)
      declared = vars(part).keys() & fields.keys()
      parts[name] = part.replace(**{field: fields.pop(field) for field in declared})
    return self.replace(**parts, **fields)


@flax.struct.dataclass
class TrainState:
  """All state changed by updates. PRNG keys derive from (seed, step) and need no state."""

  step: Array  # int32 []: number of applied updates
  params: Any  # models.transformer.Params
  opt_state: Any  # optax state
  skipped: Array  # int32 []: number of skipped updates, non-finite or after a stop
  # float32 []: factor of the clip ranges (learner/adaptive_clip.py); None: fixed clip ranges
  clip_factor: Array | None = None
  # Only `StateWithCritic` declares this field, so other runs' checkpoints hold no critic.
  critic: ClassVar[None] = None


@flax.struct.dataclass
class CriticState:
  """All state of a critic changed by updates."""

  params: Any  # models.head.Critic
  opt_state: Any  # optax state


@flax.struct.dataclass
class StateWithCritic(TrainState):
  """Training state of a policy and its critic."""

  critic: CriticState | None = None
