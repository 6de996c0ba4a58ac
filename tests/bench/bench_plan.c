/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long planning takes: a mixture-of-experts adapter of 37,248 tensors on 8 and on 512
 * ranks, under chunk rules and with explicit boxes, and its one-sided spans.
 *
 *     bench_plan            prints one line a case
 */
#include "dtype.h"
#include "plan/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LAYERS 48
#define EXPERTS 128
#define RANK_R 16

typedef struct bench {
    key_entry *entries;
    uint32_t n_keys;
    key_table *keys;
    plan_source *sources;
    size_t n_sources;
    uint64_t *to_of_key;
    uint64_t *region_length; /* by source */
    uint64_t n_boxes;
} bench;

static void require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench_plan: %s\n", what);
    exit(1);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void add_key(bench *b, const char *module, char side, uint64_t rows,
                    uint64_t columns)
{
    char *name = NULL;
    require(asprintf(&name, "base_model.model.model.layers.%s.lora_%c.weight", module,
                     side) > 0,
            "no memory");
    key_entry *e = &b->entries[b->n_keys++];
    *e = (key_entry){
        .name = name, .dtype = FANIN_DTYPE_BF16, .n_dims = 2, .shape = {rows, columns}};
    dtype_bytes(e->dtype, 2, e->shape, &e->bytes);
}

static void add_module(bench *b, const char *module, uint64_t in, uint64_t out)
{
    add_key(b, module, 'A', RANK_R, in);
    add_key(b, module, 'B', out, RANK_R);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const key_entry *)a)->name, ((const key_entry *)b)->name);
}

static void make_keys(bench *b)
{
    static const uint64_t attention[4][2] = {
        {2048, 4096}, {2048, 512}, {2048, 512}, {4096, 2048}};
    static const uint64_t expert[3][2] = {{2048, 768}, {2048, 768}, {768, 2048}};
    char module[64];
    b->entries = calloc(LAYERS * (4 + 3 * EXPERTS) * 2, sizeof *b->entries);
    require(b->entries != NULL, "no memory");
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int i = 0; i < 4; i++) {
            snprintf(module, sizeof module, "%d.self_attn.%c_proj", layer, "qkvo"[i]);
            add_module(b, module, attention[i][0], attention[i][1]);
        }
        for (int i = 0; i < 3 * EXPERTS; i++) {
            snprintf(module, sizeof module, "%d.mlp.experts.%d.%c_proj", layer, i / 3,
                     "gud"[i % 3]);
            add_module(b, module, expert[i % 3][0], expert[i % 3][1]);
        }
    }
    qsort(b->entries, b->n_keys, sizeof *b->entries, by_name);
    buffer blob = {0};
    key_table_encode(&blob, b->entries, b->n_keys, NULL, 0);
    require(key_table_decode(blob.data, blob.size, NULL, &b->keys, NULL) == FANIN_OK,
            "keys");
    buffer_free(&blob);
    b->to_of_key = malloc((b->n_keys + 1) * sizeof *b->to_of_key);
    require(b->to_of_key != NULL, "no memory");
    uint64_t to = 0;
    for (uint32_t k = 0; k < b->n_keys; k++) {
        b->to_of_key[k] = to;
        to += b->keys->entries[k].bytes;
    }
}

/* A rank that holds a chunk of each key, 64 bytes aligned, with malloc's gaps; explicit
   tables come from a first box that is cut in two. */
static void make_source(bench *b, uint32_t rank, uint32_t world, uint32_t parts,
                        bool explicit)
{
    box_record *records = calloc((size_t)b->n_keys + 1, sizeof *records);
    uint64_t n = 0, at = 0, bytes;
    bool halved = !explicit;
    require(records != NULL, "no memory");
    for (uint32_t k = 0; k < b->n_keys; k++) {
        const key_entry *e = &b->keys->entries[k];
        box_record r = {.key = k, .place = {.offset = at, .packed = true}};
        r.block = block_chunk(2, e->shape, 0, parts, rank % parts);
        if (block_is_empty(&r.block))
            continue;
        bool halve = !halved && r.block.extent[0] > 1;
        if (halve)
            r.block.extent[0] /= 2;
        dtype_bytes(e->dtype, 2, r.block.extent, &bytes);
        records[n++] = r;
        at += (bytes + 64 + 63) / 64 * 64;
        if (!halve)
            continue;
        halved = true;
        r.block.offset[0] += r.block.extent[0];
        r.block.extent[0] = block_chunk(2, e->shape, 0, parts, rank % parts).extent[0] -
                            r.block.extent[0];
        r.place.offset = at;
        dtype_bytes(e->dtype, 2, r.block.extent, &bytes);
        records[n++] = r;
        at += (bytes + 64 + 63) / 64 * 64;
    }
    buffer blob = {0};
    box_table *boxes;
    box_table_encode(&blob, b->keys->entries, b->n_keys, records, n, rank, world);
    require(box_table_decode(blob.data, blob.size, b->keys, NULL, &boxes, NULL) ==
                FANIN_OK,
            "boxes");
    require((box_table_rule(boxes, NULL, NULL, NULL) == BOXES_EXPLICIT) == explicit ||
                n == 0,
            "a table of another kind than wanted");
    buffer_free(&blob);
    free(records);
    b->region_length[rank] = at;
    b->sources[rank] = (plan_source){.rank = rank, .boxes = boxes};
    b->n_boxes += n;
}

