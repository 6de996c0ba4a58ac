/* SPDX-License-Identifier: Apache-2.0 */
#include "guarded.h"

#include "copy_list.h"
#include "error_set.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

/* -1: there is none. Beyond the limit of file sizes a write would end the process (SIGXFSZ). */
static int guarded_make_file(size_t size)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < size)
        return -1;
    int fd = memfd_create("fanin-guarded", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) == 0)
        return fd;
    close(fd);
    return -1;
}

fanin_status guarded_open(guarded *g, size_t size, fanin_error *error)
{
    int fd = guarded_make_file(size);
    int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_POPULATE, fd, 0);
    if (data != MAP_FAILED) {
        *g = (guarded){.fd = fd, .size = size, .data = data};
        return FANIN_OK;
    }
    int code = errno;
    if (fd >= 0)
        close(fd);
    *g = (guarded){.fd = -1};
    return error_set_errno(error, FANIN_ERR_IO, code, NULL,
                           "cannot make a buffer to copy published memory into");
}

void guarded_close(guarded *g)
{
    if (!g->data)
        return;
    munmap(g->data, g->size);
    if (g->fd >= 0)
        close(g->fd);
    *g = (guarded){.fd = -1};
}

size_t guarded_read(const guarded *g, size_t at, const struct iovec *from, int n)
{
    ssize_t got;
    struct iovec to = {g->data + at, g->size - at};
    do
        got = g->fd >= 0
                  ? pwritev(g->fd, from, n, (off_t)at)
                  : process_vm_readv(getpid(), &to, 1, from, (unsigned long)n, 0);
    while (got < 0 && errno == EINTR);
    return got < 0 ? 0 : (size_t)got;
}

/* ----------------------------------------------------------------- entries */

/* So many runs of an entry, or a part of one run. */
typedef struct stretch {
    uint64_t from, to;
    uint32_t run, runs;
} stretch;

/* Brings it into the buffer, one run behind the other. */
static bool bring(const guarded *g, const copy_entry *e, const stretch *s,
                  uint64_t *bad)
{
    struct iovec from[GUARDED_RUNS];
    bool one = e->from_step == (int64_t)s->run;
    size_t bytes = (size_t)s->run * s->runs;
    int n = one ? 1 : (int)s->runs;
    for (int i = 0; i < n; i++) {
        uint64_t at = s->from + (uint64_t)e->from_step * (uint64_t)i;
        /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
        from[i] = (struct iovec){(void *)(uintptr_t)at, one ? bytes : s->run};
    }
    size_t got = guarded_read(g, 0, from, n);
    if (got < bytes)
        *bad = s->from + (uint64_t)e->from_step * (got / s->run) + got % s->run;
    return got == bytes;
}

static bool run_stretch(const guarded *g, const copy_entry *e, const stretch *s,
                        uint64_t *bad)
{
    const copy_entry here = {.from = (uintptr_t)g->data,
                             .to = s->to,
                             .from_step = (int64_t)s->run,
                             .to_step = e->to_step,
                             .run = s->run,
                             .runs = s->runs,
                             .convert = e->convert};
    if (!bring(g, e, s, bad))
        return false;
    copy_entries_run(&here, 1, NULL, 0, 0);
    if (g->seen) {
        /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
        const uint8_t *converted = (const uint8_t *)(uintptr_t)s->to;
        g->seen(g->cookie, s->to, e->convert == CONVERT_NONE ? g->data : converted,
                convert_bytes(e->convert, (uint64_t)s->run * s->runs));
    }
    return true;
}

static bool run_entry(const guarded *g, const copy_entry *e, uint64_t to, uint64_t *bad)
{
    uint32_t part = e->run < g->size ? e->run : (uint32_t)g->size;
    uint64_t most = part ? g->size / part : 0;
    most = most < GUARDED_RUNS ? most : GUARDED_RUNS;
    for (uint32_t i = 0; i < e->runs; i += (uint32_t)most) {
        uint32_t left = e->runs - i;
        stretch s = {.runs = left < most ? left : (uint32_t)most};
        for (uint64_t at = 0; at < e->run; at += part) {
            s.from = e->from + (uint64_t)e->from_step * i + at;
            s.to = to + (uint64_t)e->to_step * i + convert_bytes(e->convert, at);
            s.run = e->run - at < part ? (uint32_t)(e->run - at) : part;
            if (!run_stretch(g, e, &s, bad))
                return false;
        }
    }
    return true;
}

bool guarded_run(const guarded *g, const copy_entry *entries, uint64_t n,
                 uint64_t to_add, uint64_t *bad)
{
    for (uint64_t i = 0; i < n; i++)
        if (entries[i].run > 0 &&
            !run_entry(g, &entries[i], entries[i].to + to_add, bad))
            return false;
    return true;
}
