"""Count of held-out problems that also occur in training data."""

from collections.abc import Sequence

from gspo_jax import structs
from gspo_jax.data.embedded import Embedded
from gspo_jax.data.sources import Mixture, Source

_WORDS = 8  # Whole questions are compared only if this many words at their beginning are equal.


def shared_prompts(train: Source, held_out: Source, chosen: Sequence[structs.Prompt]) -> int:
  """Counts chosen held-out problems in the training data.

  Problems are equal if their questions are equal up to white space. If both sets are embedded
  tasks, only their paths (`arithmetic:train`) are compared, so all problems are shared, or none.

  Args:
    train: training data.
    held_out: held-out set.
    chosen: problems chosen from `held_out` for an evaluation.
  """
  questions = [_first_words(prompt.question) for prompt in chosen]
  all_questions, openings = set(questions), {_first_words(text, _WORDS) for text in questions}
  shared: set[str] = set()
  for part in train.sources if isinstance(train, Mixture) else [train]:
    if isinstance(part, Embedded) and isinstance(held_out, Embedded):
      shared |= all_questions if part.path == held_out.path else set()
      continue
    if isinstance(part, Embedded):
      texts = part.questions()
    else:
      texts = (part[index].question for index in range(len(part)))
    texts = (text for text in texts if _first_words(text, _WORDS) in openings)
    shared |= all_questions.intersection(map(_first_words, texts))
  return sum(text in shared for text in questions)


def _first_words(text: str, words: int | None = None) -> str:
  """Joins the first `words` words by single spaces. None means all words."""
  return " ".join(text.split(None, -1 if words is None else words)[:words])
