#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Reading commands against four stand-in ranks that stay at step 1.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup_file()
{
    start_ranks --adapter-shape small --world-size 4 --run 0 --run best.1 \
        --world-id 000102030405060708090a0b0c0d0e0f --name job
}

teardown_file()
{
    stop_ranks
}

key=base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight

@test "the ready line gives process, step and target" {
    [[ $ready =~ ^ready:\ pid\ $ranks_pid,\ 4\ ranks,\ step\ 1,\ target\ (127\.0\.0\.1:[0-9]+,?){4}$ ]]
    run -0 "$NIXL_FETCH" ping "${ready##* }"
}

@test "ping: one row a rank, and JSON" {
    run -0 "$NIXL_FETCH" ping "$info"
    [ "$(grep -c ' ok *$' <<<"$output")" -eq 4 ]
    has job_3
    has "world 000102030405060708090a0b0c0d0e0f of 4 ranks, fanin "
    while read -r line; do
        [ "${#line}" -le 80 ]
    done <<<"$output"
    run -0 "$NIXL_FETCH" ping "$info" --json
    [ "$(field healthy)" = true ]
    [ "$(field ranks 3 rank)" = 3 ]
    [ "$(field ranks 0 world_id)" = 000102030405060708090a0b0c0d0e0f ]
}

@test "ping: one rank of several, by its address alone" {
    run -0 "$NIXL_FETCH" ping "${ready##*,}"
    grep -Eq '^ *3 127.0.0.1:[0-9]+ .* ok *$' <<<"$output"
    [ "$(grep -c ' ok *$' <<<"$output")" -eq 1 ]
    has "of 4 ranks"
    run -0 "$NIXL_FETCH" ping "${ready##*,}" --json
    [ "$(field ranks 0 world_size)" = 4 ]
    [ "$(field addresses)" = 1 ]
    # Whoever says how many ranks there are is believed.
    run -14 "$NIXL_FETCH" ping "${ready##*,}" --world-size 1
}

