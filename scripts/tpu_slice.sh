#!/usr/bin/env bash
# Trains on a Cloud TPU slice, from this checkout as it is: uncommitted files travel too.
#
#   export PROJECT=my-project ZONE=us-east5-a TYPE=v5p-128 BUCKET=gs://my-bucket
#   scripts/tpu_slice.sh setup    # Once: API, bucket in the region, role for the machines.
#   scripts/tpu_slice.sh run --config=moe_aime --config.weights=Qwen/Qwen3-30B-A3B-Base \
#     --config.data.train=gs://my-bucket/train.jsonl --config.data.eval=gs://my-bucket/eval.jsonl
#   scripts/tpu_slice.sh log      # The first host's output.
#   scripts/tpu_slice.sh delete   # Ends the run, and gives the machines back.
#
# `run` requests the slice, starts the run on its hosts with nohup, and waits. Preempted machines
# are deleted and requested again, until the run returns 0; then they are given back. The run goes
# on without this script, and the same command waits for it again. Another exit code than 0 and 75
# (stopped by a signal) ends the script, and leaves the machines for a look or another `run`.
#
# TYPE: v4-8, v5litepod-16, v5p-128, v6e-64, ... Others by RUNTIME, the image of the hosts.
# TPU: name of slice and run (gspo). SPOT=0: machines that stay, and cost more. SERVICE_ACCOUNT: of
# the machines. WANDB_API_KEY and HF_TOKEN travel in a file that only their user reads.
set -euo pipefail
case ${1:-} in
  setup | run | log | delete) ;;
  *) sed -n '2,21s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
for name in PROJECT ZONE TYPE BUCKET; do
  [[ -n ${!name:-} ]] || { echo "$name is not set: the head of $0 has an example" >&2; exit 2; }
