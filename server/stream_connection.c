/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_connection.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INPUT_FIRST 4096
#define BURST_LEAST ((size_t)128 << 10)

/* ------------------------------------------------------------------- life */

connection *connection_make(const handover *h)
{
    connection *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->fd = h->fd;
    c->reader = h->reader;
    c->counted = h->counted;
    memcpy(c->peer, h->peer, sizeof c->peer);
    c->input = h->input;
    c->output = h->output;
    c->burst = BURST_LEAST;
    c->stalled_at = UINT64_MAX;
    c->can_read = c->can_write = true;
    return c;
}

void connection_free(fanin_server *s, connection *c)
{
    /* A forked child may hold a copy of the descriptor: closing alone would not end it. */
    shutdown(c->fd, SHUT_RDWR);
    close(c->fd);
    job_free(&c->job);
    buffer_free(&c->input);
    buffer_free(&c->output);
    memory_account(s, &c->memory, 0);
    dismiss(s, c->counted);
    pthread_mutex_lock(&s->lock);
    c->reader->n_data--;
    reader_release(s, c->reader);
    pthread_mutex_unlock(&s->lock);
    free(c);
}

bool connection_account(fanin_server *s, connection *c)
{
    size_t now =
        sizeof *c + c->input.capacity + c->output.capacity + job_memory(&c->job);
    return memory_account(s, &c->memory, now);
}

/* ---------------------------------------------------------------- replies */

static void reply_error(connection *c, uint64_t request, fanin_status code,
                        const char *message)
{
    msg_error m = {.code = code};
    memcpy(m.message, message, strnlen(message, sizeof m.message - 1));
    encode_error(&c->output, request, &m);
}

/* Says why and closes once that has been read, or soon. */
static turn_result reject(stream_tools *t, connection *c, uint64_t request,
                          fanin_status code, const char *why)
{
    fanin_server *s = t->server;
    if (code == FANIN_ERR_PROTOCOL || code == FANIN_ERR_VERSION) {
        pthread_mutex_lock(&s->lock);
        s->stats.protocol_errors++;
        pthread_mutex_unlock(&s->lock);
    }
    log_write(&s->log, FANIN_LOG_WARNING, "data-rejected", "%s: %s", c->peer, why);
    reply_error(c, request, code, why);
    c->closing = true;
    c->stalled_at = deadline_in_ms(LINGER_MS);
    return c->output.failed ? TURN_CLOSE : TURN_MORE;
}

static void refuse_read(stream_tools *t, connection *c, uint64_t request,
                        fanin_status code, const char *why)
{
    fanin_server *s = t->server;
    pthread_mutex_lock(&s->lock);
    s->stats.reads_refused++;
    pthread_mutex_unlock(&s->lock);
    job_end(&c->job);
    reply_error(c, request, code, why);
}

/* Finds the lease that a token stands for and takes its catalog; NULL or why not. */
static const char *job_begin(fanin_server *s, connection *c, const uint8_t token[16])
{
    const char *why = NULL;
    pthread_mutex_lock(&s->lock);
    lease *l = lease_find(c->reader, token);
    if (l) {
        c->job.of = l->of;
        c->job.epoch = l->epoch;
        c->job.catalog = snapshot_retain(l->of->catalog);
    } else if (lease_find_void(c->reader, token)) {
        s->stats.pulls_stale++;
        why = "the lease is gone: the weights are being rewritten";
    } else {
        why = "this session has no such lease";
    }
    pthread_mutex_unlock(&s->lock);
    return why;
}

