/* SPDX-License-Identifier: Apache-2.0 */
#include "on_device.h"

#include "fake_cuda.h"
#include "fuzz.h"
#include "gpu.h"
#include <dlfcn.h>
#include <pthread.h>

#define COPY_MS 20000 /* what takes microseconds, on a machine that others use */

static gpu *driver;
static void (*count)(fake_cuda_counts *out); /* NULL: another driver */

/* Of each end, its own. */
static struct {
    pthread_mutex_t lock;
    gpu_stream *stream;
} ends[] = {{PTHREAD_MUTEX_INITIALIZER, NULL}, {PTHREAD_MUTEX_INITIALIZER, NULL}};

static int number_of(device_of whose)
{
    return whose == DEVICE_OF_READERS && gpu_count(driver) > 1 ? 1 : 0;
}

/* Who names no driver gets the stand-in. Devices are left out where an empty name says so, never
   unnoticed. */
static void load(void)
{
    static const logger quiet;
    fanin_error error = FANIN_ERROR_INIT;
    check(setenv("FANIN_CUDA_LIBRARY", FAKE_CUDA, 0) == 0 &&
          setenv("FAKE_CUDA_OWN_IPC", "1", 0) == 0);
    const char *name = getenv("FANIN_CUDA_LIBRARY");
    if (gpu_load(&quiet, &driver, &error) != FANIN_OK) {
        check(error.status == FANIN_ERR_UNSUPPORTED && (!name[0] || !gpu_built()));
        return;
    }
    void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    *(void **)&count = library ? dlsym(library, "fake_cuda_count") : NULL;
    for (int i = 0; i < 2; i++)
        check(gpu_stream_create(driver, number_of((device_of)i), &ends[i].stream,
                                NULL) == FANIN_OK);
}

bool device_is_there(void)
{
    static bool loaded;
    if (!loaded)
        load();
    loaded = true;
    return driver != NULL;
}

void *device_room(device_of whose, size_t size)
{
    void *room = NULL;
    check(gpu_alloc(driver, number_of(whose), size, &room, NULL) == FANIN_OK);
    return room;
}

void device_copy(device_of whose, void *to, const void *from, size_t size)
{
    pthread_mutex_lock(&ends[whose].lock);
    check(gpu_copy(ends[whose].stream, to, from, size, NULL) == FANIN_OK &&
          gpu_stream_wait(ends[whose].stream, deadline_in_ms(COPY_MS), NULL) ==
              FANIN_OK);
    pthread_mutex_unlock(&ends[whose].lock);
}

uint64_t device_mappings(void)
{
    fake_cuda_counts counts = {0};
    if (count)
        count(&counts);
    return counts.mappings;
}
