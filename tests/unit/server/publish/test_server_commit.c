/* SPDX-License-Identifier: Apache-2.0 */
/* Commits on a CUDA stream, by reference and as snapshots of device memory. The driver is a
   stand-in whose streams can be held. Built with FANIN_TEST_HOOKS. */
#include "clock.h"
#include "fake_cuda.h"
#include "gpu.h"
#include "core/rules.h"
#include "server_peer.h"
#include "testing.h"

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE ((size_t)300000)
#define PATIENCE_MS 20000

static gpu *driver;
static fanin_stream stream; /* on device 0 */

/* --------------------------------------------------------------------- log */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t log_changed = PTHREAD_COND_INITIALIZER;
static char log_event[64], log_text[1024];
static unsigned log_hits;

static void on_log(void *cookie, fanin_log_level level, const char *event,
                   const char *message)
{
    (void)cookie, (void)level;
    pthread_mutex_lock(&log_lock);
    if (strcmp(event, log_event) == 0) {
        log_hits++;
        snprintf(log_text, sizeof log_text, "%s", message);
        pthread_cond_broadcast(&log_changed);
    }
    pthread_mutex_unlock(&log_lock);
}

static void listen_for(const char *event)
{
    pthread_mutex_lock(&log_lock);
    snprintf(log_event, sizeof log_event, "%s", event);
    log_hits = 0;
    pthread_mutex_unlock(&log_lock);
}

/* How often, once it is @p times: the server's own thread may be the one that tells. */
static unsigned heard(unsigned times, const char *words)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 30;
    pthread_mutex_lock(&log_lock);
    while (log_hits < times &&
           pthread_cond_timedwait(&log_changed, &log_lock, &end) == 0)
        ;
    unsigned hits = log_hits;
    if (hits > 0 && !strstr(log_text, words))
        fail_msg("\"%s\" does not say \"%s\"", log_text, words);
    pthread_mutex_unlock(&log_lock);
    return hits;
}

/* ------------------------------------------------------------------ server */

static fanin_server *start(uint32_t lease_ms)
{
    fanin_server_config c = server_config();
    c.log = on_log;
    c.lease_ms = lease_ms;
    return server_start(&c);
}

static uint8_t *alloc(int device, fanin_server *s, const char *name)
{
    uint8_t *memory = fake_cuda_alloc(device, SIZE, FAKE_CUDA_MALLOC);
    memset(fake_cuda_alias(memory), 1, SIZE);
    if (s)
        server_put(s, RUN, name, memory, SIZE);
    return memory;
}

static fanin_status commit(fanin_server *s, uint64_t step, uint32_t flags,
                           fanin_error *error)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = flags;
    o.stream = stream;
    return fanin_server_commit(s, RUN, step, &o, error);
}

static void commit_ok(fanin_server *s, uint64_t step, uint32_t flags)
{
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(commit(s, step, flags, &error), error);
}

typedef struct reader {
    peer control, data;
    grant grant;
} reader;

static reader open_reader(fanin_server *s)
{
    reader r = {.control = peer_open(s)};
    r.data = peer_data(s, &r.control);
    return r;
}

static void close_reader(reader *r)
{
    peer_close(&r->data);
    peer_close(&r->control);
}

static uint64_t begin(reader *r)
{
    r->grant = peer_lease(&r->control);
    return r->grant.step;
}

/* Whole box @p box holds @p value. */
static void expect_bytes(reader *r, uint64_t box, uint8_t value)
{
    uint8_t *got = malloc(SIZE);
    read_entry one = {.box = box, .count = 1};
    peer_read(&r->data, &r->grant, &one, 1, got, SIZE);
    for (size_t i = 0; i < SIZE; i++)
        if (got[i] != value)
            fail_msg("byte %zu is %d, not %d", i, got[i], value);
    free(got);
}

static void expect_good(reader *r)
{
    assert_true(peer_end(&r->control, &r->grant, false).good);
}

static msg_list_entry entry_of(reader *r)
{
    buffer b = {0};
    msg_list_entry *entries;
    uint32_t count;
    encode_list(&b, ++r->control.request, RUN);
    peer_send(&r->control, &b);
    body in = peer_expect(&r->control, MSG_LIST_OK);
    assert_int_equal(decode_list_ok(&in, &entries, &count), FANIN_OK);
    assert_int_equal(count, 1);
    msg_list_entry one = entries[0];
    free(entries);
    return one;
}

