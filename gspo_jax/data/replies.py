"""Converts responses to continuations, the texts after rendered prompts in training data.

A chat template renders a conversation of prompt and response as one text. The continuation is the
part of this text after the rendered prompt, up to the end of the assistant's turn. It can differ
from the response: a template may write an empty thought (`<think></think>`) before the answer, or
trim white space. The prompt itself may end with an empty thought, or with an open thought
(`<think>`), which the continuation must close.

If the prompt ends with an empty thought, the response's thought is removed first. If there is no
template, or if it changes the prompt or drops part of the response (`_continuation_in`), the
continuation is the response itself, with at most one change:

- If the response begins with the prompt's last tag, this tag is removed.
- Otherwise, if the prompt ends with an open thought and the response has no closing tag, a closing
  tag is added before the response.
"""

import re
from collections.abc import Mapping, Sequence

from gspo_jax.data.special_tokens import TokenizerError
from gspo_jax.data.tokenizer import HFTokenizer, Tokenizer

# <think>, </think>, <|thinking|>, [THINK]. Not [A] or [1,2], which questions may end with.
_TAG = re.compile(r"[<\[◁][|｜/]*[^\W\d_]{2}[^\s<>\[\]◁▷]*[>\]▷]")
_LAST = re.compile(rf"({_TAG.pattern})(\s*)\Z")  # A tag at the end of a text.
_TAIL = 200  # A prompt's last tag is searched in this many characters at the prompt's end.
_FIELD = re.compile(r"[.'\"](thinking|reasoning_content)\b")  # A thought's field in a template.
_THOUGHT = re.compile(r"think|thought|reason|reflect", re.IGNORECASE)


def continuation(
  tok: Tokenizer, messages: Sequence[Mapping[str, str]], prompt: str, response: str
) -> str:
  """Returns the continuation of a finished response, without the stop token.

  Args:
    tok: tokenizer with the chat template, if any.
    messages: messages of the prompt.
    prompt: rendered prompt, `tok.chat(messages)`.
    response: text of the response, with or without a thought.
  """
  template, (tag, space) = getattr(tok, "chat_template", ""), _last_tag(prompt)
  is_thought_tag = _THOUGHT.search(tag)
  if is_thought_tag and _closes(tag):  # The prompt ends with an empty thought.
    opening = _TAG.match(response.lstrip())
    if opening and tag in _closings(opening[0]) and tag in response:
      response = response.rpartition(tag)[2].lstrip()  # Without its own thought.
  for message in _messages(response, template) if template else ():
    try:
      conversation = tok.conversation([*messages, message])
    except TokenizerError:  # The template refuses assistant messages.
      break
    stop_texts = [text for text in map(tok.tokenizer.id_to_token, tok.stop_ids) if text]
    text = _continuation_in(conversation, prompt, response, stop_texts)
    if text is not None:
      return _without_added_space(tok, prompt, text) if text[:1] == " " != response[:1] else text
  text = without_repeated_tag(prompt, response)
  if text != response or not is_thought_tag or _closes(tag):
    return text
  if any(x in response for x in _closings(tag)):  # The response closes the thought itself.
    return response
  closing = next((x for x in _closings(tag) if x in template), _closings(tag)[0])
  return "\n" * (2 - min(2, space.count("\n"))) + closing + "\n\n" + response.lstrip("\n")


def without_repeated_tag(prompt: str, response: str) -> str:
  """Removes a response's first tag if the prompt ends with the same tag, and more text follows.

  For a truncated response, the result is the continuation, because templates render only finished
  responses.
  """
  tag, space = _last_tag(prompt)
  text = response.lstrip()
  if not tag or not text.startswith(tag) or text.rstrip() == tag:
    return response
  text = text.removeprefix(tag)
  return text.removeprefix(space) if space else text


def whole_text(tok: Tokenizer, ids: Sequence[int]) -> str:
  """Decodes token ids, with the texts of a checkpoint's special tokens."""
  if not isinstance(tok, HFTokenizer):
    return tok.decode(ids)
  return tok.tokenizer.decode(list(ids), skip_special_tokens=False)


