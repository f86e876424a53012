"""Requests as vLLM 0.32 reads them, to `Ask`s. What it takes and we do not is refused by name.

Fields and defaults: vllm/entrypoints/scale_out/token_in_token_out/protocol.py, sampling_params.py
and openai/completion/protocol.py. `answers` writes what comes back.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_jax.data import tokenizer
from gspo_jax.data.tokenizer import Tokenizer
from gspo_jax.serving.limits import Limits, Refused
from gspo_jax.settings.sampling import SamplingConfig

SEEDS = 2**32


@dataclasses.dataclass(frozen=True)
class Ask:
  """Responses to one prompt."""

  prompt: tuple[int, ...]
  samples: int
  sampling: SamplingConfig  # max_new_tokens too
  seed: int
  stop_ids: tuple[int, ...]  # all that end a response
  named_stop_ids: frozenset[int]  # those of the request: they are told as the reason
  stop_strings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Form:
  """What the answer is to have in it."""

  logprobs: bool
  request_id: str = ""
  prompt_token_ids: bool = False
  token_ids: bool = False  # of /v1/completions; the other one always has them
  tokens_as_ids: bool = False  # in the log-probs of /v1/completions: "token_id:7" and no text
  keep_stop_string: bool = False


# Keys that we take with these values only, with which they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = dict(
  presence_penalty=(0, None),
  frequency_penalty=(0, None),
  repetition_penalty=(1, None),
  min_tokens=(0, None),
  logit_bias=(None, {}),
  allowed_token_ids=(None, []),
  bad_words=(None, []),
  prompt_logprobs=(None,),
  logprob_token_ids=(None, []),
  structured_outputs=(None,),
  routed_experts_prompt_start=(0, None),
  extra_args=(None, {}),
)
# Keys that concern text that we do not make, or whoever is served first: nothing comes of them.
WITHOUT_EFFECT = {
  "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind",
  "flat_logprobs", "skip_clone", "stream_options", "cache_salt", "user", "priority", "session_id",
}  # fmt: skip
OF_SAMPLING = {
  "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
  "max_tokens", "logprobs", "include_stop_str_in_output",
}  # fmt: skip
OF_COMPLETIONS = dict(
  stream=(False, None),
  best_of=(1, None),
  echo=(False, None),
  suffix=(None, ""),
  use_beam_search=(False, None),
  response_format=(None, {"type": "text"}),
  truncate_prompt_tokens=(None,),
)
OF_GENERATE = dict(
  stream=(False, None), features=(None,), content_parts=(None, []), output_mode=("tokens", None)
)


def read_object(body: bytes) -> dict[str, Any]:
  """A JSON object. Raises `Refused`."""
  try:
    text = body.decode()
    found = json.loads(text)
    if "\\u" in text:  # half a character cannot be written again
      json.dumps(found, ensure_ascii=False).encode()
  except (ValueError, RecursionError) as error:
    raise Refused(400, f"the body is not JSON: {error}") from error
  if not isinstance(found, dict):
    raise Refused(400, "the body must be a JSON object")
  return found


def generate(
  body: Mapping[str, Any], limits: Limits, tok: Tokenizer, model: str
) -> tuple[Ask, Form]:
  """A request to /inference/v1/generate: token ids in, token ids out. The tokenizer's stop tokens
  end a response unless `ignore_eos`.

  Raises:
    Refused: says which field is wrong, and what it may be.
  """
  known = {"token_ids", "sampling_params", "model", "request_id", "return_token_ids"}
  _check_keys(body, known, OF_GENERATE)
  _check_model(body, model)
  parameters = body.get("sampling_params", {})
  if not isinstance(parameters, Mapping):
    raise Refused(400, "sampling_params must be an object", "sampling_params")
  _check_keys(parameters, OF_SAMPLING, {}, "sampling_params.")
  prompt = _tokens(body.get("token_ids"), "token_ids", limits)
  rest = limits.window - len(prompt)
  ask = _ask(prompt, parameters, limits, tok, rest, "sampling_params.", _chance())
  form = Form(
    logprobs=_logprobs(parameters, "sampling_params."),
    request_id=_take(body, "request_id", str, "")[:200] or secrets.token_hex(16),
    prompt_token_ids=_take(body, "return_token_ids", bool, False),
  )
  return ask, form


def completions(
  body: Mapping[str, Any], limits: Limits, tok: Tokenizer, model: str
) -> tuple[list[Ask], Form]:
  """A request to /v1/completions, in the form of OpenAI's: one `Ask` for each prompt. A text begins
  with the bos token, if the checkpoint wants one, unless `add_special_tokens` is false.

  Raises:
    Refused: says which field is wrong, and what it may be.
  """
  known = OF_SAMPLING | {
    "prompt", "model", "request_id", "return_token_ids", "return_tokens_as_token_ids",
    "add_special_tokens",
  }  # fmt: skip
  _check_keys(body, known, OF_COMPLETIONS)
  _check_model(body, model)
  prompts = body.get("prompt")
  if isinstance(prompts, str) or (
    isinstance(prompts, list) and prompts and not isinstance(prompts[0], str | list)
  ):
    prompts = [prompts]
  if not isinstance(prompts, list) or not 0 < len(prompts) <= limits.most_prompts:
    raise Refused(
      400,
      "prompt must be a text, token ids, or a list of up to "
      f"{limits.most_prompts} of these (--max_prompts)",
      "prompt",
    )
  begin = tok.begin if _take(body, "add_special_tokens", bool, True) else str
  asks = []
  for one in prompts:
    if isinstance(one, str) and len(one) > limits.most_text:  # tokenizing it would take long
      raise Refused(
        400,
        f"prompt: {len(one)} characters are more than the window of {limits.window} tokens has, "
        f"{limits.most_text} at most",
        "prompt",
      )
    prompt = _tokens(tok.encode(begin(one)) if isinstance(one, str) else one, "prompt", limits)
    asks.append(_ask(prompt, body, limits, tok, 16, "", _chance()))
  ids = _take(body, "return_token_ids", bool, False)
  if _take(body, "skip_special_tokens", bool, True) is False and not ids:
    raise Refused(
      400,
      "skip_special_tokens=false is not offered, text is without them: leave it out, or ask for "
      "return_token_ids",
      "skip_special_tokens",
    )
  form = Form(
    logprobs=_logprobs(body, ""),
    request_id=_take(body, "request_id", str, "")[:200] or secrets.token_hex(16),
    prompt_token_ids=ids,
    token_ids=ids,
    tokens_as_ids=_take(body, "return_tokens_as_token_ids", bool, False),
    keep_stop_string=_take(body, "include_stop_str_in_output", bool, False),
  )
  return asks, form


def _chance() -> int:
  """The seed of a request that names none."""
  return secrets.randbelow(SEEDS)


def _ask(
  prompt: tuple[int, ...],
  values: Mapping[str, Any],
  limits: Limits,
  tok: Tokenizer,
  default_tokens: int,
  path: str,
  chance: int,
) -> Ask:
  samples = _take(values, "n", int, 1, path)
  if not 1 <= samples <= limits.most_samples:
    raise Refused(
      400, f"{path}n={samples} must be 1 to {limits.most_samples} (--max_n)", f"{path}n"
    )
  new = _take(values, "max_tokens", int, default_tokens, path)
  if len(prompt) + max(new, 1) > limits.window:
    raise Refused(
      400,
      f"a prompt of {len(prompt)} tokens with {path}max_tokens={new} is longer than the window of "
      f"{limits.window} (data.max_prompt_tokens + sampling.max_new_tokens)",
      f"{path}max_tokens",
    )
  top_k = _take(values, "top_k", int, 0, path)
  try:
    sampling = SamplingConfig(
      temperature=_take(values, "temperature", float, 1.0, path),
      top_k=0 if top_k == -1 else top_k,
      top_p=_take(values, "top_p", float, 1.0, path),
      min_p=_take(values, "min_p", float, 0.0, path),
      max_new_tokens=new,
    )
  except ValueError as error:
    raise Refused(400, str(error).replace("sampling.", path).replace("max_new_", "max_")) from error
  seed = _take(values, "seed", int, chance, path)
  if not 0 <= seed < SEEDS:
    raise Refused(400, f"{path}seed={seed} must be 0 to {SEEDS - 1}", f"{path}seed")
  return Ask(prompt, samples, sampling, seed, *_stops(values, limits, tok, path))


def _stops(
  values: Mapping[str, Any], limits: Limits, tok: Tokenizer, path: str
) -> tuple[tuple[int, ...], frozenset[int], tuple[str, ...]]:
  """What ends a response: all tokens, those that the request names, and strings."""
  named = values.get("stop_token_ids") or []
  named = _tokens(named, f"{path}stop_token_ids", limits) if named else ()
  ignored = _take(values, "ignore_eos", bool, False, path)
  ids = tuple(dict.fromkeys([*named, *([] if ignored else tok.stop_ids)]))
  if len(ids) > limits.stop_ids:
    raise Refused(
      400,
      f"{path}stop_token_ids: {len(ids)} tokens end a response, the tokenizer's among them; at "
      f"most {limits.stop_ids} may (--max_stop_ids)",
      f"{path}stop_token_ids",
    )
  strings = values.get("stop") or []
  strings = [strings] if isinstance(strings, str) else strings
  fit = isinstance(strings, list) and all(isinstance(s, str) and s for s in strings)
  if not fit or len(strings) > limits.stop_strings:
    raise Refused(
      400, f"{path}stop must be up to {limits.stop_strings} texts, none empty", f"{path}stop"
    )
  for s in strings:
    if len(s.encode(errors="replace")) > limits.stop_string_bytes:
      raise Refused(
        400, f"{path}stop: a text is longer than {limits.stop_string_bytes} bytes", f"{path}stop"
      )
    if not tokenizer.shows(tok, s):
      raise Refused(
        400,
        f"{path}stop: no text has {s!r:.60}, since special tokens are left out of it; name tokens "
        f"in {path}stop_token_ids",
        f"{path}stop",
      )
  return ids, frozenset(named), tuple(strings)


def _logprobs(values: Mapping[str, Any], path: str) -> bool:
  """Whether log-probabilities are asked for."""
  count = _take(values, "logprobs", int, None, path)
  if count is None:
    return False
  if count not in (0, 1):
    raise Refused(
      400,
      f"{path}logprobs={count}: only those of sampled tokens are there, which is 0 or 1",
      f"{path}logprobs",
    )
  return True


def _tokens(found: Any, key: str, limits: Limits) -> tuple[int, ...]:
  if not isinstance(found, Sequence) or isinstance(found, str) or not len(found):
    raise Refused(400, f"{key} must be token ids, at least one", key)
  if len(found) > limits.window:
    raise Refused(
      400, f"{key}: {len(found)} tokens are more than the window of {limits.window}", key
    )
  if not all(type(i) is int and 0 <= i < limits.vocab_size for i in found):
    raise Refused(400, f"{key} must be token ids from 0 to {limits.vocab_size - 1}", key)
  return tuple(found)


def _take(values: Mapping[str, Any], key: str, kind: type, default: Any, path: str = "") -> Any:
  """A value of a type; null is the default."""
  found = values.get(key)
  if found is None:
    return default
  if kind is float and type(found) is int and abs(found) < 2**53:
    found = float(found)
  if type(found) is not kind:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    raise Refused(400, f"{path}{key}={found!r:.60} must be {words[kind]}", f"{path}{key}")
  return found


def _check_keys(
  values: Mapping[str, Any], known: set[str], neutral: Mapping[str, tuple], path: str = ""
) -> None:
  for key, value in values.items():
    allowed = neutral.get(key, NEUTRAL.get(key))
    if key in known or key in WITHOUT_EFFECT or (allowed is None and value is None):
      continue
    if allowed is None:
      raise Refused(400, f"unknown field {path}{key!s:.60}: leave it out", f"{path}{key!s:.60}")
    if value not in allowed:
      raise Refused(400, f"{path}{key}={value!r:.60} is not offered: leave it out", f"{path}{key}")


def _check_model(body: Mapping[str, Any], model: str) -> None:
  asked = _take(body, "model", str, "")
  if asked and asked != model:
    raise Refused(404, f"there is no model {asked!r:.200}, only {model!r}", "model")
