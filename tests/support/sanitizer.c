/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For sanitizer builds only. To find out whether a process can be read, UCX reads into the
 * very iovec that says where to read to. The sanitizers look at that iovec after the call,
 * follow what was read, and crash. Programs that define the call themselves have theirs.
 */
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

__attribute__((visibility("default"))) ssize_t process_vm_readv(
    pid_t pid, const struct iovec *to, unsigned long n_to, const struct iovec *from,
    unsigned long n_from, unsigned long flags)
{
    return syscall(SYS_process_vm_readv, pid, to, n_to, from, n_from, flags);
}
