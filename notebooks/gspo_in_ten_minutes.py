# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GSPO in ten minutes
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/gspo_jax/blob/main/notebooks/gspo_in_ten_minutes.ipynb)
#
# A small language model (3.6 M parameters, a Mixture of Experts) learns to add three-digit numbers. It learns first from examples with mistakes, then by reinforcement learning with GSPO. Then we look at the importance ratio and the clipping, on the data of this run.
#
# It runs on a CPU, a GPU or a TPU: about two minutes on two free CPU cores, up to ten on slow or busy ones.

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

# %% tags=["parameters"] short={"ITERATIONS": 2, "COLD_START": 20}
ITERATIONS = 40  # of GSPO
COLD_START = 800  # updates at most; it ends by itself when it has learned enough
WORKDIR = "ten_minutes"  # where the run keeps its files; the same cells go on from there

# %% [markdown]
# ## The task
#
# The prompt is a sum, `389+471=`. The model writes the digits of the result in reverse, as in addition on paper, and then the result itself: `068:860`. Only the result counts: the reward is 1 if it is right and 0 if not.
#
# **Cold start.** Reinforcement learning needs some right answers to begin with. So the model first imitates examples with half of the carries forgotten, and is then right in about four sums of ten.
#
# **GSPO.** In each iteration the model answers 64 sums, 8 times each. An answer better than the others to the same sum becomes more likely, a worse one less likely.
#
# ## Train
#
# The run is one command, the same as in a terminal. Meanwhile this page reads its files: `metrics.jsonl` has a line of figures for each iteration, `rollouts/` has responses. The next cell has the functions for reading and drawing.

# %% tags=["hide-input"] cellView="form"
# @title Functions that read and draw
import html
import json
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, clear_output, display

plt.rcParams.update(
  {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}
)
BLUE, ORANGE, RED, GREY = "#2563c9", "#c2570c", "#c02030", "#a8b0ba"
run = Path(WORKDIR)


def rows(path):
  """The JSON objects of a file, one a line; none if it is not there yet."""
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(line) for line in lines if line.endswith("\n")]


def values(phase, key):
  """Steps and values of a metric."""
  lines = [r for r in rows(run / "metrics.jsonl") if r["phase"] == phase and key in r]
  return [r["step"] for r in lines], [r[key] for r in lines]


def table(head, lines):
  """A table of HTML."""
  cell = "<td style='text-align: left; padding: 2px 16px 2px 0'>{}</td>"
  lines = [[f"<b>{x}</b>" for x in head], *lines]
  lines = "".join(f"<tr>{''.join(map(cell.format, line))}</tr>" for line in lines)
  return HTML(f"<table>{lines}</table>")


def format_response(response):
  """A response and whether it is right."""
  return f"<code>{html.escape(response['response'])}</code> {'✓' if response['reward'] else '✗'}"


def curves():
  """The cold start on the left, GSPO on the right, as far as they are."""
  figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
  left.plot(*values("sft", "held_out_loss"), color=GREY, marker=".")
  left.set(title="Cold start: loss on new sums", xlabel="update", ylabel="nats per token", ylim=0)
  right.plot(*values("rl", "reward/mean"), color=GREY, label="mean reward")
  right.plot(*values("rl", "eval/accuracy"), color=BLUE, marker="o", label="accuracy on new sums")
  right.set(title="GSPO", xlabel="iteration", ylim=(0, 1.02), xlim=(0, ITERATIONS))
  right.legend(loc="lower right", frameon=False)
  return figure


def show(status):
  """Replaces what is shown by how it stands now."""
  figure = curves()
  clear_output(wait=True)
  print(status)
  display(figure)
  plt.close(figure)
  if dumps := sorted(run.glob("rollouts/eval_*.jsonl")):
    head = "sum", "after the cold start", f"after iteration {int(dumps[-1].stem[-6:])}"
    pairs = list(zip(rows(dumps[0]), rows(dumps[-1])))[60::120]
    lines = [(a["prompt"], format_response(a), format_response(b)) for a, b in pairs]
    print("Some responses to new sums:")
    display(table(head, lines))


# %%
command = [sys.executable, "-m", "gspo_jax.main", "--config=tiny", f"--workdir={WORKDIR}"]
command += [f"--config.rl.iterations={ITERATIONS}", f"--config.sft.steps={COLD_START}"]
log = Path(f"{WORKDIR}.log")
start = time.monotonic()
with log.open("w") as output:
  process = subprocess.Popen(  # in a separate session: stopping this cell does not signal it
    command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
  )
