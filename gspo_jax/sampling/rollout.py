"""Prompts × group -> Rollout."""

from collections.abc import Callable, Sequence

import numpy as np

from gspo_jax.models import routing, transformer
from gspo_jax.models.sizes import REFERENCE, ComputeConfig, ModelConfig
from gspo_jax.sampling.requests import DEFAULT, EngineConfig, Request, Response, Usage
from gspo_jax.sampling.sampler import SamplingConfig
from gspo_jax.sampling.scheduler import Scheduler
from gspo_jax.structs import Rollout


def generate(
  params: transformer.Params,
  model_config: ModelConfig,
  prompts: Sequence[Sequence[int]],
  *,
  group_size: int,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  stop_ids: tuple[int, ...] = (),
  stop_strings: tuple[str, ...] = (),
  detokenize: Callable[[list[int]], str] | None = None,
  seed: int = 0,
  pad_id: int = 0,
  prompt_length: int | None = None,
  record_routing: bool = False,
  compute: ComputeConfig = REFERENCE,
  engine: EngineConfig = DEFAULT,
  usage: Usage | None = None,
) -> Rollout:
  """Samples `group_size` responses to every prompt; rows in the prompts' order, G per prompt.

  A response depends on the weights, `seed`, its prompt's tokens and its index in the group, and on
  nothing else: not on the other prompts, the slots or the devices. Under a mesh (`jax.set_mesh`)
  the rows are split over its batch axes.

  Args:
    prompts: token ids, none empty.
    temperature: 0 is greedy.
    stop_ids: tokens that end a response; they belong to it.
    stop_strings: so does the token that completes one of these in the text that `detokenize` makes
      of a response's tokens.
    prompt_length: the longest prompt to be expected, so that batches of other lengths share one
      compilation. Default: the longest of these.
    record_routing: keep the experts that prefill and decoding used, in `Rollout.routing`: one or
      two bytes per token, layer and chosen expert.
    engine: how many responses are decoded at once, and so on; by default all of them.
    usage: what this sampling cost is added to it.

  Raises:
    ValueError: an empty prompt, one longer than `prompt_length`, or more positions than the model
      was made for.
  """
  config = SamplingConfig(temperature, top_k, top_p, min_p, max_new_tokens)
  lengths_P = np.array([len(p) for p in prompts], np.int32)
  prompt_length = int(lengths_P.max(initial=1)) if prompt_length is None else prompt_length
  _check(lengths_P, prompt_length, group_size, max_new_tokens, model_config)
  scheduler = Scheduler(
    params,
    model_config,
    config,
    engine.for_rows(len(prompts) * group_size),
    window=prompt_length + max_new_tokens,
    context=prompt_length,
    group_size=group_size,
    stop_ids=len(stop_ids),
    compute=compute,
    record_routing=record_routing,
    detokenize=detokenize,
  )
  for index, prompt in enumerate(prompts):
    scheduler.submit(
      Request(
        tuple(prompt),
        max_new_tokens,
        samples=group_size,
        seed=seed,
        stop_ids=tuple(stop_ids),
        stop_strings=tuple(stop_strings),
        tag=index,
      )
    )
  responses = sorted(scheduler.run(), key=lambda r: (r.request.tag, r.sample))
  if usage is not None:
    usage.add(scheduler.usage)
  return assemble(responses, int(lengths_P.max()) + max_new_tokens, pad_id)


def _check(lengths_P, prompt_length, group_size, max_new_tokens, model_config):
  if not len(lengths_P) or group_size < 1:
    raise ValueError(f"{len(lengths_P)} prompts × group_size={group_size}: nothing to sample")
  if lengths_P.min() < 1:
    raise ValueError(f"prompt {int(lengths_P.argmin())} is empty: a prompt has at least one token")
  if lengths_P.max() > prompt_length:
    raise ValueError(
      f"prompt {int(lengths_P.argmax())} has {lengths_P.max()} tokens, more than the window of "
      f"prompt_length={prompt_length}"
    )
  if prompt_length + max_new_tokens > model_config.max_position_embeddings:
    raise ValueError(
      f"prompt_length={prompt_length} + max_new_tokens={max_new_tokens} exceed the model's "
      f"max_position_embeddings={model_config.max_position_embeddings}"
    )


def assemble(responses: Sequence[Response], length: int, pad_id: int) -> Rollout:
  """Prompt then response in one row of `length`, right-padded."""
  B = len(responses)
  tokens = np.full((B, length), pad_id, np.int32)
  mask, logp, full_logp = (np.zeros((B, length), np.float32) for _ in range(3))
  routes = None
  if responses[0].routing is not None:
    # The last token of a response was never fed to the sampler: it has no route, and needs none,
    # since nothing is predicted from it.
    first = responses[0].routing
    routes = np.full((B, length, *first.shape[1:]), routing.NO_ROUTE, first.dtype)
  starts, lengths = np.zeros(B, np.int32), np.zeros(B, np.int32)
  for row, response in enumerate(responses):
    start, n = len(response.request.prompt), len(response.tokens)
    starts[row], lengths[row] = start, n
    tokens[row, :start] = response.request.prompt
    sampled = slice(start, start + n)
    tokens[row, sampled] = response.tokens
    mask[row, sampled] = 1
    logp[row, sampled], full_logp[row, sampled] = response.logp, response.full_logp
    if routes is not None:
      routes[row, : start + n - 1] = response.routing
  return Rollout(
    tokens=tokens,
    mask=mask,
    logp=logp,
    full_logp=full_logp,
    prompt_lengths=starts,
    lengths=lengths,
    stopped=np.array([response.stopped for response in responses]),
    routing=routes,
  )
