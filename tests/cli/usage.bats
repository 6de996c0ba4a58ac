#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The command line itself: help, wrong usage, targets, exit statuses. No ranks run.

load ranks

commands=(list show ping doctor pull verify watch status top exporter diff bundle map serve bench secret trace relay)

@test "--version names tool, library, revision, protocol, UCX and CUDA" {
    run -0 --separate-stderr "$NIXL_FETCH" --version
    [[ ${lines[0]} =~ ^nixl-fetch\ [0-9.]+\ \(libfanin\ [0-9.]+\)$ ]]
    [[ ${lines[1]} =~ ^revision\ ([0-9a-f]{12}|unknown)$ ]]
    [[ ${lines[2]} =~ ^protocol\ [0-9]+$ ]]
    [[ ${lines[3]} =~ ^UCX\ ([0-9.]+\ \(/.*\)|none:\ .+)$ ]]
    [[ ${lines[4]} =~ ^CUDA\ (driver\ for\ [0-9.]+|none:\ .+)$ ]]
    [ "${#lines[@]}" -eq 5 ]
    FANIN_UCX_LIBRARY='' run -0 "$NIXL_FETCH" --version
    has "UCX none: "
}

@test "help lists every command, and no hidden one" {
    run -0 "$NIXL_FETCH" --help
    for command in "${commands[@]}"; do
        grep -Eq "^  $command +[a-z]" <<<"$output"
    done
    [[ $output != *__complete* ]]
    run -2 "$NIXL_FETCH"
    has "Usage: nixl-fetch COMMAND"
}

@test "every command has --help with examples and a usage line" {
    for command in "${commands[@]}"; do
        run -0 --separate-stderr "$NIXL_FETCH" "$command" --help
        [ -z "$stderr" ]
        has "Examples:"
        has "Usage: nixl-fetch $command"
        cp <(echo "$output") by-option
        run -0 "$NIXL_FETCH" help "$command"
        diff by-option <(echo "$output")
    done
}

@test "every option is in the manual page and in the completion" {
    source=$FANIN_SOURCE_DIR/tools
    for command in "${commands[@]}"; do
        "$NIXL_FETCH" "$command" --help | grep -oE '^ +(-[a-z], )?--[a-z0-9-]+' |
            grep -oE -- '--.*' | sort -u >in-help
        [ -s in-help ]
        "$NIXL_FETCH" __complete options "$command" | cut -f 1 | sort -u >in-completion
        diff in-help in-completion
        while read -r option; do
            grep -qF -- "*$option*" "$source/nixl-fetch.1.scd" || {
                echo "$command $option is not in the manual page" >&2
                return 1
            }
        done <in-help
    done
}

@test "every option of every command refuses what makes no sense, and is named" {
    "$FANIN_TEST_PYTHON" - "$NIXL_FETCH" "${commands[@]}" <<'END'
import subprocess
import sys

tool, *commands = sys.argv[1:]
least_one = set("""--world-size --count --max-attempts --steps --first-step --r --iterations
    --repeat --commits --replicate --max-bytes --keep""".split())
numbers = {"N", "MS", "PORT", "K", "FD"}
seen = set()


def refused(command, option, value):
    done = subprocess.run([tool, command, f"{option}={value}"], capture_output=True, text=True,
                          timeout=20)
    good = done.returncode == 2 and not done.stdout and option in done.stderr
    if not good or not done.stderr.startswith(f"nixl-fetch: {command}: "):
        sys.exit(f"{command} {option}={value}: {done}")


for command in commands:
    listed = subprocess.run([tool, "__complete", "options", command], capture_output=True,
                            text=True, check=True).stdout
    for option, value, *_ in (line.split("\t") for line in listed.splitlines()):
        if not value:
            continue
        refused(command, option, "")
        if value not in numbers and (option, value) not in {
            ("--r", "R"), ("--shard-dim", "D"), ("--first-step", "S")
        }:
            continue
        refused(command, option, "-1")
        if option not in seen:
            for bad in ["x", "1.5", "9" * 20] + ["0"] * (option in least_one):
                refused(command, option, bad)
        seen.add(option)
assert least_one < seen, least_one - seen
END
}

