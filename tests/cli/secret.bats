#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A launch's secret on command lines, and OpenSSL's own client as a peer that knows nothing of fanin.

# shellcheck disable=SC2154 # info, ranks_pid, stderr and output are set elsewhere

load ranks

setup()
{
    set_up
    "$NIXL_FETCH" secret one
    "$NIXL_FETCH" secret other
}

@test "a secret is new, its owner's, and never written over" {
    [ "$(stat -c %a one)" = 600 ]
    grep -Eqx '[0-9a-f]{64}' one
    run -1 cmp -s one other
    cp one before
    run -11 --separate-stderr "$NIXL_FETCH" secret one
    [[ $stderr == *"one: File exists"* ]]
    cmp one before
    ln -s nowhere link
    run -11 "$NIXL_FETCH" secret link
    [ ! -e nowhere ]
    run -15 "$NIXL_FETCH" secret nowhere/secret
    run -2 "$NIXL_FETCH" secret
}

@test "commands use the secret of their option, the environment, the target file" {
    start_ranks --adapter-shape small --world-size 2 --secret-file one
    grep -Fq "\"secret_file\": \"$PWD/one\"" "$info"
    run -0 "$NIXL_FETCH" pull "$info" --no-unix --out d
    run -0 "$NIXL_FETCH" verify "$info" --no-unix --dir d
    address=$("$NIXL_FETCH" ping "$info" --no-unix --json | jq -r '.ranks[].address' | paste -sd,)
    run -0 "$NIXL_FETCH" list "$address" --no-unix --secret-file one
    FANIN_SECRET_FILE=one run -0 "$NIXL_FETCH" list "$address" --no-unix
    run -0 "$NIXL_FETCH" list "$address" # over Unix sockets the kernel says who it is
    run -13 --separate-stderr "$NIXL_FETCH" list "$address" --no-unix
    [[ $stderr == *"demands the launch's secret"*"--secret-file"* ]]
    run -13 --separate-stderr "$NIXL_FETCH" list "$address" --no-unix --secret-file other
    [[ $stderr == *"another secret than other"* ]]
    chmod 0644 one
    run -13 --separate-stderr "$NIXL_FETCH" list "$address" --no-unix --secret-file one
    [[ $stderr == *"secret file one has mode 0644"*"chmod"* ]]
    chmod 0600 one
    # Nobody learns it from what is said: not here, not of the processes.
    run -13 "$NIXL_FETCH" pull "$address" --no-unix --secret-file other --run 0 --out e --verbose
    run ! grep -qF "$(head -c 16 other)" <<<"$output"
    read -ra pids <<<"$ranks_pid $(cat /proc/"$ranks_pid"/task/*/children)"
    [ "${#pids[@]}" -gt 2 ] # the ranks are processes of their own
    for pid in "${pids[@]}"; do
        run ! grep -rqaF "$(head -c 16 one)" /proc/"$pid"/cmdline /proc/"$pid"/environ "$info"
    done
}

@test "a doctor asks with the secret, and says of which ranks it is not" {
    start_ranks --adapter-shape small --world-size 2 --world-id 0123456789abcdef0123456789abcdef --secret-file one
    first_pid=$ranks_pid
    mapfile -t first < <("$NIXL_FETCH" ping "$info" --no-unix --json | jq -r '.ranks[].address')
    address=$(IFS=,; echo "${first[*]}")
    run --separate-stderr "$NIXL_FETCH" doctor "$address" --no-unix --secret-file one
    [[ $output == *"trainer: all 2 ranks answer"* ]]
    run --separate-stderr "$NIXL_FETCH" doctor "$info" --no-unix
    [[ $output == *"trainer: all 2 ranks answer"* ]]
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$address" --no-unix --secret-file other
    [[ $output == *"problem  trainer: "*"has another secret than other"*"-> give both the secret file of one launch"* ]]
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$address" --no-unix
    [[ $output == *"problem  trainer: "*"demands the launch's secret"*"--secret-file"* ]]
    run -11 --separate-stderr "$NIXL_FETCH" doctor "$address" --no-unix --secret-file none
    [[ $stderr == *"cannot read the secret file none"* ]]
    for option in secret-file tls-cert tls-key tls-ca; do
        run -2 --separate-stderr "$NIXL_FETCH" doctor "--$option" one
        [[ $stderr == *"--$option needs a TARGET"* ]]
    done
    # A rank of this world that was given another secret is not one that is down.
    start_ranks --adapter-shape small --world-size 2 --world-id 0123456789abcdef0123456789abcdef --secret-file other
    mapfile -t second < <("$NIXL_FETCH" ping "$info" --no-unix --json | jq -r '.ranks[].address')
    run -4 --separate-stderr "$NIXL_FETCH" doctor "${first[0]},${second[1]}" --no-unix --secret-file one
    kill "$first_pid"
    [[ $output == *"1 of 2 ranks do not admit this reader, or are not believed: "*"${second[1]}"*"another secret"* ]]
    [[ $output != *unreachable* ]]
}

@test "a secret without OpenSSL is an error, and never plain" {
    export FANIN_OPENSSL_LIBRARY=/nonexistent/libssl.so.3
    run -14 --separate-stderr "$NIXL_FETCH" list 127.0.0.1:1 --secret-file one
    [[ $stderr == *"no TLS: /nonexistent/libssl.so.3"*"install it"* ]]
    run -14 --separate-stderr timeout 20 "$NIXL_FETCH" serve --adapter-shape small --world-size 1 --secret-file one
    [[ $stderr == *"no TLS"* ]]
    run -13 "$NIXL_FETCH" list 127.0.0.1:1
}

