r"""GSPO on OLMoE-1B-7B and GSM8K, on a TPU v5e host of eight chips or one H100.

Command:   python -m gspo_jax.main --config=configs/olmoe.py --workdir=DIR \
             --config.weights=allenai/OLMoE-1B-7B-0924 \
             --config.data.train=gsm8k@TRAIN.jsonl --config.data.eval=gsm8k@TEST.jsonl
Hardware:  v5e-8 (16 GiB a chip) or one card of 80 GB, with adapters
Expected:  not run by us at this size

`aot` reports the memory of a device. On a chip of v5e-8 an update takes 4.5 of 16 GiB, and decoding
6.9 GiB. On an H100 an update takes 24.4 of 73 GiB, and decoding 39.3 GiB.

configs/olmoe.py:tiny is a test of the set-up, with a small random model and the byte tokenizer. It
needs only the two data files, and its reward stays near 0.
"""

import dataclasses

from gspo_jax.configs import common, dense_math
from gspo_jax.settings import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  if common.variant(arg, "tiny"):
    config = dense_math.get_config("tiny")
    model = dataclasses.replace(sizes.tiny_moe(264), family="olmoe", norm_topk_prob=False)
    config.update(model=common.model(model))
    return config
  config = dense_math.get_config("OLMoE-1B-7B-0924")
  config.update(
    mesh=dict(expert=-1, fsdp=1),  # The experts are split over all devices.
    compute=dict(remat="full", logits_chunk=128),
    data=dict(max_prompt_tokens=384),
    engine=dict(slots=64, cache_tokens=81_920),
    rl=dict(prompts=32, microbatches=8),
    objective=dict(volatility=True),  # Measures how often an update changes the choice of experts.
    # The optimizer's float32 moments of 7 B parameters do not fit. So adapters are trained
    # (docs/one_chip.md).
    lora=dict(rank=32),
    rl_optimizer=dict(learning_rate=1e-5),
  )
  return config
