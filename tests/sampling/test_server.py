"""Servers that sample, and all that they may do wrong. Those here are in this process, with log-
probs of a real model; tests/sampling/test_vllm.py has real ones."""

import contextlib
import dataclasses
import itertools
import re
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from support.cases import long
from support.configs import config_of
from support.fake_server import FakeServer
from support.small_models import SMALLER_DENSE, next_logp, on_host

from configs import common
from gspo_jax.sampling import Driver, ServersGone, Workload, sample_rollout
from gspo_jax.sampling.driver import new_groups
from gspo_jax.sampling.requests import workload
from gspo_jax.sampling.servers import client, probe
from gspo_jax.sampling.servers import engine as engines
from gspo_jax.sampling.servers.engine import ServerEngine
from gspo_jax.settings.model import REFERENCE
from gspo_jax.settings.sampling import EngineConfig, SamplingConfig, ServerConfig
from gspo_jax.structs import Prompt
from gspo_jax.system import hosts, preemption

MODEL = SMALLER_DENSE
STOP = 3
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
WORKLOAD = Workload(SamplingConfig(0.8, 0, 1.0, 0.0, 8), 4, 12, 4, stop_ids=(STOP,))
QUICK = dict(wait_s=0.0, timeout_s=20.0)


def weights(seed=1):
  # Larger than at random, so that log-probs differ from each other and between seeds.
  return jax.tree.map(lambda x: 3 * x, on_host(MODEL, seed))


@pytest.fixture
def make(tmp_path):
  """Starts servers, or takes the given ones, and loads `weights()` as version 1.

  Returns them and their engine. They end with the test.
  """
  with contextlib.ExitStack() as stack:

    def make(servers=1, load=True, text_bytes=None, temperature=0.8, workdir=tmp_path, **config):
      if isinstance(servers, int):
        servers = [FakeServer() for _ in range(servers)]
        for server in servers:
          stack.callback(server.die)
      urls = tuple(server.url for server in servers)
      config = EngineConfig(name="server", urls=urls, server=ServerConfig(**QUICK | config))
      options = dict(workdir=workdir, window=24, temperature=temperature)
      engine = ServerEngine(MODEL, config, REFERENCE, text_bytes=text_bytes, **options)
      stack.enter_context(engine)
      if load:
        engine.load(weights(), 1)
      return *servers, engine

    yield make


GENERATE = "/inference/v1/generate"


def always(kind, path=GENERATE, first=None):
  """A fault of all requests of a run to a path, or of the `first` ones; not of the probe's."""
  count = itertools.count()

  def fault(requested, body):
    matches = requested == path and not (body and "probe" in str(body.get("request_id")))
    return kind if matches and (first is None or next(count) < first) else None

  return fault


def once(kind, path=GENERATE):
  return always(kind, path, first=1)


def well(path, body):
  """No fault."""


def check(engine, version=1, seed=0):
  """Samples whole groups, and compares their log-probs with those of the weights of `version`."""
  rollout = sample_rollout(engine, WORKLOAD, PROMPTS, seed)
  assert rollout.tokens.shape == (12, 12) and (rollout.lengths > 0).all()
  logp_BT = np.asarray(next_logp(weights(version), MODEL, rollout.tokens, temperature=0.8))
  off_BT = abs(logp_BT - rollout.logp[:, 1:]) * rollout.mask[:, 1:]
  assert off_BT.max() < 1e-4
  np.testing.assert_array_equal(rollout.full_logp, rollout.logp)
  assert set(rollout.version[rollout.mask > 0]) == {version}
  for row in range(12):
    tokens = rollout.response(row)
    assert (STOP in tokens) == rollout.stopped[row] and STOP not in tokens[:-1]
    assert len(tokens) == 8 or tokens[-1] == STOP


def requests_of(server):
  """Requests for responses at a server, without those of probes."""
  bodies = [body for body in server.bodies if body and "token_ids" in body]
  return [body for body in bodies if "probe" not in body["request_id"]]


def request_ids(server):
  return [body["request_id"] for body in requests_of(server)]


def failed(engine):
  """Counts failures by kind."""
  result = engine.usage.metrics().items()
  return {k.removeprefix("engine/failed/"): v for k, v in result if "/failed/" in k and v}


