/* SPDX-License-Identifier: Apache-2.0 */
/* Modules, and the kernels in them, by name, carried out by the CPU. Every byte that a kernel
 * reads or writes has to be in memory that its device can reach. */
#include "fake_cuda_internal.h"

#include "digest.h"
#include "copy_kernel.h"
#include "digest_kernel.h"
#include "patch_kernel.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define FATBIN_MAGIC 0xba55ed50u
#define ELF_MAGIC 0x464c457fu
#define MOST_RANGES 1024 /* that one kernel uses */

/* A kernel under way: the memory that it has touched so far cannot go away until it is done. */
typedef struct work {
    CUcontext context;
    fake_range *used[MOST_RANGES];
    size_t n_used;
} work;

struct CUfunc_st {
    const char *name;
    size_t size; /* of its parameter */
    unsigned threads;
    void (*run)(work *w, const void *parameter);
};

struct CUmod_st {
    CUcontext context;
    CUmodule next;
};
static CUmodule modules; /* as a rule nobody unloads them */

struct fake_launch {
    const struct CUfunc_st *function;
    unsigned char parameter[128];
};

/* --------------------------------------------------------------------- touching */

static fake_range *look_up(work *w, uint64_t address, uint64_t length)
{
    for (size_t i = 0; i < w->n_used; i++) { /* without the lock: they stay */
        fake_range *r = w->used[i];
        if (address >= r->start && address - r->start < r->length &&
            length <= r->length - (address - r->start))
            return r;
    }
    pthread_mutex_lock(&fake.lock);
    fake_range *r = fake_find(address, length);
    bool reachable = r != NULL && fake_reachable(w->context, r);
    if (reachable)
        r->busy++;
    pthread_mutex_unlock(&fake.lock);
    if (r == NULL)
        fake_die("a kernel on device %d touches %llu bytes at %#llx: no device memory "
                 "or pinned "
                 "memory",
                 w->context->device, (unsigned long long)length,
                 (unsigned long long)address);
    if (!reachable)
        fake_die(
            "a kernel on device %d touches memory of device %d at %#llx without access",
            w->context->device, r->device, (unsigned long long)address);
    if (w->n_used == MOST_RANGES)
        fake_die("a kernel uses more than %d allocations", MOST_RANGES);
    w->used[w->n_used++] = r;
    return r;
}

/* Where the CPU finds the bytes. */
static uint8_t *touch(work *w, uint64_t address, uint64_t length)
{
    const fake_range *r = look_up(w, address, length);
    return r->alias + (address - r->start);
}

/* The same for all runs of one side of an entry: for the first of them. */
static uint8_t *touch_runs(work *w, uint64_t first, int64_t step, uint64_t run,
                           uint32_t runs)
{
    uint64_t distance = step < 0 ? -(uint64_t)step : (uint64_t)step, span;
    if (__builtin_mul_overflow(distance, (uint64_t)(runs - 1), &span) ||
        span + run < run)
        fake_die("runs of an entry reach beyond all addresses");
    uint64_t low = step < 0 ? first - span : first;
    return touch(w, low, span + run) + (first - low);
}

/* ------------------------------------------------------------------ the kernels */

static void copy_entry_run(work *w, const copy_entry *e, uint64_t from, uint64_t to)
{
    if (e->run == 0 || e->runs == 0)
        return;
    if (e->convert > CONVERT_F32_F16 || (e->convert != CONVERT_NONE && e->run % 4 != 0))
        fake_die("an entry converts %u bytes in way %u", e->run, e->convert);
    uint64_t out = convert_bytes(e->convert, e->run);
    const uint8_t *source = touch_runs(w, from, e->from_step, e->run, e->runs);
    uint8_t *destination = touch_runs(w, to, e->to_step, out, e->runs);
    for (uint32_t i = 0; i < e->runs; i++)
        convert_run(e->convert, destination + (int64_t)i * e->to_step,
                    source + (int64_t)i * e->from_step, e->run);
}

static void copy_units(work *w, const void *parameter)
{
    copy_parameters p;
    memcpy(&p, parameter, sizeof p);
    if (p.count == 0 || p.count > UINT64_MAX / sizeof *p.entries || p.parts == 0 ||
        p.ways == 0)
        fake_die("the copy kernel is started for %llu entries in %u parts, %u ways",
                 (unsigned long long)p.count, p.parts, p.ways);
    const uint8_t *entries =
        touch(w, (uint64_t)(uintptr_t)p.entries, p.count * sizeof *p.entries);
    for (uint64_t turn = 0, i = 0; turn < copy_turns(p.count, p.ways); turn++) {
        copy_entry e;
        uint64_t at = copy_entry_of(turn, p.count, p.ways);
        if (at >= p.count)
            continue;
        memcpy(&e, entries + at * sizeof e, sizeof e);
        uint64_t base = 0, bases = (uint64_t)(uintptr_t)p.bases;
        if (bases != 0)
            memcpy(&base, touch(w, bases + e.base * sizeof base, sizeof base),
                   sizeof base);
        fake_kernel_gate(w->context, i++);
        copy_entry_run(w, &e, base + e.from + p.from_add, e.to + p.to_add);
    }
}

