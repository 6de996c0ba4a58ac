/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/shard_memory.h"
#include "error_set.h"
#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

static fanin_status wrong(fanin_error *error, const char *remedy, const char *format,
                          ...) __attribute__((format(printf, 3, 4)));

static fanin_status wrong(fanin_error *error, const char *remedy, const char *format,
                          ...)
{
    char why[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    error_place place = {.phase = "publish", .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", why);
}

static const gpu_range in_host_memory = {.memory = {FANIN_MEMORY_HOST, -1}};

static fanin_status range_at(memory_probe *probe, uint64_t address, gpu_range *out,
                             fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (gpu_find(&probe->finder, (const void *)(uintptr_t)address, out, &why) ==
        FANIN_OK)
        return FANIN_OK;
    return wrong(error,
                 "put memory that is allocated, and leave it so until it is removed",
                 "CUDA knows no allocation at a box's address: %.180s", why.message);
}

static fanin_status check_ends(memory_probe *probe, const shard_box *b,
                               fanin_error *error)
{
    if (gpu_find_holds(&probe->finder, &b->in, b->low, b->high))
        return FANIN_OK;
    return wrong(error, "check the box's address, extent and strides",
                 "a box reaches beyond its allocation of %" PRIu64
                 " bytes on CUDA device %d",
                 b->in.length, (int)b->in.memory.device);
}

/* Box @p index of the shard against what was said and against the first box. */
static fanin_status check_place(fanin_memory said, const shard *s, size_t index,
                                fanin_error *error)
{
    fanin_memory here = s->boxes[index].in.memory, first = s->boxes[0].in.memory;
    char why[160];
    const char *remedy = gpu_contradiction(said, &s->boxes[index].in, why);
    if (remedy)
        return wrong(error, remedy, "%s", why);
    if (here.kind == first.kind && here.device == first.device)
        return FANIN_OK;
    if (here.kind != first.kind)
        return wrong(
            error, "put them as two tensors, or move the one to the other",
            "some boxes of the tensor are in host memory, some on CUDA device %d",
            (int)(here.kind == FANIN_MEMORY_CUDA ? here : first).device);
    return wrong(error, "put them as two tensors, or move the one to the other",
                 "boxes of the tensor are on CUDA devices %d and %d", (int)first.device,
                 (int)here.device);
}

/* What is said to be host memory, against the driver, which may know nothing of it. */
static fanin_status check_host(memory_probe *probe, fanin_memory said,
                               const shard_box *b, fanin_error *error)
{
    gpu_range here;
    char why[160];
    const char *remedy = NULL;
    if (range_at(probe, (uintptr_t)b->first, &here, NULL) == FANIN_OK)
        remedy = gpu_contradiction(said, &here, why);
    return remedy ? wrong(error, remedy, "%s", why) : FANIN_OK;
}

static fanin_status ask(memory_probe *probe, bool needed, fanin_error *error)
{
    if (!probe->asked)
        probe->finder.g = gpu_present();
    probe->asked = true;
    if (!needed || probe->finder.g)
        return FANIN_OK;
    return gpu_load(probe->log, &probe->finder.g, error);
}

fanin_status shard_locate(memory_probe *probe, fanin_memory said, shard *s,
                          fanin_error *error)
{
    fanin_status status = FANIN_OK;
    s->memory = in_host_memory.memory;
    if (said.kind != FANIN_MEMORY_DETECT && said.kind != FANIN_MEMORY_HOST &&
        said.kind != FANIN_MEMORY_CUDA)
        return wrong(error, "use one of FANIN_MEMORY_...",
                     "the kind of memory is unknown");
    if (s->n_boxes > 0)
        status = ask(probe, said.kind == FANIN_MEMORY_CUDA, error);
    bool host = said.kind == FANIN_MEMORY_HOST, look = probe->finder.g && !host;
    for (size_t i = 0; status == FANIN_OK && i < s->n_boxes; i++) {
        shard_box *b = &s->boxes[i];
        b->in = in_host_memory;
        if (host && probe->finder.g)
            status = check_host(probe, said, b, error);
        if (look)
            status = range_at(probe, (uintptr_t)b->first, &b->in, error);
        if (status == FANIN_OK && look)
            status = check_place(said, s, i, error);
        if (status == FANIN_OK && b->in.memory.kind == FANIN_MEMORY_CUDA)
            status = check_ends(probe, b, error);
    }
    if (status == FANIN_OK && s->n_boxes > 0)
        s->memory = s->boxes[0].in.memory;
    probe->found_device = probe->found_device || s->memory.kind == FANIN_MEMORY_CUDA;
    return status;
}

void shard_set_log_origins(const shard_set *set, const char *publication,
                           const logger *log)
{
    size_t count[GPU_ORIGIN_MANAGED + 1] = {0}, all = 0;
    for (size_t i = 0; i < set->count; i++)
        for (size_t j = 0; j < set->shards[i]->n_boxes; j++) {
            gpu_origin origin = set->shards[i]->boxes[j].in.origin;
            if (origin == GPU_ORIGIN_HOST || origin == GPU_ORIGIN_MALLOC)
                continue;
            count[origin]++;
            all++;
        }
    if (all == 0)
        return;
    char origins[160];
    text t = text_in(origins, sizeof origins);
    for (int i = GPU_ORIGIN_VIRTUAL; i <= GPU_ORIGIN_MANAGED; i++)
        if (count[i] > 0)
            text_add(&t, "%s%zu of %s", t.used ? ", " : "", count[i],
                     gpu_origin_name((gpu_origin)i));
    log_write(
        log, FANIN_LOG_WARNING, "no-ipc",
        "%s: %zu boxes are in CUDA memory that has no IPC handle (%s): they are served "
        "by stream; run the trainer with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False and without "
        "cudaMallocAsync, or commit snapshots",
        publication, all, origins);
}
