#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# nixl-fetch doctor: this host, trees of other hosts, and a trainer.
# shellcheck disable=SC2154 # info is set by ranks.bash

load ranks

# json EXPRESSION: of the object in $output, which is called d.
json()
{
    printf '%s\n' "$output" | "$FANIN_TEST_PYTHON" -c "import json, sys; d = json.load(sys.stdin); print($1)"
}

@test "this host gets findings, and an exit status by the worst" {
    run --separate-stderr "$NIXL_FETCH" doctor --json
    [ -z "$stderr" ]
    worst=$(json 'd["worst"]')
    case $worst in
    ok | note) [ "$status" -eq 0 ] ;;
    warning) [ "$status" -eq 3 ] ;;
    problem) [ "$status" -eq 4 ] ;;
    *) false ;;
    esac
    [ "$(json '"locked memory" in [f["subject"] for f in d["findings"]]')" = True ]
    run --separate-stderr "$NIXL_FETCH" doctor
    [[ $output == *"locked memory:"* ]]
}

@test "a machine without RDMA ports, of another tree" {
    mkdir -p sys/class proc dev/shm
    run --separate-stderr "$NIXL_FETCH" doctor --sysfs sys --procfs proc --dev dev --json
    [ "$(json 'd["nics"] == [] and d["gpus"] == []')" = True ]
}

@test "a machine with RDMA ports and no device files is a problem" {
    mkdir -p sys/class/infiniband/mlx5_0/ports/1 proc dev/shm
    echo '4: ACTIVE' >sys/class/infiniband/mlx5_0/ports/1/state
    echo '400 Gb/sec (4X NDR)' >sys/class/infiniband/mlx5_0/ports/1/rate
    echo InfiniBand >sys/class/infiniband/mlx5_0/ports/1/link_layer
    run -4 --separate-stderr "$NIXL_FETCH" doctor --sysfs sys --procfs proc --dev dev
    [[ $output == *"mlx5_0:1"*400*active* ]]
    [[ $output == *"there is no /dev/infiniband/uverbs"* ]]
    run -4 --separate-stderr "$NIXL_FETCH" doctor --sysfs sys --procfs proc --dev dev -q
    [[ $output != *"note "* ]]
}

@test "a trainer's ranks are asked, missing ones are a problem" {
    start_ranks --adapter-shape small --world-size 3 --keep-going
    run --separate-stderr "$NIXL_FETCH" doctor "$info" --json
    [ "$(json '[f["text"] for f in d["findings"] if f["subject"] == "trainer"][0].startswith("all 3 ranks answer")')" = True ]
    pid=$(rank_pid 1)
    kill -KILL "$pid"
    gone "$pid"
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$info"
    [[ $output == *"1 of 3 ranks refuse"* ]]
    pid=$(rank_pid 2)
    stop "$pid"
    run --separate-stderr "$NIXL_FETCH" doctor "$info" --timeout 2s
    kill -CONT "$pid"
    [ "$status" -eq 4 ]
    [[ $output == *"1 of 3 ranks do not answer (the first is "*": the trainer is stopped"*"is the trainer process stopped"* ]]
    [[ $output != *firewall* ]]
    [[ $output == *"1 of 3 ranks refuse"* ]]
    stop_ranks || true
}

@test "a world of another size than the addresses is a problem" {
    start_ranks --adapter-shape small --world-size 2
    ranks=$("$FANIN_TEST_PYTHON" -c 'import json, sys; print(",".join("%s:%d" % (h["host"], h["base_port"]) for h in json.load(open(sys.argv[1]))["hosts"]))' "$info")
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$ranks,127.0.0.1:1"
    [[ $output == *"the world size is 2, but 3 addresses were given"* ]]
    stop_ranks
}

@test "another program at a rank's port is told apart from a rank that is down" {
    start_ranks --adapter-shape small --world-size 2
    IFS=, read -r zero _ <<<"${ready##* }"
    exec {greeter}< <(exec "$FANIN_TEST_PYTHON" -c '
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    held = []
    while True:
        held.append(server.accept()[0])
        held[-1].sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")' 3>&-)
    greeter_pid=$!
    read -r port <&"$greeter"
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$zero,127.0.0.1:$port"
    kill -KILL "$greeter_pid"
    has "another program listens at 1 of 2 addresses: the rank at 127.0.0.1:$port "
    [[ $output != *refuse* ]]
    stop_ranks
}

@test "ranks of two launches are a problem, and no ping is well, whoever answers first" {
    start_ranks --adapter-shape small --world-size 2
    IFS=, read -r zero _ <<<"${ready##* }"
    first=$ranks_pid
    start_ranks --adapter-shape small --world-size 2
    IFS=, read -r _ one <<<"${ready##* }"
    for _ in {1..10}; do
        run -4 --separate-stderr "$NIXL_FETCH" doctor "$zero,$one" -q --timeout 20s
        has " of another world (launch) than "
        run -14 --separate-stderr "$NIXL_FETCH" ping "$zero,$one" --json --timeout 20s
        has " of another world (launch) than "
        [[ $output != *'"healthy"'* ]] || [ "$(field healthy) $(field answered)" = "false 2" ]
    done
    kill -TERM "$first"
    stop_ranks
    gone "$first"
}

@test "descriptors: enough for as many ranks as a client takes" {
    run bash -c 'ulimit -n 70 && exec "$NIXL_FETCH" doctor'
    has "the limit is 70: enough for 11 ranks"
    run bash -c 'ulimit -n 70 && exec "$NIXL_FETCH" ping 127.0.0.1:1 -n 11'
    [[ $output != *descriptors* ]]
    run bash -c 'ulimit -n 70 && exec "$NIXL_FETCH" ping 127.0.0.1:1 -n 12'
    has "12 ranks need about 72 descriptors, the limit of this process is 70"
}

@test "wrong usage" {
    run -2 "$NIXL_FETCH" doctor one two
    run -2 "$NIXL_FETCH" doctor 127.0.0.1:1 --run 0
    has "'nixl-fetch status' tells what a run is at"
}