done
[[ $BUCKET == gs://?* ]] || { echo "BUCKET=$BUCKET must begin with gs://" >&2; exit 2; }
command -v gcloud >/dev/null ||
  { echo "gcloud is not installed: https://cloud.google.com/sdk/docs/install" >&2; exit 2; }
TPU=${TPU:-gspo} SPOT=${SPOT:-1} PAUSE=${PAUSE:-30}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# https://cloud.google.com/tpu/docs/runtimes
runtime() {
  case $TYPE in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo "TYPE=$TYPE: v4-N, v5litepod-N, v5p-N or v6e-N; others need RUNTIME" >&2; return 2 ;;
  esac
}
RUNTIME=${RUNTIME:-$(runtime)}

tpus() { gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"; }
slice() { tpus queued-resources "$@"; }
on_hosts() { tpus tpu-vm ssh "$TPU" --worker="$1" --command="$2" </dev/null; }
state() { slice describe "$TPU" --format='value(state.state)' 2>/dev/null || true; }
# Changes of state, a line each.
say() { [[ $1 == "${message:-}" ]] || echo "$(date +%T) $TPU: $1" >&2; message=$1; }
delete() { slice delete "$TPU" --force --quiet; }

setup() {
  gcloud services enable tpu.googleapis.com storage.googleapis.com --project="$PROJECT"
  gcloud storage buckets describe "$BUCKET" --project="$PROJECT" >/dev/null 2>&1 ||
    gcloud storage buckets create "$BUCKET" --project="$PROJECT" --location="${ZONE%-*}" \
      --uniform-bucket-level-access
  local number
  number=$(gcloud projects describe "$PROJECT" --format='value(projectNumber)')
  account=${SERVICE_ACCOUNT:-$number-compute@developer.gserviceaccount.com}
  gcloud storage buckets add-iam-policy-binding "$BUCKET" --project="$PROJECT" \
    --member="serviceAccount:$account" --role=roles/storage.objectAdmin
  gcloud storage buckets add-iam-policy-binding "$BUCKET" --project="$PROJECT" \
    --member="serviceAccount:$account" --role=roles/storage.legacyBucketReader
}

request() {
  local options=(--node-id="$TPU" --accelerator-type="$TYPE" --runtime-version="$RUNTIME")
  [[ $SPOT == 0 ]] || options+=(--spot)
  [[ -z ${SERVICE_ACCOUNT:-} ]] || options+=(--service-account="$SERVICE_ACCOUNT")
  slice create "$TPU" "${options[@]}"
}

# History, so that config.json names the commit, and the tree as it is, ignored files apart.
pack() {
  git bundle create -q "$work/history.bundle" HEAD
  git ls-files -coz --exclude-standard | while IFS= read -r -d '' file; do
    [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
  done | tar --null -czf "$work/tree.tar.gz" -T -
  (
    umask 077
    for name in WANDB_API_KEY HF_TOKEN; do
      [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
    done >"$work/gspo.env"
  )
}

# Python 3.11 by uv: the images have 3.10.
INSTALL='rm -rf gspo_jax gspo.code && chmod 600 gspo.env && git -c advice.detachedHead=false clone -q history.bundle gspo_jax &&
cd gspo_jax && git ls-files -z | xargs -0 rm -f && tar -xzf ../tree.tar.gz &&
python3 -m pip install -q --user uv && python3 -m uv python install 3.11 &&
python3 -m uv venv -q --python=3.11 .venv &&
python3 -m uv pip install -q --python=.venv -e ".[tpu,gcs]" wandb'

send() {
  tpus tpu-vm scp "$work/history.bundle" "$work/tree.tar.gz" "$work/gspo.env" "$TPU:" --worker=all &&
    on_hosts all "$INSTALL"
}

start() {
  local flags
  flags=$(printf '%q ' --workdir="/tmp/$TPU" --config.distributed=true \
    --config.checkpoint.directory="$BUCKET/$TPU" "$@")
  printf -v flags '%q' "rm -f gspo.code; . ./gspo.env; cd gspo_jax
.venv/bin/python -m gspo_jax.main $flags; echo \$? >../gspo.code"
  on_hosts all "nohup setsid bash -c $flags >>gspo.log 2>&1 </dev/null &"
}

# The exit code of the first host; `running`, `idle` without a run, `lost` without an answer.
status() {
  on_hosts 0 'if [ -e gspo.code ]; then cat gspo.code
elif pgrep -f "[g]spo_jax.main" >/dev/null; then echo running; else echo idle; fi' 2>/dev/null || echo lost
}

run() {
  local lost=0 failures=0 code
  pack
  while true; do
    code=$(state)
    case $code in
      ACTIVE) ;;
      '')
        say "requesting $TYPE"
        if request; then failures=0; continue; fi
        failures=$((failures + 1))
        ((failures <= 5)) || return 1
        sleep "$PAUSE"; continue
        ;;
      FAILED | SUSPENDING | SUSPENDED) say "$code: deleting it, to request it again"; delete; continue ;;
      *) say "$code"; sleep "$PAUSE"; continue ;;
    esac
    code=$(status)
    case $code in
      0) say "finished; checkpoints and report are in $BUCKET/$TPU"; delete; return 0 ;;
      75) say "stopped by a signal: starting again"; start "$@" || true ;;
      idle) say "sending and installing the checkout"; if send; then start "$@" || true; fi ;;
      running) say "running; scripts/tpu_slice.sh log shows its output"; lost=0 ;;
      lost)
        lost=$((lost + 1))
        # Preempted nodes may stay ACTIVE without an answer.
        say "no answer"
        if ((lost > 5)); then say "deleting it, to request it again"; delete; lost=0; fi
        ;;
      *)
        # The next `run` finds no code, and starts anew.
        on_hosts 0 'tail -n 30 gspo.log; rm gspo.code' || true
        say "exit code $code; scripts/tpu_slice.sh run starts again, delete gives the machines back"
        return "$code"
        ;;
    esac
    sleep "$PAUSE"
  done
}

if ! error=$(gcloud auth print-access-token 2>&1 >/dev/null); then
  printf '%s\ngcloud has no valid login: run gcloud auth login first\n' "$error" >&2
  exit 1
fi
case ${1:-} in
  setup | delete) "$1" ;;
  run) shift; run "$@" ;;
  log) on_hosts 0 'tail -n 100 -f gspo.log' ;;
esac
