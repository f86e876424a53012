r"""GSPO on Qwen3-0.6B or 1.7B and GSM8K, on one chip.

Command:   python -m gspo_jax.main --config=configs/gsm8k.py:0.6B-v5e --workdir=DIR \
             --config.weights=DIR --config.tokenizer=DIR \
             --config.data.train=gsm8k@TRAIN.jsonl --config.data.eval=gsm8k@TEST.jsonl
Hardware:  0.6B or 1.7B, and the chip: v5e (16 GiB), v6e (32 GiB), h100 (80 GB)
Expected:  not run by us at this size; docs/one_chip.md has what the compiler says of memory

Where the float32 moments of all parameters do not fit (1.7B on v5e and v6e), adapters are trained.

configs/gsm8k.py:tiny has random weights of toy size, adapters, and the byte tokenizer; it needs the
two data files only, and its reward stays near 0.
"""

from configs import common, dense_math

# Rows of a micro-batch, slots, and positions of all their caches: 112 KiB each, as both models have
# 28 layers of 8 key/value heads.
CHIPS = dict(v5e=(8, 64, 40_960), v6e=(16, 128, 81_920), h100=(16, 256, 163_840))
ADAPTED = ("1.7B-v5e", "1.7B-v6e")
VARIANTS = [f"{size}-{chip}" for size in ("0.6B", "1.7B") for chip in CHIPS]


def get_config(arg: str | None = None) -> common.ConfigDict:
  name = common.variant(arg, *VARIANTS, "tiny") or VARIANTS[0]
  size, _, chip = name.partition("-")
  config = dense_math.get_config(f"Qwen3-{size}-Base" if chip else "tiny")
  if name in ADAPTED or not chip:
    config.update(rl=dict(lora_rank=32), rl_optimizer=dict(learning_rate=1e-5))  # 10 times as much
  if chip:
    rows, slots, positions = CHIPS[chip]
    config.update(
      compute=dict(logits_chunk=128),
      data=dict(max_prompt_tokens=384),  # the longest question has 991 bytes
      engine=dict(slots=slots, cache_tokens=positions),
      # 64 responses per update
      rl=dict(prompts=32, microbatches=64 // rows),
    )
  return config
