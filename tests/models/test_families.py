"""Every family computes what transformers computes, from the directories that transformers writes.

A row is a tiny model that stresses its family: one key/value head, windows shorter than a prompt,
rows beyond the original context. `pytest -m families` has the rest: meshes, packing, replay.
"""

import copy
import dataclasses
import importlib
import importlib.util
import json
import math
import shutil
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402, after the skip
from support.hf_models import random_model  # noqa: E402
from support.small_models import forward, next_logp  # noqa: E402
from support.small_models import logits as jitted_logits  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from gspo_jax import sharding  # noqa: E402
from gspo_jax.learner import layout, replicas  # noqa: E402
from gspo_jax.models import hf, lora, transformer  # noqa: E402
from gspo_jax.models.attention import positions  # noqa: E402
from gspo_jax.models.hf import config as hf_config  # noqa: E402
from gspo_jax.models.hf import peft  # noqa: E402
from gspo_jax.models.params import with_adapters  # noqa: E402
from gspo_jax.sampling import generate  # noqa: E402
from gspo_jax.settings.mesh import MeshConfig  # noqa: E402
from gspo_jax.settings.model import REFERENCE  # noqa: E402
from gspo_jax.settings.sampling import EngineConfig  # noqa: E402
from gspo_jax.settings.sizes import PUBLISHED  # noqa: E402
from gspo_jax.settings.training import LoraConfig  # noqa: E402
from gspo_jax.structs import ModelInputs  # noqa: E402

LENGTH, PROMPT, NEW = 40, 12, 24
BASE = dict(
  vocab_size=64,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=1,
  max_position_embeddings=64,
  pad_token_id=0,
  bos_token_id=None,
  eos_token_id=None,
)
WIDE = dict(head_dim=16)  # Not 32 / 4.


def rope(kind, theta=1e4, **keys):
  return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta) | keys)


# Rows go well beyond the original context.
LONGER = dict(factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", 5e3, low_freq_factor=1.0, high_freq_factor=4.0, **LONGER)
TYPES = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5)
MULTIPLIERS = dict(
  embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.3, logits_scaling=0.5
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2)
LOCAL_EXPERTS = dict(num_local_experts=6, num_experts_per_tok=2)
# More value heads than key heads, values wider than keys, a convolution of 3.
LINEAR = dict(
  num_hidden_layers=4, num_attention_heads=4, head_dim=16, linear_num_key_heads=2,
  linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=12,
  linear_conv_kernel_dim=3,
)  # fmt: skip
SHARED_EXPERT = dict(moe_intermediate_size=24, shared_expert_intermediate_size=40)
CASES = {  # Name: (model_type, keys)
  "llama3": ("llama", LLAMA3 | dict(tie_word_embeddings=True)),
  "linear": ("llama", rope("linear", factor=2.5) | dict(num_key_value_heads=2)),
  "qwen2_yarn": ("qwen2", rope("yarn", **LONGER, beta_fast=4.0, beta_slow=0.5)),
  "qwen3_yarn": ("qwen3", WIDE | rope("yarn", **LONGER, attention_factor=1.3, truncate=False)),
  "mistral": ("mistral", WIDE | dict(sliding_window=None)),
  "mistral_window": (
    "mistral",
    rope("linear", factor=2.5) | dict(sliding_window=5, num_key_value_heads=2),
  ),
  "ministral3": (
    "ministral3",
    WIDE | rope("yarn", 1e3, **LONGER, mscale=1.2, mscale_all_dim=0.7, llama_4_scaling_beta=0.3),
  ),
  "smollm3": ("smollm3", dict(no_rope_layers=[1, 0])),
  "granite": ("granite", MULTIPLIERS),
  "olmoe": ("olmoe", EXPERTS | dict(num_key_value_heads=2, clip_qkv=1.0)),
  "granitemoe": ("granitemoe", MULTIPLIERS | LOCAL_EXPERTS),
  "qwen2_moe": (
    "qwen2_moe",
    EXPERTS | dict(moe_intermediate_size=24, shared_expert_intermediate_size=40),
  ),
  "glm4_moe": (
    "glm4_moe",
    WIDE
    | dict(num_experts_per_tok=3, moe_intermediate_size=24, n_routed_experts=8, n_group=4)
    | dict(topk_group=2, routed_scaling_factor=1.5, use_qk_norm=True, n_shared_experts=2),
  ),
  "gpt_oss": ("gpt_oss", WIDE | LOCAL_EXPERTS | TYPES | rope("yarn", **LONGER, truncate=False)),
  "minimax_m2": ("minimax_m2", WIDE | LOCAL_EXPERTS | rope("default", partial_rotary_factor=0.5)),
  "qwen3_next": ("qwen3_next", LINEAR | EXPERTS | SHARED_EXPERT | dict(mlp_only_layers=[1])),
  "qwen3_5": ("qwen3_5_text", LINEAR | dict(tie_word_embeddings=True)),
  "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR | EXPERTS | SHARED_EXPERT),
  "olmo2": ("olmo2", dict(num_key_value_heads=2)),
  "olmo3": (
    "olmo3",
    TYPES
    | dict(
      rope_parameters=dict(
        full_attention=dict(rope_type="yarn", rope_theta=5e5, **LONGER),
        sliding_attention=dict(rope_type="default", rope_theta=5e5),
      )
    ),
  ),
}


