# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A pretrained model learns by GSPO: Qwen3-0.6B on one chip, SmolLM2-135M on two cores
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gspo_jax/blob/main/notebooks/qwen3_gsm8k.ipynb)
#
# This notebook trains all parameters of a real model with GSPO, with a verifier of answers as the only teacher. The model depends on the machine:
#
# - **A TPU or a GPU**: [Qwen3-0.6B-Base](https://huggingface.co/Qwen/Qwen3-0.6B-Base) on the 7,473 problems of [GSM8K](https://github.com/openai/grade-school-math), started by the same command as on many chips. One Colab TPU (v5e-1, 16 GiB) is enough. Every program of this run has been compiled for a v5e, and the memory below is what the compiler reports. The run itself has not been made on a chip: times are estimates, and accuracy is unknown.
# - **Neither**: [SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) on word problems of the package. Two cores and 10 GiB are enough, and a quarter of an hour. [From a pretrained model to GSPO](https://github.com/OWNER/gspo_jax/blob/main/docs/pretrained.md) has the figures of such a run.
#
# The outputs shown here are from a run of SmolLM2 with `ITERATIONS = 10`. Its weights were quantised to 4 bits: `python -m experiments.smollm2 SmolLM2-135M-Instruct` wrote them to a directory, and `MODEL` named it.

# %% [markdown]
# ## Install
#
# Colab comes with an older JAX. The next cell replaces it and then stops: choose **Runtime > Restart session** and run all cells again. With gspo_jax installed, the cell does nothing. Expect pip's complaint about an older JAX, and SystemExit at the end of the cell.

# %% tags=["install"]
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "git+https://github.com/OWNER/gspo_jax"  # where this project is published

if importlib.util.find_spec("gspo_jax") is None:
  if "OWNER" in REPOSITORY:
    raise SystemExit("Set REPOSITORY to the address of gspo_jax, or to its directory.")
  if Path(REPOSITORY).is_dir():
    REPOSITORY = Path(REPOSITORY).absolute().as_uri()
  tpu = any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
  packages = [f"gspo-jax[{'tpu' if tpu else 'train'}] @ {REPOSITORY}"]
  if not tpu and shutil.which("nvidia-smi"):
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.partition(".")[0]
    if driver.isdecimal():  # CUDA 13 needs driver 580
      packages.append("jax[cuda13]" if int(driver) >= 580 else "jax[cuda12]")
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)
  raise SystemExit("Installed. Now restart the session (Runtime > Restart session), and run all.")

# %% [markdown]
# ## Settings
#
# With `DRIVE` set, checkpoints go there and the run survives the session; the last section has their sizes. `MODEL` may be any checkpoint of the architecture and size of the configuration.

# %% tags=["parameters"] short={"MODEL": "toy", "CONFIG": "gsm8k:tiny", "DATA": "toy", "HOME": "home", "ITERATIONS": 2, "PROBLEMS": 4, "CHANGES": {"data.max_prompt_tokens": 192, "rl.prompts": 4, "rl.group_size": 2, "sampling.max_new_tokens": 16, "eval.samples": 2}}
MODEL = "auto"  # of the Hugging Face hub, or a directory; auto: that of the configuration
CONFIG = "auto"  # gsm8k:0.6B-v5e, -v6e, -h100 or -t4, smollm2; auto: by the memory of the chip
DATA = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
HOME = "gspo_run"  # directory of data and the run
DRIVE = ""  # directory of checkpoints, e.g. "/content/drive/MyDrive/gspo_run"; "": in HOME
ITERATIONS = 30  # each: 32 problems and 8 responses to each (SmolLM2: 16), four updates
PROBLEMS = 128  # held-out ones of an evaluation
CHANGES = {}  # further keys of the configuration, e.g. {"objective.name": "grpo"}

# %% [markdown]
# ## The chip
#
# The run is a process of its own, as on a pod, and a TPU belongs to one process at a time. So this notebook never uses the chip: a short process of its own reports which chip there is.

# %%
import json

ASK = """
import jax, json
from gspo_jax.system import accelerators
chip = jax.devices()[0]
limit = (chip.memory_stats() or {}).get("bytes_limit") or accelerators.memory(chip.device_kind) or 0
print(json.dumps(dict(kind=chip.device_kind, platform=chip.platform, gib=limit / 2**30)))
"""
query = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
if query.returncode:
  raise RuntimeError(query.stderr[-2000:])
chip = json.loads(query.stdout.splitlines()[-1])
print(
  f"{chip['kind']}: " + (f"JAX may use {chip['gib']:.1f} GiB" if chip["gib"] else "memory unknown")
)

if CONFIG == "auto" and chip["platform"] == "cpu":
  CONFIG = "smollm2"
