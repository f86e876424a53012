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
  where: tuple[formats.Condition, ...]
  max_tokens: int  # of a prompt
  skipped: Skipped
  check: Check | None = None
  prefix: str = ""  # of ids
  filtered: int = 0  # rows that the conditions leave out
  seen: dict[str, str] = dataclasses.field(default_factory=dict)  # id: place

  def __call__(self, rows: Iterable[Row]) -> list[structs.Prompt]:
    """The prompts of these rows. DataError names the first bad row unless these are skipped."""
    prompts = []
    for place, default_id, decode in rows:
      with self.skipped.row(place):
        prompt = formats.prompt(
          decode(),
          self.form,
          self.tok,
          where=self.where,
          max_tokens=self.max_tokens,
          default_id=default_id,
        )
        if prompt is None:
          self.filtered += 1
          continue
        if prompt.id in self.seen:
          taken = f"the id {prompt.id!r} is that of {self.seen[prompt.id]} too"
          raise BadRow(f"{taken}. Make ids unique")
        if self.check:
          try:
            self.check(prompt.answer)
          except ValueError as error:
            raise BadRow(f"{error}. Correct the row") from error
        self.seen[prompt.id] = place
        prompts.append(dataclasses.replace(prompt, id=self.prefix + prompt.id))
    return prompts

  @property
  def left_out(self) -> str:
    """Says which rows became no prompts."""
    bad = f"{self.skipped.count} bad rows"
    return f"{bad}, {self.filtered} that the filter leaves out{self.skipped.first}"
