/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer takes memory away that it has published: whatever the path, the pull fails in short and
 * names the tensor, the log says so, and the trainer, which is this process, lives.
 */
#include "clock.h"
#include "ends.h"
#include "log_catcher.h"
#include "pull/pull.h"
#include "secrets.h"
#include "testing.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define SIZE ((size_t)8 << 20)
#define HOLE (((size_t)3 << 20) + 4096)
#define PAGE ((size_t)4096)
#define RUN "full:0"
#define SOON_NS UINT64_C(15000000000) /* less than a pull's timeout */

typedef struct scene {
    fanin_server *server;
    char address[64];
    uint8_t *memory;
    fanin_tensor tensors[2];
    fanin_box boxes[2];
} scene;

/* A good tensor before the one that is lost. */
static void set_scene(scene *s, const char *secret, bool narrow)
{
    fanin_server_config config = make_server_config();
    config.secret_file = secret;
    config.log = log_catch;
    s->server = make_server(&config, s->address, sizeof s->address);
    s->memory =
        mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(s->memory != MAP_FAILED);
    memset(s->memory, 5, SIZE);
    s->tensors[0] = make_tensor("kept", FANIN_DTYPE_U8, SIZE / 4 / 1024, 1024,
                                &s->boxes[0], s->memory);
    s->tensors[1] = make_tensor("lost", FANIN_DTYPE_U8, SIZE / 2 / 1024,
                                narrow ? 16 : 1024, &s->boxes[1], s->memory + SIZE / 4);
    if (narrow)
        s->boxes[1].stride[0] = 1024;
    assert_works(fanin_server_put(s->server, RUN, s->tensors, 2, false, ERROR));
}

static void commit(scene *s)
{
    assert_works(fanin_server_commit(s->server, RUN, 1, 0, ERROR));
}

static void take_away(scene *s, bool unmap)
{
    if (unmap)
        assert_int_equal(munmap(s->memory + HOLE, PAGE), 0);
    else
        assert_int_equal(mprotect(s->memory + HOLE, PAGE, PROT_NONE), 0);
}

static void end_scene(scene *s)
{
    fanin_server_destroy(&s->server, 0);
    munmap(s->memory, SIZE);
}

typedef struct way {
    fanin_path path;
    bool no_unix, is_secured, verify, narrow;
} way;

static fanin_status pull_by(scene *s, const way *w, size_t n, fanin_error *error)
{
    const char *list[] = {s->address};
    fanin_client_config config = make_client_config();
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_box boxes[2];
    fanin_tensor wanted[2];
    uint8_t *landed = malloc(SIZE);
    config.path = w->path;
    config.no_unix = w->no_unix;
    config.secret_file = w->is_secured ? secret_of('1') : NULL;
    options.publication = RUN;
    options.verify = w->verify;
    wanted[0] =
        make_tensor("kept", FANIN_DTYPE_U8, SIZE / 4 / 1024, 1024, &boxes[0], landed);
    wanted[1] = make_tensor("lost", FANIN_DTYPE_U8, SIZE / 2 / 1024,
                            w->narrow ? 16 : 1024, &boxes[1], landed + SIZE / 4);
    fanin_client *client = connect_client(&config, list, 1);
    fanin_status status = fanin_client_pull(client, &options, wanted, n, NULL, error);
    fanin_client_destroy(&client);
    free(landed);
    return status;
}

static void expect_named(const way *w, bool unmap)
{
    scene s;
    fanin_error error = FANIN_ERROR_INIT;
    set_scene(&s, w->is_secured ? secret_of('1') : NULL, w->narrow);
    commit(&s);
    assert_ok(pull_by(&s, w, 2, &error), error);
    take_away(&s, unmap);
    if (w->path == FANIN_PATH_STREAM)
        log_listen("read-failed");
    uint64_t began = clock_ns();
    assert_int_equal(pull_by(&s, w, 2, &error), FANIN_ERR_TRANSPORT);
    assert_true(clock_ns() - began < SOON_NS);
    if (!strstr(error.message, "lost"))
        fail_msg("it does not name the tensor: %s", error.message);
    if (w->path == FANIN_PATH_STREAM)
        log_await("lost");
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(pull_by(&s, w, 1, &error), error); /* the other is served on */
    end_scene(&s);
}

