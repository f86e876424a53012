"""Publication of weights for servers, and a probe of their log-probs against the trainer's.

A server that answers 200 to new weights may serve garbage, keys and values of the old ones, or
log-probabilities of another distribution. Fixed prompts are sampled after every publication, at two
temperatures, since at 1 log-probs before the temperature look like those after it.
"""

import dataclasses
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from gspo_jax import sharding
from gspo_jax.data import tokenizer as tokenizers
from gspo_jax.models import transformer
from gspo_jax.sampling.engine import ServersGone
from gspo_jax.sampling.servers.client import Call, Part
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import SamplingConfig
from gspo_jax.system import hosts

PUBLICATIONS = 2  # kept on disk: a server being started may still read the last but one
PROMPTS = 8  # half of them at each temperature
LONGEST = 256  # positions: whole blocks of prefix caches, of 16 to 128 tokens
TOKENS = 32  # sampled, at most
COOLER = 0.7  # second temperature, relative to the first
_PARTIAL = ".partial"


def write_weights(
  target: Path, params: Any, model: ModelConfig, tokenizer: epath.Path | None = None
) -> Path:
  """Writes a Hugging Face directory, complete or not at all, with a tokenizer's files.

  Keeps the last `PUBLICATIONS` directories. Every process calls this, and the first one writes.

  Raises:
    ServersGone: the directory cannot be written.
  """
  from gspo_jax.models import hf  # safetensors is only needed here

  partial = target.with_name(target.name + _PARTIAL)

  def begin() -> None:
    for incomplete in target.parent.glob(f"weights_*{_PARTIAL}"):
      shutil.rmtree(incomplete, ignore_errors=True)
    partial.mkdir(parents=True)

  def complete() -> None:
    if tokenizer:  # generation_config.json, which changes how some servers sample, is not copied
      tokenizers.copy(tokenizer, partial, tokenizers.FILES)
    shutil.rmtree(target, ignore_errors=True)  # written before the run was resumed
    os.rename(partial, target)
    # By time of writing; nothing else in the directory is touched.
    earlier = [path for path in target.parent.glob("weights_*") if path.is_dir() and path != target]
    earlier.sort(key=lambda path: path.stat().st_mtime)
    for path in earlier[: -(PUBLICATIONS - 1)]:
      shutil.rmtree(path, ignore_errors=True)

  try:
    hosts.run_on_first_host(begin, ServersGone)
    hf.save(partial, params, model)  # each tensor in the type that the trainer reads it in
    hosts.run_on_first_host(complete, ServersGone)
  except OSError as error:
    path = error.filename or target.parent
    raise ServersGone(f"{path} cannot be written: {error.strerror or error}") from error
  return target


def read_weights(directory: Path) -> Any:
  """Reads published weights; the trainer may have replaced its own."""
  from gspo_jax.models import hf  # safetensors is only needed here

  mesh = None if sharding.without_mesh() else jax.sharding.get_mesh()
  return hf.load(directory, mesh=mesh)[0]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Differences between a server's log-probs and the trainer's, in nats."""

  mean: float  # absolute difference over all tokens
  max: float
  raw: float  # mean at the second temperature, against the trainer's at temperature 1


class Probe:
  """Fixed prompts and the trainer's pass over their continuations.

  Args:
    window: positions of the longest response with its prompt.
    temperature: temperature of the run.
    routing: ask for experts too, checked by `client.read_answer`.
  """

  def __init__(
    self,
    model: ModelConfig,
    compute: ComputeConfig,
    window: int,
    temperature: float,
    routing: bool = False,
  ):
    self._model = model
    # Short rows of any length, with no requirements of kernels on shapes.
    self._compute = dataclasses.replace(compute, attention="plain", remat="none", logits_chunk=0)
    length = min(window, LONGEST, model.max_position_embeddings)
    self.new = max(1, min(TOKENS, length // 2))
    prompt = max(1, length - self.new)
    rng = np.random.default_rng(0)
    self._prompts = rng.integers(0, model.vocab_size, (PROMPTS, prompt)).astype(np.int32)
    first = temperature or 1.0
    self._temperatures = first, COOLER * first
    self._routing = routing

  def calls(self, name: str) -> list[Call]:
    """Returns calls without stop tokens, for continuations of one length."""
    return [
      Call(
        f"{name}-probe-{i}",
        tuple(prompt.tolist()),
        self.new,
        SamplingConfig(self._temperatures[2 * i // PROMPTS], 0, 1.0, 0.0, self.new),
        (),
        seed=i,
        routing=self._routing,
      )
      for i, prompt in enumerate(self._prompts)
    ]

  def verdict(self, params: Any, parts: list[Part]) -> Verdict:
    """Compares answers to `calls` with the network of `params`. Every process calls this."""
    new_NT = np.stack([part.tokens for part in parts])
    server_NT = np.stack([part.logp for part in parts])
    tokens_NL = np.concatenate([self._prompts, new_NT], axis=1)
    score = _score(self._model, self._compute, (*self._temperatures, 1.0))
    first_NT, second_NT, raw_NT = score(params, tokens_NL)[:, :, -self.new :]
    half = PROMPTS // 2
    trainer_NT = np.concatenate([first_NT[:half], second_NT[half:]])
    size_NT = abs(trainer_NT - server_NT)
    raw = float(abs(raw_NT - server_NT)[half:].mean())
    return Verdict(float(size_NT.mean()), float(size_NT.max()), raw)


@functools.cache
def _score(
  model: ModelConfig, compute: ComputeConfig, temperatures: tuple[float, ...]
) -> Callable[[Any, np.ndarray], np.ndarray]:
  """Returns a function to log-probs of all tokens but the first, at each temperature."""

  @jax.jit
  def logp(params: Any, tokens_BT: jax.Array) -> list[jax.Array]:
    out = transformer.forward(params, model, tokens_BT, compute=compute)
    targets_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
    token_logp = functools.partial(
      transformer.token_logp, params, model, out.hidden_BTD, targets_BT
    )
    return [token_logp(temperature=t, compute=compute)[0] for t in temperatures]

  def score(params: Any, tokens_NL: np.ndarray) -> np.ndarray:
    if sharding.without_mesh():
      logps = jax.device_get(logp(params, tokens_NL))
    else:  # pad to a row for every device
      mesh = jax.sharding.get_mesh()
      shards = sharding.batch_shards(mesh)
      rows = np.resize(tokens_NL, (-(-len(tokens_NL) // shards) * shards, tokens_NL.shape[1]))
      logps = sharding.fetch(logp(params, sharding.put_batch(rows, mesh)))
    return np.stack(logps)[:, : len(tokens_NL), :-1]

  return score
