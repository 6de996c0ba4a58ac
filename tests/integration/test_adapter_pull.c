/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adapter directories through the public interface: what is written, what is reused, what is
 * refused, and what several processes that want one directory at once do.
 */
#include "ends.h"
#include "lab.h"
#include "local_world.h"
#include "fetch/pattern.h"
#include "testing.h"
#include <dirent.h>
#include <fanin/safetensors.h>
#include <fcntl.h>
#include <jansson.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define RANKS 4
#define PULL_MS 30000

typedef struct bench {
    lab lab;
    lab_order order;
    rank_world world;
    char scratch[64], directory[96];
} bench;

/* What a test has; what its last pull said, and whether it found the directory made. */
static bench b;
static fanin_error error;
static bool reused;

/* ------------------------------------------------------------------ set-up */

static void make_scratch(void)
{
    const char *root = getenv("TMPDIR");
    snprintf(b.scratch, sizeof b.scratch, "%.40s/fanin-adapter-XXXXXX",
             root && root[0] ? root : "/tmp");
    assert_non_null(mkdtemp(b.scratch));
    snprintf(b.directory, sizeof b.directory, "%s/adapter", b.scratch);
}

static int set_up(void **state)
{
    b = (bench){0};
    make_scratch();
    b.order = lab_order_of(RANKS);
    lab_open(&b.lab, false);
    lab_start(&b.lab, &b.order, &b.world);
    return 0;
}

/* Another world, or another step, at the same addresses. */
static void exchange(uint8_t world, uint64_t step, uint32_t life)
{
    lab_stop(&b.lab);
    b.order.world = world;
    b.order.step = step;
    b.order.life = life;
    lab_restart(&b.lab, &b.order);
}

static void for_entries(const char *directory, void (*fn)(int directory, const char *))
{
    DIR *dir = opendir(directory);
    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            fn(dirfd(dir), e->d_name);
    }
    closedir(dir);
}

static void remove_file(int directory, const char *name)
{
    assert_int_equal(unlinkat(directory, name, 0), 0);
}

static unsigned counted;

static void count_entry(int directory, const char *name)
{
    counted++;
}

/* Nothing beside the directory, hidden or not: no lock, no temporary files. */
static void expect_alone(unsigned entries)
{
    counted = 0;
    for_entries(b.scratch, count_entry);
    assert_int_equal(counted, entries);
}

static int tear_down(void **state)
{
    for_entries(b.directory, remove_file);
    (void)rmdir(b.directory); /* some tests end without one */
    assert_int_equal(rmdir(b.scratch), 0);
    rank_world_free(&b.world);
    lab_close(&b.lab);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* ------------------------------------------------------------------ pulling */

static uint32_t threads = 1; /* that read */

static fanin_client *connect_to(fanin_path path)
{
    fanin_client_config config = make_client_config();
    config.no_ucx = false;
    config.path = path;
    config.threads = threads;
    config.max_inflight = (uint64_t)threads << 22;
    return connect_client(&config, b.world.address_list, RANKS);
}

static fanin_pull_options defaults(void)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = PULL_MS;
    return options;
}

static fanin_status pull_with(fanin_path path, const fanin_pull_options *options)
{
    fanin_client *client = connect_to(path);
    fanin_result *result = NULL;
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status =
        fanin_client_pull_adapter(client, options, b.directory, &result, &error);
    fanin_result_info info = {.struct_size = sizeof info};
    if (status == FANIN_OK)
        fanin_result_get(result, &info);
    if (status == FANIN_OK && info.reused)
        assert_int_equal(info.reads, 0);
    if (status == FANIN_OK && !info.reused)
        assert_true(info.reads > 0 && info.bytes == b.world.tensors.bytes);
    reused = info.reused;
    fanin_result_free(&result);
    fanin_client_destroy(&client);
    return status;
}

static fanin_status pull(void)
{
    fanin_pull_options options = defaults();
    return pull_with(FANIN_PATH_STREAM, &options);
}

/* ----------------------------------------------------------------- checking */

