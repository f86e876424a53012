"""The command line before anything runs: --help, configurations by name, --dry_run."""

import dataclasses
import re
import signal
import sys
import time
import types
from pathlib import Path

import jax
import pytest
from support.command_line import (
  ROOT,
  SMALL,
  SMALL_MODEL,
  called,
  command,
  forked_modules,
  started,
)
from support.configs import config_of

import gspo_jax
from configs import common, moe_aime, tiny, tiny_ppo
from gspo_jax.aot import plan
from gspo_jax.cli import before_jax
from gspo_jax.inputs import read_inputs
from gspo_jax.models import hf, transformer
from gspo_jax.settings.sizes import tiny_moe


def run_module(*arguments, module="gspo_jax.main", **more):
  return called([sys.executable, "-m", module, *arguments], **more)


@pytest.fixture(scope="module")
def run_forked(tmp_path_factory):
  with forked_modules(tmp_path_factory.mktemp("forked")) as run:
    yield run


FILES = {path.stem for path in (ROOT / "configs").glob("[!_]*.py")} - {"common"}


def test_help_names_the_configurations_and_the_keys_with_their_reasons(tmp_path):
  done = run_module("--help", cwd=tmp_path)
  assert done.returncode == 0 and not done.stderr
  for name in FILES:
    assert re.search(rf"^  {name} +[A-Z]", done.stdout, re.MULTILINE)
  assert "Hardware: any machine with two CPU cores; two to five minutes" in done.stdout
  assert "Also: tiny:gemma, tiny:hybrid\n" in done.stdout
  assert "rl.group_size=8               G, number of responses per prompt" in done.stdout
  assert all(len(line) <= 100 for line in done.stdout.splitlines() if "/" not in line)


def test_the_package_is_a_command_and_names_its_version(tmp_path):
  for module in "gspo_jax", "gspo_jax.main":
    done = run_module("--version", module=module, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"gspo_jax {gspo_jax.__version__}\n"), done.stderr


def test_help_needs_no_library_but_jax():
  code = """
import sys, jax.numpy
before = {name.split(".")[0] for name in sys.modules}
from gspo_jax.cli import before_jax
before_jax.usage()
print(*{name.split(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
"""
  done = called([sys.executable, "-c", code])
  assert done.stdout.split() == ["gspo_jax"], done.stderr


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_while_it_is_being_opened_ends_at_once(number, code, tmp_path):
  """Opening takes minutes, and schedulers go by the exit code."""
  process = started(command(tmp_path, *SMALL))
  assert "loading JAX" in process.stderr.readline()
  process.send_signal(number)
  assert process.wait(30) == code
  message = "ended; the same command continues from the files on disk\n"
  assert process.stderr.read().endswith(f": {message}")


@pytest.mark.usefixtures("hangups")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks up which signals are caught")
@pytest.mark.parametrize(
  "module",
  [
    *(f"gspo_jax.{name}" for name in ("export", "replay", "report", "aot", "settings.page")),
    "experiments.run",
  ],
)
def test_every_command_ends_at_ctrl_c_with_one_line(module, tmp_path):
  if module == "experiments.run":
    pytest.importorskip("matplotlib")  # Without the extra `experiments` it says so first.
  process = started([sys.executable, "-m", module, "--config=tiny", str(tmp_path)])
  while not caught(process.pid) & 1 << (signal.SIGHUP - 1):  # A thread has them from then on.
    assert process.poll() is None
    time.sleep(0.001)
  process.send_signal(signal.SIGINT)
  stdout, stderr = process.communicate(timeout=30)
  assert process.returncode == 130 and not stdout
  assert re.fullmatch(r"gspo_jax: Ctrl-C: ended.*\n", stderr), stderr


def caught(pid):
  """Returns a process's handled signals, as bits."""
  return int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


