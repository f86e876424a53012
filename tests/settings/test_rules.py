"""Rules of configurations: each is broken by a case here, and by no file of configs/."""

import collections
import dataclasses
import importlib
import itertools
import re
import typing
from pathlib import Path
from typing import Literal

import pytest
from support.configs import VARIANTS, values_of

from configs import common, tiny, tiny_offline, tiny_ppo, tiny_tools
from gspo_jax.data.embedded import TASKS
from gspo_jax.settings import page, ranges, rules
from gspo_jax.settings.reading import default, parse
from gspo_jax.settings.rewards import VERIFIERS

BASE, TINY, PPO, TOOLS = common.base, tiny.get_config, tiny_ppo.get_config, tiny_tools.get_config
OFFLINE = tiny_offline.get_config

RL = dict(job="rl")
SERVED = dict(engine__name="server", engine__urls=("http://a:1",))
OVERLONG = dict(reward__overlong_weight=1.0)
LONG = RL | dict(data__train="recurrence:train", data__eval="recurrence:heldout")
CALCULATOR = dict(
  environment__name="calculator",
  data__train="calculator:train",
  data__eval="calculator:heldout",
  data__digits=2,
)
LINES = dict(reward__name="recurrence", reward__per_line=True, objective__name="gspo_token")
RFT = dict(objective__name="rft", objective__advantage="reward")
RECORDED = dict(
  job="offline", objective__old_logp="recompute", offline__data="x", objective__name="rft"
)
TRUNCATED = dict(sampling__top_k=40, sampling__top_p=0.6)


def cost(name="length", bound="at_most", **changes):
  entry = dict(bound=bound) | changes
  return {f"constraints__costs__{name}__{key}": value for key, value in entry.items()}


