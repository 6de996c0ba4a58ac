/* SPDX-License-Identifier: Apache-2.0 */
/* Trainers whose memory is away for a while: what can be looked at, what is served afterwards. What
   fails and how soon is told by test_server_pause.c and test_agree.c. */
#include "ends.h"
#include "local_world.h"
#include "testing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define RUN "lora:0"
#define LONG_MS 3600000 /* whoever waits for that has failed */

/* What a test of a world has. */
static world w;
static fanin_client *client;

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin(size_t size, world_cut cut)
{
    world_begin(&w, size, cut, 1);
    client = world_client(&w, FANIN_PATH_STREAM);
}

static void pause_rank(size_t rank)
{
    assert_works(fanin_server_pause(w.ranks[rank].server, RUN, NULL, ERROR));
}

static void resume_rank(size_t rank)
{
    assert_works(fanin_server_resume(w.ranks[rank].server, RUN, ERROR));
}

static bool see_paused(void *cookie, const fanin_publication_info *info)
{
    unsigned *paused = cookie;
    assert_int_equal(info->state, info->rank == 1 ? FANIN_PUBLICATION_PAUSED
                                                  : FANIN_PUBLICATION_STABLE);
    *paused += info->state == FANIN_PUBLICATION_PAUSED;
    assert_int_equal(info->step, 1);
    return true;
}

/* What the command shows, standard error included. */
static void expect_listed(void)
{
    const char *program = getenv("NIXL_FETCH");
    char command[1024], text[8192];
    if (!program || !program[0])
        return; /* a build without it */
    snprintf(command, sizeof command, "'%s' list %s,%s 2>&1", program, w.addresses[0],
             w.addresses[1]);
    FILE *output = popen(command, "re");
    assert_non_null(output);
    size_t size = fread(text, 1, sizeof text - 1, output);
    text[size] = '\0';
    assert_int_equal(pclose(output), 0);
    assert_non_null(strstr(text, "paused"));
    assert_non_null(strstr(text, "is paused: trainer memory offloaded"));
}

static bool see_pair(void *cookie, const char *key, const char *value)
{
    return true;
}

CASE(test_looking)
{
    begin(2, CUT_CHUNK0);
    fanin_error error = FANIN_ERROR_INIT;
    unsigned paused = 0;
    pause_rank(1);
    assert_ok(fanin_client_list(client, 5000, see_paused, &paused, &error), error);
    assert_int_equal(paused, 1);
    expect_listed();
    /* The other rank has the same metadata. */
    assert_ok(fanin_client_metadata(client, RUN, 5000, see_pair, NULL, &error), error);
    pause_rank(0);
    assert_int_equal(
        fanin_client_metadata(client, RUN, LONG_MS, see_pair, NULL, &error),
        FANIN_ERR_PAUSED);
    resume_rank(0);
    resume_rank(1);
    assert_ok(fanin_client_metadata(client, RUN, 5000, see_pair, NULL, &error), error);
}

/* ----------------------------------------------- memory that comes and goes */

#define BYTES ((size_t)1 << 20)

/* A trainer of one tensor, whose memory is unmapped while it is paused. */
typedef struct trainer {
    fanin_server *server;
    char address[32];
    uint8_t *memory;
    uint64_t step;
    atomic_bool stop;
} trainer;

static uint8_t value_at(uint64_t step)
{
    return (uint8_t)(step * 37 + 11);
}

static fanin_tensor tensor_at(fanin_box *box, void *memory)
{
    return make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, box, memory);
}

/* At another address than before, as far as the kernel sees fit. */
static uint8_t *map_memory(uint8_t value)
{
    uint8_t *memory =
        mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    memset(memory, value, BYTES);
    return memory;
}

static void put(trainer *t)
{
    fanin_box box;
    fanin_tensor tensor = tensor_at(&box, t->memory);
    assert_works(fanin_server_put(t->server, RUN, &tensor, 1, true, ERROR));
}

static void train(trainer *t)
{
    assert_works(fanin_server_begin_update(t->server, RUN, ERROR));
    t->step++;
    memset(t->memory, value_at(t->step), BYTES);
    assert_works(fanin_server_commit(t->server, RUN, t->step, NULL, ERROR));
}

/* Away and back: where it was, or elsewhere. */
static void offload(trainer *t, bool move)
{
    assert_works(fanin_server_pause(t->server, RUN, NULL, ERROR));
    if (move) {
        uint8_t *fresh = map_memory(value_at(t->step));
        assert_int_equal(munmap(t->memory, BYTES), 0);
        t->memory = fresh;
        put(t);
    } else {
        assert_int_equal(mprotect(t->memory, BYTES, PROT_NONE), 0);
        assert_int_equal(mprotect(t->memory, BYTES, PROT_READ | PROT_WRITE), 0);
        memset(t->memory, 0xee, BYTES);
        memset(t->memory, value_at(t->step), BYTES);
    }
    assert_works(fanin_server_resume(t->server, RUN, ERROR));
}

