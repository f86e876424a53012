"""One process of benchmarks/iteration.py, which starts it: a system that runs RL iterations.

Command:   python -m benchmarks.iteration_systems SYSTEM SPEC.json RESULT.json
SPEC holds `model`, `directory` (weights and tokenizer as Hugging Face publishes them), `data` (the
prompts as JSON lines), `workdir` and `iterations`. RESULT is what `Record` says. `prepare` makes
the files of a model and counts the operations it needs, `probe` measures the machine.

The libraries are imported where they are used: importing them is part of starting.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import iteration_peers
from benchmarks.iteration_work import CLIP, MODELS, OPTIMIZER, WORK, Record, distance


def ours(spec: dict[str, Any], record: Record, old_logp: str = "recompute") -> None:
  """`gspo_jax.main` with a configuration made from configs/tiny.py.

  Two things differ from it: no token ends a response, and there is no evaluation. The dense
  model's gradients are taken in two parts: docs/speed.md.
  """
  import dataclasses
  from unittest import mock

  import jax

  from configs import tiny
  from gspo_jax import main, train
  from gspo_jax.inputs import read_inputs
  from gspo_jax.rollouts.collector import Collector
  from gspo_jax.run import open_run
  from gspo_jax.runs import metrics
  from gspo_jax.settings.reading import from_dict
  from gspo_jax.system import preemption

  values, work = tiny.get_config(), WORK[spec["model"]]
  changes = dict(
    job="rl",
    weights=spec["directory"],
    tokenizer=spec["directory"],
    model=spec["config"],
    data=dict(train=spec["data"], eval=spec["data"], max_prompt_tokens=work.prompt),
    reward=dict(name="benchmarks.iteration_work:reward", workers=1),
    sampling=dict(max_new_tokens=work.new),
    engine=dict(steps=16),  # Value of configs/dense_math.py, for longer responses.
    objective=CLIP | dict(old_logp=old_logp),
    rl=dict(
      prompts=work.prompts,
      group_size=work.group,
      minibatches=work.updates,
      microbatches=2 if spec["model"] == "dense" else 1,
      iterations=spec["iterations"],
      dump_every=10**6,
    ),
    rl_optimizer=OPTIMIZER | dict(schedule="constant", warmup_steps=0),
    eval=dict(every=10**6, max_new_tokens=work.new),
    checkpoint=dict(every=10**6),
  )
  values.update(changes)
  main.cache_compiled_programs()
  main.collect_garbage_rarely()
  config, workdir = from_dict(values.to_dict()), Path(spec["workdir"])

  collect = Collector.collect

  def timed_begin(*arguments):
    record.begin()
    return collect(*arguments)

  with (
    mock.patch.object(Collector, "collect", timed_begin),
    open_run(read_inputs(config, workdir)) as run,
    preemption.watch(config.checkpoint.grace_s),
  ):
    score = run.scoring.scorers[config.reward.name]

    def count(responses, prompts, lengths, finished):
      record.sampled[-1] += sum(lengths)
      record.trained[-1] += sum(lengths) + len(lengths) * work.prompt
      return score(responses, prompts, lengths, finished)

    run = dataclasses.replace(
      run,
      inputs=dataclasses.replace(
        run.inputs, tokenizer=dataclasses.replace(run.tokenizer, stop_ids=())
      ),
      scoring=dataclasses.replace(run.scoring, scorers={config.reward.name: count}),
      evaluate=dataclasses.replace(run.evaluate, benchmarks=[]),
    )
    if {len(prompt.tokens) for prompt in run.inputs.data.train_prompts} != {work.prompt}:
      raise ValueError(f"prompts are not {work.prompt} tokens long")
    params = train.train(run, run.initial_params)
    record.moved = distance(*map(jax.tree.leaves, (params, run.initial_params())))
  rows = [row for row in metrics.read_rows(workdir / "metrics.jsonl") if row["step"]]
  for stages, row in zip(record.stages, rows, strict=True):
    stages["sample"] = row["time/sample"]
    stages["score"] = row["time/score"] + row["time/logp"]
    stages["others"] = {k.removeprefix("time/"): v for k, v in row.items() if "time/" in k}
    losses = [row[f"minibatch/{i}/loss"] for i in range(work.updates)]
    record.losses.append(losses)
    record.grad_norms.append(row["grad_norm"])
  record.updates = len(losses) * len(rows) - int(rows[-1]["updates_skipped"])


def prepare(spec: dict[str, Any]) -> dict[str, Any]:
  """Writes weights, tokenizer and prompts; returns the model and its useful operations."""
  import dataclasses

  import jax
  import numpy as np
  import tokenizers

  from gspo_jax.models import flops, hf, transformer
  from gspo_jax.settings import sizes

  work = WORK[spec["model"]]
  if spec["model"] in MODELS:
    config = dataclasses.replace(sizes.tiny_moe(512), **MODELS[spec["model"]])
  else:
    config = sizes.PUBLISHED["SmolLM2-135M"]
  directory = Path(spec["directory"])
  hf.save(directory, jax.jit(transformer.init, static_argnums=0)(config, jax.random.key(0)), config)
  size = config.vocab_size - 2
  vocabulary = {f"w{i}": i for i in range(size)} | {"<pad>": size, "<eos>": size + 1}
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  words.save(str(directory / "tokenizer.json"))
  about = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>", pad_token="<pad>")
  (directory / "tokenizer_config.json").write_text(json.dumps(about))
  rows = np.random.default_rng(0).integers(0, size, (64, work.prompt)).tolist()
  texts = [" ".join(f"w{token}" for token in row) for row in rows]
  lines = [json.dumps(dict(question=text, answer="none")) for text in texts]
  Path(spec["data"]).write_text("\n".join(lines) + "\n")
  length = work.prompt + work.new
  prefill = flops.work(config, work.prompts, work.prompt, work.prompt, heads=work.prompts).forward()
  decode = flops.work(config, work.rows, work.new, length).forward()
  prompts = flops.work(config, work.prompts, work.prompt, work.prompt, heads=1).training()
  responses = flops.work(config, work.rows, work.new, length, heads=work.rows * work.new)
  return dict(
    config=dataclasses.asdict(config),
    useful=dict(
      sample=prefill + decode, update=prompts + responses.training()
    ),  # Per iteration, like `work`.
    work=dict(sampled=work.rows * work.new, trained=work.rows * length, updates=work.updates),
  )


def probe(_: dict[str, Any]) -> dict[str, float]:
  """Operations/s of a large float32 matmul in JAX."""
  import jax
  import jax.numpy as jnp

  square, dot, seconds = jnp.ones((1024, 1024)), jax.jit(jnp.dot), []
  for _ in range(60):
    started = time.perf_counter()
    dot(square, square).block_until_ready()
    seconds.append(time.perf_counter() - started)
  return dict(matmul=2 * 1024**3 / min(seconds))


def main() -> None:
  name, spec, result = sys.argv[1:]
  spec = json.loads(Path(spec).read_text())
  if name in ("prepare", "probe"):
    values = dict(prepare=prepare, probe=probe)[name](spec)
  else:
    record = Record()
    nopass = functools.partial(ours, old_logp="sampler")
    systems = dict(ours=ours, nopass=nopass, trl=iteration_peers.trl, tunix=iteration_peers.tunix)
    systems[name](spec, record)
    values = vars(record)
  Path(result).write_text(json.dumps(values, default=float))


if __name__ == "__main__":
  main()
