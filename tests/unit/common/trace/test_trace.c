/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of many threads, and of a file system that does not answer. */
#include "clock.h"
#include "testing.h"
#include "thread.h"
#include "trace.h"
#include <fcntl.h>
#include <sys/wait.h>

/* Whoever writes to a file stays there until it is let go. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    bool hangs, is_there, is_full;
} disk = {.lock = PTHREAD_MUTEX_INITIALIZER};

ssize_t __real_pwrite64(int fd, const void *from, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t size, off_t at)
{
    const deadline until = deadline_in_ms(60000);
    pthread_mutex_lock(&disk.lock);
    disk.is_there = true;
    pthread_cond_broadcast(&disk.turn);
    while (disk.hangs)
        assert_true(condition_wait(&disk.turn, &disk.lock, until));
    bool full = disk.is_full;
    pthread_mutex_unlock(&disk.lock);
    errno = ENOSPC;
    return full ? -1 : __real_pwrite64(fd, from, size, at);
}

static void hang(bool hangs)
{
    pthread_mutex_lock(&disk.lock);
    disk.hangs = hangs;
    disk.is_there = false;
    pthread_cond_broadcast(&disk.turn);
    pthread_mutex_unlock(&disk.lock);
}

static void wait_until_it_hangs(void)
{
    const deadline until = deadline_in_ms(10000);
    pthread_mutex_lock(&disk.lock);
    while (!disk.is_there)
        assert_true(condition_wait(&disk.turn, &disk.lock, until));
    pthread_mutex_unlock(&disk.lock);
}

static char folder[] = "/tmp/trace-XXXXXX", file[sizeof folder + 16];

static int set_up(void **state)
{
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/one.json", folder);
    return 0;
}

static int tear_down(void **state)
{
    hang(false);
    unlink(file);
    return rmdir(folder);
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static char *content(void)
{
    FILE *from = fopen(file, "r");
    assert_non_null(from);
    static char text[8 << 20];
    size_t size = fread(text, 1, sizeof text - 1, from);
    fclose(from);
    text[size] = '\0';
    return text;
}

static unsigned long count(const char *text, const char *words)
{
    unsigned long n = 0;
    for (; (text = strstr(text, words)); text += strlen(words))
        n++;
    return n;
}

/* Of all events "lost". */
static unsigned long lost(const char *text)
{
    unsigned long n = 0;
    while ((text = strstr(text, "\"args\":{\"spans\":")))
        n += strtoul(text += strlen("\"args\":{\"spans\":"), NULL, 10);
    return n;
}

static void start(void)
{
    assert_works(fanin_trace_start(file, ERROR));
}

static void stop(void)
{
    assert_works(fanin_trace_stop(ERROR));
}

static void add(int32_t rank)
{
    trace_span span = trace_span_of(TRACE_READ, clock_ns(), FANIN_OK, NULL);
    span.rank = rank;
    trace_add(&span);
}

static void *add_two(void *cookie)
{
    pthread_setname_np(pthread_self(), cookie);
    add(-1);
    add(7);
    return NULL;
}