static void make_sources(bench *b, uint32_t world, uint32_t parts, bool explicit)
{
    b->sources = calloc(world, sizeof *b->sources);
    b->region_length = calloc(world, sizeof *b->region_length);
    b->n_sources = world;
    b->n_boxes = 0;
    require(b->sources && b->region_length, "no memory");
    for (uint32_t rank = 0; rank < world; rank++)
        make_source(b, rank, world, parts, explicit);
}

static void free_sources(bench *b)
{
    for (size_t s = 0; s < b->n_sources; s++) {
        box_table *boxes = (box_table *)(uintptr_t)b->sources[s].boxes;
        box_table_free(&boxes);
    }
    free(b->sources);
    free(b->region_length);
}

static uint64_t count_pieces(const plan *p)
{
    uint64_t n = 0;
    for (size_t s = 0; s < p->n_ranks; s++)
        n += p->ranks[s].n_pieces;
    return n;
}

/* All sources' spans, one after the other. */
static double time_spans(const bench *b, const plan *p, uint64_t *spans_out)
{
    span_rule rule = {
        .max_length = 1 << 20, .max_gap = 16 << 10, .direct_from = 256 << 10};
    double start = now_ms();
    *spans_out = 0;
    for (size_t s = 0; s < b->n_sources; s++) {
        region_entry entry = {.length = b->region_length[s]};
        region_table regions = {.entries = &entry, .count = 1};
        plan_spans *spans;
        require(plan_spans_build(p, b->keys, b->sources, s, &regions, &rule, NULL,
                                 &spans, NULL) == FANIN_OK,
                "spans");
        *spans_out += spans->n_spans;
        plan_spans_free(&spans);
    }
    return now_ms() - start;
}

static double time_sufficient(const bench *b, uint32_t parts)
{
    bool *use = malloc(b->n_sources);
    require(use != NULL, "no memory");
    memset(use, true, b->n_sources);
    use[1] = false; /* the dead one */
    double start = now_ms();
    bool enough = plan_sufficient(b->keys, b->sources, b->n_sources, use, NULL);
    double spent = now_ms() - start;
    require(enough == (b->n_sources > parts), "only a replica can be spared");
    free(use);
    return spent;
}

/* Every tensor's upper half of columns: what tensor parallelism wants of lora_A. */
static double time_slices(const bench *b)
{
    plan_target *targets = calloc(b->n_keys, sizeof *targets);
    require(targets != NULL, "no memory");
    for (uint32_t k = 0; k < b->n_keys; k++) {
        const uint64_t *shape = b->keys->entries[k].shape;
        targets[k] = (plan_target){.key = k, .to = b->to_of_key[k]};
        targets[k].block = (block){.n_dims = 2,
                                   .offset = {0, shape[1] / 2},
                                   .extent = {shape[0], shape[1] / 2}};
    }
    plan *p;
    double start = now_ms();
    require(plan_build(b->keys, b->sources, b->n_sources, targets, b->n_keys, NULL,
                       &(plan_rules){0}, &p, NULL) == FANIN_OK,
            "plan of slices");
    double spent = now_ms() - start;
    plan_free(&p);
    free(targets);
    return spent;
}

static void run(bench *b, const char *name, uint32_t world, uint32_t parts,
                bool explicit)
{
    make_sources(b, world, parts, explicit);
    int times = world > 64 ? 1 : 5;
    double best = 1e9, spent;
    uint64_t pieces = 0, spans = 0;
    uint32_t views = 0;
    plan *p = NULL;
    for (int i = 0; i < times; i++) {
        plan_free(&p);
        double start = now_ms();
        require(plan_build(b->keys, b->sources, b->n_sources, NULL, 0, b->to_of_key,
                           &(plan_rules){0}, &p, NULL) == FANIN_OK,
                "plan");
        spent = now_ms() - start;
        best = spent < best ? spent : best;
        pieces = count_pieces(p);
        views = p->n_views;
    }
    double spans_ms = time_spans(b, p, &spans);
    plan_free(&p);
    printf("%-24s %8llu boxes: plan %8.1f ms (%llu pieces, %u views), slices %8.1f ms, "
           "spans %8.1f ms (%llu), sufficient %6.2f ms\n",
           name, (unsigned long long)b->n_boxes, best, (unsigned long long)pieces,
           views, time_slices(b), spans_ms, (unsigned long long)spans,
           time_sufficient(b, parts));
    fflush(stdout);
    free_sources(b);
}

int main(void)
{
    bench b = {0};
    make_keys(&b);
    printf("%u tensors, %.2f GB\n", b.n_keys, (double)b.keys->bytes / 1e9);
    run(&b, "8 ranks, chunks", 8, 8, false);
    run(&b, "8 ranks, explicit", 8, 8, true);
    run(&b, "16 ranks, 2 replicas", 16, 8, false);
    run(&b, "512 ranks, chunks", 512, 512, false);
    run(&b, "512 ranks, explicit", 512, 512, true);
    run(&b, "512 ranks, 32 replicas", 512, 16, false);
    run(&b, "512 ranks, same, expl.", 512, 16, true);
    for (uint32_t k = 0; k < b.n_keys; k++)
        free((char *)(uintptr_t)b.entries[k].name);
    free(b.entries);
    free(b.to_of_key);
    key_table_free(&b.keys);
    return 0;
}
