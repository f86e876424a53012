r"""GSPO or GRPO on granite-3.1-1b-a400m and GSM8K, on one chip or a machine with 24 GiB.

Command:   python -m gspo_jax.main --config=configs/granite_moe.py --workdir=DIR \
             --config.weights=ibm-granite/granite-3.1-1b-a400m-base \
             --config.data.train=gsm8k@TRAIN.jsonl --config.data.eval=gsm8k@TEST.jsonl
           For GRPO instead of GSPO: --config=configs/granite_moe.py:grpo
Hardware:  v6e (32 GiB), or two CPU cores and 24 GiB for a few iterations
Expected:  not run by us at this size

`aot` reports the memory of a device. On a v6e an update takes 28.4 of 32 GiB, and decoding
23.3 GiB. On an H100 an update takes 26.2 of 73 GiB, and decoding 19.6 GiB.

Each layer has 32 experts, and a token uses 8 of them. An update may change the choice of experts.
The paper proposes GSPO for mixtures of experts because of such changes. Runs of GSPO and of GRPO
measure how often the choice changes.

configs/granite_moe.py:tiny is a test of the set-up, with a small random model and the byte
tokenizer. It needs only the two data files, and its reward stays near 0.
"""

import dataclasses

from gspo_jax.configs import common, dense_math
from gspo_jax.settings import sizes
from gspo_jax.settings.model_groups import MultipliersConfig, ScoresConfig


def get_config(arg: str | None = None) -> common.ConfigDict:
  name = common.variant(arg, "grpo", "tiny")
  if name == "tiny":
    config = dense_math.get_config("tiny")
    model = dataclasses.replace(
      sizes.tiny_moe(264),
      family="granite",
      qk_norm=False,
      scores=ScoresConfig(scale=0.05),
      multipliers=MultipliersConfig(embedding=12.0, residual=0.22, logits=6.0),
    )
    config.update(model=common.model(model))
    return config
  config = dense_math.get_config("granite-3.1-1b-a400m-base")
  config.update(
    compute=dict(remat="full", logits_chunk=128),
    data=dict(max_prompt_tokens=384),
    engine=dict(slots=64, cache_tokens=40_960),
    rl=dict(prompts=16, group_size=8, microbatches=8),
    objective=dict(volatility=True),  # Measures how often an update changes the choice of experts.
  )
  if name == "grpo":
    config.update(objective=dict(name="grpo", clip_low=0.2, clip_high=0.27))
  return config
