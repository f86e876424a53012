"""A run as a Hugging Face directory: the weights it ended with, and its tokenizer."""

import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from support import toy_qwen3
from support.command_line import SMALL_VALUES
from support.configs import config_of
from tokenizers import decoders, models, normalizers, pre_tokenizers

from configs import tiny
from gspo_jax import export, sft, sharding
from gspo_jax.data import tokenizer
from gspo_jax.inputs import read_inputs
from gspo_jax.models import hf
from gspo_jax.run import open_run
from gspo_jax.runs import weight_source

SMALL = SMALL_VALUES | dict(
  job="sft", model__num_layers=1, sft__steps=2, sft__batch=8, sft__target_loss=0.0,
  rl__prompts=8, rl__group_size=2, rl__minibatches=1, checkpoint__every=1,
  data__max_prompt_tokens=64, engine__cache_dtype="int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run with a tokenizer of Hugging Face, and its parameters; one device compiles sooner."""
  home = tmp_path_factory.mktemp("trained")
  toy_qwen3.write_tokenizer(home)
  config = config_of(tiny.get_config, **SMALL, tokenizer=str(home))
  make_mesh = sharding.make_mesh
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sharding, "make_mesh", lambda config, _: make_mesh(config, jax.devices()[:1]))
    with open_run(read_inputs(config, home / "run")) as run:
      return home / "run", jax.device_get(sft.sft(run)), run.config.model


def test_a_run_as_others_read_it(trained, tmp_path, capsys):
  workdir, params, model = trained
  export.main([str(workdir), str(tmp_path / "out"), "--dtype=float32"])
  types, weights = capsys.readouterr().out.splitlines()
  assert types == "the run sampled with other dtypes than it trained: engine.cache_dtype=int8"
  assert weights.endswith(f"the weights of {workdir}/checkpoints/sft/2 in float32")
  exported, config = hf.load(tmp_path / "out")
  assert config == model and jax.tree.all(jax.tree.map(np.array_equal, exported, params))
  tok = tokenizer.load(str(tmp_path / "out"))
  assert tok.chat([tokenizer.user_turn("q")]) == tokenizer.load(str(workdir.parent)).chat(
    [tokenizer.user_turn("q")]
  )


def test_the_tokenizer_bytes_has_no_files(trained, tmp_path, capsys):
  export.main([str(trained[0]), str(tmp_path / "out"), "--tokenizer=bytes"])
  message = r"no tokenizer files, .* are list\(text\.encode\(\)\), and id 257 ends a response\n"
  assert re.search(message, capsys.readouterr().out)
  assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_files_of_a_processor_come_along(trained, tmp_path, monkeypatch):
  export.export(str(trained[0]), tmp_path / "origin")
  (tmp_path / "origin/preprocessor_config.json").write_text("{}")
  monkeypatch.setattr(export, "_origin", lambda checkpoint: str(tmp_path / "origin"))
  export.export(str(trained[0]), tmp_path / "out")
  assert (tmp_path / "out/preprocessor_config.json").read_text() == "{}"