def test_what_servers_sample_is_the_trainers_distribution_after_every_publication(make, tmp_path):
  *two, engine = make(2, load=False)
  for version in (1, 2, 3):
    engine.load(weights(version), version)
    check(engine, version, seed=version)
  metrics = engine.usage.metrics()
  assert metrics["engine/servers"] == 2 and metrics["engine/probe/mean"] < 1e-5
  assert not failed(engine) and metrics["tokens_per_second/decode"] > 0
  assert "sampling/slot_utilisation" not in metrics
  order = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
  for server in two:
    assert [path for path in server.seen if path in order] == order * 3
    assert requests_of(server)
  names = sorted(path.name for path in (tmp_path / "published").iterdir())
  assert names == ["weights_000002", "weights_000003"]


def test_seeds_are_sent_and_no_two_responses_have_the_same(make):
  server, engine = make()
  first = sample_rollout(engine, WORKLOAD, PROMPTS, seed=1)
  again = sample_rollout(engine, WORKLOAD, PROMPTS, seed=1)
  np.testing.assert_array_equal(first.tokens, again.tokens)
  other = sample_rollout(engine, WORKLOAD, PROMPTS, seed=2)
  assert (first.tokens != other.tokens).any()
  assert len({body["sampling_params"]["seed"] for body in requests_of(server)}) == 24
  greedy = Workload(SamplingConfig(0.0, 3, 0.9, 0.1, 8), 4, 12, 1, stop_ids=(STOP,))
  sample = sample_rollout(engine, greedy, PROMPTS)
  last = requests_of(server)[-1]["sampling_params"]
  assert [last[k] for k in ("temperature", "top_k", "top_p", "min_p")] == [0.0, 3, 0.9, 0.1]
  assert np.isnan(sample.full_logp[sample.mask > 0]).all()  # nobody says


def edited(change):
  """An answer with a changed first choice."""

  def edit(answer):
    first, *others = answer["choices"]
    return dict(choices=[{**first, **change(first)}, *others])

  return edit


def with_logp(value):
  def change(choice):
    content = [entry | dict(logprob=value) for entry in choice["logprobs"]["content"]]
    return dict(logprobs=dict(content=content))

  return edited(change)


def single_token(token, **fields):
  logprobs = dict(content=[dict(token_id=token, logprob=-1.0)])
  return edited(lambda _: dict(token_ids=[token], logprobs=logprobs) | fields)


def with_version(version, start=0):
  return edited(lambda _: dict(weight_versions=[dict(version=version, start=start, end=99)]))


GARBAGE = {  # what it holds is in test_client.py too
  "500": ("500", "status"),
  "too many requests": ("429", "status"),
  "a refusal": ("400", "request"),
  "truncated": ("truncate", "connection"),
  "no JSON": (lambda answer: b"<html>", "body"),
  "nested": (lambda answer: b"[" * 200_000, "body"),
  "no choices": (lambda answer: {}, "body"),
  "no response": (lambda answer: dict(choices=[]), "body"),
  "two responses": (lambda answer: dict(choices=2 * answer["choices"]), "body"),
  "other tokens": (edited(lambda c: dict(token_ids=[c["token_ids"][0] ^ 1])), "tokens"),
  "tokens of no vocabulary": (single_token(77), "tokens"),
  "words": (edited(lambda _: dict(token_ids=["a"])), "body"),
  "a null": (edited(lambda _: dict(token_ids=None, logprobs=None)), "tokens"),
  "NaN": (with_logp(float("nan")), "tokens"),
  "a likelihood above 1": (with_logp(0.5), "tokens"),
  "no end": (single_token(5, finish_reason="length"), "tokens"),
  "older weights": (with_version("0"), "version"),
  "weights of some tokens": (with_version("1", start=1), "version"),
  "weights that it does not say": (edited(lambda _: dict(weight_versions=None)), "version"),
  "nobody's weights": (with_version("default"), "version"),
}


# Of each kind, where it is noticed.
SOME = "500", "truncated", "no JSON", "other tokens", "NaN", "older weights"
FURTHER = (pytest.param(name, marks=pytest.mark.long) for name in GARBAGE if name not in SOME)


@pytest.mark.parametrize("name", [*SOME, *FURTHER])
def test_what_cannot_be_used_is_asked_for_again(make, name):
  fault, kind = GARBAGE[name]
  *two, engine = make(2)
  two[0].fault = once(fault)
  check(engine)
  assert failed(engine) == {kind: 1}
  sent = request_ids(two[0]) + request_ids(two[1])
  assert len(sent) == len(set(sent)), "an attempt has an id of its own"
  assert len(sent) == 13 and engine.usage.metrics()["engine/servers"] == 2


