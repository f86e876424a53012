"""Teacher of on-policy distillation: a frozen model, loaded beside the policy."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.data import tokenizer
from gspo_jax.learner.passes import Learner, make_score
from gspo_jax.models import transformer
from gspo_jax.runs import weight_source
from gspo_jax.runs.weight_source import WeightSource
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import ModelInputs

KEY = "distillation.teacher"


@dataclasses.dataclass(frozen=True)
class Teacher:
  """A teacher: the source of its weights, and its model configuration."""

  source: WeightSource
  model: ModelConfig


def find_teacher(config: RunConfig, recorded: Mapping[str, Any] | None = None) -> Teacher | None:
  """Finds the teacher; None without distillation or RL. Collective: call it on all hosts.

  Args:
    config: configuration of the run.
    recorded: `WeightSource.about` of the teacher at the run's first start; {} for a new run.

  Raises:
    ValueError: the directory or checkpoint does not exist or cannot be read.
  """
  if not (config.distillation.enabled and config.has_iterations):
    return None
  source = weight_source.resolve(KEY, config.distillation.teacher, recorded or {})
  if source.checkpoint is None:
    model = source.published_model(f"{KEY}={source.name}", "or to the workdir of a run")
    return Teacher(source, model)
  source.checkpoint.require_complete()
  return Teacher(source, source.checkpoint.model_config())


def check_teacher(
  teacher: Teacher, config: RunConfig, tok: tokenizer.Tokenizer, mesh: jax.sharding.Mesh
) -> None:
  """Raises ValueError unless the teacher can score the policy's tokens."""
  model, named, other = teacher.model, f"{KEY}={teacher.source.path}", teacher.source.tokenizer
  if model.vocab_size != config.model.vocab_size:
    raise ValueError(
      f"{named} has a vocabulary of {model.vocab_size} tokens and the policy one of "
      f"model.vocab_size={config.model.vocab_size}: a teacher scores the policy's tokens, so both "
      "need the same vocabulary"
    )
  if other not in (None, tok.path) and tokenizer.load(other).token_bytes() != tok.token_bytes():
    raise ValueError(
      f"{named} has another tokenizer, {other!r}, than the policy, tokenizer="
      f"{tok.path!r}: the same token id can have different texts. Use a teacher with the policy's "
      "tokenizer"
    )
  window = config.data.max_prompt_tokens + config.sampling.max_new_tokens
  if window > model.max_position_embeddings:
    raise ValueError(
      f"data.max_prompt_tokens + sampling.max_new_tokens = {window} exceed the "
      f"max_position_embeddings={model.max_position_embeddings} of {named}"
    )
  try:
    transformer.check_attention(model, config.compute, shared_prompts=config.shares_prompts)
    transformer.shardings(model, sharding.TRAIN, mesh)
  except ValueError as error:
    raise ValueError(f"{named}: {error}") from error


def scoring(teacher: Teacher, learner: Learner) -> Callable[[Any, ModelInputs], jax.Array]:
  """Returns the teacher's jitted scoring function.

  The function computes log-probs [B, T] from parameters and a batch, at the policy's temperature.
  So equal logits of teacher and policy give equal log-probs.
  """
  return make_score(dataclasses.replace(learner, model=teacher.model))
