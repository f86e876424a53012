"""Arguments of commands."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """Parser of a command's arguments, with errors of one line."""

  def error(self, message: str) -> NoReturn:
    """Ends the process with the error, without the usage."""
    self.exit(2, f"gspo_jax: {message}\n")
