/* SPDX-License-Identifier: Apache-2.0 */
/* Links that alter bits: whatever is altered on the way, no wrong byte is delivered. */
#include "clock.h"
#include "ends.h"
#include "rank_proxy.h"
#include "testing.h"
#include <sched.h>

#define ROWS 60
#define REQUEST_BYTES ((uint64_t)1 << 20) /* of the client */
#define FEW 50                            /* columns: one reply */
#define MANY 40000 /* nine megabytes: threads check, where there are CPUs for them */

/* How long a rank may be silent: for hellos that never end, and where all that fails is a fault. */
enum { HASTY_MS = 100, PATIENT_MS = 5000 };

static uint32_t published[ROWS * MANY], landed[ROWS * MANY];
static uint32_t columns = FEW;

static size_t size(void)
{
    return ROWS * columns * sizeof landed[0];
}

static fanin_server *start_server(void)
{
    char address[32];
    const fanin_server_config config = make_server_config();
    fanin_server *server = make_server(&config, address, sizeof address);
    publish_matrix(server, published, ROWS, columns);
    return server;
}

typedef struct outcome {
    fanin_error error;
    fanin_result_info info;
    uint64_t passed[2][2]; /* of the first two connections, by way */
    bool flipped;
} outcome;

static fanin_client_config config_of(uint32_t limit_ms)
{
    fanin_client_config config = make_client_config();
    config.no_unix = true;
    config.streams_per_rank = 1;
    config.connect_timeout_ms = config.lost_ms = limit_ms;
    return config;
}

/* Into `landed`. */
static fanin_status pull_once(fanin_client *client, outcome *out)
{
    *out =
        (outcome){.error = FANIN_ERROR_INIT, .info = {.struct_size = sizeof out->info}};
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result *result = NULL;
    fanin_box box;
    fanin_tensor tensor =
        make_tensor("matrix", FANIN_DTYPE_U32, ROWS, columns, &box, landed);
    memset(landed, 0, size());
    fanin_status status =
        fanin_client_pull(client, &options, &tensor, 1, &result, &out->error);
    if (result)
        fanin_result_get(result, &out->info);
    out->info.path_reason = out->info.ranks_json = NULL;
    fanin_result_free(&result);
    return status;
}

static void pull(flip *p, fanin_server *server, uint32_t limit_ms, bool no_checksums,
                 outcome *out)
{
    fanin_client_config config = config_of(limit_ms);
    config.no_checksums = no_checksums;
    rank_proxy proxy;
    rank_proxy_start_flip(&proxy, fanin_server_port(server), p);
    fanin_client *client = make_client(&config);
    const char *address = proxy.address;
    *out = (outcome){.error = FANIN_ERROR_INIT};
    if (fanin_client_connect(client, &address, 1, 10000, &out->error) == FANIN_OK)
        (void)pull_once(client, out);
    fanin_client_destroy(&client);
    rank_proxy_stop(&proxy);
    out->flipped = atomic_load(&p->flipped);
    for (int i = 0; i < 4; i++)
        out->passed[i / 2][i % 2] = atomic_load(&p->passed[i / 2][i % 2]);
}

static bool is_right(const outcome *o)
{
    return o->info.step == 41 && memcmp(landed, published, size()) == 0;
}

static uint64_t greeting_bytes(unsigned connection, flip_way way)
{
    static const uint64_t sizes[2][2] = {{100, 400}, {100, 400}};
    return sizes[connection][way];
}

/* Whether bytes that are wrong, if any, are asked for again at this place: then the pull succeeds.
   */
static bool is_mended(unsigned connection, flip_way way, uint64_t at)
{
    return at >= greeting_bytes(connection, way);
}

/* A busy machine is slow as well: whether a hasty pull failed of that, a patient one tells. */
static void alter_one(fanin_server *server, unsigned connection, flip_way way,
                      uint64_t at)
{
    static const uint32_t limits_ms[] = {HASTY_MS, PATIENT_MS};
    bool mended = is_mended(connection, way, at);
    outcome o = {.flipped = false};
    for (int i = 0; i < 2; i++) {
        flip p = {.connection = connection, .way = way, .at = at, .bit = at % 8};
        pull(&p, server, limits_ms[i], false, &o);
        assert_true(o.error.status != FANIN_OK || is_right(&o));
        if (o.flipped && (o.error.status == FANIN_OK || !mended))
            return;
    }
    assert_true(o.flipped);
    assert_ok(o.error.status, o.error);
}

/* Some hundred positions of one way of one connection. */
static void alter(fanin_server *server, unsigned connection, flip_way way,
                  uint64_t total)
{
    uint64_t step = total / 96 + 1;
    for (uint64_t at = 0; at < total; at += step)
        alter_one(server, connection, way, at);
}

