"""Tokenizers: raw bytes for the embedded tasks, Hugging Face files for real checkpoints.

`ByteTokenizer` and `HFTokenizer` both have `vocab_size`, `pad_id`, `stop_ids`, `encode`, `decode`,
`token_bytes` and `chat`.

The padding token of a checkpoint may equal its stop token. So masks mark the padding, and no code
compares tokens with `pad_id`.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from etils import epath

from gspo_jax.data import special_tokens, templates
from gspo_jax.data.special_tokens import TokenizerError
from gspo_jax.settings.data import DataConfig
from gspo_jax.system import files, hub


def user_turn(question: str, template: str = "{question}") -> dict[str, str]:
  """Returns a user's message: `template` with the question in place of `{question}`.

  Other braces in the template stay unchanged, so LaTeX needs no escaping.
  """
  return dict(role="user", content=template.replace("{question}", question))


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """Tokenizer of UTF-8 bytes, ids 0 to 255. Ids 256 to 258 are pad, stop and bos tokens."""

  pad_id: int = 256
  stop_ids: tuple[int, ...] = (257,)
  bos_id: int = 258
  vocab_size: int = 259
  system: str = ""  # System prompt.
  path: str = "bytes"

  def encode(self, text: str) -> list[int]:
    return list(text.encode("utf-8"))

  def encode_text(self, text: str) -> list[int]:
    """Encodes untrusted text. No text becomes a special token."""
    return self.encode(text)

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes the bytes among `ids`. Invalid UTF-8 becomes U+FFFD."""
    return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

  def token_bytes(self) -> list[bytes]:
    """Returns the byte of each token id; b"" for special tokens."""
    return [bytes([i]) if i < 256 else b"" for i in range(self.vocab_size)]

  def begin(self, text: str) -> str:
    """Returns a plain prompt unchanged."""
    return text

  def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders messages, joined by line breaks."""
    return "\n".join(message["content"] for message in _with_system_prompt(self.system, messages))


@dataclasses.dataclass(frozen=True)
class HFTokenizer:
  """A tokenizer of Hugging Face: tokenizer.json, tokenizer_config.json and chat template."""

  path: str  # Directory or hub repository.
  tokenizer: tokenizers.Tokenizer
  chat_template: str  # Jinja source; "" for plain prompts.
  special_tokens: dict[str, str]  # Dict from name (bos_token, eos_token, ...) to text.
  add_bos: bool  # Whether plain prompts begin with bos. (Chat templates write bos themselves.)
  pad_id: int
  stop_ids: tuple[int, ...]  # Demonstrations end with the first: a turn's end, or else eos.
  vocab_size: int  # Largest id + 1.
  # Optional arguments of the chat template.
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  system: str = ""  # System prompt for messages without one.
  # Date for chat templates.
  date: datetime.datetime = dataclasses.field(default_factory=datetime.datetime.now)

  @property
  def bos_id(self) -> int | None:
    """Id of the bos token; None if there is none."""
    return self.tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))

  def encode(self, text: str) -> list[int]:
    """Returns the token ids of `text`.

    Names of special tokens in `text` are encoded as these tokens. No token is added at either end.
    If a plain prompt begins with the bos token, the text after this token is encoded separately.
    """
    bos, first = "" if self.chat_template else self.begin(""), []
    if bos and text.startswith(bos):
      first, text = [self.bos_id], text.removeprefix(bos)
    return [*first, *self._encode(text)]

  def encode_text(self, text: str) -> list[int]:
    """Returns the token ids of untrusted text, such as a tool's.

    Names of special and other added tokens are encoded as plain text.
    """
    cuts = [match.start() + 1 for match in self._names.finditer(text)]
    for ends in ([0, *cuts, len(text)], range(len(text) + 1)):
      ids = [i for a, b in itertools.pairwise(ends) for i in self._encode(text[a:b])]
      if self._added.keys().isdisjoint(ids):  # Normalisation may create a token's name.
        break
    return [i for i in ids if i not in self._added]

  def _encode(self, text: str) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  @functools.cached_property
  def _added(self) -> dict[int, str]:
    """Texts of added tokens by id. Tokens of white space are excluded."""
    added = self.tokenizer.get_added_tokens_decoder()
    return {i: token.content for i, token in added.items() if token.content.strip()}

  @functools.cached_property
  def _names(self) -> re.Pattern:
    """Pattern of the positions at which names of added tokens begin."""
    return re.compile(f"(?={'|'.join(map(re.escape, self._added.values())) or '(?!)'})")

  @functools.cached_property
  def _skipped(self) -> set[int]:
    """Ids omitted by `decode`: special and stop tokens, except tags.

    Tags such as <think> or </answer> are part of response formats, although some checkpoints flag
    them as special tokens.
    """
    added = self.tokenizer.get_added_tokens_decoder()
    skipped = {i: t.content for i, t in added.items() if t.special or i in self.stop_ids}
    closing = (re.fullmatch(r"</(\w\w+)>", text) for text in skipped.values())
    tags = {"think", "answer", *(match[1] for match in closing if match)}
    return {i for i, text in skipped.items() if text.strip("</>") not in tags}

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes `ids`. Omits special tokens, stop tokens and ids beyond the vocabulary.

    Tags (<think>) are decoded even if they are special tokens.
    """
    tokens = [int(i) for i in ids if 0 <= i < self.vocab_size and int(i) not in self._skipped]
    return self.tokenizer.decode(tokens, skip_special_tokens=False)

  def token_bytes(self) -> list[bytes]:
    """Returns the bytes of each token id's text.

    A special or other added token has the bytes of its name. Other tokens may have part of a UTF-8
    character, and unused ids have b"".
    """
    tokenizer = self.tokenizer
    decoder = bytes(tokenizer.decoder.__getstate__()).decode() if tokenizer.decoder else ""
    added, bytes_V = tokenizer.get_added_tokens_decoder(), [b""] * self.vocab_size
    for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
      if i in added:
        bytes_V[i] = added[i].content.encode()
      elif "ByteLevel" in decoder:
        bytes_V[i] = b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
      elif "ByteFallback" in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token):
        bytes_V[i] = bytes([int(token[3:5], 16)])
      elif tokenizer.decoder:  # "a" comes first, since some decoders strip the first space.
        bytes_V[i] = tokenizer.decoder.decode(["a", token]).removeprefix("a").encode()
      else:
        bytes_V[i] = token.encode()
    return bytes_V

  def begin(self, text: str) -> str:
    """Prepends the bos token if `add_bos` is set and the plain prompt does not begin with it."""
    bos = self.special_tokens.get("bos_token", "") if self.add_bos else ""
    return text if text.startswith(bos) else bos + text

  def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders messages up to the beginning of the assistant's turn.

    If there is no chat template, messages are joined by line breaks.
    """
    if not self.chat_template:
      messages = _with_system_prompt(self.system, messages)
      return self.begin("\n".join(message["content"] for message in messages))
    return self.conversation(messages, add_generation_prompt=True)

  def conversation(
    self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False
  ) -> str:
    """Renders messages by the chat template. Raises TokenizerError if the template fails."""
    try:
      return templates.compiled(self.chat_template).render(
        messages=templates.normalized(_with_system_prompt(self.system, messages)),
        add_generation_prompt=add_generation_prompt,
        strftime_now=self.date.strftime,
        **templates.UNSET | self.special_tokens | self.arguments,
      )
    except Exception as error:  # A template is a program, and may raise anything.
      raise TokenizerError(
        f"the chat template of {self.path} failed: {type(error).__name__}: {error}. Correct it in"
        " chat_template.jinja or tokenizer_config.json"
      ) from error


def _with_system_prompt(
  system: str, messages: Sequence[Mapping[str, str]]
) -> list[Mapping[str, str]]:
  """Prepends the system prompt, unless the messages begin with another system prompt."""
  has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
  first = [] if has_system or not system else [dict(role="system", content=system)]
  return [*first, *messages]


# Patterns of a tokenizer's files. The file GENERATION may name further stop tokens.
FILES = (
  *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
  *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
  f"{templates.FOLDER}/*.jinja",
)
GENERATION = "generation_config.json"
# Byte-level vocabularies write each byte as a character. The character of a printable byte is that
# of Latin-1. Other bytes have characters from U+0100 on. `_BYTE_OF` maps characters to bytes.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNPRINTABLE = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): bytes([byte]) for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + i): bytes([byte]) for i, byte in enumerate(_UNPRINTABLE)}

Tokenizer = ByteTokenizer | HFTokenizer


def shows(tokenizer: Tokenizer, text: str) -> bool:
  """Whether decoded responses can contain `text`. Special tokens are not decoded."""
  return text.strip() in tokenizer.decode(tokenizer.encode(text))


def line_breaks(tokenizer: Tokenizer) -> np.ndarray:
  """Returns the number of line breaks in each token's text, int32 [V]."""
  return np.array(
    [tokenizer.decode([i]).count("\n") for i in range(tokenizer.vocab_size)], np.int32
  )


