"""GSPO on Qwen3-30B-A3B, evaluated on AIME'24: the setting of the paper (arXiv:2507.18071, §5).

Command:   python -m gspo_jax.main --config=configs/moe_aime.py --workdir=DIR \
             --config.weights=DIR --config.tokenizer=DIR \
             --config.data.train=TRAIN.jsonl --config.data.eval=AIME24.jsonl
Hardware:  a TPU v5p slice of 64 chips (4x4x4)
Expected:  not run by us at this size

The paper gives the model, the clipping ranges, the four mini-batches and the evaluation. It
gives no learning rate, batch, group or response length: those are choices, and marked as such.

configs/moe_aime.py:tiny is the same configuration at toy size: byte tokenizer, random weights, sums
instead of AIME, a minute on two CPU cores.
"""

from configs import common
from gspo_jax.models import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.ConfigDict(
    dict(
      job="rl",  # the weights are a cold-start model already; sft+rl | sft | rl | eval
      seed=0,  # of everything random
      distributed=True,  # several hosts: jax.distributed.initialize
      resume="same",  # a workdir of another config: same refuses it | force goes on
      on_nonfinite="stop",  # NaN or infinity in an update: stop the run | skip the update
      profile=0,  # iteration that JAX's profiler traces; 0: none
      wandb="",  # project of Weights & Biases, beside TensorBoard; "": none
      weights="",  # to be set: a cold start fine-tuned from Qwen3-30B-A3B-Base (§5.1)
      tokenizer="",  # to be set: the directory with its tokenizer.json
      model=common.model(sizes.qwen3_30b_a3b()),
      compute=dict(
        dtype="bfloat16",  # of activations and matmul inputs; parameters and Adam are float32
        attention="auto",  # plain | blockwise | splash | cudnn | auto: by length and platform
        experts="auto",  # blocks | batched | ragged | megablox | auto: platform, load
        expert_chunk=1024,  # tokens of a chip that go through the experts at once
        remat="full",  # recompute each layer in the backward pass: activations of 48 layers
        logits_chunk=512,  # time steps whose 151,936 logits exist at once
      ),
      mesh=dict(data=1, fsdp=16, expert=4, tensor=1),  # 64 chips: 4x4 and 4 of the torus
      data=dict(
        train="",  # to be set: problems with verifiable answers
        eval="",  # to be set: AIME'24, 30 problems
        question_field="problem",
        answer_field="answer",
        answer_pattern="",  # the whole field
        demonstration_field="",  # no cold start here
        prompt_template=common.BOXED,
        max_prompt_tokens=2048,
        on_error="raise",  # a bad row: raise | skip
        digits=3,  # of the embedded task only
        carry_errors=0.5,  # of the embedded task only
        query_set=dict(
          drop_after=0,  # groups all right or all wrong that end a prompt's use; 0: never
          readmit_after=0,  # iterations until it gets another chance; 0: never
          extra_rounds=0,  # of sampling, to fill the batch with groups with spread (DAPO)
        ),
      ),
      reward=common.reward(
        "math",  # | arithmetic | code | string | package.module:function
        workers=16,  # processes
        time_limit_s=5.0,  # per answer, without queueing
      ),
      environment=common.environment(),  # none
      sampling=dict(
        temperature=1.0,
        top_k=0,  # training samples from the whole distribution
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=30_720,  # choice: with the prompt, the 32,768 positions of the base model
      ),
      engine=dict(
        slots=512,  # responses decoded at once: 96 KiB of cache per token, 3 GiB each
        steps=32,  # of decoding between two looks of the host, which prefills for free slots
        prefill_tokens=8192,  # of a device at once; longer prompts go in pieces
        cache_dtype="bfloat16",  # of keys and values: float32 | bfloat16
      ),
      objective=dict(
        name="gspo",
        clip_low=3e-4,  # §5.1
        clip_high=4e-4,  # §5.1
        dual_clip=0.0,  # not in the paper
        max_length=30_720,  # of dr_grpo only
        advantage="std",  # eq. 6
        old_logp="sampler",  # §5.4: the sampler's own likelihoods, no recomputation
        kl_coef=0.0,  # "we omit the KL regularization term" (§2)
        kl="k3",
        entropy_coef=0.0,
        load_balance_coef=0.0,  # not in the paper; RL recipes leave it out
        replay="none",  # GSPO needs none (§5.3) | R2 | R3
        volatility=False,  # True: 384 bytes of routes per token, up to 50 GB on every host
      ),
      sft=dict(
        steps=0, batch=64, microbatches=1, max_tokens=2048, log_every=10, load_balance_coef=1e-3
      ),
      sft_optimizer=common.optimizer(1e-5),
      rl=dict(
        iterations=1000,  # choice
        prompts=256,  # choice: with G = 16, mini-batches of 1,024 responses (arXiv:2512.01374)
        group_size=16,  # choice
        extra_prompts=0,  # under way beyond `prompts`; what is unfinished then is carried over
        token_budget=0,  # sampled per iteration, the rest is carried over; 0: none
        minibatches=4,  # §5.1: "partitioned into four mini-batches for gradient updates"
        microbatches=16,  # 64 rows at once
        packed=True,  # several responses to a row, and micro-batches left out
        dump_every=10,  # iterations between dumped rollouts
      ),
      rl_optimizer=common.optimizer(1e-6),  # choice: common for models of this size
      eval=dict(
        every=20,  # iterations
        problems=0,  # all 30
        samples=32,  # §5.1: average Pass@1 over 32 samplings
        temperature=1.0,  # choice
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=30_720,
        greedy=False,  # the paper reports samples only
        batch=8,  # problems that are scored and written down together
        benchmarks=common.paper_benchmarks(),  # those with data; to be set
      ),
      checkpoint=common.checkpoint(every=10, keep=3, best="eval/accuracy"),
      alarms=common.alarms(entropy=0.03, ratio=0.005),  # nats per token; mean |ratio - 1|
    )
  )
  if common.variant(arg, "tiny"):
    config.update(
      dict(
        distributed=False,
        weights="random",
        tokenizer="bytes",
        model=common.model(sizes.tiny_moe(vocab_size=264)),
        compute=dict(logits_chunk=16),
        mesh=dict(data=1, fsdp=-1, expert=1),
        data=dict(
          train="arithmetic:train",
          eval="arithmetic:heldout",
          question_field="question",
          prompt_template="{question}",
          max_prompt_tokens=8,
        ),
        reward=dict(workers=1),
        sampling=dict(max_new_tokens=24),
        objective=dict(volatility=True),
        rl=dict(iterations=6, prompts=16, group_size=8, microbatches=2, packed=False, dump_every=2),
        eval=dict(every=3, problems=8, max_new_tokens=24, batch=8),
        checkpoint=dict(every=2),
      )
    )
  return config
