/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_link.h"

#include "error_set.h"
#include "outgoing.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define QUEUE 4        /* requests under way on one connection */
#define MAX_IOVECS 256 /* in one readv */
#define BATCH_BYTES ((size_t)1 << 20)
#define TURN_BYTES                                                                     \
    ((size_t)4 << 20) /* read from one connection before others get a turn */
#define SHORT_RUN 256 /* shorter runs are scattered from a buffer, not by iovecs */

typedef enum stage { CONNECTING, HELLO, IDLE_OR_HEADER, BODY, ERROR_BODY } stage;

typedef struct data_connection {
    loop_source source; /* first: the loop hands it back */
    struct stream_link *link;
    stage stage;
    outgoing out;
    uint64_t queue[QUEUE]; /* requests, oldest first */
    unsigned queued;
    uint8_t header[FRAME_SIZE];
    size_t header_got;
    frame reply;
    buffer text; /* body of a hello or an error */
    /* where in the oldest request's pieces the bytes that come next belong */
    uint64_t piece, pieces_end, run;
    struct iovec iov[MAX_IOVECS];
    size_t lengths[MAX_IOVECS]; /* of the iovecs, before anything came */
    unsigned n_iov, at_iov;
    size_t iov_left; /* bytes of the batch that have not come */
    bool staged;     /* the batch is one piece in `staging` */
    uint8_t *staging;
} data_connection;

struct stream_link {
    fanin_client *client;
    const connection *control;
    stream_work *work; /* NULL: idle */
    data_connection *connections;
    unsigned n;
};

static void on_ready(loop_source *source, uint32_t events);

/* ------------------------------------------------------------- life cycle */

static void close_data(stream_link *link, data_connection *d)
{
    if (d->source.fd >= 0) {
        loop_remove(&link->client->loop, &d->source);
        close(d->source.fd);
    }
    d->source.fd = -1;
    outgoing_free(&d->out);
    buffer_free(&d->text);
    free(d->staging);
    d->staging = NULL;
}

fanin_status stream_link_create(fanin_client *client, const connection *control,
                                unsigned count, stream_link **out, fanin_error *error)
{
    stream_link *link = calloc(1, sizeof(*link));
    if (!link)
        return error_set_memory(error);
    link->client = client;
    link->control = control;
    link->connections = calloc(count, sizeof(*link->connections));
    fanin_status status = link->connections ? FANIN_OK : error_set_memory(error);
    for (unsigned i = 0; i < count && status == FANIN_OK; i++) {
        data_connection *d = &link->connections[i];
        d->link = link;
        d->source = (loop_source){.fd = -1, .ready = on_ready};
        link->n++;
        int fd;
        status = socket_connect_start(connection_address(control), &fd, error);
        if (status != FANIN_OK)
            break;
        d->source.fd = fd;
        d->source.events = EPOLLOUT;
        connection_encode_data_hello(control, &d->out.bytes);
        status = loop_add(&client->loop, &d->source, error);
    }
    if (status != FANIN_OK) {
        stream_link_destroy(&link);
        return status;
    }
    *out = link;
    return FANIN_OK;
}

void stream_link_destroy(stream_link **link)
{
    if (!*link)
        return;
    for (unsigned i = 0; i < (*link)->n; i++)
        close_data(*link, &(*link)->connections[i]);
    free((*link)->connections);
    free(*link);
    *link = NULL;
}

unsigned stream_link_count(const stream_link *link)
{
    return link->n;
}

bool stream_link_stop(stream_link *link)
{
    bool idle = true;
    for (unsigned i = 0; i < link->n; i++) {
        const data_connection *d = &link->connections[i];
        idle =
            idle && d->source.fd >= 0 && d->queued == 0 && d->stage == IDLE_OR_HEADER;
    }
    link->work = NULL;
    return idle;
}

/* ---------------------------------------------------------------- failures */

static void fail(stream_link *link, fanin_status status, int sys_errno,
                 const char *what)
{
    stream_work *w = link->work;
    if (!w || w->failed)
        return;
    error_place place = connection_place(link->control, "read");
    uint32_t rank = connection_peer(link->control)->rank;
    const char *text = connection_text(link->control);
    w->failed = true;
    w->status = status;
    if (sys_errno)
        error_set_errno(&w->error, status, sys_errno, &place, "rank %u at %s %s", rank,
                        text, what);
    else
        error_set(&w->error, status, &place, "rank %u at %s %s", rank, text, what);
}

static void lose(data_connection *d, fanin_status status, int sys_errno,
                 const char *what)
{
    fail(d->link, status, sys_errno, what);
    close_data(d->link, d);
}

/* ----------------------------------------------------------------- sending */

