"""Time of each loss and its gradient, in units of reading its four [B, T] inputs once.

  python benchmarks/objectives.py [--rows=512] [--tokens=4096] [--repeats=40] [--only=gspo,grpo]

A loss must at least read log-probabilities, old log-probabilities, advantages and mask, and write a
gradient. Several copies of the inputs take turns, so that none is still in a cache. Three columns:
loss and gradient; the same with all metrics; with all metrics over 8 micro-batches, accumulated as
a training step does. Smallest times of many: on a shared machine they are what is the code's own;
the median is in brackets.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp

from gspo_jax import objectives as O

COPIES = 4
MICRO_BATCHES = 8


def losses(tokens: int) -> dict:
  """name: (the sums of a loss of (logp, old, advantage, mask), is the advantage per token)"""
  turns_T = jnp.arange(tokens) // 64

  def turns(logp_BT, *rest):
    return O.segment_loss.sums(logp_BT, *rest, jnp.broadcast_to(turns_T, logp_BT.shape))

  def packed(logp_BT, *rest):
    ids_BT = jnp.broadcast_to(turns_T // 8, logp_BT.shape)
    return O.gspo_loss.sums(logp_BT, *rest, response_BT=ids_BT)

  return {
    "gspo": (O.gspo_loss.sums, False),
    "gspo, 8 responses a row": (packed, True),
    "gspo_token": (O.gspo_token_loss.sums, True),
    "segment, 64 turns": (turns, True),
    "grpo": (O.grpo_loss.sums, True),
    "dapo": (O.dapo_loss.sums, True),
    "dr_grpo": (functools.partial(O.dr_grpo_loss.sums, max_length=tokens), True),
    "ppo": (O.ppo_loss.sums, True),
    "cispo": (O.cispo_loss.sums, True),
    "gmpo": (O.gmpo_loss.sums, False),
    "sapo": (O.sapo_loss.sums, True),
    "dppo": (functools.partial(O.dppo_loss.sums, max_length=tokens), True),
    "value": (O.value_loss.sums, True),
  }


def gradient(sums, logp_BT, *rest):
  """The gradient of the numerator, and the sums."""

  def numerator(logp_BT):
    total, metrics = sums(logp_BT, *rest)
    return total.numerator, (total, metrics)

  return jax.grad(numerator, has_aux=True)(logp_BT)


def plain(sums, *args):
  grad_BT, (total, _) = gradient(sums, *args)
  return total.compute(), grad_BT / total.denominator


def with_metrics(sums, *args):
  grad_BT, (total, metrics) = gradient(sums, *args)
  return total.compute(), O.compute(metrics), grad_BT / total.denominator


def micro_batched(sums, *args):
  parts = [x.reshape(MICRO_BATCHES, -1, *x.shape[1:]) for x in args]
  grad, results = jax.lax.map(lambda part: gradient(sums, *part), parts)
  total, metrics = O.collapse(results)
  return total.compute(), O.compute(metrics), grad / total.denominator


def read(*args):
  return [x.sum(dtype=jnp.float32) for x in args]


def inputs(key, rows: int, tokens: int) -> tuple[list, jax.Array]:
  """(logp, old, advantage per token, mask) with ragged lengths, and the advantage per row."""
  keys = jax.random.split(key, 4)
  old_BT = -jax.random.exponential(keys[0], (rows, tokens))
  logp_BT = old_BT + 0.01 * jax.random.normal(keys[1], (rows, tokens))
  advantage_B = jax.random.normal(keys[2], (rows,))
  length_B1 = jax.random.randint(keys[3], (rows, 1), tokens // 4, tokens + 1)
  mask_BT = jnp.arange(tokens)[None] < length_B1
  advantage_BT = jnp.tile(advantage_B[:, None], (1, tokens))
  return [logp_BT, old_BT, advantage_BT, mask_BT], advantage_B


def milliseconds(f, copies: list, repeats: int) -> tuple[float, float]:
  """Smallest and median time of a call."""
  f = jax.jit(f)
  jax.block_until_ready(f(*copies[0]))
  times = []
  for n in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(f(*copies[n % len(copies)]))
    times.append(1e3 * (time.perf_counter() - start))
  return min(times), statistics.median(times)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rows", type=int, default=512)
  parser.add_argument("--tokens", type=int, default=4096)
  parser.add_argument("--repeats", type=int, default=40)
  parser.add_argument("--only", default="")
  args = parser.parse_args()
  pairs = [inputs(jax.random.key(n), args.rows, args.tokens) for n in range(COPIES)]
  per_token = [arrays for arrays, _ in pairs]
  per_row = [[*arrays[:2], advantage_B, arrays[3]] for arrays, advantage_B in pairs]

  unit, median = milliseconds(read, per_token, args.repeats)
  size = sum(x.nbytes for x in per_token[0])
  device = jax.devices()[0]
  print(
    f"{device.platform} {device.device_kind}, jax {jax.__version__}, B={args.rows}, T={args.tokens}"
  )
  print(f"reading the inputs once: {unit:.2f} ms [{median:.2f}], {size / unit / 1e6:.1f} GB/s\n")
  columns = {"loss + gradient": plain, "+ metrics": with_metrics, "in 8 parts": micro_batched}
  print(f"{'':26}" + "".join(f"{name:>26}" for name in columns))
  for name, (sums, needs_tokens) in losses(args.tokens).items():
    if args.only and name not in args.only.split(","):
      continue
    line = f"{name:26}"
    for f in columns.values():
      copies = per_token if needs_tokens else per_row
      best, median = milliseconds(functools.partial(f, sums), copies, args.repeats)
      line += f"{f'{best:.2f} ms [{median:.2f}] {best / unit:5.1f}×':>26}"
    print(line, flush=True)


if __name__ == "__main__":
  main()
