#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# What a user of the installed library gets. FANIN_PREFIX: where it was installed,
# FANIN_BUILD_DIR: the build it comes from.

bats_require_minimum_version 1.5.0

setup()
{
    here=$BATS_TEST_DIRNAME
    pc=$(find "$FANIN_PREFIX" -name fanin.pc)
    libdir=$(realpath "$(dirname "$pc")/..")
    library=$libdir/libfanin.so.0
    export PKG_CONFIG_PATH=${pc%/fanin.pc}
    unset LD_LIBRARY_PATH FANIN_UCX_LIBRARY
    scratch=$BATS_TEST_TMPDIR
}

# alone COMMAND...: without any environment of ours.
alone()
{
    env -i PATH=/usr/bin:/bin "$@"
}

# compiled SOURCE PROGRAM COMPILER...: by pkg-config, as the README says for a prefix of one's own.
compiled()
{
    local source=$1 program=$2
    shift 2
    # shellcheck disable=SC2046
    "$@" $warnings "$source" -o "$program" $(pkg-config --cflags --libs fanin) \
        -Wl,-rpath,"$(pkg-config --variable=libdir fanin)"
}

headers()
{
    (cd "$FANIN_PREFIX/include" && printf '%s\n' fanin/*.h)
}

declared()
{
    cat "$FANIN_PREFIX"/include/fanin/*.h | tr '\n' ' ' |
        grep -oE 'FANIN_API [^;{]*\(' | grep -oE 'fanin_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u
}

exported()
{
    nm -D --defined-only "$library" | awk '$2 != "A" {print $3}' | sed 's/@.*//' | sort -u
}

warnings='-Wall -Wextra -pedantic -Werror'

@test "the library exports fanin_ symbols of version FANIN_0.1 and nothing else" {
    run -0 sh -c "nm -D --defined-only '$library' | awk '\$2 != \"A\" {print \$3}'"
    [ "${#lines[@]}" -gt 10 ]
    for symbol in "${lines[@]}"; do
        [[ $symbol == fanin_*@@FANIN_0.1 ]]
    done
}

@test "the library exports what its headers declare" {
    declared >"$scratch/declared"
    exported >"$scratch/exported"
    diff "$scratch/declared" "$scratch/exported"
}

@test "soname and links are those of version 0" {
    objdump -p "$library" | grep -E 'SONAME +libfanin\.so\.0$'
    [ "$(readlink -f "$libdir/libfanin.so")" = "$(readlink -f "$library")" ]
    [[ $(readlink -f "$library") == */libfanin.so.$(pkg-config --modversion fanin) ]]
}

@test "the library needs no UCX and nothing of the tool's to be loaded" {
    run -0 objdump -p "$library"
    [[ $output != *NEEDED*libuc* ]]
    [[ $output != *NEEDED*libpopt* ]]
    [[ $output != *NEEDED*libsmartcols* ]]
    [[ $output != *RUNPATH* ]]
}

@test "the library's stack is not executable and it writes to no text" {
    run -0 readelf -dlW "$library"
    [[ $output != *TEXTREL* ]]
    [[ $output =~ GNU_STACK[^E]*RW[[:space:]] ]]
}

@test "no private header is installed" {
    headers | sort >"$scratch/installed"
    printf 'fanin/%s.h\n' client error fanin log objects relay safetensors server trace types | sort >"$scratch/expected"
    diff "$scratch/expected" "$scratch/installed"
}

@test "every header compiles alone as C11" {
    for header in $(headers); do
        for compiler in gcc clang; do
            echo "#include <$header>" | "$compiler" -std=c11 $warnings -Wstrict-prototypes \
                -I"$FANIN_PREFIX/include" -fsyntax-only -x c -
        done
    done
}

@test "every header compiles alone as C++" {
    for header in $(headers); do
        for standard in c++11 c++17 c++20; do
            for compiler in g++ clang++; do
                echo "#include <$header>" | "$compiler" -std=$standard $warnings \
                    -I"$FANIN_PREFIX/include" -fsyntax-only -x c++ -
            done
        done
    done
}

@test "a header twice and all headers in any order are fine" {
    { headers; headers | sort -r; } | sed 's/.*/#include <&>/' |
        gcc -std=c11 $warnings -I"$FANIN_PREFIX/include" -fsyntax-only -x c -
}

@test "pkg-config names the library and no other" {
    run -0 pkg-config --libs fanin
    [ "$(echo "$output" | xargs)" = "-L$libdir -lfanin" ]
    run -0 pkg-config --cflags fanin
    [ "$(echo "$output" | xargs)" = "-I$FANIN_PREFIX/include" ]
}

@test "a program in C builds with pkg-config and runs" {
    compiled "$here/consumer.c" "$scratch/consumer" gcc -std=c11
    run -0 alone "$scratch/consumer"
    [ "$output" = "$(pkg-config --modversion fanin)" ]
}

@test "a program in C++ builds with pkg-config and runs" {
    compiled "$here/consumer.cpp" "$scratch/consumer" g++ -std=c++17
    run -0 alone "$scratch/consumer"
    [ "$output" = "$(pkg-config --modversion fanin)" ]
}

@test "the installed tool runs, and its manual page and completion are there" {
    run -0 alone "$FANIN_PREFIX/bin/nixl-fetch" --help
    [[ $output == *pull* ]]
    # Not its warnings: scdoc writes paragraph macros that mandoc finds superfluous.
    mandoc -T lint -W error "$FANIN_PREFIX/share/man/man1/nixl-fetch.1"
    bash -n "$FANIN_PREFIX/share/bash-completion/completions/nixl-fetch"
    [ -f "$FANIN_PREFIX/share/fanin/schemas/pull.json" ]
    [ -f "$FANIN_PREFIX/share/zsh/site-functions/_nixl-fetch" ]
    [ -f "$FANIN_PREFIX/share/fish/vendor_completions.d/nixl-fetch.fish" ]
}

@test "installed below DESTDIR, and moved from there, the tool runs" {
    DESTDIR=$scratch/package meson install -C "$FANIN_BUILD_DIR" --no-rebuild --quiet
    staged=$scratch/package$FANIN_PREFIX
    diff <(cd "$FANIN_PREFIX" && find . | sort) <(cd "$staged" && find . | sort)
    run -0 alone "$staged/bin/nixl-fetch" --help
    mv "$staged" "$scratch/elsewhere"
    run -0 alone "$scratch/elsewhere/bin/nixl-fetch" --help
    [[ $output == *pull* ]]
}

@test "nothing installed names the checkout, the build directory or the UCX of the build" {
    run -0 readelf -d "$FANIN_PREFIX/bin/nixl-fetch"
    [[ $output == *'RUNPATH'*'[$ORIGIN/../'"${libdir#"$(realpath "$FANIN_PREFIX")"/}]"* ]]
    for file in "$library" "$FANIN_PREFIX/bin/nixl-fetch"; do
        strip -o "$scratch/stripped" "$file" # debugging information names sources
        run -1 grep -aoE ".{40}($(realpath "$here/../..")|$(realpath "$FANIN_BUILD_DIR")|\.deps/).*" "$scratch/stripped"
    done
}

@test "the installed tool says how to give it UCX, and takes the one that it is given" {
    doctor=("$FANIN_PREFIX/bin/nixl-fetch" doctor)
    run -0 alone FANIN_UCX_LIBRARY=/nonexistent/libucp.so.0 "${doctor[@]}"
    [[ $output == *'UCX: none is used (FANIN_UCX_LIBRARY: /nonexistent/libucp.so.0: cannot open'* ]]
    run -0 alone "${doctor[@]}"
    if [[ $output != *'ok '*' UCX: 1.'* ]]; then # the system has none, or too old a one
        [[ $output == *'UCX: none is used'*'install'*'FANIN_UCX_LIBRARY'* ]]
    fi
    ucx=$("$here/../../tools/find-ucx")
    [ -n "$ucx" ] || skip 'no UCX in .deps'
    run -0 alone FANIN_UCX_LIBRARY="$ucx/lib/libucp.so.0" "${doctor[@]}"
    [[ $output == *' UCX: 1.'*" at $ucx/lib/libucp.so.0"* ]]
}

@test "the tool uses public functions of the shared library only" {
    run -0 objdump -p "$FANIN_PREFIX/bin/nixl-fetch"
    [[ $output == *NEEDED*libfanin.so.0* ]]
    exported >"$scratch/exported"
    nm -D --undefined-only "$FANIN_PREFIX/bin/nixl-fetch" | awk '{print $2}' | sed 's/@.*//' |
        grep '^fanin_' | sort -u >"$scratch/used"
    [ -s "$scratch/used" ]
    [ -z "$(comm -23 "$scratch/used" "$scratch/exported")" ]
    # What it links statically brings no second copy of a public function.
    nm --defined-only "$FANIN_PREFIX/bin/nixl-fetch" | awk '{print $3}' | sort -u >"$scratch/own"
    grep -qx main "$scratch/own"
    [ -z "$(comm -12 "$scratch/own" "$scratch/exported")" ]
    run ! grep -q '^fanin_' "$scratch/own"
}

@test "the examples have under 50 lines, build with pkg-config and pull a step" {
    for example in trainer worker; do
        [ "$(wc -l <"$here/../examples/$example.c")" -lt 50 ]
        compiled "$here/../examples/$example.c" "$scratch/$example" gcc -std=c11
    done
    # A trainer prints its port, takes a step a line, and ends with its input.
    mkfifo "$scratch/in0" "$scratch/in1" "$scratch/out0" "$scratch/out1"
    "$scratch/trainer" 0 <"$scratch/in0" >"$scratch/out0" 3>&- &
    first=$!
    "$scratch/trainer" 1 <"$scratch/in1" >"$scratch/out1" 3>&- &
    second=$!
    exec 7>"$scratch/in0" 8>"$scratch/in1"
    read -r -t 10 port0 <"$scratch/out0"
    read -r -t 10 port1 <"$scratch/out1"
    echo >&7
    echo >&8
    run -0 timeout 30 "$scratch/worker" "127.0.0.1:$port0" "127.0.0.1:$port1"
    [[ $output == 'step 1 by '*', first element 0x101, last 0x101' ]]
    exec 7>&- 8>&-
    wait "$first"
    wait "$second"
}

# block N FILE: a page's Nth example in C.
block()
{
    awk -v n="$1" '/^```/ { inside = $0 == "```c" && ++seen == n; next } inside' \
        "$here/../../$2"
}

# two_ports: the first of two that nobody listens on.
two_ports()
{
    local port=21000
    while [ -n "$(ss -Hltn "sport = :$port or sport = :$((port + 1))")" ]; do
        port=$((port + 2))
    done
    echo "$port"
}

@test "the session of docs/how-to/c-programs.md compiles without a warning, and reads layer by layer" {
    block 3 docs/how-to/c-programs.md >"$scratch/update.c"
    for compiler in gcc clang; do
        compiled "$scratch/update.c" "$scratch/update" "$compiler" -std=c11 "$here/weights_session.c"
        run -0 "$scratch/update"
    done
}

@test "the documented examples in C compile without a warning, and one pulls the other's step" {
    page=docs/how-to/c-programs.md
    [ "$(grep -c '^```c$' "$here/../../$page")" = 3 ]
    number=0
    for example in trainer worker; do
        number=$((number + 1))
        block "$number" "$page" >"$scratch/$example.c"
        [ -s "$scratch/$example.c" ]
        for compiler in gcc clang; do
            compiled "$scratch/$example.c" "$scratch/$example" "$compiler" -std=c11 \
                "$here/documented_$example.c"
        done
    done
    port=$(two_ports)
    mkfifo "$scratch/in0" "$scratch/in1" "$scratch/out0" "$scratch/out1"
    "$scratch/trainer" 0 "$port" <"$scratch/in0" >"$scratch/out0" 3>&- &
    first=$!
    "$scratch/trainer" 1 "$port" <"$scratch/in1" >"$scratch/out1" 3>&- &
    second=$!
    exec 7>"$scratch/in0" 8>"$scratch/in1" 5<"$scratch/out0" 6<"$scratch/out1"
    # Before each step a trainer says how many it has taken.
    for taken in 0 1; do
        read -r -t 20 -u 5 said && [ "$said" = "$taken" ]
        read -r -t 20 -u 6 said && [ "$said" = "$taken" ]
        if [ "$taken" = 1 ]; then
            "$scratch/worker" 1 "$scratch/adapter" "127.0.0.1:$port" "127.0.0.1:$((port + 1))"
            run -1 "$scratch/worker" 1 "$scratch/none" "127.0.0.1:$port"
            [[ $output == *"rank"* ]]
        fi
        echo >&7
        echo >&8
    done
    wait "$first"
    wait "$second"
    exec 5<&- 6<&- 7>&- 8>&-
    [ "$(tail -c 1024 "$scratch/adapter/adapter_model.safetensors" | od -An -v -tx1 | tr -d ' \n' | sort -u)" = \
        "$(printf '01%.0s' {1..1024})" ]
}
