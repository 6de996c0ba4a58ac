/* SPDX-License-Identifier: Apache-2.0 */
#include "net/threads.h"

#include "error_set.h"
#include "frame.h"
#include "thread.h"
#include "topology.h"
#include "trace.h"
#include "wake.h"
#include "worker_pool.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

/* One thread moves so much in the time that waking another one and telling of its end takes
   several times over. */
#define BYTES_A_THREAD ((uint64_t)8 << 20)
/* One connection's window does not fill a network, loopback's does. On one host there are more
   where a rank's bytes need several threads, but no more: with two CPUs one. A rank that has CPUs
   to spare sends by as many threads. */
#define CONNECTIONS 4
#define WORKERS_BESIDE 8 /* of a host */

typedef struct reading_thread {
    reading_threads *all;
    pthread_t thread;
    loop loop;
    loop_source halt; /* all->halt, in its own loop */
    pthread_cond_t go;
    reading_turn turn; /* NULL: it rests; guarded by all->lock */
    void *cookie;
} reading_thread;

struct reading_threads {
    loop_source told; /* an eventfd of the owner's: who looks after each turn */
    loop *owner;
    int halt; /* an eventfd that stays readable while all are to rest */
    atomic_bool halted;
    unsigned quota;
    pthread_mutex_t lock;
    pthread_cond_t rested;
    bool quit;         /* guarded by lock */
    unsigned n, taken; /* the calling thread's */
    reading_thread threads[READING_THREADS_MOST];
};

/* ------------------------------------------------------------------ a thread */

/* Wakes the loop; what it is for, the thread looks at itself. */
static void on_halt(loop_source *source, uint32_t events)
{
    (void)source;
    (void)events;
}

/* A thread's part of a read, which ended. */
static void trace_turn(uint64_t began)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(TRACE_READER, began, FANIN_OK, NULL);
    trace_add(&span);
}

