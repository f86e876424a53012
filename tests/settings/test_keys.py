"""Keys are set somewhere: in a configuration, an experiment, a notebook, a benchmark or a page; and
recipes are configurations."""

import ast
import importlib
import pathlib
import re

import pytest
from support.configs import VARIANTS, config_of

from configs import common
from gspo_jax.settings import page

ROOT = pathlib.Path(__file__).parents[2]


def generic(key):
  """The key, with NAME in the place of a named section."""
  return re.sub(r"^(eval\.benchmarks|constraints\.(?:rewards|costs))\.\w+\.", r"\1.NAME.", key)


def flat(section, path=""):
  """Yields the keys with their values; sections by name are NAME."""
  for key, value in section.items():
    name = f"{path}{key}"
    if hasattr(value, "items"):
      yield from flat(value, f"{name}.")
    else:
      yield generic(name), value


def set_by_files():
  """Keys changed by files of configs/."""
  base, changed = dict(flat(common.base())), set()
  for file, arg in VARIANTS:
    config = importlib.import_module(f"configs.{file}").get_config(arg)
    changed |= {key for key, value in flat(config) if key not in base or base[key] != value}
  return changed


def set_in_calls(tree):
  """Ends of keys in section=dict(key=...)."""
  for node in ast.walk(tree):
    value = node.value if isinstance(node, ast.keyword) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
      yield from (f"{node.arg}.{inner.arg}" for inner in value.keywords)


def declaration(key):
  """Class and name of a key, equal for the three optimizers."""
  owner = page.by_name()[key]
  return next(
    f"{type(section).__name__}.{key.rpartition('.')[2]}"
    for path, section, keys in page.sections()
    if owner in keys
  )


def set_in_text(text, ends="="):
  """Keys that a text sets: `rl.prompts=8`, `--config.rl.prompts=8`."""
  names = set(re.findall(rf"(?<![\w.])([\w.]+){ends}", text))
  return {generic(name.removeprefix("config.")) for name in names}


def used_declarations():
  """Declarations with a use."""
  folders = [ROOT / name for name in ("experiments", "notebooks", "benchmarks")]
  scripts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
  pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
  pages += [path for folder in folders for path in folder.rglob("*.md")]
  text = "\n".join(path.read_text() for path in pages if path.name != "keys.md")
  ends = {end for script in scripts for end in set_in_calls(ast.parse(script))}
  code = "\n".join(scripts)
  used = set_by_files() | set_in_text(text) | set_in_text(code, r"[\"']?\s*[:=]")
  used |= {generic(name) for name in re.findall(r"config\.([\w.]+)", code)}
  for key in page.by_name():
    if key in used or ".".join(key.split(".")[-2:]) in ends:
      yield declaration(key)


def test_a_key_has_a_use():
  """Keys of `model` are set by named sizes, or by config.json."""
  declared = {declaration(key) for key in page.by_name() if not key.startswith("model.")}
  assert not declared - {*used_declarations()}, (
    "give it a use (docs/recipes.md has some), or remove it"
  )


RECIPES = re.findall(r"^\| .* \| `(.*)` \|$", (ROOT / "docs/recipes.md").read_text(), re.M)


def literal(text):
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_a_configuration(recipe):
  settings = dict(setting.split("=", 1) for setting in recipe.split())
  config_of(common.base, **{key.replace(".", "__"): literal(x) for key, x in settings.items()})
