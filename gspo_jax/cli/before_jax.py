"""Handles the command line before JAX and other slow libraries are imported.

These imports take seconds. This module imports only the standard library and small modules of this
package. So a greeting, and messages about a wrong command line or missing libraries, appear at
once. --help is slower, since the declarations of keys need JAX.
"""

import ast
import importlib.util
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import gspo_jax
from gspo_jax.system import stops
from gspo_jax.system.text import did_you_mean, near_path

HELP = {"--help", "-help", "-h", "-?", "--helpshort", "-helpshort"}
TRAIN = ("absl", "flax", "grain", "ml_collections", "optax", "orbax")
# A dict from extras of setup.py to some of their packages. If one of these packages is missing, the
# extra is not installed.
LIBRARIES = dict(
  train=TRAIN,
  experiments=(*TRAIN, "pandas", "scipy", "matplotlib"),
  test=(*TRAIN, "torch", "transformers"),
)
CONFIGS = Path(__file__).parents[1] / "configs"
# Keys of the configuration in --help, in this order.
HELP_KEYS = """
  job weights tokenizer data.train data.eval reward.name objective.name rl.iterations rl.prompts
  rl.group_size rl.microbatches lora.rank rl_optimizer.learning_rate sampling.max_new_tokens
  compute.dtype compute.remat mesh.fsdp engine.slots eval.every checkpoint.every
  checkpoint.directory seed resume wandb distributed
""".split()

USAGE = """\
gspo-jax --config=NAME --workdir=DIR [--config.KEY=VALUE ...]
  (python -m gspo_jax is the same)

Trains a language model with GSPO, or evaluates one. The same command on the same directory
continues an interrupted run.

Flags:
  --config=NAME   a configuration below, or the path of a file; NAME:VARIANT for a variant
  --workdir=DIR   directory of the run, created if missing
  --config.KEY=VALUE  changes a key of the configuration
  --dry_run       checks all inputs as a run does and writes nothing; prints the changed keys, the
                  model's size, memory per device, tokens, operations and a lower bound of the time
  --topology=v5p:4x4x4  makes a --dry_run for these TPUs instead of the local devices; h100:8 is
                  a topology of GPUs
  --verbosity=1   prints tracebacks and messages of libraries
  --version       prints the version
  --helpfull      lists the flags of all libraries too

Configurations:
{configs}

Keys changed most often, with defaults and meanings. All keys: docs/keys.md, or
python -m gspo_jax.settings.page
{keys}

Examples:
  gspo-jax --config=tiny --workdir=/tmp/tiny
  gspo-jax --config=tiny --workdir=/tmp/tiny2 --config.seed=1 --config.rl.iterations=80
  gspo-jax --config=tiny --workdir=/tmp/grpo --config.objective.name=grpo
  gspo-jax --config=gsm8k:0.6B-v5e --workdir=DIR --dry_run --config.weights=Qwen/Qwen3-0.6B-Base ...
  python -m gspo_jax.report /tmp/tiny /tmp/grpo --output=compare.html
"""


def config_names() -> list[str]:
  """Returns the names of the package's configurations."""
  return sorted(path.stem for path in CONFIGS.glob("[!_]*.py") if path.stem != "common")


def describe(path: Path) -> tuple[str, str, list[str]]:
  """Returns summary, hardware and variants of a configuration's file.

  All three are from the file's docstring. The summary is the first paragraph. The hardware is the
  text after "Hardware:" on its line, or "" if there is no such line. The variants are all names
  that follow the file's name, such as "gemma" in "tiny.py:gemma".
  """
  doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
  hardware = re.search(r"^Hardware:\s*(.*)$", doc, re.MULTILINE)
  variants = re.findall(rf"\b{re.escape(path.stem)}\.py:([\w.-]*\w)", doc)
  summary = doc.split("\n\n")[0].replace("\n", " ")
  return summary, hardware[1] if hardware else "", list(dict.fromkeys(variants))


def config_path(name: str) -> str:
  """Replaces the name of a configuration by its file's path.

  For example, "tiny:gemma" becomes ".../configs/tiny.py:gemma". Paths of existing files and unknown
  names are returned unchanged.
  """
  file, colon, argument = name.partition(":")
  path = CONFIGS / f"{file}.py"
  if not re.fullmatch(r"\w+", file) or os.path.isfile(file) or not os.path.isfile(path):
    return name
  return f"{path}{colon}{argument}"


def resolve_config_flags(argv: Sequence[str]) -> list[str]:
  """Applies `config_path` to the value of --config."""
  arguments, value_follows = [], False
  for argument in argv:
    flag, equals, value = argument.partition("=")
    if value_follows:
      argument = config_path(argument)
    elif equals and flag in ("--config", "-config"):
      argument = f"{flag}={config_path(value)}"
    value_follows = not value_follows and argument in ("--config", "-config")
    arguments.append(argument)
  return arguments