@test "a number that is too large is told how large it may be" {
    run -2 "$NIXL_FETCH" watch h:1 --idle-ms 5000000000
    has "--idle-ms '5000000000' is no whole number from 1 to 4294967295"
}

@test "serve on a network's address is told which options that takes" {
    run -11 "$NIXL_FETCH" serve --adapter-shape small --world-size 1 --bind 192.0.2.1
    has "--open and --allow"
}

@test "typos get a suggestion" {
    run -2 "$NIXL_FETCH" pul
    has "did you mean 'pull'"
    run -2 "$NIXL_FETCH" frobnicate
    [[ $output != *"did you mean"* ]]
    run -2 "$NIXL_FETCH" pull --world-siez 8
    has "did you mean '--world-size'"
    run -2 "$NIXL_FETCH" serve --model lama-3.1-8b
    has "did you mean 'llama-3.1-8b'"
    run -2 "$NIXL_FETCH" bench --adapter-shape dnese
    has "did you mean 'dense'"
    run -2 "$NIXL_FETCH" serve --model gpt
    has "none of qwen2.5-0.5b, llama-3.1-8b"
}

@test "wrong usage is exit status 2 and says what to look at" {
    wrong=(
        "list"
        "list h:1 h:2"
        "show h:1"
        "pull h:1"
        "pull h:1 --out"
        "pull h:1 --out d --step 1 --min-step 2"
        "pull h:1 --out d --step -3"
        "pull h:1 --out d --step x"
        "pull h:1 --out d --path teleport"
        "pull h:1 --out d --path rdma --no-ucx"
        "pull h:1 --out d --run a/b"
        "pull h:1 --out d --timeout 5parsecs"
        "pull h:1 --out d --timeout 0"
        "pull h:1 --out d --expect-world-id 12"
        "pull h:1 --out d --expect-world-id 00000000000000000000000000000000"
        "pull h --out d"
        "pull h:0 --out d"
        "pull h:99999 --out d"
        "pull h:1,h:2 --world-size 3 --out d"
        "pull h:65535 --world-size 2 --out d"
        "pull h:1 --world-size -1 --out d"
        "verify h:1"
        "relay h:1"
        "relay h:1 full:0 word"
        "relay h:1 full:0 --keep 0"
        "relay h:1 full:0 --keep 65"
        "relay h:1 full:0 --memory nowhere"
        "relay h:1 full:0 --rate 1"
        "relay h:1 full:0 --network 10.0.0.0/8 --rate 0"
        "relay h:1 full:0 --network 10.0.0.0/8 --rate -1"
        "relay h:1 full:0 --network 10.0.0.0/8 --rate nan"
        "relay h:1 full:0 --network 10.0.0.0/8 --rate 1GB"
        "relay h:1 full:0 --network 10.0.0.0/8 --rate 1001"
        "watch h:1 --count -1"
        "watch h:1 --count 0"
        "list h:1 --run a/b"
        "ping h:1 --run a/b"
        "show h:1 lora:0:x --run 1"
        "pull h:1 --out d --max-attempts 0"
        "doctor h:1 --timeout 0"
        "serve --adapter-shape small --allow 10.0.0.0/8"
        "serve --adapter-shape small --world-id 00000000000000000000000000000000"
        "bench h:1 --lease-ms 5"
        "bench h:1 --data-threads 2"
        "bench --data-threads 0"
        "pull h:1 --out d --streams 17"
        "serve --adapter-shape small --data-threads 17"
        "serve --adapter-shape small --nice 20"
        "bench h:1 --nice 5"
        "bench h:1 --cast bf16"
        "bench --commits 5"
        "bench --spare-file"
        "bench --no-stream-commit"
        "serve --adapter-shape small --no-stream-commit"
        "doctor --world-size 3"
        "doctor --timeout 3s"
        "serve"
        "serve word"
        "serve --model gpt"
        "serve --model llama-3.1-8b --r 0x"
        "serve --model llama-3.1-8b --fused"
        "serve --adapter-shape tiny"
        "serve --adapter-shape small --model llama-3.1-8b"
        "serve --adapter-shape small --adapter d"
        "serve --adapter-shape small --world-size 8 --replicate 3"
        "serve --adapter-shape small --world-size 0"
        "serve --adapter-shape small --base-port 65530"
        "serve --adapter-shape small --run 0 --run 0"
        "serve --adapter-shape small --run .."
        "serve --adapter-shape small --steps 4"
        "serve --adapter-shape small --open"
        "serve --adapter-shape small --insecure"
        "serve --adapter-shape small --dtype int3"
        "serve --adapter-shape small --world-id 1"
        "bench --iterations 0"
        "bench h:1 --model llama-3.1-8b"
        "--frob"
    )
    for line in "${wrong[@]}"; do
        # shellcheck disable=SC2086
        run --separate-stderr "$NIXL_FETCH" $line
        [ "$status" -eq 2 ] || {
            echo "nixl-fetch $line: exit status $status" >&2
            return 1
        }
        [ -z "$output" ]
        [[ $stderr == nixl-fetch:\ *:\ *:\ * ]]
        [ "$(wc -l <<<"$stderr")" -eq 1 ]
    done
}

