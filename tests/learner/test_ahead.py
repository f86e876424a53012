"""What is compiled while the first responses are sampled is what the run then calls."""

import logging

import jax
import pytest
from support.command_line import SMALL
from support.configs import values_of

from configs import tiny, tiny_tools
from gspo_jax import train
from gspo_jax.run import open_run
from gspo_jax.settings.reading import from_dict

SMALL_VALUES = {
  key: int(text)
  for key, text in (flag.split("=") for flag in SMALL)
  if key.startswith(("model.", "rl.", "eval."))
}


@pytest.mark.slow  # of the usual kind of run, test_main.py says the same
@pytest.mark.parametrize(
  "get_config, changes",
  [
    (
      tiny.get_config,
      dict(objective__kl_coef=0.01, objective__old_logp="sampler", objective__replay="R3"),
    ),
    (
      tiny_tools.get_config,
      dict(objective__name="gspo_token", rl__packed=True, rl__microbatches=2),
    ),
    (  # another model: what the first one has compiled is still there
      tiny.get_config,
      dict(objective__name="ppo_clip", critic__name="head", model__num_layers=1),
    ),
  ],
  ids=["as sampled", "recomputed, of conversations", "with a critic"],
)
def test_nothing_is_compiled_twice(get_config, changes, tmp_path, caplog):
  mesh = dict(mesh__data=1, mesh__fsdp=2, mesh__expert=2, mesh__tensor=2)
  values = values_of(get_config, **(SMALL_VALUES | mesh | changes | dict(rl__iterations=1)))
  config = from_dict(values)
  with (
    open_run(config, tmp_path) as run,
    caplog.at_level(logging.WARNING),
    jax.log_compiles(),  # of this thread
  ):
    train.train(run, run.initial_params)
  compiled = [r.getMessage().split("with global")[0].strip() for r in caplog.records]
  compiled = [message for message in compiled if message.startswith("Compiling")]
  assert any("decode" in message for message in compiled)
  assert "Compiling jit(step)" not in compiled
  # Passes without gradient: only that of the reference policy is not compiled ahead.
  assert compiled.count("Compiling jit(whole)") == bool(config.objective.kl_coef)