def config_of(name):
  model_type, keys = CASES[name]
  config = transformers.AutoConfig.for_model(model_type, **BASE | keys)
  config._attn_implementation = "eager"
  return config


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
  directory = tmp_path_factory.mktemp(request.param)
  model = random_model(config_of(request.param))
  model.save_pretrained(directory)
  params, config = hf.load(directory)
  tokens = np.random.default_rng(0).integers(1, BASE["vocab_size"], (2, LENGTH))
  return types.SimpleNamespace(
    directory=directory, model=model, params=params, config=config, tokens=tokens
  )


def response_logp(logits, tokens, log_softmax):
  """Sum of the response's log-probabilities."""
  logp = log_softmax(logits[:, PROMPT - 1 : -1])
  rows, places = np.arange(len(tokens))[:, None], np.arange(tokens.shape[1] - PROMPT)[None]
  return logp[rows, places, tokens[:, PROMPT:]].sum()


# Each kind of attention, of experts and of rotation stays; the others are long.
HYBRID = "qwen3_next", "qwen3_5", "qwen3_5_moe"
COMPARED = [
  pytest.param(name, marks=pytest.mark.long)
  if name in ("linear", "qwen2_yarn", "mistral", "qwen2_moe", *HYBRID)
  else name
  for name in CASES
]


@pytest.mark.parametrize("case", HYBRID[:2], indirect=True)
def test_logits_of_hybrids_are_those_of_transformers(case):
  """Without gradients, which compile for longer."""
  logits = jitted_logits(case.params, case.config, jnp.asarray(case.tokens))
  with torch.no_grad():
    expected = case.model(torch.tensor(case.tokens)).logits.numpy()
  assert np.abs(expected).max() > 1  # Else the tolerance would say nothing.
  assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", COMPARED, indirect=True)
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
  compare(case, case.tokens, tmp_path)


@pytest.mark.parametrize(
  "case",
  ["qwen3_5_moe", "qwen3_next", "qwen3_5"],
  indirect=True,
)
@pytest.mark.long
def test_rows_of_several_chunks(case, tmp_path):
  """A row ends within the third chunk of 64."""
  tokens = np.random.default_rng(5).integers(1, BASE["vocab_size"], (1, 150))
  compare(case, tokens, tmp_path)


