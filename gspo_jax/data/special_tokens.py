"""Collects the special tokens of a checkpoint from the files of its tokenizer.

A special token, such as the end of a turn, is not part of the text. In this file, `config` is the
content of tokenizer_config.json.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from etils import epath

from gspo_jax.system import jsons


class TokenizerError(ValueError):
  """Tokenizer files are missing or cannot be used; the message names the path."""


def read_json(file: epath.Path) -> dict[str, Any]:
  """Reads a file's JSON object; {} if there is no file.

  Raises:
    TokenizerError: the file is not a JSON object.
  """
  if not file.exists():
    return {}
  try:
    return jsons.read_object(file)
  except ValueError as error:
    raise TokenizerError(str(error)) from error


def add(
  tokenizer: tokenizers.Tokenizer, directory: epath.Path, config: dict[str, Any]
) -> dict[str, str]:
  """Adds tokens from the files beside tokenizer.json to a tokenizer.

  Transformers 5 adds the same tokens (`_from_pretrained` and `TokenizersBackend`). The config of a
  newer checkpoint lists them in the key `added_tokens_decoder`. An older checkpoint has the files
  special_tokens_map.json and added_tokens.json instead.

  Args:
    tokenizer: tokenizer to extend.
    directory: directory of the files.
    config: content of tokenizer_config.json.

  Returns:
    Dict from names of special tokens (eos_token, bos_token, ...) to their texts.

  Raises:
    TokenizerError: a file is malformed, or the named eos token is not in the tokenizer.
  """
  modern = "added_tokens_decoder" in config
  legacy = {} if modern else read_json(directory / "special_tokens_map.json")
  extra, config = _extra(config), config | legacy
  flagged, extra = list(extra), extra or _extra(legacy)
  named = {name: value for name, value in config.items() if name.endswith("_token")}
  if isinstance(extra, dict):
    named, extra = named | extra, []
  named = {
    name: _token(value, f"{name} of {directory}")
    for name, value in named.items()
    if value is not None and not isinstance(value, bool)
  }
  special = {name: token.content for name, token in named.items()}
  if modern:
    source = f"added_tokens_decoder of {directory}"
    listed = {int(i): _token(token, source) for i, token in config["added_tokens_decoder"].items()}
  else:
    listed = {}
    for text, i in read_json(directory / "added_tokens.json").items():
      flag = text in flagged or text in special.values()
      listed[i] = tokenizers.AddedToken(text, normalized=not flag, special=flag)
    listed |= tokenizer.get_added_tokens_decoder()
  tokens = [token for _, token in sorted(listed.items())]
  before = tokenizer.get_added_tokens_decoder().values()
  contents = {token.content for token in (*tokens, *before)}
  further = [*named.values(), *(_token(value, f"special tokens of {directory}") for value in extra)]
  eos = special.get("eos_token")
  if eos is not None and eos not in contents and tokenizer.token_to_id(eos) is None:
    raise TokenizerError(f"eos_token {eos!r} of {directory} is not in its tokenizer.json")
  tokens += [token for token in further if token.content not in contents]
  are_special = {*special.values(), *(token.content for token in before if token.special)}
  for token in tokens:
    token.special |= token.content in are_special
  tokenizer.add_tokens(tokens)
  return special


def adds_bos(
  tokenizer: tokenizers.Tokenizer, special: Mapping[str, str], config: Mapping[str, Any]
) -> bool:
  """Whether plain text must begin with the bos token.

  The key `add_bos_token` of the config decides. If it is not set, the post-processor in
  tokenizer.json decides.
  """
  if config.get("add_bos_token") is not None or "bos_token" not in special:
    return bool(config.get("add_bos_token"))
  bos = tokenizer.token_to_id(special["bos_token"])
  return bos is not None and tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos]


def stop_ids(
  directory: epath.Path, tokenizer: tokenizers.Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
  """Returns ids of the eos token and other stop tokens.

  The others are in generation_config.json. Without this file, they are in config.json, for a
  multimodal model possibly in its text_config.

  Args:
    directory: directory of the files.
    tokenizer: tokenizer with all tokens.
    special: result of `add`.

  Raises:
    TokenizerError: there is no stop token, or one is not in the vocabulary.
  """
  ids = []
  if "eos_token" in special:
    ids.append(tokenizer.token_to_id(special["eos_token"]))
  file = directory / "generation_config.json"
  if not file.exists():
    file = directory / "config.json"
  content = read_json(file)
  named = content.get("eos_token_id")
  if named is None:
    named = (content.get("text_config") or {}).get("eos_token_id")
  ids += named if isinstance(named, list) else [] if named is None else [named]
  if not ids:
    raise TokenizerError(
      f"{directory} names no stop token: set eos_token in tokenizer_config.json or eos_token_id in"
      " generation_config.json"
    )
  vocabulary = set(tokenizer.get_vocab(with_added_tokens=True).values())
  for stop in ids:
    if type(stop) is not int or stop not in vocabulary:
      raise TokenizerError(f"eos_token_id {stop!r} of {file} is no token of tokenizer.json")
  return tuple(dict.fromkeys(ids))


def _extra(config: dict[str, Any]) -> Any:
  """Returns further special tokens: a list of tokens, or a dict of tokens by name."""
  return config.get("extra_special_tokens") or config.get("additional_special_tokens") or []


def _token(value: Any, name: str) -> tokenizers.AddedToken:
  """Reads a token of a file.

  Args:
    value: a text, which becomes a special token; or an object with the token's text and flags.
    name: name of the token, for the message.

  Raises:
    TokenizerError: the token has no text.
  """
  flags = value if isinstance(value, dict) else dict(content=value, special=True)
  if not isinstance(flags.get("content"), str):
    raise TokenizerError(f"{name} is {value!r:.40}, and must be a text")
  return tokenizers.AddedToken(**{key: v for key, v in flags.items() if key != "__type"})