static void check_tensor(const fanin_safetensors *file, const rank_world *w,
                         size_t index, uint64_t step)
{
    const tensor_spec *t = &w->tensors.tensors[index];
    char name[FANIN_MAX_NAME + 32];
    assert_true(fanin_adapter_name(t->name, name, sizeof name));
    fanin_safetensors_entry e = {.struct_size = sizeof e};
    int64_t at = fanin_safetensors_find(file, name);
    assert_true(at >= 0);
    assert_true(fanin_safetensors_get(file, (size_t)at, &e));
    assert_int_equal(e.dtype, t->dtype);
    assert_int_equal(e.bytes, t->bytes);
    uint8_t *bytes = malloc(t->bytes);
    assert_non_null(bytes);
    assert_int_equal(
        pread(fanin_safetensors_descriptor(file), bytes, t->bytes, (off_t)e.offset),
        t->bytes);
    assert_int_equal(
        pattern_compare(bytes, pattern_start(w->seeds[index], step), 0, t->bytes),
        t->bytes);
    free(bytes);
}

static json_t *load(const char *name)
{
    char path[160];
    snprintf(path, sizeof path, "%s/%s", b.directory, name);
    json_t *root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    return root;
}

/* Every byte of every tensor, the configuration and the identity. */
static void check_adapter(uint64_t pattern_step)
{
    char path[160];
    fanin_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", b.directory);
    assert_ok(fanin_safetensors_open(path, &file, &error), error);
    assert_int_equal(fanin_safetensors_count(file), b.world.tensors.count);
    for (size_t i = 0; i < b.world.tensors.count; i++)
        check_tensor(file, &b.world, i, pattern_step);
    fanin_safetensors_close(&file);
    json_t *config = load("adapter_config.json"), *identity = load("fanin.json");
    assert_int_equal(json_integer_value(json_object_get(config, "r")), 8);
    assert_string_equal(
        json_string_value(json_object_get(config, "base_model_name_or_path")),
        "test/model");
    assert_int_equal(json_integer_value(json_object_get(identity, "step")),
                     b.order.step ? b.order.step : 1);
    assert_string_equal(json_string_value(json_object_get(identity, "publication")),
                        "lora:0");
    json_decref(config);
    json_decref(identity);
}

/* ------------------------------------------------------------- one process */

static void written_and_reused(fanin_path path)
{
    fanin_pull_options options = defaults();
    struct stat first, second;
    assert_ok(pull_with(path, &options), error);
    assert_false(reused);
    check_adapter(1);
    expect_alone(1);
    assert_int_equal(stat(b.directory, &first), 0);
    assert_ok(pull_with(path, &options), error);
    assert_true(reused);
    assert_int_equal(stat(b.directory, &second), 0);
    assert_int_equal(first.st_ino, second.st_ino);
    assert_int_equal(first.st_mtim.tv_nsec, second.st_mtim.tv_nsec);
    check_adapter(1);
    expect_alone(1);
}

CASE(test_stream)
{
    written_and_reused(FANIN_PATH_STREAM);
}

/* Several threads make pages, write into pieces of the digest, and end them. */
CASE(test_threads)
{
    threads = RANKS;
    written_and_reused(FANIN_PATH_STREAM);
    threads = 1;
}

CASE(test_cma)
{
    if (!world_has_cma())
        skip();
    written_and_reused(FANIN_PATH_CMA);
}

static void expect_refused(const char *why, uint64_t pattern_step, uint64_t step)
{
    assert_int_equal(pull(), FANIN_ERR_EXISTS);
    assert_says(error.message, why);
    assert_says(error.message, b.directory);
    assert_true(error.remedy[0]);
    uint64_t now = b.order.step; /* what is there is still what was there */
    b.order.step = step;
    check_adapter(pattern_step);
    b.order.step = now;
    expect_alone(1);
}

/* The same step of another life, and another step of the same life. */
CASE(test_other_identity)
{
    assert_ok(pull(), error);
    exchange(0x43, 1, 1);
    expect_refused("another life", 1, 1);
    exchange(0x42, 2, 0);
    expect_refused("another step", 1, 1);
    /* Back in the life that it is of, it is reused. */
    exchange(0x42, 1, 0);
    assert_ok(pull(), error);
    assert_true(reused);
}

