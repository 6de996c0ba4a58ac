#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Each path between real processes, and what happens where UCX is absent, too old, of another
# version than the ranks', or no UCX at all, and between pid namespaces.

# shellcheck disable=SC2154 # of pulls.bash

load pulls

# reasons TEXT: the result and each of its ranks give this reason.
reasons()
{
    [[ $(field path_reason) == *"$1"* ]] || {
        printf 'not in the reason: %s, but: %s\n' "$1" "$(field path_reason)" >&2
        return 1
    }
    for rank in 0 1 2; do
        [[ $(field ranks "$rank" reason) == *"$1"* ]]
    done
}

# refused PATH TEXT [here]: --path PATH ends with "unsupported" or, where it is this host that
# cannot, "transport", the reason and a remedy.
refused()
{
    local code=14 name=FANIN_ERR_UNSUPPORTED
    [ -z "${3-}" ] || code=15 name=FANIN_ERR_TRANSPORT
    run "-$code" --separate-stderr "$NIXL_FETCH" pull "${target:-$info}" --out refused --path "$1" --json
    [ "$(field error status)" = "$name" ]
    [ "$(field error rank)" = 0 ]
    [[ $(field error address) == 127.0.0.1:* ]]
    [[ $(field error message) == *"path $1"*"$2"* ]]
    [[ $(field error remedy) == *"--path auto or stream"* ]]
    has "$2"
    [ -z "$(ls -Ad refused .refused* 2>/dev/null)" ]
}

@test "stream over the Unix socket and over TCP, cma, auto: the same directory" {
    need_cma
    start_ranks --adapter-shape small --world-size 3
    pulled unix stream --path stream
    pulled tcp stream --path stream --no-unix
    pulled cma cma --path cma
    [[ $(field path_reason) == *"probe read by cma"* ]]
    pulled auto cma
    for rank in 0 1 2; do
        [ "$(field ranks "$rank" path)" = cma ]
        [ "$(field ranks "$rank" connections)" = 0 ]
    done
    run -0 "$NIXL_FETCH" pull "$info" --out text
    has "path      cma: "
    for place in tcp cma auto text; do
        same unix "$place"
    done
    for place in unix cma; do
        grep -q '"transport_checksums": "local"' "$place/fanin.json"
    done
    grep -q '"transport_checksums": true' tcp/fanin.json
    pulled bare stream --path stream --no-unix --no-checksums
    same unix bare
    grep -q '"transport_checksums": false' bare/fanin.json
    run -0 "$NIXL_FETCH" pull "$info" --path stream --no-unix --out sealed
    has "checksums of all that came over the network"
    proven unix --shape small
    stop_ranks
}

@test "TCP is no way to cma: auto streams and says why" {
    need_cma
    start_ranks --adapter-shape small --world-size 3
    pulled auto stream --no-unix
    reasons "does not offer cma"
    run -14 "$NIXL_FETCH" pull "$info" --out refused --path cma --no-unix
    stop_ranks
}

@test "a client with too old a UCX has all but rdma, and says which version and which is needed" {
    need_cma
    need_old_ucx
    start_ranks --adapter-shape small --world-size 3
    export FANIN_UCX_LIBRARY=$old_ucx
    pulled auto cma
    proven auto --shape small
    refused rdma "it is UCX $old_version, and 1.16" here
    stop_ranks
}

@test "a client whose UCX is switched off, absent or something else has all but rdma, and says why" {
    need_cma
    start_ranks --adapter-shape small --world-size 3
    touch empty.so
    while IFS='|' read -r library reason; do
        export FANIN_UCX_LIBRARY=$library
        pulled auto cma
        rm -r auto
        refused rdma "$reason" here
    done <<END
|FANIN_UCX_LIBRARY is empty
/nonexistent/libucp.so.0|/nonexistent/libucp.so.0: cannot open
$PWD/empty.so|$PWD/empty.so: file too short
libm.so.6|it is not libucp
END
    unset FANIN_UCX_LIBRARY
    pulled auto cma --no-ucx
    stop_ranks
}

