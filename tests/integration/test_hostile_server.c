/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that lie, one way at a time. Whatever they send, the client returns an error that
 * names the rank or the key, in bounded memory, and then works with an honest world.
 */
#include "ends.h"
#include "fake_server.h"
#include "local_world.h"
#include "open_files.h"
#include "testing.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define CONNECT_MS 300
#define LOST_MS 300
#define PULL_MS 500
/* A lie is at most a megabyte long; more memory than a few of that is too much. */
#define GROWTH_KIB (24 * 1024)
#define CATALOG_MAX (4 << 20)

typedef struct lie {
    const char *name;
    mischief mischief;
    fanin_status wanted[3]; /* one of these; 0: no more */
    const char *words;      /* in the message; NULL: whatever fits */
} lie;

#define UNREACHABLE FANIN_ERR_UNREACHABLE
#define PROTOCOL FANIN_ERR_PROTOCOL
#define CLOSED FANIN_ERR_CLOSED
#define TIMEOUT FANIN_ERR_TIMEOUT
#define STALE FANIN_ERR_STALE

/* A connection that closes is tried again until the time is up, or does not come back. */
#define GONE                                                                           \
    {                                                                                  \
        CLOSED, UNREACHABLE, TIMEOUT                                                   \
    }

static const lie lies[] = {
    {"accept_close", ACCEPT_CLOSE, {UNREACHABLE, CLOSED}, NULL},
    {"accept_silent", ACCEPT_SILENT, {UNREACHABLE}, "did not answer in time"},
    {"accept_garbage", ACCEPT_GARBAGE, {PROTOCOL}, NULL},
    {"accept_http", ACCEPT_HTTP, {PROTOCOL}, NULL},
    {"hello_magic", HELLO_MAGIC, {PROTOCOL}, NULL},
    {"hello_major", HELLO_MAJOR, {FANIN_ERR_VERSION}, NULL},
    {"hello_huge_length", HELLO_HUGE_LENGTH, {PROTOCOL}, "limit"},
    {"hello_never_ends", HELLO_NEVER_ENDS, {UNREACHABLE}, "did not answer in time"},
    {"hello_garbage", HELLO_GARBAGE, {PROTOCOL}, NULL},
    {"hello_bomb", HELLO_BOMB, {PROTOCOL}, NULL},
    {"hello_other_type", HELLO_OTHER_TYPE, {PROTOCOL}, NULL},
    {"hello_error", HELLO_ERROR, {FANIN_ERR_AUTH}, "xxx"},
    {"hello_rank", HELLO_RANK, {FANIN_ERR_WORLD, PROTOCOL}, NULL},
    {"hello_world_size", HELLO_WORLD_SIZE, {FANIN_ERR_WORLD}, "65536"},
    {"hello_no_world", HELLO_NO_WORLD, {PROTOCOL}, "all zero"},
    {"hello_version", HELLO_VERSION, {FANIN_ERR_VERSION}, NULL},
    {"hello_close", HELLO_CLOSE, {UNREACHABLE, CLOSED}, "closed"},

    {"wait_other_type", WAIT_OTHER_TYPE, {PROTOCOL}, "does not fit"},
    {"wait_other_request", WAIT_OTHER_REQUEST, {PROTOCOL}, "was not made"},
    {"wait_garbage", WAIT_GARBAGE, {PROTOCOL}, NULL},
    {"wait_later_step", WAIT_LATER_STEP, {FANIN_ERR_SUPERSEDED}, "step 8"},
    {"wait_earlier_step", WAIT_EARLIER_STEP, {PROTOCOL}, "step 6"},
    {"wait_unasked_flood", WAIT_UNASKED_FLOOD, {PROTOCOL}, "was not made"},
    {"wait_silent", WAIT_SILENT, {TIMEOUT}, NULL},
    {"wait_close", WAIT_CLOSE, GONE, NULL},

    {"keys_other_digest", KEYS_OTHER_DIGEST, {PROTOCOL}, "not the announced one"},
    {"keys_garbage", KEYS_GARBAGE, {PROTOCOL}, NULL},
    {"keys_huge_count", KEYS_HUGE_COUNT, {PROTOCOL, FANIN_ERR_LIMIT}, NULL},
    {"keys_huge_total", KEYS_HUGE_TOTAL, {FANIN_ERR_LIMIT}, "larger"},
    {"keys_offset", KEYS_OFFSET, {PROTOCOL}, "does not follow"},
    {"keys_empty_page", KEYS_EMPTY_PAGE, {PROTOCOL}, NULL},
    {"keys_beyond_total", KEYS_BEYOND_TOTAL, {PROTOCOL}, NULL},
    {"keys_error", KEYS_ERROR, {FANIN_ERR_INTERNAL}, "xxx"},
    {"keys_stale", KEYS_STALE, {STALE, TIMEOUT}, NULL},
    {"keys_close", KEYS_CLOSE, GONE, NULL},
    {"boxes_garbage", BOXES_GARBAGE, {PROTOCOL}, NULL},
    {"boxes_huge_count", BOXES_HUGE_COUNT, {PROTOCOL}, NULL},
    {"boxes_huge_total", BOXES_HUGE_TOTAL, {FANIN_ERR_LIMIT}, "larger"},
    {"boxes_outside", BOXES_OUTSIDE, {PROTOCOL}, NULL},
    {"boxes_other_key", BOXES_OTHER_KEY, {PROTOCOL}, NULL},
    {"boxes_hole", BOXES_HOLE, {FANIN_ERR_INCOMPLETE}, "row 32"},
    {"boxes_overlap", BOXES_OVERLAP, {FANIN_ERR_INCOMPLETE}, "row 31"},
    {"boxes_stale", BOXES_STALE, {STALE, TIMEOUT}, NULL},
    {"boxes_close", BOXES_CLOSE, GONE, NULL},

    {"begin_refused", BEGIN_REFUSED, {STALE, TIMEOUT}, NULL},
    {"begin_garbage", BEGIN_GARBAGE, {PROTOCOL}, NULL},
    {"begin_close", BEGIN_CLOSE, GONE, NULL},
    {"data_garbage", DATA_GARBAGE, {PROTOCOL}, NULL},
    {"data_digests", DATA_DIGESTS, {PROTOCOL}, "malformed"},
    {"data_silent", DATA_SILENT, {TIMEOUT, UNREACHABLE}, NULL},
    {"data_unasked", DATA_UNASKED, {PROTOCOL}, "does not fit"},
    {"read_short", READ_SHORT, {PROTOCOL}, "does not fit"},
    {"read_long", READ_LONG, {PROTOCOL}, "does not fit"},
    {"read_other_request", READ_OTHER_REQUEST, {PROTOCOL}, "does not fit"},
    {"read_other_type", READ_OTHER_TYPE, {PROTOCOL}, "does not fit"},
    {"read_error", READ_ERROR, {FANIN_ERR_INTERNAL}, "xxx"},
    {"read_limit", READ_LIMIT, {TIMEOUT, FANIN_ERR_LIMIT}, "xxx"},
    {"read_silent", READ_SILENT, {TIMEOUT, UNREACHABLE}, NULL},
    {"read_close", READ_CLOSE, GONE, NULL},
    {"read_close_in_body", READ_CLOSE_IN_BODY, GONE, NULL},
    {"end_not_good", END_NOT_GOOD, {STALE}, NULL},
    {"end_garbage", END_GARBAGE, {PROTOCOL}, NULL},
    {"end_close", END_CLOSE, GONE, NULL},
};
#define N_LIES (sizeof(lies) / sizeof(*lies))