def compare(case, tokens, tmp_path):
  """Compares logits, and the gradient of each tensor."""

  def loss(params):
    logits = transformer.logits(params, case.config, jnp.asarray(tokens))
    return response_logp(logits, tokens, jax.nn.log_softmax), logits

  (_, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(case.params)
  model = copy.deepcopy(case.model)
  expected = model(torch.tensor(tokens)).logits
  response_logp(expected, tokens, lambda x: torch.log_softmax(x, -1)).backward()
  expected = expected.detach().numpy()
  assert np.abs(expected).max() > 1  # Else the tolerance would say nothing.
  assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
  # Their gradients in a directory have the names of their weights, and are read as these.
  for p in model.parameters():
    p.data, p.grad = p.grad, None
  model.save_pretrained(tmp_path)
  theirs, _ = hf.load(tmp_path)

  def assert_close(path, ours, theirs):
    if path[-1].name == "choice_bias":  # Frozen; a buffer in transformers.
      assert not ours.any()
      return
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < 1e-4, (jax.tree_util.keystr(path), error)

  jax.tree.map_with_path(assert_close, gradient, theirs)


SAMPLED = ("gpt_oss",)
SAMPLED = [
  name if name in SAMPLED else pytest.param(name, marks=pytest.mark.long) for name in CASES
]


@pytest.mark.parametrize("case", SAMPLED, indirect=True)
def test_greedy_text_of_pages_is_that_of_transformers(case):
  """Responses in two slots."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    case.directory, attn_implementation="eager"
  )
  prompts = [case.tokens[0, :PROMPT].tolist(), case.tokens[1, :5].tolist(), [7, 9, 3]]
  if case.config.linear.pattern > 1:  # Shorter than the convolution.
    prompts += [[5, 2], [8]]
  engine = EngineConfig(slots=2, cache="paged", page_tokens=8)
  options = dict(group_size=1, max_new_tokens=NEW, temperature=0)
  rollout = generate(case.params, case.config, prompts, engine=engine, **options)
  sampled = set()
  for row, prompt in enumerate(prompts):
    response = rollout.response(row)
    with torch.no_grad():
      logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    assert response == logits.argmax(-1).tolist() and len(response) == NEW
    sampled |= {*response}
  assert len(sampled) > 8  # Else the text would say little.


@pytest.mark.families
def test_equal_experts_tie(case, tmp_path):
  """Experts 0 and 1 are equal: their scores tie, and either choice gives the same logits."""
  E = case.config.num_experts
  if not E:
    pytest.skip("a dense model")
  model = transformers.AutoModelForCausalLM.from_pretrained(
    case.directory, attn_implementation="eager"
  )
  with torch.no_grad():
    for name, p in model.state_dict(keep_vars=True).items():
      if ".layers." in name and len(p) == E:
        p[1] = p[0]
  model.save_pretrained(tmp_path)
  params, config = hf.load(tmp_path)
  tokens = jnp.asarray(case.tokens)
  out = jax.jit(lambda params: transformer.forward(params, config, tokens))(params)
  chosen = np.sort(out.routing_lBTk, axis=-1)
  assert (np.diff(chosen) > 0).all()  # No expert is chosen twice.
  assert ((chosen == 0).any(-1) & (chosen == 1).any(-1)).any()
  logits = transformer.head_logits(params, config, out.hidden_BTD)
  expected = model(torch.tensor(case.tokens)).logits.detach().numpy()
  assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
  "size", [(16, 1e4, 64, 4.0), (64, 5e5, 8192, 8.0), (128, 1e6, 32_768, 2.5)]
)
@pytest.mark.parametrize(
  "keys",
  [
    dict(rope_type="linear"),
    dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    dict(rope_type="llama3", low_freq_factor=0.5, high_freq_factor=8.0),
    dict(rope_type="yarn"),
    dict(rope_type="yarn", truncate=False, beta_fast=16.0, beta_slow=2.0),
    dict(rope_type="yarn", mscale=1.3, mscale_all_dim=0.8),
    dict(rope_type="yarn", attention_factor=0.7),
  ],
  ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_frequencies_are_those_of_transformers(keys, size):
  head_dim, theta, length, factor = size
  keys = keys | dict(rope_theta=theta, factor=factor)
  if keys["rope_type"] != "linear":
    keys |= dict(original_max_position_embeddings=length)
  shape = BASE | dict(head_dim=head_dim, max_position_embeddings=4 * length, rms_norm_eps=1e-6)
  theirs = transformers.LlamaConfig(**shape, rope_parameters=dict(keys))
  frequency_h, attention = ROPE_INIT_FUNCTIONS[keys["rope_type"]](theirs, device="cpu")
  raw = theirs.to_dict() | dict(model_type="llama", rope_parameters=dict(keys))
  rotation = positions.rotation_of(hf_config._from_hf(raw), local=False)
  np.testing.assert_allclose(rotation.frequency_h, frequency_h.numpy(), rtol=1e-6)
  assert rotation.factor == pytest.approx(attention, rel=1e-12)


def scaled(kind, **keys):
  return dict(rope_scaling=dict(rope_type=kind, factor=4.0) | keys, rope_theta=1e4)


BESIDE = dict(original_max_position_embeddings=16)  # A key beside the object of the rule.
INSIDE = dict(original_max_position_embeddings=640)
FREQUENCIES = dict(low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
  "model_type, keys",
  [
    ("gpt_oss", WIDE | LOCAL_EXPERTS | TYPES),
    ("gpt_oss", WIDE | LOCAL_EXPERTS | TYPES | dict(rope_theta=1e3, rope_scaling=None)),
    ("gpt_oss", WIDE | LOCAL_EXPERTS | TYPES | rope("default", 1e3)),
    ("gpt_oss", WIDE | LOCAL_EXPERTS | TYPES | scaled("yarn", **BESIDE)),
    ("llama", BESIDE | scaled("yarn")),
    ("llama", BESIDE | scaled("yarn", **INSIDE)),
    ("llama", BESIDE | scaled("llama3", **FREQUENCIES)),
    ("llama", dict(original_max_position_embeddings=None) | scaled("yarn", **BESIDE)),
    ("llama", scaled("yarn", finetuned=True, **BESIDE)),
    ("olmo3", TYPES | BESIDE | scaled("yarn", **INSIDE)),
  ],
)
def test_frequencies_of_a_file_are_those_of_transformers(model_type, keys):
  """Also of a new file for the same model."""
  raw = BASE | dict(model_type=model_type, rms_norm_eps=1e-6) | keys
  config = hf_config._from_hf(raw)
  rotation = positions.rotation_of(config, local=False)
  for content in (raw, hf_config.to_hf(config, "float32")):
    if content.get("original_max_position_embeddings", 0) is None:
      continue  # transformers cannot compute with it.
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(content))
    module = transformers.AutoModel.from_config(theirs).rotary_emb
    kind = "full_attention_" if model_type == "olmo3" else ""
    frequency_h = getattr(module, f"{kind}inv_freq").numpy()
    np.testing.assert_allclose(rotation.frequency_h, frequency_h, rtol=1e-6)
    assert rotation.factor == pytest.approx(getattr(module, f"{kind}attention_scaling"), rel=1e-12)


CONTEXT = "max_position_embeddings"
SIZES = {  # Named size: model_type, and published keys beside the defaults of transformers' class.
  "gpt-oss-120b": ("gpt_oss", {}),
  "gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
  "GLM-4.5-Air": (
    "glm4_moe",
    dict(attention_bias=True, head_dim=128) | rope("default", 1e6, partial_rotary_factor=0.5),
  ),
  "MiniMax-M2": ("minimax_m2", dict(rotary_dim=64)),
  "OLMoE-1B-7B-0924": ("olmoe", dict(intermediate_size=1024)),
  "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {CONTEXT: 8192} | rope("default", 1e6)),
  "SmolLM3-3B": ("smollm3", {CONTEXT: 65_536} | rope("default", 5e6)),
  "Mixtral-8x7B-v0.1": ("mixtral", {CONTEXT: 32_768}),
  "Qwen3.5-9B": ("qwen3_5_text", {CONTEXT: 262_144} | rope("default", 1e7)),
  "Qwen3.5-27B": (
    "qwen3_5_text",
    {CONTEXT: 262_144}
    | dict(hidden_size=5120, intermediate_size=17_408, num_hidden_layers=64)
    | dict(num_attention_heads=24, linear_num_value_heads=48)
    | rope("default", 1e7),
  ),
  "Qwen3.5-35B-A3B": ("qwen3_5_moe_text", {CONTEXT: 262_144} | rope("default", 1e7)),
  "Qwen3-Next-80B-A3B-Instruct": (
    "qwen3_next",
    {CONTEXT: 262_144} | dict(intermediate_size=5120) | rope("default", 1e7),
  ),
  "Mistral-7B-v0.3": (
    "mistral",
    {CONTEXT: 32_768}
    | dict(vocab_size=32_768, rms_norm_eps=1e-5, sliding_window=None)
    | rope("default", 1e6),
  ),
}


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_are_those_of_transformers(name):
  model_type, keys = SIZES[name]
  raw = transformers.AutoConfig.for_model(model_type, **keys).to_dict()
  assert hf_config._from_hf(raw) == PUBLISHED[name]


def tensors(directory):
  return {k: v for path in directory.glob("*.safetensors") for k, v in load_file(path).items()}


def test_a_directory_is_written_as_it_was_read(case, tmp_path):
  hf.save(tmp_path, case.params, case.config)
  before, after = tensors(case.directory), tensors(tmp_path)
  assert before.keys() == after.keys()
  for name, array in before.items():
    np.testing.assert_array_equal(after[name], array, err_msg=name)
  assert hf.load_config(tmp_path) == case.config
  theirs, ours = (
    transformers.AutoConfig.from_pretrained(x).to_dict() for x in (case.directory, tmp_path)
  )
  ropes = [config.pop("rope_parameters") for config in (theirs, ours)]
  without = {"_name_or_path", "use_cache"} | {key for key in ours if key.endswith("token_id")}
  assert {k: ours[k] for k in theirs if k not in without} == {
    k: v for k, v in theirs.items() if k not in without
  }
  # Most defaults are left out. vLLM needs the two of YaRN, and has its own key for a factor.
  yarn = dict(beta_fast=32.0, beta_slow=1.0)
  theirs, ours = (x if isinstance(next(iter(x.values())), dict) else dict(all=x) for x in ropes)
  for kind, rope in ours.items():
    rope.pop("attn_factor", None)
    assert rope.items() <= (yarn | theirs[kind]).items()


EXACT = ("e_score_correction_bias", "A_log", "dt_bias", "linear_attn.norm.weight")


@pytest.mark.parametrize("case", ["glm4_moe", "minimax_m2", "qwen3_5_moe"], indirect=True)
def test_weights_that_rounding_would_change_are_float32_in_every_file(case, tmp_path):
  hf.save(tmp_path, case.params, case.config, dtype="bfloat16")
  saved = tensors(tmp_path)
  exact = {name for name, array in saved.items() if array.dtype == np.float32}
  assert exact == {name for name in saved if name.endswith(EXACT)}
  assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
  read, _ = hf.load(tmp_path, dtype=jnp.bfloat16)
  hf.save(tmp_path / "again", read, case.config)
  assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "bfloat16"
  for name, array in tensors(tmp_path / "again").items():
    assert array.dtype == saved[name].dtype
    np.testing.assert_array_equal(array, saved[name])


NORMS = dict(qwen3=("qwen3", "Qwen3"), olmo=("olmo2", "Olmo2"), gpt_oss=("gpt_oss", "GptOss"))


@pytest.mark.parametrize("family", NORMS)
def test_norms_round_as_those_of_transformers(family):
  module, prefix = NORMS[family]
  module = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
  theirs = getattr(module, f"{prefix}RMSNorm")(256, eps=1e-6)
  rng = np.random.default_rng(0)
  x, scale = rng.normal(size=(64, 256)), 1 + 0.3 * rng.normal(size=256)
  theirs.weight.data = torch.tensor(scale).bfloat16()
  expected = theirs(torch.tensor(x).bfloat16()).detach().float().numpy()
  norm = importlib.import_module(f"gspo_jax.models.families.{family}").FAMILY.norm
  ours = norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale, jnp.bfloat16), 1e-6)
  np.testing.assert_array_equal(ours.astype(jnp.float32), expected)


@pytest.mark.parametrize("case", ["minimax_m2"], indirect=True)
def test_fused_experts_of_minimax_and_keys_for_vllm(case, tmp_path):
  case.model.save_pretrained(tmp_path / "in", save_original_format=False)
  assert not any("block_sparse_moe" in name for name in tensors(tmp_path / "in"))
  jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "in")[0], case.params)
  hf.save(tmp_path / "out", case.params, case.config)
  raw = json.loads((tmp_path / "out/config.json").read_text())
  assert (raw["scoring_func"], raw["use_routing_bias"]) == ("sigmoid", True)
  (tmp_path / "out/config.json").write_text(json.dumps(raw | dict(scoring_func="softmax")))
  with pytest.raises(ValueError, match="scoring_func='softmax' is not supported"):
    hf.load_config(tmp_path / "out")


def loss(params, config, tokens, **options):
  hidden_BTD = transformer.forward(params, config, tokens, **options).hidden_BTD[:, :-1]
  logp = transformer.token_logp(params, config, hidden_BTD, tokens[:, 1:])[0]
  return -logp.mean()


def rounding(config):
  """Tolerance of two orders of summation; sums of decayed states round more."""
  return 1e-4 if config.linear.pattern > 1 else 2e-5


def compare_with_one_device(case, step, copies, sizes):
  """Compares a jitted step's loss and gradient on a mesh with those on one device."""
  config, tokens = case.config, np.tile(case.tokens, (copies, 1))
  expected, gradient = step(case.params, jnp.asarray(tokens))
  mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[: math.prod(sizes)])
  with jax.set_mesh(mesh):
    layout = transformer.shardings(config, sharding.TRAIN, mesh)
    value, sharded = step(jax.device_put(case.params, layout), sharding.put_batch(tokens, mesh))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
  atol = rounding(config) * largest
  chex.assert_trees_all_close(jax.device_get(sharded), gradient, atol=atol, rtol=0)


