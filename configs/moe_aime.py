r"""GSPO on Qwen3-30B-A3B, evaluated on AIME'24: the setting of the paper (arXiv:2507.18071, §5).

Command:   python -m gspo_jax.main --config=configs/moe_aime.py --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=TRAIN.jsonl --config.data.eval=AIME24.jsonl
Hardware:  a TPU v5p slice of 64 chips (4x4x4)
Expected:  not run by us at this size

The model, the clip ranges, the four mini-batches and the evaluation are the paper's. The paper
gives no learning rate, batch size, group size or response length, so we chose these values.

configs/moe_aime.py:qwen3_5 trains Qwen3.5-35B-A3B instead, which has layers of linear attention and
layers of full attention.

configs/moe_aime.py:tiny runs the same code with a small random model, the byte tokenizer, and sums
instead of AIME. The run takes a minute on two CPU cores.
"""

from gspo_jax.configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    # According to the compiler, xla="sparsecore" overlaps most of the communication with compute
    # (docs/sharding.md). At full size, remat="auto" means "both". prefetch=True would take 13.5 GiB
    # more, so that remat="auto" would mean "attention". "both" saves more time than prefetch=True.
    compute=dict(dtype="bfloat16", expert_chunk=8192, remat="auto", xla="sparsecore"),
    reward=dict(name="math", time_limit_s=5.0),
    # Old log-probs are the sampler's (§5.4), so its cache has the trainer's dtype. In int8 (with
    # cache_dtype="int8" and weights_dtype="int8"), sampling would take 193 s per iteration instead
    # of 321 s, by the estimate of `aot`. But the trainer would then have to recompute old log-probs
    # (objective.old_logp="recompute", docs/sampling.md).
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
      sampling=dict(max_new_tokens=24),
      objective=dict(volatility=True),
      rl=dict(iterations=6, prompts=16, microbatches=2, dump_every=2),
      eval=dict(every=3, problems=8),
      checkpoint=dict(every=2),
    )
  else:
    config.update(
      distributed=True,
      weights="",  # Required: Qwen3-30B-A3B-Base after a cold start, as in §5.1.
      model=common.model(common.size("Qwen3.5-35B-A3B" if arg else "Qwen3-30B-A3B-Base")),
      compute=dict(logits_chunk=2048),  # Qwen3 has 151,936 logits per token, Qwen3.5 has 248,320.
      # The most slots with whole windows. For a mean response of 8,192 tokens, `aot --search` finds
      # slots=2048 with cache_tokens=22_601_728 faster, by 26 s of sampling per iteration.
      engine=dict(slots=1024),
      # The torus of 64 chips has three sides of 4. Two sides form the axis fsdp, one the axis
      # expert. The sampler's experts are split over fsdp alone, 16 chips, so tokens travel less far
      # than over all 64 chips. `aot` estimates 321 s of sampling per iteration, and 362 s for a
      # split over all chips.
      mesh=dict(fsdp=16, expert=4, rollout_experts="fsdp"),
      data=dict(
        train="",  # Required: problems with verifiable answers.
        eval="",  # Required: AIME'24, 30 problems.
        question_field="problem",
        prompt_template=common.BOXED,
        max_prompt_tokens=2048,
      ),
      reward=dict(workers=16),
      sampling=dict(max_new_tokens=30_720),  # Prompt and response fill Qwen3's window of 32,768.
      # An update has 1,024 responses, as in arXiv:2512.01374, and a micro-batch has 64 rows.
      rl=dict(iterations=1000, prompts=256, group_size=16, microbatches=16, packed=True),
      checkpoint=dict(every=10),
    )
  return config
