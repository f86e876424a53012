"""Special tokens, wherever a checkpoint's files name them, against transformers."""

import dataclasses
import datetime
import itertools
import json
import re

import pytest
import tokenizers
import transformers
from support.configs import config_of, values_of
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from configs import tiny
from gspo_jax import structs
from gspo_jax.data import sources, tokenizer
from gspo_jax.inputs import read_inputs
from gspo_jax.runs import provenance
from gspo_jax.settings.data import DataConfig
from gspo_jax.settings.reading import from_dict

END, STOP = "<|im_end|>", "<|endoftext|>"
FLAGS = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)


def characters(*tokens):
  """A tokenizer of bytes with some tokens more in its vocabulary."""
  vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), STOP, *tokens]
  tok = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, []))
  tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tok.decoder = decoders.ByteLevel()
  tok.add_special_tokens([STOP])
  return tok


def write(directory, tok, **files):
  """A tokenizer's directory; STOP stops, whatever else does."""
  directory.mkdir(exist_ok=True)
  tok.save(str(directory / "tokenizer.json"))
  files = dict(generation_config=dict(eos_token_id=tok.token_to_id(STOP))) | files
  for name, content in files.items():
    if content is not None:
      (directory / f"{name}.json").write_text(json.dumps(content))
  return tokenizer.load(str(directory))


PLACES = dict(
  tokenizer_json=("nowhere", "vocabulary", "text", "special"),
  config=(None, "a string", "an object"),
  decoder=(None, "special", "text", "others"),
  special_tokens_map=(None, "eos", "extra"),
  added_tokens=(None, "listed"),
  extra=(None, "additional_special_tokens", "extra_special_tokens", "by name"),
)


def files_of(where):
  """A tokenizer with END in these places, and the files beside it."""
  place, config, decoder, map, listed, extra = where
  tok = characters(*[END] * (place != "nowhere"))
  if place in ("text", "special"):
    tok.add_tokens([tokenizers.AddedToken(END, special=place == "special")])
  i = tok.token_to_id(END) or tok.get_vocab_size()
  c = dict(eos_token=END) if config == "a string" else {}
  if config == "an object":
    c = dict(eos_token=dict(__type="AddedToken", content=END, special=True, **FLAGS))
  if decoder == "others":
    c["added_tokens_decoder"] = {str(tok.token_to_id(STOP)): dict(content=STOP, special=True)}
  elif decoder:
    c["added_tokens_decoder"] = {str(i): dict(content=END, special=decoder == "special", **FLAGS)}
  if extra:
    c |= dict(extra_special_tokens=dict(end_token=END)) if extra == "by name" else {extra: [END]}
  maps = dict(eos=dict(eos_token=END), extra=dict(additional_special_tokens=[END]))
  return tok, dict(
    tokenizer_config=c,
    special_tokens_map=maps.get(map),
    added_tokens={END: i} if listed else None,
  )


@pytest.mark.parametrize(
  "step",
  [
    pytest.param(5, id="one place in five"),
    pytest.param(1, marks=pytest.mark.long, id="every place"),
  ],
)
def test_a_token_is_what_it_is_in_transformers_wherever_it_is_named(step, tmp_path):
  text = f"a{END}\nb {END}"
  for i, place in enumerate([*itertools.product(*PLACES.values())][::step]):
    tok, files = files_of(place)
    named = place[1] or (place[3] == "eos" and not place[2])
    listed = place[2] in ("special", "text") or (place[4] and not place[2])
    if named and place[0] == "nowhere" and not listed:
      with pytest.raises(tokenizer.TokenizerError, match=r"is not in its tokenizer\.json"):
        write(tmp_path / str(i), tok, **files)
      continue  # transformers makes up an id, which the model was not trained with
    ours = write(tmp_path / str(i), tok, **files)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / str(i))
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text) == ids, place
    assert ours.special_tokens.get("eos_token") == theirs.eos_token, place
    expected = theirs.decode(ids, skip_special_tokens=True)
    if theirs.eos_token == END:  # never a text here, whatever its flag
      expected = expected.replace(END, "")
    assert ours.decode(ids) == expected, place
    assert ours.vocab_size == len(theirs), place


def test_tags_are_text_though_they_are_flagged_as_special(tmp_path):
  tok = characters()
  tags = ["<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"]
  tok.add_special_tokens([*tags, END, "<s>", "</s>", "<pad>"])
  ours = write(tmp_path / "a", tok, tokenizer_config=dict(eos_token=END))
  text = "<think>1+1</think><tool_call>x</tool_call><answer>2</answer>"
  assert ours.decode(ours.encode(f"<s>{text}</s><pad>{END}")) == text
  # One that stops is, too; so is one that is closed by a special token alone.
  few = characters()
  few.add_special_tokens(["</answer>"])
  ours = write(tmp_path / "b", few, tokenizer_config=dict(eos_token="</answer>"))
  assert ours.decode(ours.encode(text)) == text


