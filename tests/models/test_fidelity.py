"""The model computes what Hugging Face's transformers computes, from the directories it writes.

Random weights, float32, CPU. test_families.py has a row for each family, this page further forms.
"""

import contextlib
import json
import types

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.cases import long  # noqa: E402
from support.hf_models import random_model  # noqa: E402, after the skip

from gspo_jax.models import hf, transformer  # noqa: E402
from gspo_jax.models.attention import positions as rotary  # noqa: E402
from gspo_jax.sampling import generate  # noqa: E402

BASE = dict(
  vocab_size=128,
  hidden_size=40,
  intermediate_size=56,
  num_hidden_layers=2,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=16,  # not 40 / 8
  max_position_embeddings=256,
)
MOE = BASE | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
MIXTRAL = BASE | dict(num_local_experts=6, num_experts_per_tok=2)
NEW_TOKENS = 64
LOGIT_TOLERANCE = 2e-5  # Relative to the largest logit.


def config(kind, base, theta, tied=False, **changes):
  rope = dict(rope_type="default", rope_theta=theta)
  ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
  keys = base | dict(tie_word_embeddings=tied, rope_parameters=rope) | ids | changes
  return getattr(transformers, f"{kind}Config")(**keys)


# Rows of 24 tokens and continuations of 64 go well beyond the windows.
GEMMA = BASE | dict(num_hidden_layers=5, query_pre_attn_scalar=20, attn_implementation="eager")


def gemma(kind, pattern, window, theta=1e6, local_theta=1e4, **changes):
  full, local = (dict(rope_type="default", rope_theta=t) for t in (theta, local_theta))
  ropes = dict(full_attention=full, sliding_attention=local) if kind == "Gemma3Text" else full
  types = ["full_attention" if i % pattern == 0 else "sliding_attention" for i in range(1, 6)]
  keys = GEMMA | dict(layer_types=types, sliding_window=window, rope_parameters=ropes) | changes
  return config(kind, keys, theta, tied=True, rope_parameters=ropes)


# Query heads per key/value head are num_attention_heads=8 over num_key_value_heads.
CASES = dict(
  dense_gqa2=lambda: config("Qwen3", BASE, 1e6),
  dense_gqa8_tied=lambda: config("Qwen3", BASE, 1e7, True, num_key_value_heads=1),
  dense_gqa1=lambda: config("Qwen3", BASE, 1e6, num_key_value_heads=8, rms_norm_eps=1e-2),
  qwen2=lambda: config("Qwen2", BASE | dict(head_dim=6, hidden_size=48), 1e6),
  llama=lambda: config("Llama", BASE | dict(head_dim=6, hidden_size=48), 5e5, rms_norm_eps=1e-5),
  moe_normalised=lambda: config("Qwen3Moe", MOE, 1e6, norm_topk_prob=True),
  moe_unnormalised_tied=lambda: config("Qwen3Moe", MOE, 1e7, True, norm_topk_prob=False),
  moe_mlp_only_gqa8=lambda: config(
    "Qwen3Moe",
    MOE | dict(num_hidden_layers=4, num_key_value_heads=1),
    1e7,
    norm_topk_prob=True,
    mlp_only_layers=[0, 2],
  ),
  moe_sparse_step_2_gqa1=lambda: config(
    "Qwen3Moe",
    MOE | dict(num_hidden_layers=5, num_key_value_heads=8, num_experts=5, num_experts_per_tok=3),
    1e6,
    norm_topk_prob=True,
    decoder_sparse_step=2,
    mlp_only_layers=[1],
  ),
  mixtral=lambda: config("Mixtral", MIXTRAL, 1e6, head_dim=10),
  mixtral_fused_gqa8=lambda: config("Mixtral", MIXTRAL, 1e5, num_key_value_heads=1),
  gemma3=lambda: gemma("Gemma3Text", 3, 7),
  gemma3_bound_gqa8=lambda: gemma(
    "Gemma3Text", 2, 5, local_theta=2e4, num_key_value_heads=1, final_logit_softcapping=3.0
  ),
  gemma2=lambda: gemma(
    "Gemma2", 2, 8, theta=1e4, attn_logit_softcapping=3.0, final_logit_softcapping=4.0
  ),
)
SAVE = dict(  # other ways in which transformers writes a directory
  dense_gqa2=dict(max_shard_size="20KB"),
  moe_normalised=dict(save_original_format=False),  # experts of a layer in one tensor
  moe_mlp_only_gqa8=dict(max_shard_size="20KB"),
  mixtral_fused_gqa8=dict(save_original_format=False),
)


def hf_logits(model, tokens):
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.numpy()


@contextlib.contextmanager
def recorded_routing(model):
  """Fills a list with each MoE layer's chosen experts [B·T, k]."""
  chosen = []
  hooks = [
    module.register_forward_hook(lambda _module, _inputs, out: chosen.append(out[2].numpy()))
    for name, module in model.named_modules()
    if name.endswith(".mlp.gate")
  ]
  yield chosen
  for hook in hooks:
    hook.remove()


FURTHER = (
  *("moe_mlp_only_gqa8", "mixtral_fused_gqa8", "gemma3", "llama"),
  *("dense_gqa8_tied", "dense_gqa1", "moe_unnormalised_tied", "moe_sparse_step_2_gqa1"),
)
MARKED = [
  *(name for name in CASES if name not in FURTHER),
  *long(FURTHER),
]


