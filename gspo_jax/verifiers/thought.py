"""Separates thoughts (`<think>`) from answers."""

OPEN, CLOSE = "<think>", "</think>"


def after(response: str) -> str:
  """Returns the text after the last `</think>`; "" if a thought is still open.

  A response without either tag is an answer as a whole. If the prompt ends with `<think>`, add that
  tag to the response first (`with_opening`).
  """
  text = response.rpartition(CLOSE)[2]
  return "" if OPEN in text else text


def with_opening(response: str, thinks: bool) -> str:
  """Prepends `<think>` if the prompt ended with it.

  A response with `</think>` is returned unchanged: `after` does not need its opening tag.
  """
  return OPEN + response if thinks and CLOSE not in response else response
