#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# An existing adapter served and pulled back, what verify says of it, and pulls that end early.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

make_adapter()
{
    "$FANIN_TEST_PYTHON" "$support/make_adapter.py" "$@"
}

@test "an adapter of PEFT comes back: every byte of the file, all of its configuration" {
    make_adapter source
    for world in 1 3 6; do
        start_ranks --adapter source --world-size "$world" --run mine
        for path in stream cma; do
            run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --run mine --out "$world-$path" \
                --path "$path" --trust-config --json
            [ "$(field path)" = "$path" ]
            cmp "source/$file" "$world-$path/$file"
            proven "$world-$path" --like source --run mine
        done
        stop_ranks
    done
}

@test "verify: another life, another step" {
    make_adapter source
    start_ranks --adapter source --world-size 3
    "$NIXL_FETCH" pull "$info" --out d
    stop_ranks
    # Another life with the same bytes at the same step is not the same.
    start_ranks --adapter source --world-size 3
    run -12 "$NIXL_FETCH" verify "$info" --dir d
    has stale
    stop_ranks
    start_ranks --adapter source --world-size 3 --update-every 20
    "$NIXL_FETCH" pull "$info" --out e
    step=$("$FANIN_TEST_PYTHON" -c 'import json; print(json.load(open("e/fanin.json"))["step"])')
    "$NIXL_FETCH" pull "$info" --out later --min-step $((step + 1))
    run -12 "$NIXL_FETCH" verify "$info" --dir e
    has stale
    stop_ranks
}

@test "a pull that is interrupted while it reads leaves nothing, and can be repeated" {
    start_ranks --adapter-shape small --world-size 3
    start_proxy --hold-reads 100000
    mkdir parent
    for signal in INT TERM; do
        "$NIXL_FETCH" pull "$target" --out parent/d --path stream --timeout 60s 2>err 3>&- &
        pull_pid=$!
        [ "$signal" = TERM ] || { read -r -t 60 line <&"$proxy_out" && [ "$line" = held ]; }
        timeout 60 bash -c 'until compgen -G "parent/.d.fanin-tmp-*" >/dev/null; do sleep 0.02; done'
        kill -"$signal" "$pull_pid"
        status=0
        wait "$pull_pid" || status=$?
        [ "$status" -eq $((128 + $(kill -l "$signal"))) ]
        [ -z "$(ls -A parent)" ]
    done
    run -0 "$NIXL_FETCH" pull "$info" --out parent/d --check-pattern
    [ "$(ls -A parent)" = d ]
    stop_ranks
}
