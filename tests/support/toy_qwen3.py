"""A Qwen3 checkpoint and a GSM8K of toy size, as they are downloaded: what a notebook is run on."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gspo_jax.settings import sizes

TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 264


def write(directory: Path) -> None:
  """Random weights as transformers writes them, the tokenizer, train.jsonl and test.jsonl.

  The model is that of configs/gsm8k.py:tiny, and like Qwen3's Base its files name <|endoftext|>
  as the only stop token.
  """
  import torch  # slow to import
  import transformers

  directory.mkdir()
  toy = sizes.tiny_dense(VOCABULARY)
  torch.manual_seed(0)
  config = transformers.Qwen3Config(
    vocab_size=toy.vocab_size,
    hidden_size=toy.hidden_size,
    intermediate_size=toy.intermediate_size,
    num_hidden_layers=toy.num_layers,
    num_attention_heads=toy.num_heads,
    num_key_value_heads=toy.num_kv_heads,
    head_dim=toy.head_dim,
    max_position_embeddings=toy.max_position_embeddings,
    rms_norm_eps=toy.rms_norm_eps,
    rope_parameters=dict(rope_type="default", rope_theta=toy.rope_theta),
    tie_word_embeddings=toy.tie_word_embeddings,
    eos_token_id=0,
  )
  transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
  write_tokenizer(directory)
  for name, first, number in (("train", 0, 24), ("test", 100, 8)):
    rows = (json.dumps(problem(first + i)) + "\n" for i in range(number))
    (directory / f"{name}.jsonl").write_text("".join(rows))


def write_tokenizer(directory: Path) -> None:
  """Bytes, without merges, and Qwen's special tokens."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  ids = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  tokenizer.save(str(directory / "tokenizer.json"))
  keys = dict(eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=TEMPLATE)
  (directory / "tokenizer_config.json").write_text(json.dumps(keys))


def problem(i: int) -> dict[str, str]:
  """A row in the form of GSM8K's."""
  apples, earned = 3 + i, 2 + i % 5
  working = f"{apples} + {earned} = <<{apples}+{earned}={apples + earned}>>{apples + earned}"
  return dict(
    question=f"Ada had ${apples} & earned ${earned}. How many dollars has she?",
    answer=f"She has {working} dollars.\n#### {apples + earned}",
  )
