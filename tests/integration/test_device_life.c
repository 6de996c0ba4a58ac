/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of mapped device memory: a trainer that moves, removes and frees shards which workers
 * have mapped, workers that die while they read. Trainer and workers are processes, forked from
 * this one, which does not use the driver itself.
 */
#include "catalog.h"
#include "ends.h"
#include "error_set.h"
#include "fake_cuda.h"
#include "gpu.h"
#include "own_process.h"
#include "testing.h"
#include <cuda.h>
#include <fanin/fanin.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#define SHARDS 40
#define BYTES 50000
#define LEASE_MS 300

static uint8_t byte_of(uint64_t step, uint64_t i)
{
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15u + step * 0xD6E8FEB86659FD93u;
    return (uint8_t)((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u >> 40);
}

static void describe(fanin_tensor *tensors, fanin_box *boxes, char names[][16],
                     uint8_t *memory)
{
    for (size_t i = 0; i < SHARDS; i++) {
        snprintf(names[i], sizeof names[i], "w%02zu", i);
        tensors[i] = make_tensor(names[i], FANIN_DTYPE_U8, BYTES, 0, &boxes[i],
                                 memory + i * BYTES);
    }
}

/* ----------------------------------------------------------------- the trainer */

enum verb {
    COMMIT, /* the next step, in place */
    MOVE, /* to other memory, of the same addresses if that is free, and the next step */
    SPLIT, /* the later half of the shards to an allocation of its own, and the next step */
    ADD,     /* a publication lora:1, the same in memory of its own */
    REMOVE,  /* the publication */
    RELEASE, /* its memory */
    AGAIN,   /* the publication, in new memory */
    PAUSE,   /* the publication */
    RESUME,  /* it, in new memory, at the same step */
    MAPPERS, /* answers how many sessions may map it */
    MAPPED,  /* answers how many mappings there really are */
    TOLD,    /* answers how often "still-mapped" was logged */
};

typedef struct trainer {
    pid_t pid;
    int channel;
    char address[32];
} trainer;

static fanin_server *server;
static uint8_t *shards;
static uint64_t step;
static atomic_int still_mapped;

static void on_log(void *cookie, fanin_log_level level, const char *event,
                   const char *message)
{
    still_mapped += strcmp(event, "still-mapped") == 0;
}

static void write_shards(void)
{
    uint8_t *bytes = fake_cuda_alias(shards);
    for (uint64_t i = 0; i < SHARDS * BYTES; i++)
        bytes[i] = byte_of(step, i);
}

static fanin_status put_as(const char *publication, uint8_t *memory, bool replace)
{
    static fanin_tensor tensors[SHARDS];
    static fanin_box boxes[SHARDS];
    static char names[SHARDS][16];
    describe(tensors, boxes, names, memory);
    return fanin_server_put(server, publication, tensors, SHARDS, replace, &failure);
}

static fanin_status put(bool replace)
{
    return put_as("lora:0", shards, replace);
}

static int commit(void)
{
    step++;
    write_shards();
    CHECK(fanin_server_commit(server, "lora:0", step, NULL, &failure) == FANIN_OK);
    return 0;
}

static int rewrite(void)
{
    CHECK(fanin_server_begin_update(server, "lora:0", &failure) == FANIN_OK);
    return commit();
}

/* What comes next has the old addresses, larger by some bytes: freed first. */
static int move(void)
{
    CHECK(fanin_server_begin_update(server, "lora:0", &failure) == FANIN_OK);
    fake_cuda_free(shards);
    shards = fake_cuda_alloc(0, SHARDS * BYTES + 512, FAKE_CUDA_MALLOC);
    /* Where this is the same address, only the driver can tell that it is other memory. */
    CHECK(put(true) == FANIN_OK);
    return commit();
}

static int split(void)
{
    static fanin_tensor tensors[SHARDS];
    static fanin_box boxes[SHARDS];
    static char names[SHARDS][16];
    uint8_t *second = fake_cuda_alloc(0, SHARDS * BYTES, FAKE_CUDA_MALLOC);
    CHECK(fanin_server_begin_update(server, "lora:0", &failure) == FANIN_OK);
    describe(tensors, boxes, names, shards);
    for (size_t i = SHARDS / 2; i < SHARDS; i++)
        boxes[i].address = second + i * BYTES;
    CHECK(fanin_server_put(server, "lora:0", tensors, SHARDS, true, &failure) ==
          FANIN_OK);
    step++;
    write_shards();
    memcpy(fake_cuda_alias(second), fake_cuda_alias(shards), SHARDS * BYTES);
    memset((uint8_t *)fake_cuda_alias(shards) + SHARDS / 2 * BYTES, 0, BYTES);
    CHECK(fanin_server_commit(server, "lora:0", step, NULL, &failure) == FANIN_OK);
    return 0;
}

static int add(void)
{
    uint8_t *second = fake_cuda_alloc(0, SHARDS * BYTES, FAKE_CUDA_MALLOC);
    memcpy(fake_cuda_alias(second), fake_cuda_alias(shards), SHARDS * BYTES);
    CHECK(put_as("lora:1", second, false) == FANIN_OK);
    CHECK(fanin_server_commit(server, "lora:1", step, NULL, &failure) == FANIN_OK);
    return 0;
}

static int obey(enum verb verb)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    switch (verb) {
    case COMMIT:
        return rewrite();
    case MOVE:
        return move();
    case SPLIT:
        return split();
    case ADD:
        return add();
    case REMOVE:
        CHECK(fanin_server_remove(server, "lora:0", NULL, &failure) == FANIN_OK);
        return 0;
    case RELEASE:
        fake_cuda_free(shards);
        return 0;
    case AGAIN:
        shards = fake_cuda_alloc(0, SHARDS * BYTES, FAKE_CUDA_MALLOC);
        CHECK(put(false) == FANIN_OK);
        return commit();
    case PAUSE:
        CHECK(fanin_server_pause(server, "lora:0", NULL, &failure) == FANIN_OK);
        return 0;
    case RESUME:
        shards = fake_cuda_alloc(0, SHARDS * BYTES, FAKE_CUDA_MALLOC);
        write_shards();
        CHECK(put(true) == FANIN_OK);
        CHECK(fanin_server_resume(server, "lora:0", &failure) == FANIN_OK);
        return 0;
    case MAPPERS:
        CHECK(fanin_server_get_stats(server, &stats) == FANIN_OK);
        return (int)stats.ipc_mappers;
    case MAPPED:
        return (int)fake_cuda_mapped_by_others(shards);
    case TOLD:
        return still_mapped;
    }
    return -1;
}

