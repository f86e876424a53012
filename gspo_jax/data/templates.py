"""Chat templates of checkpoints, which are Jinja programs."""

import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from etils import epath

from gspo_jax.data.special_tokens import TokenizerError

# Arguments passed as None: templates test `is none`, and an undefined argument is not none.
UNSET = dict[str, Any](tools=None, documents=None)
FOLDER = "additional_chat_templates"  # beside chat_template.jinja


def read(directory: epath.Path, config: dict[str, Any]) -> str:
  """Returns the default template of files or config. Returns '' without one."""
  files = [directory / "chat_template.jinja", *(directory / FOLDER).glob("*.jinja")]
  named = {
    "default" if file.parent == directory else file.stem: file.read_text()
    for file in files
    if file.exists()
  }
  template = named or config.get("chat_template") or ""
  if isinstance(template, str):
    return template
  if isinstance(template, list):
    template = {entry["name"]: entry["template"] for entry in template}
  if "default" not in template:
    raise TokenizerError(
      f"{directory} has chat templates {sorted(template)} and none named 'default': copy one of"
      " them to chat_template.jinja"
    )
  return template["default"]


def arguments(source: str) -> list[str]:
  """Returns a template's arguments besides the messages."""
  tree = jinja2.Environment(extensions=_EXTENSIONS).parse(source)
  return sorted(jinja2.meta.find_undeclared_variables(tree) - {"messages", *_FUNCTIONS})


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` marks the assistant's text, and prints its body unchanged."""

  tags = {"generation"}  # noqa: RUF012 (Jinja's own way to declare it)

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


_EXTENSIONS = [_Generation, "jinja2.ext.loopcontrols"]
_FUNCTIONS = "add_generation_prompt", "raise_exception", "strftime_now"


@functools.cache
def compiled(source: str) -> jinja2.Template:
  """Compiles a chat template as transformers does, in a sandbox.

  Templates come from downloaded checkpoints, so they are untrusted. `strftime_now` is an argument
  of `render`.
  """

  def raise_exception(message: str):
    raise jinja2.TemplateError(message)

  def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(
      value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  return environment.from_string(source)
