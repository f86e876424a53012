"""The mesh, and rules from the letters of an array to its sharding.

The mesh has four axes. `data` has replicas, usually one per TPU slice. `fsdp` splits parameters
over D. `expert` splits experts over E. `tensor` splits heads, feed-forward width and vocabulary.
The first three also split the sequences of a batch. The size of any axis may be 1. The mesh is in
JAX's explicit mode: shardings are part of an array's type, and a wrong one is an error in tracing.

Functions on arrays also work if no mesh is set, so a model can be called on plain arrays.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gspo_jax.settings.mesh import AXES, MeshConfig, RolloutMeshConfig, axis_sizes
from gspo_jax.system import accelerators, meshes

BATCH = ("data", "fsdp", "expert")  # Mesh axes that split the sequences of a batch.
BY_ROW = P(BATCH)
PRODUCT = "product"  # Name of products with weights, for rematerialisation policies.

# Mesh axes that may split experts in sampling; training splits experts over `expert` alone. Since
# `expert` comes first, the experts of a chip in sampling are among its experts in training.
SLICE = ("expert", "fsdp")

Axes = str | tuple[str, ...]  # A mesh axis, or several.
Rules = Mapping[str, Axes]  # Mesh axes by letter. A letter without an entry is not split.
TRAIN: Rules = dict(D="fsdp", N="tensor", K="tensor", F="tensor", E="expert", V="tensor")
# Weights are not split over D. If they were, each decode step would gather the whole model.
ROLLOUT: Rules = dict(N="tensor", K="tensor", F="tensor", E="expert", V="tensor")
ROLLOUT_SLICE: Rules = dict(ROLLOUT, E=SLICE)
ROLLOUT_FSDP: Rules = dict(ROLLOUT, E="fsdp")  # Experts are replicated over "expert".


def make_meshes(
  config: MeshConfig, rollout: RolloutMeshConfig, devices: list | None = None
) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
  """Builds the meshes of trainer and sampler: one mesh for both if `rollout_mesh` is off.

  If it is on, the trainer takes the first of `devices` (None: all), and the sampler the next ones.
  Raises ValueError if the sizes do not fit the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  if not rollout.enabled:
    mesh = make_mesh(config, devices)
    return mesh, mesh
  trainers, samplers = (
    None if -1 in axis_sizes(c) else math.prod(axis_sizes(c)) for c in (config, rollout)
  )
  if trainers is samplers is None:
    raise ValueError(
      f"{_named(config, 'mesh')}, {_named(rollout, 'rollout_mesh')}: at most one size may be -1 "
      "(all remaining devices); set all sizes of one mesh"
    )
  trainers = len(devices) - samplers if trainers is None else trainers
  samplers = len(devices) - trainers if samplers is None else samplers
  if min(trainers, samplers) < 1 or trainers + samplers > len(devices):
    raise ValueError(
      f"{_named(config, 'mesh')} and {_named(rollout, 'rollout_mesh')} have {trainers} and "
      f"{samplers} devices, but {len(devices)} exist: lower one, or set rollout_mesh.fsdp to 0"
    )
  sampler = make_mesh(rollout, devices[trainers : trainers + samplers], "rollout_mesh")
  return make_mesh(config, devices[:trainers]), sampler


def _named(config: MeshConfig | RolloutMeshConfig, section: str) -> str:
  return ", ".join(f"{section}.{a}={n}" for a, n in zip(AXES, axis_sizes(config)))