static int train(int channel)
{
    fanin_server_config config = make_server_config();
    config.lease_ms = LEASE_MS;
    config.log = on_log;
    CHECK(fanin_server_create(&config, &server, &failure) == FANIN_OK);
    shards = fake_cuda_alloc(0, SHARDS * BYTES, FAKE_CUDA_MALLOC);
    CHECK(put(false) == FANIN_OK);
    CHECK(commit() == 0);
    int answer = fanin_server_port(server);
    enum verb verb;
    while (send(channel, &answer, sizeof(answer), MSG_NOSIGNAL) == sizeof(answer) &&
           recv(channel, &verb, sizeof(verb), 0) == sizeof(verb))
        answer = obey(verb);
    fanin_server_destroy(&server, LEASE_MS);
    return PASSED;
}

static int answer_of(const trainer *t)
{
    int answer;
    assert_int_equal(recv(t->channel, &answer, sizeof(answer), 0), sizeof(answer));
    return answer;
}

static int ask(const trainer *t, enum verb verb)
{
    assert_int_equal(send(t->channel, &verb, sizeof(verb), MSG_NOSIGNAL), sizeof(verb));
    return answer_of(t);
}

static void start(trainer *t)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(NULL);
    t->pid = fork();
    assert_true(t->pid >= 0);
    if (t->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(pair[0]);
        exit(train(pair[1]));
    }
    close(pair[1]);
    t->channel = pair[0];
    snprintf(t->address, sizeof t->address, "127.0.0.1:%d", answer_of(t));
}

static void stop(trainer *t)
{
    close(t->channel);
    assert_int_equal(tests_await(t->pid), PASSED);
}

/* ------------------------------------------------------------------ the workers */

typedef struct worker {
    fanin_client *client;
    int device;
    fanin_path forced;
    fanin_stream stream;
    const char *publication; /* NULL: lora:0 */
    uint32_t timeout_ms;     /* of a pull; 0: enough */
    uint8_t *memory;
    uint64_t step, table_ns; /* of the last pull */
    fanin_path path;
} worker;

