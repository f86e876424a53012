"""AdamW with a schedule and a gradient-norm bound, from Optax."""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gspo_jax.settings.training import OptimizerConfig


class Optimizer(NamedTuple):
  """An Optax transformation whose `update` also takes `numbers`, as a program's arguments: a sweep
  over them compiles nothing anew. Equal ones but for their numbers have the same functions."""

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Any, Mapping[str, Any]], tuple[Any, Any]]
  numbers: Mapping[str, float]


def make(config: OptimizerConfig, updates: int) -> Optimizer:
  """The chain: bound the global norm, then AdamW on the schedule of a run of `updates` updates."""
  chain = _chain(config.b1, config.b2, config.eps, bounded=config.clip_norm > 0)
  return Optimizer(*chain, numbers(config, updates))


def numbered(tx: optax.GradientTransformation | Optimizer) -> Optimizer:
  """Any transformation as an Optimizer; one of Optax has no numbers."""
  if isinstance(tx, Optimizer):
    return tx
  return Optimizer(tx.init, lambda grads, state, params, _: tx.update(grads, state, params), {})


def numbers(config: OptimizerConfig, updates: int) -> dict[str, float]:
  """What of the configuration is an argument of the update; `updates`: of the whole run."""
  updates = config.schedule_steps or updates
  schedule = dict(
    peak=config.learning_rate,
    warmup=config.warmup_steps,
    rest=max(1, updates - config.warmup_steps - 1),  # from the first update after it to the last
    final=1.0 if config.schedule == "constant" else config.final_fraction,
    cosine=float(config.schedule == "cosine"),
  )
  terms = dict(weight_decay=config.weight_decay, clip_norm=config.clip_norm)
  return schedule | {
    key: value for key, value in terms.items() if value
  }  # 0: there is no such term


def rate(numbers: Mapping[str, Any], count: Any, np: Any = jnp) -> Any:
  """Learning rate of the update after `count` others; `np`: the library that computes it. (Optax's
  schedules branch in Python on their numbers, which cannot be a program's arguments then.)"""
  peak, warmup = numbers["peak"], numbers["warmup"]
  # From peak/warmup rather than 0: an update of size zero would be a wasted rollout.
  first = peak / np.maximum(warmup, 1)
  rise = first + (peak - first) * count / np.maximum(warmup, 1)
  done = np.clip((count - warmup) / numbers["rest"], 0, 1)
  done = np.where(numbers["cosine"], (1 - np.cos(np.pi * done)) / 2, done)
  return np.where(count < warmup, rise, peak * (1 - (1 - numbers["final"]) * done))


def rates(config: OptimizerConfig, updates: int) -> np.ndarray:
  """The schedule as numbers on the host, one per update: reading it costs no device a thing."""
  return rate(numbers(config, updates), np.arange(updates), np)


@jax.jit
def last_rate(rates: np.ndarray, step: jax.Array, waits: int = 0) -> jax.Array:
  """The rate of the last update that was applied: of `TrainState.step`, which does not count those
  that were left out, less `waits` in which other parameters alone were updated; 0: of none yet."""
  made = step - waits
  return jnp.where(made > 0, rates[jnp.maximum(made - 1, 0)], 0.0)


@functools.cache
def _chain(b1: float, b2: float, eps: float, bounded: bool) -> tuple[Callable, Callable]:
  """`init` and `update` of an Optimizer."""

  def given(numbers: Mapping[str, Any]) -> optax.GradientTransformation:
    adamw = optax.adamw(
      functools.partial(rate, numbers),
      b1=b1,
      b2=b2,
      eps=eps,
      weight_decay=numbers.get("weight_decay", 0.0),
      mask=decayed,
    )
    if not bounded:
      return adamw
    return optax.chain(optax.clip_by_global_norm(numbers["clip_norm"]), adamw)

  def init(params: Any) -> Any:
    return given(collections.defaultdict(float)).init(params)  # no number is in the state

  def update(grads: Any, state: Any, params: Any, numbers: Mapping[str, Any]) -> tuple[Any, Any]:
    return given(numbers).update(grads, state, params)

  return init, update


def decayed(params: Any) -> Any:
  """True for matrices, False for norms and biases."""
  return jax.tree.map_with_path(
    lambda path, _: not path[-1].name.endswith(("norm", "bias")), params
  )