# Configuration, changes, and the message of the first rule that they break.
REFUSED = [
  # Sizes and lengths.
  (TINY, dict(rl__prompts=6), r"rl\.prompts=6 must be a multiple of rl\.minibatches=4"),
  (TINY, dict(rl__microbatches=7), r"= 512 rows must be a multiple of .* rl\.microbatches=7"),
  (TINY, dict(sft__microbatches=7), r"sft\.batch=.* must be a multiple of sft\.microbatches=7"),
  (BASE, dict(eval__max_new_tokens=2041), r"eval\.max_new_tokens=2049 exceed.*embeddings=2048"),
  (BASE, dict(job="eval", sampling__max_new_tokens=2041), r"\+ eval\.max_new_tokens=2049 exceed"),
  (BASE, dict(sft__max_tokens=2049), r"sft\.max_tokens=2049 exceed.*embeddings=2048"),
  (TINY, dict(sampling__top_k=300), r"sampling\.top_k=300, .* more than model\.vocab_size=264"),
  (
    TINY,
    dict(eval__top_k=300),
    r"eval\.top_k=300: one of these is more than model\.vocab_size=264",
  ),
  (TINY, dict(rl__packed=True), r"rl\.packed=True.*rl\.microbatches"),
  # Jobs.
  (BASE, dict(job="sft+rl"), r"sft\.steps=0: job='sft\+rl'.*set job=rl"),
  (
    TOOLS,
    dict(distributed=True, environment__workers=2),
    r"environment\.workers=2, distributed=True: hosts",
  ),
  (
    BASE,
    dict(rollout_mesh__fsdp=1, distributed=True),
    r"rollout_mesh\.fsdp=1, distributed=True.*set rollout_mesh\.fsdp to 0",
  ),
  (TINY, SERVED | dict(rollout_mesh__fsdp=1), r"rollout_mesh\.fsdp=1, .*engine\.name='server'"),
  (BASE, dict(profile__iteration=301), r"profile\.iteration=301 is no iteration: .* has 300"),
  (
    BASE,
    dict(job="eval", profile__iteration=1),
    r"iteration=1 has no effect: job='eval' has no iterations",
  ),
  (BASE, dict(profile__steps=3), r"profile\.steps=3 has no effect, since profile\.iteration=0"),
  (
    BASE,
    dict(profile__iteration=1, profile__steps=3),
    r"profile\.steps=3 has no effect, since profile\.stage",
  ),
  # Verifiers and data.
  (TINY, LONG, r"data\.eval: .*\('recurrence:heldout', 'arithmetic'\)"),
  (
    TINY,
    LONG | dict(reward__name="string"),
    r"data\.eval: .*, 'string'\)",
  ),
  (
    TINY,
    LONG | dict(environment__name="calculator"),
    r"data\.eval: .*, 'calculator'\) every response",
  ),
  (TINY, dict(reward__name="recurrence"), r"data\.eval: .*'arithmetic:heldout', 'recurrence'\)"),
  (TINY, RL | dict(reward__name="code", reward__workers=1), r"data\.eval: .*heldout', 'code'\)"),
  (BASE, dict(data__checks=0.5), r"data\.checks=0\.5 is for demonstrations of calculator"),
  (
    BASE,
    dict(
      data__train="calculator:train",
      data__eval="calculator:heldout",
      data__digits=2,
      data__skipped_work=0.5,
    ),
    r"data\.skipped_work=0\.5 is for demonstrations of arithmetic",
  ),
  (TINY, dict(sampling__stop_strings=("",)), r"sampling\.stop_strings=\('',\): an empty text"),
  # Evaluations and checkpoints.
  (BASE, dict(checkpoint__best="eval/acuracy"), r"best='eval/acuracy'.*mean eval/accuracy\?"),
  (BASE, dict(checkpoint__best="eval/aime/pass@4"), r"best='eval/aime/pass@4' is no metric"),
  (TINY, dict(eval__temperature=0.0), r"eval\.temperature=0\.0.* greedy responses to a problem"),
  (TINY, dict(eval__top_k=1), r"eval\.top_k=1.* greedy responses to a problem"),
  (TINY, dict(eval__top_p=0.001), r"eval\.top_p=0\.001: all greedy responses to a problem"),
  (
    TINY,
    SERVED | dict(engine__server__directory="/a", checkpoint__directory="/a"),
    r"engine\.server\.directory='/a', checkpoint\.directory='/a'",
  ),
  (
    TINY,
    dict(weights="/a/run", checkpoint__directory="/a/run/checkpoints"),
    r"checkpoint\.directory='/a/run/checkpoints' lies in weights='/a/run'",
  ),
  (BASE, dict(checkpoint__best_is="smallest"), r"best_is='smallest' has no effect, since checkp"),
  # Objectives.
  (
    BASE,
    dict(objective__adaptive_clip__target=0.1, objective__old_logp="recompute", rl__minibatches=1),
    r"adaptive_clip\.target=0\.1.*: with one update",
  ),
  (BASE, dict(objective__kl="k2"), r"objective\.kl='k2' has no effect without objective\.kl_coef"),
  (
    OFFLINE,
    dict(objective__kl="k3_weighted", objective__kl_coef=0.1),
    r"objective\.kl='k3_weighted': with job='offline'.* set it to k2",
  ),
  (OFFLINE, dict(objective__advantage="best"), r"objective\.advantage='best', .*leave objective"),
  (OFFLINE, RFT | dict(objective__beta=None, objective__advantage="soft"), r"advantage='soft'"),
  (
    TINY,
    dict(objective__correction__name="truncated", objective__correction__cap=0.5)
    | dict(objective__old_logp="recompute"),
    r"objective\.correction\.cap=0\.5, .* exclude 1",
  ),
  (
    TINY,
    dict(objective__correction__name="masked", objective__correction__low=1.5)
    | dict(objective__old_logp="recompute"),
    r"objective\.correction\.low=1\.5, .* exclude 1",
  ),
  (
    TINY,
    dict(objective__correction__name="masked", objective__correction__high=0.9)
    | dict(objective__correction__low=0.1, objective__old_logp="recompute"),
    r"objective\.correction\.high=0\.9: .* exclude 1",
  ),
  (OFFLINE, dict(objective__name="gspo", objective__beta=None), r"objective\.name='gspo'.* rft"),
  (OFFLINE, dict(objective__old_logp="sampler"), r"objective\.old_logp='sampler'"),
  (OFFLINE, dict(objective__replay="R3"), r"objective\.replay='R3'"),
  (OFFLINE, dict(offline__fresh=0.001), r"offline\.fresh=0\.001 of rl\.prompts=.* rounded to none"),
  (OFFLINE, dict(offline__fresh=0.999), r"offline\.fresh=0\.999 of rl\.prompts=.* rounded to none"),
  # Schedules.
  (BASE, dict(schedule__new_tokens="1:6,2:25"), r"above sampling\.max_new_tokens=10: raise"),
  (
    BASE,
    OVERLONG | dict(schedule__new_tokens="1:6,2:10", reward__overlong_buffer=9),
    r"reward\.overlong_buffer=9 exceeds the lowest limit, 6",
  ),
  (BASE, dict(schedule__group_size_min=9), r"group_size_min=9: .* at most rl\.group_size=8"),
  (BASE, dict(schedule__group_size_min=1), r"schedule\.group_size_min=1: .*at least 2"),
  (
    BASE,
    dict(schedule__group_size_min=2, rl__extra_prompts=3),
    r"schedule\.group_size_min=2, rl\.extra_prompts=3",
  ),
  # Signals of constraints.
  (BASE, cost(signal="overlong"), r"length\.signal='overlong' needs a buffer: reward\.overlong_b"),
  (
    BASE,
    cost(signal="overlong") | dict(reward__overlong_buffer=4, schedule__new_tokens="1:4,5:10"),
    r"length\.signal='overlong' has a fixed buffer, and schedule\.new_tokens='1:4,5:10'",
  ),
  (BASE, cost(bound="at_least", signal="format"), r"length\.signal='format' needs reward\.format"),
  (
    BASE,
    cost() | dict(sampling__max_new_tokens=4),
    r"length\.limit=0\.0, .*at_most': .*signal='length' always satisfies",
  ),
  (BASE, cost(limit=4.0) | dict(sampling__max_new_tokens=4), r"length\.limit=4\.0, .*at_most'"),
  (BASE, cost("text", "at_least", text="x", limit=1.5), r"text\.limit=1\.5, .*bound='at_least'"),
  (BASE, cost("truncated", "at_least"), r"truncated\.limit=0\.0, .*bound='at_least'"),
  (BASE, cost(signal="token", token=264), r"costs\.length\.token=264 must be below model\.vocab"),
  (BASE, cost(limit=6.0) | RECORDED | dict(objective__advantage="std"), r"\(length\): job='offl"),
  (BASE, cost(limit=6.0) | dict(rl__mask_truncated=True), r"\(length\): rl\.mask_truncated=True"),
  (BASE, cost(limit=6.0) | dict(objective__name="dr_grpo"), r"\(length\), objective\.advantage="),
  (
    BASE,
    cost(limit=6.0) | dict(objective__advantage="leave_one_out"),
    r"constraints \(length\), objective\.advantage='leave_one_out'",
  ),
  (
    BASE,
    cost(limit=6.0)
    | dict(distillation__teacher="/t", distillation__reward_weight=0.0)
    | dict(objective__name="ppo_clip"),
    r"distillation\.reward_weight=0 leaves constraints and costs without effect",
  ),
  # Nothing to learn from.
  (
    PPO,
    dict(critic__warmup_iterations=40),
    r"warmup_iterations=40, .* rl\.iterations=40: all responses",
  ),
  (TINY, dict(rl__lag=40), r"rl\.lag=40, rl\.iterations=40: all responses"),
  (TINY, dict(sampling__temperature=0.0), r"sampling\.temperature=0\.0, .*greedy responses of a"),
  (TINY, dict(sampling__top_k=1), r"sampling\.top_k=1, .*greedy responses of a"),
  (TINY, dict(sampling__top_k=10, sampling__top_p=0.001), r"top_p=0\.001: greedy responses"),
  (TINY, TRUNCATED | dict(sampling__top_k=0), r"^sampling\.top_p=0\.6, .* sampling\.top_k=0: up"),
  (
    TINY,
    dict(sampling__min_p=0.1),
    r"min_p=0\.1, sampling\.top_k=0: updates .* set sampling\.top_k between 2 and 1024 too",
  ),
  (
    TINY,
    dict(sampling__top_k=1025, model__vocab_size=2048),
    r"top_k=1025: .* at most 1024 are recorded",
  ),
  (TINY, SERVED | TRUNCATED, r"sampling\.top_k=40, .*engine\.name='server' keeps no record"),
  (TINY, dict(reward__false_positive=1.0), r"false_positive=1\.0, .*to a sum below 1"),
  (
    TINY,
    dict(reward__false_positive=0.5, reward__false_negative=0.5),
    r"false_positive=0\.5, reward\.false_negative=0\.5: .*to a sum below 1",
  ),
  (
    TINY,
    OVERLONG | dict(reward__overlong_max=20, reward__overlong_buffer=10),
    r"overlong_max=20, reward\.overlong_buffer=10: no response of sampling\.max_new_tokens=10",
  ),
  (
    TINY,
    dict(objective__name="grpo", objective__clip_low=0.0, objective__clip_high=0.0),
    r"objective\.clip_low=0\.0, objective\.clip_high=0\.0: every ratio but 1",
  ),
  (
    TINY,
    dict(objective__kl="k1", objective__kl_coef=0.1),
    r"objective\.kl='k1', .*an expected value of 0",
  ),
  (BASE, dict(job="sft", sft__steps=1, lora__rank=2, lora__adapter="x"), r"adapter='x', job='sft'"),
  # Keys without effect.
  (BASE, RECORDED | dict(rl__lag=1), r"rl\.lag=1 has no effect.*job='offline'"),
  (BASE, dict(job="eval", rollout_mesh__fsdp=1), r"rollout_mesh\.fsdp=1 has no effect.*job='eval'"),
  (
    BASE,
    dict(rollout_mesh__data=4),
    r"mesh\.data=4 has no effect, since .*fsdp=0; set fsdp",
  ),
  (BASE, dict(reward__format="think"), r"format='think' has no effect, since .*format_weight=0\.0"),
  (OFFLINE, dict(data__query_set__drop_after=3), r"drop_after=3 has no effect"),
  (BASE, dict(offline__data="x"), r"offline\.data='x' has no effect, since job='rl'"),
  (BASE, RECORDED | dict(schedule__new_tokens="1:6"), r"'1:6'.*no effect with job='offline'"),
  (
    OFFLINE,
    dict(objective__volatility=True),
    r"objective\.volatility=True cannot be used with job",
  ),
  (OFFLINE, dict(objective__off_policy_threshold=1.0), r"off_policy_threshold=1\.0 cannot be used"),
  (
    OFFLINE,
    dict(objective__correction__name="truncated"),
    r"correction\.name='truncated' cannot be used with job='offline'",
  ),
  (OFFLINE, dict(objective__reward_kl_coef=0.1), r"reward_kl_coef=0\.1"),
  (OFFLINE, dict(environment__name="calculator"), r"environment\.name='calculator'"),
  (OFFLINE, dict(offline__fresh=0.5, rl__extra_prompts=2), r"rl\.extra_prompts=2 cannot be used"),
  (
    OFFLINE,
    RFT | dict(objective__beta=None, offline__fresh=0.5, data__query_set__extra_rounds=1),
    r"data\.query_set\.extra_rounds=1",
  ),
  (BASE, dict(rl__max_age=1), r"rl\.max_age=1 has no effect: responses are carried over only if"),
  (TOOLS, OVERLONG | dict(reward__overlong_buffer=4), r"overlong_weight=1\.0.*environment\.name"),
  (
    BASE,
    LINES | dict(environment__name="calculator", reward__workers=1),
    r"reward\.per_line=True has no effect, since environment",
  ),
  (BASE, dict(environment__max_turns=8), r"max_turns=8 has no effect.*environment\.name=''.*to 1"),
  (BASE, dict(environment__workers=2), r"workers=2 has no effect.*set it to 0"),
  (BASE, dict(environment__token_cost=0.1), r"environment\.token_cost=0\.1 has no effect"),
  (BASE, dict(environment__call_cost=0.1), r"environment\.call_cost=0\.1 has no effect"),
  (OFFLINE, dict(environment__call_cost=0.2), r"environment\.call_cost=0\.2 has no effect"),
  (TOOLS, dict(environment__charge="right"), r"environment\.charge='right' has no effect"),
  (
    PPO,
    dict(critic__name="model", critic__trunk_coef=0.5),
    r"trunk_coef=0\.5 has no effect, since "
    r"critic\.name='model'; set it to 0\.1",
  ),
  (BASE, dict(objective__clip_length=5.0), r"clip_length=5\.0 has no effect without objective\.cl"),
  (BASE, dict(objective__kl_groups="mixed"), r"kl_groups='mixed' has no effect without"),
  (BASE, RFT | dict(objective__off_policy_threshold=0.1), r"off_policy_threshold=0\.1 has no eff"),
  (
    BASE,
    dict(objective__advantage="reward", objective__off_policy_threshold=0.1),
    r"off_policy_threshold=0\.1 has no effect: Â < 0 is not trained on",
  ),
  (
    BASE,
    RFT | dict(objective__advantage="std", objective__off_policy_threshold=0.1),
    r"off_policy_threshold=0\.1 has no effect",
  ),
  (
    TOOLS,
    dict(objective__name="gspo", objective__advantage="turns"),
    r"objective\.advantage='turns' has no effect, since objective\.name='gspo' takes one",
  ),
  (
    BASE,
    dict(objective__replay="R3", model__num_experts=0, model__experts_per_token=0)
    | dict(model__moe_intermediate_size=0),
    r"objective\.replay='R3' has no effect, since the model has no experts",
  ),
  (
    TINY,
    dict(rl_optimizer__router_rate=0.0, lora__rank=4),
    r"rl_optimizer\.router_rate=0\.0 has no effect: no router is trained .*lora\.rank=4.*to 1",
  ),
  (
    PPO,
    dict(critic_optimizer__router_rate=0.0, critic__name="head"),
    r"critic_optimizer\.router_rate=0\.0 has no effect, since critic\.name='head', .*to 1",
  ),
  (
    BASE,
    dict(distillation__discount=0.5),
    r"distillation\.discount=0\.5 has no effect without a teacher",
  ),
]

