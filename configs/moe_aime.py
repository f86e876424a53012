r"""GSPO on Qwen3-30B-A3B, evaluated on AIME'24: the setting of the paper (arXiv:2507.18071, §5).

Command:   python -m gspo_jax.main --config=configs/moe_aime.py --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=TRAIN.jsonl --config.data.eval=AIME24.jsonl
Hardware:  a TPU v5p slice of 64 chips (4x4x4)
Expected:  not run by us at this size

The model, the clip ranges, the four mini-batches and the evaluation are the paper's. The paper
gives no learning rate, batch size, group size or response length; these values are our choices.

configs/moe_aime.py:qwen3_5 is the same job with Qwen3.5-35B-A3B, a hybrid of linear and full
attention.

configs/moe_aime.py:tiny has the same code paths with a small random model, the byte tokenizer, and
sums instead of AIME. It takes a minute on two CPU cores.
"""

from gspo_jax.configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    # By the compiler's schedule, xla="sparsecore" hides most of the communication
    # (docs/sharding.md). prefetch=True would take 13.5 GiB more. Then remat="both" would not fit
    # with 32,768 tokens per chip, and remat="both" saves more time than prefetch=True.
    compute=dict(dtype="bfloat16", expert_chunk=8192, remat="auto", xla="sparsecore"),
    reward=dict(name="math", time_limit_s=5.0),
    # Old log-probs are the sampler's (§5.4), so the cache is in bfloat16. With cache_dtype="int8"
    # and weights_dtype="int8", sampling would take an estimated 193 s per iteration, but old
    # log-probs would need objective.old_logp="recompute" (docs/sampling.md).
    engine=dict(steps=32, prefill_tokens=8192, cache_dtype="bfloat16"),
    sft=dict(load_balance_coef=1e-3),
    # §5.1: average Pass@1 over 32 samplings.
    eval=dict(samples=32, greedy=False, batch=8, benchmarks=common.paper_benchmarks()),
    checkpoint=dict(keep=3, best="eval/accuracy"),
  )
  if common.variant(arg, "tiny", "qwen3_5") == "tiny":
    config.update(
      compute=dict(logits_chunk=16),
      engine=dict(cache="paged", page_tokens=16),  # A paged cache, as on TPU.
      reward=dict(workers=1),
      sampling=dict(max_new_tokens=24),
      objective=dict(volatility=True),
      rl=dict(iterations=6, prompts=16, microbatches=2, dump_every=2),
      eval=dict(every=3, problems=8),
      checkpoint=dict(every=2),
    )
  else:
    config.update(
      distributed=True,
      weights="",  # Required: a model fine-tuned from Qwen3-30B-A3B-Base, the cold start (§5.1).
      model=common.model(common.size("Qwen3.5-35B-A3B" if arg else "Qwen3-30B-A3B-Base")),
      compute=dict(logits_chunk=2048),  # Each position has 151,936 logits, or 248,320.
      engine=dict(slots=1024),  # Recommended by `aot --search`, for 8,192 tokens per response.
      # The torus of 64 chips has three sides of 4: two for fsdp, one for expert. The sampler's
      # experts are split over 16 chips instead of all 64, so tokens travel less far. By `aot`,
      # sampling takes 321 s per iteration, and 362 s with all 64.
      mesh=dict(fsdp=16, expert=4, rollout_experts="fsdp"),
      data=dict(
        train="",  # Required: problems with verifiable answers.
        eval="",  # Required: AIME'24, 30 problems.
        question_field="problem",
        prompt_template=common.BOXED,
        max_prompt_tokens=2048,
      ),
      reward=dict(workers=16),
      sampling=dict(max_new_tokens=30_720),  # 32,768 with the prompt: the model's window.
      # 1,024 responses per update (arXiv:2512.01374), in micro-batches of 64 rows.
      rl=dict(iterations=1000, prompts=256, group_size=16, microbatches=16, packed=True),
      checkpoint=dict(every=10),
    )
  return config
