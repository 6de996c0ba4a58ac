/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/arena.h"
#include "convert.h"
#include "dtype.h"
#include "error_set.h"
#include "guarded.h"
#include "shards/patch_room.h"
#include "thread.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define THREADS_MOST 4
#define BATCH_BYTES (UINT64_C(8) << 20)
#define COPY_THROUGH ((size_t)256 << 10)  /* stays in a cache */
#define COPY_LEAST ((size_t)16 << 10)     /* on a trainer's stack */
#define THREAD_BYTES (UINT64_C(32) << 20) /* what is worth a thread */

/* ------------------------------------------------------------------ layout */

static bool is_device(fanin_memory m)
{
    return m.kind == FANIN_MEMORY_CUDA;
}

static uint32_t convert_of(const shard *s, fanin_dtype cast)
{
    return cast != 0 && !s->keep && s->dtype == FANIN_DTYPE_F32
               ? (uint32_t)convert_between(s->dtype, cast)
               : CONVERT_NONE;
}

/* The part for shards in @p m, made if need be. */
static uint32_t part_of(arena_set *a, fanin_memory m)
{
    uint32_t i = 0;
    while (i < a->n_parts && (is_device(a->parts[i].memory) != is_device(m) ||
                              (is_device(m) && a->parts[i].memory.device != m.device)))
        i++;
    if (i == a->n_parts) {
        a->n_parts++;
        a->parts[i].memory = is_device(m) ? m : (fanin_memory){FANIN_MEMORY_HOST, -1};
    }
    return i;
}

/* Puts boxes one behind the other; the parts' lengths are what is used so far. */
static uint64_t place(arena_part *part, uint64_t bytes)
{
    uint64_t mask = ARENA_ALIGNMENT - 1;
    uint64_t at = (part->length + mask) & ~mask;
    part->length = at + bytes;
    return at;
}

static void measure(const shard_set *shards, fanin_dtype cast, arena_set *out)
{
    for (size_t i = 0; i < shards->count; i++) {
        const shard *s = shards->shards[i];
        uint32_t convert = convert_of(s, cast);
        for (size_t j = 0; j < s->n_boxes; j++)
            place(&out->parts[part_of(out, s->memory)],
                  convert_bytes(convert, s->boxes[j].bytes));
    }
}

static bool same_parts(const arena_set *a, const arena_set *b)
{
    bool same = a->n_parts == b->n_parts;
    for (uint32_t i = 0; same && i < a->n_parts; i++)
        same = a->parts[i].length == b->parts[i].length &&
               a->parts[i].memory.kind == b->parts[i].memory.kind &&
               a->parts[i].memory.device == b->parts[i].memory.device;
    return same;
}

/* ------------------------------------------------------------------ memory */

static void part_free(gpu *g, arena_part *part)
{
    if (part->stream)
        gpu_stream_destroy(&part->stream);
    if (part->scratch)
        gpu_free(g, part->memory.device, part->scratch);
    patch_room_leave(part->room);
    for (unsigned a = 0; a < ARENAS; a++) {
        if (!part->base[a])
            continue;
        if (is_device(part->memory))
            gpu_free(g, part->memory.device, part->base[a]);
        else
            munmap(part->base[a], part->length);
    }
}

static void arenas_free(arena_set *a)
{
    for (uint32_t i = 0; i < a->n_parts; i++)
        part_free(a->gpu, &a->parts[i]);
    free(a);
}

static fanin_status map_host(uint64_t length, uint8_t **out, fanin_error *error)
{
    void *base = MAP_FAILED;
    if (length <= PTRDIFF_MAX)
        base = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                    -1, 0);
    if (base == MAP_FAILED) {
        error_place place = {.phase = "commit",
                             .remedy = "publish by reference, or free memory"};
        return error_set(error, FANIN_ERR_MEMORY, &place,
                         "no host memory for a snapshot's arena of %" PRIu64 " bytes",
                         length);
    }
    madvise(base, length, MADV_HUGEPAGE);
    *out = base;
    return FANIN_OK;
}

static fanin_status part_allocate(gpu *g, arena_part *part, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    int device = part->memory.device;
    for (unsigned a = 0; status == FANIN_OK && a < ARENAS; a++) {
        if (!is_device(part->memory)) {
            part->in[a].memory = part->memory;
            status = map_host(part->length, &part->base[a], error);
            continue;
        }
        void *base = NULL;
        status = gpu_alloc(g, device, part->length, &base, error);
        part->base[a] = base;
        if (status == FANIN_OK)
            status = gpu_range_of(g, base, &part->in[a], error);
    }
    if (status == FANIN_OK && is_device(part->memory))
        status = gpu_stream_create(g, device, &part->stream, error);
    return status;
}

