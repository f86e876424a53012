"""Refill of slots and page allocation on each device, before every decode step.

Free slots take responses from the queue. With a paged cache, responses get a page when they need
one. If no page is free, prefixes are dropped from the queue, the newest first; after these, the
response with the fewest sampled tokens is displaced. The host detects dropped prefixes and
displaced responses, and restarts them. At least one response always proceeds, since a device's
pages hold a whole window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.attention import pages
from gspo_jax.models.attention.pages import NONE
from gspo_jax.sampling.sampler import row_key


@jax.named_scope("refill")
def refill(state: Any) -> Any:
  """Refills slots in a device's part of `slots.State`."""
  if not isinstance(state.cache, pages.Pages):
    free = (state.slots.left_B == 0).sum()
    count = jnp.minimum(free, state.waiting_R.sum())
    return jax.lax.fori_loop(0, count, lambda _, s: _start_response(s), state)
  state = _allocate_pages(state)
  return jax.lax.while_loop(_can_start, _start_response, state)


def _start_response(state):
  """Starts a response in a free slot, to the prefix with the most waiting responses."""
  queue, waiting_R = state.queue, state.waiting_R
  w, e = jnp.argmin(state.slots.left_B), jnp.argmax(waiting_R)
  key = row_key(queue.seed_B[e], queue.prompt_B[e], queue.sample_B[e])
  if isinstance(state.cache, pages.Pages):
    page = jnp.argmax(pages.free(state.cache, state.staged)).astype(jnp.int32)
    cache = pages.begin(state.cache, w, state.staged[e], queue.position_B[e], page)
  else:
    cache = kv_cache.copy_row(state.cache, w, state.staged, e)
  return state.replace(
    key_W2=state.key_W2.at[w].set(jax.random.key_data(key)),
    slots=jax.tree.map(lambda x, y: x.at[w].set(y[e]), state.slots, queue),
    cache=cache,
    queue=queue.replace(sample_B=queue.sample_B.at[e].add(1), id_B=queue.id_B.at[e].add(1)),
    waiting_R=state.waiting_R.at[e].add(-1),
  )


def _can_start(state):
  """Whether a response can start in a free slot.

  One page is reserved for each active slot whose response may continue on another page. A further
  page must be free. If no slot is active, `_allocate_pages` has already freed a page.
  """
  s, S = state.slots, state.cache.page
  growing_B = (s.position_B + s.left_B - 1) // S > s.position_B // S
  surplus = pages.free(state.cache, state.staged).sum() - (growing_B & (s.left_B > 0)).sum()
  alone = ~(s.left_B > 0).any()
  return (s.left_B == 0).any() & (state.waiting_R > 0).any() & ((surplus > 0) | alone)


class _Owners(NamedTuple):
  """Responses in slots and prefixes in the queue, with their pages."""

  left_B: jax.Array
  table_Bn: jax.Array
  waiting_R: jax.Array
  staged_Rn: jax.Array

  @classmethod
  def from_state(cls, state: Any) -> "_Owners":
    return cls(state.slots.left_B, state.cache.table_Bn, state.waiting_R, state.staged).released()

  def released(self) -> "_Owners":
    """Returns a copy without the pages of finished responses and prefixes."""
    return self._replace(
      table_Bn=jnp.where(self.left_B[:, None] > 0, self.table_Bn, NONE),
      staged_Rn=jnp.where(self.waiting_R[:, None] > 0, self.staged_Rn, NONE),
    )

  def put_into(self, state: Any) -> Any:
    return state.replace(
      slots=state.slots.replace(left_B=self.left_B),
      cache=state.cache.replace(table_Bn=self.table_Bn),
      waiting_R=self.waiting_R,
      staged=self.staged_Rn,
    )


def release(state: Any) -> Any:
  """Frees the pages of finished responses and prefixes in a device's part."""
  return _Owners.from_state(state).put_into(state)


def _allocate_pages(state):
  """Allocates a page for each slot's next position. If pages run out, prefixes or responses go."""
  s, S = state.slots, state.cache.page
  row_B = jnp.arange(len(s.left_B))
  sampled_B = s.position_B - s.start_B

  def needs_page(owners):
    next_B = owners.table_Bn[row_B, s.position_B // S]
    return (owners.left_B > 0) & (next_B == NONE)

  def free(owners):
    return pages.free(state.cache.replace(table_Bn=owners.table_Bn), owners.staged_Rn)

  def lacks_pages(owners):
    stuck = (owners.left_B == 0).all() & (owners.waiting_R > 0).any() & ~free(owners).any()
    return needs_page(owners).any() | stuck

  def allocate_or_displace(owners):
    free_p, w = free(owners), jnp.argmax(needs_page(owners))
    any_free = free_p.any()
    page = jnp.where(any_free, jnp.argmax(free_p).astype(jnp.int32), NONE)
    place = (w, s.position_B[w] // S)
    table_Bn = owners.table_Bn.at[place].set(jnp.where(any_free, page, owners.table_Bn[place]))
    # Displaces the newest waiting prefix, or else the newest response with the fewest tokens.
    waits = (owners.waiting_R > 0).any()
    e = jnp.argmax(jnp.where(owners.waiting_R > 0, state.queue.id_B, -1))
    least = jnp.where(owners.left_B > 0, sampled_B, jnp.iinfo(jnp.int32).max).min()
    v = jnp.argmax(jnp.where((owners.left_B > 0) & (sampled_B == least), s.id_B, -1))
    return owners._replace(
      table_Bn=table_Bn,
      waiting_R=owners.waiting_R.at[e].set(jnp.where(any_free, owners.waiting_R[e], 0)),
      left_B=owners.left_B.at[v].set(jnp.where(any_free | waits, owners.left_B[v], 0)),
    ).released()

  return jax.lax.while_loop(lacks_pages, allocate_or_displace, _Owners.from_state(state)).put_into(
    state
  )