@pytest.fixture(scope="module", params=MARKED)
def case(request, tmp_path_factory):
  directory = tmp_path_factory.mktemp(request.param)
  model = random_model(CASES[request.param]())
  model.save_pretrained(directory, **SAVE.get(request.param, {}))
  params, model_config = hf.load(directory)
  tokens = np.random.default_rng(0).integers(0, BASE["vocab_size"], (2, 24))
  return types.SimpleNamespace(
    model=model,
    params=params,
    config=model_config,
    tokens=tokens,
    out=jax.jit(transformer.forward, static_argnums=1)(params, model_config, tokens),
  )


def assert_close(logits, expected):
  assert np.abs(expected).max() > 1  # else the tolerance would say nothing
  assert np.abs(logits - expected).max() < LOGIT_TOLERANCE * np.abs(expected).max()


def test_logits_are_those_of_transformers(case):
  logits = transformer.head_logits(case.params, case.config, case.out.hidden_BTD)
  assert_close(logits, hf_logits(case.model, case.tokens))


def test_the_router_chooses_the_same_experts(case):
  with recorded_routing(case.model) as chosen:
    hf_logits(case.model, case.tokens)
  routing = case.out.routing_lBTk
  if not case.config.num_experts:
    assert routing is None and not chosen
    return
  assert len(routing) == len(chosen) == sum(map(case.config.is_moe, range(case.config.num_layers)))
  expected = np.stack(chosen).reshape(routing.shape)
  np.testing.assert_array_equal(routing, expected)  # the same order, not only the same set
  assert len(np.unique(expected)) == case.config.num_experts


# The sampler reads the same layers.
SAMPLED = [
  name if name == "dense_gqa2" else pytest.param(name, marks=pytest.mark.long) for name in CASES
]


@pytest.mark.parametrize("case", SAMPLED, indirect=True)
def test_greedy_continuations_are_those_of_transformers(case):
  prompts = [case.tokens[0, :9].tolist(), case.tokens[1, :4].tolist()]
  rollout = generate(
    case.params, case.config, prompts, group_size=1, max_new_tokens=NEW_TOKENS, temperature=0
  )
  sampled = set()
  for row, prompt in enumerate(prompts):
    expected = case.model.generate(
      torch.tensor([prompt]),
      attention_mask=torch.ones(1, len(prompt)),
      max_new_tokens=NEW_TOKENS,
      do_sample=False,
    )[0, len(prompt) :].tolist()
    assert rollout.response(row) == expected
    assert len(expected) == NEW_TOKENS
    sampled |= set(expected)
  assert len(sampled) > 8  # else the continuation would say little


def test_what_is_saved_opens_in_transformers(case, tmp_path):
  hf.save(tmp_path, case.params, case.config, shard_size_bytes=30_000)
  assert (tmp_path / "model.safetensors.index.json").exists()
  opened, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path,
    dtype="auto",
    output_loading_info=True,
    attn_implementation=case.model.config._attn_implementation,  # whose round-off is the same
  )
  assert type(opened) is type(case.model)
  assert opened.dtype == torch.float32
  assert not any(report.values()), report
  np.testing.assert_array_equal(hf_logits(opened, case.tokens), hf_logits(case.model, case.tokens))


def test_both_forms_of_config_json_say_the_same(case, tmp_path):
  hf.save(tmp_path, case.params, case.config)
  published = json.loads((tmp_path / "config.json").read_text())
  assert "rope_theta" in published and "rope_parameters" not in published
  experts = {"num_experts", "num_local_experts"} & published.keys()
  assert bool(experts) == (case.config.num_experts > 0)
  transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
  rewritten = json.loads((tmp_path / "config.json").read_text())
  assert "rope_parameters" in rewritten and "rope_theta" not in rewritten
  assert hf.load_config(tmp_path) == case.config


def test_bfloat16_directories(tmp_path):
  """Loaded wide, saved narrow and loaded again, a bfloat16 model is the same numbers."""
  model = random_model(CASES["moe_normalised"]()).to(torch.bfloat16)
  model.save_pretrained(tmp_path / "theirs")
  params, model_config = hf.load(tmp_path / "theirs")
  wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
  tokens = np.arange(20)[None]
  logits = jax.jit(transformer.logits, static_argnums=1)(params, model_config, tokens)
  assert_close(logits, hf_logits(wide, tokens))
  hf.save(tmp_path / "ours", params, model_config, dtype="bfloat16")
  opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
  assert opened.dtype == torch.bfloat16
  for name, p in opened.named_parameters():
    assert torch.equal(p.to(torch.float32), wide.get_parameter(name)), name
  narrow, _ = hf.load(tmp_path / "ours", dtype="bfloat16")
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype("float32"), b), narrow, params)


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6, pytest.param(1e7, marks=pytest.mark.long)])
def test_rotary_positions_of_a_long_context(theta):
  """Position 262,143 times a frequency that is off by its last bit is 0.02 radians."""
  from transformers.models.qwen3 import modeling_qwen3

  hf_config = config("Qwen3", BASE | dict(head_dim=128), theta)
  positions = np.linspace(0, 262_143, 64).astype(np.int32)[None]
  x = np.random.default_rng(0).normal(size=(1, 64, 1, 128)).astype(np.float32)
  cos, sin = modeling_qwen3.Qwen3RotaryEmbedding(hf_config)(
    torch.tensor(x), torch.tensor(positions)
  )
  heads_first = torch.tensor(x).transpose(1, 2)
  expected = modeling_qwen3.apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0]
  rotation = rotary.Rotation(1 / rotary.waves(64, theta))
  turned = jax.jit(lambda x, p: rotary.rotate(x, p, rotation))(x, positions)
  error = np.abs(turned - expected.transpose(1, 2).numpy())
  # torch's own power is a last bit off for at most one frequency in 64.
  assert (error.max(axis=(0, 1, 2)) > 1e-4).sum() <= 2
  assert error.max() < 2e-2
