"""Converts this project's docstrings, plain text for `help()`, to reStructuredText for autodoc.

- A paragraph that begins with `symbol =` is an equation (equations.py).
- `name` in backticks is a link if the site has the name, and code otherwise.
- `Shapes: ...`, `Reference: ...` and the like become a list of fields.
- Indented text outside sections (Args, Returns, Raises, Example) stays unchanged.
- `docs/NAME.md` links to that page, and `arXiv:NUMBER` to the paper, on all pages.
- Comments behind or above fields and constants describe them. Keys of a configuration are described
  by their declarations.
"""

import dataclasses
import html
import re
import types
from typing import Any

import equations
import sphinx.pycode.parser
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

from gspo_jax.settings import page

SECTIONS = Config(napoleon_use_rtype=False)
logger = logging.getLogger(__name__)
_FIELD = re.compile(r"(Shapes|Reference|Raises|Errors|Differs|Source): (.*)")
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
_PYTHON = re.compile(r"^ *(?:from|import|for|with|\w+(?:, \w+)* =) ", re.MULTILINE)
_CODE = re.compile(r"(`[^`]+`)")


def setup(app: Sphinx) -> dict[str, Any]:
  app.setup_extension("sphinx.ext.autodoc")
  parser = sphinx.pycode.parser
  # Sphinx reads descriptions from comments `#: ...`. This project uses plain comments.
  pattern = parser.comment_re.pattern
  if "#:" not in pattern:
    raise ImportError("docs/extensions/docstrings.py does not support this version of Sphinx")
  parser.comment_re = re.compile(pattern.replace("#:", "#:?"))
  app.connect("builder-inited", _keys)
  app.connect("autodoc-process-docstring", _docstring)
  app.connect("autodoc-process-signature", _signature)
  app.connect("missing-reference", _reference)
  app.connect("doctree-resolved", _link_objectives)
  app.connect("doctree-resolved", _link_papers)
  app.connect("env-check-consistency", _check_reference)
  app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
  return dict(parallel_read_safe=True, parallel_write_safe=True)


def _keys(app: Sphinx) -> None:
  """Describes keys of a configuration by their meanings."""
  for section in {type(section) for _, section, _ in page.sections()}:
    analyzer = ModuleAnalyzer.for_module(section.__module__)
    analyzer.analyze()
    for field in dataclasses.fields(section):
      if "meaning" in field.metadata:
        analyzer.attr_docs[section.__name__, field.name] = [field.metadata["meaning"], ""]


