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
#
# You have a model and a training loop, and want GSPO in it. This page is such a loop, about 40 lines with a Flax NNX model and Optax. It trains with GSPO and with GRPO, and then compares the two losses on one batch. It takes a minute on a CPU.

# %% [markdown]
# ## Install
#
# The losses need only JAX, 0.7 or newer. Flax, Optax and Matplotlib, which this page needs too, are on Colab. With gspo_jax installed, the next cell does nothing.

# %% tags=["install"]
import importlib.util
import subprocess
import sys

REPOSITORY = "git+https://github.com/OWNER/gspo_jax"  # where this project is published

if importlib.util.find_spec("gspo_jax") is None:
  if "OWNER" in REPOSITORY:
    raise SystemExit("Set REPOSITORY to the address of gspo_jax, or to its directory.")
  subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", REPOSITORY], check=True)
  importlib.invalidate_caches()  # so that this session finds it

# %% [markdown]
# ## The task
#
# The prompt is a digit, the right response counts on to nine and ends: `6` → `7 8 9 end`. The reward is the share of the right response before the first mistake. A right response has 1 token (to prompt 9) to 10 tokens (to prompt 0), so a mask marks the tokens of each response.

# %% tags=["parameters"]
STEPS = 80  # rollouts of each run, with four updates each
EARLY = 10  # rollouts after which the two losses are compared on one batch
SEED = 0

# %% [markdown]
# ## The loop
#
# Everything in the next cell is yours: model, sampler, reward, optimizer. The project gives two functions, `O.group_advantages` and the loss. They take and return arrays, whatever the model.
#
# One letter names one axis: P prompts, G responses to each, B = P·G responses in all, T tokens.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gspo_jax import objectives as O

P, G, T, END = 32, 8, 10, 10


