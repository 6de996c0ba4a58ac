/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link_internal.h"

#include "convert.h"
#include "device/devices.h"
#include "error_set.h"
#include "net/connection.h"
#include "net/trust.h"
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Read from one connection before others get a turn. */
#define TURN_BYTES ((size_t)4 << 20)
/* By TCP on one host a reply more than the one that is coming: nothing has a way to go, and what
   the kernel holds beyond that has left the CPU's caches when it is read. Over Unix sockets it
   holds no more in any case. */
#define LOCAL_READS 2

static void on_data_ready(loop_source *source, uint32_t events);
static void on_chunk(sink_waiter *waiter);

/* ------------------------------------------------------------- life cycle */

static void close_data(data_connection *d)
{
    device_sink_unwait(&d->waiter);
    if (d->job)
        sink_job_give(d->job);
    d->job = NULL;
    if (d->source.fd >= 0) {
        loop_remove(d->loop, &d->source);
        close(d->source.fd);
    }
    d->source.fd = -1;
    tls_free(&d->tls);
    outgoing_free(&d->out);
    framing_free(&d->in);
    checksum_free(d->sum);
    d->sum = NULL;
    free(d->staging);
    d->staging = NULL;
}

static fanin_status open_data_connection(const stream_link *link, data_connection *d,
                                         fanin_error *error)
{
    if (link->sealed && !(d->sum = checksum_create()))
        return error_set_memory(error);
    int fd;
    fanin_status status = socket_connect_start(&link->control->in_use, &fd, error);
    if (status != FANIN_OK)
        return status;
    d->source.fd = fd;
    d->source.events = EPOLLOUT;
    d->made_by = deadline_in_ms(link->client->config.connect_timeout_ms);
    framing_start(&d->in, LIMIT_READ_BYTES);
    d->in.exact = true;
    connection_encode_data_hello(link->control, &d->out.bytes, &d->in);
    d->requests = 1; /* the hello */
    d->out.bytes.sealed = link->sealed;
    bool failed = d->out.bytes.failed || d->in.bytes.failed;
    return failed ? error_set_memory(error) : loop_add(d->loop, &d->source, error);
}

static void free_data(data_connection **d)
{
    if (*d)
        close_data(*d);
    free(*d);
    *d = NULL;
}

fanin_status stream_link_widen(stream_link *link, unsigned count, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (link->n < count && link->control->state != CONNECTION_READY)
        return error_copy(error, &link->control->fault);
    while (link->n < count && status == FANIN_OK) {
        data_connection *d = link->connections[link->n] = calloc(1, sizeof *d);
        if (!d)
            return error_set_memory(error);
        d->link = link;
        d->loop = &link->client->loop;
        d->source = (loop_source){.fd = -1, .ready = on_data_ready};
        d->waiter.ready = on_chunk;
        d->end_job = &d->first_job;
        status = open_data_connection(link, d, error);
        if (status == FANIN_OK)
            link->n++;
        else
            free_data(&link->connections[link->n]);
    }
    return status;
}

fanin_status stream_link_create(fanin_client *client, const connection *control,
                                unsigned count, stream_link **out, fanin_error *error)
{
    stream_link *link = calloc(1, sizeof *link);
    if (!link)
        return error_set_memory(error);
    link->client = client;
    link->control = control;
    link->end = connection_tls(control);
    link->sealed = control->in.sealed;
    bool by_name = control->in_use.storage.ss_family == AF_UNIX;
    link->reads = control->local && !by_name ? LOCAL_READS : QUEUE;
    fanin_status status = stream_link_widen(link, count, error);
    if (status != FANIN_OK)
        stream_link_destroy(&link);
    *out = link;
    return status;
}

void stream_link_destroy(stream_link **link)
{
    if (!*link)
        return;
    (void)stream_link_stop(*link);
    for (unsigned i = 0; i < (*link)->n; i++)
        free_data(&(*link)->connections[i]);
    free(*link);
    *link = NULL;
}

unsigned stream_link_count(const stream_link *link)
{
    return link->n;
}

bool stream_link_is_whole(const stream_link *link)
{
    bool whole = true;
    for (unsigned i = 0; i < link->n; i++)
        whole = whole && link->connections[i]->source.fd >= 0;
    return whole;
}

static bool is_made(const data_connection *d)
{
    return d->source.fd >= 0 && d->stage >= IDLE_OR_FRAME;
}

