"""scripts/tpu_slice.sh with a stub of gcloud: its commands in their order."""

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# States of the slice and answers of the first host, a line each; the last ones stay.
GCLOUD = """#!/usr/bin/env bash
next() { head -n 1 "$HERE/$1"; [[ $(wc -l <"$HERE/$1") == 1 ]] || sed -i 1d "$HERE/$1"; }
[[ $1 != auth ]] || { echo reason >&2; exit "${NO_LOGIN:-0}"; }
printf '%q ' "$@" >>"$HERE/calls"; echo >>"$HERE/calls"
case "$*" in
  *"projects describe"*) echo 123 ;;
  *"buckets describe"*) exit 1 ;;
  *queued-resources\\ describe*) next states ;;
  *gspo.code\\ *then*) next codes ;;
  *scp*) for file in "$@"; do [[ ! -f $file ]] || cp "$file" "$HERE"; done ;;
esac
"""
CALLS = {
  "queued-resources describe": "state",
  "queued-resources create": "request",
  "queued-resources delete": "delete",
  "tpu-vm scp": "send",
  "clone -q": "install",
  "nohup": "start",
  "then": "status",
  "tail": "log",
}


@pytest.fixture
def call(tmp_path):
  """Runs the script with states and exit codes; returns the process and its calls by name."""
  (tmp_path / "gcloud").write_text(GCLOUD)
  (tmp_path / "gcloud").chmod(0o755)

  def run(*arguments, states=(), codes=(), pack=False, **more):
    for name in () if pack else ("git", "tar"):  # A second of each call.
      (tmp_path / name).write_text("#!/bin/sh\n")
      (tmp_path / name).chmod(0o755)
    for name, lines in ("states", states), ("codes", codes):
      (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    more = dict(PROJECT="p", ZONE="us-east5-a", TYPE="v5p-128", BUCKET="gs://b") | more
    environment = os.environ | dict(PATH=path, HERE=str(tmp_path), PAUSE="0") | more
    script = ["bash", str(ROOT / "scripts" / "tpu_slice.sh"), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    calls = tmp_path / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done, lines

  return run


def names(lines):
  return [next(CALLS[key] for key in CALLS if re.search(key, line)) for line in lines]


def test_a_run_is_started_again_on_new_machines_until_it_returns_0(call, tmp_path):
  states = ["", "PROVISIONING", *["ACTIVE"] * 2, "SUSPENDED", "", *["ACTIVE"] * 4]
  codes = ["idle", "running", "idle", "75", "running", "0"]
  done, lines = call("run", "--config=tiny", "--config.rl.x='a b'", states=states, codes=codes)
  assert done.returncode == 0, done.stderr
  start = "send install start".split()
  first = ["state", "request", "state", "state", "status", *start, "state", "status"]
  second = ["state", "delete", "state", "request", "state", "status", *start]
  end = ["state", "status", "start", "state", "status", "state", "status", "delete"]
  assert names(lines) == first + second + end
  messages = [line.split("gspo: ")[1].split()[0] for line in done.stderr.splitlines()]
  again = ["requesting", "sending", "stopped", "running;", "finished;"]
  assert messages == ["requesting", "PROVISIONING", "sending", "running;", "SUSPENDED:", *again]
  request = next(line for line in lines if "create" in line)
  assert "--accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5 --spot" in request
  assert all("--project=p --zone=us-east5-a" in line for line in lines)
  (started, *_) = [line for line in lines if "nohup" in line]
  assert "checkpoint.directory=gs://b/gspo" in started and "--worker=all" in started


def test_the_tree_travels_as_it_is_and_keys_in_a_file(call, tmp_path):
  scratch = ROOT / "scripts" / "uncommitted_for_a_test.txt"  # No test lists this folder.
  scratch.write_text("")
  try:
    done, lines = call(
      "run", states=["ACTIVE"], codes=["idle", "0"], pack=True, WANDB_API_KEY="k e y"
    )
  finally:
    scratch.unlink()
  assert done.returncode == 0, done.stderr
  with tarfile.open(tmp_path / "tree.tar.gz") as tree:
    files = tree.getnames()
  assert {"setup.py", "scripts/uncommitted_for_a_test.txt"} <= {*files}
  assert (tmp_path / "gspo.env").read_text() == "export WANDB_API_KEY=k\\ e\\ y\n"
  assert "k e y" not in "".join(lines) and "k\\ e" not in "".join(lines)


def test_an_error_of_the_run_ends_the_script_and_keeps_the_machines(call):
  done, lines = call("run", states=["ACTIVE"], codes=["2"])
  assert done.returncode == 2 and "delete gives the machines back" in done.stderr
  assert names(lines) == ["state", "status", "log"]
  assert "rm gspo.code" in lines[-1].replace("\\ ", " ")  # Another `run` starts anew.


@pytest.mark.parametrize(
  "kind, image",
  [("v4-8", "tpu-ubuntu2204-base"), ("v5litepod-16", "v2-alpha-tpuv5-lite"),
   ("v6e-64", "v2-alpha-tpuv6e"), ("v9-1", None)],
)  # fmt: skip
def test_images(kind, image, call):
  done, lines = call("run", states=["", "ACTIVE"], codes=["0"], TYPE=kind, SPOT="0")
  assert done.returncode == (0 if image else 2)
  assert not image or f"--runtime-version={image} --project" in lines[1]


def test_the_set_up_makes_a_bucket_in_the_region_and_gives_the_role(call):
  done, lines = call("setup")
  assert done.returncode == 0, done.stderr
  assert [line.split(" --")[0].split()[:4] for line in lines] == [
    ["services", "enable", "tpu.googleapis.com", "storage.googleapis.com"],
    ["storage", "buckets", "describe", "gs://b"],
    ["storage", "buckets", "create", "gs://b"],
    ["projects", "describe", "p"],
    ["storage", "buckets", "add-iam-policy-binding", "gs://b"],
    ["storage", "buckets", "add-iam-policy-binding", "gs://b"],
  ]
  assert "--location=us-east5" in lines[2]
  assert "123-compute@developer.gserviceaccount.com" in lines[4]


def test_a_missing_login_is_named_before_any_request(call):
  done, lines = call("run", states=[""], NO_LOGIN="1")
  assert done.returncode == 1 and not lines
  assert done.stderr == "reason\ngcloud has no valid login: run gcloud auth login first\n"


def test_a_bucket_without_its_scheme_is_refused(call):
  done, lines = call("run", BUCKET="b")  # It would name a folder of the machines.
  assert done.returncode == 2 and not lines
  assert done.stderr == "BUCKET=b must begin with gs://\n"


def test_an_unset_variable_is_named_before_any_call(call):
  done, lines = call("run", BUCKET="")
  assert done.returncode == 2 and not lines
  assert done.stderr.startswith("BUCKET is not set: the head of ")
  assert "export PROJECT=my-project" in call(PROJECT="")[0].stdout
