r"""GSPO on a dense Qwen3-1.7B and GSM8K.

Command:   python -m gspo_jax.main --config=configs/dense_math.py --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=gsm8k/train.jsonl --config.data.eval=gsm8k/test.jsonl
Hardware:  a TPU v5p or v6e host of 4 or 8 chips
Expected:  not run by us at this size

The weights determine the model. `aot` needs no weights, and takes the model from
configs/dense_math.py:NAME. NAME is a name in settings.sizes.PUBLISHED, a directory, or a repository
such as google/gemma-3-1b-pt.

configs/dense_math.py:tiny is a test of the set-up, with a small random model and the byte
tokenizer. It needs only the two data files, and its reward stays near 0.
"""

from gspo_jax.configs import common
from gspo_jax.settings import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    data=dict(
      train="",  # Required: train.jsonl of GSM8K.
      eval="",  # Required: test.jsonl of GSM8K.
      answer_pattern=r"####\s*(.+)",  # An answer of GSM8K is a solution, then #### and the result.
      prompt_template=common.BOXED,
    ),
    reward=dict(name="math", time_limit_s=5.0),
    checkpoint=dict(best="eval/accuracy"),
  )
  if arg == "tiny":
    config.update(
      model=common.model(sizes.tiny_dense(vocab_size=264)),
      compute=dict(logits_chunk=128),
      data=dict(max_prompt_tokens=1088),  # A token is a byte. The longest question has 991.
      sampling=dict(max_new_tokens=32),
      rl=dict(iterations=20, prompts=4, group_size=4, dump_every=5),
      eval=dict(every=10, problems=16, batch=16),
      checkpoint=dict(every=5),
    )
  else:
    config.update(
      weights="",  # Required: Qwen3-1.7B or another dense model.
      model=common.model(common.size(arg or "Qwen3-1.7B-Base")),
      # A token has 151,936 logits, so they are computed in chunks.
      compute=dict(dtype="bfloat16", remat="full", logits_chunk=512),
      data=dict(max_prompt_tokens=512),
      reward=dict(workers=8),
      sampling=dict(max_new_tokens=1024),
      engine=dict(slots=256, cache_dtype="bfloat16"),
      rl=dict(microbatches=4, packed=True),
    )
  return config
