/* SPDX-License-Identifier: Apache-2.0 */
/* Reads over cma from another process, and what happens when it stops, dies or unmaps. */
#include "sysfs_tree.h"
#include "testing.h"
#include "ucx_child.h"
#include "ucx_internal.h"
#include <dirent.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define PATIENCE_MS 10000
#define FIRST_WITH_CMA 20 /* UCX 1.20 */

static ucx *library;
static unsigned messages;

static void count_messages(void *cookie, fanin_log_level level, const char *event,
                           const char *message)
{
    (void)level, (void)message;
    *(unsigned *)cookie += strcmp(event, "ucx") == 0;
}

static const logger counting = {.fn = count_messages, .cookie = &messages};
static const fanin_memory host = {.kind = FANIN_MEMORY_HOST, .device = -1};

/* A client with an endpoint to a child and a destination as large as the child's words. */
typedef struct fixture {
    ucx_child child;
    ucx_client *client;
    ucx_endpoint *endpoint;
    ucx_rkey *rkey;
    ucx_local *local;
    uint64_t *to;
    unsigned done, failed;
} fixture;

static int set_up(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    *state = f;
    if (!library)
        return 0;
    f->to = mmap(NULL, UCX_CHILD_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return f->to != MAP_FAILED && ucx_child_start(&f->child, UCX_CHILD_SAFE) &&
                   ucx_client_create(library, UCX_PATH_HOST, NULL, &counting,
                                     &f->client, NULL) == FANIN_OK &&
                   ucx_endpoint_create(f->client, f->child.address,
                                       f->child.address_size, &f->endpoint,
                                       NULL) == FANIN_OK &&
                   ucx_rkey_unpack(f->endpoint, f->child.rkey, f->child.rkey_size,
                                   &f->rkey, NULL) == FANIN_OK &&
                   ucx_local_create(f->client, f->to, UCX_CHILD_BYTES, host, &f->local,
                                    NULL) == FANIN_OK
               ? 0
               : -1;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    bool sound = true;
    if (library) {
        sound = ucx_endpoint_close(&f->endpoint, deadline_in_ms(PATIENCE_MS));
        ucx_local_destroy(&f->local);
        sound &= ucx_client_destroy(&f->client);
        if (f->child.pid > 0)
            sound &= ucx_child_stop(&f->child);
        munmap(f->to, UCX_CHILD_BYTES);
    }
    free(f);
    return sound ? 0 : -1;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* cma may be forbidden (containers): then there is nothing to test here. */
static fixture *fixture_of(void **state)
{
    if (!library)
        skip();
    fixture *f = *state;
    if (!strstr(ucx_endpoint_transport(f->endpoint), "cma/")) {
        print_message("no cma here, only: %s\n", ucx_endpoint_transport(f->endpoint));
        skip();
    }
    return f;
}

static void on_done(void *cookie, uint64_t tag, int status)
{
    fixture *f = cookie;
    (void)tag;
    f->done++;
    f->failed += status != 0;
}

static fanin_status start(fixture *f, size_t word, size_t count)
{
    return ucx_get(f->endpoint, f->rkey, f->child.base + word * 8, f->to + word,
                   count * 8, f->local, on_done, f, word, NULL);
}

/* Sleeps on the descriptor, as a user does. */
static bool wait_for(fixture *f, unsigned done)
{
    const deadline at = deadline_in_ms(PATIENCE_MS);
    while (f->done < done && !deadline_passed(at)) {
        struct pollfd wait = {.fd = ucx_client_fd(f->client), .events = POLLIN};
        if (!ucx_client_progress(f->client) && ucx_client_arm(f->client))
            (void)poll(&wait, 1, deadline_poll_ms(at));
    }
    return f->done == done;
}

static bool words_are_right(const fixture *f, size_t from, size_t count)
{
    for (size_t i = from; i < from + count; i++)
        if (f->to[i] != ucx_child_word(i))
            return false;
    return true;
}

CASE(reads_while_the_server_is_stopped)
{
    fixture *f = fixture_of(state);
    assert_int_equal(start(f, 0, 1), FANIN_OK);
    assert_true(wait_for(f, 1));
    int status;
    assert_int_equal(kill(f->child.pid, SIGSTOP), 0);
    assert_int_equal(waitpid(f->child.pid, &status, WUNTRACED), f->child.pid);
    assert_int_equal(start(f, 0, UCX_CHILD_WORDS), FANIN_OK);
    const bool finished = wait_for(f, 2);
    kill(f->child.pid, SIGCONT);
    assert_true(finished);
    assert_int_equal(f->failed, 0);
    assert_true(words_are_right(f, 0, UCX_CHILD_WORDS));
    assert_int_equal(ucx_endpoint_outstanding(f->endpoint), 0);
}

CASE(many_small_reads_each_call_back_once)
{
    fixture *f = fixture_of(state);
    const size_t words = 7, count = 50000;
    for (size_t i = 0; i < count; i++)
        assert_int_equal(start(f, i * words, words), FANIN_OK);
    assert_int_equal(ucx_endpoint_outstanding(f->endpoint) + f->done, count);
    assert_true(wait_for(f, (unsigned)count));
    assert_int_equal(f->failed, 0);
    assert_true(words_are_right(f, 0, words * count));
    assert_int_equal(f->to[words * count], 0);
}

CASE(unmapped_memory_fails_the_endpoint_not_the_server)
{
    fixture *f = fixture_of(state);
    const size_t half = UCX_CHILD_WORDS / 2;
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_UNMAP), 0);
    assert_int_equal(start(f, half, half), FANIN_OK);
    unsigned started = 1;
    for (size_t i = 0; i < 100; i++)
        started += start(f, i, 1) == FANIN_OK;
    assert_true(wait_for(f, started));
    assert_true(f->failed > 0);
    const char *text;
    const deadline at = deadline_in_ms(PATIENCE_MS);
    while (!ucx_endpoint_failed(f->endpoint, &text) && !deadline_passed(at))
        ucx_client_progress(f->client);
    assert_int_not_equal(ucx_endpoint_failed(f->endpoint, &text), 0);
    assert_true(strlen(text) > 0);
    assert_int_not_equal(start(f, 0, 1), FANIN_OK);
    assert_true(ucx_endpoint_close(&f->endpoint, deadline_in_ms(PATIENCE_MS)));
    assert_int_equal(f->done, started);
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_COUNT_CHANGED), 0);
}

