"""Alarms: warnings about metrics, before a run fails.

GRPO on long responses, or on mixture-of-experts models, fails slowly: the entropy vanishes, the
ratio drifts from 1, the gradient jumps, the reward falls and does not recover (arXiv:2507.18071,
§3). Each alarm has a condition on metrics. Most conditions have a threshold in the section
`alarms`. A warning is printed when the condition becomes true. The metric `warning/<name>` is 1
while the condition holds.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from gspo_jax.settings.training import AlarmConfig


class Alarms:
  """Checks metrics rows in order.

  All state follows from the rows. A resumed run passes the rows of metrics.jsonl as `rows`, and
  then prints the same warnings as an uninterrupted run.
  """

  def __init__(self, config: AlarmConfig, rows: Iterable[Mapping[str, Any]] = ()):
    self._config = config
    self._norms: collections.deque[float] = collections.deque(maxlen=WINDOW)
    self._rewards: collections.deque[float] = collections.deque(maxlen=WINDOW)
    self._best = -float("inf")  # Highest mean reward over WINDOW iterations so far.
    self._range = math.inf, -math.inf  # Smallest and largest reward so far.
    self._idle = 0  # Consecutive iterations with a gradient of 0.
    self._compared = False  # Whether `_outside_range` had a result for an earlier row.
    self._active: set[str] = set()  # Alarms of the previous row.
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
    """Yields name and message of each true condition. Updates the statistics of earlier rows."""
    c = self._config
    norm, entropy, reward = (_finite(row.get(x)) for x in ("grad_norm", "entropy", "reward/mean"))
    if norm is not None:
      self._idle = 0 if norm else self._idle + 1
    if norm == 0 and self._idle >= IDLE_ITERATIONS:
      name, reason = _zero_gradient_cause(row)
      yield name, f"the gradient was 0 in {self._idle} iterations in a row: {reason}"
    if norm:  # The median excludes norms of 0, such as those of a task that is still too hard.
      usual = statistics.median(self._norms) if len(self._norms) == WINDOW else math.inf
      if c.grad_norm and norm > c.grad_norm * usual:
        earlier = f"the median of the {WINDOW} norms before is {usual:.3g}"
        yield "grad_norm", f"gradient norm {norm:.3g}; {earlier}"
      self._norms.append(norm)
    trained = row.get("ratio/mean") != 0  # The mean ratio is 0 if no token was trained on.
    if c.entropy and entropy is not None and entropy < c.entropy and trained:
      yield "entropy", f"the policy's entropy is down to {entropy:.3g} nats per token"
    for bound in _BOUNDS:
      value, limit = _finite(row.get(ALARMS[bound.name].metric)), bound.limit(c, row)
      if value is not None and limit and value > limit:
        yield bound.name, bound.text.format(value, row.get("clip_range"))
    if (share := _outside_range(row)) is not None:
      if c.mismatch and share > OUTSIDE and not self._compared:
        yield "mismatch_clips", _OUTSIDE_TEXT.format(share, row["clip_range"], row[_DISTANCE])
      self._compared = True
    if reward is not None:
      width = self._reward_range(row)
      self._rewards.append(reward)
      if len(self._rewards) == WINDOW:
        mean = statistics.fmean(self._rewards)
        self._best = max(self._best, mean)
        if c.reward and mean < self._best - c.reward * width:
          fall = f"from {self._best:.3g} to {mean:.3g} (means of {WINDOW} iterations)"
          yield "reward", f"the reward has fallen {fall}"
    # Training has the metric `verifier/unknown`. Each evaluation has this metric with a prefix.
    shares = [v for k, v in row.items() if k.endswith("verifier/unknown")]
    share = max(filter(None, map(_finite, shares)), default=0.0)
    if c.unknown and share > c.unknown:
      yield "unknown", f"no verdict on {share:.2%} of the responses"

  def _reward_range(self, row: Mapping[str, Any]) -> float:
    """Returns the range of rewards so far; 1 if no row has had `reward/min` and `reward/max`."""
    low, high = (_finite(row.get(f"reward/{name}")) for name in ("min", "max"))
    if low is not None and high is not None:
      self._range = min(self._range[0], low), max(self._range[1], high)
    low, high = self._range
    return high - low if low <= high else 1.0


class Alarm(NamedTuple):
  """Texts about an alarm, for the terminal and the report."""

  title: str  # A sentence about the problem.
  advice: str  # Sentences about what to change.
  metric: str  # Metric whose chart the report links to.
  page: str = "docs/running.md#alarms"  # Section of the documentation about the alarm.


_IDLE = "The gradient has been 0 for at least five iterations: "
ALARMS = {
  "grad_norm": Alarm(
    "The gradient norm is far above its usual size.",
    "If the norm stays large, lower rl_optimizer.learning_rate.",
    "grad_norm",
  ),
  "entropy": Alarm(
    "The policy has collapsed to few responses: its entropy is below alarms.entropy.",
    "Lower rl_optimizer.learning_rate, or raise objective.clip_high or objective.entropy_coef.",
    "entropy",
  ),
  "ratio": Alarm(
    "The policy moves faster than clipping can limit: importance ratios differ from 1 by more than "
    "the limit of alarms.ratio in the mean.",
    "Lower rl_optimizer.learning_rate, or take fewer updates (rl.minibatches, rl.epochs).",
    "ratio/deviation",
  ),
  "mismatch": Alarm(
    "Log-probs of sampler and trainer differ by more than alarms.mismatch times the clip range.",
    "Give the sampler the trainer's types (engine.dtype, engine.weights_dtype, "
    "engine.cache_dtype), or widen the clip range.",
    "mismatch/sequence/abs/mean",
    "docs/sampling.md#log-probabilities",
  ),
  "mismatch_clips": Alarm(
    "The sampler's rounding alone puts more than a tenth of the responses outside the clip range.",
    "Choose one of three remedies. If you set objective.old_logp=recompute, ratios begin at 1, but "
    "each iteration needs a forward pass of the trainer. If you raise objective.clip_low and "
    "objective.clip_high, no time is lost, but updates may be larger. If you set "
    "objective.old_logp=behaviour and objective.correction.name=masked, each iteration needs a "
    "forward pass, and responses outside the range of the correction are masked.",
    "clip_fraction/sequence",
    "docs/objectives.md#which-old-log-probs-which-range",
  ),
  "mismatch_tail": Alarm(
    "For more than a tenth of the tokens, probabilities of sampler and trainer differ by a factor "
    "above 2.",
    "Give the sampler the trainer's types (engine.dtype, engine.weights_dtype, "
    "engine.cache_dtype). If they are equal already, sampler and trainer compute different models: "
    "compare their weights and tokens.",
    "mismatch/tail",
    "docs/sampling.md#log-probabilities",
  ),
  "ratio_tail": Alarm(
    "Updates have changed the probability of more than a tenth of the tokens by a factor above 2.",
    "Lower rl_optimizer.learning_rate, or take fewer updates (rl.minibatches, rl.epochs).",
    "ratio/tail",
  ),
  "recomputed": Alarm(
    "Rounding errors of recomputed log-probs exceed alarms.mismatch times the clip range.",
    "Set compute.dtype=float32, or widen the clip range.",
    "mismatch/recomputed",
    "docs/running.md#recomputed-log-probabilities",
  ),
  "reward": Alarm(
    "The reward has fallen far below its best.",
    "Start a new run: set the key weights to an earlier checkpoint, and lower "
    "rl_optimizer.learning_rate.",
    "reward/mean",
  ),
  "unknown": Alarm(
    "The verifier gives no verdict on many responses.",
    "Read these responses and the reasons. Responses of training are in unknown/*.jsonl of the "
    "run's directory, and responses of evaluations are in rollouts/eval_*.jsonl.",
    "verifier/unknown",
    "docs/rewards.md#unknown-is-not-wrong",
  ),
  "uniform_groups": Alarm(
    f"{_IDLE}rewards are equal within each group.",
    "Use problems of another difficulty, a larger rl.group_size or graded rewards. If all "
    "responses have been wrong ever since the gradient norm jumped, lower "
    "rl_optimizer.learning_rate.",
    "groups_without_spread",
    "docs/data.md#query-set",
  ),
  "filled_groups": Alarm(
    f"{_IDLE}dynamic sampling finds no groups whose rewards differ.",
    "Use problems of another difficulty, or raise data.query_set.extra_rounds.",
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
    f"{_IDLE}nearly all responses are truncated, and therefore masked.",
    "Raise sampling.max_new_tokens, or set rl.mask_truncated=False.",
    "truncated_fraction",
    "docs/running.md#truncated-responses",
  ),
  "no_gradient": Alarm(
    f"{_IDLE}the metrics do not show the reason.",
    "Look at advantages and losses in metrics.jsonl.",
    "grad_norm",
  ),
}


def advice(name: str) -> str:
  """Returns an alarm's advice and page."""
  return f"{ALARMS[name].advice} ({ALARMS[name].page})"