/* In the worker's process: what the parent and it tell each other. */
static const trainer *served_by;
static int parent;

static fanin_status pull_some(worker *w, size_t first, size_t count)
{
    static fanin_tensor tensors[SHARDS];
    static fanin_box boxes[SHARDS];
    static char names[SHARDS][16];
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    options.stream = w->stream;
    if (w->publication)
        options.publication = w->publication;
    if (w->timeout_ms)
        options.timeout_ms = w->timeout_ms;
    describe(tensors, boxes, names, w->memory);
    failure = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = fanin_client_pull(w->client, &options, tensors + first, count,
                                            &result, &failure);
    if (status == FANIN_OK) {
        fanin_result_get(result, &info);
        /* For CHECK() to print. */
        snprintf(failure.message, sizeof failure.message, "%s", info.path_reason);
    }
    w->step = info.step;
    w->table_ns = info.table_ns;
    w->path = info.path;
    fanin_result_free(&result);
    return status;
}

static fanin_status pull(worker *w)
{
    return pull_some(w, 0, SHARDS);
}

static bool are_right(const worker *w, size_t first, size_t count)
{
    const uint8_t *bytes = fake_cuda_alias(w->memory);
    for (uint64_t i = first * BYTES; i < (first + count) * BYTES; i++)
        if (bytes[i] != byte_of(w->step, i))
            return false;
    return true;
}

static bool is_right(const worker *w)
{
    return are_right(w, 0, SHARDS);
}

static int join(worker *w)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = w->forced;
    const char *address = served_by->address;
    CHECK(fanin_client_create(&config, &w->client, &failure) == FANIN_OK);
    CHECK(fanin_client_connect(w->client, &address, 1, 10000, &failure) == FANIN_OK);
    w->memory = fake_cuda_alloc(w->device, SHARDS * BYTES, FAKE_CUDA_MALLOC);
    return PASSED;
}

static int begin(worker *w)
{
    CHECK(join(w) == PASSED);
    CHECK(pull(w) == FANIN_OK && w->path == FANIN_PATH_CUDA_IPC && is_right(w));
    return PASSED;
}

static uint64_t open_mappings(void)
{
    fake_cuda_counts c;
    fake_cuda_count(&c);
    return c.mappings;
}

static int end(worker *w)
{
    fanin_client_destroy(&w->client);
    CHECK(open_mappings() == 0);
    fake_cuda_free(w->memory);
    return PASSED;
}

/* Lets the parent go on, and waits until it lets this process go on. */
static bool meet(void)
{
    char c = 0;
    return send(parent, &c, 1, MSG_NOSIGNAL) == 1 && recv(parent, &c, 1, 0) == 1;
}

typedef struct started {
    pid_t pid;
    int channel;
} started;

static started start_worker(const trainer *t, int (*body)(void))
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(NULL);
    started s = {.pid = fork(), .channel = pair[0]};
    assert_true(s.pid >= 0);
    if (s.pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(t->channel);
        close(pair[0]);
        served_by = t;
        parent = pair[1];
        exit(body());
    }
    close(pair[1]);
    return s;
}

/* Until the worker is at its next meet(). */
static void await(const started *s)
{
    char c;
    assert_int_equal(recv(s->channel, &c, 1, 0), 1);
}

static void go_on(const started *s)
{
    char c = 0;
    assert_int_equal(send(s->channel, &c, 1, MSG_NOSIGNAL), 1);
}

static int finish(const started *s)
{
    int status = tests_await(s->pid);
    close(s->channel);
    return status;
}

/* ------------------------------------------------------------------------ cases */

/* Pulls again and again while the trainer rewrites and moves; has one mapping at a time. */
static int follow(void)
{
    for (int device = 0; device < 2; device++) {
        worker w = {.device = device};
        CHECK(begin(&w) == PASSED);
        uint64_t last = w.step;
        for (int i = 0; i < 4; i++) {
            CHECK(meet());
            CHECK(pull(&w) == FANIN_OK && w.step == last + 1);
            CHECK(w.path == FANIN_PATH_CUDA_IPC);
            CHECK(is_right(&w));
            CHECK(open_mappings() == 1);
            last = w.step;
        }
        CHECK(end(&w) == PASSED);
        CHECK(meet());
    }
    return PASSED;
}

