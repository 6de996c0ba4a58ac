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

@test "verify: equal, another step, and the very key whose bytes differ" {
    make_adapter source
    start_ranks --adapter source --world-size 3
    "$NIXL_FETCH" pull "$info" --out d
    run -0 "$NIXL_FETCH" verify "$info" --dir d
    has "equal: 12 tensors"
    for index in 0 5 11; do
        name=$(make_adapter --flip d "$index")
        run -14 --separate-stderr "$NIXL_FETCH" verify "$info" --dir d --json
        [ "$(field error key)" = "lora:0:$name" ]
        [[ $(field error status) == FANIN_ERR_MISMATCH ]]
        make_adapter --flip d "$index"
    done
    run -0 "$NIXL_FETCH" verify "$info" --dir d
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

@test "fields of a configuration that load code stay with the trainer, unless it is trusted" {
    make_adapter source
    "$FANIN_TEST_PYTHON" - source/adapter_config.json <<'END'
import json, sys
config = json.load(open(sys.argv[1]))
config |= {"auto_mapping": {"parent_library": "evil"}, "trust_remote_code": True}
json.dump(config, open(sys.argv[1], "w"))
END
    start_ranks --adapter source --world-size 2
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out safe
    [[ $stderr == *"a_later_field, auto_mapping, trust_remote_code"* ]]
    run -1 grep -e evil -e trust_remote_code safe/adapter_config.json
    run -0 "$NIXL_FETCH" verify "$info" --dir safe
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out whole --trust-config
    [[ $stderr != *auto_mapping* ]]
    grep -q evil whole/adapter_config.json
    run -0 "$NIXL_FETCH" verify "$info" --dir whole --trust-config
    run -14 "$NIXL_FETCH" verify "$info" --dir whole
    # Neither is used where the other is asked for.
    run -11 "$NIXL_FETCH" pull "$info" --out whole
    has "another adapter_config.json"
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

@test "a pull that is killed while it reads: the next one, of any name, clears up and succeeds" {
    start_ranks --adapter-shape small --world-size 3
    start_proxy --hold-reads 100000
    mkdir parent
    "$NIXL_FETCH" pull "$target" --out parent/d --path stream --timeout 60s 2>err 3>&- &
    pull_pid=$!
    read -r -t 60 line <&"$proxy_out"
    [ "$line" = held ]
    kill -KILL "$pull_pid"
    wait "$pull_pid" || [ $? -eq 137 ]
    [ -n "$(ls -A parent)" ]
    [ ! -e parent/d ]
    run -0 "$NIXL_FETCH" pull "$info" --out parent/other --check-pattern
    [ "$(ls -A parent)" = other ]
    stop_ranks
}

@test "serve dies while a pull reads: all ranks end, the pull names a rank and leaves nothing" {
    start_ranks --adapter-shape small --world-size 3
    mapfile -t pids < <(pgrep -P "$ranks_pid")
    [ "${#pids[@]}" -eq 3 ]
    start_proxy --hold-reads 100000
    mkdir parent
    "$NIXL_FETCH" pull "$target" --out parent/d --path stream --timeout 5s --json >out 2>err 3>&- &
    pull_pid=$!
    read -r -t 60 line <&"$proxy_out"
    [ "$line" = held ]
    SECONDS=0
    stop_ranks KILL || [ $? -eq 137 ]
    for pid in "${pids[@]}"; do
        gone "$pid"
    done
    status=0
    wait "$pull_pid" || status=$?
    [ "$status" -eq 13 ]
    [ "$SECONDS" -le 20 ]
    output=$(cat out)
    [[ $(field error address) == 127.0.0.1:* ]]
    [[ $(field error rank) == [0-2] ]]
    [ -z "$(ls -A parent)" ]
}
