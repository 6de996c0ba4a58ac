#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Worlds of ranks that hold an adapter in various ways (integration/test_pull.c has the other cuts).
# Every pull is proven three times: by --check-pattern, by verify, and by the safetensors package.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

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

@test "5 ranks: uneven shards, ranks without rows of lora_A" {
    start_ranks --adapter-shape small --world-size 5
    every_path --shape small
    stop_ranks
}

@test "HSDP: two replicas of every shard, which share the work" {
    start_ranks --adapter-shape small --world-size 4 --replicate 2
    pulled d stream --path stream
    for rank in 0 1 2 3; do
        # A quarter each, give or take a tensor.
        [ "$(field ranks "$rank" bytes)" -gt 2000000 ]
    done
    every_path --shape small
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
