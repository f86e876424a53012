"""From undecoded rows to prompts, checked one by one."""

import dataclasses
from collections.abc import Callable, Iterable

from gspo_jax import structs
from gspo_jax.data import formats, tokenizer
from gspo_jax.data.files import BadRow, Row, Skipped
from gspo_jax.settings.data import Format

Check = Callable[[str], None]  # raises ValueError for a gold answer that cannot be used


@dataclasses.dataclass
class Reader:
  """Makes prompts of the rows of one source, of which it remembers the ids."""

  form: Format
  tok: tokenizer.Tokenizer
  filters: tuple[formats.Condition, ...]
  max_tokens: int  # limit of a prompt
  skipped: Skipped
  check: Check | None = None
  prefix: str = ""  # prefix of ids
  filtered: int = 0  # rows that the conditions leave out
  places: dict[str, str] = dataclasses.field(default_factory=dict)  # place by id

  def __call__(self, rows: Iterable[Row]) -> list[structs.Prompt]:
    """Returns the prompts of these rows. Raises DataError for the first bad row unless they are
    skipped."""
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
          message = f"the id {prompt.id!r} is that of {self.places[prompt.id]} too"
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
    """Counts rows without a prompt, in words."""
    bad = f"{self.skipped.count} bad rows"
    return f"{bad}, {self.filtered} that the filter leaves out{self.skipped.first}"