static world honest; /* for afterwards */

static fanin_client *client_of(fanin_path path)
{
    fanin_client_config config = make_client_config();
    config.connect_timeout_ms = CONNECT_MS;
    config.lost_ms = LOST_MS;
    config.max_catalog = CATALOG_MAX;
    config.no_unix = true;
    config.path = path;
    return make_client(&config);
}

/* As a pull of one call, or in two reads of a session. */
static fanin_status read_matrix(fanin_client *client, const fanin_pull_options *options,
                                const fanin_tensor *tensor, bool session,
                                fanin_error *error)
{
    if (!session)
        return fanin_client_pull(client, options, tensor, 1, NULL, error);
    fanin_session *s = NULL;
    fanin_status status = fanin_client_begin(client, options, tensor, 1, &s, error);
    for (size_t i = 0; i < 2 && status == FANIN_OK; i++)
        status = fanin_session_read(s, 0, 1, error);
    if (status == FANIN_OK)
        return fanin_session_end(&s, NULL, error);
    if (s) /* what a read has met is what the end says */
        assert_int_equal(fanin_session_end(&s, NULL, NULL), status);
    return status;
}

/* Connects and pulls the matrix at step 7; the first error of the two. */
static fanin_status pull_from(const fake_server *f, fanin_client *client, bool session,
                              uint32_t timeout_ms, fanin_error *error)
{
    static uint8_t memory[FAKE_BYTES + 64];
    const char *addresses[] = {f->address};
    fanin_status status =
        fanin_client_connect(client, addresses, 1, CONNECT_MS * 2, error);
    if (status != FANIN_OK)
        return status;
    fanin_box box;
    fanin_tensor tensor =
        make_tensor(FAKE_NAME, FANIN_DTYPE_F32, FAKE_ROWS, FAKE_COLUMNS, &box, memory);
    fanin_pull_options options = make_options(FANIN_STEP_EXACT, 7);
    options.timeout_ms = timeout_ms;
    memset(memory, 0xcc, sizeof memory);
    status = read_matrix(client, &options, &tensor, session, error);
    if (status == FANIN_OK)
        assert_memory_equal(memory, f->bytes, FAKE_BYTES);
    for (size_t i = FAKE_BYTES; i < sizeof memory; i++)
        assert_int_equal(memory[i], 0xcc);
    return status;
}

