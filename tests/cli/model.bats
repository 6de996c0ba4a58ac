#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Pulls of a whole model where something is in the way: each says what and what to do, and leaves
# nothing behind.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

setup_file()
{
    start_ranks --model qwen3-8b --full --layers 6 --shrink 8 --world-size 2
}

teardown_file()
{
    stop_ranks
}

setup()
{
    set_up
    mkdir -m 700 d
}

# nothing_left: neither a model nor what a pull makes on its way.
nothing_left()
{
    [ -z "$(ls -A d)" ]
}

@test "a disk that is full" {
    unshare -m true 2>/dev/null || skip "no mount namespaces here"
    # shellcheck disable=SC2016 # of the inner shell
    run -15 unshare -m bash -c 'mount -t tmpfs -o size=8m tmpfs d && "$@"
        status=$?
        [ -z "$(ls -A d)" ] || exit 1
        exit $status' full "$NIXL_FETCH" pull "$info" full:0 d/m
    has "no room for 'd/m': "
    has "free space there"
}

@test "no permission, another user's directory, a link that was planted" {
    [ "$(id -u)" = 0 ] || skip "needs root"
    own=$(mktemp -d /tmp/test-fanin-XXXXXX) # that user cannot look into bats' folders
    chmod 755 "$own"
    run -15 setpriv --reuid 1234 --clear-groups "$NIXL_FETCH" pull "${ready##* }" full:0 "$own/m"
    rmdir "$own"
    has "cannot write beside '$own/m': Permission denied"
    has "make the parent directory writable"
    mkdir d/m
    chown 1234 d/m
    run -11 "$NIXL_FETCH" pull "$info" full:0 d/m
    has "belongs to uid 1234, this process is uid 0"
    rmdir d/m
    mkdir elsewhere
    ln -s ../elsewhere d/m
    run -11 "$NIXL_FETCH" pull "$info" full:0 d/m
    has "is a symbolic link, which is not followed"
    [ -z "$(ls -A elsewhere)" ]
    rm d/m
    nothing_left
}

@test "a limit of descriptors" {
    run -13 bash -c 'ulimit -n 16 && "$@"' limited "$NIXL_FETCH" pull "$info" full:0 d/m
    has "ulimit -n"
    run -15 bash -c 'ulimit -n 56 && "$@"' limited "$NIXL_FETCH" pull "$info" full:0 d/m \
        --max-file-bytes 20000
    has "raise ulimit -n, or let a file have more bytes"
    nothing_left
}

@test "a limit of memory" {
    bash -c 'ulimit -v 60000 && "$@"' limited "$NIXL_FETCH" --version ||
        skip "a sanitizer takes more than the limit by itself"
    # Less than the model: its files are mapped.
    run -15 bash -c 'ulimit -v 60000 && "$@"' limited "$NIXL_FETCH" pull "$info" full:0 d/m --no-ucx
    has "out of memory: free memory on this host or raise the process's limit"
    nothing_left
}

@test "the wrong run, a key that nothing is like" {
    run -11 "$NIXL_FETCH" pull "$info" full:9 d/m
    has "does not publish full:9; it publishes full:0: did you mean the run 'full:0'?"
    run -11 "$NIXL_FETCH" show "$info" 'full:0:nothing*'
    has "no key of full:0 is like 'nothing*'"
    run -11 "$NIXL_FETCH" show "$info" full:0:model.norm.weihht
    has "model.norm.weight"
    nothing_left
}

@test "output that goes nowhere" {
    run -15 bash -c '"$@" >/dev/full' full "$NIXL_FETCH" pull "$info" full:0 d/m --json --progress
    has "cannot write the output: No space left on device"
    rm -rf d/m
    # shellcheck disable=SC2016 # of the inner shell
    run -141 bash -c '"$@" | true; exit "${PIPESTATUS[0]}"' pipe \
        "$NIXL_FETCH" pull "$info" full:0 d/m --json --progress
    [ -z "$(compgen -G 'd/.m*')" ]
}

@test "killed while it writes: whole or not at all, and the next one clears up" {
    mkfifo lines
    "$NIXL_FETCH" pull "$info" full:0 d/m --json --progress --path stream >lines 3>&- &
    pid=$!
    exec {told}<lines
    read -r -t 60 line <&"$told"
    [[ $line == *'"event":"progress"'* ]]
    kill -KILL "$pid"
    wait "$pid" || true
    exec {told}<&-
    [ ! -e d/m ] || "$NIXL_FETCH" verify "$info" full:0 d/m
    run -0 "$NIXL_FETCH" pull "$info" full:0 d/m --check-pattern
    [ "$(ls -A d)" = m ]
}

# extra DIRECTORY FILE NAME: gives a file of tensors one more, which is empty.
extra()
{
    "$FANIN_TEST_PYTHON" -c '
import json, struct, sys
path, name = sys.argv[1:]
data = open(path, "rb").read()
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8 : 8 + size])
end = max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__")
header[name] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
open(path, "wb").write(struct.pack("<Q", len(text)) + text + data[8 + size :])' "$1/$2" "$3"
}

@test "verify: tensors and files that engines load besides are named" {
    "$NIXL_FETCH" pull "$info" full:0 d/several --max-file-bytes 4000000 -q
    "$NIXL_FETCH" pull "$info" full:0 d/one -q
    run -0 "$NIXL_FETCH" verify "$info" full:0 d/several -q
    run -0 "$NIXL_FETCH" verify "$info" full:0 d/one -q
    last=$(basename "$(printf '%s\n' d/several/model-*.safetensors | tail -n 1)")
    cp -r d/several d/more
    extra d/more "$last" evil.weight
    run -14 "$NIXL_FETCH" verify "$info" full:0 d/more
    has "d/more/$last: has a tensor 'evil.weight', which the index does not name"
    cp -r d/several d/twice
    extra d/twice "$last" model.embed_tokens.weight
    run -14 "$NIXL_FETCH" verify "$info" full:0 d/twice
    has "d/twice/$last: has a tensor 'model.embed_tokens.weight', which the index says is in model-0000"
    cp -r d/one d/both
    cp d/several/model* d/both
    rm d/both/model-*
    run -14 "$NIXL_FETCH" verify "$info" full:0 d/both
    has "d/both/model.safetensors.index.json: lies beside model.safetensors"
    cp d/one/model.safetensors d/one/other.safetensors
    run -14 "$NIXL_FETCH" verify "$info" full:0 d/one
    has "d/one/other.safetensors: lies beside model.safetensors"
}