def test_transformers_stops_where_the_run_did(trained, tmp_path):
  workdir, *_ = trained
  home = workdir.parent
  (home / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 20}')
  (home / "additional_chat_templates").mkdir()
  (home / "additional_chat_templates/tools.jinja").write_text("tools")
  (home / "chat_template.jinja").write_text(toy_qwen3.TEMPLATE)
  export.export(str(workdir), tmp_path / "out")
  tok = tokenizer.load(str(home))
  assert tok.stop_ids == (2, 0)
  generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
  assert generation.eos_token_id == [2, 0] and generation.pad_token_id == 0
  assert generation.top_k == 20  # From the tokenizer's directory.
  config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
  assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [2, 0], 0)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
  assert theirs.chat_template.keys() == {"default", "tools"}


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("legacy", [True, False])
def test_transformers_reads_the_ids_of_the_run(name, legacy, tmp_path):
  """Its class of Llama's tokenizers puts spaces by the key `legacy`, and ignores tokenizer.json."""
  vocab = ["<unk>", "<s>", "</s>", "▁", *"[INST]/ahi?", "▁h", "▁a"]
  ids = {text: i for i, text in enumerate(dict.fromkeys(vocab))}
  tok = tokenizers.Tokenizer(models.BPE(ids, [("▁", "h"), ("▁", "a")], unk_token="<unk>"))
  if legacy:
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
  else:
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tok.normalizer = normalizers.Sequence(parts)
  tok.decoder = decoders.Metaspace()
  tok.add_special_tokens(["<unk>", "<s>", "</s>"])
  source, out = tmp_path / "source", tmp_path / "out"
  source.mkdir()
  out.mkdir()
  tok.save(str(source / "tokenizer.json"))
  template = "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% endfor %}"
  config = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template)
  config |= dict(tokenizer_class=name, legacy=legacy)
  (source / "tokenizer_config.json").write_text(json.dumps(config))
  (out / "config.json").write_text('{"model_type": "llama"}')
  export._save_tokenizer(out, str(source), {}, "")
  messages = [dict(role="user", content="hi a"), dict(role="user", content="a?")]
  ours, theirs = tokenizer.load(str(source)), transformers.AutoTokenizer.from_pretrained(out)
  expected = theirs.apply_chat_template(messages, return_dict=False)
  assert ours.encode(ours.conversation(messages)) == expected
  defaults = transformers.LlamaTokenizer
  assert theirs.padding_side == defaults.padding_side == "left"
  assert theirs.model_input_names == defaults.model_input_names
  written = json.loads((out / "tokenizer_config.json").read_text())
  assert config.items() - {("tokenizer_class", name)} <= written.items()


def test_a_tokenizer_that_is_elsewhere_now(trained, tmp_path, monkeypatch, capsys):
  """Such as a relative path, from another directory."""
  workdir, *_ = trained
  for name in "config.json", "checkpoints":
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(workdir / name)
  values = json.loads((workdir / "config.json").read_text())
  values["provenance"]["tokenizer"] = workdir.parent.name
  (tmp_path / "run/config.json").unlink()
  (tmp_path / "run/config.json").write_text(json.dumps(values))
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit):
    export.main([str(tmp_path / "run"), "out"])
  assert "the directory of the tokenizer of RUN=" in capsys.readouterr().err
  assert not (tmp_path / "out").exists()
  export.main([str(tmp_path / "run"), "out", f"--tokenizer={workdir.parent}"])
  assert tokenizer.load("out").stop_ids == (2, 0)
  monkeypatch.chdir(workdir.parents[1])
  export.main([str(tmp_path / "run"), str(tmp_path / "other")])
  assert tokenizer.load(str(tmp_path / "other")).stop_ids == (2, 0)


def test_an_earlier_checkpoint_in_half_precision(trained, tmp_path):
  workdir, params, _ = trained
  export.export(str(workdir / "checkpoints/sft/1"), tmp_path / "out")
  exported, _ = hf.load(tmp_path / "out")
  assert "bfloat16" in (tmp_path / "out" / "config.json").read_text()
  halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), exported)
  assert jax.tree.all(jax.tree.map(np.array_equal, exported, halves))
  near = jax.tree.map(lambda a, b: np.abs(a.astype(np.float32) - b).max(), exported, params)
  assert 0 < max(jax.tree.leaves(near)) < 0.1  # an update apart


def test_what_cannot_be_exported_is_said_in_one_line(trained, tmp_path, capsys):
  workdir, *_ = trained
  for arguments, message in (
    ([str(tmp_path / "nowhere"), str(tmp_path / "out")], "is neither the workdir nor"),
    ([str(workdir / "checkpoints/sft/7"), str(tmp_path / "out")], "complete steps: 1, 2"),
    ([str(workdir), str(workdir)], "exists and is not empty: give a new name"),
    ([str(workdir), "gs://bucket/model"], "gs://bucket/model is not local"),
  ):
    with pytest.raises(SystemExit):
      export.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gspo_jax: ") and message in line


