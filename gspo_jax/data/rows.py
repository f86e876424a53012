"""Conversion of data rows to prompts, with a check of each row."""

import dataclasses
from collections.abc import Callable, Iterable

from gspo_jax import structs
from gspo_jax.data import formats, tokenizer
from gspo_jax.data.files import BadRow, Row, Skipped
from gspo_jax.data.filters import Condition
from gspo_jax.settings.data import Format

Check = Callable[[str], None]  # Raises ValueError for an unusable gold answer.
_IDS: dict[int, int] = {}  # All prompts share one int per token id, to save memory.


@dataclasses.dataclass
class Reader:
  """Converts the data rows of one source to prompts with unique ids."""

  form: Format
  tok: tokenizer.Tokenizer
  filters: tuple[Condition, ...]  # Conditions; rows that fail one are excluded.
  max_tokens: int  # Maximum number of tokens of a prompt.
  skipped: Skipped  # Handles bad rows: raises an error, or counts them (`data.on_error`).
  check: Check | None = None  # Check of gold answers; None for no check.
  prefix: str = ""  # Prefix of ids.
  filtered: int = 0  # Number of rows excluded by the conditions so far.
  # Dict from id, with its prefix, to the file and line of the row.
  places: dict[str, str] = dataclasses.field(default_factory=dict)

  def __call__(self, rows: Iterable[Row]) -> list[structs.Prompt]:
    """Converts rows to prompts.

    Raises:
      DataError: a row is bad, and `data.on_error` is "raise".
    """
    prompts = []
    for place, default_id, decode in rows:
      with self.skipped.row(place):
        prompt = formats.prompt(
          decode(),
          self.form,
          self.tok,
          filters=self.filters,
          max_tokens=self.max_tokens,
          default_id=default_id,
        )
        if prompt is None:
          self.filtered += 1
          continue
        unique_id = self.prefix + prompt.id
        if self.places.get(unique_id, place) != place:
          message = f"the id {prompt.id!r} is also that of {self.places[unique_id]}"
          fields = ", ".join(formats.ID_FIELDS)
          raise BadRow(f"{message}. Make ids unique, or rename the field ({fields})")
        if self.check:
          try:
            self.check(prompt.answer)
          except ValueError as error:
            raise BadRow(f"{error}. Correct the row") from error
        self.places[unique_id] = place
        tokens = tuple(map(_IDS.setdefault, prompt.tokens, prompt.tokens))
        prompts.append(dataclasses.replace(prompt, id=unique_id, tokens=tokens))
    return prompts

  @property
  def left_out(self) -> str:
    """Describes how many rows are excluded, with the first bad row."""
    bad = f"{self.skipped.count} bad rows"
    return f"{bad}, {self.filtered} rows excluded by the filter{self.skipped.first}"
