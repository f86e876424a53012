"""TRL and Tunix as benchmarks/iteration.py runs them, each set up to do what ours does.

Their libraries are imported where they are used: importing them is part of starting.
"""

import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.iteration_work import CLIP, OPTIMIZER, WORK, Record, distance, reward


def trl(spec: dict[str, Any], record: Record) -> None:
  """TRL's GRPOTrainer at the sequence level, its gradient checkpointing off."""
  import torch
  from datasets import Dataset
  from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
  from trl import GRPOConfig, GRPOTrainer

  work = WORK[spec["model"]]

  class Iterations(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
      if state.global_step % work.updates == 0:
        record.begin()
        record.losses.append([])

    def on_log(self, args, state, control, logs=None, **_):
      if "grad_norm" in logs:
        record.losses[-1].append(logs["loss"])
        record.grad_norms.append(logs["grad_norm"])

  load = functools.partial(
    AutoModelForCausalLM.from_pretrained, spec["directory"], dtype=torch.float32
  )
  rows = [json.loads(line) for line in Path(spec["data"]).read_text().splitlines()]
  trainer = GRPOTrainer(
    model=load(),
    processing_class=AutoTokenizer.from_pretrained(spec["directory"]),
    reward_funcs=lambda completions, **_: [reward(c, "none") for c in completions],
    train_dataset=Dataset.from_dict(dict(prompt=[row["question"] for row in rows])),
    callbacks=[Iterations()],
    args=GRPOConfig(
      output_dir=spec["workdir"],
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,  # it would recompute the forward pass
      max_steps=work.updates * spec["iterations"],
      per_device_train_batch_size=work.rows // work.updates,
      steps_per_generation=work.updates,
      num_generations=work.group,
      max_completion_length=work.new,
      temperature=1.0,
      importance_sampling_level="sequence",
      loss_type="grpo",  # Mean over sequences.
      epsilon=CLIP["clip_low"],
      epsilon_high=CLIP["clip_high"],
      beta=0.0,
      learning_rate=OPTIMIZER["learning_rate"],
      lr_scheduler_type="constant",
      adam_beta2=OPTIMIZER["b2"],
      max_grad_norm=OPTIMIZER["clip_norm"],
      logging_steps=work.updates,
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
    ),
  )
  trainer.eos_token_ids = [-1]  # no token ends a response
  trainer.generation_config.eos_token_id = None
  trainer._generate = record.timed("sample", trainer._generate)
  make_batch = record.timed("score", trainer._generate_and_score_completions)

  def make_and_count(inputs):
    batch = make_batch(inputs)
    tokens = int(batch["completion_mask"].sum())
    record.sampled[-1] += tokens
    record.trained[-1] += tokens + int(batch["prompt_mask"].sum())
    if "old_per_token_logps" not in batch:
      raise ValueError("no old log-probabilities: the ratio would always be 1")
    return batch

  trainer._generate_and_score_completions = make_and_count
  trainer.train()
  for stages in record.stages:
    stages["score"] -= stages["sample"]
  record.updates = trainer.state.global_step
  weights = [
    [x.detach().numpy() for x in network.parameters()] for network in (trainer.model, load())
  ]
  record.moved = distance(*weights)


def tunix(spec: dict[str, Any], record: Record) -> None:
  """Tunix's GRPOLearner with its loss gspo-token.

  It knows no mini-batches of one rollout. What is nearest: an iteration is 4 times sampling 8
  responses and updating on them. Its old policy is then the current one, and costs no pass.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax
  import tokenizers
  from flax import nnx
  from tunix.models.qwen3 import model as qwen3
  from tunix.models.qwen3 import params as loader
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  work, c, rows = WORK[spec["model"]], spec["config"], Path(spec["data"]).read_text().splitlines()
  prompts = [json.loads(row)["question"] for row in rows]
  words = tokenizers.Tokenizer.from_file(str(Path(spec["directory"]) / "tokenizer.json"))

  class Words:  # Interface of a tokenizer, without stop token and padding.
    encode = staticmethod(lambda text, **_: words.encode(text).ids)
    decode = staticmethod(lambda ids, **_: words.decode(ids))
    bos_id = staticmethod(lambda: None)
    eos_id = pad_id = staticmethod(lambda: -1)

  same = ("num_layers", "vocab_size", "num_heads", "head_dim", "num_kv_heads")
  config = qwen3.ModelConfig(
    **{name: c[name] for name in same},
    embed_dim=c["hidden_size"],
    hidden_dim=c["moe_intermediate_size"] or c["intermediate_size"],
    rope_theta=int(c["rope_theta"]),
    norm_eps=c["rms_norm_eps"],
    num_experts=c["num_experts"] or None,
    num_experts_per_tok=c["experts_per_token"] or None,
  )
  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def load():
    return loader.create_model_from_safe_tensors(spec["directory"], config, mesh, dtype=jnp.float32)

  o, roles = OPTIMIZER, rl_cluster.Role
  adamw = optax.adamw(o["learning_rate"], o["b1"], o["b2"], weight_decay=0.0)
  cluster = rl_cluster.RLCluster(
    actor=load(),
    tokenizer=Words(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(o["clip_norm"]), adamw),
        eval_every_n_steps=10**6,
        max_steps=work.updates * spec["iterations"],
        mini_batch_size=work.prompts // work.updates,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=work.new,
        max_prompt_length=work.prompt,
        kv_cache_size=work.prompt + work.new,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[-1],
      ),
    ),
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=lambda prompts, completions, **_: [reward(c, "none") for c in completions],
    algo_config=grpo_learner.GRPOConfig(
      loss_algo="gspo-token", num_generations=work.group, beta=0.0, epsilon=CLIP["clip_high"]
    ),
  )
  cluster.generate = record.timed("sample", cluster.generate)
  make_batch = record.timed("score", learner._generate_and_compute_advantage)

  def make_and_count(*arguments):
    batch = make_batch(*arguments)
    tokens = int(batch.completion_mask.sum())
    record.sampled[-1] += tokens
    record.trained[-1] += tokens + int(batch.prompt_mask.sum())
    return batch

  learner._generate_and_compute_advantage = make_and_count
  trainer, reported = cluster.actor_trainer, []
  log = trainer._log_metrics

  def log_and_keep(loss, step=None, additional_metrics=None):
    reported.append((float(loss), float(additional_metrics["grad_norm"])))
    log(loss, step, additional_metrics)

  trainer._log_metrics = log_and_keep

  def batches():
    for i in range(spec["iterations"]):
      if i == 1:  # only here: the first iteration has really ended
        jax.block_until_ready(nnx.state(trainer.model))
      record.begin()
      chosen = [prompts[(work.prompts * i + j) % len(prompts)] for j in range(work.prompts)]
      yield dict(prompts=np.array(chosen))

  with mesh:
    learner.train(batches())
  for stages in record.stages:
    stages["score"] -= stages["sample"]
  record.updates = trainer.train_steps
  for i in range(0, len(reported), work.updates):
    losses, norms = zip(*reported[i : i + work.updates])
    record.losses.append(losses)
    record.grad_norms.append(float(np.mean(norms)))

  def leaves(network):
    return jax.tree.leaves(nnx.state(network, nnx.Param))

  record.moved = distance(leaves(trainer.model), leaves(load()))