def test_a_format_whose_tags_no_text_has_is_refused(tmp_path):
  tok = characters()
  tok.normalizer = normalizers.Replace("<answer>", "")
  write(tmp_path, tok, tokenizer_config={})
  for form, tag in (("think", ""), ("think_answer", "<answer>")):
    config = config_of(
      tiny.get_config, tokenizer=str(tmp_path), reward__format=form, reward__format_weight=0.1,
      data__max_prompt_tokens=16,
    )  # fmt: skip
    if tag:
      with pytest.raises(
        ValueError, match=f"reward.format={form}: text decoded by .* never has '{tag}'"
      ):
        read_inputs(config)
    else:
      read_inputs(config)


# Templates as in Qwen's, Gemma's and Llama's checkpoints, cut down to what they put around texts.
TURNS = {
  "<|im_end|>": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
  "<end_of_turn>": "{% for m in messages %}<start_of_turn>"
  "{{ m.role.replace('assistant', 'model') }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
  "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
  "<|eot_id|>": "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot_id|>"
  "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
  STOP: "{% for m in messages %}[{{ m.content }}]{% if m.role == 'assistant' %}{{ eos_token }}"
  "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("end, template", TURNS.items())
def test_demonstrations_end_as_the_template_ends_a_turn(end, template, tmp_path):
  tok = characters()
  named = re.findall(r"<[|\w]+>", template)
  tok.add_special_tokens([*dict.fromkeys(named), end])
  ours = write(tmp_path, tok, tokenizer_config=dict(eos_token=STOP, chat_template=template))
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  queue, output = dict(role="user", content="1+1?"), dict(role="assistant", content="2")
  expected = theirs.apply_chat_template([queue, output], return_dict=False)
  prompt = tuple(ours.encode(ours.chat([tokenizer.user_turn("1+1?")])))
  prompt = structs.Prompt("id", "1+1?", "2", prompt, "[2]" if end == STOP else "2")
  ids = [*prompt.tokens, *sources.demonstration_tokens(prompt, ours)[0]]
  assert ids == expected[: len(ids)] and not theirs.decode(expected[len(ids) :]).strip()
  assert theirs.decode(ids[-1]) == end and ours.stop_ids[-1] == tok.token_to_id(STOP)


def test_templates_in_a_folder(tmp_path):
  """Without a default of them transformers refuses to choose, too."""
  config = dict(eos_token=STOP, chat_template="of the config")
  write(tmp_path, characters(), tokenizer_config=config)
  (tmp_path / "additional_chat_templates").mkdir()
  (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("tools")
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  with pytest.raises(ValueError, match="no default"):
    theirs.apply_chat_template([dict(role="user", content="q")])
  with pytest.raises(tokenizer.TokenizerError, match=r"chat templates \['tools'\] and none named"):
    tokenizer.load(str(tmp_path))
  (tmp_path / "chat_template.jinja").write_text("by default")
  assert tokenizer.load(str(tmp_path)).chat([tokenizer.user_turn("q")]) == "by default"


THINKING = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
  "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant"
  "\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
  "{% endif %}"
)


def test_a_resumed_run_has_the_date_of_its_first_start(tmp_path):
  template = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
  write(tmp_path, characters(), tokenizer_config=dict(chat_template=template))
  c = config_of(tiny.get_config, tokenizer=str(tmp_path), data__max_prompt_tokens=200)
  run, first = tmp_path / "run", datetime.datetime(2024, 2, 28, 23, 59)
  run.mkdir()
  provenance.record(run, dataclasses.asdict(c), date=first)
  for workdir, seen in ((run, True), (None, False)):
    checked = read_inputs(c, workdir)
    text = checked.tokenizer.decode(checked.data.train_prompts[0].tokens)
    assert text.startswith("28 Feb 2024 ") == (checked.date == first) == seen


def test_arguments_of_the_template(tmp_path):
  write(tmp_path, characters("<think>"), tokenizer_config=dict(chat_template=THINKING))
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  messages = [dict(role="user", content="12+34=")]
  for arguments in ({}, dict(enable_thinking=False), dict(tools=[dict(type="function", name="f")])):
    values = values_of(tiny.get_config, tokenizer=str(tmp_path), data__max_prompt_tokens=200)
    values["data"]["template_arguments"] = arguments
    prompt = read_inputs(from_dict(values)).data.train_prompts[0]
    messages[0]["content"] = prompt.question
    expected = theirs.apply_chat_template(
      messages, add_generation_prompt=True, return_dict=False, **arguments
    )
    assert list(prompt.tokens) == expected
  wrong = DataConfig(template_arguments=dict(thinking=False))
  with pytest.raises(tokenizer.TokenizerError, match=r"template_arguments\.thinking: .*no such"):
    tokenizer.load_for(str(tmp_path), 300, wrong)
  with pytest.raises(tokenizer.TokenizerError, match="there are none"):
    tokenizer.load_for("bytes", 300, wrong)
  with pytest.raises(tokenizer.TokenizerError, match="there are none"):
    tokenizer.load_for(str(tmp_path), 300, dataclasses.replace(wrong, chat_template=False))


METASPACE = "▁"


@pytest.mark.parametrize("place", ["config", "text_config"])
def test_without_a_generation_config_the_model_names_stop_tokens(place, tmp_path):
  tok = characters()
  tok.add_special_tokens(["<|user|>", "<|observation|>"])
  ids = [tok.token_to_id(text) for text in (STOP, "<|user|>", "<|observation|>")]
  content = dict(model_type="glm4_moe", eos_token_id=ids)
  if place == "text_config":
    text = dict(model_type="gemma3_text", eos_token_id=ids)
    content = dict(model_type="gemma3", eos_token_id=None, text_config=text)
  files = dict(tokenizer_config=dict(eos_token=STOP), config=content)
  ours = write(tmp_path, tok, generation_config=None, **files)
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  theirs = transformers.GenerationConfig.from_model_config(config)
  assert list(ours.stop_ids) == theirs.eos_token_id == ids
  generation = dict(eos_token_id=ids[:1])
  assert write(tmp_path, tok, generation_config=generation, **files).stop_ids == (ids[0],)
  (tmp_path / "generation_config.json").unlink()
  with pytest.raises(tokenizer.TokenizerError, match=r"eos_token_id 9999 of .*/config\.json"):
    write(tmp_path, tok, generation_config=None, config=dict(eos_token_id=[9999]))


FIELDS = (
  "{% for m in messages %}{{ m.role }}{{ m.content }}{% if 'tool_calls' in m %}"
  "{{ m.tool_calls | length }}{% endif %}{% if m.name is defined %}{{ m.name }}{% endif %}"
  "{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}"
)


def test_fields_of_messages_are_those_that_transformers_renders(tmp_path):
  """Parquet has every field in every message."""
  names = "tool_calls", "name", "thinking", "reasoning_content", "reasoning"
  messages = [dict.fromkeys(names) | dict(role="user", content="1+1?")]
  for thoughts in (dict(thinking="a"), dict(reasoning_content="b"), dict(reasoning="c")):
    for more in ({}, dict(thinking=""), dict(reasoning="d")):
      messages.append(dict.fromkeys(names) | dict(role="assistant", content="2") | thoughts | more)
  ours = write(tmp_path, characters(), tokenizer_config=dict(chat_template=FIELDS))
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  expected = theirs.apply_chat_template(messages, tokenize=False)
  assert ours.conversation(messages) == expected and "None" not in expected


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_the_ids_of_a_plain_prompt_are_those_behind_bos(scheme, tmp_path):
  """Transformers 5 writes the tokenizer of any Llama so."""
  vocab = ["<unk>", "<s>", "</s>", *"▁theanswr", "th", "the", "▁the", "▁a"]
  merges = [("t", "h"), ("th", "e"), (METASPACE, "the"), (METASPACE, "a")]
  tok = tokenizers.Tokenizer(
    models.BPE({text: i for i, text in enumerate(dict.fromkeys(vocab))}, merges, unk_token="<unk>")
  )
  tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
  tok.decoder = decoders.Metaspace(prepend_scheme=scheme)
  tok.add_special_tokens(["<unk>", "<s>", "</s>"])
  tok.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
  config = dict(bos_token="<s>", eos_token="</s>")
  ours = write(tmp_path, tok, generation_config=None, tokenizer_config=config)
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  assert ours.encode(ours.chat([tokenizer.user_turn("the answer")])) == theirs.encode("the answer")
  # Behind a chat template the text is what it says.
  template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
  ours = write(
    tmp_path, tok, generation_config=None, tokenizer_config=config | dict(chat_template=template)
  )
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  messages = [dict(role="user", content="the answer")]
  expected = theirs.apply_chat_template(messages, return_dict=False)
  assert ours.encode(ours.chat([tokenizer.user_turn("the answer")])) == expected


def test_a_bos_token_that_is_wanted_and_has_no_name(tmp_path):
  ours = write(tmp_path, characters(), tokenizer_config=dict(add_bos_token=True))
  assert ours.encode(ours.chat([tokenizer.user_turn("q")])) == characters().encode("q").ids
