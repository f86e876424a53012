"""Losses and estimators of the user's own: found, declared, tried, and refused."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest

from configs import tiny
from gspo_jax.cli import flags
from gspo_jax.inputs import objective
from gspo_jax.learner.objective import configured_loss
from gspo_jax.rollouts.advantages import advantages
from gspo_jax.runs import contents
from gspo_jax.settings.reading import from_dict

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "objectives.md"
(LOSS,) = re.findall(r"### A loss of your own\n.*?```python\n(.*?)```", PAGE.read_text(), re.S)
NAME = "own_losses:soft_clip_loss"
MORE = """

def returns_seven(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return 7


def returns_pair(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return logp_BT.sum(), {}


def returns_mean(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return O.Mean(logp_BT, "x"), None, mask_BT > 1


def clips_nothing(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return O.Mean(logp_BT.sum(), mask_BT.sum()), {}, None


def clips_two(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return O.Mean(logp_BT.sum(), mask_BT.sum()), {}, mask_BT[:, :2] > 1


def branches(logp_BT, old_logp_BT, advantage_B, mask_BT):
  return 1 if logp_BT.sum() > 0 else 0


def by_response(logp_BT, old_logp_BT, advantages, mask_BT):
  return O.Mean((logp_BT * advantages * mask_BT).sum(), mask_BT.sum()), {}, mask_BT > 1


def unmasked(logp_BT, old_logp_BT, advantage_BT, mask_BT):
  return O.Mean((logp_BT * advantage_BT).sum(), mask_BT.sum()), {}, mask_BT > 1


def plain_metric(logp_BT, old_logp_BT, advantage_BT, mask_BT):
  return O.Mean((logp_BT * mask_BT).sum(), mask_BT.sum()), {"x": logp_BT.sum()}, mask_BT > 1


def critic(logp_BT, old_logp_BT, advantage_BT, mask_BT, value_BT):
  pass


def with_reference(logp_BT, old_logp_BT, advantage_BT, mask_BT, ref_logp_BT):
  return O.Mean(((logp_BT - ref_logp_BT) * mask_BT).sum(), mask_BT.sum()), {}, mask_BT > 1


def centred(reward_PG, valid_PG, scale=1.0):
  return scale * (reward_PG - (reward_PG * valid_PG).sum() / valid_PG.sum())


def divides(reward_PG, valid_PG):
  return (reward_PG - reward_PG.mean(1, keepdims=True)) / reward_PG.std(1, keepdims=True)


def one_number(reward_PG, valid_PG):
  return reward_PG.sum()


def two_arrays(reward_PG, valid_PG):
  return reward_PG, valid_PG


def only_rewards(reward_PG):
  return reward_PG
"""


def line(name):
  """A pattern of the place of a function in the module."""
  lines = (LOSS + MORE).partition(f"def {name}(")[0].split("\n")
  return rf" \(own_losses\.py, line {len(lines)}\)"


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
  (tmp_path / "own_losses.py").write_text(LOSS + MORE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)


def configured(**keys):
  values = tiny.get_config().to_dict()
  values["objective"] |= keys
  config = from_dict(values)
  objective.check_objective(config)
  return config


def test_the_loss_of_the_page_is_computed_with_its_option():
  config = configured(name=NAME, width=0.3)
  assert config.objective.options() == {"width": 0.3}
  assert from_dict(dataclasses.asdict(config)) == config
  batch = objective._batch()
  logp_BT = batch.old_logp_BT + 0.1
  total, metrics, clipped_BT = jax.jit(
    lambda x_BT: configured_loss(config.objective, x_BT, x_BT, batch, 6)
  )(logp_BT)
  mask_BT, advantage_B = batch.mask_BT, batch.advantage_B
  bounded = 0.3 * np.tanh(np.expm1(0.1) / 0.3)
  expected = -(bounded * advantage_B[:, None] * mask_BT).sum() / mask_BT.sum()
  np.testing.assert_allclose(total.compute(), expected, rtol=1e-5)
  assert not clipped_BT.any() and metrics["ratio/outside"].compute() == 0


def test_an_argument_names_the_reference():
  assert configured(name="own_losses:with_reference").objective.needs_reference
  assert not configured(name=NAME).objective.needs_reference


def test_an_estimator_of_rewards():
  config = configured(name=NAME, advantage="own_losses:centred", scale=2.0)
  assert config.objective.options() == {"width": 0.2, "scale": 2.0}
  reward_PG, valid_PG = np.float32([[0, 1, 5]]), np.array([[True, True, False]])
  np.testing.assert_allclose(advantages(config.objective, reward_PG, valid_PG), [[-1, 1, 0]])
  assert config.estimator.name == "own_losses:centred"


@pytest.mark.parametrize(
  "keys, message",
  [
    (dict(name="own_losses:returns_seven"), f"returned 7, expected .Mean.*{line('returns_seven')}"),
    (
      dict(name="own_losses:returns_pair"),
      r"returned \(an array of shape \[\], \{\}\), expected .Mean",
    ),
    (
      dict(name="own_losses:returns_mean"),
      r"returned \(Mean\(an array of shape \[4, 6\], 'x'\), None, an .*, expected .Mean",
    ),
    (dict(name="own_losses:clips_nothing"), r"returned clipped_BT as None, expected bool \[B, T\]"),
    (
      dict(name="own_losses:clips_two"),
      f"clips_two'{line('clips_two')} returned clipped_BT of shape .4, 2., expected .4, 6.",
    ),
    (
      dict(name="own_losses:branches"),
      r"TracerBool.*\(own_losses.py, line \d+\); .* use jnp.where",
    ),
    (dict(name="own_losses:by_response"), r"advantage_B \[4\], since its third argument is not"),
    (dict(name="own_losses:unmasked"), "outside mask_BT"),
    (dict(name="own_losses:plain_metric"), "metric 'x' as an array"),
    (dict(name="own_losses:critic"), "value_BT is neither computed by the update"),
    (dict(name="own_losses:soft_clip_los"), "did you mean soft_clip_loss"),
    (dict(name="no_such_module:loss"), "No module named 'no_such_module'"),
    (dict(name=NAME, width="wide"), "objective.width='wide' must be a number"),
    (
      dict(name=NAME, widht=0.1),
      "objective.widht; did you mean objective.width",
    ),
    (dict(name=NAME, clip_low=0.1), "has no such option; it has width"),
    (dict(name="gspo_loss"), r"did you mean gspo\?$"),
    (dict(name="gspo", beta=0.1), r"it has clip_low, .*; did you mean kl_coef\?"),
    (dict(name="own_losses.soft_clip_loss"), r"did you mean own_losses:soft_clip_loss\?"),
    (dict(name="own_losses"), "for a function in own_losses.py write own_losses:FUNCTION"),
    (dict(advantage="own_losses.py"), "in own_losses.py write own_losses:FUNCTION"),
    (dict(name="./own_losses.py"), "in own_losses.py write own_losses:FUNCTION"),
    (dict(name=f"{pathlib.Path(__file__).parents[1]}/conftest.py"), "module:function[^;]*$"),
    (dict(name="own_loses:soft_clip_loss"), r"did you mean own_losses\?"),
    (dict(name=NAME, off_policy_threshold=0.1), "no argument weight"),
    (dict(advantage="own_losses:divides"), "not finite for a group of equal rewards"),
    (
      dict(advantage="own_losses:one_number"),
      rf"returned an array of shape \[\], expected .* \[P, G\] = .*{line('one_number')}",
    ),
    (
      dict(advantage="own_losses:two_arrays"),
      r"returned \(an array of shape \[3, 8\], an array of shape \[3, 8\]\), expected",
    ),
    (
      dict(advantage="own_losses:only_rewards"),
      rf"{line('only_rewards')} must be reward_PG and valid_PG.*; its arguments are reward_PG$",
    ),
  ],
)
def test_a_faulty_function_or_option_is_refused(keys, message):
  with pytest.raises(ValueError, match=message):
    configured(**keys)


def test_options_are_keys_of_the_command_line():
  values = tiny.get_config().to_dict()
  name = f"--config.objective.name={NAME}"
  arguments = "--config.data.template_arguments.enable_thinking=False"
  flags._check_keys([name, "--config.objective.width=0.3", arguments], values)
  with pytest.raises(ValueError, match=r"objective\.widht; did you mean objective\.width"):
    flags._check_keys([name, "--config.objective.widht=0.3"], values)
  with pytest.raises(ValueError, match=r"unknown config key objective\.width"):
    flags._check_keys(["--config.objective.width=0.3"], values)


def test_a_run_records_the_source(tmp_path):
  def described():
    (tmp_path / "edited_losses.py").write_text(source)
    config = configured(name="edited_losses:soft_clip_loss")
    return contents.describe(config, {}, {}, [0])["objective.name"]

  source = LOSS
  before = described()
  assert described() == before
  source = LOSS.replace("0.2", "0.3")
  assert described() != before
