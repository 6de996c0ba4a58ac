/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of killed processes go; whatever is, or may be, somebody's stays. */
#include "testing.h"
#include "ucx_internal.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define SIZE 4096

static char root[64];

static int set_up(void **state)
{
    /* UCX's segments are in the memory of /dev/shm. */
    snprintf(root, sizeof root, "/dev/shm/fanin-leftovers-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static int make(const char *name, mode_t mode)
{
    int fd = open(path_of(name), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, SIZE), 0);
    assert_int_equal(fchmod(fd, mode), 0);
    return fd;
}

static bool is_there(const char *name)
{
    struct stat info;
    return lstat(path_of(name), &info) == 0;
}

static void expect(const char *name, bool there)
{
    if (is_there(name) != there)
        fail_msg("%s is %s", name, there ? "gone" : "still there");
    if (there)
        assert_int_equal(unlink(path_of(name)), 0);
}

TEST(what_nobody_has_goes)
{
    close(make("ucx_shm_posix_1f3a", 0600));
    close(make("ucx_shm_posix_7", 0600));
    ucx_leftovers_remove(root, NULL);
    expect("ucx_shm_posix_1f3a", false);
    expect("ucx_shm_posix_7", false);
    ucx_leftovers_remove("/nonexistent", NULL);
}

TEST(other_files_stay)
{
    static const char *const names[] = {"ucx_shm_posix_", "ucx_shm_posix_xyz",
                                        "ucx_shm_posix_12.part", "shm_12"};
    for (size_t i = 0; i < 4; i++)
        close(make(names[i], 0600));
    close(make("ucx_shm_posix_a0", 0660));
    close(make("ucx_shm_posix_a1", 0600));
    char other[128];
    snprintf(other, sizeof other, "%s/linked", root);
    assert_int_equal(link(path_of("ucx_shm_posix_a1"), other), 0);
    assert_int_equal(symlink("linked", path_of("ucx_shm_posix_a2")), 0);
    assert_int_equal(mkfifo(path_of("ucx_shm_posix_a3"), 0600), 0);
    ucx_leftovers_remove(root, NULL);
    for (size_t i = 0; i < 4; i++)
        expect(names[i], true);
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "ucx_shm_posix_a%d", i);
        expect(name, true);
    }
    expect("linked", true);
}

/* In another process that has it open, or has it mapped only, until it is killed. */
static void used_in_a_process(bool map)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    int fd = make("ucx_shm_posix_beef", 0600);
    pid_t pid = fork();
    if (pid == 0) {
        if (map &&
            mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
            close(fd);
        (void)!write(ready[1], "", 1);
        for (;;)
            pause();
    }
    close(fd);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    ucx_leftovers_remove(root, NULL);
    bool stayed = is_there("ucx_shm_posix_beef");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(ready[0]);
    close(ready[1]);
    assert_true(stayed);
    ucx_leftovers_remove(root, NULL);
    expect("ucx_shm_posix_beef", false);
}

TEST(what_a_process_has_stays)
{
    used_in_a_process(false);
    used_in_a_process(true);
}

static int tear_down(void **state)
{
    return rmdir(root);
}

TESTS_BETWEEN(set_up, tear_down)