CRITIC = dict(critic__name="model", objective__name="ppo_clip")
TEACHER = dict(distillation__teacher="/t", objective__name="ppo_clip")
COST = cost(limit=6.0)
TALK = dict(environment__name="calculator", environment__max_turns=4)
PRICE = dict(objective__reward_kl_coef=0.1)
OBJECTIVE = dict(objective__old_logp="recompute")
SEGMENT = dict(objective__name="segment")
TUNED = "objective__tuned"
STEPS = r"objective\.segment_delimiters=.*segment_unit='step'"

# Refused by the estimator of advantages, or by a section itself.
REFUSED_BY_SECTIONS = [
  (BASE, dict(lora__adapter="x"), r"lora\.adapter='x', lora\.rank=0: set rank to that of these"),
  (BASE, dict(rl__group_size=1), r"rl\.group_size=1: advantages are relative"),
  (BASE, dict(eval__every=0), r"eval\.every=0 must be .*: .* for these two alone set a number"),
  (BASE, {TUNED: dict(dapo=dict(clip_low=2.0))}, r"tuned\.dapo\.clip_low=2\.0 must be"),
  (BASE, {TUNED: dict(dapo=dict(clip_low="x"))}, r"tuned\.dapo\.clip_low='x' must be"),
  (BASE, {TUNED: dict(gspo=dict(tau_pos=1.0))}, r"tuned\.gspo\.tau_pos: gspo has no such option"),
  (BASE, {TUNED: dict(gsop=dict(clip_low=1.0))}, r"objective\.tuned='gsop' is not one of gspo"),
  # A teacher.
  (
    BASE,
    TEACHER | dict(objective__name="gspo"),
    r"'gspo' takes one per response; set objective.name to one of gspo_token, segment, ppo_clip",
  ),
  (
    BASE,
    TEACHER | dict(critic__name="model"),
    r"critic\.name='model': both compute advantages, .* each token",
  ),
  (BASE, TEACHER | dict(data__query_set__extra_rounds=1), r"extra_rounds=1 replaces groups"),
  (BASE, TEACHER | RECORDED, r"rft' takes one per response"),
  (BASE, TEACHER | dict(rl__group_size=1), r"rl\.group_size=1: advantages are relative"),
  # A critic.
  (PPO, dict(objective__name="gspo"), r"objective\.name='gspo' takes one per response"),
  (PPO, dict(data__query_set__extra_rounds=1), r"extra_rounds=1 replaces groups"),
  (PPO, dict(environment__discount=0.9), r"environment\.discount=0\.9 has no effect"),
  (PPO, dict(critic__name="none", rl__group_size=1), r"rl\.group_size=1: advantages"),
  (PPO, dict(objective__advantage="none"), r"objective\.advantage='none' has no effect"),
  # Signals.
  (BASE, cost("other"), r"costs\.other\.bound='at_most' needs constraints\.costs\.other\.signal"),
  (
    BASE,
    dict(constraints__rewards__extra__weight=-1.0),
    r"rewards\.extra\.weight=-1\.0 needs constraints\.rewards\.extra\.signal",
  ),
  (BASE, cost("text"), r"costs\.text\.text=''.*signal='text'"),
  (BASE, cost(text="x"), r"costs\.length\.text='x'.*signal='length'"),
  (BASE, cost(token=3), r"costs\.length\.token=3"),
  (
    BASE,
    cost(initial=11.0),
    r"costs\.length\.initial=11\.0 must be at most constraints\.costs\.length\.most=10\.0",
  ),
  (BASE, cost() | dict(constraints__reward_weight=0.0), r"constraints\.reward_weight=0\.0"),
  (
    BASE,
    cost(limit=6.0) | dict(environment__name="calculator"),
    r"\(length\), environment\.name='calculator'",
  ),
  (
    BASE,
    cost(limit=6.0) | dict(reward__name="recurrence", reward__per_line=True),
    r"\(length\), reward\.per_line=True",
  ),
  (
    BASE,
    cost(limit=6.0) | dict(critic__name="model", objective__name="ppo_clip"),
    r"\(length\), critic\.name='model'",
  ),
  (
    BASE,
    cost(limit=6.0) | dict(data__query_set__extra_rounds=2),
    r"\(length\): data\.query_set\.extra_rounds=2",
  ),
  # Rewards and environments.
  (BASE, OVERLONG, r"reward\.overlong_weight=1\.0 needs a buffer"),
  (TOOLS, dict(environment__token_cost=-0.1), r"environment\.token_cost=-0\.1"),
  (TOOLS, dict(environment__call_cost=-1.0), r"environment\.call_cost=-1"),
  (TOOLS, dict(environment__charge="wrong"), r"environment\.charge='wrong' is"),
  (TOOLS, dict(data__checks=2.0), r"data\.checks=2"),
  (TINY, dict(environment__discount=0.5), r"environment\.discount=0\.5 has no effect"),
  (
    TINY,
    dict(objective__name="gspo_token", environment__discount=0.5),
    r"environment\.name='', reward\.per_line=False have none; set it to 1",
  ),
  # Schedules and recorded responses.
  (BASE, dict(schedule__new_tokens="6"), r"schedule\.new_tokens='6'"),
  (BASE, dict(schedule__new_tokens="2:6"), r"schedule\.new_tokens='2:6'.* increase from 1"),
  (BASE, dict(schedule__new_tokens="1:6,1:8"), r"schedule\.new_tokens='1:6,1:8'.* must increase"),
  (
    BASE,
    dict(schedule__new_tokens="1:8,3:6"),
    r"schedule\.new_tokens='1:8,3:6'.*lengths must be at least 1 and increase",
  ),
  (
    BASE,
    dict(schedule__new_tokens="1:0"),
    r"schedule\.new_tokens='1:0'.*lengths must be at least 1 and increase",
  ),
  (OFFLINE, dict(offline__fresh=1.0), r"offline\.fresh=1\.0"),
  (BASE, RECORDED | dict(objective__soft_value=0.5), r"objective\.soft_value=0\.5"),
  # Models, adapters and benchmarks.
  (BASE, dict(model__mlp_only_layers=(4,)), r"model\.mlp_only_layers=4.*model\.num_layers=4"),
  (BASE, dict(rl__lag=-1), r"rl\.lag=-1 must be"),
  (
    BASE,
    dict(eval__benchmarks=dict(aime=common.benchmark(samples=3, pass_at=(1, 4)))),
    r"^eval\.benchmarks\.aime\.pass_at=4 must be ",
  ),
  *[
    (
      BASE,
      dict(eval__benchmarks={name: common.benchmark(samples=3)}),
      rf"^eval\.benchmarks\.{re.escape(name)}: a benchmark",
    )
    for name in ("math/500", "eval", "")
  ],
  # Segments.
  (
    BASE,
    SEGMENT | dict(objective__segment_unit="turn", objective__segment_delimiters=("]",)),
    STEPS,
  ),
  (BASE, SEGMENT | dict(objective__segment_delimiters=("]",)), STEPS),
  (BASE, SEGMENT | dict(objective__segment_unit="step", objective__segment_delimiters=()), STEPS),
  (
    BASE,
    SEGMENT | dict(objective__segment_unit="step", objective__segment_delimiters=("]", "")),
    STEPS,
  ),
  # Options of losses.
  (TINY, dict(objective__name="sapo", objective__adaptive_clip__target=0.3), r"sapo has none"),
  (TINY, dict(objective__clip_exponent=0.5), r"needs objective\.clip_length"),
  (TINY, dict(objective__name="grpo", objective__clip_length=8.0), r"grpo has no such option"),
  (
    TINY,
    RFT | dict(data__query_set__extra_rounds=1),
    r"extra_rounds=1 replaces groups of equal rewards, and objective\.name='rft'",
  ),
  (BASE, OBJECTIVE | dict(objective__name="gsop"), r"objective\.name='gsop' is not one of gspo"),
  (BASE, OBJECTIVE | dict(objective__kl="k4"), r"objective\.kl='k4' is not one of"),
  (BASE, OBJECTIVE | dict(objective__old_logp="none"), r"objective\.old_logp='none' is not one of"),
  (BASE, OBJECTIVE | dict(objective__replay="r2"), r"objective\.replay='r2' is not one of"),
  (
    BASE,
    OBJECTIVE | dict(objective__replay="R2", objective__old_logp="sampler"),
    r"objective\.old_logp='sampler'.*recompute",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="gmpo", objective__dual_clip=3.0),
    r"objective\.dual_clip=3\.0: gmpo has no such option",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="sapo", objective__clip_low=0.1),
    r"sapo has no such option; it has tau_pos, tau_neg, kl",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="grpo", objective__aggregate="row"),
    r"aggregate='row' is not one of sequence, segment, token, constant",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="grpo", objective__aggregate="segment"),
    r"aggregate='segment' is not one of sequence, token, constant, which grpo",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__clip_low=-0.1),
    r"objective\.clip_low=-0\.1 must be at least 0",
  ),
  (BASE, OBJECTIVE | dict(objective__clip_low=float("nan")), r"objective\.clip_low=nan must"),
  (
    BASE,
    OBJECTIVE | dict(objective__dual_clip=0.5),
    r"objective\.dual_clip=0\.5 must be above 1",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="sapo", objective__tau_neg=0.0),
    r"objective\.tau_neg=0\.0 must be above 0",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="luspo", objective__length_exponent=0.5),
    r"length_exponent=0\.5: luspo has no such option",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="vespo", objective__clip_low=0.1),
    r"vespo has no such option; it has k_pos, lambda_pos, k_neg",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="vespo", objective__lambda_neg=0.0),
    r"objective\.lambda_neg=0\.0 must be above 0",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="vespo", objective__adaptive_clip__target=0.1),
    r"no clip range to adapt: vespo has none",
  ),
  (
    BASE,
    OBJECTIVE
    | dict(
      objective__name="vespo",
      objective__correction__name="masked",
      objective__correction__level="token",
    ),
    r"correction\.level='token' is not one of geometric, sequence, which vespo takes",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="opmd", objective__clip_high=0.1),
    r"clip_high=0\.1: opmd has no such option; it has beta, kl",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__off_policy_threshold=-1.0),
    r"objective\.off_policy_threshold=-1\.0 must",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="segment", objective__segment_unit="word"),
    r"segment_unit='word' is not one of turn, step, line",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="segment", objective__segment_unit="tokens"),
    r"segment_tokens=None.*change one",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__name="segment", objective__segment_tokens=4),
    r"segment_unit='turn'.*change one",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="tis"),
    r"correction\.name='tis' is not one of none, truncated, masked",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__cap=2.0),
    r"correction\.cap=2\.0: correction 'none' has no such option",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="truncated", objective__correction__low=0.1),
    r"correction\.low=0\.1.*level, cap",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="masked", objective__correction__cap=2.0),
    r"correction\.cap.*level, low, high",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="masked", objective__correction__low=6.0),
    r"high=5\.0 is smaller than .*low=6\.0",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="truncated", objective__correction__cap=0.0),
    r"correction\.cap=0\.0 must be above",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__correction__name="truncated", objective__correction__level="token"),
    r"geometric, sequence.*gspo",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__old_logp="sampler", objective__correction__name="truncated"),
    r"correction\.name='truncated'.*objective\.old_logp='sampler'.*set old_logp to recompute",
  ),
  (
    BASE,
    OBJECTIVE | dict(objective__old_logp="behaviour", objective__correction__name="truncated"),
    r"objective\.old_logp='behaviour', ratios already contain .*correction\.name='truncated'",
  ),
  # Estimators of advantages.
  (TINY, dict(objective__advantage="gae"), r"advantage='gae' needs critic.name="),
  (TINY, CRITIC | dict(objective__advantage="turn_gae"), r"'turn_gae' needs environment.name"),
  (TINY, dict(objective__advantage="distillation"), r"needs distillation.teacher"),
  (TINY, dict(objective__advantage="constraints"), r"needs an entry of constraints"),
  (TINY, dict(objective__advantage="gdpo"), r"needs an entry of constraints"),
  (
    TINY,
    TEACHER | COST | dict(objective__advantage="constraints"),
    r"/t', constraints \(length\): both compute advantages, .* each response",
  ),
  (TINY, dict(objective__advantage="kl_in_reward"), r"needs objective.reward_kl_coef"),
  (TINY, CRITIC | PRICE, r"reward_kl_coef=0\.1: both compute advantages, .* each response"),
  (TINY, TALK | PRICE, r"environment\.name='calculator': both compute advantages, .* each turn"),
  (
    TINY,
    PRICE | dict(objective__name="rft"),
    r"reward_kl_coef=0\.1 has no effect, since objective\.advantage='best' compares whole",
  ),
  (
    TINY,
    PRICE | dict(data__query_set__extra_rounds=1),
    r"reward_kl_coef=0\.1: data\.query_set\.extra_rounds=1 replaces groups of equal rewards",
  ),
  (TINY, dict(objective__advantage="turns"), r"'turns' needs environment.name"),
  (TINY, CRITIC | TEACHER, r"/t', critic\.name='model': both compute advantages, .* each token"),
  (
    TINY,
    CRITIC | TEACHER | TALK | dict(objective__advantage="turn_gae"),
    r"/t', critic\.name='model': both compute advantages, .* each token",
  ),
  (
    TINY,
    CRITIC | TALK | dict(objective__advantage="turns"),
    r"critic\.name='model', environment\.name='calculator': both compute advantages, .* each turn",
  ),
  (
    TINY,
    LINES
    | dict(data__train="recurrence:train", data__eval="recurrence:heldout")
    | dict(objective__name="rft"),
    r"reward\.per_line=True has no effect, since objective\.advantage='best'",
  ),
]