@test "an OpenSSL whose configuration leaves it no ciphers says which file to look at" {
    printf 'openssl_conf = a\n[a]\nproviders = b\n[b]\nbase = c\n[c]\nactivate = 1\n' >no-ciphers.cnf
    OPENSSL_CONF=$PWD/no-ciphers.cnf run -14 --separate-stderr "$NIXL_FETCH" list 127.0.0.1:1 --secret-file one
    [[ $stderr == *"cannot be set up for TLS 1.3: "*"OPENSSL_CONF"* ]]
}

# derive FILE IDENTITY: the key that PROTOCOL.md says, by OpenSSL.
derive()
{
    openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt "hexkey:$(head -c 64 "$1")" \
        -kdfopt salt:fanin/1 -kdfopt "info:$2" HKDF | tr -d ':\n'
}

@test "OpenSSL's client is a reader by the protocol's key, and nobody by another" {
    openssl version | grep -q '^OpenSSL 3' || skip "needs the command openssl"
    start_ranks --adapter-shape small --world-size 1 --secret-file one
    address=$("$NIXL_FETCH" ping "$info" --no-unix --json | jq -r '.ranks[0].address')
    # ask OPTION...: what OpenSSL says, and what it hears, to a request that is no hello.
    ask()
    {
        output=$(timeout 10 openssl s_client -connect "$address" -brief -ign_eof "$@" \
            <<<'no frame, but 24 bytes..' 2>&1 | tr -d '\0')
    }
    ask -tls1_3 -psk "$(derive one fanin/1/reader)" -psk_identity fanin/1/reader
    [[ $output == *"TLS_AES_128_GCM_SHA256"*"FAN1"* ]]
    ask -tls1_3 -psk "$(derive other fanin/1/reader)" -psk_identity fanin/1/reader
    [[ $output == *alert* && $output != *FAN1* ]]
    ask -tls1_3 -psk "$(derive one fanin/1/reader)" -psk_identity fanin/1/rank/0
    [[ $output == *alert* && $output != *FAN1* ]]
    ask -tls1_3
    [[ $output == *alert* && $output != *FAN1* ]]
    ask -tls1_2
    [[ $output == *alert* && $output != *FAN1* ]]
    run -0 "$NIXL_FETCH" ping "$info" --no-unix
}

@test "OpenSSL's client finds nothing weaker than TLS 1.3 with a fresh exchange of keys" {
    openssl version | grep -q '^OpenSSL 3' || skip "needs the command openssl"
    start_ranks --adapter-shape small --world-size 1 --secret-file one
    address=$("$NIXL_FETCH" ping "$info" --no-unix --json | jq -r '.ranks[0].address')
    key=$(derive one fanin/1/reader)
    # look OPTION...: what OpenSSL tells of a connection by the right key.
    look()
    {
        output=$(timeout 10 openssl s_client -connect "$address" -ign_eof -psk "$key" -psk_identity fanin/1/reader "$@" \
            <<<'no frame, but 24 bytes..' 2>&1 | tr -d '\0')
    }
    for version in -tls1 -tls1_1 -tls1_2 -no_tls1_3; do
        look "$version" -cipher ALL:PSK:eNULL@SECLEVEL=0
        [[ $output != *FAN1* ]]
        [[ $output == *alert* || $output == *"no protocols available"* || $output == *"no ciphers available"* ]]
    done
    for suite in TLS_AES_256_GCM_SHA384 TLS_AES_128_CCM_SHA256 TLS_AES_128_CCM_8_SHA256; do
        look -tls1_3 -ciphersuites "$suite"
        [[ $output != *FAN1* ]]
    done
    for suite in TLS_AES_128_GCM_SHA256 TLS_CHACHA20_POLY1305_SHA256; do
        look -tls1_3 -ciphersuites "$suite"
        [[ $output == *"$suite"*FAN1* ]]
    done
    # Who would do without an exchange of keys has one all the same; nothing of it can be taken up again.
    look -tls1_3 -allow_no_dhe_kex
    [[ $output == *"Server Temp Key: "*FAN1* ]]
    [[ $output != *"New Session Ticket"* ]]
    [[ $output != *"Max Early Data"* ]]
    [[ $output == *"Compression: NONE"* && $output == *"Expansion: NONE"* ]]
    [[ $output == *"No ALPN negotiated"* ]]
    run -0 "$NIXL_FETCH" ping "$info" --no-unix
}

@test "a reader speaks TLS with OpenSSL's server, and takes it for no rank" {
    openssl version | grep -q '^OpenSSL 3' || skip "needs the command openssl"
    mkfifo input
    exec {hold}<>input # it ends when its input does
    for port in $(seq 17431 17450); do
        openssl s_server -accept "127.0.0.1:$port" -tls1_3 -nocert -psk "$(derive one fanin/1/reader)" \
            -psk_identity fanin/1/reader >heard 2>&1 <input 3>&- &
        server=$!
        for _ in $(seq 100); do
            kill -0 "$server" 2>/dev/null || continue 2
            ! ss -ltnH "sport = :$port" | grep -q . || break 2
            sleep 0.1
        done
    done
    run -13 --separate-stderr "$NIXL_FETCH" list "127.0.0.1:$port" --timeout 3s --secret-file other
    [[ $stderr == *"another secret"* ]]
    run -13 --separate-stderr "$NIXL_FETCH" list "127.0.0.1:$port" --timeout 1s --secret-file one
    [[ $stderr == *"did not answer"* ]]
    kill "$server"
    grep -qa FAN1 heard # its hello, which that server could decrypt
    exec {hold}>&-
}