TEST(test_moved_shards)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, follow);
    for (int device = 0; device < 2; device++) {
        for (int i = 0; i < 4; i++) {
            await(&w);
            assert_int_equal(ask(&t, MAPPED), 1);
            assert_int_equal(ask(&t, i % 2 == 0 ? MOVE : COMMIT), 0);
            go_on(&w);
        }
        await(&w);
        assert_int_equal(ask(&t, MAPPED), 0);
        go_on(&w);
    }
    assert_int_equal(finish(&w), PASSED);
    assert_true(ask(&t, TOLD) > 0); /* moving what a worker has mapped */
    stop(&t);
}

/* Maps what is read, and keeps it; what is read later comes to it. */
static int choose(void)
{
    for (int device = 0; device < 2; device++) {
        worker w = {.device = device};
        size_t half = SHARDS / 2;
        CHECK(join(&w) == PASSED);
        for (int i = 0; i < 2; i++) {
            CHECK(pull_some(&w, half, half) == FANIN_OK && are_right(&w, half, half));
            CHECK(w.path == FANIN_PATH_CUDA_IPC && open_mappings() == 1);
        }
        for (int i = 0; i < 2; i++) {
            CHECK(pull_some(&w, 0, half) == FANIN_OK && are_right(&w, 0, half));
            CHECK(w.path == FANIN_PATH_CUDA_IPC && open_mappings() == 2);
        }
        CHECK(pull(&w) == FANIN_OK && is_right(&w));
        CHECK(w.path == FANIN_PATH_CUDA_IPC && open_mappings() == 2);
        CHECK(end(&w) == PASSED);
    }
    return PASSED;
}

/* A session maps when it begins; a pull after it finds that done. */
static int prepare(void)
{
    static fanin_tensor tensors[SHARDS];
    static fanin_box boxes[SHARDS];
    static char names[SHARDS][16];
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_session *session = NULL;
    fake_cuda_counts before, after;
    worker w = {.device = 1};
    CHECK(join(&w) == PASSED);
    describe(tensors, boxes, names, w.memory);
    CHECK(fanin_client_begin(w.client, &options, tensors, SHARDS, &session, &failure) ==
          FANIN_OK);
    fanin_session_abandon(&session);
    CHECK(open_mappings() == 2);
    fake_cuda_count(&before);
    CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
    fake_cuda_count(&after);
    CHECK(after.opens == before.opens);
    return end(&w);
}

TEST(test_what_is_read_is_mapped)
{
    trainer t;
    start(&t);
    assert_int_equal(ask(&t, SPLIT), 0);
    started w = start_worker(&t, choose);
    assert_int_equal(finish(&w), PASSED);
    w = start_worker(&t, prepare);
    assert_int_equal(finish(&w), PASSED);
    stop(&t);
}

static int lose(void)
{
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    CHECK(meet());
    w.timeout_ms = 2000; /* a run that is not there may come yet */
    CHECK(pull(&w) == FANIN_ERR_NOT_FOUND);
    CHECK(open_mappings() == 0);
    CHECK(meet());
    w.timeout_ms = 0;
    CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
    return end(&w);
}

/* Removed while mapped: the trainer is told, frees, and goes on; the worker finds nothing and
   unmaps, until there is something again. */
TEST(test_removed_shards)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, lose);
    await(&w);
    assert_int_equal(ask(&t, MAPPERS), 1);
    assert_int_equal(ask(&t, REMOVE), 0);
    assert_int_equal(ask(&t, TOLD), 1);
    assert_int_equal(ask(&t, RELEASE), 0);
    go_on(&w);
    await(&w);
    assert_int_equal(ask(&t, AGAIN), 0);
    go_on(&w);
    assert_int_equal(finish(&w), PASSED);
    stop(&t);
}

static int bear_pauses(void)
{
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    for (int i = 0; i < 3; i++) {
        CHECK(meet());
        CHECK(pull(&w) == FANIN_ERR_PAUSED);
        CHECK(open_mappings() == 0);
        CHECK(meet());
        CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
        CHECK(w.step == 1 && open_mappings() == 1);
    }
    return end(&w);
}

