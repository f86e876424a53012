"""The server over real sockets: what it answers, what it refuses, weights that change in flight."""

import base64
import concurrent.futures
import dataclasses
import http.client
import io
import json
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.configs import config_of
from support.small_models import initial, next_logp

from configs import common
from gspo_jax import serve, sharding
from gspo_jax.data import tokenizer
from gspo_jax.learner.state import new_state
from gspo_jax.models import hf, transformer
from gspo_jax.runs import checkpoint, weights
from gspo_jax.sampling import generate
from gspo_jax.sampling.local import slots
from gspo_jax.sampling.requests import sizes
from gspo_jax.serving import answers, dialect
from gspo_jax.serving.limits import Limits
from gspo_jax.serving.loop import Loop
from gspo_jax.settings.training import CheckpointConfig

uvicorn = pytest.importorskip("uvicorn", reason="pip install -e '.[serve]'")

from gspo_jax.serving import app as http_app  # noqa: E402

CONFIG = config_of(
  common.base, mesh__data=1, mesh__fsdp=1, weights="random", engine__steps=2, rl__group_size=2,
  data__max_prompt_tokens=24, sampling__max_new_tokens=24, reward__overlong_max=24, engine__slots=4,
  model__hidden_size=16, model__num_layers=1, model__num_heads=2, model__num_kv_heads=2,
  model__head_dim=8, model__moe_intermediate_size=8,
)  # fmt: skip
MODEL = CONFIG.model
LIMITS = Limits(
  window=48, vocab_size=MODEL.vocab_size, most_text=96, most_samples=8, most_prompts=3, queue=64,
  body_bytes=20_000, stop_ids=4, stop_strings=2, stop_string_bytes=8, timeout_s=60.0,
)  # fmt: skip
PROMPT = list(b"12+34=")
LONG = dict(max_tokens=40, seed=11, logprobs=0, ignore_eos=True)
NEVER = 10.0  # seconds, after which what should have come has not


