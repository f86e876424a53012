"""Compares the header of a GGUF file with transformers' model.

transformers drops keys and tensors that it does not know: scaled RoPE of Llama 3.1, experts of
Mixtral. A parameter without a tensor is random then.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo_jax.models import transformer
from gspo_jax.models.hf import leaves
from gspo_jax.settings.model import ModelConfig

# Key without the architecture -> ModelConfig field.
_FIELDS = {
  "vocab_size": "vocab_size",
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "block_count": "num_layers",
  "feed_forward_length": "intermediate_size",
  "attention.head_count": "num_heads",
  "attention.head_count_kv": "num_kv_heads",
  "attention.key_length": "head_dim",
  "attention.value_length": "head_dim",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "attention.sliding_window": "sliding_window",
  "rope.dimension_count": "head_dim",
  "rope.freq_base": "rope_theta",
  "rope.freq_base_swa": "local_rope_theta",
  "expert_count": "num_experts",
  "expert_used_count": "experts_per_token",
  "expert_feed_forward_length": "moe_intermediate_size",
  "attn_logit_softcapping": "attn_logit_softcapping",
  "final_logit_softcapping": "final_logit_softcapping",
}
_PLAIN = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "attention.causal": True}
_ANY = {"tensor_data_layout"}  # A note on the origin.

_LAYER = "blk.{l}."
# Parameter -> tensor. Experts of a layer are one tensor.
_TENSORS = {
  "embed": "token_embd.weight",
  "final_norm": "output_norm.weight",
  "head": "output.weight",
  "attention_norm": _LAYER + "attn_norm.weight",
  "attention_post_norm": _LAYER + "post_attention_norm.weight",
  "attention.o": _LAYER + "attn_output.weight",
  "ffn_norm": _LAYER + "ffn_norm.weight",
  "ffn_post_norm": _LAYER + "post_ffw_norm.weight",
  "Moe.router": _LAYER + "ffn_gate_inp.weight",
}
for _x in "qkv":
  _TENSORS |= {f"attention.{_x}": f"{_LAYER}attn_{_x}.weight"}
  _TENSORS |= {f"attention.{_x}_bias": f"{_LAYER}attn_{_x}.bias"}
  _TENSORS |= {f"attention.{_x}_norm": f"{_LAYER}attn_{_x}_norm.weight"}
for _x in ("gate", "up", "down"):
  _TENSORS |= {f"Dense.{_x}": f"{_LAYER}ffn_{_x}.weight"}
  _TENSORS |= {f"Moe.{_x}": f"{_LAYER}ffn_{_x}_exps.weight"}


def check(file: Path, model: ModelConfig) -> None:
  """Raises ValueError for keys or tensors of another model."""
  import gguf  # Not in the extras.

  reader = gguf.GGUFReader(file)
  keys = {key: field.contents() for key, field in reader.fields.items()}
  faults = [*_wrong_keys(keys, model), *_wrong_tensors({t.name for t in reader.tensors}, model)]
  if faults:
    raise ValueError(f"{file} has more than transformers reads of it: {'; '.join(faults)}")


def _wrong_keys(keys: Mapping[str, Any], model: ModelConfig) -> list[str]:
  prefix = f"{keys['general.architecture']}."
  faults = []
  for key, value in keys.items():
    name = key.removeprefix(prefix)
    if name == key or name in _ANY or (name in _PLAIN and value == _PLAIN[name]):
      continue
    field = _FIELDS.get(name)
    if field is None:
      faults.append(f"{key}={value} is not supported")
    elif not _close(value, actual := getattr(model, field)):
      faults.append(f"{key}={value}, and {field}={actual}")
  return faults


def _close(a: Any, b: Any) -> bool:
  """Whether two numbers are equal in float32, the precision of the file."""
  return isinstance(a, int | float) and abs(a - b) <= 1e-6 * abs(b)


def _wrong_tensors(names: set[str], model: ModelConfig) -> list[str]:
  expected = set()
  files = {key: (name, "") for key, name in _TENSORS.items()}
  for leaf in leaves.leaves_of(model, transformer.table(model), files):
    expected |= {leaf.tensor(position) for position in leaf.positions(leaves.whole(leaf))}
  faults = []
  if extra := sorted(names - expected):
    faults.append(f"no parameter takes {', '.join(extra[:4])} ({len(extra)} tensors)")
  if missing := sorted(expected - names):
    faults.append(f"no tensor gives {', '.join(missing[:4])} ({len(missing)} parameters)")
  return faults