def test_a_server_with_other_weights_is_left_out_after_three_answers(make):
  *two, engine = make(2)
  two[0].fault = always(GARBAGE["older weights"][0])
  check(engine)
  assert failed(engine)["version"] >= 3 and engine.usage.metrics()["engine/servers"] == 1


def test_a_server_that_dies_in_the_middle_is_left_out_and_comes_back(make):
  *two, engine = make(2)
  two[0].fault = once("die")
  check(engine)
  assert failed(engine).keys() <= {"connection"} and failed(engine)
  engine.load(weights(2), 2)
  check(engine, 2)
  metrics = engine.usage.metrics()
  assert metrics["engine/servers"] == 1 == metrics["engine/left_out"]
  port = int(two[0].url.rpartition(":")[2])
  back = FakeServer(port=port)  # somebody starts it again
  engine.load(weights(3), 3)
  assert back.version == "3"
  check(engine, 3)
  assert engine.usage.metrics()["engine/servers"] == 2
  back.die()


def test_a_server_that_hangs_is_left_out_before_the_time_of_a_request(make, monkeypatch):
  monkeypatch.setattr(client, "HEALTH_S", 0.05)
  monkeypatch.setattr(client, "CONNECT_S", 1.0)
  *two, engine = make(2)
  two[0].fault = lambda path, body: "hang"
  started = time.monotonic()
  check(engine)
  assert time.monotonic() - started < 15
  assert set(failed(engine)) == {"health"} and engine.usage.metrics()["engine/servers"] == 1


def test_a_server_that_hangs_does_not_keep_others_from_new_weights(make, monkeypatch):
  monkeypatch.setattr(client, "CONNECT_S", 1.5)
  *two, engine = make(2)
  two[0].fault = lambda path, body: "hang"
  started = time.monotonic()
  engine.load(weights(2), 2)
  assert time.monotonic() - started < 18
  check(engine, 2)
  assert engine.usage.metrics()["engine/servers"] == 1


def test_requests_with_weights_and_probes_have_a_time_of_their_own(make, monkeypatch):
  _, engine = make(load=False, timeout_s=1000.0, publish_s=30.0)
  pool, seconds_of = engine._pool, {}
  send = pool.request

  def request(url, path, body=None, seconds=client.CONNECT_S):
    seconds_of[path] = seconds
    return send(url, path, body, seconds)

  monkeypatch.setattr(pool, "request", request)
  engine.load(weights(), 1)
  assert seconds_of["/collective_rpc"] == seconds_of[GENERATE] == max(seconds_of.values()) == 30.0
  sample_rollout(engine, WORKLOAD, PROMPTS)
  assert seconds_of[GENERATE] == 1000.0


def test_what_we_stumble_over_is_a_failure_of_the_server_that_said_it(make, monkeypatch):
  _, engine = make()
  check_part, count = probe.check_part, itertools.count()

  def stumbles(*args):
    if next(count) == 0:
      raise MemoryError
    return check_part(*args)

  monkeypatch.setattr(probe, "check_part", stumbles)
  check(engine)
  assert failed(engine) == {"body": 1}


@pytest.mark.parametrize(
  "path, message",
  [
    ("/inference/v1/generate", "404 for /inference/v1/generate: vLLM needs VLLM_SERVER_DEV_MODE=1"),
    ("/collective_rpc", "404 for /collective_rpc: vLLM needs VLLM_SERVER_DEV_MODE=1"),
  ],
)
def test_a_server_without_what_is_needed_is_refused_by_name(make, path, message):
  server, engine = make(load=False)
  server.fault = lambda position, body: "404" if position == path else None
  with pytest.raises(ServersGone, match=message):
    engine.load(weights(), 1)


def driving(engine, group, load=WORKLOAD):
  """A driver with the responses of a group under way."""
  driver = Driver(engine, load)
  driver.begin(group)
  return driver


def group_of(count):
  (group,) = new_groups([Prompt("a", "", "", (5, 6, 7))], count, 0, 4, None)
  return group


