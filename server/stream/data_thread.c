/* SPDX-License-Identifier: Apache-2.0 */
/* The data threads: which of them gets a connection, and what it does with it. A connection stays
   with its thread until it is closed. Sockets are watched edge-triggered; connections that can do
   something are in a queue and take turns of at most one frame or one sendmsg each. */
#include "wake.h"
#include "core/server_state.h"
#include "error_set.h"
#include "guests/peer.h"
#include "stream/data_connection.h"
#include "thread.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define SOCKET_ROOM (512 << 10) /**< if it stays on this host; the kernel doubles it */
#define EVENTS 64
#define EVENTS_WANTED (EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)
#define TURNS 64
#define SWEEP_MS 1000 /**< deadlines are looked at, if the queue is never empty */

typedef LIST_HEAD(list, connection) list;
typedef TAILQ_HEAD(queue, connection) queue;

typedef struct data_thread {
    stream_tools tools;
    pthread_t thread;
    int epoll, wake;
    atomic_bool quit;
    atomic_uint load;  /**< connections, those on their way included */
    list connections;  /**< the thread's */
    queue own, others; /**< of the own user, and of those who must not delay it */
    peer_turns resting;
    pthread_mutex_t lock;
    list arriving; /**< guarded by lock */
} data_thread;

struct stream {
    kept_digests *kept; /**< of all threads */
    atomic_uint n;      /* the control thread adds to it, any thread looks */
    data_thread *threads[];
};

/* ----------------------------------------------------------- connections */

static queue *queue_of(data_thread *t, const connection *c)
{
    return c->from->is_own ? &t->own : &t->others;
}

static void enqueue(data_thread *t, connection *c)
{
    if (!c->is_queued)
        TAILQ_INSERT_TAIL(queue_of(t, c), c, queued);
    c->is_queued = true;
}

static void dequeue(data_thread *t, connection *c)
{
    if (c->is_queued)
        TAILQ_REMOVE(queue_of(t, c), c, queued);
    c->is_queued = false;
}

static bool is_idle(const data_thread *t)
{
    return TAILQ_EMPTY(&t->own) && TAILQ_EMPTY(&t->others);
}

/* Takes it out of list and queue. */
static void connection_close(data_thread *t, connection *c)
{
    dequeue(t, c);
    LIST_REMOVE(c, link);
    if (c->turn.waits)
        turns_leave(&t->resting, &c->turn);
    epoll_ctl(t->epoll, EPOLL_CTL_DEL, c->fd, NULL);
    atomic_fetch_sub(&t->load, 1);
    peer_log_broken(t->tools.server, c->from, c->peer, c->tls);
    connection_free(&t->tools, c);
}

static bool data_thread_adopt(data_thread *t, const handover *h)
{
    connection *c = connection_make(h);
    if (!c)
        return false;
    atomic_fetch_add(&t->load, 1);
    pthread_mutex_lock(&t->lock);
    LIST_INSERT_HEAD(&t->arriving, c, link);
    pthread_mutex_unlock(&t->lock);
    wake_up(t->wake);
    return true;
}

static void accept_handovers(data_thread *t)
{
    pthread_mutex_lock(&t->lock);
    list arriving = t->arriving;
    LIST_INIT(&t->arriving);
    pthread_mutex_unlock(&t->lock);
    for (connection *c = LIST_FIRST(&arriving), *next; c; c = next) {
        next = LIST_NEXT(c, link);
        /* What a Unix socket holds is fixed and small. TCP tunes itself to networks; on one host
           more only has left the CPU's caches before it is read. */
        int room = SOCKET_ROOM;
        if (socket_stays_here(c->fd))
            (void)setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        struct epoll_event event = {.events = EVENTS_WANTED, .data.ptr = c};
        bool good = connection_account(t->tools.server, c) &&
                    epoll_ctl(t->epoll, EPOLL_CTL_ADD, c->fd, &event) == 0;
        LIST_INSERT_HEAD(&t->connections, c, link);
        if (good)
            enqueue(t, c);
        else
            connection_close(t, c);
    }
}