@dataclasses.dataclass
class Client:
  port: int
  token: str = ""

  def __call__(self, method, path, body=None, **headers):
    """Status and body; an object is JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    if isinstance(body, dict | list):
      body, headers = json.dumps(body), {"content-type": "application/json"} | headers
    if self.token:
      headers["authorization"] = f"Bearer {self.token}"
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    kind = response.headers.get("content-type", "")
    return response.status, json.loads(text) if "json" in kind else text.decode()

  def generate(self, tokens=PROMPT, **parameters):
    """The choices of a request that must succeed."""
    status, answer = self(
      "POST", "/inference/v1/generate", dict(token_ids=tokens, sampling_params=parameters)
    )
    assert status == 200, answer
    return answer["choices"]

  def reload(self, path):
    body = dict(method="reload_weights", kwargs=dict(weights_path=str(path)))
    return self("POST", "/collective_rpc", body)

  def do(self, path, body=None):
    status, answer = self("POST", path, body)
    assert status == 200, answer
    return answer


def serving(server):
  """Serves from another thread of this process. Gives the client and what stops it."""
  running = uvicorn.Server(
    uvicorn.Config(http_app.make(server), port=0, log_level="error", timeout_graceful_shutdown=1)
  )
  thread = threading.Thread(target=running.run, daemon=True)
  thread.start()
  wait(lambda: running.started)

  def stop():
    running.should_exit = True
    thread.join(10)

  return Client(running.servers[0].sockets[0].getsockname()[1]), stop


def wait(condition, seconds=NEVER):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it never came true"
    time.sleep(0.002)


class Engine:
  """An engine whose steps may take long, or fail: the first ones after a start do not, as on a
  device, whose errors come with what is fetched."""

  delay, errors, spared = 0.0, 0, 0

  def __init__(self, engine):
    self._engine = engine

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def start(self, workload):
    self._steps = 0
    self._engine.start(workload)

  def step(self):
    time.sleep(Engine.delay)
    self._steps += 1
    if Engine.errors and self._steps > Engine.spared:
      Engine.errors -= 1
      raise RuntimeError("the chip is gone")
    return self._engine.step()


def programs():
  return slots.prefill._cache_size() + slots.decode._cache_size()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  tok, mesh, make_engine = serve.parts(CONFIG, jax.devices()[:1])
  with jax.set_mesh(mesh):
    old = weights.initial(CONFIG, mesh)
  work = serve.workload(CONFIG, LIMITS, record_routing=True)
  loop = Loop(
    lambda: Engine(make_engine()),
    lambda path: old if path == "random" else serve.read_weights(CONFIG, mesh, path),
    work,
    lambda: jax.set_mesh(mesh),
  )
  loop.start("random")
  compiled = programs()
  serve.warm_up(loop, work, CONFIG.engine)
  compiled = programs() - compiled
  server = http_app.Server(loop, LIMITS, tok, "tiny", info=dict(logprobs_mode="processed_logprobs"))
  client, stop = serving(server)
  new = initial(MODEL, 7)
  directory = tmp_path_factory.mktemp("weights")
  hf.save(directory / "new", new, MODEL)
  yield SimpleNamespace(
    client=client, server=server, loop=loop, old=jax.device_get(old), new=new, tok=tok,
    directory=directory, mesh=mesh, compiled=compiled,
  )  # fmt: skip
  stop()
  loop.close()
  assert not loop._thread.is_alive()


@pytest.fixture
def client(world):
  yield world.client
  Engine.delay = Engine.errors = Engine.spared = 0
  world.client.do("/resume")
  if world.loop.version or world.loop.label != "default":
    assert world.client.reload("random")[0] == 200
    world.client.do("/update_weight_version", dict(new_version="default"))
  wait(lambda: world.server.queued == 0 and world.loop.running == 0)


def expected(world, params=None, tokens=PROMPT, n=1, max_tokens=40, stop=(), **options):
  """Tokens and log-probs of `generate`, by response."""
  options = dict(stop_ids=stop) | options
  rollout = generate(
    params or world.old, MODEL, [tokens], group_size=n, max_new_tokens=max_tokens, **options
  )
  found = []
  for row in range(n):
    at = rollout.mask[row] > 0
    found.append((rollout.tokens[row][at].tolist(), rollout.logp[row][at]))
  return found


def logps(choice):
  content = choice["logprobs"]["content"]
  assert [entry["token_id"] for entry in content] == choice["token_ids"]
  assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in content)
  return np.array([entry["logprob"] for entry in content])


def same(choices, wanted):
  assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in wanted]
  for choice, (_, logp) in zip(choices, wanted):
    np.testing.assert_allclose(logps(choice), logp, atol=1e-5)


@pytest.mark.parametrize(
  "options",
  [
    dict(n=3, temperature=0.8, seed=5),
    dict(n=2, temperature=1.0, top_k=5, top_p=0.9, min_p=0.05, seed=6),
    dict(temperature=0.0),
  ],
  ids=str,
)
def test_what_is_sampled_is_what_generate_samples(world, client, options):
  stop = (30, 31, 32)
  choices = client.generate(max_tokens=20, logprobs=0, stop_token_ids=list(stop), **options)
  eos = world.tok.stop_ids
  wanted = expected(world, max_tokens=20, stop=(*stop, *eos), **options)
  same(choices, wanted)
  for choice in choices:
    tokens = choice["token_ids"]
    ended = tokens[-1] in (*stop, *eos)
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert choice["stop_reason"] == (tokens[-1] if tokens[-1] in stop else None)
    assert choice["weight_versions"] == [dict(version="default", start=0, end=len(tokens))]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert experts.shape == (len(PROMPT) + len(tokens) - 1, 1, MODEL.experts_per_token)
    assert experts.dtype == np.uint8 and experts.max() < MODEL.num_experts


def test_many_at_once_are_each_as_if_alone(world, client):
  kinds = [
    dict(seed=i, max_tokens=3 + i, temperature=0.5 * (i % 4), n=1 + i % 3, top_k=i % 5, logprobs=0)
    for i in range(16)
  ]
  prompts = [[i, 200 - i, 7][: 1 + i % 3] for i in range(16)]
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    futures = [pool.submit(client.generate, p, **kind) for p, kind in zip(prompts, kinds)]
    together = [future.result() for future in futures]
  for prompt, kind, choices in zip(prompts, kinds, together):
    alone = client.generate(prompt, **kind)
    assert [c["token_ids"] for c in choices] == [c["token_ids"] for c in alone]
    for one, other in zip(choices, alone):
      np.testing.assert_allclose(logps(one), logps(other), atol=1e-5)
  assert len({tuple(c[0]["token_ids"]) for c in together}) == 16


def test_no_request_compiles(world, client):
  """Whatever its length: decoding and the prefills of 16, 32 and 46 tokens are there."""
  assert world.compiled == 4
  before = programs()
  for length in (1, 17, 18, 33, 34, 47):
    client.generate([7] * length, max_tokens=1, top_k=2)
  assert programs() == before


@pytest.mark.parametrize(
  "asked, configured, expected", [(0, 0, 32), (0, 5, 5), (64, 32, 64), (3, 32, 3)]
)
def test_as_many_slots_as_are_said(asked, configured, expected):
  config = dataclasses.replace(CONFIG, engine=dataclasses.replace(CONFIG.engine, slots=configured))
  config = serve.with_slots(config, asked)
  work = serve.workload(config, LIMITS, False)
  assert work.trajectories == sizes(work, config.engine, 1).slots == expected


def test_completions_as_text_and_as_tokens(world, client):
  body = dict(model="tiny", max_tokens=12, seed=3, logprobs=1, n=2, return_token_ids=True)
  answer = client.do("/v1/completions", body | dict(prompt=["12+34=", PROMPT[:3]]))
  first, second, third, fourth = answer["choices"]
  same_tokens = [one["token_ids"] for one in (first, second)]
  assert same_tokens == [c["token_ids"] for c in client.generate(max_tokens=12, seed=3, n=2)]
  assert third["prompt_token_ids"] == fourth["prompt_token_ids"] == PROMPT[:3]
  assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
  assert first["text"] == world.tok.decode(first["token_ids"])
  assert len(first["logprobs"]["token_logprobs"]) == len(first["token_ids"])
  counts = [len(one["token_ids"]) for one in answer["choices"]]
  assert answer["usage"] == dict(
    prompt_tokens=9, completion_tokens=sum(counts), total_tokens=9 + sum(counts)
  )
  by_default = client.do("/v1/completions", dict(prompt="12+34=", seed=3, ignore_eos=True))
  assert by_default["usage"]["completion_tokens"] == 16 and not by_default["choices"][0]["logprobs"]
  assert answer["object"] == "text_completion"


def test_stop_strings(client):
  whole = client.do("/v1/completions", dict(prompt="12+34=", seed=3, temperature=2.0))
  text = whole["choices"][0]["text"]
  string = next(one for one in text[2:] if one.isascii())
  body = dict(prompt="12+34=", seed=3, temperature=2.0, stop=[string, "never"])
  cut = client.do("/v1/completions", body)["choices"][0]
  assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", string)
  assert cut["text"] == text[: text.index(string)]
  body |= dict(include_stop_str_in_output=True)
  assert client.do("/v1/completions", body)["choices"][0]["text"] == cut["text"] + string


def test_only_texts_that_are_needed_are_made(world, client, monkeypatch):
  made, decode = [], world.tok.decode
  one = SimpleNamespace(
    encode=world.tok.encode, begin=str, stop_ids=(),
    decode=lambda ids: (made.append(len(ids)), decode(ids))[1],
  )  # fmt: skip
  monkeypatch.setattr(world.server, "tokenizer", one)
  body = dict(prompt="12+34=", seed=3, max_tokens=5)
  client.generate(max_tokens=5)
  assert not made
  client.generate(max_tokens=5, stop="nev")
  assert made == [3, 5]  # whether any text can have it
  client.do("/v1/completions", body)
  assert made == [3, 5, 5]


def test_texts_begin_with_a_bos_token_and_stop_at_what_can_be_said(world, client, monkeypatch):
  tok = world.tok
  one = SimpleNamespace(
    encode=lambda text: [] if text == "<s>" else tok.encode(text),  # the decoder skips it
    decode=tok.decode, stop_ids=(), begin=lambda text: "B" + text,
  )  # fmt: skip
  monkeypatch.setattr(world.server, "tokenizer", one)
  body = dict(prompt="12+34=", seed=3, max_tokens=5, return_token_ids=True)
  (choice,) = client.do("/v1/completions", body)["choices"]
  assert choice["prompt_token_ids"] == tok.encode("B12+34=")
  (choice,) = client.do("/v1/completions", body | dict(add_special_tokens=False))["choices"]
  assert choice["prompt_token_ids"] == tok.encode("12+34=")
  status, answer = client("POST", "/v1/completions", body | dict(stop="<s>"))
  assert status == 400 and "name tokens in stop_token_ids" in answer["error"]["message"]


def test_tokens_of_one_character_begin_where_it_does():
  text = "é = 価ok"
  ids = list(text.encode())
  offsets = answers._offsets(ids, tokenizer.load("bytes").decode)
  assert offsets == [i for i, c in enumerate(text) for _ in c.encode()]
  pieces = [" a", " b", "", "c"]  # a decoder that leaves out a space at the beginning
  join = lambda some: "".join(pieces[i] for i in some).removeprefix(" ")  # noqa: E731
  assert answers._offsets([0, 1, 2, 3], join) == [0, 1, 3, 3]


def test_seeds_that_are_not_given_differ(client):
  texts = {tuple(client.generate(max_tokens=12)[0]["token_ids"]) for _ in range(3)}
  assert len(texts) == 3
  body = dict(prompt=["12+34="] * 3, max_tokens=12, return_token_ids=True)
  choices = client.do("/v1/completions", body)["choices"]
  assert len({tuple(one["token_ids"]) for one in choices}) == 3
  seeded = client.do("/v1/completions", body | dict(seed=4))["choices"]
  assert len({tuple(one["token_ids"]) for one in seeded}) == 1


GOOD = dict(token_ids=[1, 2], sampling_params=dict(max_tokens=2))
REFUSED = [
  (b"{", "not JSON"),
  (b"[1]", "must be a JSON object"),
  (b'{"token_ids": [1], "request_id": "\\ud800"}', "not JSON"),
  (b"[" * 15_000, "not JSON"),
  (dict(), "token_ids must be token ids"),
  (dict(token_ids=[]), "at least one"),
  (dict(token_ids="abc"), "token_ids must be token ids"),
  (dict(token_ids=[264]), "from 0 to 263"),
  (dict(token_ids=[True]), "from 0 to 263"),
  (dict(token_ids=[1] * 48), "window of 48"),
  (dict(token_ids=[1] * 49), "token_ids: 49 tokens are more than the window of 48"),
  (dict(token_ids=[264] * 49), "more than the window"),  # before each is looked at
  (GOOD | dict(stream=True), "stream=True is not offered"),
  (GOOD | dict(output_mode="text"), "output_mode='text' is not offered"),
  (GOOD | dict(surprise=1), "unknown field surprise"),
  (GOOD | dict(sampling_params=3), "must be an object"),
  (dict(max_tokens=47), "longer than the window"),
  (dict(max_tokens=0), "max_tokens=0 must be at least 1"),
  (dict(max_tokens=2.5), "a whole number"),
  (dict(n=9), "n=9 must be 1 to 8 (--max_n)"),
  (dict(n=0), "n=0"),
  (dict(temperature=-1), "temperature"),
  (dict(temperature="hot"), "must be a number"),
  (dict(temperature=float("nan")), "temperature=nan must be"),
  (dict(top_p=0), "top_p"),
  (dict(top_k=-2), "top_k"),
  (dict(seed=-1), "seed=-1 must be 0 to 4294967295"),
  (dict(seed=10**400), "seed"),
  (dict(stop_token_ids=[1, 2, 3, 4, 5]), "at most 4 may (--max_stop_ids)"),
  (dict(stop_token_ids=[-1]), "from 0 to 263"),
  (dict(stop=["a", "b", "c"]), "up to 2 texts"),
  (dict(stop=[""]), "none empty"),
  (dict(stop="123456789"), "longer than 8 bytes"),
  (dict(logprobs=5), "which is 0 or 1"),
  (dict(presence_penalty=0.5), "presence_penalty=0.5 is not offered"),
  (dict(best_of=2), "unknown field sampling_params.best_of"),
]


@pytest.mark.parametrize("body, message", REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_wrong_with_a_request_is_said(client, body, message):
  if isinstance(body, dict) and "token_ids" not in body and body:
    body = GOOD | dict(sampling_params=dict(max_tokens=2) | body)
  body = body if isinstance(body, bytes) else json.dumps(body)
  status, answer = client("POST", "/inference/v1/generate", body, content_type="application/json")
  assert status == 400 and message in answer["error"]["message"], answer
  assert answer["error"]["code"] == 400


@pytest.mark.parametrize(
  "method, path, body, headers, status, message",
  [
    ("POST", "/inference/v1/generate", GOOD | dict(model="other"), {}, 404, "no model 'other'"),
    ("POST", "/v1/completions", dict(prompt=["a"] * 4), {}, 400, "up to 3 of these"),
    ("POST", "/v1/completions", dict(prompt={}), {}, 400, "prompt must be a text"),
    ("POST", "/v1/completions", dict(prompt="a" * 96), {}, 400, "96 tokens are more than"),
    ("POST", "/v1/completions", dict(prompt="a" * 97), {}, 400, "97 characters are more than"),
    ("POST", "/v1/completions", dict(prompt="a", echo=True), {}, 400, "echo=True"),
    ("POST", "/v1/completions", dict(prompt="a", skip_special_tokens=False), {}, 400, "_token_ids"),
    ("POST", "/v1/completions", "{}", dict(content_type="text/plain"), 415, "Content-Type"),
    ("POST", "/v1/completions", dict(prompt="a" * 20_000), {}, 413, "--max_body_mib"),
    ("POST", "/pause", None, dict(origin="http://example.org"), 403, "web pages"),
    ("POST", "/v1/completions", dict(prompt="a"), dict(origin="null"), 403, "web pages"),
    ("GET", "/v1/completions", None, {}, 405, "Not Allowed"),
    ("GET", "/nothing", None, {}, 404, "Not Found"),
    ("POST", "/pause?mode=sleep", None, {}, 400, "keep, abort or wait"),
    ("POST", "/collective_rpc", dict(method="run"), {}, 400, "only reload_weights"),
    ("POST", "/collective_rpc", dict(method="reload_weights"), {}, 400, "weights_path"),
    ("POST", "/update_weight_version", dict(new_version=3), {}, 400, "new_version"),
  ],
  ids=str,
)
def test_and_with_any_other(client, method, path, body, headers, status, message):
  found, answer = client(method, path, body, **headers)
  assert found == status and message in answer["error"]["message"], answer


def test_long_bodies_are_read_in_other_threads(client, monkeypatch):
  """What the event loop does, all others wait for."""
  names, here = set(), threading.current_thread
  for name in ("read_object", "generate"):
    was = getattr(dialect, name)
    monkeypatch.setattr(dialect, name, lambda *a, was=was: (names.add(here().name), was(*a))[1])
  client.generate(max_tokens=1)
  assert names and all("worker" in name for name in names)


def test_a_full_queue_is_said(world, client):
  client.do("/pause?mode=keep")
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    waiting = [pool.submit(client.generate, [i], max_tokens=1, n=8) for i in range(8)]
    wait(lambda: world.server.queued == 64)
    body = dict(token_ids=[1], sampling_params=dict(max_tokens=1))
    status, answer = client("POST", "/inference/v1/generate", body)
    assert status == 429 and "--max_queue" in answer["error"]["message"]
    client.do("/resume")
    assert all(len(future.result()) == 8 for future in waiting)


def test_what_can_never_fit_is_not_told_to_come_again(world, client, monkeypatch):
  monkeypatch.setattr(world.server, "limits", dataclasses.replace(LIMITS, queue=7))
  body = dict(prompt=["a", "b"], max_tokens=1, n=4)
  status, answer = client("POST", "/v1/completions", body)
  assert status == 400 and "8 responses are more than the 7" in answer["error"]["message"]
  assert client("POST", "/v1/completions", body | dict(n=3))[0] == 200


def test_a_request_has_its_time(world, client):
  world.server.limits = dataclasses.replace(LIMITS, timeout_s=0.05)
  client.do("/pause?mode=keep")
  body = dict(token_ids=[1], sampling_params=dict(max_tokens=1))
  status, answer = client("POST", "/inference/v1/generate", body)
  world.server.limits = LIMITS
  assert status == 504 and "--timeout_s" in answer["error"]["message"]
  wait(lambda: world.loop.running == 0)


def test_the_token(world):
  server = dataclasses.replace(world.server, token="secret")
  client, stop = serving(server)
  try:
    assert client("GET", "/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/nothing"):
      status, answer = client("GET", path)
      assert status == 401 and "Bearer" in answer["error"]["message"]
    client.token = "secreT"
    assert client("POST", "/pause")[0] == 401 and not world.loop.paused
    client.token = "secret"
    assert client("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
    counted = 'gspo_jax_requests_total{path="other",status="401"} 4.0'
    assert counted in client("GET", "/metrics")[1]
    assert len(client.generate(max_tokens=1)) == 1
  finally:
    stop()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "10.1.2.3"])
def test_nothing_beyond_loopback_without_a_token(host):
  with pytest.raises(ValueError, match=serve.TOKEN):
    serve._check_host(host, "")
  serve._check_host(host, "secret")
  for near in ("127.0.0.1", "::1", "localhost"):
    serve._check_host(near, "")


def test_what_a_client_learns(client):
  assert client("GET", "/version")[1]["logprobs_mode"] == "processed_logprobs"
  config = client("GET", "/server_info?config_format=json")[1]["vllm_config"]["model_config"]
  assert config["logprobs_mode"] == "processed_logprobs" and config["max_model_len"] == 48
  card = client("GET", "/v1/models")[1]["data"][0]
  assert (card["id"], card["max_model_len"]) == ("tiny", 48)
  assert client("GET", "/health") == (200, "")


def under_way(world, pool, tokens=4, **options):
  """A long response of which some is sampled, and its future."""
  Engine.delay = 0.03
  before = world.loop.total().tokens
  future = pool.submit(world.client.generate, **LONG | options)
  wait(lambda: world.loop.total().tokens >= before + tokens)
  return future


def test_paused_and_resumed(world, client):
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = under_way(world, pool)
    client.do("/pause?mode=keep")
    assert client("GET", "/is_paused")[1] == dict(is_paused=True)
    second = pool.submit(client.generate, [1, 2], max_tokens=3, seed=1, logprobs=0)
    wait(lambda: world.loop.running == 2)
    time.sleep(0.1)
    assert not first.done() and not second.done()
    client.do("/resume")
    same(first.result(), expected(world, seed=11))
    same(second.result(), expected(world, tokens=[1, 2], max_tokens=3, seed=1))


def test_aborted_with_what_is_there(world, client):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    future = under_way(world, pool)
    assert client.do("/pause") == dict(status="paused")  # vLLM's mode by default
    (choice,) = future.result()
  assert choice["finish_reason"] == "abort" and 4 <= len(choice["token_ids"]) < 40
  (whole, logp), = expected(world, seed=11)  # fmt: skip
  assert choice["token_ids"] == whole[: len(choice["token_ids"])]
  np.testing.assert_allclose(logps(choice), logp[: len(logps(choice))], atol=1e-5)


def test_a_pause_may_wait(world, client):
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    first = under_way(world, pool)
    paused = pool.submit(client.do, "/pause?mode=wait")
    wait(lambda: world.loop._waiters)
    second = pool.submit(client.generate, [1, 2], max_tokens=3)
    assert paused.result() == dict(status="paused")
    assert first.result()[0]["finish_reason"] == "length"
    assert not second.done() and world.loop.running == 0
    client.do("/resume")
    assert len(second.result()[0]["token_ids"]) == 3


@pytest.mark.parametrize("paused", [True, False], ids=["paused", "sampling"])
def test_responses_go_on_under_new_weights(world, client, paused):
  before = world.loop.total().tokens
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    future = under_way(world, pool, n=2, tokens=8)
    if paused:
      client.do("/pause?mode=keep")
    assert client.reload(world.directory / "new") == (200, dict(results=[None]))
    client.do("/reset_prefix_cache")
    client.do("/update_weight_version", dict(new_version="v1"))
    assert client("GET", "/weight_info")[1] == dict(weight_version="v1")
    if paused:
      client.do("/resume")
    choices = future.result()
  assert world.loop.total().tokens - before == 2 * 40  # those that came with the change, too
  for choice, (whole, logp) in zip(choices, expected(world, n=2, seed=11), strict=True):
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"]) == ("default", "v1")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], 40)
    cut, tokens = old["end"], choice["token_ids"]
    assert cut >= 4 and tokens[:cut] == whole[:cut] and tokens != whole
    found = logps(choice)
    np.testing.assert_allclose(found[:cut], logp[:cut], atol=1e-5)
    row = np.array([PROMPT + tokens])
    under_new = np.asarray(next_logp(world.new, MODEL, row))[0, len(PROMPT) - 1 :]
    np.testing.assert_allclose(found[cut:], under_new[cut:], atol=1e-5)
    assert np.abs(found[:cut] - under_new[:cut]).max() > 0.01
  same(client.generate(**LONG), expected(world, world.new, seed=11))


def test_weights_nobody_named_have_no_other_name(world, client):
  assert client.reload(world.directory / "new")[0] == 200
  (span,) = client.generate(max_tokens=3)[0]["weight_versions"]
  assert span["version"].startswith("reload-")


def test_there_is_always_a_label():
  """Other threads read `label` at any time."""
  engine = SimpleNamespace(load=lambda *_: None, release=lambda: None)
  loop = Loop(lambda: engine, lambda path: None, None)

  class Labels(dict):
    def setdefault(self, number, label):
      assert loop.label == "default"
      return super().setdefault(number, label)

  loop.labels = Labels(loop.labels)
  loop._reload(concurrent.futures.Future(), "new")
  assert loop.label == "reload-1"


def test_a_checkpoint_of_a_run_is_read_too(world, client, tmp_path):
  import optax

  config = CheckpointConfig(directory="", every=1, keep=2, keep_every=0, best="", grace_s=30.0)
  with jax.set_mesh(world.mesh):
    layout = jax.tree.map(lambda x: x.sharding, weights.initial(CONFIG, world.mesh))
    state = new_state(jax.device_put(world.new, layout), optax.sgd(0.1))
    saved = checkpoint.Checkpointer(tmp_path, "rl", config)
    saved.save(3, state, {"data": {}})
    saved.close()
  assert client.reload(tmp_path / "checkpoints" / "rl")[0] == 200
  same(client.generate(**LONG), expected(world, world.new, seed=11))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_is_read_as_it_is_sampled_with(world, dtype):
  """At once in the sampler's layout and types, so that publishing changes nothing."""
  engine = dataclasses.replace(CONFIG.engine, dtype=dtype)
  split = dataclasses.replace(CONFIG.mesh, fsdp=2)
  config = dataclasses.replace(CONFIG, engine=engine, mesh=split)
  mesh = sharding.make_mesh(split, jax.devices()[:2])
  with jax.set_mesh(mesh):
    found = serve.read_weights(config, mesh, str(world.directory / "new"))
    config = dataclasses.replace(config, weights=str(world.directory / "new"))
    rules = sharding.rollout_rules(split, mesh, MODEL.num_experts)
    layout = transformer.shardings(MODEL, rules, mesh)
    publish = sharding.publisher(layout, transformer.dtypes(MODEL, dtype))
    wanted = publish(weights.initial(config, mesh))
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert one.dtype == other.dtype and one.sharding.is_equivalent_to(other.sharding, one.ndim)
    np.testing.assert_array_equal(one, other)