def begin(argv: Sequence[str]) -> None:
  """Begins a run: handles signals, --help and --version, checks packages, prints a greeting.

  Ends the process after --help or --version, without any argument, and if a package or the file of
  --config is missing.

  argv: command line, the program's name included.
  """
  stops.begin("ended; the same command continues from the files on disk")
  if HELP & set(argv[1:]):
    sys.stdout.write(usage())
    sys.exit()
  if "--version" in argv[1:]:
    sys.stdout.write(f"gspo_jax {gspo_jax.__version__}\n")
    sys.exit()
  _require_packages("train")
  if problem := first_error(argv[1:]):
    sys.stderr.write(f"gspo_jax: {problem}\n")
    sys.exit(2)
  sys.stderr.write(greeting(argv[1:]))
  sys.stderr.flush()


def begin_command(extra: str) -> None:
  """Handles signals of a command other than a run, and checks packages.

  extra: extra of setup.py with the packages of the command.
  """
  stops.begin("ended; its output may be incomplete")
  _require_packages(extra)


def _require_packages(extra: str) -> None:
  """Ends the process if an extra is not installed."""
  if missing := [name for name in LIBRARIES[extra] if importlib.util.find_spec(name) is None]:
    command = f"pip install '.[{extra}]'"
    sys.stderr.write(f"gspo_jax: {', '.join(missing)} not found: run {command} in the checkout\n")
    sys.exit(2)


def first_error(arguments: Sequence[str]) -> str:
  """Returns an error message for wrong arguments, else "".

  Arguments are wrong if there are none, or if --config names no file.
  """
  if not arguments:
    names = ", ".join(config_names())
    return f"--config must be given: {names}, or the path of a file; --help has more"
  name = _flag_values(arguments).get("config")
  return missing_file(name) if name else ""


def missing_file(name: str) -> str:
  """Returns a message if --config names no file, else "".

  name: value of --config.
  """
  path = config_path(name).partition(":")[0]
  if os.path.isfile(path):
    return ""
  names = config_names()
  hint = did_you_mean(path, names) or near_path(path, ".py") or did_you_mean(Path(path).stem, names)
  hint = hint or f"; names: {', '.join(names)}"
  return f"--config={name}: there is no file {path!r}{hint}"


def greeting(arguments: Sequence[str]) -> str:
  """Returns the first lines of a run: configuration, directory and hardware.

  The hardware is omitted for a variant. Returns "" for a dry run, or if --config or --workdir is
  missing.
  """
  values = _flag_values(arguments)
  config, workdir = values.get("config"), values.get("workdir")
  if not config or not workdir or "dry_run" in values:
    return ""
  start = f"gspo_jax: {config} in {workdir}; loading JAX and the libraries takes some seconds\n"
  path, _, variant = config_path(config).partition(":")
  try:
    _, hardware, _ = describe(Path(path))
  except (OSError, SyntaxError, ValueError):  # The run itself will report the error.
    hardware = ""
  return start + (f"gspo_jax: {config} is for: {hardware}\n" if hardware and not variant else "")


def usage() -> str:
  """Returns the text of --help."""
  from gspo_jax.settings import page

  keys, lines = page.by_name(), []
  for name in HELP_KEYS:
    key = keys[name]
    words = list(page.words(key.kind))
    if words and "module:function" in page.ranges.describe(key.kind):
      words.append("package.module:function")
    meaning = f"{' | '.join(words)}: {key.meaning}" if words else key.meaning
    lines.append(_entry(f"{name}={page.format_value(key.default)}", meaning, 32))
  return USAGE.format(configs="\n".join(map(_help_entry, config_names())), keys="\n".join(lines))


def console() -> None:
  """Runs the command `gspo-jax`, as `python -m gspo_jax.main`."""
  runpy.run_module("gspo_jax.main", run_name="__main__", alter_sys=True)


def _flag_values(arguments: Sequence[str]) -> dict[str, str]:
  """Returns the values of flags written as --flag=value, by flag.

  The value of other arguments is "".
  """
  return dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)


def _help_entry(name: str) -> str:
  """Formats the help on a configuration."""
  summary, hardware, variants = describe(CONFIGS / f"{name}.py")
  named = ", ".join(f"{name}:{variant}" for variant in variants)
  lines = [summary, f"Hardware: {hardware}" if hardware else "", f"Also: {named}" if named else ""]
  return "\n".join(_entry(name if line is summary else "", line, 22) for line in lines if line)


def _entry(name: str, text: str, width: int) -> str:
  """Formats a name, in `width` columns, and its text for --help."""
  lines = textwrap.wrap(text, 98 - width) or [""]
  first = f"  {name:<{width - 3}} {lines[0]}"
  if len(name) > width - 3:
    return "\n".join([f"  {name}", *(" " * width + line for line in lines)])
  return "\n".join([first, *(" " * width + line for line in lines[1:])]).rstrip()
