r"""GSPO on a dense Qwen3-1.7B and GSM8K.

Command:   python -m gspo_jax.main --config=configs/dense_math.py --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=gsm8k/train.jsonl --config.data.eval=gsm8k/test.jsonl
Hardware:  a TPU v5p or v6e host of 4 or 8 chips
Expected:  not run by us at this size

The model is that of the weights. Without weights, for the compiler, configs/dense_math.py:NAME
names it in settings.model.PUBLISHED, or by directory or repository: :google/gemma-3-1b-pt.

configs/dense_math.py:tiny has random weights of toy size and the byte tokenizer; it needs the two
data files only, and its reward stays near 0.
"""

from gspo_jax.configs import common
from gspo_jax.settings import model as sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    data=dict(
      train="",  # to be set: GSM8K train.jsonl
      eval="",  # to be set: GSM8K test.jsonl
      answer_pattern=r"####\s*(.+)",  # GSM8K writes the result after the working
      prompt_template=common.BOXED,
    ),
    reward=dict(name="math", time_limit_s=5.0),
    checkpoint=dict(best="eval/accuracy"),
  )
  if arg == "tiny":
    config.update(
      model=common.model(sizes.tiny_dense(vocab_size=264)),
      compute=dict(logits_chunk=128),
      data=dict(max_prompt_tokens=1088),  # bytes: the longest question has 991
      reward=dict(workers=1),
      sampling=dict(max_new_tokens=32),
      rl=dict(iterations=20, prompts=4, group_size=4, dump_every=5),
      eval=dict(every=10, problems=16, batch=16),
      checkpoint=dict(every=5),
    )
  else:
    config.update(
      weights="",  # to be set: Qwen3-1.7B or another dense model
      model=common.model(common.size(arg or "Qwen3-1.7B-Base")),
      compute=dict(dtype="bfloat16", remat="full", logits_chunk=512),  # of 151,936 logits each
      data=dict(max_prompt_tokens=512),
      reward=dict(workers=8),
      sampling=dict(max_new_tokens=1024),
      engine=dict(slots=256, cache_dtype="bfloat16"),
      rl=dict(microbatches=4, packed=True),
    )
  return config
