#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Whole models: a directory served and pulled back, what verify says of it, pulls that cannot be.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

make_model()
{
    "$FANIN_TEST_PYTHON" "$support/make_model.py" "$@"
}

# like DIRECTORY OPTION...: the directory holds what "source" does.
like()
{
    "$FANIN_TEST_PYTHON" "$FANIN_SOURCE_DIR/tests/oracle/check_model.py" "$1" --like source "${@:2}"
}

@test "a model of several files comes back, in files of any size" {
    make_model source 5
    for world in 1 3; do
        start_ranks --model-dir source --world-size "$world" --run mine
        for path in stream cma; do
            run -0 --separate-stderr "$NIXL_FETCH" pull "$info" full:mine "$world-$path" \
                --path "$path" --max-file-bytes 6000 --json
            [ "$(field path)" = "$path" ]
            [ "$(field publication)" = full:mine ]
            brought=0
            for ((rank = 0; rank < world; rank++)); do
                brought=$((brought + $(field ranks "$rank" bytes)))
            done
            [ "$brought" -ge "$(field bytes)" ] # cma also reads what lies between
            like "$world-$path" --max-file-bytes 6000
            [ "$(compgen -G "$world-$path/model-*" | wc -l)" -gt 5 ]
            run -0 "$NIXL_FETCH" verify "$info" full:mine "$world-$path"
            has "equal: 51 tensors"
        done
        "$NIXL_FETCH" pull "$info" --run full:mine --out "$world-one"
        like "$world-one"
        [ -e "$world-one/model.safetensors" ]
        [ ! -e "$world-one/model.safetensors.index.json" ]
        stop_ranks
    done
    # What was pulled can be served in turn.
    start_ranks --model-dir 3-stream --world-size 2
    NIXL_FETCH_SERVERS=$info "$NIXL_FETCH" pull full:0 again --max-file-bytes 20000
    like again --max-file-bytes 20000
    stop_ranks
}

@test "the target file says what there is to be pulled" {
    make_model source 1
    start_ranks --model-dir source --world-size 2
    grep -q '"publications": \[ *$' "$info"
    run -0 "$NIXL_FETCH" pull "$info" --out only
    like only
    run -0 "$NIXL_FETCH" verify "$info" --dir only
    run -0 timeout 60 "$NIXL_FETCH" watch "$info" --count 1
    # Files of older trainers name a run and no kind.
    sed -z 's/"publications": \[[^]]*\],//' "$info" >old.json
    run -11 "$NIXL_FETCH" pull old.json --out old
    has "full:0"
    run -0 "$NIXL_FETCH" pull old.json full:0 old
    # Of several one must be named; commands about all of them go on.
    sed 's/"full:0"/"full:0", "lora:0"/' "$info" >two.json
    for words in "pull two.json new" "watch two.json" "show two.json key"; do
        # shellcheck disable=SC2086 # several words
        run -2 "$NIXL_FETCH" $words
        has "two.json names several publications, give one of full:0, lora:0"
    done
    run -0 "$NIXL_FETCH" list two.json
    run -0 "$NIXL_FETCH" ping two.json
    run -0 "$NIXL_FETCH" pull two.json full:0 two
    stop_ranks
}

@test "built-in shapes: every byte follows the pattern, also rounded" {
    start_ranks --model deepseek-v3 --layers 4 --shrink 64 --run full:0 --world-size 3
    run -0 "$NIXL_FETCH" pull "$info" full:0 d --check-pattern --max-file-bytes 1000000
    has "bytes are those of step 1"
    "$FANIN_TEST_PYTHON" -c '
import json
config = json.load(open("d/config.json"))
assert (config["model_type"], config["kv_lora_rank"], config["num_hidden_layers"]) == ("deepseek_v3", 8, 4)'
    stop_ranks
    start_ranks --model qwen3-8b --full --layers 2 --shrink 32 --dtype f32 --world-size 2
    run -0 "$NIXL_FETCH" pull "$info" full:0 rounded --check-pattern --dtype bf16 --verify
    run -0 "$NIXL_FETCH" verify "$info" full:0 rounded
    stop_ranks
}

