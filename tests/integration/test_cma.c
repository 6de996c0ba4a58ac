/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls by cma: what comes, however little the kernel brings at a time, what it refuses, and that
 * nothing counts that another process than the rank's was read for. The kernel's call is the
 * test's.
 */
#include "ends.h"
#include "local_world.h"
#include "testing.h"
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

#define RANKS 8
#define WITNESS 16 /* bytes of the read that proves who is read */

/* Half a megabyte a rank. */
static const world_tensor large[] = {
    {"base_model.model.a.lora_A.weight", FANIN_DTYPE_F32, 2, {512, 1500}},
    {"base_model.model.a.lora_B.weight", FANIN_DTYPE_BF16, 2, {1500, 333}},
    {"base_model.model.b.lora_A.weight", FANIN_DTYPE_F32, 1, {123457}},
};

static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static fanin_result_info info;

/* What the kernel does. */
static struct {
    size_t most;         /* bytes of one call; 0: all */
    atomic_int refuses;  /* an errno, 0: nothing */
    bool only_weights;   /* ... probes go well */
    bool once;           /* ... and all but one call */
    unsigned other_from; /* witnesses from this one on are another process's; 0: none */
    unsigned other_to;   /* ... up to this one; 0: all */
    void (*strike)(void); /* runs before the fourth call; NULL: nothing does */
    long slow_ns;         /* what each call takes besides */
    atomic_uint calls, witnesses;
} kernel;

static bool is_witness(const struct iovec *from, unsigned long n_from)
{
    return n_from == 1 && from->iov_len == WITNESS;
}

static bool is_probe(const struct iovec *from, unsigned long n_from)
{
    return n_from == 1 && from->iov_len <= WITNESS;
}

/* Another process's bytes. */
static bool is_other(void)
{
    const unsigned witness = atomic_fetch_add(&kernel.witnesses, 1) + 1;
    return kernel.other_from && witness >= kernel.other_from &&
           (!kernel.other_to || witness <= kernel.other_to);
}

ssize_t __real_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n_to,
                                const struct iovec *from, unsigned long n_from,
                                unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n_to,
                                const struct iovec *from, unsigned long n_from,
                                unsigned long flags);

ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n_to,
                                const struct iovec *from, unsigned long n_from,
                                unsigned long flags)
{
    const unsigned call = atomic_fetch_add(&kernel.calls, 1);
    struct iovec part = *from;
    if (kernel.strike && call == 3)
        kernel.strike();
    if (kernel.slow_ns)
        nanosleep(&(struct timespec){.tv_nsec = kernel.slow_ns}, NULL);
    if (kernel.refuses && !(kernel.only_weights && is_probe(from, n_from))) {
        errno = kernel.refuses;
        if (kernel.once)
            kernel.refuses = 0;
        return -1;
    }
    if (is_witness(from, n_from) && is_other()) {
        memset(to->iov_base, 0x5a, WITNESS);
        return WITNESS;
    }
    if (kernel.most == 0)
        return __real_process_vm_readv(pid, to, n_to, from, n_from, flags);
    part.iov_len = part.iov_len < kernel.most ? part.iov_len : kernel.most;
    return __real_process_vm_readv(pid, to, n_to, &part, 1, flags);
}

static int set_up(void **state)
{
    memset(&kernel, 0, sizeof kernel);
    return 0;
}

static int tear_down(void **state)
{
    memset(&kernel, 0, sizeof kernel);
    fanin_client_destroy(&client);
    world_stop(&w);
    error = (fanin_error)FANIN_ERROR_INIT;
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static void connect_with(fanin_path path, unsigned threads)
{
    fanin_client_config config = make_client_config();
    config.path = path;
    config.threads = threads;
    fanin_client_destroy(&client);
    client = world_client_with(&w, &config);
    atomic_store(&kernel.calls, 0);
    atomic_store(&kernel.witnesses, 0);
}

static void begin(fanin_path path, unsigned threads)
{
    world_start(&w, RANKS, CUT_CHUNK0, large, sizeof large / sizeof *large);
    world_commit(&w, 1);
    connect_with(path, threads);
}

static void expect_pull(fanin_path path)
{
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(world_pull(&w, client, NULL, &info, &error), error);
    assert_int_equal(info.step, 1);
    assert_int_equal(info.path, path);
}

static void expect_failure(fanin_status status, const char *words)
{
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_int_equal(world_pull(&w, client, NULL, &info, &error), status);
    if (!strstr(error.message, words))
        fail_msg("not '%s' in: %s", words, error.message);
}

/* -------------------------------------------- a process that becomes another */

static int to_rank[2], from_rank[2];

/* In a process of its own: serves one tensor, and is another program at a word. */
static void serve_and_exec(void)
{
    enum { BYTES = 8 << 20 };
    char address[64], word;
    fanin_server_config config = make_server_config();
    fanin_server *server = make_server(&config, address, sizeof address);
    fanin_box box;
    const fanin_tensor tensor =
        make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, &box, calloc(1, BYTES));
    if (fanin_server_put(server, "lora:0", &tensor, 1, false, NULL) == FANIN_OK &&
        fanin_server_commit(server, "lora:0", 1, NULL, NULL) == FANIN_OK &&
        write(from_rank[1], address, sizeof address) == sizeof address &&
        read(to_rank[0], &word, 1) == 1)
        execlp("cat", "cat", (char *)NULL);
    _exit(1);
}