/* Sanitizers keep freed memory and shadow all of it: there the peak means nothing. */
static bool peak_means_memory(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
    return false;
#else
    return true;
#endif
#else
    return true;
#endif
}

static long peak_kib(void)
{
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_maxrss;
}

static void expect_refusal(const lie *l, fanin_status status, const fake_server *f,
                           const fanin_error *error)
{
    bool wanted = false;
    for (size_t i = 0; i < 3 && l->wanted[i]; i++)
        wanted = wanted || l->wanted[i] == status;
    if (!wanted)
        fail_msg("%s (%s)", fanin_status_name(status), error->message);
    assert_int_equal(error->status, status);
    assert_true(error->message[0]);
    assert_says(error->message, l->words ? l->words : "");
    /* The liar by its address, or the tensor or publication that it lies about. */
    if (strcmp(error->address, f->address) != 0 && !error->key[0])
        fail_msg("\"%s\" names neither address nor key", error->message);
}

static void expose(const lie *l, bool session)
{
    fake_server f;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = client_of(FANIN_PATH_AUTO);
    fake_server_start(&f, l->mischief);
    long before_kib = peak_kib();
    fanin_status status = pull_from(&f, client, session, PULL_MS, &error);
    long grown_kib = peak_kib() - before_kib;
    if (status == FANIN_OK)
        fail_msg("the lie was believed");
    expect_refusal(l, status, &f, &error);
    if (peak_means_memory() && grown_kib > GROWTH_KIB)
        fail_msg("it took %ld KiB of memory", grown_kib);
    fake_server_stop(&f);

    error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(
        fanin_client_connect(client, honest.address_list, honest.size, 10000, &error),
        error);
    assert_ok(world_pull(&honest, client, NULL, NULL, &error), error);
    fanin_client_destroy(&client);
}

