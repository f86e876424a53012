"""Sampling against transformers' `generate` and Tunix's sampler: useful tokens/s, same weights.

Command:   python benchmarks/sampling.py [--systems=ours,transformers,tunix] [--rounds=5]
             [--models=moe,dense] [--loads=fixed,tail] [--cache=float32] [--save=FILE.json]
Two random float32 models, Qwen3-MoE and its dense twin, and two loads for 32 slots: `fixed`, 32
responses of exactly 128 tokens; `tail`, 128 responses that stop with probability 9/512 at every
token (mean 51, at most 128), which the peers take in 4 batches because they do not refill. A token
is useful up to and including the first stop token. The systems take turns, and must continue the
prompts alike when greedy. Runs during which others took more than 10 % of the machine are left out
where quieter ones remain. "Of compute" and "of memory": the share of the time in which one large
matmul makes as many operations as the useful tokens need, and in which one sum reads as many bytes,
the weights once per 32 tokens; measured in the same run. A system that is not installed is left
out; benchmarks/peers.txt installs them. --cache=float32,bfloat16,int8 samples with keys and values
of each type in turn; only float32 is compared with the peers. MiB are those of the whole cache.
On a busy machine useful tokens per second of one core (`a core`) say more than those per second.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from machine import busy_seconds, environment

from gspo_jax.models import hf, transformer
from gspo_jax.sampling import LocalEngine, Workload, sample_rollout
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.sampling import LOCAL_ENGINE, SamplingConfig
from gspo_jax.settings.sizes import tiny_moe

SLOTS, GROUP, PROMPT, NEW, VOCABULARY = 32, 8, 32, 128, 512
STOP_IDS = tuple(range(9))  # logits are nearly uniform: each token ends a response with 9/512
HEAD = 0.01  # factor on the head's weights that makes them so
PACKAGES = ("jax", "torch", "transformers", "google-tunix")
FOREIGN = 0.1  # share of the machine that other processes may take
PAUSE = 0.2  # seconds between runs: threads that spin while they wait for work have gone to sleep

# tiny_moe has 4 layers, 2 key/value heads of 32, and 2 experts per token.
SHAPE = dict(hidden_size=256, num_heads=8, intermediate_size=1024, moe_intermediate_size=128)
MOE = dataclasses.replace(tiny_moe(VOCABULARY), num_experts=16, **SHAPE)
DENSE = dataclasses.replace(MOE, num_experts=0, experts_per_token=0, moe_intermediate_size=0)
MODELS = dict(moe=MOE, dense=DENSE)


@dataclasses.dataclass(frozen=True)
class Load:
  prompts: list[list[int]]
  stop_ids: tuple[int, ...] = ()
  group: int = GROUP
  tokens: int = NEW  # Maximum.
  temperature: float = 1.0  # 0: greedy


@dataclasses.dataclass(frozen=True)
class Sampled:
  responses: list[np.ndarray]  # tokens, the stop token included
  slot_use: float | None  # useful tokens / (slots x steps); None: not known
  cache_mib: float = math.nan


Sampler = Callable[[Load, int], Sampled]  # (load, seed) -> samples on the host


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--systems", default=",".join(SYSTEMS))
  parser.add_argument("--models", default="moe,dense")
  parser.add_argument("--loads", default="fixed,tail")
  parser.add_argument("--cache", default="float32", help="types of keys and values, ours alone")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--save", default="", help="file for the figures of every run, as JSON")
  options = parser.parse_args()
  prompts = np.random.default_rng(0).integers(0, VOCABULARY, (16, PROMPT)).tolist()
  loads = dict(fixed=Load(prompts[:4]), tail=Load(prompts, STOP_IDS))
  print(about := environment(PACKAGES), flush=True)
  results = []
  with tempfile.TemporaryDirectory() as scratch:
    for name in options.models.split(","):
      config, directory = MODELS[name], os.path.join(scratch, name)
      params = jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0))
      params = params.replace(head=HEAD * params.head)
      hf.save(directory, params, config)
      systems = systems_of(options.systems.split(","), options.cache.split(","))
      samplers = make(systems, config, params, directory)
      exact = {name: sampler for name, sampler in samplers.items() if name in SYSTEMS}
      compare_greedy(exact, Load(prompts[:4], group=1, tokens=8, temperature=0))
      for load in options.loads.split(","):
        result = compare(config, samplers, loads[load], options.rounds)
        results.append(dict(model=name, load=load) | result)
        show(results[-1])
  if options.save:
    with open(options.save, "w") as file:
      json.dump(dict(environment=about, results=results), file, indent=2)


def ours(
  config: ModelConfig, params: transformer.Params, _: str, cache_dtype: str = "float32"
) -> Sampler:
  engine = LocalEngine(
    config, dataclasses.replace(LOCAL_ENGINE, slots=SLOTS, cache_dtype=cache_dtype)
  )
  engine.load(params, version=0)

  def sample(load: Load, seed: int) -> Sampled:
    workload = Workload(
      SamplingConfig(load.temperature, 0, 1.0, 0.0, load.tokens),
      prompt_length=max(map(len, load.prompts)),
      trajectories=len(load.prompts) * load.group,
      group_size=load.group,
      stop_ids=load.stop_ids,
    )
    rollout = sample_rollout(engine, workload, load.prompts, seed)
    responses = [np.array(rollout.response(row)) for row in range(len(rollout.lengths))]
    metrics = engine.usage.metrics()
    cache_mib = 1024 * metrics["sampling/cache_gib"]
    return Sampled(responses, metrics["sampling/slot_utilisation"], cache_mib)

  return sample


def transformers(_: ModelConfig, __: transformer.Params, directory: str) -> Sampler:
  import torch
  from transformers import AutoModelForCausalLM, utils

  utils.logging.disable_progress_bar()
  network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

  def sample(load: Load, seed: int) -> list[np.ndarray]:
    torch.manual_seed(seed)
    tokens = torch.tensor(load.prompts)
    options = dict(temperature=load.temperature, top_k=0) if load.temperature else {}
    out = network.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      max_new_tokens=load.tokens,
      num_return_sequences=load.group,
      eos_token_id=list(load.stop_ids) or None,
      pad_token_id=0,
      do_sample=bool(options),
      **options,
    )
    return [until_stop(row, load.stop_ids) for row in out[:, PROMPT:].numpy()]

  return in_batches(sample)


def tunix(c: ModelConfig, _: transformer.Params, directory: str) -> Sampler:
  from tunix.generate import sampler as vanilla
  from tunix.models.qwen3 import model as qwen3
  from tunix.models.qwen3 import params as loader

  same = ("num_layers", "vocab_size", "num_heads", "head_dim", "num_kv_heads")
  config = qwen3.ModelConfig(
    **{name: getattr(c, name) for name in same},
    embed_dim=c.hidden_size,
    hidden_dim=c.moe_intermediate_size or c.intermediate_size,
    rope_theta=int(c.rope_theta),
    norm_eps=c.rms_norm_eps,
    num_experts=c.num_experts or None,
    num_experts_per_tok=c.experts_per_token or None,
  )
  network = loader.create_model_from_safe_tensors(directory, config, dtype=jnp.float32)
  cache = vanilla.CacheConfig(PROMPT + NEW, c.num_layers, c.num_kv_heads, c.head_dim)

  # Its compiled functions keep the stop ids of their first call: one sampler for each set of them.
  @functools.cache
  def sampler(stop_ids: tuple[int, ...]) -> vanilla.Sampler:
    return vanilla.Sampler(network, TokensAsText(), cache)

  def sample(load: Load, seed: int) -> list[np.ndarray]:
    out = sampler(load.stop_ids)(
      [prompt for prompt in load.prompts for _ in range(load.group)],
      max_generation_steps=load.tokens,
      max_prompt_length=PROMPT,
      eos_tokens=load.stop_ids or (-1,),
      seed=seed,
      **(dict(temperature=load.temperature, top_p=1.0) if load.temperature else {}),
    )
    # It leaves the stop token off: the first stop id stands for whichever it was.
    return [np.array([*row, *load.stop_ids[:1]])[: load.tokens] for row in out.tokens]

  return in_batches(sample)


SYSTEMS = dict(ours=ours, transformers=transformers, tunix=tunix)


class TokensAsText:
  """Tokenizer for the sampler of Tunix: its texts are lists of tokens."""

  encode = staticmethod(list)
  decode = staticmethod(lambda tokens: "")
  bos_id = eos_id = staticmethod(lambda: None)
  pad_id = staticmethod(lambda: -1)  # outside the vocabulary: sampled padding would be masked


def systems_of(names: list[str], dtypes: list[str]) -> dict[str, Callable[..., Sampler]]:
  """Systems by name; ours once per type of the cache."""
  systems = {}
  for name in names:
    if name != "ours":
      systems[name] = SYSTEMS[name]
      continue
    for dtype in dtypes:
      label = name if dtype == "float32" else f"{name}, {dtype}"
      systems[label] = functools.partial(ours, cache_dtype=dtype)
  return systems


def make(systems: dict[str, Callable[..., Sampler]], *model) -> dict[str, Sampler]:
  samplers = {}
  for name, system in systems.items():
    try:
      samplers[name] = system(*model)
    except ImportError as error:
      print(f"{name} is left out: {error}")
  return samplers


def until_stop(row: np.ndarray, stop_ids: tuple[int, ...]) -> np.ndarray:
  stops = np.flatnonzero(np.isin(row, stop_ids))
  return row[: stops[0] + 1] if len(stops) else row


def in_batches(sample: Callable[[Load, int], list[np.ndarray]]) -> Sampler:
  """SLOTS responses at a time, until the longest of them has ended."""

  def all_of(load: Load, seed: int) -> Sampled:
    responses, computed, size = [], 0, SLOTS // load.group
    for i in range(0, len(load.prompts), size):
      part = dataclasses.replace(load, prompts=load.prompts[i : i + size])
      batch = sample(part, 1000 * seed + i)
      responses += batch
      computed += len(batch) * max(map(len, batch))
    return Sampled(responses, sum(map(len, responses)) / computed)

  return all_of


def compare_greedy(samplers: dict[str, Sampler], load: Load) -> None:
  """SystemExit if the systems do not compute the same model."""
  if not samplers:
    return
  tokens = {name: np.stack(sample(load, 0).responses) for name, sample in samplers.items()}
  (first, expected), *rest = tokens.items()
  for name, actual in rest:
    if (actual == expected).mean() < 0.9:  # Near-ties may differ.
      raise SystemExit(f"{first} and {name} do not agree:\n{expected}\n{actual}")


def compare(c: ModelConfig, samplers: dict[str, Sampler], load: Load, rounds: int) -> dict:
  """Runs every system on one load, and measures the machine's limits meanwhile."""
  first = {system: timed(sample, load, 0) for system, sample in samplers.items()}
  probe = speed_probe(int(work(c, load, [NEW] * SLOTS)[1] / NEW))
  runs, limits = {system: [] for system in samplers}, []
  for seed in range(1, rounds + 1):
    for system, sample in samplers.items():
      runs[system].append(timed(sample, load, seed))
    limits.append(probe())
  limit = {key: max(x[key] for x in limits) for key in limits[0]}
  systems = {
    system: dict(first_s=first[system]["seconds"]) | summary(c, load, runs[system], limit)
    for system in samplers
  }
  return dict(limit=limit, systems=systems, runs=runs)


