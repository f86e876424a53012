"""Arguments of commands."""

import argparse
from pathlib import Path
from typing import NoReturn


def local_path(name: str) -> Path:
  """Reads a local path. Raises ArgumentTypeError for an address such as gs://..."""
  if "://" in name:
    raise argparse.ArgumentTypeError(f"{name} is not local; copy it from or to a local directory")
  return Path(name)


class Parser(argparse.ArgumentParser):
  """Parser of a command's arguments, with errors of one line."""

  def error(self, message: str) -> NoReturn:
    """Ends the process with the error, without the usage."""
    self.exit(2, f"gspo_jax: {message}\n")
