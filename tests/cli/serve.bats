#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The stand-in trainer: updates, deaths, refusals, ways to cut; each test has its own ranks.

# shellcheck disable=SC2154 # info, ready and ranks_pid are set by ranks.bash

load ranks

@test "updates: watch sees each step, pulls are whole, an old step is superseded" {
    start_ranks --adapter-shape small --world-size 3 --update-every 20
    run -0 "$NIXL_FETCH" watch "$info" --count 5 --json
    [ "${#lines[@]}" -eq 5 ]
    output=${lines[4]}
    [ "$(field step)" -ge 5 ]
    for i in 1 2 3 4 5; do
        run -0 "$NIXL_FETCH" pull "$info" --out "d$i" --check-pattern --min-step $((10 * i))
    done
    run -12 "$NIXL_FETCH" pull "$info" --out old --step 1
    has "step 1"
    run -12 "$NIXL_FETCH" verify "$info" --dir d1
    has stale
    has ": pull again"
    stop_ranks
}

@test "--steps and --first-step: stops updating, goes on serving, pull --step waits" {
    start_ranks --adapter-shape small --world-size 2 --update-every 50 --first-step 40 --steps 5
    run -0 "$NIXL_FETCH" pull "$info" --out d --step 44 --check-pattern
    run -0 "$NIXL_FETCH" verify "$info" --dir d
    run -12 "$NIXL_FETCH" pull "$info" --out e --step 45 --timeout 500ms
    stop_ranks
}

# rank_nice PID NAME: the nice values of the threads of that name in the process's children.
rank_nice()
{
    local stat child
    for child in $(cat "/proc/$1/task/"*/children); do
        for stat in "/proc/$child/task/"*/stat; do
            sed -n "s/^[0-9]* ($2) //p" "$stat" | cut -d ' ' -f 17
        done
    done
}

@test "--nice: the threads that serve give way by so much, and go on serving" {
    start_ranks --adapter-shape small --world-size 2 --nice 7
    own=$(nice)
    [ "$(rank_nice "$ranks_pid" fanin-control | sort -u)" -eq $((own + 7 < 19 ? own + 7 : 19)) ]
    run -0 "$NIXL_FETCH" pull "$info" --out d --check-pattern
    stop_ranks
}

@test "uncoupled ranks: pulls are of one step" {
    start_ranks --adapter-shape small --world-size 3 --update-every 400 --uncoupled
    for i in 1 2 3; do
        run -0 "$NIXL_FETCH" pull "$info" --out "d$i" --check-pattern
    done
    stop_ranks
}

@test "verify knows what pull --dtype made of F32" {
    start_ranks --model qwen2.5-0.5b --r 2 --dtype float32 --world-size 2
    run -0 "$NIXL_FETCH" pull "$info" --out half --dtype bf16
    run -0 "$NIXL_FETCH" verify "$info" --dir half
    printf '\377\376' | dd of=half/adapter_model.safetensors bs=1 seek=100000 conv=notrunc status=none
    run -14 "$NIXL_FETCH" verify "$info" --dir half
    stop_ranks
}

@test "show names replicas" {
    start_ranks --model qwen2.5-0.5b --r 4 --replicate 2 --world-size 4
    run -0 "$NIXL_FETCH" show "$info" \
        base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    [ "$(grep -c 'rank 0 *$' <<<"$output")" -eq 1 ]
    [ "$(grep -c 'rank 1 *$' <<<"$output")" -eq 1 ]
    stop_ranks
}

@test "what a rank says steers no terminal" {
    export LC_ALL=C.UTF-8 # where text has directions
    start_ranks --adapter-shape small --world-size 1
    "$NIXL_FETCH" pull "$info" --out d
    stop_ranks
    printf '{"x": "\033[31mred\302\2331m\t", "r": 8, "lora_alpha": 16, "peft_type": "LORA"}' \
        >d/adapter_config.json
    start_ranks --adapter d --world-size 1 --name "$(printf 'job\033[31m\342\200\256')"
    for command in list "list --run 0" ping doctor "pull --out e"; do
        # shellcheck disable=SC2086
        "$NIXL_FETCH" $command "$info" -v >out 2>&1 || true
        [ -s out ]
        run ! grep -q "$(printf '\033\|\302\233\|\342\200\256')" out
    done
    run -0 "$NIXL_FETCH" list "$info"
    has '\x1b[31mred\xc2\x9b1m\x09'
    stop_ranks
}

