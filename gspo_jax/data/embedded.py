"""Embedded tasks (gspo_jax.tasks) as sources of prompts. Prompts are generated on access."""

from collections.abc import Iterator

from gspo_jax import structs
from gspo_jax.data import replies, tokenizer
from gspo_jax.settings.data import DataConfig, DataError
from gspo_jax.tasks import arithmetic, calculator, recurrence, word_problems

TASKS = dict(
  arithmetic=arithmetic,
  calculator=calculator,
  recurrence=recurrence,
  word_problems=word_problems,
)


class Embedded:
  """Source of prompts (`sources.Source`) from an embedded task.

  Args:
    config: section `data`, with the sizes of problems and the errors of demonstrations.
    tok: tokenizer of the run.
    path: task and split, such as `arithmetic:train`.
    key: configuration key of the path, for messages.

  Raises:
    DataError: the split or a size is invalid, or a prompt is longer than `data.max_prompt_tokens`.
      Only prompts at the indices of `probe` are checked.
  """

  skipped = 0  # An embedded task has no bad rows.

  def __init__(self, config: DataConfig, tok: tokenizer.Tokenizer, path: str, key: str):
    task, _, split = path.partition(":")
    self.path = path
    self._config, self._tok, self._task = config, tok, TASKS[task]
    self._teacher_settings = {key: getattr(config, key) for key in self._task.TEACHER}
    try:
      sizes = [getattr(config, key) for key in self._task.SIZES]
      self._problems = self._task.problems(split, *sizes)
    except ValueError as error:
      raise DataError(f"{key}: {error}") from error
    for index in probe(len(self)):
      prompt = self[index]
      if len(prompt.tokens) > config.max_prompt_tokens:
        raise DataError(
          f"{key}: the prompt {prompt.question!r} takes {len(prompt.tokens)} tokens, more than"
          f" data.max_prompt_tokens={config.max_prompt_tokens}; raise that limit"
        )

  def __len__(self) -> int:
    return len(self._problems)

  def questions(self) -> Iterator[str]:
    """Yields all questions, without building prompts."""
    return (self._problems[index]["question"] for index in range(len(self)))

  def __getitem__(self, index: int) -> structs.Prompt:
    row = self._problems[index]
    messages = [tokenizer.user_turn(row["question"], self._config.prompt_template)]
    text = self._tok.chat(messages)
    # The index is the seed, so the run's seed does not change demonstrations and their errors.
    turns = self._task.demonstration(row, seed=index, **self._teacher_settings)
    first, *others = (turns,) if isinstance(turns, str) else turns
    first = replies.continuation(self._tok, messages, text, first)
    return structs.Prompt(
      id=row["id"],
      question=row["question"],
      answer=row["answer"],
      tokens=tuple(self._tok.encode(text)),
      demonstration=first if isinstance(turns, str) else (first, *others),
      thinks=text.rstrip().endswith("<think>"),
    )


def probe(length: int) -> range:
  """Returns evenly spaced indices below `length`.

  If `length` is below 1000, these are all indices. Otherwise they are 500 to 750 indices.
  """
  return range(0, length, max(1, length // 500))