/* ----------------------------------------------------------------- thread */

static void note_events(connection *c, uint32_t events)
{
    const uint32_t ends = EPOLLRDHUP | EPOLLHUP | EPOLLERR;
    c->can_read = c->can_read || events & (EPOLLIN | ends);
    c->can_write = c->can_write || events & (EPOLLOUT | EPOLLERR);
    if (c->can_write && !c->closing)
        c->stalled_at = UINT64_MAX; /* it has taken bytes: it waits for this thread */
}

/* Packets for who rests would wake the thread, and nobody would pay for it. What came meanwhile is
   told when it goes on. */
static void listen_to(data_thread *t, connection *c)
{
    struct epoll_event event = {.events = c->resting ? EPOLLET : EVENTS_WANTED,
                                .data.ptr = c};
    if (c->deaf != c->resting && epoll_ctl(t->epoll, EPOLL_CTL_MOD, c->fd, &event) == 0)
        c->deaf = c->resting;
}

static void take_turn(data_thread *t, connection *c)
{
    progress result = connection_progress(&t->tools, c);
    if (result == PROGRESS_CLOSE) {
        connection_close(t, c);
        return;
    }
    if (c->resting && !c->turn.waits)
        turns_append(&t->resting, &c->turn, c, c->from);
    else if (!c->resting && c->turn.waits)
        turns_leave(&t->resting, &c->turn);
    listen_to(t, c);
    if (result == PROGRESS_FIRST) {
        TAILQ_INSERT_HEAD(queue_of(t, c), c, queued);
        c->is_queued = true;
    } else if (result == PROGRESS_MORE) {
        enqueue(t, c);
    }
}

/* Some turns; then it is looked at what came meanwhile, and at the other queue. */
static void run_queue(data_thread *t, queue *q)
{
    for (unsigned i = 0; i < TURNS && !TAILQ_EMPTY(q); i++) {
        connection *c = TAILQ_FIRST(q);
        dequeue(t, c);
        take_turn(t, c);
    }
}

/* Memory of the stage that nothing is done with now goes to those that wait for it. */
static void share_stage(data_thread *t)
{
    stage *st = t->tools.stage;
    connection *c = LIST_FIRST(&t->connections);
    for (; c && st && stage_is_short(st); c = LIST_NEXT(c, link))
        connection_return_chunks(&t->tools, c);
}

static bool may_go_on(void *tools, void *of)
{
    return connection_may_go_on(tools, of);
}

/* Those that rest go on, peer by peer: there may be something left for some only. */
static void end_rests(data_thread *t)
{
    stream_tools *tools = &t->tools;
    const fanin_server *s = tools->server;
    connection *c = NULL;
    unsigned left = TURNS;
    tools->rest_until = UINT64_MAX;
    tools->crowded[false] = tools->crowded[true] = false; /* for those that are there */
    while (left > 0 && (c = turns_next(&t->resting, may_go_on, tools))) {
        left--;
        dequeue(t, c); /* if its session is over */
        take_turn(t, c);
    }
    if (!t->resting.first)
        return;
    tools->crowded[false] = strangers_must_rest(s);
    tools->crowded[true] = strangers_send_must_rest(s);
    tools->rest_until = c ? 0 : deadline_in_ms(REST_MS);
}