/* One entry of a piece, packed and converted. Returns where it ends. */
static uint64_t gather_entry(work *w, const copy_entry *e, uint8_t *piece)
{
    uint64_t out = convert_bytes(e->convert, e->run);
    if (e->run == 0 || e->runs == 0 || e->to + out * e->runs > BOX_DIGEST_PIECE)
        fake_die("%u runs of %u bytes at %llu of a piece", e->runs, e->run,
                 (unsigned long long)e->to);
    const uint8_t *source = touch_runs(w, e->from, e->from_step, e->run, e->runs);
    for (uint32_t i = 0; i < e->runs; i++)
        convert_run(e->convert, piece + e->to + i * out,
                    source + (int64_t)i * e->from_step, e->run);
    return e->to + out * e->runs;
}

static void digest_piece(work *w, const digest_parameters *p, const digest_row *row,
                         uint32_t piece)
{
    uint8_t bytes[BOX_DIGEST_PIECE] = {0};
    uint64_t end = 0, at = (uint64_t)(uintptr_t)(p->out + row->at + piece);
    for (uint32_t k = 0; k < row->count; k++) {
        copy_entry e;
        memcpy(&e,
               touch(w, (uint64_t)(uintptr_t)(p->entries + row->first + k), sizeof e),
               sizeof e);
        if (k == 0) { /* the others of its run are those of other pieces */
            uint32_t most = DIGEST_KERNEL_RUN(e.convert),
                     skip = row->skip + piece * most;
            e.from += skip;
            e.run = e.run - skip < most ? e.run - skip : most;
        }
        if (e.to != end)
            fake_die("an entry of a piece leaves a gap");
        end = gather_entry(w, &e, bytes);
    }
    uint64_t digest = XXH3_64bits(bytes, sizeof bytes);
    memcpy(touch(w, at, sizeof digest), &digest, sizeof digest);
}

static void digest_pieces(work *w, const void *parameter)
{
    digest_parameters p;
    memcpy(&p, parameter, sizeof p);
    if (p.count == 0 || p.count > UINT32_MAX || p.share == 0 ||
        DIGEST_KERNEL_ROW % p.share != 0)
        fake_die("the digest kernel is started for %llu rows, %u pieces a warp",
                 (unsigned long long)p.count, p.share);
    const uint8_t *rows =
        touch(w, (uint64_t)(uintptr_t)p.rows, p.count * sizeof *p.rows);
    for (uint64_t i = 0; i < p.count; i++) {
        digest_row row;
        memcpy(&row, rows + i * sizeof row, sizeof row);
        if (row.pieces == 0 || row.pieces > DIGEST_KERNEL_ROW ||
            (row.pieces > 1 && row.count > 1))
            fake_die("a row of %u pieces, %u entries", row.pieces, row.count);
        fake_kernel_gate(w->context, i);
        for (uint32_t k = 0; k < row.pieces; k++)
            digest_piece(w, &p, &row, k);
    }
}

static void digest_file(work *w, const void *parameter)
{
    digest_file_parameters p;
    memcpy(&p, parameter, sizeof p);
    if (p.count == 0 || (uint64_t)(uintptr_t)p.bytes % 16 != 0)
        fake_die("the digest kernel of files is started for %llu pieces at %p",
                 (unsigned long long)p.count, (const void *)p.bytes);
    const uint8_t *bytes =
        touch(w, (uint64_t)(uintptr_t)p.bytes, p.count * DIGEST_FILE_PIECE);
    uint8_t *out = touch(w, (uint64_t)(uintptr_t)p.out, p.count * 16);
    for (uint64_t i = 0; i < p.count; i++) {
        fake_kernel_gate(w->context, i);
        XXH128_hash_t hash =
            XXH3_128bits(bytes + i * DIGEST_FILE_PIECE, DIGEST_FILE_PIECE);
        memcpy(out + i * 16, &hash.low64, 8);
        memcpy(out + i * 16 + 8, &hash.high64, 8);
    }
}

/* ------------------------------------------------------------------------ patches */

/** The three kernels that make one, one after the other. */
typedef struct patch_work {
    patch_parameters p;
    const uint8_t *before, *after;
    uint16_t *counts;
    uint64_t *first, segments;
} patch_work;

