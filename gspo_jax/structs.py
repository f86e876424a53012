"""The alphabet, and the four things that flow through a training run.

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
  """One problem, on the host. `tokens` is the rendered question, ready to be prefilled."""

  id: str
  question: str
  answer: str
  tokens: tuple[int, ...]
  # What supervised fine-tuning learns to write; "" where there is none. Of several turns: response,
  # observation, response, ...
  demonstration: str | tuple[str, ...] = ""
  info: tuple[tuple[str, str], ...] = ()  # further fields of the row: rating, tolerance, ...
  thinks: bool = False  # the text ends with <think>: a response begins with a thought

  @property
  def content(self) -> str:
    """The id, with a checksum of the texts: what is known of a row is not true of an edited one."""
    return f"{self.id} {zlib.crc32(f'{self.question}{chr(0)}{self.answer}'.encode()):08x}"


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Trajectories as arrays on the host: P·G rows in the prompts' order, G rows per prompt."""

  tokens: np.ndarray  # int32 [B, L]: prompt, then response or conversation, right-padded
  mask: np.ndarray  # float32 [B, L]: 1 on sampled tokens, the stop token included
  turns: np.ndarray  # int32 [B, L]: turn of each sampled token, 0, 1, ...; -1 elsewhere
  logp: np.ndarray  # float32 [B, L]: log-prob under the sampling distribution, 0 off the mask
  full_logp: np.ndarray  # float32 [B, L]: the same without top-k, top-p and min-p
  version: np.ndarray  # int32 [B, L]: of the weights that sampled the token; -1 off the mask
  rewards: np.ndarray  # float32 [B, L]: of each turn, at its last token; 0 elsewhere
  prompt_lengths: np.ndarray  # int32 [B]
  lengths: np.ndarray  # int32 [B]: sampled tokens, |y_i|
  ends: np.ndarray  # int32 [B]: tokens of the prompt and of all that follows it
  stopped: np.ndarray  # bool [B]: ended by a stop token; False: cut off at max_new_tokens
  # int8 or int16 [B, L, l, k]: the experts that the sampler used, -1 where it fed no token (padding
  # and each row's last token); None where nobody asked, or where there are no experts
  routing: np.ndarray | None = None
  # int32 [B, L, X]: the tokens that top-k, top-p and min-p kept where each one was sampled, -1
  # where they are fewer; -1 alone: all were kept, or nothing was sampled. None: nobody asked
  support: np.ndarray | None = None

  def response(self, row: int) -> list[int]:
    """Returns what follows the prompt of one row, observations included."""
    return self.tokens[row, self.prompt_lengths[row] : self.ends[row]].tolist()


@flax.struct.dataclass
class ModelInputs:
  """What the model reads of B sequences; known before the first pass of the trainer."""

  tokens_BT: Array  # int32
  segments_BT: Array  # int32: 0 is padding; tokens attend within their own segment only
  # int8 or int16, -1 for none: the experts that the sampler used when it sampled these tokens
  sampler_experts_BTlk: Array | None = None
  # int32 [B, T, X]: the tokens that each one was drawn from, which log-probs are normalised over
  # (models/head.py); None: the whole vocabulary
  support_BTX: Array | None = None
  # int32: tokens of the prompt, which all sequences of a group share; None: nothing is shared
  prompt_B: Array | None = None
  # Where `packing.plan` puts each sequence; None: it has a row of its own
  row_B: Array | None = None  # int32: packed row, of those of its device; -1: in none
  start_B: Array | None = None  # int32: the position there of its first token
  # Where others share its prompt: there `start_B` is that of the prompt's last token
  trunk_B: Array | None = None  # int32: position of the prompt's first token, in the same row
  path_B: Array | None = None  # int32: position of its first token in the row of attention


@flax.struct.dataclass
class TrainBatch:
  """B sequences as an update needs them: what the model reads, and what the loss does; position t
  of every [B, T] field speaks of token t."""

  inputs: ModelInputs
  mask_BT: Array  # float32: 1 on trained tokens
  advantage_B: Array  # float32
  # float32: fixed when the rollout is made, the denominator of the ratio; None: not yet decided
  old_logp_BT: Array | None
  sampler_logp_BT: Array  # float32: what the sampler returned
  ref_logp_BT: Array | None = None  # float32: reference policy, for the KL penalty
  teacher_logp_BT: Array | None = None  # float32: of distillation, until there are advantages
  # float32: of the trainer before the updates, where the old policy is what sampled; None: it is it
  own_logp_BT: Array | None = None
  # float32: 1 on tokens that the policy before the updates sampled; None: it sampled all of them
  current_BT: Array | None = None
  # int32: which part of its response each trained token is in, of those that have an importance
  # ratio of their own in objective "segment" (sampling/parts.py); None: there is one
  unit_BT: Array | None = None
  # int32: iterations since the oldest weights that sampled a response; None: none
  age_B: Array | None = None
  advantage_BT: Array | None = None  # float32: of each token, for losses that take such
  # bool: rewards of its group differ, and the KL penalty holds it; None: it holds all
  mixed_B: Array | None = None
  # int8 or int16, -1 for none: the experts that the old policy used, as the trainer computes it
  old_experts_BTlk: Array | None = None
  # bool: in the first mini-batch of an iteration, before which there was no update; None: unknown
  first_B: Array | None = None
  order_B: Array | None = None  # int32: which sequence it was before `packing.plan`
  # Of a critic, float32; position t speaks of what stands before token t (learner/critic.py)
  reward_BT: Array | None = None  # until there are advantages
  old_value_BT: Array | None = None  # of the critic before the updates
  # Of what follows the last token, and bool: cut off there; until there are advantages, where the
  # one counts for the other
  last_value_B: Array | None = None
  cut_off_B: Array | None = None
  turn_BT: Array | None = None  # int32: of each token, until there are advantages of turns
  return_BT: Array | None = None  # what values are drawn to


@flax.struct.dataclass
class TrainState:
  """Everything that an update changes. The PRNG needs no state: keys derive from (seed, step)."""

  step: Array  # int32 []: gradient updates made
  params: Any  # models.transformer.Params
  opt_state: Any  # optax state
  skipped: Array  # int32 []: updates left out, since they would not have been finite
  # float32 []: what the clip ranges are multiplied by (learner/adaptive_clip.py); None: they stay
  clip_factor: Array | None = None
  # A field of `StateWithCritic` only: without one, checkpoints hold nothing of it.
  critic: ClassVar[None] = None


@flax.struct.dataclass
class CriticState:
  """Everything of a critic that an update changes."""

  params: Any  # models.critic.Critic
  opt_state: Any  # optax state


@flax.struct.dataclass
class StateWithCritic(TrainState):
  """The same with a critic."""

  critic: CriticState | None = None
