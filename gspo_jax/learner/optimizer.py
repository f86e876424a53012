"""AdamW from Optax, with a schedule of the learning rate and a bound on the gradient norm."""

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspo_jax.settings.training import OptimizerConfig


class Optimizer(NamedTuple):
  """An Optax transformation with hyperparameters as an argument of `update`.

  Optimizers share the functions `init` and `update` if they have the same `b1` and `b2`, and if all
  or none of them bound the gradient norm. So a sweep over values of hyperparameters compiles once.
  """

  init: Callable[[Any], Any]
  update: Callable[[Any, Any, Any, Mapping[str, Any]], tuple[Any, Any]]
  hyperparameters: Mapping[str, float]


def make(config: OptimizerConfig, updates: int) -> Optimizer:
  """Builds the optimizer for a run of `updates` updates."""
  chain = _chain(config.b1, config.b2, bounded=config.clip_norm > 0)
  return Optimizer(*chain, hyperparameters(config, updates))


def as_optimizer(tx: optax.GradientTransformation | Optimizer) -> Optimizer:
  """Wraps an Optax transformation as an `Optimizer` without hyperparameters.

  An `Optimizer` is returned unchanged.
  """
  if isinstance(tx, Optimizer):
    return tx
  return Optimizer(tx.init, lambda grads, state, params, _: tx.update(grads, state, params), {})


def hyperparameters(config: OptimizerConfig, updates: int) -> dict[str, float]:
  """Returns the hyperparameters of an optimizer for a run of `updates` updates.

  The entries `weight_decay`, `clip_norm` and `router_rate` exist only if they have an effect.
  """
  schedule = dict(
    peak=config.learning_rate,
    warmup=config.warmup_steps,
    # Updates are counted from 0. The last one, `updates - 1`, has the final learning rate.
    decay_updates=max(1, updates - config.warmup_steps - 1),
    final=1.0 if config.schedule == "constant" else config.final_fraction,
    cosine=float(config.schedule == "cosine"),
  )
  terms = dict(weight_decay=config.weight_decay, clip_norm=config.clip_norm)
  # A value of 0 means that the optimizer has no such term.
  terms = {key: value for key, value in terms.items() if value}
  if config.router_rate != 1:
    terms["router_rate"] = config.router_rate
  return schedule | terms


def rate(schedule: Mapping[str, Any], count: Any) -> Any:
  """Returns the learning rate of update number `count`, counted from 0.

  The schedules of Optax are not used, since they test arguments with Python's `if`. Such arguments
  cannot be traced.
  """
  peak, warmup = schedule["peak"], schedule["warmup"]
  # The warmup starts at peak / warmup, not at 0, since an update with a learning rate of 0 would
  # waste its rollout.
  first = peak / jnp.maximum(warmup, 1)
  rise = first + (peak - first) * count / jnp.maximum(warmup, 1)
  progress = jnp.clip((count - warmup) / schedule["decay_updates"], 0, 1)
  progress = jnp.where(schedule["cosine"], (1 - jnp.cos(jnp.pi * progress)) / 2, progress)
  return jnp.where(count < warmup, rise, peak * (1 - (1 - schedule["final"]) * progress))


def last_rate(schedule: Mapping[str, Any], opt_state: Any) -> jax.Array:
  """Returns the learning rate of the last applied update; 0 before the first.

  Args:
    schedule: hyperparameters of the optimizer.
    opt_state: state of the optimizer, which counts the applied updates.
  """
  states = jax.tree.leaves(opt_state, is_leaf=_has_rate)
  return _rate_after(schedule, next(filter(_has_rate, states)).count)


def _has_rate(state: Any) -> bool:
  return isinstance(state, optax.ScaleByScheduleState)


@jax.jit
def _rate_after(schedule: Mapping[str, Any], count: jax.Array) -> jax.Array:
  return jnp.where(count > 0, rate(schedule, count - 1), 0.0)


@functools.cache
def _chain(b1: float, b2: float, bounded: bool) -> tuple[Callable, Callable]:
  """Builds `init` and `update` of an `Optimizer`.

  The result is cached, so equal arguments give the same functions.

  Args:
    bounded: whether there is a bound on the gradient norm.
  """

  def transformation(hyperparameters: Mapping[str, Any]) -> optax.GradientTransformation:
    adamw = optax.adamw(
      functools.partial(rate, hyperparameters),
      b1=b1,
      b2=b2,
      weight_decay=hyperparameters.get("weight_decay", 0.0),
      mask=decayed,
    )
    if not bounded:
      return adamw
    return optax.chain(optax.clip_by_global_norm(hyperparameters["clip_norm"]), adamw)

  def init(params: Any) -> Any:
    # The initial state does not depend on hyperparameters, so any values will do.
    return transformation(collections.defaultdict(float)).init(params)

  def update(
    grads: Any, state: Any, params: Any, hyperparameters: Mapping[str, Any]
  ) -> tuple[Any, Any]:
    updates, state = transformation(hyperparameters).update(grads, state, params)
    if "router_rate" in hyperparameters:
      factor = hyperparameters["router_rate"]  # Also scales weight decay.
      updates = jax.tree.map_with_path(
        lambda path, x: x * factor if path[-1].name in ("router", "router_bias") else x, updates
      )
    return updates, state

  return init, update


def decayed(params: Any) -> Any:
  """Marks the parameters with weight decay, in a tree of bools.

  All parameters have weight decay, except norms, biases, and the convolutions and decays of linear
  attention.
  """
  without = ("norm", "bias", "conv", "log_decay")
  return jax.tree.map_with_path(lambda path, _: not path[-1].name.endswith(without), params)
