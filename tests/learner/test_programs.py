"""Options of the compiler: for TPU alone, and for every program of the learner."""

import dataclasses

import jax
import pytest
from support.small_models import SMALLER_DENSE, initial
from support.small_updates import GSPO, SGD, learner, make_batch

from gspo_jax import sharding
from gspo_jax.learner import passes, programs, step
from gspo_jax.learner.state import new_state
from gspo_jax.settings.model import REFERENCE

SPARSECORE = dataclasses.replace(REFERENCE, xla="sparsecore")


def test_other_platforms_have_no_compiler_options(monkeypatch):
  assert programs.options(SPARSECORE) == {}
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  assert programs.options(SPARSECORE) == programs.OPTIONS["sparsecore"] != {}
  assert programs.options(REFERENCE) == {}


def test_every_program_has_the_compiler_options(monkeypatch):
  monkeypatch.setattr(programs, "options", lambda compute: {f"xla_{compute.xla}": True})
  trainer = learner(SMALLER_DENSE, compute=SPARSECORE)
  state, batch = new_state(initial(SMALLER_DENSE), SGD), make_batch(SMALLER_DENSE)
  cases = (
    (step.make_rl_step(trainer, GSPO, SGD), (state, batch)),
    (step.make_sft_step(trainer, SGD), (state, batch)),
    (step.make_sft_loss(trainer), (state.params, batch)),
    (passes.make_score(trainer), (state.params, batch.inputs)),
    (passes.make_old_policy(trainer, GSPO), (state.params, batch.inputs)),
  )
  for program, arguments in cases:
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_sparsecore"):
      program(*arguments)
