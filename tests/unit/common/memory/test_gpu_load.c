/* SPDX-License-Identifier: Apache-2.0 */
/* How CUDA is found and loaded, forks, and memory of other processes. On the stand-in for the
   driver; every case runs in a process of its own: what is loaded cannot be unloaded. */
#include "fake_cuda.h"
#include "gpu.h"
#include "own_process.h"
#include "testing.h"
#include <cuda.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define SIZE ((uint64_t)1 << 20)

/* Whether loading fails with both words in message or remedy, twice. */
static bool is_refused(const char *word, const char *another)
{
    for (int i = 0; i < 2; i++) {
        gpu *g = NULL;
        failure = (fanin_error)FANIN_ERROR_INIT;
        if (gpu_load(NULL, &g, &failure) != FANIN_ERR_UNSUPPORTED || g != NULL ||
            gpu_present() != NULL)
            return false;
        char text[2048];
        snprintf(text, sizeof text, "%s; %s", failure.message, failure.remedy);
        if (strstr(text, word) == NULL || strstr(text, another) == NULL) {
            fprintf(stderr, "refused so: %s\n", text);
            return false;
        }
    }
    return true;
}

/* --------------------------------------------------------------------- loading */

/* With this in the environment. */
#define REFUSED(name, variable, value, word, another)                                  \
    OWN_PROCESS(name, .checked = true)                                                 \
    {                                                                                  \
        setenv(variable, value, 1);                                                    \
        CHECK(is_refused(word, another));                                              \
        return PASSED;                                                                 \
    }

REFUSED(none_wanted, "FANIN_CUDA_LIBRARY", "", "FANIN_CUDA_LIBRARY", "switched off")
REFUSED(missing_file, "FANIN_CUDA_LIBRARY", "/nonexistent/libcuda.so.1",
        "no CUDA driver", "/nonexistent/libcuda.so.1")
REFUSED(something_else, "FANIN_CUDA_LIBRARY", "libc.so.6", "libc.so.6", "cuInit")
REFUSED(no_device, "FAKE_CUDA_DEVICES", "0", "no GPU", "nvidia-smi")
REFUSED(nothing_visible, "CUDA_VISIBLE_DEVICES", "", "no GPU", "CUDA_VISIBLE_DEVICES")
REFUSED(old_driver, "FAKE_CUDA_VERSION", "10020", "10.2", "too old")
REFUSED(start_fails, "FAKE_CUDA_FAIL", "cuInit=802", "CUDA_ERROR_SYSTEM_NOT_READY",
        "system not yet initialized")

OWN_PROCESS(loads_once, .checked = true)
{
    gpu *g, *again;
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_load(NULL, &again, NULL) == FANIN_OK && again == g);
    CHECK(gpu_present() == g);
    CHECK(gpu_count(g) == 2);
    CHECK(strcmp(gpu_driver_version(g), "13.0") == 0);
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    CHECK(counts.retains == 0 && counts.allocations == 0);
    return PASSED;
}

/* The driver is in the process, since this program is linked to it, but nobody uses it. */
OWN_PROCESS(absent_until_used, .checked = true)
{
    CHECK(gpu_present() == NULL);
    CHECK(fake_cuda_calls("cuInit") == 0);
    CHECK(cuInit(0) == CUDA_SUCCESS);
    gpu *g = gpu_present();
    CHECK(g != NULL && gpu_count(g) == 2);
    gpu *loaded;
    CHECK(gpu_load(NULL, &loaded, &failure) == FANIN_OK && loaded == g);
    return PASSED;
}

OWN_PROCESS(sees_what_is_visible, .checked = true)
{
    setenv("FAKE_CUDA_DEVICES", "8", 1);
    setenv("CUDA_VISIBLE_DEVICES", "5,2", 1);
    gpu *g;
    gpu_device first, second;
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_count(g) == 2);
    CHECK(gpu_device_get(g, 0, &first, &failure) == FANIN_OK);
    CHECK(gpu_device_get(g, 1, &second, &failure) == FANIN_OK);
    CHECK(first.uuid[15] == 5 && second.uuid[15] == 2);
    CHECK(gpu_device_of_uuid(g, first.uuid) == 0);
    CHECK(gpu_device_of_uuid(g, second.uuid) == 1);
    second.uuid[15] = 3;
    CHECK(gpu_device_of_uuid(g, second.uuid) == -1);
    return PASSED;
}

