"""Room for prompts in the rows of an iteration's updates: few lengths, since each is a program.

Rows as long as `data.max_prompt_tokens` allows would be padding where all prompts are shorter. So
the lengths of the prompts on file say once, at the start, which rooms there are.
"""

import math
from collections.abc import Sequence

from gspo_jax.data.sources import Mixture, Prompts, Source
from gspo_jax.settings.run import RunConfig

# Of all iterations, how many do with a room. The last one is for all prompts.
SHARES = (0.5, 0.9, 1.0)
MULTIPLE = 16  # of positions
WORTH = 1.25  # times as large is the next room, or a program of its own would bring little


def rooms(config: RunConfig, sources: Sequence[Source]) -> tuple[int, ...]:
  """Rooms that iterations choose from, the smallest first, at most three; `data.max_prompt_tokens`
  is the only one where later prompts may be longer, and where rows are not as long as a prompt and
  its response: packed ones, and conversations.

  An iteration draws `rl.prompts` prompts. All of them are within the quantile q of the lengths with
  probability q^P.
  """
  most = config.data.max_prompt_tokens
  parts = [p for s in sources for p in (s.sources if isinstance(s, Mixture) else (s,))]
  known = bool(parts) and all(isinstance(part, Prompts) for part in parts)
  if config.rl.packed or config.environment.name or not known:
    return (most,)
  ordered = sorted(len(prompt.tokens) for part in parts for prompt in part.rows)
  places = (math.ceil(len(ordered) * share ** (1 / config.rl.prompts)) - 1 for share in SHARES)
  chosen: list[int] = []
  for length in sorted((ordered[i] for i in places), reverse=True):
    room = min(-(-length // MULTIPLE) * MULTIPLE, most)
    if not chosen or WORTH * room <= chosen[0]:
      chosen.insert(0, room)
  return tuple(chosen)


def room_for(longest: int, rooms: Sequence[int], most: int) -> int:
  """The smallest of the rooms that has place for a prompt so long; `most` for one that was drawn
  from other data, before the run was interrupted."""
  return next((room for room in rooms if room >= longest), most)
