"""Every key of a configuration, once, with its unit or reason: `base()`. The files next to this one
are differences from it.

`base()` itself runs anywhere: GSPO with the paper's numbers, on sums, with a toy model of random
weights. "0: all" and the like say what a value that stands for another means; ranges stand with the
keys' declarations, in the dataclasses that `gspo_jax.settings.run.RunConfig` is made of.
"""

import dataclasses
import typing
from pathlib import Path

import ml_collections
from ml_collections import config_dict

from gspo_jax.settings import model as sizes
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.objective import CorrectionConfig, ObjectiveConfig

ConfigDict = ml_collections.ConfigDict

# The instruction of Qwen's own evaluations for mathematical problems.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def base() -> ConfigDict:
  """The default run, with all keys."""
  return ConfigDict(
    dict(
      job="rl",  # sft+rl | sft | rl | offline | eval
      seed=0,  # of everything random
      distributed=False,  # several hosts: call jax.distributed.initialize
      resume="same",  # a workdir of another config: same refuses it | force goes on
      on_nonfinite="stop",  # NaN or infinity in an update: stop the run | skip the update
      profile=0,  # iteration that JAX's profiler traces; 0: none
      wandb="",  # project of Weights & Biases, beside TensorBoard; "": none
      weights="random",  # random | Hugging Face directory | run or its checkpoint: docs/running.md
      tokenizer="bytes",  # bytes | Hugging Face directory
      # A named size, whose keys are those of ModelConfig. 264: 256 bytes, 3 special tokens, and a
      # multiple of 8.
      model=model(sizes.tiny_moe(vocab_size=264)),
      compute=dict(
        dtype="float32",  # of activations and matmul inputs: float32 | bfloat16 (on accelerators)
        attention="auto",  # plain | blockwise | splash | cudnn | auto: by length and platform
        experts="auto",  # blocks | batched | ragged | megablox | auto: by platform and load
        expert_chunk=0,  # tokens of a device that go through the experts at once; 0: all
        remat="none",  # none | full | attention | dots | both | auto: models/remat.py
        logits_chunk=0,  # time steps whose logits exist at once; 0: all
      ),
      mesh=dict(
        **dict(data=1, fsdp=-1, expert=1, tensor=1),  # devices per axis; one may be -1: the rest
        rollout_experts="auto",  # sampler's, over: all (fsdp x expert) | expert | auto: all if even
      ),
      # Devices that only sample, after those of `mesh`, which are fewer then; one axis may be -1:
      # the rest. With a 0: none, the sampler has the trainer's. docs/asynchronous.md
      rollout_mesh=dict(data=1, fsdp=0, expert=1, tensor=1),
      data=dict(
        train="arithmetic:train",  # embedded task | [format@]path [where ...]; docs/data.md
        eval="arithmetic:heldout",  # the same
        question_field="question",
        answer_field="answer",
        answer_pattern="",  # regex whose group 1 is the gold answer; boxed; "": the whole field
        demonstration_field="",  # imitated by the cold start; "": the answer field
        prompt_template="{question}",
        max_prompt_tokens=8,  # "999+999="
        on_error="raise",  # a bad row: raise | skip (and count)
        digits=3,  # of an operand of the embedded task: 1 to 3, with the calculator 1 or 2
        lines=(8, 16, 32),  # that problems of the embedded recurrence ask for
        carry_errors=0.5,  # probability that the embedded task's teacher forgets a carry
        skipped_work=0.0,  # embedded sums: share that the teacher writes down without their work
        checks=0.0,  # probability that the calculator's teacher asks a question twice, to be sure
        query_set=dict(
          drop_after=0,  # groups all right or all wrong that end a prompt's use; 0: never
          readmit_after=0,  # iterations until it gets another chance; 0: never
          extra_rounds=0,  # of sampling, until all groups have different rewards (DAPO)
        ),
      ),
      offline=dict(  # of job=offline, which learns from recorded responses; docs/data.md
        data="",  # dumped rollouts, RUN/rollouts/rl_*.jsonl, or files like them
        fresh=0.0,  # share of the prompts of an iteration whose responses are sampled now
      ),
      reward=dict(  # of the verifier: 1 for a right response and 0 for any other
        # arithmetic | recurrence | math | code | string | package.module:function
        name="arithmetic",
        workers=0,  # processes that verify at the same time; math and code need some
        time_limit_s=1.0,  # per answer, without queueing; code: CPU time per test
        memory_mb=1024,  # code: address space of a program; at least 64
        isolation="auto",  # code: namespaces | auto: the same | none: with your rights
        format="none",  # think | think_answer: tags that a response must have
        format_weight=0.0,  # added to the reward of a response that has them
        overlong_weight=0.0,  # taken from a response of overlong_max tokens; DAPO has 1
        overlong_max=0,  # tokens; 0: sampling.max_new_tokens
        overlong_buffer=0,  # tokens below overlong_max over which the loss grows from 0
        false_positive=0.0,  # noise for experiments: share of other responses rewarded as right
        false_negative=0.0,  # share of right responses that are not rewarded
        partial=0.0,  # recurrence: of the value, what the share of right lines decides
        noise_seed=0,  # the same seed misjudges the same responses
        # True: each line has its own reward where it ends, what `partial` (0 is 1 then) gives for
        # it, and is misjudged by itself. Verifiers that judge lines: recurrence
        per_line=False,
      ),
      constraints=dict(  # further rewards, and costs held at limits: docs/objectives.md
        reward_weight=1.0,  # of the reward above where there are any
        # By name, as many as you like; these are left out until they have a weight or a bound.
        rewards=dict(extra=extra_reward()),
        costs=dict(
          length=cost(signal="length"),
          truncated=cost(signal="truncated"),
          text=cost(signal="text"),
          other=cost(),
        ),
      ),
      environment=dict(
        name="",  # calculator | package.module:function | "": one turn, judged by the verifier
        max_turns=1,  # of the policy; a conversation that is not over by then is cut off
        stop_strings=(),  # that end a turn, besides stop tokens
        discount=1.0,  # of rewards of later turns (or lines) in the advantage of an earlier one
        workers=0,  # threads that environments run in; 0: none, for those that never wait
        token_cost=0.0,  # of each sampled token, taken from the reward of its turn; 0: none
        call_cost=0.0,  # of each tool call, taken from the reward of its turn; 0: none
        charge="all",  # who pays: all | right: nobody gains by giving up sooner
      ),
      sampling=dict(  # for training; what leaves out tokens needs top_k: docs/objectives.md
        temperature=1.0,  # above 0: greedy responses of a group would all be the same
        top_k=0,  # at most 1,024, whose ids are kept for the updates; 0: all tokens
        top_p=1.0,  # 1: all tokens
        min_p=0.0,  # 0: all tokens
        max_new_tokens=10,  # per response: "8991:1998" (sums are written in reverse) and the end
      ),
      engine=dict(
        # local: slots on the trainer's mesh, with the keys that follow | server: docs/engines.md,
        # with dtype, urls and server
        name="local",
        slots=0,  # responses decoded at once, over all devices; 0: all of a batch
        steps=16,  # of decoding between two looks of the host, which prefills for free slots
        prefill_tokens=4096,  # of a device at once, a power of 2; longer prompts go in pieces
        # As compute.dtype, of rollouts and evaluations, whose weights are published in it: "": the
        # trainer's | float32 | bfloat16. With another than the trainer's the mismatch is larger.
        dtype="",
        cache_dtype="float32",  # of keys and values: float32 | bfloat16
        # dense: rows of the whole window | paged: responses take pages as they grow | auto: paged
        # on TPU, whose kernel reads what is filled, and with cache_tokens; others collect pages
        cache="auto",
        # Positions of all pages, over all devices; 0: the whole window of every slot. With fewer,
        # responses that find no page are put aside and begun again: sampling/put_aside.
        cache_tokens=0,
        page_tokens=128,  # of a page: 256 KiB a layer of Qwen3-30B-A3B, enough for a fast copy
        urls=(),  # of servers: http://host:port
        server=dict(
          directory="",  # of published weights, seen by all servers; "": published/ of the workdir
          token_variable="GSPO_ENGINE_TOKEN",  # of the environment: a bearer token; unset: none
          in_flight=256,  # responses that one server is asked for at once
          timeout_s=3600.0,  # of a request; longer than the longest response takes
          publish_s=900.0,  # of a request with new weights or a probe; timeout_s bounds it too
          wait_s=300.0,  # with no server left, until the run ends
          retries=5,  # of a request, on other servers where there are any
          # Mean |difference| of a probe's log-probs from the trainer's, in nats, beyond which a
          # server is not used; 0: 0.005 in float32, 0.1 in bfloat16
          tolerance=0.0,
        ),
      ),
      objective=dict(
        # gspo | gspo_token | segment | grpo | ppo_clip | dapo | dr_grpo | cispo | gmpo | sapo |
        # dppo | spo | rft
        name="gspo",
        # What the loss is told, in docs/objectives.md: clip_low, clip_high, clip_length,
        # clip_exponent, dual_clip, aggregate, divergence, length_exponent, tau_pos, tau_neg,
        # kl_coef, kl, entropy_coef, off_policy_threshold, segment_unit, segment_tokens,
        # segment_delimiters, beta, soft_value; and its advantage, std | none | leave_one_out | soft
        # | best | reward. Unset, each is what the loss was published with, or nothing.
        **unset(ObjectiveConfig),
        # {loss: {option: value}} that suit the other settings of a file, in the place of published
        # ones; the options above go before them.
        tuned=dict(),
        # Importance weights for a trainer that differs from the sampler: none | truncated | masked;
        # level, cap, low, high as in docs/objectives.md
        correction=dict(name="none", **unset(CorrectionConfig)),
        # Ranges that move until so many tokens are clipped: docs/objectives.md
        adaptive_clip=dict(
          target=0.0,  # share of tokens; 0: the ranges stay
          gain=1.0,  # of log range, by iteration and distance to the target
          span=100.0,  # the largest factor, and the inverse of the smallest
        ),
        # sampler: §5.4, saves a pass | recompute: ratios start at exactly 1 | behaviour: as
        # sampler, and a pass says by how much the trainer differs: for engines of others
        old_logp="sampler",
        load_balance_coef=0.0,  # none in RL: where rewards are silent, Adam would follow it alone
        replay="none",  # Routing Replay: none | R2: the trainer's old experts | R3: the sampler's
        volatility=False,  # True: record experts, for router/volatility/*
      ),
      sft=dict(  # the cold start
        steps=0,  # updates, at most
        target_loss=0.0,  # nats per token of held-out demonstrations that end it sooner; 0: none
        check_every=10,  # updates between two looks at the held-out loss
        check_problems=128,  # demonstrations that are held out for it
        batch=64,  # demonstrations per update
        microbatches=1,  # parts of an update, one after the other: more of them need less memory
        max_tokens=0,  # of prompt and demonstration; 0: data.max_prompt_tokens + max_new_tokens
        log_every=10,  # updates
        load_balance_coef=0.0,  # of the router; from scratch, experts collapse without it
      ),
      sft_optimizer=optimizer(learning_rate=1e-5),
      rl=dict(
        iterations=300,  # rollout batches
        prompts=64,  # P, per rollout batch; a multiple of minibatches
        group_size=8,  # G, responses per prompt; 2 or more where advantages are relative
        lag=0,  # iterations that sampling is ahead of the updates; 0: none, docs/asynchronous.md
        record=False,  # True: each batch goes into WORKDIR/batches, as it is trained on
        replay="",  # WORKDIR/batches of a recorded run, trained on again; "": sample
        extra_prompts=0,  # begun beyond `prompts` as places become free; the unfinished carry over
        token_budget=0,  # sampled per iteration, the rest is carried over; 0: none
        mask_truncated=False,  # True: responses that were cut off teach nothing (DAPO, §3.4)
        minibatches=4,  # updates per rollout batch and epoch: §5.1
        epochs=1,  # times that the mini-batches are gone through, in the same order
        microbatches=1,  # parts of an update, one after the other: more of them need less memory
        packed=False,  # several responses to a row, and micro-batches left out; docs/running.md
        lora_rank=0,  # of adapters, which are trained instead of the model; 0: all of it is
        dump_every=10,  # iterations between dumped rollouts
      ),
      rl_optimizer=optimizer(learning_rate=1e-6),
      schedule=dict(  # what changes while a run goes on: docs/objectives.md
        # Tokens of a response, at most, from an iteration on: "1:2048,50:4096"; "": max_new_tokens
        new_tokens="",
        refresh_every=0,  # iterations until lines appended to data.train are read; 0: never
        group_size_min=0,  # responses to the easiest prompts, of group_size; 0: all have group_size
        group_solved=0.9,  # probability of a right response that decides the size of a group
      ),
      critic=dict(  # PPO: objective.name=ppo_clip, and docs/objectives.md
        name="none",  # none | head: on the policy's trunk | model: with a trunk of its own
        init="policy",  # of a model of its own: policy: its weights before RL | random
        warmup_iterations=0,  # the first ones of rl.iterations, in which only the critic learns
        discount=1.0,  # per token; 1: a right response is worth the same at any length
        trace=0.95,  # lambda of GAE, per token; 1: rewards alone, for long responses
        clip=0.2,  # of values around old ones, in units of the reward; 0: none
        normalize=True,  # advantages of an iteration to mean 0 and standard deviation 1
        trunk_coef=0.1,  # of a head: factor of its loss for the trunk; 0: the head alone learns
        kl_coef=0.0,  # of KL to the policy before RL, taken from each token's reward
      ),
      critic_optimizer=optimizer(learning_rate=1e-5),  # larger: its target moves
      distillation=dict(  # on-policy, from a larger model: docs/objectives.md
        teacher="",  # Hugging Face directory | run or its checkpoint, as weights; "": none
        coef=1.0,  # of log π_teacher/π_old in the advantage of a token
        discount=0.0,  # of that of later tokens, per token; 0: each answers for itself alone
        reward_weight=1.0,  # of the advantage that rewards give; 0: the teacher's alone
      ),
      eval=dict(
        every=20,  # iterations between evaluations
        problems=0,  # of the held-out set, evenly spread over it; 0: all
        samples=4,  # k of avg@k
        temperature=1.0,  # 0: greedy
        top_k=0,  # 0: all tokens
        top_p=1.0,  # 1: all tokens
        min_p=0.0,  # 0: all tokens
        max_new_tokens=0,  # 0: sampling.max_new_tokens
        greedy=True,  # and one greedy response per problem
        batch=64,  # problems that are scored and written down together
        benchmarks=dict(),  # further ones, by name: benchmark()
      ),
      checkpoint=dict(
        directory="",  # local or gs://...; "": checkpoints/ of the workdir
        every=20,  # iterations or updates
        keep=2,  # of the newest
        keep_every=0,  # those of steps that this divides stay as well; 0: none
        best="",  # the one with the largest value of this metric stays as well; "": none
        grace_s=30.0,  # seconds from SIGTERM to the end of the process
      ),
      alarms=dict(  # warnings of a run in trouble; 0 turns one off, except for the window
        window=10,  # iterations that medians and means are taken over; at least 2
        grad_norm=10.0,  # times its median
        entropy=0.03,  # nats per token, below which the policy has collapsed
        ratio=0.005,  # mean |importance ratio - 1|: the policy runs away from the one that sampled
        mismatch=1.0,  # times the clip range: sampler and trainer, or two programs, differ so much
        reward=0.2,  # that the mean reward lies below the best it has been
        unknown=0.01,  # share of responses on which the verifier failed, which are not learned from
      ),
    )
  )