def test_weights_may_change_while_responses_are_under_way(make):
  """Each token has its version; answers under new weights wait for their probe."""
  server, engine = make()
  server.pace, group = 0.15, group_of(4)
  driver = driving(engine, group)
  loads = threading.Timer(0.5, lambda: engine.load(weights(2), 2))
  loads.start()
  until = time.monotonic() + 30
  assert len(list(driver.run(lambda: time.monotonic() > until))) == 4
  loads.join()
  versions = np.concatenate([each.version for each in group])
  assert set(versions) == {1, 2}
  for each in group:
    assert (np.diff(each.version) >= 0).all()
  assert not failed(engine) and engine._pool.usable


def test_a_request_has_a_time(make):
  *two, engine = make(2, timeout_s=5.0)  # the probe is quicker
  two[0].fault = once("hang")
  check(engine)
  assert failed(engine) == {"timeout": 1}


def test_without_a_server_the_run_ends_and_says_why(make):
  server, engine = make()
  server.fault = once("die")
  with pytest.raises(ServersGone, match=rf"no server can be used\. {server.url}: .*connect"):
    sample_rollout(engine, WORKLOAD, PROMPTS)


def test_a_response_that_fails_everywhere_fails_and_the_run_goes_on(make, monkeypatch):
  monkeypatch.setattr(engines, "MAX_FAILURES", 2)
  *two, engine = make(2)
  for server in two:
    server.fault = always("500", first=1)
  bad, good = group_of(1), group_of(1)
  assert list(driving(engine, bad).run()) == bad
  assert bad[0].finished and not len(bad[0].tokens)
  assert re.match(r"2 calls failed, the last at http.*HTTP 500", bad[0].failure)
  assert sum(map(len, map(request_ids, two))) == 2 and all(map(request_ids, two))  # elsewhere
  list(driving(engine, good).run())
  assert good[0].finished and len(good[0].tokens) and not good[0].failure
  assert failed(engine) == {"status": 2} and engine.usage.metrics()["engine/servers"] == 2


def test_all_calls_of_an_excluded_server_end(make):
  server, engine = make()
  answered = threading.Event()

  def fails(path, body):
    if path == GENERATE and body["token_ids"][0] == PROMPTS[0][0]:
      answered.wait(20)
    return "500" if path == GENERATE else None

  server.fault = fails
  pool, tokens = engine._pool, [*itertools.repeat(PROMPTS[0], 9), *itertools.repeat(PROMPTS[1], 3)]
  for i, prompt in enumerate(tokens):
    pool.submit(probe.Call(str(i), tuple(prompt), 8, WORKLOAD.sampling, (STOP,), seed=0))
  answers = dict(pool.answers.get(timeout=5)[::2] for _ in tokens)
  answered.set()
  assert not pool.usable and not pool.servers[0].calls
  assert [answers[str(i)].kind for i in range(12)] == [""] * 9 + ["status"] * 3


def test_a_response_does_not_fail_with_calls_of_another(make, monkeypatch):
  monkeypatch.setattr(engines, "MAX_FAILURES", 1)
  monkeypatch.setattr(client, "MAX_FAILURES", 1)
  server, engine = make()
  published = threading.Event()

  def fails(path, body):
    if path == "/pause":
      published.set()
    if path != GENERATE or published.is_set():
      return None
    while len(requests_of(server)) < 2:
      time.sleep(0.01)
    return "500" if body["token_ids"] == PROMPTS[0] else published.wait(20) and None

  server.fault = fails
  bad, good = new_groups([Prompt("", "", "", tuple(x)) for x in PROMPTS[:2]], 1, 0, 4, None)
  driver = driving(engine, bad)
  driver.begin(good)
  assert {*driver.run()} == {*bad, *good}
  assert bad[0].failure and not good[0].failure and len(good[0].tokens)
  assert failed(engine) == {"status": 1}


def test_a_refused_response_does_not_exclude_its_server(make):
  server, engine = make()
  server.fault = always("400")
  (refused,) = group = group_of(1)
  list(driving(engine, group).run())
  assert re.match(r"6 calls failed, the last at http.*HTTP 400", refused.failure)
  assert failed(engine) == {"request": 6} and server.seen.count("/pause") == 1
  server.fault = well
  check(engine)


def test_the_last_server_is_waited_for(make):
  server, engine = make(wait_s=30.0)

  def fails(path, body):
    if path == "/pause":  # before the next probe
      server.fault = well
    return "500" if path == GENERATE else None

  server.fault = fails
  check(engine)
  assert failed(engine)["status"] >= 3