/* A commit in a thread of its own. */
typedef struct committer {
    fanin_server *server;
    uint64_t step;
    uint32_t flags;
    pthread_t thread;
    fanin_status status;
    atomic_bool returned;
} committer;

static void *commit_run(void *cookie)
{
    committer *c = cookie;
    c->status = commit(c->server, c->step, c->flags, NULL);
    atomic_store(&c->returned, true);
    return NULL;
}

static void commit_start(committer *c, fanin_server *s, uint64_t step, uint32_t flags)
{
    *c = (committer){.server = s, .step = step, .flags = flags};
    atomic_init(&c->returned, false);
    assert_int_equal(pthread_create(&c->thread, NULL, commit_run, c), 0);
}

static fanin_status commit_end(committer *c)
{
    pthread_join(c->thread, NULL);
    return c->status;
}

static bool stays_away(const committer *c)
{
    deadline end = deadline_in_ms(100);
    while (!deadline_passed(end) && !atomic_load(&c->returned))
        ;
    return !atomic_load(&c->returned);
}

static void hold(void)
{
    fake_cuda_hold_stream(stream.handle);
}

static void release(void)
{
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
}

/* ------------------------------------------------------------- by reference */

static void effect_comes_with_the_stream(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    reader r = open_reader(s);
    hold();
    commit_ok(s, 1, 0);
    assert_int_equal(entry_of(&r).state, WIRE_STATE_UNPUBLISHED);
    assert_int_equal(server_stats(s).commits, 0);
    peer_request_wait(&r.control, RUN, WIRE_RULE_NEWEST, 0, PATIENCE_MS);
    assert_true(peer_silent(&r.control, 50));
    release();
    msg_wait_ok ok; /* the parked one is woken */
    body in = peer_expect(&r.control, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.step, 1);
    assert_int_equal(begin(&r), 1);
    expect_bytes(&r, 0, 1);
    expect_good(&r);
    server_begin(s);
    commit_ok(s, 2, FANIN_COMMIT_WAIT); /* has taken effect on return */
    assert_int_equal(entry_of(&r).step, 2);
    assert_int_equal(server_stats(s).commits, 2);
    assert_int_equal(server_stats(s).commits_withdrawn, 0);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

static void begin_update_withdraws(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    reader r = open_reader(s);
    listen_for("commit-withdrawn");
    committer c;
    hold();
    commit_start(&c, s, 41, FANIN_COMMIT_WAIT);
    assert_true(fake_cuda_wait_queued(0, 1));
    assert_true(stays_away(&c));
    server_begin(s);
    assert_int_equal(commit_end(&c), FANIN_ERR_STATE);
    assert_int_equal(heard(1, "step 41"), 1);
    release();
    assert_int_equal(entry_of(&r).state, WIRE_STATE_WRITING);
    assert_int_equal(entry_of(&r).step, 0);
    assert_int_equal(server_stats(s).commits_withdrawn, 1);
    commit_ok(s, 41, FANIN_COMMIT_WAIT); /* it was never published */
    assert_int_equal(begin(&r), 41);
    assert_int_equal(server_stats(s).commits, 1);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

/* After the stream got there a begin_update withdraws nothing, however soon it comes. */
static void what_was_reached_is_published(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    for (uint64_t step = 1; step < 50; step++) {
        commit_ok(s, step, 0);
        assert_true(fake_cuda_wait_idle(0));
        server_begin(s);
        assert_int_equal(server_stats(s).commits, step);
    }
    assert_int_equal(server_stats(s).commits_withdrawn, 0);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

static void abort_it(fanin_server *s)
{
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
}

static void remove_it(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
}

static void remove_shard(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, "a", NULL), FANIN_OK);
}

static void replace_shard(fanin_server *s)
{
    static uint8_t elsewhere[100];
    server_put(s, RUN, "a", elsewhere, sizeof elsewhere);
}

static void other_changes_withdraw(void **state)
{
    void (*const changes[])(fanin_server *) = {abort_it, remove_it, remove_shard,
                                               replace_shard};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        fanin_server *s = start(0);
        uint8_t *memory = alloc(0, s, "a");
        listen_for("commit-withdrawn");
        hold();
        commit_ok(s, 1, 0);
        changes[i](s);
        assert_int_equal(heard(1, "step 1"), 1);
        release();
        assert_int_equal(server_stats(s).commits, 0);
        assert_int_equal(server_stats(s).commits_withdrawn, 1);
        server_put(s, RUN, "b", memory, SIZE);
        commit_ok(s, 1, FANIN_COMMIT_WAIT);
        reader r = open_reader(s);
        begin(&r);
        expect_bytes(&r, i == 0 || i == 3 ? 1 : 0, 1);
        close_reader(&r);
        fanin_server_destroy(&s, 0);
        fake_cuda_free(memory);
    }
}