/* Closes who has not moved for too long; when to look again. The queue may fill. */
static deadline sweep(data_thread *t)
{
    deadline soonest = t->tools.stage ? stage_expire(t->tools.stage) : UINT64_MAX;
    for (connection *c = LIST_FIRST(&t->connections), *next; c; c = next) {
        next = LIST_NEXT(c, link);
        deadline at = deadline_sooner(c->stalled_at, c->begun_at);
        if (at == UINT64_MAX || !deadline_passed(at)) {
            soonest = deadline_sooner(soonest, at);
            continue;
        }
        if (!c->closing)
            peer_log(t->tools.server, c->from, FANIN_LOG_WARNING, "data-stalled",
                     "%s %s for %d s and is dropped", c->peer,
                     at == c->stalled_at ? "took no bytes" : "began a request",
                     STALL_MS / 1000);
        connection_close(t, c);
    }
    return soonest;
}

/* Connections end with their session, also those that rest. */
static void close_unowned(data_thread *t)
{
    fanin_server *s = t->tools.server;
    pthread_mutex_lock(&s->lock);
    for (connection *c = LIST_FIRST(&t->connections); c; c = LIST_NEXT(c, link)) {
        if (!c->reader->closed)
            continue;
        c->ended = true;
        enqueue(t, c);
    }
    pthread_mutex_unlock(&s->lock);
}

static void *run(void *cookie)
{
    data_thread *t = cookie;
    struct epoll_event events[EVENTS];
    deadline at = UINT64_MAX, sweep_due = 0;
    yielding_begin(t->tools.server);
    while (!atomic_load(&t->quit)) {
        if (deadline_passed(t->tools.rest_until))
            end_rests(t);
        if (is_idle(t) || deadline_passed(sweep_due)) {
            at = sweep(t);
            sweep_due = deadline_in_ms(SWEEP_MS);
        }
        deadline next = deadline_sooner(at, t->tools.rest_until);
        int timeout = !is_idle(t) ? 0 : deadline_poll_ms(next);
        int n = epoll_wait(t->epoll, events, EVENTS, timeout);
        for (int i = 0; i < n; i++) {
            connection *c = events[i].data.ptr;
            if (events[i].data.ptr == &t->tools) {
                stage_reap(t->tools.stage);
                continue;
            }
            if (!c) {
                wake_heard(t->wake);
                accept_handovers(t);
                close_unowned(t);
                continue;
            }
            note_events(c, events[i].events);
            if (!c->resting) /* those have their turn when they may go on */
                enqueue(t, c);
        }
        run_queue(t, &t->own);
        run_queue(t, &t->others);
        share_stage(t);
    }
    return NULL;
}

static void wake(void *cookie, connection *c)
{
    enqueue(cookie, c);
}

static fanin_status need_stage(stream_tools *tools, fanin_error *error)
{
    data_thread *t = (data_thread *)tools; /* its first member */
    gpu *g = atomic_load(&tools->server->gpu);
    stage *made = NULL;
    if (!g)
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "device memory is published without CUDA");
    fanin_status status = stage_create(tools->server, g, wake, t, &made, error);
    if (status != FANIN_OK)
        return status;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = tools};
    if (epoll_ctl(t->epoll, EPOLL_CTL_ADD, stage_event(made), &event) != 0) {
        stage_destroy(&made);
        return error_set(error, FANIN_ERR_IO, NULL,
                         "epoll refuses the stage's descriptor");
    }
    tools->stage = made;
    return FANIN_OK;
}

static void free_all(data_thread *t)
{
    if (t->epoll >= 0)
        close(t->epoll);
    if (t->wake >= 0)
        close(t->wake);
    pthread_mutex_destroy(&t->lock);
    free(t->tools.entries);
    guarded_close(&t->tools.gather.bounce);
    free(t);
}