if CONFIG == "auto":
  # TPU v5e: 16 GiB. JAX takes three quarters of a GPU: these are GPUs of 80, 40, 24 and 16 GB.
  sizes = {50: "0.6B-h100", 25: "0.6B-v6e", 15: "0.6B-v5e", 10: "0.6B-t4"}
  fitting = [name for least, name in sizes.items() if chip["gib"] >= least]
  if not fitting:
    raise RuntimeError("the chip has less than 10 GiB: choose another runtime, or set CONFIG")
  CONFIG = f"gsm8k:{fitting[0]}"
smol = CONFIG == "smollm2"
if MODEL == "auto":
  MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct" if smol else "Qwen/Qwen3-0.6B-Base"
print(f"configuration: {CONFIG}, model: {MODEL}")

# %% [markdown]
# ## Does it fit? The compiler knows beforehand
#
# SmolLM2's run takes 9 GiB of memory on two cores. For Qwen3, `gspo_jax.aot` compiles every program of a run for a TPU that need not be present. To a program's peak memory it adds the arrays of the run that are on the chip at that time. The command
#
# ```
# python -m gspo_jax.aot --config=gsm8k:0.6B-v5e --topology=v5e:1x1
# ```
#
# prints this table in GiB; a v5e has 16. It takes minutes, so its output is copied here. It runs on any machine with `gspo-jax[tpu]` installed.
#
# | program | its peak, arguments included | other arrays of the run | together |
# | --- | --- | --- | --- |
# | update, 64 responses of up to 1,408 tokens | 13.7 | 0 | **13.7** |
# | log-probabilities, where they are recomputed (not in this run) | 4.2 | 5.6 | 9.8 |
# | publication of the new weights to the sampler | 3.4 | 4.4 | 7.8 |
# | prefill | 6.4 | 6.7 | **13.1** |
# | decoding, 64 responses at a time | 5.7 | 6.7 | 12.4 |
#
# So full float32 Adam fits. Parameters and two moments take 12 bytes per parameter (6.7 GiB), gradients and their sum over micro-batches 8 more during an update. Layers are recomputed in the backward pass, and the logits, of a vocabulary of 151,936, are computed for 128 positions at a time. The sampler's bfloat16 copy is gone while the model is updated. The 1.7B model does not fit like this; `gsm8k:1.7B-v5e` trains low-rank adapters. [Training on one chip](https://github.com/OWNER/gspo_jax/blob/main/docs/one_chip.md) has their memory, and shows that they learn in a toy model.
#
# | chip | configuration | status |
# | --- | --- | --- |
# | TPU v5e, v6e | `gsm8k:0.6B-v5e`, `-v6e` | compiled for the chip, not run on one |
# | GPU of 80, 40 or 24 GB (H100, A100, L4) | `gsm8k:0.6B-h100`, `-v6e`, `-v5e` | neither compiled nor run on one. The settings for 80 GB were calculated; those for 40 and 24 GB are the ones of v6e and v5e |
# | GPU of 16 GB (T4) | `gsm8k:0.6B-t4` | neither compiled nor run on one: full Adam does not fit; by calculation, adapters of rank 32 do. A T4 multiplies bfloat16 at the speed of float32, so by its data sheet an iteration takes at least two minutes |

# %% [markdown]
# ## Weights and data
#
# The run fetches the weights by itself, 1.2 GB (SmolLM2: 0.3) from the Hugging Face hub, into the cache of its library (`HF_HOME`). This cell fetches two files of GSM8K for Qwen3, and the next one the tokenizer.

# %%
import urllib.request

home = Path(HOME).absolute()
home.mkdir(parents=True, exist_ok=True)


def data_file(name):
  if Path(DATA).is_dir():
    return Path(DATA) / name
  path = home / name
  if not path.exists():
    partial, _ = urllib.request.urlretrieve(f"{DATA}/{name}", path.with_suffix(".partial"))
    Path(partial).rename(path)  # a download that breaks off leaves no half of a file
  return path


if smol:
  from gspo_jax.tasks import word_problems

  example = word_problems.problems("heldout")[0]
  data = {}  # that of the configuration
else:
  data = {"data.train": f"gsm8k@{data_file('train.jsonl')}"}
  data |= {"data.eval": f"gsm8k@{data_file('test.jsonl')}"}
  with open(data_file("test.jsonl"), encoding="utf-8") as lines:
    example = json.loads(next(lines))
print(f"{example['question']}\n\n{example['answer']}")

# %% [markdown]
# The verifier compares with GSM8K's number behind `####`; the model never sees the working. SmolLM2 first learns, in a short cold start, to write an arithmetic expression, which the verifier evaluates. The next cell prints a prompt in the chat template of the checkpoint:

# %%
from gspo_jax.configs import common, smollm2
from gspo_jax.data import tokenizer

words = tokenizer.load(MODEL)
if smol:
  print(smollm2.get_config().data.prompt_template.format(**example))
