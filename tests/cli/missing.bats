#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Looking at three stand-in ranks one of which is stopped or dead: each rank is told by itself, and
# the whole command takes one --timeout.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup_file()
{
    start_ranks --adapter-shape small --world-size 3 --keep-going
}

teardown_file()
{
    stop_ranks || true
}

teardown()
{
    [ -z "${stopped-}" ] || kill -CONT "${stopped[@]}"
}

stop_rank()
{
    [ -z "${stopped-}" ] || kill -CONT "$stopped"
    stopped=$(rank_pid "$1")
    stop "$stopped"
}

key=base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight

@test "ping: a stopped rank is one dead rank, wherever it stands" {
    for odd in 0 1 2; do
        stop_rank "$odd"
        run -13 --separate-stderr "$NIXL_FETCH" ping "$info" --timeout 1s --json
        [ "$(field answered)" = 2 ]
        for rank in 0 1 2; do
            [ "$(field ranks "$rank" rank)" = "$rank" ]
            if [ "$rank" = "$odd" ]; then
                [ "$(field ranks "$rank" status)" = FANIN_ERR_UNREACHABLE ]
            else
                [ "$(field ranks "$rank" status)" = FANIN_OK ]
            fi
        done
        has "2 of 3 ranks answered"
        has "did not answer in time"
        has "is the trainer process stopped"
    done
    run -13 --separate-stderr "$NIXL_FETCH" ping "$info" --timeout 1s
    grep -Eq "^ *2 +127.* no answer in time$" <<<"$output"
}

@test "list: a stopped rank is a row and exit status 13, the metadata are there" {
    stop_rank 0
    run -13 --separate-stderr "$NIXL_FETCH" list "$info" --timeout 2s
    [ "$(grep -c 'rank [0-2] *stable' <<<"$output")" -eq 2 ]
    grep -q "rank 0 *unreachable" <<<"$output"
    grep -q "^0 *stable, 2 of 3 ranks" <<<"$output"
    grep -q "^rank 0 unreachable: .* did not answer in time" <<<"$output"
    has "run 0: lora_alpha = 16"
    stop_rank 2
    run -13 --separate-stderr "$NIXL_FETCH" list "$info" --timeout 2s --json
    [ "$(field missing 0 rank)" = 2 ]
    [ "$(field missing 0 status)" = FANIN_ERR_UNREACHABLE ]
    [ "$(field runs 0 metadata r)" = 8 ]
}

@test "list --run and show: what the others hold, and who is missing" {
    stop_rank 1
    run -13 --separate-stderr "$NIXL_FETCH" list "$info" --run 0 --timeout 2s
    grep -Eq "^lora:0:$key +BF16 +\[8, 896\] +0,2 +14336$" <<<"$output"
    has "rank 1 unreachable: "
    run -13 --separate-stderr "$NIXL_FETCH" list "$info" --run 0 --timeout 2s --json
    [ "$(field keys 0 ranks)" = "[0, 2]" ]
    [ "$(field missing 0 rank)" = 1 ]
    run -13 --separate-stderr "$NIXL_FETCH" show "$info" "$key" --timeout 2s
    has "rank 1 unreachable: "
    run -13 --separate-stderr "$NIXL_FETCH" show "$info" "$key" --timeout 2s --json
    [ "$(field owners 1 rank)" = 2 ]
    [ "$(field missing 0 rank)" = 1 ]
}

@test "a rank that is left over is known by its number in any order of addresses" {
    target=${ready##* }
    IFS=, read -r a b c <<<"$target"
    stop_rank 1
    run -13 --separate-stderr "$NIXL_FETCH" list "$c,$b,$a" --timeout 2s --json
    [ "$(field missing 0 rank)" = 1 ]
    [ "$(field missing 0 address)" = "$b" ]
}

@test "completion: a stopped rank leaves the others' words" {
    stop_rank 0
    run -0 "$NIXL_FETCH" __complete line pull "$info" --run ""
    [ "$output" = 0 ]
    run -0 "$NIXL_FETCH" __complete line show "$info" lora:0:base_model.model.model.layers.23.mlp.up
    [ "${#lines[@]}" -eq 2 ]
}

@test "pull: names the rank that is stopped" {
    stop_rank 1
    IFS=, read -r _ odd _ <<<"${ready##* }"
    for rule in --out=d --step=1 --step=9; do
        run -13 --separate-stderr "$NIXL_FETCH" pull "$info" --out=d --timeout 2s --json "$rule"
        [ "$(field error address)" = "$odd" ]
        [ "$(field error rank)" = 1 ]
        has "warning: rank 1 does not answer"
        has "the rank at $odd accepted but did not answer in time; no other rank holds"
        [[ "$output" != *"not said where"* ]]
    done
    [ ! -e d ]
    run -1 compgen -G ".d*"
}

@test "pull that waits: says which rank is mute" {
    stop_rank 1
    until_it_says "waiting for rank 1: the rank at " "$NIXL_FETCH" pull "$info" --out d --step 9
}

@test "all ranks stopped: exit status 13 from every command, whichever clock is first" {
    stopped=("$(rank_pid 0)" "$(rank_pid 1)" "$(rank_pid 2)")
    stop "${stopped[@]}"
    # Small times: the rounding of milliseconds is what may differ.
    for time in 299ms 300ms 301ms; do
        run -13 --separate-stderr "$NIXL_FETCH" ping "$info" --timeout "$time"
        has "0 of 3 ranks answered: "
        for command in list "show $key" "pull --out d"; do
            # shellcheck disable=SC2086
            set -- $command
            run -13 "$NIXL_FETCH" "$1" "$info" "${@:2}" --timeout "$time"
            has " did not answer "
            has "is the trainer process stopped"
        done
    done
}

@test "a dead rank is a row too" {
    pid=$(rank_pid 2)
    kill -KILL "$pid"
    gone "$pid"
    run -13 --separate-stderr "$NIXL_FETCH" list "$info" --json
    [ "$(field missing 0 rank)" = 2 ]
    has "2 of 3 ranks answered"
    has "start the rank"
    run -13 --separate-stderr "$NIXL_FETCH" show "$info" "$key" --json
    [ "$(field missing 0 rank)" = 2 ]
    run -13 --separate-stderr "$NIXL_FETCH" ping "$info" --json
    [ "$(field answered)" = 2 ]
}

@test "pull that waits: its options are those by which it asks who is late" {
    [ "$(id -u)" = 0 ] || skip "only root can be two users"
    setpriv --reuid 1234 --regid 1234 --clear-groups test -x "$NIXL_FETCH" || skip "another user cannot reach the build"
    theirs=$(mktemp -d /tmp/test-fanin-XXXXXX) # that user cannot look into bats' folders
    chmod 1777 "$theirs"
    exec {their_out}< <(exec setpriv --reuid 1234 --regid 1234 --clear-groups "$NIXL_FETCH" serve \
        --info "$theirs/info" --adapter-shape small --world-size 2 2>/dev/null 3>&-)
    their_pid=$!
    read -r -t 120 <&"$their_out"
    until_it_says "waiting for step 9 of lora:0: ranks 0-1 stable at step 1" \
        "$NIXL_FETCH" pull "$theirs/info" --out d --step 9 --trust-other-users
    kill -TERM "$their_pid"
    gone "$their_pid"
    rm -r "$theirs"
}
