"""benchmarks/aot_table.py without a compiler: its rows, its table, the page that it writes to."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import aot_table

from gspo_jax.models.families.lookup import FAMILIES

FITS = dict(
  model="Qwen3-0.6B",
  slice="v5e:1x1",
  fits=True,
  mesh=[1, 1, 1],
  microbatches=64,
  remat="full",
  peak_gib=12.34,
  hbm_gib=16.0,
  compute_s=9.876,
  hbm_s=1.5,
  interconnect_s=0.0,
  mfu=0.512,
  below="",
)


def test_every_model_has_its_smallest_slice_of_every_chip():
  names = aot_table.names()
  assert len(names) == len(set(names)) and 20 <= len(names) <= 30
  assert {name.rsplit(" ", 1)[0] for name in names if name.endswith("least")} == {
    f"{model} {chip}" for model in aot_table.MODELS for chip in aot_table.SLICES
  }
  assert aot_table.case_of("Qwen3-30B-A3B", 256).sequences == 256
  assert aot_table.case_of("Qwen3-0.6B", 1).model.hidden_size == 1024


def test_rows_become_a_table_in_which_a_slice_stands_once():
  large = dict(model="Qwen3-1.7B", slice="v5e:1x1", fits=False, error="needs 26 GiB")
  rows = {
    "Qwen3-0.6B v5e least": FITS,
    "Qwen3-0.6B v5e:8x8": FITS,
    "Qwen3-1.7B v5e least": large,
  }
  lines = aot_table.markdown(rows).splitlines()
  assert lines[2:] == [
    "| Qwen3-0.6B | v5e:1x1 | 1 x 1 x 1 | 64 | full | 12.3 of 16 | 9.88 | 1.5 | 0 | 51% |  |",
    "| Qwen3-1.7B | v5e:1x1 | does not fit: needs 26 GiB |  |  |  |  |  |  |  |  |",
  ]
  assert len({line.count("|") for line in lines}) == 1


def test_the_smallest_slice_is_the_first_that_fits(monkeypatch):
  def search_row(name, tries):
    model, topology = name.split(" ")
    fits = topology == "v5e:2x4"
    row = dict(FITS, model=model, slice=topology, fits=fits)
    return row if fits else row | dict(error="needs more")

  monkeypatch.setattr(aot_table, "search_row", search_row)
  row = aot_table.smallest("Qwen3-1.7B v5e least", 2)
  assert row["slice"] == "v5e:2x4" and row["below"] == "2x2: needs more"
  row = aot_table.smallest("Qwen3-1.7B v5p least", 2)
  assert not row["fits"] and row["slice"] == "v5p:4x8x8"


def test_runs_on_gpus_become_a_table():
  ratios = dict(executed_flops=4e12, product_flops=5e12, needed_bytes=2e9, hbm_bytes=3e9)
  row = {
    name: dict(peak_gib=peak, held_gib=1.0, hbm_gib=72.77, fits=True, **ratios)
    for name, peak in zip(("train", "score", "publish", "prefill", "decode"), range(10, 15))
  }
  names = "Qwen3-8B h100:1", "Qwen3-8B h100:8"
  assert aot_table.gpu_markdown(dict.fromkeys(names, row)).splitlines()[2:] == [
    "| Qwen3-8B | h100:1 | adapters | 11.0 | 13.0 | 15.0 | 72.8 | 1.25 | 1.50 |",
    "| Qwen3-8B | h100:8 | all | 11.0 | 13.0 | 15.0 | 72.8 | 1.25 | 1.50 |",
  ]


def test_runs_on_small_slices_become_a_table():
  row = {
    name: dict(peak_gib=peak, held_gib=1.0, hbm_gib=32.0, fits=True, bound_s=0.0123)
    for name, peak in zip(("train", "score", "publish", "prefill", "decode"), range(10, 15))
  }
  rows = {"Qwen3-4B v4:2x2x1": row, "Qwen3-4B v6e:2x4": row | dict(decode=dict(fits=False))}
  (line,) = aot_table.small_markdown(rows).splitlines()[2:]
  assert line.startswith("| v4:2x2x1 | Qwen3-4B | all | 11.0 | 15.0 | 0.012 | 12 |")


def test_only_what_is_between_the_marks_is_replaced(tmp_path):
  page = tmp_path / "page.md"
  first, last = "<!-- a -->\n", aot_table.END
  other = f"<!-- other -->\nkept\n{last}\n"
  page.write_text(f"before\n{other}{first}old\n{last}\nafter\n")
  aot_table.replace(page, first, "new\n")
  assert page.read_text() == f"before\n{other}{first}new\n{last}\nafter\n"
  for text in ("no marks", first, f"{last}\n{first}"):
    page.write_text(text)
    with pytest.raises(ValueError, match="lacks"):
      aot_table.replace(page, first, "new\n")


@pytest.mark.parametrize("name", aot_table.TABLES)
def test_every_page_has_its_table(name):
  """The committed rows make the committed table."""
  _, table, _, rows, page = aot_table.TABLES[name]
  rows = json.loads((aot_table.ROOT / rows).read_text())
  assert (
    aot_table.MARK.format(name) + table(rows) + aot_table.END in (aot_table.ROOT / page).read_text()
  )


def test_every_family_has_a_run_on_tpus_and_on_gpus():
  assert aot_table.FAMILY_RUNS.keys() <= FAMILIES.keys()
  assert all([t[0] for t in runs] == ["v", "h"] for runs in aot_table.FAMILY_RUNS.values())
  rows = {
    "llama v5e:2x2": dict(programs=dict(train=dict(fits=True)), below=""),
    "llama h100:1": dict(programs=dict(train=dict(fits=False)), below=""),
  }
  table = {line.split("|")[1]: line for line in aot_table.family_markdown(rows).splitlines()}
  assert len(table) == 2 + len(FAMILIES)
  line = table[" `llama` "]
  flags = aot_table.FAMILY_RUNS["llama"]["h100:1"]
  assert line.endswith(f"| v5e:2x2 | `{flags}` |") and "dense_math.py:Llama-3.2-1B" in flags
  assert "](https://arxiv.org/abs/2407.21783) | SmolLM2-135M, Llama-3.2-1B," in line


def test_the_next_smaller_topology_is_compiled_until_a_program_does_not_fit(monkeypatch):
  compiled = []

  def compile_run(topology, flags):
    program = flags.partition("--programs=")[2]
    compiled.append((topology, program))
    assert ("mesh.expert=8" in flags) == (topology == "h100:8")
    return {program: dict(fits=program != "train", error="needs\n more")}

  monkeypatch.setattr(aot_table, "compile_run", compile_run)
  assert aot_table.family_row("llama v5e:2x2", 1)["below"] == "v5e:1x1: train needs more"
  assert compiled == [("v5e:2x2", "train,decode"), ("v5e:1x1", "publish"), ("v5e:1x1", "train")]
  assert aot_table.family_row("qwen2 v5e:1x1", 1)["below"] == ""
  assert aot_table.family_row("mixtral h100:8", 1)["below"] == "h100:1: train needs more"
  assert aot_table.smaller_topology("h100:2x8") == "h100:8"
