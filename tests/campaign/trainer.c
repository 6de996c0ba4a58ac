/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trainer BOARD RANK WORLD PORT LIFE SEED START_NS PERIOD_MS LEASE_MS KIND
 *
 * A rank of a campaign's trainer: commits the step that the clock says, all ranks the same. KIND is
 * reference or snapshot. Now and then it does what a trainer may do and readers must survive: an
 * update is taken back over scribbled memory, the run is removed and put again, shards move and
 * their old memory is unmapped, the run is paused and scribbled on. PORT: of rank 0. LIFE: the
 * world id, in hexadecimal. Without arguments: exit status 77 if it cannot run here, for want of
 * devices.
 *
 * Mutants (mutant.h): "liar" serves bytes of no launch; "byte" has one wrong byte in each fiftieth
 * step; "late" begins updates too late; "leak-rank" leaves a descriptor open in each.
 */
#include "board.h"
#include "memory.h"
#include "mutant.h"
#include "weights.h"
#include <fanin/server.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS UINT64_C(1000000)
#define CREATE_NS (10 * 1000 * MS) /* a rank that was killed may still have the port */
#define GRACE_NS (1000 * MS)       /* what a busy machine may add to a wait */
#define ACTS_PERCENT 12
#define PATCHES 4 /* that are kept, in a campaign of deltas */
/* All readers, and the handshakes that bad links break, come from one address; and a sanitizer
   makes them cost ten times as much. */
#define PEER_CPU 500

typedef struct rank {
    const board *board;
    board_rank *told;
    fanin_server *server;
    uint64_t life, random, start_ns, period_ns, lease_ns, step;
    uint32_t rank, world;
    bool snapshot, published, paused;
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint64_t first[N_TENSORS], end[N_TENSORS]; /* rows */
    void *memory[N_TENSORS];
} rank;

static volatile sig_atomic_t ended;

static void on_end(int number)
{
    (void)number;
    ended = 1;
}

/* stops: as it was before the call. */
static bool good(rank *r, uint64_t stops, fanin_status status, const char *what,
                 const fanin_error *error)
{
    if (status != FANIN_OK && stops == atomic_load(&r->told->stops)) {
        atomic_fetch_add(&r->told->wrong, 1);
        fprintf(stderr, "rank %u: %s: %s: %s\n", r->rank, what,
                fanin_status_name(status), error->message);
    }
    return status == FANIN_OK;
}

#define TRY(r, what, call) good(r, atomic_load(&(r)->told->stops), call, what, &error)

/* ---------------------------------------------------------------------- memory */

static size_t shard_bytes(const rank *r, size_t i)
{
    return (r->end[i] - r->first[i]) * weights_shape(i).columns * sizeof(float);
}

static void get_memory(rank *r)
{
    for (size_t i = 0; i < N_TENSORS; i++)
        r->memory[i] = memory_get(shard_bytes(r, i), r->rank);
}

/* What it writes is of no launch, if it lies. */
static void fill(rank *r, uint64_t step)
{
    uint64_t life = r->life ^ (mutant_is("liar") ? UINT64_C(0x11a5) : 0);
    for (size_t i = 0; i < N_TENSORS; i++) {
        weights_fill(life, step, i, r->first[i], r->end[i], memory_bytes(r->memory[i]));
        if (mutant_is("byte") && step % 50 == 0 && r->rank == 1 && i == 0)
            *(uint8_t *)memory_bytes(r->memory[i]) ^= 1;
        memory_send(r->memory[i], shard_bytes(r, i));
    }
}

static void scribble(rank *r, void *const *memory)
{
    for (size_t i = 0; i < N_TENSORS; i++) {
        weights_scribble(memory_bytes(memory[i]), shard_bytes(r, i));
        memory_send(memory[i], shard_bytes(r, i));
    }
}

static bool put(rank *r, bool replace)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_tensor tensors[N_TENSORS];
    fanin_box boxes[N_TENSORS];
    tensor_shape shapes[N_TENSORS];
    for (size_t i = 0; i < N_TENSORS; i++) {
        shapes[i] = weights_shape(i);
        boxes[i] = (fanin_box){.offset = {r->first[i], 0},
                               .extent = {r->end[i] - r->first[i], shapes[i].columns},
                               .address = r->memory[i]};
        tensors[i] = (fanin_tensor){.struct_size = sizeof *tensors,
                                    .name = shapes[i].name,
                                    .dtype = FANIN_DTYPE_F32,
                                    .n_dims = 2,
                                    .shape = {shapes[i].rows, shapes[i].columns},
                                    .boxes = &boxes[i],
                                    .n_boxes = r->end[i] > r->first[i]};
    }
    return TRY(r, "put",
               fanin_server_put(r->server, RUN, tensors, N_TENSORS, replace, &error));
}

