/* SPDX-License-Identifier: Apache-2.0 */
/* Ctrl-C while a bench measures the machine's limits, which are raw reads at first: this program's
   process_vm_readv is found before that of libc. */
#include "fetch/command.h"
#include "testing.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/uio.h>

static _Atomic unsigned reads;

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long n_local,
                         const struct iovec *remote, unsigned long n_remote,
                         unsigned long flags)
{
    if (atomic_fetch_add(&reads, 1) == 0)
        assert_int_equal(kill(getpid(), SIGINT), 0);
    return syscall(SYS_process_vm_readv, pid, local, n_local, remote, n_remote, flags);
}

TEST(ctrl_c_ends_the_limits)
{
    const char *words[] = {"nixl-fetch bench",
                           "--adapter-shape",
                           "small",
                           "--world-size",
                           "1",
                           "--iterations",
                           "1",
                           "--path",
                           "stream",
                           "--json",
                           NULL};
    int count = sizeof words / sizeof words[0] - 1;
    assert_int_equal(cmd_bench.run(&cmd_bench, count, words), 130);
    assert_true(atomic_load(&reads) > 0);
}
