"""What vLLM 0.32 answers, of trajectories. Log-probs are those of the distribution that a token was
drawn from, after temperature and truncation: its `processed_logprobs`."""

import base64
import io
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax.sampling import Trajectory
from gspo_jax.serving.dialect import Ask, Form

LEAST = -9999.0  # vLLM's, in the place of what JSON has no number for

Decode = Callable[[Sequence[int]], str]
Done = tuple[Ask, Sequence[Trajectory]]  # a prompt and its responses


def generate(form: Form, model: str, done: Done, labels: Mapping[int, str], decode: Decode) -> dict:
  """The answer of /inference/v1/generate."""
  ask, trajectories = done
  choices = []
  for index, one in enumerate(trajectories):
    # There is no text in the answer, and making one holds up other requests.
    text = decode(one.tokens.tolist()) if ask.stop_strings else ""
    reason, stop_reason, _ = _end(ask, one, text)
    choices.append(
      dict(
        index=index,
        logprobs=dict(content=_contents(one)) if form.logprobs else None,
        finish_reason=reason,
        stop_reason=stop_reason,
        token_ids=one.tokens.tolist(),
        routed_experts=_experts(one.routing),
        sampling_mask=None,
        weight_versions=_spans(one.version, labels),
      )
    )
  return dict(
    request_id=form.request_id,
    model=model,
    created=int(time.time()),
    output_mode="tokens",
    usage=_usage([done]),
    prompt_token_ids=list(ask.prompt) if form.prompt_token_ids else None,
    prompt_logprobs=None,
    kv_transfer_params=None,
    choices=choices,
  )


def completions(
  form: Form, model: str, all_done: Sequence[Done], labels: Mapping[int, str], decode: Decode
) -> dict:
  """The answer of /v1/completions: responses to the first prompt, then those to the next."""
  choices = []
  for done in all_done:
    ask, trajectories = done
    for one in trajectories:
      text = decode(one.tokens.tolist())
      reason, stop_reason, text = _end(ask, one, text, form.keep_stop_string)
      choices.append(
        dict(
          index=len(choices),
          text=text,
          logprobs=_openai_logprobs(one, decode, form.tokens_as_ids) if form.logprobs else None,
          finish_reason=reason,
          stop_reason=stop_reason,
          token_ids=one.tokens.tolist() if form.token_ids else None,
          prompt_token_ids=list(ask.prompt) if form.prompt_token_ids else None,
          routed_experts=_experts(one.routing),
          weight_versions=_spans(one.version, labels),
        )
      )
  return dict(
    id=f"cmpl-{form.request_id}",
    object="text_completion",
    created=int(time.time()),
    model=model,
    choices=choices,
    usage=_usage(all_done),
  )


def _end(
  ask: Ask, one: Trajectory, text: str, keep: bool = False
) -> tuple[str, int | str | None, str]:
  """How a response ended: finish_reason, stop_reason, and its text without the stop string."""
  if not one.finished:
    return "abort", None, text
  if not one.stopped:
    return "length", None, text
  last = int(one.tokens[-1])
  if last in ask.stop_ids:
    return "stop", last if last in ask.named_stop_ids else None, text
  found = [(text.find(s), s) for s in ask.stop_strings if s in text]
  if not found:  # it ran over the end of the text, in what the decoder leaves out
    return "stop", None, text
  place, string = min(found)
  return "stop", string, text[: place + len(string) * keep]


def _contents(one: Trajectory) -> list[dict[str, Any]]:
  """vLLM repeats the sampled token among the likeliest; its rank is not known here."""
  entries = zip(one.tokens.tolist(), _finite(one.columns["logp"]))
  entries = [dict(token_id=token, logprob=logp, rank=None) for token, logp in entries]
  return [entry | dict(top_logprobs=[entry]) for entry in entries]


def _openai_logprobs(one: Trajectory, decode: Decode, as_ids: bool) -> dict[str, list]:
  ids, logps = one.tokens.tolist(), _finite(one.columns["logp"])
  texts = [f"token_id:{i}" if as_ids else decode([i]) for i in ids]
  return dict(
    text_offset=_offsets(ids, decode),
    token_logprobs=logps,
    tokens=texts,
    top_logprobs=[{text: logp} for text, logp in zip(texts, logps)],
  )


def _offsets(ids: Sequence[int], decode: Decode) -> list[int]:
  """Where in the text each token begins; tokens of one character all where it does."""
  offsets, length, before, parts = [], 0, [], []
  for i in ids:
    offsets.append(length)
    parts.append(i)
    text = decode([*before, *parts])  # some decoders leave out a space at the beginning
    if text.endswith("\ufffd") and len(parts) < 4:
      continue  # a character has four bytes at most
    length += len(text) - len(decode(before))
    before, parts = (parts if decode(parts) else before), []
  return offsets


def _finite(logp: np.ndarray) -> list[float]:
  return np.maximum(np.nan_to_num(logp.astype(float), nan=LEAST), LEAST).tolist()


def _spans(version: np.ndarray, labels: Mapping[int, str]) -> list[dict[str, Any]]:
  """Tokens `[start, end)` that weights of one label have sampled."""
  cuts = [0, *(np.flatnonzero(np.diff(version)) + 1).tolist(), len(version)]
  return [
    dict(version=labels[int(version[start])], start=start, end=end)
    for start, end in itertools.pairwise(cuts)
    if end > start
  ]


def _experts(routing: np.ndarray | None) -> str | None:
  """An .npy of [tokens of prompt and response - 1, MoE layers, k] in base64."""
  if routing is None:
    return None
  file = io.BytesIO()
  kind = np.uint8 if routing.dtype == np.int8 else np.uint16
  np.save(file, routing.astype(kind), allow_pickle=False)
  return base64.b64encode(file.getvalue()).decode()


def _usage(all_done: Sequence[Done]) -> dict[str, int]:
  prompts = sum(len(ask.prompt) for ask, _ in all_done)
  new = sum(len(one.tokens) for _, trajectories in all_done for one in trajectories)
  return dict(prompt_tokens=prompts, completion_tokens=new, total_tokens=prompts + new)