CASE(a_killed_server_fails_the_reads)
{
    fixture *f = fixture_of(state);
    assert_int_equal(start(f, 0, 1), FANIN_OK);
    assert_true(wait_for(f, 1));
    int status;
    assert_int_equal(kill(f->child.pid, SIGKILL), 0);
    assert_int_equal(waitpid(f->child.pid, &status, 0), f->child.pid);
    f->child.pid = 0;
    unsigned started = 1;
    for (size_t i = 0; i < 100; i++)
        started += start(f, i, 1) == FANIN_OK;
    assert_true(started > 1);
    assert_true(wait_for(f, started));
    assert_int_equal(f->failed, started - 1);
    assert_true(ucx_endpoint_close(&f->endpoint, deadline_in_ms(PATIENCE_MS)));
}

CASE(close_drains_and_nothing_lands_afterwards)
{
    fixture *f = fixture_of(state);
    const unsigned count = 2000;
    const size_t words = UCX_CHILD_WORDS / count;
    for (size_t i = 0; i < count; i++)
        assert_int_equal(start(f, i * words, words), FANIN_OK);
    for (int i = 0; i < 10; i++)
        ucx_client_progress(f->client);
    assert_true(f->done < count);
    assert_true(ucx_endpoint_close(&f->endpoint, deadline_in_ms(PATIENCE_MS)));
    assert_null(f->endpoint);
    assert_int_equal(f->done, count);
    memset(f->to, 0, UCX_CHILD_BYTES);
    for (int i = 0; i < 10000; i++)
        ucx_client_progress(f->client);
    for (size_t i = 0; i < UCX_CHILD_WORDS; i++)
        assert_int_equal(f->to[i], 0);
    /* The client is as good as new. */
    assert_int_equal(ucx_endpoint_create(f->client, f->child.address,
                                         f->child.address_size, &f->endpoint, NULL),
                     FANIN_OK);
    assert_int_equal(
        ucx_rkey_unpack(f->endpoint, f->child.rkey, f->child.rkey_size, &f->rkey, NULL),
        FANIN_OK);
    assert_int_equal(start(f, 3, 5), FANIN_OK);
    assert_true(wait_for(f, count + 1));
    assert_true(words_are_right(f, 3, 5));
}

CASE(destroying_the_client_drains_too)
{
    fixture *f = fixture_of(state);
    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(start(f, i * 64, 64), FANIN_OK);
    f->endpoint = NULL;
    ucx_local_destroy(&f->local);
    ucx_client_destroy(&f->client);
    assert_int_equal(f->done, 1000);
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_COUNT_CHANGED), 0);
}

