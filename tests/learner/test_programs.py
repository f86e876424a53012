"""Options of the compiler: for TPU alone, and for every program of the learner."""

import dataclasses

import jax
import pytest
from support.small_models import SMALLER_MOE, initial
from support.small_updates import GSPO, SGD, learner, make_batch

from gspo_jax import sharding
from gspo_jax.learner import passes, programs, step
from gspo_jax.learner.state import new_state
from gspo_jax.settings.model import REFERENCE

SPARSECORE = dataclasses.replace(REFERENCE, xla="sparsecore")


def test_other_platforms_are_told_nothing(monkeypatch):
  assert programs.options(SPARSECORE) == {}
  monkeypatch.setattr(sharding, "platform", lambda: "tpu")
  assert programs.options(SPARSECORE) == programs.OPTIONS["sparsecore"] != {}
  assert programs.options(REFERENCE) == {}


def test_every_program_is_compiled_with_them(monkeypatch):
  monkeypatch.setattr(programs, "options", lambda compute: {f"xla_{compute.xla}": True})
  how = learner(SMALLER_MOE, compute=SPARSECORE)
  state, batch = new_state(initial(SMALLER_MOE), SGD), make_batch(SMALLER_MOE)
  made = (
    (step.make_rl_step(how, GSPO, SGD), (state, batch)),
    (step.make_sft_step(how, SGD), (state, batch)),
    (step.make_sft_loss(how), (state.params, batch)),
    (passes.make_score(how), (state.params, batch.inputs)),
    (passes.make_old_policy(how, GSPO), (state.params, batch.inputs)),
  )
  for program, arguments in made:
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_sparsecore"):
      program(*arguments)