static patch_work begin_patch(work *w, const void *parameter)
{
    patch_work k;
    memcpy(&k.p, parameter, sizeof k.p);
    if (k.p.bytes == 0 || ((uintptr_t)k.p.before | (uintptr_t)k.p.after) % 16 != 0)
        fake_die("a patch of %llu bytes at %p and %p", (unsigned long long)k.p.bytes,
                 (const void *)k.p.before, (const void *)k.p.after);
    k.segments = patch_kernel_segments(k.p.bytes);
    k.before = touch(w, (uint64_t)(uintptr_t)k.p.before, k.p.bytes);
    k.after = touch(w, (uint64_t)(uintptr_t)k.p.after, k.p.bytes);
    k.counts = (uint16_t *)touch(w, (uint64_t)(uintptr_t)k.p.counts,
                                 2 * PATCH_SHARES * k.segments);
    k.first =
        (uint64_t *)touch(w, (uint64_t)(uintptr_t)k.p.first, 8 * (k.segments + 1));
    return k;
}

/* Words of a share that differ; NULL: they are counted alone. */
static uint16_t find_changes(const patch_work *k, uint64_t share, uint8_t *places,
                             uint8_t *words)
{
    uint16_t n = 0;
    for (uint64_t i = 0; i < PATCH_SHARE_WORDS; i++) {
        uint64_t at = 2 * (share * PATCH_SHARE_WORDS + i);
        uint8_t was[2] = {0}, is[2] = {0};
        for (uint64_t b = 0; b < 2 && at + b < k->p.bytes; b++) {
            was[b] = k->before[at + b];
            is[b] = k->after[at + b];
        }
        if (memcmp(was, is, 2) == 0)
            continue;
        uint16_t place = (uint16_t)(share % PATCH_SHARES * PATCH_SHARE_WORDS + i);
        if (places) {
            memcpy(places + 2 * n, &place, 2);
            memcpy(words + 2 * n, is, 2);
        }
        n++;
    }
    return n;
}

static void patch_count(work *w, const void *parameter)
{
    patch_work k = begin_patch(w, parameter);
    for (uint64_t i = 0; i < k.segments * PATCH_SHARES; i++) {
        fake_kernel_gate(w->context, i);
        k.counts[i] = find_changes(&k, i, NULL, NULL);
    }
}

static uint32_t count_shares(const patch_work *k, uint64_t from, uint64_t to)
{
    uint32_t n = 0;
    for (; from < to; from++)
        n += k->counts[from];
    return n;
}

static void patch_scan(work *w, const void *parameter)
{
    patch_work k = begin_patch(w, parameter);
    uint32_t *directory =
        (uint32_t *)touch(w, (uint64_t)(uintptr_t)k.p.directory, 4 * k.segments);
    k.first[0] = 0;
    for (uint64_t i = 0; i < k.segments; i++) {
        directory[i] = count_shares(&k, i * PATCH_SHARES, (i + 1) * PATCH_SHARES);
        k.first[i + 1] = k.first[i] + directory[i];
    }
    *(uint64_t *)touch(w, (uint64_t)(uintptr_t)k.p.made, 8) =
        k.first[k.segments] > k.p.most ? PATCH_TOO_LARGE : k.first[k.segments];
}

static void patch_emit(work *w, const void *parameter)
{
    patch_work k = begin_patch(w, parameter);
    uint64_t all = k.first[k.segments];
    if (all == 0 || all > k.p.most)
        return;
    uint8_t *changes = touch(w, (uint64_t)(uintptr_t)k.p.changes, 4 * all);
    for (uint64_t i = 0; i < k.segments * PATCH_SHARES; i++) {
        uint64_t segment = i / PATCH_SHARES, from = segment * PATCH_SHARES;
        uint8_t *places =
            changes + 4 * k.first[segment] + UINT64_C(2) * count_shares(&k, from, i);
        find_changes(&k, i, places,
                     places +
                         UINT64_C(2) * count_shares(&k, from, from + PATCH_SHARES));
    }
}

/* Where byte @p at of the landing is; 0: nowhere. */
static uint64_t landed(const patch_landing *l, uint64_t at)
{
    uint64_t to = l->to;
    if (at < l->from || at >= l->end)
        return 0;
    at -= l->from;
    for (uint32_t i = 0; i < l->n_dims; i++) {
        if (at / l->from_step[i] >= l->extent[i])
            return 0;
        to += (uint64_t)((int64_t)(at / l->from_step[i]) * l->to_step[i]);
        at %= l->from_step[i];
    }
    return l->n_dims == 0 || at < l->run ? to + at : 0;
}

