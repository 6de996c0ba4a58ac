/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What column slices of row-sharded tensors cost before a byte moves: the plan of the second of two
 * tensor-parallel workers that read a whole model from eight ranks, and what each path makes of it.
 *
 *     bench_columns            times and memory, a line a step
 */
#include "copy_list.h"
#include "copy_units.h"
#include "dtype.h"
#include "plan/plan.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANKS 8
#define PARTS 2 /* of tensor parallelism; the second worker's are planned */

typedef struct model {
    const char *name;
    uint64_t layers, hidden, queries, keys, width, experts, vocabulary;
} model;

typedef enum cut { WHOLE, ROWS, COLUMNS } cut;

typedef struct bench {
    key_entry *entries;
    uint8_t *cuts; /* by key, as it was added */
    uint32_t n_keys, capacity;
    key_table *keys;
    plan_source sources[RANKS];
    uint64_t region_length[RANKS];
    plan_target *targets;
} bench;

static void require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench_columns: %s\n", what);
    exit(1);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static double held_mb(void)
{
    struct mallinfo2 m = mallinfo2();
    return (double)(m.uordblks + m.hblkhd) / 1e6;
}

/* ---------------------------------------------------------------------- the model */

static void add(bench *b, const char *name, uint64_t rows, uint64_t columns, cut how)
{
    if (b->n_keys == b->capacity) {
        b->capacity = b->capacity ? 2 * b->capacity : 1024;
        b->entries = realloc(b->entries, b->capacity * sizeof *b->entries);
        b->cuts = realloc(b->cuts, b->capacity);
        require(b->entries && b->cuts, "no memory");
    }
    key_entry *e = &b->entries[b->n_keys];
    *e = (key_entry){.name = strdup(name),
                     .dtype = FANIN_DTYPE_BF16,
                     .n_dims = columns ? 2 : 1,
                     .shape = {rows, columns}};
    require(e->name != NULL, "no memory");
    dtype_bytes(e->dtype, e->n_dims, e->shape, &e->bytes);
    b->cuts[b->n_keys++] = (uint8_t)how;
}

/* Keys come in the order of their names. */
static void add_layer(bench *b, const model *m, uint64_t layer)
{
    char name[96];
    char *end = name + snprintf(name, sizeof name, "layers.%03u.", (unsigned)layer);
    size_t room = sizeof name - (size_t)(end - name);
    for (uint64_t e = 0; e < (m->experts ? m->experts : 1); e++) {
        snprintf(end, room, "mlp.%03u.down_proj", (unsigned)e);
        add(b, name, m->hidden, m->width, COLUMNS);
        snprintf(end, room, "mlp.%03u.gate_proj", (unsigned)e);
        add(b, name, m->width, m->hidden, ROWS);
        snprintf(end, room, "mlp.%03u.up_proj", (unsigned)e);
        add(b, name, m->width, m->hidden, ROWS);
    }
    static const char *const small[] = {"norm.a", "norm.b", "norm.k", "norm.q"};
    for (int i = 0; i < 4; i++) {
        snprintf(end, room, "%s", small[i]);
        add(b, name, i < 2 ? m->hidden : 128, 0, WHOLE);
    }
    if (m->experts) {
        snprintf(end, room, "router");
        add(b, name, m->experts, m->hidden, WHOLE);
    }
    snprintf(end, room, "self_attn.k_proj");
    add(b, name, m->keys, m->hidden, ROWS);
    snprintf(end, room, "self_attn.o_proj");
    add(b, name, m->hidden, m->queries, COLUMNS);
    snprintf(end, room, "self_attn.q_proj");
    add(b, name, m->queries, m->hidden, ROWS);
    snprintf(end, room, "self_attn.v_proj");
    add(b, name, m->keys, m->hidden, ROWS);
}

static void make_keys(bench *b, const model *m)
{
    add(b, "embed_tokens", m->vocabulary, m->hidden, ROWS);
    for (uint64_t layer = 0; layer < m->layers; layer++)
        add_layer(b, m, layer);
    add(b, "lm_head", m->vocabulary, m->hidden, ROWS);
    buffer blob = {0};
    key_table_encode(&blob, b->entries, b->n_keys, NULL, 0);
    require(key_table_decode(blob.data, blob.size, NULL, &b->keys, NULL) == FANIN_OK,
            "keys");
    buffer_free(&blob);
}