@test "list: a long value of metadata is cut between two characters" {
    start_ranks --adapter-shape small --world-size 1
    "$NIXL_FETCH" pull "$info" --out d
    stop_ranks
    # 61 bytes, of which the last two are one character; and one more of them.
    printf '{"r": 8, "lora_alpha": 16, "peft_type": "LORA", "x": "%s\303\244"}' 12345 \
        >d/adapter_config.json
    start_ranks --adapter d --world-size 1
    run -0 "$NIXL_FETCH" list "$info"
    grep -qx 'run 0: peft_config = {"r": 8, "lora_alpha": 16, "peft_type": "LORA", "x": "12345\.\.\.' <<<"$output"
    stop_ranks
}

@test "verify: long values are shown from shortly before where they differ, by whole characters" {
    start_ranks --adapter-shape small --world-size 1
    "$NIXL_FETCH" pull "$info" --out d
    stop_ranks
    ten=ääääääääää
    sed -i "s/qwen2.5-0.5b/$ten$ten$ten${ten}a$ten$ten$ten$ten/" d/adapter_config.json
    start_ranks --adapter d --world-size 1
    "$NIXL_FETCH" pull "$info" --out e
    sed -i 's/u00E4a/u00E4b/' e/adapter_config.json
    run -14 "$NIXL_FETCH" verify "$info" --dir e
    has "is ...ääääääääb$ten${ten}ä... in the file, ...ääääääääa$ten${ten}ä... on the ranks"
    sed -i '/base_model_name_or_path/d' e/adapter_config.json
    run -14 "$NIXL_FETCH" verify "$info" --dir e
    has "is absent in the file, \"$ten${ten}äääääääää... on the ranks"
    stop_ranks
}

@test "a pull ends by SIGTERM with 143, SIGHUP with 129, a doctor by Ctrl-C with 130, and says why" {
    start_ranks --adapter-shape small --world-size 1
    for signal in TERM HUP; do
        # Where this runs under nohup, SIGHUP would be left ignored.
        env "--default-signal=$signal" "$NIXL_FETCH" pull "$info" --out d --step 9 \
            --timeout 60s 3>&- 2>err &
        pid=$!
        timeout 30 sh -c 'until [ -e .d.fanin-lock ]; do sleep 0.02; done'
        kill "-$signal" "$pid"
        status=0
        wait "$pid" || status=$?
        [ "$status" -eq $((128 + $(kill -l "$signal"))) ]
        [ ! -e .d.fanin-lock ]
    done
    # Nobody answers at a rank that is stopped.
    stop "$(rank_pid 0)"
    "$FANIN_TEST_PYTHON" - "$NIXL_FETCH" "$info" <<'END'
import signal, subprocess, sys, time
child = subprocess.Popen([sys.argv[1], "doctor", sys.argv[2], "--timeout", "60s", "--no-unix"],
                         stderr=subprocess.PIPE, text=True)
status = f"/proc/{child.pid}/status"
def catches():
    lines = open(status).read().splitlines()
    return int(next(l for l in lines if l.startswith("SigCgt")).split()[1], 16) & 1 << signal.SIGINT - 1
while not catches():
    time.sleep(0.01)
child.send_signal(signal.SIGINT)
_, told = child.communicate(timeout=30)
assert child.returncode == 130, child.returncode
assert "interrupted" in told, told
END
    kill -CONT "$(rank_pid 0)"
    stop_ranks
}

@test "a serve that is stopped before it is ready ends by that signal" {
    "$NIXL_FETCH" serve --adapter-shape large --world-size 2 3>&- >out 2>err &
    ranks_pid=$!
    timeout 30 sh -c "until pgrep -P $ranks_pid >/dev/null; do sleep 0.01; done"
    kill -TERM "$ranks_pid"
    status=0
    wait "$ranks_pid" || status=$?
    ranks_pid=
    if ! grep -q ready: out; then # which would end it as usual
        [ "$status" -eq 143 ]
    fi
}