def test_weights_that_are_wrong_leave_the_old_ones(world, client, tmp_path):
  larger = dataclasses.replace(MODEL, moe_intermediate_size=16)
  hf.save(tmp_path / "larger", initial(larger), larger)
  broken = world.new.replace(head=world.new.head.at[0, 3].set(np.nan))
  hf.save(tmp_path / "nan", broken, MODEL)
  hf.save(tmp_path / "short", world.new, MODEL)
  file = tmp_path / "short" / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    future = under_way(world, pool)
    for name, message in dict(
      larger="model.moe_intermediate_size=8 and not 16",
      nan="head has values that are not finite",
      short="not a complete safetensors file",
      nowhere="not a directory",
    ).items():
      status, answer = client.reload(tmp_path / name)
      assert status == 400 and message in answer["error"]["message"], answer
      assert "the weights are the old ones" in answer["error"]["message"]
    same(future.result(), expected(world, seed=11))
  assert client("GET", "/weight_info")[1] == dict(weight_version="default")


def test_who_goes_away_is_not_sampled_for(world, client):
  Engine.delay = 0.1
  before = world.loop.total().tokens
  connection = http.client.HTTPConnection("127.0.0.1", client.port)
  body = json.dumps(dict(token_ids=PROMPT, sampling_params=LONG | dict(n=8)))
  headers = {"content-type": "application/json"}
  connection.request("POST", "/inference/v1/generate", body, headers)
  wait(lambda: world.loop.total().tokens > before)
  connection.close()
  wait(lambda: world.loop.running == 0 and world.server.queued == 0, seconds=1.0)
  Engine.delay = 0.0
  same(client.generate(**LONG), expected(world, seed=11))
  assert world.loop.total().tokens - before < 8 * 40


