"""What config files share: every key with its unit or reason, and the sections of named models."""

import dataclasses

import ml_collections

from gspo_jax.models.sizes import ModelConfig

ConfigDict = ml_collections.ConfigDict

# What Qwen's own evaluations ask of a mathematical problem.
BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


def model(sizes: ModelConfig) -> ConfigDict:
  """A named size as a section; each of its numbers can be overridden."""
  return ConfigDict(dataclasses.asdict(sizes))


def reward(name: str, workers: int, time_limit_s: float, **changes) -> ConfigDict:
  """A verifier, and nothing added to what it says: 1 for a right response and 0 for any other."""
  section = ConfigDict(
    dict(
      name=name,  # arithmetic | math | code | string | package.module:function
      workers=workers,  # processes that verify at the same time; arithmetic and string need none
      time_limit_s=time_limit_s,  # per answer, without queueing; code: CPU time per test
      memory_mb=1024,  # code: address space of a program
      isolation="auto",  # code: namespaces | seccomp | auto: either | none: with your rights
      format="none",  # think | think_answer: tags that a response must have
      format_weight=0.0,  # what having them adds to the reward
      overlong_weight=0.0,  # what a response of overlong_max tokens loses; DAPO has 1
      overlong_max=0,  # tokens: sampling.max_new_tokens
      overlong_buffer=0,  # tokens below that over which the loss grows from 0
      false_positive=0.0,  # noise for experiments: share of other responses rewarded as right
      false_negative=0.0,  # share of right responses that are not rewarded
      noise_seed=0,  # the same seed misjudges the same responses
    )
  )
  section.update(changes)
  return section


def environment(name: str = "", **changes) -> ConfigDict:
  """What responses are conversations with; by default nothing: each is one turn."""
  section = ConfigDict(
    dict(
      name=name,  # calculator | package.module:function | "": none, a verifier judges responses
      max_turns=1,  # of the policy; a conversation that is not over by then is cut off
      stop_strings=(),  # that end a turn, besides stop tokens
      discount=1.0,  # of rewards of later turns in the advantage of an earlier one
      workers=0,  # threads that environments run in; 0: none, for those that never wait
    )
  )
  section.update(changes)
  return section


def optimizer(learning_rate: float, **changes) -> ConfigDict:
  """AdamW as RL of language models commonly uses it."""
  section = ConfigDict(
    dict(
      learning_rate=learning_rate,  # peak
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
  section.update(changes)
  return section


def checkpoint(every: int, keep: int, **changes) -> ConfigDict:
  """What is kept of a run; docs/running.md."""
  section = ConfigDict(
    dict(
      directory="",  # local or gs://...; "": checkpoints/ of the workdir
      every=every,  # iterations or updates
      keep=keep,  # of the newest
      keep_every=0,  # those of steps that this divides stay as well; 0: none
      best="",  # the one with the largest value of this metric stays as well; "": none
      grace_s=30.0,  # from SIGTERM to the end of the process
    )
  )
  section.update(changes)
  return section


def alarms(entropy: float, ratio: float, **changes) -> ConfigDict:
  """When a run says that it is in trouble; 0 turns a warning off."""
  section = ConfigDict(
    dict(
      window=10,  # iterations that medians and means are taken over
      grad_norm=10.0,  # times its median
      entropy=entropy,  # nats per token, below which the policy has collapsed
      ratio=ratio,  # mean |importance ratio - 1|: the policy runs away from the one that sampled
      reward=0.2,  # that the mean reward lies below the best it has been
    )
  )
  section.update(changes)
  return section


def benchmark(samples: int, **changes) -> ConfigDict:
  """A section of eval.benchmarks; docs/evaluation.md has more."""
  section = ConfigDict(
    dict(
      data="",  # [format@]path [where ...], as in docs/data.md; "": it is left out
      reward="",  # verifier, as reward.name; "": the one of the run
      problems=0,  # evenly spread over the set; 0: all
      samples=samples,  # per problem
      pass_at=(),  # k of pass@k, besides the average over all samples
      rating=False,  # Elo rating against the field `rating` of the problems
      standings="",  # JSON lines of contests: a rating against those who took part
    )
  )
  section.update(changes)
  return section


def paper_benchmarks() -> ConfigDict:
  """What the paper evaluates besides AIME'24 (arXiv:2507.18071, §5.1)."""
  return ConfigDict(
    dict(
      # Average Pass@1 over 8 samplings, 202410-202502. Data: livecodebench@FILES where
      # contest_date>=2024-10-01 and contest_date<2025-03-01
      livecodebench=benchmark(samples=8, reward="code"),
      # Elo rating; the number of samples is a choice. Data: codeforces@FILES where rating>0
      codeforces=benchmark(samples=8, reward="code", rating=True),
    )
  )


def variant(arg: str | None, *allowed: str) -> str | None:
  """The part of --config=file.py:arg after the colon, checked."""
  if arg and arg not in allowed:
    raise ValueError(f"config variant {arg!r} is not one of: {', '.join(allowed) or '(none)'}")
  return arg or None
