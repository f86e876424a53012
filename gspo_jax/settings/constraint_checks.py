"""constraint checks, to be merged"""

from typing import TYPE_CHECKING

from gspo_jax.settings.rewards import SHOWN, CostSignal, _active, verifier_config

if TYPE_CHECKING:
  from gspo_jax.settings.run import RunConfig


def check(c: "RunConfig") -> None:
  """ValueError for what constraints do not go with; `c` is a `config.RunConfig`."""
  if not c.constraints.on:
    return
  _check_signals(c)
  if not c.has_iterations:
    return
  kind, names = c.objective.advantage_kind, ", ".join(c.constraints.signals)
  wrong = {
    f"job={c.job!r}: multipliers follow what the policy samples; set job=rl": c.job == "offline",
    "rl.mask_truncated=True leaves out what the longest responses cost; set it to "
    "False": c.rl.mask_truncated,
    f"objective.advantage={kind!r}: standardised advantages are combined; set it to std": kind
    != "std",
  }
  for what, found in wrong.items():
    if found:
      raise ValueError(f"constraints ({names}): {what}")


def _check_signals(c: "RunConfig") -> None:
  for kind, name, one in c.constraints.entries():
    key = f"constraints.{kind}.{name}.signal={one.signal!r}"
    if not _active(one):
      continue
    if one.signal == "overlong" and not 0 < c.reward.overlong_buffer <= (
      c.reward.overlong_max or c.reward.overlong_buffer
    ):
      raise ValueError(
        f"{key} needs a buffer: reward.overlong_buffer={c.reward.overlong_buffer} must lie between "
        f"1 and reward.overlong_max={c.reward.overlong_max or 'sampling.max_new_tokens'}"
      )
    if one.signal == "overlong" and c.schedule.new_tokens:
      raise ValueError(
        f"{key} has a fixed buffer, and schedule.new_tokens={c.schedule.new_tokens!r} moves the "
        'limit; leave it "", or take signal=truncated'
      )
    if one.signal == "format" and c.reward.format == "none":
      raise ValueError(f"{key} needs reward.format=think or think_answer")
    if isinstance(one, CostSignal) and (one.rate or one.gain):
      _check_limit(one, f"constraints.costs.{name}", c.sampling.max_new_tokens)
    if one.signal == "token" and one.token >= c.model.vocab_size:
      raise ValueError(
        f"constraints.{kind}.{name}.token={one.token} is not below model.vocab_size="
        f"{c.model.vocab_size}"
      )
    if one.signal not in SHOWN:
      try:
        verifier_config(c.reward, one.signal)
      except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_limit(cost: CostSignal, key: str, longest: int) -> None:
  low, high = (1, longest) if cost.signal == "length" else (0, 1)
  side = cost.bound.replace("_", " ")
  never, always = cost.limit < low, cost.limit >= high
  if cost.bound == "at_least":
    never, always = cost.limit > high, cost.limit <= low
  if never or always:
    raise ValueError(
      f"{key}.limit={cost.limit}: with signal={cost.signal!r} {'no' if never else 'every'} mean is "
      f"{side} that; set it between {low} and {high}"
    )