/* Returns when the rank's process is another program: its end of the pipe is closed. */
static void become_another(void)
{
    char word = 'x';
    assert_int_equal(write(to_rank[1], &word, 1), 1);
    assert_int_equal(read(from_rank[0], &word, 1), 0);
}

/* The first, since it forks: before threads are. */
CASE(a_rank_that_becomes_another_program_is_lost)
{
    enum { BYTES = 8 << 20 };
    char address[64];
    int status;
    assert_int_equal(pipe(to_rank), 0);
    assert_int_equal(pipe2(from_rank, O_CLOEXEC), 0);
    pid_t rank = fork();
    assert_true(rank >= 0);
    if (rank == 0) {
        dup2(to_rank[0], STDIN_FILENO);
        to_rank[0] = STDIN_FILENO;
        close(to_rank[1]);
        close(from_rank[0]);
        serve_and_exec();
    }
    close(from_rank[1]);
    assert_int_equal(read(from_rank[0], address, sizeof address), sizeof address);
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_CMA;
    config.threads = 2;
    const char *list[] = {address};
    client = connect_client(&config, list, 1);
    uint8_t *into = malloc(BYTES);
    fanin_box box;
    const fanin_tensor tensor = make_tensor("a", FANIN_DTYPE_U8, BYTES, 0, &box, into);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    kernel.strike = become_another;
    assert_int_not_equal(fanin_client_pull(client, &options, &tensor, 1, NULL, &error),
                         FANIN_OK);
    assert_int_equal(error.rank, 0);
    assert_true(atomic_load(&kernel.calls) > 3);
    close(to_rank[1]); /* cat ends with its input */
    close(to_rank[0]);
    close(from_rank[0]);
    assert_int_equal(waitpid(rank, &status, 0), rank);
    free(into);
}

/* ---------------------------------------------------------------- what comes */

CASE(every_cut_comes)
{
    static const world_cut cuts[] = {CUT_CHUNK0,  CUT_CHUNK1,    CUT_GRID,
                                     CUT_STRIDED, CUT_REPLICATE, CUT_HSDP};
    static const unsigned threads[] = {1, 3, 20};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        for (size_t j = 0; j < sizeof threads / sizeof *threads; j++) {
            world_start(&w, RANKS, cuts[i], j % 2 ? large : world_lora,
                        j % 2 ? sizeof large / sizeof *large : world_lora_count);
            world_commit(&w, 1);
            connect_with(FANIN_PATH_CMA, threads[j]);
            expect_pull(FANIN_PATH_CMA);
            expect_pull(FANIN_PATH_CMA);
            assert_int_equal(info.restarts, 0);
            tear_down(NULL);
        }
    }
}

CASE(little_at_a_time_comes_too)
{
    static const size_t most[] = {1000, 4096, 100000};
    begin(FANIN_PATH_CMA, 3);
    for (size_t i = 0; i < sizeof most / sizeof *most; i++) {
        kernel.most = most[i];
        expect_pull(FANIN_PATH_CMA);
    }
}

/* ------------------------------------------------------------ what is refused */

CASE(what_the_kernel_forbids_is_streamed)
{
    static const struct {
        int error;
        fanin_status status;
        const char *words;
    } cases[] = {
        {EPERM, FANIN_ERR_UNSUPPORTED, "does not let this process read"},
        {ENOSYS, FANIN_ERR_TRANSPORT, "no process_vm_readv"},
    };
    for (size_t i = 0; i < 2; i++) {
        kernel.refuses = cases[i].error;
        begin(FANIN_PATH_AUTO, 0);
        expect_pull(FANIN_PATH_STREAM);
        connect_with(FANIN_PATH_CMA, 0);
        expect_failure(cases[i].status, cases[i].words);
        tear_down(NULL);
    }
}

