/* SPDX-License-Identifier: Apache-2.0 */
/* The small modules of common/core: log, clock, buffer, array, text, dtype, digest, utf8. */
#include "array.h"
#include "clock.h"
#include "convert.h"
#include "digest.h"
#include "dtype.h"
#include "log.h"
#include "testing.h"
#include "text.h"
#include "thread.h"
#include "worker_pool.h"
#include <limits.h>

/* ------------------------------------------------------------- log */

typedef struct seen {
    int calls;
    fanin_log_level level;
    char event[64], message[2048];
} seen;

static void remember(void *cookie, fanin_log_level level, const char *event,
                     const char *message)
{
    seen *s = cookie;
    s->calls++;
    s->level = level;
    strncpy(s->event, event, sizeof s->event - 1);
    strncpy(s->message, message, sizeof s->message - 1);
}

TEST(log_messages_are_one_line)
{
    seen s = {0};
    logger to = {.fn = remember, .cookie = &s};
    log_write(&to, FANIN_LOG_WARNING, "peer-odd", "rank %d says \"%s\"", 3,
              "a\nb\033[");
    assert_int_equal(s.calls, 1);
    assert_int_equal(s.level, FANIN_LOG_WARNING);
    assert_string_equal(s.event, "peer-odd");
    assert_string_equal(s.message, "rank 3 says \"a b [\"");
    /* NEL, CSI, a line's end, a turn of direction; and what is none, also where the message ends.
       */
    log_write(&to, FANIN_LOG_INFO, "steers", "%s",
              "a\xc2\x85"
              "b\xc2\x9b"
              "c\xe2\x80\xa8"
              "d\xe2\x80\xae"
              "e\xe2\x81\xa6"
              "f\x7f"
              "\xc2\xa0\xe2\x80\xa6\xe2\x82\xac\xe2\x80");
    assert_string_equal(s.message, "a  b  c   d   e   f "
                                   "\xc2\xa0\xe2\x80\xa6\xe2\x82\xac\xe2\x80");
    log_write(&to, FANIN_LOG_INFO, "unseen", "%s",
              "a\xe2\x80\x8b"
              "b\xc2\xad"
              "c\xef\xbb\xbf"
              "d\xf3\xa0\x81\xa1"
              "\xf0\x9f\x98\x80\xe3\x80\x80");
    assert_string_equal(s.message, "a   b  c   d    \xf0\x9f\x98\x80\xe3\x80\x80");
    char text[3000];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    log_write(&to, FANIN_LOG_INFO, "long", "%s", text);
    assert_int_equal(strlen(s.message), 1023);
}

TEST(log_goes_nowhere_without_a_function)
{
    log_write(NULL, FANIN_LOG_ERROR, "e", "x");
    log_write(&(logger){0}, FANIN_LOG_ERROR, "e", "x");
}

/* ------------------------------------------------------------- clock */

TEST(deadlines)
{
    uint64_t before = clock_ns();
    deadline soon = deadline_in_ms(60000);
    assert_true(soon >= before + UINT64_C(60000000000));
    assert_true(soon <= clock_ns() + UINT64_C(60000000000));
    assert_false(deadline_passed(soon));
    int left_ms = deadline_poll_ms(soon);
    assert_true(left_ms <= 60000);
    assert_true(clock_ns() + (uint64_t)left_ms * 1000000 >= soon);
    assert_true(deadline_passed(before));
    assert_true(deadline_passed(0));
    assert_int_equal(deadline_left_ns(0), 0);
    assert_int_equal(deadline_poll_ms(0), 0);
    assert_true(deadline_passed(deadline_in_ms(0)));
    assert_true(deadline_sooner(soon, UINT64_MAX) == soon);
    assert_true(deadline_sooner(1, 2) == 1);
}

TEST(far_deadlines_saturate)
{
    assert_true(deadline_in_ms(UINT64_MAX) == UINT64_MAX);
    assert_true(deadline_left_ns(UINT64_MAX) == UINT64_MAX);
    assert_false(deadline_passed(UINT64_MAX));
    assert_int_equal(deadline_poll_ms(UINT64_MAX), INT_MAX);
    assert_int_equal(deadline_poll_ms(deadline_in_ms(UINT64_C(1) << 40)), INT_MAX);
}