static void read_again(void *cookie, uint64_t tag, int status)
{
    fixture *f = cookie;
    on_done(cookie, tag, status);
    if (tag < 1000)
        assert_int_equal(ucx_get(f->endpoint, f->rkey, f->child.base + tag * 8,
                                 f->to + tag, 8, f->local, read_again, f, tag + 1,
                                 NULL),
                         FANIN_OK);
}

CASE(a_callback_may_start_the_next_read)
{
    fixture *f = fixture_of(state);
    read_again(f, 0, 0);
    assert_true(wait_for(f, 1001));
    assert_int_equal(f->failed, 0);
    assert_true(words_are_right(f, 0, 1000));
}

/* Inodes of sockets that a process has open, looked up in a table of /proc/net. */
static bool process_has_socket(pid_t pid, uint64_t inode)
{
    char path[64], target[64], wanted[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    snprintf(wanted, sizeof wanted, "socket:[%" PRIu64 "]", inode);
    DIR *directory = opendir(path);
    assert_non_null(directory);
    bool found = false;
    for (struct dirent *entry; (entry = readdir(directory));) {
        const ssize_t n = readlinkat(dirfd(directory), entry->d_name, target, 63);
        target[n > 0 ? n : 0] = '\0';
        found = found || strcmp(target, wanted) == 0;
    }
    closedir(directory);
    return found;
}

static unsigned count_sockets(pid_t pid, const char *table)
{
    char path[64], line[512];
    unsigned count = 0;
    snprintf(path, sizeof path, "/proc/%d/net/%s", (int)pid, table);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof(line), file)) {
        uint64_t inode;
        if (sscanf(line, "%*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64, &inode) == 1)
            count += process_has_socket(pid, inode);
    }
    fclose(file);
    return count;
}

CASE(no_end_has_an_ip_socket)
{
    fixture *f = fixture_of(state);
    static const char *const tables[] = {"tcp", "tcp6", "udp", "udp6"};
    assert_int_equal(start(f, 0, 1), FANIN_OK);
    assert_true(wait_for(f, 1));
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(count_sockets(f->child.pid, tables[i]), 0);
        assert_int_equal(count_sockets(getpid(), tables[i]), 0);
    }
}

/* Lines of the kernel's table whose creator is the process. */
static unsigned count_sysv_segments(pid_t pid)
{
    unsigned count = 0;
    char line[512];
    FILE *table = fopen("/proc/sysvipc/shm", "re");
    while (table && fgets(line, sizeof(line), table)) {
        int creator;
        count += sscanf(line, "%*d %*d %*o %*u %d", &creator) == 1 && creator == pid;
    }
    if (table)
        fclose(table);
    return count;
}

/* Every user of the group could write into them. */
CASE(no_end_has_a_sysv_segment)
{
    fixture *f = fixture_of(state);
    assert_int_equal(start(f, 0, 1), FANIN_OK);
    assert_true(wait_for(f, 1));
    assert_int_equal(count_sysv_segments(f->child.pid), 0);
    assert_int_equal(count_sysv_segments(getpid()), 0);
}

static bool connects(fixture *f, const uint8_t *address, size_t size)
{
    fanin_error error = FANIN_ERROR_INIT;
    ucx_endpoint *e = NULL;
    fanin_status status = ucx_endpoint_create(f->client, address, size, &e, &error);
    if (status == FANIN_ERR_PROTOCOL)
        assert_non_null(strstr(error.message, "no UCX worker address: "));
    else
        assert_int_equal(status, FANIN_OK);
    assert_true(ucx_endpoint_close(&e, deadline_in_ms(PATIENCE_MS)));
    return status == FANIN_OK;
}

/* UCX ends the process over some of these. */
CASE(false_addresses_are_refused)
{
    fixture *f = fixture_of(state);
    const uint8_t *true_one = f->child.address;
    size_t size = f->child.address_size;
    uint8_t a[4096];
    assert_true(connects(f, true_one, size));
    for (size_t cut = 1; cut < size; cut++)
        assert_false(connects(f, true_one, cut));
    memcpy(a, true_one, size);
    a[size] = 0;
    assert_false(connects(f, a, size + 1));
    for (unsigned head = 0; head < 256; head++) {
        a[0] = (uint8_t)head;
        assert_int_equal(connects(f, a, size), head == true_one[0]);
    }
    /* The first transport: name, speeds, abilities, length. */
    size_t transport = 11 + (true_one[10] & 0x1f);
    static const uint8_t nan[] = {0, 0, 0xc0, 0x7f}, none[4],
                         negative[] = {0, 0, 1, 0xc0};
    for (size_t at = transport + 2; at < transport + 14; at += 4) {
        const uint8_t *const wrong[] = {nan, negative,
                                        at == transport + 6 ? none : nan};
        for (size_t i = 0; i < 3; i++) {
            memcpy(a, true_one, size);
            memcpy(a + at, wrong[i], 4);
            assert_false(connects(f, a, size));
        }
    }
    for (size_t at = transport + 14; at < transport + 19; at++) {
        memcpy(a, true_one, size);
        a[at] ^= 0x41; /* abilities, then endpoints that are not there */
        assert_false(connects(f, a, size));
    }
    memset(a, 0xff, sizeof a);
    assert_false(connects(f, a, sizeof a));
}

