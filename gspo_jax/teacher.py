"""The teacher of on-policy distillation: found, checked and loaded, frozen, beside the policy."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from gspo_jax import sharding
from gspo_jax.data import tokenizer
from gspo_jax.learner.passes import Learner, make_score
from gspo_jax.models import transformer
from gspo_jax.models.params import abstract_params
from gspo_jax.runs import provenance, start, weights
from gspo_jax.settings.model import ModelConfig
from gspo_jax.settings.run import RunConfig
from gspo_jax.structs import ModelInputs
from gspo_jax.system import hosts, hub

KEY = "distillation.teacher"


@dataclasses.dataclass(frozen=True)
class Teacher:
  """Where the weights of a teacher are, and of which model."""

  path: str  # a Hugging Face directory or repository, or a checkpoint
  origin: start.Start | None  # the checkpoint, if it is one
  model: ModelConfig
  tokenizer: str | None  # as the key `tokenizer`; None: not known

  @property
  def about(self) -> dict[str, Any]:
    """JSON for the provenance of a run that learns from it."""
    return self.origin.about if self.origin else dict(directory=self.path)


def find(config: RunConfig, workdir: Path | None = None) -> Teacher | None:
  """The teacher of a `config.RunConfig`, if it has one. A run that goes on in its `workdir` has the
  checkpoint that it began with, whatever has been added to the teacher's run since.

  Raises:
    ValueError: there is no such directory or checkpoint, or none that can be read.
  """
  d = config.distillation
  if not (d.on and config.has_iterations):
    return None
  began_with = provenance.origin(workdir, dataclasses.asdict(config), "teacher")
  name = began_with.get("checkpoint", d.teacher)
  origin = hosts.run_on_first_host(lambda: start.find(name, KEY))
  if origin is not None:
    model = start.model(origin, f"{KEY}={name}")
    return Teacher(str(origin.path), origin, model, origin.tokenizer if origin.config else None)
  name = start.pinned(KEY, name, began_with)
  start.check_published(KEY, name, "or to the workdir of a run")
  from gspo_jax.models import hf  # safetensors is only needed here

  has_tokenizer = (hub.directory(name) / "tokenizer.json").exists()
  return Teacher(name, None, hf.check(name), name if has_tokenizer else None)


def check(
  teacher: Teacher, config: RunConfig, tok: tokenizer.Tokenizer, mesh: jax.sharding.Mesh
) -> None:
  """ValueError if the teacher cannot score what the policy samples, or does not fit the mesh."""
  model, what = teacher.model, f"{KEY}={teacher.path}"
  if model.vocab_size != config.model.vocab_size:
    raise ValueError(
      f"{what} has a vocabulary of {model.vocab_size} tokens and the policy one of "
      f"model.vocab_size={config.model.vocab_size}: a teacher scores the policy's tokens, so both "
      "need the same vocabulary"
    )
  if (
    teacher.tokenizer not in (None, tok.path)
    and tokenizer.load(teacher.tokenizer).token_bytes() != tok.token_bytes()
  ):
    raise ValueError(
      f"{what} has another tokenizer, {teacher.tokenizer!r}, than the policy, tokenizer="
      f"{tok.path!r}: the same ids stand for other texts; take a teacher of the same one"
    )
  window = config.data.max_prompt_tokens + config.sampling.max_new_tokens
  if window > model.max_position_embeddings:
    raise ValueError(
      f"data.max_prompt_tokens + sampling.max_new_tokens = {window} exceed the "
      f"max_position_embeddings={model.max_position_embeddings} of {what}"
    )
  try:
    transformer.check(model, config.compute, shared_prompts=config.shares_prompts)
    transformer.shardings(model, sharding.TRAIN, mesh)
  except ValueError as error:
    raise ValueError(f"{what}: {error}") from error


def abstract(teacher: Teacher, config: RunConfig, mesh: jax.sharding.Mesh) -> Any:
  """Shapes, shardings and types of the weights: the policy's layout, in the types that are read."""
  return abstract_params(teacher.model, mesh, sharding.TRAIN, config.compute.dtype)


def load(teacher: Teacher, config: RunConfig, mesh: jax.sharding.Mesh) -> Any:
  """The weights, as `abstract` describes them.

  Raises:
    ValueError: the checkpoint is damaged, or holds other parameters.
  """
  if teacher.origin is not None:
    return weights.of_checkpoint(teacher.origin, teacher.model, mesh, config.compute.dtype, KEY)
  from gspo_jax.models import hf  # safetensors is only needed here

  types = jax.tree.map(lambda x: x.dtype, abstract(teacher, config, mesh))
  return hf.load(teacher.path, dtype=types, mesh=mesh, rules=sharding.TRAIN)[0]


def scoring(teacher: Teacher, learner: Learner) -> Callable[[Any, ModelInputs], jax.Array]:
  """A jitted pass of the teacher: its log-probabilities [B, T] of a batch, at the temperature of
  the policy, so that a policy with the teacher's logits has the advantage 0."""
  return make_score(dataclasses.replace(learner, model=teacher.model))
