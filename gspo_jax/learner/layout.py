"""Arranges a mini-batch's sequences in model rows, and maps results back to sequences.

A sequence is a prompt with its response. A model row is one row of the arrays that the model reads.
There are three arrangements:

- `plain`: each row is one sequence.
- `trees`: the responses of a group follow one copy of their prompt, in several rows.
- `packed`: each row has several sequences, at the places chosen by `packing.plan`.

Losses and metrics read arrays [B, T] by sequence. A sequence and its model row are on the same
device, so rearranging needs no communication.

The head computes logits, which predict the token after each position. No loss needs predictions of
prompt tokens. So if prompt lengths are known, the head reads only U positions of each sequence,
from the prompt's last token on (`before_responses`). In packed rows, the head reads all positions.

Letters in addition to those of structs.py:

  R  model rows
  U  maximum response length
  X  maximum number of tokens in a support (`Rollout.support`)
  F  length of attention's rows, if packed sequences share prompts (`packed`)
"""

import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax import sharding
from gspo_jax.learner import packing
from gspo_jax.models import transformer
from gspo_jax.models.attention.attention import Paths, Tree
from gspo_jax.models.experts import routing
from gspo_jax.models.head import NO_TOKEN
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.sharding import BATCH, P
from gspo_jax.structs import Array, ModelInputs

EMPTY = dict(  # Padding values of fields of `Rows`; other fields are padded with 0.
  old_experts_RTlk=routing.NO_EXPERT,
  sampler_experts_RTlk=routing.NO_EXPERT,
  support_RTX=NO_TOKEN,
)


@flax.struct.dataclass
class Rows:
  """Inputs of the model, arranged in model rows."""

  tokens_RT: Array
  targets_RT: Array  # Next token of the same sequence.
  segments_RT: Array  # Segment number, 0 for padding; attention stays within a segment.
  old_experts_RTlk: Array | None  # Experts of the old policy; None if not recorded.
  sampler_experts_RTlk: Array | None  # Experts chosen by the sampler; None if not recorded.
  support_RTX: Array | None  # Support of the target; None means the whole vocabulary.
  # Position of each token in its sequence. None if each row is one sequence.
  positions_RT: Array | None = None
  # int32 [B, T]: index of each token in the flattened rows of its device. An index beyond their end
  # marks a token without a place, such as padding. None if each row is one sequence.
  place_BT: Array | None = None
  # Prompt length of each sequence. None if the head reads all positions, or if rows are trees.
  prompt_B: Array | None = None
  # Maximum response length U; 0 if the head reads all positions.
  responses: int = flax.struct.field(pytree_node=False, default=0)
  # Layout of the trees. None for plain and packed rows.
  tree: Tree | None = flax.struct.field(pytree_node=False, default=None)
  # Attention's rows, if packed sequences share prompts. Otherwise None.
  paths: Paths | None = None


def forward(
  params: Any,
  rows: Rows,
  model: ModelConfig,
  compute: ComputeConfig,
  replayed_experts_RTlk: Array | None = None,
) -> transformer.Output:
  """Runs the model over rows.

  Args:
    replayed_experts_RTlk: experts used instead of the router's choice. None means no replay.
  """
  return transformer.forward(
    params,
    model,
    rows.tokens_RT,
    positions=rows.positions_RT,
    segments=rows.segments_RT,
    tree=rows.tree or rows.paths,
    routing=routing.by_layer(replayed_experts_RTlk),
    compute=compute,
  )


def plain(
  inputs: ModelInputs, old_experts_BTlk: Array | None = None, response_tokens: int = 0
) -> Rows:
  """Returns rows of one sequence each.

  Args:
    old_experts_BTlk: experts of the old policy. None if not recorded.
    response_tokens: maximum response length U. If it is 0 or not below T, or if prompt lengths are
      unknown, the head reads all positions.
  """
  support_BTX, T = inputs.support_BTX, inputs.tokens_BT.shape[1]
  rows = Rows(
    tokens_RT=inputs.tokens_BT,
    targets_RT=_next(inputs.tokens_BT),
    segments_RT=inputs.segments_BT,
    old_experts_RTlk=old_experts_BTlk,
    sampler_experts_RTlk=inputs.sampler_experts_BTlk,
    support_RTX=None if support_BTX is None else _next(support_BTX, NO_TOKEN),
  )
  if inputs.prompt_B is None or not 0 < response_tokens < T:
    return rows
  return rows.replace(prompt_B=inputs.prompt_B, responses=response_tokens)