@test "an unknown command is told as JSON, too" {
    run -2 --separate-stderr "$NIXL_FETCH" pul h:1 --json
    [ "$(jq -r .error.status <<<"$output")" = FANIN_ERR_ARGUMENT ]
    run -2 --separate-stderr "$NIXL_FETCH" pul h:1
    [ -z "$output" ]
}

@test "a tree that is not there is not looked at" {
    for option in --sysfs --procfs --dev; do
        run -11 "$NIXL_FETCH" doctor $option ./nowhere
        has "$option ./nowhere: No such file or directory"
    done
}

@test "output that cannot be written is a failure with a message" {
    [ -c /dev/full ] || skip "no /dev/full"
    for line in --version --help "pull --help" "doctor" "doctor --json"; do
        # shellcheck disable=SC2086
        "$NIXL_FETCH" $line >/dev/full 2>err && return 1 || [ $? -eq 15 ]
        grep -q "^nixl-fetch: cannot write the output: No space left on device: " err
        # shellcheck disable=SC2086
        "$NIXL_FETCH" $line >&- 2>err && return 1 || [ $? -eq 15 ]
        grep -q "^nixl-fetch: cannot write the output: Bad file descriptor: " err
    done
}

@test "with --json an error is an object on standard output too" {
    run -2 --separate-stderr "$NIXL_FETCH" pull h --out d --json
    [ "$(field error status)" = FANIN_ERR_ARGUMENT ]
    [ "$(field error code)" = -100 ]
    [ -n "$(field error remedy)" ]
    has "nixl-fetch: "
}

@test "the environment gives target and timeout" {
    NIXL_FETCH_TIMEOUT=soon run -2 "$NIXL_FETCH" list h:1
    has "NIXL_FETCH_TIMEOUT 'soon'"
    # Nobody listens on port 1 of this host.
    NIXL_FETCH_SERVERS=127.0.0.1:1 NIXL_FETCH_TIMEOUT=2s run -13 "$NIXL_FETCH" list
    has "127.0.0.1:1"
    FANIN_TRAINER=127.0.0.1:2 NIXL_FETCH_TIMEOUT=2s run -13 "$NIXL_FETCH" list
    has "127.0.0.1:2"
    FANIN_TRAINER=127.0.0.1:2 NIXL_FETCH_SERVERS=127.0.0.1:1 run -13 "$NIXL_FETCH" list --timeout 2s
    has "127.0.0.1:1"
}

@test "nobody there is exit status 13 within the timeout, and names the address" {
    # Long before the 60 s that it would take without the option.
    SECONDS=0
    run -13 --separate-stderr "$NIXL_FETCH" pull 127.0.0.1:1 --out d --timeout 2s --json
    [ "$SECONDS" -le 30 ]
    [ "$(field error status)" = FANIN_ERR_UNREACHABLE ]
    [[ $(field error address) == *127.0.0.1:1* ]]
    [ ! -e d ]
    run -13 "$NIXL_FETCH" ping 127.0.0.1:1 --timeout 1s
}