/* Paused while mapped: the worker's next pull unmaps, then the memory can be freed; what takes its
   place, often at the same address, is mapped anew. */
TEST(test_paused_shards)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, bear_pauses);
    for (int i = 0; i < 3; i++) {
        await(&w);
        assert_int_equal(ask(&t, MAPPED), 1);
        assert_int_equal(ask(&t, PAUSE), 0);
        assert_int_equal(ask(&t, TOLD), i + 1);
        go_on(&w);
        await(&w);
        assert_int_equal(ask(&t, MAPPED), 0);
        assert_int_equal(ask(&t, RELEASE), 0);
        assert_int_equal(ask(&t, RESUME), 0);
        go_on(&w);
    }
    assert_int_equal(finish(&w), PASSED);
    stop(&t);
}

static void *tell_when_held(void *cookie)
{
    if (fake_cuda_wait_kernel_held(1))
        meet();
    return NULL;
}

/* Stands still in the middle of a pull's kernel. */
static int stand_still(void)
{
    pthread_t thread;
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    fake_cuda_hold_kernel(1, 20);
    CHECK(pthread_create(&thread, NULL, tell_when_held, NULL) == 0);
    CHECK(pull(&w) == FANIN_OK); /* the process is killed in here */
    return FAILED;
}

static int pull_well(void)
{
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    return end(&w);
}

/* The worker dies while it reads; the trainer's update begins as soon as its session is gone, and
   its memory can be freed. */
TEST(test_killed_worker)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, stand_still);
    await(&w);
    assert_int_equal(kill(w.pid, SIGKILL), 0);
    assert_int_equal(finish(&w), -SIGKILL);
    assert_int_equal(ask(&t, MOVE), 0); /* frees the memory that was being read */
    started next = start_worker(&t, pull_well);
    assert_int_equal(finish(&next), PASSED);
    assert_int_equal(ask(&t, REMOVE), 0);
    assert_int_equal(ask(&t, RELEASE), 0);
    stop(&t);
}

static void *release_when_told(void *cookie)
{
    tell_when_held(cookie);
    fake_cuda_release(1);
    return NULL;
}

/* The kernel stands still; when the parent says so it goes on, too late. */
static int be_overtaken(void)
{
    pthread_t thread;
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    fake_cuda_hold_kernel(1, 20);
    CHECK(pthread_create(&thread, NULL, release_when_told, NULL) == 0);
    fanin_status status = pull(&w);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(status == FANIN_OK && w.step == 2);
    CHECK(is_right(&w));
    return end(&w);
}

/* The trainer waits for the reader no longer than the lease, then rewrites under its kernel, or
   frees what it reads: what was read is thrown away, and the pull gives the new step whole. */
TEST(test_overtaken_reader)
{
    static const enum verb verbs[] = {COMMIT, MOVE};
    for (size_t i = 0; i < 2; i++) {
        trainer t;
        start(&t);
        started w = start_worker(&t, be_overtaken);
        await(&w);
        assert_int_equal(ask(&t, verbs[i]), 0);
        go_on(&w);
        assert_int_equal(finish(&w), PASSED);
        stop(&t);
    }
}

/* ------------------------------------------------------------ mapped beside catalogs */

/* What happens when the key table has come and is not decoded yet; NULL: nothing. */
static fanin_status (*at_key_table)(void);
static sem_t mapped; /* posted for each mapping */
static worker *at_work;

fanin_status __real_key_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                                     key_table **out, fanin_error *error);
fanin_status __wrap_key_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                                     key_table **out, fanin_error *error);
fanin_status __wrap_key_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                                     key_table **out, fanin_error *error)
{
    fanin_status status = at_key_table ? at_key_table() : FANIN_OK;
    if (status != FANIN_OK)
        return error_set(error, status, NULL, "the test says so");
    return __real_key_table_decode(blob, size, stop, out, error);
}

fanin_status __real_gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                            void **base_out, fanin_error *error);
fanin_status __wrap_gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                            void **base_out, fanin_error *error);
fanin_status __wrap_gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                            void **base_out, fanin_error *error)
{
    fanin_status status = __real_gpu_map(g, device, handle, base_out, error);
    sem_post(&mapped);
    return status;
}

/* Until something is mapped; 20 s: nothing is. */
static fanin_status wait_for_mapping(void)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    return sem_timedwait(&mapped, &until) == 0 ? FANIN_OK : FANIN_ERR_INTERNAL;
}

