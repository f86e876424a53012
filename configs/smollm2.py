r"""A pretrained model of 135 M parameters learns word problems in English: cold start, then GSPO.

Command:   python -m gspo_jax.main --config=configs/smollm2.py --workdir=DIR
Hardware:  two CPU cores and 10 GiB of memory; a quarter of an hour
Expected:  eval/accuracy 0.24 -> 0.38, eval/greedy 0.32 -> 0.43 (experiments/e18_real_model)
Paper:     arXiv:2507.18071

The weights are downloaded from the hub. --config.weights=DIR reads them from a directory instead.
Held-out problems and training problems have different texts (docs/data.md#word-problems).
docs/pretrained.md explains this configuration step by step.

configs/smollm2.py:svamp trains on problems of SVAMP instead, from a file that you name:
--config.data.train='svamp@FILE where idx<850' --config.data.eval='svamp@FILE where idx>=850'
"""

from gspo_jax.configs import common
from gspo_jax.settings import sizes


def get_config(arg: str | None = None) -> common.ConfigDict:
  config = common.base()
  config.update(
    job="sft+rl",
    weights="HuggingFaceTB/SmolLM2-135M-Instruct",
    model=common.model(sizes.PUBLISHED["SmolLM2-135M-Instruct"]),
    mesh=dict(data=-1, fsdp=1),
    data=dict(
      train="word_problems:train",
      eval="word_problems:heldout",
      prompt_template="{question}\nExpression: ",
      chat_template=False,  # The cold start teaches the template above instead.
      max_prompt_tokens=41,  # Length of the longest prompt.
    ),
    reward=dict(name="math", workers=1),  # The verifier evaluates the expression.
    sampling=dict(max_new_tokens=16),  # "(41 + 19) / 5" and the stop token take 13 tokens.
    # After these updates a quarter of the samples is right. RL needs some right samples.
    sft=dict(steps=40, batch=16),
    sft_optimizer=dict(learning_rate=1e-5),
    rl=dict(iterations=30, prompts=16, group_size=8),
    rl_optimizer=dict(learning_rate=1e-5),
    eval=dict(every=10, problems=160, samples=2, batch=160),
    alarms=dict(ratio=0.03),  # Ratios average over only ten tokens, so they vary much.
  )
  if common.variant(arg, "svamp"):
    config.update(
      data=dict(train="", eval="", max_prompt_tokens=80), sampling=dict(max_new_tokens=28)
    )
  return config
