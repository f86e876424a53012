r"""GSPO on a dense Qwen3-1.7B and GSM8K.

Command:   python -m gspo_jax.main --config=configs/dense_math.py --workdir=DIR \
             --config.weights=DIR --config.tokenizer=DIR \
             --config.data.train=gsm8k/train.jsonl --config.data.eval=gsm8k/test.jsonl
Hardware:  a TPU v5p or v6e host of 4 or 8 chips
Expected:  not run by us at this size

configs/dense_math.py:tiny has random weights of toy size and the byte tokenizer; it needs the two
data files only, and its reward stays near 0.
"""

from configs import common
from gspo_jax.models import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.ConfigDict(
    dict(
      job="rl",  # sft+rl | sft | rl | eval
      seed=0,  # of everything random
      distributed=False,  # several hosts: jax.distributed.initialize
      resume="same",  # a workdir of another config: same refuses it | force goes on
      on_nonfinite="stop",  # NaN or infinity in an update: stop the run | skip the update
      profile=0,  # iteration that JAX's profiler traces; 0: none
      wandb="",  # project of Weights & Biases, beside TensorBoard; "": none
      weights="",  # to be set: Qwen3-1.7B or its Base
      tokenizer="",  # to be set: the same directory
      model=common.model(sizes.qwen3_1_7b()),
      compute=dict(
        dtype="bfloat16",  # of activations and matmul inputs; parameters and Adam are float32
        attention="auto",  # plain | blockwise | splash | cudnn | auto: by length and platform
        experts="auto",  # blocks | batched | ragged | megablox | auto: platform, load
        expert_chunk=0,  # tokens of a device that go through the experts at once; 0: all
        remat="full",  # recompute each layer in the backward pass
        logits_chunk=512,  # time steps whose 151,936 logits exist at once
      ),
      mesh=dict(data=1, fsdp=-1, expert=1, tensor=1),  # devices per axis; -1: all
      data=dict(
        train="",  # to be set: GSM8K train.jsonl
        eval="",  # to be set: GSM8K test.jsonl
        question_field="question",
        answer_field="answer",
        answer_pattern=r"####\s*(.+)",  # GSM8K writes the result after the working
        demonstration_field="",  # the answer field, should there be a cold start
        prompt_template=common.BOXED,
        max_prompt_tokens=512,
        on_error="raise",  # a bad row: raise | skip
        digits=3,  # of the embedded task only
        carry_errors=0.5,  # of the embedded task only
        query_set=dict(
          drop_after=0,  # groups all right or all wrong that end a prompt's use; 0: never
          readmit_after=0,  # iterations until it gets another chance; 0: never
          extra_rounds=0,  # of sampling, to fill the batch with groups with spread (DAPO)
        ),
      ),
      reward=common.reward("math", workers=8, time_limit_s=5.0),  # processes; seconds per answer
      environment=common.environment(),  # none
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_new_tokens=1024),
      engine=dict(
        slots=256,  # responses decoded at once, of all devices
        steps=16,  # of decoding between two looks of the host, which prefills for free slots
        prefill_tokens=4096,  # of a device at once; longer prompts go in pieces
        cache_dtype="bfloat16",  # of keys and values: float32 | bfloat16
      ),
      objective=dict(
        name="gspo",
        clip_low=3e-4,  # arXiv:2507.18071, §5.1
        clip_high=4e-4,
        dual_clip=0.0,
        max_length=1024,  # of dr_grpo only
        advantage="std",
        old_logp="sampler",  # no recomputation (§5.4)
        kl_coef=0.0,
        kl="k3",
        entropy_coef=0.0,
        load_balance_coef=0.0,  # a dense model has no router
        replay="none",
        volatility=False,
      ),
      sft=dict(
        steps=0, batch=64, microbatches=1, max_tokens=1024, log_every=10, load_balance_coef=0.0
      ),
      sft_optimizer=common.optimizer(1e-5),
      rl=dict(
        iterations=300,
        prompts=64,
        group_size=8,
        extra_prompts=0,  # under way beyond `prompts`; what is unfinished then is carried over
        token_budget=0,  # sampled per iteration, the rest is carried over; 0: none
        minibatches=4,
        microbatches=4,
        packed=True,  # several responses to a row, and micro-batches left out
        dump_every=10,  # iterations between dumped rollouts
      ),
      rl_optimizer=common.optimizer(1e-6),
      eval=dict(
        every=20,  # iterations
        problems=0,  # all 1,319
        samples=4,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        max_new_tokens=1024,
        greedy=True,
        batch=64,  # problems that are scored and written down together
        benchmarks=dict(),  # further ones, by name; see configs/eval_suite.py
      ),
      checkpoint=common.checkpoint(every=20, keep=2, best="eval/accuracy"),
      alarms=common.alarms(entropy=0.03, ratio=0.005),  # nats per token; mean |ratio - 1|
    )
  )
  if common.variant(arg, "tiny"):
    config.update(
      dict(
        weights="random",
        tokenizer="bytes",
        model=common.model(sizes.tiny_dense(vocab_size=264)),
        compute=dict(dtype="float32", remat="none", logits_chunk=128),
        data=dict(max_prompt_tokens=1088),  # bytes: the longest question has 991
        reward=dict(workers=1),
        sampling=dict(max_new_tokens=32),
        engine=dict(slots=0, cache_dtype="float32"),
        rl=dict(iterations=20, prompts=4, group_size=4, microbatches=1, packed=False, dump_every=5),
        eval=dict(every=10, problems=16, samples=4, max_new_tokens=32, batch=16),
        checkpoint=dict(every=5),
      )
    )
  return config