def test_log_probs_before_the_temperature_are_refused_by_name(make):
  server, _ = make(load=False)
  for temperature in (0.8, 1.0):  # at 1 they would be right, but no others
    server.raw = True
    with pytest.raises(ServersGone, match=r"start it with --logprobs-mode processed_logprobs"):
      make([server], temperature=temperature)


def test_new_weights_that_were_not_taken_are_found_out(make):
  *two, engine = make(2)
  two[0].reloads = False
  engine.load(weights(2), 2)
  check(engine, 2)
  metrics = engine.usage.metrics()
  assert metrics["engine/servers"] == 1 == metrics["engine/probe/disagreed"]
  two[1].reloads = False
  message = (
    r"differ from the trainer's by .* in the mean, above .*server\.tolerance=0\.005.*: start it"
  )
  with pytest.raises(ServersGone, match=message):
    engine.load(weights(3), 3)
  for server in two:
    server.reloads = True
  engine.load(weights(4), 4)
  check(engine, 4)


OTHER_CALLS = "/resume", "/reset_prefix_cache"


@pytest.mark.parametrize("path", ["/collective_rpc", *long(OTHER_CALLS)])
def test_a_publication_that_fails_half_way_leaves_the_server_out(make, path):
  *two, engine = make(2)

  fault = "500" if path != "/reset_prefix_cache" else lambda answer: dict(success=False)
  two[0].fault = once(fault, path)
  engine.load(weights(2), 2)
  assert two[0].seen[-1] == "/resume"  # so that it does not wait for ever
  check(engine, 2)
  assert engine.usage.metrics()["engine/servers"] == 1


def test_what_is_stopped_comes_back_with_what_it_has_and_goes_on(make):
  server, engine = make()
  server.pace, group = 0.2, group_of(4)
  driver = driving(engine, group)
  until = time.monotonic() + 0.7
  count = len(list(driver.run(lambda: time.monotonic() > until)))  # ended by a stop token
  lengths = [len(each.tokens) for each in group]
  assert count < 4 and 0 < max(lengths) < 8 and not engine.busy
  server.pace = 0.0
  engine.load(weights(2), 2)
  assert len(list(driving(engine, group).run())) == 4 - count
  for each, length in zip(group, lengths):
    assert set(each.version[:length]) <= {1} and set(each.version[length:]) <= {2}
    assert each.finished and (each.stopped or len(each.tokens) == 8)
    tokens = np.array([[*each.prompt, *each.tokens]], np.int32)
    pad = np.pad(tokens, ((0, 0), (0, 12 - tokens.shape[1])))
    output = each.columns["logp"]
    for seed, mine in ((1, slice(0, length)), (2, slice(length, None))):
      reference = np.asarray(next_logp(weights(seed), MODEL, pad, temperature=0.8))[0, 2:][
        : len(output)
      ]
      np.testing.assert_allclose(output[mine], reference[mine], atol=1e-4)


def test_a_stop_waits_for_the_answers_until_a_publication_ends(make, monkeypatch):
  server, engine = make()
  receive, blocked, released = engine._receive, threading.Event(), threading.Event()
  answered, group = threading.Semaphore(0), group_of(4)
  monkeypatch.setattr(engines, "ABORT_S", 0.05)
  monkeypatch.setattr(engine, "_receive", lambda seconds: receive(0.05))

  def waits(path, body):
    if path == "/collective_rpc":
      blocked.set()
      released.wait(20)
    elif path == GENERATE and "probe" not in body["request_id"]:
      blocked.wait(20)
      return lambda answer: answered.release() or answer

  server.fault = waits
  driver = driving(engine, group)
  loads = threading.Thread(target=engine.load, args=(weights(2), 2))
  loads.start()
  assert all(answered.acquire(timeout=20) for _ in group)
  with pytest.raises(preemption.Preempted), preemption.checked_by(ended):
    engine._abort()
  threading.Timer(0.3, released.set).start()
  list(driver.run(lambda: True))
  loads.join()
  assert all(each.finished and len(each.tokens) for each in group) and not failed(engine)


def ended():
  raise preemption.Preempted


