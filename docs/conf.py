"""Configures the site. `bash .ci/docs` builds it into docs/_build/html.

The source directory is the repository, so links between pages work in both. A page's address is its
path, and the README is the home page.
"""

import os
import re
import shutil
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs/extensions")]

import gspo_jax  # noqa: E402

project = "gspo_jax"
author = "the authors of gspo_jax"
copyright = author
version = release = gspo_jax.__version__

extensions = [
  "docstrings",
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx_copybutton",
]
root_doc = "README"
include_patterns = [
  "README.md",
  "CHANGELOG.md",
  "CONTRIBUTING.md",
  "docs/**",
  "benchmarks/results/*.md",
  "experiments/README.md",
  "experiments/*/README.md",
  "notebooks/*.ipynb",
]
exclude_patterns = [
  ".*",
  "build",
  "dist",
  "runs",
  "docs/_build",
]

# Options for pages like GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
nb_execution_mode = "off"  # Notebooks keep their saved outputs.
html_math_renderer = "mathml"  # Browsers typeset MathML without a network.
highlight_language = "text"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True
suppress_warnings = ["myst.header"]  # Some pages begin with a heading of the third level.

default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:(class|exc)", ".*")]  # Types and errors of other libraries.
autodoc_typehints = "none"  # Names include the shapes.
autodoc_member_order = "bysource"
autodoc_default_options = {"undoc-members": True, "exclude-members": "replace"}
autodoc_preserve_defaults = True

html_theme = "furo"
smartquotes = False  # Most quotes are in code.
html_title = f"gspo_jax {release}"
html_show_sourcelink = html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}

# Pages by group (https://diataxis.fr).
GROUPS = {
  "Tutorials": ["notebooks/gspo_*", "notebooks/losses_*", "notebooks/qwen3_*"],
  "How to": [
    "docs/running",
    "docs/recipes",
    "docs/pretrained",
    "docs/data",
    "docs/rewards",
    "docs/verifiers",
    "docs/multi_turn",
    "docs/evaluation",
    "docs/one_chip",
    "docs/asynchronous",
    "notebooks/experiment_*",
    "CONTRIBUTING",
  ],
  "Reference": [
    "docs/models",
    "docs/keys",
    "docs/objectives",
    "docs/metrics",
    "docs/reference/*",
    "CHANGELOG",
  ],
  "Explanation": [
    "docs/sampling",
    "docs/engines",
    "docs/routing",
    "docs/sharding",
    "docs/speed",
    "docs/comparison",
    "benchmarks/results/*",
    "experiments/README",
  ],
}


def _toctree(pages, caption=""):
  options = f":hidden:\n:glob:\n:caption: {caption}" if caption else ":hidden:"
  return "\n\n```{toctree}\n" + options + "\n\n" + "\n".join(pages) + "\n```\n"


def _add_contents(app, name, source):
  """Adds tables of contents, which the README itself does not need."""
  if name == root_doc:
    source[0] += "".join(_toctree(pages, caption) for caption, pages in GROUPS.items())
  elif name == "experiments/README":
    folders = [path.parent.name for path in ROOT.glob("experiments/*/README.md")]
    folders.sort(key=lambda folder: int("0" + "".join(re.findall(r"^e(\d+)_", folder))))
    source[0] += _toctree([f"{folder}/README" for folder in folders])


def _home(app, error):
  if not error and app.builder.name == "html":
    shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app):
  app.connect("source-read", _add_contents)
  app.connect("build-finished", _home)
