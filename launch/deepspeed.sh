#!/usr/bin/env bash
# usage: launch/deepspeed.sh CONFIG [GPUS] [--job-index N] [key=value ...]
# Train on one node, on the first GPUS of the visible GPUs (all of them when not given).
# SIGTERM, SIGINT and SIGUSR1 go on, as USR1, to every process of the run (killing `deepspeed` alone
# would orphan its workers), which then has GRACE seconds (90) to save and stop before it is killed.
set -euo pipefail

if [ $# -eq 0 ]; then sed -n '2s/^# //p' "$0" >&2; exit 2; fi
config=$1; shift
gpus=() options=()
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    gpus=(--num_gpus "$1")
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then  # which deepspeed would ignore, told a number
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        [ "$1" -le ${#visible[@]} ] || { echo "$1 GPUs asked, ${#visible[@]} visible" >&2; exit 2; }
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${visible[*]:0:$1}") gpus=()
    fi
    shift
fi
if [ "${1:-}" = --job-index ]; then options=(--job-index "$2"); shift 2; fi

deadline='' status=0
forward() {
    [ -n "${!:-}" ] || exit 1  # nothing runs yet
    deadline=$((SECONDS + ${GRACE:-90}))
    # Not TERM or INT: DeepSpeed's launcher answers those by killing its workers after 30 s.
    kill -s USR1 -- "-$!" 2>/dev/null || true
}
trap forward TERM INT USR1

set -m  # gives the run a process group of its own
deepspeed --no_local_rank ${gpus[@]+"${gpus[@]}"} --master_port "${MASTER_PORT:-29500}" \
    --module lm train --config "$config" ${options[@]+"${options[@]}"} resume=auto "$@" &
run=$!
set +m

wait "$run" || true  # until the launcher is gone, or a signal has been forwarded
deadline=${deadline:-$((SECONDS + ${GRACE:-90}))}
while kill -0 -- "-$run" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
kill -KILL -- "-$run" 2>/dev/null || true
wait "$run" || status=$?
exit "$status"
