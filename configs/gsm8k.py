r"""GSPO on Qwen3-0.6B to 8B and GSM8K, on one chip.

Command:   python -m gspo_jax.main --config=configs/gsm8k.py:0.6B-v5e --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=gsm8k@TRAIN.jsonl --config.data.eval=gsm8k@TEST.jsonl
Hardware:  v5e (16 GiB), v6e (32 GiB), h100 (80 GB) or t4 (16 GB)
Expected:  not run by us at this size

The name of a variant is a size of Qwen3 or a model of Qwen3.5, followed by the chip.
`VARIANTS` lists all names. If a chip cannot hold the optimizer's moments of all parameters, its
variant trains adapters instead (lora.rank). docs/one_chip.md has the memory that the compiler
reports. Updates of Qwen3.5 have not been compiled for v6e.

configs/gsm8k.py:tiny is a test of the set-up, with a small random model, adapters and the byte
tokenizer. It needs only the two data files, and its reward stays near 0.
"""

from gspo_jax.configs import common, dense_math

# Each variant has five values: the rows of a micro-batch, compute.remat, engine.slots,
# engine.cache_tokens and lora.rank. Each slot decodes one response. The slots share a cache of
# cache_tokens positions; 0 means a whole window for each slot.
#
# A position takes 112 KiB in 0.6B and 1.7B, 144 KiB in 4B and 8B, 12 KiB in Qwen3.5-0.8B and -2B,
# and 32 KiB in Qwen3.5-4B. The states of linear attention take 19 MiB per slot in Qwen3.5-0.8B and
# -2B, and 50 MiB in Qwen3.5-4B.
VARIANTS = {
  "0.6B-v5e": (8, "full", 64, 40_960, 0),
  "0.6B-v6e": (4, "dots", 128, 81_920, 0),
  "0.6B-h100": (4, "dots", 256, 0, 0),
  "0.6B-t4": (8, "full", 64, 40_960, 32),
  "1.7B-v5e": (2, "dots", 64, 40_960, 32),
  "1.7B-v6e": (4, "dots", 128, 81_920, 32),
  "1.7B-h100": (2, "dots", 256, 0, 0),
  "4B-h100": (2, "dots", 192, 0, 32),
  "8B-h100": (2, "dots", 128, 0, 32),
  "Qwen3.5-0.8B-v5e": (2, "dots", 64, 40_960, 32),
  "Qwen3.5-0.8B-v6e": (4, "dots", 128, 81_920, 0),
  "Qwen3.5-0.8B-h100": (4, "dots", 256, 0, 0),
  "Qwen3.5-2B-v6e": (2, "dots", 128, 81_920, 32),
  "Qwen3.5-2B-h100": (2, "dots", 256, 0, 0),
  "Qwen3.5-4B-h100": (2, "dots", 128, 0, 32),
}


def get_config(arg: str | None = None) -> common.ConfigDict:
  name = common.variant(arg, *VARIANTS, "tiny") or "0.6B-v5e"
  if name == "tiny":
    config = dense_math.get_config("tiny")
    rank = 4
  else:
    rows, remat, slots, positions, rank = VARIANTS[name]
    size, _, _ = name.rpartition("-")
    config = dense_math.get_config(size if size.startswith("Qwen") else f"Qwen3-{size}-Base")
    config.update(
      # Each chunk reads the head. On v6e, memory would bind updates with short chunks.
      compute=dict(remat=remat, logits_chunk=352 if name.endswith("v6e") else 128),
      data=dict(max_prompt_tokens=384),  # The longest question has 991 bytes.
      engine=dict(slots=slots, cache_tokens=positions),
      rl=dict(prompts=32, microbatches=64 // rows),  # An update has 64 responses.
    )
  if name == "0.6B-t4":
    config.update(compute=dict(attention="blockwise"))  # cuDNN's attention needs Ampere or newer.
  if rank:
    # Adapters train with ten times the learning rate of all parameters (docs/one_chip.md).
    config.update(lora=dict(rank=rank), rl_optimizer=dict(learning_rate=1e-5))
  return config