TEST(no_altered_bit_arrives)
{
    fanin_server *server = start_server();
    flip clean = {.at = UINT64_MAX};
    outcome o;
    pull(&clean, server, PATIENT_MS, false, &o);
    assert_ok(o.error.status, o.error);
    assert_true(is_right(&o));
    assert_int_equal(o.info.transport_checksums, FANIN_CHECKSUMS_ALL);
    assert_int_equal(o.info.restarts, 0);
    for (int i = 0; i < 4; i++)
        alter(server, (unsigned)i / 2, (flip_way)(i % 2), o.passed[i / 2][i % 2]);
    fanin_server_destroy(&server, 0);
}

/* What is altered, says so and is asked for again. */
static void ask_again(uint32_t columns_now)
{
    columns = columns_now;
    fanin_server *server = start_server();
    flip clean = {.at = UINT64_MAX};
    outcome o;
    pull(&clean, server, PATIENT_MS, false, &o);
    /* In the last reply's bytes, its seal, and its header. */
    uint64_t total = o.passed[1][FLIP_TO_CLIENT];
    const uint64_t last = columns == FEW ? size() : size() % REQUEST_BYTES;
    const uint64_t places[] = {total - size() / 2, total - 3, total - last - 8 - 4};
    for (int i = 0; i < 3; i++) {
        flip p = {.connection = 1, .way = FLIP_TO_CLIENT, .at = places[i]};
        pull(&p, server, PATIENT_MS, false, &o);
        assert_ok(o.error.status, o.error);
        assert_true(is_right(&o));
        assert_int_equal(o.info.restarts, 1);
        assert_int_equal(o.info.stale, 0);
    }
    fanin_server_destroy(&server, 0);
    columns = FEW;
}

TEST(altered_weights_are_asked_for_again)
{
    ask_again(FEW);
    ask_again(MANY);
}

/* The proxy does what it says, and this is what checksums are for. */
TEST(without_checksums_it_arrives)
{
    fanin_server *server = start_server();
    flip clean = {.at = UINT64_MAX};
    outcome o;
    pull(&clean, server, PATIENT_MS, true, &o);
    assert_ok(o.error.status, o.error);
    assert_true(is_right(&o));
    assert_int_equal(o.info.transport_checksums, FANIN_CHECKSUMS_NONE);
    flip p = {.connection = 1,
              .way = FLIP_TO_CLIENT,
              .at = o.passed[1][FLIP_TO_CLIENT] - size() / 2};
    pull(&p, server, PATIENT_MS, true, &o);
    assert_ok(o.error.status, o.error);
    assert_false(is_right(&o));
    fanin_server_destroy(&server, 0);
}

/* Whether two pulls come through, without a new beginning where another connection reads all. */
static bool come_through(const fanin_client_config *config, const char *address,
                         flip *p, outcome *o)
{
    fanin_client *client = make_client(config);
    *o = (outcome){.error = FANIN_ERROR_INIT};
    bool good = fanin_client_connect(client, &address, 1, 10000, &o->error) == FANIN_OK;
    for (int i = 0; i < 2 && good; i++) {
        good = pull_once(client, o) == FANIN_OK;
        assert_true(!good || (atomic_load(&p->flipped) && is_right(o)));
        good = good && (config->threads == 1 || o->info.restarts == 0);
        for (deadline late = deadline_in_ms(200); !deadline_passed(late);)
            sched_yield(); /* what is not made by now has had its time */
    }
    fanin_client_destroy(&client);
    return good;
}

/* Of an answer to a data connection's hello that says it is longer than it is the rest never comes.
   It is not waited for as long as there is time. As above, what a hasty client does not get tells
   nothing. */
static void never_end(unsigned threads, unsigned connection)
{
    static const uint32_t limits_ms[] = {200, PATIENT_MS};
    fanin_server *server = start_server();
    outcome o;
    bool good = false;
    for (int i = 0; i < 2 && !good; i++) {
        rank_proxy proxy;
        flip p = {.connection = connection, .way = FLIP_TO_CLIENT, .at = 17};
        rank_proxy_start_flip(&proxy, fanin_server_port(server), &p);
        fanin_client_config config = config_of(PATIENT_MS);
        config.threads = config.streams_per_rank = threads;
        config.connect_timeout_ms = limits_ms[i];
        good = come_through(&config, proxy.address, &p, &o);
        rank_proxy_stop(&proxy);
    }
    assert_ok(o.error.status, o.error);
    assert_true(good);
    fanin_server_destroy(&server, 0);
}

TEST(a_hello_that_never_ends_is_given_up)
{
    columns = MANY; /* as much as two threads read */
    never_end(1, 1);
    never_end(2, 1);
    never_end(2, 2);
}
