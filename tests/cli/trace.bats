#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Traces of commands.

# shellcheck disable=SC2154 # info is set by ranks.bash

load ranks

# names FILE: the names of its spans, each once; fails if it is not JSON of the kind.
names()
{
    "$FANIN_TEST_PYTHON" -c '
import json, sys
spans = [e for e in json.load(open(sys.argv[1]))["traceEvents"] if e["ph"] == "X"]
assert all(e["dur"] >= 0 and e["ts"] > 0 and "pid" in e and "tid" in e for e in spans)
print(*sorted({e["name"] for e in spans}))' "$1"
}

@test "--trace writes what a pull, a bench and a watch do, and FANIN_TRACE what ranks do" {
    mkdir own
    FANIN_TRACE=$PWD/own start_ranks --adapter-shape small --world-size 2 --run 0 --wait-commit \
        --update-every 50
    run -0 "$NIXL_FETCH" pull "$info" --out a --trace pull.json --path stream
    [[ $(names pull.json) == *attempt*begin*catalog*connect*end*paths*plan*publish*pull*read*wait*write* ]]
    [ "$(stat -c %a pull.json)" = 600 ]
    run -11 --separate-stderr "$NIXL_FETCH" pull "$info" --out b --trace pull.json
    has "cannot make the trace pull.json"
    [ ! -e b ]
    run -0 "$NIXL_FETCH" bench "$info" --iterations 3 --trace bench.json
    [ "$(grep -c '"name":"pull"' bench.json)" -ge 3 ]
    run -0 "$NIXL_FETCH" watch "$info" --count 2 --trace watch.json
    [[ $(names watch.json) == *wait* ]]
    for command in bundle exporter; do
        run -2 "$NIXL_FETCH" "$command" "$info" --trace no.json
        has "it reads no weights itself"
        [ ! -e no.json ]
    done
    stop_ranks
    run -0 "$NIXL_FETCH" trace pull.json own/* --svg pull.svg --merge all.json
    has "1 pulls of 3 processes"
    grep -Eq '^ *1 +read .* slowest|^ *0 +read .* slowest' <<<"$output"
    grep -q '>rank 1</text>' pull.svg
    run -0 "$NIXL_FETCH" trace own/* --svg own.svg
    grep -q '>trainer, rank 1</text>' own.svg
    for option in "--svg own.svg" "--merge pull.json" "--merge all.json"; do
        cp "${option#* }" before
        # shellcheck disable=SC2086
        run -11 "$NIXL_FETCH" trace pull.json own/* $option
        has "${option#* }: File exists: remove it, or give another name"
        cmp before "${option#* }"
    done
    "$FANIN_TEST_PYTHON" -c 'import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])' pull.svg
    [[ $(names all.json) == *begin_update*commit*pull* ]]
    run -0 --separate-stderr "$NIXL_FETCH" trace bench.json --pull 2 --json
    [ "$(field pulls)" -ge 3 ]
    run -2 "$NIXL_FETCH" trace bench.json --pull 99
    echo '{"traceEvents":[{"ph":"X","name":"x","ts":1,"dur":-1}]}' >bad.json
    run -11 "$NIXL_FETCH" trace bad.json
    has "bad.json: it is no trace of this kind"
    lost='{"ph":"i","args":{"spans":9223372036854775807}}'
    echo '{"otherData":{},"traceEvents":['"$lost"']}' >most.json
    run -0 "$NIXL_FETCH" trace most.json
    has "9223372036854775807 spans found no room"
    run -11 "$NIXL_FETCH" trace most.json most.json
    has "most.json: it is no trace of this kind"
    run -11 "$NIXL_FETCH" trace nothing.json
    [ "$(find own -name 'fanin-*.json' | wc -l)" -eq 2 ]
    for file in own/*; do
        [[ $(names "$file") == *begin_update*commit* ]]
    done
}

@test "FANIN_LOG tells a pull in one line, and both ends name its trace" {
    FANIN_LOG=info,$PWD/ranks.log start_ranks --adapter-shape small --world-size 2 --run 0 --wait-commit
    FANIN_LOG=info run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out a
    # shellcheck disable=SC2154 # of bats
    [[ $stderr =~ ' info pull: trace '([0-9a-f]{32})'/1: lora:0 step 1 of ranks 0-1, 336 tensors, ' ]]
    grep -q "info session-open: .*, trace ${BASH_REMATCH[1]}\$" ranks.log
    FANIN_LOG=info run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out b --quiet
    [ -z "$stderr" ]
    FANIN_LOG=debug,own.log run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out c
    [ -z "$stderr" ]
    grep -q ' debug phase: trace .*/1 attempt 1: read ' own.log
    ln -s own.log link.log
    FANIN_LOG=info,link.log run -15 "$NIXL_FETCH" pull "$info" --out d
    has "cannot append to FANIN_LOG's file link.log"
    FANIN_LOG=all run -11 "$NIXL_FETCH" pull "$info" --out d
    has "FANIN_LOG=all is not debug, info or warn"
    stop_ranks
}

# spans NAMES: a trace of so many phases, which rank 2 takes four times as long for as ranks 0 and 1.
spans()
{
    "$FANIN_TEST_PYTHON" -c '
import json, sys
def span(name, rank, took):
    args = {"outcome": "FANIN_OK", "pull": 1, "rank": rank}
    return {"ph": "X", "name": name, "ts": 1000.0, "dur": took, "pid": 1, "tid": 1, "args": args}
names = [f"phase {i}" for i in range(int(sys.argv[1]))]
spans = [span(n, r, 4000.0 if r == 2 else 1000.0) for n in names for r in range(3)]
json.dump({"otherData": {}, "traceEvents": spans}, sys.stdout)' "$1"
}

@test "trace names the rank that is slowest, and by how much" {
    spans 1 >one.json
    run -0 --separate-stderr "$NIXL_FETCH" trace one.json
    has "slowest: rank 2, 4.00 ms in phase 0, 4.0 times as long as the 1.00 ms of the other ranks"
    run -0 --separate-stderr "$NIXL_FETCH" trace one.json --json
    [ "$(field slowest)" = '{"rank": 2, "phase": "phase 0", "median_ns": 4000000, "others_median_ns": 1000000}' ]
    sed 's/4000.0/1500.0/' one.json >even.json
    run -0 --separate-stderr "$NIXL_FETCH" trace even.json --json
    [ "$(field slowest)" = null ]
}

@test "a trace of very many phases is told in no time" {
    spans 20000 >many.json
    timeout 40 "$NIXL_FETCH" trace many.json --json >told.json
    [ "$(grep -c '"slowest": true' told.json)" -eq 20000 ]
}

@test "a log whose reader has stopped is waited for by nobody, and by the end half a second" {
    start_ranks --adapter-shape small --world-size 2 --run 0 --wait-commit
    mkfifo log
    exec {reader}<>log # which reads nothing
    FANIN_LOG=debug,$PWD/log run -0 timeout 60 "$NIXL_FETCH" bench "$info" --iterations 300
    # The pipe is full: each pull has 16 lines or so.
    [ "$(dd if=log bs=4k iflag=nonblock status=none | wc -c)" -gt 60000 ]
    exec {reader}<&-
    stop_ranks
}
