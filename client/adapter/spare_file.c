/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/spare_file.h"

#include "adapter/file_pages.h"
#include "thread.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Between two steps of the allocation the thread looks whether it is to end. */
#define ALLOCATE_STEP ((uint64_t)16 << 20)

struct spare_file {
    dev_t parent_device;
    ino_t parent_inode;
    uint64_t wanted;           /* bytes */
    file_memory made, retired; /* the thread's until it has ended */
    gpu *g;
    atomic_bool stop;
    /* pages: where the next step begins, and whether some could not be had */
    _Atomic uint64_t next;
    atomic_bool lacking;
    pthread_t thread;
};

void file_memory_release(file_memory *m)
{
    if (m->pinned_by)
        gpu_unpin(m->pinned_by, m->base);
    if (m->base)
        munmap(m->base, (size_t)m->size);
    if (m->file >= 0)
        close(m->file);
    *m = (file_memory){.file = -1};
}

static bool allocate_spare(spare_file *s, uint64_t size)
{
    for (uint64_t at = 0; at < size;) {
        if (atomic_load(&s->stop))
            return false;
        uint64_t left = size - at;
        uint64_t step = left < ALLOCATE_STEP ? left : ALLOCATE_STEP;
        if (file_space_make(s->made.file, at, step) != 0)
            return false; /* a full disk: a pull that needs the file will say so */
        at += step;
    }
    return true;
}

/* In steps that spare_file_take() can end; by several threads. */
static void *touch_pages(void *cookie)
{
    spare_file *s = cookie;
    for (uint64_t at;
         !atomic_load(&s->lacking) &&
         (at = atomic_fetch_add(&s->next, FILE_PAGES_STEP)) < s->made.size;) {
        uint64_t left = s->made.size - at;
        size_t step = (size_t)(left < FILE_PAGES_STEP ? left : FILE_PAGES_STEP);
        if (atomic_load(&s->stop) || !file_pages_touch(s->made.base + at, step))
            atomic_store(&s->lacking, true);
    }
    return NULL;
}

static bool make_spare_pages(spare_file *s)
{
    pthread_t threads[FILE_PAGES_THREADS];
    unsigned wanted = usable_cpus();
    wanted = wanted < FILE_PAGES_THREADS ? wanted : FILE_PAGES_THREADS;
    unsigned n = worker_threads_start(threads, wanted - 1, touch_pages, s);
    touch_pages(s);
    worker_threads_join(threads, n);
    return !atomic_load(&s->lacking);
}

static void *make_spare(void *argument)
{
    spare_file *s = argument;
    uint64_t size = s->wanted;
    pthread_setname_np(pthread_self(), "fanin-spare");
    file_memory_release(&s->retired);
    if (size == 0)
        return NULL;
    if (!allocate_spare(s, size)) {
        file_memory_release(&s->made); /* what there was of it is others' again */
        return NULL;
    }
    void *base =
        mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, s->made.file, 0);
    if (base == MAP_FAILED)
        return NULL;
    s->made.base = base;
    s->made.size = size;
    s->made.populated = make_spare_pages(s);
    long page = sysconf(_SC_PAGESIZE);
    size_t whole =
        (size_t)((size + (uint64_t)page - 1) / (uint64_t)page * (uint64_t)page);
    if (s->made.populated && s->g && !atomic_load(&s->stop) &&
        gpu_pin(s->g, base, whole, NULL) == FANIN_OK)
        s->made.pinned_by = s->g;
    return NULL;
}

/* Neither name nor leftovers; not every filesystem has such files. */
static int open_nameless(int parent, const logger *log)
{
    char reason[64];
    int fd = openat(parent, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, ADAPTER_FILE_MODE);
    if (fd < 0 && log)
        log_write(log, FANIN_LOG_INFO, "spare-file",
                  "no spare file is kept: the filesystem has no nameless files (%s)",
                  strerror_r(errno, reason, sizeof reason));
    return fd;
}

/* Another file as large fits behind it. */
static bool has_room_for_spare(int parent, uint64_t size, const logger *log)
{
    struct statvfs info;
    if (fstatvfs(parent, &info) != 0)
        return false;
    bool room =
        info.f_blocks == 0 || (uint64_t)info.f_bavail * info.f_frsize / 2 >= size;
    if (!room && log)
        log_write(
            log, FANIN_LOG_INFO, "spare-file",
            "no spare file is kept: the filesystem has no room for two of %" PRIu64
            " bytes",
            size);
    return room;
}

spare_file *spare_file_start(int parent, uint64_t size, gpu *g, file_memory *retired,
                             const logger *log)
{
    struct stat info;
    spare_file *s = calloc(1, sizeof *s);
    int fd = -1;
    if (s && size > 0 && fstat(parent, &info) == 0 &&
        has_room_for_spare(parent, size, log))
        fd = open_nameless(parent, log);
    if (!s || (fd < 0 && !retired->base)) {
        file_memory_release(retired);
        free(s);
        return NULL;
    }
    if (fd >= 0) {
        s->parent_device = info.st_dev;
        s->parent_inode = info.st_ino;
        s->wanted = size;
    }
    s->made = (file_memory){.file = fd};
    s->retired = *retired;
    s->g = g;
    *retired = (file_memory){.file = -1};
    if (worker_thread_start(&s->thread, make_spare, s))
        return s;
    file_memory_release(&s->retired);
    file_memory_release(&s->made);
    free(s);
    return NULL;
}

bool spare_file_fits(const spare_file *s, int parent, uint64_t size)
{
    struct stat info;
    return s && s->wanted > 0 && s->wanted == size && fstat(parent, &info) == 0 &&
           info.st_dev == s->parent_device && info.st_ino == s->parent_inode;
}

bool spare_file_take(spare_file **spare, file_memory *out)
{
    spare_file *s = *spare;
    *spare = NULL;
    *out = (file_memory){.file = -1};
    if (!s)
        return false;
    atomic_store(&s->stop, true);
    pthread_join(s->thread, NULL);
    if (s->made.base)
        *out = s->made;
    else
        file_memory_release(&s->made);
    free(s);
    return out->base != NULL;
}

void spare_file_drop(spare_file **s)
{
    file_memory memory;
    if (spare_file_take(s, &memory))
        file_memory_release(&memory);
}

void spare_file_retire(spare_file **s)
{
    file_memory memory;
    if (spare_file_take(s, &memory))
        *s = spare_file_start(-1, 0, NULL, &memory, NULL);
}
