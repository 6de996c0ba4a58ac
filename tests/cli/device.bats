#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# GPU memory through the command, with a driver that needs no GPU: ranks on devices, destinations
# on devices, snapshots and casts, what the benchmark says of them, refusals.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup()
{
    set_up
    [ -n "${FANIN_TEST_CUDA_LIBRARY-}" ] || skip "built without CUDA"
    export FANIN_CUDA_LIBRARY=$FANIN_TEST_CUDA_LIBRARY
}

# proven DEST PATH OPTION...: pulls into memory, each proven, go by that path.
proven()
{
    local dest=$1 path=$2
    shift 2
    run -0 "$NIXL_FETCH" bench "$info" --dest "$dest" --iterations 2 --check-pattern --json "$@"
    [ "$(field path)" = "$path" ]
    [ "$(field all_checked)" = true ]
}

# proven_directory PATH OPTION...: the same of an adapter directory.
proven_directory()
{
    local path=$1
    shift
    rm -rf adapter
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out adapter --check-pattern --json "$@"
    [ "$(field path)" = "$path" ]
    [ "$(field pattern)" = equal ]
    [ "$(field pattern_bytes)" -gt 1000000 ]
}

every_way()
{
    for dest in device:0 device:1 memory; do
        proven "$dest" cuda_ipc
        proven "$dest" stream --path stream
    done
    proven_directory cuda_ipc
    proven_directory stream --path stream
}

@test "shards on two devices: into either, the host's memory and a directory, by both paths" {
    start_ranks --adapter-shape small --world-size 3 --device 0,1
    every_way
    has '"map"'
    has '"table"'
    run -0 "$NIXL_FETCH" pull "$info" --out people
    has "cuda_ipc"
    run -0 "$NIXL_FETCH" verify "$info" --dir people
    stop_ranks
}

@test "host,0 mixes: each rank by its own path, told by groups" {
    start_ranks --adapter-shape small --world-size 4 --device host,0
    run -0 "$NIXL_FETCH" bench "$info" --dest device:1 --iterations 2 --check-pattern --json
    proven memory stream --path stream
    run -0 "$NIXL_FETCH" pull "$info" --out people --check-pattern
    has "cuda_ipc, ranks 2-3"
    has "ranks 0-1"
    stop_ranks
}

@test "ready line and statistics of ranks on devices" {
    start_ranks --adapter-shape small --world-size 2 --device 0,1 --json \
        --snapshot --wait-commit --update-every 5 --steps 4
    [[ $ready == *'"device":0'* && $ready == *'"device":1'* ]]
    run -0 "$NIXL_FETCH" pull "$info" --out d --step 4 --check-pattern
    kill -TERM "$ranks_pid"
    read -r -t 60 output <&"$ranks_out"
    wait "$ranks_pid"
    [ "$(field ranks 0 commits)" = 4 ]
    [ "$(field ranks 1 commits_withdrawn)" = 0 ]
    [ "$(field ranks 1 commit_ns | tr -cd , | wc -c)" -eq 3 ]
    ranks_pid=
}

@test "--dtype converts on the way, in each kind of destination" {
    start_ranks --model qwen2.5-0.5b --r 3 --dtype f32 --world-size 2 --device 0
    for how in "auto bf16" "stream f16"; do
        read -r path dtype <<<"$how"
        for dest in memory device:1; do
            run -0 "$NIXL_FETCH" bench "$info" --dest "$dest" --path "$path" \
                --pull-dtype "$dtype" --iterations 2 --check-pattern
        done
        rm -rf d
        run -0 "$NIXL_FETCH" pull "$info" --out d --path "$path" --dtype "$dtype" --check-pattern
        grep -aq "\"${dtype^^}\"" d/adapter_model.safetensors
    done
    stop_ranks
}