static void test_lie(void **state)
{
    expose(*state, false);
}

static void test_lie_in_session(void **state)
{
    expose(*state, true);
}

/* The controls: the fake rank tells the truth, at once or bit by bit, and is believed. */
static void believe(mischief mischief)
{
    fake_server f;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = client_of(FANIN_PATH_AUTO);
    fake_server_start(&f, mischief);
    assert_ok(pull_from(&f, client, false, 20000, &error), error);
    assert_ok(pull_from(&f, client, true, 20000, &error), error);
    fanin_client_destroy(&client);
    fake_server_stop(&f);
}

static void test_honest(void **state)
{
    believe(HONEST);
}

static void test_byte_by_byte(void **state)
{
    believe(HONEST_BYTE_BY_BYTE);
}

static void test_small_pages(void **state)
{
    believe(HONEST_SMALL_PAGES);
}

/* A pull asks again, as what the rank is short of becomes free; a session, whose first read may be
   in use, says so. */
static void test_at_limit(void **state)
{
    fanin_error error = FANIN_ERROR_INIT;
    for (int session = 0; session < 2; session++) {
        fake_server f;
        fanin_client *client = client_of(FANIN_PATH_AUTO);
        fake_server_start(&f, HONEST_AT_LIMIT);
        assert_int_equal(pull_from(&f, client, session, 20000, &error),
                         session ? FANIN_ERR_LIMIT : FANIN_OK);
        assert_ok(pull_from(&f, client, session, 20000, &error), error);
        fanin_client_destroy(&client);
        fake_server_stop(&f);
    }
}

static unsigned files;

static int start_honest(void **state)
{
    for (int i = 0; i < 2; i++) { /* the first server opens what the process keeps */
        world_stop(&honest);
        files = open_files();
        honest.flags = FANIN_SERVER_NO_UCX;
        world_begin(&honest, 2, CUT_CHUNK0, 1);
    }
    return 0;
}

static int stop_honest(void **state)
{
    world_stop(&honest);
    assert_int_equal(open_files(), files);
    return 0;
}

/* What has gone is not told as a path that is not possible. */
static void test_gone(void **state)
{
    static const fanin_path paths[] = {FANIN_PATH_AUTO, FANIN_PATH_CUDA_IPC};
    for (size_t i = 0; i < 2; i++) {
        fake_server f;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_client *client = client_of(paths[i]);
        fake_server_start(&f, REGIONS_GONE);
        assert_int_equal(pull_from(&f, client, false, PULL_MS, &error),
                         FANIN_ERR_NOT_FOUND);
        assert_null(strstr(error.message, "not possible"));
        fanin_client_destroy(&client);
        fake_server_stop(&f);
    }
}

int main(int argc, char **argv)
{
    struct CMUnitTest tests[2 * N_LIES + 5] = {
        cmocka_unit_test(test_honest),      cmocka_unit_test(test_byte_by_byte),
        cmocka_unit_test(test_small_pages), cmocka_unit_test(test_at_limit),
        cmocka_unit_test(test_gone),
    };
    size_t n = 5;
    for (size_t i = 0; i < N_LIES; i++)
        tests[n++] = (struct CMUnitTest){.name = lies[i].name,
                                         .test_func = test_lie,
                                         .initial_state = (void *)(uintptr_t)&lies[i]};
    /* Until there is a lease, a session is what a pull is. */
    for (size_t i = 0; i < N_LIES; i++)
        if (lies[i].mischief >= BEGIN_REFUSED)
            tests[n++] =
                (struct CMUnitTest){.name = lies[i].name,
                                    .test_func = test_lie_in_session,
                                    .initial_state = (void *)(uintptr_t)&lies[i]};
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return _cmocka_run_group_tests("hostile_server", tests, n, start_honest,
                                   stop_honest);
}