TEST(memory_that_is_gone_is_named)
{
    static const way ways[] = {
        {.path = FANIN_PATH_AUTO},
        {.path = FANIN_PATH_CMA},
        {.path = FANIN_PATH_STREAM},
        {.path = FANIN_PATH_STREAM, .narrow = true},
        {.path = FANIN_PATH_STREAM, .no_unix = true},
        {.path = FANIN_PATH_STREAM, .no_unix = true, .is_secured = true},
        {.path = FANIN_PATH_STREAM, .verify = true},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        for (int unmap = 0; unmap < 2; unmap++)
            expect_named(&ways[i], unmap);
}

/* ------------------------------------------------------ between read and digest */

static scene *to_be_lost;

fanin_status __real_pull_verify(pull *p, fanin_error *error);
fanin_status __wrap_pull_verify(pull *p, fanin_error *error);

fanin_status __wrap_pull_verify(pull *p, fanin_error *error)
{
    if (to_be_lost)
        take_away(to_be_lost, false);
    return __real_pull_verify(p, error);
}

TEST(a_digest_of_memory_that_is_gone_is_named)
{
    const way w = {.path = FANIN_PATH_STREAM, .verify = true};
    scene s;
    fanin_error error = FANIN_ERROR_INIT;
    set_scene(&s, NULL, false);
    commit(&s);
    log_listen("read-failed");
    to_be_lost = &s;
    assert_int_equal(pull_by(&s, &w, 2, &error), FANIN_ERR_TRANSPORT);
    to_be_lost = NULL;
    assert_non_null(strstr(error.message, "lost"));
    log_await("lost");
    end_scene(&s);
}

/* ----------------------------------------------------------------- short counts */

static atomic_bool cut;

ssize_t __real_sendmsg(int fd, const struct msghdr *m, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *m, int flags);

/* Half of the first part, although there is room. */
ssize_t __wrap_sendmsg(int fd, const struct msghdr *m, int flags)
{
    if (!atomic_load(&cut) || m->msg_iovlen == 0 || m->msg_iov->iov_len < 2)
        return __real_sendmsg(fd, m, flags);
    struct iovec part = *m->msg_iov;
    struct msghdr less = *m;
    part.iov_len /= 2;
    less.msg_iov = &part;
    less.msg_iovlen = 1;
    return __real_sendmsg(fd, &less, flags);
}

TEST(a_short_count_is_not_a_full_socket)
{
    for (int no_unix = 0; no_unix < 2; no_unix++) {
        const way w = {.path = FANIN_PATH_STREAM, .no_unix = no_unix};
        scene s;
        fanin_error error = FANIN_ERROR_INIT;
        set_scene(&s, NULL, false);
        commit(&s);
        atomic_store(&cut, true);
        uint64_t began = clock_ns();
        assert_ok(pull_by(&s, &w, 2, &error), error);
        assert_true(clock_ns() - began < SOON_NS);
        atomic_store(&cut, false);
        end_scene(&s);
    }
}

TEST(a_snapshot_of_memory_that_is_gone_fails)
{
    scene s;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = FANIN_COMMIT_SNAPSHOT;
    set_scene(&s, NULL, false);
    take_away(&s, false);
    log_listen("read-failed");
    assert_int_equal(fanin_server_commit(s.server, RUN, 1, &options, &error),
                     FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(error.message, "lost"));
    log_await("lost");
    assert_int_equal(mprotect(s.memory + HOLE, PAGE, PROT_READ | PROT_WRITE), 0);
    assert_ok(fanin_server_commit(s.server, RUN, 2, &options, &error), error);
    end_scene(&s);
}

TESTS_BETWEEN(NULL, secrets_tear_down)
