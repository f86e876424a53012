"""Docstrings as this project writes them, for autodoc: plain text that `help()` shows as it is.

- A paragraph that begins with `symbol =` is an equation (equations.py).
- `name` in backticks is a link where the site has it, and code elsewhere.
- `Shapes: ...`, `Reference: ...` and the like become a list of fields.
- What is indented, and is no section (Args, Returns, Raises, Example), is shown as it stands.
- `docs/NAME.md` is a link to that page, and so are papers by their numbers, on all pages.
- In comments behind or above them, fields of classes and constants say what they are; keys of a
  configuration in their declarations.
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
  # Sphinx takes `#: ...` for the description of what it stands at; here it is any comment there.
  pattern = parser.comment_re.pattern
  if "#:" not in pattern:
    raise ImportError("this Sphinx reads comments in another way: docs/extensions/docstrings.py")
  parser.comment_re = re.compile(pattern.replace("#:", "#:?"))
  app.connect("builder-inited", _keys)
  app.connect("autodoc-process-docstring", _docstring)
  app.connect("autodoc-process-signature", _signature)
  app.connect("missing-reference", _reference)
  app.connect("doctree-resolved", _link_objectives)
  app.connect("doctree-resolved", _link_papers)
  app.connect("env-check-consistency", _all_are_there)
  app.add_html_math_renderer("mathml", (_inline_math, None), (_display_math, None))
  return dict(parallel_read_safe=True, parallel_write_safe=True)


def _keys(app: Sphinx) -> None:
  """Has the reasons of keys for what comments are to other fields."""
  for section in {type(section) for _, section, _ in page.sections()}:
    analyzer = ModuleAnalyzer.for_module(section.__module__)
    analyzer.analyze()
    for field in dataclasses.fields(section):
      if "meaning" in field.metadata:
        analyzer.attr_docs[section.__name__, field.name] = [field.metadata["meaning"], ""]


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
  text = "\n".join(lines)
  if re.fullmatch(r"Alias for field number \d+\s*", text):  # of every field of a NamedTuple
    text = ""
  lines[:] = restructured(text).split("\n")
  if what not in ("attribute", "data", "property"):  # of which napoleon takes words for types
    lines[:] = GoogleDocstring(lines, SECTIONS, app, what, name, obj, options).lines()


def restructured(text: str) -> str:
  """reStructuredText of a docstring."""
  found, section = [], False
  for block in re.split(r"\n{2,}", text.strip("\n")):
    indented = block.startswith(" ")
    section = bool(_SECTION.match(block.split("\n")[0])) or (section and indented)
    if equations.EQUATION.match(block.strip()) and "`" not in block:
      found += [f".. math:: {equations.tex(one)}" for one in equations.split(block.strip())]
    elif section:
      found.append(_section(block))
    elif indented:
      language = "pycon" if ">>>" in block else "python" if _PYTHON.search(block) else "text"
      found.append(f".. code-block:: {language}\n\n" + re.sub("^", "  ", block, flags=re.M))
    else:
      found += _paragraphs(block)
  return "\n\n".join(found) + "\n"


def _paragraphs(block: str) -> list[str]:
  """A paragraph of prose; lines that begin one of the fields, as a list of fields behind it."""
  found, fields = [[]], []
  for line in block.split("\n"):
    if field := _FIELD.match(line):
      fields.append([f":{field[1]}: {_prose(field[2])}"])
    elif fields:
      fields[-1].append("  " + _prose(line.strip()))
    else:
      found[0].append(_prose(line))
  prose = "\n".join(found[0])
  return [x for x in (prose, "\n".join("\n".join(field) for field in fields)) if x]


def _section(block: str) -> str:
  """A section as napoleon reads it. Examples stay as they are."""
  if re.match(r"Examples?:", block) or ">>>" in block:
    return block
  return "\n".join(line if _SECTION.match(line) else _prose(line) for line in block.split("\n"))


def _prose(line: str) -> str:
  """A line without what reStructuredText would take for markup; pages that it names are links."""
  parts = _CODE.split(line)
  parts = [part if part[:1] == "`" else re.sub(r"([|*\\])", r"\\\1", part) for part in parts]
  line = re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))
  return re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/docs/\1`", line)


def _signature(
  app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str | None, str | None] | None:
  """Names and defaults: the shapes are in the names, and the docstrings say the rest."""
  if what == "class" and signature and (": " in signature or "*args" in signature):
    signature = ""  # of a protocol, or with types: the fields are listed below
  return signature, None


def _reference(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
  """A name in backticks as a link, where the site has it and nothing else can be meant."""
  if node.get("refdomain") != "py" or node.get("reftype") != "obj":
    return None
  name, objects = node["reftarget"].removesuffix("()"), env.domains.python_domain.objects
  package = ".".join((node.get("py:module") or "").split(".")[:2])

  def meant(full: str) -> bool:
    if full != name and not full.endswith(f".{name}"):
      return False
    kind = objects[full].objtype
    return kind in ("class", "exception") or (
      kind in ("function", "data") and full.startswith(f"{package}.")
    )

  found = list(filter(meant, objects))
  if len(found) != 1:
    return contnode
  target = objects[found[0]]
  return make_refnode(app.builder, node["refdoc"], target.docname, target.node_id, contnode)


def _link_objectives(app: Sphinx, tree: nodes.document, page: str) -> None:
  """In pages, code that names a function of the objectives leads to it in the reference."""
  for code in list(tree.findall(nodes.literal)):
    name = f"gspo_jax.objectives.{code.astext().removeprefix('O.')}"
    target = app.env.domains.python_domain.objects.get(name)
    plain = not isinstance(code.parent, nodes.reference | nodes.title)
    if target and target.docname != page and plain:
      place = target.docname, target.node_id
      code.replace_self(make_refnode(app.builder, page, *place, code.deepcopy()))


def _link_papers(app: Sphinx, tree: nodes.document, page: str) -> None:
  """`arXiv:2507.18071` leads to the paper."""
  for text in list(tree.findall(nodes.Text)):
    parts = re.split(r"(?:arXiv:)(\d{4}\.\d{5})", text)
    if len(parts) == 1 or isinstance(text.parent, nodes.reference | nodes.literal):
      continue
    links = [nodes.Text(parts[0])]
    for number, after in zip(parts[1::2], parts[2::2]):
      address = f"https://arxiv.org/abs/{number}"
      links += [nodes.reference("", f"arXiv:{number}", refuri=address), nodes.Text(after)]
    text.parent.replace(text, links)


def _all_are_there(app: Sphinx, env: Any) -> None:
  """Warns of what a package offers and no page of the reference has."""
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
  """MathML, which browsers typeset themselves."""
  text = re.sub(r"(\\hat\{\w\})", r"{\1{}}", node.astext())  # an index goes beside the hat
  text = re.sub(r"\\[bB]igg?[lr]?(?![A-Za-z])", "", text)  # sizes, which the browser knows
  try:
    return tex2mathml(text, as_block=as_block)
  except MathError as error:
    logger.warning(f"{error} in the equation {node.astext()}", location=node)
    return f"<code>{html.escape(node.astext())}</code>"
