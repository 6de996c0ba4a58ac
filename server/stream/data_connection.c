/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/data_connection.h"
#include "guests/peer.h"
#include "core/rules.h"
#include "error_set.h"
#include "publish/filling.h"
#include "stream/stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BURST_LEAST ((size_t)128 << 10)
#define SLOW_EVERY_NS UINT64_C(60000000000)
#define TELL_MS 1000
#define DIGEST_MOST ((size_t)256 << 10) /* stays in a cache */

bucket limit_bucket;

/* ------------------------------------------------------------------- life */

connection *connection_make(const handover *h)
{
    connection *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->fd = h->fd;
    c->tls = h->tls;
    c->reader = h->reader;
    c->from = h->from;
    memcpy(c->peer, h->peer, sizeof c->peer);
    c->in = h->in;
    c->in.longest = LIMIT_READ_REQUEST;
    c->out = h->out;
    if (c->in.sealed && !(c->sum = checksum_create())) {
        free(c);
        return NULL;
    }
    c->copies = c->in.sealed || c->tls;
    c->burst = BURST_LEAST;
    c->stalled_at = c->begun_at = UINT64_MAX;
    c->can_read = c->can_write = true;
    return c;
}

void connection_free(stream_tools *t, connection *c)
{
    fanin_server *s = t->server;
    if (t->stage)
        stage_leave(t->stage, c);
    /* A forked child may hold a copy of the descriptor: closing alone would not end it. */
    shutdown(c->fd, SHUT_RDWR);
    close(c->fd);
    tls_free(&c->tls);
    job_free(s, &c->job);
    digester_free(&c->digester);
    framing_free(&c->in);
    outgoing_free(&c->out);
    checksum_free(c->sum);
    memory_account(s, c->from, &c->memory, 0);
    pthread_mutex_lock(&s->lock);
    s->stats.sends_waiting -= c->waiting;
    c->reader->n_data--;
    reader_release(s, c->reader);
    pthread_mutex_unlock(&s->lock);
    dismiss(s, c->from);
    free(c);
}

bool connection_account(fanin_server *s, connection *c)
{
    size_t now = sizeof *c + c->in.bytes.capacity + c->out.bytes.capacity +
                 job_memory(&c->job) + digester_memory(&c->digester) +
                 tls_memory(c->tls);
    return memory_account(s, c->from, &c->memory, now);
}

/* ----------------------------------------------------------------- shares */

/* Tensors are what the server is for, and have a share of their own. */
static bool is_reading(const connection *c)
{
    return c->job.left > 0 || c->digester.on;
}

static bool is_counted(const stream_tools *t, const connection *c)
{
    if (is_reading(c))
        return peer_send_is_counted(t->server, c->from);
    return !c->closing && outgoing_is_empty(&c->out) && !t->server->tls &&
           peer_is_counted(t->server, c->from);
}

/* Others were before it, or nothing is left. */
static bool share_is_used(const stream_tools *t, const connection *c, bool crowded)
{
    return is_counted(t, c) &&
           (crowded || (is_reading(c) ? peer_send_must_rest(t->server, c->from)
                                      : peer_must_rest(t->server, c->from)));
}

/* By the bytes a second of all that is sent. */
static bool is_held_back(const stream_tools *t, const connection *c)
{
    return c->job.left > 0 && !c->digester.on && t->server->max_bytes_per_second > 0 &&
           bucket_ready(&limit_bucket, LIMIT_WINDOW_NS) > clock_ns();
}

bool connection_may_go_on(const stream_tools *t, const connection *c)
{
    return !share_is_used(t, c, false) && !is_held_back(t, c);
}

static bool turn_is_over(const stream_tools *t, const connection *c)
{
    return share_is_used(t, c, t->crowded[is_reading(c)]) || is_held_back(t, c);
}

/* ---------------------------------------------------------------- replies */

static void reply_fault(connection *c, uint64_t request, const fanin_error *why)
{
    msg_error m = {.code = why->status};
    memcpy(m.message, why->message, sizeof m.message);
    memcpy(m.remedy, why->remedy, sizeof m.remedy);
    memcpy(m.key, why->key, sizeof m.key);
    encode_error(&c->out.bytes, request, &m);
}

static void reply_error(connection *c, uint64_t request, fanin_status code,
                        const char *message)
{
    fanin_error why = FANIN_ERROR_INIT;
    error_set(&why, code, NULL, "%s", message);
    reply_fault(c, request, &why);
}