def make_mesh(
  config: MeshConfig | RolloutMeshConfig, devices: list | None = None, section: str = "mesh"
) -> jax.sharding.Mesh:
  """Builds a mesh over `devices` (None: all). Only the axis `data` crosses slices.

  If the devices are `accelerators.Device`s, the mesh is abstract. Raises ValueError if the sizes
  do not fit the number of devices, or if slices differ in size or cannot share `data` equally.
  """
  devices = jax.devices() if devices is None else devices
  sizes, named = axis_sizes(config), _named(config, section)
  if sizes.count(-1) > 1:
    raise ValueError(f"{named}: at most one size may be -1 (all remaining devices)")
  if -1 in sizes:
    fixed = -math.prod(sizes)
    if len(devices) % fixed:
      raise ValueError(
        f"{named}: the product without -1 is {fixed}, and must divide {len(devices)} devices"
      )
    sizes[sizes.index(-1)] = len(devices) // fixed
  if math.prod(sizes) != len(devices):
    raise ValueError(
      f"{named} needs {math.prod(sizes)} devices, but {len(devices)} exist: make the product "
      "equal, or set one axis to -1"
    )
  if isinstance(devices[0], accelerators.Device):
    return meshes.abstract_mesh(devices[0], sizes, AXES)
  slices = [[x for x in devices if slice_of(x) == i] for i in sorted(set(map(slice_of, devices)))]
  if sizes[0] % len(slices) or len(set(map(len, slices))) > 1:
    raise ValueError(
      f"{named}: the {len(slices)} slices of {', '.join(str(len(x)) for x in slices)} devices are "
      f"connected by the data-centre network alone: make {section}.data a multiple of "
      f"{len(slices)}, and take the same number of devices from each slice"
    )
  within = [sizes[0] // len(slices), *sizes[1:]]
  # A mesh axis may use a part of a torus dimension. A mesh of 8x8 on a 4x4x4 torus needs this.
  grids = [mesh_utils.create_device_mesh(within, x, allow_split_physical_axes=True) for x in slices]
  return jax.sharding.Mesh(np.concatenate(grids), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def slice_of(device: Any) -> int:
  """Number of a device's TPU slice. Devices of other kinds count as one slice."""
  return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def rollout_rules(config: MeshConfig, mesh: jax.sharding.Mesh, experts: int) -> Rules:
  """Returns the sampler's rules. Raises ValueError if "all" or "fsdp" splits experts unevenly."""
  name = config.rollout_experts
  rules = dict(fsdp=ROLLOUT_FSDP, expert=ROLLOUT).get(name, ROLLOUT_SLICE)
  # Prefill always splits experts over `expert`. Both splits must divide the number of experts.
  chips = math.lcm(parts(rules["E"], mesh.shape), mesh.shape["expert"])
  if name in ("all", "fsdp") and experts % chips:
    text = f"mesh.rollout_experts={name}: {experts} experts do not divide over {chips} chips"
    raise ValueError(f"{text}: set it to expert, or make the sampler's axes smaller")
  return ROLLOUT if experts % chips else rules


def each(axes: Axes | None) -> tuple[str, ...]:
  """Returns the mesh axes of one dimension as a tuple; () for None."""
  return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def parts(axes: Axes | None, sizes: Mapping[str, int]) -> int:
  """Returns the number of parts of a dimension split over `axes`."""
  return math.prod(sizes[axis] for axis in each(axes))


def spec(letters: str, rules: Rules) -> P:
  """Returns the spec of an array's letters. Raises ValueError if two letters share a mesh axis."""
  axes = [rules.get(letter) for letter in letters]
  used = [a for split in axes for a in each(split)]
  if len(used) != len(set(used)):
    raise ValueError(f"{letters!r} splits two dimensions over one mesh axis: {axes}")
  return P(*axes)


def without_mesh() -> bool:
  """Whether no mesh is set."""
  return jax.sharding.get_abstract_mesh().empty


def platform() -> str:
  """Returns "cpu", "tpu" or "gpu" for the mesh. If no mesh is set, this is JAX's default."""
  device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
  return getattr(device, "platform", device) or jax.default_backend()


def device_kind() -> str:
  """Returns the `device_kind` of the mesh's devices; "" if no mesh is set."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return "" if device is None else device.device_kind


def reshard(x: jax.Array, pspec: P) -> jax.Array:
  """Reshards `x` to `pspec`. Keeps `reduced`, the axes over which gradients are summed later."""
  if without_mesh():
    return x
  return jax.sharding.reshard(x, P(*pspec, reduced=jax.typeof(x).sharding.spec.reduced))


def reshape(x: jax.Array, shape: tuple[int, ...], out: P) -> jax.Array:
  """Reshapes `x`. JAX cannot infer the sharding `out` if a sharded dimension is merged."""
  if without_mesh():
    return x.reshape(shape)
  reduced = jax.typeof(x).sharding.spec.reduced  # Not empty for a weight from `gather`.
  return jnp.reshape(x, shape, out_sharding=P(*out, reduced=reduced))


def product(equation: str, x: jax.Array, y: jax.Array, **kwargs) -> jax.Array:
  """Computes jnp.einsum in the common dtype of `x` and `y`.

  XLA on CPU multiplies bfloat16 into float32 twice as fast as into bfloat16, so on CPU the result
  is rounded afterwards. On TPU and GPU, float32 gains no speed, and collectives send more bytes.
  """
  dtype = jnp.result_type(x, y)
  wide = jnp.float32 if dtype == jnp.bfloat16 and platform() == "cpu" else None
  return jnp.einsum(equation, x, y, preferred_element_type=wide, **kwargs).astype(dtype)


def einsum(equation: str, x: jax.Array, y: jax.Array, out: P, dtype: Any = None) -> jax.Array:
  """Computes jnp.einsum with sharding `out` and `dtype`; None means the dtype of `product`."""
  layout = None if without_mesh() else out
  if dtype is None:
    return product(equation, x, y, out_sharding=layout)
  return jnp.einsum(equation, x, y, preferred_element_type=dtype, out_sharding=layout)


def project(equation: str, x: jax.Array, w: jax.Array, out: P) -> jax.Array:
  """Computes `einsum` of activations and a weight. Every shared letter is contracted.

  The gradient of `w` is a product with `x` as its first factor. JAX would put the cotangent first.
  XLA on CPU would then use a slow memory order, and a dense model's update take 1.7 times as long.
  """
  return checkpoint_name(_project(equation, x, w, out), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _project(equation: str, x: jax.Array, w: jax.Array, out: P) -> jax.Array:
  return einsum(equation, x, w, out)


def _project_forward(equation: str, x: jax.Array, w: jax.Array, out: P):
  return einsum(equation, x, w, out), (x, w)


def _project_backward(equation: str, out: P, saved: tuple[jax.Array, jax.Array], g: jax.Array):
  factors, y_axes = equation.split("->")
  x_axes, w_axes = factors.split(",")
  x, w = saved
  dx = einsum(f"{y_axes},{w_axes}->{x_axes}", g, w, _cotangent_spec(x))
  dw = einsum(f"{x_axes},{y_axes}->{w_axes}", x, g, _cotangent_spec(w))
  return dx, dw


_project.defvjp(_project_forward, _project_backward)


def _cotangent_spec(x: jax.Array) -> P:
  """Returns a cotangent's spec, before the cotangent is summed over the axes `reduced` of `x`."""
  pspec = P() if without_mesh() else jax.typeof(x).sharding.spec
  return P(*pspec.partitions, unreduced=pspec.reduced)


def spec_of(x: jax.Array) -> P:
  """Returns the array's PartitionSpec, padded with None to the array's rank."""
  split = () if without_mesh() else jax.typeof(x).sharding.spec.partitions
  return P(*split, *[None] * (x.ndim - len(split)))


def gather(x: jax.Array, pspec: P) -> jax.Array:
  """Gathers `x` over "fsdp" into `pspec`, a spec without batch axes.

  If "fsdp" splits `x`, gradients are summed in two steps: first over "fsdp", so each device keeps
  one part, and then this part over the other batch axes. One step would sum whole gradients.
  """
  if without_mesh():
    return x
  split = spec_of(x)
  reduced = frozenset(BATCH) - frozenset(split)
  if "fsdp" in split:
    x = jax.sharding.reshard(x, P(*split, reduced=reduced))
  return jax.sharding.reshard(x, P(*pspec, reduced=reduced | {"fsdp"}))


def is_per_replica(x: jax.Array) -> bool:
  """Whether a weight has a separate gradient on each replica (`learner.replicas`)."""
  return "data" in jax.typeof(x).sharding.spec.reduced


def gather_whole(x: jax.Array, pspec: P) -> jax.Array:
  """Gathers an input of `shard_map`, split as `pspec`, over "fsdp"."""
  if without_mesh():
    return x
  split = [each(axes) for axes in pspec]
  x = vary(x, tuple(axis for axis in AXES if axis not in sum(split, ())))
  for dimension, axes in enumerate(split):
    if "fsdp" in axes and not _alone("fsdp"):
      x = jax.lax.all_gather(x, "fsdp", axis=dimension, tiled=True)
  return x


def shard_map(f: Callable, in_specs: Any, out_specs: Any, check: bool = True) -> Callable:
  """Maps `f` over the devices' parts of arrays; returns `f` itself if no mesh is set.

  Pass `check=False` for Pallas kernels: the types of their results do not declare the axes over
  which the results vary.
  """
  if without_mesh():
    return f

  def run(*arguments: Any) -> Any:
    marks = jax.tree.map(is_per_replica, arguments)
    if not any(jax.tree.leaves(marks)):
      return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, check_vma=check)(*arguments)
    specs = jax.tree.map(
      lambda pspec, mark: jax.tree.map(lambda m: P("data", *pspec) if m else pspec, mark),
      in_specs,
      marks,
      is_leaf=lambda x: isinstance(x, P),
    )

    def on_each_device(*arguments: Any) -> Any:
      return f(*jax.tree.map(lambda x, mark: x[0] if mark else x, arguments, marks))

    arguments = jax.tree.map(lambda x, mark: _replicas(x) if mark else x, arguments, marks)
    mapped = jax.shard_map(on_each_device, in_specs=specs, out_specs=out_specs, check_vma=check)
    return mapped(*arguments)

  return run


def _replicas(x: jax.Array) -> jax.Array:
  """Expands an `is_per_replica` weight to [replicas, ...], with separate gradients."""
  split = spec_of(x)
  return jax.shard_map(
    lambda x: jax.lax.pcast(x, "data", to="varying")[None],
    in_specs=P(*split, reduced={"data"}),
    out_specs=P("data", *split),
  )(x)


def _alone(axis: Axes) -> bool:
  """Whether `axis` has size 1. Collectives are then skipped: XLA on CPU would copy the array."""
  return axis_size(axis) == 1


def all_gather(x: jax.Array, axis: Axes) -> jax.Array:
  """Concatenates the devices' parts along dimension 0, over `axis`, inside `shard_map`."""
  for name in reversed(each(axis)):
    x = x if _alone(name) else jax.lax.all_gather(x, name, tiled=True)
  return x


def all_to_all(x: jax.Array, axis: str, split: int, concatenate: int) -> jax.Array:
  return x if _alone(axis) else jax.lax.all_to_all(x, axis, split, concatenate, tiled=True)


def psum_scatter(x: jax.Array, axis: Axes) -> jax.Array:
  """Sums over `axis` and scatters dimension 0: the transpose of `all_gather`."""
  for name in each(axis):
    if not _alone(name):
      x = x.reshape(axis_size(name), -1, *x.shape[1:])
      x = jax.lax.psum_scatter(x, name, scatter_dimension=0)
  return x


def psum(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
  return x if without_mesh() else jax.lax.psum(x, axis)


def pmax(x: jax.Array, axis: str | tuple[str, ...]) -> jax.Array:
  return x if without_mesh() else jax.lax.pmax(x, axis)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
  """Marks replicated arrays inside `shard_map` as varying over `axes`.

  A custom gradient may then return a cotangent per device. The transpose sums these over `axes`.
  """
  if without_mesh():
    return tree

  def varying(x: jax.Array) -> jax.Array:
    further = (axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, tuple(further), to="varying")

  return jax.tree.map(varying, tree)


def axis_size(axis: Axes) -> int:
  return 1 if without_mesh() else parts(axis, jax.sharding.get_abstract_mesh().shape)


def axis_index(axis: Axes) -> jax.Array | int:
  return 0 if without_mesh() else jax.lax.axis_index(axis)


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of parts into which the mesh splits a batch of sequences."""
  return parts(BATCH, mesh.shape)


def rows_per_device(rows: int) -> int:
  """Number of rows per device in a batch of `rows`."""
  return rows // axis_size(BATCH)


def put_batch(tree: Any, mesh: jax.sharding.Mesh, pspec: P = BY_ROW) -> Any:
  """Places host arrays on the devices, split as `pspec`. All processes pass equal arrays."""
  layout = NamedSharding(mesh, pspec)
  return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, layout, x.__getitem__), tree)


def fetch(tree: Any) -> Any:
  """Fetches whole arrays to every process. Arrays on several hosts are gathered."""

  def gather_hosts(x: Any) -> Any:
    is_local = getattr(x, "is_fully_addressable", True)
    return x if is_local else multihost_utils.process_allgather(x, tiled=True)

  return jax.device_get(jax.tree.map(gather_hosts, tree))