static turn_result start_read(stream_tools *t, connection *c, const frame *f, body *in)
{
    msg_read m;
    fanin_status status = decode_read(in, &m, t->entries);
    if (status == FANIN_ERR_UNSUPPORTED) {
        refuse_read(t, c, f->request, status, in->why);
        return TURN_MORE;
    }
    if (status != FANIN_OK)
        return reject(t, c, f->request, status, in->why);
    const char *why = job_begin(t->server, c, m.token);
    if (why) {
        refuse_read(t, c, f->request, FANIN_ERR_STALE, why);
        return TURN_MORE;
    }
    status = job_set_ranges(&c->job, &m, &why);
    if (status != FANIN_OK) {
        refuse_read(t, c, f->request, status, why);
        return TURN_MORE;
    }
    if (!connection_account(t->server, c)) {
        job_end(&c->job);
        return reject(t, c, f->request, FANIN_ERR_LIMIT,
                      "the server's connections have all the memory they may");
    }
    encode_read_ok(&c->output, f->request, (uint32_t)m.bytes);
    return TURN_MORE;
}

static turn_result handle_frame(stream_tools *t, connection *c, const frame *f,
                                body *in)
{
    if (f->type == MSG_READ)
        return start_read(t, c, f, in);
    if (f->type == MSG_PING) {
        if (decode_empty(in) != FANIN_OK)
            return reject(t, c, f->request, FANIN_ERR_PROTOCOL, in->why);
        encode_empty(&c->output, f->request, MSG_PONG);
        return TURN_MORE;
    }
    if (message_kind(f->type) == KIND_REQUEST)
        return reject(t, c, f->request, FANIN_ERR_PROTOCOL,
                      "a request that belongs on a control session came on a data "
                      "connection");
    if (message_kind(f->type) == KIND_REPLY)
        return reject(t, c, f->request, FANIN_ERR_PROTOCOL, "a reply came to a server");
    reply_error(c, f->request, FANIN_ERR_UNSUPPORTED,
                "this server does not know the request");
    return TURN_MORE;
}

/* ------------------------------------------------------------------ input */

/* Makes room for the rest of the frame that the input begins with. */
static bool make_room(connection *c, size_t need)
{
    size_t pending = c->input.size - c->used;
    if (c->used > 0) {
        memmove(c->input.data, c->input.data + c->used, pending);
        c->input.size = pending;
        c->used = 0;
    }
    if (need < INPUT_FIRST)
        need = INPUT_FIRST;
    return need <= pending || buffer_reserve(&c->input, need - pending);
}

static turn_result receive(stream_tools *t, connection *c, size_t need)
{
    if (!c->can_read)
        return TURN_WAIT;
    if (!make_room(c, need))
        return TURN_CLOSE;
    if (!connection_account(t->server, c))
        return reject(t, c, 0, FANIN_ERR_LIMIT,
                      "the server's connections have all the memory they may");
    ssize_t n = recv(c->fd, c->input.data + c->input.size,
                     c->input.capacity - c->input.size, MSG_DONTWAIT);
    if (n > 0) {
        c->input.size += (size_t)n;
        return TURN_MORE;
    }
    if (n < 0 && errno == EINTR)
        return TURN_MORE;
    if (n < 0 && errno == EAGAIN) {
        c->can_read = false;
        return TURN_WAIT;
    }
    return TURN_CLOSE;
}

static turn_result next_frame(stream_tools *t, connection *c)
{
    size_t pending = c->input.size - c->used;
    if (pending < FRAME_SIZE)
        return receive(t, c, FRAME_SIZE);
    frame f;
    const char *why;
    const uint8_t *start = c->input.data + c->used;
    fanin_status status = frame_decode(start, &f, &why);
    if (status != FANIN_OK)
        return reject(t, c, 0, status, why);
    if (f.length > LIMIT_READ_REQUEST)
        return reject(t, c, f.request, FANIN_ERR_PROTOCOL, "the request is too long");
    if (pending < FRAME_SIZE + (size_t)f.length)
        return receive(t, c, FRAME_SIZE + (size_t)f.length);
    body in = {.data = start + FRAME_SIZE, .size = f.length};
    c->used += FRAME_SIZE + (size_t)f.length;
    turn_result result = handle_frame(t, c, &f, &in);
    if (c->used == c->input.size)
        c->used = c->input.size = 0;
    return c->output.failed ? TURN_CLOSE : result;
}