/* Says why and closes once that has been read, or soon. */
static progress reject(stream_tools *t, connection *c, uint64_t request,
                       fanin_status code, const char *why)
{
    fanin_server *s = t->server;
    if (code == FANIN_ERR_PROTOCOL || code == FANIN_ERR_VERSION) {
        pthread_mutex_lock(&s->lock);
        s->stats.protocol_errors++;
        pthread_mutex_unlock(&s->lock);
    }
    peer_log(s, c->from, FANIN_LOG_WARNING, "data-rejected", "%s: %s", c->peer, why);
    reply_error(c, request, code, why);
    c->closing = true;
    c->stalled_at = deadline_in_ms(LINGER_MS);
    return PROGRESS_MORE;
}

static progress refuse_for(stream_tools *t, connection *c, uint64_t request,
                           const fanin_error *why)
{
    fanin_server *s = t->server;
    pthread_mutex_lock(&s->lock);
    s->stats.reads_refused++;
    pthread_mutex_unlock(&s->lock);
    job_end(s, &c->job);
    c->digester.on = false;
    reply_fault(c, request, why);
    return PROGRESS_MORE;
}

static progress refuse_read(stream_tools *t, connection *c, uint64_t request,
                            fanin_status code, const char *message)
{
    fanin_error why = FANIN_ERROR_INIT;
    error_set(&why, code, NULL, "%s", message);
    return refuse_for(t, c, request, &why);
}

/* Finds the lease that a token stands for and takes its catalog, or says why not. */
static fanin_status job_begin(fanin_server *s, connection *c, const uint8_t token[16],
                              fanin_error *error)
{
    const char *why = NULL;
    fanin_status status = FANIN_OK;
    pthread_mutex_lock(&s->lock);
    lease *l = lease_find(c->reader, token);
    if (l) {
        c->job.of = l->of;
        c->job.epoch = l->epoch;
        c->job.fills = l->of->proofs.fills;
        c->job.first_region = l->first_region;
        memcpy(c->job.token, token, sizeof c->job.token);
        c->job.catalog = shard_catalog_retain(l->catalog);
    } else if (lease_failed(c->reader, token)) {
        status = error_copy(error, lease_failed(c->reader, token));
    } else if (lease_find_void(c->reader, token)) {
        s->stats.pulls_stale++;
        why = "the lease is gone: the weights are being rewritten";
    } else {
        why = "this session has no such lease";
    }
    pthread_mutex_unlock(&s->lock);
    return why ? error_set(error, FANIN_ERR_STALE, NULL, "%s", why) : status;
}

/* Of the epoch that stands; if that is another one, nothing is read anyway. */
static bool has_come(fanin_server *s, const job *j, const msg_read *m)
{
    bool all = true;
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; all && i < m->n_entries; i++) {
        const read_entry *e = &m->entries[i];
        all = filling_has(j->of, e->box, e->count ? e->count : 1);
    }
    pthread_mutex_unlock(&s->lock);
    return all;
}

/* The header of the reply to a read. */
static void start_reply(connection *c, uint64_t request)
{
    encode_read_ok(&c->out.bytes, request, (uint32_t)c->job.left);
    if (!c->in.sealed || c->out.bytes.failed)
        return;
    checksum_reset(c->sum);
    const buffer *out = &c->out.bytes;
    checksum_add(c->sum, out->data + out->size - FRAME_SIZE, FRAME_SIZE);
}

/* All of the reply has left, but for its seal. */
static void end_reply(stream_tools *t, connection *c)
{
    uint8_t seal[SEAL_SIZE];
    job_end(t->server, &c->job);
    if (!c->in.sealed)
        return;
    seal_encode(checksum_get(c->sum), seal);
    buffer_append(&c->out.bytes, seal, sizeof seal);
}

/* A reply from device memory; its header waits until the first bytes are there. */
static progress start_staged(stream_tools *t, connection *c, uint64_t request)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (!t->stage && t->need_stage(t, &why) != FANIN_OK)
        return refuse_for(t, c, request, &why);
    c->job.ungathered = c->job.left;
    c->job.is_staged = c->job.header_due = true;
    return PROGRESS_MORE;
}