def unset(section: type) -> dict:
  """The keys of a dataclass whose values may be left out, without one."""
  kinds = typing.get_type_hints(section)
  keys = {}
  for field in dataclasses.fields(section):
    if field.default is None:
      kind, _ = typing.get_args(kinds[field.name])  # or None
      word = typing.get_origin(kind) is typing.Literal
      keys[field.name] = config_dict.placeholder(str if word else typing.get_origin(kind) or kind)
  return keys


def optimizer(learning_rate: float) -> ConfigDict:
  """AdamW as RL of language models commonly uses it: sft_optimizer and rl_optimizer."""
  return ConfigDict(
    dict(
      learning_rate=learning_rate,  # the largest of the schedule
      schedule="constant",  # after the warm-up: constant | linear | cosine
      warmup_steps=10,  # gradient updates
      final_fraction=0.1,  # of the peak at the end; constant ignores it
      b1=0.9,
      b2=0.95,  # shorter memory than 0.999: RL gradients change quickly
      eps=1e-8,
      weight_decay=0.0,  # RL moves little; decay would pull towards zero instead
      clip_norm=1.0,  # global gradient norm; 0: no bound
    )
  )


def benchmark(samples: int, **changes) -> ConfigDict:
  """A section of eval.benchmarks; docs/evaluation.md has more."""
  section = ConfigDict(
    dict(
      data="",  # [format@]path [where ...], as in docs/data.md; "": it is left out
      reward="",  # verifier, as reward.name; "": the one of the run
      problems=0,  # evenly spread over the set; 0: all
      samples=samples,  # per problem
      pass_at=(),  # k of pass@k, each at most `samples`, besides the average over all samples
      rating=False,  # Elo rating against the field `rating` of the problems
      standings="",  # JSON lines of contests: a rating against those who took part
    )
  )
  section.update(changes)
  return section


