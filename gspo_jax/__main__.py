"""Command line: python -m gspo_jax is python -m gspo_jax.main."""

from gspo_jax.cli import before_jax

if __name__ == "__main__":
  before_jax.console()
