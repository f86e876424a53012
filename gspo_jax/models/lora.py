"""Low-rank adapters (LoRA, arXiv:2106.09685) as leaves of the parameter tree.

A layer with adapters uses W + alpha / rank · A B in place of its matrix W. A has the inputs of W,
and B the outputs. Only A and B are trained; all other parameters are frozen, in the dtype in which
passes use them. The sum is computed for one layer at a time, just before the layer uses it. So
adapters work in every family, on every mesh and for experts. The sampler receives the same sums.

If W is in bfloat16, one update changes the sum by about a hundredth of the step from W to the next
bfloat16 number, so rounding to nearest would give W again. `dithered` instead rounds about one sum
in a hundred to the next number, so the mean change over many weights is right.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from gspo_jax.models.weights import Params, Weight
from gspo_jax.settings.training import LoraConfig

# Odd numbers near 2^16 / g, 2^16 / g², 2^16 / g³, where g⁴ = g + 1, and near 2^16 (√2 - 1).
_STEPS = (53_685, 43_977, 36_025, 27_145)

# A gate has an adapter if q has one, since Qwen3-Next's files store both in one tensor.
_WITH = dict(q_gate="q", z="q")


@flax.struct.dataclass
class Adapted:
  """A matrix W and its adapter; in brackets the axes of attention's output projection."""

  frozen: Any  # W [l N H D]
  a: Any  # A, from inputs to r [l N H r]
  b: Any  # B, from r to outputs [l r D]
  scale: float = flax.struct.field(pytree_node=False)  # alpha / rank


def table(plain: Params, config: LoraConfig) -> Params:
  """Declares adapters on `config.matrices` of every layer; rank 0 returns `plain`."""
  if not config.rank:
    return plain

  def with_adapter(path: tuple[Any, ...], w: Weight) -> Weight | Adapted:
    name = path[-1].name
    if f"{_WITH.get(name, name)}_proj" not in config.matrices:
      return w
    sizes = dict(zip(w.letters, w.shape)) | dict(r=config.rank)
    stacked, outputs = w.letters.split(w.inputs)
    return Adapted(
      frozen=w,
      a=Weight(f"{stacked}{w.inputs}r", sizes, fan_in=w.inputs, wide=True),
      b=Weight(f"{stacked}r{outputs}", sizes, wide=True),  # B is 0, so the first sum is W.
      scale=config.alpha / config.rank,
    )

  return plain.replace(blocks=jax.tree.map_with_path(with_adapter, plain.blocks))


def adapt(plain: Params, fresh: Params) -> Params:
  """Combines plain, frozen parameters with adapters.

  fresh: initialised parameters of `table`; only their adapters are used.
  """

  def adapted(new, x):
    return new.replace(frozen=x) if is_adapted(new) else x

  return jax.tree.map(adapted, fresh, plain, is_leaf=is_adapted)


def merged(params: Any, dtype: Any = None) -> Any:
  """Merges adapters in float32, then rounds to nearest in `dtype`.

  Parameters without adapters are unchanged.

  dtype: dtype of the merged matrices. None means the dtype of the frozen matrices.
  """

  def rounded(x: Any) -> Any:
    if not is_adapted(x):
      return x
    return _sum(x, jax.lax.Precision.HIGHEST).astype(x.frozen.dtype if dtype is None else dtype)

  return jax.tree.map(rounded, params, is_leaf=is_adapted)


def dithered(params: Any) -> Any:
  """Merges adapters, with dithered rounding if W is in bfloat16.

  Trainer and sampler compute with these matrices. A sum s lies between two numbers a and b of
  bfloat16, with |a| < |b|, at the fraction f = (s - a) / (b - a). Each element of W has a number u
  between 0 and 1. The sum is rounded to b if f >= 1 - u, else to a. The numbers u are evenly
  distributed, so the mean of many weights is right. A sum equal to a number of bfloat16 is
  unchanged.

  For element [i, j, k, n] of one layer's or one expert's W, u is the fractional part of
  0.819 i + 0.671 j + 0.550 k + 0.414 n (the sequence R3 of M. Roberts, and √2 - 1 for a fourth
  axis). Indices of missing axes are 0. u is evenly distributed along each axis, and the same in all
  updates. The gradient is that of the exact sum.
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
    # The sum of u and the 16 bits dropped by bfloat16 carries into the kept bits if f >= 1 - u.
    u = sum(i.astype(jnp.uint16) * jnp.uint16(step) for i, step in zip(places, _STEPS))
    u = u.astype(jnp.uint32)[(None,) * stacked]
    bits = jax.lax.bitcast_convert_type(constant, jnp.uint32) + u
    near = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF_0000), jnp.float32)
    return (total + (near - constant)).astype(jnp.bfloat16)  # Equals `near`.

  return jax.tree.map(rounded, params, is_leaf=is_adapted)


def materialize(params: Any, dtype: Any) -> Any:
  """Merges adapters for export.

  Parameters without adapters are unchanged. If W is in bfloat16, the result is that of `dithered`,
  with which trainer and sampler compute. If W is in float32 and `dtype` is bfloat16, a sum is
  dithered if its element of W is exact in bfloat16, and rounded to nearest otherwise. Elements of
  models published in bfloat16 are exact.

  Args:
    params: parameters with adapters.
    dtype: dtype to which the caller will cast the result, or None for no cast. Unless it is
      bfloat16, sums of a float32 W stay in float32.
  """

  def rounded(x: Any) -> Any:
    if not is_adapted(x) or x.frozen.dtype == jnp.bfloat16:
      return dithered(x)
    total = _sum(x, jax.lax.Precision.HIGHEST)
    if dtype != jnp.bfloat16:
      return total
    narrow = x.frozen.astype(jnp.bfloat16)
    exact = narrow.astype(x.frozen.dtype) == x.frozen
    return jnp.where(exact, dithered(x.replace(frozen=narrow)), total.astype(jnp.bfloat16))

  return jax.tree.map(rounded, params, is_leaf=is_adapted)


def _sum(x: Adapted, precision: jax.lax.Precision | None = None) -> jax.Array:
  """Returns W + alpha / rank · A B in float32."""
  letters = "stuvwxyz"[: x.frozen.ndim]
  inputs = letters[: x.a.ndim - 1]
  outputs = letters[: _stacked(x)] + "r" + letters[x.a.ndim - 1 :]
  product = jnp.einsum(f"{inputs}r,{outputs}->{letters}", x.a, x.b, precision=precision)
  return x.frozen.astype(product.dtype) + product * x.scale


def _stacked(x: Adapted) -> int:
  """Returns the number of leading stacked dimensions: layers, experts."""
  return x.a.ndim + x.b.ndim - 2 - x.frozen.ndim


def split(params: Any) -> tuple[Any, Any]:
  """Splits parameters into trained and frozen ones.

  Both trees have the structure of `params`, with None for the arrays of the other tree. If there
  are no adapters, all parameters are trained.
  """
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
  """Undoes `split`."""
  return jax.tree.map(
    lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
  )


def is_adapted(x: Any) -> bool:
  return isinstance(x, Adapted)