static fanin_status data_thread_start(fanin_server *s, data_thread **out,
                                      fanin_error *error)
{
    data_thread *t = calloc(1, sizeof *t);
    if (!t)
        return error_set_memory(error);
    t->tools.server = s;
    t->tools.kept = s->stream->kept;
    t->tools.need_stage = need_stage;
    t->tools.rest_until = UINT64_MAX;
    TAILQ_INIT(&t->own);
    TAILQ_INIT(&t->others);
    pthread_mutex_init(&t->lock, NULL);
    t->epoll = epoll_create1(EPOLL_CLOEXEC);
    t->wake = wake_open();
    t->tools.entries = malloc(LIMIT_READ_ENTRIES * sizeof *t->tools.entries);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    fanin_status status = guarded_open(&t->tools.gather.bounce, SEND_MOST, error);
    if (status == FANIN_OK && !t->tools.entries)
        status = error_set_memory(error);
    else if (status == FANIN_OK &&
             (t->epoll < 0 || t->wake < 0 ||
              epoll_ctl(t->epoll, EPOLL_CTL_ADD, t->wake, &event) != 0))
        status = error_set_errno(error, FANIN_ERR_IO, errno, NULL,
                                 "cannot set up a data thread");
    else if (status == FANIN_OK)
        status = thread_start(&t->thread, "fanin-data", run, t, error);
    if (status != FANIN_OK) {
        free_all(t);
        return status;
    }
    *out = t;
    return FANIN_OK;
}

static void data_thread_end(data_thread **thread)
{
    data_thread *t = *thread;
    *thread = NULL;
    pthread_join(t->thread, NULL);
    accept_handovers(t);
    while (!LIST_EMPTY(&t->connections))
        connection_close(t, LIST_FIRST(&t->connections));
    stage_destroy(&t->tools.stage);
    free_all(t);
}

/* ------------------------------------------------------- all of a server's */

#define CPUS_A_THREAD 4
#define AUTOMATIC_MOST 4

unsigned stream_threads_for(unsigned cpus, uint64_t max_memory)
{
    uint64_t n = cpus / CPUS_A_THREAD, room = max_memory / DATA_THREAD_MEMORY;
    n = n < room ? n : room;
    n = n < AUTOMATIC_MOST ? n : AUTOMATIC_MOST;
    return n > 0 ? (unsigned)n : 1;
}

static fanin_status add(fanin_server *s, fanin_error *error)
{
    struct stream *t = s->stream;
    unsigned n = t->n;
    fanin_status status = data_thread_start(s, &t->threads[n], error);
    if (status == FANIN_OK)
        t->n = n + 1; /* from here on others may look at it */
    return status;
}

bool stream_adopt(fanin_server *s, const handover *h)
{
    const struct stream *t = s->stream;
    data_thread *least = t->threads[0];
    for (unsigned i = 1; i < t->n; i++)
        if (t->threads[i]->load < least->load)
            least = t->threads[i];
    if (least->load > 0 && t->n < s->data_threads && add(s, NULL) == FANIN_OK)
        least = t->threads[t->n - 1];
    return data_thread_adopt(least, h);
}

void stream_wake(fanin_server *s)
{
    for (unsigned i = 0; i < s->stream->n; i++)
        if (s->stream->threads[i]->load > 0)
            wake_up(s->stream->threads[i]->wake);
}

uint64_t stream_cpu_ns(const fanin_server *s)
{
    uint64_t all = 0;
    for (unsigned i = 0; i < s->stream->n; i++)
        all += thread_cpu_ns_of(s->stream->threads[i]->thread);
    return all;
}

fanin_status stream_create(fanin_server *s, fanin_error *error)
{
    s->stream = calloc(1, sizeof *s->stream + s->data_threads * sizeof(data_thread *));
    if (s->stream)
        s->stream->kept = kept_digests_create();
    return s->stream && s->stream->kept ? add(s, error) : error_set_memory(error);
}

void stream_destroy(fanin_server *s)
{
    struct stream *t = s->stream;
    if (!t)
        return;
    for (unsigned i = 0; i < t->n; i++) {
        atomic_store(&t->threads[i]->quit, true);
        wake_up(t->threads[i]->wake);
    }
    for (unsigned i = 0; i < t->n; i++)
        data_thread_end(&t->threads[i]);
    kept_digests_free(t->kept);
    free(t);
    s->stream = NULL;
}
