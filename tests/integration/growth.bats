#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Adapters of many tensors: no phase of a pull grows faster than the number of tensors.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

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
    for model in "qwen2.5-0.5b 336" "llama-3.3-70b 1120" "qwen3-30b-a3b 37248"; do
        # shellcheck disable=SC2086
        instructions $model
        counts+=("$count")
    done
    first=$(((counts[1] - counts[0]) / (1120 - 336)))
    second=$(((counts[2] - counts[1]) / (37248 - 1120)))
    printf '%d, %d and %d instructions: %d, then %d a tensor\n' "${counts[@]}" "$first" "$second"
    # Were a phase quadratic, the second would tend to 26 times the first.
    [ "$first" -gt 0 ]
    [ $((second * 4)) -le $((first * 5)) ]
}
