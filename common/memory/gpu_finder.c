/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_finder.h"

#include "array.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool gpu_finder_holds(const gpu_range *r, const void *address)
{
    return (uint64_t)(uintptr_t)address - r->base < r->length;
}

/* 1: the allocation ends before the address. */
static int compare_end(const void *address, const void *element)
{
    const gpu_range *r = element;
    return r->base + r->length <= (uint64_t)(uintptr_t)address;
}

static void gpu_finder_remember(gpu_finder *f, size_t at, const gpu_range *r)
{
    if (!f->known)
        f->known = malloc(GPU_FINDER_KNOWN * sizeof *f->known);
    if (!f->known || f->n_known == GPU_FINDER_KNOWN)
        return;
    memmove(&f->known[at + 1], &f->known[at], (f->n_known - at) * sizeof *f->known);
    f->known[at] = *r;
    f->n_known++;
    f->last = at;
}

fanin_status gpu_find(gpu_finder *f, const void *address, gpu_range *out,
                      fanin_error *error)
{
    uint64_t grain = (uint64_t)(uintptr_t)address / GPU_ADDRESS_GRAIN;
    uint64_t *host = &f->host[grain % GPU_FINDER_STRETCHES];
    *out = (gpu_range){.memory = {FANIN_MEMORY_HOST, -1}};
    if (*host == grain + 1)
        return FANIN_OK;
    size_t at = f->last;
    if (f->n_known == 0 || !gpu_finder_holds(&f->known[at], address))
        at = array_search(address, f->known, f->n_known, sizeof *f->known, compare_end,
                          NULL);
    if (at < f->n_known && gpu_finder_holds(&f->known[at], address)) {
        f->last = at;
        *out = f->known[at];
        return FANIN_OK;
    }
    fanin_status status = gpu_range_of(f->g, address, out, error);
    if (status != FANIN_OK)
        return status;
    if (out->memory.kind == FANIN_MEMORY_CUDA)
        gpu_finder_remember(f, at, out);
    else
        *host = grain + 1;
    return FANIN_OK;
}

void gpu_finder_free(gpu_finder *f)
{
    free(f->known);
    f->known = NULL;
    f->n_known = f->last = 0;
}

static bool gpu_finder_is_beside(gpu_finder *f, const gpu_range *in, uint64_t address)
{
    gpu_range there;
    if (address - in->base < in->length)
        return true;
    return in->origin == GPU_ORIGIN_VIRTUAL &&
           /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
           gpu_find(f, (const void *)(uintptr_t)address, &there, NULL) == FANIN_OK &&
           there.origin == GPU_ORIGIN_VIRTUAL &&
           there.memory.device == in->memory.device;
}

bool gpu_find_holds(gpu_finder *f, const gpu_range *in, uint64_t low, uint64_t end)
{
    return gpu_finder_is_beside(f, in, low) && gpu_finder_is_beside(f, in, end - 1);
}

bool gpu_range_continues(const gpu_range *before, uint64_t end, const gpu_range *one,
                         uint64_t low, uint64_t page)
{
    if (low < end)
        return true;
    if (before->memory.kind == FANIN_MEMORY_CUDA ||
        one->memory.kind == FANIN_MEMORY_CUDA)
        return one->memory.kind == before->memory.kind && one->id == before->id;
    return low / page <= (end - 1) / page + 1;
}

const char *gpu_contradiction(fanin_memory said, const gpu_range *here, char why[160])
{
    bool on_device = here->memory.kind == FANIN_MEMORY_CUDA;
    const char *find_out = "let the library find out: FANIN_MEMORY_DETECT";
    if (said.kind == FANIN_MEMORY_HOST) {
        if (!on_device || here->origin == GPU_ORIGIN_MANAGED)
            return NULL;
        snprintf(why, 160, "the tensor says host memory, a box is on CUDA device %d",
                 (int)here->memory.device);
        return find_out;
    }
    if (said.kind != FANIN_MEMORY_CUDA)
        return NULL;
    if (!on_device) {
        snprintf(why, 160, "the tensor says CUDA memory, a box is in host memory");
        return find_out;
    }
    if (said.device < 0 || said.device == here->memory.device)
        return NULL;
    snprintf(why, 160, "the tensor says CUDA device %d, a box is on device %d",
             (int)said.device, (int)here->memory.device);
    return "name the device that holds the memory, or -1";
}
