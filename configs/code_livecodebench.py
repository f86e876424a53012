r"""GSPO on Qwen3-30B-A3B with programs as answers, evaluated on LiveCodeBench.

Paper:     arXiv:2507.18071, §5; configs/moe_aime.py lists the settings that are the paper's
Command:   python -m gspo_jax.main --config=configs/code_livecodebench.py --workdir=DIR \
             --config.weights=MODEL --config.data.train=apps@TACO/*.jsonl \
             "--config.data.eval=livecodebench@LCB/*.jsonl where contest_date>=2024-10-01 and \
               contest_date<2025-03-01 and prompt_tokens<=2048"
Hardware:  a TPU v5p slice of 64 chips (4x4x4), Linux hosts that allow namespaces
Expected:  not run by us at this size

Programs run in sandboxes (docs/rewards.md).

configs/code_livecodebench.py:tiny is a test of the set-up, with a small random model and the byte
tokenizer. It needs only the two data files, and its reward stays near 0.
"""

from gspo_jax.configs import common, moe_aime


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = moe_aime.get_config(arg)
  config.update(
    data=dict(
      train="",  # Required: apps@FILES (APPS or TACO), or files with the two fields below.
      eval="",  # Required, as in the command above. §5.1 has problems of 2024-10 to 2025-02.
      question_field="question",
      answer_field="input_output",  # Tests of the program. docs/rewards.md describes their formats.
      prompt_template="{question}",  # Unused by the formats apps and livecodebench.
      on_error="skip",  # Rows of TACO without tests are skipped and counted.
    ),
    reward=dict(
      name="code",
      workers=32,  # Maximum number of programs that run at the same time.
      time_limit_s=6.0,  # As in LiveCodeBench.
      memory_mb=4096,  # As in LiveCodeBench.
      overlong_buffer=4096,  # As in DAPO. Unused, since overlong_weight is 0.
    ),
    eval=dict(samples=8, batch=32),  # §5.1: average Pass@1 over 8 samplings.
  )
  if common.variant(arg, "tiny"):
    config.update(
      compute=dict(logits_chunk=128),
      data=dict(max_prompt_tokens=1920),  # A token is a byte. Longer problems are skipped.
      reward=dict(workers=2, memory_mb=1024, overlong_buffer=16),
      sampling=dict(max_new_tokens=64),
      objective=dict(volatility=False),
      rl=dict(iterations=4, prompts=4, group_size=4),
      eval=dict(every=2, samples=2, batch=4),
    )
  return config
