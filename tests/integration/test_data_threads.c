/* SPDX-License-Identifier: Apache-2.0 */
/* Many readers of one rank that has several data threads, while its trainer rewrites the weights,
   pauses and goes on: what is pulled is of one step, and nobody holds up the trainer for longer
   than the lease. */
#include "clock.h"
#include "ends.h"
#include "testing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#define RUN "lora:0"
#define SIZE ((size_t)4 << 20)
#define PATIENT 5 /* readers */
#define HASTY                                                                          \
    3 /* ... that break off in the midst of reads, and so close their connections */
#define GOOD_EACH 10
#define PATIENCE_MS 60000

typedef struct scene {
    fanin_server *server;
    uint8_t *memory;
    char address[32];
    const char *addresses[1];
    atomic_bool over;
    atomic_uint good, stale, paused, late;
} scene;

typedef struct reader_thread {
    scene *of;
    pthread_t thread;
    bool hasty, tcp;  /* tcp: with checksums */
    atomic_uint good; /* pulls */
    bool torn;
    fanin_status wrong; /* that it did not expect */
    fanin_error error;
} reader_thread;

static bool is_step(const uint8_t *bytes, uint64_t step)
{
    return bytes[0] == (uint8_t)step && memcmp(bytes, bytes + 1, SIZE - 1) == 0;
}

static void count(reader_thread *t, fanin_status status, const uint8_t *got,
                  uint64_t step)
{
    scene *s = t->of;
    if (status == FANIN_ERR_STALE)
        s->stale++;
    else if (status == FANIN_ERR_PAUSED)
        s->paused++;
    else if (t->hasty && status == FANIN_ERR_TIMEOUT)
        s->late++;
    else if (status != FANIN_OK)
        t->wrong = status;
    else if (!is_step(got, step))
        t->torn = true;
    else {
        s->good++;
        t->good++;
    }
}

static void rest_ms(unsigned ms)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)ms * 1000000}, NULL);
}

static void *read_on(void *cookie)
{
    reader_thread *t = cookie;
    uint8_t *got = malloc(SIZE);
    fanin_box box;
    fanin_tensor wanted = make_tensor("t", FANIN_DTYPE_U8, SIZE, 0, &box, got);
    fanin_client_config config = make_client_config();
    config.no_unix = t->tcp;
    fanin_client *client = connect_client(&config, t->of->addresses, 1);
    for (uint32_t i = 0; !t->of->over && !t->wrong && !t->torn; i++) {
        fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
        fanin_result *result = NULL;
        fanin_result_info info = {.struct_size = sizeof info};
        options.verify = i % 4 == 0;
        if (t->hasty)
            options.timeout_ms = 1 + i % 5;
        t->error = (fanin_error)FANIN_ERROR_INIT;
        fanin_status status =
            fanin_client_pull(client, &options, &wanted, 1, &result, &t->error);
        fanin_result_get(result, &info);
        fanin_result_free(&result);
        count(t, status, got, info.step);
        if (status != FANIN_OK)
            rest_ms(1); /* whoever cannot read leaves the CPUs to the others */
    }
    fanin_client_destroy(&client);
    free(got);
    return NULL;
}

/* The trainer's memory is its own meanwhile: under ThreadSanitizer a thread that still reads is a
   race. */
static void rewrite(scene *s, uint64_t step, uint64_t *longest_ns)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t start = clock_ns();
    if (step % 4 == 0) {
        assert_ok(fanin_server_pause(s->server, RUN, NULL, &error), error);
        *longest_ns =
            clock_ns() - start > *longest_ns ? clock_ns() - start : *longest_ns;
        memset(s->memory, 0xee, SIZE);
        memset(s->memory, (uint8_t)(step - 1), SIZE);
        assert_ok(fanin_server_resume(s->server, RUN, &error), error);
        start = clock_ns();
    }
    assert_ok(fanin_server_begin_update(s->server, RUN, &error), error);
    *longest_ns = clock_ns() - start > *longest_ns ? clock_ns() - start : *longest_ns;
    memset(s->memory, (uint8_t)step, SIZE);
    assert_ok(fanin_server_commit(s->server, RUN, step, NULL, &error), error);
}

static bool all_have_enough(const reader_thread *readers)
{
    for (size_t i = 0; i < PATIENT; i++)
        if (readers[i].good < GOOD_EACH)
            return false;
    return true;
}

static void start(scene *s, uint32_t data_threads, uint32_t lease_ms)
{
    *s = (scene){.memory = malloc(SIZE), .addresses = {s->address}};
    fanin_server_config config = make_server_config();
    config.data_threads = data_threads;
    config.lease_ms = lease_ms;
    s->server = make_server(&config, s->address, sizeof s->address);
    memset(s->memory, 1, SIZE);
    fanin_box box;
    fanin_tensor t = make_tensor("t", FANIN_DTYPE_U8, SIZE, 0, &box, s->memory);
    assert_int_equal(fanin_server_put(s->server, RUN, &t, 1, false, NULL), FANIN_OK);
    assert_int_equal(fanin_server_commit(s->server, RUN, 1, NULL, NULL), FANIN_OK);
}

/* The trainer's pause between updates is one that lets some pulls through. */
static void stress(uint32_t data_threads, uint32_t lease_ms)
{
    scene s;
    start(&s, data_threads, lease_ms);
    static reader_thread readers[PATIENT + HASTY];
    for (size_t i = 0; i < PATIENT + HASTY; i++) {
        readers[i] = (reader_thread){.of = &s, .hasty = i >= PATIENT, .tcp = i % 2};
        assert_int_equal(pthread_create(&readers[i].thread, NULL, read_on, &readers[i]),
                         0);
    }
    deadline at = deadline_in_ms(PATIENCE_MS);
    uint64_t step = 1, longest_ns = 0;
    unsigned pause_ms = 1;
    while (!all_have_enough(readers) && !deadline_passed(at)) {
        unsigned before = s.good;
        rest_ms(pause_ms);
        pause_ms = s.good > before  ? (pause_ms + 1) / 2
                   : pause_ms < 500 ? 2 * pause_ms
                                    : 500;
        rewrite(&s, ++step, &longest_ns);
    }
    s.over = true;
    for (size_t i = 0; i < PATIENT + HASTY; i++)
        pthread_join(readers[i].thread, NULL);
    printf("# %u threads, lease %u ms: %llu steps, %u good, %u stale, %u paused, %u "
           "broken off; longest wait "
           "%.1f ms\n",
           data_threads, lease_ms, (unsigned long long)step, s.good, s.stale, s.paused,
           s.late, (double)longest_ns / 1e6);
    for (size_t i = 0; i < PATIENT + HASTY; i++) {
        assert_ok(readers[i].wrong, readers[i].error);
        assert_false(readers[i].torn);
    }
    assert_true(all_have_enough(readers));
    /* What is above the lease is the scheduler's. */
    assert_true(longest_ns < (lease_ms + UINT64_C(15000)) * 1000000);
    fanin_server_destroy(&s.server, 0);
    free(s.memory);
}

TEST(test_leased)
{
    static const uint32_t threads[] = {1, 4};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++)
        stress(threads[i], 300);
}

/* begin_update waits for nothing but sends that are under way: pulls are overtaken. */
TEST(test_unleased)
{
    static const uint32_t threads[] = {1, 4};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++)
        stress(threads[i], 0);
}