bool stream_link_is_made(const stream_link *link)
{
    bool made = false;
    for (unsigned i = 0; i < link->n; i++)
        made = made || is_made(link->connections[i]);
    return made;
}

static fanin_status move(data_connection *d, loop *to, fanin_error *error)
{
    if (d->loop == to)
        return FANIN_OK;
    loop *from = d->loop;
    d->loop = to;
    if (d->source.fd < 0)
        return FANIN_OK;
    loop_remove(from, &d->source);
    fanin_status status = loop_add(to, &d->source, error);
    if (status != FANIN_OK)
        close_data(d);
    return status;
}

fanin_status stream_link_deal(stream_link *link, unsigned index, stream_share *share,
                              fanin_error *error)
{
    link->connections[index]->share = share;
    return move(link->connections[index], share->loop, error);
}

void stream_link_gather(stream_link *link)
{
    for (unsigned i = 0; i < link->n; i++)
        (void)move(link->connections[i], &link->client->loop, NULL);
}

/* What devices still do for a connection is waited for; the rest is dropped. */
static void recall(data_connection *d, device_sink *devices)
{
    device_sink_unwait(&d->waiter);
    d->paused = false;
    if (d->job)
        sink_job_give(d->job);
    d->job = NULL;
    for (sink_job *job = d->first_job, *next; job; job = next) {
        next = job->next;
        if (job->finished) /* it waited for one before it */
            sink_job_give(job);
    }
    (void)device_sink_recall(devices, d);
    d->first_job = NULL;
    d->end_job = &d->first_job;
}

bool stream_link_stop(stream_link *link)
{
    bool idle = true, failed = link->work && link->work->failed;
    unsigned n = 0;
    for (unsigned i = 0; i < link->n; i++) {
        data_connection *d = link->connections[i];
        bool given_up = d->source.fd < 0 && d->stage < IDLE_OR_FRAME && !failed;
        if (link->work && link->work->devices)
            recall(d, link->work->devices);
        d->share = NULL;
        /* One that is still being made goes on in the client's loop. */
        bool rests =
            d->stage == IDLE_OR_FRAME ? d->queued == 0 : d->stage < IDLE_OR_FRAME;
        idle = idle && (given_up || (d->source.fd >= 0 && rests));
        if (given_up)
            free_data(&link->connections[i]);
        else
            link->connections[n++] = d;
    }
    link->n = n;
    link->work = NULL;
    return idle;
}

/* ---------------------------------------------------------------- failures */

void stream_work_fail(stream_work *work, const fanin_error *why)
{
    if (atomic_exchange(&work->failing, true))
        return;
    error_copy(&work->error, why);
    work->failed = true; /* last: from here on others look at the error */
}

/* @p remedy: NULL or "": what the status suggests. */
static void fail_work(const stream_link *link, fanin_status status, int sys_errno,
                      const char *what, const char *remedy)
{
    stream_work *w = link->work;
    fanin_error why = FANIN_ERROR_INIT;
    if (!w || w->failed)
        return;
    error_place place = connection_place(link->control, "read");
    uint32_t rank = link->control->peer.rank;
    const char *text = link->control->text;
    place.sys_errno = sys_errno;
    if (remedy && remedy[0])
        place.remedy = remedy;
    else if (sys_errno == EBADMSG) /* whose own words tell nothing */
        place.remedy = WAY_REMEDY;
    else if (status == FANIN_ERR_UNREACHABLE)
        place.remedy = STOPPED_REMEDY;
    if (status == FANIN_ERR_MEMORY)
        error_set_memory(&why); /* nobody else's fault */
    else if (sys_errno && sys_errno != EBADMSG)
        error_set_errno(&why, status, sys_errno, &place, "rank %u at %s %s", rank, text,
                        what);
    else
        error_set(&why, status, &place, "rank %u at %s %s", rank, text, what);
    stream_work_fail(w, &why);
}

/* The sink's failure is the work's: it says which device. */
static void fail_work_by_device(const stream_link *link)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (link->work && device_sink_failed(link->work->devices, &why))
        stream_work_fail(link->work, &why);
}

void data_lose(data_connection *d, fanin_status status, int sys_errno, const char *what)
{
    fail_work(d->link, status, sys_errno, what, NULL);
    close_data(d);
}

static void lose_by_fault(data_connection *d, int sys_errno, const secure_fault *why)
{
    fail_work(d->link, why->status, sys_errno, why->what, why->remedy);
    close_data(d);
}