def _next(x_BT: Array, last: int = 0) -> jax.Array:
  """Returns the values of the next position, and `last` at the end of a row."""
  # `jnp.roll` loses the sharding of a single row in JAX 0.12.
  after = ((0, 0), (0, 1), *((0, 0),) * (x_BT.ndim - 2))
  return jnp.pad(x_BT[:, 1:], after, constant_values=last)


def trees(
  inputs: ModelInputs,
  group_size: int,
  response_tokens: int,
  old_experts_BTlk: Array | None = None,
) -> Rows:
  """Returns rows with one prompt for the sequences of a group.

  A tree is a trunk and one branch per sequence (Prefix Grouper, arXiv:2506.05433). The trunk is the
  prompt without its last token. A branch is the last prompt token and the response. The last prompt
  token is repeated because its next token differs between responses. A branch has U positions. The
  last token of a response of length U is not an input, since no token follows it.

  A tree of G sequences fills G rows, which are shorter than T. For example, if T = 8, U = 3 and
  G = 2, a trunk of 4 positions and two branches of 3 positions fill two rows of 5 positions. G is
  the greatest common divisor of the group size and the number of sequences on a device. Rows are
  plain if G is 1, if U is 0, or if fewer than two positions of T are for the prompt.

  Args:
    inputs: sequences in groups of `group_size`. The first `prompt_B` tokens are equal in a group.
    response_tokens: maximum response length U; the other T - U positions are for the prompt.
    old_experts_BTlk: experts of the old policy. None if not recorded.
  """
  B, T = inputs.tokens_BT.shape
  G, branch = math.gcd(group_size, sharding.rows_per_device(B)), response_tokens
  if G == 1 or not 0 < branch < T - 1:
    return plain(inputs, old_experts_BTlk, response_tokens)
  trunk = -(-(T - branch - 1) // G) * G  # Rounded up, so that a tree fills whole rows.

  def on_each_device(sequences, prompt_B):
    rows, size = len(prompt_B), trunk + G * branch
    tree_B1, member_B1 = (x[:, None] for x in jnp.divmod(jnp.arange(rows, dtype=jnp.int32), G))
    time_1T, shared_B1 = jnp.arange(T, dtype=jnp.int32)[None], jnp.maximum(prompt_B[:, None] - 1, 0)
    # Whether a token is in the trunk, and its position relative to the prompt's last token.
    in_trunk_BT, after_BT = time_1T < shared_B1, time_1T - shared_B1
    branch_place_BT = trunk + member_B1 * branch + after_BT
    place_BT = tree_B1 * size + jnp.where(in_trunk_BT, time_1T, branch_place_BT)
    dropped = rows // G * size
    read_BT = (sequences.segments_RT > 0) & (after_BT < branch)
    place_BT = jnp.where(read_BT, place_BT, dropped)
    # A tree's first sequence with a prompt writes the trunk, which all its sequences read. (After a
    # failure of sampling, a sequence may have no prompt.)
    writer_t1 = jnp.argmax(prompt_B.reshape(-1, G) > 0, axis=1)[:, None]
    writes_B1 = member_B1 == jnp.repeat(writer_t1, G, axis=0)
    written_BT = jnp.where(in_trunk_BT & ~writes_B1, dropped, place_BT)
    arranged = arrange(sequences, written_BT, (rows, size // G))
    return arranged.replace(place_BT=place_BT, tree=Tree(trunk, G), responses=branch)

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  return run(plain(inputs, old_experts_BTlk), inputs.prompt_B)


def packed(
  inputs: ModelInputs, R: int, old_experts_BTlk: Array | None = None, response_tokens: int = 0
) -> Rows:
  """Returns R rows with several sequences each, as planned by `packing.plan`.

  Sequences that share a prompt have one copy of it in their row. Attention then reads separate,
  longer rows of F positions, with a copy of the prompt before each response
  (`packing.with_prompts`).

  Args:
    R: number of rows on all devices.
    old_experts_BTlk: experts of the old policy. None if not recorded.
    response_tokens: maximum response length, from which F is computed.
  """
  rows = sharding.rows_per_device(R)

  def on_each_device(sequences, row_B, start_B, trunk_B, path_B, prompt_B):
    T = sequences.tokens_RT.shape[1]
    row_B1, start_B1 = row_B[:, None], start_B[:, None]
    time_1T = jnp.arange(T, dtype=jnp.int32)[None]

    def places(start_BX: jax.Array, size: int) -> jax.Array:
      inside_BT = (sequences.segments_RT > 0) & (row_B1 >= 0)
      return jnp.where(inside_BT, row_B1 * size + start_BX + time_1T, rows * size)

    # Sequences of a row start at different positions, so start + 1 can be the segment number.
    segments_BT = jnp.broadcast_to(start_B1 + 1, sequences.segments_RT.shape)
    marked = sequences.replace(segments_RT=segments_BT)
    if trunk_B is None:
      return arrange(marked, places(start_B1, T), (rows, T))
    trunk_B1, shared_B1 = trunk_B[:, None], jnp.maximum(prompt_B[:, None] - 1, 0)
    in_trunk_BT = time_1T < shared_B1
    place_BT = places(jnp.where(in_trunk_BT, trunk_B1, start_B1 - shared_B1), T)
    # Sequences that share a trunk have the same prompt. Only the sequence directly after the trunk
    # writes the trunk.
    writes_B1 = trunk_B1 + shared_B1 == start_B1
    written_BT = jnp.where(in_trunk_BT & ~writes_B1, rows * T, place_BT)
    F = packing.with_prompts(T, response_tokens)
    path_BT = places(path_B[:, None], F)
    paths = Paths(
      read_RF=scattered(place_BT, path_BT, (rows, F), rows * T),
      segment_RF=scattered(
        jnp.broadcast_to(path_B[:, None] + 1, path_BT.shape), path_BT, (rows, F)
      ),
      back_RT=scattered(path_BT, written_BT, (rows, T), rows * F),
    )
    return arrange(marked, written_BT, (rows, T)).replace(place_BT=place_BT, paths=paths)

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  sequences, plan = plain(inputs, old_experts_BTlk), inputs.places
  return run(sequences, plan.row_B, plan.start_B, plan.trunk_B, plan.path_B, inputs.prompt_B)


def arrange(sequences: Rows, place_BT: jax.Array, shape: tuple[int, int]) -> Rows:
  """Scatters the tokens of one device's sequences to the device's rows.

  Args:
    place_BT: flat index of each token; an index beyond the end for a token without a place.
    shape: number and length of the device's rows.
  """

  def scatter(path, x_BT: jax.Array) -> jax.Array:
    return scattered(x_BT, place_BT, shape, EMPTY.get(path[-1].name, 0))

  time_T = jnp.arange(sequences.tokens_RT.shape[1], dtype=jnp.int32)
  time_BT = jnp.broadcast_to(time_T[None], place_BT.shape)
  rows = jax.tree.map_with_path(scatter, sequences.replace(positions_RT=time_BT))
  return rows.replace(place_BT=place_BT)


def scattered(
  x_BT: jax.Array, place_BT: jax.Array, shape: tuple[int, int], empty: int = 0
) -> jax.Array:
  """Scatters values [B, T, ...] to new rows at flat indices `place_BT`.

  Values with an index beyond the end are dropped. Positions without a value are `empty`.
  """
  x_X = jnp.full((math.prod(shape), *x_BT.shape[2:]), empty, x_BT.dtype)
  return x_X.at[place_BT].set(x_BT, mode="drop").reshape(*shape, *x_BT.shape[2:])


def by_sequence(x_RT: jax.Array, rows: Rows, empty: int = 0) -> jax.Array:
  """Gathers values of rows [R, T, ...] by sequence, [B, T, ...].

  Tokens without a place have the value `empty`.
  """
  if rows.place_BT is None:
    return x_RT

  def on_each_device(x_RT, place_BT):
    x_X = x_RT.reshape(-1, *x_RT.shape[2:])
    return x_X.at[place_BT].get(mode="fill", fill_value=empty)

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  return run(x_RT, rows.place_BT)


def before_responses(x_RT: jax.Array, rows: Rows) -> jax.Array:
  """Selects the U positions predicting response tokens, [B, U, ...].

  The first of these positions is that of the prompt's last token. If `rows.responses` is 0, `x_RT`
  is returned unchanged.
  """
  if not rows.responses:
    return x_RT

  def on_each_device(x_RT, prompt_B):
    if rows.tree is not None:
      return rows.tree.split(x_RT)[1]
    take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=rows.responses)
    return jax.vmap(take)(x_RT, prompt_B - 1)

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  return run(x_RT, rows.prompt_B)


def in_rows(x_BU: jax.Array, rows: Rows) -> jax.Array:
  """Reverses `before_responses`; all other positions of the result are 0."""
  if not rows.responses:
    return x_BU

  def on_each_device(x_BU, tokens_RT, prompt_B):
    if rows.tree is not None:
      trees = len(x_BU) // rows.tree.branches
      return rows.tree.join(jnp.zeros((trees, rows.tree.trunk), x_BU.dtype), x_BU)
    zeros_RT = jnp.zeros(tokens_RT.shape, x_BU.dtype)
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(write)(zeros_RT, x_BU, prompt_B - 1)

  run = sharding.shard_map(on_each_device, in_specs=P(BATCH), out_specs=P(BATCH))
  return run(x_BU, rows.tokens_RT, rows.prompt_B)