def test_values_beyond_float16_are_refused_with_the_tensor(trained, tmp_path, monkeypatch, capsys):
  workdir, *_ = trained
  load = weight_source.RunCheckpoint.load

  def load_larger(*arguments):
    params = load(*arguments)
    return params.replace(embed=params.embed * 0 - 1e5)

  monkeypatch.setattr(weight_source.RunCheckpoint, "load", load_larger)
  with pytest.raises(SystemExit):
    export.main([str(workdir), str(tmp_path / "out"), "--dtype=float16"])
  count = trained[1].embed.size
  assert (
    f"model.embed_tokens.weight has {count} values that are NaN or beyond float16, whose largest "
    "is 65504: take bfloat16" in " ".join(capsys.readouterr().err.split())
  )
  assert not (tmp_path / "out").exists()
  export.main([str(workdir), str(tmp_path / "out"), "--dtype=bfloat16"])


@pytest.mark.parametrize("name", ["model.safetensors.partial", "config.json", "tokenizer.json"])
def test_an_export_to_a_full_disk_names_it_and_can_be_repeated(
  name, trained, tmp_path, monkeypatch, capsys
):
  arguments = [str(trained[0]), str(tmp_path / "out"), "--dtype=float32"]
  mkdir = Path.mkdir

  def mkdir_on_full_disk(path, *arguments, **options):
    mkdir(path, *arguments, **options)
    if path == tmp_path / "out" and not (path / name).is_symlink():
      (path / name).symlink_to("/dev/full")

  with monkeypatch.context() as patch, pytest.raises(SystemExit):
    patch.setattr(Path, "mkdir", mkdir_on_full_disk)
    export.main(arguments)
  (line,) = capsys.readouterr().err.splitlines()
  assert line == f"gspo_jax: {tmp_path}/out cannot be written: No space left on device"
  export.main(arguments)
  assert hf.load(tmp_path / "out")[1] == trained[2]


@pytest.mark.parametrize("directory", ["org/model@0123abc", ""])
def test_parts_beside_the_language_model_are_those_of_the_first_run(trained, directory, tmp_path):
  """Also if RL started from a cold start in another workdir."""
  first = shutil.copytree(trained[0], tmp_path / "first")
  values = json.loads((first / "config.json").read_text())
  values["provenance"]["start"] = dict(directory=directory) if directory else {}
  (first / "config.json").write_text(json.dumps(values))
  start = dict(checkpoint=str(first / "checkpoints/sft/2"), step=2)
  later = weight_source.RunCheckpoint(Path("x/checkpoints/rl/3"), dict(provenance={"start": start}))
  assert export._origin(later) == directory
  shutil.rmtree(first)
  assert export._origin(later) == ""


@pytest.mark.parametrize(
  "job, start, base",
  [
    ("rl", dict(directory="org/model@0123abc"), "org/model@0123abc"),
    ("offline", dict(directory="gs://bucket/model"), "gs://bucket/model"),
    ("rl", dict(directory="."), os.getcwd()),
    ("rl", {}, ""),
    ("rl", dict(checkpoint="other/checkpoints/rl/3", step=3), ""),
    ("sft+rl", dict(directory="org/model@0123abc"), ""),
  ],
)
def test_the_base_of_adapters_is_the_published_model_of_the_start(job, start, base):
  config = dict(job=job, weights="unused", provenance=dict(start=start) if start else {})
  path = Path("run/checkpoints/rl/3")
  checkpoint = weight_source.RunCheckpoint(path, config)
  assert export._base(checkpoint) == base
  assert export._base(checkpoint, ".") == os.getcwd()
  origin = str(path.parents[1] / "sft") if job == "sft+rl" else start.get("checkpoint", "")
  assert export._unpublished_base(checkpoint) == origin