/* Neither sending nor receiving goes on; 0: the rank has closed it. */
static void lose_broken(data_connection *d, int sys_errno)
{
    secure_fault why;
    if (secure_refused(d->tls, &why))
        lose_by_fault(d, 0, &why);
    else if (secure_broken(d->tls, &why))
        lose_by_fault(d, EBADMSG, &why);
    else
        data_lose(d, FANIN_ERR_CLOSED, sys_errno,
                  sys_errno ? "broke a data connection" : "closed a data connection");
}

void data_lose_device(data_connection *d)
{
    fail_work_by_device(d->link);
    close_data(d);
}

/* ----------------------------------------------------------------- sending */

void data_want(data_connection *d)
{
    uint32_t events = d->paused ? 0 : EPOLLIN;
    /* What TLS has received already the socket does not tell: its room wakes the loop. */
    bool has_come = !d->paused && tls_pending(d->tls);
    if (!outgoing_is_empty(&d->out) || tls_unsent(d->tls) > 0 || has_come)
        events |= EPOLLOUT;
    loop_want(d->loop, &d->source, events);
}

static void flush_requests(data_connection *d)
{
    int failed = outgoing_flush(&d->out, d->tls, d->source.fd);
    if (failed)
        lose_broken(d, failed);
    else
        data_want(d);
}

/* What a request holds of the share's window: a reply's bytes. */
static uint64_t window_of(const stream_work *w, const read_request *r)
{
    return w->digested ? r->n_entries * DIGEST_SIZE : r->bytes;
}

/* The next request that nobody has sent. False: there is none, or no room in the share's window for
   it. */
static bool take_request(stream_work *w, stream_share *share, uint64_t *out)
{
    uint64_t next = w->next_request, bytes;
    do {
        if (w->failed || next == w->list->n_requests)
            return false;
        bytes = window_of(w, &w->list->requests[next]);
        if (share->inflight > 0 && share->inflight + bytes > share->max_inflight)
            return false;
    } while (!atomic_compare_exchange_weak(&w->next_request, &next, next + 1));
    share->inflight += bytes;
    *out = next;
    return true;
}

static void ask_digest(data_connection *d, const read_request *r, msg_read *m)
{
    const stream_work *w = d->link->work;
    const piece *p = &w->pieces->pieces[r->first_piece];
    if (p->view && w->plan->views[p->view - 1].convert != CONVERT_NONE)
        m->dtype = w->dtype;
    encode_digest(&d->out.bytes, ++d->requests, m);
}

/* A read of some of the entries, or of what they spread to. */
static void ask_bytes(data_connection *d, const read_request *r, msg_read *m)
{
    const stream_work *w = d->link->work;
    read_entry *spread = NULL;
    if (r->spread && !(spread = malloc(r->n_entries * sizeof *spread))) {
        d->out.bytes.failed = true;
        return;
    }
    if (spread) {
        read_list_spread(w->list, r, w->plan, w->pieces, spread);
        m->entries = spread;
    }
    encode_read(&d->out.bytes, ++d->requests, m);
    free(spread);
}

static void pump(data_connection *d)
{
    stream_work *w = d->link->work;
    if (!w || !w->list || d->source.fd < 0 || d->stage < IDLE_OR_FRAME)
        return;
    bool added = false;
    uint64_t index;
    unsigned most = w->digested ? QUEUE : d->link->reads;
    while (d->queued < most && take_request(w, d->share, &index)) {
        const read_request *r = &w->list->requests[index];
        msg_read m = {.bytes = r->bytes,
                      .entries = &w->list->entries[r->first_entry],
                      .n_entries = r->n_entries};
        memcpy(m.token, w->token, sizeof m.token);
        if (w->digested)
            ask_digest(d, r, &m);
        else
            ask_bytes(d, r, &m);
        d->queue[d->queued++] = index;
        added = true;
    }
    if (d->out.bytes.failed)
        data_lose(d, FANIN_ERR_MEMORY, 0, "cannot be asked: out of memory");
    else if (added)
        flush_requests(d);
}

void stream_link_look(stream_link *link, const stream_share *share, deadline *wake)
{
    for (unsigned i = 0; i < link->n; i++) {
        data_connection *d = link->connections[i];
        if (d->share != share || d->source.fd < 0 || d->stage >= IDLE_OR_FRAME)
            continue;
        if (!deadline_passed(d->made_by))
            *wake = deadline_sooner(*wake, d->made_by);
        else if (atomic_fetch_add(&link->work->given_up, 1) + 1 < link->n)
            close_data(d); /* nothing was asked by it, and others go on */
        else
            data_lose(d, FANIN_ERR_UNREACHABLE, 0,
                      "has not answered a data connection in time");
    }
}

