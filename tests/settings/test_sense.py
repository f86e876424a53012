"""Settings that cannot be meant are refused, and what can hardly be meant is told: every row of the
tables, by a setting of configs/tiny.py that has nothing else wrong with it."""

import dataclasses

import pytest
from support.configs import config_of

from configs import common, tiny
from gspo_jax.data.embedded import TASKS
from gspo_jax.settings import doubts, ranges, sense
from gspo_jax.settings.reading import default
from gspo_jax.settings.rewards import VERIFIERS

SERVED = dict(engine__name="server", engine__urls=("http://a:1",))
OVERLONG = dict(reward__overlong_weight=1.0)
LONG = dict(data__train="recurrence:train", data__eval="recurrence:heldout", job="rl")
CALCULATOR = dict(
  environment__name="calculator",
  data__train="calculator:train",
  data__eval="calculator:heldout",
  data__digits=2,
)

REFUSED = [
  LONG,
  LONG | dict(reward__name="string"),
  LONG | dict(environment__name="calculator"),
  dict(reward__name="recurrence"),
  dict(reward__name="code", reward__workers=1, job="rl"),
  dict(reward__false_positive=1.0),
  dict(reward__false_negative=1.0),
  dict(reward__false_positive=0.5, reward__false_negative=0.5),
  OVERLONG | dict(reward__overlong_max=20, reward__overlong_buffer=10),
  dict(objective__clip_low=0.0, objective__clip_high=0.0),
  dict(objective__name="grpo", objective__clip_low=0.0, objective__clip_high=0.0),
  dict(objective__dual_clip=1.0),
  dict(objective__off_policy_threshold=0.0),
  dict(objective__correction__name="truncated", objective__correction__cap=0.5),
  dict(objective__correction__name="masked", objective__correction__low=1.5),
  dict(
    objective__correction__name="masked",
    objective__correction__low=0.1,
    objective__correction__high=0.9,
  ),
  dict(objective__adaptive_clip__target=0.1, objective__adaptive_clip__span=1.0),
  dict(objective__kl="k1", objective__kl_coef=0.1),
  dict(objective__name="ppo_clip", critic__name="head", critic__discount=0.0),
  dict(
    weights="/a",
    objective__name="ppo_clip",
    distillation__teacher="/a",
    distillation__reward_weight=0.0,
  ),
  dict(rl_optimizer__learning_rate=1.0, rl_optimizer__weight_decay=1.0),
  dict(eval__temperature=0.0),
  dict(eval__top_k=1),
  dict(eval__top_p=0.001),
  dict(sampling__top_k=10, sampling__top_p=0.001),
  dict(sampling__stop_strings=("]", "]")),
  dict(sampling__stop_strings=("",)),
  dict(lora__rank=200),
  dict(sampling__top_k=300),
  dict(eval__top_k=300),
  dict(reward__workers=4000),
  CALCULATOR | dict(environment__workers=4000),
  dict(rl__lag=40),
  dict(job="rl", schedule__refresh_every=41),
  SERVED | dict(engine__server__timeout_s=0.0),
  SERVED | dict(engine__server__publish_s=0.0),
  dict(alarms__entropy=6.0),
  dict(sft__target_loss=6.0),
  dict(rl__token_budget=100),
  SERVED | dict(engine__server__directory="/a", checkpoint__directory="/a"),
  dict(weights="/a/run", checkpoint__directory="/a/run/checkpoints"),
]

DOUBTED = [
  dict(job="rl"),
  dict(reward__name="string"),
  CALCULATOR | dict(environment__name=""),
  dict(reward__false_positive=0.5),
  dict(reward__format="think", reward__format_weight=2.0),
  dict(reward__overlong_weight=2.0, reward__overlong_buffer=4),
  OVERLONG | dict(reward__overlong_max=12, reward__overlong_buffer=4),
  OVERLONG | dict(reward__overlong_buffer=10),
  CALCULATOR | dict(environment__token_cost=1.0),
  CALCULATOR | dict(environment__max_turns=1),
  CALCULATOR | dict(environment__max_turns=100),
  dict(data__carry_errors=1.0),
  dict(objective__clip_low=0.0),
  dict(objective__clip_high=0.2),
  dict(objective__name="grpo", objective__clip_low=3e-4, objective__clip_high=4e-4),
  dict(objective__dual_clip=1.001),
  dict(objective__kl_coef=2.0),
  dict(objective__reward_kl_coef=0.1),
  dict(rl__max_age=1, rl__token_budget=1000),
  dict(objective__entropy_coef=1.0),
  dict(objective__load_balance_coef=1.0),
  dict(objective__adaptive_clip__target=0.6),
  dict(
    objective__name="segment", objective__segment_unit="tokens", objective__segment_tokens=10
  ),
  dict(objective__name="segment"),
  dict(weights="/a", objective__name="ppo_clip", distillation__teacher="/a"),
  dict(rl__epochs=20),
  dict(sampling__temperature=5.0),
  dict(sampling__temperature=0.05),
  dict(sampling__min_p=0.6, sampling__top_k=10),
  dict(eval__temperature=5.0),
  dict(eval__temperature=0.0, eval__samples=1),
  dict(rl_optimizer__warmup_steps=1000),
  dict(sft_optimizer__learning_rate=1.0),
  dict(rl_optimizer__learning_rate=1e-12),
  dict(rl_optimizer__b1=0.99, rl_optimizer__b2=0.9),
  dict(rl_optimizer__eps=0.1),
  dict(rl_optimizer__final_fraction=1.0),
  dict(sft__check_every=900),
  dict(schedule__new_tokens="1:6,50:10", job="rl"),
  dict(schedule__group_size_min=8, job="rl"),
  dict(data__query_set__drop_after=50),
  dict(data__query_set__drop_after=1, data__query_set__readmit_after=50),
  dict(data__query_set__extra_rounds=100),
  dict(checkpoint__keep_every=60),
  dict(checkpoint__best="eval/accuracy", checkpoint__every=30, eval__every=20),
  dict(checkpoint__best="loss"),
  dict(checkpoint__best="eval/accuracy", checkpoint__best_is="smallest"),
  dict(rl_optimizer__schedule_steps=8),
  dict(checkpoint__best="eval/accuracy", job="sft"),
  dict(checkpoint__grace_s=0.0),
  dict(eval__max_new_tokens=6),
  dict(alarms__ratio=1.0),
  dict(objective__off_policy_threshold=20.0),
  dict(objective__correction__name="truncated", objective__correction__cap=1e5),
  dict(objective__name="ppo_clip", distillation__teacher="/a", distillation__coef=1000.0),
  dict(alarms__window=50),
  dict(alarms__no_gradient=50),
  dict(alarms__reward=2.0),
  dict(alarms__unknown=1.0),
  dict(alarms__grad_norm=0.5),
  SERVED | dict(engine__server__tolerance=5.0),
  dict(rl__token_budget=5120),
  dict(rl__extra_prompts=100),
  dict(model__experts_per_token=8),
  dict(model__sliding_window=4096, model__sliding_window_pattern=2),
  dict(model__rope_theta=1.0),
  dict(model__rms_norm_eps=0.5),
  dict(model__final_logit_softcapping=1.0),
  dict(model__attn_logit_softcapping=0.5),
  dict(engine__cache="paged"),
  dict(engine__steps=100),
  dict(compute__logits_chunk=4096),
  dict(rollout_mesh__fsdp=1),
  dict(reward__time_limit_s=7200.0),
  dict(reward__name="math", reward__workers=1, reward__time_limit_s=0.05),
  dict(constraints__costs__length__bound="at_most", constraints__costs__length__limit=5.0)
  | dict(constraints__costs__length__rate=0.0, constraints__costs__length__gain=0.0),
  dict(eval__benchmarks__again__data="arithmetic:heldout"),
]  # fmt: skip