def test_requests_are_aborted_by_their_ids(world, client):
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    body = dict(token_ids=PROMPT, sampling_params=LONG, request_id="mine")
    before = world.loop.total().tokens
    Engine.delay = 0.03
    mine = pool.submit(client, "POST", "/inference/v1/generate", body)
    wait(lambda: world.loop.total().tokens > before)
    kept = pool.submit(client.generate, [1], max_tokens=10, ignore_eos=True)
    wait(lambda: world.loop.running == 2)
    status, answer = client("POST", "/inference/v1/generate", body)
    assert status == 400 and "under way already" in answer["error"]["message"]
    ids = ["generate-tokens-mine", "none"]  # as vLLM calls it
    assert client.do("/inference/v1/abort_requests", dict(request_ids=ids))["aborted"] == 1
    (choice,) = mine.result()[1]["choices"]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < 40
    ((whole, _),) = expected(world, seed=11)
    assert choice["token_ids"] == whole[: len(choice["token_ids"])]
    assert kept.result()[0]["finish_reason"] == "length"


def test_all_prompts_of_a_request_are_aborted(world, client):
  client.do("/pause?mode=keep")
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    body = dict(prompt=["a", "b", "c"], request_id="all")
    future = pool.submit(client.do, "/v1/completions", body)
    wait(lambda: world.loop.running == 3)
    assert client.do("/abort_requests", dict(request_ids=["all"]))["aborted"] == 3
    assert [one["finish_reason"] for one in future.result()["choices"]] == ["abort"] * 3