static fanin_status arenas_allocate(gpu *g, arena_set *a, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    a->gpu = g;
    for (uint32_t i = 0; status == FANIN_OK && i < a->n_parts; i++)
        status = part_allocate(g, &a->parts[i], error);
    return status;
}

/* ------------------------------------------------------------------ copies */

static void plan_box(copy_list *list, const shard *s, const shard_box *b,
                     uint32_t convert, uint64_t to)
{
    uint64_t from = (uintptr_t)b->first;
    strided view = {.convert = convert};
    if (!b->packed) {
        shard_box_view(s, b, &view);
        view.convert = convert;
        for (uint32_t i = 0; i < view.n_dims; i++)
            view.to[i] = (int64_t)convert_bytes(convert, (uint64_t)view.to[i]);
        copy_list_add_view(list, 0, from, to, &view);
        return;
    }
    /* The kernel cuts what is long; threads of the host get pieces. */
    uint64_t piece = is_device(s->memory) ? b->bytes : BATCH_BYTES;
    for (uint64_t done = 0; done < b->bytes; done += view.run) {
        view.run = b->bytes - done < piece ? b->bytes - done : piece;
        copy_list_add_view(list, 0, from + done, to + convert_bytes(convert, done),
                           &view);
    }
}

/* The shard as it is published: packed, in arena 0, perhaps of another dtype. NULL: no memory. */
static shard *make_packed(const shard *s, uint32_t convert, fanin_dtype cast)
{
    size_t name_size = strlen(s->name) + 1, boxes = s->n_boxes * sizeof s->boxes[0];
    shard *p = malloc(sizeof *p + boxes + name_size);
    if (!p)
        return NULL;
    memcpy(p, s, sizeof *p + boxes);
    p->name = memcpy((char *)&p->boxes[s->n_boxes], s->name, name_size);
    p->dtype = convert == CONVERT_NONE ? s->dtype : cast;
    p->shape_bytes = convert_bytes(convert, s->shape_bytes);
    return p;
}

static void move_box(const shard *packed, shard_box *b, uint32_t convert,
                     const arena_part *part, uint64_t offset)
{
    dtype_unit unit = dtype_get_unit(packed->dtype);
    block units;
    b->bytes = convert_bytes(convert, b->bytes);
    b->packed = true;
    memset(b->stride, 0, sizeof b->stride);
    block_in_units(&b->block, unit.elements, &units);
    block_packed_strides(packed->n_dims, units.extent, unit.bytes, b->stride);
    b->first = part->base[0] + offset;
    b->low = (uintptr_t)b->first;
    b->high = b->low + b->bytes;
    b->in = part->in[0];
}

/* Plans all copies into @p lists, one a part, and makes the packed shards. */
static bool plan_shards(const arena_set *a, const shard_set *shards, fanin_dtype cast,
                        copy_list *lists, shard_set *packed)
{
    arena_set at;
    memset(&at, 0, sizeof at);
    packed->shards = calloc(shards->count + 1, sizeof(shard *));
    packed->capacity = shards->count;
    packed->n_boxes = shards->n_boxes;
    if (!packed->shards)
        return false;
    for (size_t i = 0; i < shards->count; i++) {
        const shard *s = shards->shards[i];
        uint32_t convert = convert_of(s, cast);
        shard *p = packed->shards[packed->count] = make_packed(s, convert, cast);
        if (!p)
            return false;
        packed->count++;
        if (s->n_boxes == 0)
            continue;
        uint32_t id = part_of(&at, s->memory);
        p->memory = a->parts[id].memory;
        for (size_t j = 0; j < s->n_boxes; j++) {
            uint64_t bytes = convert_bytes(convert, s->boxes[j].bytes);
            uint64_t offset = place(&at.parts[id], bytes);
            plan_box(&lists[id], s, &s->boxes[j], convert, offset);
            move_box(p, &p->boxes[j], convert, &a->parts[id], offset);
        }
    }
    for (uint32_t i = 0; i < a->n_parts; i++)
        if (lists[i].failed)
            return false;
    return true;
}