@test "bench of own ranks: limits, commits, a spare file, cold" {
    run -0 --separate-stderr "$NIXL_FETCH" bench --model qwen2.5-0.5b --r 2 --world-size 3 --device 0,1 --dest device:1 \
        --snapshot --cast bf16 --commits 5 --iterations 3 --repeat 2 --json
    [ "$(field commit ranks 2 commits)" = 5 ]
    [ "$(field commit median_ns)" -gt 0 ]
    [ "$(field rounds 1 total)" -gt 0 ]
    has "copy of one buffer, GPU 0 to GPU 1"
    has "copy of one buffer, GPU 1 to GPU 0"
    has "copy of one buffer on GPU 1"
    has "all of them to their end at once"
    mkdir dir
    run -0 "$NIXL_FETCH" bench --model qwen2.5-0.5b --r 2 --world-size 2 --device 0 --dest dir \
        --spare-file --pause 50 --iterations 4 --check-pattern
    has "limit: pages of a fresh file, 4 threads"
    has "limit: pinning its pages"
    has "limit: copies into the file's pinned pages"
    [ -z "$(ls -A dir)" ]
    run -0 --separate-stderr "$NIXL_FETCH" bench --model qwen2.5-0.5b --r 2 --world-size 2 --device 0 --dest device:0 \
        --cold --iterations 2 --json
    [ "$(field phases map median_ns)" -gt 0 ]
    [ "$(field phases table median_ns)" -gt 0 ]
}

@test "without CUDA: ranks refuse devices in words, workers take the stream" {
    FANIN_CUDA_LIBRARY='' run -15 "$NIXL_FETCH" serve --adapter-shape small --world-size 1 --device 0
    has "no CUDA"
    FANIN_CUDA_LIBRARY=/nonexistent run -15 "$NIXL_FETCH" bench --world-size 1 --device 0
    has "/nonexistent"
    start_ranks --adapter-shape small --world-size 2 --device 0
    FANIN_CUDA_LIBRARY='' proven memory stream
    FANIN_CUDA_LIBRARY='' proven_directory stream
    FANIN_CUDA_LIBRARY='' run -15 "$NIXL_FETCH" bench "$info" --dest device:0
    stop_ranks
}

@test "wrong use: devices, lists, casts, types" {
    run -11 "$NIXL_FETCH" serve --adapter-shape small --world-size 1 --device 5
    has "device 5"
    run -2 "$NIXL_FETCH" serve --adapter-shape small --device 0,,1
    run -2 "$NIXL_FETCH" serve --adapter-shape small --device hosts
    run -2 "$NIXL_FETCH" serve --adapter-shape small --device 0,1,0 --world-size 2
    has "more devices than ranks"
    run -2 "$NIXL_FETCH" serve --adapter-shape small --cast bf16
    has "--snapshot"
    run -2 "$NIXL_FETCH" serve --adapter-shape small --snapshot --cast f32
    run -2 "$NIXL_FETCH" bench --pull-dtype int8
    run -2 "$NIXL_FETCH" bench --dest device:x
    run -2 "$NIXL_FETCH" bench 127.0.0.1:1 --device 0
    run -2 "$NIXL_FETCH" pull 127.0.0.1:1 --out d --dtype f64
}

@test "gpu-check says when there is no GPU, gpu-pack makes a folder that runs" {
    mkdir empty
    touch empty/mine
    PATH=$PWD/empty run -77 "$(python3 -c 'import sys; print(sys.executable)')" \
        "$FANIN_SOURCE_DIR/tools/gpu-check" "$FANIN_BUILD_DIR"
    has "no GPU: skipped"
    run -0 "$FANIN_SOURCE_DIR/tools/gpu-pack" "$FANIN_BUILD_DIR" packed --tar packed.tar.gz
    [ -x packed/gpu-check ]
    [ "$(stat -c %s packed.tar.gz)" -lt 62914560 ]
    LD_LIBRARY_PATH=packed/lib run -0 packed/bin/nixl-fetch --version
    run -1 "$FANIN_SOURCE_DIR/tools/gpu-pack" "$FANIN_BUILD_DIR" empty
    has "something else"
}

@test "a benchmark's own ranks do not warn of its own mappings" {
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 4 \
        --device 0,1 --dest device:0 --iterations 2
    [ -z "$stderr" ]
}

@test "verifying is measured beside the read, and said of a directory" {
    start_ranks --adapter-shape small --world-size 3 --device 0,1
    for path in cuda_ipc stream; do
        proven device:1 "$path" --path "$path"
        [ "$(field phases verify max_ns)" -eq 0 ]
        proven device:1 "$path" --path "$path" --verify
        [ "$(field phases verify min_ns)" -gt 0 ]
        proven_directory "$path" --path "$path" --verify
        [ "$(field verified)" = true ]
        [ "$(field phases_ns verify)" -gt 0 ]
    done
    run -0 "$NIXL_FETCH" bench "$info" --dest device:0 --iterations 2 --verify
    [[ "$output" =~ verify\ .*B/s ]]
}
