"""Further rewards and costs: what they measure, their advantages, multipliers that hold a limit."""

import numpy as np
import pytest
from support import rollouts
from support.configs import config_of, reward_config
from support.rollouts import dumped, iterate

from configs import common, tiny_constrained
from gspo_jax import objectives as O
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.rewards.signals import Signals, check_signals, open_signals
from gspo_jax.rollouts.groups import Group, filled, trajectories_of
from gspo_jax.rollouts.multipliers import Constraints, Multiplier
from gspo_jax.sampling.trajectory import recorded_turn
from gspo_jax.settings.rewards import ConstraintConfig, CostSignal, RewardSignal
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts

P, G = 5, 4


def section(rewards=(), costs=(), reward_weight=1.0):
  """A ConstraintConfig of these entries, {name: changes}."""
  return ConstraintConfig(
    reward_weight,
    {n: RewardSignal(**common.extra_reward(**entry)) for n, entry in dict(rewards).items()},
    {n: CostSignal(**common.cost(**entry)) for n, entry in dict(costs).items()},
  )


LENGTH = dict(signal="length", bound="at_most", limit=6.0)


def cost(name="length", bound="at_most", **changes):
  """Keys of a cost in a configuration."""
  keys = dict(bound=bound) | changes
  return {f"constraints__costs__{name}__{key}": value for key, value in keys.items()}


def group(rewards, lengths, unknown=(), prompt="1+1="):
  """A scored group; of response g, as many tokens as are said."""
  tokens = [np.full(n, 5, np.int32) for n in lengths]
  trajectories = [recorded_turn((1, 2), g, ids, True, "p") for g, ids in enumerate(tokens)]
  new_group = Group(Prompt("p", prompt, "2", (1, 2)), trajectories, ["x" * n for n in lengths])
  new_group.reward_G = np.array(rewards, np.float32)
  new_group.correct_G = new_group.reward_G
  new_group.unknown = dict.fromkeys(unknown, "crash")
  return new_group


def judged(config, groups, scorers=None):
  measure(config, groups, scorers)
  return Constraints(config)


def measure(config, groups, scorers=None):
  """Gives scored groups their signals, as the verdicts on them do."""
  signals, trajectories = Signals(config, reward_config(), scorers or {}), trajectories_of(groups)
  texts = [text for group in groups for text in group.responses]
  prompts = [group.prompt for group in groups for _ in group.trajectories]
  measured, unknown = hosts.run_on_first_host(lambda: signals(texts, *shown(trajectories), prompts))
  start = 0
  for group in groups:
    size = len(group.trajectories)
    group.signals = {name: value_B[start : start + size] for name, value_B in measured.items()}
    group.unknown = {
      g: unknown[start + g] for g in range(size) if start + g in unknown
    } | group.unknown
    start += size


def shown(trajectories):
  """Tokens of responses, and if each ended by itself."""
  return [trajectory.tokens for trajectory in trajectories], [
    trajectory.stopped for trajectory in trajectories
  ]


def random_groups(seed=0, unknown=True):
  rng = np.random.default_rng(seed)
  return [
    group(
      rng.integers(0, 2, G),
      rng.integers(1, 12, G),
      unknown=np.flatnonzero(rng.random(G) < 0.2) if unknown else (),
    )
    for _ in range(P)
  ]


def z(value_G, known_G):
  """Standardised by hand."""
  out, some = np.zeros(len(value_G)), value_G[known_G]
  if len(some) > 1 and some.std() > 0:
    out[known_G] = (some - some.mean()) / some.std(ddof=1)
  return out


def test_groups_with_padding_have_the_advantages_of_those_without():
  config = section(costs=dict(long=LENGTH | dict(initial=0.7)))
  groups = random_groups()
  judge = judged(config, groups)
  padded = [filled(group, G + 3) for group in groups]
  expected, row = judge.advantages(groups)
  result, same = judged(config, groups).advantages(padded)
  np.testing.assert_allclose(result[:, :G], expected, atol=1e-6)
  assert not result[:, G:].any() and same == pytest.approx(row)


def test_a_checkpoint_keeps_to_the_bounds_of_now():
  config = section(costs=dict(long=LENGTH | dict(initial=3.0, most=5.0)))
  saved = judged(config, random_groups()).get_state()
  lower = judged(section(costs=dict(long=LENGTH | dict(most=2.0))), random_groups())
  lower.set_state(saved)
  assert lower.multipliers["long"] == Multiplier(2.0, 2.0)