static void make_source(bench *b, uint32_t rank)
{
    box_record *records = calloc(b->n_keys, sizeof *records);
    uint64_t at = 0, bytes;
    require(records != NULL, "no memory");
    for (uint32_t k = 0; k < b->n_keys; k++) {
        const key_entry *e = &b->keys->entries[k];
        records[k] = (box_record){.key = k, .place = {.offset = at, .packed = true}};
        records[k].block = block_chunk(e->n_dims, e->shape, 0, RANKS, rank);
        dtype_bytes(e->dtype, e->n_dims, records[k].block.extent, &bytes);
        at += (bytes + 511) / 512 * 512;
    }
    buffer blob = {0};
    box_table *boxes;
    box_table_encode(&blob, b->keys->entries, b->n_keys, records, b->n_keys, rank,
                     RANKS);
    require(box_table_decode(blob.data, blob.size, b->keys, NULL, &boxes, NULL) ==
                FANIN_OK,
            "boxes");
    buffer_free(&blob);
    free(records);
    b->region_length[rank] = at;
    b->sources[rank] = (plan_source){.rank = rank, .boxes = boxes};
}

/* The second worker's slices, each packed behind the one before. */
static uint64_t make_targets(bench *b)
{
    uint64_t to = 0, bytes;
    b->targets = calloc(b->n_keys, sizeof *b->targets);
    require(b->targets != NULL, "no memory");
    for (uint32_t k = 0; k < b->n_keys; k++) {
        const key_entry *e = &b->keys->entries[k];
        plan_target *t = &b->targets[k];
        *t = (plan_target){.key = k, .to = to, .group = k};
        t->block.n_dims = e->n_dims;
        memcpy(t->block.extent, e->shape, sizeof e->shape);
        if (b->cuts[k] != WHOLE) {
            uint32_t dim = b->cuts[k] == ROWS ? 0 : 1;
            t->block.extent[dim] = e->shape[dim] / PARTS;
            t->block.offset[dim] = e->shape[dim] - t->block.extent[dim];
        }
        dtype_bytes(e->dtype, e->n_dims, t->block.extent, &bytes);
        to += bytes;
    }
    return to;
}

/* ---------------------------------------------------------------------- the steps */

typedef struct tally {
    double ms, mb;
    uint64_t n;
} tally;

static void print(const char *what, const tally *t, const char *of)
{
    printf("  %-34s %9.1f ms %9.2f MB  %10llu %s\n", what, t->ms, t->mb,
           (unsigned long long)t->n, of);
    fflush(stdout);
}

static plan *make_plan(const bench *b)
{
    tally t = {.ms = now_ms(), .mb = held_mb()};
    plan *p;
    require(plan_build(b->keys, b->sources, RANKS, b->targets, b->n_keys, NULL,
                       &(plan_rules){0}, &p, NULL) == FANIN_OK,
            "plan");
    t.ms = now_ms() - t.ms;
    t.mb = held_mb() - t.mb;
    for (size_t s = 0; s < p->n_ranks; s++)
        t.n += p->ranks[s].n_pieces;
    print("plan", &t, "pieces");
    return p;
}

static plan_spans *spans_of(const bench *b, const plan *p, size_t s,
                            const span_rule *rule)
{
    region_entry entry = {.length = b->region_length[s]};
    region_table regions = {.entries = &entry, .count = 1};
    plan_spans *spans;
    require(plan_spans_build(p, b->keys, b->sources, s, &regions, rule, NULL, &spans,
                             NULL) == FANIN_OK,
            "spans");
    return spans;
}

static void list_copies(const plan_spans *spans, copy_list *list)
{
    for (uint64_t i = 0; i < spans->n_spans; i++) {
        const span *s = &spans->spans[i];
        for (uint64_t j = s->first; j < s->first + s->count; j++) {
            const span_piece *p = &spans->pieces[j];
            if (p->view)
                copy_list_add_view(list, s->region, s->offset + p->offset, p->to,
                                   &spans->views[p->view - 1]);
            else
                copy_list_add(list, s->region, s->offset + p->offset, p->to, p->length);
        }
    }
}