else:
  print(words.chat([tokenizer.user_turn(example["question"], common.BOXED)]))
print("a response ends with", " or ".join(words.tokenizer.id_to_token(i) for i in words.stop_ids))

# %% [markdown]
# ## The command
#
# This is a whole run. `--dry_run` reads the weights' shapes, the tokenizer and every problem, refuses any settings that the run would refuse, and prints the size of the run. The memory that it prints is an estimate; the table above is the compiler's.

# %%
workdir = home / "run"
keys = {
  "weights": MODEL,
  **data,
  "rl.iterations": ITERATIONS,
  "eval.problems": PROBLEMS,
  "eval.every": max(1, ITERATIONS // 4),
  "checkpoint.every": max(1, ITERATIONS // 4),
  "checkpoint.keep": 1,
  "checkpoint.best": "",
  "checkpoint.directory": DRIVE,
  "checkpoint.grace_s": 600,  # to save in, when the cell is interrupted
  **CHANGES,
}
command = [sys.executable, "-m", "gspo_jax.main", f"--config={CONFIG}", f"--workdir={workdir}"]
command += [f"--config.{key}={value}" for key, value in keys.items()]
if DRIVE.startswith("/content/drive"):
  from google.colab import drive

  drive.mount("/content/drive")
dry = subprocess.run([*command, "--dry_run"], capture_output=True, text=True)
print(dry.stdout or dry.stderr)
if dry.returncode:
  raise RuntimeError("the run would be refused: the line above says why")

# %% [markdown]
# ## Train
#
# The first evaluation and the first iteration compile their programs for some minutes. The line under the curves shows progress, and from the second iteration on the time left.
#
# How long does it take? `aot`, with `--mean_response=300`, computes the least time of an iteration on a v5e, for responses of 300 tokens in the mean:
#
# | | | |
# | --- | --- | --- |
# | prefill of 32 prompts | 0.1 s | bound by compute |
# | decoding of 256 responses, 1,931 steps of 64 slots | 7.6 s | bound by memory |
# | four updates | 3.8 s | bound by compute |
# | together | **11.5 s** | 6,700 tokens per second |
#
# So 100 iterations take at least 20 minutes, and each of the five evaluations half a minute. No chip reaches this bound; at a third of its speed the run takes a little more than an hour. Responses twice as long take twice the time.
#
# To **stop**, interrupt the cell: the run saves its state. To **continue**, run the cell again, here or, with `DRIVE`, in another session with the same settings. To train longer, raise `ITERATIONS` and add `"resume": "force"` to `CHANGES`; for another run, change `HOME`.

# %% tags=["hide-input"] cellView="form"
# @title Functions that start the run and draw
import ctypes
import signal
import time

import matplotlib.pyplot as plt
from IPython.display import HTML, display


def rows():
  """The rows of metrics.jsonl so far."""
  path = workdir / "metrics.jsonl"
  whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
  return [json.loads(line) for line in whole.splitlines()]


def curve(axes, records, key, label, style="-"):
  points = [(row["step"], row[key]) for row in records if row.get(key) is not None]
  if points:
    axes.plot(*zip(*points), style, label=label)


def figure(records):
  """Is it learning, how long are the responses, how far does the policy move?"""
  drawn, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
  curve(left, records, "reward/mean", "reward, training problems")
  curve(left, records, "eval/accuracy", "accuracy, held-out problems", "o-")
  left.set(title="Right answers", ylim=(0, 1))
  curve(middle, records, "response_length/mean", "tokens of a response")
  middle.set(title="Length", ylim=(0, None))
  curve(right, records, "clip_fraction/token", "clipped tokens")
  curve(right, records, "truncated_fraction", "responses cut off")
  right.set(title="Shares", ylim=(0, None))
  for axes in (left, middle, right):
    axes.set(xlabel="iteration", xlim=(0, ITERATIONS))
    axes.grid(alpha=0.3)
    if axes.lines:
      axes.legend(frameon=False)
  plt.close(drawn)  # shown by `display` alone
  return drawn


def end_with_notebook():
  """Has Linux tell the run to save and end if this notebook's kernel is restarted."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def train(every=5.0):
  """Starts the run, or goes on with it, and draws its curves until it ends."""
  log = home / "log.txt"
  curves = display(figure(rows()), display_id=True)
  line = display({"text/plain": ""}, raw=True, display_id=True)

  def show():
    curves.update(figure(rows()))
    last = log.read_text(encoding="utf-8").splitlines()[-1:]
    line.update({"text/plain": "".join(last)}, raw=True)

  with open(log, "w", encoding="utf-8") as out:
    process = subprocess.Popen(
      command,
      stdout=out,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # an interrupt of this cell comes to the run as a notice to save
      preexec_fn=end_with_notebook,
    )
  try:
    while process.poll() is None:
      time.sleep(every)
      show()
  finally:
    if process.poll() is None:
      process.send_signal(signal.SIGTERM)
      process.wait()
    show()
  if process.returncode:
    raise RuntimeError(f"{log} ends with:\n{log.read_text()[-2000:]}")


# %%
train()

# %% [markdown]
# ## Before and after, in figures
#
# Each evaluation asks the same problems with the same random numbers: four samples of each at temperature 1 (SmolLM2: two), and a greedy one. `accuracy` is the average Pass@1, with a 95 % interval over problems.

# %%
import numpy as np

evaluations = [row for row in rows() if "eval/accuracy" in row]
print(
  f"{'iteration':>9}  {'accuracy':>8}  {'95 %':^13}  {'greedy':>6}  {'tokens':>6}  {'cut off':>7}"
)
for row in evaluations:
  low, high = row["eval/accuracy/low"], row["eval/accuracy/high"]
  print(
    f"{row['step']:>9}  {row['eval/accuracy']:>8.3f}  {low:.3f} - {high:.3f}  "
    f"{row['eval/greedy']:>6.3f}  {row['eval/response_length/mean']:>6.0f}  "
    f"{row['eval/truncated_fraction']:>7.3f}"
  )


def responses(step):
  """What was answered at an evaluation: {(problem, sample): record}."""
  path = workdir / "rollouts" / f"eval_{step:06d}.jsonl"
  records = map(json.loads, path.read_text().splitlines())
  return {(record["prompt_id"], record["sample"]): record for record in records}


before, after = responses(0), responses(evaluations[-1]["step"])
problems = list(dict.fromkeys(problem for problem, _ in before))


def rewards(records):
  """[problems, samples]"""
  return np.array([records[key]["reward"] for key in before]).reshape(len(problems), -1)


gain = (rewards(after) - rewards(before)).mean(1)
resampled = np.random.default_rng(0).choice(gain, (10_000, len(gain))).mean(1)
low, high = np.percentile(resampled, [2.5, 97.5])
print(f"\ngain by problem: {gain.mean():+.3f}, 95 % interval {low:+.3f} to {high:+.3f}")

# %% [markdown]
# ## Before and after, in words
#
# The first three held-out problems, then up to two that became right and up to two that became wrong.

# %% tags=["hide-input"] cellView="form"
# @title Functions that write tables
from html import escape

CELL = "text-align:left; vertical-align:top; white-space:pre-wrap; padding:0.5em; width:50%"


def answer(record):
  color, verdict = ("#2a7d3f", "right") if record["reward"] else ("#b3402a", "wrong")
  cut = ", cut off" if record["truncated"] else ""
  text = escape(record["response"].strip() or "(nothing)")
  head = f'<b style="color:{color}">{verdict}{cut}, {record["length"]} tokens</b>'
  return f'<td style="{CELL}">{head}\n{text}</td>'


def side_by_side(title, keys):
  parts = ['<div class="tex2jax_ignore mathjax_ignore">', f"<h4>{title}</h4>"]  # $ is a dollar
  for key in keys:
    question, gold = escape(before[key]["prompt"]), escape(before[key]["answer"])
    parts += [
      f"<p>{question} <b>[{gold}]</b></p>",
      '<table style="width:100%; table-layout:fixed; overflow-wrap:anywhere">',
      f'<tr><th style="{CELL}">before</th><th style="{CELL}">after</th></tr>',
      f"<tr>{answer(before[key])}{answer(after[key])}</tr></table>",
    ]
  display(HTML("".join([*parts, "</div>"])))


# %%
first = [(problem, 0) for problem in problems]
change = {key: after[key]["reward"] - before[key]["reward"] for key in first}
side_by_side("The first three", first[:3])
for title, sign in (("Became right", 1), ("Became wrong", -1)):
  if changed := [key for key in first[3:] if change[key] * sign > 0][:2]:
    side_by_side(title, changed)

# %% [markdown]
# ## What stays
#
# `run/report.html` in `HOME` has all metrics and warnings, and the responses of every tenth iteration with tokens coloured by log-ratio. Download this one file from the file browser. `python -m gspo_jax.report RUN OTHER --output=compare.html` compares runs, for instance with one of `CHANGES = {"objective.name": "grpo"}`.
#
# A checkpoint of Qwen3-0.6B takes 7.2 GB (12 bytes per parameter), and two exist while a new one is written. A free Drive has 15 GB, and deleted checkpoints count while they are in the trash, so it fills up. With adapters a checkpoint takes 1.4 GB: `CHANGES = {"lora.rank": 32, "rl_optimizer.learning_rate": 1e-5}`. With `DRIVE` set, metrics and rollouts are copied there beside the checkpoints, and a new session with the same settings continues. This was tested with directories of a local disk, not with a Drive.

# %%
for path in sorted(workdir.iterdir()):
  print(path.name)
