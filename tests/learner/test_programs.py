"""What is compiled while the first responses are sampled is what the run then calls."""

import logging

import jax
import pytest
from support import command_line

from configs import tiny, tiny_tools
from gspo_jax import config as configuration
from gspo_jax import train
from gspo_jax.run import open_context

SMALL = [flag.split("=") for flag in command_line.SMALL if not flag.startswith(("sft.", "sft_"))]


@pytest.mark.slow  # of the usual kind of run, test_main.py says the same
@pytest.mark.parametrize(
  "config, changes",
  [
    (tiny, {"objective.kl_coef": 0.01, "objective.old_logp": "sampler", "objective.replay": "R3"}),
    (tiny_tools, {"objective.name": "gspo_token", "rl.packed": True, "rl.microbatches": 2}),
  ],
  ids=["as sampled", "recomputed, of conversations"],
)
def test_nothing_is_compiled_twice(config, changes, tmp_path, caplog):
  values = config.get_config()
  for key, value in [*SMALL, *changes.items()]:
    owner = values
    *path, name = key.split(".")
    for part in path:
      owner = owner[part]
    owner[name] = type(owner[name])(value) if isinstance(value, str) else value
  values.rl.iterations = 1
  values.mesh.update(data=1, fsdp=2, expert=2, tensor=2)
  with (
    open_context(configuration.from_dict(values.to_dict()), tmp_path) as context,
    caplog.at_level(logging.WARNING),
    jax.log_compiles(),  # of this thread
  ):
    train.run(context, context.initial_params)
  compiled = [r.getMessage().split("with global")[0].strip() for r in caplog.records]
  compiled = [message for message in compiled if message.startswith("Compiling")]
  assert "Compiling jit(decode)" in compiled
  assert "Compiling jit(step)" not in compiled
  if values.objective.old_logp == "recompute":
    assert compiled.count("Compiling jit(whole)") == values.objective.volatility  # for the report