static void apply_run(work *w, const patch_landing *landings, const patch_run *r)
{
    const uint8_t *changes =
        touch(w, (uint64_t)(uintptr_t)r->changes, UINT64_C(4) * r->count);
    for (uint32_t i = 0; i < r->count; i++) {
        uint16_t place;
        memcpy(&place, changes + 2 * (uint64_t)i, 2);
        const uint8_t *word = changes + 2 * ((uint64_t)r->count + i);
        for (uint32_t j = 0; j < 2 * r->n; j++) {
            const patch_landing *l = &landings[r->first + j / 2];
            uint64_t to = landed(l, r->start + UINT64_C(2) * place + j % 2);
            if (to != 0 && l->even && to % 2 != j % 2)
                fake_die("a word of a patch goes to %#llx", (unsigned long long)to);
            if (to != 0)
                *touch(w, to, 1) = word[j % 2];
        }
    }
}

static void patch_apply(work *w, const void *parameter)
{
    patch_apply_parameters p;
    memcpy(&p, parameter, sizeof p);
    const patch_run *runs = (const patch_run *)touch(w, (uint64_t)(uintptr_t)p.runs,
                                                     p.count * sizeof *runs);
    for (uint64_t i = 0; i < p.count; i++) {
        fake_kernel_gate(w->context, i);
        const patch_landing *landings = (const patch_landing *)touch(
            w, (uint64_t)(uintptr_t)p.landings,
            (runs[i].first + runs[i].n) * sizeof *landings);
        apply_run(w, landings, &runs[i]);
    }
}

static struct CUfunc_st functions[] = {
    {COPY_KERNEL_NAME, sizeof(copy_parameters), COPY_KERNEL_THREADS, copy_units},
    {DIGEST_KERNEL_NAME, sizeof(digest_parameters), DIGEST_KERNEL_THREADS,
     digest_pieces},
    {DIGEST_FILE_KERNEL_NAME, sizeof(digest_file_parameters),
     DIGEST_FILE_KERNEL_THREADS, digest_file},
    {PATCH_COUNT_NAME, sizeof(patch_parameters), PATCH_KERNEL_THREADS, patch_count},
    {PATCH_SCAN_NAME, sizeof(patch_parameters), PATCH_SCAN_THREADS, patch_scan},
    {PATCH_EMIT_NAME, sizeof(patch_parameters), PATCH_KERNEL_THREADS, patch_emit},
    {PATCH_APPLY_NAME, sizeof(patch_apply_parameters), PATCH_KERNEL_THREADS,
     patch_apply},
};

void fake_kernel_run(CUcontext context, fake_launch *launch)
{
    work *w = calloc(1, sizeof *w);
    if (w == NULL)
        fake_die("out of memory");
    w->context = context;
    launch->function->run(w, launch->parameter);
    pthread_mutex_lock(&fake.lock);
    for (size_t i = 0; i < w->n_used; i++)
        w->used[i]->busy--;
    fake.counts.kernels++;
    fake.counts.digests +=
        launch->function->run == digest_pieces || launch->function->run == digest_file;
    pthread_mutex_unlock(&fake.lock);
    free(w);
}

void fake_kernel_free(fake_launch *launch)
{
    free(launch);
}

/* --------------------------------------------------------------------- launching */

CUresult CUDAAPI cuModuleLoadData(CUmodule *out, const void *image)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    uint32_t magic = 0;
    if (image != NULL)
        memcpy(&magic, image, sizeof magic);
    if (magic != FATBIN_MAGIC && magic != ELF_MAGIC)
        return fake_leave(CUDA_ERROR_INVALID_IMAGE);
    CUmodule module = malloc(sizeof *module);
    if (module == NULL)
        fake_die("out of memory");
    module->context = fake_current();
    module->next = modules;
    modules = module;
    fake.counts.modules++;
    *out = module;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (module->context != fake_current())
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) == 0) {
            *out = &functions[i];
            return fake_leave(CUDA_SUCCESS);
        }
    }
    return fake_leave(CUDA_ERROR_NOT_FOUND);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks,
                                                             CUfunction function,
                                                             int threads, size_t shared)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    (void)function;
    (void)shared;
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 0;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x,
                                unsigned int grid_y, unsigned int grid_z,
                                unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared,
                                CUstream stream, void **parameters, void **extra)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (function == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if (grid_x == 0 || grid_x > INT32_MAX || grid_y != 1 || grid_z != 1 ||
        block_y != 1 || block_z != 1 || block_x != function->threads ||
        shared > 49152 || extra != NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    fake_launch *launch = calloc(1, sizeof *launch);
    if (launch == NULL)
        fake_die("out of memory");
    launch->function = function;
    memcpy(launch->parameter, parameters[0], function->size);
    return fake_leave(fake_stream_launch(fake_current(), stream, launch));
}
