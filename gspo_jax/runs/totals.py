"""What a run has cost since its first iteration."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Totals:
  """Sums over iterations. A checkpoint has them, so that a run that was interrupted counts what is
  in its result once and nothing else."""

  tokens: int = 0  # sampled, discarded ones too
  flops: float = 0.0  # of the model: sampling, passes without gradient and updates

  def plus(self, tokens: int, flops: float) -> "Totals":
    """The sums after one more iteration."""
    return Totals(self.tokens + tokens, self.flops + flops)

  def metrics(self) -> dict[str, float]:
    """By the names of metrics.jsonl."""
    return {f"total/{name}": float(value) for name, value in vars(self).items()}

  def get_state(self) -> dict[str, Any]:
    """Returns JSON."""
    return dataclasses.asdict(self)