def load(path: str) -> Tokenizer:
  """Opens the tokenizer "bytes", or the tokenizer in a directory or hub repository.

  Raises:
    TokenizerError: the files are missing or cannot be read.
  """
  if path == "bytes":
    return ByteTokenizer()
  try:
    directory = hub.directory(path) if hub.is_id(path) else files.located(path, "tokenizer")
  except ValueError as error:
    raise TokenizerError(str(error)) from error
  try:
    if not path or not (directory / "tokenizer.json").exists():
      raise TokenizerError(
        f"no tokenizer.json in {path!r}. Set --config.tokenizer to the directory of a Hugging"
        " Face checkpoint (tokenizer.json and tokenizer_config.json), or to 'bytes'."
      )
    return _load(directory, path)
  except (TokenizerError, hub.HubError):
    raise
  except (AttributeError, ImportError, LookupError, OSError, TypeError, ValueError) as error:
    raise TokenizerError(
      f"the tokenizer in {path!r} cannot be read: {type(error).__name__}: {error}. Copy the files"
      " of the checkpoint again, or set --config.tokenizer"
    ) from error


def copy(
  source: epath.Path, directory: Path, patterns: Sequence[str] = (*FILES, GENERATION)
) -> None:
  """Copies a tokenizer's files to a local directory. `source` may be in a bucket."""
  for pattern in patterns:
    for file in source.glob(pattern):
      target = directory / str(file.relative_to(source))
      target.parent.mkdir(exist_ok=True)
      target.write_bytes(file.read_bytes())


