/* SPDX-License-Identifier: Apache-2.0 */
#include "net/connection.h"

#include "error_set.h"
#include "neighbour.h"
#include "net/secure.h"
#include "net/spans.h"
#include "outgoing.h"
#include "socket_owner.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct pending {
    struct pending *next;
    uint64_t request;
    reply_fn fn;
    void *cookie;
    bool keep;
} pending;

struct connection {
    loop_source source; /* first: the loop hands it back */
    const connection_shared *shared;
    socket_address tcp, in_use;
    char text[64];
    connection_state state;
    const char *stranger; /* why its Unix socket is not used, NULL: nobody's is */
    bool is_unix, local, known;
    uid_t uid; /* who listens, if it is Unix */
    pid_t pid;
    fanin_error fault;
    msg_hello_ok peer;
    uint64_t generation, next_request;
    deadline connect_by;
    uint64_t started_ns; /* when it began to connect */
    uint64_t heard_ns; /* last byte from the peer, or when it began to owe an answer */
    bool pinged, owing, silent;
    uint64_t look_ns; /* when silence is to be looked at next; 0: nobody waits */
    framing in;
    outgoing out;
    tls *tls; /* NULL: there is none, or not yet */
    pending *pending;
};

static void on_ready(loop_source *source, uint32_t events);

