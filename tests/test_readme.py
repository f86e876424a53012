"""Pages: links lead somewhere, cells of the comparison name sources, the README's code runs."""

import re
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from support.command_line import ROOT

README = ROOT / "README.md"
COMPARISON = ROOT / "docs/comparison.md"
PATTERNS = "*.md", "docs/*.md", "benchmarks/results/*.md", "experiments/**/*.md"
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))


def references(page):
  """URLs of a page's reference links, by name."""
  return dict(re.findall(r"^\[([a-z]-[\w-]+)\]: (\S+)$", page.read_text(), re.MULTILINE))


def local_links(page):
  """Links of a page to files of the repository."""
  text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
  links = {*references(page).values(), *re.findall(r"\]\(([^)\s]+)\)", text)}
  return sorted(link for link in links if not link.startswith("http"))


def slug(heading):
  """GitHub's anchor of a heading."""
  plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
  return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def leads_somewhere(page, link):
  path, _, anchor = link.partition("#")
  target = page.parent / path if path else page
  if not anchor or not target.exists():
    return target.exists()
  headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
  return anchor in map(slug, headings)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
  assert [link for link in local_links(page) if not leads_somewhere(page, link)] == []


def test_every_cell_of_the_comparison_names_its_source():
  text = COMPARISON.read_text()
  table = text.partition("\n\n|")[2].partition("\n\n")[0]
  head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
  assert len(rows) > 15
  for row in rows:
    assert len(row) == 1 + len(head), row  # the first column has no name
    for cell in row[1:]:
      names = re.findall(r"\]\[([\w-]+)\]", cell)
      assert names or re.fullmatch(r"no\b.*|not found\b.*|.*\b(Tunix's|trainers)", cell), (
        row[0],
        cell,
      )
  assert {*re.findall(r"\]\[([\w-]+)\]", text)} == references(COMPARISON).keys()


def test_its_code_runs():
  (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  names = dict(
    reward_PG=jnp.array([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]),
    logp_BT=jnp.full((6, 4), -1.0),
    old_logp_BT=jnp.full((6, 4), -1.0),
    mask_BT=jnp.ones((6, 4)),
  )
  exec(code, names)
  np.testing.assert_allclose(names["loss"], 0.0, atol=1e-6)  # advantages of a group add up to 0
  assert names["metrics"]


def test_continuous_integration_runs_its_commands():
  """The set-up of README comes first in `.ci/run`, then its tests, as they stand there."""
  run = (ROOT / ".ci/run").read_text()
  assert run.index("$(.ci/readme)") < run.index("$(.ci/readme tests)") < run.index("pip install")

  def commands(*arguments):
    return subprocess.check_output([ROOT / ".ci/readme", *arguments], text=True).splitlines()

  venv, install, main = commands()
  assert venv == "python3 -m venv .venv && . .venv/bin/activate"
  assert install == "pip install -e '.[train]'" and "gspo_jax.main" in main
  assert commands("tests") == ["pip install -e '.[test]'", "python -m pytest"]


def test_contributing_names_files_and_tests_that_exist():
  text = (ROOT / "CONTRIBUTING.md").read_text()
  for link in re.findall(r"\]\(([^)#]+)", text):
    assert link.startswith("http") or (ROOT / link).exists(), link
  tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
  assert len(tests) >= 12
  for path, name in tests:
    assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
