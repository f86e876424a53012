"""The update of a pretrained model's shape: processor time, memory and padding.

Command:   python benchmarks/update.py [--dtype=float32|bfloat16] [--rows=shared|packed|plain]
             [--room=128] [--responses=32] [--rounds=3]
SmolLM2-135M (30 layers of width 576, a vocabulary of 49,152), random weights, AdamW; `--responses`
of at most 16 tokens, eight to a prompt of about 59 (lognormal, at most 128; `--room` positions are
kept for it). Printed are the seconds of processor time of one update, the least of all rounds,
which others on the machine disturb less than time on the clock; the temporary memory of the
compiled update; the peak of the process; and how much of what the update reads is padding.
"""

import argparse
import resource
import time

import jax
import numpy as np
from scaling_points import ADAMW, OBJECTIVE, init

from gspo_jax import sharding
from gspo_jax.learner import optimizer, packing, passes
from gspo_jax.learner import step as train_step
from gspo_jax.learner.state import new_state
from gspo_jax.learner.summary import summarize
from gspo_jax.runs.metrics import compute as computed
from gspo_jax.settings.mesh import MeshConfig
from gspo_jax.settings.model import ComputeConfig
from gspo_jax.settings.sizes import PUBLISHED
from gspo_jax.structs import ModelInputs, TrainBatch

SMOLLM2 = PUBLISHED["SmolLM2-135M"]
GROUP, NEW, MEAN, LONGEST = 8, 16, 59, 128


def batch(responses: int, room: int, rows: str) -> TrainBatch:
  """Random tokens; a group's prompts are alike."""
  rng = np.random.default_rng(0)
  prompt_P = np.clip(rng.lognormal(np.log(MEAN) - 0.06, 0.35, responses // GROUP), 16, LONGEST)
  prompt_B = np.repeat(prompt_P.astype(np.int32), GROUP)
  end_B = prompt_B + rng.integers(4, NEW + 1, responses)
  time_1T = np.arange(room + NEW)[None]
  real_BT, in_prompt_BT = time_1T < end_B[:, None], time_1T < prompt_B[:, None]
  tokens_BT = rng.integers(0, SMOLLM2.vocab_size, real_BT.shape)
  tokens_BT = np.where(in_prompt_BT, np.repeat(tokens_BT[::GROUP], GROUP, axis=0), tokens_BT)
  mask_BT = (real_BT & ~in_prompt_BT).astype(np.float32)
  logp_BT = -np.log(SMOLLM2.vocab_size, dtype=np.float32) * mask_BT
  inputs = ModelInputs(
    (tokens_BT * real_BT).astype(np.int32),
    real_BT.astype(np.int32),
    prompt_B=None if rows == "plain" else prompt_B,
  )
  advantage_B = rng.normal(size=responses).astype(np.float32)
  train_batch = TrainBatch(
    inputs, mask_BT, advantage_B, old_logp_BT=logp_BT, sampler_logp_BT=logp_BT
  )
  return packing.plan(train_batch, 1, GROUP, NEW) if rows == "packed" else train_batch


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--rows", choices=("shared", "packed", "plain"), default="shared")
  parser.add_argument("--room", type=int, default=LONGEST)
  parser.add_argument("--responses", type=int, default=32)
  parser.add_argument("--rounds", type=int, default=3)
  options = parser.parse_args()
  learner = passes.Learner(
    SMOLLM2,
    ComputeConfig(dtype=options.dtype, remat="none"),
    temperature=1.0,
    microbatches=4 if options.rows == "packed" else 1,
    load_balance_coef=0.0,
    group_size=GROUP,
    response_tokens=NEW,
  )
  mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
  with jax.set_mesh(mesh):
    tx = optimizer.make(ADAMW, 1000)
    state = new_state(init(SMOLLM2, sharding.TRAIN), tx)
    batches = sharding.put_batch(batch(options.responses, options.room, options.rows), mesh)
    step = train_step.make_rl_step(learner, OBJECTIVE, tx).compile(state, batches)
    seconds = []
    for _ in range(options.rounds):
      started = time.process_time()
      state, metrics = jax.block_until_ready(step(state, batches))
      seconds.append(time.process_time() - started)
  row = computed(summarize((metrics,)))
  temporary = step.function.memory_analysis().temp_size_in_bytes
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  print(
    f"{options.rows}, {options.dtype}, room {options.room}: {min(seconds):.2f} CPU-seconds, "
    f"temporary {temporary / 2**20:,.0f} MiB, peak {peak / 2**20:,.0f} MiB, "
    f"padding {row['padding']:.2f}, loss {row['loss']:.6f}, gradient {row['grad_norm']:.5f}"
  )


if __name__ == "__main__":
  main()
