"""Converts undecoded data rows to prompts, with checks row by row."""

import dataclasses
from collections.abc import Callable, Iterable

from gspo_jax import structs
from gspo_jax.data import formats, tokenizer
from gspo_jax.data.files import BadRow, Row, Skipped
from gspo_jax.data.filters import Condition
from gspo_jax.settings.data import Format

Check = Callable[[str], None]  # raises ValueError for a gold answer that cannot be used


@dataclasses.dataclass
class Reader:
  """Converts the data rows of one source to prompts with unique ids."""

  form: Format
  tok: tokenizer.Tokenizer
  filters: tuple[Condition, ...]
  max_tokens: int  # maximum length of a prompt
  skipped: Skipped
  check: Check | None = None
  prefix: str = ""  # prefix of ids
  filtered: int = 0  # number of rows left out by the conditions
  places: dict[str, str] = dataclasses.field(default_factory=dict)  # place of each row by its id

  def __call__(self, rows: Iterable[Row]) -> list[structs.Prompt]:
    """Converts rows to prompts. Raises DataError for a bad row unless skipped."""
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
        if prompt.id in self.places:
          message = f"the id {prompt.id!r} is also that of {self.places[prompt.id]}"
          raise BadRow(f"{message}. Make ids unique")
        if self.check:
          try:
            self.check(prompt.answer)
          except ValueError as error:
            raise BadRow(f"{error}. Correct the row") from error
        self.places[prompt.id] = place
        prompts.append(dataclasses.replace(prompt, id=self.prefix + prompt.id))
    return prompts

  @property
  def left_out(self) -> str:
    """Describes the number of excluded rows, and the first bad row."""
    bad = f"{self.skipped.count} bad rows"
    return f"{bad}, {self.filtered} that the filter leaves out{self.skipped.first}"
