"""Responses after their prompts, as chat templates write them: against transformers."""

import functools
import json

import numpy as np
import pytest
import transformers
from support import data_cases
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gspo_jax.data import formats, recorded, replies, sources, tokenizer
from gspo_jax.data.files import BadRow
from gspo_jax.settings.data import DataConfig, DataError

STOP = "<|im_end|>"
MARKS = (
  "<think>",
  "</think>",
  "<|thinking|>",
  "<|/thinking|>",
  "[THINK]",
  "[/THINK]",
  "<|im_start|>",
)
PLAIN = "It is 2."
THOUGHT = "<think>\none and one\n</think>\n\nIt is 2."
SPLIT = (
  "{% set c = m.content %}{% set r = m.reasoning_content | default('') %}{% if '</think>' in c %}"
  "{% set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
  "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
THINKS = SPLIT + "<|im_start|>assistant\n<think>\n{{ r }}\n</think>\n\n{{ c }}"
LOSES = SPLIT + "<|im_start|>assistant\n{{ c }}"
PLAIN_TURN = "<|im_start|>assistant\n{{ m.content }}"
FIELD = "<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{{ m.content }}"
OFF = "{% if enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
NAMED = "{% if r or enable_thinking is defined %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
ANALYSIS = (
  "{% if 'thinking' in m %}<|im_start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}"
  "<|end|>{% endif %}"
)
AT_ONCE = "{% if r %}<think>{{ r }}{% endif %}</think>{{ c }}"
# By name: an assistant's turn, and the end of a prompt.
PARTS = {
  "thought in the turn": (THINKS, "\n"),
  "prompt opens a thought": (THINKS, "\n<think>\n"),
  "prompt opens a thought, without a line": (THINKS, "\n<think>"),
  "prompt has an empty thought": (SPLIT + "<|im_start|>assistant\n" + NAMED, "\n" + OFF),
  "turns lose thoughts": (LOSES, "\n<think>\n"),
  "turns lose thoughts, plain prompt": (LOSES, "\n"),
  "plain": (PLAIN_TURN, "\n"),
  "plain turns, prompt opens": (PLAIN_TURN, "\n<think>\n"),
  "closes at once": (SPLIT + "<|im_start|>assistant\n" + AT_ONCE, "\n<think>"),
  "trims": (PLAIN_TURN.replace("content", "content | trim"), "\n"),
  "separate field": ("<|im_start|>assistant\n" + FIELD, "\n<think>\n"),
  "refuses": ("{{ raise_exception('no turns') }}", "\n<think>\n"),
  "leaves thoughts open": ("<|im_start|>assistant\n<think>\n\n{{ m.content }}", "\n<think>\n\n"),
  "empty thoughts alone": ("<|im_start|>assistant\n<think></think>{{ m.content }}", "\n"),
  "channels": (PLAIN_TURN.replace("\n", "<|channel|>final<|message|>"), ""),
  "channel of thoughts": (ANALYSIS + PLAIN_TURN.replace("\n", "<|channel|>final<|message|>"), ""),
}
TEMPLATES = {
  name: "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
  f"{{{{ m.content }}}}{{% else %}}{turn}{{% endif %}}<|im_end|>\n{{% endfor %}}"
  f"{{% if add_generation_prompt %}}<|im_start|>assistant{end}{{% endif %}}"
  for name, (turn, end) in PARTS.items()
}
AS_WRITTEN = "as transformers"
FINAL = "<|im_start|>assistant<|channel|>final<|message|>It is 2."
OPENED = "one and one\n</think>\n\nIt is 2."
# By template: a plain demonstration, and one with its thought, after the prompt.
EXPECTED = {
  "thought in the turn": (AS_WRITTEN, AS_WRITTEN),
  "prompt opens a thought": (AS_WRITTEN, AS_WRITTEN),
  "prompt opens a thought, without a line": (AS_WRITTEN, AS_WRITTEN),
  "prompt has an empty thought": (AS_WRITTEN, AS_WRITTEN),
  "turns lose thoughts": ("\n</think>\n\nIt is 2.", OPENED),
  "turns lose thoughts, plain prompt": (AS_WRITTEN, THOUGHT),
  "plain": (AS_WRITTEN, AS_WRITTEN),
  "plain turns, prompt opens": ("\n</think>\n\nIt is 2.", AS_WRITTEN),
  "closes at once": ("</think>It is 2.", "one and one</think>It is 2."),
  "trims": (AS_WRITTEN, AS_WRITTEN),
  "separate field": (AS_WRITTEN, OPENED),
  "refuses": ("\n</think>\n\nIt is 2.", OPENED),
  "leaves thoughts open": ("</think>\n\nIt is 2.", "\n" + OPENED),
  "empty thoughts alone": (AS_WRITTEN, THOUGHT),
  "channels": (AS_WRITTEN, "<|channel|>final<|message|>" + THOUGHT),
  "channel of thoughts": (AS_WRITTEN, "<|channel|>analysis<|message|>one and one<|end|>" + FINAL),
}


def checkpoint(directory, template, **arguments):
  """Our tokenizer with a chat template, and that of transformers."""
  vocab = ["<|endoftext|>", STOP, *MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
  tok = Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, []))
  tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tok.decoder = decoders.ByteLevel()
  tok.add_special_tokens(["<|endoftext|>", STOP, "<|im_start|>"])
  tok.add_tokens(list(MARKS))
  tok.save(str(directory / "tokenizer.json"))
  config = dict(eos_token=STOP, chat_template=template)
  (directory / "tokenizer_config.json").write_text(json.dumps(config))
  data = DataConfig(template_arguments=arguments)
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
  return tokenizer.load_for(str(directory), len(vocab), data), theirs