void stream_link_pump(stream_link *link, const stream_share *share)
{
    for (unsigned i = 0; i < link->n; i++) {
        if (link->connections[i]->share == share)
            pump(link->connections[i]);
    }
}

void stream_link_start(stream_link *link, stream_work *work, stream_share *share)
{
    link->work = work;
    if (work->devices && !device_sink_attach(work->devices, &link->client->loop,
                                             &link->client->devices->memory))
        fail_work_by_device(link);
    for (unsigned i = 0; i < link->n; i++) {
        data_connection *d = link->connections[i];
        d->share = d->share ? d->share : share;
        work->made += is_made(d);
        pump(d);
    }
}

/* --------------------------------------------------------------- receiving */

/* A request's bytes are where they belong, or in a job. */
static void count_request(data_connection *d, uint64_t bytes)
{
    stream_work *w = d->link->work;
    sink_job *job = d->job;
    for (sink_job *j = d->first_job; j && !d->job; j = j->next)
        job = j; /* the last that was submitted */
    if (d->on_device && job) {
        job->requests++;
        job->bytes += bytes;
    } else {
        w->bytes += bytes;
        w->done_requests++; /* last: another thread takes the bytes' number when all are done */
    }
}

/* The oldest request is answered. Its bytes. */
static uint64_t end_request(data_connection *d)
{
    stream_work *w = d->link->work;
    const read_request *r = &w->list->requests[d->queue[0]];
    d->queued--;
    memmove(d->queue, d->queue + 1, d->queued * sizeof *d->queue);
    d->stage = IDLE_OR_FRAME;
    d->share->inflight -= window_of(w, r);
    return r->bytes;
}

/* The oldest request is answered, and what came is what was sent. */
static void finish_request(data_connection *d)
{
    stream_work *w = d->link->work;
    count_request(d, end_request(d));
    pump(d);
    /* A chunk with room is kept for what is coming, unless others want one. */
    if (d->job && d->job->n_items > 0 &&
        (d->queued == 0 || device_sink_is_short(w->devices)))
        batch_submit(d);
}

void data_landed(sink_job *job, bool ok)
{
    data_connection *d = job->owner;
    stream_work *w = d->link->work;
    job->finished = true;
    while (d->first_job && d->first_job->finished) {
        sink_job *first = d->first_job;
        d->first_job = first->next;
        if (!d->first_job)
            d->end_job = &d->first_job;
        if (ok) {
            w->bytes += first->bytes;
            w->done_requests += first->requests;
        }
        sink_job_give(first);
    }
    if (!ok)
        fail_work_by_device(d->link);
}

/* A chunk may be free. */
static void on_chunk(sink_waiter *waiter)
{
    data_connection *d =
        (data_connection *)((char *)waiter - offsetof(data_connection, waiter));
    d->paused = false;
    data_want(d);
}

/* recv/readv with the usual cases; 0: nothing now or the connection is gone. */
static size_t receive_frames(data_connection *d, struct iovec *iov, unsigned n)
{
    for (;;) {
        ssize_t got = tls_receive_into(d->tls, d->source.fd, iov, (int)n);
        if (got > 0)
            return (size_t)got;
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        lose_broken(d, got < 0 ? errno : 0);
        return 0;
    }
}

static void lose_seal(data_connection *d)
{
    data_lose(d, FANIN_ERR_TRANSPORT, EBADMSG,
              "sent weights that did not come as they were sent: a checksum does not "
              "fit");
}

/* What has just come, while the CPU's caches have it. */
static void sum_received(data_connection *d, size_t bytes)
{
    for (unsigned i = d->at_iov; bytes > 0; i++) {
        size_t size = d->iov[i].iov_len < bytes ? d->iov[i].iov_len : bytes;
        checksum_add(d->sum, d->iov[i].iov_base, size);
        bytes -= size;
    }
}

static size_t receive_body(data_connection *d)
{
    if (d->at_iov == d->n_iov && !batch_fill(d))
        return 0;
    size_t got = receive_frames(d, d->iov + d->at_iov, d->n_iov - d->at_iov);
    if (got == 0)
        return 0;
    if (d->link->sealed)
        sum_received(d, got);
    batch_consume(d, got);
    if (d->iov_left > 0 || d->piece < d->pieces_end)
        return got;
    if (d->link->sealed)
        d->stage = SEAL;
    else
        finish_request(d);
    return got;
}

