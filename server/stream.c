/* SPDX-License-Identifier: Apache-2.0 */
/* The data thread: answers reads with bytes straight from the tensors' memory. Sockets are
   watched edge-triggered; connections that can do something are in a queue and take turns
   of at most one frame or one sendmsg each. */
#include "stream_job.h"

#include "error_set.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define INPUT_MOST (FRAME_SIZE + LIMIT_READ_REQUEST)
#define INPUT_FIRST 4096
#define SOCKET_ROOM (512 << 10) /**< of a Unix socket; the kernel doubles it */
#define BURST_LEAST ((size_t)128 << 10)
#define EVENTS 64

typedef enum turn_result { TURN_MORE, TURN_WAIT, TURN_CLOSE } turn_result;

typedef struct connection {
    int fd;
    reader *reader;
    peer_count *counted;
    char peer[64];
    bool can_read, can_write, queued;
    bool closing; /**< an error is on its way; nothing is read any more */
    bool shut;    /**< ... and it has left */
    buffer input, output;
    size_t used, sent;   /**< of input, of output */
    size_t memory;       /**< counted */
    size_t burst;        /**< what the socket is likely to take at once */
    deadline stalled_at; /**< when to give the peer up; UINT64_MAX: it owes nothing */
    job job;
    struct connection *next, *next_queued;
} connection;

struct stream {
    fanin_server *server;
    pthread_t thread;
    int epoll, event;
    atomic_bool quit;
    connection *connections;  /**< the thread's */
    connection *first, *last; /**< the queue */
    read_entry *entries;      /**< LIMIT_READ_ENTRIES */
    gather gather;
    pthread_mutex_t lock;
    connection *arriving; /**< guarded by lock */
};

/* ----------------------------------------------------------- connections */

static void enqueue(struct stream *t, connection *c)
{
    if (c->queued)
        return;
    c->queued = true;
    c->next_queued = NULL;
    if (t->last)
        t->last->next_queued = c;
    else
        t->first = c;
    t->last = c;
}

