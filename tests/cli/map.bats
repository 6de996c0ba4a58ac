#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Recorded mappings, shown and refused. No ranks run.

load ranks

setup()
{
    set_up
    cp "$FANIN_SOURCE_DIR/tests/support/mapping.json" good.json
}

# spoilt EXPRESSION: good.json as d, changed by the expression, becomes bad.json.
spoilt()
{
    "$FANIN_TEST_PYTHON" -c '
import json, sys
d = json.load(open("good.json"))
rows = d["modules"][0]["tensors"][0]
exec(sys.argv[1])
json.dump(d, open("bad.json", "w"))' "$1"
}

@test "map: every box of every published tensor, and what is the engine's own" {
    run -0 --separate-stderr "$NIXL_FETCH" map good.json
    [ -z "$stderr" ]
    grep -Eq '^. \(Fused\) +boxes$' <<<"$output"
    grep -Eq 'rows +down +\[0, 0\] +\[6, 4\] +48 +48' <<<"$output"
    grep -Eq 'cache +- +own: a buffer that no checkpoint has' <<<"$output"
    has "vllm 0.32.0, Fused"
    has "tp rank 0 of 2"
    has "3 boxes, 120 B, of 3 published tensors"
    run -0 --separate-stderr "$NIXL_FETCH" map good.json --json
    [ "$(field modules 0 tensors 0 sources 1 boxes 0 stride)" = "[2, 12]" ]
    [ "$(field modules 0 mode)" = boxes ]
    [ "$(field bytes)" = 120 ]
}

@test "map --key: what takes of some tensors only" {
    run -0 "$NIXL_FETCH" map good.json --key 'no*'
    has norm
    [[ $output != *down* ]]
    run -0 --separate-stderr "$NIXL_FETCH" map good.json --key down --json
    [ "$(field sources)" = 1 ]
    [ "$(field modules 0 tensors 0 sources 0 name)" = down ]
    run -11 --separate-stderr "$NIXL_FETCH" map good.json --key 'model.*' --json
    has "takes no published tensor like 'model.*'"
}

@test "map: a module that the loader has to fill says why" {
    spoilt 'd["modules"][0]["fallback"] = {"why": "it computes", "taken": ["up", "norm"]}'
    run -0 "$NIXL_FETCH" map bad.json
    has "loader: it computes"
    run -0 --separate-stderr "$NIXL_FETCH" map bad.json --key norm --json
    [ "$(field modules 0 mode)" = loader ]
    [ "$(field modules 0 taken 0)" = up ]
}

@test "map: unknown fields are left alone, wrong ones are named" {
    spoilt 'd["later"] = 1; rows["later"] = {}'
    run -0 "$NIXL_FETCH" map bad.json
    local -A wrong=(
        ['d["format"] = "fanin-mapping/2"']='format is not "fanin-mapping/1"'
        ['del d["engine"]']="engine.name is no string"
        ['d["modules"] = {}']="modules is no list"
        ['d["published"]["count"] = -1']="published.count is no integer"
        ['rows["dtype"] = "BF15"']="modules[0].tensors[0].dtype is no element type"
        ['rows["shape"] = [1] * 9']="modules[0].tensors[0].shape has more than 8"
        ['rows["stride"] = [12]']="modules[0].tensors[0].stride does not have a number"
        ['rows["shape"] = [1 << 61, 1 << 61]']="larger than any memory"
        ['rows["sources"][1]["boxes"] = []']="modules[0].tensors[0].sources[1].boxes is empty"
        ['rows["sources"][0]["dtype"] = "I64"']="sources[0].dtype does not become"
        ['rows["sources"][0]["boxes"][0]["offset"] = [1, 0]']="sources[0].boxes[0].offset and extent"
        ['rows["sources"][0]["boxes"][0]["extent"] = [0, 6]']="are not inside"
        ['rows["sources"][0]["boxes"][0]["at"] = 96']="boxes[0].at and stride end after"
        ['rows["sources"][0]["boxes"][0]["at"] = 1']="are not of whole elements"
        ['rows["sources"][0]["boxes"][0]["stride"] = [0, 2]']="writes elements over each other"
        ['rows["own"] = "why"']="is the engine's own and has sources"
        ['d["modules"][0]["fallback"] = {}']="fallback does not say why"
    )
    for change in "${!wrong[@]}"; do
        spoilt "$change"
        run -11 "$NIXL_FETCH" map bad.json
        has "bad.json"
        has "${wrong[$change]}"
    done
}

@test "map: files that are none" {
    run -2 "$NIXL_FETCH" map
    run -2 "$NIXL_FETCH" map good.json good.json
    run -11 "$NIXL_FETCH" map missing.json
    has "missing.json"
    echo '[1]' >bad.json
    run -11 "$NIXL_FETCH" map bad.json
    has "no JSON object"
    head -c 100 good.json >bad.json
    run -11 "$NIXL_FETCH" map bad.json
    mkfifo pipe
    run -15 "$NIXL_FETCH" map pipe
    has "no regular file"
}