@pytest.mark.families
def test_eight_devices_compute_what_one_does(case):
  config = case.config
  step = jax.jit(jax.value_and_grad(lambda p, t: loss(p, config, t)))
  tensor = 2 if config.num_kv_heads % 2 == 0 else 1
  expert = 2 if config.num_experts else 1
  compare_with_one_device(case, step, 4, (8 // (2 * tensor * expert), 2, expert, tensor))


@pytest.mark.families
def test_replicas_compute_what_one_device_does(case):
  """Each has the gradient of its rows, and the gradients are summed once."""

  @jax.jit
  def step(params, tokens):
    value, gradient = jax.value_and_grad(loss)(replicas.apart(params), case.config, tokens)
    return value, replicas.summed(gradient)

  compare_with_one_device(case, step, 2, (2, 1, 1, 1))


@pytest.mark.families
def test_packed_segments_are_separate_rows(case):
  first, second = case.tokens[:, :17], case.tokens[:, 17:]
  lengths = first.shape[1], second.shape[1]
  segments, positions = (
    np.repeat(np.concatenate(x)[None], 2, 0).astype(np.int32)
    for x in ([np.full(n, i + 1) for i, n in enumerate(lengths)], [np.arange(n) for n in lengths])
  )
  packed = forward(
    case.params, case.config, case.tokens, segments=jnp.asarray(segments),
    positions=jnp.asarray(positions),
  ).hidden_BTD  # fmt: skip
  apart = [forward(case.params, case.config, part).hidden_BTD for part in (first, second)]
  np.testing.assert_allclose(packed, np.concatenate(apart, 1), atol=rounding(case.config))


@pytest.mark.families
def test_scores_are_the_samplers_log_probs(case):
  prompts = [case.tokens[0, :PROMPT].tolist(), [7, 9, 3]]
  engine = EngineConfig(cache="paged", page_tokens=8)
  rollout = generate(
    case.params, case.config, prompts, group_size=2, max_new_tokens=NEW, engine=engine
  )
  scores = next_logp(case.params, case.config, rollout.tokens)
  mask = rollout.mask[:, 1:] > 0
  np.testing.assert_allclose(scores[mask], rollout.logp[:, 1:][mask], atol=2e-5)


@pytest.mark.families
def test_replay_gives_the_gates_of_the_router(case):
  """The router's own experts change nothing; others change the output, not their choice."""
  if not case.config.num_experts:
    pytest.skip("no experts")
  out = forward(case.params, case.config, case.tokens)
  again = forward(case.params, case.config, case.tokens, routing=out.routing_lBTk)
  np.testing.assert_allclose(again.hidden_BTD, out.hidden_BTD, atol=1e-6)
  others = (out.routing_lBTk + 1) % case.config.num_experts
  changed = forward(case.params, case.config, case.tokens, routing=others)
  np.testing.assert_array_equal(changed.routing_lBTk, others)
  assert np.abs(changed.hidden_BTD - out.hidden_BTD).max() > 0.1


@pytest.mark.families
def test_prompts_shared_by_a_tree_change_no_hidden_state(case):
  """Four responses in two groups; a window reaches from a branch into its trunk."""
  prompts, group = (7, PROMPT), 2
  tokens = np.random.default_rng(1).integers(1, BASE["vocab_size"], (4, LENGTH)).astype(np.int32)
  for i, length in enumerate(prompts):
    tokens[2 * i + 1, :length] = tokens[2 * i, :length]
  prompt_B = np.repeat(np.array(prompts, np.int32), group)
  segments = np.arange(LENGTH)[None] < prompt_B[:, None] + LENGTH - PROMPT - 1
  inputs = ModelInputs(
    tokens_BT=jnp.asarray(tokens),
    segments_BT=jnp.asarray(segments, jnp.int32),
    prompt_B=jnp.asarray(prompt_B),
  )

  @jax.jit
  def both(params):
    rows = layout.trees(inputs, group, LENGTH - PROMPT)
    out = layout.forward(params, rows, case.config, REFERENCE).hidden_BTD
    plain = layout.forward(params, layout.plain(inputs), case.config, REFERENCE).hidden_BTD
    return layout.by_sequence(out, rows), plain

  shared, plain = both(case.params)
  assert layout.trees(inputs, group, LENGTH - PROMPT).tree is not None
  np.testing.assert_allclose(shared[segments], plain[segments], atol=2e-5)


@pytest.mark.families
@pytest.mark.parametrize("case", ["olmo2", "olmoe"], indirect=True)
def test_adapters_of_a_dense_and_of_a_sparse_family(case, tmp_path):
  """Logits are those of W + 4 B A of PEFT's files, in transformers and, if installed, in PEFT."""
  config, generator = LoraConfig(rank=3, alpha=12.0), np.random.default_rng(2)
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])

  def adapted(config, size):
    with jax.set_mesh(mesh):
      params = with_adapters(case.params, case.config, config, "float32", mesh, seed=1)
      trained, frozen = lora.split(params)
      noisy = jax.tree.map(lambda x: x + size * generator.normal(size=x.shape), trained)
      return lora.join(jax.tree.map(lambda x: x.astype(jnp.float32), noisy), frozen)

  params, adapter = adapted(config, 0.1), tmp_path / "adapter"
  peft.save(adapter, params, case.config, config, base=str(case.directory))
  loaded = adapted(dataclasses.replace(config, adapter=str(adapter)), 0)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  matrices, summed = load_file(adapter / "adapter_model.safetensors"), tensors(case.directory)
  for a in (name for name in matrices if name.endswith("lora_A.weight")):
    weight = a.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
    product = matrices[a.replace("lora_A", "lora_B")].astype(float) @ matrices[a]
    summed[weight] = (summed[weight] + 12 / 3 * product).astype(np.float32)
  shutil.copytree(case.directory, tmp_path / "summed")
  save_file(summed, tmp_path / "summed" / "model.safetensors", dict(format="pt"))
  auto, options = transformers.AutoModelForCausalLM, dict(attn_implementation="eager")
  models = [auto.from_pretrained(tmp_path / "summed", **options)]
  if importlib.util.find_spec("peft"):
    import peft as theirs

    base = auto.from_pretrained(case.directory, **options)
    models.append(theirs.PeftModel.from_pretrained(base, adapter))
  merged = jax.tree.map(jnp.asarray, jax.device_get(lora.materialize(params, jnp.dtype("float32"))))
  tokens = jnp.asarray(case.tokens)
  logits = transformer.logits(merged, case.config, tokens)
  assert np.abs(logits - transformer.logits(case.params, case.config, tokens)).max() > 0.1
  for model in models:
    with torch.no_grad():
      expected = model(torch.tensor(case.tokens)).logits.numpy()
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