def after(tok, demonstration, directory, **changes):
  """Prompt and demonstration of a data row, as texts and tokens."""
  row = dict(question="1+1?", answer="2", solution=demonstration) | changes
  path = data_cases.write(directory / "rows.jsonl", [row])
  config = data_cases.config(max_prompt_tokens=500, demonstration_field="solution")
  (prompt,) = sources.load_spec(config, tok, path, "data.train")
  ids, mask = sources.demonstration_tokens(prompt, tok)
  assert all(mask) and ids[-1] == tok.stop_ids[0]
  return prompt, tok.tokenizer.decode(ids[:-1], skip_special_tokens=False)


def conversation(theirs, text, **arguments):
  messages = [dict(role="user", content="1+1?"), dict(role="assistant", content=text)]
  return theirs.apply_chat_template(messages, tokenize=False, **arguments)


@pytest.mark.parametrize("text", [PLAIN, THOUGHT])
@pytest.mark.parametrize("name", TEMPLATES)
def test_demonstrations_follow_their_prompts_as_the_template_writes_them(name, text, tmp_path):
  tok, theirs = checkpoint(tmp_path, TEMPLATES[name])
  prompt, response = after(tok, text, tmp_path)
  expected = EXPECTED[name][text == THOUGHT]
  opening = theirs.apply_chat_template(
    [dict(role="user", content="1+1?")], tokenize=False, add_generation_prompt=True
  )
  assert list(prompt.tokens) == theirs(opening, add_special_tokens=False)["input_ids"]
  if expected == AS_WRITTEN:
    whole = conversation(theirs, text)
    assert opening + response + STOP == whole.rstrip("\n")
  else:
    assert response == expected
  assert (opening + response).count("<think>") <= 1
  assert (opening + response).count("<think>") <= (opening + response).count("</think>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_recorded_texts_follow_as_demonstrations_do(name, tmp_path):
  tok, _ = checkpoint(tmp_path, TEMPLATES[name])
  limits = recorded.Limits(2, 500, 500, tok.vocab_size)
  for text in (PLAIN, THOUGHT):
    _, response = after(tok, text, tmp_path)
    row = dict(prompt="1+1?", response=text, reward=1.0)
    path = data_cases.write(tmp_path / "recorded.jsonl", [row, row | dict(truncated=True)])
    (group,) = recorded.load(path, tok, "{question}", limits, "raise").rows
    whole, cut = (
      tok.tokenizer.decode(x.tokens, skip_special_tokens=False) for x in group.responses
    )
    assert whole == response + STOP
    prompt = tok.chat([dict(role="user", content="1+1?")])
    if text == PLAIN:
      assert cut == PLAIN  # A thought that was cut off stays open.
    else:
      assert (prompt + cut).count("<think>") == 1 and cut.endswith(OPENED)


@pytest.mark.parametrize("thought", ["one and one", ""])
def test_a_thought_goes_to_its_channel_as_in_transformers(thought, tmp_path):
  tok, theirs = checkpoint(tmp_path, TEMPLATES["channel of thoughts"])
  prompt, response = after(tok, f"<think>\n{thought}\n</think>\n\n{PLAIN}", tmp_path)
  text = tok.tokenizer.decode(list(prompt.tokens), skip_special_tokens=False)
  message = dict(role="assistant", content=PLAIN, reasoning_content=thought or None)
  expected = theirs.apply_chat_template(
    [dict(role="user", content="1+1?"), message], tokenize=False
  )
  assert text + response + STOP + "\n" == expected


def test_arguments_of_a_template_hold_for_the_response(tmp_path):
  name = "prompt has an empty thought"
  tok, theirs = checkpoint(tmp_path, TEMPLATES[name], enable_thinking=False)
  prompt, response = after(tok, PLAIN, tmp_path)
  text = tok.tokenizer.decode(list(prompt.tokens), skip_special_tokens=False)
  assert text + response + STOP + "\n" == conversation(theirs, PLAIN, enable_thinking=False)
  assert response == PLAIN
  assert after(tok, THOUGHT, tmp_path)[1] == PLAIN  # The prompt has closed the thought.


def test_thoughts_of_earlier_turns_are_the_template_s(tmp_path):
  tok, theirs = checkpoint(tmp_path, TEMPLATES["turns lose thoughts, plain prompt"])
  messages = [
    dict(role="user", content="0+0?"),
    dict(role="assistant", content="<think>\nnothing\n</think>\n\n0"),
    dict(role="user", content="1+1?"),
  ]
  prompt, response = after(tok, PLAIN, tmp_path, question=messages)
  text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
  assert tok.tokenizer.decode(list(prompt.tokens), skip_special_tokens=False) == text
  assert "nothing" not in text and response == PLAIN


@pytest.mark.parametrize(
  "prompt, response, expected",
  [
    ("q<think>", PLAIN, "\n\n</think>\n\nIt is 2."),
    ("q<think>\n", PLAIN, "\n</think>\n\nIt is 2."),
    ("q<think>\n\n", PLAIN, "</think>\n\nIt is 2."),
    ("q<think>\n", THOUGHT, OPENED),
    ("q<think>\n", "<think>a</think>b", "a</think>b"),
    ("q<think>\n", OPENED, OPENED),
    ("q<think>\n\n</think>\n\n", THOUGHT, PLAIN),
    ("q<think></think>", PLAIN, PLAIN),
    ("q</think>", PLAIN, PLAIN),
    ("q</think>", THOUGHT, PLAIN),
    ("q<|END_THINKING|>", "<|START_THINKING|>a<|END_THINKING|>It is 2.", PLAIN),
    ("q<thought_end>", "<thought>a<thought_end>It is 2.", PLAIN),
    ("q<seed:think>", "<seed:think>a</seed:think>b", "a</seed:think>b"),
    ("q<|thinking|>\n", "<|thinking|>\na<|/thinking|>b", "a<|/thinking|>b"),
    ("q<|thinking|>\n", PLAIN, "\n<|/thinking|>\n\nIt is 2."),
    ("q[THINK]", "[THINK]a[/THINK]b", "a[/THINK]b"),
    ("q[THINK]", PLAIN, "\n\n[/THINK]\n\nIt is 2."),
    ("q<|begin_of_thought|>\n", PLAIN, "\n<|end_of_thought|>\n\nIt is 2."),
    ("q<answer>", "<answer>2</answer>", "2</answer>"),
    ("q: ", THOUGHT, THOUGHT),
    ("q<b>", PLAIN, PLAIN),
    ("Sort [1,2]", "[1,2]", "[1,2]"),
    ("[A] or [B]", "[B] is right", "[B] is right"),
    ("[True] or [False]", "[False]", "[False]"),
  ],
)
def test_without_a_template_the_prompt_s_end_decides(prompt, response, expected):
  assert replies.continuation(data_cases.BYTES, [], prompt, response) == expected


def test_messages_that_a_template_refuses_are_a_bad_row(tmp_path):
  tok, _ = checkpoint(tmp_path, "{{ raise_exception('roles must alternate') }}")
  rows = [dict(question="1+1?", answer="2")]
  path = data_cases.write(tmp_path / "rows.jsonl", rows)
  with pytest.raises(
    DataError, match=r"rows\.jsonl, line 1: .*alternate.*or the messages of the row"
  ):
    sources.load_spec(data_cases.config(max_prompt_tokens=500), tok, path, "data.train")
  recording = data_cases.write(tmp_path / "r.jsonl", [dict(prompt="a", response="b", reward=1.0)])
  with pytest.raises(DataError, match=r"r\.jsonl, line 1: .*alternate"):
    recorded.load(
      recording, tok, "{question}", recorded.Limits(9, 500, 500, tok.vocab_size), "raise"
    )


def test_a_recorded_length_tells_what_was_sampled(tmp_path):
  tok, _ = checkpoint(tmp_path, TEMPLATES["prompt opens a thought"])
  limits = recorded.Limits(9, 500, 500, tok.vocab_size)
  raw, written = ([*tok.encode(x), tok.stop_ids[0]] for x in (PLAIN, "\n</think>\n\nIt is 2."))
  row = dict(prompt="1+1?", response=PLAIN, reward=0.0)
  rows = [row | dict(length=len(ids)) for ids in (raw, written)]
  path = data_cases.write(tmp_path / "recorded.jsonl", rows)
  (group,) = recorded.load(path, tok, "{question}", limits, "raise").rows
  for response, ids in zip(group.responses, (raw, written)):
    np.testing.assert_array_equal(response.tokens, ids)


@pytest.mark.parametrize("end, expected", [("<think>\n", OPENED), ("", THOUGHT)])
def test_a_recorded_prompt_of_another_template_decides(end, expected, tmp_path):
  tok, _ = checkpoint(tmp_path, TEMPLATES["turns lose thoughts"])
  ids = tok.encode(f"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n{end}")
  row = dict(prompt="1+1?", prompt_ids=ids, response=THOUGHT, reward=1.0)
  limits = recorded.Limits(9, 500, 500, tok.vocab_size)
  path = data_cases.write(tmp_path / "recorded.jsonl", [row])
  (group,) = recorded.load(path, tok, "{question}", limits, "raise").rows
  assert replies.whole_text(tok, group.responses[0].tokens.tolist()) == expected + STOP


def test_the_embedded_tasks_follow_too(tmp_path):
  tok, _ = checkpoint(tmp_path, TEMPLATES["prompt opens a thought"])
  for task in ("arithmetic", "calculator"):
    prompt = sources.load_spec(
      data_cases.config(max_prompt_tokens=500), tok, f"{task}:train", "data.train"
    )[5]
    ids, _ = sources.demonstration_tokens(prompt, tok)
    assert tok.decode(ids).startswith("\n</think>\n\n") and tok.decode(ids).count("</think>") == 1


@pytest.mark.parametrize("prepends", [False, True])
def test_a_template_s_space_is_written_once(prepends, tmp_path):
  """Tokenizers of Llama 2 put a space before every text that they encode."""
  template = TEMPLATES["plain"].replace("\n{{ m.content }}{% endif", " {{ m.content }}{% endif")
  template = template.replace("assistant\n{% endif", "assistant{% endif")
  tok, theirs = checkpoint(tmp_path, template)
  if prepends:
    fields = json.loads((tmp_path / "tokenizer.json").read_text())
    space = dict(type="Prepend", prepend=" ")
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields | dict(normalizer=space)))
    tok = tokenizer.load(str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  prompt, _ = after(tok, PLAIN, tmp_path)
  ids = [*prompt.tokens, *sources.demonstration_tokens(prompt, tok)[0]]
  messages = [dict(role="user", content="1+1?"), dict(role="assistant", content=PLAIN)]
  expected = theirs.apply_chat_template(messages, return_dict=False)
  assert ids == expected[: len(ids)] and ids[-1] == tok.stop_ids[0]


@pytest.mark.parametrize("field", ["question", "demonstration"])
def test_prompts_with_images_are_refused_by_the_row(field, tmp_path):
  directory = tmp_path / "tokenizer"
  directory.mkdir()
  checkpoint(directory, "{% for m in messages %}{{ m.content }}{% endfor %}")
  tok = Tokenizer.from_file(str(directory / "tokenizer.json"))
  tok.add_special_tokens(["<|image_pad|>"])
  tok.save(str(directory / "tokenizer.json"))
  tok = tokenizer.load(str(directory))
  row = dict(question="1 + 1?", answer="2", demonstration="2")
  row[field] = f"<image>: {row[field]} [IMG] <|image_pad|>"
  form = formats.Format("question", "answer", demonstration="demonstration", template="{question}")
  read = functools.partial(formats.prompt, form=form, tok=tok, max_tokens=100, default_id="0")
  if field == "question":
    refusal = r"the token <\|image_pad\|>, and only text is supported"
    with pytest.raises(BadRow, match=refusal):
      read(row)
    response = dict(prompt=row[field], response="2", reward=1.0)
    with pytest.raises(BadRow, match=refusal):
      recorded._read(response, tok, "{question}", recorded.Limits(1, 100, 10, 300))
    row[field] = row[field].replace("<|image_pad|>", "")  # Other names are text.
  assert read(row).question == row["question"]