TEST(poll_times_are_rounded_up)
{
    /* A nanosecond that is left must not become a poll of 0 ms. */
    for (int i = 0; i < 1000; i++) {
        deadline at = clock_ns() + 500000;
        int ms = deadline_poll_ms(at);
        if (!deadline_passed(at))
            assert_int_equal(ms, 1);
    }
}

/* ------------------------------------------------------------- buffer */

TEST(buffers_grow)
{
    buffer b = {0};
    for (uint32_t i = 0; i < 10000; i++)
        buffer_append(&b, &i, sizeof i);
    assert_false(b.failed);
    assert_int_equal(b.size, 40000);
    for (uint32_t i = 0; i < 10000; i++)
        assert_memory_equal(b.data + 4 * i, &i, sizeof i);
    assert_true(buffer_reserve(&b, 100000));
    assert_true(b.capacity >= 140000);
    buffer_append(&b, NULL, 0);
    assert_int_equal(b.size, 40000);
    buffer_free(&b);
    assert_null(b.data);
    assert_int_equal(b.size, 0);
}

TEST(impossible_sizes_are_remembered)
{
    buffer b = {0};
    buffer_append(&b, "abc", 3);
    assert_false(buffer_reserve(&b, SIZE_MAX - 1));
    assert_true(b.failed);
    buffer_append(&b, "d", 1);
    assert_int_equal(b.size, 3);
    assert_false(buffer_reserve(&b, 1));
    buffer_free(&b);
    assert_false(b.failed);
}

/* ------------------------------------------------------------- array */

TEST(arrays_grow)
{
    uint32_t *array = NULL;
    size_t capacity = 0, moves = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        size_t before = capacity;
        assert_true(array_reserve(&array, &capacity, i + 1, sizeof *array));
        moves += capacity != before;
        array[i] = i;
    }
    assert_in_range(moves, 1, 11);
    assert_true(array_reserve(&array, &capacity, 100000, sizeof *array));
    assert_int_equal(capacity, 100000);
    array_shrink(&array, 10000, sizeof *array);
    for (uint32_t i = 0; i < 10000; i++)
        assert_int_equal(array[i], i);
    uint32_t *same = array;
    assert_false(array_reserve(&array, &capacity, SIZE_MAX / 2, sizeof *array));
    assert_ptr_equal(array, same);
    assert_int_equal(capacity, 100000);
    array_shrink(&array, 0, sizeof *array);
    free(array);
    array = NULL;
    array_shrink(&array, 0, sizeof *array);
    assert_null(array);
}

static int compare_number(const void *key, const void *element)
{
    return *(const int *)key - *(const int *)element;
}

/* What grew from the first large room on is as it was, however it was laid out. */
TEST(large_arrays_are_arrays)
{
    const size_t huge = (size_t)2 << 20;
    uint8_t *array = array_large(1, 1);
    assert_non_null(array);
    free(array);
    assert_null(array_large(SIZE_MAX / 2, 3));
    assert_null(array_large(SIZE_MAX, 1));
    array = array_large(huge, 1);
    assert_int_equal((uintptr_t)array % huge, 0);
    free(array);
    array = NULL;
    size_t capacity = 0;
    assert_true(array_reserve(&array, &capacity, huge + 1, 1));
    memset(array, 0xa5, huge + 1);
    assert_true(array_reserve(&array, &capacity, 5 * huge, 1));
    array_shrink(&array, huge + 1, 1);
    for (size_t i = 0; i <= huge; i++)
        assert_int_equal(array[i], 0xa5);
    free(array);
}

TEST(arrays_are_searched)
{
    static const int sorted[] = {2, 4, 4, 4, 6, 8, 10};
    for (int key = 0; key <= 12; key++) {
        for (size_t n = 0; n <= 7; n++) {
            size_t at = 0;
            while (at < n && sorted[at] < key)
                at++;
            bool is = at < n && sorted[at] == key, found = !is;
            assert_int_equal(
                array_search(&key, sorted, n, sizeof key, compare_number, &found), at);
            assert_int_equal(found, is);
            assert_ptr_equal(array_find(&key, sorted, n, sizeof key, compare_number),
                             is ? &sorted[at] : NULL);
        }
    }
    assert_null(array_find(&sorted[0], NULL, 0, sizeof(int), compare_number));
}

