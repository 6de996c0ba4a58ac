#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What bench writes beside its figures.

load ranks

setup_file()
{
    cd "$BATS_FILE_TMPDIR" || return 1
    "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 20 --repeat 2 --json >result.json
}

setup()
{
    cp "$BATS_FILE_TMPDIR/result.json" "$BATS_TEST_TMPDIR/a.json"
    set_up
}

@test "percentiles are those of the samples, which the result has too" {
    "$FANIN_TEST_PYTHON" -c '
import json, math, statistics
o = json.load(open("a.json"))
for name, figure in o["phases"].items():
    values = o["samples"][name]
    ordered = sorted(values)
    assert figure["count"] == 40
    assert figure["median_ns"] == math.floor(statistics.median(values))
    assert figure["p90_ns"] == ordered[35] and figure["p99_ns"] == ordered[39]
    assert figure["min_ns"] == ordered[0] and figure["max_ns"] == ordered[-1]
assert o["limits"][0]["count"] == 5'
}

@test "pulls by TCP stand beside TCP without the library" {
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 1 --json \
        --path stream --no-unix
    "$FANIN_TEST_PYTHON" -c '
import json, sys
o = json.loads(sys.argv[1])
tcp = [limit for limit in o["limits"] if limit["name"] == "TCP"]
assert tcp and tcp[0]["threads"] == 1, o["limits"]
for limit in tcp:
    assert limit["count"] == 5 and limit["min_ns"] > 0 and limit["bytes"] >= o["bytes"]
reads = [limit["threads"] for limit in o["limits"] if limit["name"] == "raw reads"]
assert reads == sorted(set(reads)) and all(limit["threads"] in reads for limit in tcp), o["limits"]' "$output"
    run ! grep -q '"TCP"' a.json
}

@test "pulls by TLS stand beside its cipher" {
    "$NIXL_FETCH" secret launch.secret
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 1 --json \
        --path stream --no-unix --secret-file launch.secret
    "$FANIN_TEST_PYTHON" -c '
import json, sys
limits = json.loads(sys.argv[1])["limits"]
tcp = [limit["threads"] for limit in limits if limit["name"] == "TCP"]
cipher = [limit for limit in limits if limit["name"] == "AES-128-GCM of one end"]
assert [limit["threads"] for limit in cipher] == tcp, limits
for limit in cipher:
    assert limit["count"] == 5 and limit["min_ns"] > 0
    assert 0.01 < limit["bytes"] / limit["min_ns"] < 1000, limit  # GB/s' "$output"
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 1 \
        --path stream --no-unix
    [[ $output != *AES* ]]
}

@test "a result says whether TCP, TLS and checksums were used" {
    output=$(cat a.json)
    [ "$(field secured) $(field no_unix) $(field checksums)" = "false false true" ]
    "$NIXL_FETCH" secret launch
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 1 --iterations 1 --json \
        --path stream --no-unix --no-checksums --secret-file "$PWD/launch"
    [ "$(field secured) $(field no_unix) $(field checksums)" = "true true false" ]
}

@test "into a directory: a link that was planted is not followed, and nothing else is removed" {
    mkdir dest kept
    echo precious >kept/weights.bin
    mkdir dest/fanin-bench-0
    echo mine >dest/fanin-bench-0/x
    # By exec the command has a number that is known beforehand.
    # shellcheck disable=SC2016 # of the inner shell
    run -0 bash -c 'ln -s "$PWD/kept" "dest/fanin-bench-$$-0"; exec "$@"' planted \
        "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 2 --dest dest
    [ "$(cat kept/weights.bin)" = precious ]
    [ "$(cat dest/fanin-bench-0/x)" = mine ]
    [ "$(find dest -mindepth 1 -maxdepth 1 | wc -l)" -eq 2 ]
}
