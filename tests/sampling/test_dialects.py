"""What is sent in each dialect, and answers as servers gave them, read.

vLLM's are of 0.32 on the CPU. SGLang's are put together from its documentation (a recorded answer
of /generate) and its source (log-probs, routes): none was run for this.
"""

import asyncio
import base64
import dataclasses
import io
import resource
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from support.command_line import environment

from gspo_jax.sampling.servers import launch, wire
from gspo_jax.sampling.servers.calls import (
  Call,
  Failed,
  Limits,
  Refused,
  array_of_base64,
  checked,
  dated,
  floats,
  version_number,
)
from gspo_jax.sampling.servers.launch import Process, filled
from gspo_jax.sampling.servers.sglang import SGLANG
from gspo_jax.sampling.servers.starting import find_dialect
from gspo_jax.sampling.servers.vllm import COMPLETIONS, VLLM
from gspo_jax.sampling.servers.wire import Wire
from gspo_jax.settings.sampling import SamplingConfig
from gspo_jax.settings.server import ServerConfig

CALL = Call("a1", (5, 6, 7), 1, 6, SamplingConfig(0.7, 0, 0.9, 0.0, 99), (9,), 3)
LIMITS = Limits(264, 8, 2, 3, (1, 2))
RECORDED = {  # of vLLM, with one token less
  "request_id": "generate-tokens-a1", "model": "/weights", "created": 1795422882,
  "usage": {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3},
  "prompt_logprobs": None, "output_mode": "tokens",
  "choices": [{
    "index": 0, "finish_reason": "stop", "stop_reason": 9, "token_ids": [28, 58, 9],
    "routed_experts": None, "sampling_mask": None,
    "weight_versions": [
      {"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3},
    ],
    "logprobs": {"content": [
      {"token_id": t, "logprob": p, "rank": 2, "top_logprobs": [{"token_id": t, "logprob": p}]}
      for t, p in ((28, -5.599640846252441), (58, -3.150298595428467), (9, -3.356875419616699))
    ]},
  }],
}  # fmt: skip
COMPLETION = {  # of vLLM's /v1/completions, with return_token_ids
  "id": "cmpl-a1", "object": "text_completion", "model": "/weights",
  "choices": [{
    "index": 0, "text": "x", "finish_reason": "stop", "stop_reason": 9,
    "token_ids": [28, 58, 9], "prompt_token_ids": [5, 6, 7],
    "logprobs": {"text_offset": [0, 1, 2], "token_logprobs": [-5.5, -3.1, -3.3],
                 "tokens": ["a", "b", "c"], "top_logprobs": [None, None, None]},
  }],
}  # fmt: skip
DATED = dict(  # of gspo_jax.serve
  choices=[
    COMPLETION["choices"][0] | dict(weight_versions=RECORDED["choices"][0]["weight_versions"])
  ]
)
SGLANG_ANSWER = {
  "text": "x", "output_ids": [28, 58, 9],
  "meta_info": {
    "id": "594dd14c1b89490e95ddebf742382420", "finish_reason": {"type": "stop", "matched": 9},
    "prompt_tokens": 3, "weight_version": "5", "num_retractions": 0, "completion_tokens": 3,
    "cached_tokens": 1, "dp_rank": None, "e2e_latency": 2.838345530908555,
    "output_token_logprobs": [[-5.5, 28, None], [-3.1, 58, None], [-3.3, 9, None]],
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "dialect, answer, versions",
  [
    (VLLM, RECORDED, [4, 4, 5]),
    (COMPLETIONS, COMPLETION, None),
    (COMPLETIONS, DATED, [4, 4, 5]),
    (SGLANG, SGLANG_ANSWER, [5, 5, 5]),
  ],
  ids=["vllm", "completions", "completions of gspo_jax.serve", "sglang"],
)
def test_an_answer_is_read(dialect, answer, versions):
  (part,) = checked(dialect.read(answer, CALL), CALL, LIMITS, 4, 5)
  assert part.tokens.tolist() == [28, 58, 9] and part.stopped and not part.aborted
  np.testing.assert_allclose(part.logp, [-5.5, -3.1, -3.3], atol=0.1)
  assert (None if part.version is None else part.version.tolist()) == versions
  if versions is not None:
    with pytest.raises(Failed, match="weights"):
      checked(dialect.read(answer, CALL), CALL, LIMITS, 6, 6)


def test_nothing_of_the_distribution_is_left_to_a_servers_defaults():
  expected = dict(temperature=0.7, top_p=0.9, min_p=0.0, n=1, ignore_eos=True, stop_token_ids=[9])
  expected |= dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
  for dialect, tokens, most in (
    (VLLM, "token_ids", dict(max_tokens=6, seed=3, top_k=0, logprobs=0)),
    (COMPLETIONS, "prompt", dict(max_tokens=6, seed=3, top_k=0, logprobs=0)),
    (SGLANG, "input_ids", dict(max_new_tokens=6, sampling_seed=3, top_k=-1)),
  ):
    body = dialect.generate(CALL).body
    sent = body if dialect is COMPLETIONS else body["sampling_params"]
    assert body[tokens] == [5, 6, 7] and (expected | most).items() <= sent.items()


def test_samples_of_a_group_have_seeds_of_their_own():
  """SGLang hashes a seed with the position alone, and copies the parameters of `n` samples."""
  body = SGLANG.generate(dataclasses.replace(CALL, samples=3, seed=2**31 - 2)).body
  assert body["input_ids"] == [[5, 6, 7]] * 3 and body["rid"] == ["a1-0", "a1-1", "a1-2"]
  assert [one["sampling_seed"] for one in body["sampling_params"]] == [2**31 - 2, 2**31 - 1, 0]
  assert [one["n"] for one in body["sampling_params"]] == [1, 1, 1]
  assert SGLANG.generate(CALL).body["rid"] == "a1"
  call = dataclasses.replace(CALL, samples=2)
  parts = checked(SGLANG.read([SGLANG_ANSWER, SGLANG_ANSWER], call), call, LIMITS, 4, 5)
  assert len(parts) == 2
  wrong = dataclasses.replace(parts[1], logp=np.full(3, 0.5, np.float32))
  with pytest.raises(Failed, match="response 1: a log-prob is above 0"):
    checked([parts[0], wrong], call, LIMITS, 4, 5)


def test_an_answer_without_tokens_is_of_any_weights():
  """Aborted in a server's queue, after new weights came."""
  empty = dict(index=0, finish_reason="abort", token_ids=[], weight_versions=[], logprobs=None)
  (part,) = VLLM.read(dict(choices=[empty]), CALL)
  (part,) = checked([dated(part, 4)], CALL, LIMITS, 4, 5)
  assert part.aborted and part.version.tolist() == []
  (part,) = COMPLETIONS.read(COMPLETION, CALL)
  assert dated(part, 4).version.tolist() == [4, 4, 4]


def npy(array):
  file = io.BytesIO()
  np.save(file, array)
  return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("layers", [2, 3])
def test_routed_experts_are_decoded(layers):
  """Of layers with experts, whether or not the server has rows for the others."""
  call = Call("a1", (5, 6, 7), 1, 6, CALL.sampling, (9,), 3, routing=True)
  experts = np.arange(5 * layers * 2).reshape(5, layers, 2) % 8
  own = experts if layers == 2 else experts[:, 1:]
  choice = RECORDED["choices"][0] | dict(routed_experts=npy(experts.astype(np.uint8)))
  flat = base64.b64encode(experts.astype("<i4").tobytes()).decode()
  meta = SGLANG_ANSWER["meta_info"] | dict(routed_experts=flat)
  for dialect, answer in (
    (VLLM, dict(choices=[choice])),
    (COMPLETIONS, dict(choices=[DATED["choices"][0] | dict(routed_experts=npy(experts))])),
    (SGLANG, SGLANG_ANSWER | dict(meta_info=meta)),
  ):
    (part,) = checked(dialect.read(answer, call), call, LIMITS, 4, 5)
    assert part.experts.dtype == np.int8
    np.testing.assert_array_equal(part.experts, own)
  for wrong in (experts[1:], experts + 8, experts.astype(np.float32)):
    choice |= dict(routed_experts=npy(wrong))
    with pytest.raises(Failed, match=r"experts"):
      checked(VLLM.read(dict(choices=[choice]), call), call, LIMITS, 4, 5)
  for text in ("no base64", npy(np.array([None]))):  # a pickle, which is never read
    with pytest.raises(Failed, match=r"no array in base64"):
      VLLM.read(dict(choices=[choice | dict(routed_experts=text)]), call)
  with pytest.raises(Failed, match=r"no routed experts came"):
    checked(VLLM.read(RECORDED, call), call, LIMITS, 4, 5)


def headed(header, version=(1, 0)):
  """Base64 of an .npy with a header of our own, and four bytes."""
  size = len(header).to_bytes(2 * version[0], "little")
  return base64.b64encode(b"\x93NUMPY" + bytes(version) + size + header.encode() + b"abcd").decode()


@pytest.mark.parametrize(
  "text",
  [
    base64.b64encode(b"PK\x05\x06" + bytes(18)).decode(),  # an empty zip, which np.load opens
    base64.b64encode(b"PK").decode(),
    headed("{'descr': '<i4', 'fortran_order': False, 'shape': (1125899906842624,)}\n"),
    headed("{'descr': '<i4', 'fortran_order': False, 'shape': (-1, -1)}\n"),
    headed("{'descr': '<i4', 'fortran_order': False, 'shape': (1,)\n"),  # not closed
    headed('("""\n'),
    headed("-" * 9000 + "1\n"),
    headed("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
    headed("{}", (9, 9)),
    7,
  ],
  ids=range(10),
)  # fmt: skip
def test_nothing_that_experts_may_hold_is_more_than_a_failure(text):
  with pytest.raises(Failed, match=r"no array in base64") as error:
    array_of_base64(text)
  assert error.value.kind == "body"


def test_no_room_is_made_for_what_a_header_claims():
  text = headed("{'descr': '<i4', 'fortran_order': False, 'shape': (134217728,)}\n")
  tracemalloc.start()
  try:
    with pytest.raises(Failed, match=r"no array in base64"):
      array_of_base64(text)
    assert tracemalloc.get_traced_memory()[1] < 2**20
  finally:
    tracemalloc.stop()
  right = headed("{'descr': '<i4', 'fortran_order': False, 'shape': (1,)}\n")
  assert array_of_base64(right).tolist() == [int.from_bytes(b"abcd", "little")]


@pytest.mark.parametrize("value", [-(10**400), "x", {}, [1.0]])
def test_numbers_are_numbers(value):
  with pytest.raises(Failed, match="where numbers belong"):
    floats([value])


@pytest.mark.parametrize("end", ["x", float("inf"), float("nan"), None, [1]])
def test_spans_are_spans(end):
  for dialect, answer in ((VLLM, RECORDED), (COMPLETIONS, DATED)):
    spans = [dict(version="4", start=0, end=end)]
    if end is None:
      spans = 5
    with pytest.raises(Failed, match="weight_versions are no spans"):
      dialect.read(dict(choices=[answer["choices"][0] | dict(weight_versions=spans)]), CALL)


class Said:
  """A wire at whose end paths have one status each."""

  def __init__(self, **statuses):
    self.statuses = statuses

  async def sent(self, url, ask, seconds):
    return self.statuses.get(ask.path.rpartition("/")[2], 404), b""

  async def ask(self, url, ask, seconds):
    return {}


def test_a_dialect_is_found_by_its_path_and_not_by_a_proxy_that_is_out_of_order():
  def found(configured="auto", **statuses):
    return asyncio.run(find_dialect(Said(**statuses), "http://a:1", configured, False))

  assert found(generate=422) is VLLM and found(completions=400) is COMPLETIONS
  for status in (500, 502, 503):
    with pytest.raises(Failed, match=f"HTTP {status}.*engine.server.dialect") as error:
      found(generate=status)
    assert error.value.kind == "status"
  assert found("sglang", generate=502) is SGLANG
  with pytest.raises(Refused, match="it has none of"):
    found()


def test_a_token_that_no_header_can_have_is_refused_without_being_told(monkeypatch):
  config = ServerConfig(token_variable="SECRET")
  for token in ("s3c\nret", "s3cr\u00e9t", "s3cret\x7f"):
    monkeypatch.setenv("SECRET", token)
    with pytest.raises(ValueError, match="the token of SECRET must be of printable ASCII") as error:
      Wire(config, 1)
    assert "s3c" not in str(error.value)
  monkeypatch.setenv("SECRET", "s3cret\n")  # of a file
  assert Wire(config, 1)._client.headers["Authorization"] == "Bearer s3cret"


def test_there_are_descriptors_for_all_connections(monkeypatch):
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
  try:
    assert Wire(ServerConfig(in_flight=256), 4).in_flight == 256
    raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised == min(hard, 4 * (256 + 16) + wire.SPARE) or hard == resource.RLIM_INFINITY
    assert raised > 4 * 256
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  set_to = []
  monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
  for limits, in_flight, now in (
    ((1024, 1024), 112, []),  # half of them, less what is asked besides
    ((1024, 4096), 256, [(2112, 4096)]),
    ((1024, resource.RLIM_INFINITY), 256, [(2112, resource.RLIM_INFINITY)]),
    ((resource.RLIM_INFINITY,) * 2, 256, []),
    ((8, 8), 1, []),
  ):
    set_to.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
    assert Wire(ServerConfig(in_flight=256), 4).in_flight == in_flight and set_to == now


def test_servers_that_do_not_reload_need_a_command():
  with pytest.raises(
    ValueError, match=r"engine\.server\.reloads=False needs engine\.server\.command"
  ):
    ServerConfig(reloads=False)
  assert not ServerConfig(reloads=False, command="serve").reloads


def test_a_server_that_lacks_something_says_so_before_training():
  def said(mode, sends):
    outputs = dict(enable_return_routed_experts=sends)
    return dict(vllm_config=dict(model_config=dict(logprobs_mode=mode), aux_output_config=outputs))

  right = "processed_logprobs"
  assert VLLM.unfit(said(right, False), False) == "" == VLLM.unfit(said(right, True), True)
  assert "--logprobs-mode processed_logprobs" in VLLM.unfit(said("raw_logprobs", True), False)
  assert "--enable-return-routed-experts" in VLLM.unfit(said(right, False), True)
  assert VLLM.unfit({}, True) == "" == VLLM.unfit(dict(vllm_config="a text"), True)
  assert "--enable-return" in SGLANG.unfit(dict(enable_return_routed_experts=False), True)
  assert "--logprobs-mode" in COMPLETIONS.processed and "SGLANG_RETURN_OR" in SGLANG.processed


def test_versions_are_whole_numbers_or_nobodys():
  assert [version_number(x) for x in ("12", 3, "default", "", "-1", "²", "9" * 30, None)] == [
    12, 3, -1, -1, -1, -1, -1, -1,
  ]  # fmt: skip


def test_sglang_is_told_of_weights_after_what_was_under_way_came_back():
  asks = SGLANG.publish("/w/weights_000007", 7)
  assert [ask.path for ask in asks] == [
    "/pause_generation", "/update_weights_from_disk", "/continue_generation",
  ]  # fmt: skip
  assert asks[0].body == dict(mode="abort")
  assert asks[1].body["weight_version"] == "7" and asks[1].holds == dict(success=True)


def test_a_process_ends_with_its_children(tmp_path):
  command = filled("echo {index} {host}:{port} {weights}; sleep 60 & wait", "http://a:81", 2, "/w")
  process = Process(command, tmp_path / "logs/server.log")
  while "2 a:81 /w" not in process.log.read_text():
    assert process.alive
  process.stop()
  assert not process.alive and not in_group(process.pid)


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_has_time_to_end_by_itself(tmp_path, monkeypatch, ends):
  monkeypatch.setattr(launch, "STOP_S", 20.0 if ends else 0.5)
  ending = "sleep 0.2; echo ended; exit" if ends else ":"
  command = f"trap '{ending}' TERM; echo up; while true; do sleep 0.02; done"
  process = Process(command, tmp_path / "server.log")
  while "up" not in process.log.read_text():
    assert process.alive
  started = time.monotonic()
  process.stop()
  assert time.monotonic() - started < 10
  assert ("ended" in process.log.read_text()) == ends
  assert not process.alive and not in_group(process.pid)  # at once


def in_group(group):
  """Processes of a group that are not over."""
  found = subprocess.run(["ps", "-eo", "pgid,stat"], capture_output=True, text=True).stdout
  rows = [line.split() for line in found.splitlines()[1:]]
  return [stat for pgid, stat in rows if pgid == str(group) and not stat.startswith("Z")]


def test_a_process_ends_with_a_run_that_was_killed(tmp_path):
  start = "from gspo_jax.sampling.servers.launch import Process; import pathlib, time; "
  start += f"print(Process('exec sleep 60', pathlib.Path('{tmp_path}/log')).pid, flush=True); "
  run = subprocess.Popen(
    [sys.executable, "-c", start + "time.sleep(60)"],
    stdout=subprocess.PIPE, env=environment(),
  )  # fmt: skip
  group = int(run.stdout.readline())
  assert in_group(group)
  run.kill()
  run.wait()
  run.stdout.close()
  end = time.monotonic() + 20
  while in_group(group):
    assert time.monotonic() < end
    time.sleep(0.05)
