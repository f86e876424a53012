"""Recorded responses, with prompts and rewards, for offline training (job=offline).

The files are logs of a run's samples, or JSON lines from other tools (docs/data.md). Files are
untrusted, so each row is checked before training starts.
"""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gspo_jax.data import replies, tokenizer
from gspo_jax.data.files import BadRow, Skipped, read
from gspo_jax.data.formats import render_prompt
from gspo_jax.data.sources import Prompts
from gspo_jax.settings.data import DataError
from gspo_jax.settings.rewards import LARGEST_REWARD
from gspo_jax.structs import Prompt

CHARACTERS = 1 << 20  # Maximum characters of a text; a longer text takes too long to encode.


@dataclasses.dataclass(frozen=True)
class Response:
  """A recorded response."""

  tokens: np.ndarray  # Token ids, int32 [n], with the stop token if there is one.
  reward: float
  stopped: bool  # False if a length limit truncated the response.


@dataclasses.dataclass(frozen=True)
class Group:
  """Responses to one prompt, at most `Limits.group_size`."""

  id: str  # File and line of the first response.
  prompt: Prompt
  responses: tuple[Response, ...]

  @property
  def content(self) -> str:
    """File, line, and checksums of the prompt and the responses."""
    checksum = 0
    for r in self.responses:
      checksum = zlib.crc32(r.tokens.tobytes() + f" {r.reward} {r.stopped}".encode(), checksum)
    return f"{self.id} {self.prompt.content} {checksum:08x}"


