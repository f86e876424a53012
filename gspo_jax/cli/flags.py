"""Parses a command's flags, above all --config, and reports errors in one line."""

import dataclasses
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags, logging
from ml_collections import config_flags

from gspo_jax.cli import before_jax
from gspo_jax.settings import ranges, reading
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.objective import fill_unset, section_kind
from gspo_jax.settings.reading import kind_of, unknown_key_message
from gspo_jax.settings.run import RunConfig
from gspo_jax.system.text import visible

BAD_INPUT = 2  # Exit code for errors in the command line, or in a file that it names.


def read_config(
  read_model: Callable[[RunConfig], ModelConfig],
  check: Callable[[RunConfig], None] = lambda _: None,
) -> RunConfig:
  """Returns the configuration, with changes by flags --config.KEY=VALUE.

  If --config names a variant (NAME:VARIANT), the file determines the model. Otherwise the model is
  read from the weights if a flag sets `weights`, or if section `model` has its defaults. In all
  cases, flags may still change keys of the model. An error ends the process with one line.

  Args:
    read_model: function from a configuration to the model of its weights.
    check: function called before the model is read, which raises ValueError for bad paths.
  """
  config, changes = CONFIG.value, config_flags.get_override_values(flags.FLAGS["config"])
  try:
    values = reading.parse(config.to_dict())
    check(values)
    unset = "weights" in changes or values.model == RunConfig.model
    if unset and ":" not in filename():
      config.model.update(dataclasses.asdict(read_model(values)))
      model_changes = {key: value for key, value in changes.items() if key.startswith("model.")}
      config.update_from_flattened_dict(model_changes)
    return reading.from_dict(config.to_dict())
  except (ValueError, OSError) as error:
    refuse(error)


def refuse(error: Exception) -> NoReturn:
  """Ends the process with an error's message in one line.

  The exit code is `BAD_INPUT`. If --verbosity is 1, the traceback is printed too. On several hosts,
  a normal exit would wait minutes for the other hosts, and then have another code.
  """
  logging.debug("", exc_info=error)
  if isinstance(error, OSError) and error.filename:
    error = f"{error.filename}: {error.strerror}"
  lines = " ".join(line.strip() for line in str(error).splitlines())
  sys.stderr.write(f"gspo_jax: {visible(lines)}\n")  # The message may quote a response.
  if jax.distributed.is_initialized():
    sys.stderr.flush()
    os._exit(BAD_INPUT)
  sys.exit(BAD_INPUT)


try:
  CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Configuration: its name, e.g. tiny, or the path of a file.",
    # Flags may set keys that are not in the file: options of a user's own functions, and entries of
    # a section such as `data.template_arguments`. `_check_keys` refuses all other unknown keys.
    lock_config=False,
    accept_new_attributes=True,
  )
except (flags.Error, UnicodeError) as error:
  # ml_collections reads the command line here. A file of --flagfile is missing or malformed.
  flagfiles = [argument for argument in sys.argv if "flagfile" in argument]
  refuse(ValueError(f"{' '.join(flagfiles)}: {str(error).removeprefix('ERROR:: ')}"))


def cache_compiled_programs() -> None:
  """Turns on JAX's cache of compiled programs, by default in ~/.cache/gspo_jax/compiled.

  The environment variable JAX_COMPILATION_CACHE_DIR sets another directory, and
  JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
  """
  if jax.config.jax_compilation_cache_dir is None:
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache")))
    if not home.is_absolute():  # Some containers have users without a home.
      return
    jax.config.update("jax_compilation_cache_dir", str(home / "gspo_jax" / "compiled"))
    # Programs that compile fast are cached too, since a run has many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def filename() -> str:
  """Returns the value of --config, with its variant."""
  return config_flags.get_config_filename(flags.FLAGS["config"])


