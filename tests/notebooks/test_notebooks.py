"""Notebooks equal their scripts, and run from top to bottom in their own kernel.

It runs shortened: the cell tagged `parameters` has in its metadata, under `short`, values that the
names it assigns get instead; in a script `# %% tags=["parameters"] short={"STEPS": 5}`. Nothing
else differs from what a reader runs. `CHECKS` are run as a last cell.
"""

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from support import smollm2, toy_qwen3

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
IN_CLONE = "experiment_figures"  # needs what is not in the package
LOSSES = "losses_in_your_loop"  # installs the losses alone, beside the JAX of its session
FIX = "jupytext --to ipynb --update notebooks/*.py"

CHECKS = dict(
  gspo_in_ten_minutes="""
assert len(responses) == 512 and values("rl", "eval/accuracy")[0] == [0, ITERATIONS]
""",
  losses_in_your_loop="""
for name, curve in curves.items():
  assert curve[:3].mean() < 0.2 and curve[-5:].mean() > 0.8, (name, curve)
assert unused.any() and not unused.all()
""",
  qwen3_gsm8k="""
assert [row["step"] for row in evaluations] == [0, 1, 2]
assert len(before) == 4 * 2 and before.keys() == after.keys()
assert words.stop_ids == (2, 0)  # the end of a turn, and that of texts
""",
  smollm2="""
assert [row["step"] for row in evaluations] == [0, 1, 2]
answers = [record["response"] for record in after.values()]
assert sum(set(answer) <= set("0123456789+-*/() ") for answer in answers) >= len(answers) / 2
""",
)
# qwen3_gsm8k where there is no chip.
SMOLLM2 = dict(
  HOME="home",
  ITERATIONS=2,
  PROBLEMS=8,
  CHANGES={"sft.steps": 12, "rl.prompts": 4, "rl.group_size": 4},
)
# What a reader downloads, by notebook.
DOWNLOADS = dict(qwen3_gsm8k=lambda folder: toy_qwen3.write(folder / "toy"))


def script(name):
  return jupytext.read(FOLDER / f"{name}.py")


def tagged(notebook, tag):
  (cell,) = [c for c in notebook.cells if tag in c.metadata.get("tags", ())]
  return cell


def contents(notebook):
  """Contents of a notebook without outputs, ids and counts."""
  metadata = {key: notebook.metadata.get(key) for key in ("kernelspec", "accelerator", "colab")}
  return metadata, [
    (cell.cell_type, cell.source, static_metadata(cell.metadata)) for cell in notebook.cells
  ]


def static_metadata(metadata):
  """Metadata without traces of execution."""
  return {key: value for key, value in metadata.items() if key != "execution"}


def test_every_notebook_has_a_script():
  assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES, FIX


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_equal_their_scripts(name):
  notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
  nbformat.validate(notebook)
  assert contents(notebook) == contents(script(name)), FIX


def test_notebooks_install_alike_and_open_in_colab():
  names = [name for name in NAMES if name != IN_CLONE]
  sources = {tagged(script(name), "install").source for name in names if name != LOSSES}
  assert len(sources) == 1
  for name in names:
    address = f"colab.research.google.com/github/OWNER/gspo_jax/blob/main/notebooks/{name}.ipynb"
    assert address in script(name).cells[0].source


def test_losses_notebook_goes_on_after_its_installation(monkeypatch):
  source = tagged(script(LOSSES), "install").source.replace("/OWNER/", "/somebody/")
  commands = []
  monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  exec(source, {})  # Without a SystemExit, and without the extra that replaces JAX.
  assert [command[-1] for command in commands] == ["git+https://github.com/somebody/gspo_jax"]


def test_notebooks_install_from_a_directory(monkeypatch, tmp_path):
  repository = "git+https://github.com/OWNER/gspo_jax"
  source = tagged(script("qwen3_gsm8k"), "install").source.replace(repository, str(tmp_path))
  commands = []
  monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  monkeypatch.setattr("shutil.which", lambda name: None)
  with pytest.raises(SystemExit, match="Installed"):
    exec(source, {})
  assert [command[-1] for command in commands] == [f"gspo-jax[train] @ {tmp_path.as_uri()}"]


@pytest.mark.parametrize("name", NAMES)
def test_shortened_values_are_parameters(name):
  cell, values = tagged(script(name), "parameters"), {}
  exec(cell.source, values)
  for key, value in cell.metadata.get("short", {}).items():
    assert key in values and values[key] != value


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path):
  short = tagged(script(name), "parameters").metadata.get("short", {})
  DOWNLOADS.get(name, lambda _: None)(tmp_path)
  run(name, short, CHECKS.get(name, ""), FOLDER if name == IN_CLONE else tmp_path)


@pytest.mark.slow
def test_pretrained_model_is_trained_on_a_cpu(tmp_path):
  weights = smollm2.weights()
  run("qwen3_gsm8k", SMOLLM2 | dict(MODEL=str(weights)), CHECKS["smollm2"], tmp_path)


def run(name, values, check, directory):
  """Runs a notebook in a directory, with the check as a last cell."""
  notebook = script(name)
  cell = tagged(notebook, "parameters")
  cell.source = "\n".join([cell.source, *(f"{key} = {value!r}" for key, value in values.items())])
  notebook.cells.append(new_code_cell(check))
  resources = dict(metadata=dict(path=str(directory)))
  NotebookClient(notebook, timeout=1800, resources=resources).execute()
