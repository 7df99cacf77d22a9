#!/usr/bin/env bash
# usage: launch/again.sh TIMES COMMAND ...
# Run COMMAND (launch/deepspeed.sh CONFIG, say), and again when it ends by itself in a way that may
# heal: a hang (77), no network (69, after PAUSE seconds, 60), a process that was killed (71, 134,
# 137, 139). At most TIMES times; TERM, USR1 and INT (as TERM) to this script go on to it, and end
# it. docs/cluster.md has the table.
set -uo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[0-9]+$ ]]; then sed -n '2s/^# //p' "$0" >&2; exit 2; fi
left=$1 asked='' run=''; shift
forward() { asked=1; [ -z "$run" ] || kill -s "$1" "$run" 2>/dev/null; }
trap 'forward TERM' TERM INT  # a shell starts what is in its background with INT ignored
trap 'forward USR1' USR1

while true; do
    "$@" &
    run=$!
    while kill -0 "$run" 2>/dev/null; do wait "$run"; done  # a signal cuts a wait short
    wait "$run"; status=$?
    case $status in 69 | 71 | 77 | 134 | 137 | 139) ;; *) exit "$status" ;; esac
    if [ -n "$asked" ] || [ "$left" = 0 ]; then exit "$status"; fi
    echo "$(date '+%F %T') ended with status $status: again, at most $left times" >&2
    left=$((left - 1))
    if [ "$status" = 69 ]; then
        sleep "${PAUSE:-60}" & run=$!; wait "$run"
        [ -z "$asked" ] || exit "$status"
    fi
done
