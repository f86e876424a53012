"""SGLang's native surface, as of 0.5.

Its weights are changed after all requests were aborted: an answer names one version, so that of a
response under two of them would not be known token by token. What was aborted is gone on with.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_jax.sampling.servers.calls import (
  Call,
  Failed,
  Part,
  floats,
  integers,
  version_number,
)
from gspo_jax.sampling.servers.dialects import Ask, Dialect

SEEDS = 0x7FFFFFFF  # a mask: seeds are int32 there


def _generate(call: Call) -> Ask:
  sampling = call.sampling
  parameters = dict(
    n=1,
    max_new_tokens=call.max_new_tokens,
    temperature=sampling.temperature,
    top_k=sampling.top_k or -1,
    top_p=sampling.top_p,
    min_p=sampling.min_p,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    sampling_seed=call.seed,  # looked at with --enable-deterministic-inference alone
    stop_token_ids=list(call.stop_ids),
    ignore_eos=True,
    no_stop_trim=True,
    skip_special_tokens=False,
  )
  body: dict[str, Any] = dict(return_logprob=True)
  body |= dict(return_routed_experts=True) if call.routing else {}
  if call.samples == 1:
    body |= dict(input_ids=list(call.tokens), sampling_params=parameters, rid=call.id)
    return Ask("/generate", body)
  # With `n` of them all samples would have one seed, and with it the same tokens.
  samples = range(call.samples)
  body |= dict(
    input_ids=[list(call.tokens)] * call.samples,
    sampling_params=[parameters | dict(sampling_seed=(call.seed + i) & SEEDS) for i in samples],
    rid=[f"{call.id}-{i}" for i in samples],
  )
  return Ask("/generate", body)


def _read(answer: Any, call: Call) -> list[Part]:
  answers = answer if isinstance(answer, list) else [answer]
  return [_part(one) for one in answers]


def _part(answer: Mapping[str, Any]) -> Part:
  try:
    meta = answer["meta_info"]
    # [log-prob, token, text] each. `output_ids` may be without what ended the response.
    entries = meta.get("output_token_logprobs") or []
    tokens = integers([entry[1] for entry in entries])
    logp = floats([entry[0] for entry in entries])
    reason = meta["finish_reason"]["type"]
    label, experts = meta.get("weight_version"), meta.get("routed_experts")
  except (KeyError, IndexError, TypeError, AttributeError) as error:
    raise Failed("body", f"an answer is not as it should be: {error!r:.80}") from error
  if reason not in ("stop", "length", "abort"):
    raise Failed("body", f"a response ended by {reason!r:.40}")
  if experts is not None:
    experts = _flat(experts)
  version = None if label is None else np.full(len(tokens), version_number(label), np.int32)
  return Part(tokens, logp, version, reason == "stop", reason == "abort", experts)


def _flat(text: Any) -> np.ndarray:
  """int32 of base64: the experts of token after token, layer after layer."""
  try:
    return np.frombuffer(base64.b64decode(text, validate=True), np.int32)
  except (TypeError, ValueError) as error:  # binascii.Error is one
    raise Failed("body", "its routed experts are no int32 in base64") from error


def _publish(directory: str, version: int) -> list[Ask]:
  update = dict(model_path=directory, weight_version=str(version), flush_cache=True)
  return [
    Ask("/pause_generation", dict(mode="abort")),
    Ask("/update_weights_from_disk", update, dict(success=True)),
    CONTINUE,
  ]


def _abort(ids: list[str]) -> list[Ask]:
  return [Ask("/abort_request", dict(rid="", abort_all=True))]  # it takes one id, or all


def _unfit(settings: Mapping[str, Any], routing: bool) -> str:
  if routing and settings.get("enable_return_routed_experts") is False:
    return "it sends no routed experts: start it with --enable-return-routed-experts"
  return ""


CONTINUE = Ask("/continue_generation", {})
SGLANG = Dialect(
  "sglang",
  _generate,
  _read,
  _publish,
  CONTINUE,
  label=lambda version: Ask("/update_weight_version", dict(new_version=str(version))),
  abort=_abort,
  settings=Ask("/get_server_info"),
  unfit=_unfit,
  processed="start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
)