static progress start_digest(stream_tools *t, connection *c, const frame *f,
                             uint32_t dtype)
{
    fanin_status code;
    const char *why = digester_start(&c->digester, &c->job, f->request, dtype, &code);
    if (why)
        return refuse_read(t, c, f->request, code, why);
    /* What is more than a read may ask for takes turns with others. */
    bool staged = c->job.left > LIMIT_READ_BYTES || job_needs_stage(&c->job);
    return staged ? start_staged(t, c, f->request) : PROGRESS_MORE;
}

static progress start_read(stream_tools *t, connection *c, const frame *f, body *in)
{
    msg_read m;
    bool is_digest = f->type == MSG_DIGEST;
    fanin_status status =
        is_digest ? decode_digest(in, &m, t->entries) : decode_read(in, &m, t->entries);
    if (status == FANIN_ERR_UNSUPPORTED)
        return refuse_read(t, c, f->request, status, in->why);
    if (status != FANIN_OK)
        return reject(t, c, f->request, status, in->why);
    fanin_error gone = FANIN_ERROR_INIT;
    if (job_begin(t->server, c, m.token, &gone) != FANIN_OK)
        return refuse_for(t, c, f->request, &gone);
    const char *why = NULL;
    bool is_wide = is_digest && c->job.catalog->has_device;
    c->job.request = f->request;
    status = job_set_ranges(t->server, &c->job, &m,
                            is_wide ? LIMIT_DIGEST_BYTES : LIMIT_READ_BYTES, &why);
    if (status != FANIN_OK)
        return refuse_read(t, c, f->request, status, why);
    if (is_digest && c->job.is_patch)
        return refuse_read(t, c, f->request, FANIN_ERR_ARGUMENT,
                           "patches have no digests");
    if (c->job.fills && !has_come(t->server, &c->job, &m))
        return refuse_read(t, c, f->request, FANIN_ERR_STALE,
                           "the read names a box that has not come yet");
    if (!connection_account(t->server, c)) {
        job_end(t->server, &c->job);
        return reject(t, c, f->request, FANIN_ERR_LIMIT,
                      "the server's connections have all the memory they may");
    }
    if (is_digest)
        return start_digest(t, c, f, m.dtype);
    if (job_needs_stage(&c->job))
        return start_staged(t, c, f->request);
    start_reply(c, f->request);
    return PROGRESS_MORE;
}

static progress handle_frame(stream_tools *t, connection *c, const frame *f, body *in)
{
    if (f->type == MSG_READ || f->type == MSG_DIGEST)
        return start_read(t, c, f, in);
    if (f->type == MSG_PING) {
        if (decode_empty(in) != FANIN_OK)
            return reject(t, c, f->request, FANIN_ERR_PROTOCOL, in->why);
        encode_empty(&c->out.bytes, f->request, MSG_PONG);
        return PROGRESS_MORE;
    }
    if (message_kind(f->type) == KIND_REQUEST)
        return reject(t, c, f->request, FANIN_ERR_PROTOCOL,
                      "a request that belongs on a control session came on a data "
                      "connection");
    if (message_kind(f->type) == KIND_REPLY)
        return reject(t, c, f->request, FANIN_ERR_PROTOCOL, "a reply came to a server");
    reply_error(c, f->request, FANIN_ERR_UNSUPPORTED,
                "this server does not know the request");
    return PROGRESS_MORE;
}

/* ------------------------------------------------------------------ input */

static progress receive(stream_tools *t, connection *c)
{
    size_t room;
    if (!c->can_read)
        return PROGRESS_WAIT;
    uint8_t *to = framing_room(&c->in, &room);
    if (!to)
        return PROGRESS_CLOSE;
    if (!connection_account(t->server, c))
        return reject(t, c, 0, FANIN_ERR_LIMIT,
                      "the server's connections have all the memory they may");
    ssize_t n = tls_receive(c->tls, c->fd, to, room);
    if (n > 0) {
        framing_add(&c->in, (size_t)n);
        return PROGRESS_MORE;
    }
    if (n < 0 && errno == EINTR)
        return PROGRESS_MORE;
    if (n < 0 && errno == EAGAIN) {
        c->can_read = false;
        if (framing_has_begun(&c->in) && c->begun_at == UINT64_MAX)
            c->begun_at = deadline_in_ms(STALL_MS);
        return PROGRESS_WAIT;
    }
    return PROGRESS_CLOSE;
}

