"""A run as a Hugging Face directory: the weights it ended with, and its tokenizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy_qwen3
from support.command_line import SMALL_VALUES
from support.configs import config_of

from configs import tiny
from gspo_jax import export, sft
from gspo_jax.data import tokenizer
from gspo_jax.models import hf
from gspo_jax.run import open_run

SMALL = SMALL_VALUES | dict(
  job="sft", model__num_layers=1, sft__steps=2, sft__batch=8, sft__target_loss=0.0,
  rl__prompts=8, rl__group_size=2, rl__minibatches=1, checkpoint__every=1,
  data__max_prompt_tokens=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A run with a tokenizer of Hugging Face, and its parameters."""
  home = tmp_path_factory.mktemp("trained")
  toy_qwen3.write_tokenizer(home)
  with open_run(config_of(tiny.get_config, **SMALL, tokenizer=str(home)), home / "run") as run:
    return home / "run", jax.device_get(sft.sft(run)), run.config.model


def test_a_run_as_others_read_it(trained, tmp_path, capsys):
  workdir, params, model = trained
  export.main([str(workdir), str(tmp_path / "out"), "--dtype=float32"])
  assert capsys.readouterr().out.endswith(f"the weights of {workdir}/checkpoints/sft/2\n")
  found, config = hf.load(tmp_path / "out")
  assert config == model and jax.tree.all(jax.tree.map(np.array_equal, found, params))
  tok = tokenizer.load(str(tmp_path / "out"))
  assert tok.render("q") == tokenizer.load(str(workdir.parent)).render("q")


def test_an_earlier_checkpoint_in_half_precision(trained, tmp_path):
  workdir, params, _ = trained
  export.export(str(workdir / "checkpoints/sft/1"), tmp_path / "out")
  found, _ = hf.load(tmp_path / "out")
  assert "bfloat16" in (tmp_path / "out" / "config.json").read_text()
  halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), found)
  assert jax.tree.all(jax.tree.map(np.array_equal, found, halves))
  near = jax.tree.map(lambda a, b: np.abs(a.astype(np.float32) - b).max(), found, params)
  assert 0 < max(jax.tree.leaves(near)) < 0.1  # an update apart


def test_what_cannot_be_exported_is_said_in_one_line(trained, tmp_path, capsys):
  workdir, *_ = trained
  for arguments, message in (
    ([str(tmp_path / "nowhere"), str(tmp_path / "out")], "is not the workdir of a run"),
    ([str(workdir / "checkpoints/sft/7"), str(tmp_path / "out")], "there are those of steps 1, 2"),
    ([str(workdir), str(workdir)], "is there already: give a new name"),
  ):
    with pytest.raises(SystemExit):
      export.main(arguments)
    assert message in capsys.readouterr().err