fanin_status connection_create(const connection_shared *shared, const char *address,
                               const socket_address *tcp, connection **out,
                               fanin_error *error)
{
    connection *c = calloc(1, sizeof *c);
    if (!c)
        return error_set_memory(error);
    c->shared = shared;
    c->source = (loop_source){.fd = -1, .ready = on_ready};
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

error_place connection_place(const connection *c, const char *phase)
{
    return (error_place){.phase = phase,
                         .address = c->text,
                         .rank_plus_1 = c->known ? (int32_t)c->peer.rank + 1 : 0};
}

/* ------------------------------------------------------------ connecting */

/* EBADMSG is for who decides whether to try again; its words tell nothing. */
static void fail_here(connection *c, fanin_status status, int sys_errno,
                      const char *phase, const char *remedy, const char *what)
{
    fanin_error fault = FANIN_ERROR_INIT;
    error_place place = connection_place(c, phase);
    place.remedy = remedy;
    place.sys_errno = sys_errno;
    char who[CONNECTION_NAME];
    connection_name(c, who);
    if (sys_errno && sys_errno != EBADMSG)
        error_set_errno(&fault, status, sys_errno, &place, "%s %s", who, what);
    else
        error_set(&fault, status, &place, "%s %s", who, what);
    connection_fail(c, &fault);
}

/* Nobody else's fault. */
static void fail_for_memory(connection *c)
{
    fanin_error fault = FANIN_ERROR_INIT;
    error_set_memory(&fault);
    connection_fail(c, &fault);
}

static void close_socket(connection *c)
{
    c->state = CONNECTION_DOWN;
    if (c->source.fd < 0)
        return;
    loop_remove(c->shared->loop, &c->source);
    close(c->source.fd);
    c->source.fd = -1;
    tls_free(&c->tls);
}

static bool start_on(connection *c, const socket_address *address, fanin_error *fault)
{
    int fd;
    if (socket_connect_start(address, &fd, fault) != FANIN_OK)
        return false;
    c->in_use = *address;
    c->source.fd = fd;
    c->source.events = EPOLLOUT;
    if (loop_add(c->shared->loop, &c->source, fault) != FANIN_OK) {
        close_socket(c);
        return false;
    }
    c->state = CONNECTION_CONNECTING;
    c->connect_by = deadline_in_ms(c->shared->connect_ms);
    return true;
}

/* Whether who listens there is a process of this user, and not only of this uid. */
static bool is_own(connection *c)
{
    const connection_shared *shared = c->shared;
    unsigned differs = neighbour_differs(c->source.fd) & NEIGHBOUR_STRANGER;
    if (differs == 0 || (differs & NEIGHBOUR_UID))
        return differs == 0;
    if (shared->trust_containers)
        return true;
    c->stranger = neighbour_why(differs);
    if (differs & ~*shared->told) {
        *shared->told |= differs;
        log_write(&shared->log, FANIN_LOG_INFO, "unix-stranger",
                  "%s is asked over TCP: on its Unix socket %s; %s", c->text,
                  c->stranger,
                  error_remedy(neighbour_lacks(differs), NEIGHBOUR_REMEDY));
    }
    return false;
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
    if (failed == 0 && is_own(c) &&
        socket_peer_credentials(c->source.fd, &c->uid, &c->pid)) {
        c->is_unix = true;
        return true;
    }
    close_socket(c);
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

/* Whoever took the Unix name of an address need not be who listens there. Over TCP addresses may
   differ lawfully: forwarders, names, NAT. */
static bool is_who_was_asked(const connection *c, const msg_hello_ok *peer)
{
    char asked[SOCKET_TEXT];
    socket_listen_text(&c->tcp, asked);
    return !c->is_unix || strcmp(asked, peer->address) == 0;
}

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

void connection_fail(connection *c, const fanin_error *fault)
{
    bool was_up = c->state != CONNECTION_DOWN;
    if (was_up && c->state != CONNECTION_READY)
        span_of_connection(c, c->shared->place, TRACE_CONNECT, c->started_ns,
                           fault->status);
    close_socket(c);
    c->pinged = false;
    if (was_up || !c->known)
        error_copy(&c->fault, fault);
    pending *list = c->pending;
    c->pending = NULL;
    while (list) {
        pending *p = list;
        list = p->next;
        if (p->fn)
            p->fn(p->cookie, c, 0, NULL);
        free(p);
    }
}

/* --------------------------------------------------------------- replies */

/* The kernel tells nothing of who has closed its end. */
static bool is_closed_there(int fd)
{
    struct pollfd end = {fd, POLLRDHUP, 0};
    return poll(&end, 1, 0) > 0;
}

/* To see whose process it is takes a descriptor. To lack one may pass, and is no reason to trust
   other users. */
static void explain_shortage(int code, secure_fault *why)
{
    char reason[128];
    *why = (secure_fault){.status = FANIN_ERR_UNREACHABLE};
    snprintf(why->what, sizeof why->what,
             "cannot be told from another user's process: %s",
             strerror_r(code, reason, sizeof reason));
    snprintf(why->remedy, sizeof why->remedy, "%s", error_remedy(code, ""));
}

/* On loopback whoever came first has the port. Root needs no port to alter what this process pulls.
   */
static bool is_trusted_owner(const connection *c, int fd, secure_fault *why)
{
    uid_t uid;
    if (c->shared->trust_other_users || !socket_is_loopback(&c->tcp))
        return true;
    bool told = socket_owner(fd, &uid);
    int code = errno;
    if (told && (uid == geteuid() || uid == 0))
        return true;
    *why =
        (secure_fault){FANIN_ERR_AUTH,
                       "may be any user's process: the kernel does not say whose it is",
                       "run both as one user, or take it as it is: trust_other_users, "
                       "--trust-other-users, FANIN_TRUST_OTHER_USERS=1"};
    if (told)
        snprintf(
            why->what, sizeof why->what,
            "is a process of uid %u, and this one is of uid %u: any user can take a "
            "port of this host",
            (unsigned)uid, (unsigned)geteuid());
    else if (is_closed_there(fd))
        *why = (secure_fault){FANIN_ERR_CLOSED,
                              "closed the connection when it was made", STOPPED_REMEDY};
    else if (error_remedy(code, NULL))
        explain_shortage(code, why);
    return false;
}

/* A port and a name are free again while their rank ends, which still answers by the connections
   that it has. */
static bool is_same_process(const connection *c, int fd, secure_fault *why)
{
    uid_t uid;
    pid_t pid;
    if (socket_peer_credentials(fd, &uid, &pid) && uid == c->uid && pid == c->pid)
        return true;
    *why = (secure_fault){FANIN_ERR_CLOSED,
                          "has its Unix name no more: another process answers there",
                          "has the trainer just ended?"};
    return false;
}

bool connection_trusts(const connection *c, int fd, secure_fault *why)
{
    return c->is_unix ? is_same_process(c, fd, why) : is_trusted_owner(c, fd, why);
}

static void on_hello_ok(connection *c, message_type type, body *b)
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
        fail_here(c, FANIN_ERR_PROTOCOL, 0, "connect",
                  "is this port a fanin parameter server of a compatible version?",
                  what);
        return;
    }
    if (peer.version < VERSION_MIN || peer.version > VERSION_MAX) {
        fail_here(c, FANIN_ERR_VERSION, 0, "connect",
                  "use the same fanin release on both ends",
                  "chose a protocol version that was not offered");
        return;
    }
    static const uint8_t none[sizeof peer.world_id];
    if (memcmp(peer.world_id, none, sizeof none) == 0) {
        fail_here(c, FANIN_ERR_PROTOCOL, 0, "connect",
                  "let the trainer draw a world id for each launch",
                  "announces a world id that is all zero, which stands for none");
        return;
    }
    if (!is_who_was_asked(c, &peer)) {
        close_socket(c);
        start_tcp(c);
        return;
    }
    secure_fault why;
    /* By TLS it proves itself; of the Unix name its owner was looked at before. */
    bool trusted = c->tls || c->is_unix || is_trusted_owner(c, c->source.fd, &why);
    if (trusted && !secure_proven(c->tls, &peer)) {
        secure_explain_unproven(c->tls, &peer, &why);
        trusted = false;
    }
    if (!trusted) {
        fail_here(c, why.status, 0, "connect", why.remedy, why.what);
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

static void dispatch(connection *c, const frame *f, body *b)
{
    if (c->state == CONNECTION_HELLO) {
        on_hello_ok(c, f->type, b);
        return;
    }
    if (f->request == 0 && f->type == MSG_ERROR) {
        fanin_error fault = FANIN_ERROR_INIT;
        connection_reply_error(c, "connection", f->type, b, &fault);
        /* The rank says that of what came to it, and of nothing else. */
        if (fault.status == FANIN_ERR_TRANSPORT && c->in.sealed)
            fault.sys_errno = EBADMSG;
        connection_fail(c, &fault);
        return;
    }
    for (pending **at = &c->pending; *at; at = &(*at)->next) {
        pending *p = *at;
        if (p->request != f->request)
            continue;
        if (p->keep) {
            p->fn(p->cookie, c, f->type, b);
            return;
        }
        *at = p->next;
        reply_fn fn = p->fn;
        void *cookie = p->cookie;
        free(p);
        if (fn)
            fn(cookie, c, f->type, b);
        return;
    }
    fail_here(c, FANIN_ERR_PROTOCOL, 0, "connection", NULL,
              "answered a request that was not made");
}

static void fail_for_frame(connection *c, const framed *bad)
{
    char what[160];
    if (bad->status == FANIN_ERR_TRANSPORT) {
        fail_here(c, FANIN_ERR_TRANSPORT, EBADMSG, "connection", WAY_REMEDY,
                  "and this process do not agree on a frame: " SEAL_BROKEN);
    } else if (bad->head.length > LIMIT_REPLY) {
        fail_here(c, FANIN_ERR_PROTOCOL, 0, "connection", NULL,
                  "announced a reply beyond the limit");
    } else {
        snprintf(what, sizeof what, "sent something else: %s", bad->why);
        fail_here(c, bad->status, 0, "connection",
                  "is this port a fanin parameter server?", what);
    }
}

/* Hands over every complete frame; false: the connection is gone. */
static bool take_frames(connection *c)
{
    framed got;
    framing_result result;
    while ((result = framing_take(&c->in, &got)) == FRAMING_WHOLE) {
        c->out.bytes.sealed = c->in.sealed;
        uint64_t generation = c->generation;
        dispatch(c, &got.head, &got.body);
        if (c->state <= CONNECTION_CONNECTING || c->source.fd < 0 ||
            (generation != c->generation && c->state != CONNECTION_READY))
            return false;
    }
    if (result == FRAMING_BAD)
        fail_for_frame(c, &got);
    return result == FRAMING_MORE;
}

/* A rank judges this end's certificate when this end believes hands shaken already. Whoever accepts
   and says nothing is a forwarder in front of a dead rank. */
static void fail_broken(connection *c, int sys_errno, const char *remedy,
                        const char *what)
{
    secure_fault why;
    bool is_ready = c->state == CONNECTION_READY;
    c->silent = false;
    if (secure_refused(c->tls, &why))
        fail_here(c, why.status, 0, "connect", why.remedy, why.what);
    else if (secure_broken(c->tls, &why))
        fail_here(c, why.status, EBADMSG, "connection", why.remedy, why.what);
    else
        fail_here(c, is_ready ? FANIN_ERR_CLOSED : FANIN_ERR_UNREACHABLE, sys_errno,
                  "connection", remedy, what);
}

static void on_readable(connection *c)
{
    for (;;) {
        size_t room;
        uint8_t *to = framing_room(&c->in, &room);
        if (!to) {
            fail_for_memory(c);
            return;
        }
        ssize_t n = tls_receive(c->tls, c->source.fd, to, room);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n <= 0) {
            fail_broken(c, n < 0 ? errno : 0, CLOSED_REMEDY,
                        n < 0 ? "broke the connection" : "closed the connection");
            return;
        }
        framing_add(&c->in, (size_t)n);
        c->heard_ns = clock_ns();
        c->pinged = false;
        if (!take_frames(c) || ((size_t)n < room && !c->tls))
            return; /* what comes later wakes the loop again */
    }
}

static void flush(connection *c)
{
    int failed = outgoing_flush(&c->out, c->tls, c->source.fd);
    /* What the peer said before it closed (a refusal) is worth more than EPIPE: the reader
       finds it, then the end of the stream. */
    if (failed == EPIPE || failed == ECONNRESET) {
        outgoing_clear(&c->out);
    } else if (failed) {
        /* A request is lost, or half of it has left: nobody would answer. */
        fail_broken(c, failed, "is this host short of memory, or the network cut?",
                    "could not be sent a request");
        return;
    }
    bool is_sent = outgoing_is_empty(&c->out) && tls_unsent(c->tls) == 0;
    loop_want(c->shared->loop, &c->source, is_sent ? EPOLLIN : EPOLLIN | EPOLLOUT);
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
    fail_here(c, why.status, 0, "connect", why.remedy, why.what);
    return false;
}

/* Over TCP, if there is a secret. False: it goes on later, or the connection is gone. */
static bool is_secured(connection *c)
{
    if (!c->shared->tls || c->is_unix)
        return true;
    if (!c->tls && !(c->tls = tls_new(c->shared->tls, c->source.fd))) {
        fail_for_memory(c);
        return false;
    }
    return take_step(c, tls_handshake(c->tls));
}

static void greet(connection *c)
{
    send_hello(c);
    if (c->out.bytes.failed)
        fail_for_memory(c);
    else
        flush(c);
}

static void on_ready(loop_source *source, uint32_t events)
{
    connection *c = (connection *)source;
    if (c->state == CONNECTION_CONNECTING) {
        int failed = socket_connect_result(source->fd);
        if (failed) {
            c->silent = false;
            fail_here(c, FANIN_ERR_UNREACHABLE, failed, "connect",
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
        flush(c);
    if (c->source.fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        on_readable(c);
}

/* -------------------------------------------------------------- requests */

/* Whether anybody still waits for this rank. The answer to a question that was given up may lie
   unread until the next call: that silence is this side's, not the rank's. */
static bool awaited(const connection *c)
{
    bool any = c->owing;
    for (const pending *p = c->pending; p && !any; p = p->next)
        any = p->fn != NULL;
    return any;
}

static void listen_anew(connection *c)
{
    c->heard_ns = clock_ns();
    c->pinged = false;
    c->look_ns = 0;
}

uint64_t connection_next_request(connection *c)
{
    return c->next_request++;
}

buffer *connection_out(connection *c)
{
    return &c->out.bytes;
}

void connection_ask(connection *c, uint64_t request, reply_fn fn, void *cookie)
{
    pending *p = calloc(1, sizeof *p);
    if (!p || c->out.bytes.failed || c->state != CONNECTION_READY) {
        free(p);
        if (c->state == CONNECTION_READY)
            fail_for_memory(c);
        if (fn)
            fn(cookie, c, 0, NULL);
        return;
    }
    if (!awaited(c))
        listen_anew(c);
    *p = (pending){.next = c->pending, .request = request, .fn = fn, .cookie = cookie};
    c->pending = p;
    flush(c);
}

void connection_forget(connection *c, const void *cookie)
{
    /* The entry stays so that the late reply is recognised. */
    for (pending *p = c->pending; p; p = p->next) {
        if (p->cookie == cookie) {
            p->fn = NULL;
            p->cookie = NULL;
            p->keep = false;
        }
    }
}

void connection_keep(connection *c, uint64_t request)
{
    for (pending *p = c->pending; p; p = p->next)
        p->keep |= p->request == request;
}

bool connection_owes(const connection *c)
{
    bool owes = c->state == CONNECTION_READY && c->owing;
    for (const pending *p = c->pending; p; p = p->next)
        owes = owes || (p->fn && !p->keep);
    return owes;
}

void connection_set_owing(connection *c, bool owing)
{
    if (owing && !awaited(c))
        listen_anew(c);
    c->owing = owing;
}

void connection_give_up(connection *c)
{
    static const char stopped[] = STOPPED_REMEDY;
    bool accepted = c->state == CONNECTION_HELLO || c->tls;
    if (c->state == CONNECTION_DOWN)
        return;
    c->silent = true;
    if (c->state == CONNECTION_READY)
        fail_here(c, FANIN_ERR_UNREACHABLE, 0, "connection",
                  "is the trainer process stopped, or the network cut?",
                  "owes an answer and fell silent");
    else
        fail_here(c, FANIN_ERR_UNREACHABLE, 0, "connect", stopped,
                  accepted ? "accepted but did not answer in time"
                           : "did not answer in time");
}

deadline connection_tick(connection *c)
{
    if (c->state == CONNECTION_DOWN)
        return UINT64_MAX;
    if (c->state != CONNECTION_READY) {
        if (deadline_passed(c->connect_by))
            connection_give_up(c);
        return c->state == CONNECTION_DOWN ? UINT64_MAX : c->connect_by;
    }
    if (!awaited(c))
        return UINT64_MAX;
    uint64_t lost_ns = (uint64_t)c->shared->lost_ms * 1000000;
    uint64_t now = clock_ns();
    /* This process came late, as it was stopped, or busy: what the rank has said since then has not
       been read, so that this is not the rank's silence. */
    if (c->look_ns > 0 && now > c->look_ns)
        c->heard_ns += now - (c->look_ns > c->heard_ns ? c->look_ns : c->heard_ns);
    if (now - c->heard_ns >= lost_ns) {
        connection_give_up(c);
        return UINT64_MAX;
    }
    if (now - c->heard_ns >= lost_ns / 2 && !c->pinged) {
        c->pinged = true;
        uint64_t request = connection_next_request(c);
        encode_empty(connection_out(c), request, MSG_PING);
        uint64_t heard = c->heard_ns;
        connection_ask(c, request, NULL, NULL); /* any byte is a sign of life */
        c->heard_ns = heard;
    }
    c->look_ns = c->heard_ns + (c->pinged ? lost_ns : lost_ns / 2);
    return c->look_ns;
}

fanin_status connection_reply_error(connection *c, const char *phase, message_type type,
                                    body *b, fanin_error *error)
{
    error_place place = connection_place(c, phase);
    if (type == 0)
        return error_copy(error, &c->fault);
    msg_error m;
    if (type != MSG_ERROR || decode_error(b, &m) != FANIN_OK) {
        char who[CONNECTION_NAME];
        place.remedy = "use the same fanin release on both ends";
        return error_set(error, FANIN_ERR_PROTOCOL, &place,
                         "%s sent a reply that does not fit the request (%s)",
                         connection_name(c, who), b->why ? b->why : "unexpected type");
    }
    place.remedy = m.remedy;
    place.key = m.key;
    fanin_status status = m.code < 0 ? m.code : FANIN_ERR_PROTOCOL;
    if (c->known)
        return error_set(error, status, &place, "rank %u at %s: %s", c->peer.rank,
                         c->text, m.message);
    return error_set(error, status, &place, "%s: %s", c->text, m.message);
}

/* ------------------------------------------------------------- accessors */

connection_state connection_get_state(const connection *c)
{
    return c->state;
}
const fanin_error *connection_fault(const connection *c)
{
    return &c->fault;
}
const msg_hello_ok *connection_peer(const connection *c)
{
    return &c->peer;
}
bool connection_known(const connection *c)
{
    return c->known;
}
const char *connection_text(const connection *c)
{
    return c->text;
}
const char *connection_name(const connection *c, char name[CONNECTION_NAME])
{
    char rank[16] = "the rank";
    if (c->known)
        snprintf(rank, sizeof rank, "rank %u", c->peer.rank);
    snprintf(name, CONNECTION_NAME, "%s at %s", rank, c->text);
    return name;
}
const socket_address *connection_address(const connection *c)
{
    return &c->in_use;
}
bool connection_is_unix(const connection *c)
{
    return c->is_unix;
}
const char *connection_stranger(const connection *c)
{
    return c->stranger;
}
bool connection_process(const connection *c, pid_t *pid_out)
{
    *pid_out = 0;
    return c->is_unix && c->source.fd >= 0 &&
           socket_peer_credentials(c->source.fd, NULL, pid_out);
}
bool connection_is_sealed(const connection *c)
{
    return c->in.sealed;
}
const tls_end *connection_tls(const connection *c)
{
    return c->tls ? c->shared->tls : NULL;
}
bool connection_is_local(const connection *c)
{
    return c->local;
}
uint64_t connection_heard_ns(const connection *c)
{
    return c->heard_ns;
}
bool connection_was_silent(const connection *c)
{
    return c->silent;
}

bool connection_is_late(const connection *c)
{
    return deadline_passed(c->connect_by);
}
uint64_t connection_generation(const connection *c)
{
    return c->generation;
}