static progress next_frame(stream_tools *t, connection *c)
{
    framed got;
    framing_result result = framing_take(&c->in, &got);
    if (result == FRAMING_MORE)
        return receive(t, c);
    c->begun_at = UINT64_MAX;
    if (result == FRAMING_BAD)
        return reject(t, c, got.head.request, got.status, got.why);
    return handle_frame(t, c, &got.head, &got.body);
}

/* Reads what comes after an error until the peer has closed, so that it gets the error. */
static progress discard(connection *c)
{
    if (!c->shut) {
        c->shut = true;
        shutdown(c->fd, SHUT_WR);
    }
    char nothing[4096];
    ssize_t n = tls_receive(c->tls, c->fd, nothing, sizeof nothing);
    if (n > 0 || (n < 0 && errno == EINTR))
        return PROGRESS_MORE;
    return n < 0 && errno == EAGAIN ? PROGRESS_WAIT : PROGRESS_CLOSE;
}

/* ----------------------------------------------------------------- output */

static void send_leave(fanin_server *s, connection *c, bool reading, uint64_t bytes,
                       bool full)
{
    job *j = &c->job;
    pthread_mutex_lock(&s->lock);
    if (reading)
        publication_read_leave(s, j->of, j->epoch);
    s->stats.bytes_streamed += bytes;
    s->stats.bytes_patches += j->is_patch ? bytes : 0;
    if (j->of)
        j->of->bytes_left += bytes;
    s->stats.bytes_tls += c->tls ? bytes : 0;
    s->stats.reads_streamed += bytes > 0 && bytes == j->left && !j->is_void;
    s->stats.sends_waiting += full;
    s->stats.sends_waiting -= c->waiting;
    c->waiting = full;
    c->reader->active_ns = clock_ns();
    pthread_mutex_unlock(&s->lock);
}

/* How many of @p bytes that have left were the job's, not of the output before it. */
static uint64_t account_sent(connection *c, size_t bytes)
{
    size_t queued = outgoing_left(&c->out);
    size_t first = bytes < queued ? bytes : queued;
    outgoing_sent(&c->out, first);
    return bytes - first;
}

static void gather_clear(gather *g, size_t most)
{
    g->n = g->n_runs = 0;
    g->bytes = g->bounced = g->run_bytes = 0;
    g->most = most;
    g->copies = true;
    g->failed = false;
}

static void gather_start(gather *g, const connection *c, size_t most)
{
    gather_clear(g, c->tls && most > TLS_SEND_MOST ? TLS_SEND_MOST : most);
    g->copies = c->copies;
    gather_add(g, c->out.bytes.data + c->out.sent, outgoing_left(&c->out));
}

/* The socket is full. */
static progress wait_for_room(connection *c)
{
    c->can_write = false;
    if (!c->closing)
        c->stalled_at = deadline_in_ms(STALL_MS);
    return PROGRESS_WAIT;
}

/* Sends what is gathered; @p reading: from the publication's memory. What of it was the job's is in
   *of_job. */
static progress transmit(stream_tools *t, connection *c, bool reading, uint64_t *of_job)
{
    gather *g = &t->gather;
    size_t queued = outgoing_left(&c->out);
    ssize_t n = tls_send(c->tls, c->fd, g->iov, g->n);
    int code = errno;
    *of_job = n > 0 ? account_sent(c, (size_t)n) : 0;
    /* What was sent is as it was: begin_update waits, or it is the stage's. */
    if (c->in.sealed)
        gather_sum(g, queued, *of_job, c->sum);
    /* A short count may have another reason than a full socket: the next call says which. */
    bool full = n < 0 ? code == EAGAIN : tls_unsent(c->tls) > 0;
    bool is_short = n > 0 && (size_t)n < g->bytes;
    if (reading || *of_job > 0 || c->waiting)
        send_leave(t->server, c, reading, *of_job, full);
    if (t->server->max_bytes_per_second > 0)
        bucket_take(&limit_bucket, clock_ns(),
                    *of_job * UINT64_C(1000000000) / t->server->max_bytes_per_second);
    if (n < 0 && code == EFAULT && !c->copies) {
        c->copies = true; /* up to the byte that cannot be read, then it */
        return PROGRESS_MORE;
    }
    if (n < 0 && code != EAGAIN && code != EINTR)
        return PROGRESS_CLOSE;
    if (n > 0)
        c->burst = full || is_short ? c->burst / 2 : 2 * c->burst;
    c->burst = c->burst < BURST_LEAST ? BURST_LEAST : c->burst;
    c->burst = c->burst > SEND_MOST ? SEND_MOST : c->burst;
    job_advance(&c->job, *of_job);
    return full ? wait_for_room(c) : PROGRESS_MORE;
}