/* Reads what comes after an error until the peer has closed, so that it gets the error. */
static turn_result discard(connection *c)
{
    if (!c->shut) {
        c->shut = true;
        shutdown(c->fd, SHUT_WR);
    }
    char nothing[4096];
    ssize_t n = recv(c->fd, nothing, sizeof nothing, MSG_DONTWAIT);
    if (n > 0 || (n < 0 && errno == EINTR))
        return TURN_MORE;
    return n < 0 && errno == EAGAIN ? TURN_WAIT : TURN_CLOSE;
}

/* ----------------------------------------------------------------- output */

/* Announces a send that reads the publication's memory; false: the epoch has gone. */
static bool send_enter(fanin_server *s, job *j)
{
    pthread_mutex_lock(&s->lock);
    bool stands = j->of->epoch == j->epoch || !RULE(RULE_SEND_CHECK);
    if (stands) {
        j->of->in_flight++;
        j->of->in_flight_epoch = j->epoch;
    } else {
        s->stats.pulls_stale++;
    }
    pthread_mutex_unlock(&s->lock);
    return stands;
}

static void send_leave(fanin_server *s, connection *c, bool reading, uint64_t bytes)
{
    job *j = &c->job;
    pthread_mutex_lock(&s->lock);
    if (reading) {
        j->of->in_flight--;
        if (j->of->epoch != j->epoch)
            pthread_cond_broadcast(&s->freed);
    }
    s->stats.bytes_streamed += bytes;
    s->stats.reads_streamed += bytes > 0 && bytes == j->left && !j->is_void;
    c->reader->active_ns = clock_ns();
    pthread_mutex_unlock(&s->lock);
}

static void account_sent(connection *c, size_t bytes, uint64_t *of_job)
{
    size_t queued = c->output.size - c->sent;
    size_t first = bytes < queued ? bytes : queued;
    c->sent += first;
    if (c->sent == c->output.size)
        c->sent = c->output.size = 0;
    *of_job = bytes - first;
}

static turn_result send_some(stream_tools *t, connection *c)
{
    gather *g = &t->gather;
    job *j = &c->job;
    bool reading = false;
    g->n = 0;
    g->bytes = g->bounced = 0;
    g->most = c->burst;
    bool more = gather_add(g, c->output.data + c->sent, c->output.size - c->sent);
    if (j->left > 0 && more) {
        reading = !j->is_void && send_enter(t->server, j);
        j->is_void = !reading;
        if (reading)
            ON_SEND();
        if (reading)
            job_gather(j, g);
        else
            job_gather_zeros(j, g);
    }
    struct msghdr message = {.msg_iov = g->iov, .msg_iovlen = (size_t)g->n};
    ssize_t n = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    int code = errno;
    uint64_t of_job = 0;
    if (n > 0)
        account_sent(c, (size_t)n, &of_job);
    if (reading || of_job > 0)
        send_leave(t->server, c, reading, of_job);
    if (n < 0 && code != EAGAIN && code != EINTR)
        return TURN_CLOSE;
    if (n > 0 && !c->closing)
        c->stalled_at = UINT64_MAX;
    bool full = n < 0 ? code == EAGAIN : (size_t)n < g->bytes;
    c->burst = full ? c->burst / 2 : 2 * c->burst;
    c->burst = c->burst < BURST_LEAST ? BURST_LEAST : c->burst;
    c->burst = c->burst > SEND_MOST ? SEND_MOST : c->burst;
    job_advance(j, of_job);
    if (j->of && j->left == 0)
        job_end(j);
    if (!full)
        return TURN_MORE;
    c->can_write = false;
    if (c->stalled_at == UINT64_MAX)
        c->stalled_at = deadline_in_ms(STALL_MS);
    return TURN_WAIT;
}

turn_result connection_turn(stream_tools *t, connection *c)
{
    if (c->output.size > c->sent || c->job.left > 0)
        return c->can_write ? send_some(t, c) : TURN_WAIT;
    return c->closing ? discard(c) : next_frame(t, c);
}