static void trainer_start(trainer *t)
{
    fanin_server_config config = make_server_config();
    config.flags = 0;
    config.lease_ms = 200;
    t->server = make_server(&config, t->address, sizeof t->address);
    t->memory = map_memory(0);
    put(t);
    train(t);
}

static void trainer_stop(trainer *t)
{
    fanin_server_destroy(&t->server, 0);
    munmap(t->memory, BYTES);
}

static fanin_client *trainer_client(const trainer *t, fanin_path path)
{
    const char *address = t->address;
    fanin_client_config config = make_client_config();
    config.no_ucx = false;
    config.path = path;
    return connect_client(&config, &address, 1);
}

static fanin_status pull_tensor(fanin_client *by, uint8_t *into, uint64_t *step,
                                fanin_error *error)
{
    fanin_box box;
    fanin_tensor tensor = tensor_at(&box, into);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_status status = fanin_client_pull(by, &options, &tensor, 1, &result, error);
    if (status == FANIN_OK)
        fanin_result_get(result, &info);
    *step = info.step;
    fanin_result_free(&result);
    return status;
}

static bool note_version(void *cookie, const fanin_publication_info *info)
{
    *(uint64_t *)cookie = info->catalog_version;
    return true;
}

static void expect_pulled(const trainer *t, fanin_client *by)
{
    uint8_t *into = malloc(BYTES);
    uint64_t step;
    assert_non_null(into);
    assert_works(pull_tensor(by, into, &step, ERROR));
    assert_int_equal(step, t->step);
    for (size_t i = 0; i < BYTES; i++)
        if (into[i] != value_at(step))
            fail_msg("byte %zu is %d, not %d", i, into[i], value_at(step));
    free(into);
}

static void offload_on(fanin_path path)
{
    trainer t = {0};
    trainer_start(&t);
    fanin_client *by = trainer_client(&t, path);
    expect_pulled(&t, by);
    uint64_t before, after;
    for (int round = 0; round < 6; round++) {
        bool move = round % 2;
        assert_works(fanin_client_list(by, 5000, note_version, &before, ERROR));
        offload(&t, move);
        expect_pulled(&t, by);
        assert_works(fanin_client_list(by, 5000, note_version, &after, ERROR));
        /* Nothing of this memory was registered or mapped that would have to end. */
        assert_int_equal(after != before, move);
        if (round == 3)
            train(&t);
    }
    fanin_client_destroy(&by);
    trainer_stop(&t);
}

TEST(test_offload_stream)
{
    offload_on(FANIN_PATH_STREAM);
}

TEST(test_offload_cma)
{
    if (!world_has_cma())
        skip();
    offload_on(FANIN_PATH_CMA);
}

typedef struct reading {
    trainer *from;
    fanin_client *client;
    uint64_t good, paused, wrong;
    fanin_status other;
    fanin_error error;
} reading;

static void *read_on(void *cookie)
{
    reading *r = cookie;
    uint8_t *into = malloc(BYTES);
    while (into && !atomic_load(&r->from->stop)) {
        uint64_t step;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status = pull_tensor(r->client, into, &step, &error);
        if (status == FANIN_OK) {
            r->good++;
            for (size_t i = 0; i < BYTES; i++)
                r->wrong += into[i] != value_at(step);
        } else if (status == FANIN_ERR_PAUSED) {
            r->paused++;
        } else {
            r->other = status;
            r->error = error;
            break;
        }
    }
    free(into);
    return NULL;
}

/* Pulls without pause, of the reader, while the trainer's memory comes and goes: each has the bytes
   of its step, or says that the trainer is paused. */
TEST(test_reader_loop)
{
    trainer t = {0};
    trainer_start(&t);
    atomic_init(&t.stop, false);
    reading r = {.from = &t, .client = trainer_client(&t, FANIN_PATH_STREAM)};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, read_on, &r), 0);
    for (int round = 0; round < 150; round++) {
        if (round % 3 == 0)
            train(&t);
        offload(&t, round % 2);
    }
    atomic_store(&t.stop, true);
    pthread_join(thread, NULL);
    if (r.other)
        fail_msg("%s: %s", fanin_status_name(r.other), r.error.message);
    assert_int_equal(r.wrong, 0);
    assert_true(r.good + r.paused > 0);
    expect_pulled(&t, r.client);
    fanin_client_destroy(&r.client);
    trainer_stop(&t);
}
