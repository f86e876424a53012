"""job=offline: recorded responses in the place of sampled ones, alone and beside fresh ones."""

import dataclasses
import json
import re

import numpy as np
import pytest
from support import rollouts
from support.command_line import SMALL, run
from support.configs import config_of
from support.rollouts import NEW, PARAMS, PROMPTS, G, P, dumped, goes_on

from configs import tiny_offline, tiny_rft
from gspo_jax.data import recorded
from gspo_jax.data.recorded import Group, Recordings, Response
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.learner import batch as batches
from gspo_jax.runs.metrics import Stopwatch
from gspo_jax.structs import Prompt

BETA = 0.2
OFFLINE = dict(
  job="offline", offline__data="file", extra_prompts=0,
  objective__name="spo", objective__beta=BETA, objective__old_logp="recompute",
)  # fmt: skip


def on_file(count=7):
  """Groups of three responses, and one of a single one; i, g and the length tell them apart."""
  groups = []
  for i in range(count):
    prompt = Prompt(f"p{i}", f"q{i}", "a", (8 + i, 9, 10))
    sizes = range(1 if i == count - 1 else G)
    responses = [Response(np.full(2 + g, 5 + i, np.int32), (i + g) % 2, g > 0) for g in sizes]
    groups.append(Group(f"file:{i}", prompt, tuple(responses)))
  return Recordings(groups)


def collector(records=None, source=None, **changes):
  records = on_file() if records is None else records
  source = records.prompts if source is None else source
  return rollouts.collector(source, records=records, **OFFLINE | changes)


def collect(made, steps):
  """The first iterations, without weights to sample with."""
  return [made[0].collect(step, Stopwatch()) for step in range(1, steps + 1)]


def names(collected):
  return [group.prompt.id for group in collected.groups]


def by_hand(rewards, kind):
  if kind == "soft":
    return rewards - BETA * np.log(np.mean(np.exp(rewards / BETA)))
  return rewards * (np.arange(len(rewards)) == np.argmax(rewards)) if kind == "best" else rewards