@test "a ready line that cannot be written ends serve with a message" {
    [ -c /dev/full ] || skip "no /dev/full"
    "$NIXL_FETCH" serve --adapter-shape small --world-size 1 >/dev/full 2>err && return 1 ||
        [ $? -eq 15 ]
    grep -q "cannot write the output: No space left on device" err
    "$NIXL_FETCH" serve --adapter-shape small --world-size 1 --ready-fd 5 5>/dev/full 2>err &&
        return 1 || [ $? -eq 15 ]
    grep -q -- "--ready-fd 5: No space left on device" err
}

@test "SIGINT and SIGTERM end all ranks with exit status 0" {
    for signal in INT TERM; do
        start_ranks --adapter-shape small --world-size 3 --update-every 10
        mapfile -t pids < <(pgrep -P "$ranks_pid")
        [ "${#pids[@]}" -eq 3 ]
        stop_ranks "$signal"
        for pid in "${pids[@]}"; do
            [ ! -e "/proc/$pid" ]
        done
    done
}

@test "ranks end with a serve that is killed, even a stopped one" {
    start_ranks --adapter-shape small --world-size 3 --update-every 10
    mapfile -t pids < <(pgrep -P "$ranks_pid")
    stop "${pids[1]}"
    stop_ranks KILL || [ $? -eq 137 ]
    for pid in "${pids[@]}"; do
        gone "$pid"
    done
}

@test "a rank that dies ends the others, by a message" {
    start_ranks --adapter-shape small --world-size 3 --update-every 10
    mapfile -t pids < <(pgrep -P "$ranks_pid")
    victim=$(rank_pid 1)
    kill -KILL "$victim"
    status=0
    wait "$ranks_pid" || status=$?
    [ "$status" -eq 13 ]
    grep -q "rank 1 (process $victim) was ended by signal 9" serve.err
    for pid in "${pids[@]}"; do
        [ ! -e "/proc/$pid" ]
    done
}

@test "--keep-going: replicas serve on after a death, and updates go on" {
    start_ranks --adapter-shape small --world-size 4 --replicate 2 --update-every 200 --keep-going
    victim=$(rank_pid 1)
    kill -KILL "$victim"
    gone "$victim"
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out d --min-step 5 --check-pattern --timeout 30s
    stop_ranks
    grep -q "rank 1 .* died" serve.err
}

@test "a port in use is refused, names the port, and leaves no rank" {
    # Whether the port before it is free is luck: where it is not, that one is named.
    for _ in {1..10}; do
        start_ranks --adapter-shape small --world-size 2
        port=${ready##*:}
        run -11 timeout 60 "$NIXL_FETCH" serve --adapter-shape small --world-size 2 \
            --base-port $((port - 1))
        [[ $output != *"$port"* ]] || break
        has $((port - 1))
        stop_ranks
    done
    has "$port"
    stop_ranks
}

@test "--ready-fd and --json: objects for scripts, statistics at the end" {
    mkfifo ready.fifo
    "$NIXL_FETCH" serve --adapter-shape small --world-size 2 --json --ready-fd 5 \
        5>ready.fifo >out 2>err 3>&- &
    ranks_pid=$!
    read -r -t 60 output <ready.fifo
    [ "$(field event)" = ready ]
    [ "$(field pid)" = "$ranks_pid" ]
    target=$(field target)
    "$NIXL_FETCH" pull "$target" --out d
    kill "$ranks_pid"
    wait "$ranks_pid"
    output=$(cat out)
    [ "$(field event)" = stopped ]
    [ "$(field ranks 1 pulls_good)" -ge 1 ]
    ranks_pid=
}

@test "bench with ranks of its own prints limits and leaves no process" {
    run -0 --separate-stderr "$NIXL_FETCH" bench --adapter-shape small --world-size 3 --iterations 3 --json
    [ "$(field world_size)" = 3 ]
    [ "$(field limits 2 name)" = memcpy ]
    [ "$(field limits 0 bytes)" -ge 8798208 ]
    run -0 "$NIXL_FETCH" bench --model qwen2.5-0.5b --r 2 --world-size 2 --iterations 2 --path stream
    has "limit: memcpy"
    has "path stream"
}
