"""Directories of runs that never were, for reports of them."""

import json
import re

from gspo_jax.report import data
from gspo_jax.runs import metrics

HOSTILE = (
  "</script><script>document.title='taken'</script><!-- <img src=x onerror=alert(1)> {{run}}"
)
NAMES = (
  "reward/mean", "reward/std", "response_length/mean", "response_length/max", "truncated_fraction",
  "groups_without_spread", "loss", "grad_norm", "learning_rate", "entropy", "tokens_per_second",
  "ratio/mean", "ratio/min", "ratio/max", "ratio/std", "ratio/deviation", "kl/k1", "kl/k3",
  "mismatch/abs/mean", "mismatch/abs/max", "mismatch/tail", "ratio/tail",
  "mismatch/sequence/abs/mean", "router/load_balance", "router/entropy",
  "router/volatility/mean", "router/volatility/max_layer", "router/volatility/sampler",
  "ratio/effective_length", "total/tokens", "total/flops",
  "router/dropped_tokens", "router/busiest_expert", "verifier/right", "verifier/crash",
)  # fmt: skip
STAGES = ("sample", "score", "logp", "update", "publish")


def eval_keys(accuracy):
  return {
    "eval/accuracy": accuracy,
    "eval/accuracy/low": accuracy - 0.05,
    "eval/accuracy/high": accuracy + 0.05,
    "eval/greedy": accuracy + 0.1,
    "eval/response_length/mean": 5.0,
  }


def sft_row(step):
  names = ("loss", "entropy", "grad_norm", "learning_rate", "updates_skipped", "router/entropy")
  return {"phase": "sft", "step": step, **{name: 1.0 / step for name in names}}


def rl_row(step):
  row = {"phase": "rl", "step": step}
  names = [*NAMES]
  names += [f"clip_fraction/{a}{b}" for a in ("sequence", "token") for b in ("", "/low", "/high")]
  names += [f"time/{stage}" for stage in STAGES]
  for i in range(12):
    names += [f"minibatch/{i}/{k}" for k in ("ratio/deviation", "clip_fraction/sequence")]
    names += [f"minibatch/{i}/clip_fraction/token{side}" for side in ("", "/high", "/low")]
    names += [f"minibatch/{i}/{k}" for k in ("ratio/std", "kl/k3", "router/volatility/mean")]
    names += [f"minibatch/{i}/router/volatility/max_layer", f"router/volatility/layer_{i:02d}"]
  by_length = ("reward", "responses", "log_ratio_std", "clip_fraction")
  names += [f"by_length/{k}/le_{n}" for k in by_length for n in (64, 256, 128)]
  return row | {name: step / 10 for name in names}


def record(step, prompt, sample, **changes):
  usual = {
    "step": step, "prompt_id": prompt, "sample": sample, "prompt": f"{prompt} + 1 = ",
    "response": "42", "answer": str(prompt + 1), "reward": float(sample % 2), "advantage": 0.5,
    "length": 3, "truncated": False, "stop_reason": "stop", "eval": False,
  }  # fmt: skip
  return usual | changes


def write(folder, rows=(), dumps=(), **config):
  """A directory with these rows, and responses of (phase, step, records)."""
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  with metrics.Writer(folder) as writer:
    for row in rows:
      writer.write(row)
    for dump in dumps:
      writer.dump_rollouts(*dump)
  return folder


def make_run(tmp_path, loss="gspo"):
  """A run of three sft steps and four rl steps, evaluated before, during and after them."""
  rows = [sft_row(step) for step in (1, 2, 3)]
  rows.append({"phase": "rl", "step": 0, **eval_keys(0.25)})
  for step in (1, 2, 3, 4):
    rows.append(rl_row(step) | (eval_keys(0.2 * step) if step % 2 == 0 else {}))
  dumps = [("eval", 4, [record(4, 9, 0, eval=True, response="lone \udc80 \u2028")])]
  for step in (1, 4):
    records = [record(step, prompt, sample) for prompt in range(3) for sample in range(4)]
    records[5] |= {"response": HOSTILE, "ratio": 1.0002, "clipped": True}
    dumps.append(("rl", step, records))
  objective = {"name": loss, "clip_low": 3e-4, "clip_high": 4e-4}
  return write(tmp_path / "a <b>run", rows, dumps, objective=objective, rl={"group_size": 4})


def describe(rows, config=None):
  return data.describe([data.Run("run", rows, config or {})])


def embedded(page, name="report"):
  """Data of a page (path or text) for its script."""
  page = page if isinstance(page, str) else page.read_text("utf-8")
  (text,) = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)
  return json.loads(text)


def figures(run):
  """The charts by the titles of section and chart."""
  return {(s["title"], f["title"]): f for s in run["sections"] for f in s["figures"]}
