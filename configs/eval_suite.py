r"""Evaluation of a model on the paper's benchmarks, GSM8K, MATH and HumanEval, without training.

Command:   python -m gspo_jax.main --config=configs/eval_suite.py --workdir=DIR \
             --config.weights=MODEL \
             --config.eval.benchmarks.aime24.data=aime@aime24.jsonl \
             --config.eval.benchmarks.gsm8k.data=gsm8k@gsm8k/test.jsonl ...
Hardware:  a TPU host of 4 chips of v5p, or 8 of v6e, for Qwen3-30B-A3B
Expected:  not run by us at this size

Benchmarks whose data are not set are skipped. The same command resumes an interrupted evaluation,
and prints the results of a finished one again. DIR/metrics.jsonl has the results, DIR/evaluations/
has the results of each problem, and DIR/rollouts/ has the responses. A training configuration with
these benchmarks evaluates them every `eval.every` iterations.

configs/eval_suite.py:tiny is a test of the set-up, with a small random model and the byte
tokenizer.
"""

from gspo_jax.configs import common, moe_aime


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = moe_aime.get_config(arg)
  config.update(
    job="eval",
    distributed=False,  # A single host.
    data=dict(eval="", prompt_template=common.BOXED),  # "": evaluates the benchmarks below alone.
  )
  config.eval.benchmarks = dict(
    aime24=common.benchmark(samples=32),  # §5.1: average Pass@1 over 32 samplings.
    **common.paper_benchmarks(),
    gsm8k=common.benchmark(samples=1),
    math=common.benchmark(samples=4),
    humaneval=common.benchmark(samples=20, pass_at=(1, 10), reward="code"),
  )
  if common.variant(arg, "tiny"):
    config.update(
      data=dict(max_prompt_tokens=1920),  # A token is a byte.
      reward=dict(workers=2),
      eval=dict(batch=10),
    )
  else:
    config.update(
      mesh=dict(fsdp=-1, expert=1, rollout_experts="auto"),
      engine=dict(slots=48, cache_tokens=393_216),  # 4.5 GiB for each of eight chips.
    )
  return config