def test_metrics(world, client, monkeypatch):
  client.generate(max_tokens=5, n=2)

  def figures():
    status, text = client("GET", "/metrics")
    assert status == 200
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *sorted(s.labels.values())): s.value for s in samples}

  before = figures()
  client.generate(max_tokens=5, n=2, ignore_eos=True)
  client("POST", "/inference/v1/generate", {})
  for method, path in (("GET", "/nothing"), ("GET", "/<b>"), ("POST", "/health")):
    client(method, path)
  found = {"404": 2, "405": 1}
  with monkeypatch.context() as broken:
    broken.setattr(http_app.answers, "generate", None)
    client(
      "POST", "/inference/v1/generate", dict(token_ids=[1], sampling_params=dict(max_tokens=1))
    )
  after = figures()
  gained = {key: value - before.get(key, 0) for key, value in after.items()}
  assert gained["gspo_jax_generated_tokens_total",] == 11
  assert gained["gspo_jax_prefilled_tokens_total",] == len(PROMPT) - 1
  assert gained["gspo_jax_responses_total", "length"] == 3
  assert gained["gspo_jax_request_seconds_count",] == 2
  assert gained["gspo_jax_requests_total", "/inference/v1/generate", "200"] == 1
  assert gained["gspo_jax_requests_total", "/inference/v1/generate", "400"] == 1
  assert gained["gspo_jax_requests_total", "/inference/v1/generate", "500"] == 1
  others = {status: gained["gspo_jax_requests_total", status, "other"] for status in found}
  assert others == found
  assert after["gspo_jax_weights_info", "default"] == 1
  assert after["gspo_jax_paused",] == after["gspo_jax_responses_queued",] == 0


@pytest.mark.parametrize("spared", [0, 1, 4])
def test_an_engine_that_fails_begins_anew(world, client, spared):
  body = dict(token_ids=PROMPT, sampling_params=LONG)
  Engine.errors, Engine.spared = 1, spared
  before = world.loop.total()
  status, answer = client("POST", "/inference/v1/generate", body)
  assert status == 500 and "the chip is gone" in answer["error"]["message"]
  after = world.loop.total()  # what was sampled has cost what it has
  assert after.steps - before.steps == 2 * max(0, spared - 1)
  assert (after.prefilled > before.prefilled) == (spared > 0)
  same(client.generate(**LONG), expected(world, seed=11))
  Engine.errors = 3
  for _ in range(3):
    assert client("POST", "/inference/v1/generate", body)[0] == 500
  assert client("GET", "/health")[0] == 503
  assert client("POST", "/inference/v1/generate", body)[0] == 503
  assert client.reload("random")[0] == 200  # in case it was the weights
  same(client.generate(**LONG), expected(world, seed=11))
  assert client("GET", "/health")[0] == 200