VISION = dict(
  hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=14,
  patch_size=7,
)  # fmt: skip
NESTED = {  # Outer model_type: (model_type, keys of the language model, keys of the outer model)
  "gemma3": (
    "gemma3_text",
    WIDE
    | TYPES
    | dict(
      query_pre_attn_scalar=20,
      rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
      ),
    ),
    dict(vision_config=VISION, mm_tokens_per_image=4),
  ),
  "mistral3": (
    "mistral",
    WIDE | dict(sliding_window=None),
    dict(vision_config=VISION | dict(model_type="pixtral"), tie_word_embeddings=False),
  ),
}


@pytest.mark.parametrize("outer", NESTED)
def test_a_language_model_inside_another_model(outer, tmp_path):
  model_type, keys, more = NESTED[outer]
  text = BASE | keys | dict(model_type=model_type)
  theirs = transformers.AutoConfig.for_model(outer, text_config=text, **more)
  theirs._attn_implementation = "eager"
  model = random_model(theirs, kind=transformers.AutoModelForImageTextToText)
  model.save_pretrained(tmp_path / "in")
  params, config = hf.load(tmp_path / "in")
  tokens = np.random.default_rng(0).integers(1, BASE["vocab_size"], (2, LENGTH))
  with torch.no_grad():
    expected = model(input_ids=torch.tensor(tokens)).logits.numpy()
  logits = jitted_logits(params, config, jnp.asarray(tokens))
  assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
  hf.save(tmp_path / "out", params, config, like=str(tmp_path / "in"))
  before, after = (tensors(tmp_path / name) for name in ("in", "out"))
  assert before.keys() == after.keys() and any("vision" in name for name in before)
  for name, array in before.items():
    np.testing.assert_array_equal(after[name], array, err_msg=name)
  configs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out"))
  assert next(configs) == next(configs)
  hf.save(tmp_path / "alone", params, config)
  assert hf.load_config(tmp_path / "alone") == config


