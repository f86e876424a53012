"""All families of models by name."""

from gspo_jax.models.families import (
  gemma,
  glm4_moe,
  granite,
  llama,
  minimax_m2,
  mistral,
  mixtral,
  olmo,
  olmoe,
  qwen2,
  qwen3,
  smollm3,
)
from gspo_jax.models.families.declaration import NAMES, Family
from gspo_jax.settings.model import ModelConfig

FAMILIES: dict[str, Family] = dict(
  llama=llama.FAMILY,
  qwen2=qwen2.FAMILY,
  qwen3=qwen3.FAMILY,
  mistral=mistral.FAMILY,
  mixtral=mixtral.FAMILY,
  gemma=gemma.FAMILY,
  smollm3=smollm3.FAMILY,
  granite=granite.FAMILY,
  olmo=olmo.FAMILY,
  olmoe=olmoe.FAMILY,
  glm4_moe=glm4_moe.FAMILY,
  minimax_m2=minimax_m2.FAMILY,
)


def family(config: ModelConfig) -> Family:
  """Returns the functions of the model's family."""
  return FAMILIES[config.family]


def names(config: ModelConfig) -> dict[str, tuple[str, str]]:
  """Returns names and axes of parameters in published files."""
  return NAMES | dict(family(config).names)


def relatives(name: str) -> list[str]:
  """Returns families with equal layers, itself first."""
  layers = {x: (f.block_table, f.layer) for x, f in FAMILIES.items()}
  same = [x for x in layers if layers[x] == layers.get(name)]
  return sorted(same, key=lambda x: x != name)
