"""The papers' equations in float64 NumPy, response by response, and cases to try them on.

Written from the papers, not from the code. Gradients are complex steps: f(x + ih).imag / h is exact
to the last digit for h = 1e-30, `sg` is the real part, and minima are taken by real parts.
"""

import numpy as np


def gradient(f, x):
  """df/dx of a real function of a real array."""
  grad = np.zeros(x.shape)
  for index in np.ndindex(*x.shape):
    moved = x.astype(complex)
    moved[index] += 1e-30j
    grad[index] = f(moved).imag / 1e-30
  return grad


def sg(x):
  return np.real(x)


def clip(x, low, high):
  return np.where(sg(x) < low, low, np.where(sg(x) > high, high, x))


def minimum(x, y):
  return np.where(sg(x) <= sg(y), x, y)


def maximum(x, y):
  return np.where(sg(x) >= sg(y), x, y)


def surrogate(ratio, advantage, low, high, dual=None):
  objective = minimum(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
  if dual is not None:
    objective = np.where(advantage < 0, maximum(objective, dual * advantage), objective)
  return objective


def responses(mask, *arrays):
  """What belongs to the tokens of each response that has any; of [B] what belongs to the row."""
  for i in range(len(mask)):
    live = mask[i] != 0
    if live.any():
      yield [a[i][live] if a.ndim == 2 else np.broadcast_to(a[i], live.sum()) for a in arrays]


def aggregate(losses, level, max_length=None):
  """Losses per token, a list of one array per response."""
  if level == "sequence":
    return sum(loss.mean() for loss in losses) / len(losses)
  if level == "token":
    return sum(loss.sum() for loss in losses) / sum(len(loss) for loss in losses)
  return sum(loss.sum() for loss in losses) / (len(losses) * max_length)


def gspo(logp, old, advantage, mask, low=3e-4, high=4e-4, alpha=1, dual=None):
  """Eq. 5 and 7."""
  objectives = []
  for new, past, a in responses(mask, logp, old, advantage):
    s = np.exp((new - past).sum() / len(new) ** alpha)
    objectives.append(surrogate(s, a[0], low, high, dual))
  return -sum(objectives) / len(objectives)


def gspo_token(logp, old, advantage, mask, low=3e-4, high=4e-4, dual=None):
  """Eq. 13 and 14."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    s = np.exp((new - past).mean())
    s_t = sg(s) * np.exp(new) / sg(np.exp(new))
    losses.append(-surrogate(s_t, a, low, high, dual))
  return aggregate(losses, "sequence")


def luspo(logp, old, advantage, mask, low=2e-3, high=2.5e-3, dual=None):
  """arXiv:2602.05261, Eq. 6 and 7."""
  objectives = []
  for new, past, a in responses(mask, logp, old, advantage):
    s = np.exp((new - past).mean())
    objectives.append(surrogate(s, a[0], low, high, dual) * len(new))
  return -sum(objectives) / len(objectives)


def segment(logp, old, advantage, mask, ids, low=3e-4, high=4e-4, alpha=1):
  """1/G Σ_i 1/K_i Σ_k min(s_ik Â_ik, clip(s_ik) Â_ik)."""
  objectives = []
  for new, past, a, z in responses(mask, logp, old, advantage, ids):
    parts = []
    for k in np.unique(z):
      s = np.exp((new - past)[z == k].sum() / (z == k).sum() ** alpha)
      parts.append(surrogate(s, a[z == k][0], low, high))
    objectives.append(sum(parts) / len(parts))
  return -sum(objectives) / len(objectives)


def grpo(
  logp, old, advantage, mask, low=0.2, high=0.27, level="sequence", max_length=None, dual=None
):
  """Eq. 2 and 3; DAPO and Dr. GRPO by their aggregation."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    losses.append(-surrogate(np.exp(new - past), a, low, high, dual))
  return aggregate(losses, level, max_length)


def cispo(logp, old, advantage, mask, low=None, high=0.27):
  """arXiv:2506.13585, Eq. 4 and 5."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    floor = -np.inf if low is None else 1 - low
    losses.append(-sg(clip(np.exp(new - past), floor, 1 + high)) * a * new)
  return aggregate(losses, "token")


def gmpo(logp, old, advantage, mask, low=0.4, high=0.4):
  """arXiv:2507.20673v3, Eq. 4: ( Π_t |min( w Â, clip(w, e^−low, e^high) Â )| )^{1/|y|} sgn Â."""
  objectives = []
  for new, past, a in responses(mask, logp, old, advantage):
    w, sign = np.exp(new - past), np.sign(a[0])
    bounded = minimum(w * a, clip(w, np.exp(-low), np.exp(high)) * a) * sign
    geometric_mean = np.exp(np.log(bounded).sum() / len(new)) if sign else 0
    objectives.append(geometric_mean * sign)
  return -sum(objectives) / len(objectives)


def sapo(logp, old, advantage, mask, tau_pos=1.0, tau_neg=1.05):
  """arXiv:2511.20347, Eq. 5 and 6: f(w) = σ(τ(w − 1)) · 4/τ."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    tau = np.where(a > 0, tau_pos, tau_neg)
    gate = 1 / (1 + np.exp(-tau * (np.exp(new - past) - 1)))
    losses.append(-gate * 4 / tau * a)
  return aggregate(losses, "sequence")


def divergence(new, past, kind):
  """arXiv:2602.04879, Eq. 13 and 14."""
  p, q = np.exp(np.minimum(past, 0)), np.exp(np.minimum(new, 0))
  if kind == "tv":
    return abs(q - p)
  with np.errstate(all="ignore"):
    others = (1 - p) * np.log((1 - p) / abs(np.expm1(np.minimum(new, 0))))
  return p * (np.minimum(past, 0) - np.minimum(new, 0)) + np.where(p < 1, others, 0)


def dppo(
  logp, old, advantage, mask, low=0.15, high=0.15, kind="tv", level="token", max_length=None
):
  """arXiv:2602.04879, Eq. 11 and 12."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    d, up = divergence(new.real, past, kind), new.real > past
    leaves = (a > 0) & up & (d > high) | (a < 0) & ~up & (d > low)
    losses.append(-np.where(leaves, 0, np.exp(new - past)) * a)
  return aggregate(losses, level, max_length)


def vespo(logp, old, advantage, mask, good=(2, 3), bad=(3, 2)):
  """arXiv:2602.10693v3, Eq. 20 and the kernel of §3.3, as a mean over tokens."""
  losses = []
  for new, past, a in responses(mask, logp, old, advantage):
    c1, c2 = good if a[0] >= 0 else bad
    W = sg(np.exp((new - past).sum()))
    losses.append(-(W**c1) * np.exp(c2 * (1 - W)) * a * new)
  return aggregate(losses, "token")


def opmd(logp, old, advantage, mask, tau=1.0):
  """arXiv:2501.12599, Eq. 3, of which it gives the gradient."""
  objectives = []
  for new, past, a in responses(mask, logp, old, advantage):
    log_ratio = new.sum() - past.sum()
    objectives.append(new.sum() * a[0] - tau / 2 * log_ratio**2)
  return -sum(objectives) / len(objectives)


def minirl(logp, old, sampler, advantage, mask, low=0.2, high=0.27, cap=5.0):
  """arXiv:2512.01374, Eq. 7, without its constant: the factor π_old/μ of its weight π_θ/μ is cut
  off at `cap`. Only the gradient means something."""
  objectives = []
  for new, past, mu, a in responses(mask, logp, old, sampler, advantage):
    r = np.exp(sg(new) - past)
    M = np.where((a > 0) & (r > 1 + high) | (a < 0) & (r < 1 - low), 0, 1)
    weight = r * np.minimum(np.exp(past - mu), cap)
    objectives.append((M * weight * a * new).sum())
  return -sum(objectives) / len(objectives)


def rft(logp, old, weight, mask):
  """−Σ w log π / Σ w |y| over what has w > 0: supervised fine-tuning on what was chosen."""
  total = chosen = 0
  for new, w in responses(mask, logp, weight):
    total, chosen = total - (np.maximum(w, 0) * new).sum(), chosen + np.maximum(w, 0).sum()
  return total / chosen


def spo(logp, ref, reward, value, mask, beta):
  """arXiv:2405.19107, Eq. 4, times 2: (r − V − β log π/π_ref)²."""
  errors = []
  for new, reference, r, q in responses(mask, logp, ref, reward, value):
    errors.append((q[0] + (beta * (new - reference)).sum() - r[0]) ** 2)
  return sum(errors) / len(errors)


def value(values, old, returns, mask, eps=0.2):
  """PPO's clipped critic loss, with ½, over all tokens."""
  losses = []
  for v, past, r in responses(mask, values, old, returns):
    near = v if eps is None else clip(v, past - eps, past + eps)
    losses.append(0.5 * maximum((v - r) ** 2, (near - r) ** 2))
  return aggregate(losses, "token")


def kl_penalty(logp, ref, mask, kind, level="sequence", max_length=None, old=None):
  losses = []
  for new, reference, past in responses(mask, logp, ref, ref if old is None else old):
    d = new - reference
    k3 = np.exp(-d) - 1 + d
    weighted = np.exp(new - past) * k3  # arXiv:2512.02556
    losses.append({"k1": d, "k2": d**2 / 2, "k3": k3, "k3_weighted": weighted}[kind])
  return aggregate(losses, level, max_length)


def gae(reward, values, mask, discount, trace, last=None):
  advantage = np.zeros(reward.shape)
  for i in range(len(reward)):
    next_value, next_advantage = 0.0 if last is None else last[i], 0.0
    for t in reversed(range(reward.shape[1])):
      if mask[i, t]:
        delta = reward[i, t] + discount * next_value - values[i, t]
        next_advantage = delta + discount * trace * next_advantage
        next_value = values[i, t]
        advantage[i, t] = next_advantage
  return advantage, np.where(mask, advantage + values, 0)


def turn_gae(reward, values, mask, turns, discount, trace, last):
  """A step for each turn, whose value is that before its first token."""
  advantage, returns = np.zeros(reward.shape), np.zeros(reward.shape)
  for i in range(len(reward)):
    next_value, next_advantage = last[i], 0.0
    for turn in sorted({*turns[i][mask[i]].tolist()}, reverse=True):
      tokens = np.flatnonzero(mask[i] & (turns[i] == turn))
      value = values[i, tokens[0]]
      delta = reward[i, tokens].sum() + discount * next_value - value
      next_advantage = delta + discount * trace * next_advantage
      next_value = value
      advantage[i, tokens], returns[i, tokens] = next_advantage, next_advantage + value
  return advantage, returns


def case(seed, B=8, T=12, spread="mixed", dtype=np.float32, garbage=True):
  """A batch with ragged rows, holes, rows of one token, of none, without advantage, on policy.

  `spread` of the log-ratios: "near" is the size of GSPO's ranges, "mixed" from 3e-3 to 2, "wide"
  from −25 to +15.
  """
  rng = np.random.default_rng(seed)
  mask = np.arange(T) < rng.integers(2, T + 1, (B, 1))
  mask &= rng.random((B, T)) < 0.8
  mask[0] = False
  mask[0, rng.integers(T)] = True
  mask[1] = False
  mask[2:, 0] = True
  if spread == "near":
    log_ratio = rng.normal(0, 1e-3, (B, T))
  elif spread == "mixed":
    log_ratio = rng.normal(0, 1, (B, T)) * 10.0 ** rng.uniform(-2.5, 0.3, (B, 1))
  else:
    log_ratio = rng.uniform(-25, 15, (B, T))
  log_ratio[4] = rng.normal(0, 1e-4, T)  # inside every range
  old = -rng.exponential(1.0, (B, T))
  logp = np.minimum(old, -30 * rng.random((B, T)) * (spread == "wide")) + log_ratio
  old = logp - log_ratio
  advantage = rng.normal(0, 1, B)
  advantage_bt = rng.normal(0, 1, (B, T))
  advantage[3], advantage_bt[3] = 0, 0
  ref = logp + rng.normal(0, 0.3, (B, T))
  arrays = dict(logp=logp, old=old, advantage=advantage, advantage_bt=advantage_bt, ref=ref)
  arrays = {name: array.astype(dtype) for name, array in arrays.items()}
  if garbage:
    rubbish = np.array([np.nan, np.inf, -np.inf, 1e30, -1e38], dtype)
    for name in ("logp", "old", "advantage_bt", "ref"):
      arrays[name][~mask] = rng.choice(rubbish, (~mask).sum())
    arrays["advantage"][1] = np.nan
  return arrays | dict(mask=mask, rng=rng)
