"""Partial rollouts: what an iteration leaves unfinished goes on in the next, under newer weights.

Long responses would keep an iteration waiting. With `rl.extra_prompts` more groups are under way
than an iteration trains on: it ends when enough of them are finished. With `rl.token_budget` it
also ends when so many tokens have been sampled. Responses that are not finished keep their tokens,
each with the log-probability and the iteration of the weights that sampled it; their contexts are
prefilled again under the new weights. So the old policy of such a response is a mixture, and its
likelihood the product of what the sampler said: GSPO's sequence ratio takes it as it is
(arXiv:2507.18071, §5.4). Partial rollouts: Kimi k1.5, arXiv:2501.12599, §3.3.2.
"""

import base64
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gspo_jax.run import Context
from gspo_jax.sampling import Request, Response, Scheduler, Usage
from gspo_jax.sampling.rollout import assemble
from gspo_jax.structs import Prompt, Rollout

FIELDS = dict(tokens=np.int32, logp=np.float32, version=np.int32)


@dataclasses.dataclass
class Begun:
  """A response under way: its tokens so far."""

  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  logp: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
  version: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  stopped: bool = False
  finished: bool = False

  def extend(self, part: Response, version: int) -> None:
    self.tokens = np.concatenate([self.tokens, part.tokens])
    self.logp = np.concatenate([self.logp, part.logp])
    self.version = np.concatenate([self.version, np.full(len(part.tokens), version, np.int32)])
    self.stopped, self.finished = part.stopped, part.finished


@dataclasses.dataclass
class Group:
  """A prompt with its responses; `seed` is that of the iteration in which they were begun."""

  prompt: Prompt
  seed: int
  responses: list[Begun]

  @property
  def finished(self) -> bool:
    return all(response.finished for response in self.responses)


class InFlight:
  """The groups that are under way between iterations."""

  def __init__(self):
    self.groups: list[Group] = []

  def sample(
    self,
    context: Context,
    params: Any,
    take: Callable[[int], list[Prompt]],
    usage: Usage,
    step: int,
  ) -> tuple[list[Prompt], Rollout]:
    """Goes on until `rl.prompts` groups are finished or the budget is spent, and hands out those
    that are: at most `rl.prompts`, and one per mini-batch at least."""
    c = context.config
    for prompt in take(max(0, c.rl.prompts + c.rl.extra_prompts - len(self.groups))):
      begun = [Begun() for _ in range(c.rl.group_size)]
      self.groups.append(Group(prompt, context.seed("rl", "sample", step), begun))
    scheduler = self._scheduler(context, params)

    def enough() -> bool:
      finished = sum(group.finished for group in self.groups)
      spent = c.rl.token_budget and scheduler.usage.tokens >= c.rl.token_budget
      return finished >= c.rl.prompts or bool(spent and finished >= c.rl.minibatches)

    def keep(parts: Sequence[Response]) -> None:
      for part in parts:
        self.groups[part.request.tag].responses[part.sample].extend(part, step)

    while scheduler.busy and not enough():
      keep(scheduler.step())
    keep(scheduler.stop())
    usage.add(scheduler.usage)
    done = [group for group in self.groups if group.finished][: c.rl.prompts]
    self.groups = [group for group in self.groups if not any(group is other for other in done)]
    length = c.data.max_prompt_tokens + c.sampling.max_new_tokens
    return [group.prompt for group in done], _rollout(done, length, context.tokenizer.pad_id)

  def _scheduler(self, context: Context, params: Any) -> Scheduler:
    """With requests for all that is not finished; those of an untouched group share a prefill."""
    c, stop_ids = context.config, tuple(context.tokenizer.stop_ids)
    s, window = c.sampling, c.data.max_prompt_tokens + c.sampling.max_new_tokens
    scheduler = Scheduler(
      params,
      c.model,
      s,
      c.engine.for_rows(len(self.groups) * c.rl.group_size),
      window=window,
      context=window - 1,
      group_size=c.rl.group_size,
      stop_ids=len(stop_ids),
      compute=c.compute,
    )
    for tag, group in enumerate(self.groups):
      common = dict(seed=group.seed, stop_ids=stop_ids, tag=tag)
      plain = Request(tuple(group.prompt.tokens), s.max_new_tokens, **common)
      if not any(len(response.tokens) for response in group.responses):
        scheduler.submit(dataclasses.replace(plain, samples=len(group.responses)))
        continue
      for sample, response in enumerate(group.responses):
        if not response.finished:
          begun = tuple(response.tokens.tolist())
          left = s.max_new_tokens - len(begun)
          rest = dict(begun=begun, first_sample=sample, max_new_tokens=left)
          scheduler.submit(dataclasses.replace(plain, **rest))
    return scheduler

  def get_state(self) -> list[dict[str, Any]]:
    """JSON: what a checkpoint keeps."""

    def packed(response: Begun) -> dict[str, Any]:
      arrays = {k: base64.b64encode(getattr(response, k).tobytes()).decode() for k in FIELDS}
      return arrays | dict(stopped=response.stopped, finished=response.finished)

    return [
      dict(
        prompt=dataclasses.asdict(group.prompt),
        seed=group.seed,
        responses=[packed(response) for response in group.responses],
      )
      for group in self.groups
    ]

  def set_state(self, state: list[dict[str, Any]]) -> None:
    def unpacked(r: dict[str, Any]) -> Begun:
      arrays = {k: np.frombuffer(base64.b64decode(r[k]), kind) for k, kind in FIELDS.items()}
      return Begun(**arrays, stopped=r["stopped"], finished=r["finished"])

    def prompt(fields: dict[str, Any]) -> Prompt:
      info = tuple((key, value) for key, value in fields["info"])
      return Prompt(**fields | dict(tokens=tuple(fields["tokens"]), info=info))

    self.groups = [
      Group(prompt(g["prompt"]), g["seed"], [unpacked(r) for r in g["responses"]]) for g in state
    ]


def _rollout(groups: Sequence[Group], length: int, pad_id: int) -> Rollout:
  rows = [
    (Request(tuple(group.prompt.tokens), len(response.tokens)), sample, response)
    for group in groups
    for sample, response in enumerate(group.responses)
  ]
  responses = [
    Response(request, i, r.tokens, r.logp, r.logp, r.stopped, True, None) for request, i, r in rows
  ]
  rollout = assemble(responses, length, pad_id)
  version = np.full(rollout.tokens.shape, -1, np.int32)
  for row, (request, _, response) in enumerate(rows):
    start = len(request.prompt)
    version[row, start : start + len(response.tokens)] = response.version
  return dataclasses.replace(rollout, version=version)


def metrics(rollout: Rollout, in_flight: InFlight, step: int) -> dict[str, float]:
  """Of the tokens that are trained on, how many older weights sampled, and how much older the
  oldest; nothing where no response is ever carried over."""
  if rollout.version is None:
    return {}
  version = rollout.version[rollout.mask > 0]
  left = [len(r.tokens) for group in in_flight.groups for r in group.responses]
  return {
    "partial/stale_tokens": float((version < step).mean()),
    "partial/oldest": float(step - version.min()),
    "partial/finished_groups": float(len(rollout.tokens)),
    "partial/tokens_in_flight": float(sum(left)),
  }
