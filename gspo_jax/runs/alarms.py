"""Warnings at configured thresholds, before a run fails.

Runs of GRPO with long responses or experts fail slowly: the entropy vanishes, the ratio drifts from
1, the gradient jumps, the reward falls and does not recover (arXiv:2507.18071, §3). A warning is
printed when its condition becomes true; the metric `warning/<name>` is 1 while the condition is
true.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from gspo_jax.settings.training import AlarmConfig


class Alarms:
  """Checks metrics rows in order.

  All state follows from the rows. A resumed run passes the rows on file, and prints the same
  warnings as an uninterrupted run.
  """

  def __init__(self, config: AlarmConfig, rows: Iterable[Mapping[str, Any]] = ()):
    self._config = config
    self._norms: collections.deque[float] = collections.deque(maxlen=WINDOW)
    self._rewards: collections.deque[float] = collections.deque(maxlen=WINDOW)
    self._best = -float("inf")
    self._range = math.inf, -math.inf  # Smallest and largest reward so far.
    self._idle = 0  # Consecutive iterations with a gradient of 0.
    self._compared = False  # Whether a row has compared sampler and trainer.
    self._active: set[str] = set()
    for row in rows:
      self(row)

  def __call__(self, row: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Returns metrics for the row, and one line per new warning."""
    active = dict(self._conditions(row))
    new = [name for name in active if name not in self._active]
    self._active = set(active)
    lines = [f"warning at step {row['step']}: {active[name]}. {advice(name)}" for name in new]
    return {f"warning/{name}": 1.0 for name in active}, lines

  def _conditions(self, row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields name and message of each true condition."""
    c = self._config
    norm, entropy, reward = (_finite(row.get(x)) for x in ("grad_norm", "entropy", "reward/mean"))
    if norm is not None:
      self._idle = 0 if norm else self._idle + 1
    if norm == 0 and self._idle >= IDLE_ITERATIONS:
      name, reason = _nothing_learned(row)
      yield name, f"the gradient was 0 in {self._idle} iterations in a row: {reason}"
    if norm:  # A norm of 0, for example of a task still too hard, is left out of the median.
      usual = statistics.median(self._norms) if len(self._norms) == WINDOW else math.inf
      if c.grad_norm and norm > c.grad_norm * usual:
        yield "grad_norm", f"gradient norm {norm:.3g}, and its median is {usual:.3g}"
      self._norms.append(norm)
    trained = row.get("ratio/mean") != 0  # The mean ratio is 0 if no token was trained on.
    if c.entropy and entropy is not None and entropy < c.entropy and trained:
      yield "entropy", f"the policy's entropy is down to {entropy:.3g} nats per token"
    for bound in _BOUNDS:
      value, limit = _finite(row.get(bound.metric)), bound.limit(c, row)
      if value is not None and limit and value > limit:
        yield bound.name, bound.text.format(value, row.get("clip_range"))
    if (share := _outside_range(row)) is not None:
      if c.mismatch and share > OUTSIDE and not self._compared:
        yield "mismatch_clips", _CLIPS.format(share, row["clip_range"], row[_DISTANCE])
      self._compared = True
    if reward is not None:
      spread = self._spread(row)
      self._rewards.append(reward)
      if len(self._rewards) == WINDOW:
        mean = statistics.fmean(self._rewards)
        self._best = max(self._best, mean)
        if c.reward and mean < self._best - c.reward * spread:
          origin = f"mean of {WINDOW}, from {self._best:.3g}"
          yield "reward", f"the reward has fallen to {mean:.3g}, {origin}"
    # Training and evaluations have such a metric.
    shares = [v for k, v in row.items() if k.endswith("verifier/unknown")]
    share = max(filter(None, map(_finite, shares)), default=0.0)
    if c.unknown and share > c.unknown:
      yield "unknown", f"no verdict on {share:.2%} of the responses"

  def _spread(self, row: Mapping[str, Any]) -> float:
    """Returns the width of the rewards' range; 1 without one."""
    low, high = (_finite(row.get(f"reward/{name}")) for name in ("min", "max"))
    if low is not None and high is not None:
      self._range = min(self._range[0], low), max(self._range[1], high)
    low, high = self._range
    return high - low if low <= high else 1.0


class Alarm(NamedTuple):
  """Texts about an alarm."""

  title: str  # A sentence.
  advice: str  # A sentence: what to change.
  metric: str  # The report links to the section with its chart.
  page: str = "docs/running.md#alarms"  # Section about the alarm.


_IDLE = "The gradient has been 0 for five iterations: "
ALARMS = {
  "grad_norm": Alarm(
    "The gradient norm is far above its usual size.",
    "If it stays there, lower rl_optimizer.learning_rate.",
    "grad_norm",
  ),
  "entropy": Alarm(
    "The policy has collapsed to few responses: its entropy is below alarms.entropy.",
    "Lower rl_optimizer.learning_rate, or raise objective.clip_high or objective.entropy_coef.",
    "entropy",
  ),
  "ratio": Alarm(
    "The policy moves faster than clipping can hold: its ratios are off 1 by more than "
    "alarms.ratio.",
    "Lower rl_optimizer.learning_rate, or take fewer updates (rl.minibatches, rl.epochs).",
    "ratio/deviation",
  ),
  "mismatch": Alarm(
    "The sampler's log-probs are off the trainer's by more than the clip range.",
    "Give the sampler the trainer's types (engine.dtype, engine.weights_dtype, "
    "engine.cache_dtype), or widen the clip range.",
    "mismatch/sequence/abs/mean",
    "docs/sampling.md#log-probabilities",
  ),
  "mismatch_clips": Alarm(
    "Rounding of the sampler alone takes more than a tenth of the responses out of the clip range.",
    "Three ways out: objective.old_logp=recompute costs a pass of the trainer, and ratios begin at "
    "1; wider objective.clip_low and objective.clip_high cost nothing, and admit larger updates; "
    "objective.old_logp=behaviour with objective.correction.name=masked costs a pass and the "
    "responses that it leaves out.",
    "clip_fraction/sequence",
    "docs/sampling.md#rollouts-in-eight-bits",
  ),
  "mismatch_tail": Alarm(
    "For more than a tenth of the tokens sampler and trainer differ by a factor above 2.",
    "Give the sampler the trainer's types (engine.dtype, engine.weights_dtype, "
    "engine.cache_dtype). If it has them, sampler and trainer are two models: compare their "
    "weights and tokens.",
    "mismatch/tail",
    "docs/sampling.md#rollouts-in-eight-bits",
  ),
  "ratio_tail": Alarm(
    "For more than a tenth of the tokens the policy has moved by a factor above 2.",
    "Lower rl_optimizer.learning_rate, or take fewer updates (rl.minibatches, rl.epochs).",
    "ratio/tail",
  ),
  "recomputed": Alarm(
    "Rounding of recomputed log-probs exceeds the clip range.",
    "Set compute.dtype=float32, or widen the clip range.",
    "mismatch/recomputed",
    "docs/running.md#recomputed-log-probabilities",
  ),
  "reward": Alarm(
    "The reward has fallen far below its best.",
    "Lower rl_optimizer.learning_rate, and start again from a checkpoint before (weights).",
    "reward/mean",
  ),
  "unknown": Alarm(
    "The verifier gives no verdict on many responses.",
    "The directory unknown/ of the run has these responses, with the reasons.",
    "verifier/unknown",
    "docs/rewards.md#unknown-is-not-wrong",
  ),
  "uniform_groups": Alarm(
    f"{_IDLE}rewards are equal within each group.",
    "Take problems of another difficulty, a larger rl.group_size or graded rewards; if all are "
    "wrong since a jump, a lower rl_optimizer.learning_rate.",
    "groups_without_spread",
    "docs/data.md#query-set",
  ),
  "filled_groups": Alarm(
    f"{_IDLE}dynamic sampling finds no groups of different rewards.",
    "Take problems of another difficulty, or raise data.query_set.extra_rounds.",
    "groups_without_spread",
    "docs/data.md#query-set",
  ),
  "all_dropped": Alarm(
    f"{_IDLE}all tried prompts are dropped.",
    "Raise data.query_set.drop_after, or add problems.",
    "query_set/dropped",
    "docs/data.md#query-set",
  ),
  "all_masked": Alarm(
    f"{_IDLE}all responses are cut off, and masked.",
    "Raise sampling.max_new_tokens, or set rl.mask_truncated=False.",
    "truncated_fraction",
    "docs/running.md#truncated-responses",
  ),
  "no_gradient": Alarm(
    f"{_IDLE}metrics do not say why.",
    "Look at advantages and losses in metrics.jsonl.",
    "grad_norm",
  ),
}


def advice(name: str) -> str:
  """Returns an alarm's advice and page."""
  return f"{ALARMS[name].advice} ({ALARMS[name].page})"


WINDOW = 10  # Iterations of medians and means.
IDLE_ITERATIONS = 5  # Consecutive iterations with a gradient of 0 before a warning.
TAIL = 0.1  # Share of tokens with a ratio above 2 or below 1/2; runs beyond it are known to fail.
OUTSIDE = 0.1  # Share of responses outside the clip range before any update.


class Bound(NamedTuple):
  """Alarm on one metric above a limit."""

  name: str
  metric: str
  limit: Callable[[AlarmConfig, Mapping[str, Any]], float]  # 0: no alarm.
  text: str  # With the metric's value and the clip range.


def _ratio_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  return config.ratio


def _mismatch_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  return config.mismatch * (row.get("clip_range") or 0.0)


def _mismatch_tail_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  return TAIL if config.mismatch else 0.0


def _ratio_tail_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  """Returns the limit. Only recomputed ratios exclude the sampler's mismatch."""
  mismatch = 0.0 if "mismatch/recomputed" in row else _finite(row.get("mismatch/tail")) or 0.0
  return TAIL + mismatch if config.ratio else 0.0


_DISTANCE = "mismatch/sequence/abs/mean"  # Not the signed mean, in which noise cancels.
_BOUNDS = (
  Bound(
    "ratio",
    "ratio/deviation",
    _ratio_limit,
    "importance ratios are off 1 by {:.3g} in the mean",
  ),
  Bound(
    "mismatch",
    _DISTANCE,
    _mismatch_limit,
    "the trainer's log-probs are off the sampler's by {:.2g} in the mean, and the clip range is "
    "{:.2g}: old_logp=sampler clips on policy, with old_logp=recompute the batch is off policy",
  ),
  Bound(
    "recomputed",
    "mismatch/recomputed",
    _mismatch_limit,
    "recomputed old log-probs are off the update's own by {:.2g} in the mean, and the clip range "
    "is {:.2g}: rounding clips from the second mini-batch on",
  ),
  Bound(
    "mismatch_tail",
    "mismatch/tail",
    _mismatch_tail_limit,
    "sampler and trainer differ by a factor above 2 on {:.1%} of the tokens",
  ),
  Bound(
    "ratio_tail",
    "ratio/tail",
    _ratio_tail_limit,
    "the policy has moved by a factor above 2 on {:.1%} of the tokens",
  ),
)
_CLIPS = (
  "an estimated {:.0%} of the responses are outside the clip range of {:.2g} before any update, by "
  "rounding of the sampler alone (mean |Δ log-prob| of a response: {:.2g})"
)


def _outside_range(row: Mapping[str, Any]) -> float | None:
  """Returns the share of responses outside the clip range by the mismatch alone.

  P(|N(0, m)| > range) with m √(2/π) the mean distance of a response. None without such a metric or
  range, with recomputed old log-probs, and with a mask of responses.
  """
  distance, clip_range = _finite(row.get(_DISTANCE)), _finite(row.get("clip_range"))
  remedies = row.keys() & {"mismatch/recomputed", "correction/masked"}
  if distance is None or not clip_range or remedies:
    return None
  return math.erfc(clip_range / (distance * math.sqrt(math.pi))) if distance else 0.0


def _nothing_learned(row: Mapping[str, Any]) -> tuple[str, str]:
  """Returns name and reason of a gradient of 0."""
  dropped = row.get("query_set/dropped")
  masked, recorded = row.get("masked_responses"), row.get("recorded/responses")
  if masked and (row.get("truncated_fraction") == 1 or masked == recorded):
    return "all_masked", "all responses were cut off, and rl.mask_truncated masks them"
  if dropped and dropped == row.get("query_set/tried"):
    return "all_dropped", "data.query_set.drop_after has dropped all tried prompts"
  if row.get("dynamic_sampling/filled_groups"):
    return "filled_groups", "groups of equal values filled the batch, after all rounds of sampling"
  if row.get("groups_without_spread") == 1:
    return "uniform_groups", "the rewards within each group are equal"
  return "no_gradient", "metrics do not say why"


def _finite(value: float | None) -> float | None:
  """Returns a finite value; None for an absent or non-finite value (null on file)."""
  return value if value is not None and math.isfinite(value) else None
