#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# JSON outputs of all commands against docs/schemas.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup()
{
    set_up
    mkdir out
}

key=lora:0:base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight

# say NAME STATUS WORD...: the command's output, with --json, for the schema NAME.
count=0
say()
{
    local name=$1 wanted=$2 status=0
    shift 2
    count=$((count + 1))
    "$NIXL_FETCH" "$@" --json >"out/$name.$count.json" 2>err || status=$?
    [ "$status" -eq "$wanted" ] || {
        printf '%s: exit status %s: %s\n' "$*" "$status" "$(cat err)" >&2
        return 1
    }
}

# What a host is like decides doctor's exit status.
say_doctor()
{
    count=$((count + 1))
    "$NIXL_FETCH" doctor "$@" --json >"out/doctor.$count.json" 2>err || [ $? -le 4 ]
}

@test "what commands print with --json is what the schemas say" {
    "$FANIN_TEST_PYTHON" -c 'import jsonschema' || skip "needs the package jsonschema"
    start_ranks --adapter-shape small --world-size 2 --replicate 2 --update-every 200 \
        --run 0 --run 1 --wait-commit --json
    echo "$ready" >out/serve.ready.json
    say list 0 list "$info"
    say list 0 list "$info" --run 0
    say list 0 list "$info" --run 0 --map
    say show 0 show "$info" "$key"
    say show 0 show "$info" 'lora:0:*layers.0.*k_proj*'
    say ping 0 ping "$info"
    say secret 0 secret launch.secret
    say ping 0 ping "$info" --trace ping.trace
    say trace 0 trace ping.trace
    say error 11 secret launch.secret
    say watch 0 watch "$info" --count 3 --idle-ms 20
    grep -q '"event":"quiet"' "out/watch.$count.json"
    say status 0 status "$info" --max-age 1h
    say status 0 top "$info" --max-age 1h --count 1
    say pull 0 pull "$info" --out proven --check-pattern
    say pull 0 pull "$info" --out told --progress --path stream
    grep -q '^{"schema":1,"event":"progress",.*"ranks":\[{"rank":0,' "out/pull.$count.json"
    say map 0 map "$FANIN_SOURCE_DIR/tests/support/mapping.json"
    say watch 0 watch "$info" --count 3 # until the pulled step is surely over
    say diff 1 diff proven "$info"
    say diff 0 diff proven proven --limit 1
    say error 2 diff proven
    say bundle 0 bundle "$info" --no-pull --out bundle.tar
    say error 12 verify "$info" --dir proven
    say error 11 show "$info" lora:0:nothing
    say_doctor "$info"
    kill -TERM "$ranks_pid"
    cat <&"$ranks_out" >out/serve.stopped.json
    wait "$ranks_pid"
    start_ranks --adapter-shape small --world-size 3 --keep-going
    say pull 0 pull "$info" --out d
    say pull 0 pull "$info" --out d
    say verify 0 verify "$info" --dir d
    say bench 0 bench "$info" --iterations 1 --repeat 2
    victim=$(rank_pid 1)
    kill -KILL "$victim"
    gone "$victim"
    say list 13 list "$info"
    say list 13 list "$info" --run 0
    say show 13 show "$info" "$key"
    say ping 13 ping "$info"
    say status 13 status "$info"
    say error 13 pull "$info" --out e --timeout 2s
    say error 13 ping 127.0.0.1:1
    say error 13 top 127.0.0.1:1 --count 1
    say error 2 pull "$info"
    stop_ranks
    start_ranks --model qwen2.5-0.5b --full --layers 1 --shrink 16 --world-size 2
    exec {lines}< <(exec "$NIXL_FETCH" relay "$info" full:0 --json 3>&-)
    relay_pid=$!
    read -r -t 60 line <&"$lines"
    echo "$line" >out/relay.step.json
    stop_ranks
    start_ranks --model qwen2.5-0.5b --full --layers 1 --shrink 16 --world-size 2
    read -r -t 60 line <&"$lines"
    echo "$line" >out/relay.launch.json
    kill -TERM "$relay_pid"
    wait "$relay_pid"
    stop_ranks
    say bench 0 bench --adapter-shape small --world-size 2 --iterations 1 --dest .
    if [ -n "${FANIN_TEST_CUDA_LIBRARY-}" ]; then
        export FANIN_CUDA_LIBRARY=$FANIN_TEST_CUDA_LIBRARY
        say bench 0 bench --adapter-shape small --world-size 2 --device 0,1 --dest device:0 \
            --iterations 1 --snapshot --cast bf16
        say_doctor
    fi
    cp "$FANIN_SOURCE_DIR/tests/support/mapping.json" out/mapping.0.json # what Python writes
    "$FANIN_TEST_PYTHON" "$FANIN_SOURCE_DIR/tests/support/validate.py" \
        "$FANIN_SOURCE_DIR/docs/schemas" out
}
