"""Chat templates of published models, as other packages carry them, render the same text here.

TRL has those of Hugging Face repositories, mistral-common has Mistral's tokenizers. Each part is
skipped without its package.
"""

import importlib.util
from pathlib import Path

import pytest
import tokenizers

from gspo_jax.data.tokenizer import HFTokenizer

# Parquet has every field in every message.
FIELDS = dict(tool_calls=None, name=None, reasoning_content=None, thinking=None)
TURNS = [
  dict(role="user", content="2 + 2 < 5?"),
  dict(role="assistant", content="Yes: 4."),
  dict(role="user", content="3 + 3?"),
]
SPECIAL = dict(bos_token="<s>", eos_token="</s>")


def folder(package: str, name: str) -> Path:
  """Returns a folder of an installed package, without importing it; skips the test without it."""
  found = importlib.util.find_spec(package)
  if found is None:
    pytest.skip(f"{package} is not installed")
  return Path(found.submodule_search_locations[0], name)


def rendered(template: str, messages) -> str:
  tokenizer = HFTokenizer(
    path="", tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()), chat_template=template,
    special_tokens=SPECIAL, add_bos=False, pad_id=0, stop_ids=(), vocab_size=1,
  )  # fmt: skip
  return tokenizer.conversation(messages, add_generation_prompt=True)


@pytest.mark.parametrize("fields", [{}, FIELDS], ids=["", "fields"])
@pytest.mark.parametrize("system", [[], [dict(role="system", content="Be brief.")]])
@pytest.mark.parametrize(
  "name",
  "gemma3 glm4moe gptoss llama3_1 llama3_2 qwen2_5 qwen3 qwen3_instruct_2507".split(),
)
def test_templates_of_trl_render_as_in_transformers(name, system, fields):
  template = (folder("trl", "chat_templates") / f"{name}.jinja").read_text()
  transformers = pytest.importorskip("transformers")
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL
  )
  messages = [fields | message for message in system + TURNS]
  expected = theirs.apply_chat_template(
    messages, chat_template=template, tokenize=False, add_generation_prompt=True
  )
  assert rendered(template, messages) == expected and "3 + 3?" in expected


@pytest.mark.parametrize(
  "name", ["mistral_instruct_tokenizer_240323.model.v3", "tekken_240718.json"]
)
def test_templates_of_mistral_render_as_in_mistral_common(name):
  path = folder("mistral_common", "data") / name
  from mistral_common.integrations.chat_templates import chat_templates
  from mistral_common.protocol.instruct.request import ChatCompletionRequest
  from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
  from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

  messages = [dict(role="system", content="Be brief."), *TURNS]
  request = ChatCompletionRequest(messages=messages)
  tokenizer = MistralTokenizer.from_file(str(path))
  tokens = tokenizer.encode_chat_completion(request).tokens
  expected = tokenizer.decode(tokens, special_token_policy=SpecialTokenPolicy.KEEP)
  expected = expected.replace("▁", " ").replace("<0x0A>", "\n")  # SentencePiece's spelling.
  assert rendered(chat_templates.convert_tokenizer_to_chat_template(path), messages) == expected