OBJECTIVES = {
  "soft": {},
  "best": dict(objective__name="rft", objective__beta=None),
  "reward": dict(objective__name="rft", objective__beta=None, objective__advantage="reward"),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_nothing_is_sampled_and_all_is_as_recorded(kind):
  """The engine has no weights."""
  records = on_file()
  valid = {group.prompt.id: group for group in records.rows}
  for out in collect(collector(**OBJECTIVES[kind]), 4):
    assert len(out.groups) == P and out.usage.tokens == 0
    assert not {"reward/mean", "sampling/decode_steps"} & out.metrics.keys()
    number = 0
    for p, group in enumerate(out.groups):
      responses = valid[group.prompt.id].responses
      rewards = np.array([response.reward for response in responses])
      expected = np.zeros(G)
      expected[: len(responses)] = by_hand(rewards, kind)
      if len(set(rewards)) == 1 and kind == "soft":
        expected[:] = 0
      np.testing.assert_allclose(out.advantage_PG[p], expected, atol=1e-6)
      for g, response in enumerate(responses):
        row = p * G + g
        assert out.rollout.response(row) == response.tokens.tolist()
        assert out.rollout.stopped[row] == response.stopped
      blank = out.rollout.mask[p * G + len(responses) : (p + 1) * G]
      assert not blank.any() and (out.rollout.ends[p * G : (p + 1) * G] >= 3).all()
      number += len(responses)
    assert out.metrics["recorded/responses"] == number == (out.rollout.lengths > 0).sum()
    assert (out.rollout.version == -1).all()
    batch = batches.train_batch(
      out.rollout, out.advantage_PG, shared_prompts=True, version=out.version
    )
    assert not batch.metric_inputs.current_BT.any(), "what a sampler said of them is not known"


def test_every_group_comes_up_once_in_an_epoch_in_an_order_of_the_seed():
  count = 7  # of four at a time: an iteration may span two epochs
  out = [name for batch in collect(collector(), count) for name in names(batch)]
  for epoch in range(4):
    assert len(set(out[count * epoch : count * (epoch + 1)])) == count
  assert out == [name for batch in collect(collector(), count) for name in names(batch)]
  assert out != [name for batch in collect(collector(seed=1), count) for name in names(batch)]


def test_responses_that_are_not_on_record_were_not_cut_off():
  """A file with fewer responses than a group gives blank rows."""
  (batch,) = collect(collector(mask_truncated=True), 1)
  blank_B = batch.rollout.lengths == 0
  assert blank_B.any() and not batch.rollout.stopped[blank_B].any()
  assert batch.metrics["masked_responses"] == (~batch.rollout.stopped[~blank_B]).sum()


def test_it_goes_on_from_a_checkpoint():
  records = on_file()
  goes_on(3, 4, source=records.prompts, records=records, **OFFLINE)


def test_an_edited_group_is_another():
  first, second = (Response(np.int32([5, n]), 0.5, True) for n in (6, 7))
  group = Group("f:1", Prompt("id", "1+2=", "3", (5,)), (first, second))
  changes = (
    dict(id="f:2"),
    dict(prompt=dataclasses.replace(group.prompt, answer="4")),
    dict(responses=(first, dataclasses.replace(second, reward=1.0))),
    dict(responses=(second, first)),
  )
  groups = [group, *(dataclasses.replace(group, **change) for change in changes)]
  assert len({group.content for group in groups}) == 5


def test_fresh_responses_take_their_share():
  collecting = collector(source=PROMPTS, offline__fresh=0.5)
  collecting[1].load(PARAMS, version=1)
  (out,) = collect(collecting, 1)
  origin = [name.startswith("p") for name in names(out)]
  assert origin == [True, False, True, False], "each mini-batch has its share of both"
  recorded_B = np.repeat(origin, G)
  assert out.usage.tokens == out.rollout.lengths[~recorded_B].sum() > 0
  assert (out.rollout.version[recorded_B] == -1).all()
  assert (out.rollout.version[~recorded_B].max(axis=1) == 1).all()
  fresh = [group.reward_G for group in out.groups[1::2]]
  assert out.metrics["reward/mean"] == pytest.approx(np.mean(fresh))
  rewards = [group.reward_G[group.known_G] for group in out.groups[::2]]
  assert out.metrics["recorded/reward"] == pytest.approx(np.concatenate(rewards).mean())
  batch = batches.train_batch(
    out.rollout, out.advantage_PG, shared_prompts=True, version=out.version
  )
  np.testing.assert_array_equal(
    batch.metric_inputs.current_BT[~recorded_B], batch.mask_BT[~recorded_B]
  )
  assert not batch.metric_inputs.current_BT[recorded_B].any()


def test_a_response_without_a_verdict_is_no_target():
  """To the soft loss an advantage of 0 is one: it holds the response where the reference is."""
  (out,) = collect(collector(), 1)
  out.groups[1].unknown = {2: "timeout"}
  known_B = np.arange(P * G) != G + 2
  there_B = out.rollout.mask.any(axis=1)
  judged = batches.with_verdict(out.rollout, out.known_B)
  np.testing.assert_array_equal(judged.mask.any(axis=1), there_B & known_B)
  rewards_B = batches.token_rewards(judged, out.reward_PG, in_parts=False).sum(axis=1)
  np.testing.assert_array_equal(rewards_B, out.reward_PG.reshape(-1) * (there_B & known_B))


def test_a_dump_is_read_again_as_it_was_sampled(tmp_path):
  """Broken characters and all: what comes out of one run goes into another."""
  ids = [[200, 5, 257], [5, 6], [257]]
  responses = [Response(np.array(x, np.int32), 0.5 * g, x[-1] == 257) for g, x in enumerate(ids)]
  source = Group("x", Prompt("id", "1+2=", "3", tuple(b"1+2=")), tuple(responses))
  collecting = collector(Recordings([source] * P), tok=ByteTokenizer(), data__max_prompt_tokens=4)
  (out,) = collect(collecting, 1)
  file, decode = tmp_path / "rl_000001.jsonl", ByteTokenizer().decode
  file.write_text("".join(json.dumps(record) + "\n" for record in dumped(out, decode)))
  limits = recorded.Limits(G, 4, NEW, 264)
  again = recorded.load(str(file), ByteTokenizer(), "{question}?", limits, "raise")
  assert len(again) == P
  for group in again.rows:
    assert group.prompt.tokens == source.prompt.tokens and group.prompt.id == "id"
    for response, before in zip(group.responses, responses, strict=True):
      np.testing.assert_array_equal(response.tokens, before.tokens)
      assert (response.reward, response.stopped) == (before.reward, before.stopped)


def test_responses_that_ended_with_a_stop_string_are_trained_on(tmp_path):
  """Their samples log, without stop tokens, gives a batch without masked responses."""
  texts = [b"1;", b"2;", b"3;"]
  responses = [Response(np.array([*x], np.int32), 0.5 * g, True) for g, x in enumerate(texts)]
  source = Group("x", Prompt("id", "1+2=", "3", tuple(b"1+2=")), tuple(responses))
  changes = dict(tok=ByteTokenizer(), data__max_prompt_tokens=4, mask_truncated=True)
  (out,) = collect(collector(Recordings([source] * P), **changes), 1)
  file = tmp_path / "rl_000001.jsonl"
  records = dumped(out, ByteTokenizer().decode)
  file.write_text("".join(json.dumps(record) + "\n" for record in records))
  limits = recorded.Limits(G, 4, NEW, 264, (";",))
  again = recorded.load(str(file), ByteTokenizer(), "{question}", limits, "raise")
  (out,) = collect(collector(again, **changes), 1)
  assert out.rollout.stopped.all() and out.metrics["masked_responses"] == 0


def test_the_configurations_choose_what_they_say():
  offline_, rft = config_of(tiny_offline.get_config), config_of(tiny_rft.get_config)
  assert (offline_.job, offline_.objective.name) == ("offline", "spo")
  assert offline_.objective.advantage == "soft" and offline_.objective.needs_reference
  assert (rft.job, rft.objective.name, rft.objective.advantage) == ("sft+rl", "rft", "best")
  assert not rft.objective.needs_reference


@pytest.mark.slow
def test_a_recorded_response_without_a_reward_is_named_in_a_few_lines(tmp_path):
  file, flags = tmp_path / "bad.jsonl", [flag for flag in SMALL if not flag.startswith("sft")]
  file.write_text('{"prompt": "1+2=", "response": "3"}\n')
  flags += [f"offline.data={file}", "weights=random", "data.on_error=raise"]
  stderr = run(tmp_path / "run", *flags, config="configs/tiny_offline.py", ok=False)
  assert re.search(r"bad\.jsonl, line 1: it has no reward", stderr)
  assert stderr.count("\n") < 40