/* ---------------------------------------------------------------------- updates */

/* What readers may delay is bounded, whatever they and others do. */
static void judge_wait(rank *r, uint64_t stops, uint64_t began)
{
    uint64_t took = board_now() - began, allowed = r->lease_ns + GRACE_NS;
    if (took <= allowed || stops != atomic_load(&r->told->stops))
        return;
    atomic_fetch_add(&r->told->late, 1);
    if (took - allowed > atomic_load(&r->told->longest_ns))
        atomic_store(&r->told->longest_ns, took - allowed);
}

static bool begin(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t stops = atomic_load(&r->told->stops), began = board_now();
    if (mutant_is("late"))
        board_sleep(r->lease_ns + 2 * GRACE_NS);
    bool done =
        TRY(r, "begin_update", fanin_server_begin_update(r->server, RUN, &error));
    judge_wait(r, stops, began);
    return done;
}

static uint64_t step_at(const rank *r, uint64_t ns)
{
    return ns < r->start_ns ? 1 : 1 + (ns - r->start_ns) / r->period_ns;
}

/* The last before all ranks rest. */
static uint64_t last_step(const rank *r)
{
    uint64_t calm_ns = atomic_load(&r->board->calm_ns);
    return calm_ns ? step_at(r, calm_ns) : UINT64_MAX;
}

static void commit(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = r->snapshot ? FANIN_COMMIT_SNAPSHOT : 0;
    options.deltas = r->snapshot && weights_change_little() ? PATCHES : 0;
    if (mutant_is("leak-rank"))
        (void)!open("/dev/null", O_RDONLY | O_CLOEXEC);
    uint64_t step = step_at(r, board_now()), last = last_step(r);
    step = step < last ? step : last;
    if (step <= r->step)
        step = r->step + 1;
    fill(r, step);
    if (!TRY(r, "commit", fanin_server_commit(r->server, RUN, step, &options, &error)))
        return;
    r->step = step;
    atomic_store(&r->told->step, step);
    atomic_fetch_add(&r->told->updates, 1);
}

static void train(rank *r)
{
    if (begin(r))
        commit(r);
}

/* ------------------------------------------------- what a trainer may do besides */

static void take_back(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (!begin(r))
        return;
    scribble(r, r->memory);
    (void)TRY(r, "abort_update", fanin_server_abort_update(r->server, RUN, &error));
    board_sleep(board_random(&r->random) % (3 * MS));
    train(r);
}

static bool set_metadata(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    const fanin_pair pairs[] = {
        {"r", "8"}, {"lora_alpha", "16"}, {"base_model_name_or_path", "campaign/base"}};
    return TRY(r, "set_metadata",
               fanin_server_set_metadata(r->server, RUN, pairs, 3, &error));
}

/* Without both, readers find nothing: where memory is short, tried again until it works. */
static void publish(rank *r)
{
    r->published = set_metadata(r) && put(r, false);
    if (r->published)
        train(r);
}

static void remove_and_put(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (!TRY(r, "remove", fanin_server_remove(r->server, RUN, NULL, &error)))
        return;
    scribble(r, r->memory);
    board_sleep(board_random(&r->random) % (3 * MS));
    publish(r);
}

/* The old pages are gone as soon as the put has returned; or the new ones, if it has failed. */
static void move(rank *r)
{
    void *old[N_TENSORS], *fresh[N_TENSORS];
    memcpy(old, r->memory, sizeof old);
    get_memory(r);
    memcpy(fresh, r->memory, sizeof fresh);
    bool moved = put(r, true);
    void **gone = moved ? old : fresh;
    memcpy(r->memory, moved ? fresh : old, sizeof old);
    scribble(r, gone);
    for (size_t i = 0; i < N_TENSORS; i++)
        memory_free(gone[i], shard_bytes(r, i));
    train(r);
}

static void resume(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    r->paused = !TRY(r, "resume", fanin_server_resume(r->server, RUN, &error));
}

