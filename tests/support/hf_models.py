"""Random models of transformers, with all weights in effect."""

import torch
import transformers

torch.set_num_threads(1)  # tiny models: threads cost more than they bring


ADDING_ONE = ("gemma", "qwen3_next", "qwen3_5")  # Their norms multiply by 1 + weight.


def random_model(hf_config, seed=4, kind=transformers.AutoModelForCausalLM):
  """A random transformers model with all weights in effect and activations near 1.

  Every kind of weight is drawn wide, norm scales and biases too: at transformers' own
  initialisation (scales 1, biases 0) a forgotten one would not show. The seed is one with which no
  two best next tokens of a greedy continuation come nearer than 5e-4: a choice between equals would
  be round-off's.
  """
  model = kind.from_config(hf_config, dtype=torch.float32).eval()
  generator = torch.Generator().manual_seed(seed)
  for name, p in model.named_parameters():
    noise = torch.randn(p.shape, generator=generator)
    if name.endswith("norm.weight"):
      adds_one = hf_config.model_type.startswith(ADDING_ONE) and "linear_attn" not in name
      p.data = 0.3 * noise + (0 if adds_one else 1)
    elif name.endswith("A_log"):
      p.data = noise - 3  # Decays of a step mostly near 1.
    elif name.endswith(("bias", "sinks")):
      p.data = 0.5 * noise
    elif name.endswith("embed_tokens.weight"):
      # Tied, a wide embedding would make each token its own best successor, for ever.
      p.data = noise * (0.1 if hf_config.tie_word_embeddings else 1)
    else:
      p.data = noise * p.shape[-1] ** -0.5
  for name, buffer in model.named_buffers():
    if name.endswith("bias"):  # Of a router's choice.
      buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
  return model
