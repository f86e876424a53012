"""One process of benchmarks/gpu.py, which starts it: transformers (torch) on the same device.

Command:   python benchmarks/gpu_peers.py RESULT.json < SPEC.json
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network(spec: dict[str, Any]):
  """Random weights in bfloat16."""
  torch.manual_seed(0)
  fields = dict(spec["hf_config"])
  config = AutoConfig.for_model(fields.pop("model_type"), **fields)
  with torch.device(DEVICE):
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def train(spec: dict[str, Any]) -> dict[str, Any]:
  """Forward, backward and AdamW, in as many parts as fit."""
  model = network(spec).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=DEVICE == "cuda")
  shape = spec["rows"], spec["length"]
  tokens = torch.randint(spec["model"]["vocab_size"], shape, device=DEVICE)
  parts = tokens.split(spec["at_once"])
  seconds = []
  for _ in range(spec["calls"] + 1):
    started = synchronized_time()
    for part in parts:
      (model(input_ids=part, labels=part, use_cache=False).loss / len(parts)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds.append(synchronized_time() - started)
  return dict(seconds=statistics.median(seconds[1:]), peak_bytes=peak_bytes())


@torch.no_grad()
def sample(spec: dict[str, Any]) -> dict[str, Any]:
  """Samples every prompt `group` times; times the tokens after the first."""
  model = network(spec).eval()
  shape = spec["prompts"], spec["prompt"]
  tokens = torch.randint(spec["model"]["vocab_size"], shape, device=DEVICE)

  def generate(new: int) -> float:
    started = synchronized_time()
    out = model.generate(
      tokens,
      attention_mask=torch.ones_like(tokens),
      max_new_tokens=new,
      num_return_sequences=spec["group"],
      do_sample=True,
      temperature=1.0,
      top_k=0,
      eos_token_id=None,
      pad_token_id=0,
    )
    seconds = synchronized_time() - started
    if out.shape != (spec["prompts"] * spec["group"], spec["prompt"] + new):
      raise ValueError(f"sampled {tuple(out.shape)}")
    return seconds

  whole, first = ([generate(n) for _ in range(spec["calls"] + 1)][1:] for n in (spec["new"], 1))
  seconds = statistics.median(whole)
  step = (seconds - statistics.median(first)) / (spec["new"] - 1)
  return dict(seconds=seconds, step_seconds=max(step, 0.0), peak_bytes=peak_bytes())


def synchronized_time() -> float:
  if DEVICE == "cuda":
    torch.cuda.synchronize()
  return time.perf_counter()


def peak_bytes() -> int | None:
  return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None


def main() -> None:
  spec = json.load(sys.stdin)
  record = dict(train=train, sample=sample)[spec["task"]](spec)
  Path(sys.argv[1]).write_text(json.dumps(record))


if __name__ == "__main__":
  main()
