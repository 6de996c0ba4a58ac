#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Worlds of 1 to 16 ranks that hold the small adapter in various ways. Every pull is proven three
# times: by --check-pattern, by verify, and by the safetensors package.

# shellcheck disable=SC2154 # of pulls.bash

bats_require_minimum_version 1.5.0

setup()
{
    load pulls
    setup_pulls
}

teardown()
{
    teardown_pulls
}

# every_path PROOF...: the whole adapter over each path; PROOF: options of check_pulled.py.
every_path()
{
    pulled unix stream --path stream --run "${run:-0}"
    proven unix "$@"
    pulled tcp stream --path stream --no-unix --run "${run:-0}"
    same unix tcp
    pulled cma cma --path cma --run "${run:-0}"
    same unix cma
    run -0 "$NIXL_FETCH" verify "$info" --dir unix
    has "equal: "
    rm -r unix tcp cma
}

world()
{
    start_ranks --adapter-shape small --world-size "$1"
    every_path --shape small
    stop_ranks
}

@test "1 rank" {
    world 1
}

@test "2 ranks" {
    world 2
}

@test "3 ranks: uneven shards" {
    world 3
}

@test "5 ranks: uneven shards, ranks without rows of lora_A" {
    world 5
}

@test "8 ranks" {
    world 8
}

@test "16 ranks: half of them have no rows of lora_A" {
    world 16
}

@test "HSDP: two and three replicas of every shard, which share the work" {
    start_ranks --adapter-shape small --world-size 4 --replicate 2
    pulled d stream --path stream
    for rank in 0 1 2 3; do
        # A quarter each, give or take a tensor.
        [ "$(field ranks "$rank" bytes)" -gt 2000000 ]
    done
    every_path --shape small
    stop_ranks
    start_ranks --adapter-shape small --world-size 6 --replicate 3
    every_path --shape small
    stop_ranks
}

@test "cut in dimension 1" {
    start_ranks --adapter-shape small --world-size 3 --shard-dim 1
    every_path --shape small
    stop_ranks
}

@test "float32, an odd rank, and the default model's cut" {
    start_ranks --model qwen2.5-0.5b --r 3 --dtype f32 --world-size 5
    every_path --model qwen2.5-0.5b --r 3 --dtype f32
    stop_ranks
}

@test "float16 cut in dimension 1 with replicas" {
    start_ranks --model qwen2.5-0.5b --r 5 --dtype f16 --world-size 4 --replicate 2 --shard-dim 1
    every_path --model qwen2.5-0.5b --r 5 --dtype f16
    stop_ranks
}

@test "several runs, each its own bytes" {
    start_ranks --adapter-shape small --world-size 3 --run a --run b.2
    run=a every_path --shape small --run a
    run=b.2 every_path --shape small --run b.2
    pulled a stream --run a --path stream
    pulled b stream --run b.2 --path stream
    run -1 cmp "a/$file" "b/$file"
    stop_ranks
}

@test "while ranks update, pulls over each path are whole and of one step" {
    start_ranks --adapter-shape small --world-size 3 --update-every 100
    for path in stream cma; do
        pulled "$path" "$path" --path "$path" --min-step 3
        [ "$(field step)" -ge 3 ]
        proven "$path" --shape small
    done
    stop_ranks
}
