/* SPDX-License-Identifier: Apache-2.0 */
#include "net/connection.h"

#include "error_set.h"
#include "net/client_state.h"
#include "net/trust.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool start_on(connection *c, const socket_address *address, fanin_error *fault)
{
    int fd;
    if (socket_connect_start(address, &fd, fault) != FANIN_OK)
        return false;
    c->in_use = *address;
    c->source.fd = fd;
    c->source.events = EPOLLOUT;
    if (loop_add(c->shared->loop, &c->source, fault) != FANIN_OK) {
        connection_shut(c);
        return false;
    }
    c->state = CONNECTION_CONNECTING;
    c->connect_by = deadline_in_ms(c->shared->connect_ms);
    return true;
}

/* The abstract name may belong to another user: then only TCP is left. */
static bool start_unix(connection *c)
{
    if (c->shared->no_unix || !socket_is_loopback(&c->tcp))
        return false;
    socket_address name;
    socket_unix_address(geteuid(), &c->tcp, &name);
    if (!start_on(c, &name, NULL))
        return false;
    int failed = socket_connect_result(c->source.fd);
    if (failed == 0 && trust_listener(c) &&
        socket_peer_credentials(c->source.fd, &c->uid, &c->pid)) {
        c->is_unix = true;
        return true;
    }
    connection_shut(c);
    return false;
}

static void forget_talk(connection *c)
{
    c->is_unix = c->out.bytes.sealed = false;
    framing_start(&c->in, LIMIT_REPLY);
    outgoing_clear(&c->out);
    c->next_request = 1;
}

static void start_tcp(connection *c)
{
    fanin_error fault = FANIN_ERROR_INIT;
    forget_talk(c);
    if (start_on(c, &c->tcp, &fault))
        return;
    error_place place = connection_place(c, "connect");
    place.sys_errno = fault.sys_errno;
    place.remedy = error_remedy(
        fault.sys_errno, "is the trainer running, and is this its base port + rank?");
    if (c->known)
        error_set(&c->fault, FANIN_ERR_UNREACHABLE, &place, "rank %u: %s", c->peer.rank,
                  fault.message);
    else
        error_set(&c->fault, FANIN_ERR_UNREACHABLE, &place, "%s", fault.message);
}

void connection_start(connection *c)
{
    if (c->state != CONNECTION_DOWN) {
        if (c->state != CONNECTION_READY && deadline_passed(c->connect_by))
            c->connect_by = deadline_in_ms(c->shared->connect_ms);
        return;
    }
    forget_talk(c);
    c->stranger = NULL;
    c->started_ns = clock_ns();
    if (!start_unix(c))
        start_tcp(c);
}

/* -------------------------------------------------------------- greeting */

static void send_hello(connection *c)
{
    msg_hello hello = {.version_min = VERSION_MIN,
                       .version_max = VERSION_MAX,
                       .features = FEATURES,
                       .role = ROLE_CONTROL};
    if (c->is_unix || c->tls || c->shared->no_checksums)
        hello.features &= ~FEATURE_SEALS;
    memcpy(hello.id, c->shared->client_id, sizeof hello.id);
    snprintf(hello.software, sizeof hello.software, "fanin %s", fanin_version());
    snprintf(hello.trace_id, sizeof hello.trace_id, "%s", c->shared->trace_id);
    if (c->shared->ucx_version)
        snprintf(hello.ucx_version, sizeof hello.ucx_version, "%s",
                 c->shared->ucx_version);
    encode_hello(&c->out.bytes, c->next_request++, &hello);
    if (hello.features & FEATURE_SEALS)
        framing_expect_hello_ok(&c->in, c->out.bytes.data, c->out.bytes.size, false);
    c->state = CONNECTION_HELLO;
    loop_want(c->shared->loop, &c->source, EPOLLIN | EPOLLOUT);
}

void connection_encode_data_hello(const connection *c, buffer *out, framing *in)
{
    msg_hello hello = {.version_min = VERSION_MIN,
                       .version_max = VERSION_MAX,
                       .features = c->in.sealed ? FEATURE_SEALS : 0,
                       .role = ROLE_DATA};
    memcpy(hello.id, c->peer.session, sizeof hello.id);
    snprintf(hello.software, sizeof hello.software, "fanin %s", fanin_version());
    encode_hello(out, 1, &hello);
    if (c->in.sealed)
        framing_expect_hello_ok(in, out->data, out->size, true);
}

/* A relay tells what one reader has, and nothing of what the trainer does. */
static void refuse_role(connection *c, bool is_relay)
{
    connection_fail_for(
        c, FANIN_ERR_WORLD, 0, "connect",
        is_relay ? "give the addresses of the trainer's ranks"
                 : "the list of relays is out of date: pull again",
        is_relay ? "is a relay: an engine's worker that hands on what it has read, and "
                   "no rank"
                 : "is a trainer's rank, and a relay was to be there");
}