def test_advantages_are_standardised_one_by_one_and_combined():
  config = section(
    rewards=dict(short=dict(signal="length", weight=-0.5)),
    costs=dict(
      long=LENGTH | dict(initial=0.7), some=dict(signal="length", bound="at_least", initial=0.2)
    ),
    reward_weight=2.0,
  )
  groups = random_groups()
  result, row = judged(config, groups).advantages(groups)
  assert any(group.unknown for group in groups)
  lengths = [np.array([t.length for t in group.trajectories], float) for group in groups]
  for group, length_G, advantage_G in zip(groups, lengths, result, strict=True):
    length_values = z(length_G, group.known_G)
    expected = 2 * z(group.reward_G, group.known_G) + (-0.5 - 0.7 + 0.2) * length_values
    np.testing.assert_allclose(advantage_G, expected, atol=1e-5)
    assert (advantage_G[~group.known_G] == 0).all()
  valid = np.concatenate([group.known_G for group in groups])
  length = np.concatenate(lengths)[valid]
  assert row["constraint/long/cost"] == pytest.approx(length.mean())
  assert row["constraint/short/reward"] == pytest.approx(length.mean())
  assert row["constraint/long/violation"] == pytest.approx(length.mean() - 6)
  assert row["constraint/some/violation"] == pytest.approx(0 - length.mean())
  assert row["constraint/long/multiplier"] == 0.7 and row["constraint/long/limit"] == 6
  by_group = [length_G[group.known_G] for group, length_G in zip(groups, lengths)]
  squares = sum(((some - some.mean()) ** 2).sum() for some in by_group if len(some))
  spread = np.sqrt(squares / sum(max(len(some) - 1, 0) for some in by_group))
  assert row["constraint/long/spread"] == pytest.approx(spread, rel=1e-6)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_unit_of_a_reward_does_not_matter(scale):
  config = section(costs=dict(long=LENGTH | dict(initial=1.0)))
  out = []
  for factor in (1.0, scale):
    groups = random_groups()
    for group in groups:
      group.reward_G = group.reward_G * np.float32(factor)
    out.append(judged(config, groups).advantages(groups)[0])
  np.testing.assert_allclose(*out, atol=2e-3)
  assert np.abs(out[0]).max() > 1


def test_a_multiplier_of_0_leaves_the_rewards_advantage():
  groups = random_groups()
  result, _ = judged(section(costs=dict(long=LENGTH)), groups).advantages(groups)
  reward_PG = np.stack([group.reward_G for group in groups])
  valid_PG = np.stack([group.known_G for group in groups])
  np.testing.assert_allclose(result, O.group_advantages(reward_PG, valid_PG=valid_PG), atol=1e-6)


def test_multipliers_stay_within_their_bounds():
  rng = np.random.default_rng(0)
  for _ in range(50):
    rate, gain, most = rng.exponential([0.5, 3, 5])
    cost = section(costs=dict(a=LENGTH | dict(rate=rate, gain=gain, most=most))).costs["a"]
    multiplier = Multiplier(0.0, 0.0)
    for violation in rng.standard_cauchy(200) * 10:
      before = multiplier.sum
      multiplier.update(cost, violation)
      assert 0 <= multiplier.value <= most and 0 <= multiplier.sum <= most
      assert abs(multiplier.sum - before) <= rate + 1e-12


def test_a_multiplier_falls_to_0_while_its_cost_keeps_to_the_limit():
  length = 6
  for changes in dict(bound="at_most", limit=6.5), dict(bound="at_least", limit=5.5):
    config = section(costs=dict(a=LENGTH | changes | dict(initial=1.0, gain=0.5)))
    groups = [group([0, 1, 0, 1], [length - 1, length, length, length + 1]) for _ in range(3)]
    verdicts, values = judged(config, groups), []
    for _ in range(30):
      values.append(verdicts.advantages(groups)[1]["constraint/a/multiplier"])
    assert values[0] == 1 and values[-1] == 0 and values == sorted(values, reverse=True)


def test_a_multiplier_grows_as_the_equation_says():
  config = section(costs=dict(a=LENGTH | dict(rate=0.25, gain=2.0, limit=5.5)))
  groups = [group([0, 1], [5, 7]), group([0, 1], [5, 7])]  # σ = √2, mean 6
  verdicts = judged(config, groups)
  verdicts.advantages(groups)
  v = 0.5 / np.sqrt(2)
  assert verdicts.multipliers["a"].sum == pytest.approx(0.25 * v)
  assert verdicts.multipliers["a"].value == pytest.approx(2.25 * v)
  verdicts.advantages(groups)
  assert verdicts.multipliers["a"].value == pytest.approx(2.5 * v)
  far = [group([0, 1], [20, 20])]  # no spread at all: as much as it may move
  measure(config, far)
  verdicts.advantages(far)
  assert verdicts.multipliers["a"].sum == pytest.approx(0.5 * v + 0.25)


