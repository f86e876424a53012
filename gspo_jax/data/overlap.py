"""Held-out problems that are trained on as well."""

from collections.abc import Sequence

from gspo_jax.data.embedded import Embedded
from gspo_jax.data.sources import Mixture, Source
from gspo_jax.structs import Prompt

_WORDS = 8  # of a question that are looked at before all of them are


def shared_prompts(train: Source, held_out: Source, chosen: Sequence[Prompt]) -> int:
  """How many problems of `chosen`, which come from `held_out`, are among those of `train`.

  Two are the same if their questions are, but for white space. A million rows take about a second.
  The splits of embedded tasks are told apart by their names, without a look at every problem.
  """
  questions = [_first(prompt.question) for prompt in chosen]
  wanted, begun = set(questions), {_first(text, _WORDS) for text in questions}
  shared: set[str] = set()
  for part in train.sources if isinstance(train, Mixture) else [train]:
    if isinstance(part, Embedded) and isinstance(held_out, Embedded):
      shared |= wanted if part.path == held_out.path else set()
      continue
    if isinstance(part, Embedded):
      texts = part.questions()
    else:
      texts = (part[index].question for index in range(len(part)))
    shared |= wanted.intersection(_first(text) for text in texts if _first(text, _WORDS) in begun)
  return sum(text in shared for text in questions)


def _first(text: str, words: int | None = None) -> str:
  """The first `words` words of a text, one space between them; all of them by default."""
  return " ".join(text.split(None, -1 if words is None else words)[:words])
