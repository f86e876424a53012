"""Assumed distribution of response lengths, for estimates before anything is sampled."""

import dataclasses
import functools
import math
import random


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Truncated exponential distribution of response lengths.

  A response ends with the same probability after each token, and always after `most` tokens.
  """

  mean: float  # Mean tokens of a response, including truncated responses.
  most: int  # Maximum tokens of a response: sampling.max_new_tokens.

  def __post_init__(self):
    if not 0 < self.mean <= self.most:
      raise ValueError(
        f"--mean_response={self.mean:g}: set it above 0, and to at most sampling.max_new_tokens="
        f"{self.most}"
      )

  @functools.cached_property
  def rate(self) -> float:
    """Rate λ per token; 0 if all responses are truncated.

    Solves (1 - exp(-λ most)) / λ = mean by bisection.
    """
    low, high = 0.0, 1 / self.mean
    for _ in range(100):
      middle = (low + high) / 2
      mean = -math.expm1(-middle * self.most) / middle
      low, high = (middle, high) if mean > self.mean else (low, middle)
    return 0.0 if high * self.most < 1e-9 else high

  @property
  def mean_square(self) -> float:
    """Mean of the squared length, E[L²]."""
    x = self.rate * self.most
    if x < 1e-6:
      return float(self.most) ** 2
    return 2 / self.rate**2 * (1 - math.exp(-x) * (1 + x))

  def filled(self, prompt: float) -> float:
    """Mean filled cache positions of a slot over time.

    A response of length L occupies a slot for L steps, and on average fills L/2 positions after its
    prompt. So the mean over time is prompt + E[L²] / (2 E[L]), if no slot is idle.

    prompt: tokens of each prompt.
    """
    return prompt + self.mean_square / (2 * self.mean)

  def sample(self, number: int) -> list[int]:
    """Returns `number` lengths in a fixed random order.

    The lengths are the distribution's quantiles at (i + 1/2) / number, so repeated calls agree.
    """
    sampled = [self.most] * number
    if self.rate:
      quantiles = (-math.log1p(-(i + 0.5) / number) / self.rate for i in range(number))
      sampled = [min(self.most, max(1, math.ceil(x))) for x in quantiles]
    random.Random(0).shuffle(sampled)
    return sampled


def default_mean(most: int) -> float:
  """Returns half of `most`, at most 8,192 tokens.

  A mean of 8,192 tokens is typical of competition problems.
  """
  return min(8192.0, most / 2)