def test_a_configuration_is_found_by_its_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert set(before_jax.config_names()) == FILES
  path = str(before_jax.CONFIGS / "tiny.py")
  assert before_jax.config_path("tiny") == path
  assert before_jax.config_path("tiny:gemma") == f"{path}:gemma"
  for other in "tiny.py", "configs/tiny.py", "nowhere", "./tiny", "":
    assert before_jax.config_path(other) == other
  argv = ["main", "--config=tiny", "--config.seed=1", "--config", "tiny", "tiny", "--workdir=tiny"]
  assert before_jax.resolve_config_flags(argv) == [
    "main", f"--config={path}", "--config.seed=1", "--config", path, "tiny", "--workdir=tiny",
  ]  # fmt: skip
  (tmp_path / "tiny").touch()  # a file of that name goes first
  assert before_jax.config_path("tiny") == "tiny"


def test_the_configurations_need_no_checkout():
  """They are installed as gspo_jax.configs, without `configs`."""
  for path in before_jax.CONFIGS.glob("*.py"):
    assert not re.search(r"^\s*(from|import) configs\b", path.read_text(), re.MULTILINE), path


def test_the_first_lines_say_what_is_begun_and_what_it_takes(tmp_path):
  start, takes = before_jax.greeting(["--config=tiny", "--workdir=/x", "--config.seed=1"]).split(
    "\n", 1
  )
  assert start.startswith("gspo_jax: tiny in /x; loading JAX")
  assert takes == "gspo_jax: tiny is for: any machine with two CPU cores; two to five minutes\n"
  for lacking in ["--config=tiny"], ["--workdir=x"], ["--config=a", "--workdir=b", "--dry_run"]:
    assert before_jax.greeting(lacking) == ""
  (tmp_path / "a(.py").write_text("def get_config(: not Python\n")
  for name in "moe_aime:tiny", str(tmp_path / "a(.py"):
    assert before_jax.greeting([f"--config={name}", "--workdir=x"]).count("\n") == 1


def test_a_wrong_command_line_is_told_before_anything_is_loaded(capsys, monkeypatch):
  monkeypatch.setattr(before_jax.stops, "begin", str)  # the signals of the tests stay theirs
  assert "there is no file" in before_jax.first_error([f"--config={'x' * 300}"])
  for right in ["--config=tiny", "--dry_run"], ["--config", "tiny"], ["--helpfull"]:
    assert before_jax.first_error(right) == ""
  assert before_jax.first_error([]).startswith("--config must be given: ")
  with pytest.raises(SystemExit, match="2"):
    before_jax.begin(["main", "--config=tinny:gemma", "--workdir=x"])
  message = capsys.readouterr().err
  assert re.fullmatch(
    r"gspo_jax: --config=tinny:gemma: there is no file 'tinny'; did you mean tiny\?\n", message
  )


def test_a_similar_path_of_a_configuration_is_suggested(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "mine.py").touch()
  (tmp_path / "wheel").mkdir()  # Near "nowhere", but no configuration.
  assert "; names: " in before_jax.missing_file("nowhere")
  for name, near in ("own/mime.py", "own/mine.py"), ("confgs/tinny.py:x", "tiny"):
    assert before_jax.missing_file(name).endswith(f"; did you mean {near}?")


def test_what_a_configuration_says_of_itself():
  summary, hardware, variants = before_jax.describe(before_jax.CONFIGS / "gsm8k.py")
  assert summary.endswith("on one chip.") and "v5e (16 GiB)" in hardware
  assert variants == ["0.6B-v5e", "tiny"]
  _, _, variants = before_jax.describe(before_jax.CONFIGS / "tiny_schedules.py")
  assert variants == ["length", "groups", "growing"]
  for name in FILES:  # The help needs it.
    assert before_jax.describe(before_jax.CONFIGS / f"{name}.py")[1], name


@pytest.mark.parametrize(
  "module, extra",
  [
    *((f"gspo_jax.{name}", "train") for name in ("main", "export", "replay", "report", "aot")),
    ("experiments.run", "experiments"),
  ],
)
def test_libraries_that_are_missing_are_one_line_that_names_the_extra(module, extra):
  done = called([sys.executable, "-S", "-m", module])  # without site-packages
  message = (
    rf"gspo_jax: absl, flax, .* not found: run pip install '\.\[{extra}\]' in the checkout\n"
  )
  assert done.returncode == 2 and re.fullmatch(message, done.stderr), done.stderr


