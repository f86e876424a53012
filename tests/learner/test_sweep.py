"""A sweep's next condition compiles nothing: what it varies are arguments of the programs."""

import dataclasses

import jax
import pytest
from learner.test_optimizer import CONFIG
from support.small_models import SHALLOW
from support.small_updates import ALL_TERMS, learner

from configs import tiny
from gspo_jax import train
from gspo_jax.inputs import read_inputs
from gspo_jax.learner import optimizer
from gspo_jax.learner.step import make_rl_step
from gspo_jax.run import open_run
from gspo_jax.settings.objective import CorrectionConfig, ObjectiveConfig, fill_unset
from gspo_jax.settings.reading import from_dict

SMALL = dict(
  job="rl",
  tokenizer="bytes",
  model=dict(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
    moe_intermediate_size=16,
  ),
  mesh=dict(fsdp=1, expert=1),
  rl=dict(iterations=2, prompts=8, group_size=2, minibatches=1, microbatches=1),
  eval=dict(problems=2, every=100),
  sampling=dict(max_new_tokens=4),
)  # fmt: skip
OTHER = dict(
  seed=7,
  objective=dict(clip_low=0.01, clip_high=0.02, entropy_coef=0.2, load_balance_coef=0.1),
  rl_optimizer=dict(
    learning_rate=3e-5, warmup_steps=1, schedule="cosine", final_fraction=0.5, clip_norm=0.3
  ),
)


@pytest.fixture
def misses(tmp_path):
  """Counts misses of a new compilation cache."""
  events, names = [], ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
  before = {name: getattr(jax.config, name) for name in names}

  def listen(event, **_):
    if event.endswith("/cache_misses"):
      events.append(event)

  for name, value in zip(names, (str(tmp_path / "compiled"), 0.0)):
    jax.config.update(name, value)
  jax.experimental.compilation_cache.compilation_cache.reset_cache()
  jax.clear_caches()  # Programs of earlier tests would be missing in the new cache.
  jax.monitoring.register_event_listener(listen)
  yield events
  jax.monitoring.unregister_event_listener(listen)
  for name, value in before.items():
    jax.config.update(name, value)
  jax.experimental.compilation_cache.compilation_cache.reset_cache()


def condition(workdir, *changes):
  values = tiny.get_config()
  for change in (SMALL, dict(objective=dict(entropy_coef=0.1)), *changes):
    values.update(change)
  with open_run(read_inputs(from_dict(values.to_dict()), workdir)) as run:
    train.train(run, run.initial_params)


@pytest.mark.long
def test_second_condition_of_a_sweep_compiles_nothing(tmp_path, misses):
  condition(tmp_path / "first")
  assert misses
  misses.clear()
  jax.clear_caches()  # Like a new process.
  condition(tmp_path / "second", OTHER)
  assert not misses


def test_hyperparameters_do_not_recompile():
  wider = dataclasses.replace(ALL_TERMS, clip_low=0.3, clip_high=0.5, kl_coef=2.0, entropy_coef=0.5)
  first, second = (
    make_rl_step(learner(SHALLOW), o, optimizer.make(CONFIG, 9)) for o in (ALL_TERMS, wider)
  )
  assert first.function is second.function
  assert first.hyperparameters != second.hyperparameters


def test_hyperparameters_apply_to_any_configuration_of_equal_static_part():
  base = dict(
    name="gspo", advantage="std", old_logp="recompute", load_balance_coef=0.0, replay="none",
    volatility=False, off_policy_threshold=0.5,
  )  # fmt: skip
  filled = fill_unset(base | dict(clip_low=0.1, dual_clip=3.0))
  config = ObjectiveConfig(**filled, correction=CorrectionConfig("masked", low=0.2, high=3.0))
  assert config.hyperparameters() == dict(
    clip_low=0.1, clip_high=4e-4, dual_clip=3.0, low=0.2, high=3.0, off_policy_threshold=0.5,
    clip_range=4e-4,
  )  # fmt: skip
  wider = dataclasses.replace(
    config, clip_high=0.2, correction=CorrectionConfig("masked", low=0.1, high=9.0)
  )
  assert config.static == wider.static == config.static.static