try:
  while process.poll() is None:
    last = (log.read_text().splitlines() or ["starting"])[-1]
    show(f"{time.monotonic() - start:4.0f} s  {last}")
    time.sleep(5)
finally:
  process.terminate()  # if you stop this cell, the run saves its state
  process.wait()
if process.returncode:
  raise RuntimeError(log.read_text()[-3000:])
show(f"Done in {(time.monotonic() - start) / 60:.1f} minutes.")

# %% [markdown]
# The blue line is the accuracy on held-out sums. In the examples of the cold start half of the carries are wrong, so imitation alone cannot raise it further. The rise comes from the reward.
#
# ## One group of responses
#
# GSPO compares the responses to one prompt. A response's **advantage** compares it with its group: above zero it should become more likely, below zero less. The run wrote down all 512 responses of the first iteration. Here is one group of eight.

# %% tags=["hide-input"] cellView="form"
# @title The group of which most responses were clipped
responses = rows(run / "rollouts" / "rl_000001.jsonl")
groups = [responses[i : i + 8] for i in range(0, len(responses), 8)]
group = max(groups, key=lambda g: sum(r["clipped"] for r in g))


def tinted(response):
  """The response with its tokens coloured: orange became more likely, blue less."""
  spans = []
  for token, x in zip(response["tokens"], response["log_ratio"]):
    colour = "194, 87, 12" if x > 0 else "37, 99, 201"
    style = f"background: rgba({colour}, {min(abs(x) / 0.5, 0.8):.2f}); padding: 1px 3px"
    spans.append(f"<span style='{style}'>{html.escape(token) or '⏎'}</span>")
  return f"<code>{''.join(spans)}</code>"


print(f"{group[0]['prompt']} the right result is {group[0]['answer']}")
table(
  ("response", "reward", "advantage", "sequence ratio", ""),
  (
    (
      tinted(r),
      f"{r['reward']:.0f}",
      f"{r['advantage']:+.2f}",
      f"{r['ratio']:.3f}",
      "clipped" if r["clipped"] else "",
    )
    for r in group
  ),
)

# %% [markdown]
# The colours and ratios are from after the iteration's four updates: orange tokens became more likely, blue ones less. Most often these are digits with a carry: there the model doubts, and there it learns. (⏎ is the end of the response.)
#
# ## The ratio
#
# A batch of responses is used for four updates. From the second on, the model has changed since it sampled them. The **importance ratio** measures its movement:
#
# - GRPO has one for each token, $w_t = \pi_\text{new}(y_t) / \pi_\text{old}(y_t)$.
# - GSPO has one for each response, $s = \exp\left(\frac{1}{|y|} \sum_t \log w_t\right)$: the geometric mean of its tokens' ratios.

# %% tags=["hide-input"] cellView="form"
# @title Histograms of the log-ratios
clip = json.loads((run / "config.json").read_text())["objective"]
low, high = np.log(1 - clip["clip_low"]), np.log(1 + clip["clip_high"])
token = np.concatenate([r["log_ratio"] for r in responses])
sequence = np.array([np.mean(r["log_ratio"]) for r in responses])
length = np.mean([len(r["log_ratio"]) for r in responses])

figure, axes = plt.subplots(2, 1, figsize=(8, 4.4), sharex=True, layout="constrained")
for ax, x, colour, title in (
  (axes[0], token, ORANGE, f"{len(token)} tokens: log w, as GRPO sees it"),
  (axes[1], sequence, BLUE, f"{len(sequence)} responses: log s, as GSPO sees it"),
):
  ax.hist(np.clip(x, -0.4, 0.4), bins=np.linspace(-0.4, 0.4, 81), color=colour)
  ax.set(title=f"{title}; standard deviation {x.std():.3f}", yscale="log", ylabel="how many")
axes[1].axvspan(low, high, color=GREY, alpha=0.4, lw=0, zorder=0, label="GSPO's clip range")
axes[1].legend(loc="upper right", frameon=False)
axes[1].set(xlabel="log-ratio (the outermost bars hold all that lies beyond)")
display(figure)
plt.close(figure)
print(f"tokens spread {token.std() / sequence.std():.1f} times as wide as responses;")
print(f"the square root of the mean length, {length:.1f} tokens, is {length**0.5:.1f}")

