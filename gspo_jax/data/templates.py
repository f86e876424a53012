"""Chat templates of checkpoints. A template is a Jinja program."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from etils import epath

from gspo_jax.data.special_tokens import TokenizerError

# Arguments of every template. A template may test `tools is none`, which would be False for a
# missing argument.
UNSET = dict[str, Any](tools=None, documents=None)
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # Fields of an assistant's thought.
FOLDER = "additional_chat_templates"  # Folder of further templates, beside chat_template.jinja.


def read(directory: epath.Path, config: dict[str, Any]) -> str:
  """Returns a tokenizer's default chat template; "" if there is none.

  Args:
    directory: directory of the tokenizer's files. Files of templates take precedence over `config`.
    config: content of tokenizer_config.json. Its `chat_template` is one template, or a list of
      named templates.

  Raises:
    TokenizerError: there are named templates, and none is named "default".
  """
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
  """Returns names of a template's optional arguments, such as `enable_thinking`."""
  tree = jinja2.Environment(extensions=_EXTENSIONS).parse(source)
  return sorted(jinja2.meta.find_undeclared_variables(tree) - {"messages", *_FUNCTIONS})


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Returns messages as transformers passes them to templates.

  Fields without a value are removed, since a template may test whether they exist. A thought is in
  two fields, since templates read different ones.
  """
  result = []
  for message in messages:
    fields = {key: value for key, value in message.items() if value is not None}
    thought = next((fields[key] for key in THOUGHTS if key in fields), None)
    if thought is not None:
      fields = dict(thinking=thought) | fields | dict(reasoning_content=thought)
    result.append(fields)
  return result


class _Generation(jinja2.ext.Extension):
  """The Jinja tag `{% generation %}`. The assistant's text inside it is rendered unchanged."""

  tags = {"generation"}  # noqa: RUF012 (Jinja declares it in this way)

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


_EXTENSIONS = [_Generation, "jinja2.ext.loopcontrols"]
# Arguments and functions that every template has.
_FUNCTIONS = "add_generation_prompt", "raise_exception", "strftime_now"


@functools.cache
def compiled(source: str) -> jinja2.Template:
  """Compiles a chat template in a sandbox, as transformers does.

  Templates come from downloaded checkpoints, so they are untrusted. Callers pass the function
  `strftime_now` to `render`.
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
