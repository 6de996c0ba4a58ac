#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A host's cache of a model: what it keeps, what others take of it, restarts, ends.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup()
{
    set_up
    relays=()
}

teardown()
{
    kill -KILL "${relays[@]}" $ranks_pid 2>/dev/null || true
}

model=(--model qwen2.5-0.5b --full --layers 1 --shrink 16 --world-size 2)

# relay NAME OPTION...: starts one, whose lines go to NAME.
relay()
{
    "$NIXL_FETCH" relay "$info" full:0 --json "${@:2}" >"$1" 2>"$1.err" 3>&- &
    relays+=($!)
}

# until_true WORD...: runs the command again and again until it succeeds.
until_true()
{
    local limit=$((SECONDS + 60))
    until "$@"; do
        [ "$SECONDS" -lt "$limit" ] || {
            printf 'in vain: %s\n' "$*" >&2
            head -c 2000 ./*.err >&2
            return 1
        }
        sleep 0.1
    done
}

# ended PID: by SIGTERM, which is no failure.
ended()
{
    kill -TERM "$1"
    gone "$1"
    wait "$1"
}

from_relays()
{
    grep -q '"bytes_from_relays":[1-9]' "$1"
}

@test "relays take steps from each other, and end without leaving anything" {
    start_ranks "${model[@]}" --update-every 1000
    mkdir files
    relay one --memory "$PWD/files"
    until_true grep -q '"event":"step"' one
    relay two
    relay three --verify
    until_true from_relays two
    until_true from_relays three
    [ -z "$(ls -A files)" ]
    for pid in "${relays[@]}"; do
        ended "$pid"
    done
    [ -z "$(ls -A files)" ]
    [ ! -s one.err ]
    stop_ranks
}

# alone FILE: has got a step of the trainer alone.
alone()
{
    grep -q '"bytes_from_relays":0' "$1"
}

@test "relays of different sites take nothing from each other" {
    start_ranks "${model[@]}"
    relay east --place east/r1
    until_true alone east
    relay west --place west
    until_true alone west
    FANIN_PLACE=east relay near
    until_true from_relays near
    run -0 "$NIXL_FETCH" status "$info" full:0
    has "3 relays in 2 sites"
    [[ $output =~ east/r1 ]]
    for pid in "${relays[@]}"; do
        ended "$pid"
    done
    stop_ranks
}

# holds STEP...: the ranks know of relays with these steps, and of no other.
holds()
{
    "$NIXL_FETCH" status "$info" full:0 --json >status 2>/dev/null || true
    "$FANIN_TEST_PYTHON" - "$@" <<'END'
import json
import sys

ranks = json.load(open("status")).get("ranks", [])
steps = [relay["step"] for rank in ranks for relay in rank.get("told_relays", [])]
sys.exit(sorted(steps) != sorted(map(int, sys.argv[1:])))
END
}

@test "--keep: the last steps, each on its own" {
    start_ranks "${model[@]}" --update-every 700 --steps 4
    relay one --keep 2
    until_true grep -q '"step":4,' one
    until_true holds 3 4
    stop_ranks
    ended "${relays[0]}"
}

@test "a relay that is stopped while steps come takes the last one" {
    start_ranks "${model[@]}" --update-every 700 --steps 6
    relay one --verify
    relay two --verify
    until_true grep -q '"event":"step"' one
    until_true grep -q '"event":"step"' two
    stop "${relays[0]}"
    until_true grep -q '"step":6,' two
    kill -CONT "${relays[0]}"
    until_true grep -q '"step":6,' one
    until_true holds 6 6
    stop_ranks
    for pid in "${relays[@]}"; do
        ended "$pid"
    done
}

@test "a trainer that is started again: its steps are others, those of before are dropped" {
    start_ranks "${model[@]}" --first-step 7
    relay one
    until_true grep -q '"step":7,' one
    stop_ranks
    start_ranks "${model[@]}" --first-step 3
    until_true grep -q '"step":3,' one
    grep -q '"event":"launch",.*"dropped":1}' one
    until_true holds 3
    ended "${relays[0]}"
    stop_ranks
}

@test "a trainer that is started again with its world id, at an earlier step" {
    local world=(--model qwen2.5-0.5b --full --layers 1 --shrink 16 --world-size 1 --world-id "$(printf '5%.0s' {1..32})")
    start_ranks "${world[@]}" --first-step 7
    relay one
    until_true grep -q '"step":7,' one
    stop_ranks
    start_ranks "${world[@]}" --first-step 3 --base-port "${ready##*:}"
    until_true grep -q '"step":3,' one
    until_true holds 3
    ended "${relays[0]}"
    stop_ranks
}

@test "what cannot be kept is told, with what it would take" {
    start_ranks "${model[@]}"
    run -15 "$NIXL_FETCH" relay "$info" full:0 --memory ./nowhere
    has "nowhere: No such file or directory: give --memory a directory"
    run -11 "$NIXL_FETCH" relay "$info" full:1
    has "does not publish full:1"
    run -11 "$NIXL_FETCH" relay "$info" full:0 --network 192.0.2.0/24
    has "this host's loopback, where no other host reaches this one: leave out --network"
    run -11 "$NIXL_FETCH" relay "$info" full:0 --network 10.0.0.0/8,10.1.2.3/8
    has '"10.1.2.3/8" is no network of an allow-list: write networks as'
    run -11 "$NIXL_FETCH" relay "$info" full:0 --place a/b/c
    has "place 'a/b/c' is no place"
    FANIN_PLACE=a/ run -11 "$NIXL_FETCH" relay "$info" full:0
    has "FANIN_PLACE 'a/' is no place"
    mkdir small
    mount() { unshare -rm sh -c 'mount -t tmpfs -o size=64k none small && exec "$@"' sh "$@"; }
    if mount true; then
        run -15 mount "$NIXL_FETCH" relay "$info" full:0 --memory ./small --keep 3
        has "small: 3 copies of"
        has "No space left on device: keep fewer steps (--keep)"
    fi
    mkdir -p group/a
    echo 0::/a >group/of
    echo 67200000 >group/a/memory.max
    # shellcheck disable=SC2016 # the inner shell's number
    limit() { timeout 20 unshare -rm sh -c 'mount --bind group /sys/fs/cgroup && mount --bind group/of /proc/$$/cgroup && exec "$@"' sh "$@"; }
    if limit true; then
        run -15 limit "$NIXL_FETCH" relay "$info" full:0
        has "memory: 1 copy of"
        has "the cgroup /a has room for 91.1 kB: keep fewer steps (--keep), raise the limit"
    fi
    stop_ranks
}
