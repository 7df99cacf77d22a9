#!/usr/bin/env bash
# usage: launch/deepspeed.sh CONFIG [GPUS | --hostfile FILE] [--job-index N] [key=value ...]
# Train on the first GPUS of the visible GPUs (default: all), or on the hosts of FILE, with lines
# `host slots=8` (needs pdsh, and ssh without a password). TERM, INT and USR1 are forwarded to the
# run as USR1; it has GRACE seconds (default 90) to save and stop. Its exit status is passed on.
set -euo pipefail

if [ $# -eq 0 ]; then sed -n '2s/^# //p' "$0" >&2; exit 2; fi
config=$1 where=() point=() first='' run='' deadline='' status=0; shift
if [ "${1:-}" = --hostfile ]; then
    where=("$1" "$2") first=$(awk '!/^ *(#|$)/ { print $1; exit }' "$2"); shift 2
elif [[ ${1:-} =~ ^[0-9]+$ ]]; then
    where=(--num_gpus "$1")
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then  # deepspeed ignores it with --num_gpus
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        [ "$1" -le ${#visible[@]} ] || { echo "$1 GPUs asked, ${#visible[@]} visible" >&2; exit 2; }
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${visible[*]:0:$1}") where=()
    fi
    shift
fi
if [ "${1:-}" = --job-index ]; then point=("$1" "$2"); shift 2; fi
free='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
port=${MASTER_PORT:-$(python3 -c "$free")}

trap '[ -n "$run" ] || exit 1; deadline=$((SECONDS + ${GRACE:-90}))' TERM INT USR1
set -m  # the run gets its own process group; its launchers ignore USR1
(trap '' USR1; exec deepspeed --no_local_rank ${where[@]+"${where[@]}"} --master_port "$port" \
    --module lm train --config "$config" ${point[@]+"${point[@]}"} resume=auto "$@") &
run=$!
set +m

far="run=\$(pgrep -d, -f '[-]-master_port=$port ') && pkill -USR1 -P \$run"  # all ranks there
while kill -0 -- "-$run" 2>/dev/null; do
    kill -0 "$run" 2>/dev/null || deadline=${deadline:-$((SECONDS + ${GRACE:-90}))}
    if [ -n "$deadline" ]; then  # repeated, because a rank that starts up ignores signals
        ((SECONDS < deadline)) || break
        kill -s USR1 -- "-$run" 2>/dev/null || true
        [ -z "$first" ] || ssh -n "$first" "$far" || true
    fi
    sleep 0.5 || true  # a signal to the process group ends `sleep`, too
done
if [ -n "$first" ] && kill "$run" 2>/dev/null; then sleep 5 || true; fi  # ends the other hosts
kill -KILL -- "-$run" 2>/dev/null || true
wait "$run" || status=$?
exit "$status"
