"""A small Qwen3-MoE learns to use a calculator over several turns: cold start, then GSPO-token.

A problem is `37*58+46=`, which the model cannot do in its head. The teacher of the cold start asks
the calculator for two in five operations only; docs/multi_turn.md shows a conversation.

Command:   python -m gspo_jax.main --config=configs/tiny_tools.py --workdir=/tmp/tools
Hardware:  any machine with two CPU cores; about 6 minutes
Expected:  eval/accuracy 0.23 -> 0.99, eval/tool_use 0.40 -> 1.00
Paper:     arXiv:2507.18071, §4.3
"""

import dataclasses

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
      model=common.model(
        # 256 bytes, 3 special, a multiple of 8; two layers are enough for copying
        dataclasses.replace(sizes.tiny_moe(vocab_size=264), num_layers=2)
      ),
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
        train="calculator:train",
        eval="calculator:heldout",
        question_field="question",
        answer_field="answer",
        answer_pattern="",  # regex whose group 1 is the gold answer; "": the whole field
        demonstration_field="",  # what the cold start imitates; the calculator task makes its own
        prompt_template="{question}",
        max_prompt_tokens=9,  # "99*99+99="
        on_error="raise",  # a bad row: raise | skip
        digits=2,  # of each number
        carry_errors=0.5,  # how often the teacher forgets a carry where he works in his head
        query_set=dict(
          drop_after=0,  # groups all right or all wrong that end a prompt's use; 0: never
          readmit_after=0,  # iterations until it gets another chance; 0: never
          extra_rounds=0,  # of sampling, to fill the batch with groups with spread (DAPO)
        ),
      ),
      reward=common.reward(
        "arithmetic",  # not asked: the environment judges
        workers=0,
        time_limit_s=1.0,  # per answer
      ),
      environment=common.environment(
        "calculator",  # | package.module:function | "": none
        max_turns=4,  # two operations and the answer, and one to spare
      ),
      sampling=dict(
        temperature=1.0,
        top_k=0,  # 0: all tokens
        top_p=1.0,  # 1: all tokens
        min_p=0.0,  # 0: all tokens
        max_new_tokens=36,  # three turns take 33, what the calculator says included
      ),
      engine=dict(
        slots=0,  # responses decoded at once; 0: all of a batch
        steps=4,  # of decoding between two looks of the host, which prefills for free slots
        prefill_tokens=4096,  # of a device at once; longer prompts go in pieces
        cache_dtype="float32",  # of keys and values: float32 | bfloat16
      ),
      objective=dict(
        name="gspo_token",  # | segment: a ratio per turn | gspo: one advantage for all turns
        clip_low=0.03,  # as in tiny.py
        clip_high=0.04,
        dual_clip=0.0,  # bound on the ratio for negative advantages; 0: none
        max_length=36,  # of dr_grpo: what every response is divided by
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
        max_tokens=42,  # prompt, demonstration and stop tokens
        log_every=10,
        load_balance_coef=0.01,  # trained from scratch, experts would collapse without it
      ),
      sft_optimizer=common.optimizer(2e-3, schedule="cosine", warmup_steps=30),
      rl=dict(
        iterations=40,
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
        every=5,  # iterations
        problems=256,  # of the held-out set
        samples=4,  # k of avg@k
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=36,
        greedy=True,
        batch=128,  # problems that are scored and written down together
        benchmarks=dict(),  # further ones, by name; see configs/eval_suite.py
      ),
      checkpoint=common.checkpoint(every=25, keep=2),
      alarms=common.alarms(entropy=0.0005, ratio=0.1),  # nats per token; mean |ratio - 1|
    )
  )
