"""Architectures of Hugging Face, looked up in the families of models."""

from gspo_jax.models.families.declaration import LAYER, NAMES
from gspo_jax.models.families.lookup import FAMILIES, names, relatives

__all__ = ["ARCHITECTURES", "FAMILY_OF", "names", "relatives"]

ARCHITECTURES = {key: value for f in FAMILIES.values() for key, value in f.architectures.items()}
FAMILY_OF = {key: name for name, f in FAMILIES.items() for key in f.architectures}

# Keys of any architecture that would change the computation, with their neutral values.
FIXED = dict(
  use_sliding_window=False,
  use_bidirectional_attention=False,
  use_mrope=False,
  mlp_bias=False,
  partial_rotary_factor=1.0,
  quantization_config=None,
)

# Experts in memory in transformers 5, and in its files on request (save_original_format=False): one
# tensor per layer, gate and up as the halves of one axis, "2".
FUSED = {
  "Moe.router": NAMES["Moe.router"],  # Mixtral's has this name too.
  "Moe.gate": (LAYER + "mlp.experts.gate_up_proj", "E 2F D"),
  "Moe.up": (LAYER + "mlp.experts.gate_up_proj", "E 2F D"),
  "Moe.down": (LAYER + "mlp.experts.down_proj", "E D F"),
}
EMBED, HEAD = NAMES["embed"][0], NAMES["head"][0]
