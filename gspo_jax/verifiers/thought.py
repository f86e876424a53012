"""Separates the thought in a response, `<think>...</think>`, from its answer."""

OPEN, CLOSE = "<think>", "</think>"


def after(response: str) -> str:
  """Returns the text after the last `</think>`; "" if a thought is not closed.

  Returns a response without tags unchanged. If the prompt ends with `<think>`, the response lacks
  this tag, so add it by `with_opening` first.
  """
  text = response.rpartition(CLOSE)[2]
  return "" if OPEN in text else text


def with_opening(response: str, thinks: bool) -> str:
  """Prepends `<think>` to a response if the prompt ended with it.

  A response with `</think>` is returned unchanged, since `after` does not need its opening tag.

  thinks: whether the prompt ends with `<think>`.
  """
  return OPEN + response if thinks and CLOSE not in response else response