def _docstring(app: Sphinx, kind: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  """Converts a docstring in place."""
  text = "\n".join(lines)
  if re.fullmatch(r"Alias for field number \d+\s*", text):  # Default of NamedTuple fields.
    text = ""
  lines[:] = restructured(text).split("\n")
  if kind not in ("attribute", "data", "property"):  # Napoleon would read types into these.
    lines[:] = GoogleDocstring(lines, SECTIONS, app, kind, name, obj, options).lines()


def restructured(text: str) -> str:
  """Converts a docstring to reStructuredText."""
  blocks, section = [], False
  for block in re.split(r"\n{2,}", text.strip("\n")):
    indented = block.startswith(" ")
    section = bool(_SECTION.match(block.split("\n")[0])) or (section and indented)
    if equations.EQUATION.match(block.strip()) and "`" not in block:
      blocks += [f".. math:: {equations.tex(x)}" for x in equations.split(block.strip())]
    elif section:
      blocks.append(_section(block))
    elif indented:
      language = "pycon" if ">>>" in block else "python" if _PYTHON.search(block) else "text"
      blocks.append(f".. code-block:: {language}\n\n" + re.sub("^", "  ", block, flags=re.M))
    else:
      blocks += _paragraphs(block)
  return "\n\n".join(blocks) + "\n"


def _paragraphs(block: str) -> list[str]:
  """Splits a paragraph into prose and a list of fields."""
  prose, fields = [], []
  for line in block.split("\n"):
    if field := _FIELD.match(line):
      fields.append([f":{field[1]}: {_prose(field[2])}"])
    elif fields:
      fields[-1].append("  " + _prose(line.strip()))
    else:
      prose.append(_prose(line))
  return [x for x in ("\n".join(prose), "\n".join("\n".join(x) for x in fields)) if x]


def _section(block: str) -> str:
  """Converts the lines of a section; examples stay unchanged."""
  if re.match(r"Examples?:", block) or ">>>" in block:
    return block
  return "\n".join(line if _SECTION.match(line) else _prose(line) for line in block.split("\n"))


def _prose(line: str) -> str:
  """Escapes markup in a line of prose, and links pages."""
  parts = _CODE.split(line)
  parts = [part if part[:1] == "`" else re.sub(r"([|*\\])", r"\\\1", part) for part in parts]
  line = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))
  return re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/docs/\1`", line)


def _signature(
  app: Sphinx, kind: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str | None] | None:
  """Returns a signature without types: names include the shapes."""
  if kind == "class" and signature and (": " in signature or "*args" in signature):
    signature = ""  # A protocol has none, and fields are listed below.
  return signature, None


def _reference(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
  """Links a name in backticks if exactly one object matches."""
  if node.get("refdomain") != "py" or node.get("reftype") != "obj":
    return None
  name, objects = node["reftarget"].removesuffix("()"), env.domains.python_domain.objects
  package = ".".join((node.get("py:module") or "").split(".")[:2])

  def matches(full: str) -> bool:
    if full != name and not full.endswith(f".{name}"):
      return False
    kind = objects[full].objtype
    return kind in ("class", "exception") or (
      kind in ("function", "data") and full.startswith(f"{package}.")
    )

  names = list(filter(matches, objects))
  if len(names) != 1:
    return contnode
  target = objects[names[0]]
  return make_refnode(app.builder, node["refdoc"], target.docname, target.node_id, contnode)


def _link_objectives(app: Sphinx, tree: nodes.document, page: str) -> None:
  """Links names of objectives in code to the reference."""
  for code in list(tree.findall(nodes.literal)):
    name = f"gspo_jax.objectives.{code.astext().removeprefix('O.')}"
    target = app.env.domains.python_domain.objects.get(name)
    plain = not isinstance(code.parent, nodes.reference | nodes.title)
    if target and target.docname != page and plain:
      place = target.docname, target.node_id
      code.replace_self(make_refnode(app.builder, page, *place, code.deepcopy()))


def _link_papers(app: Sphinx, tree: nodes.document, page: str) -> None:
  """Links `arXiv:2507.18071` to the paper."""
  for text in list(tree.findall(nodes.Text)):
    parts = re.split(r"(?:arXiv:)(\d{4}\.\d{5})", text)
    if len(parts) == 1 or isinstance(text.parent, nodes.reference | nodes.literal):
      continue
    links = [nodes.Text(parts[0])]
    for number, after in zip(parts[1::2], parts[2::2]):
      address = f"https://arxiv.org/abs/{number}"
      links += [nodes.reference("", f"arXiv:{number}", refuri=address), nodes.Text(after)]
    text.parent.replace(text, links)


def _check_reference(app: Sphinx, env: Any) -> None:
  """Warns of public names without an entry in the reference."""
  from gspo_jax import objectives, sampling

  for package in (objectives, sampling):
    for name, value in vars(package).items():
      if name.startswith("_") or name == "annotations" or isinstance(value, types.ModuleType):
        continue
      if f"{package.__name__}.{name}" not in env.domains.python_domain.objects:
        page = f"docs/reference/{package.__name__.rpartition('.')[2]}.rst"
        logger.warning(f"{package.__name__}.{name} is not in {page}")


def _inline_math(self: Any, node: nodes.math) -> None:
  self.body.append(_mathml(node, as_block=False))
  raise nodes.SkipNode


def _display_math(self: Any, node: nodes.math_block) -> None:
  self.body.append(self.starttag(node, "div", CLASS="math"))
  self.body.append(_mathml(node, as_block=True) + "</div>")
  raise nodes.SkipNode


def _mathml(node: nodes.Element, as_block: bool) -> str:
  """Converts an equation to MathML."""
  text = re.sub(r"(\\hat\{\w\})", r"{\1{}}", node.astext())  # Indices follow the hat.
  text = re.sub(r"\\[bB]igg?[lr]?(?![A-Za-z])", "", text)  # Browsers choose sizes.
  try:
    return tex2mathml(text, as_block=as_block)
  except MathError as error:
    logger.warning(f"{error} in the equation {node.astext()}", location=node)
    return f"<code>{html.escape(node.astext())}</code>"
