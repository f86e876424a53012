"""How much of what adapters learn a pass in bfloat16 sees: trainer's and sampler's, sums rounded to
the nearest neighbour and dithered.

  python benchmarks/lora_bfloat16.py [--layers=28] [--updates=1,4,16] [--rows=48] [--tokens=32]

Qwen3-0.6B's shape with random weights of standard deviation fan_in^(-1/2), a vocabulary of 16,384,
and a final norm of 4, so that logits have a standard deviation of 4 and tokens 3.9 nats. Adapters
are those of configs/gsm8k.py:1.7B-v5e, with its optimizer: mini-batches of a quarter of the rows,
whose tokens are drawn from the model, and advantages of ±1. Gradients are in float32.

A line says what a pass shows of the change in log-probs since the first update: the slope of its
change over the one of a float32 pass, of tokens, with a standard error over sequences (it does not
know of what rounding has in common for all of them), the correlation of the two, and the same for
means over sequences, which are GSPO's log-ratios.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.configs import gsm8k
from gspo_jax.learner import optimizer
from gspo_jax.models import lora, transformer
from gspo_jax.models.attention import cache as kv_cache
from gspo_jax.models.params import with_adapters
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.reading import from_dict
from gspo_jax.settings.sizes import PUBLISHED

BFLOAT16 = dataclasses.replace(REFERENCE, dtype="bfloat16")
FLOAT32 = dataclasses.replace(REFERENCE, remat="full")
AT_ONCE = 16  # rows of a pass
SHARP = 4.0
ROUNDINGS = dict(nearest=lora.merged, dithered=lora.dithered)


def forward_logp(params, model, tokens_BT, targets_BT, compute):
  """The trainer's pass."""
  hidden_BTD = transformer.forward(params, model, tokens_BT, compute=compute).hidden_BTD
  return transformer.token_logp(params, model, hidden_BTD, targets_BT, compute=compute)[0]


def decoded_logp(params, model, tokens_BT, targets_BT, compute):
  """The sampler's: one token after the other, with a cache."""
  B, T = tokens_BT.shape

  def step(cache, inputs):
    t, tokens_B, targets_B = inputs
    options = dict(positions=jnp.full((B, 1), t), cache=cache)
    out = transformer.forward(params, model, tokens_B[:, None], compute=compute, **options)
    ends = out.hidden_BTD, targets_B[:, None]
    logp_B1, _ = transformer.token_logp(params, model, *ends, compute=compute)
    return out.cache, logp_B1[:, 0]

  cache = kv_cache.allocate(model, B, T, compute.dtype)
  return jax.lax.scan(step, cache, (jnp.arange(T), tokens_BT.T, targets_BT.T))[1].T


PASSES = dict(trainer=forward_logp, sampler=decoded_logp)


def changes(params, model, tokens_BT, targets_BT):
  """Log-probs [B, T] in float32, and for each pass and rounding."""

  def by_parts(run, params, compute):
    run = jax.jit(run, static_argnums=(1, 4))
    starts = range(0, len(tokens_BT), AT_ONCE)
    parts = [(x[i : i + AT_ONCE] for x in (tokens_BT, targets_BT)) for i in starts]
    return np.concatenate([run(params, model, *part, compute) for part in parts])

  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)  # adapters are a few per cent
  logp = {"true": by_parts(forward_logp, lora.merged(wide), FLOAT32)}
  del wide
  for rounding, round_sums in ROUNDINGS.items():
    plain = jax.jit(round_sums)(params)
    for name, run in PASSES.items():
      logp[name, rounding] = by_parts(run, plain, BFLOAT16)
  return logp


def print_correlation(name, seen_BT, true_BT):
  """A line of the table."""
  slope = (seen_BT * true_BT).sum(1), (true_BT**2).sum(1)
  again = np.random.default_rng(0).integers(0, len(true_BT), (1000, len(true_BT)))
  error = (slope[0][again].sum(1) / slope[1][again].sum(1)).std()
  seen_B, true_B = seen_BT.mean(1), true_BT.mean(1)
  return (
    f"  {' '.join(name):18} slope {slope[0].sum() / slope[1].sum():6.3f} ± {error:.3f}, "
    f"correlation {np.corrcoef(seen_BT.ravel(), true_BT.ravel())[0, 1]:6.3f}; sequences: slope "
    f"{(seen_B * true_B).sum() / (true_B**2).sum():6.3f}, correlation "
    f"{np.corrcoef(seen_B, true_B)[0, 1]:6.3f}, rms {np.sqrt((true_B**2).mean()):.1e}, rms of the "
    f"difference {np.sqrt(((seen_B - true_B) ** 2).mean()):.1e}"
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--layers", type=int, default=28)
  parser.add_argument("--updates", default="1,4,16")
  parser.add_argument("--rows", type=int, default=48, help="sequences; a multiple of 4")
  parser.add_argument("--tokens", type=int, default=32, help="of a sequence")
  options = parser.parse_args()
  config = from_dict(gsm8k.get_config("1.7B-v5e").to_dict())
  small = dict(num_layers=options.layers, vocab_size=16_384)
  model = dataclasses.replace(PUBLISHED["Qwen3-0.6B"], **small)
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  keys = jax.random.split(jax.random.key(0), 4)
  params = jax.jit(lambda key: transformer.init(model, key, jnp.bfloat16))(keys[0])
  params = params.replace(final_norm=params.final_norm * SHARP)
  params = with_adapters(params, model, config.lora, "bfloat16", mesh, seed=1)
  params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)  # Without a mesh.
  tokens_BT = jax.random.randint(keys[1], (options.rows, options.tokens), 0, model.vocab_size)

  @jax.jit
  def draw(params, tokens_BT, key):
    return jax.random.categorical(key, transformer.logits(params, model, tokens_BT))

  parts = [tokens_BT[i : i + AT_ONCE] for i in range(0, options.rows, AT_ONCE)]
  plain = lora.merged(params)
  targets_BT = jnp.concatenate([draw(plain, part, keys[2]) for part in parts])
  del plain
  advantage_B = jnp.sign(jax.random.normal(keys[3], (options.rows,)))
  tx = optimizer.make(config.rl_optimizer, 100)
  trained, frozen = lora.split(params)
  moments = jax.jit(tx.init)(trained)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def update(trained, moments, frozen, tokens_BT, targets_BT, advantage_B):
    def loss(trained):
      logp = forward_logp(lora.join(trained, frozen), model, tokens_BT, targets_BT, FLOAT32)
      return -(advantage_B * logp.mean(1)).mean()

    updates, moments = tx.update(jax.grad(loss)(trained), moments, trained, tx.hyperparameters)
    return jax.tree.map(jnp.add, trained, updates), moments

  before, done = changes(params, model, tokens_BT, targets_BT), 0
  del params
  for total in map(int, options.updates.split(",")):
    for i in range(done, total):
      part = np.arange(options.rows).reshape(4, -1)[i % 4]
      batch = tokens_BT[part], targets_BT[part], advantage_B[part]
      trained, moments = update(trained, moments, frozen, *batch)
    done, after = total, changes(lora.join(trained, frozen), model, tokens_BT, targets_BT)
    print(f"after {total} updates", flush=True)
    for name in [key for key in before if key != "true"]:
      change, true = (after[key] - before[key] for key in (name, "true"))
      print(print_correlation(name, change, true), flush=True)


if __name__ == "__main__":
  main()