static void take_seal(data_connection *d)
{
    uint8_t seal[SEAL_SIZE];
    if (framing_take_seal(&d->in, seal) == FRAMING_MORE)
        return;
    if (seal_fits(checksum_get(d->sum), seal))
        finish_request(d);
    else
        lose_seal(d);
}

/* What a rank's boxes digest to. */
static void take_digests(data_connection *d, body *b)
{
    stream_work *w = d->link->work;
    const read_request *r = &w->list->requests[d->queue[0]];
    msg_digest_ok m;
    if (decode_digest_ok(b, &m) != FANIN_OK ||
        m.digests.size != (size_t)r->n_entries * 16) {
        data_lose(d, FANIN_ERR_PROTOCOL, 0, "sent digests that do not fit the request");
        return;
    }
    if (!w->digested(w->digested_cookie, d->queue[0], m.digests.data)) {
        data_lose(d, w->error.status, 0, "sent other digests"); /* w has said why */
        return;
    }
    d->on_device = false;
    finish_request(d);
}

static bool is_unix(const data_connection *d)
{
    return d->link->control->in_use.storage.ss_family == AF_UNIX;
}

/* Without TLS: nobody else has come to the rank's address. False: it is lost. */
static bool is_trusted(data_connection *d)
{
    secure_fault why;
    bool trusted = connection_trusts(d->link->control, d->source.fd, &why);
    if (!trusted)
        lose_by_fault(d, 0, &why);
    return trusted;
}

/* False: it does not prove what it says of itself, and is lost. */
static bool is_link_proven(data_connection *d, const msg_hello_ok *said)
{
    secure_fault why;
    if (!d->tls && !is_unix(d))
        return is_trusted(d);
    if (secure_proven(d->tls, said))
        return true;
    secure_explain_unproven(d->tls, said, &why);
    lose_by_fault(d, 0, &why);
    return false;
}

/* It is the rank of the control connection. False: it is not, and is lost. */
static bool is_same_rank(data_connection *d, const msg_hello_ok *hello)
{
    msg_hello_ok rank = d->link->control->peer;
    if (memcmp(hello->incarnation, rank.incarnation, sizeof rank.incarnation) != 0) {
        data_lose(d, FANIN_ERR_CLOSED, 0, "has another server at its address now");
        return false;
    }
    rank.proof = hello->proof;
    if (!is_link_proven(d, &rank))
        return false;
    bool same = memcmp(hello->world_id, rank.world_id, sizeof rank.world_id) == 0 &&
                memcmp(hello->session, rank.session, sizeof rank.session) == 0 &&
                hello->rank == rank.rank && hello->world_size == rank.world_size;
    if (!same)
        data_lose(d, FANIN_ERR_PROTOCOL, 0,
                  "answers a data connection as another world's, rank's or session's");
    return same;
}

/* What a rank says of a read, or of the connection. */
static void lose_by_rank(data_connection *d, uint64_t request, const msg_error *m)
{
    /* About no request, it says that of what came to it only. */
    bool altered = d->link->sealed && request == 0 && m->code == FANIN_ERR_TRANSPORT;
    fail_work(d->link, m->code < 0 ? m->code : FANIN_ERR_PROTOCOL,
              altered ? EBADMSG : 0, m->message, m->remedy);
    close_data(d);
}

/* A hello's answer, digests or an error. */
static void take_text(data_connection *d, framed *got)
{
    msg_hello_ok hello;
    msg_error m;
    if (d->stage == HELLO && got->head.type == MSG_HELLO_OK &&
        decode_hello_ok(&got->body, &hello) == FANIN_OK) {
        if (d->link->sealed && !(hello.features & FEATURE_SEALS)) {
            data_lose(d, FANIN_ERR_PROTOCOL, 0,
                      "gives no checksums on a data connection");
            return;
        }
        if (!is_same_rank(d, &hello))
            return;
        d->stage = IDLE_OR_FRAME;
        if (d->link->work)
            d->link->work->made++;
        pump(d);
    } else if (d->stage != HELLO && got->head.type == MSG_DIGEST_OK) {
        take_digests(d, &got->body);
    } else if (got->head.type == MSG_ERROR &&
               decode_error(&got->body, &m) == FANIN_OK) {
        lose_by_rank(d, got->head.request, &m);
    } else {
        data_lose(d, FANIN_ERR_PROTOCOL, 0,
                  "sent a malformed reply on a data connection");
    }
}

