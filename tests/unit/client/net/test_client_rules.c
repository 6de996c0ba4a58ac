/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For each rule of the client a property that holds with it and is broken without it. No
 * collective couples the two ranks: each commits when the test says so. Built with
 * FANIN_TEST_HOOKS, which lets a test take rules out.
 */
#include "net/client_rules.h"
#include "local_world.h"
#include "messages.h"
#include "testing.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>

#define HALF                                                                           \
    ((size_t)12 << 20) /* bytes of a rank: more than one round of gets brings */

#define MOST_ENDS 16
#define MOST_FDS 512 /* descriptors that are looked at */
/* Of a rank that went unheard; the time it takes to find that out. */
#define LOST_MS 200

/* One tensor of bytes, the first half on rank 0; a rank's bytes all have one value. */
typedef struct pair {
    fanin_server *servers[2];
    uint8_t *memory[2];
    char addresses[2][32];
    uint8_t world;
    int ends[MOST_ENDS]; /* of connections to ranks that went unheard */
    size_t n_ends;
} pair;

static void start_rank(pair *p, uint32_t rank, uint16_t port)
{
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, p->world, sizeof config.world_id);
    config.rank = rank;
    config.world_size = 2;
    config.base_port = port ? (uint16_t)(port - rank) : 0;
    config.lease_ms = 0;
    assert_works(fanin_server_create(&config, &p->servers[rank], ERROR));
    fanin_box box = {
        .offset = {rank * HALF}, .extent = {HALF}, .address = p->memory[rank]};
    fanin_tensor shard = {.struct_size = sizeof(shard),
                          .name = "t",
                          .dtype = FANIN_DTYPE_U8,
                          .n_dims = 1,
                          .shape = {2 * HALF},
                          .boxes = &box,
                          .n_boxes = 1};
    assert_works(fanin_server_put(p->servers[rank], "lora:0", &shard, 1, false, ERROR));
    snprintf(p->addresses[rank], sizeof p->addresses[rank], "127.0.0.1:%u",
             (unsigned)fanin_server_port(p->servers[rank]));
}

static void commit(pair *p, uint32_t rank, uint8_t value, uint64_t step)
{
    assert_works(fanin_server_begin_update(p->servers[rank], "lora:0", ERROR));
    memset(p->memory[rank], value, HALF);
    assert_works(fanin_server_commit(p->servers[rank], "lora:0", step, NULL, ERROR));
}

static void start(pair *p)
{
    *p = (pair){.world = 1};
    for (uint32_t i = 0; i < 2; i++) {
        p->memory[i] = malloc(HALF);
        assert_non_null(p->memory[i]);
        start_rank(p, i, 0);
        commit(p, i, 10, 1);
    }
}

/* A new life of a rank on its old port. */
static void restart(pair *p, uint32_t rank)
{
    uint16_t port = fanin_server_port(p->servers[rank]);
    fanin_server_destroy(&p->servers[rank], 0);
    start_rank(p, rank, port);
}

static bool is_connection_at(int fd, uint16_t port)
{
    struct sockaddr_in here = {0}, there;
    socklen_t size = sizeof here, other = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &size) == 0 &&
           here.sin_family == AF_INET && ntohs(here.sin_port) == port &&
           getpeername(fd, (struct sockaddr *)&there, &other) == 0;
}

static atomic_bool unheard;

int __real_shutdown(int fd, int how);
int __wrap_shutdown(int fd, int how);
int __wrap_shutdown(int fd, int how)
{
    return atomic_load(&unheard) ? 0 : __real_shutdown(fd, how);
}

/* The same when its host had gone: the ends of its connections stay open, and say nothing. */
static void restart_unheard(pair *p, uint32_t rank)
{
    uint16_t port = fanin_server_port(p->servers[rank]);
    for (int fd = 0; fd < MOST_FDS; fd++) {
        if (!is_connection_at(fd, port))
            continue;
        assert_true(p->n_ends < MOST_ENDS);
        p->ends[p->n_ends] = fcntl(fd, F_DUPFD_CLOEXEC, MOST_FDS);
        assert_true(p->ends[p->n_ends] >= 0);
        p->n_ends++;
    }
    assert_true(p->n_ends > 0);
    atomic_store(&unheard, true);
    restart(p, rank);
    atomic_store(&unheard, false);
}

static void stop(pair *p)
{
    for (uint32_t i = 0; i < 2; i++) {
        fanin_server_destroy(&p->servers[i], 0);
        free(p->memory[i]);
    }
    for (size_t i = 0; i < p->n_ends; i++)
        close(p->ends[i]);
}

