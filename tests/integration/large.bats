#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The large adapters on eight ranks: every path proven, memory bounded, and no phase that grows
# faster than the number of tensors.

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

# bounded PLACE BYTES PATH: a pull to PLACE/PATH that takes no more memory than the adapter and 64 MiB.
bounded()
{
    run --separate-stderr "$FANIN_TEST_PYTHON" "$support/peak_memory.py" --place "$1" \
        $(($2 + (64 << 20))) "$NIXL_FETCH" pull "$info" --out "$1/$3" --path "$3" \
        --check-pattern --json
    printf '%s\n' "$stderr"
    [ "$status" -eq 0 ]
    [ "$(field path)" = "$3" ]
    [ "$(field bytes)" = "$2" ]
}

# digests DIRECTORY: of all its files. There is room for one copy of an adapter, not for two.
digests()
{
    "$FANIN_TEST_PYTHON" -c '
import os, sys, xxhash
for name in sorted(os.listdir(sys.argv[1])):
    digest = xxhash.xxh3_128()
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    print(digest.hexdigest(), name)' "$1"
}

# need_room PLACE BYTES: on the file system for an adapter of that size, and in memory for two:
# the one that the ranks are going to hold, and the one that is pulled.
need_room()
{
    local free available
    free=$(($(stat -f -c '%a * %S' "$1")))
    [ "$free" -ge $(($2 + (64 << 20))) ] ||
        skip "$(realpath "$1") has room for $((free >> 20)) MiB only"
    available=$(($(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo) * 1024))
    [ "$available" -ge $((2 * $2 + (512 << 20))) ] ||
        skip "only $((available >> 20)) MiB of memory are available"
}

# large SHAPE BYTES: both paths to a tmpfs and to a disk.
large()
{
    local disk=$PWD path
    enter_memory
    need_room . "$2"
    need_room "$disk" "$2"
    start_ranks --adapter-shape "$1" --world-size 8
    mkdir first second
    bounded first "$2" stream
    proven first/stream --shape "$1"
    digests first/stream >wanted
    rm -r first/stream
    for path in ${FANIN_TEST_UCX_LIBRARY:+cma}; do
        bounded second "$2" "$path"
        diff wanted <(digests "second/$path")
        rm -r "second/$path"
    done
    if [ "$(stat -f -c %T "$disk")" != tmpfs ]; then
        mkdir "$disk/third"
        bounded "$disk/third" "$2" stream
        diff wanted <(digests "$disk/third/stream")
        rm -r "$disk/third"
    fi
    stop_ranks
}

@test "dense: 448 tensors, 84 MB" {
    large dense 83886080
}

@test "moe: 37,248 tensors, 1.69 GB" {
    large moe 1687683072
}

@test "moe-fused: 576 tensors, 1.98 GB" {
    large moe-fused 1989672960
}

# counted MODEL: pulls its adapter of rank 1 through a proxy; sets $output to the frames.
counted()
{
    start_ranks --model "$1" --r 1 --world-size 4 --no-ucx
    start_proxy
    run -0 --separate-stderr "$NIXL_FETCH" pull "$target" --out "$1" --path stream --json
    tensors=$(field tensors)
    stop_proxy
    stop_ranks
    rm -r "$1"
}

# frames NAME: how many ranks saw it, how many there were, bytes of their bodies.
frames()
{
    printf '%s\n' "$output" | "$FANIN_TEST_PYTHON" -c '
import json, sys
seen = [rank[sys.argv[1]] for rank in json.load(sys.stdin)["ranks"] if sys.argv[1] in rank]
print(len(seen), sum(s[0] for s in seen), sum(s[1] for s in seen))' "$1"
}

@test "the key table is sent once; tables and requests grow as the tensors do, or less" {
    enter_memory
    counted llama-3.3-70b
    few=$tensors
    [ "$few" -eq 1120 ]
    for name in keys_ok boxes_ok; do
        read -r _ _ "few_${name?}" < <(frames "$name")
    done
    counted qwen3-30b-a3b
    [ "$tensors" -eq 37248 ]
    # One rank's table, in pages of a megabyte: no page comes twice.
    read -r ranks pages bytes < <(frames keys_ok)
    [ "$ranks" -eq 1 ]
    [ "$pages" -le $((bytes / (1 << 20) + 1)) ]
    [ $((bytes * few)) -le $((few_keys_ok * tensors * 11 / 10)) ]
    # Of each rank its own, at most 4 bytes a box.
    read -r ranks pages bytes < <(frames boxes_ok)
    [ "$ranks" -eq 4 ]
    [ "$bytes" -le $((4 * tensors * 4)) ]
    [ $((bytes * few)) -le $((few_boxes_ok * tensors * 11 / 10)) ]
    # All else is a few frames a rank, however many tensors there are.
    for name in hello wait begin end; do
        read -r ranks pages bytes < <(frames "$name")
        [ "$pages" -le $((4 * 8)) ]
        [ "$bytes" -le $((4 * 8 * 256)) ]
    done
    # Reads hold a megabyte or thousands of pieces each.
    read -r ranks pages bytes < <(frames read_ok)
    [ "$ranks" -eq 4 ]
    [ "$pages" -le $((4 * 2 + bytes / (1 << 20) + tensors / 1000)) ]
}

# instructions MODEL TENSORS: what a whole pull executes, in user mode, as valgrind counts, but for
# hashing, which follows the bytes; sets $count.
instructions()
{
    start_ranks --model "$1" --r 1 --world-size 4 --no-ucx
    valgrind --tool=callgrind --callgrind-out-file=profile "$NIXL_FETCH" pull "$info" --out "$1" \
        --path stream --no-ucx -q --timeout 200s >out 2>err
    grep -q "^tensors  *$2\$" out
    stop_ranks
    rm -r "$1"
    callgrind_annotate --threshold=100 profile >annotated
    count=$(awk '{ gsub(",", "", $1) }
        /PROGRAM TOTALS/ { total = $1 }
        /\[.*libxxhash/ { hashing += $1 }
        END { if (total && hashing) print total - hashing }' annotated)
    [ -n "$count" ]
}

@test "a cold pull's work for one more tensor does not grow with their number" {
    command -v valgrind >/dev/null || skip "no valgrind"
    enter_memory
    local counts=()
    for model in "llama-3.3-70b 1120" "qwen3-30b-a3b 37248" "qwen3-235b-a22b 72944"; do
        # shellcheck disable=SC2086
        instructions $model
        counts+=("$count")
    done
    first=$(((counts[1] - counts[0]) / (37248 - 1120)))
    second=$(((counts[2] - counts[1]) / (72944 - 37248)))
    printf '%d, %d and %d instructions: %d, then %d a tensor\n' "${counts[@]}" "$first" "$second"
    # Were a phase quadratic, the second would tend to three times the first.
    [ "$first" -gt 0 ]
    [ $((second * 4)) -le $((first * 5)) ]
}
