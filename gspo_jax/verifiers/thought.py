"""Where a response's thought ends and its answer begins, by `<think>` and `</think>`."""

OPEN, CLOSE = "<think>", "</think>"


def after(response: str) -> str:
  """Returns the text after the last `</think>`. Nothing if a thought is still open.

  A response without either tag is an answer as a whole. One that begins within a thought, because
  its prompt ends with `<think>`, has to be given with that tag (`with_opening`).
  """
  text = response.rpartition(CLOSE)[2]
  return "" if OPEN in text else text


def with_opening(response: str, thinks: bool) -> str:
  """Prepends `<think>` to the response to a prompt with that ending. Not if it closes the thought
  itself: then nothing hangs on it."""
  return OPEN + response if thinks and CLOSE not in response else response