def _messages(response: str, template: str) -> list[dict[str, str]]:
  """Returns one or two forms of the assistant's message.

  If the response has a `</think>`, there is a form with the thought in the field
  `reasoning_content`. It comes first if the template reads such a field, and has no `</think>`.
  """
  whole = dict(role="assistant", content=response)
  thought, close, answer = response.rpartition("</think>")
  if not close:
    return [whole]
  split, thought = whole | dict(content=answer.lstrip("\n")), thought.rpartition("<think>")[2]
  if thought.strip():
    split["reasoning_content"] = thought.strip("\n")
  reads = _FIELD.search(template) and "</think>" not in template
  return [split, whole] if reads else [whole, split]


def _continuation_in(
  conversation: str, prompt: str, response: str, stops: Sequence[str]
) -> str | None:
  """Returns a conversation's text between its prompt and the stop token.

  If the prompt ends with the opening tag of a thought, the conversation may have a closing tag in
  place of the opening tag.

  Args:
    conversation: rendered conversation.
    prompt: rendered prompt.
    response: text of the response.
    stops: texts of the stop tokens.

  Returns:
    The text. None if the conversation does not begin with the prompt, repeats the opening tag,
    leaves a thought open, or lacks part of the response.
  """
  tag, space = _last_tag(prompt)
  closings = tuple(_closings(tag)) if _THOUGHT.search(tag) and not _closes(tag) else ()
  prefix, thought_tag = prompt, tag if closings else "<think>"
  if closings and not conversation.startswith(prompt):
    prefix = prompt[: len(prompt) - len(tag + space)]
  if not conversation.startswith(prefix):
    return None
  text = _up_to_stop(conversation[len(prefix) :], response, stops)
  if text is None or text.count(thought_tag) + bool(closings) > max(1, response.count(thought_tag)):
    return None
  if prefix != prompt and not text.lstrip().startswith(closings):
    return None
  return text if not closings or any(x in text for x in closings) else None


def _without_added_space(tok: Tokenizer, prompt: str, text: str) -> str:
  """Removes a text's first space if the tokens of prompt and text stay the same.

  The remaining text is encoded separately from the prompt.
  """
  whole, start = tok.encode(prompt + text), tok.encode(prompt)
  bare = text.removeprefix(" ")
  return bare if [*start, *tok.encode(bare)] == whole else text


def _up_to_stop(text: str, response: str, stops: Sequence[str]) -> str | None:
  """Cuts a rendered response before its stop token.

  If there is no stop token, the text is not cut, and ends with the response's white space. Returns
  None if the text lacks part of the response, apart from tags and white space.
  """
  end = 0
  for part in filter(None, map(str.strip, _TAG.split(response))):
    start = text.find(part, end)
    if start < 0:
      return None
    end = start + len(part)
  ends = [index for index in (text.find(stop, end) for stop in stops) if index >= 0]
  if ends:
    return text[: min(ends)]
  return text.rstrip() + response[len(response.rstrip()) :]


def _last_tag(prompt: str) -> tuple[str, str]:
  """Returns the tag at a prompt's end, and white space after the tag; ("", "") if none."""
  match = _LAST.search(prompt[-_TAIL:])
  return (match[1], match[2]) if match else ("", "")


def _closes(tag: str) -> bool:
  """Whether a tag is a closing tag."""
  return "/" in tag or "end" in tag.lower()


def _closings(tag: str) -> list[str]:
  """Returns possible closing tags of an opening tag."""
  name, pipe = tag[1:-1].strip("|"), "|" if tag[1] == "|" else ""
  swaps = ("begin", "end"), ("start", "end"), ("BEGIN", "END"), ("START", "END")
  names = [name.replace(old, new) for old, new in swaps if old in name]
  names += [f"/{name}", f"end_{name}", f"end_of_{name}", f"{name}_end"]
  return [*(f"{tag[0]}{pipe}{x}{pipe}{tag[-1]}" for x in names), f"{tag[0]}/{tag[1:]}"]
