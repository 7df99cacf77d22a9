#!/usr/bin/env bash
# usage: launch/again.sh TIMES COMMAND ...
# Run COMMAND, such as launch/deepspeed.sh CONFIG. Restart it at most TIMES times if it ends with a
# status after which another try may succeed: a hang (77), no network (69; restarts after PAUSE
# seconds, default 60), a killed process (71, 134, 137, 139). TERM, USR1 and INT (as TERM) are
# forwarded to COMMAND, and after them it is not restarted. docs/cluster.md lists the statuses.
set -uo pipefail

if [ $# -lt 2 ] || ! [[ $1 =~ ^[0-9]+$ ]]; then sed -n '2s/^# //p' "$0" >&2; exit 2; fi
left=$1 asked='' run=''; shift
forward() { asked=1; [ -z "$run" ] || kill -s "$1" "$run" 2>/dev/null; }
trap 'forward TERM' TERM INT  # INT as TERM: a shell's background processes ignore INT
trap 'forward USR1' USR1

while true; do
    "$@" &
    run=$!
    while kill -0 "$run" 2>/dev/null; do wait "$run"; done  # a signal ends `wait` early
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
