"""SmolLM3: layers without rotary positions. https://huggingface.co/blog/smollm3"""

from collections.abc import Mapping
from typing import Any

from gspo_jax.models.families import declaration as base
from gspo_jax.settings.model import ModelConfig


def read_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Reads the layers without positions, from a flag per layer or from an interval."""
  rotary, layers = raw.get("no_rope_layers"), raw["num_hidden_layers"]
  if rotary is None:
    interval = raw.get("no_rope_layer_interval", 4)
    rotary = [(layer + 1) % interval for layer in range(layers)]
  if len(rotary) < layers:
    raise ValueError(f"no_rope_layers={rotary} is shorter than num_hidden_layers={layers}")
  without = (layer for layer in range(layers) if not rotary[layer])
  return {"rope.layers_without": tuple(without)}


def write_layers(config: ModelConfig) -> dict[str, Any]:
  """Returns a flag per layer: 1 with positions, 0 without."""
  rotary = [int(config.kind(layer).rotary) for layer in range(config.num_layers)]
  return dict(no_rope_layers=rotary)


FAMILY = base.Family(
  dict(
    smollm3=base.Architecture(
      "SmolLM3ForCausalLM",
      base.FIELDS,
      fixed=base.NO_BIAS | dict(mlp_bias=False, use_sliding_window=False),
      defaults=dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True),
      read=read_layers,
      write=write_layers,
    )
  )
)
