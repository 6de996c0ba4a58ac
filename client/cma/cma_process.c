/* SPDX-License-Identifier: Apache-2.0 */
#include "cma/cma_process.h"

#include <errno.h>
#include <string.h>

/* Steps over @p bytes of @p n iovecs; how many are through. */
static unsigned step_over(struct iovec *v, unsigned n, size_t bytes)
{
    unsigned through = 0;
    while (bytes > 0 && through < n) {
        size_t step = bytes < v->iov_len ? bytes : v->iov_len;
        v->iov_base = (uint8_t *)v->iov_base + step;
        v->iov_len -= step;
        bytes -= step;
        if (v->iov_len > 0)
            break;
        through++;
        v++;
    }
    return through;
}

int cma_read(pid_t pid, struct iovec *to, unsigned n_to, struct iovec *from,
             unsigned n_from, unsigned *at)
{
    unsigned at_to = 0;
    *at = 0;
    while (*at < n_from) {
        ssize_t n = process_vm_readv(pid, to + at_to, n_to - at_to, from + *at,
                                     n_from - *at, 0);
        if (n < 0)
            return errno;
        if (n == 0)
            return EFAULT;
        at_to += step_over(to + at_to, n_to - at_to, (size_t)n);
        *at += step_over(from + *at, n_from - *at, (size_t)n);
    }
    return 0;
}

int cma_prove(const cma_process *p)
{
    uint8_t there[sizeof p->incarnation] = {0};
    unsigned at;
    struct iovec to = {.iov_base = there, .iov_len = sizeof there};
    struct iovec from = {.iov_base = (void *)(uintptr_t)p->witness,
                         .iov_len = sizeof there};
    int error = cma_read(p->pid, &to, 1, &from, 1, &at);
    if (error == 0 && memcmp(there, p->incarnation, sizeof there) == 0)
        return 0;
    return error == 0 || error == EFAULT ? ESTALE : error;
}

const char *cma_why(int error)
{
    switch (error) {
    case ESTALE:
        return "the process that the socket names is not the rank (any more)";
    case ESRCH:
        return "its process has ended";
    case EPERM:
        return "the kernel does not let this process read the rank's memory";
    case EFAULT:
        return "memory that it publishes is not there (any more), or the destination's "
               "is not";
    case ENOSYS:
        return "this kernel has no process_vm_readv";
    default:
        return strerror(error);
    }
}

const char *cma_remedy(int error)
{
    switch (error) {
    case EPERM:
        return "run both as the same user, in containers with SYS_PTRACE, with "
               "kernel.yama.ptrace_scope at most 1 (nixl-fetch doctor); or --path "
               "stream";
    case EFAULT:
        return "a shard's memory must stay until the shard is removed or replaced";
    case ENOSYS:
        return "use --path auto or stream";
    default:
        return "look whether the trainer still runs";
    }
}