CASE(false_keys_are_refused)
{
    fixture *f = fixture_of(state);
    ucx_rkey *key = NULL;
    uint8_t k[64] = {0};
    for (size_t cut = 1; cut < 9; cut++)
        assert_int_equal(ucx_rkey_unpack(f->endpoint, f->child.rkey, cut, &key, NULL),
                         FANIN_ERR_PROTOCOL);
    k[8] = 77; /* kind of memory */
    assert_int_equal(ucx_rkey_unpack(f->endpoint, k, 9, &key, NULL),
                     FANIN_ERR_PROTOCOL);
    k[8] = 0;
    k[0] = 1; /* a domain whose key is longer than what is there */
    k[9] = 200;
    assert_int_equal(ucx_rkey_unpack(f->endpoint, k, 40, &key, NULL),
                     FANIN_ERR_PROTOCOL);
}

CASE(ucx_prints_nothing)
{
    fixture *f = fixture_of(state);
    struct stat output;
    const int file = memfd_create("output", MFD_CLOEXEC);
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_UNMAP), 0);
    fflush(NULL);
    const int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    messages = 0;
    const fanin_status status = start(f, UCX_CHILD_WORDS / 2, 64);
    const bool finished = wait_for(f, 1);
    const bool closed = ucx_endpoint_close(&f->endpoint, deadline_in_ms(PATIENCE_MS));
    fflush(NULL);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    assert_int_equal(fstat(file, &output), 0);
    close(file);
    assert_int_equal(status, FANIN_OK);
    assert_true(finished && closed);
    assert_true(messages > 0);
    assert_int_equal(output.st_size, 0);
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_COUNT_OUTPUT), 0);
}

