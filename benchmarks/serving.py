"""The server against `sample_rollout` in one process: tokens/s of the same requests, same weights.

Command:   python benchmarks/serving.py [--rounds=5] [--responses=128] [--tokens=128] [--save=FILE]
One server process with 32 slots is asked over loopback, by as many threads as there are requests,
for groups of 8 responses to a prompt (`groups`), and for one response at a time (`single`); then
this process samples the same with an engine of its own, while the server idles. A random float32
Qwen3-MoE, prompts of 32 tokens, responses of exactly --tokens. Log-probs are asked for, as a
trainer does. They take turns; what is printed is the median of the rounds, least and largest. The
tokens of `groups` must be the same.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable

import jax
import numpy as np
from machine import environment

from gspo_jax.models import hf, transformer
from gspo_jax.sampling import LocalEngine, Workload, sample_rollout
from gspo_jax.settings.model import ModelConfig, tiny_moe
from gspo_jax.settings.sampling import DEFAULT, SamplingConfig

SLOTS, GROUP, PROMPT, VOCABULARY = 32, 8, 32, 512
PAUSE = 0.2  # seconds between runs: threads that spin while they wait for work have gone to sleep
CHANGES = dict(
  hidden_size=256, num_heads=8, intermediate_size=1024, moe_intermediate_size=128, num_experts=16
)
MODEL = dataclasses.replace(tiny_moe(VOCABULARY), **CHANGES)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--responses", type=int, default=128)
  parser.add_argument("--tokens", type=int, default=128)
  parser.add_argument("--save", default="", help="file for the figures of every round, as JSON")
  options = parser.parse_args()
  prompts = np.random.default_rng(0).integers(0, VOCABULARY, (options.responses // GROUP, PROMPT))
  params = jax.jit(transformer.init, static_argnums=0)(MODEL, jax.random.key(0))
  print(environment(("jax", "starlette", "uvicorn")), flush=True)
  results = []
  with tempfile.TemporaryDirectory() as directory:
    hf.save(directory, params, MODEL)
    process, address = start(directory, options.tokens)
    try:
      ours = local(MODEL, params)
      for load, group in (("groups", GROUP), ("single", 1)):
        asked = np.repeat(prompts, GROUP // group, axis=0)
        systems = dict(
          server=functools.partial(over_http, address, asked, group, options.tokens),
          local=functools.partial(ours, asked, group, options.tokens),
        )
        results.append(dict(load=load) | compare(systems, options.rounds, group > 1))
        show(results[-1], options)
    finally:
      process.send_signal(signal.SIGTERM)
      process.wait(60)
  if options.save:
    with open(options.save, "w") as file:
      json.dump(results, file, indent=2)


def start(directory: str, tokens: int) -> tuple[subprocess.Popen, str]:
  """A server of the weights in a directory, and its address."""
  model = dataclasses.asdict(MODEL).items()
  keys = [f"--config.model.{key}={value}" for key, value in model if not isinstance(value, tuple)]
  command = [
    sys.executable, "-m", "gspo_jax.serve", "--config=tiny", f"--weights={directory}", "--port=0",
    *keys, f"--config.data.max_prompt_tokens={PROMPT}", f"--config.rl.group_size={GROUP}",
    f"--config.sampling.max_new_tokens={tokens}", f"--config.engine.slots={SLOTS}",
    "--config.engine.steps=16", "--model_name=moe",
  ]  # fmt: skip
  process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
  said = []
  for line in process.stderr:
    said.append(line)
    if found := re.search(r"http://[\d.]+:\d+", line):
      return process, found[0]
  raise RuntimeError("the server did not start: " + "".join(said))


def over_http(address: str, prompts: np.ndarray, group: int, tokens: int) -> list[list[int]]:
  """Tokens of all responses, in the prompts' order. A prompt that comes again has another seed."""
  seeds = np.arange(len(prompts)) * (group == 1)

  def ask(prompt: np.ndarray, seed: int) -> list[list[int]]:
    parameters = dict(max_tokens=tokens, n=group, seed=seed, logprobs=0, ignore_eos=True)
    body = json.dumps(dict(token_ids=prompt.tolist(), sampling_params=parameters)).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/inference/v1/generate", body, headers)
    with urllib.request.urlopen(request, timeout=600) as response:
      return [choice["token_ids"] for choice in json.load(response)["choices"]]

  with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
    found = pool.map(ask, prompts, seeds.tolist())
    return [tokens for some in found for tokens in some]


def local(config: ModelConfig, params: transformer.Params) -> Callable[..., list[list[int]]]:
  """The same by an engine of this process."""
  engine = LocalEngine(config, dataclasses.replace(DEFAULT, slots=SLOTS))
  engine.load(params, version=0)

  def sample(prompts: np.ndarray, group: int, tokens: int) -> list[list[int]]:
    workload = Workload(
      SamplingConfig(1.0, 0, 1.0, 0.0, tokens), PROMPT, trajectories=len(prompts) * group,
      group_size=group,
    )  # fmt: skip
    rollout = sample_rollout(engine, workload, prompts.tolist(), seed=0)
    return [rollout.tokens[row, PROMPT:].tolist() for row in range(len(rollout.tokens))]

  return sample


def compare(systems: dict, rounds: int, alike: bool) -> dict[str, list[float]]:
  """Seconds of each round, by system; the first round compiles and is left out.

  alike: they must sample the same tokens.
  """
  seconds = {name: [] for name in systems}
  for _ in range(rounds + 1):
    found = []
    for name, sample in systems.items():
      started = time.perf_counter()
      found.append(sample())
      seconds[name].append(time.perf_counter() - started)
      time.sleep(PAUSE)
    first, second = found
    assert first == second or not alike, "they sampled other tokens"
    assert list(map(len, first)) == list(map(len, second))
  return {name: some[1:] for name, some in seconds.items()}


def show(result: dict, options: argparse.Namespace) -> None:
  total = options.responses * options.tokens
  for name in ("server", "local"):
    speeds = [total / s for s in result[name]]
    print(
      f"{result['load']:>7} {name:>7}: {statistics.median(speeds):8.0f} tokens/s "
      f"({min(speeds):.0f} to {max(speeds):.0f})"
    )
  ratio = statistics.median(b / a for a, b in zip(result["server"], result["local"]))
  print(f"{result['load']:>7} server / local: {ratio:.2f}", flush=True)


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  main()
