"""vLLM's surface for reinforcement learning, as of 0.32: what is sent, and how answers are read.

Tokens in, tokens out needs a server with `--enable-scale-out`, new weights need
`VLLM_SERVER_DEV_MODE=1`, and log-probs `--logprobs-mode processed_logprobs`. No request is made
here.
"""

import base64
import contextlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gspo_jax.sampling.servers.calls import Call, Failed, Part, failing
from gspo_jax.sampling.servers.wire import Ask

PROCESSED = "start it with --logprobs-mode processed_logprobs"
PREFIX = "generate-tokens-"  # vLLM puts it before the ids of calls
RESUME = Ask("/resume", {})  # lets a server go on, whatever came after its /pause
SETTINGS = Ask("/server_info?config_format=json")  # how a server was started
_HEADERS = {  # of an .npy, by its version; a third one is for names of fields
  (1, 0): np.lib.format.read_array_header_1_0,
  (2, 0): np.lib.format.read_array_header_2_0,
}


def generate(call: Call) -> Ask:
  """The request for a call. Nothing is left to defaults, which a directory's generation_config.json
  may change; end-of-sequence tokens are our stop ids or none."""
  sampling = call.sampling
  parameters = dict(
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
    detokenize=False,
  )
  body = dict(request_id=call.id, token_ids=list(call.tokens), sampling_params=parameters)
  return Ask("/inference/v1/generate", body)


def read(answer: Mapping[str, Any], call: Call) -> list[Part]:
  """The parts in the answer to a call, in the order of its samples. Failed: there are none."""
  with failing("it has no choices"):
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    indices = [choice["index"] for choice in choices]
  if indices != list(range(call.samples)):
    raise Failed("tokens", f"{len(choices)} choices came for {call.samples}")
  return [_part(choice) for choice in choices]


def _part(choice: Mapping[str, Any]) -> Part:
  with failing("a choice is not as it should be"):
    tokens = column(choice["token_ids"] or [], np.int32)
    content = (choice["logprobs"] or {}).get("content") or []
    said = column([entry["token_id"] for entry in content], np.int32)
    logp = column([entry["logprob"] for entry in content], np.float32)
    reason, experts = choice["finish_reason"], choice.get("routed_experts")
  if not np.array_equal(said, tokens):
    raise Failed("tokens", "the log-probs are not of the tokens that came")
  version = np.full(len(tokens), -1, np.int32)  # nobody's, where no span is
  with failing("its weight_versions are no spans"):
    for span in choice.get("weight_versions") or []:
      version[int(span["start"]) : int(span["end"])] = version_number(span["version"])
  experts = None if experts is None else array_of_base64(experts)
  return Part(tokens, logp, version, reason == "stop", reason == "abort", experts)


def publish(directory: str, version: int) -> list[Ask]:
  """Requests, one after the other, after which a server has the weights of a directory."""
  reload = dict(method="reload_weights", kwargs=dict(weights_path=directory))
  return [
    Ask("/pause?mode=keep", {}),  # what is under way goes on with the new weights
    Ask("/collective_rpc", reload),
    # Keys and values of the old weights, those of responses under way too.
    Ask("/reset_prefix_cache?reset_running_requests=true", {}, dict(success=True)),
    Ask("/update_weight_version", dict(new_version=str(version))),
    RESUME,
  ]


def abort(ids: list[str]) -> Ask:
  """Leaves the calls of these ids, whose answers then come with what they have."""
  return Ask("/inference/v1/abort_requests", dict(request_ids=[PREFIX + id_ for id_ in ids]))


def unfit(settings: Any, routing: bool) -> str:
  """Why a server that answers `settings` cannot be used; "": it can, or does not say."""

  def said(section: str, key: str) -> Any:
    with contextlib.suppress(KeyError, TypeError):
      return settings["vllm_config"][section][key]
    return None

  mode = said("model_config", "logprobs_mode")
  if mode not in (None, "processed_logprobs"):
    return f"its log-probs are {mode}: {PROCESSED}"
  if routing and said("aux_output_config", "enable_return_routed_experts") is False:
    return "it sends no routed experts: start it with --enable-return-routed-experts"
  return ""


def column(values: Any, dtype: type) -> np.ndarray:
  """[n] of a list of numbers, int32 where all are integers or float32. Failed: it is none."""
  with contextlib.suppress(TypeError, ValueError, OverflowError):
    array = np.asarray(values, None if dtype is np.int32 else np.float64)
    right = dtype is np.float32 or not array.size
    if array.ndim == 1 and (right or (array.dtype.kind == "i" and abs(array).max() < 2**31)):
      with np.errstate(over="ignore"):  # to infinity, which `calls.checked` refuses
        return array.astype(dtype)
  wanted = "integers" if dtype is np.int32 else "numbers"
  raise Failed("body", f"it holds {values!r:.60} where {wanted} belong")


def version_number(label: Any) -> int:
  """The version that a label names; -1 for a label that no publication has set."""
  text = str(label)
  return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def array_of_base64(text: Any, most_bytes: int = 2**30) -> np.ndarray:
  """The array in base64 of an .npy file. Failed if it is none."""
  with failing("its routed experts are no array in base64"):
    raw = base64.b64decode(text, validate=True)
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    shape, fortran, dtype = _HEADERS[version](file)
    claimed = math.prod(shape) * dtype.itemsize
    # `np.load` would make room for whatever a header claims.
    if dtype.kind not in "iu" or not claimed == len(raw) - file.tell() <= most_bytes:
      raise ValueError(f"{len(raw)} bytes for {shape} of {dtype}")
    array = np.frombuffer(raw, dtype, offset=file.tell())
    return array.reshape(shape, order="F" if fortran else "C")