@test "ranks without UCX: cma, no rdma, and the reason" {
    need_cma
    start_ranks --adapter-shape small --world-size 3 --no-ucx
    pulled auto cma
    [ -z "$FANIN_TEST_UCX_LIBRARY" ] || refused rdma "the rank has no UCX"
    pulled stream stream --path stream
    stop_ranks
}

@test "ranks with too old a UCX say so, and are read from" {
    need_cma
    need_old_ucx
    export FANIN_UCX_LIBRARY=$old_ucx
    start_ranks --adapter-shape small --world-size 3
    grep -q "UCX $old_version, and 1.16" serve.err
    unset FANIN_UCX_LIBRARY
    pulled d cma
    [ -z "$FANIN_TEST_UCX_LIBRARY" ] || refused rdma "the rank has no UCX"
    stop_ranks
}

@test "ranks with a UCX of another minor version: no rdma, and both versions" {
    [ -n "$FANIN_TEST_UCX_LIBRARY" ] || skip "no UCX"
    start_ranks --adapter-shape small --world-size 3
    start_proxy --ucx-version 1.21.7
    refused rdma "and 1.21.7 there"
    stop_proxy
    stop_ranks
}

@test "who answers for a rank on its Unix socket is not read in its place" {
    need_cma
    start_ranks --adapter-shape small --world-size 3
    start_proxy
    pulled auto stream
    refused cma "does not offer cma"
    stop_proxy
    stop_ranks
}

@test "ranks in another pid namespace are read over TCP, unless both ends trust containers" {
    need_cma
    unshare --pid --fork true 2>/dev/null || skip "no pid namespaces for this user"
    inside=(unshare --pid --fork --mount-proc)
    start_ranks --adapter-shape small --world-size 3
    run -0 --separate-stderr "${inside[@]}" "$NIXL_FETCH" pull "$info" --out beside --json --verbose
    [ "$(field path)" = stream ]
    [ "$(field ranks 0 checksums)" = true ] # TCP
    [[ $(field path_reason) == *"pid namespace"* ]]
    [[ $stderr == *unix-stranger*"pid namespace"*--trust-containers* ]]
    [ "$(grep -c unix-stranger <<<"$stderr")" = 1 ]
    run -14 --separate-stderr "${inside[@]}" "$NIXL_FETCH" pull "$info" --out refused --path cma --json
    [[ $(field error message) == *"pid namespace"* ]]
    # One end's trust is its own: the ranks offer a stranger nothing but the stream.
    run -0 --separate-stderr "${inside[@]}" "$NIXL_FETCH" pull "$info" --out told --json --trust-containers
    [ "$(field path)" = stream ]
    [ "$(field ranks 0 checksums)" = local ]
    [[ $(field path_reason) == *"does not offer"* ]]
    run -0 --separate-stderr "$NIXL_FETCH" pull "$info" --out own --json
    [ "$(field path)" = cma ]
    stop_ranks
}

@test "both ends trust containers: cma reads ranks of a pid namespace below, and none that it cannot see" {
    need_cma
    unshare --pid --fork true 2>/dev/null || skip "no pid namespaces for this user"
    export FANIN_TRUST_CONTAINERS=1
    start_ranks --adapter-shape small --world-size 3
    run -14 --separate-stderr unshare --pid --fork --mount-proc "$NIXL_FETCH" pull "$info" --out refused \
        --path cma --json
    [[ $(field error message) == *"has no number here"* ]]
    stop_ranks
}

