"""A small Qwen3-MoE learns to add: cold start from an unreliable teacher, then GSPO.

Command:   python -m gspo_jax.main --config=configs/tiny.py --workdir=/tmp/tiny
Hardware:  any machine with two CPU cores; about 3 minutes
Paper:     arXiv:2507.18071
"""

from configs import common
from gspo_jax.models import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  common.variant(arg)
  return common.ConfigDict(
    dict(
      job="sft+rl",  # sft+rl | sft | rl | eval
      seed=0,  # of everything random
      distributed=False,  # several hosts: call jax.distributed.initialize
      resume="same",  # a workdir of another config: same refuses it | force goes on
      on_nonfinite="stop",  # NaN or infinity in an update: stop the run | skip the update
      profile=0,  # iteration that JAX's profiler traces; 0: none
      wandb="",  # project of Weights & Biases, beside TensorBoard; "": none
      weights="random",  # random | Hugging Face directory to start from
      tokenizer="bytes",  # bytes | Hugging Face directory
      model=common.model(sizes.tiny_moe(vocab_size=264)),  # 256 bytes, 3 special, a multiple of 8
      compute=dict(
        dtype="float32",  # a CPU gains nothing from bfloat16
        attention="auto",  # plain | blockwise | splash | cudnn | auto: by length and platform
        experts="auto",  # blocks | batched | ragged | megablox | auto: platform, load
        expert_chunk=0,  # tokens of a device that go through the experts at once; 0: all
        remat="none",  # none | full | attention | dots: what the backward pass recomputes
        logits_chunk=0,  # time steps whose logits exist at once; 0: all
      ),
      mesh=dict(data=-1, fsdp=1, expert=1, tensor=1),  # devices per axis; -1: what is left
      data=dict(
        train="arithmetic:train",
        eval="arithmetic:heldout",
        question_field="question",
        answer_field="answer",
        answer_pattern="",  # regex whose group 1 is the gold answer; "": the whole field
        demonstration_field="",  # what the cold start imitates; arithmetic makes its own
        prompt_template="{question}",
        max_prompt_tokens=8,  # "999+999="
        on_error="raise",  # a bad row: raise | skip
        digits=3,  # of the terms
        carry_errors=0.5,  # how often the teacher forgets a carry
        query_set=dict(
          drop_after=0,  # groups all right or all wrong that end a prompt's use; 0: never
          readmit_after=0,  # iterations until it gets another chance; 0: never
          extra_rounds=0,  # of sampling, to fill the batch with groups with spread (DAPO)
        ),
      ),
      reward=common.reward(
        "arithmetic",  # exact | math | code | string | package.module:function
        workers=0,  # processes; this verifier needs none
        time_limit_s=1.0,  # per answer
      ),
      environment=common.environment(),  # none
      sampling=dict(
        temperature=1.0,
        top_k=0,  # 0: all tokens
        top_p=1.0,  # 1: all tokens
        min_p=0.0,  # 0: all tokens
        max_new_tokens=10,  # "8991:1998" and the stop token
      ),
      engine=dict(
        slots=0,  # responses decoded at once; 0: all of a batch
        steps=5,  # of decoding between two looks of the host, which prefills for free slots
        prefill_tokens=4096,  # of a device at once; longer prompts go in pieces
        cache_dtype="float32",  # of keys and values: float32 | bfloat16
      ),
      objective=dict(
        name="gspo",  # | gspo_token | grpo | ppo_clip | dapo | dr_grpo | cispo | gmpo
        clip_low=0.03,  # a hundred times the paper's: ten tokens average out less than thousands
        clip_high=0.04,
        dual_clip=0.0,  # bound on the ratio for negative advantages; 0: none
        max_length=10,  # of dr_grpo: what every response is divided by
        advantage="std",  # std | none | leave_one_out
        old_logp="recompute",  # recompute: the ratio starts at exactly 1 | sampler: saves a pass
        kl_coef=0.0,  # GSPO is run without a KL penalty
        kl="k3",
        entropy_coef=0.0,
        load_balance_coef=0.0,  # none in RL: where rewards are silent, Adam would follow it alone
        replay="none",  # Routing Replay: none | R2: the trainer's old routes | R3: the sampler's
        volatility=True,  # record routes, for router/volatility/*
      ),
      sft=dict(
        steps=300,
        batch=256,
        microbatches=1,
        max_tokens=18,  # prompt, demonstration and stop token
        log_every=10,
        load_balance_coef=0.01,  # trained from scratch, experts would collapse without it
      ),
      sft_optimizer=common.optimizer(2e-3, schedule="cosine", warmup_steps=30),
      rl=dict(
        iterations=80,
        prompts=64,  # P
        group_size=8,  # G
        extra_prompts=0,  # under way beyond `prompts`; what is unfinished then is carried over
        token_budget=0,  # sampled per iteration, the rest is carried over; 0: none
        minibatches=4,  # updates per rollout batch, as in the paper
        microbatches=1,
        packed=False,  # several responses to a row, and micro-batches left out
        dump_every=10,  # iterations between dumped rollouts
      ),
      rl_optimizer=common.optimizer(2e-4, schedule="linear"),
      eval=dict(
        every=10,  # iterations
        problems=256,  # of the held-out set
        samples=4,  # k of avg@k
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=10,
        greedy=True,
        batch=128,  # problems that are scored and written down together
        benchmarks=dict(),  # further ones, by name; see configs/eval_suite.py
      ),
      checkpoint=common.checkpoint(every=25, keep=2),
      alarms=common.alarms(entropy=0.002, ratio=0.1),  # nats per token; mean |ratio - 1|
    )
  )