static void streams_may_outlive_the_server(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    listen_for("commit-withdrawn");
    hold();
    commit_ok(s, 1, 0);
    server_begin(s);
    commit_ok(s, 2, 0);
    fanin_server_destroy(&s, 0);
    assert_int_equal(heard(2, "step 2"), 2);
    release();
    fake_cuda_free(memory);
}

static void a_commit_waits_for_the_one_before(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    committer c;
    hold();
    commit_ok(s, 1, 0);
    commit_start(&c, s, 2, 0);
    assert_true(stays_away(&c));
    release();
    assert_int_equal(commit_end(&c), FANIN_ERR_STATE); /* step 1 is there: no update */
    assert_int_equal(server_stats(s).commits, 1);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

/* With the late effect's rule the step that was begun anew is not published. */
static bool late_effect_is_withdrawn(void)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    reader r = open_reader(s);
    hold();
    commit_ok(s, 1, 0);
    server_begin(s);
    release();
    (void)server_stats(s);
    peer_ping(&r.control); /* the control thread has been woken before */
    bool withdrawn = entry_of(&r).state == WIRE_STATE_WRITING;
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
    return withdrawn;
}

static void late_effects_mind_the_epoch(void **state)
{
    assert_true(late_effect_is_withdrawn());
    atomic_store(&server_rules_off, RULE_LATE_EFFECT);
    bool without = late_effect_is_withdrawn();
    atomic_store(&server_rules_off, 0);
    assert_false(without);
}

static void streams_are_checked(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    fanin_commit_options o;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_commit_options_init(&o, sizeof o);
    o.stream = stream;
    const int32_t devices[] = {-1, 2, 64};
    for (size_t i = 0; i < 3; i++) {
        o.stream.device = devices[i];
        assert_int_equal(fanin_server_commit(s, RUN, 1, &o, &error),
                         FANIN_ERR_ARGUMENT);
    }
    assert_non_null(strstr(error.message, "64"));
    fake_cuda_fail("cuStreamAddCallback", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_int_equal(commit(s, 1, 0, NULL), FANIN_ERR_TRANSPORT);
    fake_cuda_fail("cuStreamAddCallback", CUDA_SUCCESS, 0, 0);
    commit_ok(s, 1, FANIN_COMMIT_WAIT);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

/* ---------------------------------------------------------------- snapshots */

/* What the trainer's next kernel does: queued on its stream. */
static void write_later(uint8_t *memory, uint8_t value)
{
    assert_int_equal(gpu_context_enter(driver, 0, NULL), FANIN_OK);
    assert_int_equal(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, value, SIZE,
                                     (CUstream)stream.handle),
                     CUDA_SUCCESS);
    gpu_context_leave(driver);
}

static void copies_are_made_in_the_streams_order(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a"), *b = alloc(1, s, "b");
    reader r = open_reader(s);
    hold();
    write_later(a, 11);
    write_later(b, 12);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT);
    write_later(a, 91); /* behind the copy */
    write_later(b, 92);
    assert_int_equal(entry_of(&r).state, WIRE_STATE_UNPUBLISHED);
    release();
    assert_int_equal(begin(&r), 1);
    expect_bytes(&r, 0, 11);
    expect_bytes(&r, 1, 12);
    assert_int_equal(((uint8_t *)fake_cuda_alias(a))[SIZE - 1], 91);
    expect_good(&r);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
    fake_cuda_free(b);
}

/* The trainer runs ahead of its stream: steps are published one after the other. */
static void the_trainer_runs_ahead(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    reader r = open_reader(s);
    listen_for("commit-withdrawn");
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    hold();
    server_begin(s);
    write_later(a, 2);
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT);
    server_begin(s); /* withdraws no copy */
    write_later(a, 3);
    committer c;
    commit_start(&c, s, 3, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    assert_true(stays_away(&c));
    assert_int_equal(begin(&r), 1); /* readers go on */
    expect_bytes(&r, 0, 1);
    expect_good(&r);
    fake_cuda_release(0);
    assert_int_equal(commit_end(&c), FANIN_OK);
    assert_int_equal(begin(&r), 3);
    expect_bytes(&r, 0, 3);
    expect_good(&r);
    assert_int_equal(heard(0, ""), 0);
    assert_int_equal(server_stats(s).commits, 3);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
}