def extra_reward(**changes) -> ConfigDict:
  """A section of constraints.rewards."""
  section = ConfigDict(
    dict(
      # length | truncated | overlong | format | text | token, or a verifier as reward.name
      signal="",
      text="",  # text: 1 for a response that has it
      token=0,  # token: 1 for a response that has the token of this id
      weight=0.0,  # of the reward, standardised in its group; 0: it is left out
    )
  )
  section.update(changes)
  return section


def cost(**changes) -> ConfigDict:
  """A section of constraints.costs, the first three as in `extra_reward`."""
  section = ConfigDict(
    dict(
      signal="",
      text="",
      token=0,
      bound="",  # at_most | at_least; "": it is left out
      limit=0.0,  # of the mean over the responses of an iteration, in the signal's units
      initial=0.0,  # multiplier of the first iteration
      rate=0.2,  # of the multiplier, per iteration and standard deviation off the limit
      gain=2.0,  # added to the multiplier per standard deviation, against overshooting
      most=10.0,  # of the multiplier
    )
  )
  section.update(changes)
  return section


def paper_benchmarks() -> ConfigDict:
  """Evaluations of the paper besides AIME'24 (arXiv:2507.18071, §5.1)."""
  return ConfigDict(
    dict(
      # Average Pass@1 over 8 samplings, 202410-202502. Data: livecodebench@FILES where
      # contest_date>=2024-10-01 and contest_date<2025-03-01
      livecodebench=benchmark(samples=8, reward="code"),
      # Elo rating; the number of samples is a choice. Data: codeforces@FILES where rating>0
      codeforces=benchmark(samples=8, reward="code", rating=True),
    )
  )


def model(size: ModelConfig) -> ConfigDict:
  """A named size as a section; each of its numbers can be overridden."""
  return ConfigDict(dataclasses.asdict(size))


def size(name: str) -> ModelConfig:
  """A published size by its name in `sizes.PUBLISHED`, or that of a Hugging Face directory."""
  if Path(name).is_dir():
    from gspo_jax.models import hf  # needs safetensors

    return hf.load_config(name)
  if name not in sizes.PUBLISHED:
    raise ValueError(f"{name!r} is neither a directory nor one of {', '.join(sizes.PUBLISHED)}")
  return sizes.PUBLISHED[name]


def variant(arg: str | None, *allowed: str) -> str | None:
  """The part of --config=file.py:arg after the colon, checked."""
  if arg and arg not in allowed:
    raise ValueError(f"config variant {arg!r} is not one of: {', '.join(allowed) or '(none)'}")
  return arg or None