def read_config_file(name: str) -> dict[str, Any]:
  """Returns the configuration of a file, without changes by flags.

  name: value of --config.

  Raises:
    ValueError: the file does not exist, or running it fails.
  """
  if problem := before_jax.missing_file(name):
    raise ValueError(problem)
  path, _, argument = before_jax.config_path(name).partition(":")
  try:
    get_config = runpy.run_path(path)["get_config"]
    return (get_config(argument) if argument else get_config()).to_dict()
  except ValueError as error:
    raise ValueError(f"--config={name}: {error}") from error
  except Exception as error:  # The file is a program, which may raise any type.
    lines = [
      f":{x.lineno}" for x in traceback.extract_tb(error.__traceback__) if x.filename == path
    ]
    raise ValueError(
      f"--config={name}: {path}{(lines or [''])[-1]}: {type(error).__name__}: {error}; the "
      "file's get_config() must return a ConfigDict"
    ) from error


def parse(argv: list[str], check: Callable[[], None] = lambda: None) -> list[str]:
  """Parses the command line into absl's flags, and returns the program's name.

  An error ends the process with one line.

  Args:
    argv: command line, the program's name included.
    check: function called after parsing, which raises ValueError for invalid values of flags.
  """
  argv = before_jax.resolve_config_flags(argv)
  values = flags.FlagValues()
  flags.DEFINE_string("config", None, "", flag_values=values)
  try:
    values(argv, known_only=True)
    if values.config is not None:
      _check_keys(argv, read_config_file(values.config))
    try:
      rest = flags.FLAGS(argv)
    except SystemExit:  # After --help or --helpfull, absl's exit code is 1.
      sys.exit()
    if rest[1:]:
      raise ValueError(f"{rest[1]!r} is no flag: write --name=value")
    if not flags.FLAGS["config"].value:
      names = ", ".join(before_jax.config_names())
      raise ValueError(f"--config must be given: {names}, or the path of a file")
    check()
    return rest
  except (AttributeError, KeyError, OSError, TypeError, ValueError, flags.Error) as error:
    refuse(ValueError(_flag_error(error)))


def _check_keys(argv: list[str], values: dict[str, Any]) -> None:
  """Raises ValueError for a flag --config.KEY with an unknown key.

  values: the configuration of the file.
  """
  keys = [re.match(r"--?config\.([\w.]*)(=|$)", argument) for argument in argv]
  if isinstance(values.get("objective"), Mapping):
    values = values | dict(objective=_with_user_options(argv, values["objective"]))
  for key in [match[1] for match in keys if match]:
    section, path = values, ""
    for part in key.split("."):
      if not isinstance(section, Mapping):
        raise ValueError(f"--config.{key}: {path[:-1]} is no section")
      # A section of kind dict takes any key.
      if part not in section and kind_of(path[:-1]) is not dict:
        raise ValueError(unknown_key_message(path, key.removeprefix(path), section))
      section, path = section.get(part), f"{path}{part}."


def _with_user_options(argv: list[str], section: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `objective` with options of a user's own loss and estimator.

  The value of an option is None if the file does not set it.
  """
  names = {}
  for argument, following in zip(argv, [*argv[1:], ""]):
    if match := re.fullmatch(r"--?config\.objective\.(name|advantage)(?:=(.*))?", argument):
      names[match[1]] = following if match[2] is None else match[2]
  options = ranges.kinds(section_kind(fill_unset({**section, **names})))
  return dict.fromkeys(options) | section


def _flag_error(error: Exception) -> str:
  """Returns the message of a flag's error, with its key's valid values."""
  cause = error.__context__
  key = re.match(r"flag --config\.([\w.]+)=", str(error))
  if key and cause and (kind := kind_of(key[1])):
    valid = ranges.describe(kind).removesuffix(", or None")  # No flag sets a key to None.
    return f"{str(error)[5:].removesuffix(f': {cause}')} must be {valid}"
  while isinstance(error, BaseException) and error.args:
    error = error.args[0]  # ml_collections wraps its hint in two exceptions.
  if str(error).startswith("Unknown command line flag"):
    name = re.findall("'(.*?)'", str(error))[0]
    keys = [f"--config.{key}" for key in reading.suggest("", name, ranges.kinds(RunConfig))]
    hint = f"did you mean {' or '.join(keys)}?" if keys else "keys are set with --config.KEY=VALUE"
    return f"{str(error).removesuffix('.')}; {hint}"
  return str(error)