static void connection_free(struct stream *t, connection *c)
{
    fanin_server *s = t->server;
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

/* Takes it out of the list; it must not be in the queue. */
static void connection_close(struct stream *t, connection *c)
{
    connection **link = &t->connections;
    while (*link != c)
        link = &(*link)->next;
    *link = c->next;
    connection_free(t, c);
}

static bool account(struct stream *t, connection *c)
{
    size_t now =
        sizeof *c + c->input.capacity + c->output.capacity + job_memory(&c->job);
    return memory_account(t->server, &c->memory, now);
}

bool stream_adopt(fanin_server *s, const handover *h)
{
    struct stream *t = s->stream;
    connection *c = calloc(1, sizeof *c);
    if (!c)
        return false;
    c->fd = h->fd;
    c->reader = h->reader;
    c->counted = h->counted;
    memcpy(c->peer, h->peer, sizeof c->peer);
    c->input = h->input;
    c->output = h->output;
    c->burst = BURST_LEAST;
    c->stalled_at = UINT64_MAX;
    c->can_read = c->can_write = true;
    pthread_mutex_lock(&t->lock);
    c->next = t->arriving;
    t->arriving = c;
    pthread_mutex_unlock(&t->lock);
    stream_wake(s);
    return true;
}

static void welcome(struct stream *t)
{
    pthread_mutex_lock(&t->lock);
    connection *arriving = t->arriving;
    t->arriving = NULL;
    pthread_mutex_unlock(&t->lock);
    while (arriving) {
        connection *c = arriving;
        arriving = c->next;
        /* What a Unix socket holds is fixed and small; TCP tunes itself. */
        int room = SOCKET_ROOM;
        if (socket_peer_credentials(c->fd, NULL, NULL))
            (void)setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                                    .data.ptr = c};
        bool good =
            account(t, c) && epoll_ctl(t->epoll, EPOLL_CTL_ADD, c->fd, &event) == 0;
        c->next = t->connections;
        t->connections = c;
        if (good)
            enqueue(t, c);
        else
            connection_close(t, c);
    }
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
static turn_result reject(struct stream *t, connection *c, uint64_t request,
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

static void refuse_read(struct stream *t, connection *c, uint64_t request,
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

static turn_result start_read(struct stream *t, connection *c, const frame *f, body *in)
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
    if (!account(t, c)) {
        job_end(&c->job);
        return reject(t, c, f->request, FANIN_ERR_LIMIT,
                      "the server's connections have all the memory they may");
    }
    encode_read_ok(&c->output, f->request, (uint32_t)m.bytes);
    return TURN_MORE;
}

static turn_result handle_frame(struct stream *t, connection *c, const frame *f,
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

static turn_result receive(struct stream *t, connection *c, size_t need)
{
    if (!c->can_read)
        return TURN_WAIT;
    if (!make_room(c, need))
        return TURN_CLOSE;
    if (!account(t, c))
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

static turn_result next_frame(struct stream *t, connection *c)
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

static turn_result send_some(struct stream *t, connection *c)
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

static turn_result take_turn(struct stream *t, connection *c)
{
    if (c->output.size > c->sent || c->job.left > 0)
        return c->can_write ? send_some(t, c) : TURN_WAIT;
    return c->closing ? discard(c) : next_frame(t, c);
}

/* ----------------------------------------------------------------- thread */

/* One turn for everybody that is in the queue now. */
static void run_queue(struct stream *t)
{
    connection *c = t->first;
    t->first = t->last = NULL;
    while (c) {
        connection *next = c->next_queued;
        c->queued = false;
        switch (take_turn(t, c)) {
        case TURN_MORE:
            enqueue(t, c);
            break;
        case TURN_WAIT:
            break;
        case TURN_CLOSE:
            connection_close(t, c);
            break;
        }
        c = next;
    }
}

/* Closes who has not moved for too long; when to look again. The queue is empty. */
static deadline sweep(struct stream *t)
{
    deadline soonest = UINT64_MAX;
    for (connection *c = t->connections, *next; c; c = next) {
        next = c->next;
        if (c->stalled_at == UINT64_MAX || !deadline_passed(c->stalled_at)) {
            soonest = deadline_sooner(soonest, c->stalled_at);
            continue;
        }
        if (!c->closing)
            log_write(&t->server->log, FANIN_LOG_WARNING, "data-stalled",
                      "%s took no bytes for %d s and is dropped", c->peer,
                      STALL_MS / 1000);
        connection_close(t, c);
    }
    return soonest;
}

/* Connections end with their session: their next turn finds the socket shut. */
static void drop_orphans(struct stream *t)
{
    fanin_server *s = t->server;
    pthread_mutex_lock(&s->lock);
    for (connection *c = t->connections; c; c = c->next) {
        if (!c->reader->closed)
            continue;
        shutdown(c->fd, SHUT_RDWR);
        c->can_read = c->can_write = true;
        enqueue(t, c);
    }
    pthread_mutex_unlock(&s->lock);
}

static void *run(void *cookie)
{
    struct stream *t = cookie;
    struct epoll_event events[EVENTS];
    while (!atomic_load(&t->quit)) {
        int timeout = t->first ? 0 : deadline_poll_ms(sweep(t));
        int n = epoll_wait(t->epoll, events, EVENTS, timeout);
        for (int i = 0; i < n; i++) {
            connection *c = events[i].data.ptr;
            if (!c) {
                eventfd_t count;
                (void)eventfd_read(t->event, &count);
                welcome(t);
                drop_orphans(t);
                continue;
            }
            c->can_read = c->can_read || events[i].events & (EPOLLIN | EPOLLRDHUP |
                                                             EPOLLHUP | EPOLLERR);
            c->can_write = c->can_write || events[i].events & (EPOLLOUT | EPOLLERR);
            enqueue(t, c);
        }
        run_queue(t);
    }
    return NULL;
}

void stream_wake(fanin_server *s)
{
    (void)eventfd_write(s->stream->event, 1);
}

static void stream_free(struct stream *t)
{
    if (t->epoll >= 0)
        close(t->epoll);
    if (t->event >= 0)
        close(t->event);
    pthread_mutex_destroy(&t->lock);
    free(t->entries);
    free(t->gather.bounce);
    free(t);
}

fanin_status stream_create(fanin_server *s, fanin_error *error)
{
    struct stream *t = calloc(1, sizeof *t);
    if (!t)
        return error_set_memory(error);
    t->server = s;
    pthread_mutex_init(&t->lock, NULL);
    t->epoll = epoll_create1(EPOLL_CLOEXEC);
    t->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->entries = malloc(LIMIT_READ_ENTRIES * sizeof *t->entries);
    t->gather.bounce = malloc(SEND_MOST);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    fanin_status status = FANIN_OK;
    if (!t->entries || !t->gather.bounce)
        status = error_set_memory(error);
    else if (t->epoll < 0 || t->event < 0 ||
             epoll_ctl(t->epoll, EPOLL_CTL_ADD, t->event, &event) != 0)
        status = error_set_errno(error, FANIN_ERR_IO, errno, NULL,
                                 "cannot set up the data thread");
    else
        status = thread_start(&t->thread, "fanin-data", run, t, error);
    if (status != FANIN_OK) {
        stream_free(t);
        return status;
    }
    s->stream = t;
    return FANIN_OK;
}

void stream_destroy(fanin_server *s)
{
    struct stream *t = s->stream;
    if (!t)
        return;
    atomic_store(&t->quit, true);
    stream_wake(s);
    pthread_join(t->thread, NULL);
    welcome(t);
    t->first = t->last = NULL;
    while (t->connections)
        connection_close(t, t->connections);
    stream_free(t);
    s->stream = NULL;
}