@dataclasses.dataclass(frozen=True)
class Recordings(Prompts):
  """Recorded groups, with the methods of a `sources.Source`."""

  rows: Sequence[Group]
  unknown: int = 0  # Number of rows with reward null, for which the verifier had failed.

  @property
  def prompts(self) -> Prompts:
    return Prompts([group.prompt for group in self.rows])

  def left_out(self) -> dict[str, float]:
    """Returns the numbers of skipped and unknown rows as metrics, except zeros."""
    counts = {"recorded/skipped_rows": self.skipped, "recorded/unknown_rows": self.unknown}
    return {name: float(count) for name, count in counts.items() if count}


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of recorded rows, equal to the limits of sampled responses."""

  group_size: int  # Maximum number of responses in a group.
  prompt_tokens: int  # Maximum number of tokens of a prompt.
  response_tokens: int  # Maximum number of tokens of a response.
  vocabulary: int  # Exclusive upper bound on token ids.
  stop_strings: tuple[str, ...] = ()  # Texts that end a response.


def load(
  spec: str, tok: tokenizer.Tokenizer, template: str, limits: Limits, on_error: str
) -> Recordings:
  """Reads recorded responses, grouped by prompt in file order.

  A prompt with more than `group_size` responses has several groups. The last group may be smaller.

  Args:
    spec: `offline.data`, files with commas between them.
    tok: tokenizer of the run.
    template: `data.prompt_template`.
    limits: limits of the rows.
    on_error: `data.on_error`, "raise" or "skip".

  Raises:
    DataError: a file cannot be read, or no file has a usable response, or a row is bad and
      `on_error` is "raise".
  """
  rows: dict[tuple[int, ...], list[tuple[str, Prompt, Response]]] = {}
  skipped, unknown = Skipped(on_error), 0
  for place, default_id, decode in _rows(spec):
    with skipped.row(place):
      prompt, response = _read(decode(), tok, template, limits)
      if response is None:
        unknown += 1
        continue
      rows.setdefault(prompt.tokens, []).append((default_id, prompt, response))
  if not rows:
    counts = f"{skipped.count} bad rows, {unknown} with reward null{skipped.first}"
    raise DataError(f"offline.data={spec}: there is no usable response ({counts})")
  skipped.warn(f"offline.data={spec}")
  groups, G = [], limits.group_size
  for responses in rows.values():
    for part in (responses[start : start + G] for start in range(0, len(responses), G)):
      groups.append(Group(part[0][0], responses[0][1], tuple(response for *_, response in part)))
  return Recordings(groups, skipped.count, unknown)


def _rows(spec: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
  """Yields the rows (`files.Row`) of several files."""
  for part in spec.split(","):
    if not part.strip():
      raise DataError(f"offline.data={spec!r} has an empty part: separate files by single commas")
    yield from read(part.strip(), "offline.data")


def _read(
  row: Any, tok: tokenizer.Tokenizer, template: str, limits: Limits
) -> tuple[Prompt, Response | None]:
  """Returns a row's prompt and response.

  The response is None if the reward is null.

  Raises:
    BadRow: the row cannot be used.
  """
  if not isinstance(row, Mapping):
    raise BadRow(f"a row is an object with fields, and this is {row!r:.40}. Correct the row")
  if row.get("eval") is True:
    raise BadRow("it is from an evaluation: held-out problems are not trained on. Name other files")
  if row.get("turns"):
    raise BadRow("it is a conversation of several turns. Name files of single turns")
  question, reward = _text(row, "prompt"), _reward(row)
  messages = [tokenizer.user_turn(question, template)]
  text = render_prompt(tok, messages)
  prompt_ids = _ids(row, "prompt_ids", limits.prompt_tokens, limits.vocabulary)
  if prompt_ids is None:
    prompt_ids = tok.encode(text)
  _require_length("prompt", prompt_ids, limits.prompt_tokens, "data.max_prompt_tokens")
  _require_text(row, "prompt", prompt_ids, tok, (text, question))
  if row.get("response_ids") is None and list(prompt_ids) != tok.encode(text):
    text = replies.whole_text(tok, prompt_ids)  # Another template rendered the prompt.
  row = {key: value for key, value in row.items() if value is not None or key == "reward"}
  name = str(row.get("prompt_id", question[:200]))
  answer = row.get("answer", "")
  texts = dict(prompt_id=name[:1000], answer=answer[:1000] if isinstance(answer, str) else "")
  name, answer = (_text(texts, key) for key in texts)
  prompt = Prompt(name, question, answer, tuple(prompt_ids))
  ids, stopped = _response(row, tok, messages, text, limits)
  if reward is None:
    return prompt, None
  return prompt, Response(np.array(ids, np.int32), reward, stopped)


def _response(
  row: Mapping[str, Any],
  tok: tokenizer.Tokenizer,
  messages: Sequence[Mapping[str, str]],
  prompt: str,
  limits: Limits,
) -> tuple[list[int], bool]:
  """Returns a response's token ids, and whether it stopped.

  Args:
    row: the row.
    tok: tokenizer of the run.
    messages: messages of the prompt.
    prompt: rendered prompt.
    limits: limits of the row.

  Raises:
    BadRow: the response cannot be used.
  """
  truncated = row.get("truncated")
  if not isinstance(truncated, bool | None):
    raise BadRow(f"truncated={truncated!r:.40} is neither true nor false. Correct the row")
  ids = _ids(row, "response_ids", limits.response_tokens, limits.vocabulary)
  recorded_ids = ids is not None
  if ids is None:
    ids = _encode(row, tok, messages, prompt, limits)
  _require_length("response", ids, limits.response_tokens, "sampling.max_new_tokens")
  stops = np.isin(ids, tok.stop_ids)
  if stops[:-1].any():
    stop = ids[stops.argmax()]
    raise BadRow(f"the response continues after the stop token {stop}. End it there")
  if recorded_ids and isinstance(row.get("response"), str):
    _require_text(row, "response", ids, tok, (_text(row, "response"),))
  if stops[-1]:
    return ids, True
  if truncated is None:
    return ids, _ends_with_stop_string(ids, tok, limits)
  return ids, not truncated


def _encode(
  row: Mapping[str, Any],
  tok: tokenizer.Tokenizer,
  messages: Sequence[Mapping[str, str]],
  prompt: str,
  limits: Limits,
) -> list[int]:
  """Encodes a response without recorded token ids.

  There are several encodings: the chat template may add text around the response, and a stop token
  may follow. If the row has `length`, the first encoding of this length is returned, otherwise the
  likeliest one.

  Raises:
    BadRow: the text is unusable, or no encoding has this length.
  """
  text, truncated = _text(row, "response"), row.get("truncated")
  texts = [replies.without_repeated_tag(prompt, text), text]
  if not truncated:
    texts.insert(0, replies.continuation(tok, messages, prompt, text))
  if "length" not in row:
    texts = texts[:1]
  encoded = [tok.encode(text) for text in dict.fromkeys(texts)]
  if not truncated:
    stop, bare = tok.stop_ids[0], encoded
    encoded = [x if _ends_with_stop_string(x, tok, limits) else [*x, stop] for x in bare]
    # The recording run may have had stop strings. A response that ends with one needs no stop
    # token.
    if truncated is False and "length" in row:
      encoded += bare
  length = row.get("length", len(encoded[0]))
  for ids in encoded:
    if len(ids) == length:
      return ids
  # Encoding the text of a response may give other tokens than the sampled ones.
  raise BadRow(
    f"the response has length={length!r:.20}, but its text is encoded as {len(encoded[0])} tokens."
    " Add its token ids as response_ids, or remove length"
  )


def _ends_with_stop_string(ids: Sequence[int], tok: tokenizer.Tokenizer, limits: Limits) -> bool:
  """Whether the last token completes a stop string, and no earlier token does."""
  if not limits.stop_strings:
    return False
  text, before = tok.decode(ids), tok.decode(ids[:-1])
  return any(x in text for x in limits.stop_strings) and all(
    x not in before for x in limits.stop_strings
  )


def _require_text(
  row: Mapping[str, Any],
  key: str,
  ids: Sequence[int],
  tok: tokenizer.Tokenizer,
  texts: Sequence[str],
) -> None:
  """Raises BadRow if a row's token ids and text disagree.

  White space is ignored. A prompt's ids may decode to more than the prompt's text, since a chat
  template adds text.

  Args:
    row: the row.
    key: "prompt" or "response".
    ids: token ids from the field prompt_ids or response_ids.
    tok: tokenizer of the run.
    texts: permitted texts.
  """
  if row.get(f"{key}_ids") is None:
    return
  decoded = tok.decode(ids)
  # `decode` omits special tokens, so each text is also compared without the special tokens in it.
  for plain in itertools.chain(texts, (tok.decode(tok.encode(text)) for text in texts)):
    expected, actual = _without_spaces(plain), _without_spaces(decoded)
    if expected == actual or (key == "prompt" and expected in actual):
      return
  raise BadRow(
    f"{key}_ids decode to {decoded!r:.60} and {key} is {texts[-1]!r:.60}: they are ids of another"
    " tokenizer. Set --config.tokenizer to that tokenizer, or remove the ids"
  )


def _without_spaces(text: str) -> str:
  return "".join(text.split())


def _text(row: Mapping[str, Any], key: str) -> str:
  """Returns a text field. Raises BadRow if it is no usable text."""
  text = row.get(key)
  if not isinstance(text, str):
    raise BadRow(f"{key}={text!r:.40} is no text. Correct the row")
  if len(text) > CHARACTERS:
    raise BadRow(f"{key} has {len(text):,} characters, more than {CHARACTERS:,}. Shorten it")
  try:
    text.encode()
  except UnicodeError:
    raise BadRow(f"{key} has half of a character, a lone surrogate. Correct it") from None
  return text


def _reward(row: Mapping[str, Any]) -> float | None:
  """Returns the reward; None for null. Raises BadRow for a missing or unusable reward."""
  if "reward" not in row:
    raise BadRow("it has no reward. Add one, or null if the reward is unknown")
  reward = row["reward"]
  if reward is None:
    return None
  number = isinstance(reward, int | float) and not isinstance(reward, bool)
  if not (number and abs(reward) <= LARGEST_REWARD):  # NaN fails too.
    raise BadRow(
      f"reward={reward!r:.40} is no number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}. "
      "Correct it"
    )
  return float(reward)


def _ids(row: Mapping[str, Any], key: str, limit: int, vocabulary: int) -> list[int] | None:
  """Returns a field's token ids; None if the field is absent or null.

  Only the first `limit` + 1 ids are checked, since `_require_length` refuses longer lists.

  Raises:
    BadRow: the field is not a list of token ids below `vocabulary`.
  """
  ids = row.get(key)
  if ids is None:
    return None
  prefix = ids[: limit + 1] if isinstance(ids, list) else [None]
  if not all(type(i) is int and 0 <= i < vocabulary for i in prefix):
    raise BadRow(f"{key}={ids!r:.40} are no token ids from 0 to {vocabulary - 1}. Correct the row")
  return ids


def _require_length(field: str, ids: Sequence[int], limit: int, key: str) -> None:
  """Raises BadRow unless there are 1 to `limit` ids. `key` is the key of the limit."""
  if not ids:
    raise BadRow(f"the {field} has no token. Correct the row")
  if len(ids) > limit:
    raise BadRow(f"the {field} takes {len(ids)} tokens, {key}={limit}. Shorten it, or raise {key}")
