#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What bench writes beside its figures, and the comparison of two results.

bats_require_minimum_version 1.5.0

setup_file()
{
    cd "$BATS_FILE_TMPDIR" || return 1
    "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 20 --repeat 2 --json \
        --csv pulls.csv --html 'a report.html' >result.json
}

setup()
{
    load ranks
    unset NIXL_FETCH_SERVERS NIXL_FETCH_TIMEOUT FANIN_TRAINER FANIN_SECRET_FILE
    cd "$BATS_TEST_TMPDIR" || return 1
    cp "$BATS_FILE_TMPDIR/result.json" a.json
}

# altered FILE STATEMENT...: a.json after Python's statements about the object `o`.
altered()
{
    local file=$1
    shift
    "$FANIN_TEST_PYTHON" -c '
import json, sys
o = json.load(open("a.json"))
for statement in sys.argv[2:]:
    exec(statement)
json.dump(o, open(sys.argv[1], "w"))' "$file" "$@"
}

@test "percentiles are those of the samples, which the CSV file has too" {
    cd "$BATS_FILE_TMPDIR"
    "$FANIN_TEST_PYTHON" -c '
import csv, json, math, statistics
o = json.load(open("result.json"))
rows = list(csv.DictReader(open("pulls.csv")))
assert [(int(r["round"]), int(r["pull"])) for r in rows] == [(i, j) for i in range(2) for j in range(20)]
for name, figure in o["phases"].items():
    values = o["samples"][name]
    assert values == [int(r[name + "_ns"]) for r in rows]
    ordered = sorted(values)
    assert figure["count"] == 40
    assert figure["median_ns"] == math.floor(statistics.median(values))
    assert figure["p90_ns"] == ordered[35] and figure["p99_ns"] == ordered[39]
    assert figure["min_ns"] == ordered[0] and figure["max_ns"] == ordered[-1]
assert o["limits"][0]["count"] == 5
assert o["command"].endswith("--html '\''a report.html'\''"), o["command"]'
}

