"""Responses after their prompts, as chat templates write them.

Templates may end a prompt within a thought (`<think>`) or after an empty one, write an empty
thought before a plain answer, or trim the text. A response continues its prompt so that both
together are the template's text of the conversation, up to the end of the turn. Where the template
loses part of the response, the response itself is joined to the prompt: an opening mark is never
written twice, and a plain answer closes an open thought.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from gspo_jax.data.special_tokens import TokenizerError
from gspo_jax.data.tokenizer import HFTokenizer, Tokenizer

_MARK = re.compile(r"[<\[◁][^\s<>\[\]◁▷]+[>\]▷]")  # <think>, </think>, <|thinking|>, [THINK]
_LAST = re.compile(rf"({_MARK.pattern})(\s*)\Z")
_TAIL = 200  # characters of a prompt that can hold its last mark
_THOUGHT = re.compile(r"think|thought|reason|reflect", re.IGNORECASE)


def continuation(
  tok: Tokenizer, messages: Sequence[Mapping[str, str]], prompt: str, response: str
) -> str:
  """Returns a finished response's text after its prompt.

  The stop token is not part of it.

  Args:
    tok: tokenizer with the chat template, if any.
    messages: messages of the prompt.
    prompt: rendered prompt, `tok.chat(messages)`.
    response: text of the response, with or without its thought.
  """
  template, (mark, space) = getattr(tok, "chat_template", ""), _last_mark(prompt)
  thinks = _THOUGHT.search(mark)
  if thinks and _closes(mark):  # The prompt has an empty thought already.
    response = _after_thought(response, mark)
  for turn in _turns(response) if template else ():
    try:
      conversation = tok.conversation([*messages, turn])
    except TokenizerError:  # The template refuses an assistant's turn.
      break
    text = _written(conversation, prompt, response, _stop_texts(tok))
    if text is not None:
      return _as_encoded(tok, prompt, text) if text[:1] == " " != response[:1] else text
  text = unfinished(prompt, response)
  if text != response or not thinks or _closes(mark):
    return text
  if any(x in response for x in _closings(mark)):  # The response begins within the thought.
    return response
  closing = next((x for x in _closings(mark) if x in template), _closings(mark)[0])
  return "\n" * (2 - min(2, space.count("\n"))) + closing + "\n\n" + response.lstrip("\n")


def unfinished(prompt: str, response: str) -> str:
  """Returns a truncated response's text after its prompt.

  The mark at the prompt's end is not repeated.
  """
  mark, space = _last_mark(prompt)
  text = response.lstrip()
  if not mark or not text.startswith(mark):
    return response
  text = text.removeprefix(mark)
  return text.removeprefix(space) if space else text


def whole_text(tok: Tokenizer, ids: Sequence[int]) -> str:
  """Decodes `ids` with all special tokens."""
  if not isinstance(tok, HFTokenizer):
    return tok.decode(ids)
  return tok.tokenizer.decode(list(ids), skip_special_tokens=False)


def _turns(response: str) -> Iterator[dict[str, str]]:
  """Yields a response as an assistant's message.

  The second message has the thought in a separate field.
  """
  yield dict(role="assistant", content=response)
  thought, close, answer = response.rpartition("</think>")
  if close:
    thought = thought.rpartition("<think>")[2].strip("\n")
    yield dict(role="assistant", content=answer.lstrip("\n"), reasoning_content=thought)


def _written(conversation: str, prompt: str, response: str, stops: Sequence[str]) -> str | None:
  """Returns a conversation's text after its prompt.

  The result is None if the conversation does not continue the prompt, repeats its opening mark,
  leaves a thought open, or lacks a part of the response.
  """
  mark, space = _last_mark(prompt)
  closings = tuple(_closings(mark)) if _THOUGHT.search(mark) and not _closes(mark) else ()
  opening, thought = prompt, mark if closings else "<think>"
  if closings and not conversation.startswith(prompt):  # It may replace the mark by a closing one.
    opening = prompt[: len(prompt) - len(mark + space)]
  if not conversation.startswith(opening):
    return None
  text = _up_to_stop(conversation[len(opening) :], response, stops)
  if text is None or text.count(thought) + bool(closings) > max(1, response.count(thought)):
    return None
  if opening != prompt and not text.lstrip().startswith(closings):
    return None
  return text if not closings or any(x in text for x in closings) else None


def _as_encoded(tok: Tokenizer, prompt: str, text: str) -> str:
  """Removes a leading space if encoding adds one."""
  whole, opening = tok.encode(prompt + text), tok.encode(prompt)
  bare = text.removeprefix(" ")
  return bare if [*opening, *tok.encode(bare)] == whole else text


def _up_to_stop(text: str, response: str, stops: Sequence[str]) -> str | None:
  """Cuts a turn's text before the stop token.

  The result is None if a part of the response is missing.
  """
  end = 0
  for part in filter(None, map(str.strip, _MARK.split(response))):
    start = text.find(part, end)
    if start < 0:
      return None
    end = start + len(part)
  ends = [index for index in (text.find(stop, end) for stop in stops) if index >= 0]
  if ends:
    return text[: min(ends)]
  return text.rstrip() + response[len(response.rstrip()) :]


def _stop_texts(tok: Tokenizer) -> list[str]:
  return [text for text in map(tok.tokenizer.id_to_token, tok.stop_ids) if text]


def _last_mark(prompt: str) -> tuple[str, str]:
  """Returns a prompt's last mark and white space.

  Both are empty if the prompt ends otherwise.
  """
  match = _LAST.search(prompt[-_TAIL:])
  return (match[1], match[2]) if match else ("", "")


def _closes(mark: str) -> bool:
  return "/" in mark or "end" in mark.lower()


def _closings(mark: str) -> list[str]:
  """Returns possible closing marks, the most common one first."""
  name, pipe = mark[1:-1].strip("|"), "|" if mark[1] == "|" else ""
  swaps = ("begin", "end"), ("start", "end"), ("BEGIN", "END"), ("START", "END")
  names = [name.replace(old, new) for old, new in swaps if old in name]
  names += [f"/{name}", f"end_{name}", f"end_of_{name}", f"{name}_end"]
  return [*(f"{mark[0]}{pipe}{x}{pipe}{mark[-1]}" for x in names), f"{mark[0]}/{mark[1:]}"]


def _after_thought(response: str, closing: str) -> str:
  """Removes a response's thought."""
  opening = closing.replace("/", "").replace("end", "begin").replace("END", "BEGIN")
  if not response.lstrip().startswith(opening) or closing not in response:
    return response
  return response.rpartition(closing)[2].lstrip()
