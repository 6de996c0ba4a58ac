# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the bats files of this folder share, on top of ../cli/ranks.bash: pulls, proofs of what
# was pulled, and processes between a client and its ranks.

# shellcheck disable=SC2154 # info, ready, ranks_pid, output and stderr: of ranks.bash and bats

load ../cli/ranks

support=$FANIN_SOURCE_DIR/tests/support
file=adapter_model.safetensors

setup()
{
    "$FANIN_TEST_PYTHON" -c 'import numpy, safetensors, xxhash' 2>/dev/null ||
        skip "the packages numpy, safetensors and xxhash are missing; tools/setup installs them"
    set_up
    unset FANIN_UCX_LIBRARY
    proxy_pid=
    memory=
}

teardown()
{
    end_ranks
    [ -z "$proxy_pid" ] || kill -KILL "$proxy_pid" 2>/dev/null || true
    [ -z "$memory" ] || rm -rf "$memory"
}

# Goes to a folder on a tmpfs, which teardown removes.
enter_memory()
{
    [ "$(stat -f -c %T /dev/shm)" = tmpfs ] || skip "/dev/shm is not a tmpfs"
    memory=$(mktemp -d /dev/shm/fanin-test-XXXXXX)
    cd "$memory" || return 1
}

# cma needs a kernel that lets a process of this user read another one that says so.
need_cma()
{
    [ "$(id -u)" = 0 ] || [ "$(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null || echo 0)" = 0 ] ||
        skip "ptrace is restricted, so cma is"
}

# A libucp.so.0 of the distribution that is older than what fanin can use.
need_old_ucx()
{
    old_ucx=$(ldconfig -p | sed -n 's/^\tlibucp\.so\.0 .*=> //p' | head -n 1)
    old_version=$("$FANIN_TEST_PYTHON" -c '
import ctypes, sys
major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
library = ctypes.CDLL(sys.argv[1])
library.ucp_get_version(*(ctypes.byref(x) for x in (major, minor, release)))
if (major.value, minor.value) >= (1, 16):
    sys.exit(1)
print(f"{major.value}.{minor.value}.{release.value}")' "$old_ucx" 2>/dev/null) ||
        skip "the distribution has no UCX older than 1.16"
}

# pulled DIRECTORY PATH OPTION...: pulls, proves the pattern, and that this path was taken.
# $output is the JSON.
pulled()
{
    local place=$1 path=$2
    shift 2
    run -0 --separate-stderr "$NIXL_FETCH" pull "${target:-$info}" --out "$place" \
        --check-pattern --json "$@"
    [ "$(field path)" = "$path" ] || {
        printf 'path %s: %s\n' "$(field path)" "$(field path_reason)" >&2
        return 1
    }
}

# proven DIRECTORY OPTION...: by the safetensors package, see check_pulled.py.
proven()
{
    "$FANIN_TEST_PYTHON" "$FANIN_SOURCE_DIR/tests/oracle/check_pulled.py" "$@"
}

# same DIRECTORY DIRECTORY: of one step, so equal in every byte, fanin.json included.
same()
{
    diff -r -I '"transport_checksums"' "$1" "$2" # which says how it came
}

# start_proxy OPTION...: frame_proxy.py before the ranks; sets target and proxy_pid.
start_proxy()
{
    exec {proxy_out}< <(exec "$FANIN_TEST_PYTHON" "$support/frame_proxy.py" "${ready##* }" \
        "$@" 3>&-)
    proxy_pid=$!
    read -r -t 60 target <&"$proxy_out"
}

# stop_proxy: what it counted is in $output.
stop_proxy()
{
    kill "$proxy_pid"
    IFS= read -r -t 60 output <&"$proxy_out"
    wait "$proxy_pid"
    exec {proxy_out}<&-
    proxy_pid=
    target=
}