# Configuration and changes, each of which breaks a rule of warnings.
DOUBTED = [
  (TINY, RL),
  (TINY, dict(reward__name="string")),
  (TINY, dict(rl_optimizer__warmup_steps=1000)),
  (TINY, dict(sft_optimizer__learning_rate=1.0)),
  (TINY, dict(rl_optimizer__learning_rate=1e-12)),
  (TINY, dict(rl__max_age=1, rl__token_budget=1000)),
  (TINY, dict(eval__max_new_tokens=6)),
  (TINY, dict(rollout_mesh__fsdp=1)),
  (TINY, dict(checkpoint__best="eval/accuracy", checkpoint__every=30, eval__every=20)),
  (TINY, dict(objective__clip_high=0.2)),
  (TINY, dict(objective__name="grpo", objective__clip_low=3e-4, objective__clip_high=4e-4)),
  (TINY, dict(objective__reward_kl_coef=0.1)),
  (
    TINY,
    dict(objective__name="segment", objective__segment_unit="tokens", objective__segment_tokens=10),
  ),
  (TINY, dict(objective__name="segment")),
]

# 40 problems, 10 demonstrations and 4 held-out problems, on a machine with one processor.
FACTS = rules.DataFacts(
  prompts=40,
  demonstrations=10,
  answers={"data.train": 0.5},
  words={"data.train": "yes: 40%"},
  format_tokens=8,
  shared="2 of 4 of data.eval",
  memory_mb=2000,
  has_tokenizer=True,
)
REFUSED_BY_DATA = [
  (dict(reward__format="think", reward__format_weight=0.1), dict(format_tokens=10)),
  ({}, dict(answers={"data.eval": 0.0})),
]
DOUBTED_BY_DATA = [
  {},
  dict(reward__name="code", reward__workers=4, data__train="a", data__eval="b"),
  dict(distributed=True),
  dict(tokenizer="bytes"),
]
TABLES = rules.INVALID, rules.INVALID_RL, rules.UNUSED, rules.WARNINGS, rules.WARNINGS_RL
DATA_TABLES = rules.INVALID_DATA, rules.DATA_WARNINGS
KEYS = page.by_name()
SECTIONS_OFF = (
  "critic",
  "critic_optimizer",
  "distillation",
  "engine.server",
  "lora",
  "objective.adaptive_clip",
)
SWITCHES = (
  "lora.rank",
  "lora.adapter",
  "critic.name",
  "distillation.teacher",
  "objective.adaptive_clip.target",
)
KEYS_OFF = [name for name in KEYS if name.rpartition(".")[0] in SECTIONS_OFF]