static fanin_client *make_client(fanin_path path)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = path;
    config.lost_ms = LOST_MS;
    config.no_unix = path == FANIN_PATH_STREAM;
    config.threads = 1; /* what overtakes a rank comes before it is read */
    fanin_client *client = NULL;
    assert_works(fanin_client_create(&config, &client, ERROR));
    return client;
}

static fanin_status connect_to(const pair *p, fanin_client *client)
{
    const char *addresses[] = {p->addresses[0], p->addresses[1]};
    fanin_error error = FANIN_ERROR_INIT;
    return fanin_client_connect(client, addresses, 2, 5000, &error);
}

/* Pulls step 1; *good: it was refused, or the bytes are @p value throughout. */
static fanin_status pull(fanin_client *client, uint8_t value,
                         fanin_progress_fn progress, void *cookie, bool *good,
                         fanin_error *error)
{
    uint8_t *bytes = malloc(2 * HALF);
    assert_non_null(bytes);
    fanin_box box = {.extent = {2 * HALF}, .address = bytes};
    fanin_tensor wanted = {.struct_size = sizeof wanted,
                           .name = "t",
                           .dtype = FANIN_DTYPE_U8,
                           .n_dims = 1,
                           .shape = {2 * HALF},
                           .boxes = &box,
                           .n_boxes = 1};
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    options.rule = FANIN_STEP_EXACT;
    options.step = 1;
    options.timeout_ms = 10000;
    options.progress = progress;
    options.progress_cookie = cookie;
    *good = true;
    fanin_status status = fanin_client_pull(client, &options, &wanted, 1, NULL, error);
    for (size_t i = 0; i < 2 * HALF && *good && status == FANIN_OK; i++)
        *good = bytes[i] == value;
    free(bytes);
    return status;
}

static bool good_or_refused(fanin_client *client, uint8_t value,
                            fanin_progress_fn progress, void *cookie)
{
    bool good;
    fanin_error error = FANIN_ERROR_INIT;
    (void)pull(client, value, progress, cookie, &good, &error);
    return good;
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

/* -------------------------------------------------------------- properties */

/* A rank of another launch, with other bytes for the same step, is never mixed in. */
static bool worlds_do_not_mix(void)
{
    pair p;
    start(&p);
    p.world = 2;
    restart(&p, 1);
    commit(&p, 1, 20, 1);
    fanin_client *client = make_client(FANIN_PATH_STREAM);
    bool good =
        connect_to(&p, client) != FANIN_OK || good_or_refused(client, 10, NULL, NULL);
    fanin_client_destroy(&client);
    stop(&p);
    return good;
}

/* The same when the rank restarts after the client had connected. */
static bool later_worlds_do_not_mix(void)
{
    pair p;
    start(&p);
    fanin_client *client = make_client(FANIN_PATH_STREAM);
    assert_int_equal(connect_to(&p, client), FANIN_OK);
    assert_true(good_or_refused(client, 10, NULL, NULL));
    p.world = 2;
    restart(&p, 1);
    commit(&p, 1, 20, 1);
    bool good = good_or_refused(client, 10, NULL, NULL);
    fanin_client_destroy(&client);
    stop(&p);
    return good;
}

/* All ranks restart with the same steps and catalog versions; their shards lie elsewhere. */
static bool old_addresses_are_forgotten(void)
{
    pair p;
    start(&p);
    fanin_client *client = make_client(FANIN_PATH_CMA);
    assert_int_equal(connect_to(&p, client), FANIN_OK);
    assert_true(good_or_refused(client, 10, NULL, NULL));
    uint8_t *old[2] = {p.memory[0], p.memory[1]};
    p.world = 2;
    for (uint32_t i = 0; i < 2; i++) {
        p.memory[i] = malloc(HALF);
        assert_non_null(p.memory[i]);
        restart(&p, i);
        commit(&p, i, 20, 1);
    }
    bool good = good_or_refused(client, 20, NULL, NULL);
    fanin_client_destroy(&client);
    stop(&p);
    free(old[0]);
    free(old[1]);
    return good;
}

static void overtake(void *cookie, uint64_t done, uint64_t total)
{
    pair *p = cookie;
    (void)done;
    (void)total;
    if (p->memory[1][0] == 10)
        commit(p, 1, 30, 2);
}

/* The trainer, which grants no lease time, rewrites a rank while it is read. */
static bool overtaken_bytes_are_discarded(void)
{
    pair p;
    start(&p);
    fanin_client *client = make_client(FANIN_PATH_CMA);
    assert_int_equal(connect_to(&p, client), FANIN_OK);
    bool good = good_or_refused(client, 10, overtake, &p);
    assert_int_equal(p.memory[1][0], 30); /* it did happen */
    fanin_client_destroy(&client);
    stop(&p);
    return good;
}

/* The ranks restart one after the other, the client pulls in between. */
static bool staggered(void (*restart_one)(pair *, uint32_t))
{
    pair p;
    bool good;
    fanin_error error = FANIN_ERROR_INIT;
    start(&p);
    fanin_client *client = make_client(FANIN_PATH_STREAM);
    assert_int_equal(connect_to(&p, client), FANIN_OK);
    assert_true(good_or_refused(client, 10, NULL, NULL));
    p.world = 2;
    restart_one(&p, 1);
    commit(&p, 1, 20, 1);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pull(client, 20, NULL, NULL, &good, &error), FANIN_ERR_WORLD);
        assert_non_null(strstr(error.message, "rank 0 at"));
        assert_non_null(strstr(error.message, p.addresses[0]));
        assert_non_null(strstr(error.message, "(0101010101010101)"));
        assert_non_null(strstr(error.message, "rank 1 at"));
        assert_non_null(strstr(error.message, p.addresses[1]));
        assert_non_null(strstr(error.message, "(0202020202020202)"));
    }
    restart_one(&p, 0);
    commit(&p, 0, 20, 1);
    fanin_status status = pull(client, 20, NULL, NULL, &good, &error);
    assert_true(good);
    assert_true(status == FANIN_OK || status == FANIN_ERR_WORLD);
    fanin_client_destroy(&client);
    stop(&p);
    return status == FANIN_OK;
}