static fanin_status refuse_mapped(void)
{
    fanin_status status = wait_for_mapping();
    return status == FANIN_OK ? FANIN_ERR_PROTOCOL : status;
}

static fanin_status cancel_mapped(void)
{
    fanin_status status = wait_for_mapping();
    fanin_client_cancel(at_work->client);
    return status;
}

static fanin_status lose_mapped(void)
{
    fanin_status status = wait_for_mapping();
    return meet() ? status : FANIN_ERR_INTERNAL; /* the parent kills the rank */
}

static fanin_status find_unmapped(void)
{
    return open_mappings() == 0 ? FANIN_OK : FANIN_ERR_INTERNAL;
}

/* The rank's memory is mapped while the key table is still awaited. */
static int map_ahead_well(void)
{
    worker w = {.device = 1};
    CHECK(join(&w) == PASSED);
    at_key_table = wait_for_mapping;
    CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
    CHECK(open_mappings() == 1 && w.table_ns > 0);
    CHECK(pull(&w) == FANIN_OK && is_right(&w) && open_mappings() == 1);
    return end(&w);
}

/* What is mapped when the catalog turns out bad, or the pull is cancelled, is used by the next
   pull. */
static int map_ahead_in_vain(void)
{
    static const struct {
        fanin_status (*how)(void);
        fanin_status status;
    } ends[] = {{refuse_mapped, FANIN_ERR_PROTOCOL},
                {cancel_mapped, FANIN_ERR_CANCELLED}};
    for (size_t i = 0; i < 2; i++) {
        worker w = {.device = (int)i};
        at_work = &w;
        CHECK(join(&w) == PASSED);
        at_key_table = ends[i].how;
        CHECK(pull(&w) == ends[i].status && open_mappings() == 1);
        at_key_table = NULL;
        CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
        CHECK(open_mappings() == 1);
        CHECK(end(&w) == PASSED);
    }
    return PASSED;
}

TEST(test_mapped_beside_catalogs)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, map_ahead_well);
    assert_int_equal(finish(&w), PASSED);
    w = start_worker(&t, map_ahead_in_vain);
    assert_int_equal(finish(&w), PASSED);
    assert_int_equal(ask(&t, MAPPED), 0);
    stop(&t);
}

/* The rank dies when its memory is mapped and its boxes are still to come. */
static int lose_rank_when_mapped(void)
{
    worker w = {.device = 1, .timeout_ms = 3000};
    CHECK(join(&w) == PASSED);
    at_key_table = lose_mapped;
    CHECK(pull(&w) != FANIN_OK && failure.rank == 0);
    CHECK(failure.status == FANIN_ERR_UNREACHABLE ||
          failure.status == FANIN_ERR_TIMEOUT);
    return end(&w);
}

TEST(test_rank_lost_when_mapped)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, lose_rank_when_mapped);
    await(&w);
    assert_int_equal(kill(t.pid, SIGKILL), 0);
    assert_int_equal(tests_await(t.pid), -SIGKILL);
    go_on(&w);
    assert_int_equal(finish(&w), PASSED);
    close(t.channel);
}

/* Who wants half of the shards waits for the plan to know which memory that is. */
static int map_nothing_ahead(void)
{
    worker w = {.device = 1};
    CHECK(join(&w) == PASSED);
    at_key_table = find_unmapped;
    CHECK(pull_some(&w, 0, SHARDS / 2) == FANIN_OK && are_right(&w, 0, SHARDS / 2));
    CHECK(w.path == FANIN_PATH_CUDA_IPC && open_mappings() == 1);
    return end(&w);
}

TEST(test_little_is_not_mapped_ahead)
{
    trainer t;
    start(&t);
    assert_int_equal(ask(&t, SPLIT), 0);
    started w = start_worker(&t, map_nothing_ahead);
    assert_int_equal(finish(&w), PASSED);
    stop(&t);
}

/* ------------------------------------------------------- what devices do not end */

#define LITTLE_MS 300
#define GIVE_UP_MS 2000

/* What happens when a probe's read is about to be queued; NULL: nothing. */
static void (*at_copy)(void);

fanin_status __real_gpu_copy(gpu_stream *stream, void *to, const void *from,
                             size_t bytes, fanin_error *error);
