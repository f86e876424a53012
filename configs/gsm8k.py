r"""GSPO on a small Qwen3 and GSM8K, on one chip.

Command:   python -m gspo_jax.main --config=configs/gsm8k.py:0.6B-v5e --workdir=DIR \
             --config.weights=DIR --config.tokenizer=DIR \
             --config.data.train=gsm8k@gsm8k/train.jsonl --config.data.eval=gsm8k@gsm8k/test.jsonl
Hardware:  one TPU v5e (16 GiB) or v6e (32 GiB), or one H100 (80 GB): the part after the dash
Expected:  not run by us at this size
"""

from configs import common

SIZES = ("0.6B", "1.7B")
CHIPS = ("v5e", "v6e", "h100")


def get_config(arg: str | None = None) -> common.ConfigDict:
  size, _, chip = (
    common.variant(arg, *(f"{s}-{c}" for s in SIZES for c in CHIPS)) or "0.6B-v5e"
  ).partition("-")
  config = common.base()
  config.update(
    weights="",
    tokenizer="",
    model=common.model(common.size(f"Qwen3-{size}-Base")),
    compute=dict(dtype="bfloat16", remat="full", logits_chunk=128),
    data=dict(
      train="",
      eval="",
      prompt_template=common.BOXED,
      max_prompt_tokens=256,
    ),
    reward=dict(name="math", time_limit_s=5.0, workers=4),
    sampling=dict(max_new_tokens=1024),
    engine=dict(slots=32, prefill_tokens=2048, cache_dtype="bfloat16"),
    rl=dict(prompts=32, group_size=8, minibatches=4, microbatches=8, packed=True),
    checkpoint=dict(best="eval/accuracy"),
  )
  return config
