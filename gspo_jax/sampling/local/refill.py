"""Refill of slots and allocation of cache pages on each device, before every decode step.

The queue has prefilled *prefixes*: prompts, or trajectories so far (slots.py). A free slot starts
the next response to one of them. If the cache is paged, a slot takes another page when its response
needs one. If no page is free, a prefix or a response has to give its pages back, and is
*displaced*. Prefixes in the queue are displaced first, the newest before older prefixes. If the
queue is empty, the response with the fewest tokens after its prompt is displaced. A displaced
prefix also displaces its responses that have not started. The host submits displaced responses
again (scheduler.py). At least one response always proceeds, since the pages of a device are enough
for a response of the maximum length (`requests.sizes`).
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
  """Allocates pages and starts responses, in one device's part of `slots.State`."""
  if not isinstance(state.cache, pages.Pages):
    free = (state.slots.remaining_B == 0).sum()
    count = jnp.minimum(free, state.waiting_R.sum())
    return jax.lax.fori_loop(0, count, lambda _, s: _start_response(s), state)
  state = _allocate_pages(state)
  return jax.lax.while_loop(_can_start, _start_response, state)


def _start_response(state):
  """Starts a response in a free slot, from the prefix with the most waiting responses."""
  queue, waiting_R = state.queue, state.waiting_R
  slot, entry = jnp.argmin(state.slots.remaining_B), jnp.argmax(waiting_R)
  key = row_key(queue.seed_B[entry], queue.prompt_B[entry], queue.sample_B[entry])
  if isinstance(state.cache, pages.Pages):
    page = jnp.argmax(pages.free(state.cache, state.staged)).astype(jnp.int32)
    cache = pages.begin(state.cache, slot, state.staged[entry], queue.position_B[entry], page)
    cache = cache.with_states(kv_cache.copy_row(cache.states, slot, state.staged_states, entry))
  else:
    cache = kv_cache.copy_row(state.cache, slot, state.staged, entry)
  return state.replace(
    key_W2=state.key_W2.at[slot].set(jax.random.key_data(key)),
    slots=jax.tree.map(lambda x, y: x.at[slot].set(y[entry]), state.slots, queue),
    cache=cache,
    queue=queue.replace(sample_B=queue.sample_B.at[entry].add(1), id_B=queue.id_B.at[entry].add(1)),
    waiting_R=state.waiting_R.at[entry].add(-1),
  )


def _can_start(state):
  """Whether a response can start in a free slot of a paged cache.

  A new response takes one page, and shares the full pages of its prefix. One more page is reserved
  for every active slot whose response may still reach another page. If no slot is active,
  `_allocate_pages` has already ensured a free page.
  """
  s, S = state.slots, state.cache.page
  growing_B = (s.position_B + s.remaining_B - 1) // S > s.position_B // S
  surplus = pages.free(state.cache, state.staged).sum() - (growing_B & (s.remaining_B > 0)).sum()
  alone = ~(s.remaining_B > 0).any()
  return (s.remaining_B == 0).any() & (state.waiting_R > 0).any() & ((surplus > 0) | alone)


class _PageOwners(NamedTuple):
  """Owners of pages, with page tables: responses in slots (B), and prefixes in the queue (R)."""

  remaining_B: jax.Array
  table_Bn: jax.Array
  waiting_R: jax.Array
  staged_Rn: jax.Array

  @classmethod
  def from_state(cls, state: Any) -> "_PageOwners":
    return cls(
      state.slots.remaining_B, state.cache.table_Bn, state.waiting_R, state.staged
    ).released()

  def released(self) -> "_PageOwners":
    """Returns a copy without the pages of free slots and unused queue entries."""
    return self._replace(
      table_Bn=jnp.where(self.remaining_B[:, None] > 0, self.table_Bn, NONE),
      staged_Rn=jnp.where(self.waiting_R[:, None] > 0, self.staged_Rn, NONE),
    )

  def write_to(self, state: Any) -> Any:
    """Returns the state with these owners and their pages."""
    return state.replace(
      slots=state.slots.replace(remaining_B=self.remaining_B),
      cache=state.cache.replace(table_Bn=self.table_Bn),
      waiting_R=self.waiting_R,
      staged=self.staged_Rn,
    )


def release(state: Any) -> Any:
  """Frees unused pages in one device's part of the state."""
  return _PageOwners.from_state(state).write_to(state)


def _allocate_pages(state):
  """Allocates pages for the next positions. Displaces owners if no page is free."""
  s, S = state.slots, state.cache.page
  row_B = jnp.arange(len(s.remaining_B))
  sampled_B = s.position_B - s.start_B

  def needs_page(owners):
    next_B = owners.table_Bn[row_B, s.position_B // S]
    return (owners.remaining_B > 0) & (next_B == NONE)

  def free(owners):
    return pages.free(state.cache.replace(table_Bn=owners.table_Bn), owners.staged_Rn)

  def lacks_pages(owners):
    # Whether prefixes in the queue occupy all pages, so that no response can start.
    stuck = (owners.remaining_B == 0).all() & (owners.waiting_R > 0).any() & ~free(owners).any()
    return needs_page(owners).any() | stuck

  def allocate_or_displace(owners):
    free_p, slot = free(owners), jnp.argmax(needs_page(owners))
    any_free = free_p.any()
    page = jnp.where(any_free, jnp.argmax(free_p).astype(jnp.int32), NONE)
    place = (slot, s.position_B[slot] // S)
    table_Bn = owners.table_Bn.at[place].set(jnp.where(any_free, page, owners.table_Bn[place]))
    # If no page is free, the newest prefix in the queue is displaced. If the queue is empty too,
    # the response with the fewest tokens after its prompt is displaced, the newest if several tie.
    waits = (owners.waiting_R > 0).any()
    entry = jnp.argmax(jnp.where(owners.waiting_R > 0, state.queue.id_B, -1))
    least = jnp.where(owners.remaining_B > 0, sampled_B, jnp.iinfo(jnp.int32).max).min()
    response = jnp.argmax(jnp.where((owners.remaining_B > 0) & (sampled_B == least), s.id_B, -1))
    return owners._replace(
      table_Bn=table_Bn,
      waiting_R=owners.waiting_R.at[entry].set(jnp.where(any_free, owners.waiting_R[entry], 0)),
      remaining_B=owners.remaining_B.at[response].set(
        jnp.where(any_free | waits, owners.remaining_B[response], 0)
      ),
    ).released()

  return jax.lax.while_loop(
    lacks_pages, allocate_or_displace, _PageOwners.from_state(state)
  ).write_to(state)