/* A publication's memory that is gone, say. */
CASE(what_cannot_be_read_is_named)
{
    kernel.only_weights = true;
    for (unsigned threads = 1; threads < 5; threads += 3) {
        begin(FANIN_PATH_CMA, threads);
        expect_pull(FANIN_PATH_CMA);
        kernel.only_weights = true;
        kernel.refuses = EFAULT;
        expect_failure(FANIN_ERR_TRANSPORT, "by cma: memory that it publishes");
        assert_true(error.rank >= 0 && error.rank < RANKS);
        assert_non_null(strstr(error.key, "lora"));
        assert_int_equal(error.sys_errno, EFAULT);
        assert_non_null(strstr(error.remedy, "must stay"));
        kernel.refuses = 0;
        expect_pull(FANIN_PATH_CMA);
        tear_down(NULL);
    }
    begin(FANIN_PATH_AUTO, 1);
    expect_pull(FANIN_PATH_CMA);
    kernel.only_weights = kernel.once = true;
    kernel.refuses = EFAULT;
    expect_pull(FANIN_PATH_CMA); /* but for one rank */
    assert_int_equal(info.restarts, 1);
}

/* --------------------------------------------------------------- who is read */

CASE(another_process_is_not_read)
{
    kernel.other_from = 1;
    begin(FANIN_PATH_AUTO, 0);
    expect_pull(FANIN_PATH_STREAM);
    connect_with(FANIN_PATH_CMA, 0);
    expect_failure(FANIN_ERR_UNSUPPORTED, "is not the rank");
}

CASE(nor_does_it_count_that_came_meanwhile)
{
    begin(FANIN_PATH_CMA, 2);
    kernel.other_from = kernel.other_to =
        RANKS + 1; /* the first after those of the probes */
    expect_pull(FANIN_PATH_CMA);
    assert_int_equal(info.restarts, 1);
}

/* ----------------------------------------------------------------- who has ended */

static pid_t seen_as = -1;
bool __real_connection_process(const void *c, pid_t *pid_out);
bool __wrap_connection_process(const void *c, pid_t *pid_out);
bool __wrap_connection_process(const void *c, pid_t *pid_out)
{
    bool known = __real_connection_process(c, pid_out);
    *pid_out = seen_as >= 0 ? seen_as : *pid_out;
    return known;
}

CASE(a_process_without_a_number_is_streamed)
{
    seen_as = 0;
    begin(FANIN_PATH_AUTO, 0);
    expect_pull(FANIN_PATH_STREAM);
    connect_with(FANIN_PATH_CMA, 0);
    expect_failure(FANIN_ERR_UNSUPPORTED, "pid namespace");
    seen_as = getppid(); /* some other process, for once really read */
    connect_with(FANIN_PATH_AUTO, 0);
    expect_pull(FANIN_PATH_STREAM);
    seen_as = -1;
}

/* -------------------------------------------------------------- what ends it */

static void cancel(void)
{
    fanin_client_cancel(client);
}

CASE(a_pull_is_cancelled)
{
    for (unsigned threads = 1; threads < 5; threads += 3) {
        begin(FANIN_PATH_CMA, threads);
        expect_pull(FANIN_PATH_CMA);
        atomic_store(&kernel.calls, 0);
        kernel.strike = cancel;
        kernel.slow_ns = 1000000;
        expect_failure(FANIN_ERR_CANCELLED, "");
        kernel.strike = NULL;
        kernel.slow_ns = 0;
        expect_pull(FANIN_PATH_CMA);
        tear_down(NULL);
    }
}

CASE(a_pull_runs_out_of_time)
{
    begin(FANIN_PATH_CMA, 2);
    expect_pull(FANIN_PATH_CMA);
    kernel.slow_ns = 200000000;
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = 100;
    assert_int_equal(world_pull(&w, client, &options, &info, &error),
                     FANIN_ERR_TIMEOUT);
    kernel.slow_ns = 0;
    expect_pull(FANIN_PATH_CMA);
}

int main(void)
{
    if (!world_has_cma())
        return 77;
    return tests_run(NULL);
}
