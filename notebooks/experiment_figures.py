# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Figures from an experiment's results
#
# All figures come from the CSV files of a folder of `experiments/`: no run is needed. You need a clone of the repository, with `pip install -e '.[notebooks,experiments]'`.

# %% tags=["parameters"]
EXPERIMENT = "e2"  # of which folder; its beginning is enough
COLUMN = "reward/mean"  # of curves.csv, for the last figure

# %%
import sys
from pathlib import Path

ROOT = next(p for p in (Path.cwd(), *Path.cwd().parents) if (p / "experiments").is_dir())
sys.path.insert(0, str(ROOT))

# %%
from IPython.display import display

from experiments import definition, figures, readme, runs
from experiments.results import Store

folder = definition.HERE / definition.find(EXPERIMENT)
experiment, module = definition.load(folder.name)
verdict, report = readme.assess(folder, experiment, module.report)
print(f"{verdict.outcome}: {verdict.because}")

# %% [markdown]
# The table has one row per run. `results.values(condition, column)` returns the values of a column for one condition, by seed.

# %%
store = Store(folder)
results = store.results(runs.plan(experiment, store))
results.runs.head()

# %% [markdown]
# The figures of the experiment's README.

# %%
for figure in (report.figures if report else {}).values():
  display(figures.Svg(figure))

# %% [markdown]
# Any column of `curves.csv`, with 95 % bands over seeds.

# %%
names = results.conditions() if len(results.runs) else []
figure, (axes,) = figures.new()
figures.curves(axes, results, {name: name for name in names}, COLUMN)
figures.Svg(figure)