# %% [markdown]
# **Why is the sequence ratio so much closer to 1?** Its logarithm is a mean over the tokens. A response here has eight or nine tokens, so one outlying token counts for an eighth of the mean, and upward and downward moves cancel. If $n$ tokens moved independently, their mean would spread $\sqrt n$ times less, about as seen here. With thousands of tokens the mean stays very close to 0. So the paper's range is only $[1 - 0.0003,\ 1 + 0.0004]$, while GRPO's is $[0.8,\ 1.27]$. Here responses have about eight tokens, and the range is a hundred times the paper's.
#
# **What is it good for?** The reward is for the whole response. A single token's ratio is one noisy number, and GRPO multiplies each token's gradient with it. GSPO has one weight for the response, as it has one reward.
#
# ## The clipping
#
# The objective of a response is $\min\left(s \hat A,\ \text{clip}(s) \hat A\right)$. Clipping acts on a response that has gone far enough *in the direction of its advantage*: a good one ($\hat A > 0$) above the range, a bad one ($\hat A < 0$) below it. A clipped response has no gradient, so all of its tokens are left out.

# %% tags=["hide-input"] cellView="form"
# @title Which responses are clipped
advantage = np.array([r["advantage"] for r in responses])
clipped = np.array([r["clipped"] for r in responses])
figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
edge = 0.15
ax.axvspan(low, high, color=GREY, alpha=0.3, lw=0, label="the clip range")
for which, colour, label in ((~clipped, BLUE, "used"), (clipped, RED, "clipped")):
  label = f"{which.sum()} responses {label}"
  x = np.clip(sequence[which], -edge, edge)
  ax.scatter(x, advantage[which], s=14, color=colour, alpha=0.6, lw=0, label=label)
ax.axhline(0, color="black", lw=0.8)
ax.set(
  xlabel=f"log s (at the edges: all beyond ±{edge})",
  ylabel="advantage",
  xlim=(-edge * 1.05, edge * 1.05),
)
ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
display(figure)
plt.close(figure)

silent = np.mean(advantage == 0)
tokens = np.concatenate([np.full(len(r["log_ratio"]), r["advantage"]) for r in responses])
grpo = ((tokens > 0) & (token > np.log(1.27))) | ((tokens < 0) & (token < np.log(0.8)))
print(f"GSPO clips {clipped.mean():.1%} of the responses, with all of their tokens.")
print(f"GRPO, with its own range on the same data, would clip {grpo.mean():.1%} of the tokens.")
print(f"{silent:.0%} have the advantage 0: all responses of their group are right, or all wrong.")

# %% [markdown]
# Red dots are top right (good, and already much more likely) and bottom left (bad, and already much less likely). Dots outside the range on the other sides are used: they moved the wrong way, and the gradient brings them back.
#
# GSPO clips more than GRPO and learns well all the same. The paper reports the same at scale: 15 % of tokens against 0.13 %.
#
# All of this is from after the four updates. In training, the first update of an iteration sees ratios of exactly 1 and clips nothing. The next ones see the movement by the updates before:

# %% tags=["hide-input"] cellView="form"
# @title Clipped responses by iteration and update
print("iteration  mean |s - 1| and share of clipped responses in updates 1 to 4")
for row in rows(run / "metrics.jsonl"):
  if row["phase"] == "rl" and row["step"] in (1, 2, 3, 4, 5, 10, 20, 40):
    cells = []
    for i in range(4):
      away = row[f"minibatch/{i}/ratio/deviation"]
      share = row[f"minibatch/{i}/clip_fraction/sequence"]
      cells.append(f"{away:8.4f} {share:6.1%}")
    print(f"{row['step']:9}", *cells)

# %% [markdown]
# ## Where to go from here
#
# - `report.html` in the run's directory has all curves and responses on one page. In Colab: the folder symbol on the left, then download it. [Running](https://github.com/OWNER/gspo_jax/blob/main/docs/running.md) explains the other files of a run.
# - Set `--config.objective.name=grpo` in the command, and another `WORKDIR`, to compare.
# - [The losses in a training loop of your own](losses_in_your_loop.ipynb) uses GSPO without the rest of this project.
# - [Qwen3 on GSM8K](qwen3_gsm8k.ipynb) does this with a real language model.
