r"""GSPO on Qwen3-30B-A3B with programs as answers, evaluated on LiveCodeBench.

Paper:     arXiv:2507.18071, §5; what it gives is as in moe_aime.py
Command:   python -m gspo_jax.main --config=configs/code_livecodebench.py --workdir=DIR \
             --config.weights=MODEL --config.data.train=apps@TACO/*.jsonl \
             "--config.data.eval=livecodebench@LCB/*.jsonl where contest_date>=2024-10-01 and \
               contest_date<2025-03-01 and prompt_tokens<=2048"
Hardware:  a TPU v5p slice of 64 chips (4x4x4), Linux hosts that allow namespaces
Expected:  not run by us at this size

Programs run in sandboxes: docs/rewards.md says what confines them.

configs/code_livecodebench.py:tiny has random weights of toy size and the byte tokenizer; it needs
the two data files only, and its reward stays near 0.
"""

from gspo_jax.configs import common, moe_aime


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = moe_aime.get_config(arg)
  config.update(
    data=dict(
      train="",  # to be set: apps@FILES (APPS, TACO), or files that the next keys describe
      eval="",  # to be set: livecodebench@FILES where (window of §5.1: 2024-10 to 2025-02)
      question_field="question",
      answer_field="input_output",  # tests: docs/rewards.md has the forms
      prompt_template="{question}",  # the formats above have their own
      on_error="skip",  # TACO has rows without tests; they are counted
    ),
    reward=dict(
      name="code",
      workers=32,  # programs that run at the same time on a host
      time_limit_s=6.0,  # LiveCodeBench's
      memory_mb=4096,  # LiveCodeBench's
      overlong_buffer=4096,  # DAPO's, should overlong_weight be set
    ),
    eval=dict(samples=8, batch=32),  # §5.1: average Pass@1 over 8 samplings
  )
  if common.variant(arg, "tiny"):
    config.update(
      compute=dict(logits_chunk=128),
      data=dict(max_prompt_tokens=1920),  # bytes; longer problems are left out
      reward=dict(workers=2, memory_mb=1024, overlong_buffer=16),
      sampling=dict(max_new_tokens=64),
      objective=dict(volatility=False),
      rl=dict(iterations=4, prompts=4, group_size=4),
      eval=dict(every=2, samples=2, batch=4),
    )
  return config