TEST(ranges_are_found)
{
    uint8_t memory[64];
    const memory_range ranges[] = {
        {memory, 8, -1}, {memory + 8, 8, 0}, {memory + 32, 16, 1}};
    for (size_t i = 0; i < sizeof memory; i++) {
        const memory_range *r = memory_range_find(ranges, 3, memory + i);
        if (i < 16)
            assert_ptr_equal(r, &ranges[i / 8]);
        else if (i >= 32 && i < 48)
            assert_ptr_equal(r, &ranges[2]);
        else
            assert_null(r);
    }
}

/* ------------------------------------------------------------- text */

TEST(texts_are_bounded)
{
    char room[8] = "unclean", out[sizeof room];
    text t = text_in(room, sizeof room);
    assert_string_equal(room, "");
    text_add(&t, "%s", "abc");
    assert_false(text_add_whole(&t, 0, "%d", 12345)); /* one too many */
    assert_string_equal(room, "abc");
    assert_false(text_add_whole(&t, 4, "%d", 1));
    assert_true(text_add_whole(&t, 3, "%d", 1));
    assert_string_equal(room, "abc1");
    assert_int_equal(t.used, 4);
    text_add(&t, "%s", "defgh");
    assert_string_equal(room, "abc1def");
    assert_int_equal(t.used, 9);
    assert_false(text_add_whole(&t, 0, "i"));
    text_add(&t, "ij");
    assert_string_equal(room, "abc1def");
    assert_int_equal(t.used, 11);
    memset(out, 'x', sizeof out);
    t = text_in(out, 0);
    text_add(&t, "abc");
    assert_int_equal(t.used, 3);
    assert_int_equal(out[0], 'x');
}

/* ------------------------------------------------------------- waiting */

typedef struct meeting {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool here;
} meeting;

