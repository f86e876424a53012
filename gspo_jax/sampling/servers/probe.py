"""Publication of weights for servers, and a probe of servers' log-probs against the trainer.

Even after a successful publication, a server may serve garbage, use keys and values of old weights,
or return log-probs of another distribution. So fixed prompts are sampled after every publication.
Two temperatures are used, since at temperature 1 log-probs before and after temperature are equal.
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

PUBLICATIONS = 2  # Publications on disk: a starting server may still read the previous one.
PROMPTS = 8  # Number of prompts, half of them at each temperature.
LONGEST = 256  # Maximum positions, a multiple of prefix cache blocks of 16 to 128 tokens.
TOKENS = 32  # Maximum sampled tokens.
COOLER = 0.7  # Second temperature, relative to the first.
_PARTIAL = ".partial"


def write_weights(
  target: Path, params: Any, model: ModelConfig, tokenizer: epath.Path | None = None
) -> Path:
  """Writes a Hugging Face directory atomically, with a tokenizer's files.

  Keeps the newest `PUBLICATIONS` directories. Collective: call it on all hosts.

  Raises:
    ServersGone: the directory cannot be written.
  """
  from gspo_jax.models import hf  # Only publication needs safetensors.

  partial = target.with_name(target.name + _PARTIAL)

  def begin() -> None:
    for incomplete in target.parent.glob(f"weights_*{_PARTIAL}"):
      shutil.rmtree(incomplete, ignore_errors=True)
    partial.mkdir(parents=True)

  def complete() -> None:
    if tokenizer:  # Without generation_config.json, which changes sampling in some servers.
      tokenizers.copy(tokenizer, partial, tokenizers.FILES)
    shutil.rmtree(target, ignore_errors=True)  # May exist from before a resume.
    os.rename(partial, target)
    # Only earlier publications are removed, the oldest first.
    earlier = [path for path in target.parent.glob("weights_*") if path.is_dir() and path != target]
    earlier.sort(key=lambda path: path.stat().st_mtime)
    for path in earlier[: -(PUBLICATIONS - 1)]:
      shutil.rmtree(path, ignore_errors=True)

  try:
    hosts.run_on_first_host(begin, ServersGone)
    hf.save(partial, params, model)  # Each tensor in its dtype in `params`.
    hosts.run_on_first_host(complete, ServersGone)
  except OSError as error:
    path = error.filename or target.parent
    raise ServersGone(f"{path} cannot be written: {error.strerror or error}") from error
  return target


def read_weights(directory: Path) -> Any:
  """Reads published weights, since the trainer may have newer ones."""
  from gspo_jax.models import hf  # Only publication needs safetensors.

  mesh = None if sharding.without_mesh() else jax.sharding.get_mesh()
  return hf.load(directory, mesh=mesh)[0]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Differences between a server's log-probs and the trainer's, in nats."""

  mean: float  # Mean absolute difference over all tokens.
  max: float  # Maximum absolute difference.
  raw: float  # Mean at the second temperature, against the trainer's log-probs at temperature 1.


class Probe:
  """Fixed prompts, and the trainer's forward pass over their continuations.

  Args:
    model: configuration of the model.
    compute: compute settings of the trainer's pass.
    window: maximum tokens of a prompt with its response.
    temperature: temperature of the run.
    routing: whether to request experts too, checked by `client.read_answer`.
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
    # Plain attention accepts any length, unlike kernels.
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
    """Compares answers to `calls` with log-probs under `params`. Collective."""
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
  """Returns a function for log-probs of all tokens but the first, at each temperature."""

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
    else:  # Pads to the same number of batch rows on every device.
      mesh = jax.sharding.get_mesh()
      shards = sharding.batch_shards(mesh)
      rows = np.resize(tokens_NL, (-(-len(tokens_NL) // shards) * shards, tokens_NL.shape[1]))
      logps = sharding.fetch(logp(params, sharding.put_batch(rows, mesh)))
    return np.stack(logps)[:, : len(tokens_NL), :-1]

  return score
