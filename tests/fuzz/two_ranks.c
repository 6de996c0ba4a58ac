/* SPDX-License-Identifier: Apache-2.0 */
#include "two_ranks.h"

#include "clock.h"
#include "ends.h"
#include "fuzz.h"
#include "on_device.h"
#include <sched.h>
#include <string.h>

#define LEASE_MS 20
#define HALF_BYTES (BYTES / RANKS)
#define HALF_ROWS (ROWS / RANKS)
#define HALF_SLOW (SLOW / RANKS)
#define PATCHES 4

enum {
    ACT_UPDATE,
    ACT_BEGIN,
    ACT_COMMIT,
    ACT_PAUSE,
    ACT_ABORT,
    ACT_WITHDRAW,
    ACT_EXCHANGE,
};

typedef struct shards {
    uint8_t bytes[HALF_BYTES];
    float matrix[HALF_ROWS][COLUMNS];
    float adapter[HALF_ROWS][COLUMNS]; /* both tensors of it */
} shards;

typedef struct held {
    fanin_server *server;
    unsigned rank;
    char address[32];
    uint64_t step, sessions;
    bool updates;    /* FULL: between its begin and what ends that */
    bool unreadable; /* and behind that, if nothing was published */
    fanin_box boxes[5];
    uint8_t slow[HALF_SLOW];
    shards here;
    shards *lie; /* here, or on a device, where nobody else touches them */
} held;

struct two_ranks {
    held ranks[RANKS];
    const char *addresses[RANKS];
};

uint8_t ranks_byte(uint64_t step, unsigned at)
{
    return (uint8_t)(at * 7 + step * 31 + 1);
}

/* One in 97 is another at each step, and stays so for as many. */
uint8_t ranks_slow_byte(uint64_t step, unsigned at)
{
    uint64_t changed = step;
    while (changed > 0 && (at + 13 * changed) % 97 != 3)
        changed--;
    return (uint8_t)(at * 5 + changed * 29);
}

float ranks_element(uint64_t step, unsigned row, unsigned column)
{
    return (float)(row * COLUMNS + column + 1000 * (step % 1000));
}

/* ------------------------------------------------------------------ trainer */

/* A rank's part of a matrix: so many of its rows. */
static fanin_tensor part(const char *name, unsigned rank, uint64_t rows,
                         uint64_t columns, void *memory, fanin_box *box)
{
    fanin_tensor t = make_tensor(name, FANIN_DTYPE_F32, rows, columns, box, memory);
    box->offset[0] = rank * rows / RANKS;
    box->extent[0] = rows / RANKS;
    return t;
}

static fanin_tensor matrix_of(held *r)
{
    return part("matrix", r->rank, ROWS, COLUMNS, r->lie->matrix, &r->boxes[1]);
}

static void write_shards(held *r)
{
    if (r->lie != &r->here)
        device_copy(DEVICE_OF_RANKS, r->lie, &r->here, sizeof r->here);
}

static void scribble(held *r)
{
    memset(r->here.bytes, 0xee, sizeof r->here.bytes);
    memset(r->here.matrix, 0xee, sizeof r->here.matrix);
    write_shards(r);
}

static void begin(held *r)
{
    check(r->updates || fanin_server_begin_update(r->server, FULL, NULL) == FANIN_OK);
    r->updates = true;
    scribble(r);
}

static void publish_changes(held *r, uint64_t step)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    o.deltas = PATCHES;
    if (step > 1)
        check(fanin_server_begin_update(r->server, CHANGES, NULL) == FANIN_OK);
    for (unsigned i = 0; i < HALF_SLOW; i++)
        r->slow[i] = ranks_slow_byte(step, r->rank * HALF_SLOW + i);
    check(fanin_server_commit(r->server, CHANGES, step, &o, NULL) == FANIN_OK);
}

static void publish(held *r, uint64_t step)
{
    unsigned rank = r->rank;
    for (unsigned i = 0; i < HALF_BYTES; i++)
        r->here.bytes[i] = ranks_byte(step, rank * HALF_BYTES + i);
    for (unsigned i = 0; i < HALF_ROWS * COLUMNS; i++)
        r->here.matrix[i / COLUMNS][i % COLUMNS] =
            ranks_element(step, rank * HALF_ROWS + i / COLUMNS, i % COLUMNS);
    write_shards(r);
    check(fanin_server_commit(r->server, FULL, step, NULL, NULL) == FANIN_OK);
    publish_changes(r, step);
    r->step = step;
    r->updates = r->unreadable = false;
}

/* Without publishing: what is there is no step. */
static void end(held *r, fanin_status status)
{
    check(status == FANIN_OK);
    r->updates = false;
    r->unreadable = true;
    scribble(r);
}

/* The matrix's memory is no shard of the rank's for a while. */
static void exchange(held *r)
{
    const fanin_tensor matrix = matrix_of(r);
    check(fanin_server_remove(r->server, FULL, "matrix", NULL) == FANIN_OK);
    scribble(r);
    check(fanin_server_put(r->server, FULL, &matrix, 1, false, NULL) == FANIN_OK);
    publish(r, r->step + 1);
}

