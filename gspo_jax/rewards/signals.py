"""Signals for the section `constraints`: further rewards and costs of responses.

A signal is a number for each response. It is a property of the response, such as the length, or the
reward from a further verifier.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gspo_jax.rewards import shaping
from gspo_jax.rewards.scorer import Prompt, Scorer, check_importable, open_scorers
from gspo_jax.settings.rewards import (
  ConstraintConfig,
  CostSignal,
  RewardConfig,
  RewardSignal,
  verifier_config,
)


def check_signals(config: ConstraintConfig) -> None:
  """Raises ValueError if the module of a signal's verifier cannot be found."""
  for kind, active in ("rewards", config.active_rewards), ("costs", config.active_costs):
    for name, entry in active.items():
      if entry.signal in config.verifiers:
        check_importable(entry.signal, f"constraints.{kind}.{name}.signal")


class Signals:
  """Measures the signals of responses.

  Args:
    config: section `constraints` of the configuration.
    reward: section `reward`, for the format and the limits of overlong responses.
    scorers: an open scorer for each of `config.verifiers`, by name.
  """

  def __init__(self, config: ConstraintConfig, reward: RewardConfig, scorers: Mapping[str, Scorer]):
    self._signals, self._reward, self.scorers = config.signals, reward, scorers

  def __call__(
    self,
    responses: Sequence[str],
    tokens: Sequence[np.ndarray],
    stopped: Sequence[bool],
    prompts: Sequence[Prompt],
  ) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """Measures B responses.

    Args:
      responses: texts of the responses.
      tokens: sampled token ids of each response.
      stopped: whether each response ended with a stop token or stop string; False if truncated.
      prompts: prompt of each response.

    Returns:
      Two dicts. The first has each signal, float32 [B], by name. The second has an entry for each
      response on which a verifier gave no verdict. The key is the response's index in the batch.
      The value is a text that names the verifier and the reason.
    """
    verdicts = {
      name: scorer(responses, prompts, finished=stopped) for name, scorer in self.scorers.items()
    }
    unknown = {i: f"{n}: {why}" for n, s in verdicts.items() for i, why in s.unknown.items()}
    signals = {}
    for name, entry in self._signals.items():
      scores = verdicts.get(entry.signal)
      values = scores.reward if scores else self._measure(entry, responses, tokens, stopped)
      signals[name] = np.asarray(values, np.float32)
    return signals, unknown

  def _measure(
    self,
    entry: RewardSignal | CostSignal,
    responses: Sequence[str],
    tokens: Sequence[np.ndarray],
    stopped: Sequence[bool],
  ) -> Sequence[float] | np.ndarray:
    """Measures a signal without a verifier, such as the length."""
    if entry.signal == "truncated":
      return ~np.asarray(stopped, bool)
    if entry.signal == "format":
      return [shaping.keeps_format(response, self._reward.format) for response in responses]
    if entry.signal == "text":
      return [entry.text in response for response in responses]
    if entry.signal == "token":
      return [entry.token in ids for ids in tokens]
    lengths = [len(ids) for ids in tokens]
    if entry.signal == "overlong":
      return -shaping.overlong(lengths, self._reward.overlong_max, self._reward.overlong_buffer)
    return lengths


@contextlib.contextmanager
def open_signals(config: ConstraintConfig, reward: RewardConfig) -> Iterator[Signals | None]:
  """Opens the configured signals. Yields None if none is configured.

  Raises:
    ValueError: a verifier cannot be started.
  """
  if not config.enabled:
    yield None
    return
  sections = {name: verifier_config(reward, name) for name in config.verifiers}
  with open_scorers(sections, "constraints: signal") as scorers:
    yield Signals(config, reward, scorers)