/* A child of a process that uses CUDA gets errors, not crashes or hangs. */
OWN_PROCESS(survives_fork, .checked = true)
{
    gpu *g;
    void *memory, *more;
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_alloc(g, 0, SIZE, &memory, &failure) == FANIN_OK);
    const pid_t pid = fork();
    if (pid == 0) {
        gpu_range range;
        gpu *again = gpu_present();
        fanin_status load = gpu_load(NULL, &again, NULL);
        fanin_status alloc = gpu_alloc(g, 0, SIZE, &more, NULL);
        fanin_status look = gpu_range_of(g, memory, &range, &failure);
        _exit(alloc != FANIN_OK && look != FANIN_OK && load == FANIN_ERR_FORKED &&
                      again == NULL
                  ? PASSED
                  : FAILED);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == PASSED);
    gpu_free(g, 0, memory);
    return PASSED;
}

/* ------------------------------------------------- memory of other processes */

/* What the exporter tells, in memory that both have. */
typedef struct offer {
    uint8_t handle[GPU_HANDLE_SIZE];
    uint64_t length;
} offer;

static uint8_t byte_of(uint64_t i)
{
    return (uint8_t)(i * 31 + (i >> 8) * 7 + 3);
}

/* Another process with memory of a device. It does what a letter from the pipe says. */
typedef struct exporter {
    pid_t pid;
    int tell, hear; /* ours */
    offer *offer;
} exporter;

static int export_main(int device, offer *out, int in, int answer)
{
    gpu *g;
    void *memory;
    gpu_range range;
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_alloc(g, device, SIZE, &memory, &failure) == FANIN_OK);
    uint8_t *bytes = fake_cuda_alias(memory);
    for (uint64_t i = 0; i < SIZE; i++)
        bytes[i] = byte_of(i);
    CHECK(gpu_range_of(g, memory, &range, &failure) == FANIN_OK);
    CHECK(gpu_export(g, &range, out->handle, &failure) == FANIN_OK);
    /* Not for the process itself. */
    void *mapped;
    CHECK(gpu_map(g, device, out->handle, &mapped, NULL) == FANIN_ERR_TRANSPORT);
    out->length = range.length;
    char letter = 'r';
    while (write(answer, &letter, 1) == 1 && read(in, &letter, 1) == 1) {
        if (letter == 'f')
            gpu_free(g, device, memory);
        if (letter == 'm')
            letter = (char)('0' + fake_cuda_mapped_by_others(memory));
    }
    return PASSED;
}

static bool start(exporter *e, int device)
{
    int down[2], up[2];
    e->offer = mmap(NULL, sizeof *e->offer, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (e->offer == MAP_FAILED || pipe(down) != 0 || pipe(up) != 0)
        return false;
    e->pid = fork();
    if (e->pid == 0) {
        close(down[1]);
        close(up[0]);
        exit(export_main(device, e->offer, down[0], up[1]));
    }
    close(down[0]);
    close(up[1]);
    e->tell = down[1];
    e->hear = up[0];
    char letter;
    return read(e->hear, &letter, 1) == 1;
}

static char ask(const exporter *e, char letter)
{
    char answer = 0;
    if (write(e->tell, &letter, 1) != 1 || read(e->hear, &answer, 1) != 1)
        return 0;
    return answer;
}

static bool stop(exporter *e)
{
    int status;
    close(e->tell);
    close(e->hear);
    munmap(e->offer, sizeof *e->offer);
    return waitpid(e->pid, &status, 0) == e->pid && WIFEXITED(status) &&
           WEXITSTATUS(status) == 0;
}

/* Copies all by the kernel of @p device from @p base; whether it is what the exporter wrote. */
static bool reads_well(gpu *g, int device, const void *base)
{
    gpu_stream *s;
    gpu_table *table;
    void *to;
    const copy_entry entry = {.run = (uint32_t)SIZE, .runs = 1, .base = 1};
    const uint64_t bases[2] = {0, (uint64_t)(uintptr_t)base};
    if (gpu_alloc(g, device, SIZE, &to, &failure) != FANIN_OK ||
        gpu_stream_create(g, device, &s, &failure) != FANIN_OK ||
        gpu_table_create(g, device, &entry, 1, 2, &table, &failure) != FANIN_OK ||
        gpu_table_set_bases(table, s, bases, &failure) != FANIN_OK ||
        gpu_table_run(table, s, 0, 1, 0, (uint64_t)(uintptr_t)to, &failure) !=
            FANIN_OK ||
        gpu_stream_wait(s, deadline_in_ms(20000), &failure) != FANIN_OK)
        return false;
    const uint8_t *bytes = fake_cuda_alias(to);
    bool good = true;
    for (uint64_t i = 0; i < SIZE && good; i++)
        good = bytes[i] == byte_of(i);
    gpu_table_destroy(&table);
    gpu_stream_destroy(&s);
    gpu_free(g, device, to);
    return good;
}

static uint64_t open_mappings(void)
{
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    return counts.mappings;
}

/* From the same device and from another, twice each. */
OWN_PROCESS(maps, .checked = true)
{
    exporter e;
    gpu *g;
    CHECK(start(&e, 0));
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    for (int device = 0; device < 2; device++) {
        void *base, *again;
        CHECK(gpu_map(g, device, e.offer->handle, &base, &failure) == FANIN_OK);
        CHECK(reads_well(g, device, base));
        CHECK(gpu_map(g, device, e.offer->handle, &again, &failure) == FANIN_OK);
        CHECK(again == base && open_mappings() == 2);
        gpu_unmap(g, device, again);
        CHECK(reads_well(g, device, base));
        CHECK(ask(&e, 'm') == '1');
        gpu_range range;
        CHECK(gpu_range_of(g, (uint8_t *)base + 77, &range, &failure) == FANIN_OK);
        CHECK(range.memory.kind == FANIN_MEMORY_CUDA && range.memory.device == 0);
        CHECK(range.base == (uint64_t)(uintptr_t)base && range.length == SIZE);
        gpu_unmap(g, device, base);
        CHECK(open_mappings() == 0 && ask(&e, 'm') == '0');
    }
    CHECK(cuCtxGetCurrent(&(CUcontext){NULL}) == CUDA_SUCCESS);
    CHECK(stop(&e));
    return PASSED;
}

OWN_PROCESS(maps_nothing_that_is_gone, .checked = true)
{
    exporter e;
    gpu *g;
    void *base;
    uint8_t handle[GPU_HANDLE_SIZE];
    CHECK(start(&e, 0));
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_map(g, 1, e.offer->handle, &base, &failure) == FANIN_OK);
    CHECK(ask(&e, 'f') != 0);
    /* Freed, but the address holds: late reads are harmless, and unmapping is. */
    CHECK(!reads_well(g, 1, base));
    gpu_unmap(g, 1, base);
    CHECK(gpu_map(g, 1, e.offer->handle, &base, &failure) == FANIN_ERR_TRANSPORT);
    CHECK(strstr(failure.message, "CUDA_ERROR_") != NULL);
    memcpy(handle, e.offer->handle, sizeof handle);
    CHECK(stop(&e));
    CHECK(gpu_map(g, 0, handle, &base, &failure) == FANIN_ERR_TRANSPORT);
    memset(handle, 7, sizeof handle);
    CHECK(gpu_map(g, 0, handle, &base, &failure) == FANIN_ERR_TRANSPORT);
    CHECK(open_mappings() == 0);
    return PASSED;
}