def test_tokens_count_before_their_response_is_finished(make):
  """A budget would not see them before the longest responses end."""
  _, engine = make()
  group = group_of(4)
  driver = driving(engine, group, dataclasses.replace(WORKLOAD, piece=2))
  finished = list(driver.run(lambda: engine.usage.tokens >= 4))
  total = sum(len(each.tokens) for each in group)
  assert engine.usage.tokens == total and max(len(each.tokens) for each in group) < 8
  assert len(finished) + len(list(driving(engine, group).run())) == len(group)
  assert engine.usage.tokens == sum(len(each.tokens) for each in group) - total > 0


def test_pieces_are_an_eighth_of_what_a_budget_is_for_a_response():
  def piece(budget):
    c = config_of(common.base, rl__prompts=4, rl__group_size=4, rl__token_budget=budget)
    return workload(c, (), False).piece

  assert [piece(budget) for budget in (0, 16, 16 * 8 * 100)] == [0, 64, 100]


def test_what_waited_in_a_server_while_weights_changed_comes_back_empty(make):
  *two, engine = make(2, in_flight=2)
  for server in two:

    def waits(path, body, server=server):  # as in its queue, until it is aborted
      while path.endswith("generate") and "probe" not in str(body) and not server.aborted:
        time.sleep(0.01)

    server.fault = waits
  group = group_of(4)
  driver = driving(engine, group)
  until = time.monotonic() + 10
  while not all(request_ids(server) for server in two):
    assert time.monotonic() < until
    time.sleep(0.01)
  engine.load(weights(2), 2)
  assert list(driver.run(lambda: True)) == []
  assert not failed(engine) and engine.usage.metrics()["engine/servers"] == 2
  for server in two:  # each was told of what it had
    assert server.aborted == {f"generate-tokens-{id_}" for id_ in request_ids(server)}
  list(driving(engine, group).run())
  assert all(each.finished and set(each.version) == {2} for each in group)


def test_what_waits_to_be_tried_again_does_not_keep_a_stop_waiting(make):
  server, engine = make()
  server.fault = always("500")
  driver = driving(engine, group_of(1))
  while not engine._pool.failures["status"]:
    time.sleep(0.01)
  started = time.monotonic()
  assert list(driver.run(lambda: True)) == []
  assert time.monotonic() - started < 9


def test_a_call_that_fails_while_its_server_takes_weights_leaves_it_to_the_probe(make):
  server, engine = make()
  probed = threading.Event()

  def refuses(path, body):
    if "probe" in str(body) and not probed.is_set():
      probed.set()
      time.sleep(0.3)  # the call's answer comes in the meantime
    elif path.endswith("generate") and body and not probed.is_set():
      probed.wait(20)
      return "401"
    return None

  server.fault = refuses
  group = group_of(1)
  driver = driving(engine, group)
  while not request_ids(server):
    time.sleep(0.01)
  engine.load(weights(2), 2)
  list(driver.run())
  assert all(each.finished and set(each.version) == {2} for each in group)


def test_a_server_in_the_place_of_another_is_probed(make):
  *two, engine = make(2)
  two[0].raw = True
  engine.load(weights(2), 2)
  assert "start it with --logprobs-mode" in engine._pool.servers[0].reason
  two[0].raw = False
  engine.load(weights(3), 3)
  check(engine, 3)
  assert engine.usage.metrics()["engine/servers"] == 2


def test_directories_that_are_not_complete_are_not_among_the_last_two(tmp_path):
  for number in (4, 5):
    probe.write_weights(tmp_path / f"weights_{number:06d}", weights(), MODEL)
  (tmp_path / "weights_000006.partial").mkdir()
  probe.write_weights(tmp_path / "weights_000007", weights(), MODEL)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ["weights_000005", "weights_000007"]


def test_runs_in_one_directory_keep_their_weights_and_those_of_others(make, tmp_path, monkeypatch):
  shared = tmp_path / "shared"
  others = [shared / "weights_2025-11-30", shared / "weights_000000", shared / "weights_1.partial"]
  for path in others:
    path.mkdir(parents=True)
  server, first = make(load=False, directory=str(shared), workdir=tmp_path / "first")
  _, second = make(load=False, directory=str(shared), workdir=tmp_path / "second")
  first.load(weights(1), 1)
  for version in (1, 2, 3):
    second.load(weights(2), version)
  first._find_servers(probe.read_weights(first._weights))  # As after the server's restart.
  check(first, 1)
  assert all(path.is_dir() for path in others)
  monkeypatch.chdir(tmp_path)
  *_, resumed = make([server], directory=str(shared), workdir=Path("first"))
  assert resumed._weights.parent == first._weights.parent and len(list(shared.iterdir())) == 5