static void without_a_stream_it_is_complete(void **state)
{
    static uint8_t host[SIZE];
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a"), *b = alloc(1, s, "b");
    server_put(s, RUN, "c", host, SIZE);
    reader r = open_reader(s);
    for (uint8_t step = 1; step < 5; step++) {
        memset(fake_cuda_alias(a), step, SIZE);
        memset(fake_cuda_alias(b), step + 10, SIZE);
        memset(host, step + 20, SIZE);
        server_begin(s);
        server_snapshot(s, step);
        memset(fake_cuda_alias(a), 99, SIZE);
        memset(fake_cuda_alias(b), 99, SIZE);
        memset(host, 99, SIZE);
        assert_int_equal(begin(&r), step);
        expect_bytes(&r, 0, step);
        expect_bytes(&r, 1, step + 10);
        expect_bytes(&r, 2, step + 20);
        expect_good(&r);
    }
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
    fake_cuda_free(b);
}

/* The stream may write host memory too: it is copied when the stream has got there. */
static void host_memory_waits_for_the_stream(void **state)
{
    static uint8_t host[SIZE];
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    server_put(s, RUN, "h", host, SIZE);
    memset(host, 1, SIZE);
    reader r = open_reader(s);
    committer c;
    hold();
    commit_start(&c, s, 1, FANIN_COMMIT_SNAPSHOT);
    assert_true(fake_cuda_wait_queued(0, 1));
    assert_true(stays_away(&c));
    memset(host, 2, SIZE);
    fake_cuda_release(0);
    assert_int_equal(commit_end(&c), FANIN_OK);
    assert_int_equal(begin(&r), 1);
    expect_bytes(&r, 1, 2);
    expect_good(&r);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
}

/* Nothing reads the trainer's memory when remove has returned. */
static void *remove_run(void *cookie)
{
    committer *c = cookie;
    c->status = fanin_server_remove(c->server, RUN, NULL, NULL);
    atomic_store(&c->returned, true);
    return NULL;
}

static void removal_waits_for_the_copy(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    listen_for("commit-withdrawn");
    hold();
    commit_ok(s, 7, FANIN_COMMIT_SNAPSHOT);
    committer c = {.server = s};
    assert_int_equal(pthread_create(&c.thread, NULL, remove_run, &c), 0);
    assert_true(stays_away(&c));
    fake_cuda_release(0);
    assert_int_equal(commit_end(&c), FANIN_OK);
    fake_cuda_free(a);
    assert_int_equal(heard(1, "step 7"), 1);
    assert_int_equal(server_stats(s).commits, 0);
    fanin_server_destroy(&s, 0);
}

static void *pause_run(void *cookie)
{
    committer *c = cookie;
    c->status = fanin_server_pause(c->server, RUN, NULL, NULL);
    atomic_store(&c->returned, true);
    return NULL;
}

/* Of a commit, whose step is published before, and of a copy that nobody will see. */
static void pauses_wait_for_the_stream(void **state)
{
    for (uint32_t flags = 0; flags <= FANIN_COMMIT_SNAPSHOT; flags++) {
        bool copies = flags == FANIN_COMMIT_SNAPSHOT;
        fanin_server *s = start(0);
        uint8_t *a = alloc(0, s, "a");
        reader r = open_reader(s);
        commit_ok(s, 1, flags | FANIN_COMMIT_WAIT);
        server_begin(s);
        hold();
        commit_ok(s, 2, flags);
        if (copies)
            abort_it(s);
        committer c = {.server = s};
        assert_int_equal(pthread_create(&c.thread, NULL, pause_run, &c), 0);
        assert_true(stays_away(&c));
        release();
        assert_int_equal(commit_end(&c), FANIN_OK);
        memset(fake_cuda_alias(a), 9, SIZE);
        if (copies) {
            assert_int_equal(begin(&r), 1); /* the last snapshot */
            expect_bytes(&r, 0, 1);
            expect_good(&r);
        }
        memset(fake_cuda_alias(a), 1, SIZE);
        assert_int_equal(fanin_server_resume(s, RUN, NULL), FANIN_OK);
        assert_int_equal(begin(&r), copies ? 1 : 2);
        expect_bytes(&r, 0, 1);
        expect_good(&r);
        close_reader(&r);
        fanin_server_destroy(&s, 0);
        fake_cuda_free(a);
    }
}