def timed(sample: Sampler, load: Load, seed: int) -> dict:
  time.sleep(PAUSE)
  others, started, cpu = foreign_seconds(), time.perf_counter(), time.process_time()
  sampled = sample(load, seed)
  seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
  others = foreign_seconds() - others
  check(load, sampled.responses)
  return dict(
    seconds=seconds,
    cpu=cpu,
    foreign=max(others, 0.0) / seconds / os.cpu_count(),
    lengths=[len(response) for response in sampled.responses],
    slot_use=sampled.slot_use,
    cache_mib=sampled.cache_mib,
  )


def foreign_seconds() -> float:
  """Returns processor time of other processes, on Linux."""
  times = os.times()
  return busy_seconds() - times[0] - times[1]


def check(load: Load, responses: list[np.ndarray]) -> None:
  """Raises ValueError unless every response is complete."""
  if len(responses) != len(load.prompts) * load.group:
    raise ValueError(f"{len(responses)} responses, not {len(load.prompts) * load.group}")
  for response in responses:
    *inside, last = np.isin(response, load.stop_ids)
    whole = len(response) == load.tokens or (last and len(response) < load.tokens)
    if any(inside) or not whole:
      raise ValueError(f"a response of {len(response)} tokens ends wrongly: {response}")


def work(c: ModelConfig, load: Load, lengths: list[int]) -> tuple[float, float]:
  """Returns minimum operations and bytes: each prompt once, no idle slots."""
  total, active = transformer.count(c)
  table = c.vocab_size * c.hidden_size  # the embedding, which is looked up; the head is as large
  context = sum(PROMPT * n + n * (n + 1) / 2 for n in lengths)  # cache positions that are read
  prefill = 2 * (active - 2 * table) * PROMPT * len(load.prompts)
  decode = 2 * (active - table) * sum(lengths)
  attention = 4 * c.num_heads * c.head_dim * c.num_layers * context
  weights = 4 * (total - table) * sum(lengths) / SLOTS  # 32 tokens reach nearly every expert
  cache = 4 * 2 * c.num_kv_heads * c.head_dim * c.num_layers * context
  return prefill + decode + attention, weights + cache


