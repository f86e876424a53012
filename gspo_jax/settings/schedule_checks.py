"""schedule checks"""

from typing import TYPE_CHECKING

from gspo_jax.settings import estimators

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


def check(c: "RunConfig") -> None:
  """ValueError for a schedule that does not fit the rest of a `config.RunConfig`, or has no effect
  there."""
  s, rl, reward, longest = c.schedule, c.rl, c.reward, c.sampling.max_new_tokens
  set_ = {
    "new_tokens": bool(s.stages),
    "refresh_every": s.refresh_every > 0,
    "group_size_min": s.group_size_min > 0,
  }
  for key, on in set_.items():
    if on and "rl" not in c.job:
      raise ValueError(
        f"schedule.{key}={getattr(s, key)!r} is of responses that a run of job=rl samples, and has "
        f"no effect with job={c.job!r}; leave it {type(getattr(s, key))()!r}"
      )
  first, last = s.limit(1, longest), s.stages[-1][1] if s.stages else longest
  wrong = {
    f"schedule.new_tokens={s.new_tokens!r} goes on to {last} tokens, and sampling.max_new_tokens="
    f"{longest} is the most: raise the one or lower the other": last > longest,
    f"schedule.new_tokens={s.new_tokens!r}: the overlong punishment moves with the limit, and "
    f"reward.overlong_buffer={reward.overlong_buffer} is more than {first} tokens; make it "
    "smaller": bool(s.stages and reward.overlong_weight)
    and c.overlong_follows
    and reward.overlong_buffer > first,
    f"schedule.group_size_min={s.group_size_min} is more than rl.group_size={rl.group_size}, the "
    "most": s.group_size_min > rl.group_size,
    f"schedule.group_size_min={s.group_size_min}, rl.extra_prompts={rl.extra_prompts}: small "
    "groups leave room for extra prompts from the start, and these would be trained on late; set "
    "one of them to 0": s.group_size_min > 0 and rl.extra_prompts > 0,
    "schedule.group_size_min=1: advantages are relative to a group; make it at least "
    "2": s.group_size_min == 1 and estimators.needs_group(c),
  }
  for what, found in wrong.items():
    if found:
      raise ValueError(what)
