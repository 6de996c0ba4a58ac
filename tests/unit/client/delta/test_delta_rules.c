/* SPDX-License-Identifier: Apache-2.0 */
/* For each rule of patches a property of real ranks and a client that holds with it and is broken
   without it (tests/model/delta.pml). Built with FANIN_TEST_HOOKS, which lets a test take rules
   out. Digests are not compared: they would mend what the rules prevent. */
#include "local_world.h"
#include "net/client_rules.h"
#include "testing.h"

#include <stdatomic.h>

#define RANKS 2
#define HALF ((size_t)400001) /* bytes of a rank */
#define BYTES (RANKS * HALF)
#define FEW 997 /* bytes between two that change */
#define RUN "lora:0"
#define OTHER "lora:1"

/* One tensor of bytes in each publication, the first half on rank 0. */
typedef struct scene {
    fanin_server *servers[RANKS];
    uint8_t *shards; /* of both ranks */
    uint8_t *memory; /* the reader's */
    char addresses[RANKS][32];
    uint8_t world;
    fanin_client *client;
    fanin_destination *into;
    fanin_result_info info;
} scene;

static fanin_tensor tensor_in(fanin_box *box)
{
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = "t",
                          .dtype = FANIN_DTYPE_U8,
                          .n_dims = 1,
                          .shape = {BYTES},
                          .boxes = box,
                          .n_boxes = 1};
}

/* --------------------------------------------------------------------- trainer */

static void start_rank(scene *s, uint32_t rank, uint16_t port)
{
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, s->world, sizeof config.world_id);
    config.rank = rank;
    config.world_size = RANKS;
    config.base_port = port ? (uint16_t)(port - rank) : 0;
    config.lease_ms = 0;
    assert_works(fanin_server_create(&config, &s->servers[rank], ERROR));
    fanin_box box = {
        .offset = {rank * HALF}, .extent = {HALF}, .address = s->shards + rank * HALF};
    fanin_tensor shard = tensor_in(&box);
    assert_works(fanin_server_put(s->servers[rank], RUN, &shard, 1, false, ERROR));
    assert_works(fanin_server_put(s->servers[rank], OTHER, &shard, 1, false, ERROR));
    snprintf(s->addresses[rank], sizeof s->addresses[rank], "127.0.0.1:%u",
             (unsigned)fanin_server_port(s->servers[rank]));
}

static void commit(scene *s, const char *run, uint64_t step)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    o.deltas = 4;
    for (size_t i = 0; i < RANKS; i++)
        assert_works(fanin_server_commit(s->servers[i], run, step, &o, ERROR));
}

/* One of @p of bytes becomes another; they are other ones for each step. */
static void train(scene *s, uint64_t step, size_t of)
{
    for (size_t i = 0; i < RANKS; i++)
        assert_works(fanin_server_begin_update(s->servers[i], RUN, ERROR));
    for (size_t i = step % of; i < BYTES; i += of)
        s->shards[i] += 1 + (uint8_t)step;
    commit(s, RUN, step);
}

static void start_ranks(scene *s)
{
    s->world++;
    for (size_t i = 0; i < BYTES; i++)
        s->shards[i] = (uint8_t)(i * 31 + s->world * 97);
    for (uint32_t i = 0; i < RANKS; i++) {
        uint16_t port = s->servers[i] ? fanin_server_port(s->servers[i]) : 0;
        fanin_server_destroy(&s->servers[i], 0);
        start_rank(s, i, port);
    }
    commit(s, RUN, 1);
}

/* ---------------------------------------------------------------------- reader */

static fanin_client *make_client(const scene *s)
{
    const char *addresses[] = {s->addresses[0], s->addresses[1]};
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = FANIN_PATH_STREAM;
    fanin_client *client = NULL;
    assert_works(fanin_client_create(&config, &client, ERROR));
    assert_works(fanin_client_connect(client, addresses, RANKS, 5000, ERROR));
    return client;
}

static fanin_destination *prepare(uint8_t *memory)
{
    fanin_destination *into = NULL;
    fanin_box box = {.extent = {BYTES}, .address = memory};
    fanin_tensor wanted = tensor_in(&box);
    assert_works(fanin_destination_create(&wanted, 1, &into, ERROR));
    return into;
}

static fanin_pull_options options_of(const char *run, bool deltas)
{
    fanin_pull_options o;
    fanin_pull_options_init(&o, sizeof o);
    o.publication = run;
    o.timeout_ms = 10000;
    o.deltas = deltas;
    return o;
}

static void pull(scene *s, const char *run, bool deltas)
{
    fanin_pull_options o = options_of(run, deltas);
    fanin_result *result = NULL;
    assert_works(fanin_client_pull_into(s->client, &o, s->into, &result, ERROR));
    s->info = (fanin_result_info){.struct_size = sizeof s->info};
    fanin_result_get(result, &s->info);
    fanin_result_free(&result);
}

/* Whether the memory holds what the trainer does. */
static bool is_right(const scene *s)
{
    return memcmp(s->memory, s->shards, BYTES) == 0;
}