def load_for(
  path: str,
  vocab_size: int,
  prompts: DataConfig | None = None,
  date: datetime.datetime | None = None,
) -> Tokenizer:
  """Loads a tokenizer for a model.

  Special tokens with ids beyond the model's vocabulary are removed, except bos and stop tokens. The
  names of removed tokens are then plain text. (For example, the tokenizer of Gemma 3's text models
  has tokens for images.)

  Args:
    prompts: section `data`; None for its defaults.
    date: date for chat templates; None for the current date.

  Raises:
    TokenizerError: a remaining token is beyond the vocabulary, or the chat template does not have a
      configured argument.
  """
  tok = load(path)
  if prompts is not None:
    tok = _apply_config(tok, path, prompts)
  if date is not None and isinstance(tok, HFTokenizer):
    tok = dataclasses.replace(tok, date=date)
  if tok.vocab_size > vocab_size and isinstance(tok, HFTokenizer):
    tok = _remove_special_tokens(tok, vocab_size)
  if tok.vocab_size > vocab_size:
    raise TokenizerError(
      f"tokenizer {path!r} has token ids up to {tok.vocab_size - 1}, too many for"
      f" model.vocab_size={vocab_size}"
    )
  return tok


def _apply_config(tok: Tokenizer, path: str, config: DataConfig) -> Tokenizer:
  tok = dataclasses.replace(tok, system=config.system)
  if isinstance(tok, HFTokenizer) and not config.chat_template:
    tok = dataclasses.replace(tok, chat_template="")
  if arguments := dict(config.template_arguments):
    available = templates.arguments(getattr(tok, "chat_template", ""))
    if unknown := set(arguments) - set(available):
      raise TokenizerError(
        f"data.template_arguments.{min(unknown)}: the chat template of {path!r} has no such"
        f" argument; there are {', '.join(available) or 'none'}"
      )
    tok = dataclasses.replace(tok, arguments=arguments)
  return tok