class Model(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(END + 1, 32, rngs=rngs)
    self.memory = nnx.RNN(nnx.GRUCell(32, 64, rngs=rngs), rngs=rngs)
    self.out = nnx.Linear(64, END + 1, rngs=rngs)

  def __call__(self, tokens_BT):  # logits of the token after each
    return self.out(self.memory(self.embed(tokens_BT)))


def log_probs(model, tokens_BT):  # of each token of the response, given all before it
  logp_BTV = jax.nn.log_softmax(model(tokens_BT[:, :-1]))
  return jnp.take_along_axis(logp_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]


@nnx.jit
def rollout(model, key):
  prompt_P = jax.random.randint(key, (P,), 0, END)
  tokens_BT = jnp.zeros((P * G, T + 1), int).at[:, 0].set(jnp.repeat(prompt_P, G))
  for t in range(T):
    token_B = jax.random.categorical(jax.random.fold_in(key, t), model(tokens_BT)[:, t])
    tokens_BT = tokens_BT.at[:, t + 1].set(token_B)
  response_BT, right_BT = tokens_BT[:, 1:], tokens_BT[:, :1] + 1 + jnp.arange(T)
  end_BT = response_BT == END
  mask_BT = jnp.cumsum(end_BT, axis=1) - end_BT == 0  # up to the first END, which counts
  so_far_BT = jnp.cumprod(response_BT == right_BT, axis=1)  # 1 up to the first mistake
  reward_B = so_far_BT.sum(axis=1) / (right_BT <= END).sum(axis=1)
  advantage_B = O.group_advantages(reward_B.reshape(P, G)).reshape(-1)
  return tokens_BT, log_probs(model, tokens_BT), advantage_B, mask_BT, reward_B


def train(loss, model):
  optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

  @nnx.jit
  def update(model, optimizer, tokens_BT, old_logp_BT, advantage_B, mask_BT):
    def of(model):
      return loss(log_probs(model, tokens_BT), old_logp_BT, advantage_B, mask_BT)

    grads, metrics = nnx.grad(of, has_aux=True)(model)
    optimizer.update(model, grads)
    return metrics

  for step in range(STEPS):
    *batch, reward_B = rollout(model, jax.random.key(1000 * SEED + step))
    for i in range(4):  # updates; the old log-probabilities stay as they were sampled
      metrics = update(model, optimizer, *(x[i::4] for x in batch))
    yield reward_B.mean(), metrics


# %% [markdown]
# ## GSPO and GRPO, from the same start
#
# Both see the same prompts. GSPO's published clip range, 0.0003 and 0.0004, is for responses of thousands of tokens. With ten tokens the mean is over fewer tokens and scatters more, so the range must be about a hundred times as wide. GRPO has its published range, 0.2 and 0.27.

# %%
from functools import partial

import matplotlib.pyplot as plt
import numpy as np

LOSSES = {
  "GSPO": partial(O.gspo_loss, clip_low=0.03, clip_high=0.04),
  "GRPO": O.grpo_loss,
}
models = {name: Model(nnx.Rngs(SEED)) for name in LOSSES}
curves = {}
for name, loss in LOSSES.items():
  curves[name] = np.array([float(reward) for reward, _ in train(loss, models[name])])

figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for (name, curve), colour in zip(curves.items(), ("#2563c9", "#c2570c")):
  ax.plot(curve, label=name, color=colour)
ax.set(xlabel="rollout", ylabel="mean reward", ylim=(0, 1.02))
ax.grid(alpha=0.3)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Three responses of each, beside an untrained model's:


# %%
def responses(model):
  tokens_BT, _, _, mask_BT, _ = map(np.asarray, rollout(model, jax.random.key(999)))
  _, first = np.unique(tokens_BT[:, 0], return_index=True)  # response to each prompt
  for (prompt, *response), mask in zip(tokens_BT[first[2::3]], mask_BT[first[2::3]]):
    text = " ".join("end" if t == END else str(t) for t, m in zip(response, mask) if m)
    yield f"{prompt} → {text}"


for name, model in {"untrained": Model(nnx.Rngs(SEED)), **models}.items():
  print(f"{name:10}", *(f"{text:25}" for text in responses(model)))

# %% [markdown]
# ## The same batch, two losses
#
# Now one batch for both. A model early in its training samples it, and then makes four more updates on another batch. So its log-probabilities are no longer the old ones, and the ratios are not 1.

# %%
model = Model(nnx.Rngs(SEED))
training = train(LOSSES["GSPO"], model)
for _ in range(EARLY):
  next(training)
tokens_BT, old_logp_BT, advantage_B, mask_BT, _ = rollout(model, jax.random.key(777))
next(training)  # four updates
logp_BT = log_probs(model, tokens_BT)

metrics, gradients = {}, {}
for name, loss in LOSSES.items():
  value_and_grad = jax.value_and_grad(loss, has_aux=True)  # with respect to logp_BT
  (value, figures), gradients[name] = value_and_grad(logp_BT, old_logp_BT, advantage_B, mask_BT)
  metrics[name] = {"loss": value, **figures}

print(f"{'':32}{'GSPO':>10}{'GRPO':>10}")
for key in metrics["GSPO"]:
  print(f"{key:32}" + "".join(f"{float(metrics[name][key]):10.4f}" for name in LOSSES))

# %% [markdown]
# | metric | meaning |
# | --- | --- |
# | `loss` | to be minimised. Its value means little, since advantages are relative: watch the reward. |
# | `ratio/mean`, `min`, `max`, `std` | the importance ratio: GSPO's are of responses, GRPO's of tokens. GSPO's lie closer to 1, because each is a mean over tokens. |
# | `ratio/deviation` | mean distance of the ratio from 1. On the first update after sampling it is 0, but for rounding. If it is always 0, your old log-probabilities are those of the current model, and nothing is ever clipped. |
# | `ratio/effective_length` | over how many tokens the change of a response's log-prob is spread: 1 if one token changed, all of them if they changed equally. Both losses give the same value. |
# | `clip_fraction/token` | share of the tokens without a gradient. `high`: good ones, already likelier than the range allows; `low`: bad ones, already less likely. |
# | `clip_fraction/sequence` | the same, each response counted once. GSPO clips whole responses, GRPO single tokens. |
# | `kl/k1`, `kl/k3` | two estimates of the distance to the sampling model, in nats per token. |
#
# ## The weight of a token
#
# Here is the gradient of each loss with respect to the log-prob of each token, for two responses. Its sign is reversed, so that an upward bar makes a token likelier, and it is multiplied by the numbers of responses and tokens. GSPO gives all tokens of a response the same weight, or none when it is clipped. GRPO gives each token its own.

# %%
length_B = mask_BT.sum(axis=1)
scale_B1 = -len(length_B) * length_B[:, None]
weight = {name: np.asarray(scale_B1 * g_BT) for name, g_BT in gradients.items()}
unused = np.abs(weight["GSPO"]).max(axis=1) == 0
# Of each kind the response of at least four tokens with the largest advantage, as far as any.
order = np.argsort(-np.abs(advantage_B))
order = order[np.asarray(length_B)[order] >= 4]
chosen = [order[kind[order]][:1] for kind in (~unused, unused)]

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for ax, rows, title in zip(axes, chosen, ("not clipped by GSPO", "clipped by GSPO")):
  for i in rows:  # none, if GSPO clipped no response
    n, positions = int(length_B[i]), np.arange(int(length_B[i]))
    ax.bar(positions - 0.2, weight["GSPO"][i][:n], 0.4, color="#2563c9", label="GSPO")
    ax.bar(positions + 0.2, weight["GRPO"][i][:n], 0.4, color="#c2570c", label="GRPO")
    words = ["end" if t == END else str(t) for t in tokens_BT[i][1 : n + 1]]
    ax.set_xticks(positions, words)
    ax.set(title=f"{title}: Â = {advantage_B[i]:+.2f}", xlabel=f"prompt: {tokens_BT[i][0]}")
  ax.axhline(0, color="black", lw=0.8)
  ax.spines[["top", "right"]].set_visible(False)
axes[0].set(ylabel="weight of the token")
labels = axes[0].get_legend_handles_labels()
figure.legend(*labels, loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# ## In your own code
#
# - `old_logp_BT` comes from the sampler, and stays fixed for all updates on a rollout.
# - The mask is 1 on sampled tokens, the end token included, and 0 on prompt, padding and tool output.
# - Choose the clip range by the length of your responses; watch `clip_fraction/token`. The paper has about 0.15 with GSPO.
# - The losses run inside `jit`, on any device. [Objectives](https://github.com/OWNER/gspo_jax/blob/main/docs/objectives.md) has all of them, with options and formulas.
