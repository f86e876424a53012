"""Expert products against the matmul limit of the machine, measured in the same run.

Command:   python benchmarks/moe.py [--forms=blocks,batched] [--shapes=train,decode]
Prints for two layers, while training and while decoding, the milliseconds of each formulation,
forward and with the backward pass, and the share of the limit: the time that its useful
floating-point operations take as one large matmul. Decoding is held against the time to read every
expert's weights once. Kernels that would be interpreted are left out.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from gspo_jax.models.experts.blocks import ExpertWeights
from gspo_jax.models.experts.moe import IMPLEMENTATIONS

SHAPES = {  # tokens, D, E, k, F
  "train": (4096, 512, 32, 4, 256),
  "decode": (32, 512, 32, 4, 256),
  "train-small": (5120, 256, 16, 2, 128),
  "train-few": (1280, 256, 16, 2, 128),
  "train-wide": (2048, 576, 4, 2, 1536),  # SmolLM2-135M, upcycled.
  "decode-small": (32, 256, 16, 2, 128),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--forms", default=",".join(IMPLEMENTATIONS))
  parser.add_argument("--shapes", default=",".join(SHAPES))
  parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
  options = parser.parse_args()
  forms = {name: IMPLEMENTATIONS[name] for name in options.forms.split(",")}
  if jax.default_backend() != "tpu":
    forms.pop("megablox", None)
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

  print(f"{jax.devices()[0].device_kind}, {jnp.dtype(dtype).name}")
  print(f"{'shape':<14}{'form':<10}{'pass':<9}{'ms':>9}{'share of the limit':>20}")
  for shape in options.shapes.split(","):
    tokens, D, _, K, F = SHAPES[shape]
    trains = shape.startswith("train")
    x, gate, index, w = inputs(*SHAPES[shape], dtype)
    for name, form in forms.items():

      def forward(x, gate, w, index, form=form):
        return form(x, gate, index, w, w)

      def total(*arguments, forward=forward):
        return forward(*arguments).astype(jnp.float32).sum()

      passes = dict(fwd=(1, forward))
      if trains:
        # With the value: nobody would compute it for the gradient alone.
        passes["fwd+bwd"] = (3, jax.value_and_grad(total, (0, 1, 2)))
      for label, (times, f) in passes.items():
        call = (jax.jit(f), (x, gate, w, index))
        if trains:
          side = 2048
          a = jnp.ones((side, side), dtype)
          seconds, matmul_seconds = measure([call, (jax.jit(jnp.dot), (a, a))], options.seconds)
          floor = times * tokens * K * 6 * D * F / (2 * side**3) * matmul_seconds
        else:
          flat = jnp.concatenate([leaf.reshape(-1) for leaf in w])
          read = jax.jit(lambda a: a.astype(jnp.float32).sum())
          seconds, floor = measure([call, (read, (flat,))], options.seconds)
        print(
          f"{shape:<14}{name:<10}{label:<9}{seconds * 1e3:>9.2f}{floor / seconds:>20.1%}",
          flush=True,
        )


def inputs(tokens: int, D: int, E: int, K: int, F: int, dtype):
  keys = jax.random.split(jax.random.key(0), 6)

  def normal(key, *shape):
    return jax.random.normal(key, shape, dtype) / shape[-2] ** 0.5

  w = ExpertWeights(normal(keys[0], E, D, F), normal(keys[1], E, D, F), normal(keys[2], E, F, D))
  _, index = jax.lax.top_k(jax.random.uniform(keys[3], (tokens, E)), K)  # K different experts
  gate = jax.random.uniform(keys[4], (tokens, K)).astype(dtype)
  return normal(keys[5], tokens, D), gate, index.astype(jnp.int32), w


def measure(calls, seconds: float) -> list[float]:
  """Times calls in turns and returns the fastest of each."""
  for f, arguments in calls:
    jax.block_until_ready(f(*arguments))
  fastest, end, rounds = [float("inf")] * len(calls), time.perf_counter() + seconds, 0
  while time.perf_counter() < end or rounds < 3:
    rounds += 1
    for i, (f, arguments) in enumerate(calls):
      started = time.perf_counter()
      jax.block_until_ready(f(*arguments))
      fastest[i] = min(fastest[i], time.perf_counter() - started)
  return fastest


if __name__ == "__main__":
  main()
