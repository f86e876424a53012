"""Reward functions for the trainers of others. TRL and verl themselves run where they are there."""

import inspect

import pytest
from support import toy_qwen3

from gspo_jax.verifiers import math_answer, trainers

HANGS = r"\boxed{e^{e^{e^{e^{e}}}}}"


def test_a_reward_is_one_zero_or_none():
  completions = [r"\boxed{\frac{1}{2}}", r"\boxed{2}", "No idea.", HANGS, "5", "5"]
  answers = ["0.5", r"\sqrt{2}", "5", r"2\sqrt{2}", None, " "]
  rewards = trainers.math_reward(["q"] * 6, completions, answer=answers, time_limit_s=1.0)
  assert rewards == [1.0, 0.0, 0.0, None, None, None]


def test_a_gold_answer_may_be_a_number():
  assert trainers.math_reward(["q"] * 2, ["4", "4.5"], [4, 4.5]) == [1, 1]
  assert trainers.compute_score("aime", "It is 17.", 18)["score"] == 0
  with pytest.raises(TypeError, match=r"must be a text or a number, and not \['4'\]"):
    trainers.math_reward(["q"], ["4"], [["4"]])


def test_a_missing_sympy_is_named(monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", {}.get)
  with pytest.raises(RuntimeError, match=r"needs SymPy: pip install '\.\[verifiers\]'"):
    math_answer.MathVerifier(1, 1.0)


def test_the_last_message_of_a_conversation_counts():
  conversation = [dict(role="assistant", content="4"), dict(role="assistant", content="It is 5.")]
  parts = [dict(role="assistant", content=[dict(type="text", text="It is "), dict(text="6.")])]
  empty = [dict(role="assistant", content=None)]
  assert trainers.math_reward([[]] * 3, [conversation, parts, empty], ["5", "6", "7"]) == [1, 1, 0]


def test_further_columns_are_passed_over():
  """TRL passes them: https://huggingface.co/docs/trl/grpo_trainer, "custom reward function"."""
  columns = dict(completion_ids=[[1, 2]], trainer_state=None, log_metric=None, level=["easy"])
  assert trainers.math_reward(prompts=["q"], completions=["5"], answer=["5"], **columns) == [1.0]


def test_the_parameters_of_verl():
  names = [*inspect.signature(trainers.compute_score).parameters]
  assert names[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
  right = dict(score=1.0, acc=1.0, unknown=0.0)
  assert trainers.compute_score("aime", r"\boxed{18}", "18", dict(index=0)) == right
  assert trainers.compute_score("aime", r"\boxed{17}", "18") == dict(score=0, acc=0, unknown=0)
  unknown = dict(score=0, acc=0, unknown=1)
  assert trainers.compute_score("aime", HANGS, r"2\sqrt{2}", time_limit_s=1.0) == unknown
  assert trainers.compute_score("aime", r"\boxed{17}", r"\frac{") == unknown


def test_trl_trains_with_it(tmp_path):
  trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
  toy_qwen3.write(tmp_path / "model")
  rows = [dict(prompt=f"{i} + 1 =", answer=str(i + 1)) for i in range(4)]
  settings = trl.GRPOConfig(
    str(tmp_path / "run"), per_device_train_batch_size=4, num_generations=2, max_steps=1,
    max_completion_length=8, logging_steps=1, use_cpu=True, bf16=False, report_to="none",
  )  # fmt: skip
  trainer = trl.GRPOTrainer(
    str(tmp_path / "model"), reward_funcs=trainers.math_reward, args=settings,
    train_dataset=datasets.Dataset.from_list(rows),
  )  # fmt: skip
  trainer.train()
  assert 0 <= trainer.state.log_history[0]["rewards/math_reward/mean"] <= 1


@pytest.mark.long
def test_verl_scores_with_it():
  pytest.importorskip("verl")
  import numpy as np
  import torch
  from omegaconf import OmegaConf
  from verl import DataProto
  from verl.trainer.ppo.reward import load_reward_manager

  function = dict(path=trainers.__file__, name="compute_score", reward_kwargs=dict(time_limit_s=9))
  manager = dict(source="register", name="naive")
  config = OmegaConf.create(
    dict(reward=dict(custom_reward_function=function, reward_manager=manager))
  )
  text = rb"so \boxed{\frac{1}{2}}"

  class Bytes:
    def decode(self, ids, skip_special_tokens):
      return bytes(ids.tolist()).decode()

  data = DataProto.from_dict(
    dict(responses=torch.tensor([[*text]]), attention_mask=torch.ones(1, 3 + len(text), dtype=int)),
    dict(
      data_source=np.array(["aime"], object), extra_info=np.array([{}], object),
      reward_model=np.array([dict(ground_truth="0.5")], object),
    ),
  )  # fmt: skip
  scorer = load_reward_manager(config, Bytes())
  result = scorer.loop.run_until_complete(scorer.run_single(data))
  assert result["reward_score"] == 1.0
  assert result["reward_extra_info"] == dict(score=1.0, acc=1.0, unknown=0.0)