/* Groups of entries of about as many bytes, for the threads. A patch's words are in one of them. */
static bool cut_batches(arena_plan *plan)
{
    plan->batches = calloc(plan->host.n + 1, sizeof *plan->batches);
    if (!plan->batches)
        return false;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < plan->host.n; i++) {
        const copy_entry *e = &plan->host.entries[i];
        if (i == 0 || (bytes >= BATCH_BYTES && e->to % 2 == 0)) {
            plan->batches[plan->n_batches++].first = i;
            bytes = 0;
        }
        bytes += (uint64_t)e->run * e->runs;
        plan->batches[plan->n_batches - 1].count++;
    }
    return true;
}

/* ------------------------------------------------------------------ plan */

static fanin_status fill_plan(arena_plan *plan, const shard_set *shards,
                              fanin_dtype cast, shard_set *packed, fanin_error *error)
{
    const arena_set *a = plan->arenas;
    copy_list *lists = calloc(GPU_MAX_DEVICES + 1, sizeof *lists);
    if (!lists)
        return error_set_memory(error);
    fanin_status status = FANIN_OK;
    if (!plan_shards(a, shards, cast, lists, packed))
        status = error_set_memory(error);
    for (uint32_t i = 0; status == FANIN_OK && i < a->n_parts; i++) {
        if (!is_device(a->parts[i].memory)) {
            plan->host = lists[i];
            memset(&lists[i], 0, sizeof lists[i]);
            if (!cut_batches(plan))
                status = error_set_memory(error);
            continue;
        }
        status = gpu_table_create(a->gpu, a->parts[i].memory.device, lists[i].entries,
                                  lists[i].n, 1, &plan->tables[i], error);
    }
    for (uint32_t i = 0; i < a->n_parts; i++)
        copy_list_free(&lists[i]);
    free(lists);
    return status;
}

fanin_status arena_plan_build(gpu *g, const shard_set *shards, fanin_dtype cast,
                              const arena_plan *before, shard_set *packed_out,
                              arena_plan **out, fanin_error *error)
{
    memset(packed_out, 0, sizeof *packed_out);
    arena_plan *plan = calloc(1, sizeof *plan);
    arena_set *arenas = calloc(1, sizeof *arenas);
    fanin_status status = FANIN_OK;
    if (!plan || !arenas) {
        free(plan);
        free(arenas);
        return error_set_memory(error);
    }
    measure(shards, cast, arenas);
    if (before && same_parts(before->arenas, arenas)) {
        free(arenas);
        plan->arenas = before->arenas;
        atomic_fetch_add_explicit(&plan->arenas->references, 1, memory_order_relaxed);
    } else {
        plan->arenas = arenas;
        atomic_init(&arenas->references, 1);
        status = arenas_allocate(g, arenas, error);
    }
    if (status == FANIN_OK)
        status = fill_plan(plan, shards, cast, packed_out, error);
    if (status == FANIN_OK)
        *out = plan;
    else
        arena_plan_free(plan, arena_plan_drop(plan));
    return status;
}

bool arena_plan_drop(arena_plan *plan)
{
    return atomic_fetch_sub_explicit(&plan->arenas->references, 1,
                                     memory_order_acq_rel) == 1;
}

void arena_plan_free(arena_plan *plan, bool last)
{
    for (size_t i = 0; i < sizeof plan->tables / sizeof *plan->tables; i++)
        if (plan->tables[i])
            gpu_table_destroy(&plan->tables[i]);
    if (last)
        arenas_free(plan->arenas);
    copy_list_free(&plan->host);
    free(plan->batches);
    free(plan);
}

uint64_t arena_distance(const arena_set *a, uint64_t address, const gpu_range **in_out)
{
    for (uint32_t i = 0; i < a->n_parts; i++) {
        const arena_part *part = &a->parts[i];
        if (address - (uintptr_t)part->base[0] >= part->length)
            continue;
        *in_out = is_device(part->memory) ? &part->in[1] : NULL;
        return (uintptr_t)part->base[1] - (uintptr_t)part->base[0];
    }
    *in_out = NULL;
    return 0;
}

/* ------------------------------------------------------------------ copying */

/* What the threads of one copy share. */
typedef struct host_copy {
    const arena_plan *plan;
    patch_maker *patch; /* NULL: none is made */
    uint64_t to;
    atomic_uint_fast64_t next;
    atomic_uint_fast64_t bad; /* an address that cannot be read; 0: none so far */
} host_copy;

