# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the bats files of this folder share: stand-in ranks and a few assertions. A file that loads it
# need not have a setup() or teardown() of its own.

bats_require_minimum_version 1.5.0

# A test's own folder. Ranks are those of setup_file(), or the test starts its own, which end with it.
set_up()
{
    unset NIXL_FETCH_SERVERS NIXL_FETCH_TIMEOUT FANIN_TRAINER FANIN_SECRET_FILE FANIN_TRACE FANIN_LOG
    unset FANIN_TLS_CERT FANIN_TLS_KEY FANIN_TLS_CA CUDA_VISIBLE_DEVICES
    cd "$BATS_TEST_TMPDIR" || return 1
    ranks_of_file=${ranks_pid-}
    [ -n "$ranks_of_file" ] || export BATS_FILE_TMPDIR=$BATS_TEST_TMPDIR
}

end_ranks()
{
    [ "${ranks_pid-}" = "$ranks_of_file" ] || kill -KILL "$ranks_pid" 2>/dev/null || true
}

setup() { set_up; }
teardown() { end_ranks; }

# start_ranks OPTION...: starts `nixl-fetch serve` and waits for its ready line. Sets
# ranks_pid; the target is in $info.
start_ranks()
{
    info=$BATS_FILE_TMPDIR/nixl_info.json
    # 3 is where bats listens until everybody has closed it.
    exec {ranks_out}< <(exec "$NIXL_FETCH" serve --info "$info" "$@" \
        2>"$BATS_FILE_TMPDIR/serve.err" 3>&-)
    ranks_pid=$!
    if ! read -r -t 120 ready <&"$ranks_out"; then
        cat "$BATS_FILE_TMPDIR/serve.err" >&2
        return 1
    fi
    export info ranks_pid ready
}

# stop_ranks [SIGNAL]: ends them and waits; the exit status is serve's.
stop_ranks()
{
    kill -"${1:-TERM}" "$ranks_pid"
    local status=0
    wait "$ranks_pid" || status=$?
    exec {ranks_out}<&-
    return "$status"
}

# The process of a rank, found as a child of serve.
rank_pid()
{
    pgrep -P "$ranks_pid" -x "nixl-rank-$1"
}

# stop PID...: SIGSTOP; returns when every thread has stopped: the signal alone comes to each when it
# next leaves the processor.
stop()
{
    kill -STOP "$@"
    local pid limit=$((SECONDS + 20))
    for pid; do
        while grep -qv ') T ' "/proc/$pid"/task/*/stat; do
            [ "$SECONDS" -lt "$limit" ] || return 1
        done
    done
}

# gone PID: waits until the process is no more.
gone()
{
    timeout 20 tail --pid="$1" -s 0.05 -f /dev/null
}

# until_it_says PATTERN COMMAND...: the command, which waits, is ended when it has said that.
until_it_says()
{
    local pattern=$1 pid limit=$((SECONDS + 60)) said=$BATS_TEST_TMPDIR/said
    shift
    "$@" >"$said" 2>&1 3>&- &
    pid=$!
    until grep -Eq -- "$pattern" "$said"; do
        [ "$SECONDS" -lt "$limit" ] && [ -e "/proc/$pid" ] || {
            cat "$said" >&2
            return 1
        }
        sleep 0.05
    done
    kill -TERM "$pid"
    wait "$pid" || [ $? -eq 143 ]
}

# field NAME...: prints a member of the JSON object in $output; fails if there is none or
# if $output is no object with "schema": 1.
field()
{
    # shellcheck disable=SC2154 # of bats
    printf '%s\n' "$output" | "$FANIN_TEST_PYTHON" -c '
import json, sys
o = json.load(sys.stdin)
assert o["schema"] == 1
for name in sys.argv[1:]:
    o = o[int(name)] if isinstance(o, list) else o[name]
print(json.dumps(o) if not isinstance(o, str) else o)' "$@"
}

# has TEXT: $output (and $stderr, if kept apart) contains it.
has()
{
    [[ "$output${stderr-}" == *"$1"* ]] || {
        printf 'not found: %s, but: %s %s\n' "$1" "$output" "${stderr-}" >&2
        return 1
    }
}
