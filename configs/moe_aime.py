r"""GSPO on Qwen3-30B-A3B, evaluated on AIME'24: the setting of the paper (arXiv:2507.18071, §5).

Command:   python -m gspo_jax.main --config=configs/moe_aime.py --workdir=DIR \
             --config.weights=MODEL \
             --config.data.train=TRAIN.jsonl --config.data.eval=AIME24.jsonl
Hardware:  a TPU v5p slice of 64 chips (4x4x4)
Expected:  not run by us at this size

The paper gives the model, the clipping ranges, the four mini-batches and the evaluation. It
gives no learning rate, batch, group or response length: those are choices.

configs/moe_aime.py:tiny is the same configuration at toy size: byte tokenizer, random weights, sums
instead of AIME, a minute on two CPU cores.
"""

from gspo_jax.configs import common


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    # By the compiler sparsecore hides most of the links' time (docs/sharding.md). Not prefetch: its
    # 13.5 GiB leave no room for remat="both" of 32,768 tokens a chip, which costs more.
    compute=dict(dtype="bfloat16", expert_chunk=8192, remat="auto", xla="sparsecore"),
    reward=dict(name="math", time_limit_s=5.0),
    # The sampler's own log-probs (§5.4) need bfloat16. cache_dtype="int8" and weights_dtype="int8"
    # sample in 193 s, but are for objective.old_logp="recompute" (docs/sampling.md).
    engine=dict(steps=32, prefill_tokens=8192, cache_dtype="bfloat16"),
    sft=dict(load_balance_coef=1e-3),
    # §5.1: average Pass@1 over 32 samplings
    eval=dict(samples=32, greedy=False, batch=8, benchmarks=common.paper_benchmarks()),
    checkpoint=dict(keep=3, best="eval/accuracy"),
  )
  if common.variant(arg, "tiny"):
    config.update(
      compute=dict(logits_chunk=16),
      engine=dict(cache="paged", page_tokens=16),  # as on TPU
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
      weights="",  # to be set: a cold start fine-tuned from Qwen3-30B-A3B-Base (§5.1)
      model=common.model(common.size("Qwen3-30B-A3B-Base")),
      compute=dict(logits_chunk=2048),  # of 151,936 logits each
      engine=dict(slots=1024),  # what `aot --search` recommends, for a mean of 8,192 tokens
      # 64 chips: 4x4 and 4 of the torus. With the sampler's experts over 16 of them and not all,
      # tokens travel less far, and by the compiler sampling takes 321 s an iteration, not 362.
      mesh=dict(fsdp=16, expert=4, rollout_experts="fsdp"),
      data=dict(
        train="",  # to be set: problems with verifiable answers
        eval="",  # to be set: AIME'24, 30 problems
        question_field="problem",
        prompt_template=common.BOXED,
        max_prompt_tokens=2048,
      ),
      reward=dict(workers=16),
      sampling=dict(max_new_tokens=30_720),  # with the prompt, the 32,768 positions of the model
      # 1,024 responses per update (arXiv:2512.01374), 64 rows at once
      rl=dict(iterations=1000, prompts=256, group_size=16, microbatches=16, packed=True),
      checkpoint=dict(every=10),
    )
  return config