/* ------------------------------------------------- memory that cannot be read */

static void tell_failed(stream_tools *t, const connection *c, const fanin_error *why)
{
    /* Of strangers peer_log() leaves lines out, and counts them. */
    if (c->from->is_own && t->tell_at > 0 && !deadline_passed(t->tell_at))
        return;
    t->tell_at = deadline_in_ms(TELL_MS);
    peer_log(t->server, c->from, FANIN_LOG_ERROR, "read-failed",
             "a read of %s for %s fails: %s; %s", c->job.of->name, c->peer,
             why->message, why->remedy);
}

/* Bytes of the reply will not come. If nothing of it has left, the reply is that error; else its
   rest is padding, and the lease is taken away: the reader's end, or its next read, gets the error.
   */
static void give_up_reply(stream_tools *t, connection *c, const fanin_error *why)
{
    fanin_server *s = t->server;
    job *j = &c->job;
    tell_failed(t, c, why);
    if (t->stage)
        stage_leave(t->stage, c);
    if (j->header_due || c->digester.on) {
        refuse_for(t, c, j->request, why);
        return;
    }
    j->is_void = true;
    pthread_mutex_lock(&s->lock);
    lease_fail(s, c->reader, j->token, why);
    pthread_mutex_unlock(&s->lock);
}

/* The byte that comes next. */
static progress cannot_read(stream_tools *t, connection *c)
{
    fanin_error why = FANIN_ERROR_INIT;
    const job *j = &c->job;
    shard_catalog_unreadable(j->catalog, j->ranges[j->current].box, t->server->rank,
                             &why);
    give_up_reply(t, c, &why);
    return PROGRESS_MORE;
}

static void leave_read(stream_tools *t, connection *c)
{
    pthread_mutex_lock(&t->server->lock);
    publication_read_leave(t->server, c->job.of, c->job.epoch);
    c->reader->active_ns = clock_ns();
    pthread_mutex_unlock(&t->server->lock);
}

static progress send_some(stream_tools *t, connection *c)
{
    gather *g = &t->gather;
    job *j = &c->job;
    bool reading = false;
    uint64_t of_job;
    gather_start(g, c, c->burst);
    if (j->left > 0 && g->bytes < g->most) {
        reading = !j->is_void && bracket_enter(t->server, j->of, j->epoch);
        j->is_void = !reading;
        if (reading)
            ON_SEND();
        if (reading)
            job_gather(j, g);
        else
            job_gather_zeros(j, g);
    }
    if (g->failed && g->bytes == outgoing_left(&c->out)) {
        leave_read(t, c);
        return cannot_read(t, c);
    }
    progress result = transmit(t, c, reading, &of_job);
    if (result != PROGRESS_CLOSE && j->of && j->left == 0)
        end_reply(t, c);
    return result;
}

/* ----------------------------------------------------------- device memory */

/* The first one if it can be sent, and one more unless its turn is over. */
static bool may_fill(const stream_tools *t, const connection *c)
{
    const job *j = &c->job;
    return c->staged.count < CHUNKS_EACH && j->ungathered > 0 && !j->is_void &&
           (c->staged.first ? !turn_is_over(t, c) : c->can_write);
}

/* Starts copies as long as there are chunks for them; false: the read was given up. */
static bool fill_chunks(stream_tools *t, connection *c)
{
    job *j = &c->job;
    while (may_fill(t, c)) {
        fanin_error why = FANIN_ERROR_INIT;
        fill_result result = stage_fill(t->stage, c, j, &t->gather.bounce, &why);
        j->is_void = result == FILL_VOID;
        if (result == FILL_FAILED)
            give_up_reply(t, c, &why);
        if (result == FILL_WAIT || result == FILL_FAILED)
            return result == FILL_WAIT;
    }
    const chunk *first = c->staged.first;
    if (first && first->state == CHUNK_FAILED) {
        fanin_error why = FANIN_ERROR_INIT;
        stage_explain(t->stage, first, &why);
        give_up_reply(t, c, &why);
        return false;
    }
    return true;
}