@test "the report is one well-formed file that loads nothing" {
    cd "$BATS_FILE_TMPDIR"
    "$FANIN_TEST_PYTHON" -c '
import re
import xml.etree.ElementTree as tree
text = open("a report.html").read()
pictures = [tree.fromstring(one) for one in re.findall("<svg.*?</svg>", text, re.S)]
assert len(pictures) >= 4
assert not re.findall(r"(?:src|href)=|url\(|@import|<script", text)
assert "limit: memcpy, 1 thread" in text and "p99" in text and "--iterations 20" in text
total = text[text.index("<figcaption>total"):]
total = tree.fromstring(re.search("<svg.*?</svg>", total, re.S)[0])
bars = [int(t.text) for t in total.iter("{http://www.w3.org/2000/svg}title")]
assert sum(bars) == 40'
    [ "$(stat -c %a 'a report.html')" = "$(printf '%o' $((0666 & ~$(umask))))" ]
    [ "$(find . -name '*.html*' -o -name '*.csv*' | wc -l)" -eq 2 ]
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

@test "a file that cannot be written is told before anything runs, what was there stays" {
    run -15 "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --csv nowhere/x.csv
    has "nowhere/x.csv: No such file or directory"
    run -15 "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --html .
    has ".: Is a directory"
    run -15 "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --html /dev/null
    [ -c /dev/null ]
    echo mine >kept.csv
    run -13 "$NIXL_FETCH" bench 127.0.0.1:1 --timeout 2s --csv kept.csv
    [ "$(cat kept.csv)" = mine ]
    [ "$(find . -name 'kept*' | wc -l)" -eq 1 ]
}

@test "a full disk is told, nothing is left on it" {
    unshare -m true 2>/dev/null || skip "no mount namespaces here"
    mkdir d
    # shellcheck disable=SC2016 # of the inner shell
    run -15 unshare -m bash -c 'mount -t tmpfs -o size=4k tmpfs d && "$@"
        status=$?
        [ -z "$(ls -A d)" ] || exit 1
        exit $status' full "$NIXL_FETCH" bench --adapter-shape small --world-size 2 --iterations 100 --csv d/x.csv
    has "d/x.csv: No space left on device"
}

@test "compare: the same, slower, faster, and only noise" {
    altered a.json 'o["samples"]["total"] = [1000000 + 9000 * (i % 7) for i in range(40)]'
    altered slower.json 'o["samples"]["total"] = [2 * x for x in o["samples"]["total"]]'
    altered noise.json 'o["samples"]["total"] = o["samples"]["total"][::-1]'
    run -0 "$NIXL_FETCH" bench --compare a.json a.json --json
    [ "$(field verdict)" = same ]
    run -1 "$NIXL_FETCH" bench --compare a.json slower.json --json
    [ "$(field verdict)" = slower ]
    run -0 "$NIXL_FETCH" bench --compare slower.json a.json --json
    [ "$(field verdict)" = faster ]
    run -0 "$NIXL_FETCH" bench --compare a.json noise.json
    has "within noise"
    run -1 "$NIXL_FETCH" bench --compare a.json slower.json
    grep -Eq '^total .* 2\.000 .* slower$' <<<"$output"
    first=$output
    run -1 "$NIXL_FETCH" bench --compare a.json slower.json
    [ "$output" = "$first" ]
    # What the machine's own limits moved by is no finding.
    altered drifted.json 'o["samples"]["total"] = [x * 13 // 10 for x in o["samples"]["total"]]' \
        'o["limits"][2]["min_ns"] = o["limits"][2]["min_ns"] * 14 // 10'
    run -0 "$NIXL_FETCH" bench --compare a.json drifted.json --json
    [ "$(field verdict)" = same ]
}

@test "compare: other shapes, worlds, paths, machines and limits are not compared" {
    for change in 'o["tensors"] += 1' 'o["bytes"] *= 2' 'o["world_size"] = 3' 'o["path"] = "rdma"' \
        'o["cold"] = True' 'o["snapshot"] = True' 'o["machine"]["cores"] += 1' 'o["limits"].pop()' \
        'o["secured"] = True' 'o["no_unix"] = True' 'o["checksums"] = False' \
        'o["limits"][0]["min_ns"] *= 2' 'o["limits"][0]["name"] = "other"' 'del o["destination"]' \
        'o["samples"] = {k: v[:4] for k, v in o["samples"].items()}'; do
        altered b.json "$change"
        run -2 --separate-stderr "$NIXL_FETCH" bench --compare a.json b.json
        # shellcheck disable=SC2154 # of bats
        [[ -z $output && $stderr == *"a.json and b.json cannot be compared: "* ]]
        run -2 --separate-stderr "$NIXL_FETCH" bench --compare b.json a.json --json
        [ "$(field comparable)" = false ]
    done
}

# refused FILE TEXT: b.json is none that can be compared, whichever comes first.
refused()
{
    run -11 --separate-stderr "$NIXL_FETCH" bench --compare a.json "$1"
    [[ $stderr == *"$1: "*"$2"* ]]
    run -11 --separate-stderr "$NIXL_FETCH" bench --compare "$1" a.json
    [[ $stderr == *"$1: "*"$2"* ]]
}

@test "compare: files that are no results are named, with the cause" {
    head -c 3000 a.json >truncated.json
    refused truncated.json "line "
    sed '0,/"median_ns": [0-9]*/s//"median_ns": NaN/' a.json >nan.json
    refused nan.json "near 'NaN'"
    sed '0,/"median_ns": [0-9]*/s//"median_ns": 1e999/' a.json >huge.json
    refused huge.json "overflow"
    sed '0,/"median_ns": [0-9]*/s//"median_ns": 99999999999999999999999/' a.json >large.json
    refused large.json "too big integer"
    : >empty.json
    refused empty.json "line 1"
    echo '[]' >list.json
    refused list.json "no result of bench"
    echo '{"schema":1,"healthy":true}' >foreign.json
    refused foreign.json "no result of bench"
    echo '{"schema":1,"error":{}}' >error.json
    refused error.json "an error"
    altered negative.json 'o["samples"]["total"][0] = -1'
    refused negative.json "samples"
    altered words.json 'o["samples"]["total"] = "many"'
    refused words.json "samples"
    altered few.json 'o["samples"]["total"].pop()'
    refused few.json "different numbers"
    altered older.json 'del o["samples"]'
    refused older.json "no result of bench"
    "$FANIN_TEST_PYTHON" -c 'print("[" * 100000)' >deep.json
    refused deep.json "depth"
    refused missing.json "No such file"
    refused . "Is a directory"
    refused /dev/zero "larger than any result"
}

@test "compare: is for two files, and nothing else" {
    for line in "a.json" "a.json a.json a.json" "a.json a.json --iterations 5" "a.json a.json --csv x" \
        "a.json a.json --world-size 2"; do
        # shellcheck disable=SC2086
        run -2 --separate-stderr "$NIXL_FETCH" bench --compare $line
    done
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
