"""README.md: what it links to is there, its table can be checked, its code runs."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from support.command_line import ROOT

TEXT = (ROOT / "README.md").read_text()
REFERENCES = dict(re.findall(r"^\[([a-z]-[\w-]+)\]: (\S+)$", TEXT, re.MULTILINE))
LINKS = sorted({*REFERENCES.values(), *re.findall(r"\]\(([^)\s]+)\)", TEXT)})


def slug(heading):
  """The anchor that GitHub gives a heading."""
  plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
  return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


@pytest.mark.parametrize("link", [link for link in LINKS if not link.startswith("http")])
def test_what_it_links_to_is_there(link):
  path, _, anchor = link.partition("#")
  assert (ROOT / path).exists()
  if anchor:
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in map(slug, headings)


def test_every_cell_of_the_comparison_names_its_source():
  table = TEXT.partition("## Next to others")[2].partition("\n\n|")[2].partition("\n\n")[0]
  head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
  assert len(rows) > 15
  used = set()
  for row in rows:
    assert len(row) == 1 + len(head), row  # the first column has no name
    for cell in row[1:]:
      names = re.findall(r"\]\[([\w-]+)\]", cell)
      assert names or re.fullmatch(r"no\b.*|.*\b(Tunix's|trainers)", cell), (row[0], cell)
      used.update(names)
  assert used == REFERENCES.keys()


def test_its_code_runs():
  (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  found = dict(
    reward_PG=jnp.array([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]),
    logp_BT=jnp.full((6, 4), -1.0),
    old_logp_BT=jnp.full((6, 4), -1.0),
    mask_BT=jnp.ones((6, 4)),
  )
  exec(code, found)
  np.testing.assert_allclose(found["loss"], 0.0, atol=1e-6)  # advantages of a group add up to 0
  assert found["metrics"]