static void flush(data_connection *d)
{
    int failed = outgoing_flush(&d->out, d->source.fd);
    if (failed)
        lose(d, FANIN_ERR_CLOSED, failed, "broke a data connection");
    else
        loop_want(&d->link->client->loop, &d->source,
                  outgoing_is_empty(&d->out) ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

static bool window_open(const stream_work *w)
{
    if (w->failed || w->next_request == w->list->n_requests)
        return false;
    uint64_t bytes = w->list->requests[w->next_request].bytes;
    return *w->inflight == 0 || *w->inflight + bytes <= w->max_inflight;
}

static void pump(data_connection *d)
{
    stream_work *w = d->link->work;
    if (!w || d->source.fd < 0 || d->stage == CONNECTING || d->stage == HELLO)
        return;
    bool added = false;
    while (d->queued < QUEUE && window_open(w)) {
        uint64_t index = w->next_request++;
        const read_request *r = &w->list->requests[index];
        msg_read m = {.bytes = r->bytes,
                      .entries = &w->list->entries[r->first_entry],
                      .n_entries = r->n_entries};
        memcpy(m.token, w->token, sizeof(m.token));
        encode_read(&d->out.bytes, index + 2, &m); /* 1 was the hello */
        d->queue[d->queued++] = index;
        *w->inflight += r->bytes;
        added = true;
    }
    if (d->out.bytes.failed)
        lose(d, FANIN_ERR_MEMORY, 0, "cannot be asked: out of memory");
    else if (added)
        flush(d);
}

void stream_link_pump(stream_link *link)
{
    for (unsigned i = 0; i < link->n && link->work; i++)
        pump(&link->connections[i]);
}

void stream_link_start(stream_link *link, stream_work *work)
{
    link->work = work;
    stream_link_pump(link);
}

/* --------------------------------------------------------------- receiving */

static void begin_body(data_connection *d)
{
    const stream_work *w = d->link->work;
    const read_request *r = &w->list->requests[d->queue[0]];
    d->piece = r->first_piece;
    d->pieces_end = r->first_piece + r->n_pieces;
    d->run = 0;
    d->n_iov = d->at_iov = 0;
    d->iov_left = 0;
    d->stage = BODY;
}

static void add_iovec(data_connection *d, uint8_t *to, size_t length)
{
    d->lengths[d->n_iov] = length;
    d->iov[d->n_iov++] = (struct iovec){.iov_base = to, .iov_len = length};
    d->iov_left += length;
}

static bool batch_full(const data_connection *d)
{
    return d->n_iov == MAX_IOVECS || d->iov_left >= BATCH_BYTES;
}

/* Destinations of the bytes that come next; at least one if any piece is left. */
static bool fill_batch(data_connection *d)
{
    const stream_work *w = d->link->work;
    d->n_iov = d->at_iov = 0;
    d->iov_left = 0;
    d->staged = false;
    while (d->piece < d->pieces_end && !batch_full(d)) {
        const piece *p = &w->pieces->pieces[d->piece];
        const strided *view = p->view ? &w->plan->views[p->view - 1] : NULL;
        if (!view) {
            add_iovec(d, w->base + p->to, p->length);
        } else if (view->run < SHORT_RUN) {
            if (d->n_iov > 0)
                break; /* a staged piece is a batch of its own */
            if (!d->staging && !(d->staging = malloc(PIECE_MAX)))
                return false;
            add_iovec(d, d->staging, p->length);
            d->staged = true;
            d->piece++;
            break;
        } else {
            uint64_t runs = strided_runs(view);
            for (; d->run < runs && !batch_full(d); d->run++) {
                int64_t to;
                strided_run(view, d->run, NULL, &to);
                add_iovec(d, w->base + p->to + to, view->run);
            }
            if (d->run < runs)
                break;
            d->run = 0;
        }
        d->piece++;
    }
    return true;
}

static void finish_batch(data_connection *d)
{
    stream_work *w = d->link->work;
    if (d->staged) {
        const piece *p = &w->pieces->pieces[d->piece - 1];
        const strided *view = &w->plan->views[p->view - 1];
        strided_copy(view, w->base + p->to, d->staging);
        if (w->landed)
            landed_view(w->landed, w->landed_cookie, view, p->to);
        return;
    }
    for (unsigned i = 0; i < d->n_iov && w->landed; i++) {
        const uint8_t *end = d->iov[i].iov_base; /* consume() moved it there */
        w->landed(w->landed_cookie, (uint64_t)(end - d->lengths[i] - w->base),
                  d->lengths[i]);
    }
}

static void consume(data_connection *d, size_t bytes)
{
    d->iov_left -= bytes;
    while (bytes > 0) {
        struct iovec *v = &d->iov[d->at_iov];
        size_t step = bytes < v->iov_len ? bytes : v->iov_len;
        v->iov_base = (uint8_t *)v->iov_base + step;
        v->iov_len -= step;
        bytes -= step;
        d->at_iov += v->iov_len == 0;
    }
    if (d->iov_left == 0)
        finish_batch(d);
}

/* The oldest request is answered. */
static void finish_request(data_connection *d)
{
    stream_work *w = d->link->work;
    uint64_t bytes = w->list->requests[d->queue[0]].bytes;
    d->queued--;
    memmove(d->queue, d->queue + 1, d->queued * sizeof(*d->queue));
    d->stage = IDLE_OR_HEADER;
    d->header_got = 0;
    *w->inflight -= bytes;
    w->bytes += bytes;
    w->done_requests++;
    pump(d);
}

/* recv/readv with the usual cases; 0: nothing now or the connection is gone. */
static size_t receive(data_connection *d, struct iovec *iov, unsigned n)
{
    for (;;) {
        ssize_t got = readv(d->source.fd, iov, (int)n);
        if (got > 0)
            return (size_t)got;
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        lose(d, FANIN_ERR_CLOSED, got < 0 ? errno : 0,
             got < 0 ? "broke a data connection" : "closed a data connection");
        return 0;
    }
}

static size_t read_body(data_connection *d)
{
    if (d->at_iov == d->n_iov && !fill_batch(d)) {
        lose(d, FANIN_ERR_MEMORY, 0, "sent what memory does not suffice to sort");
        return 0;
    }
    size_t got = receive(d, d->iov + d->at_iov, d->n_iov - d->at_iov);
    if (got == 0)
        return 0;
    consume(d, got);
    if (d->iov_left == 0 && d->piece == d->pieces_end)
        finish_request(d);
    return got;
}

/* A hello's answer or an error: small, decoded when whole. */
static size_t read_text(data_connection *d)
{
    size_t missing = d->reply.length - d->text.size;
    if (missing > 0) {
        if (!buffer_reserve(&d->text, missing)) {
            lose(d, FANIN_ERR_MEMORY, 0, "sent what memory does not suffice for");
            return 0;
        }
        struct iovec iov = {d->text.data + d->text.size, missing};
        size_t got = receive(d, &iov, 1);
        d->text.size += got;
        return got;
    }
    body b = {.data = d->text.data, .size = d->text.size};
    msg_hello_ok hello;
    if (d->stage == HELLO && d->reply.type == MSG_HELLO_OK &&
        decode_hello_ok(&b, &hello) == FANIN_OK) {
        d->stage = IDLE_OR_HEADER;
        d->header_got = 0;
        pump(d);
        return 1;
    }
    msg_error m;
    if (d->reply.type == MSG_ERROR && decode_error(&b, &m) == FANIN_OK)
        lose(d, m.code < 0 ? m.code : FANIN_ERR_PROTOCOL, 0, m.message);
    else
        lose(d, FANIN_ERR_PROTOCOL, 0, "sent a malformed reply on a data connection");
    return 0;
}

static void take_header(data_connection *d)
{
    const char *why = "sent a reply that does not fit the read";
    const stream_work *w = d->link->work;
    if (frame_decode(d->header, &d->reply, &why) != FANIN_OK) {
        lose(d, FANIN_ERR_PROTOCOL, 0, why);
        return;
    }
    bool text = d->stage == HELLO || d->reply.type == MSG_ERROR;
    if (text && d->reply.length <= LIMIT_REPLY) {
        d->text.size = 0;
        d->stage = d->stage == HELLO ? HELLO : ERROR_BODY;
        return;
    }
    if (!text && w && d->queued > 0 && d->reply.type == MSG_READ_OK &&
        d->reply.request == d->queue[0] + 2 &&
        d->reply.length == w->list->requests[d->queue[0]].bytes) {
        begin_body(d);
        return;
    }
    lose(d, FANIN_ERR_PROTOCOL, 0, why);
}

static size_t read_header(data_connection *d)
{
    struct iovec iov = {d->header + d->header_got, FRAME_SIZE - d->header_got};
    size_t got = receive(d, &iov, 1);
    d->header_got += got;
    if (d->header_got == FRAME_SIZE)
        take_header(d);
    return got;
}

static void on_readable(data_connection *d)
{
    size_t turn = 0, got;
    do {
        if (d->stage == BODY)
            got = read_body(d);
        else if (d->header_got < FRAME_SIZE)
            got = read_header(d);
        else
            got = read_text(d);
        turn += got;
    } while (got > 0 && turn < TURN_BYTES && d->source.fd >= 0);
}

static void on_ready(loop_source *source, uint32_t events)
{
    data_connection *d = (data_connection *)source;
    if (d->stage == CONNECTING) {
        int failed = socket_connect_result(source->fd);
        if (failed) {
            lose(d, FANIN_ERR_UNREACHABLE, failed, "refuses data connections");
            return;
        }
        socket_tune(source->fd);
        d->stage = HELLO;
        flush(d);
        return;
    }
    if (events & EPOLLOUT)
        flush(d);
    if (d->source.fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        on_readable(d);
}