def held(gain, steps=150, tail=30):
  """Distance of the mean cost from the limit at the end, and its swing in standard deviations.

  The policy's mean cost moves with its advantage, and rises without one.

  The policy's mean cost moves with its advantage, and rises without one.
  """
  cost = section(costs=dict(a=LENGTH | dict(rate=0.1, gain=gain))).costs["a"]
  multiplier, off, observed = Multiplier(0.0, 0.0), 0.0, []
  for _ in range(steps):
    off = min(max(off + 0.2 * (0.6 - multiplier.value), -2.0), 2.0)
    multiplier.update(cost, off)
    observed.append(off)
  return abs(np.mean(observed[-tail:])), np.ptp(observed[-tail:])


def test_the_gain_ends_the_swinging_of_dual_ascent():
  assert held(gain=2.0)[0] < 0.01 and held(gain=2.0)[1] < 0.01
  assert held(gain=0.0)[1] > 0.5


class Judge:
  """A verifier that says how many x there are, and nothing of responses of five."""

  def __call__(self, responses, prompts, lengths=None, finished=None):
    from gspo_jax.rewards import Scores

    count = np.array([len(text) / 100 for text in responses], np.float32)
    unknown = {i: "crash: five" for i, text in enumerate(responses) if len(text) == 5}
    return Scores(count, {}, count * 0, unknown)


def test_every_signal_measures_what_it_says():
  names = "length truncated overlong format text token string".split()
  more = dict(text=dict(text="</think> 7"), token=dict(token=55))
  config = section(
    costs={n: dict(signal=n, bound="at_most") | more.get(n, {}) for n in names},
  )
  reward = reward_config(format="think", overlong_max=20, overlong_buffer=10)
  texts, tok = ["<think>a</think> 7", "<think>a", "7 then 77 and 777"], ByteTokenizer()
  trajectories = [
    recorded_turn((1,), g, np.array(tok.encode(text), np.int32), g != 1, "p")
    for g, text in enumerate(texts)
  ]
  prompts = [Prompt("p", "q", "7", (1,))] * 3
  with open_signals(config, reward) as signals:
    result, unknown = signals(texts, *shown(trajectories), prompts)
  lengths = [len(text) for text in texts]
  assert not unknown and result["length"].tolist() == lengths
  assert result["truncated"].tolist() == [0, 1, 0]
  np.testing.assert_allclose(result["overlong"], np.clip((np.array(lengths) - 10) / 10, 0, 1))
  assert result["format"].tolist() == [1, 0, 0]
  assert result["text"].tolist() == [1, 0, 0]
  assert result["token"].tolist() == [1, 0, 1], "55 is the byte of 7"
  assert result["string"].tolist() == [1, 0, 0] and set(result) == set(names)


def test_a_signal_may_be_a_function_of_the_users_own(tmp_path, monkeypatch):
  (tmp_path / "own_cost.py").write_text(
    "def share(response, record):\n"
    "  return response.count(record['answer']) / len(response)\n"
  )  # fmt: skip
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  config = section(costs=dict(a=dict(signal="own_cost:share", bound="at_most", limit=0.1)))
  check_signals(config)
  prompts, texts = [Prompt("p", "q", "7", (1,))] * 3, ["7", "47", "1234"]
  tokens = [recorded_turn((1,), g, np.zeros(1, np.int32), True, "p") for g in range(3)]
  with open_signals(config, reward_config()) as signals:
    result, unknown = signals([*texts[:2], ""], *shown(tokens), prompts)
    shares, none = signals(texts, *shown(tokens), prompts)
  assert shares["a"].tolist() == [1, 0.5, 0] and not none
  assert result["a"][:2].tolist() == [1, 0.5]
  assert list(unknown) == [2] and "ZeroDivisionError" in unknown[2], "that is no cost of 0"
  with pytest.raises(ValueError, match=r"constraints\.costs\.a\.signal='no_own:f' cannot be imp"):
    check_signals(section(costs=dict(a=dict(signal="no_own:f", bound="at_most"))))