static void *work(void *cookie)
{
    reading_thread *t = cookie;
    reading_threads *all = t->all;
    pthread_setname_np(pthread_self(), "fanin-read");
    pthread_mutex_lock(&all->lock);
    while (!all->quit) {
        if (!t->turn) {
            pthread_cond_wait(&t->go, &all->lock);
            continue;
        }
        reading_turn turn = t->turn;
        void *of = t->cookie;
        pthread_mutex_unlock(&all->lock);
        uint64_t began = clock_ns();
        for (deadline wake = UINT64_MAX; !atomic_load(&all->halted) && turn(of, &wake);
             wake = UINT64_MAX)
            loop_step(&t->loop, wake);
        trace_turn(began);
        pthread_mutex_lock(&all->lock);
        t->turn = NULL;
        pthread_cond_signal(&all->rested);
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

static bool add_reading_thread(reading_threads *all)
{
    reading_thread *t = &all->threads[all->n];
    *t = (reading_thread){
        .all = all, .halt = {.fd = all->halt, .events = EPOLLIN, .ready = on_halt}};
    if (loop_init(&t->loop, NULL) != FANIN_OK)
        return false;
    pthread_cond_init(&t->go, NULL);
    if (loop_add(&t->loop, &t->halt, NULL) == FANIN_OK &&
        worker_thread_start(&t->thread, work, t)) {
        all->n++;
        return true;
    }
    pthread_cond_destroy(&t->go);
    loop_finish(&t->loop);
    return false;
}

/* ---------------------------------------------------------------- all of them */

reading_threads *reading_threads_create(loop *owner)
{
    reading_threads *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->rested, NULL);
    t->owner = owner;
    t->quota = cpu_quota("/proc", "/sys");
    t->halt = wake_open();
    if (loop_source_wake(&t->told, NULL) != FANIN_OK || t->halt < 0 ||
        loop_add(owner, &t->told, NULL) != FANIN_OK)
        reading_threads_destroy(&t);
    return t;
}

void reading_threads_destroy(reading_threads **threads)
{
    reading_threads *t = *threads;
    *threads = NULL;
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->quit = true;
    for (unsigned i = 0; i < t->n; i++)
        pthread_cond_signal(&t->threads[i].go);
    pthread_mutex_unlock(&t->lock);
    for (unsigned i = 0; i < t->n; i++) {
        pthread_join(t->threads[i].thread, NULL);
        pthread_cond_destroy(&t->threads[i].go);
        loop_finish(&t->threads[i].loop);
    }
    loop_remove(t->owner, &t->told);
    if (t->told.fd >= 0)
        close(t->told.fd);
    if (t->halt >= 0)
        close(t->halt);
    pthread_cond_destroy(&t->rested);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

unsigned reading_threads_have(reading_threads *t, unsigned wanted)
{
    wanted = wanted < READING_THREADS_MOST ? wanted : READING_THREADS_MOST;
    while (t->n < wanted && add_reading_thread(t))
        ;
    return t->n;
}

unsigned reading_threads_cpus(const reading_threads *t)
{
    unsigned cpus = usable_cpus();
    return cpus < t->quota ? cpus : t->quota;
}

loop *reading_threads_loop(reading_threads *t, unsigned index)
{
    return &t->threads[index].loop;
}

void reading_threads_go(reading_threads *t, unsigned index, reading_turn turn,
                        void *cookie)
{
    reading_thread *one = &t->threads[index];
    t->taken = t->taken > index ? t->taken : index + 1;
    pthread_mutex_lock(&t->lock);
    one->turn = turn;
    one->cookie = cookie;
    pthread_cond_signal(&one->go);
    pthread_mutex_unlock(&t->lock);
}

unsigned reading_threads_taken(const reading_threads *t)
{
    return t->taken;
}

bool reading_threads_halted(const reading_threads *t)
{
    return atomic_load(&t->halted);
}

void reading_threads_tell(reading_threads *t)
{
    wake_up(t->told.fd);
}

void reading_threads_rest(reading_threads *t)
{
    atomic_store(&t->halted, true);
    wake_up(t->halt);
    pthread_mutex_lock(&t->lock);
    for (unsigned i = 0; i < t->n; i++) {
        while (t->threads[i].turn)
            pthread_cond_wait(&t->rested, &t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    wake_heard(t->halt);
    atomic_store(&t->halted, false);
    t->taken = 0;
}

/* ------------------------------------------------------------- who reads what */

/* At least 1. */
static uint64_t limited(uint64_t n, uint64_t most)
{
    n = n < most ? n : most;
    return n > 0 ? n : 1;
}

/* Each has a share of the window, of which the largest request must find room; two of them are what
   keeps a connection busy. Half of the CPUs are others': ranks and workers on the same host. */
unsigned reading_threads_for(const reading_size *size)
{
    uint64_t n = size->configured, room = size->window / LIMIT_READ_BYTES;
    if (n == 0) {
        n = limited(size->cpus / 2, size->bytes / BYTES_A_THREAD);
        room /= 2;
    }
    n = limited(n, READING_THREADS_MOST);
    return (unsigned)limited(limited(n, room), size->sources);
}

unsigned reading_connections_for(unsigned cpus, bool ciphered_here)
{
    unsigned part = cpus / WORKERS_BESIDE > 0 ? cpus / WORKERS_BESIDE : 1;
    return ciphered_here && part < CONNECTIONS ? part : CONNECTIONS;
}

typedef struct load {
    uint64_t bytes;
    size_t source;
} load;

static int larger_first(const void *a, const void *b)
{
    const load *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->source < y->source ? -1 : x->source > y->source;
}

/* Parts of one source, of what @p share is a thread's share of. A quarter of it more is not worth
   another thread. */
static unsigned parts_of(uint64_t bytes, uint64_t share, unsigned most)
{
    uint64_t parts = (bytes + share - share / 4 - 1) / share;
    return (unsigned)limited(parts, most);
}

/* The largest one first, each to who has the least: at most a third more than the best would be. */
static void deal(load *loads, size_t n, unsigned threads, uint64_t *threads_of)
{
    uint64_t has[READING_THREADS_MOST] = {0};
    qsort(loads, n, sizeof *loads, larger_first);
    for (size_t i = 0; i < n; i++) {
        unsigned least = threads - 1;
        for (unsigned j = threads - 1; j-- > 0;)
            least = has[j] < has[least] ? j : least;
        has[least] += loads[i].bytes;
        threads_of[loads[i].source] |= UINT64_C(1) << least;
    }
}

bool reading_threads_share(const uint64_t *bytes, size_t n, unsigned threads,
                           unsigned most, uint64_t *threads_of)
{
    uint64_t all = 0, n_loads = 0;
    for (size_t i = 0; i < n; i++)
        all += bytes[i];
    const uint64_t share = limited(all / threads, UINT64_MAX);
    load *loads = calloc(n + (size_t)threads * 2 + 1, sizeof *loads);
    if (!loads)
        return false;
    for (size_t i = 0; i < n; i++) {
        unsigned parts = parts_of(bytes[i], share, most);
        threads_of[i] = 0;
        for (unsigned j = 0; j < parts; j++)
            loads[n_loads++] = (load){bytes[i] / parts, i};
    }
    deal(loads, n_loads, threads, threads_of);
    free(loads);
    return true;
}

/* ----------------------------------------------------------------------- workers */

#define MOST_THREADS 15

typedef struct workers_part {
    worker_job job;
    workers *of;
    client_work work;
    bool begun;
    fanin_status status;
    fanin_error error;
} workers_part;

struct workers {
    worker_pool *pool;
    atomic_bool closing;
    workers_fn fn;
    void *cookie;
    size_t n, n_begun, n_ended;
    workers_part parts[];
};

static bool wants_no_more(void *cookie)
{
    const workers_part *p = cookie;
    return atomic_load(&p->of->closing) || client_work_over(&p->work);
}

static void run_part(worker_job *job)
{
    workers_part *p = (workers_part *)job; /* its first member */
    p->status =
        p->of->fn(p->of->cookie, (size_t)(p - p->of->parts), &p->work.stop, &p->error);
}

workers *workers_open(fanin_client *client, deadline at, size_t n, bool worth,
                      workers_fn fn, void *cookie)
{
    workers *c = calloc(1, sizeof *c + n * sizeof c->parts[0]);
    if (!c)
        return NULL;
    unsigned most = n < MOST_THREADS ? (unsigned)n : MOST_THREADS;
    c->pool = worker_pool_create(0, worth ? most : 0, -1);
    if (!c->pool) {
        free(c);
        return NULL;
    }
    c->fn = fn;
    c->cookie = cookie;
    c->n = n;
    for (size_t i = 0; i < n; i++) {
        c->parts[i] =
            (workers_part){.job.run = run_part, .of = c, .error = FANIN_ERROR_INIT};
        client_work_start(&c->parts[i].work, client, at);
        c->parts[i].work.stop.fn = wants_no_more;
        c->parts[i].work.stop.cookie = &c->parts[i];
    }
    return c;
}

void workers_begin(workers *c, size_t part)
{
    c->parts[part].begun = true;
    c->n_begun++;
    worker_pool_submit(c->pool, &c->parts[part].job);
}

fanin_status workers_finish(workers *c, size_t *failed, fanin_error *error)
{
    while (c->n_ended < c->n_begun) {
        if (worker_pool_collect(c->pool))
            c->n_ended++;
        else if (!worker_pool_help(c->pool))
            worker_pool_wait(c->pool);
    }
    for (size_t i = 0; i < c->n; i++) {
        const workers_part *p = &c->parts[i];
        if (!p->begun || p->status == FANIN_OK)
            continue;
        if (failed)
            *failed = i;
        error_copy(error, &p->error);
        return client_work_end(&p->work, p->status, error);
    }
    return FANIN_OK;
}

void workers_close(workers **c)
{
    if (!*c)
        return;
    atomic_store(&(*c)->closing, true);
    worker_pool_destroy(&(*c)->pool);
    free(*c);
    *c = NULL;
}

fanin_status workers_run(fanin_client *client, deadline at, size_t n, bool worth,
                         workers_fn fn, void *cookie, fanin_error *error)
{
    workers *w = workers_open(client, at, n, worth, fn, cookie);
    if (!w)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++)
        workers_begin(w, i);
    fanin_status status = workers_finish(w, NULL, error);
    workers_close(&w);
    return status;
}