static bool is_expected(const data_connection *d, const frame *f)
{
    const stream_work *w = d->link->work;
    if (d->stage == HELLO || f->type == MSG_ERROR)
        return f->length <= LIMIT_REPLY;
    if (!w || d->queued == 0 || f->request != d->requests - d->queued + 1)
        return false;
    if (w->digested)
        return f->type == MSG_DIGEST_OK && f->length <= LIMIT_REPLY;
    return f->type == MSG_READ_OK && f->length == w->list->requests[d->queue[0]].bytes;
}

/* What the oldest request asked for goes straight to its places. */
static void begin_body(data_connection *d)
{
    uint8_t header[FRAME_SIZE];
    framing_take_header(&d->in, header);
    batch_begin(d);
    if (!d->link->sealed)
        return;
    checksum_reset(d->sum);
    checksum_add(d->sum, header, FRAME_SIZE);
}

static void take_frame(data_connection *d)
{
    static const char unfit[] = "sent a reply that does not fit the read";
    framed got;
    framing_result result = framing_peek(&d->in, &got);
    if (result == FRAMING_WHOLE && !is_expected(d, &got.head)) {
        data_lose(d, FANIN_ERR_PROTOCOL, 0, unfit);
        return;
    }
    if (result == FRAMING_WHOLE && d->stage != HELLO && got.head.type == MSG_READ_OK) {
        begin_body(d);
        return;
    }
    if (result == FRAMING_WHOLE)
        result = framing_take(&d->in, &got);
    if (result == FRAMING_WHOLE)
        take_text(d, &got);
    else if (result == FRAMING_BAD && got.status == FANIN_ERR_TRANSPORT)
        lose_seal(d);
    else if (result == FRAMING_BAD)
        data_lose(d, FANIN_ERR_PROTOCOL, 0,
                  got.head.length > LIMIT_READ_BYTES ? unfit : got.why);
}

static size_t read_frame(data_connection *d)
{
    struct iovec iov;
    iov.iov_base = framing_room(&d->in, &iov.iov_len);
    if (!iov.iov_base) {
        data_lose(d, FANIN_ERR_MEMORY, 0, "sent what memory does not suffice for");
        return 0;
    }
    size_t got = receive_frames(d, &iov, 1);
    framing_add(&d->in, got);
    if (got > 0 && d->stage == SEAL)
        take_seal(d);
    else if (got > 0)
        take_frame(d);
    return got;
}

static void on_readable(data_connection *d)
{
    size_t turn = 0, got;
    do {
        got = d->stage == BODY ? receive_body(d) : read_frame(d);
        turn += got;
    } while (got > 0 && turn < TURN_BYTES && d->source.fd >= 0);
    if (d->source.fd >= 0 && d->tls)
        data_want(d);
}

/* As the control connection was when this one was begun: that may be lost since. False: it goes on
   later, or the connection is gone. */
static bool is_link_secured(data_connection *d)
{
    secure_fault why;
    const tls_end *end = d->link->end;
    if (!end)
        return true;
    if (!d->tls && !(d->tls = tls_new(end, d->source.fd))) {
        data_lose(d, FANIN_ERR_MEMORY, 0, "cannot be secured: out of memory");
        return false;
    }
    if (d->link->control->peer.relay)
        tls_expect_relay(d->tls);
    tls_step step = tls_handshake(d->tls);
    if (step == TLS_WAIT) {
        data_want(d);
    } else if (step == TLS_FAILED) {
        secure_explain(d->tls, &why);
        lose_by_fault(d, 0, &why);
    }
    return step == TLS_UP;
}

static void on_data_ready(loop_source *source, uint32_t events)
{
    data_connection *d = (data_connection *)source;
    if (d->stage == CONNECTING) {
        int failed = socket_connect_result(source->fd);
        if (failed) {
            data_lose(d, FANIN_ERR_UNREACHABLE, failed, "refuses data connections");
            return;
        }
        if (!d->tls)
            socket_tune(source->fd);
        if (!is_link_secured(d) || (is_unix(d) && !is_trusted(d)))
            return;
        d->stage = HELLO;
        flush_requests(d);
        return;
    }
    if (events & EPOLLOUT)
        flush_requests(d);
    if (d->source.fd >= 0 &&
        (events & (EPOLLIN | EPOLLHUP | EPOLLERR) || tls_pending(d->tls)))
        on_readable(d);
}