static unsigned count_entries(const char *path)
{
    unsigned count = 0;
    DIR *directory = opendir(path);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static void open_and_close_all(const ucx_child *child)
{
    static uint64_t word;
    ucx_server *server;
    ucx_region *region;
    ucx_client *client;
    ucx_endpoint *endpoint;
    assert_int_equal(ucx_server_create(library, UCX_PATH_HOST, NULL, &server, NULL),
                     FANIN_OK);
    assert_int_equal(ucx_region_create(server, &word, sizeof word, host, &region, NULL),
                     FANIN_OK);
    assert_int_equal(
        ucx_client_create(library, UCX_PATH_HOST, NULL, NULL, &client, NULL), FANIN_OK);
    assert_int_equal(ucx_endpoint_create(client, child->address, child->address_size,
                                         &endpoint, NULL),
                     FANIN_OK);
    ucx_client_destroy(&client);
    ucx_region_destroy(&region);
    ucx_server_destroy(&server);
}

CASE(nothing_leaks)
{
    fixture *f = fixture_of(state);
    char child_fds[64];
    snprintf(child_fds, sizeof child_fds, "/proc/%d/fd", (int)f->child.pid);
    open_and_close_all(&f->child);
    const unsigned fds = count_entries("/proc/self/fd");
    const unsigned threads = count_entries("/proc/self/task");
    const unsigned fds_of_child = count_entries(child_fds);
    for (int i = 0; i < 50; i++)
        open_and_close_all(&f->child);
    assert_int_equal(count_entries("/proc/self/fd"), fds);
    assert_int_equal(count_entries("/proc/self/task"), threads);
    assert_int_equal(ucx_child_ask(&f->child, UCX_CHILD_COUNT_CHANGED), 0);
    assert_int_equal(count_entries(child_fds), fds_of_child);
}

CASE(the_server_may_end_first)
{
    fixture *f = fixture_of(state);
    assert_int_equal(start(f, 0, 1), FANIN_OK);
    assert_true(wait_for(f, 1));
    assert_true(ucx_child_stop(&f->child));
    if (start(f, 0, 1) == FANIN_OK) {
        assert_true(wait_for(f, 2));
        assert_int_equal(f->failed, 1);
    }
}

CASE(wrong_arguments_are_refused)
{
    fixture *f = fixture_of(state);
    static uint8_t blob[5000];
    ucx_endpoint *endpoint = NULL;
    ucx_rkey *rkey = NULL;
    ucx_local *local = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    const fanin_memory unknown = {.kind = FANIN_MEMORY_DETECT};
    assert_int_equal(ucx_endpoint_create(f->client, blob, 0, &endpoint, NULL),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(ucx_endpoint_create(f->client, blob, sizeof blob, &endpoint, NULL),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(ucx_rkey_unpack(f->endpoint, blob, 0, &rkey, NULL),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(ucx_rkey_unpack(f->endpoint, blob, sizeof blob, &rkey, NULL),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(ucx_local_create(f->client, blob, 0, host, &local, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(ucx_local_create(f->client, blob, SIZE_MAX, host, &local, NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(ucx_local_create(f->client, blob, 8, unknown, &local, &error),
                     FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "kind 0"));
}

TEST(versions_match_by_major_and_minor)
{
    assert_true(ucx_versions_match("1.22.0", "1.22.1"));
    assert_true(ucx_versions_match("1.22.0", "1.22"));
    assert_false(ucx_versions_match("1.22.0", "1.2.0"));
    assert_false(ucx_versions_match("1.2.2", "1.22.2"));
    assert_false(ucx_versions_match("1.19.1", "1.20.1"));
    assert_false(ucx_versions_match("", ""));
    assert_false(ucx_versions_match("1.", "1."));
    assert_false(ucx_versions_match("none", "none"));
    assert_false(ucx_versions_match(NULL, "1.22.0"));
}

TEST(one_rdma_port_is_chosen)
{
    char root[256], name[UCX_DEVICE_NAME];
    assert_false(ucx_device_choose("/nonexistent", NULL, NULL, name));
    sysfs_tree_nic(sysfs_tree_make(root), "mlx5_0", NULL, 400, 1, "InfiniBand");
    assert_false(ucx_device_choose(root, NULL, NULL, name));
    sysfs_tree_nic(root, "mlx5_1", NULL, 100, 4, "InfiniBand");
    sysfs_tree_nic(root, "mlx5_3", NULL, 200, 4, "InfiniBand");
    sysfs_tree_nic(root, "mlx5_2", NULL, 200, 4, "InfiniBand");
    sysfs_tree_nic(root, "mlx5_4", NULL, 2.5, 4, "InfiniBand");
    assert_true(ucx_device_choose(root, NULL, NULL, name));
    assert_string_equal(name, "mlx5_2:1");
    assert_true(ucx_device_choose(root, "all", NULL, name));
    assert_string_equal(name, "mlx5_2:1");
    assert_true(ucx_device_choose(root, "eth0,mlx5_4:1,mlx5_1:1", NULL, name));
    assert_string_equal(name, "mlx5_4:1");
    assert_true(ucx_device_choose(root, "mlx5_1:1", NULL, name));
    assert_string_equal(name, "mlx5_1:1");
    sysfs_tree_remove(root);
}

TEST(the_port_next_to_the_gpu_is_chosen)
{
    char root[256], name[UCX_DEVICE_NAME];
    sysfs_tree_dgx(sysfs_tree_make(root));
    assert_true(ucx_device_choose(root, NULL, "0000:d1:00.0", name));
    assert_string_equal(name, "mlx5_10:1");
    assert_true(
        ucx_device_choose(root, NULL, "0000:99:00.0", name)); /* there is no such GPU */
    assert_string_equal(name, "mlx5_0:1");
    assert_true(ucx_device_choose(root, "mlx5_4:1", "0000:d1:00.0", name));
    assert_string_equal(name, "mlx5_4:1");
    sysfs_tree_remove(root);
}

int main(int argc, char **argv)
{
    const int child = ucx_child_main(argc, argv);
    if (child >= 0)
        return child;
    /* Gives UCX something to say when an endpoint fails. */
    setenv("UCX_LOG_LEVEL", "diag", 1);
    fanin_error error = FANIN_ERROR_INIT;
    if (ucx_load(NULL, &library, &error) != FANIN_OK)
        print_message("skipping: %s\n", error.message);
    unsigned minor = 0;
    if (library && sscanf(ucx_version(library), "1.%u", &minor) == 1 &&
        minor < FIRST_WITH_CMA) {
        print_message("skipping: UCX %s has no reads over cma that survive a peer\n",
                      ucx_version(library));
        library = NULL;
    }
    return tests_run(NULL);
}
