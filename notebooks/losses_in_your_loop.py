# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The losses in a training loop of your own
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gspo_jax/blob/main/notebooks/losses_in_your_loop.ipynb)

# %% [markdown]
# ## Install
#
# Colab comes with an older JAX. The next cell replaces it and then stops: choose **Runtime > Restart session** and
# run all cells again. Where gspo_jax is installed, the cell does nothing.

# %% tags=["install"]
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "git+https://github.com/OWNER/gspo_jax"  # where this project is published

if importlib.util.find_spec("gspo_jax") is None:
  tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
  wanted = [f"gspo-jax[{'tpu' if tpu else 'train'}] @ {REPOSITORY}"]
  if not tpu and shutil.which("nvidia-smi"):
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.partition(".")[0]
    if driver.isdecimal():  # CUDA 13 needs driver 580
      wanted.append("jax[cuda13]" if int(driver) >= 580 else "jax[cuda12]")
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
  raise SystemExit("Installed. Now restart the session (Runtime > Restart session), and run all.")

# %% tags=["parameters"] short={"STEPS": 5}
STEPS = 100  # updates of each run
