#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Certificates on command lines, and OpenSSL's own client and server as peers that know nothing of fanin.

# shellcheck disable=SC2154 # info, ranks_pid, stderr and output are set elsewhere

load ranks

setup()
{
    set_up
    openssl version | grep -q '^OpenSSL 3' || skip "needs the command openssl"
    "$FANIN_SOURCE_DIR/tests/support/make-certificates" .
    read -ra ranks <<<"--tls-cert ranks.pem --tls-key ranks.key --tls-ca ca.pem"
    read -ra reader <<<"--tls-cert reader.pem --tls-key reader.key --tls-ca ca.pem"
}

@test "commands use certificates of their options and of the environment" {
    start_ranks --adapter-shape small --world-size 2 "${ranks[@]}"
    run ! grep -Eq 'secret|pem|key"' "$info"
    run -0 "$NIXL_FETCH" pull "$info" --no-unix --out d "${reader[@]}"
    run -0 "$NIXL_FETCH" verify "$info" --no-unix --dir d "${reader[@]}"
    export FANIN_TLS_CERT=reader.pem FANIN_TLS_KEY=reader.key FANIN_TLS_CA=ca.pem
    run -0 "$NIXL_FETCH" list "$info" --no-unix
    FANIN_TLS_CERT='' FANIN_TLS_KEY='' FANIN_TLS_CA='' \
        run -13 --separate-stderr "$NIXL_FETCH" list "$info" --no-unix
    [[ $stderr == *"demands a certificate"*"--tls-cert"* ]]
    FANIN_TLS_CERT=foreign.pem FANIN_TLS_KEY=foreign.key \
        run -13 --separate-stderr "$NIXL_FETCH" list "$info" --no-unix
    [[ $stderr == *"does not believe the certificate foreign.pem"*"unknown ca"* ]]
    FANIN_TLS_CA=other.pem run -13 --separate-stderr "$NIXL_FETCH" list "$info" --no-unix
    [[ $stderr == *"fanin://job/rank/*"*"not believed"* ]]
    FANIN_TLS_KEY=rank0.key run -11 --separate-stderr "$NIXL_FETCH" list "$info" --no-unix
    [[ $stderr == *"rank0.key is not that of the certificate reader.pem"*": make them: "* ]]
    [ -e "$FANIN_SOURCE_DIR/$(sed 's/.*: make them: //' <<<"$stderr")" ] # a page of ours
}

@test "a doctor asks with certificates" {
    start_ranks --adapter-shape small --world-size 2 "${ranks[@]}"
    run --separate-stderr "$NIXL_FETCH" doctor "$info" --no-unix "${reader[@]}"
    [[ $output == *"trainer: all 2 ranks answer"* ]]
    run -4 --separate-stderr "$NIXL_FETCH" doctor "$info" --no-unix
    [[ $output == *"problem  trainer: "*"demands a certificate"*"--tls-cert"* ]]
}

@test "OpenSSL's client is a reader by a reader's certificate, and nobody by another" {
    start_ranks --adapter-shape small --world-size 1 "${ranks[@]}"
    address=$("$NIXL_FETCH" ping "$info" --no-unix --json "${reader[@]}" | jq -r '.ranks[0].address')
    # ask OPTION...: what OpenSSL says, and what it hears, to a request that is no hello.
    ask()
    {
        output=$(timeout 10 openssl s_client -connect "$address" -CAfile ca.pem -verify_return_error -ign_eof "$@" \
            <<<'no frame, but 24 bytes..' 2>&1 | tr -d '\0')
    }
    ask -tls1_3 -cert reader.pem -key reader.key
    [[ $output == *"FAN1"* ]]
    ask -tls1_3 -cert leaf.pem -key leaf.key -cert_chain middle.pem
    [[ $output == *"FAN1"* ]]
    for wrong in leaf rank3 ranks elsewhere nobody expired foreign served; do
        ask -tls1_3 -cert "$wrong.pem" -key "$wrong.key"
        [[ $output == *alert* && $output != *FAN1* ]]
    done
    ask -tls1_3
    [[ $output == *"certificate required"* && $output != *FAN1* ]]
    ask -tls1_2 -cert reader.pem -key reader.key
    [[ $output == *alert* && $output != *FAN1* ]]
    ask -tls1_3 -psk "$(head -c 64 /dev/zero | tr '\0' 1)" -psk_identity fanin/1/reader
    [[ $output != *FAN1* ]]
    run -0 "$NIXL_FETCH" ping "$info" --no-unix "${reader[@]}"
}

@test "a reader says nothing to a server that is no rank of its job" {
    mkfifo input
    exec {hold}<>input # it ends when its input does
    # serve NAME: OpenSSL's server with that certificate, at $port.
    serve()
    {
        for port in $(seq 17451 17490); do
            openssl s_server -accept "127.0.0.1:$port" -tls1_3 -cert "$1.pem" -key "$1.key" -CAfile ca.pem \
                -Verify 3 -verify_return_error >heard 2>&1 <input 3>&- &
            server=$!
            for _ in $(seq 100); do
                kill -0 "$server" 2>/dev/null || continue 2
                ! ss -ltnH "sport = :$port" | grep -q . || return 0
                sleep 0.1
            done
        done
    }
    for wrong in elsewhere nobody reader foreign-rank; do
        serve "$wrong"
        run -13 --separate-stderr "$NIXL_FETCH" list "127.0.0.1:$port" --timeout 3s "${reader[@]}"
        [[ $stderr == *"shows a certificate for"* ]]
        kill "$server"
        run ! grep -qa FAN1 heard
    done
    serve rank3
    run -13 --separate-stderr "$NIXL_FETCH" list "127.0.0.1:$port" --timeout 1s "${reader[@]}"
    [[ $stderr == *"did not answer"* ]]
    kill "$server"
    grep -qa FAN1 heard # its hello, which that server could decrypt
    exec {hold}>&-
}

@test "the commands of the how-to make certificates that work" {
    mkdir new
    cd new
    sed -n '/^## Make certificates/,/^## /p' "$FANIN_SOURCE_DIR/docs/how-to/certificates.md" | sed -n '/^.\{3\}sh$/,/^.\{3\}$/p' |
        sed '1d; $d; /^nixl-fetch/d' >commands
    [ "$(wc -l <commands)" -gt 5 ]
    run -0 sh -eu commands
    start_ranks --adapter-shape small --world-size 2 --tls-cert rank.pem --tls-key rank.key --tls-ca ca.pem
    run -0 "$NIXL_FETCH" list "$info" --no-unix --tls-cert reader.pem --tls-key reader.key --tls-ca ca.pem
    run -13 "$NIXL_FETCH" list "$info" --no-unix --tls-cert ../reader.pem --tls-key ../reader.key --tls-ca ../ca.pem
}