WINDOW = 10  # Number of iterations over which medians and means are computed.
IDLE_ITERATIONS = 5  # Consecutive iterations with a gradient of 0 before a warning.
MASKED = 0.9  # Smallest share of truncated responses that explains a gradient of 0.
TAIL = 0.1  # Largest share of tokens with a ratio above 2 or below 1/2 that causes no warning.
RATIO = 0.005  # Smallest default limit of the mean deviation of the ratios from 1.
OUTSIDE = 0.1  # Largest share of responses outside the clip range that causes no warning.


class Bound(NamedTuple):
  """Alarm for a metric above a limit."""

  name: str  # Name of an alarm, which has the metric.
  limit: Callable[[AlarmConfig, Mapping[str, Any]], float]  # A limit of 0 disables the alarm.
  text: str  # Format string of the warning. Its arguments are metric value and clip range.


def _ratio_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  """Returns the limit of `ratio/deviation`; by default 0 for a loss without a clip range."""
  if config.ratio is not None:
    return config.ratio
  clip_range = row.get("clip_range")
  return max(RATIO, clip_range) if clip_range else 0.0


def _mismatch_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  return config.mismatch * (row.get("clip_range") or 0.0)


def _mismatch_tail_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  return TAIL if config.mismatch else 0.0


def _ratio_tail_limit(config: AlarmConfig, row: Mapping[str, Any]) -> float:
  """Returns the limit of `ratio/tail`.

  If old log-probs are not recomputed, ratios include the mismatch between sampler and trainer. Then
  the limit is higher by `mismatch/tail`, the share of tokens with a large mismatch.
  """
  mismatch = 0.0 if "mismatch/recomputed" in row else _finite(row.get("mismatch/tail")) or 0.0
  return 0.0 if config.ratio == 0 else TAIL + mismatch