@test "target files: absent or malformed is 11, no target is 2" {
    run -11 "$NIXL_FETCH" list ./absent.json
    has absent.json
    mkfifo pipe.json
    run -11 timeout 20 "$NIXL_FETCH" list pipe.json
    has "pipe.json is no regular file"
    run -2 "$NIXL_FETCH" list 127.0.0.1
    has "'127.0.0.1' has no port"
    echo '{"host": "h"}' >bad.json
    : >empty.json
    for file in bad empty; do
        run -11 "$NIXL_FETCH" list $file.json
        has $file.json
    done
}

@test "an adapter that is none cannot be served" {
    run -11 "$NIXL_FETCH" serve --adapter ./nowhere
    has adapter_config.json
    mkdir broken
    echo '{}' >broken/adapter_config.json
    echo 'no safetensors' >broken/adapter_model.safetensors
    run -14 "$NIXL_FETCH" serve --adapter broken
}

# expect_words SHELL WANTED WORD...: the words that the line leads to, sorted.
expect_words()
{
    local shell=$1 wanted=$2
    shift 2
    run -0 "complete_by_$shell" "$@"
    [ "$(sort <<<"$output" | paste -sd ' ')" = "$wanted" ] || {
        printf '%s: %s: %s instead of %s\n' "$shell" "$*" "$output" "$wanted" >&2
        return 1
    }
}

complete_by_bash()
{
    # shellcheck disable=SC2016
    bash --norc -c 'source "$1"; shift
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE=$* COMP_POINT=${#COMP_LINE}
        _nixl_fetch
        printf "%s\n" "${COMPREPLY[@]}"' - \
        "$FANIN_SOURCE_DIR/tools/completions/nixl-fetch.bash" "$NIXL_FETCH" "$@"
}

complete_by_zsh()
{
    # shellcheck disable=SC2016
    zsh -f -c '
        _describe() { print -rl -- "${(@)${(P)2}%%:*}" }
        _files() { print -r -- files "$@" }
        source "$1"; shift
        words=("$@") CURRENT=$#
        _nixl_fetch' - "$FANIN_SOURCE_DIR/tools/completions/nixl-fetch.zsh" "$NIXL_FETCH" "$@"
}

complete_by_fish()
{
    # shellcheck disable=SC2016
    PATH=$(dirname "$NIXL_FETCH"):$PATH fish --no-config -c '
        source $argv[1]; complete -C "$argv[2]"' \
        "$FANIN_SOURCE_DIR/tools/completions/nixl-fetch.fish" "nixl-fetch $*" | cut -f 1
}

@test "completion of commands, options, models and shapes, in three shells" {
    for shell in bash zsh fish; do
        command -v "$shell" >/dev/null || {
            echo "# no $shell, it is in tools/setup test" >&3
            continue
        }
        expect_words "$shell" pull pu
        expect_words "$shell" --check-pattern pull --check
        expect_words "$shell" "--world-id --world-size" serve --adapter-shape small --world
        expect_words "$shell" llama-3.1-8b serve --model llama-3.1
        expect_words "$shell" "moe moe-fused" bench --adapter-shape moe
        expect_words "$shell" stream pull 127.0.0.1:1 -n 4 --path st
        expect_words "$shell" "ping pull" help p
    done
}

@test "completion of a target in bash: directories too, also where no file fits" {
    mkdir step_1
    expect_words bash step_1/ list st
    touch story.json
    expect_words bash "step_1/ story.json" list st
}

@test "completion of a file to write: any that is there, in three shells" {
    mkdir step_1
    touch story.csv
    for shell in bash zsh fish; do
        command -v "$shell" >/dev/null || continue
        case $shell in
        bash) want="step_1 story.csv" ;;
        zsh) want="files" ;;
        fish) want="step_1/ story.csv" ;;
        esac
        expect_words "$shell" "$want" trace --svg st
    done
}

@test "completion knows what a word is" {
    line()
    {
        run -0 "$NIXL_FETCH" __complete line "$@"
    }
    line ''
    has "list	list runs with"
    [[ $output != *__complete* ]]
    line pull --out ''
    [ "$output" = :directories ]
    line pull -o ''
    [ "$output" = :directories ]
    line list ''
    [ "$output" = :files ]
    line list ./info.json ''
    [ -z "$output" ]
    line pull --json ''
    [ "$output" = :files ]
    line frobnicate ''
    [ -z "$output" ]
    line __complete ''
    [ -z "$output" ]
}
