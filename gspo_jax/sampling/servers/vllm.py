"""vLLM's surface for reinforcement learning, as of 0.32: tokens in, tokens out.

`VLLM` needs a server with `--enable-scale-out`, `COMPLETIONS` one with a tokenizer. With either,
new weights need `VLLM_SERVER_DEV_MODE=1`, and log-probs `--logprobs-mode processed_logprobs`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_jax.sampling.servers.calls import (
  Call,
  Failed,
  Part,
  array_of_base64,
  floats,
  integers,
  version_number,
)
from gspo_jax.sampling.servers.dialects import Ask, Dialect

PROCESSED = "start it with --logprobs-mode processed_logprobs"
PREFIX = "generate-tokens-"  # vLLM puts it before the ids of such requests


def _sampling(call: Call) -> dict[str, Any]:
  """The distribution and the end of a response. Nothing is left to defaults, which a directory's
  generation_config.json may change; end-of-sequence tokens are our stop ids or none."""
  sampling = call.sampling
  return dict(
    n=call.samples,
    max_tokens=call.max_new_tokens,
    temperature=sampling.temperature,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    min_p=sampling.min_p,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=call.seed,
    stop_token_ids=list(call.stop_ids),
    ignore_eos=True,
    logprobs=0,  # the sampled token's alone
  )


def _generate(call: Call) -> Ask:
  parameters = _sampling(call) | dict(detokenize=False)
  body = dict(request_id=call.id, token_ids=list(call.tokens), sampling_params=parameters)
  return Ask("/inference/v1/generate", body)


def _read(answer: Mapping[str, Any], call: Call) -> list[Part]:
  return [_part(choice) for choice in _choices(answer, call)]


def _choices(answer: Mapping[str, Any], call: Call) -> list[Mapping[str, Any]]:
  """The choices in the order of their index, which is the number of the sample."""
  try:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] == list(range(call.samples)):
      return choices
  except (KeyError, TypeError, AttributeError) as error:
    raise Failed("body", f"it has no choices: {error!r:.80}") from error
  raise Failed("tokens", f"{len(choices)} choices came for {call.samples}")


def _part(choice: Mapping[str, Any]) -> Part:
  try:
    tokens = integers(choice["token_ids"] or [])
    content = (choice["logprobs"] or {}).get("content") or []
    said = integers([entry["token_id"] for entry in content])
    logp = floats([entry["logprob"] for entry in content])
    reason = choice["finish_reason"]
  except (KeyError, TypeError, AttributeError) as error:
    raise Failed("body", f"a choice is not as it should be: {error!r:.80}") from error
  if not np.array_equal(said, tokens):
    raise Failed("tokens", "the log-probs are not of the tokens that came")
  version, experts = _versions(choice, len(tokens)), _routed(choice)
  return Part(tokens, logp, version, reason == "stop", reason == "abort", experts)


def _versions(choice: Mapping[str, Any], count: int) -> np.ndarray | None:
  """int32 [n] of contiguous spans; None where there are none."""
  version = np.full(count, -1, np.int32)
  try:
    spans = choice.get("weight_versions") or []
    for span in spans:
      version[int(span["start"]) : int(span["end"])] = version_number(span["version"])
  except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
    raise Failed("body", f"its weight_versions are no spans: {error!r:.80}") from error
  return version if spans else None


def _routed(choice: Mapping[str, Any]) -> np.ndarray | None:
  experts = choice.get("routed_experts")
  return None if experts is None else array_of_base64(experts)


def _completion(call: Call) -> Ask:
  more = dict(return_token_ids=True, skip_special_tokens=False, request_id=call.id)
  return Ask("/v1/completions", dict(prompt=list(call.tokens)) | _sampling(call) | more)


def _read_completion(answer: Mapping[str, Any], call: Call) -> list[Part]:
  parts = []
  for choice in _choices(answer, call):
    try:
      tokens = integers(choice["token_ids"] or [])
      logp = floats((choice["logprobs"] or {}).get("token_logprobs") or [])
      reason = choice["finish_reason"]
    except (KeyError, TypeError, AttributeError) as error:
      raise Failed("body", f"a choice is not as it should be: {error!r:.80}") from error
    version, experts = _versions(choice, len(tokens)), _routed(choice)
    parts.append(Part(tokens, logp, version, reason == "stop", reason == "abort", experts))
  return parts


def _publish(directory: str, version: int) -> list[Ask]:
  reload = dict(method="reload_weights", kwargs=dict(weights_path=directory))
  return [
    Ask("/pause?mode=keep", {}),  # what is under way goes on with the new weights
    Ask("/collective_rpc", reload),
    # Keys and values of the old weights, those of responses under way too.
    Ask("/reset_prefix_cache?reset_running_requests=true", {}, dict(success=True)),
    _label(version),
    RESUME,
  ]


def _label(version: int) -> Ask:
  return Ask("/update_weight_version", dict(new_version=str(version)))


def _abort(ids: list[str]) -> list[Ask]:
  return [Ask("/inference/v1/abort_requests", dict(request_ids=[PREFIX + id_ for id_ in ids]))]


def _abort_completions(ids: list[str]) -> list[Ask]:
  return [Ask("/abort_requests", dict(request_ids=[]))]  # all: these ids are the server's own


def _unfit(settings: Mapping[str, Any], routing: bool) -> str:
  config = settings.get("vllm_config")
  if not isinstance(config, Mapping):
    return ""
  model, outputs = (config.get(key) for key in ("model_config", "aux_output_config"))
  mode = model.get("logprobs_mode") if isinstance(model, Mapping) else None
  if mode not in (None, "processed_logprobs"):
    return f"its log-probs are {mode}: {PROCESSED}"
  sends = outputs.get("enable_return_routed_experts") if isinstance(outputs, Mapping) else None
  if routing and sends is False:
    return "it sends no routed experts: start it with --enable-return-routed-experts"
  return ""


RESUME = Ask("/resume", {})
_COMMON = dict(
  publish=_publish,
  release=RESUME,
  label=_label,
  settings=Ask("/server_info?config_format=json"),
  unfit=_unfit,
  processed=PROCESSED,
)
VLLM = Dialect("vllm", _generate, _read, abort=_abort, **_COMMON)
COMPLETIONS = Dialect(
  "vllm_completions", _completion, _read_completion, abort=_abort_completions, **_COMMON
)
