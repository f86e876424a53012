"""Low-rank adapters (LoRA, arXiv:2106.09685) as leaves of the parameter tree.

With adapters, a matrix W of a layer is W + alpha / rank · A B, where A has its inputs and B its
outputs, and only A and B are trained. Everything else is frozen, and lies in the type that passes
read it in. The sum is made for one layer at a time, just before its use: a pass is the pass of a
plain model with these weights, in every family, on every mesh, experts included, and the sampler is
given the same sum.

In bfloat16 an update's A B is a hundredth of the distance between two neighbours of W, and a sum
that is rounded to the nearest one is W again. `dithered` rounds one in a hundred weights up, and
what the product comes to in the mean is what it should be.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax.models.weights import Params, Weight
from gspo_jax.settings.training import LoraConfig

_STEPS = (53_685, 43_977, 36_025)  # of 2^16, odd: 1/g, 1/g², 1/g³, where g⁴ = g + 1


@flax.struct.dataclass
class Adapted:
  """A weight and its adapter."""

  frozen: Any  # W, e.g. l N H D
  a: Any  # its inputs to r: l N H r
  b: Any  # r to its outputs: l r D
  scale: float = flax.struct.field(pytree_node=False)  # alpha / rank


def table(plain: Params, config: LoraConfig) -> Params:
  """The table of weights with adapters on `config.matrices` of every layer."""
  if not config.rank:
    return plain

  def with_adapter(path: tuple[Any, ...], w: Weight) -> Weight | Adapted:
    if f"{path[-1].name}_proj" not in config.matrices:
      return w
    sizes = dict(zip(w.letters, w.shape)) | dict(r=config.rank)
    stacked, outputs = w.letters.split(w.inputs)
    return Adapted(
      frozen=w,
      a=Weight(f"{stacked}{w.inputs}r", sizes, fan_in=w.inputs, wide=True),
      b=Weight(f"{stacked}r{outputs}", sizes, wide=True),  # 0: the model is the plain one at first
      scale=config.alpha / config.rank,
    )

  return plain.replace(blocks=jax.tree.map_with_path(with_adapter, plain.blocks))


def adapt(plain: Params, fresh: Params) -> Params:
  """Plain parameters, frozen, with the adapters of `fresh`, initial ones of a table with them."""

  def adapted(new, x):
    return new.replace(frozen=x) if is_adapted(new) else x

  return jax.tree.map(adapted, fresh, plain, is_leaf=is_adapted)


def merged(params: Any, dtype: Any = None) -> Any:
  """The same without adapters: every adapted weight is the sum, made in float32 and rounded once,
  to `dtype`; default: that of the frozen one. Plain parameters stay as they are."""

  def rounded(x: Any) -> Any:
    if not is_adapted(x):
      return x
    return _sum(x, jax.lax.Precision.HIGHEST).astype(x.frozen.dtype if dtype is None else dtype)

  return jax.tree.map(rounded, params, is_leaf=is_adapted)


def dithered(params: Any) -> Any:
  """The same as passes read it, trainer's and sampler's: in the type of the frozen weights, where
  that is bfloat16 rounded up or down so that the change of many weights is right in the mean.

  up if the sum's place between its neighbours, 0 to 1, is at least 1 - u. Without a change there is
  none. u is the same in all updates: the fraction of 0.819 i + 0.671 j (+ 0.550 k) for the weight
  [i, j(, k)] of a layer, which fills [0, 1) evenly along each axis (the sequence R3 of M. Roberts).
  The gradient is that of the sum.
  """

  def rounded(x: Any) -> Any:
    if not is_adapted(x):
      return x
    total = _sum(x)
    if x.frozen.dtype != jnp.bfloat16:
      return total
    constant = jax.lax.stop_gradient(total)
    stacked = _stacked(x)
    places = jnp.ogrid[tuple(slice(size) for size in total.shape[stacked:])]
    # The 16 bits of a float32 that bfloat16 leaves out, and a carry where they overflow.
    u = sum(i.astype(jnp.uint16) * jnp.uint16(step) for i, step in zip(places, _STEPS))
    u = u.astype(jnp.uint32)[(None,) * stacked]
    bits = jax.lax.bitcast_convert_type(constant, jnp.uint32) + u
    near = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF_0000), jnp.float32)
    return (total + (near - constant)).astype(jnp.bfloat16)  # exactly near

  return jax.tree.map(rounded, params, is_leaf=is_adapted)


def _sum(x: Adapted, precision: jax.lax.Precision | None = None) -> jax.Array:
  """In float32."""
  letters = "stuvwxyz"[: x.frozen.ndim]
  inputs = letters[: x.a.ndim - 1]
  outputs = letters[: _stacked(x)] + "r" + letters[x.a.ndim - 1 :]
  product = jnp.einsum(f"{inputs}r,{outputs}->{letters}", x.a, x.b, precision=precision)
  return x.frozen.astype(product.dtype) + product * x.scale


def _stacked(x: Adapted) -> int:
  """The number of leading dimensions over which matrices are stacked: layers, experts."""
  return x.a.ndim + x.b.ndim - 2 - x.frozen.ndim


def split(params: Any) -> tuple[Any, Any]:
  """What an update changes, and what it does not: each has None where the other has an array.
  Without adapters it changes everything."""
  leaves = jax.tree.leaves(params, is_leaf=is_adapted)
  nothing = jax.tree.map(lambda _: None, params)
  if not any(is_adapted(x) for x in leaves):
    return params, nothing

  def trained(x):
    return x.replace(frozen=None) if is_adapted(x) else None

  def frozen(x):
    return x.replace(a=None, b=None) if is_adapted(x) else x

  return tuple(jax.tree.map(part, params, is_leaf=is_adapted) for part in (trained, frozen))


def join(trained: Any, frozen: Any) -> Any:
  """The parameters that were split."""
  return jax.tree.map(
    lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
  )


def is_adapted(x: Any) -> bool:
  return isinstance(x, Adapted)
