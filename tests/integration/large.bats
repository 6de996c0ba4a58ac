#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Large adapters on eight ranks: every path proven, memory bounded.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

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

# large SHAPE BYTES [DISK]: both paths to a tmpfs, and one to a folder on a disk.
large()
{
    enter_memory
    need_room . "$2"
    start_ranks --adapter-shape "$1" --world-size 8
    mkdir first second
    bounded first "$2" stream
    proven first/stream --shape "$1"
    digests first/stream >wanted
    rm -r first/stream
    bounded second "$2" cma
    diff wanted <(digests second/cma)
    rm -r second/cma
    if [ -n "${3:-}" ] && [ "$(stat -f -c %T "$3")" != tmpfs ]; then
        mkdir "$3/third"
        bounded "$3/third" "$2" stream
        diff wanted <(digests "$3/third/stream")
        rm -r "$3/third"
    fi
    stop_ranks
}

@test "dense: 448 tensors, 84 MB" {
    large dense 83886080 "$PWD"
}

@test "moe: 37,248 tensors, 1.69 GB" {
    large moe 1687683072
}