def test_a_tokenizer_goes_with_weights_and_what_changes_sampling_does_not(tmp_path):
  source = tmp_path / "source"
  (source / "additional_chat_templates").mkdir(parents=True)
  names = {"tokenizer.json", "tokenizer.model", "additional_chat_templates/tool.jinja"}
  for name in names | {"generation_config.json", "model.safetensors"}:
    (source / name).write_text(name)
  written = probe.write_weights(tmp_path / "weights_1", weights(), MODEL, epath.Path(source))
  files = {str(path.relative_to(written)) for path in written.rglob("*") if path.is_file()}
  assert files == names | {"config.json", "model.safetensors"}
  assert (written / "model.safetensors").read_bytes() != b"model.safetensors"


def test_what_ends_the_first_process_is_told_to_the_others(make, tmp_path, monkeypatch):
  output = []

  def record(value):
    output.append(value)
    return value

  monkeypatch.setattr(hosts, "broadcast", record)
  _, engine = make(load=False)
  (tmp_path / "published").write_text("a file")
  with pytest.raises(ServersGone, match=r"published.* cannot be written"):
    engine.load(weights(), 1)
  assert "published" in output[-1][1]
  (tmp_path / "published").unlink()
  engine.load(weights(), 1)

  def breaks(*args):
    raise KeyError("a mistake of ours")

  monkeypatch.setattr(engine._pool, "publish", breaks)
  with pytest.raises(KeyError):
    engine.load(weights(2), 2)
  assert "a mistake of ours" in output[-1][1]
  monkeypatch.setattr(hosts.jax, "process_index", lambda: 1)
  for wrong, kind in ((False, ServersGone), (True, ValueError)):
    monkeypatch.setattr(hosts, "broadcast", lambda value, wrong=wrong: (None, "it is full", wrong))
    with pytest.raises(kind, match="it is full"):
      hosts.run_on_first_host(breaks, ServersGone)


def test_a_response_that_somebody_aborted_is_gone_on_with(make):
  server, engine = make()

  def cut(answer):
    for choice in answer["choices"]:
      if choice["finish_reason"] != "stop":
        choice |= dict(finish_reason="abort", token_ids=choice["token_ids"][:3])
        choice["logprobs"] = dict(content=choice["logprobs"]["content"][:3])
        choice["weight_versions"][0]["end"] = 3
    return answer

  server.fault = once(cut)
  check(engine)
  assert not failed(engine)


def test_stop_strings_end_a_response_with_the_token_that_completes_them(make):
  def letters(tokens):
    return "".join(chr(97 + t % 26) for t in tokens)

  _, engine = make(text_bytes=[letters([i]).encode() for i in range(MODEL.vocab_size)])
  whole = sample_rollout(engine, WORKLOAD, PROMPTS)
  text = letters(whole.response(0))
  strings = (text[2:4],)
  load = Workload(**vars(WORKLOAD) | dict(stop_strings=strings))
  result = sample_rollout(engine, load, PROMPTS)
  for row in range(12):
    uncut, current = letters(whole.response(row)), letters(result.response(row))
    end = uncut.find(strings[0])
    assert current == (uncut if end < 0 else uncut[: end + 2])
    assert result.stopped[row] == (end >= 0 or whole.stopped[row])
  assert len(result.response(0)) == text.find(strings[0]) + 2 < len(text)


def test_a_token_of_the_environment_is_brought(make, monkeypatch):
  server, _ = make(load=False)
  server.token = "secret"
  with pytest.raises(ServersGone, match=r"HTTP 401.*set GSPO_ENGINE_TOKEN to the server's token"):
    make([server])
  monkeypatch.setenv("GSPO_ENGINE_TOKEN", "secret")
  make([server])


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(urls=()), r"engine\.name='server', engine\.urls=\(\)"),
    (dict(name="local", urls=("http://a:1",)), r"'local' has none"),
    (dict(urls=("a:1",)), r"'a:1' is not like http://host:port"),
    (dict(urls=("http://a:1", "http://a:1/")), r"names a server twice"),
    (dict(urls=("http://a:1",), weights_dtype="int8"), r"engine.weights_dtype=.int8.: servers"),
  ],
)
def test_urls_are_checked_before_anything_else(changes, message):
  with pytest.raises(ValueError, match=message):
    EngineConfig(**dict(name="server") | changes)