/* What the copy kernel's path makes of it: spans stay, the table goes to the device. */
static void copy_kernel(const bench *b, const plan *p)
{
    tally t = {.ms = now_ms(), .mb = held_mb()}, table = {0}, units = {0};
    plan_spans *spans[RANKS];
    copy_list list = {0};
    for (size_t s = 0; s < RANKS; s++)
        spans[s] = spans_of(
            b, p, s,
            &(span_rule){.max_length = UINT64_C(1) << 40, .walks_views = true});
    t.ms = now_ms() - t.ms;
    t.mb = held_mb() - t.mb;
    table.ms = now_ms();
    table.mb = held_mb();
    for (size_t s = 0; s < RANKS; s++) {
        list_copies(spans[s], &list);
        t.n += spans[s]->n_spans;
    }
    require(!list.failed, "no memory");
    table.ms = now_ms() - table.ms;
    table.mb = held_mb() - table.mb;
    table.n = list.n;
    units.ms = now_ms();
    for (uint64_t i = 0; i < list.n; i++)
        units.n += copy_units_cut(&list.entries[i], NULL);
    copy_entry *cut = malloc(units.n * sizeof *cut), *at = cut;
    require(cut != NULL, "no memory");
    for (uint64_t i = 0; i < list.n; i++)
        at += copy_units_cut(&list.entries[i], at);
    units.ms = now_ms() - units.ms;
    units.mb = (double)(units.n * sizeof *cut) / 1e6;
    print("cuda_ipc: where it lies", &t, "stretches");
    print("cuda_ipc: copies", &table, "entries");
    print("cuda_ipc: the device's table", &units, "units");
    free(cut);
    copy_list_free(&list);
    for (size_t s = 0; s < RANKS; s++)
        plan_spans_free(&spans[s]);
}

static void one_sided(const bench *b, const plan *p)
{
    static const span_rule rule = {
        .max_length = 1 << 20, .max_gap = 8192, .direct_from = 65536};
    tally t = {.ms = now_ms(), .mb = held_mb()};
    plan_spans *spans[RANKS];
    for (size_t s = 0; s < RANKS; s++) {
        spans[s] = spans_of(b, p, s, &rule);
        t.n += spans[s]->n_spans;
    }
    t.ms = now_ms() - t.ms;
    t.mb = held_mb() - t.mb;
    print("cma, rdma: gets", &t, "spans");
    for (size_t s = 0; s < RANKS; s++)
        plan_spans_free(&spans[s]);
}

static void stream(const bench *b, const plan *p)
{
    tally t = {.ms = now_ms(), .mb = held_mb()};
    read_list lists[RANKS];
    for (size_t s = 0; s < RANKS; s++) {
        require(read_list_build(p, s, b->sources[s].boxes, b->keys, NULL, &lists[s],
                                NULL) == FANIN_OK,
                "requests");
        t.n += lists[s].n_requests;
    }
    t.ms = now_ms() - t.ms;
    t.mb = held_mb() - t.mb;
    print("stream: requests", &t, "requests");
    for (size_t s = 0; s < RANKS; s++) {
        free(lists[s].entries);
        free(lists[s].requests);
    }
}

static void run(const model *m)
{
    bench b = {0};
    make_keys(&b, m);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        make_source(&b, rank);
    uint64_t bytes = make_targets(&b);
    printf("%s, %u ranks -> TP%u: %u tensors, %.2f GB a worker\n", m->name, RANKS,
           PARTS, b.n_keys, (double)bytes / 1e9);
    plan *p = make_plan(&b);
    copy_kernel(&b, p);
    one_sided(&b, p);
    stream(&b, p);
    plan_free(&p);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        box_table *boxes = (box_table *)(uintptr_t)b.sources[rank].boxes;
        box_table_free(&boxes);
    }
    for (uint32_t k = 0; k < b.n_keys; k++)
        free((char *)(uintptr_t)b.entries[k].name);
    key_table_free(&b.keys);
    free(b.entries);
    free(b.cuts);
    free(b.targets);
}

int main(void)
{
    static const model models[] = {
        {"Qwen3-8B", 36, 4096, 4096, 1024, 12288, 0, 151936},
        {"Qwen3-30B-A3B", 48, 2048, 4096, 512, 768, 128, 151936},
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        run(&models[i]);
    return 0;
}
