"""A probe of servers: what they say of tokens that they sample, against the trainer's own pass.

A server that answers 200 to new weights may serve garbage, keys and values of the old ones, or
log-probabilities of another distribution. Fixed prompts are sampled after every publication, at two
temperatures, since at 1 log-probs before the temperature look like those after it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import sharding
from gspo_jax.models import transformer
from gspo_jax.sampling.servers.calls import Call, Part
from gspo_jax.settings.model import ComputeConfig, ModelConfig
from gspo_jax.settings.sampling import SamplingConfig

PROMPTS = 8  # half of them at each temperature
LONGEST = 256  # positions: blocks of 16 to 128 tokens, whole ones of which a server may have kept
TOKENS = 32  # sampled, at most
COOLER = 0.7  # the second temperature, of the first


@dataclasses.dataclass(frozen=True)
class Verdict:
  """Differences between a server's log-probs and the trainer's, in nats."""

  mean: float  # of their size, over all tokens
  max: float
  raw: float  # the mean, if the server's were those at temperature 1, of the second temperature


class Probe:
  """Fixed prompts and the trainer's pass over what follows them.

  Args:
    window: positions of the longest response with its prompt, which a server must have room for.
    temperature: of the run.
    routing: ask for experts too, which `calls.checked` then looks at.
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
    # Short rows, of any length: what kernels want of shapes would only be in the way.
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
    """What to ask a server for; no stop tokens, so that all are of one length."""
    return [
      Call(
        f"{name}-probe-{i}",
        tuple(prompt.tolist()),
        1,
        self.new,
        SamplingConfig(self._temperatures[2 * i // PROMPTS], 0, 1.0, 0.0, self.new),
        (),
        seed=i,
        routing=self._routing,
      )
      for i, prompt in enumerate(self._prompts)
    ]

  def verdict(self, params: Any, parts: list[Part]) -> Verdict:
    """Compares the answers to `calls` with the network of `params`. Every process calls this."""
    new_NT = np.stack([part.tokens for part in parts])
    said_NT = np.stack([part.logp for part in parts])
    tokens_NL = np.concatenate([self._prompts, new_NT], axis=1)
    score = _score(self._model, self._compute, (*self._temperatures, 1.0))
    first_NT, second_NT, raw_NT = score(params, tokens_NL)[:, :, -self.new :]
    half = PROMPTS // 2
    ours_NT = np.concatenate([first_NT[:half], second_NT[half:]])
    size_NT = abs(ours_NT - said_NT)
    raw = float(abs(raw_NT - said_NT)[half:].mean())
    return Verdict(float(size_NT.mean()), float(size_NT.max()), raw)


@functools.cache
def _score(
  model: ModelConfig, compute: ComputeConfig, temperatures: tuple[float, ...]
) -> Callable[[Any, np.ndarray], np.ndarray]:
  """Log-probs of all tokens but the first, at each of some temperatures."""

  @jax.jit
  def logp(params: Any, tokens_BT: jax.Array) -> list[jax.Array]:
    out = transformer.forward(params, model, tokens_BT, compute=compute)
    targets_BT = jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1)))
    of = functools.partial(transformer.token_logp, params, model, out.hidden_BTD, targets_BT)
    return [of(temperature=t, compute=compute)[0] for t in temperatures]

  def score(params: Any, tokens_NL: np.ndarray) -> np.ndarray:
    if sharding.without_mesh():
      logps = jax.device_get(logp(params, tokens_NL))
    else:  # every device has a row
      mesh = jax.sharding.get_mesh()
      shards = sharding.batch_shards(mesh)
      rows = np.resize(tokens_NL, (-(-len(tokens_NL) // shards) * shards, tokens_NL.shape[1]))
      logps = sharding.fetch(logp(params, sharding.put_batch(rows, mesh)))
    return np.stack(logps)[:, : len(tokens_NL), :-1]

  return score