def another(key):
  """Returns a valid value of a key, other than its default."""
  if typing.get_origin(key.kind) is Literal:
    return next(word for word in typing.get_args(key.kind) if word != key.default)
  if isinstance(key.default, tuple):
    return key.default[:1]
  if isinstance(key.default, bool | str):
    return not key.default if isinstance(key.default, bool) else "x"
  return key.default + 1 if isinstance(key.default, int) else key.default / 2 + 0.07


OFF = {name: another(KEYS[name]) for name in KEYS_OFF if name not in SWITCHES}


CONFIGURED = {}  # By configuration and changes: each is built once.


def configured(get_config, changes):
  key = get_config, repr(changes)
  if key not in CONFIGURED:
    CONFIGURED[key] = parse(values_of(get_config, **changes))
  return CONFIGURED[key]


@pytest.mark.parametrize(
  "get_config, changes, message",
  REFUSED + REFUSED_BY_SECTIONS,
  ids=[f"{i}-{m[:40]}" for i, (_, _, m) in enumerate(REFUSED + REFUSED_BY_SECTIONS)],
)
def test_invalid_settings_are_refused_by_name(get_config, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    rules.check(configured(get_config, changes))
  assert "{" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("get_config, changes", DOUBTED, ids=[str(x) for _, x in DOUBTED])
def test_doubtful_settings_give_one_warning(get_config, changes):
  config = configured(get_config, changes)
  rules.check(config)
  (line,) = rules.warnings(config, rules.DataFacts())
  assert "{" not in line
  assert any(key.replace("__", ".") in line for key in changes)


def test_every_rule_has_a_case():
  broken = collections.Counter()
  cases = [(get_config, changes) for get_config, changes, _ in REFUSED]
  cases += [(BASE, {name.replace(".", "__"): value}) for name, value in OFF.items()]
  for get_config, changes in cases:
    broken.update(rule for rule, _ in rules.invalid(configured(get_config, changes)))
  for get_config, changes in DOUBTED:
    config = configured(get_config, changes)
    broken.update(rule for rule, _ in rules.doubtful(config, rules.DataFacts()))
  for changes, facts in REFUSED_BY_DATA:
    config, facts = configured(TINY, changes), dataclasses.replace(FACTS, **facts)
    broken.update(rule for rule, _ in rules.invalid(config, facts))
  for changes in DOUBTED_BY_DATA:
    broken.update(rule for rule, _ in rules.doubtful(configured(TINY, changes), FACTS))
  assert not [rule for table in TABLES + DATA_TABLES for rule in table if not broken[rule]]


def test_a_rule_names_the_place_that_shows_its_need():
  """A test, a page, a line of the change log, or an issue of another project."""
  root = Path(__file__).parents[2]
  names = {path.stem for path in (root / "tests").rglob("test_*.py")} | {"CHANGELOG"}
  for rule in itertools.chain(*TABLES, *DATA_TABLES):
    name = rule.shown_by.partition(":")[0]
    page_exists = name.endswith((".md", ".py")) and (root / name).is_file()
    assert name in names or page_exists or re.fullmatch(r"\w+ issue \d+", name), rule


@pytest.mark.parametrize("file, arg", VARIANTS)
def test_configs_break_no_rule(file, arg):
  values = importlib.import_module(f"configs.{file}").get_config(arg).to_dict()
  config = parse(values)
  assert not list(rules.invalid(config))


@pytest.mark.parametrize("job", ["sft", "eval"])
def test_other_jobs_take_the_configuration_of_an_rl_run(job):
  changes = dict(rl__lag=1, data__query_set__drop_after=2, schedule__new_tokens="1:6")
  rules.check(configured(TINY, changes | dict(job=job)))


def test_settings_invalid_with_the_data_are_refused():
  for changes, facts in REFUSED_BY_DATA:
    config, facts = configured(TINY, changes), dataclasses.replace(FACTS, **facts)
    with pytest.raises(ValueError, match=r"sampling\.max_new_tokens=10"):
      rules.warnings(config, facts)


def test_settings_doubtful_with_the_data_give_warnings():
  for changes in DOUBTED_BY_DATA:
    assert not any(
      re.search(r"\{[\w.]+:?\}", x) for x in rules.warnings(configured(TINY, changes), FACTS)
    )
  (line,) = rules.warnings(configured(TINY, {}), dataclasses.replace(FACTS, answers={}, words={},
    prompts=0, shared=""))  # fmt: skip
  assert line.startswith("sft.batch=") and "10 demonstrations" in line


def test_defaults_break_no_rule():
  config = configured(TINY, {})
  assert not list(rules.invalid(config)) and not rules.warnings(config, rules.DataFacts())


def test_keys_of_rules_are_declared():
  config = default()
  for rule in rules.UNUSED:
    assert not list(rules._changed(config, rule.keys.split()))
    assert "{" not in ranges.fill(config, "", rule.message)
  for table in (rules.INVALID, rules.INVALID_RL, rules.WARNINGS, rules.WARNINGS_RL):
    for rule in table:
      if isinstance(rule, rules.Rule):
        assert "{" not in ranges.fill(config, "", rule.message)


def test_every_task_has_verifiers():
  assert {*rules.TASK_VERIFIERS} == {*TASKS}
  assert all(judge in VERIFIERS for judges in rules.TASK_VERIFIERS.values() for judge in judges)


@pytest.mark.parametrize("name", OFF)
def test_changed_keys_of_a_disabled_section_are_refused(name):
  value = OFF[name]
  message = rf"^{re.escape(f'{name}={value!r}')} has no effect"
  with pytest.raises(ValueError, match=message) as error:
    rules.check(configured(BASE, {name.replace(".", "__"): value}))
  assert str(KEYS[name].default).removesuffix(".0") in str(error.value)