# Mean over responses of |d|, where d is the trainer's log-prob minus the sampler's log-prob, as a
# mean over the response's tokens. Without the absolute value, errors of different responses would
# cancel.
_DISTANCE = "mismatch/sequence/abs/mean"
_BOUNDS = (
  Bound(
    "ratio",
    _ratio_limit,
    "importance ratios differ from 1 by {:.3g} in the mean",
  ),
  Bound(
    "mismatch",
    _mismatch_limit,
    "log-probs of sampler and trainer differ by {:.2g} in the mean, and the clip range is {:.2g}. "
    "If objective.old_logp is sampler, responses are clipped before any update. If it is "
    "recompute, ratios do not include this difference",
  ),
  Bound(
    "recomputed",
    _mismatch_limit,
    "recomputed old log-probs differ from those of the first update by {:.2g} in the mean, and the "
    "clip range is {:.2g}. From the second mini-batch on, rounding alone clips responses",
  ),
  Bound(
    "mismatch_tail",
    _mismatch_tail_limit,
    "probabilities of sampler and trainer differ by a factor above 2 on {:.1%} of the tokens",
  ),
  Bound(
    "ratio_tail",
    _ratio_tail_limit,
    "importance ratios of {:.1%} of the tokens differ from 1 by a factor above 2",
  ),
)
_OUTSIDE_TEXT = (
  "rounding in the sampler puts an estimated {:.0%} of the responses outside the clip range of "
  "{:.2g} before any update: log-probs of sampler and trainer differ by {:.2g} in the mean"
)


def _outside_range(row: Mapping[str, Any]) -> float | None:
  """Estimates the share of responses outside the clip range before any update.

  Let d be a response's log-prob difference between trainer and sampler, as a mean over tokens. The
  estimate assumes that d is normal over responses, with mean 0 and standard deviation σ. Then the
  mean of |d| is σ √(2/π). The row has this mean as `mismatch/sequence/abs/mean`. The result is None
  if the row lacks this mean or the clip range, if old log-probs are recomputed, or if a correction
  masks responses.
  """
  distance, clip_range = _finite(row.get(_DISTANCE)), _finite(row.get("clip_range"))
  remedies = row.keys() & {"mismatch/recomputed", "correction/masked"}
  if distance is None or not clip_range or remedies:
    return None
  return math.erfc(clip_range / (distance * math.sqrt(math.pi))) if distance else 0.0


def _zero_gradient_cause(row: Mapping[str, Any]) -> tuple[str, str]:
  """Returns the alarm's name, and the reason for a gradient of 0."""
  dropped = row.get("query_set/dropped")
  masked, recorded = row.get("masked_responses"), row.get("recorded/responses")
  truncated = 1.0 if masked == recorded else row.get("truncated_fraction") or 0.0
  if masked and truncated >= MASKED:
    share = f"{truncated:.0%} of the responses"
    return "all_masked", f"{share} were truncated, and rl.mask_truncated masks them"
  if dropped and dropped == row.get("query_set/tried"):
    return "all_dropped", "data.query_set.drop_after has dropped all tried prompts"
  if row.get("dynamic_sampling/filled_groups"):
    return "filled_groups", "groups of equal rewards filled the batch, after all rounds of sampling"
  if row.get("groups_without_spread") == 1:
    return "uniform_groups", "the rewards within each group are equal"
  return "no_gradient", "the metrics do not show the reason"


def _finite(value: float | None) -> float | None:
  """Returns the value; None if it is absent, NaN or infinite (null in metrics.jsonl)."""
  return value if value is not None and math.isfinite(value) else None