/* @p bytes of the reply have left. */
static void drop_sent(stream_tools *t, staged *of, uint64_t bytes)
{
    while (bytes > 0 && of->first) {
        chunk *first = of->first;
        uint64_t step = first->bytes - first->sent;
        step = bytes < step ? bytes : step;
        first->sent += step;
        bytes -= step;
        if (first->sent == first->bytes)
            stage_drop_first(t->stage, of);
    }
}

void connection_return_chunks(stream_tools *t, connection *c)
{
    uint64_t unsent = 0;
    if (c->can_write || !c->staged.first)
        return;
    for (const chunk *at = c->staged.first; at; at = at->next)
        unsent += at->bytes - at->sent;
    job_rewind(&c->job, unsent);
    c->job.ungathered += unsent;
    stage_leave(t->stage, c);
}

static progress send_staged(stream_tools *t, connection *c)
{
    gather *g = &t->gather;
    job *j = &c->job;
    uint64_t of_job;
    if (!fill_chunks(t, c))
        return PROGRESS_MORE;
    const chunk *first = c->staged.first;
    if (j->header_due && (first ? first->state == CHUNK_READY : j->is_void)) {
        start_reply(c, j->request);
        j->header_due = false;
    }
    if (c->out.bytes.failed || !c->can_write)
        return PROGRESS_WAIT;
    gather_start(g, c, SEND_MOST);
    for (const chunk *at = first; at && at->state == CHUNK_READY; at = at->next)
        gather_add(g, at->data + at->sent, at->bytes - at->sent);
    if (!first && j->is_void)
        job_gather_zeros(j, g);
    if (g->bytes == 0)
        return PROGRESS_WAIT; /* for a copy, or for a chunk */
    progress result = transmit(t, c, false, &of_job);
    drop_sent(t, &c->staged, of_job);
    if (result != PROGRESS_CLOSE && j->left == 0)
        end_reply(t, c);
    return result;
}

/* ----------------------------------------------------------------- digests */

static void end_digest(stream_tools *t, connection *c)
{
    digester *d = &c->digester;
    msg_digest_ok m = {
        .digests = {d->digests[0].bytes, c->job.n_ranges * sizeof *d->digests}};
    encode_digest_ok(&c->out.bytes, d->request, &m);
    d->on = false;
    job_end(t->server, &c->job);
}

/* They were made, also of the last byte, while the epoch stood. */
static void tell_digest(stream_tools *t, connection *c)
{
    kept_digests_add(t->server, t->kept, &c->job, c->digester.convert,
                     c->digester.digests);
    end_digest(t, c);
}

static progress lose_digest(stream_tools *t, connection *c)
{
    if (t->stage)
        stage_leave(t->stage, c);
    return refuse_read(t, c, c->digester.request, FANIN_ERR_STALE,
                       "the lease is gone: the weights are being rewritten");
}

/* What is copied while begin_update waits is in a cache when it is digested. */
static bool digest_some(stream_tools *t, connection *c)
{
    gather *g = &t->gather;
    job *j = &c->job;
    if (!bracket_enter(t->server, j->of, j->epoch))
        return false;
    ON_SEND();
    gather_clear(g, DIGEST_MOST);
    job_gather(j, g);
    leave_read(t, c);
    if (g->failed && g->bytes == 0) {
        (void)cannot_read(t, c);
        return true;
    }
    for (int i = 0; i < g->n; i++)
        digester_add(&c->digester, j, g->iov[i].iov_base, g->iov[i].iov_len);
    job_advance(j, g->bytes);
    return true;
}

/* What has been copied from devices, or digested there. */
static progress digest_staged(stream_tools *t, connection *c)
{
    job *j = &c->job;
    if (!fill_chunks(t, c))
        return PROGRESS_MORE;
    if (j->is_void)
        return lose_digest(t, c);
    const chunk *first = c->staged.first;
    if (!first || first->state != CHUNK_READY)
        return PROGRESS_WAIT;
    size_t bytes = first->bytes;
    if (first->digests.n_pieces > 0)
        digester_add_pieces(&c->digester, j, &first->digests);
    else
        digester_add(&c->digester, j, first->data, bytes);
    drop_sent(t, &c->staged, bytes);
    job_advance(j, bytes);
    if (j->left == 0)
        tell_digest(t, c);
    return PROGRESS_MORE;
}

/* Whether it was made for somebody else, and nothing was read yet. */
static bool is_digest_kept(const stream_tools *t, connection *c)
{
    digester *d = &c->digester;
    return job_is_whole(&c->job) && !c->staged.first &&
           kept_digests_find(t->kept, &c->job, d->convert, d->digests);
}