/* A world of which nobody said that its ranks have gone is found as soon as it is whole. */
static bool a_whole_world_is_found(void)
{
    return staggered(restart_unheard);
}

TEST(test_world)
{
    check(worlds_do_not_mix, CLIENT_RULE_WORLD);
}

TEST(test_world_again)
{
    check(later_worlds_do_not_mix, CLIENT_RULE_WORLD_AGAIN);
}

TEST(test_incarnation)
{
    if (!world_has_cma())
        skip();
    check(old_addresses_are_forgotten, CLIENT_RULE_INCARNATION);
}

TEST(test_end)
{
    if (!world_has_cma())
        skip();
    check(overtaken_bytes_are_discarded, CLIENT_RULE_END_CHECK);
}

TEST(test_world_ask)
{
    check(a_whole_world_is_found, CLIENT_RULE_WORLD_ASK);
}

/* ------------------------------------------------------------------ surveys */

/* Rank 0 restarts unheard as soon as it has answered. */
static pair *ends_after_its_answer;

fanin_status __real_decode_list_ok(body *in, msg_list_entry **entries, uint32_t *count);
fanin_status __wrap_decode_list_ok(body *in, msg_list_entry **entries, uint32_t *count);
fanin_status __wrap_decode_list_ok(body *in, msg_list_entry **entries, uint32_t *count)
{
    pair *p = ends_after_its_answer;
    ends_after_its_answer = NULL;
    if (p)
        restart_unheard(p, 0);
    return __real_decode_list_ok(in, entries, count);
}

static bool count_publication(void *cookie, const fanin_publication_info *info)
{
    (void)info;
    ++*(int *)cookie;
    return true;
}

/* Rank 1 is of the new launch already; rank 0 answers as one of the old, and is not asked again
   before the two are compared. */
static bool a_list_asks_anew(void)
{
    pair p;
    int ranks = 0;
    fanin_error error = FANIN_ERROR_INIT;
    start(&p);
    fanin_client *client = make_client(FANIN_PATH_STREAM);
    assert_int_equal(connect_to(&p, client), FANIN_OK);
    p.world = 2;
    restart(&p, 1);
    ends_after_its_answer = &p;
    fanin_status status =
        fanin_client_list(client, 5000, count_publication, &ranks, &error);
    assert_null(ends_after_its_answer);
    assert_true(status == FANIN_ERR_WORLD || ranks == 2);
    fanin_client_destroy(&client);
    stop(&p);
    return status == FANIN_OK;
}

TEST(test_survey)
{
    check(a_list_asks_anew, CLIENT_RULE_WORLD_ASK);
}

TEST(test_staggered_restart)
{
    assert_true(staggered(restart));
}