/* ------------------------------------------------------- several processes */

typedef struct outcome {
    fanin_status status;
    bool reused;
    fanin_error error;
} outcome;

/* A process that pulls into the directory. */
typedef struct puller {
    pid_t pid;
    int reports; /* "I am reading" as one byte, then an outcome */
} puller;

static int report_to;
static bool reported;

static void report_reading(void *cookie, uint64_t done, uint64_t total)
{
    if (reported)
        return;
    reported = true;
    if (write(report_to, "r", 1) != 1)
        _exit(1);
    if (cookie) /* whoever waits for this process's stop knows where it is */
        raise(*(int *)cookie);
}

static _Noreturn void be_puller(int number)
{
    outcome o;
    fanin_pull_options options = defaults();
    options.progress = report_reading;
    options.progress_cookie = number ? &number : NULL;
    o.status = pull_with(FANIN_PATH_STREAM, &options);
    o.reused = reused;
    o.error = error;
    _exit(write(report_to, &o, sizeof o) == (ssize_t)sizeof o ? 0 : 1);
}

/* @p number: the signal that it raises in the middle of its read, 0: none. */
static puller start_puller(int number)
{
    int ends[2];
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        report_to = ends[1];
        if (getppid() == parent)
            be_puller(number);
        _exit(1);
    }
    close(ends[1]);
    return (puller){.pid = pid, .reports = ends[0]};
}

static void await_reading(const puller *p)
{
    char byte = 0;
    assert_int_equal(read(p->reports, &byte, 1), 1);
    assert_int_equal(byte, 'r');
}

static outcome await_outcome(puller *p)
{
    outcome o;
    assert_int_equal(read(p->reports, &o, sizeof o), sizeof o);
    close(p->reports);
    assert_int_equal(waitpid(p->pid, NULL, 0), p->pid);
    return o;
}

/* The second is let loose while the first is in the middle of its read. */
CASE(test_two_at_once)
{
    puller first = start_puller(SIGSTOP);
    await_reading(&first);
    siginfo_t info;
    assert_int_equal(waitid(P_PID, (id_t)first.pid, &info, WSTOPPED | WNOWAIT), 0);
    puller second = start_puller(0);
    assert_int_equal(kill(first.pid, SIGCONT), 0);
    outcome o = await_outcome(&first);
    assert_ok(o.status, o.error);
    assert_false(o.reused);
    o = await_outcome(&second);
    assert_ok(o.status, o.error);
    assert_true(o.reused);
    check_adapter(1);
    expect_alone(1);
}

#define CROWD 6

/* -------------------------------------------------------------- failed pulls */

static void kill_rank(void *cookie, uint64_t done, uint64_t total)
{
    if (!reported)
        lab_signal(&b.lab, 1, SIGKILL);
    reported = true;
}

CASE(test_rank_dies)
{
    fanin_pull_options options = defaults();
    options.progress = kill_rank;
    reported = false;
    assert_int_equal(pull_with(FANIN_PATH_STREAM, &options), FANIN_ERR_UNREACHABLE);
    assert_int_equal(error.rank, 1);
    expect_alone(0); /* nothing at all was left */
}

/* A filesystem of its own that is too small, then large enough. Needs root. */
CASE(test_disk_full)
{
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        printf("# skipped: a small filesystem needs root\n");
        skip();
    }
    assert_int_equal(mount("none", b.scratch, "tmpfs", 0, "size=4m"), 0);
    assert_int_equal(pull(), FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, ENOSPC);
    assert_non_null(strstr(error.message, b.directory));
    assert_true(error.remedy[0]);
    expect_alone(0);
    assert_int_equal(mount("none", b.scratch, "tmpfs", MS_REMOUNT, "size=64m"), 0);
    assert_ok(pull(), error);
    check_adapter(1);
    expect_alone(1);
    assert_int_equal(umount(b.scratch), 0);
}

/* Those that fork processes that pull come before this one loads UCX. */