static void *arrive(void *cookie)
{
    meeting *m = cookie;
    pthread_mutex_lock(&m->lock);
    m->here = true;
    pthread_cond_signal(&m->changed);
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

TEST(conditions_are_waited_for)
{
    meeting m = {.lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t thread;
    condition_init(&m.changed);
    pthread_mutex_lock(&m.lock);
    assert_false(condition_wait(&m.changed, &m.lock, 0));
    deadline soon = deadline_in_ms(20);
    while (condition_wait(&m.changed, &m.lock, soon))
        ;
    assert_true(deadline_passed(soon));
    assert_true(worker_thread_start(&thread, arrive, &m));
    while (!m.here)
        assert_true(condition_wait(&m.changed, &m.lock, UINT64_MAX));
    pthread_mutex_unlock(&m.lock);
    pthread_join(thread, NULL);
    pthread_cond_destroy(&m.changed);
}

/* ------------------------------------------------------------- helpers */

typedef struct counted {
    worker_job job; /* first */
    unsigned runs;
    char thread[16];
} counted;

static void count_run(worker_job *job)
{
    counted *c = (counted *)job;
    c->runs++;
    pthread_getname_np(pthread_self(), c->thread, sizeof c->thread);
}

TEST(helpers_do_each_job_once)
{
    enum { JOBS = 200 };
    static counted jobs[JOBS];
    char own[16];
    pthread_getname_np(pthread_self(), own, sizeof own);
    for (unsigned threads = 0; threads < 4; threads++) {
        worker_pool *pool = worker_pool_create(threads, threads, -1);
        assert_int_equal(worker_pool_threads(pool), threads);
        for (unsigned i = 0; i < JOBS; i++) {
            jobs[i] = (counted){.job.run = count_run};
            worker_pool_submit(pool, &jobs[i].job);
        }
        unsigned done = 0;
        for (;;) {
            while (worker_pool_collect(pool))
                done++;
            if (done == JOBS)
                break;
            if (!worker_pool_help(pool))
                worker_pool_wait(pool);
        }
        for (unsigned i = 0; i < JOBS; i++) {
            assert_int_equal(jobs[i].runs, 1);
            if (strcmp(jobs[i].thread, own) != 0) /* which has a name of its own */
                assert_string_equal(jobs[i].thread, "fanin-work");
        }
        assert_false(worker_pool_help(pool));
        worker_pool_destroy(&pool);
        assert_null(pool);
    }
}

TEST(helpers_forget_what_is_drained)
{
    counted one = {.job.run = count_run}, two = one;
    worker_pool *pool = worker_pool_create(0, 0, -1);
    worker_pool_submit(pool, &one.job);
    worker_pool_submit(pool, &two.job);
    assert_true(worker_pool_help(pool));
    worker_pool_drain(pool);
    assert_null(worker_pool_collect(pool));
    assert_false(worker_pool_help(pool));
    assert_int_equal(one.runs, 1);
    assert_int_equal(two.runs, 0);
    worker_pool_submit(pool, &two.job);
    assert_true(worker_pool_help(pool));
    assert_ptr_equal(worker_pool_collect(pool), &two.job);
    worker_pool_destroy(&pool);
}

/* ------------------------------------------------------------- dtype */

TEST(dtypes_have_names_and_sizes)
{
    for (fanin_dtype d = FANIN_DTYPE_BOOL; d <= FANIN_DTYPE_U64; d++) {
        const char *name = fanin_dtype_name(d);
        assert_non_null(name);
        assert_int_equal(fanin_dtype_from_name(name), d);
        dtype_unit unit = dtype_get_unit(d);
        assert_int_equal(unit.bytes * 8, unit.elements * fanin_dtype_bits(d));
    }
    assert_string_equal(fanin_dtype_name(FANIN_DTYPE_BF16), "BF16");
    assert_string_equal(fanin_dtype_name(FANIN_DTYPE_F8_E5M2FNUZ), "F8_E5M2FNUZ");
    assert_int_equal(fanin_dtype_bits(FANIN_DTYPE_C64), 64);
    assert_int_equal(fanin_dtype_bits(FANIN_DTYPE_F6_E3M2), 6);
    assert_null(fanin_dtype_name(0));
    assert_null(fanin_dtype_name(-1));
    assert_null(fanin_dtype_name(FANIN_DTYPE_U64 + 1));
    assert_int_equal(fanin_dtype_from_name("bf16"), 0);
    assert_int_equal(fanin_dtype_from_name(NULL), 0);
    assert_int_equal(fanin_dtype_bits(99), 0);
    assert_int_equal(dtype_get_unit(99).elements, 0);
}

TEST(dtype_sizes_of_shapes)
{
    uint64_t bytes, shape[8] = {3, 5, 8};
    assert_true(dtype_bytes(FANIN_DTYPE_BF16, 3, shape, &bytes));
    assert_int_equal(bytes, 240);
    assert_true(dtype_bytes(FANIN_DTYPE_F32, 0, NULL, &bytes));
    assert_int_equal(bytes, 4);
    assert_true(dtype_bytes(FANIN_DTYPE_F4, 3, shape, &bytes));
    assert_int_equal(bytes, 60);
    assert_true(dtype_bytes(FANIN_DTYPE_F6_E2M3, 3, shape, &bytes));
    assert_int_equal(bytes, 90);
    shape[2] = 6;
    assert_false(dtype_bytes(FANIN_DTYPE_F6_E2M3, 3, shape, &bytes));
    assert_true(dtype_bytes(FANIN_DTYPE_F4, 3, shape, &bytes));
    assert_false(dtype_bytes(FANIN_DTYPE_F4, 0, NULL, &bytes));
    assert_false(dtype_bytes(0, 3, shape, &bytes));
    assert_false(dtype_bytes(FANIN_DTYPE_U8, 9, shape, &bytes));
}

TEST(dtype_sizes_do_not_overflow)
{
    uint64_t bytes, shape[8] = {UINT64_C(1) << 40, UINT64_C(1) << 23, 2};
    assert_false(dtype_bytes(FANIN_DTYPE_U8, 3, shape, &bytes));
    assert_true(dtype_bytes(FANIN_DTYPE_U8, 2, shape, &bytes));
    assert_true(bytes == UINT64_C(1) << 63);
    assert_false(dtype_bytes(FANIN_DTYPE_F16, 2, shape, &bytes));
    shape[2] = 0; /* empty, whatever the others are */
    assert_true(dtype_bytes(FANIN_DTYPE_F64, 3, shape, &bytes));
    assert_int_equal(bytes, 0);
}

/* ------------------------------------------------------------- digest */

TEST(digests_are_xxh3_128)
{
    char hex[33];
    /* Published test value of XXH3-128 for the empty input, seed 0. */
    digest empty = digest_of("", 0), other = digest_of("a", 1);
    digest_hex(empty.bytes, hex);
    assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
    assert_true(digest_equal(&empty, &empty));
    assert_false(digest_equal(&empty, &other));
}

static void box_digest_is(box_digest *d, const char *expected)
{
    char hex[33];
    digest taken = box_digest_take(d);
    digest_hex(taken.bytes, hex);
    assert_string_equal(hex, expected);
}

/* The values are those of Python's xxhash over what PROTOCOL.md says. */
TEST(box_digests)
{
    static uint8_t bytes[10000];
    static const float floats[] = {1.0F, 2.5F, -3.25F, 1e38F};
    box_digest *d = box_digest_create();
    assert_non_null(d);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)(i * 7);
    for (size_t step = 1; step < sizeof bytes; step = 3 * step + 1) {
        for (size_t at = 0; at < sizeof bytes; at += step)
            box_digest_add(d, bytes + at,
                           step < sizeof bytes - at ? step : sizeof bytes - at,
                           CONVERT_NONE);
        box_digest_is(d, "1fa5e0432fb511dda7f98ac0a4f37108");
    }
    box_digest_is(d, "2c0a8a99dc147d5445c3b49d035665b2"); /* of nothing */
    box_digest_add(d, "abc", 3, CONVERT_NONE);
    box_digest_is(d, "19a219ef31e5097a1cc51d2e7469d5e9");
    for (size_t step = 1; step <= sizeof floats; step++) {
        for (size_t at = 0; at < sizeof floats; at += step)
            box_digest_add(d, (const uint8_t *)floats + at,
                           step < sizeof floats - at ? step : sizeof floats - at,
                           CONVERT_F32_BF16);
        box_digest_is(d, "6693c7d68b7e538d335c2bc6d5961f3a");
    }
    box_digest_free(d);
}

TEST(digests_as_text)
{
    uint8_t bytes[16];
    char hex[33];
    for (int i = 0; i < 16; i++)
        bytes[i] = (uint8_t)(i * 17 + 3);
    digest_hex(bytes, hex);
    assert_string_equal(hex, "031425364758697a8b9cadbecfe0f102");
}

TEST(random_bytes_differ)
{
    uint8_t a[1000] = {0}, b[1000] = {0};
    assert_true(random_bytes(a, sizeof a));
    assert_true(random_bytes(b, sizeof b));
    assert_memory_not_equal(a, b, sizeof a);
    assert_memory_not_equal(a + 984, b + 984, 16);
    assert_true(random_bytes(a, 0));
}

/* ------------------------------------------------------------- utf8 */

TEST(utf8_is_checked)
{
    static const char *const good[] = {
        "",
        "plain ascii, longer than eight bytes",
        "\x7f",
        "\xc2\x80",
        "\xdf\xbf",
        "\xe0\xa0\x80",
        "\xed\x9f\xbf",
        "\xee\x80\x80",
        "\xef\xbf\xbf",
        "\xf0\x90\x80\x80",
        "\xf4\x8f\xbf\xbf",
        "1234567\xc3\xa4 and on",
    };
    static const char *const bad[] = {
        "\x80",         "\xbf",         "\xc0\x80",         "\xc1\xbf",
        "\xc2",         "\xc2\x41",     "\xe0\x9f\xbf",     "\xed\xa0\x80",
        "\xe2\x82",     "\xe2\x82\x41", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80",
        "\xf5\x80\x80", "\xff",         "12345678\xe2\x82", "1234567\x80 and on",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(utf8_valid(good[i], strlen(good[i])));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(utf8_valid(bad[i], strlen(bad[i])));
    assert_false(utf8_valid("a\0b", 3));
    assert_false(utf8_valid("01234567\0", 9));
    for (size_t i = 0; i < 8; i++) {
        char text[8] = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'};
        text[i] = '\0';
        assert_false(utf8_valid(text, 8));
    }
}