def speed_probe(size: int) -> Callable[[], dict[str, float]]:
  """Measures operations/s of large and decoding matmuls, and bytes/s of reads.

  Reads repeat those of a decoding step, so caches keep as much of it.
  """
  buffer, square = jnp.ones(size // 4), jnp.ones((1024, 1024))
  dot, read = jax.jit(jnp.dot), jax.jit(jnp.sum)

  def fastest(repeats: int, f, *arguments) -> float:
    seconds = []
    for _ in range(repeats):
      started = time.perf_counter()
      jax.block_until_ready(f(*arguments))
      seconds.append(time.perf_counter() - started)
    return min(seconds)

  return lambda: dict(
    matmul=2 * 1024**3 / fastest(20, dot, square, square),
    decode_matmul=2 * SLOTS * 256 * 1024 / fastest(200, dot, square[:SLOTS, :256], square[:256]),
    read=buffer.nbytes / fastest(50, read, buffer),
  )


def summary(c: ModelConfig, load: Load, runs: list[dict], limit: dict) -> dict:
  runs = [r for r in runs if r["foreign"] <= FOREIGN] or runs
  speeds = [sum(r["lengths"]) / r["seconds"] for r in runs]
  needed = [(*work(c, load, r["lengths"]), r["seconds"]) for r in runs]
  return dict(
    speed=statistics.median(speeds),
    spread=(min(speeds), max(speeds)),
    by_core=statistics.median(sum(r["lengths"]) / r["cpu"] for r in runs),
    mean_length=statistics.mean(n for r in runs for n in r["lengths"]),
    slot_use=statistics.mean(r["slot_use"] or math.nan for r in runs),
    cache_mib=runs[-1]["cache_mib"],
    compute=statistics.median(flops / limit["matmul"] / s for flops, _, s in needed),
    memory=statistics.median(read / limit["read"] / s for _, read, s in needed),
    foreign=max(r["foreign"] for r in runs),
    runs=len(runs),
  )


def show(result: dict) -> None:
  matmul, decode_matmul, read = (f"{x / 1e9:.0f}" for x in result["limit"].values())
  print(
    f"\n{result['model']}, {result['load']}: matmul {matmul} GF/s, one of {SLOTS} rows", end=" "
  )
  print(f"{decode_matmul}; what a step needs is read at {read} GB/s")
  head = "length  slots compute memory   first  runs foreign a core    MiB"
  print(f"{'':<15}{'useful tokens/s':>20} {head}")
  for name, s in result["systems"].items():
    speed = f"{s['speed']:.0f} [{s['spread'][0]:.0f}-{s['spread'][1]:.0f}]"
    print(f"{name:<15}{speed:>20}{s['mean_length']:>7.1f}{s['slot_use']:>7.0%}", end="")
    print(f"{s['compute']:>8.1%}{s['memory']:>7.1%}{s['first_s']:>6.1f} s", end="")
    print(f"{s['runs']:>6}{s['foreign']:>8.0%}", end="")
    print(f"{s['by_core']:>7.0f}{s['cache_mib']:>7.1f}")
  peers = {name: s["speed"] for name, s in result["systems"].items() if name in SYSTEMS}
  peers.pop("ours", None)
  if peers and (us := result["systems"].get("ours")):
    peer = max(peers, key=peers.get)
    binds = "compute" if us["compute"] > us["memory"] else "memory"
    print(f"ours: {us['speed'] / peers[peer]:.2f} times {peer}, the faster peer; {binds} binds")


if __name__ == "__main__":
  main()
