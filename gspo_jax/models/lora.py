"""Low-rank adapters (LoRA, arXiv:2106.09685) as leaves of the parameter tree.

With adapters, a matrix W of a layer is W + ALPHA / rank · A B, where A has its inputs and B its
outputs, and only A and B are trained. Everything else is frozen, and lies in the type that passes
read it in. The sum is made for one layer at a time, just before its use: a pass is the pass of a
plain model with these weights, in every family, on every mesh, experts included, and what the
sampler and `hf.save` are given is the same sum.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax.models.weights import Params, Weight

# As in https://thinkingmachines.ai/blog/lora: with the factor 1 / rank the best learning rate
# hardly depends on the rank, and is about ten times that of training all parameters.
ALPHA = 32


@flax.struct.dataclass
class Adapted:
  """A weight and its adapter."""

  frozen: Any  # W, e.g. l N H D
  a: Any  # its inputs to r: l N H r
  b: Any  # r to its outputs: l r D


def table(plain: Params, rank: int) -> Params:
  """The table of weights with adapters of this rank on every matrix of the layers but those that
  are read in float32: routers."""

  def with_adapter(w: Weight) -> Weight | Adapted:
    if w.fan_in is None or w.wide:
      return w
    sizes = dict(zip(w.letters, w.shape)) | dict(r=rank)
    stacked, outputs = w.letters.split(w.inputs)
    return Adapted(
      frozen=w,
      a=Weight(f"{stacked}{w.inputs}r", sizes, fan_in=w.inputs, wide=True),
      b=Weight(f"{stacked}r{outputs}", sizes, wide=True),  # 0: the model is the plain one at first
    )

  return plain.replace(blocks=jax.tree.map(with_adapter, plain.blocks))


def adapt(plain: Params, fresh: Params) -> Params:
  """Plain parameters, frozen, with the adapters of `fresh`, initial ones of a table with them."""

  def adapted(new, x):
    return new.replace(frozen=x) if _is_adapted(new) else x

  return jax.tree.map(adapted, fresh, plain, is_leaf=_is_adapted)


def merged(params: Any) -> Any:
  """The same without adapters: every adapted weight is the sum, in the type of the frozen one.
  Plain parameters stay as they are."""
  return jax.tree.map(lambda x: _sum(x) if _is_adapted(x) else x, params, is_leaf=_is_adapted)


def _sum(x: Adapted) -> jax.Array:
  stacked = x.a.ndim + x.b.ndim - 2 - x.frozen.ndim  # dimensions: layers, experts
  letters = "stuvwxyz"[: x.frozen.ndim]
  inputs, outputs = letters[: x.a.ndim - 1], letters[:stacked] + "r" + letters[x.a.ndim - 1 :]
  product = jnp.einsum(f"{inputs}r,{outputs}->{letters}", x.a, x.b)
  total = x.frozen.astype(product.dtype) + product * (ALPHA / x.a.shape[-1])
  return total.astype(x.frozen.dtype)


def split(params: Any) -> tuple[Any, Any]:
  """What an update changes, and what it does not: each has None where the other has an array.
  Without adapters it changes everything."""
  leaves = jax.tree.leaves(params, is_leaf=_is_adapted)
  nothing = jax.tree.map(lambda _: None, params)
  if not any(_is_adapted(x) for x in leaves):
    return params, nothing

  def trained(x):
    return x.replace(frozen=None) if _is_adapted(x) else None

  def frozen(x):
    return x.replace(a=None, b=None) if _is_adapted(x) else x

  return tuple(jax.tree.map(part, params, is_leaf=_is_adapted) for part in (trained, frozen))


def join(trained: Any, frozen: Any) -> Any:
  """The parameters that were split."""
  return jax.tree.map(
    lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
  )


def _is_adapted(x: Any) -> bool:
  return isinstance(x, Adapted)