@test "the directory is used again, and never in other files" {
    make_model source 2
    start_ranks --model-dir source --world-size 2
    "$NIXL_FETCH" pull "$info" full:0 d --max-file-bytes 6000
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" full:0 d --max-file-bytes 6000 --json
    [ "$(field reused)" = true ]
    run -11 "$NIXL_FETCH" pull "$info" full:0 d
    has "max_file_bytes"
    mkdir other
    echo mine >other/notes.txt
    run -11 "$NIXL_FETCH" pull "$info" full:0 other
    has "notes.txt"
    [ "$(ls other)" = notes.txt ]
    stop_ranks
}

@test "verify: the very key whose bytes differ, a file that is missing, another configuration" {
    make_model source 3
    start_ranks --model-dir source --world-size 3
    "$NIXL_FETCH" pull "$info" full:0 d --max-file-bytes 6000
    for name in lm_head.weight model.layers.7.steps model.layers.11.mlp.experts.gate_up; do
        make_model --flip d "$name"
        run -14 --separate-stderr "$NIXL_FETCH" verify "$info" full:0 d --json
        [ "$(field error key)" = "full:0:$name" ]
        make_model --flip d "$name"
    done
    run -0 --separate-stderr "$NIXL_FETCH" verify "$info" full:0 d --json
    for name in d/*; do
        [[ $name == d/fanin.json || $name == *.index.json || $output == *"\"${name#d/}\""* ]]
    done
    second=$(basename d/model-00002-*)
    sed -i 's/"layers": 12/"layers": 13/' d/config.json
    run -14 "$NIXL_FETCH" verify "$info" full:0 d
    has "config.json: layers is 13 in the file, 12 on the ranks"
    mv d/config.json d/away
    run -14 "$NIXL_FETCH" verify "$info" full:0 d
    mv d/away d/config.json
    sed -i 's/13/12/' d/config.json
    mv "d/$second" away
    run -14 "$NIXL_FETCH" verify "$info" full:0 d
    has "$second"
    stop_ranks
}

@test "code that a configuration names stays with the trainer, unless it is trusted" {
    make_model source 1
    sed -i 's/"layers": 12/"layers": 12, "auto_map": {"AutoConfig": "evil.C"}/' source/config.json
    start_ranks --model-dir source --world-size 2
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" full:0 safe
    [[ $stderr == *auto_map* ]]
    run -1 grep evil safe/config.json
    run -0 "$NIXL_FETCH" verify "$info" full:0 safe
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" full:0 whole --trust-config
    cmp source/config.json whole/config.json
    stop_ranks
}

@test "a model that is not a whole one is not served" {
    make_model source 3
    rm source/model-00002-of-00003.safetensors
    run -14 "$NIXL_FETCH" serve --model-dir source
    has model-00002-of-00003.safetensors
    run -2 "$NIXL_FETCH" serve --model-dir source --model qwen3-8b
    run -2 "$NIXL_FETCH" serve --model-dir source --run lora:0
    has "cannot be a whole model"
    mkdir empty
    run -11 "$NIXL_FETCH" serve --model-dir empty
    has model.safetensors.index.json
    echo '{"weight_map": {"a": "../source/model-00001-of-00003.safetensors"}}' \
        >empty/model.safetensors.index.json
    run -14 "$NIXL_FETCH" serve --model-dir empty
    has weight_map
}

@test "pulls that cannot be: limits, other kinds, two directories" {
    make_model source 1
    start_ranks --model-dir source --world-size 2
    run -11 "$NIXL_FETCH" pull "$info" --run 0 --out d
    has "full:0"
    run -2 "$NIXL_FETCH" pull "$info" full:0 d --out e
    has "two directories"
    run -2 "$NIXL_FETCH" pull "$info" full:0 d --run 0
    has "--run '0' is not 'full:0'"
    run -2 "$NIXL_FETCH" pull "$info" full:0 d --spare-file
    has "for adapters"
    run -2 "$NIXL_FETCH" pull "$info" lora:0 d --max-file-bytes 7
    has "for models"
    run -2 "$NIXL_FETCH" pull "$info" lora:0 d --delta-from d
    has "delta-from is for models"
    run -13 "$NIXL_FETCH" pull "$info" full:0 d --max-bytes 1000
    has max_bytes
    run -15 bash -c 'ulimit -f 8 && "$@"' limited "$NIXL_FETCH" pull "$info" full:0 d
    has "limit of file sizes"
    [ -z "$(compgen -G 'd*')" ]
    stop_ranks
}

@test "list, show, watch and bench take a model's run" {
    make_model source 2
    start_ranks --model-dir source --world-size 2 --update-every 50
    run -0 "$NIXL_FETCH" list "$info"
    grep -Eq '^full:0 ' <<<"$output"
    run -0 "$NIXL_FETCH" list "$info" full:0
    has "full:0:model.layers.11.steps"
    run -0 "$NIXL_FETCH" show "$info" full:0:lm_head.weight
    has "[51, 24]"
    run -0 "$NIXL_FETCH" show "$info" --run full:0 'model.layers.*.steps' --json
    [ "$(field publication)" = full:0 ]
    run -2 "$NIXL_FETCH" show "$info" --run full:1 full:0:lm_head.weight
    run -0 "$NIXL_FETCH" watch "$info" full:0 --count 2
    run -0 "$NIXL_FETCH" bench "$info" full:0 --iterations 2 --json
    [ "$(field tensors)" = 50 ] # one is empty
    run -0 "$NIXL_FETCH" __complete line pull "$info" fu
    [ "${lines[0]}" = full:0 ]
    stop_ranks
}

@test "bench: into an engine's parameters, every byte proven" {
    start_ranks --model deepseek-v3 --full --layers 4 --shrink 64 --world-size 3 --no-ucx
    "$NIXL_FETCH" list "$info" full:0 --json >keys.json
    for shape in "--tp 1" "--tp 2" "--tp 2 --ep 4"; do
        rm -f rank*.json
        # shellcheck disable=SC2086
        "$FANIN_TEST_PYTHON" "$FANIN_SOURCE_DIR/tools/measure/layout.py" keys.json rank $shape
        mappings=()
        for one in rank*.json; do mappings+=(--mapping "$one"); done
        run -0 --separate-stderr "$NIXL_FETCH" bench "$info" full:0 --iterations 1 --check-pattern \
            "${mappings[@]}" --json
        [ "$(field all_checked) $(field workers)" = "true $((${#mappings[@]} / 2))" ]
        bytes+=("$(field bytes)")
    done
    # Two ranks have some tensors both; four have experts once, everything else each.
    [ "${bytes[0]}" -lt "${bytes[1]}" ] && [ "${bytes[1]}" -lt "${bytes[2]}" ]
    run -0 "$NIXL_FETCH" bench "$info" full:0 --iterations 1 "${mappings[@]}"
    has "by 4 of the engine's ranks at once"
    stop_ranks
}

@test "bench: mappings that are none" {
    own=(--model qwen3-8b --full --layers 1 --shrink 64 --world-size 2)
    echo '{}' >m.json
    run -2 "$NIXL_FETCH" bench "${own[@]}" --mapping m.json --dest .
    run -2 "$NIXL_FETCH" bench "${own[@]}" --mapping m.json --mapping m.json --cold
    run -11 "$NIXL_FETCH" bench "${own[@]}" --mapping missing.json
    has missing.json
}

@test "no escape codes where there is no terminal, and nothing at all with --quiet" {
    make_model source 2
    start_ranks --model-dir source --world-size 2
    start_proxy --hold-reads 1000
    "$NIXL_FETCH" pull "$target" full:0 held --path stream --timeout 1s 2>err 3>&- || [ $? -eq 12 ]
    [ -s err ]
    run -1 grep -q $'\033' err
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" full:0 d --quiet
    [ -z "$stderr" ]
    run -1 grep -q $'\033' <<<"$output"
    stop_ranks
}