typedef struct comparison {
    const host_copy *of;
    patch_finds *found;
} comparison;

static void see_copied(void *cookie, uint64_t to, const uint8_t *bytes, uint64_t length)
{
    const comparison *c = cookie;
    patch_maker_compare(c->of->patch, c->found, to - c->of->to, bytes, length);
}

static void copy_batches(host_copy *c, const guarded *buffer)
{
    const arena_plan *plan = c->plan;
    comparison patch = {c, c->patch ? patch_finds_open(c->patch) : NULL};
    guarded through = *buffer;
    if (patch.found) {
        through.seen = see_copied;
        through.cookie = &patch;
    }
    while (atomic_load(&c->bad) == 0) {
        uint64_t bad, i = atomic_fetch_add_explicit(&c->next, 1, memory_order_relaxed);
        if (i >= plan->n_batches)
            break;
        const arena_batch *b = &plan->batches[i];
        if (!guarded_run(&through, &plan->host.entries[b->first], b->count, c->to,
                         &bad))
            atomic_store(&c->bad, bad);
        if (patch.found)
            patch_maker_keep(c->patch, patch.found);
    }
    patch_finds_close(patch.found);
}

/* A thread that gets no buffer leaves its batches to the others. */
static void *help(void *cookie)
{
    guarded through = {.fd = -1};
    if (guarded_open(&through, COPY_THROUGH, NULL) == FANIN_OK)
        copy_batches(cookie, &through);
    guarded_close(&through);
    return NULL;
}

/* The trainer's thread: its step is published also where descriptors and memory are lacking. */
static void copy_myself(host_copy *c)
{
    uint8_t on_stack[COPY_LEAST];
    guarded through;
    bool open = guarded_open(&through, COPY_THROUGH, NULL) == FANIN_OK;
    if (!open)
        through = (guarded){.fd = -1, .data = on_stack, .size = sizeof on_stack};
    copy_batches(c, &through);
    if (open)
        guarded_close(&through);
}

static unsigned threads_for(uint64_t bytes)
{
    uint64_t n = bytes / THREAD_BYTES;
    unsigned wanted = n < THREADS_MOST ? (unsigned)n : THREADS_MOST,
             cpus = usable_cpus();
    return wanted < cpus ? wanted : cpus;
}

static const arena_part *host_part(const arena_plan *plan)
{
    const arena_part *part = plan->arenas->parts;
    while (is_device(part->memory))
        part++;
    return part;
}

patch_maker *arena_patch_maker(const arena_plan *plan, unsigned before, uint64_t most)
{
    const arena_part *part = host_part(plan);
    return patch_maker_open(part->base[before], part->length, plan->n_batches, most);
}

void arena_copy_host(const arena_plan *plan, unsigned arena, patch_maker *patch,
                     uint64_t *bad)
{
    *bad = 0;
    if (plan->n_batches == 0)
        return;
    const arena_part *part = host_part(plan);
    host_copy c = {.plan = plan, .patch = patch, .to = (uintptr_t)part->base[arena]};
    atomic_init(&c.next, 0);
    pthread_t threads[THREADS_MOST];
    unsigned n = 0, wanted = threads_for(part->length);
    while (n + 1 < wanted &&
           thread_start(&threads[n], "fanin-arena", help, &c, NULL) == FANIN_OK)
        n++;
    copy_myself(&c);
    while (n > 0)
        pthread_join(threads[--n], NULL);
    *bad = atomic_load(&c.bad);
}

fanin_status arena_copy_part(const arena_plan *plan, uint32_t part, unsigned arena,
                             const fanin_stream *after, fanin_error *error)
{
    const arena_part *p = &plan->arenas->parts[part];
    fanin_status status = FANIN_OK;
    if (after)
        status = gpu_stream_after(p->stream, after, error);
    if (status == FANIN_OK)
        status = gpu_table_run(plan->tables[part], p->stream, 0,
                               gpu_table_count(plan->tables[part]), 0,
                               (uintptr_t)p->base[arena], error);
    return status;
}

fanin_status arena_wait(const arena_plan *plan, deadline at)
{
    fanin_status status = FANIN_OK;
    for (uint32_t i = 0; status != FANIN_ERR_TIMEOUT && i < plan->arenas->n_parts; i++)
        if (plan->arenas->parts[i].stream)
            status = gpu_stream_wait(plan->arenas->parts[i].stream, at, NULL);
    return status;
}
