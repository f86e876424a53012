"""Log-probs of samplers of less precision against a float32 trainer's, on a pretrained network.

Command:   python -m experiments.smollm2 DIR
           python benchmarks/likelihoods.py DIR [--samplers=bfloat16_cache,int8_cache,...]
             [--responses=32] [--tokens=256]
Every sampler draws its own responses to sixteen openings of books, at temperature 1. Δ is the
trainer's log-prob of a token less the sampler's. A response's mismatch is |mean Δ| over its first
tokens. `tail` is the share of tokens with |Δ| > log 2. `outside` is the share of responses with
|mean Δ| > 3e-4, GSPO's narrower range, and `estimate` what the alarm mismatch_clips makes of the
mean mismatch.
"""

import argparse
import dataclasses
import math
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from machine import environment
from tokenizers import Tokenizer

from gspo_jax.models import hf, transformer
from gspo_jax.models.params import as_read
from gspo_jax.sampling import EngineConfig, generate
from gspo_jax.settings.model import REFERENCE, ModelConfig
from gspo_jax.structs import Rollout

SAMPLERS = {
  "float32": EngineConfig(),
  "bfloat16_cache": EngineConfig(cache_dtype="bfloat16"),
  "int8_cache": EngineConfig(cache_dtype="int8"),
  "int8_weights": EngineConfig(weights_dtype="int8"),
  "int8": EngineConfig(weights_dtype="int8", cache_dtype="int8"),
  "bfloat16": EngineConfig(dtype="bfloat16", cache_dtype="bfloat16"),
}
STOP, CLIP_RANGE = 2, 3e-4  # End of a message; the paper's lower range.
LENGTHS = (8, 64, 256)
AT_ONCE = 8  # Rows of a pass of the trainer.
OPENINGS = """\
It was the best of times, it was the worst of times, it was the age of wisdom,
It is a truth universally acknowledged, that a single man in possession of a good fortune,
Call me Ishmael. Some years ago, never mind how long precisely, having little money in my purse,
Alice was beginning to get very tired of sitting by her sister on the bank,
All happy families are alike; each unhappy family is unhappy in its own way.
In the beginning God created the heaven and the earth. And the earth was without form,
The sun shone, having no alternative, on the town below the hill, where
Mr. Sherlock Holmes, who was usually very late in the mornings, was seated at the breakfast table.
The theory of evolution by natural selection was first described by
Water boils at a lower temperature on a mountain, because
To bake a loaf of bread you need flour, water, salt and yeast. First,
The French Revolution began in 1789. Its causes were
The cell is the smallest unit of life. Every cell has
A prime number is a whole number greater than one which
The Roman Empire reached its greatest extent under the emperor Trajan, when
Once upon a time there was a miller, and he had three sons,""".splitlines()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("directory", help="weights, config.json and tokenizer.json")
  parser.add_argument("--samplers", default=",".join(SAMPLERS))
  parser.add_argument("--responses", type=int, default=32, help="a multiple of 16")
  parser.add_argument("--tokens", type=int, default=256, help="of a response, at most")
  options = parser.parse_args()
  print(environment(("jax",)), flush=True)
  params, model = hf.load(options.directory)
  tokenizer = Tokenizer.from_file(os.path.join(options.directory, "tokenizer.json"))
  prompts = [tokenizer.encode(text).ids for text in OPENINGS]
  head = ["", "tokens", "mean \\|Δ\\|", "largest", *(f"mismatch at {n}" for n in LENGTHS)]
  head += ["tail", f"outside at {options.tokens}", "estimate"]
  print(f"| {' | '.join(head)} |\n| {' | '.join(['---'] * len(head))} |", flush=True)
  for name in options.samplers.split(","):
    start = time.perf_counter()
    rollout = sample(params, model, SAMPLERS[name], prompts, options)
    logp_BT = trainer_logp(params, model, rollout.tokens)
    cells = measure(logp_BT - rollout.logp, rollout.mask > 0, options.tokens)
    print(f"| {name} | {' | '.join(cells)} |  {time.perf_counter() - start:.0f} s", flush=True)


def sample(params, model: ModelConfig, engine: EngineConfig, prompts, options) -> Rollout:
  compute = engine.compute(REFERENCE)
  if compute.dtype != REFERENCE.dtype:
    params = as_read(params, model, compute.dtype)
  return generate(
    params,
    model,
    prompts,
    group_size=options.responses // len(prompts),
    max_new_tokens=options.tokens,
    stop_ids=(STOP,),
    compute=compute,
    engine=dataclasses.replace(engine, slots=options.responses),
  )


def trainer_logp(params, model: ModelConfig, tokens_BT: np.ndarray) -> np.ndarray:
  """Log-probs in float32, 0 at the first position."""

  @jax.jit
  def run(params, tokens_BT):
    hidden_BTD = transformer.forward(params, model, tokens_BT[:, :-1]).hidden_BTD
    logp_BT, _ = transformer.token_logp(params, model, hidden_BTD, tokens_BT[:, 1:])
    return jnp.pad(logp_BT, ((0, 0), (1, 0)))

  starts = range(0, len(tokens_BT), AT_ONCE)
  return np.concatenate([run(params, jnp.asarray(tokens_BT[i : i + AT_ONCE])) for i in starts])


def measure(delta_BT: np.ndarray, mask_BT: np.ndarray, tokens: int) -> list[str]:
  """Cells of a row."""
  rows = [np.float64(delta_T[mask_T]) for delta_T, mask_T in zip(delta_BT, mask_BT)]
  delta = np.concatenate(rows)
  cells = [f"{len(delta):,}", f"{abs(delta).mean():.1e}", f"{abs(delta).max():.1e}"]
  for length in LENGTHS:
    means = np.array([row[:length].mean() for row in rows if len(row) >= length])
    cells.append(f"{abs(means).mean():.1e} ({len(means)})" if len(means) else "")
  cells.append(f"{(abs(delta) > math.log(2)).mean():.1e}")
  means = abs(np.array([row.mean() for row in rows if len(row) == tokens]))
  if not len(means):
    return [*cells, "", ""]
  estimate = math.erfc(CLIP_RANGE / (means.mean() * math.sqrt(math.pi)))
  return [*cells, f"{(means > CLIP_RANGE).mean():.2f}", f"{estimate:.2f}"]


if __name__ == "__main__":
  main()