static void act(held *r, unsigned what)
{
    bool is_stable = !r->updates && !r->unreadable;
    if (what == ACT_UPDATE || what == ACT_BEGIN)
        begin(r);
    if (what == ACT_UPDATE || (what == ACT_COMMIT && r->updates))
        publish(r, r->step + 1);
    if (what == ACT_PAUSE && is_stable)
        check(fanin_server_pause(r->server, FULL, NULL, NULL) == FANIN_OK &&
              fanin_server_resume(r->server, FULL, NULL) == FANIN_OK);
    if (what == ACT_ABORT && r->updates)
        end(r, fanin_server_abort_update(r->server, FULL, NULL));
    if (what == ACT_WITHDRAW && is_stable)
        end(r, fanin_server_withdraw(r->server, FULL, NULL));
    if (what == ACT_EXCHANGE)
        exchange(r);
}

void ranks_act(void *ranks, uint16_t number)
{
    two_ranks *t = ranks;
    unsigned who = number & 3;
    for (unsigned rank = 0; rank < RANKS; rank++)
        if (who == 0 || (who & 1u << rank))
            act(&t->ranks[rank], number >> 2 & 7);
}

uint64_t ranks_settle(two_ranks *t)
{
    const held *a = &t->ranks[0], *b = &t->ranks[1];
    uint64_t step = a->step > b->step ? a->step : b->step;
    if (a->step == b->step && !a->updates && !b->updates && !a->unreadable &&
        !b->unreadable)
        return step;
    for (unsigned rank = 0; rank < RANKS; rank++) {
        begin(&t->ranks[rank]);
        publish(&t->ranks[rank], step + 1);
    }
    return step + 1;
}

/* -------------------------------------------------------------------- start */

static fanin_tensor vector(const char *name, uint64_t bytes, void *half, held *r,
                           fanin_box *box)
{
    fanin_tensor t = make_tensor(name, FANIN_DTYPE_U8, bytes, 0, box, half);
    box->offset[0] = r->rank * bytes / RANKS;
    box->extent[0] = bytes / RANKS;
    return t;
}

static void put(held *r, const char *publication, const fanin_tensor tensors[2],
                const fanin_pair *metadata, size_t n)
{
    check(fanin_server_put(r->server, publication, tensors, 2, false, NULL) ==
          FANIN_OK);
    check(fanin_server_set_metadata(r->server, publication, metadata, n, NULL) ==
          FANIN_OK);
}

static void start(held *r, const char *secret_file)
{
    static const fanin_pair metadata[] = {{"base_model_name_or_path", "base"},
                                          {"lora_alpha", "16"},
                                          {"config", "{\"hidden_size\": 16}"}};
    const unsigned rank = r->rank;
    fanin_server_config config = make_server_config();
    config.peer_cpu = 0; /* how often inputs come is not what they are */
    config.lease_ms = LEASE_MS;
    config.rank = rank;
    config.world_size = RANKS;
    config.secret_file = secret_file;
    r->server = make_server(&config, r->address, sizeof r->address);
    const fanin_tensor full[] = {vector("bytes", BYTES, r->lie->bytes, r, &r->boxes[0]),
                                 matrix_of(r)};
    const fanin_tensor slow = vector("slow", SLOW, r->slow, r, &r->boxes[4]);
    const fanin_tensor lora[] = {part("model.q.lora_A.weight", rank, ROWS, COLUMNS,
                                      r->lie->adapter, &r->boxes[2]),
                                 part("model.q.lora_B.weight", rank, COLUMNS, ROWS,
                                      r->lie->adapter, &r->boxes[3])};
    put(r, FULL, full, metadata + 2, 1);
    put(r, LORA, lora, metadata, 2);
    check(fanin_server_put(r->server, CHANGES, &slow, 1, false, NULL) == FANIN_OK);
    publish(r, 1);
    check(fanin_server_commit(r->server, LORA, 1, NULL, NULL) == FANIN_OK);
}

two_ranks *ranks_start(const char *secret_file, bool on_device)
{
    two_ranks *t = calloc(1, sizeof *t);
    check(t != NULL);
    for (unsigned rank = 0; rank < RANKS; rank++) {
        held *r = &t->ranks[rank];
        r->rank = rank;
        r->lie = on_device ? device_room(DEVICE_OF_RANKS, sizeof r->here) : &r->here;
        start(r, secret_file);
        t->addresses[rank] = r->address;
    }
    return t;
}

const char *const *ranks_addresses(const two_ranks *t)
{
    return t->addresses;
}

uint16_t ranks_port(const two_ranks *t, uint32_t rank)
{
    return fanin_server_port(t->ranks[rank].server);
}

/* --------------------------------------------------------------------- left */

static fanin_server_stats stats_of(const held *r)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    check(fanin_server_get_stats(r->server, &stats) == FANIN_OK);
    return stats;
}

void ranks_check_left(two_ranks *t)
{
    deadline soon = deadline_in_ms(MOST_MS);
    for (held *r = t->ranks; r < t->ranks + RANKS; r++) {
        if (r->sessions == 0)
            r->sessions = stats_of(r).sessions;
        for (fanin_server_stats s;
             s = stats_of(r), s.sessions != r->sessions || s.leases != 0;) {
            check(!deadline_passed(soon));
            sched_yield();
        }
    }
}