OWN_PROCESS(outlives_its_owner, .checked = true)
{
    exporter e;
    gpu *g;
    void *base;
    CHECK(start(&e, 1));
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_map(g, 0, e.offer->handle, &base, &failure) == FANIN_OK);
    CHECK(kill(e.pid, SIGKILL) == 0);
    CHECK(!stop(&e));
    CHECK(reads_well(g, 0, base));
    gpu_unmap(g, 0, base);
    CHECK(open_mappings() == 0);
    return PASSED;
}

OWN_PROCESS(needs_peer_access, .checked = true)
{
    exporter e;
    gpu *g;
    void *base;
    setenv("FAKE_CUDA_NO_PEER", "1", 1);
    CHECK(start(&e, 0));
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_can_access(g, 0, 0) && gpu_can_access(g, 1, 1));
    CHECK(!gpu_can_access(g, 0, 1) && !gpu_can_access(g, 1, 0));
    CHECK(gpu_map(g, 1, e.offer->handle, &base, &failure) == FANIN_ERR_UNSUPPORTED);
    CHECK(gpu_map(g, 0, e.offer->handle, &base, &failure) == FANIN_OK);
    CHECK(reads_well(g, 0, base));
    gpu_unmap(g, 0, base);
    CHECK(stop(&e));
    return PASSED;
}

/* The exporter sees two devices, this process the second of them, as its first. */
OWN_PROCESS(needs_the_device, .checked = true)
{
    exporter e, other;
    gpu *g;
    void *base;
    CHECK(start(&e, 0));
    CHECK(start(&other, 1));
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    CHECK(gpu_load(NULL, &g, &failure) == FANIN_OK);
    CHECK(gpu_map(g, 0, e.offer->handle, &base, &failure) == FANIN_ERR_TRANSPORT);
    CHECK(strstr(failure.message, "CUDA_ERROR_INVALID_DEVICE") != NULL);
    CHECK(gpu_map(g, 0, other.offer->handle, &base, &failure) == FANIN_OK);
    CHECK(reads_well(g, 0, base));
    gpu_unmap(g, 0, base);
    CHECK(stop(&other)); /* first: it has the other's pipe, too */
    CHECK(stop(&e));
    return PASSED;
}