static void take_greeting(connection *c, message_type type, body *b)
{
    msg_hello_ok peer;
    fanin_error fault = FANIN_ERROR_INIT;
    if (type != MSG_HELLO_OK) {
        connection_reply_error(c, "connect", type, b, &fault);
        connection_fail(c, &fault);
        return;
    }
    if (decode_hello_ok(b, &peer) != FANIN_OK) {
        char what[160];
        snprintf(what, sizeof what, "sent a malformed greeting: %s",
                 b->why ? b->why : "");
        connection_fail_for(
            c, FANIN_ERR_PROTOCOL, 0, "connect",
            "is this port a fanin parameter server of a compatible version?", what);
        return;
    }
    if (peer.version < VERSION_MIN || peer.version > VERSION_MAX) {
        connection_fail_for(c, FANIN_ERR_VERSION, 0, "connect",
                            "use the same fanin release on both ends",
                            "chose a protocol version that was not offered");
        return;
    }
    static const uint8_t none[sizeof peer.world_id];
    if (memcmp(peer.world_id, none, sizeof none) == 0) {
        connection_fail_for(
            c, FANIN_ERR_PROTOCOL, 0, "connect",
            "let the trainer draw a world id for each launch",
            "announces a world id that is all zero, which stands for none");
        return;
    }
    if (!trust_name(c, &peer)) {
        connection_shut(c);
        start_tcp(c);
        return;
    }
    if (peer.relay != c->shared->relays) {
        refuse_role(c, peer.relay);
        return;
    }
    secure_fault why;
    /* By TLS it proves itself; of the Unix name its owner was looked at before. */
    bool trusted = c->tls || c->is_unix || trust_owner(c, c->source.fd, &why);
    if (trusted && !secure_proven(c->tls, &peer)) {
        secure_explain_unproven(c->tls, &peer, &why);
        trusted = false;
    }
    if (!trusted) {
        connection_fail_for(c, why.status, 0, "connect", why.remedy, why.what);
        return;
    }
    peer.proof = (bytes_view){0}; /* it is the buffer's */
    c->peer = peer;
    c->known = true;
    c->silent = false;
    c->generation++;
    c->state = CONNECTION_READY;
    span_of_connection(c, c->shared->place, TRACE_CONNECT, c->started_ns, FANIN_OK);
}

/* What a handshake has come to. False: it goes on later, or the connection is gone. */
static bool take_step(connection *c, tls_step step)
{
    secure_fault why;
    switch (step) {
    case TLS_UP:
        return true;
    case TLS_WAIT:
        loop_want(c->shared->loop, &c->source,
                  tls_unsent(c->tls) > 0 ? EPOLLIN | EPOLLOUT : EPOLLIN);
        return false;
    case TLS_FAILED:
        break;
    }
    c->silent = false;
    secure_explain(c->tls, &why);
    connection_fail_for(c, why.status, 0, "connect", why.remedy, why.what);
    return false;
}

/* Over TCP, if there is a secret. False: it goes on later, or the connection is gone. */
static bool is_secured(connection *c)
{
    if (!c->shared->tls || c->is_unix)
        return true;
    if (!c->tls && !(c->tls = tls_new(c->shared->tls, c->source.fd))) {
        connection_fail_for_memory(c);
        return false;
    }
    if (c->shared->relays)
        tls_expect_relay(c->tls);
    return take_step(c, tls_handshake(c->tls));
}

static void greet(connection *c)
{
    send_hello(c);
    if (c->out.bytes.failed)
        connection_fail_for_memory(c);
    else
        connection_flush(c);
}

static void on_ready(loop_source *source, uint32_t events)
{
    connection *c = (connection *)source;
    if (c->state == CONNECTION_CONNECTING) {
        int failed = socket_connect_result(source->fd);
        if (failed) {
            c->silent = false;
            connection_fail_for(
                c, FANIN_ERR_UNREACHABLE, failed, "connect",
                "is the trainer running, and is this its base port + rank?",
                "cannot be reached");
            return;
        }
        if (!c->tls)
            socket_tune(source->fd);
        if (is_secured(c))
            greet(c);
        return;
    }
    if (events & EPOLLOUT)
        connection_flush(c);
    if (c->source.fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        connection_read(c);
}

/* ----------------------------------------------------------------- whole */

fanin_status connection_create(const connection_shared *shared, const char *address,
                               const socket_address *tcp, connection **out,
                               fanin_error *error)
{
    connection *c = calloc(1, sizeof *c);
    if (!c)
        return error_set_memory(error);
    c->shared = shared;
    c->source = (loop_source){.fd = -1, .ready = on_ready};
    c->on_greeting = take_greeting;
    c->fault = (fanin_error)FANIN_ERROR_INIT;
    snprintf(c->text, sizeof c->text, "%s", address);
    c->tcp = *tcp;
    socket_to_connect(&c->tcp);
    c->local = socket_is_local(&c->tcp);
    error_place place = connection_place(c, "connect");
    place.remedy = STOPPED_REMEDY;
    error_set(&c->fault, FANIN_ERR_UNREACHABLE, &place,
              "the rank at %s has not answered yet", c->text);
    *out = c;
    return FANIN_OK;
}

void connection_destroy(connection **c)
{
    if (!*c)
        return;
    fanin_error closed = FANIN_ERROR_INIT;
    error_set(&closed, FANIN_ERR_CLOSED, NULL, "the client disconnected");
    connection_fail(*c, &closed);
    framing_free(&(*c)->in);
    outgoing_free(&(*c)->out);
    free(*c);
    *c = NULL;
}