# Of 40 problems, 10 demonstrations and 4 held-out problems, on a machine with one processor.
HERE = doubts.Facts(
  prompts=40,
  demonstrations=10,
  recorded=20,
  problems={"data.eval": 4},
  answers={"data.train": 0.5},
  format_tokens=8,
  memory_mb=2000,
  has_tokenizer=True,
)
REFUSED_HERE = [
  (dict(reward__format="think"), dict(format_tokens=10)),
  ({}, dict(answers={"data.eval": 0.0})),
]
DOUBTED_HERE = [
  dict(eval__problems=5),
  dict(reward__workers=8),
  dict(reward__name="code", reward__workers=4, data__train="a", data__eval="b"),
  dict(distributed=True),
  dict(tokenizer="bytes"),
]


def configured(changes):
  def get_config():
    config = tiny.get_config()
    config.eval.benchmarks.again = common.benchmark(1)
    return config

  return config_of(get_config, **changes)


def firing(rows, *what):
  return {message for message, wrong in rows.items() if wrong(*what)}


def rows_of(table, config):
  return getattr(sense if table == "REFUSED" else doubts, table) | (
    getattr(sense if table == "REFUSED" else doubts, f"{table}_RL") if config.has_iterations else {}
  )


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_what_cannot_be_meant_is_refused(changes):
  with pytest.raises(ValueError) as error:
    configured(changes)
  assert any(key.replace("__", ".") in str(error.value) for key in changes)
  assert "{" not in str(error.value)


@pytest.mark.parametrize("changes", DOUBTED, ids=str)
def test_what_can_hardly_be_meant_is_told(changes):
  config = configured(changes)
  told = doubts.check(config, doubts.Facts())
  assert len(told) == len(firing(rows_of("DOUBTED", config), config)) > 0
  assert not any("{" in line for line in told)


def test_every_row_is_tried(monkeypatch):
  monkeypatch.setattr(sense, "check", lambda config: None)
  for table, cases in dict(REFUSED=REFUSED, DOUBTED=DOUBTED).items():
    configs, tried = [configured(changes) for changes in cases], set()
    for config in configs:
      tried |= firing(rows_of(table, config), config)
    everything = {message for config in configs for message in rows_of(table, config)}
    assert tried == everything


def test_every_task_has_its_judges():
  assert {*sense.JUDGES} == {*TASKS}
  assert all(judge in VERIFIERS for judges in sense.JUDGES.values() for judge in judges)


def test_what_the_data_and_the_machine_have_to_say():
  tried = set()
  for changes, found in REFUSED_HERE:
    config, here = configured(changes), dataclasses.replace(HERE, **found)
    tried |= firing(doubts.REFUSED_HERE, config, here)
    with pytest.raises(ValueError, match=r"sampling\.max_new_tokens=10"):
      doubts.check(config, here)
  assert tried == {*doubts.REFUSED_HERE}
  tried = set()
  for changes in DOUBTED_HERE:
    config = configured(changes)
    tried |= firing(doubts.DOUBTED_HERE, config, HERE)
    assert not any("{" in line for line in doubts.check(config, HERE))
  assert tried == {*doubts.DOUBTED_HERE}


def test_the_defaults_are_meant():
  config = configured({})
  assert not doubts.check(config, doubts.Facts())
  for table in "DOUBTED", "REFUSED":
    for message in rows_of(table, config):
      assert "{" not in ranges.told(default(), "", message, it="it")