def parameters(overrides):
  changes = dict(flag.split("=") for flag in overrides)
  model = config_of(tiny.get_config, **{key: int(value) for key, value in changes.items()}).model
  params = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_a_dry_run_tells_what_a_run_would_be_and_leaves_nothing(tmp_path):
  (tmp_path / "here").mkdir()
  flags = [f"--config.{flag}" for flag in SMALL]
  done = run_module(
    "--config=tiny", "--dry_run", f"--workdir={tmp_path / 'run'}", *flags,
    cwd=tmp_path / "here", XDG_CACHE_HOME=str(tmp_path / "cache"),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert [path.name for path in tmp_path.rglob("*")] == ["here"]
  for line in (
    "rl.group_size: 8 -> 4",
    "data: 793,893 prompts, 8 held-out problems",
    "first problem, 100+100, a prompt of 8 tokens:\n  | 100+100=\n  its answer: 200\n"
    "  reward of this answer as the response: 1; of an empty response: 0\n",
    "in an update: ",
    "while it samples: ",
    "cold start: at most 8 updates of 16 demonstrations, 288 tokens with padding",
    "iterations: 8, each of 32 responses (8 prompts x 4), at most 320 tokens, and 4 updates",
    "operations/s, measured with a large matrix product",
  ):
    assert line in done.stdout
  first = f"model: {parameters(SMALL_MODEL):,} parameters, "
  assert done.stdout.startswith(first) and "of the family qwen3\n" in done.stdout
  assert "rl.minibatches" not in done.stdout, "it is as in the base"


def test_a_dry_run_refuses_what_a_run_refuses(run_forked, tmp_path):
  flags = ["--config=tiny", "--dry_run", "--config.mesh.fsdp=3", "--config.mesh.data=1"]
  done = run_forked("gspo_jax.main", *flags, cwd=tmp_path)
  assert done.returncode == 2 and not done.stdout
  assert re.fullmatch(r"gspo_jax: .*mesh\.fsdp=3.*\n", done.stderr)
  (tmp_path / "config.json").write_text('{"seed": 1}')
  with pytest.raises(ValueError, match="belongs to a run of another configuration"):
    read_inputs(config_of(tiny.get_config), tmp_path)


@pytest.mark.parametrize(
  "topology, message",
  [
    (
      "v5p:2x2x2",
      r"devices: 8 x TPU v5p \(data 8 .*\n(.*\n)*memory .* of 95\.0 GiB\n"
      r"(.*\n)*.* --topology=v5p:2x2x2 .*\[tpu\]",
    ),
    pytest.param(
      "h100:1",
      r"devices: 1 x NVIDIA H100 .*\n(.*\n)*memory .* of 72\.8 GiB\n"
      r"(.*\n)*.* --topology=h100:1 .*\[aot-cuda\]",
      marks=pytest.mark.long,
    ),
    (
      "h100:1 --config.rl.prompts=200000",
      r"GiB; too much: raise rl\.microbatches .*\n(.*\n)*.* GiB; too much: lower engine\.slots or",
    ),
    ("v5p:4x4x12", "do not divide over"),
    ("v5e:3x3", "--topology=v5e:3x3: a side of a slice is 1, 2, or a multiple of 4"),
    ("h100", "--topology=h100: write the number of GPUs, such as h100:8"),
    ("v5p:9", "--topology=v5p:9: write the sides of the slice in chips, such as v5p:4x4x2"),
  ],
)
def test_a_dry_run_takes_the_devices_of_a_topology(topology, message, run_forked, tmp_path):
  flags = ["--config=tiny", "--dry_run", "--config.distributed=True"]
  flags += f"--topology={topology}".split()
  done = run_forked("gspo_jax.main", *flags, cwd=tmp_path)
  assert re.search(message, done.stdout + done.stderr), done.stderr
  assert "only process" not in done.stderr


SIZES = {
  "the weights'": ("tiny", [], "model.hidden_size: 128 -> 8"),
  "a flag that agrees": ("tiny", ["model.num_layers=1"], "model.num_layers: 4 -> 1"),
  "a flag": ("tiny", ["model.num_layers=2"], "model.num_layers=2 and not 1. Set these"),
  "a variant": ("tiny:gemma", [], "model.family='gemma' and not 'qwen3'"),
}


@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=pytest.mark.long) if case == "a flag that agrees" else case
    for case in SIZES
  ],
)
def test_the_weights_say_the_model_unless_a_flag_or_a_variant_does(case, run_forked, tmp_path):
  config, changes, message = SIZES[case]
  model = dataclasses.replace(tiny_moe(264), num_layers=1, hidden_size=8)
  hf.save(tmp_path / "weights", transformer.init(model, jax.random.key(0)), model)
  changes = [f"--config.{key}" for key in ["weights=weights", "tokenizer=bytes", *changes]]
  flags = [f"--config={config}", "--dry_run", "--topology=h100:1"]  # no rate to be measured
  done = run_forked("gspo_jax.main", *flags, *changes, cwd=tmp_path)
  assert message in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize(
  "workdir, message",
  [
    ("gs://bucket/run", r"--workdir=gs://bucket/run: .* set --config\.checkpoint\.directory="),
    ("--dry_run", "--workdir=--dry_run: that is a flag"),
    ("~nouser/run", r"--workdir=~nouser/run: .*directory\. Write an absolute"),
    ("/", "--workdir=/: this is the root of the file system; set a directory below it"),
  ],
)
def test_a_workdir_that_is_none_is_refused(workdir, message, run_forked, tmp_path):
  done = run_forked("gspo_jax.main", "--config=tiny", f"--workdir={workdir}", cwd=tmp_path)
  assert done.returncode == 2 and re.search(message, done.stderr), done.stderr
  assert "Traceback" not in done.stderr
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("module", ["gspo_jax.main", "gspo_jax.aot"])
def test_a_file_of_flags_that_cannot_be_read_is_one_line(module, run_forked, tmp_path):
  (tmp_path / "bytes").write_bytes(b"\xff")
  for name, why in ("missing", "No such file"), (".", "Is a directory"), ("bytes", "decode byte"):
    done = run_forked(module, f"--flagfile={name}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert re.match(f"gspo_jax: --flagfile={name}: .*{why}", done.stderr), done.stderr


def test_a_dump_of_nowhere_is_one_line(run_forked, tmp_path):
  done = run_forked("gspo_jax.replay", "foo://x", cwd=tmp_path)
  assert done.returncode == 2 and "Traceback" not in done.stderr
  assert "foo://x: foo:// is not supported" in done.stderr


def test_the_compilers_help_is_no_error(run_forked, tmp_path):
  done = run_forked("gspo_jax.aot", "--help", cwd=tmp_path)
  assert done.returncode == 0 and "--topology" in done.stdout, done.stderr


def test_the_compiler_says_what_is_wrong_in_one_line(run_forked, tmp_path):
  for flags, message in (
    (["--config=tinny"], "tinny"),
    (["--config=tiny", "--config.rl.promts=3"], r"rl\.promts.*prompts"),
    (["--config=tiny", f"--json={tmp_path}/none/x.json"], "none is no directory"),
    (
      ["--config=tiny", "--search", "--programs=publish"],
      r"publish: --search finds settings for .*decode",
    ),
    *(
      (["--config=tiny", f"--{name}=-1"], f"--{name}=-1: -1 is not a non-negative integer")
      for name in "sequences length slots mean_response mean_prompt".split()
    ),
    *(
      (["--config=tiny", f"--{name}=0"], f"--{name}=0: 0 is not a positive integer")
      for name in ("slices", "tries")
    ),
    (["--config=eval_suite"], r"job='eval' has no iterations, .*--dry_run --topology"),
    (["--config=tiny", "--config.rollout_mesh.fsdp=2"], r"rollout_mesh=\{.*'fsdp': 2.*=train,"),
  ):
    done = run_forked("gspo_jax.aot", *flags, cwd=tmp_path)
    assert done.returncode and re.search(message, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr


REFUSED = {
  r"checkpoint\.directory=foo://x: foo:// is not supported": {"checkpoint__directory": "foo://x"},
  r"checkpoint\.directory=/dev/null/ck: /dev/null is not a directory": {
    "checkpoint__directory": "/dev/null/ck",
  },
  r"weights=foo://x: foo:// is not supported": {"weights": "foo://x"},
  r"^tokenizer=foo://x: foo:// is not supported": {"tokenizer": "foo://x"},
  r"data\.eval=foo://x: foo:// is not supported": {"data__eval": "foo://x"},
  r"engine\.server\.directory=gs://x: servers read it as a local": {
    "engine__name": "server", "engine__urls": ("http://127.0.0.1:1",),
    "engine__server__directory": "gs://x",
  },
  r"engine\.server\.directory=~/x: servers .*; write an absolute path that all": {
    "engine__name": "server", "engine__urls": ("http://127.0.0.1:1",),
    "engine__server__directory": "~/x",
  },
  r"checkpoint\.directory=ck: write an absolute path": {"checkpoint__directory": "ck"},
  r"checkpoint\.directory=.*run/ck lies in the workdir": {"checkpoint__directory": "HERE/run/ck"},
  r"reward\.per_line=True: reward\.name='arithmetic' scores whole": {
    "reward__per_line": True, "objective__name": "gspo_token",
  },
  r"reward\.workers=-1 must be at least 0": {"reward__workers": -1},
  r"eval\.benchmarks\.one: the problem .* has no numeric rating": {
    "eval__benchmarks__one__data": "arithmetic:heldout", "eval__benchmarks__one__rating": True,
  },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_refused_before_a_run_begins(tmp_path, message):
  def get_config():
    config = tiny.get_config()
    config.eval.benchmarks.one = common.benchmark(1)
    return config

  changes = REFUSED[message]
  directory = changes.get("checkpoint__directory", "").replace("HERE", str(tmp_path))
  changes = changes | ({"checkpoint__directory": directory} if directory else {})
  with pytest.raises(ValueError, match=message):
    read_inputs(config_of(get_config, **changes), tmp_path / "run")


@pytest.mark.parametrize("name, remark", [("own:seven", True), ("code", False)])
def test_a_dry_run_remarks_on_a_function_with_one_reward_for_all(name, remark):
  prompt = types.SimpleNamespace(id="1", tokens=[65], answer="2")
  inputs = types.SimpleNamespace(
    config=types.SimpleNamespace(reward=types.SimpleNamespace(name=name, threshold=1.0)),
    data=types.SimpleNamespace(main_prompts=[prompt]),
    trial=None,
    tokenizer=types.SimpleNamespace(token_bytes=lambda: {65: b"A"}),
  )
  assert ("alike" in plan.first_problem(inputs, ["7", "7"])[-1]) == remark
  line = plan.first_problem(inputs, ["7", "0"])[-1]
  assert "alike" not in line and ("right from 1 on" in line) == remark


def printed(get_config, **changes):
  config = config_of(get_config, **changes)
  return "\n".join(plan.lines(read_inputs(config)))


def gib(text, name):
  return float(re.search(rf"([\d.e-]+)  {name}", text)[1])


def test_its_memory_is_that_of_a_device():
  """Weights and moments are split over `fsdp`, and not over `data`, of eight devices."""
  whole = printed(tiny.get_config, mesh__data=8, mesh__fsdp=1)
  split = printed(tiny.get_config, mesh__data=1, mesh__fsdp=8)
  state = "weights and the optimizer's moments"
  assert gib(whole, state) == pytest.approx(3 * 4 * parameters([]) / 2**30, rel=0.02)
  assert gib(split, state) == pytest.approx(gib(whole, state) / 8, rel=0.05)
  adapters = printed(tiny.get_config, mesh__data=8, mesh__fsdp=1, lora__rank=2)
  assert gib(adapters, "gradients") < gib(whole, "gradients") / 10


@pytest.mark.parametrize("job", ["sft", "sft+rl"])
def test_a_cold_start_trains_all_parameters(job):
  meshes = dict(mesh__data=8, mesh__fsdp=1)
  update = printed(tiny.get_config, lora__rank=2, **meshes).split("in an update of the cold")[1]
  text = printed(tiny.get_config, lora__rank=2, job=job, **meshes).split("of the cold start")[1]
  assert gib(text, "weights and the") == pytest.approx(3 * 4 * parameters([]) / 2**30, rel=0.02)
  assert gib(text, "gradients") == gib(update, "gradients")


def test_a_critic_is_in_its_memory_and_its_operations():
  lines = printed(tiny_ppo.get_config, mesh__data=8, mesh__fsdp=1)
  number = re.search(r"critic: ([\d,]+) parameters, a separate model", lines)[1]
  count, moments = int(number.replace(",", "")), "the critic's weights and moments"
  assert count == pytest.approx(parameters([]), rel=0.02) and count < parameters([])  # no head
  assert gib(lines, moments) == pytest.approx(12 * count / 2**30, rel=0.02)
  head_lines = printed(tiny_ppo.get_config, mesh__data=8, mesh__fsdp=1, critic__name="head")
  assert "critic: 129 parameters, a head on the policy's trunk" in head_lines

  def operations(text):
    return float(re.search(r"at most ([\d.e+]+) in an iteration", text)[1])

  assert operations(lines) == pytest.approx(operations(head_lines) * 9 / 6, rel=0.01)


def test_its_time_is_a_bound_where_the_peak_is_known(monkeypatch):
  devices = [types.SimpleNamespace(device_kind="TPU v5p")]
  config = config_of(common.base)
  *_, first = plan.iteration(config, devices, None)
  *_, second = plan.iteration(config, devices * 2, None)
  seconds = [
    float(re.search(r"\(([\d.e-]+) s an iteration\)", line)[1]) for line in (first, second)
  ]
  assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)


def test_its_time_is_a_bound_where_the_peak_is_measured(monkeypatch):
  monkeypatch.setattr(plan, "matmul_rate", lambda: 1e9)
  *_, operations, time = plan.iteration(config_of(common.base), jax.devices(), None)
  total = float(re.search(r"at most ([\d.e+]+) in an iteration", operations)[1])
  seconds = float(re.search(r"\(([\d.e+]+) s an iteration\)", time)[1])
  assert seconds == pytest.approx(total / 1e9, rel=0.01)  # eight devices share the processors


def test_the_rate_of_a_large_product_is_measured():
  assert 1e8 < plan.matmul_rate(256) < 1e15


@pytest.mark.parametrize("job", ["sft", "eval"])
def test_jobs_that_do_not_sample_for_training(job):
  changes = dict(job=job) | (dict(sft__steps=5) if job == "sft" else {})
  text = printed(common.base, **changes)
  assert "iterations:" not in text and ("in an update" in text) == (job == "sft")


def test_its_cache_is_that_of_the_largest_workload():
  cache = "cache, queue and slots"
  few, many, alone = (
    gib(printed(common.base, **changes), cache)
    for changes in (
      dict(rl__prompts=4, rl__minibatches=4, eval__problems=8, eval__samples=1),
      dict(rl__prompts=4, rl__minibatches=4, eval__problems=256, eval__samples=4),
      dict(job="eval", eval__problems=256, eval__samples=4),
    )
  )
  assert many > 4 * few and alone == many


def test_the_flagship_at_toy_size_has_a_plan():
  text = printed(lambda: moe_aime.get_config("tiny"))
  assert " of them for each token" in text and "while it samples" in text


def test_a_mesh_that_only_samples_has_its_own_memory():
  shared = printed(common.base, rl__lag=2)
  two = printed(common.base, rl__lag=2, rollout_mesh__fsdp=2, mesh__fsdp=4)
  assert "devices: 4 x cpu" in two and "rollout mesh: 2 further devices (data 1 x fsdp 2 " in two
  assert "of the rollout mesh" in two and "while it samples" not in two
  assert "rollout mesh" not in shared and "while it samples" in shared
  weights = "the sampler's weights"
  assert gib(two, "newer weights for the") == pytest.approx(2 * gib(two, weights), rel=0.02)
