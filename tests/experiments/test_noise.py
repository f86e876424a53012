"""The engine that adds noise to log-probs, and E22's verdict on made-up results."""

import types

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("scipy")
pytest.importorskip("matplotlib")

from support import verdicts  # noqa: E402

from experiments.e22_noise_dial import conditions as e22  # noqa: E402
from experiments.engines import ChangedEngine  # noqa: E402
from experiments.noise import add_noise  # noqa: E402
from experiments.report import FAILS, HOLDS, OPEN, Results  # noqa: E402
from gspo_jax.sampling.requests import Request, Response  # noqa: E402

COUNT = 4000


def response(sample=0, prior=0, count=COUNT, **changes):
  request = Request(**(dict(prompt=(1, 2), max_new_tokens=COUNT, seed=3) | changes))
  request = Request(**(vars(request) | dict(prior=(5,) * prior)))
  tokens, zeros = np.full(count, 5, np.int32), np.zeros(count, np.float32)
  return Response(request, sample, tokens, zeros, zeros - 1, tokens, True, True, None)


def noisy(kind, *responses, scale=1e-2):
  engine = types.SimpleNamespace(step=lambda: list(responses), stop=lambda: [], usage="usage")
  wrapped = ChangedEngine(engine, lambda _, x: add_noise(x, kind, scale))
  assert wrapped.usage == "usage" and wrapped.stop() == []
  return wrapped.step()


def test_independent_noise_has_its_deviation_and_moves_a_mean_by_its_root():
  (out,) = noisy("independent", response())
  assert out.logp.dtype == np.float32 and abs(out.logp.mean()) < 4e-2 / COUNT**0.5
  assert out.logp.std() == pytest.approx(1e-2, rel=0.05)
  np.testing.assert_allclose(out.full_logp, out.logp - 1, atol=1e-6)
  assert abs(np.corrcoef(out.logp[1:], out.logp[:-1])[0, 1]) < 0.06


def test_constant_noise_is_one_number_for_a_response():
  outs = noisy("constant", *(response(sample=i, count=9) for i in range(400)))
  values = np.array([out.logp for out in outs])
  assert (values == values[:, :1]).all() and values[:, 0].std() == pytest.approx(1e-2, rel=0.1)


def test_students_noise_has_heavy_tails():
  (out,) = noisy("student", response())
  share = (np.abs(out.logp) > 4e-2).mean()
  assert share == pytest.approx(0.057, abs=0.015)  # 6e-5 of a normal distribution.


def test_noise_follows_seed_prompt_sample_and_position_alone():
  (whole,) = noisy("independent", response())
  (rest,) = noisy("independent", response(prior=100, count=COUNT - 100))
  np.testing.assert_array_equal(rest.logp, whole.logp[100:])
  for other in (response(sample=1), response(seed=4), response(prompt=(2, 1))):
    (out,) = noisy("independent", other)
    assert abs(np.corrcoef(out.logp, whole.logp)[0, 1]) < 0.06


@pytest.mark.parametrize(
  "gspo, weak, grpo, outcome",
  [
    (0.3, 0.0, 0.0, HOLDS),
    (0.0, 0.0, 0.0, FAILS),
    pytest.param(0.3, 0.1, 0.0, FAILS, marks=pytest.mark.long),
    pytest.param(0.3, 0.0, 0.3, FAILS, marks=pytest.mark.long),
  ],
)
def test_e22_compares_the_losses_at_the_strongest_noise(gspo, weak, grpo, outcome):
  lost = {("gspo", "0.03"): gspo, ("gspo", "0.001"): weak, ("grpo", "0.03"): grpo}

  def value(c, seed):
    loss, _, dose = c.name.split("_")[:3]
    noise = 0.01 * np.random.default_rng([seed, *c.name.encode()]).standard_normal()
    reward = 0.5 - lost.get((loss, dose), 0.0) + noise
    return {"reward/mean": reward, "eval/start": 0.3, "eval/final": 0.5}

  result = verdicts.report("e22", value)
  assert result.verdict.outcome == outcome, result.verdict
  assert e22.near(8) == (0, 1e-3, 3e-3) and e22.near(32) == (0, 3e-3, 1e-2)


def test_e22_claims_nothing_without_runs():
  none = pd.DataFrame(columns=["condition", "seed", "stage", "status"])
  assert e22.report(Results(none, none)).verdict.outcome == OPEN
