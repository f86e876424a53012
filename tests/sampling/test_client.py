"""What is sent, and an answer as vLLM 0.32 gave it on the CPU, read."""

import base64
import dataclasses
import io
import resource

import numpy as np
import pytest

from gspo_jax.sampling.servers import client, probe
from gspo_jax.sampling.servers.client import ServerPool
from gspo_jax.sampling.servers.probe import Call, Failed, read_answer
from gspo_jax.settings.sampling import SamplingConfig, ServerConfig
from gspo_jax.settings.sizes import tiny_moe

CALL = Call("a1", (5, 6, 7), 6, SamplingConfig(0.7, 0, 0.9, 0.0, 99), (9,), 3)
# Eight experts, of which a token takes two, in the last two of three layers.
MODEL = dataclasses.replace(tiny_moe(264), num_layers=3, mlp_only_layers=(0,))
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


CONTENT = RECORDED["choices"][0]["logprobs"]["content"]


def test_an_answer_is_read():
  part = read_answer(RECORDED, CALL, MODEL, 4, 5)
  assert part.tokens.tolist() == [28, 58, 9] and part.stopped and not part.aborted
  np.testing.assert_allclose(part.logp, [-5.5, -3.1, -3.3], atol=0.1)
  assert part.version.tolist() == [4, 4, 5]
  with pytest.raises(Failed, match="weights"):
    read_answer(RECORDED, CALL, MODEL, 6, 6)
  with pytest.raises(Failed, match=r"the answer cannot be used: .*too many values"):
    read_answer(dict(choices=2 * RECORDED["choices"]), CALL, MODEL, 4, 5)
  wrong = dataclasses.replace(part, logp=np.full(3, 0.5, np.float32))
  with pytest.raises(Failed, match="log-prob that is above 0"):
    probe.check_part(wrong, CALL, MODEL, 4, 5)


def test_nothing_of_the_distribution_is_left_to_a_servers_defaults():
  expected = dict(temperature=0.7, top_p=0.9, min_p=0.0, n=1, ignore_eos=True, stop_token_ids=[9])
  expected |= dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
  expected |= dict(max_tokens=6, seed=3, top_k=0, logprobs=0)
  body = client.generate_body(CALL)
  assert body["token_ids"] == [5, 6, 7] and expected.items() <= body["sampling_params"].items()


def test_an_answer_without_tokens_is_of_any_weights():
  """Aborted in a server's queue, after new weights came."""
  empty = dict(index=0, finish_reason="abort", token_ids=[], weight_versions=[], logprobs=None)
  part = read_answer(dict(choices=[empty]), CALL, MODEL, 4, 5)
  assert part.aborted and part.version.tolist() == []


def npy(array):
  file = io.BytesIO()
  np.save(file, array)
  return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("layers", [2, 3])
def test_routed_experts_are_decoded(layers):
  """Layers with experts count; a server may have rows for the others too."""
  call = Call("a1", (5, 6, 7), 6, CALL.sampling, (9,), 3, routing=True)
  experts = np.arange(5 * layers * 2).reshape(5, layers, 2) % 8
  expected = experts if layers == 2 else experts[:, 1:]
  choice = dict(RECORDED["choices"][0])
  for sent in (experts, experts.astype(np.uint8)):
    choice |= dict(routed_experts=npy(sent))
    part = read_answer(dict(choices=[choice]), call, MODEL, 4, 5)
    assert part.experts.dtype == np.int8
    np.testing.assert_array_equal(part.experts, expected)
  for wrong in (experts[1:], experts + 8, experts.astype(np.float32)):
    choice |= dict(routed_experts=npy(wrong))
    with pytest.raises(Failed, match=r"experts"):
      read_answer(dict(choices=[choice]), call, MODEL, 4, 5)
  for text in ("no base64", npy(np.array([None]))):  # a pickle, which is never read
    with pytest.raises(Failed, match=r"the answer cannot be used"):
      read_answer(dict(choices=[choice | dict(routed_experts=text)]), call, MODEL, 4, 5)
  with pytest.raises(Failed, match=r"no routed experts: start the server with --enable"):
    read_answer(RECORDED, call, MODEL, 4, 5)


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
  call = dataclasses.replace(CALL, routing=True)
  choice = RECORDED["choices"][0] | dict(routed_experts=text)
  with pytest.raises(Failed, match=r"the answer cannot be used") as error:
    read_answer(dict(choices=[choice]), call, MODEL, 4, 5)
  assert error.value.kind == "body"


@pytest.mark.parametrize("value", [-(10**400), "x", {}, [1.0]])
def test_numbers_are_numbers(value):
  content = [entry | dict(logprob=value) for entry in CONTENT]
  choice = RECORDED["choices"][0] | dict(logprobs=dict(content=content))
  with pytest.raises(Failed):
    read_answer(dict(choices=[choice]), CALL, MODEL, 4, 5)


@pytest.mark.parametrize("end", ["x", float("inf"), float("nan"), None, [1]])
def test_spans_are_spans(end):
  spans = 5 if end is None else [dict(version="4", start=0, end=end)]
  with pytest.raises(Failed, match="the answer cannot be used"):
    choice = RECORDED["choices"][0] | dict(weight_versions=spans)
    read_answer(dict(choices=[choice]), CALL, MODEL, 4, 5)


def connect(config, count):
  """Returns a closed pool of `count` servers."""
  pool = ServerPool([f"http://{i}" for i in range(count)], config, MODEL)
  pool.close()
  return pool


def test_a_token_that_no_header_can_have_is_refused_without_being_told(monkeypatch):
  config = ServerConfig()
  for token in ("s3c\nret", "s3cr\u00e9t", "s3cret\x7f"):
    monkeypatch.setenv(client.TOKEN, token)
    with pytest.raises(ValueError, match="GSPO_ENGINE_TOKEN must be of printable ASCII") as error:
      connect(config, 1)
    assert "s3c" not in str(error.value)
  monkeypatch.setenv(client.TOKEN, "s3cret\n")  # of a file
  assert connect(config, 1)._http.headers["Authorization"] == "Bearer s3cret"


def test_there_are_descriptors_for_all_connections(monkeypatch):
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
  try:
    assert connect(ServerConfig(in_flight=256), 4).in_flight == 256
    raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (
      raised == min(hard, 4 * (256 + 16) + client.SPARE_DESCRIPTORS)
      or hard == resource.RLIM_INFINITY
    )
    assert raised > 4 * 256
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  set_to = []
  monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
  for limits, in_flight, current in (
    ((1024, 1024), 112, []),  # half of them, less what is asked besides
    ((1024, 4096), 256, [(2112, 4096)]),
    ((1024, resource.RLIM_INFINITY), 256, [(2112, resource.RLIM_INFINITY)]),
    ((resource.RLIM_INFINITY,) * 2, 256, []),
    ((8, 8), 1, []),
  ):
    set_to.clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
    assert connect(ServerConfig(in_flight=256), 4).in_flight == in_flight and set_to == current


@pytest.mark.parametrize("label", ["default", "", "-1", "²", "9" * 30, None])
def test_versions_are_whole_numbers(label):
  spans = [dict(version=label, start=0, end=3)]
  choice = RECORDED["choices"][0] | dict(weight_versions=spans)
  with pytest.raises(Failed):
    read_answer(dict(choices=[choice]), CALL, MODEL, 0, 5)