def test_a_verifiers_signal_has_no_additions_and_no_noise():
  config = section(costs=dict(a=dict(signal="string", bound="at_most")))
  reward = reward_config(format="think", format_weight=3.0, false_negative=1.0)
  trajectory = recorded_turn((1,), 0, np.zeros(1, np.int32), True, "p")
  with open_signals(config, reward) as signals:
    result, _ = signals(["<think>a</think> 7"], *shown([trajectory]), [Prompt("p", "q", "7", (1,))])
  assert result["a"].tolist() == [1]


def test_what_a_verifier_failed_on_is_left_out_of_everything():
  config = section(costs=dict(a=dict(signal="string", bound="at_most", initial=1.0)))
  groups = [group([0, 1, 1, 0], [5, 7, 9, 3], unknown=[3])]
  verdicts = judged(config, groups, dict(string=Judge()))
  assert groups[0].unknown == {0: "string: crash: five", 3: "crash"}
  advantage_PG, row = verdicts.advantages(groups)
  assert row["constraint/a/cost"] == pytest.approx(0.08)
  assert advantage_PG[0][0] == advantage_PG[0][3] == 0
  np.testing.assert_allclose(advantage_PG[0][1:3], [np.sqrt(0.5), -np.sqrt(0.5)], atol=1e-3)


def test_the_first_hosts_word_counts(monkeypatch):
  """All hosts have the first host's measurements, and so the same multipliers."""
  output = []

  def told(value):
    output.append(value)
    return output[0]

  monkeypatch.setattr(hosts, "broadcast", told)
  config = section(costs=dict(a=LENGTH))
  states = []
  for lengths in ([5, 7], [2, 30]):
    groups = [group([0, 1], lengths)]
    verdicts = judged(config, groups)
    verdicts.advantages(groups)
    states.append((verdicts.get_state(), groups[0].signals["a"].tolist()))
  assert len(output) == 2 and states[0] == states[1] and states[0][1] == [5, 7]


LIMITED = cost(limit=6.0) | dict(extra_prompts=0)


@pytest.mark.parametrize(
  "extra", [0, pytest.param(3, marks=pytest.mark.long)], ids=["whole", "partial"]
)
def test_it_goes_on_from_a_checkpoint(extra):
  collecting = rollouts.collector(**LIMITED | dict(extra_prompts=extra))
  rollouts.goes_on(3, 3, collecting, **LIMITED | dict(extra_prompts=extra))
  assert collecting[0].position()()["multipliers"]["length"]["sum"] > 0


def test_a_dump_has_the_signals_of_what_there_is_a_verdict_on():
  (out,), _ = iterate(1, **LIMITED)
  out.groups[0].unknown = {1: "length: crash"}
  first, second, third, *_ = dumped(out)
  assert [x["signals"]["length"] for x in (first, second, third)] == [
    first["length"], None, third["length"],
  ]  # fmt: skip


def test_another_cost_begins_anew_and_others_go_on():
  config = section(costs=dict(a=LENGTH | dict(initial=0.5), b=LENGTH | dict(initial=0.25)))
  constraints = Constraints(config)
  constraints.set_state(dict(a=dict(sum=3.0, value=2.0), gone=dict(sum=1.0, value=1.0)))
  assert constraints.get_state() == dict(a=dict(sum=3.0, value=2.0), b=dict(sum=0.25, value=0.25))


def test_without_signals_a_collector_has_nothing_of_them():
  config = config_of(common.base)
  with open_signals(config.constraints, config.reward) as signals:
    assert signals is None
  assert not config.constraints.enabled and not config.constraints.verifiers


def test_a_fixed_weight_needs_no_limit():
  assert config_of(common.base, **cost(rate=0.0, gain=0.0, initial=0.5)).constraints.enabled


def test_two_signals_of_one_name_are_refused():
  with pytest.raises(ValueError, match=r"constraints\.rewards\.a and constraints\.costs\.a"):
    section(rewards=dict(a=dict(signal="length", weight=1.0)), costs=dict(a=LENGTH))
  with pytest.raises(ValueError, match=r"constraints\.costs\.a/b: the name"):
    section(costs={"a/b": LENGTH})


def test_an_entry_of_any_name_may_be_added():
  spec = common.base()
  spec.constraints.costs.shouting = common.cost(signal="text", text="!", bound="at_most")
  config = config_of(lambda: spec)
  assert list(config.constraints.signals) == ["shouting"]


def test_the_configuration_is_what_it_says():
  config = config_of(tiny_constrained.get_config)
  assert list(config.constraints.signals) == ["length"]
  assert config.constraints.costs["length"].limit == 5.5
  assert not config_of(tiny_constrained.get_config, **cost(bound="")).constraints.enabled