def test_layers_of_multi_token_prediction_are_written_back(tmp_path):
  model = random_model(config_of("glm4_moe"))
  model.save_pretrained(tmp_path)
  path = tmp_path / "model.safetensors"
  before = load_file(path) | {"model.layers.2.eh_proj.weight": np.arange(6.0).reshape(2, 3)}
  save_file(before, path)
  params, config = hf.load(tmp_path)
  hf.save(tmp_path / "out", params, config, like=str(tmp_path))
  after = tensors(tmp_path / "out")
  assert before.keys() == after.keys()
  np.testing.assert_array_equal(
    after["model.layers.2.eh_proj.weight"], np.arange(6.0).reshape(2, 3)
  )
  assert hf.load(tmp_path / "out")[1] == config
  with pytest.raises(hf.CheckpointError, match="1 tensors belong to no parameter: model"):
    save_file(before | {"model.layers.3.eh_proj.weight": np.ones(2)}, path)
    hf.load(tmp_path)


def test_nested_models_are_refused_by_name(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gemma3")))
  with pytest.raises(hf.CheckpointError, match="model_type='gemma3' has no text_config"):
    hf.load_config(tmp_path)
  text = dict(model_type="gemma3_text", hidden_activation="gelu")
  content = dict(model_type="gemma3", text_config=text)
  (tmp_path / "config.json").write_text(json.dumps(content))
  with pytest.raises(hf.CheckpointError, match="hidden_activation='gelu'"):
    hf.load_config(tmp_path)