@test "a mount namespace leaves cma" {
    need_cma
    unshare --mount true 2>/dev/null || skip "no mount namespaces for this user"
    start_ranks --adapter-shape small --world-size 3
    run -0 --separate-stderr unshare --mount "$NIXL_FETCH" pull "$info" --out beside --json
    [ "$(field path)" = cma ]
    [ -z "$FANIN_TEST_UCX_LIBRARY" ] || {
        run -14 --separate-stderr unshare --mount "$NIXL_FETCH" pull "$info" --out refused --path rdma --json
        [[ $(field error message) == *"does not offer rdma"* ]]
    }
    stop_ranks
}

@test "paths that this host cannot have are refused" {
    need_cma
    start_ranks --adapter-shape small --world-size 2
    run -14 --separate-stderr "$NIXL_FETCH" pull "$info" --out refused --path cuda_ipc --json
    # Built without CUDA, and with.
    [[ $(field error message) =~ "path cuda_ipc".*("does not offer"|"holds host memory") ]]
    [ ! -e refused ]
    stop_ranks
}

@test "ranks on loopback listen on no other interface, after a pull by cma neither" {
    need_cma
    start_ranks --adapter-shape small --world-size 3
    pulled d cma
    "$NIXL_FETCH" pull "$info" --out e --path cma
    mapfile -t pids < <(pgrep -P "$ranks_pid")
    [ "${#pids[@]}" -eq 3 ]
    for pid in "${pids[@]}"; do
        grep -q libucp /proc/"$pid"/maps
        # Everything that waits for somebody: listening streams, unconnected datagrams, raw.
        # Columns: protocol, state, two queues, local address, peer, process.
        ss -Hltuwnp | grep "pid=$pid," >listening || true
        [ "$(grep -c '^tcp' listening)" -ge 1 ]
        run -1 awk '$5 !~ /^(127\.[0-9.]+|\[::1\]):[0-9]+$/ { print; bad = 1 } END { exit !bad }' listening
        [ -z "$output" ]
    done
    stop_ranks
}

# as_user COMMAND...: as a user of another uid.
as_user()
{
    setpriv --reuid 1234 --regid 1234 --clear-groups "$@"
}

@test "on loopback another user's ranks are refused, unless told; root's and one's own are not" {
    [ "$(id -u)" = 0 ] || skip "only root can be two users"
    as_user test -x "$NIXL_FETCH" || skip "another user cannot reach the build"
    theirs=$(mktemp -d /tmp/test-fanin-XXXXXX) # that user cannot look into bats' folders
    chmod 1777 "$theirs"
    binds=(127.0.0.1)
    ! grep -q '^0\{31\}1 ' /proc/net/if_inet6 || binds+=(::1)
    for bind in "${binds[@]}"; do
        exec {ranks_out}< <(exec setpriv --reuid 1234 --regid 1234 --clear-groups \
            "$NIXL_FETCH" serve --info "$theirs/info" --bind "$bind" --adapter-shape small --world-size 2 2>/dev/null 3>&-)
        ranks_pid=$!
        read -r -t 120 <&"$ranks_out"
        run -13 --separate-stderr timeout 60 "$NIXL_FETCH" pull "$theirs/info" --out refused --json
        [ "$(field error status)" = FANIN_ERR_AUTH ]
        [[ $(field error message) == *"process of uid 1234, and this one is of uid 0"* ]]
        [[ $(field error remedy) == *--trust-other-users* ]]
        [ ! -e refused ]
        run -0 timeout 60 "$NIXL_FETCH" pull "$theirs/info" --out "told $bind" --trust-other-users
        FANIN_TRUST_OTHER_USERS=1 run -0 timeout 60 "$NIXL_FETCH" pull "$theirs/info" --out "variable $bind"
        run -0 as_user timeout 60 "$NIXL_FETCH" pull "$theirs/info" --out "$theirs/own $bind"
        stop_ranks
    done
    start_ranks --adapter-shape small --world-size 2
    cp "$info" "$theirs/root"
    chmod 0644 "$theirs/root"
    run -0 as_user timeout 60 "$NIXL_FETCH" pull "$theirs/root" --out "$theirs/pulled"
    stop_ranks
    rm -r "$theirs"
}