@test "ping fails when one of the ranks is missing" {
    target=${ready##* }
    run -13 --separate-stderr "$NIXL_FETCH" ping "${target%,*},127.0.0.1:1" --json
    [ "$(field healthy)" = false ]
    [ "$(field answered)" = 3 ]
    has "3 of 4 ranks answered"
}

@test "list: runs with state, step and metadata" {
    run -0 "$NIXL_FETCH" list "$info"
    grep -Eq '^best\.1 +stable +1 ' <<<"$output"
    [ "$(grep -c 'rank [0-3] *stable' <<<"$output")" -eq 8 ]
    has "run 0: lora_alpha = 16"
    run -0 "$NIXL_FETCH" list "$info" --json
    [ "$(field runs 1 run)" = best.1 ]
    [ "$(field runs 0 ranks 2 state)" = stable ]
    [ "$(field runs 0 metadata r)" = 8 ]
    [ "$(field runs 0 bytes)" = 8798208 ]
    [ "$(field runs 0 ranks 1 state_age_ns)" -gt 0 ]
    [ "$(field runs 0 ranks 1 commit_age_ns)" -gt 0 ]
    [ "$(field missing)" = "[]" ]
}

@test "list --run: keys with dtype, shape, ranks and bytes" {
    run -0 "$NIXL_FETCH" list "$info" --run 0
    [ "${#lines[@]}" -eq 337 ]
    grep -Eq "^lora:0:$key +BF16 +\[8, 896\] +0-3 +14336$" <<<"$output"
    run -0 "$NIXL_FETCH" list "$info" --run best.1 --json
    [ "$(field keys 0 dtype)" = BF16 ]
    [ "$(field keys 0 ranks)" = "[0, 1, 2, 3]" ]
}

@test "show: boxes, by the whole key or by name and run" {
    run -0 "$NIXL_FETCH" show "$info" "lora:best.1:$key"
    grep -Eq '^ *3 +\[6, 0\] +\[2, 896\] +3584 .* packed +-$' <<<"$output"
    cp <(echo "$output") by-key
    run -0 "$NIXL_FETCH" show "$info" "$key" --run best.1
    diff by-key <(echo "$output")
    run -0 "$NIXL_FETCH" show "$info" "lora:0:$key" --json
    [ "$(field owners 1 offset)" = "[2, 0]" ]
    [ "$(field distinct_bytes)" = 14336 ]
}

@test "show: a pattern shows the keys that are like it" {
    run -0 "$NIXL_FETCH" show "$info" 'lora:0:*.layers.1.*.[kv]_proj.lora_?.weight'
    [ "$(grep -c '^key ' <<<"$output")" -eq 4 ]
    [ "$(grep -c 'layers.1.self_attn.v_proj.lora_B' <<<"$output")" -eq 1 ]
    run -0 "$NIXL_FETCH" show "$info" '*.layers.1.*.[kv]_proj.lora_?.weight' --run best.1 --json
    [ "$(field publication)" = lora:best.1 ]
    [ "$(field keys 3 shape)" = "[128, 8]" ]
    run -11 "$NIXL_FETCH" show "$info" 'lora:0:*nothing*'
    has "no key of lora:0 is like '*nothing*'"
}

@test "a name that is not there gets a suggestion" {
    run -11 "$NIXL_FETCH" show "$info" lora:0:base_model.model.model.layers.0.self_attn.k_prj.lora_A.weight
    has "did you mean '$key'?"
    run -11 "$NIXL_FETCH" show "$info" lora:0:nothing.like.it
    [[ $output != *"did you mean"* ]]
    for command in list "pull --out d" "show key"; do
        # shellcheck disable=SC2086
        set -- $command
        run -11 "$NIXL_FETCH" "$1" "$info" "${@:2}" --run bset.1 --timeout 5s
        has "did you mean the run 'best.1'?"
    done
    run -11 "$NIXL_FETCH" list "$info" --run quite-another --timeout 5s
    has "the ranks have the runs 0, best.1"
}

@test "what is not there is exit status 11 and named" {
    run -11 "$NIXL_FETCH" show "$info" lora:0:no.such.key
    has no.such.key
    run -11 "$NIXL_FETCH" pull "$info" --run other --out d --timeout 2s
    has lora:other
    [ ! -e d ]
}

@test "pull: whole, proven, reused, and refused in the place of another" {
    run -0 "$NIXL_FETCH" pull "$info" --out d --check-pattern
    has "all 8798208 bytes are those of step 1"
    [ "$(ls d)" = "$(printf '%s\n' adapter_config.json adapter_model.safetensors fanin.json)" ]
    run -0 "$NIXL_FETCH" pull "$info" --out d --check-pattern --json
    [ "$(field reused)" = true ]
    [ "$(field pattern)" = equal ]
    run -11 "$NIXL_FETCH" pull "$info" --run best.1 --out d
    mkdir full
    touch full/file
    run -11 "$NIXL_FETCH" pull "$info" --out full
    run -15 "$NIXL_FETCH" pull "$info" --out no/such/place
    [ "$(ls)" = "$(printf '%s\n' d full)" ]
}

@test "pull: the bytes are those of an independent implementation" {
    "$FANIN_TEST_PYTHON" -c 'import numpy, xxhash' || skip "needs the packages numpy and xxhash"
    run -0 "$NIXL_FETCH" pull "$info" --run best.1 --out d
    run -0 "$FANIN_TEST_PYTHON" "$FANIN_SOURCE_DIR/tests/support/pattern.py" check d
    [ "$output" = "ok: 336 tensors of step 1" ]
}

@test "pull: JSON has phases, path and every rank's share" {
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out d --path stream --no-unix --json
    [ "$(field path)" = stream ]
    [ "$(field step)" = 1 ]
    [ "$(field world_id)" = 000102030405060708090a0b0c0d0e0f ]
    [ "$(field ranks 3 rank)" = 3 ]
    [ "$(field phases_ns total)" -gt 0 ]
    whole=$(field phases_ns read)
    own=()
    for rank in 0 1 2 3; do
        own+=("$(field ranks "$rank" read_ns)")
        [ "${own[rank]}" -gt 0 ]
        [ "${own[rank]}" -le "$whole" ]
    done
    [ "$(printf '%s\n' "${own[@]}" | sort -u | wc -l)" -gt 1 ] # each rank's own
    [ "$(field peak_resident_bytes)" -lt $((8798208 + 67108864)) ]
}

@test "pull: a step that is not reached, a wrong world, a wrong name" {
    run -12 "$NIXL_FETCH" pull "$info" --out d --step 5 --timeout 500ms
    has "step 5"
    run -12 "$NIXL_FETCH" pull "$info" --out d --min-step 2 --timeout 500ms
    run -14 "$NIXL_FETCH" pull "$info" --out d --expect-world-id ffffffffffffffffffffffffffffffff
    has "another world id than was demanded: connect to the launch that is meant"
    run -14 "$NIXL_FETCH" pull "$info" --out d --server-name other
    has "connect to the job that is meant, or change the name"
    run -14 "$NIXL_FETCH" pull "${ready##*,}" --out d
    [ -z "$(ls)" ]
}

# recode OPTION...: a copy of the info file with other fields, as info.json.
recode()
{
    "$FANIN_TEST_PYTHON" -c '
import json, sys
o = json.load(open(sys.argv[1]))
o.update(json.loads(sys.argv[2]))
json.dump(o, open("info.json", "w"))' "$info" "$1"
}

@test "the info file says which world and which job is meant" {
    recode '{"world_id": "ffffffffffffffffffffffffffffffff"}'
    for command in list ping watch "pull --out d" "verify --dir d"; do
        # shellcheck disable=SC2086
        [[ $command != verify* ]] || "$NIXL_FETCH" pull "$info" --out d
        # shellcheck disable=SC2086
        run -14 "$NIXL_FETCH" $command info.json --timeout 5s
        has "another world id than was demanded"
        [[ $command == verify* ]] || [ ! -e d ]
    done
    run -0 "$NIXL_FETCH" list info.json --expect-world-id 000102030405060708090a0b0c0d0e0f
    recode '{"server_name": "other"}'
    run -14 "$NIXL_FETCH" list info.json
    has "belongs to another job"
    has info.json
    run -0 "$NIXL_FETCH" list info.json --server-name job
    [ "$(grep -c '"server_name": "job"' "$info")" -eq 1 ]
}

@test "ranks of two launches in one info file: what may be left of the earlier one is told" {
    exec {later}< <(exec "$NIXL_FETCH" serve --adapter-shape small --world-size 4 --name job --info later.json 3>&-)
    pid=$!
    read -r -t 60 _ <&"$later"
    recode "{\"world_id\": null, \"hosts\": $("$FANIN_TEST_PYTHON" -c '
import json, sys
earlier, later = (json.load(open(name))["hosts"] for name in sys.argv[1:])
print(json.dumps(earlier[:3] + later[3:]))' "$info" later.json)}"
    run -14 "$NIXL_FETCH" list info.json
    kill "$pid"
    has "of another world (launch) than"
    has "a rank of an earlier launch may still be alive"
    has "info.json names the ranks"
}

@test "list: a rank that answers and does not hold a run is absent from it" {
    own=()
    pids=()
    for run in first second; do
        exec {out}< <(exec "$NIXL_FETCH" serve --adapter-shape small --world-size 2 --run $run \
            --world-id 00112233445566778899aabbccddeeff 3>&-)
        pids+=("$!")
        read -r -t 60 line <&"$out"
        own+=("${line##* }")
    done
    target=${own[0]%,*},${own[1]#*,}
    run -0 --separate-stderr "$NIXL_FETCH" list "$target"
    table=$output
    run -0 --separate-stderr "$NIXL_FETCH" list "$target" --json
    kill "${pids[@]}"
    [ "$(field runs 0 absent)" = "[1]" ]
    [ "$(field runs 1 absent)" = "[0]" ]
    grep -q "^first *stable, 1 of 2 ranks" <<<"$table"
    [ "$(grep -c "rank [01] *absent" <<<"$table")" -eq 2 ]
}

@test "a directory with nixl_info.json, and FANIN_TRAINER, are targets" {
    mkdir step_1
    cp "$info" step_1/
    run -0 "$NIXL_FETCH" list step_1
    FANIN_TRAINER=$PWD/step_1 run -0 "$NIXL_FETCH" ping
    FANIN_TRAINER=${ready##* } run -0 "$NIXL_FETCH" list
    NIXL_FETCH_SERVERS=$info FANIN_TRAINER=./nowhere run -0 "$NIXL_FETCH" list
}

@test "one rank of several cannot be listed alone, and the message says how to go on" {
    run -14 "$NIXL_FETCH" list "${ready##*,}"
    has "--world-size N"
}

@test "a --world-size that the ranks do not have: the message says which one they have" {
    first=${ready##* }
    for command in list ping "show key" "pull --out d"; do
        # shellcheck disable=SC2086
        set -- $command
        run -14 "$NIXL_FETCH" "$1" "${first%%,*}" "${@:2}" --world-size 5
        has "says the world size is 4"
        has "give --world-size 4"
        [[ $output != *"address of every rank"* ]]
    done
}

@test "verify: equal, a changed byte, a missing tensor, another run" {
    "$NIXL_FETCH" pull "$info" --out d
    run -0 "$NIXL_FETCH" verify "$info" --dir d
    has "equal: 336 tensors, 8798208 bytes of lora:0 at step 1 (adapter_model.safetensors)"
    has "(adapter_config.json)"
    run -0 "$NIXL_FETCH" verify "$info" --dir d --json
    [ "$(field result)" = equal ]
    [ "$(field files 1)" = adapter_config.json ]
    run -14 "$NIXL_FETCH" verify "$info" --run best.1 --dir d
    printf '\377\376' | dd of=d/adapter_model.safetensors bs=1 seek=5000000 conv=notrunc status=none
    run -14 --separate-stderr "$NIXL_FETCH" verify "$info" --dir d --json
    [[ $(field error key) == lora:0:base_model.* ]]
    has "not equal"
    rm d/fanin.json
    run -14 "$NIXL_FETCH" verify "$info" --dir d
    has fanin.json
}

@test "verify: another configuration, missing files, a missing directory" {
    "$NIXL_FETCH" pull "$info" --out d
    cp -r d other
    sed -i 's/"lora_alpha": 16/"lora_alpha": 64/' other/adapter_config.json
    run -14 "$NIXL_FETCH" verify "$info" --dir other
    has "lora_alpha is 64 in the file, 16 on the ranks"
    for file in adapter_config.json adapter_model.safetensors; do
        rm -rf less
        cp -r d less
        rm less/$file
        run -14 "$NIXL_FETCH" verify "$info" --dir less
        has $file
    done
    run -11 "$NIXL_FETCH" verify "$info" --dir nowhere
    has "nowhere: No such file or directory"
    touch file
    run -11 "$NIXL_FETCH" verify "$info" --dir file
}

@test "watch: tells the step that stands, then waits until its time is over" {
    run -12 --separate-stderr "$NIXL_FETCH" watch "$info" --timeout 2s --json
    [ "$(grep -c '"step":1,' <<<"$output")" -eq 1 ]
    run -0 "$NIXL_FETCH" watch "$info" --count 1
    [[ $output =~ ^[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\.[0-9]{3}\ \ step\ 1\ \ ranks\ apart\  ]]
}

@test "pull --step: says whom it waits for, unless it is to be quiet" {
    until_it_says 'waiting for step 5 of lora:0: ranks 0-3 stable at step 1 for [0-9]+ (ms|s|min)$' \
        "$NIXL_FETCH" pull "$info" --out d --step 5
    run -12 --separate-stderr "$NIXL_FETCH" pull "$info" --out d --step 5 --timeout 2500ms --quiet
    [[ $stderr != *"waiting for"* ]]
}

@test "watch: says what the ranks do while no step comes" {
    until_it_says '  no step for [0-9]+ m?s: ranks 0-3 stable at step 1 for [0-9]+ (ms|s|min)$' \
        "$NIXL_FETCH" watch "$info" --idle-ms 100
    until_it_says '"quiet"' "$NIXL_FETCH" watch "$info" --idle-ms 100 --json
    output=$(grep -m 1 '"quiet"' "$BATS_TEST_TMPDIR/said")
    [ "$(field quiet_ns)" -ge 100000000 ]
    [ "$(field ranks 3 state)" = stable ]
    [ "$(field ranks 3 state_age_ns)" -gt 0 ]
}

@test "watch: a run that is not there is refused, with the names of those that are" {
    run -11 "$NIXL_FETCH" watch "$info" --run other --timeout 20s
    has "lora:other"
    has "they publish lora:0, lora:best.1"
}

@test "bench against ranks that run, to memory and to a directory" {
    run -0 "$NIXL_FETCH" bench "$info" --iterations 3 --json
    [ "$(field pattern_checked)" = true ]
    [ "$(field iterations)" = 3 ]
    [ "$(field phases total median_ns)" -gt 0 ]
    run -0 "$NIXL_FETCH" bench "$info" --iterations 2 --cold
    has "each by a new client"
    run -0 "$NIXL_FETCH" bench "$info" --iterations 2 --dest .
    [ -z "$(ls -A)" ]
}

@test "completion asks the ranks for runs and keys" {
    run -0 "$NIXL_FETCH" __complete line pull "$info" --run ""
    [ "$output" = "$(printf '0\nbest.1')" ]
    run -0 "$NIXL_FETCH" __complete line show "$info" lora:0:base_model.model.model.layers.23.mlp.up
    [ "${#lines[@]}" -eq 2 ]
    FANIN_TRAINER=$info run -0 "$NIXL_FETCH" __complete line show lora:0:base_model.model.model.layers.23.mlp.up
    [ "${#lines[@]}" -eq 2 ]
    run -0 "$NIXL_FETCH" __complete line show 127.0.0.1:1 ""
    [ -z "$output" ]
}

@test "completion offers no key that a shell would act on" {
    mkdir adapter
    echo '{"peft_type": "LORA", "r": 8}' >adapter/adapter_config.json
    "$FANIN_TEST_PYTHON" -c '
import json, struct
names = ["base_model.model.x.lora_A.weight", "base_model.model.$(id).lora_A.weight", "base_model.model.x y;z.lora_A.weight"]
header = json.dumps({name: {"dtype": "F32", "shape": [8, 2], "data_offsets": [64 * i, 64 * i + 64]}
                     for i, name in enumerate(names)}).encode()
header += b" " * (-len(header) % 8)
open("adapter/adapter_model.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + bytes(192))'
    exec {hostile}< <(exec "$NIXL_FETCH" serve --adapter adapter --world-size 1 3>&-)
    pid=$!
    read -r -t 60 line <&"$hostile"
    run -0 "$NIXL_FETCH" __complete line show "${line##* }" ""
    kill "$pid"
    [ "$output" = lora:0:base_model.model.x.lora_A.weight ]
}
