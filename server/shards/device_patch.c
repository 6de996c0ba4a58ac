/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/device_patch.h"
#include "patch.h"
#include "shards/patch_room.h"

_Static_assert(PATCH_KERNEL_SEGMENT == PATCH_SEGMENT, "segments of the kernels");

void device_patch_prepare(arena_plan *plan, uint32_t part, unsigned arena)
{
    const arena_part *p = &plan->arenas->parts[part];
    if (!plan->zeroed[arena])
        plan->zeroed[arena] =
            gpu_zero(p->stream, p->base[arena], p->length, NULL) == FANIN_OK;
}

/* What does not come about is not tried again. */
static bool room_is_there(gpu *g, arena_part *p, uint64_t most, fanin_error *why)
{
    if (p->asked_for_room)
        return p->room && p->scratch;
    p->asked_for_room = true;
    if (gpu_prepare_patches(g, p->memory.device, why) == FANIN_OK &&
        gpu_alloc(g, p->memory.device, patch_kernel_scratch(p->length), &p->scratch,
                  why) == FANIN_OK)
        p->room = patch_room_make(g, most, why);
    return p->room && p->scratch;
}

bool device_patch_queue(arena_plan *plan, uint32_t part, unsigned before,
                        unsigned after, uint64_t most, uint8_t **packed,
                        const uint64_t **made, fanin_error *why)
{
    static const uint64_t none = PATCH_TOO_LARGE;
    arena_part *p = &plan->arenas->parts[part];
    uint64_t directory = patch_directory_bytes(p->length), length;
    if (!plan->zeroed[0] || !plan->zeroed[1] ||
        !room_is_there(plan->arenas->gpu, p, most, why))
        return false;
    *packed = patch_room_take(p->room, &length);
    if (!*packed || length < directory) {
        if (*packed)
            patch_room_give(p->room, *packed);
        *packed = NULL;
        return false;
    }
    uint16_t *counts = p->scratch;
    patch_parameters job = {
        .before = p->base[before],
        .after = p->base[after],
        .bytes = p->length,
        .most = (length - directory) / PATCH_CHANGE,
        .counts = counts,
        .first = (uint64_t *)(counts + patch_segments(p->length) * PATCH_SHARES),
        .directory = (uint32_t *)*packed,
        .changes = *packed + directory,
        .made = patch_room_made(p->room),
    };
    /* Some of it may be on its way: the block is in use until the stream gets there. */
    bool queued = gpu_patch_run(p->stream, &job, NULL) == FANIN_OK;
    *made = queued ? job.made : &none;
    return true;
}