static progress repeat_digest(stream_tools *t, connection *c)
{
    if (!bracket_enter(t->server, c->job.of, c->job.epoch))
        return lose_digest(t, c);
    leave_read(t, c);
    if (t->stage)
        stage_leave(t->stage, c);
    end_digest(t, c);
    return PROGRESS_MORE;
}

static progress digest_progress(stream_tools *t, connection *c)
{
    if (is_digest_kept(t, c))
        return repeat_digest(t, c);
    if (c->job.is_staged)
        return digest_staged(t, c);
    if (!digest_some(t, c))
        return lose_digest(t, c);
    if (!c->digester.on)
        return PROGRESS_MORE;
    /* Others may ask for the same: what has begun ends first, and is found by them. */
    if (c->job.left > 0)
        return PROGRESS_FIRST;
    tell_digest(t, c);
    return PROGRESS_MORE;
}

/* What TLS has taken already, before anything else. */
static progress flush_tls(connection *c)
{
    if (!c->can_write)
        return PROGRESS_WAIT;
    if (tls_flush(c->tls) != 0)
        return PROGRESS_CLOSE;
    return tls_unsent(c->tls) > 0 ? wait_for_room(c) : PROGRESS_MORE;
}

static progress progress_once(stream_tools *t, connection *c)
{
    if (tls_unsent(c->tls) > 0)
        return flush_tls(c);
    if (c->digester.on)
        return digest_progress(t, c);
    if (c->job.is_staged)
        return send_staged(t, c);
    if (!outgoing_is_empty(&c->out) || c->job.left > 0)
        return c->can_write ? send_some(t, c) : PROGRESS_WAIT;
    return c->closing ? discard(c) : next_frame(t, c);
}

/* ---------------------------------------------------------------- CPU time */

/* Who waits for a chunk, or has one, is in the midst of its turn: it would keep the chunk from
   others, or have it filled again and again and never send it. */
static bool must_rest(const stream_tools *t, const connection *c)
{
    return turn_is_over(t, c) && !stage_serves(&c->staged);
}

/* Whoever asks why pulls from there are slow is to find it. */
static void tell_slow(const stream_tools *t, const connection *c)
{
    fanin_server *s = t->server;
    uint64_t now = clock_ns(), told = atomic_load(&c->from->slow_at);
    if ((told > 0 && now - told < SLOW_EVERY_NS) ||
        !atomic_compare_exchange_strong(&c->from->slow_at, &told, now))
        return;
    peer_log(
        s, c->from, FANIN_LOG_WARNING, "sent-slowly",
        "the rank sends to %s more slowly: sending to it, or to all strangers, has "
        "used up its CPU time (%u of 1000 of a CPU for all of them). Give ranks and "
        "workers a launch's secret, set trusted_network, or a larger stranger_cpu",
        c->from->name, (unsigned)s->stranger_cpu);
}

/* It waits until its peer may go on. */
static progress rest(stream_tools *t, connection *c)
{
    bool reads = is_reading(c);
    if (!c->resting && share_is_used(t, c, t->crowded[reads])) {
        if (reads)
            tell_slow(t, c);
        atomic_fetch_add(&t->server->rests, 1);
    }
    c->resting = true;
    c->begun_at = UINT64_MAX; /* nobody looks for the rest of it */
    if (t->rest_until == UINT64_MAX)
        t->rest_until = deadline_in_ms(REST_MS);
    return PROGRESS_WAIT;
}

progress connection_progress(stream_tools *t, connection *c)
{
    /* With a secret there are none but of peers that have proven it. */
    bool counts = !c->from->is_own && !t->server->tls, reads = is_reading(c);
    if (c->ended)
        return PROGRESS_CLOSE;
    /* Of who rests the socket tells nothing: first there must be room in it. */
    if (must_rest(t, c))
        return c->can_write ? rest(t, c) : PROGRESS_WAIT;
    c->resting = false;
    uint64_t began = counts ? thread_cpu_ns() : 0;
    progress result = progress_once(t, c);
    reads = reads || is_reading(c);
    if (counts && !reads)
        peer_charge(t->server, c->from, thread_cpu_ns() - began);
    else if (counts && peer_send_is_counted(t->server, c->from))
        peer_charge_send(t->server, c->from, thread_cpu_ns() - began);
    return c->out.bytes.failed ? PROGRESS_CLOSE : result;
}