static void *destroy_run(void *cookie)
{
    committer *c = cookie;
    fanin_server_destroy(&c->server, 0);
    atomic_store(&c->returned, true);
    return NULL;
}

static void destruction_waits_for_the_copy(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    listen_for("commit-withdrawn");
    hold();
    commit_ok(s, 7, FANIN_COMMIT_SNAPSHOT);
    committer c = {.server = s};
    assert_int_equal(pthread_create(&c.thread, NULL, destroy_run, &c), 0);
    assert_true(stays_away(&c));
    fake_cuda_release(0);
    commit_end(&c);
    fake_cuda_free(a);
    assert_int_equal(heard(1, "step 7"), 1);
    fake_cuda_counts now;
    fake_cuda_count(&now);
    assert_int_equal(now.allocations, 0);
}

static void aborted_copies_are_not_published(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    reader r = open_reader(s);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    server_begin(s);
    hold();
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT);
    abort_it(s);
    write_later(a, 3);
    commit_ok(s, 3, FANIN_COMMIT_SNAPSHOT); /* into the same arena, behind it */
    release();
    assert_int_equal(begin(&r), 3);
    expect_bytes(&r, 0, 3);
    expect_good(&r);
    assert_int_equal(server_stats(s).commits, 2);
    assert_int_equal(server_stats(s).commits_withdrawn, 1);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
}

static void arenas_can_be_exported(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = fake_cuda_alloc(0, SIZE, FAKE_CUDA_VIRTUAL);
    server_put(s, RUN, "a", a, SIZE);
    server_snapshot(s, 1);
    reader r = {.control = peer_open_unix(s)};
    r.data = peer_data_unix(s, &r.control);
    r.grant = peer_wait(&r.control, WIRE_RULE_NEWEST, 0);
    buffer b = {0};
    msg_open_path m = {.path = WIRE_PATH_CUDA_IPC};
    encode_open_path(&b, ++r.control.request, MSG_OPEN_PATH, &m);
    peer_send(&r.control, &b);
    peer_expect(&r.control, MSG_OPEN_PATH_OK);
    buffer blob = peer_blob(&r.control, MSG_REGIONS, &r.grant, WIRE_PATH_CUDA_IPC);
    region_table *regions;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(region_table_decode(blob.data, blob.size, NULL, &regions, &error), error);
    assert_int_equal(regions->count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(regions->entries[i].memory, FANIN_MEMORY_CUDA);
        assert_int_equal(regions->entries[i].length, SIZE);
        assert_true(regions->entries[i].rkey_size > 0);
    }
    region_table_free(&regions);
    buffer_free(&blob);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
}