static void pause_and_scribble(rank *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t stops = atomic_load(&r->told->stops), began = board_now();
    if (!TRY(r, "pause", fanin_server_pause(r->server, RUN, "campaign", &error)))
        return;
    judge_wait(r, stops, began);
    scribble(r, r->memory);
    board_sleep(board_random(&r->random) % (8 * MS));
    fill(r, r->step);
    resume(r);
}

static void act(rank *r)
{
    static void (*const acts[])(rank *) = {take_back, remove_and_put, move,
                                           pause_and_scribble};
    acts[board_random(&r->random) % 4](r);
    atomic_fetch_add(&r->told->acts, 1);
}

/* ------------------------------------------------------------------------- life */

static bool create(rank *r, uint16_t port)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    config.rank = r->rank;
    config.world_size = r->world;
    config.base_port = port;
    config.lease_ms = (uint32_t)(r->lease_ns / MS);
    config.peer_cpu = PEER_CPU;
    config.stranger_cpu = 16000; /* readers by TCP are to find faults, not a limit */
    memcpy(config.world_id, r->world_id, sizeof config.world_id);
    uint64_t until = board_now() + CREATE_NS;
    while (fanin_server_create(&config, &r->server, &error) != FANIN_OK) {
        if (board_now() > until || ended) {
            fprintf(stderr, "rank %u: %s\n", r->rank, error.message);
            return false;
        }
        board_sleep(20 * MS);
    }
    return true;
}

/* Rows in even chunks; the first rank has none of every third tensor, the second all of it. */
static void share_out(rank *r)
{
    for (size_t i = 0; i < N_TENSORS; i++) {
        uint64_t rows = weights_shape(i).rows;
        uint64_t of = i % 3 == 2 && r->world > 1 ? 1 : r->world;
        uint64_t part = of == 1 ? (r->rank == 1 || r->world == 1 ? 0 : 1) : r->rank;
        r->first[i] = part < of ? rows * part / of : rows;
        r->end[i] = part < of ? rows * (part + 1) / of : rows;
    }
}

static bool parse(rank *r, char **v)
{
    r->rank = (uint32_t)strtoul(v[2], NULL, 10);
    r->world = (uint32_t)strtoul(v[3], NULL, 10);
    for (size_t i = 0; i < sizeof r->world_id; i++)
        if (sscanf(v[5] + 2 * i, "%2hhx", &r->world_id[i]) != 1)
            return false;
    r->life = weights_life(r->world_id);
    r->random = strtoull(v[6], NULL, 10) | 1;
    r->start_ns = strtoull(v[7], NULL, 10);
    r->period_ns = strtoull(v[8], NULL, 10) * MS;
    r->lease_ns = strtoull(v[9], NULL, 10) * MS;
    r->snapshot = strcmp(v[10], "snapshot") == 0;
    return r->rank < r->world && r->world <= BOARD_RANKS && r->period_ns > 0;
}

/* False: it is not time for a step yet, or the ranks rest. */
static bool is_due(const rank *r)
{
    uint64_t next = r->start_ns + r->step * r->period_ns, now = board_now();
    bool rests = r->step >= last_step(r) && r->published && !r->paused;
    if (now >= next && !rests)
        return true;
    board_sleep(now < next && next - now < 20 * MS ? next - now : 20 * MS);
    return false;
}

static void live(rank *r)
{
    while (!ended && !atomic_load(&r->board->over)) {
        if (!is_due(r))
            continue;
        if (r->paused)
            resume(r);
        else if (!r->published)
            publish(r);
        else if (board_random(&r->random) % 100 < ACTS_PERCENT)
            act(r);
        else
            train(r);
    }
}

int main(int argc, char **argv)
{
    rank r = {0};
    if (argc == 1)
        return memory_there() ? 0 : 77;
    if (argc != 11 || !parse(&r, argv))
        return 2;
    board *b = board_open(argv[1]);
    r.board = b;
    r.told = &b->ranks[r.rank];
    signal(SIGTERM, on_end);
    share_out(&r);
    get_memory(&r);
    atomic_store(&r.told->step, 0);
    if (!create(&r, (uint16_t)strtoul(argv[4], NULL, 10)))
        return 3;
    atomic_store(&r.told->life, r.life);
    live(&r);
    fanin_server_destroy(&r.server, 200);
    for (size_t i = 0; i < N_TENSORS; i++)
        memory_free(r.memory[i], shard_bytes(&r, i));
    return memory_left(0) ? 4 : 0;
}