fanin_status __wrap_gpu_copy(gpu_stream *stream, void *to, const void *from,
                             size_t bytes, fanin_error *error);
fanin_status __wrap_gpu_copy(gpu_stream *stream, void *to, const void *from,
                             size_t bytes, fanin_error *error)
{
    if (at_copy)
        at_copy();
    return __real_gpu_copy(stream, to, from, bytes, error);
}

/* The pull's deadline is past when it goes on. */
static void hold_until_late(void)
{
    fake_cuda_hold(1);
    deadline passed = deadline_in_ms(GIVE_UP_MS);
    while (!deadline_passed(passed))
        sched_yield();
}

static void hold_and_cancel(void)
{
    fake_cuda_hold(1);
    fanin_client_cancel(at_work->client);
}

/* The driver answers once that it may not be asked. */
static void hold_and_deny(void)
{
    fake_cuda_hold(1);
    fake_cuda_fail("cuStreamQuery", CUDA_ERROR_NOT_PERMITTED, 0, 1);
}

/* A pull gives up waiting for the caller's stream; the next one has other memory to try. */
static int give_up_streams(void)
{
    CUcontext context;
    CUstream stream;
    worker w = {.device = 1};
    CHECK(begin(&w) == PASSED);
    CHECK(cuDevicePrimaryCtxRetain(&context, 1) == CUDA_SUCCESS);
    CHECK(cuCtxPushCurrent(context) == CUDA_SUCCESS);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    fake_cuda_hold_stream(stream);
    w.stream = (fanin_stream){.handle = stream, .device = 1};
    w.timeout_ms = LITTLE_MS;
    CHECK(pull(&w) == FANIN_ERR_TIMEOUT);
    w.stream = (fanin_stream){.handle = NULL};
    w.publication = "lora:1";
    fanin_status status = pull(&w);
    CHECK(status == FANIN_OK || status == FANIN_ERR_TIMEOUT);
    fake_cuda_release(1);
    w.timeout_ms = 0;
    CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
    CHECK(cuStreamDestroy(stream) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent(NULL) == CUDA_SUCCESS);
    return end(&w);
}

/* It is none of the device's fault: what was mapped is unmapped in the end. */
TEST(test_a_callers_stream_is_no_stuck_device)
{
    trainer t;
    start(&t);
    assert_int_equal(ask(&t, ADD), 0);
    started w = start_worker(&t, give_up_streams);
    assert_int_equal(finish(&w), PASSED);
    assert_int_equal(ask(&t, MAPPED), 0);
    stop(&t);
}

/* The probe's read does not end while the pull lasts: what it reads stays mapped, and no longer. */
static int give_up_probes(void)
{
    static const struct {
        void (*how)(void);
        uint32_t timeout_ms;
        fanin_status status;
    } ends[] = {{hold_until_late, GIVE_UP_MS, FANIN_ERR_TIMEOUT},
                {hold_and_cancel, 0, FANIN_ERR_CANCELLED},
                {hold_and_deny, 0, FANIN_ERR_UNSUPPORTED}};
    for (size_t i = 0; i < 3; i++) {
        worker w = {.device = 1, .forced = FANIN_PATH_CUDA_IPC};
        at_work = &w;
        CHECK(join(&w) == PASSED);
        at_copy = ends[i].how;
        w.timeout_ms = ends[i].timeout_ms;
        CHECK(pull(&w) == ends[i].status);
        CHECK(open_mappings() == 1);
        at_copy = NULL;
        fake_cuda_release(1);
        CHECK(fake_cuda_wait_idle(1));
        w.timeout_ms = 0;
        CHECK(pull(&w) == FANIN_OK && w.path == FANIN_PATH_CUDA_IPC && is_right(&w));
        CHECK(end(&w) == PASSED);
    }
    return PASSED;
}

TEST(test_probes_that_are_given_up)
{
    trainer t;
    start(&t);
    started w = start_worker(&t, give_up_probes);
    assert_int_equal(finish(&w), PASSED);
    assert_int_equal(ask(&t, MAPPED), 0);
    stop(&t);
}

int main(void)
{
    sem_init(&mapped, 0, 0);
    unsetenv("CUDA_VISIBLE_DEVICES");
    return tests_run(NULL);
}