static void short_memory_leaves_the_last_snapshot(void **state)
{
    fanin_server *s = start(0);
    fanin_error error = FANIN_ERROR_INIT;
    uint8_t *a = alloc(0, s, "a"), *b = NULL;
    reader r = open_reader(s);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    server_begin(s);
    b = alloc(0, s, "b");
    for (unsigned after = 0; after < 2; after++) {
        fake_cuda_fail("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, after, 1);
        assert_int_equal(commit(s, 2, FANIN_COMMIT_SNAPSHOT, &error), FANIN_ERR_MEMORY);
        fake_cuda_fail("cuMemAlloc_v2", CUDA_SUCCESS, 0, 0);
        char bytes[32];
        snprintf(bytes, sizeof bytes, "%zu", (SIZE + 511) / 512 * 512 + SIZE);
        assert_non_null(strstr(error.message, bytes));
    }
    assert_int_equal(begin(&r), 1);
    expect_bytes(&r, 0, 1);
    expect_good(&r);
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    assert_int_equal(begin(&r), 2);
    expect_bytes(&r, 1, 1);
    expect_good(&r);
    close_reader(&r);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
    fake_cuda_free(b);
}

static void any_failing_call_is_survived(void **state)
{
    static const char *const functions[] = {
        "cuMemAlloc_v2",        "cuStreamCreate",      "cuEventCreate",
        "cuEventRecord",        "cuStreamWaitEvent",   "cuLaunchKernel",
        "cuMemcpyHtoDAsync_v2", "cuStreamAddCallback", "cuCtxPushCurrent_v2"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        for (unsigned after = 0; after < 4; after++) {
            fanin_server *s = start(0);
            uint8_t *a = alloc(0, s, "a"), *b = alloc(1, s, "b");
            reader r = open_reader(s);
            fake_cuda_fail(functions[i], CUDA_ERROR_OUT_OF_MEMORY, after, 1);
            fanin_status status =
                commit(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT, NULL);
            fake_cuda_fail(functions[i], CUDA_SUCCESS, 0, 0);
            server_begin(s);
            if (status != FANIN_OK) /* some copies may have been queued */
                assert_true(fake_cuda_wait_idle(0) && fake_cuda_wait_idle(1));
            memset(fake_cuda_alias(b), 2, SIZE);
            commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
            assert_int_equal(begin(&r), 2);
            expect_bytes(&r, 0, 1);
            expect_bytes(&r, 1, 2);
            expect_good(&r);
            close_reader(&r);
            fanin_server_destroy(&s, 0);
            fake_cuda_free(a);
            fake_cuda_free(b);
        }
}

static void unchanged_shards_cost_little(void **state)
{
    fanin_server *s = start(0);
    uint8_t *a = alloc(0, s, "a");
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    fake_cuda_counts before, after;
    fake_cuda_count(&before);
    for (uint64_t step = 2; step < 12; step++) {
        server_begin(s);
        commit_ok(s, step, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    }
    fake_cuda_count(&after);
    assert_int_equal(after.kernels - before.kernels, 10);
    assert_int_equal(after.copies, before.copies);
    assert_int_equal(after.allocations, before.allocations);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(a);
}

/* Last: what was on a broken device cannot be given back. */
static void failed_devices_are_told(void **state)
{
    fanin_server *s = start(0);
    uint8_t *memory = alloc(0, s, "a");
    listen_for("commit-failed");
    committer c;
    hold();
    commit_start(&c, s, 5, FANIN_COMMIT_WAIT);
    assert_true(fake_cuda_wait_queued(0, 1));
    fake_cuda_break(0);
    fake_cuda_release(0);
    assert_int_equal(commit_end(&c), FANIN_ERR_TRANSPORT);
    assert_int_equal(heard(1, "step 5"), 1);
    assert_int_equal(server_stats(s).commits, 0);
    fake_cuda_repair(0);
    fanin_server_destroy(&s, 0);
    fake_cuda_free(memory);
}

static int set_up(void **state)
{
    const char *library = getenv("FANIN_TEST_CUDA_LIBRARY");
    if (!library)
        return -1;
    setenv("FANIN_CUDA_LIBRARY", library, 1);
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(gpu_load(&(logger){0}, &driver, &error), error);
    assert_int_equal(gpu_context_enter(driver, 0, NULL), FANIN_OK);
    CUstream made;
    assert_int_equal(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    gpu_context_leave(driver);
    stream.handle = made;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(effect_comes_with_the_stream),
        cmocka_unit_test(begin_update_withdraws),
        cmocka_unit_test(what_was_reached_is_published),
        cmocka_unit_test(other_changes_withdraw),
        cmocka_unit_test(streams_may_outlive_the_server),
        cmocka_unit_test(a_commit_waits_for_the_one_before),
        cmocka_unit_test(late_effects_mind_the_epoch),
        cmocka_unit_test(streams_are_checked),
        cmocka_unit_test(copies_are_made_in_the_streams_order),
        cmocka_unit_test(the_trainer_runs_ahead),
        cmocka_unit_test(without_a_stream_it_is_complete),
        cmocka_unit_test(host_memory_waits_for_the_stream),
        cmocka_unit_test(removal_waits_for_the_copy),
        cmocka_unit_test(pauses_wait_for_the_stream),
        cmocka_unit_test(destruction_waits_for_the_copy),
        cmocka_unit_test(aborted_copies_are_not_published),
        cmocka_unit_test(arenas_can_be_exported),
        cmocka_unit_test(short_memory_leaves_the_last_snapshot),
        cmocka_unit_test(any_failing_call_is_survived),
        cmocka_unit_test(unchanged_shards_cost_little),
        cmocka_unit_test(failed_devices_are_told),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