/* Step 2 has come by patches. */
static void start(scene *s)
{
    *s = (scene){.shards = malloc(BYTES), .memory = malloc(BYTES)};
    assert_non_null(s->shards);
    assert_non_null(s->memory);
    start_ranks(s);
    s->client = make_client(s);
    s->into = prepare(s->memory);
    pull(s, RUN, true);
    assert_int_equal(s->info.base_step, 0);
    train(s, 2, FEW);
    pull(s, RUN, true);
    assert_int_equal(s->info.base_step, 1);
    assert_true(is_right(s));
}

static void stop(scene *s)
{
    fanin_destination_free(&s->into);
    fanin_client_destroy(&s->client);
    for (uint32_t i = 0; i < RANKS; i++)
        fanin_server_destroy(&s->servers[i], 0);
    free(s->shards);
    free(s->memory);
}

static void check(bool (*holds)(void), unsigned rules)
{
    atomic_store(&client_rules_off, 0);
    bool with = holds();
    atomic_store(&client_rules_off, rules);
    bool without = holds();
    atomic_store(&client_rules_off, 0);
    assert_true(with);
    assert_false(without);
}

/* ------------------------------------------------------------------ properties */

/* A step that has no patch, as most of it changes, is between what is held and what there is. */
static bool a_gap_is_seen(void)
{
    scene s;
    start(&s);
    train(&s, 3, 2);
    train(&s, 4, FEW);
    pull(&s, RUN, true);
    bool good = is_right(&s);
    stop(&s);
    return good;
}

TEST(patches_go_onto_the_copy_that_they_lead_from)
{
    check(a_gap_is_seen, CLIENT_RULE_BASE);
}

/* The ranks start again, with the same steps and generations, and other bytes. Another reader has
   asked them for patches by then. */
static bool lives_do_not_mix(void)
{
    scene s;
    fanin_pull_options o = options_of(RUN, true);
    start(&s);
    start_ranks(&s);
    uint8_t *memory = malloc(BYTES);
    assert_non_null(memory);
    fanin_client *other = make_client(&s);
    fanin_destination *into = prepare(memory);
    assert_works(fanin_client_pull_into(other, &o, into, NULL, ERROR));
    train(&s, 2, FEW);
    train(&s, 3, FEW);
    pull(&s, RUN, true);
    bool good = is_right(&s);
    fanin_destination_free(&into);
    fanin_client_destroy(&other);
    free(memory);
    stop(&s);
    return good;
}

TEST(patches_go_onto_bytes_of_their_own_incarnation)
{
    check(lives_do_not_mix, CLIENT_RULE_BASE);
}

/* Publications have tensors of the same names, and are pulled into the same memory. */
static bool what_was_written_anew_is_no_base(void)
{
    scene s;
    start(&s);
    for (size_t i = 0; i < BYTES; i++)
        s.shards[i] ^= 0xff;
    commit(&s, OTHER, 1);
    pull(&s, OTHER, false);
    assert_true(is_right(&s));
    for (size_t i = 0; i < BYTES; i++)
        s.shards[i] ^= 0xff;
    train(&s, 3, FEW);
    pull(&s, RUN, true);
    bool good = is_right(&s);
    stop(&s);
    return good;
}

TEST(whoever_writes_a_destination_drops_its_base)
{
    check(what_was_written_anew_is_no_base, CLIENT_RULE_BASE_DROP);
}

static scene *overtaken;

/* All changes are here: the trainer goes on until the copy that they lead to is overwritten. */
bool __real_patch_segment_is_sound(const uint8_t *changes, uint64_t count,
                                   uint64_t length);
bool __wrap_patch_segment_is_sound(const uint8_t *changes, uint64_t count,
                                   uint64_t length);
bool __wrap_patch_segment_is_sound(const uint8_t *changes, uint64_t count,
                                   uint64_t length)
{
    scene *s = overtaken;
    overtaken = NULL;
    for (uint64_t step = 4; s && step <= 6; step++)
        train(s, step, FEW);
    return __real_patch_segment_is_sound(changes, count, length);
}

/* Step 3 is gone when all of its patches are here, and before it has been confirmed. */
static bool what_does_not_count_is_not_applied(void)
{
    scene s;
    start(&s);
    uint8_t *before = malloc(BYTES);
    assert_non_null(before);
    memcpy(before, s.memory, BYTES);
    train(&s, 3, FEW);
    fanin_pull_options o = options_of(RUN, true);
    o.rule = FANIN_STEP_EXACT;
    o.step = 3;
    overtaken = &s;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = fanin_client_pull_into(s.client, &o, s.into, NULL, &error);
    assert_int_not_equal(status, FANIN_OK);
    assert_null(overtaken);
    bool good = memcmp(s.memory, before, BYTES) == 0;
    pull(&s, RUN, true); /* and goes on from there */
    good = good && s.info.base_step == 2 && is_right(&s);
    free(before);
    stop(&s);
    return good;
}

TEST(patches_are_applied_after_all_ends)
{
    check(what_does_not_count_is_not_applied, CLIENT_RULE_APPLY);
}