def _remove_special_tokens(tok: HFTokenizer, vocab_size: int) -> HFTokenizer:
  used, content = {*tok.stop_ids, tok.bos_id}, json.loads(tok.tokenizer.to_str())
  content["added_tokens"] = [
    token
    for token in content["added_tokens"]
    if token["id"] < vocab_size or not token["special"] or token["id"] in used
  ]
  tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
  pad_id = tok.pad_id if tok.pad_id < vocab_size else tok.stop_ids[-1]
  size = _largest_id(tokenizer) + 1
  return dataclasses.replace(tok, tokenizer=tokenizer, vocab_size=size, pad_id=pad_id)


def _largest_id(tokenizer: tokenizers.Tokenizer) -> int:
  return max(tokenizer.get_vocab(with_added_tokens=True).values())


def _load(directory: epath.Path, name: str) -> HFTokenizer:
  config = special_tokens.read_json(directory / "tokenizer_config.json")
  try:
    # Parsing a string works for directories in a bucket, too.
    tokenizer = tokenizers.Tokenizer.from_str((directory / "tokenizer.json").read_text())
  except Exception as error:  # The library raises bare Exceptions.
    raise TokenizerError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error
  # A tokenizer saved with truncation and padding would cut long prompts and lengthen short ones.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  special = special_tokens.add(tokenizer, directory, config)
  template = templates.read(directory, config)
  stop_ids = special_tokens.stop_ids(directory, tokenizer, special)
  stop_ids = tuple(dict.fromkeys([*_turn_end(tokenizer, template, special), *stop_ids]))
  pad_id = tokenizer.token_to_id(special["pad_token"]) if "pad_token" in special else None
  return HFTokenizer(
    path=name,
    tokenizer=tokenizer,
    chat_template=template,
    special_tokens=special,
    add_bos=special_tokens.adds_bos(tokenizer, special, config),
    pad_id=stop_ids[-1] if pad_id is None else pad_id,
    stop_ids=stop_ids,
    vocab_size=_largest_id(tokenizer) + 1,
  )


def _turn_end(tokenizer: tokenizers.Tokenizer, template: str, special: dict[str, str]) -> list[int]:
  """Returns [id] of the special token after an assistant's turn; [] if there is none.

  Some base models (Qwen3) have a chat template, but the stop token in their files does not end a
  turn. If a response did not stop at the end of its turn, it would continue with further turns.
  """
  messages = [dict(role="user", content="asked"), dict(role="assistant", content="said")]
  try:
    text = templates.compiled(template).render(
      messages=messages,
      add_generation_prompt=False,
      strftime_now=datetime.datetime.now().strftime,
      **templates.UNSET | special,
    )
  except Exception:  # The template rejects these messages; `chat` reports errors of real prompts.
    return []
  _, answer, after = text.rpartition("said")
  ids = tokenizer.encode(after.lstrip(), add_special_tokens=False).ids if answer else []
  kinds = tokenizer.get_added_tokens_decoder()
  return ids[:1] if ids and ids[0] in kinds and kinds[ids[0]].special else []