/* One after the other, and at the end some at once. */
CASE(threads_without_end_have_rows)
{
    enum { THREADS = 3000, AT_ONCE = 16 };
    char names[AT_ONCE][16];
    pthread_t threads[AT_ONCE];
    start();
    for (int i = 0; i < THREADS; i += AT_ONCE) {
        for (int k = 0; k < AT_ONCE; k++) {
            snprintf(names[k], sizeof names[k], "thread-%d", i + k);
            assert_int_equal(pthread_create(&threads[k], NULL, add_two, names[k]), 0);
        }
        for (int k = 0; k < AT_ONCE; k++)
            pthread_join(threads[k], NULL);
    }
    stop();
    const unsigned long all = (THREADS + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    const char *text = content();
    assert_int_equal(count(text, "\"name\":\"lost\""), 0);
    assert_int_equal(count(text, "\"ph\":\"X\""), 2 * all);
    assert_int_equal(count(text, "{\"name\":\"thread-"), all);
    assert_int_equal(count(text, "{\"name\":\"rank 7, thread "), all);
}

CASE(a_row_is_told_once)
{
    start();
    for (int i = 0; i < 100; i++) {
        add(-1);
        add(i % 2);
        if (i % 10 == 0)
            trace_flush();
    }
    stop();
    const char *text = content();
    assert_int_equal(count(text, "\"ph\":\"X\""), 200);
    assert_int_equal(count(text, "thread_name"), 3);
}

CASE(what_has_no_room_is_counted)
{
    enum { SPANS = 20000 };
    start();
    hang(true);
    add(-1);
    trace_settle(FANIN_ERR_STALE);
    wait_until_it_hangs();
    const uint64_t began = clock_ns();
    for (int i = 1; i < SPANS; i++)
        add(i % 16);
    trace_settle(FANIN_ERR_TIMEOUT);
    assert_true(clock_ns() - began < UINT64_C(10000000000));
    hang(false);
    stop();
    const char *text = content();
    assert_true(lost(text) > SPANS / 2);
    assert_int_equal(count(text, "\"ph\":\"X\"") + lost(text), SPANS);
}

/* The file is whole before, and once it answers. */
CASE(a_file_system_that_does_not_answer_is_left)
{
    fanin_error error = FANIN_ERROR_INIT;
    start();
    hang(true);
    add(1);
    trace_settle(FANIN_ERR_STALE);
    wait_until_it_hangs();
    uint64_t began = clock_ns();
    trace_flush();
    assert_in_range(clock_ns() - began, UINT64_C(900000000), UINT64_C(20000000000));
    began = clock_ns();
    assert_int_equal(fanin_trace_stop(&error), FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ETIMEDOUT);
    assert_true(clock_ns() - began < UINT64_C(20000000000));
    assert_int_equal(count(content(), "\"ph\":\"X\""), 0);
    assert_non_null(strstr(content(), "\n]}\n"));
    hang(false);
    const deadline until = deadline_in_ms(10000);
    while (count(content(), "\"ph\":\"X\"") == 0)
        assert_false(deadline_passed(until));
}

/* A file that has been given up is closed, and its number is somebody else's: children leave that
   alone. */
CASE(a_child_closes_no_number_of_others)
{
    fanin_error error = FANIN_ERROR_INIT;
    char name[64], target[128];
    int fd = -1;
    start();
    while (++fd < 1024) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(name, target, sizeof target - 1);
        target[n > 0 ? n : 0] = '\0';
        if (strcmp(target, file) == 0)
            break;
    }
    assert_true(fd < 1024);
    pthread_mutex_lock(&disk.lock);
    disk.is_full = true;
    pthread_mutex_unlock(&disk.lock);
    add(1);
    trace_settle(FANIN_ERR_STALE);
    const deadline until = deadline_in_ms(10000);
    while (fcntl(fd, F_GETFD) >= 0)
        assert_false(deadline_passed(until));
    assert_int_equal(open("/dev/null", O_RDONLY | O_CLOEXEC), fd);
    pid_t child = fork();
    if (child == 0)
        _exit(fcntl(fd, F_GETFD) >= 0 ? 0 : 1);
    assert_int_equal(tests_await(child), 0);
    close(fd);
    assert_int_equal(fanin_trace_stop(&error), FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOSPC);
    disk.is_full = false;
}

/* Nobody calls once more for it. */
CASE(it_is_written_within_a_second)
{
    start();
    add(1);
    const deadline until = deadline_in_ms(10000);
    while (count(content(), "\"ph\":\"X\"") == 0)
        assert_false(deadline_passed(until));
    stop();
}

static void *add_many(void *cookie)
{
    for (int i = 0; i < 2000; i++) {
        add(i % 5);
        if (i % 500 == 0)
            trace_settle(FANIN_ERR_STALE);
    }
    return cookie;
}

CASE(starting_and_stopping_beside_calls)
{
    enum { THREADS = 4, ROUNDS = 20 };
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_many, NULL), 0);
    for (int i = 0; i < ROUNDS; i++) {
        start();
        trace_flush();
        pid_t child = fork();
        if (child == 0)
            _exit(fanin_trace_stop(NULL) == FANIN_OK && !trace_on() ? 0 : 1);
        int status = 1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        stop();
        assert_non_null(strstr(content(), "\n]}\n"));
        unlink(file);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

int main(void)
{
    condition_init(&disk.turn);
    return tests_run(NULL);
}
