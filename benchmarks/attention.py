"""Attention: time of each formulation forward and with its backward pass, by length.

Command:   python benchmarks/attention.py [--lengths=512,1024,2048,4096] [--segments=1]
Two key/value heads, eight query heads of width 64, one row of equal segments; `plain` holds T x T
scores.
"""

import argparse

import jax
import jax.numpy as jnp
from moe import measure

from gspo_jax.models.attention.attention import attend_self

FORMS = dict(cpu=("plain", "blockwise"), tpu=("plain", "blockwise", "splash"))
GPU = ("plain", "blockwise", "cudnn")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--lengths", default="512,1024,2048,4096")
  parser.add_argument("--segments", type=int, default=1, help="sequences packed into the row")
  parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
  options = parser.parse_args()
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  print(f"{'T':>6} {'form':<10}{'fwd ms':>9}{'fwd+bwd ms':>12}")
  for T in (int(n) for n in options.lengths.split(",")):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, T, n, 64), dtype) for key, n in zip(keys, (8, 2, 2)))
    ids = 1 + jnp.arange(T, dtype=jnp.int32)[None] * options.segments // T
    for name in FORMS.get(jax.default_backend(), GPU):
      forward = jax.jit(lambda q, k, v: attend_self(q, k, v, ids, name))  # noqa: B023
      gradient = jax.jit(jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), (0, 1, 2)))  # noqa: B023
      seconds = measure([(f, (q, k, v)) for f in (forward, gradient)], options.seconds)
      print(f"{T:>6} {name:<10}{seconds[0] * 1e3:>9.1f}{seconds[1] * 1e3:>12.1f}", flush=True)


if __name__ == "__main__":
  main()
