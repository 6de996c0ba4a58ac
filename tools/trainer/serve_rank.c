/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of the stand-in trainer: allocates shards as a trainer does, one by one, and
   lives through updates until the world ends. */
#include "fetch/failure.h"
#include "fetch/pattern.h"
#include "trainer/device_shards.h"
#include "trainer/serve_rank.h"
#include "trainer/trainer_options.h"
#include "clock.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------- what ranks share */

void rank_board_wake(rank_board *board)
{
    int saved = errno;
    atomic_fetch_add(&board->wake, 1);
    syscall(SYS_futex, &board->wake, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    errno = saved;
}

void rank_board_stop(rank_board *board)
{
    atomic_store(&board->stop, 1);
    rank_board_wake(board);
}

static bool all_arrived(const rank_board *board, uint64_t generation)
{
    for (uint32_t i = 0; i < board->world_size; i++) {
        const rank_slot *slot = &board->slots[i];
        if (atomic_load(&slot->alive) != 0 && atomic_load(&slot->arrived) < generation)
            return false;
    }
    return true;
}

static bool is_past(const rank_board *board, uint64_t end_ns)
{
    (void)board;
    return clock_ns() >= end_ns;
}

/* Until @p done says so of @p what, which it looks at anew with each event and at @p end_ns;
   false: the world is to end. */
static bool wait_until(rank_board *board, bool (*done)(const rank_board *, uint64_t),
                       uint64_t what, uint64_t end_ns)
{
    for (;;) {
        uint32_t seen = atomic_load(&board->wake);
        if (atomic_load(&board->stop) != 0)
            return false;
        if (done(board, what))
            return true;
        uint64_t now = clock_ns(), left = end_ns > now ? end_ns - now : 0;
        const struct timespec timeout = {(time_t)(left / 1000000000),
                                         (long)(left % 1000000000)};
        /* Not the private kind: the word is shared between processes. */
        syscall(SYS_futex, &board->wake, FUTEX_WAIT, seen,
                end_ns != UINT64_MAX ? &timeout : NULL, NULL, 0);
    }
}

/* Waits for all living ranks to come here; false: the world is to end. */
static bool rank_board_barrier(rank_board *board, uint32_t rank)
{
    uint64_t generation = atomic_fetch_add(&board->slots[rank].arrived, 1) + 1;
    if (all_arrived(board, generation))
        rank_board_wake(board);
    return wait_until(board, all_arrived, generation, UINT64_MAX);
}

/* Waits ms milliseconds (negative: for ever); false: the world is to end. */
static bool rank_board_pause(rank_board *board, int64_t ms)
{
    uint64_t end_ns = ms < 0 ? UINT64_MAX : deadline_in_ms((uint64_t)ms);
    return wait_until(board, is_past, end_ns, end_ns);
}

typedef struct published {
    char name[OPTIONS_PUBLICATION];
    void **memory; /**< one a tensor, NULL: empty */
    uint64_t *seeds;
    device_shards *device; /**< whose the memory is; NULL: the host's */
} published;

typedef struct life {
    const rank_options *options;
    rank_board *board;
    rank_slot *slot;
    uint32_t rank;
    int device;
    shard *shards; /**< one a tensor, the same for all runs */
    published *runs;
    fanin_server *server;
} life;

static rank_board *board_of_handler;

static void serve_rank_on_signal(int number)
{
    (void)number;
    rank_board_stop(board_of_handler);
}

/* On a device as PyTorch does it; on the host each shard by an allocation of its own. */
static fanin_status allocate_shards(life *l, published *run, fanin_error *error)
{
    const tensor_list *list = l->options->tensors;
    if (l->device != DEVICE_HOST)
        return device_shards_make(l->device, l->shards, list->count, run->memory,
                                  &run->device, error);
    for (size_t i = 0; i < list->count; i++) {
        if (l->shards[i].bytes > 0 &&
            posix_memalign(&run->memory[i], 64, l->shards[i].bytes) != 0) {
            run->memory[i] = NULL;
            failure_set(error, FANIN_ERR_MEMORY,
                        "serve less (--layers, --shrink), or fewer runs",
                        "no memory for the shards");
            snprintf(error->key, sizeof error->key, "%s", run->name);
            return FANIN_ERR_MEMORY;
        }
    }
    return FANIN_OK;
}

static fanin_status allocate_run(life *l, size_t number, fanin_error *error)
{
    const tensor_list *list = l->options->tensors;
    published *run = &l->runs[number];
    rank_publication(l->options, number, run->name);
    run->memory = output_require(calloc(list->count + 1, sizeof run->memory[0]));
    run->seeds = output_require(calloc(list->count + 1, sizeof run->seeds[0]));
    for (size_t i = 0; i < list->count; i++) {
        char key[FANIN_MAX_NAME + sizeof run->name + 2];
        snprintf(key, sizeof key, "%s:%s", run->name, list->tensors[i].name);
        run->seeds[i] = pattern_seed(key);
    }
    return allocate_shards(l, run, error);
}

static fanin_status serve_rank_allocate(life *l, fanin_error *error)
{
    const rank_options *o = l->options;
    uint32_t parts = o->world_size / o->replicate;
    l->shards = output_require(calloc(o->tensors->count + 1, sizeof l->shards[0]));
    l->runs = output_require(calloc(o->n_runs, sizeof l->runs[0]));
    for (size_t i = 0; i < o->tensors->count; i++)
        shard_cut(&o->tensors->tensors[i], o->shard_dim, parts, l->rank % parts,
                  &l->shards[i]);
    for (size_t i = 0; i < o->n_runs; i++) {
        fanin_status status = allocate_run(l, i, error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

static void serve_rank_release(life *l)
{
    const rank_options *o = l->options;
    for (size_t run = 0; l->runs != NULL && run < o->n_runs; run++) {
        published *p = &l->runs[run];
        for (size_t i = 0;
             l->device == DEVICE_HOST && p->memory != NULL && i < o->tensors->count;
             i++)
            free(p->memory[i]);
        device_shards_free(&p->device);
        free(p->memory);
        free(p->seeds);
    }
    free(l->runs);
    free(l->shards);
}

/* The tensors' own bytes, or the pattern. @p memory: one a tensor. */
static void fill_tensors(const life *l, const published *run, uint64_t step,
                         void *const *memory)
{
    const tensor_list *list = l->options->tensors;
    for (size_t i = 0; i < list->count; i++) {
        const shard *s = &l->shards[i];
        const uint8_t *data = list->tensors[i].data;
        uint8_t *to = memory[i];
        uint64_t start = pattern_start(run->seeds[i], step);
        for (uint64_t n = 0; s->bytes > 0 && n < s->runs; n++) {
            uint64_t from = s->first + n * s->step;
            if (data != NULL)
                memcpy(to + n * s->run_bytes, data + from, s->run_bytes);
            else
                pattern_fill(to + n * s->run_bytes, start, from, s->run_bytes);
        }
    }
}

static fanin_status rewrite(const life *l, const published *run, uint64_t step,
                            fanin_error *error)
{
    void **images;
    if (run->device == NULL) {
        fill_tensors(l, run, step, run->memory);
        return FANIN_OK;
    }
    fanin_status status = device_shards_images(run->device, &images, error);
    if (status != FANIN_OK)
        return status;
    fill_tensors(l, run, step, images);
    return device_shards_send(run->device, error);
}

/* Waits for what was queued on the run's stream. */
static fanin_status serve_rank_finish(const published *run, fanin_error *error)
{
    return run->device != NULL
               ? gpu_stream_wait(device_shards_stream(run->device), UINT64_MAX, error)
               : FANIN_OK;
}

/* In the order of the stream that rewrites; @p wait: returns when it has taken effect. */
static fanin_status commit(life *l, const published *run, uint64_t step, bool wait,
                           fanin_error *error)
{
    const rank_publishing *p = &l->options->publishing;
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = (p->snapshot ? (uint32_t)FANIN_COMMIT_SNAPSHOT : 0) |
                    (wait ? (uint32_t)FANIN_COMMIT_WAIT : 0);
    options.cast = p->cast;
    if (run->device != NULL && !p->no_stream)
        options.stream = (fanin_stream){
            gpu_stream_handle(device_shards_stream(run->device)), (int32_t)l->device};
    fanin_status status =
        p->no_stream || p->timed ? serve_rank_finish(run, error) : FANIN_OK;
    if (status != FANIN_OK)
        return status;
    uint64_t start = clock_ns();
    status = fanin_server_commit(l->server, run->name, step, &options, error);
    if (status == FANIN_OK && p->timed) {
        uint32_t n = atomic_load(&l->slot->commits);
        l->slot->commit_ns[n % RANK_COMMITS] = clock_ns() - start;
        atomic_store(&l->slot->commits, n + 1);
    }
    return status;
}

static fanin_status serve_rank_put(const life *l, const published *run,
                                   fanin_error *error)
{
    const tensor_list *list = l->options->tensors;
    fanin_tensor *tensors = output_require(calloc(list->count + 1, sizeof tensors[0]));
    fanin_box *boxes = output_require(calloc(list->count + 1, sizeof boxes[0]));
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < list->count; i++) {
        const tensor_spec *spec = &list->tensors[i];
        const shard *s = &l->shards[i];
        memcpy(boxes[i].offset, s->offset, sizeof s->offset);
        memcpy(boxes[i].extent, s->extent, sizeof s->extent);
        boxes[i].address = run->memory[i];
        tensors[i] = (fanin_tensor){
            .struct_size = sizeof tensors[i],
            .name = spec->name,
            .dtype = spec->dtype,
            .n_dims = spec->n_dims,
            .boxes = &boxes[i],
            .n_boxes = s->bytes > 0,
            .memory = {run->device != NULL ? FANIN_MEMORY_DETECT : FANIN_MEMORY_HOST,
                       -1},
        };
        memcpy(tensors[i].shape, spec->shape, sizeof spec->shape);
    }
    if (list->count > 0)
        status =
            fanin_server_put(l->server, run->name, tensors, list->count, false, error);
    if (status == FANIN_OK)
        status = fanin_server_set_metadata(l->server, run->name, l->options->pairs,
                                           l->options->n_pairs, error);
    free(tensors);
    free(boxes);
    return status;
}

static fanin_status create_server(life *l, fanin_error *error)
{
    const rank_options *o = l->options;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memcpy(config.world_id, o->world_id, sizeof config.world_id);
    config.rank = l->rank;
    config.world_size = o->world_size;
    config.base_port = o->base_port;
    config.flags = o->flags;
    config.lease_ms = o->lease_ms;
    config.stranger_cpu = 16000; /* it has nothing else to do */
    config.data_threads = o->data_threads;
    config.nice = o->nice;
    config.allow = o->allow;
    CREDENTIALS_GIVE(&config, &o->credentials);
    config.log = o->log;
    config.log_cookie = o->log_cookie;
    if (o->bind != NULL)
        config.bind = o->bind;
    if (o->server_name != NULL)
        config.name = o->server_name;
    fanin_status status = fanin_server_create(&config, &l->server, error);
    if (status == FANIN_OK)
        l->slot->port = fanin_server_port(l->server);
    return status;
}

static fanin_status begin_update(life *l, const published *run, fanin_error *error)
{
    /* As a trainer that has looked at a loss: the last step's work is done, so that this
       update does not withdraw its commit. */
    fanin_status status = serve_rank_finish(run, error);
    return status == FANIN_OK ? fanin_server_begin_update(l->server, run->name, error)
                              : status;
}

/* All runs at @p step; @p first: they become known with it. */
static fanin_status serve_rank_publish(life *l, uint64_t step, bool first,
                                       fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; status == FANIN_OK && i < l->options->n_runs; i++) {
        const published *run = &l->runs[i];
        status = first ? FANIN_OK : begin_update(l, run, error);
        status = status != FANIN_OK ? status : rewrite(l, run, step, error);
        if (status == FANIN_OK && first)
            status = serve_rank_put(l, run, error);
        if (status == FANIN_OK)
            status = commit(l, run, step, first || l->options->publishing.timed, error);
    }
    if (status == FANIN_OK)
        atomic_store(&l->slot->step, step);
    return status;
}

static bool barrier(const life *l)
{
    return l->options->uncoupled || rank_board_barrier(l->board, l->rank);
}

/* Step after step until the world ends. */
static fanin_status serve_rank_live(life *l, int ready_fd, fanin_error *error)
{
    const rank_options *o = l->options;
    const uint64_t one = 1;
    fanin_status status = serve_rank_publish(l, o->first_step, true, error);
    if (status != FANIN_OK)
        return status;
    bool going = rank_board_barrier(l->board, l->rank);
    atomic_store(&l->slot->ready, 1);
    if (write(ready_fd, &one, sizeof one) != (ssize_t)sizeof one)
        return failure_set(error, FANIN_ERR_IO, "", "the rank cannot tell it is ready");
    for (uint64_t n = 1; going; n++) {
        bool last = o->update_every_ms < 0 || (o->steps > 0 && n >= o->steps);
        going =
            rank_board_pause(l->board, last ? -1 : o->update_every_ms) && barrier(l);
        if (going) {
            status = serve_rank_publish(l, o->first_step + n, false, error);
            going = status == FANIN_OK && barrier(l);
        }
    }
    return status;
}

static void install_handlers(rank_board *board)
{
    struct sigaction action = {.sa_handler = serve_rank_on_signal};
    sigset_t set;
    board_of_handler = board;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

/* A server that saw its readers leave knows that none of them maps its memory. */
static void see_readers_off(const life *l)
{
    enum { PATIENCE = 1000 };
    fanin_server_stats stats = {.struct_size = sizeof stats};
    for (int ms = 0; ms < PATIENCE; ms++) {
        if (fanin_server_get_stats(l->server, &stats) != FANIN_OK ||
            stats.sessions == 0)
            return;
        poll(NULL, 0, 1);
    }
}

int serve_rank(const rank_options *options, rank_board *board, uint32_t rank,
               int ready_fd, rank_extent *extents)
{
    life l = {.options = options,
              .board = board,
              .slot = &board->slots[rank],
              .rank = rank,
              .device = rank_device(options, rank)};
    fanin_error error = FANIN_ERROR_INIT;
    install_handlers(board);
    fanin_status status = serve_rank_allocate(&l, &error);
    for (size_t i = 0; status == FANIN_OK && extents != NULL && options->n_runs > 0 &&
                       i < options->tensors->count;
         i++)
        extents[i] =
            (rank_extent){(uint64_t)(uintptr_t)l.runs[0].memory[i], l.shards[i].bytes};
    status = status != FANIN_OK ? status : create_server(&l, &error);
    status = status != FANIN_OK ? status : serve_rank_live(&l, ready_fd, &error);
    if (l.server != NULL) {
        if (options->readers_gone)
            see_readers_off(&l);
        l.slot->stats.struct_size = sizeof l.slot->stats;
        l.slot->has_stats =
            fanin_server_get_stats(l.server, &l.slot->stats) == FANIN_OK;
        fanin_server_destroy(&l.server, options->lease_ms);
    }
    serve_rank_release(&l);
    if (status != FANIN_OK) {
        if (error.rank < 0)
            error.rank = (int32_t)rank;
        l.slot->error = error;
        l.slot->failed = true;
    }
    return exit_code_of(status);
}
