/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fleet without its machines: the catalogs of 256 trainer ranks, and what each of 128 workers
 * makes of them, with the shapes of models of 0.7 and 1 trillion parameters. Real tables and real
 * plans; no bytes of weights, no network.
 *
 *     bench_fleet [MODEL [TRAINER]]      a part of both names, all without
 *
 * One block a trainer layout and engine layout:
 *   - the tables: keys, boxes, their bytes on the wire, what a worker that fetches all decodes and
 *     keeps of them; and what workers do, which fetch the boxes of the tensors that they want;
 *   - the plans of all workers: time, memory, pieces;
 *   - the busiest rank's bytes by the most that even sharing could reach, which is the mean of
 *     the pipeline stage that serves most: a stage's layers are on no other rank.
 */
#include "dtype.h"
#include "plan/plan.h"

#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANKS 256
#define WORKERS 128
#define ALIGNMENT 512 /* of tensors in a rank's memory */
/* One worker of so many is measured; the others are planned for what they make ranks serve. */
#define MEASURED 16

static void require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "bench_fleet: %s\n", what);
    exit(1);
}

/* Of this process, so that a busy machine does not count. */
static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static double used_mb(void)
{
    struct mallinfo2 m = mallinfo2();
    return (double)(m.uordblks + m.hblkhd) / 1e6;
}

/* --------------------------------------------------------------------- models */

typedef struct model {
    const char *name;
    int layers, dense_layers, experts;
    uint64_t hidden, expert_width, dense_width, vocabulary;
    uint64_t heads, head_plain, head_rotary, head_value, rank_q, rank_kv;
} model;

static const model models[] = {
    {"kimi-k2", 61, 1, 384, 7168, 2048, 18432, 163840, 64, 128, 64, 128, 1536, 512},
    {"deepseek-v3", 61, 3, 256, 7168, 2048, 18432, 129280, 128, 128, 64, 128, 1536,
     512},
};

typedef enum cut {
    CUT_NONE,    /* every rank of a tensor-parallel group has all of it */
    CUT_ROWS,    /* what is cut along its output */
    CUT_COLUMNS, /* along its input */
    CUT_EXPERT,  /* one expert's */
} cut;

typedef struct tensor {
    char *name;
    fanin_dtype dtype;
    cut cut;
    int layer, expert; /* layer -1: before the first */
    uint32_t n_dims;
    uint64_t shape[2];
} tensor;

typedef struct fleet {
    const model *model;
    tensor *tensors; /* in the order of their names */
    uint32_t n_tensors;
    key_table *keys;
    size_t keys_wire;
    double keys_ms, keys_mb;
    box_table *boxes[RANKS]; /* whole, as the ranks have them */
    uint64_t n_boxes, boxes_wire;
    double boxes_ms, boxes_mb;
} fleet;

static tensor *add(fleet *f, cut cut, int layer, uint64_t rows, uint64_t columns,
                   const char *format, ...) __attribute__((format(printf, 6, 7)));

static tensor *add(fleet *f, cut cut, int layer, uint64_t rows, uint64_t columns,
                   const char *format, ...)
{
    va_list arguments;
    if ((f->n_tensors & 4095) == 0) {
        f->tensors = realloc(f->tensors, (f->n_tensors + 4096) * sizeof *f->tensors);
        require(f->tensors != NULL, "no memory");
    }
    tensor *t = &f->tensors[f->n_tensors++];
    *t = (tensor){.dtype = FANIN_DTYPE_BF16,
                  .cut = cut,
                  .layer = layer,
                  .expert = -1,
                  .n_dims = columns ? 2 : 1,
                  .shape = {rows, columns}};
    va_start(arguments, format);
    require(vasprintf(&t->name, format, arguments) > 0, "no memory");
    va_end(arguments);
    return t;
}

static void add_attention(fleet *f, int layer)
{
    const model *m = f->model;
    uint64_t query = m->heads * (m->head_plain + m->head_rotary);
    uint64_t both = m->heads * (m->head_plain + m->head_value);
    char at[64];
    snprintf(at, sizeof at, "model.layers.%d.self_attn", layer);
    add(f, CUT_NONE, layer, m->rank_q, m->hidden, "%s.q_a_proj.weight", at);
    add(f, CUT_NONE, layer, m->rank_q, 0, "%s.q_a_layernorm.weight", at);
    add(f, CUT_ROWS, layer, query, m->rank_q, "%s.q_b_proj.weight", at);
    add(f, CUT_NONE, layer, m->rank_kv + m->head_rotary, m->hidden,
        "%s.kv_a_proj_with_mqa.weight", at);
    add(f, CUT_NONE, layer, m->rank_kv, 0, "%s.kv_a_layernorm.weight", at);
    add(f, CUT_ROWS, layer, both, m->rank_kv, "%s.kv_b_proj.weight", at);
    add(f, CUT_COLUMNS, layer, m->hidden, m->heads * m->head_value, "%s.o_proj.weight",
        at);
}

static void add_mlp(fleet *f, int layer, const char *at, uint64_t width, int expert)
{
    const model *m = f->model;
    cut in = expert < 0 ? CUT_ROWS : CUT_EXPERT;
    cut out = expert < 0 ? CUT_COLUMNS : CUT_EXPERT;
    add(f, in, layer, width, m->hidden, "%s.gate_proj.weight", at)->expert = expert;
    add(f, in, layer, width, m->hidden, "%s.up_proj.weight", at)->expert = expert;
    add(f, out, layer, m->hidden, width, "%s.down_proj.weight", at)->expert = expert;
}

static void add_layer(fleet *f, int layer)
{
    const model *m = f->model;
    char at[64];
    snprintf(at, sizeof at, "model.layers.%d", layer);
    add(f, CUT_NONE, layer, m->hidden, 0, "%s.input_layernorm.weight", at);
    add(f, CUT_NONE, layer, m->hidden, 0, "%s.post_attention_layernorm.weight", at);
    add_attention(f, layer);
    snprintf(at, sizeof at, "model.layers.%d.mlp", layer);
    if (layer < m->dense_layers) {
        add_mlp(f, layer, at, m->dense_width, -1);
        return;
    }
    add(f, CUT_NONE, layer, (uint64_t)m->experts, m->hidden, "%s.gate.weight", at);
    add(f, CUT_NONE, layer, (uint64_t)m->experts, 0, "%s.gate.e_score_correction_bias",
        at)
        ->dtype = FANIN_DTYPE_F32;
    snprintf(at, sizeof at, "model.layers.%d.mlp.shared_experts", layer);
    add_mlp(f, layer, at, m->expert_width, -1);
    for (int expert = 0; expert < m->experts; expert++) {
        snprintf(at, sizeof at, "model.layers.%d.mlp.experts.%d", layer, expert);
        add_mlp(f, layer, at, m->expert_width, expert);
    }
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const tensor *)a)->name, ((const tensor *)b)->name);
}

static void make_tensors(fleet *f)
{
    const model *m = f->model;
    for (int layer = 0; layer < m->layers; layer++)
        add_layer(f, layer);
    add(f, CUT_ROWS, -1, m->vocabulary, m->hidden, "model.embed_tokens.weight");
    add(f, CUT_NONE, m->layers - 1, m->hidden, 0, "model.norm.weight");
    add(f, CUT_ROWS, m->layers - 1, m->vocabulary, m->hidden, "lm_head.weight");
    qsort(f->tensors, f->n_tensors, sizeof *f->tensors, by_name);
}

static void make_keys(fleet *f)
{
    key_entry *entries = calloc(f->n_tensors, sizeof *entries);
    buffer blob = {0};
    require(entries != NULL, "no memory");
    for (uint32_t i = 0; i < f->n_tensors; i++) {
        const tensor *t = &f->tensors[i];
        key_entry *e = &entries[i];
        *e = (key_entry){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims};
        memcpy(e->shape, t->shape, sizeof t->shape);
        require(dtype_bytes(e->dtype, e->n_dims, e->shape, &e->bytes), "bytes");
    }
    key_table_encode(&blob, entries, f->n_tensors, NULL, 0);
    double before = used_mb(), start = now_ms();
    require(key_table_decode(blob.data, blob.size, NULL, &f->keys, NULL) == FANIN_OK,
            "keys");
    f->keys_ms = now_ms() - start;
    f->keys_mb = used_mb() - before;
    f->keys_wire = blob.size;
    buffer_free(&blob);
    free(entries);
}

/* -------------------------------------------------------------------- layouts */

typedef enum scheme {
    SCHEME_STAGES,  /* pipeline stages; tensor and expert parallel in each */
    SCHEME_EXPERTS, /* expert groups, whose rows are cut over ranks; all else over all */
    SCHEME_ROWS,    /* rows of everything over all ranks of a replica */
} scheme;

typedef struct trainer {
    const char *name;
    scheme scheme;
    uint32_t stages, tensor, expert, replicas;
} trainer;

static const trainer trainers[] = {
    {"megatron-pp8-tp8-ep32", SCHEME_STAGES, 8, 8, 32, 1},
    {"fsdp2-ep8", SCHEME_EXPERTS, 1, 1, 8, 1},
    {"fsdp2", SCHEME_ROWS, 1, 1, 1, 1},
    {"hsdp-8x32", SCHEME_ROWS, 1, 1, 1, 8},
};

typedef struct engines {
    const char *name;
    uint32_t tensor, expert; /* ranks that share a tensor, and the experts of a layer */
} engines;

static const engines fleets[] = {
    {"16 x attention TP8, EP128", 8, 128},
    {"4 engines TP32 EP32", 32, 32},
    {"attention DP128, EP128", 1, 128},
};

static uint32_t expert_owner(const fleet *f, int expert, uint32_t groups)
{
    return (uint32_t)expert * groups / (uint32_t)f->model->experts;
}

static block part_of(const tensor *t, uint32_t dim, uint32_t parts, uint32_t index)
{
    return block_chunk(t->n_dims, t->shape, dim, parts, index);
}

static block tensor_parallel(const tensor *t, uint32_t ranks, uint32_t rank)
{
    if (t->cut == CUT_ROWS)
        return part_of(t, 0, ranks, rank % ranks);
    if (t->cut == CUT_COLUMNS)
        return part_of(t, 1, ranks, rank % ranks);
    return part_of(t, 0, 1, 0);
}

static bool stage_holds(const fleet *f, const trainer *how, uint32_t rank,
                        const tensor *t, block *out)
{
    uint32_t ranks = RANKS / how->stages, inside = rank % ranks;
    uint32_t layers = ((uint32_t)f->model->layers + how->stages - 1) / how->stages;
    uint32_t stage = t->layer < 0 ? 0 : (uint32_t)t->layer / layers;
    if (rank / ranks != stage)
        return false;
    *out = tensor_parallel(t, how->tensor, inside);
    return t->cut != CUT_EXPERT ||
           inside % how->expert == expert_owner(f, t->expert, how->expert);
}

static bool rank_holds(const fleet *f, const trainer *how, uint32_t rank,
                       const tensor *t, block *out)
{
    if (how->scheme == SCHEME_STAGES)
        return stage_holds(f, how, rank, t, out);
    if (how->scheme == SCHEME_EXPERTS && t->cut == CUT_EXPERT) {
        if (rank % how->expert != expert_owner(f, t->expert, how->expert))
            return false;
        *out = part_of(t, 0, RANKS / how->expert, rank / how->expert);
    } else {
        uint32_t ranks = RANKS / how->replicas;
        *out = part_of(t, 0, ranks, rank % ranks);
    }
    return !block_is_empty(out);
}

static bool worker_wants(const fleet *f, const engines *how, uint32_t worker,
                         const tensor *t, block *out)
{
    if (t->cut == CUT_EXPERT &&
        worker % how->expert != expert_owner(f, t->expert, how->expert))
        return false;
    *out = tensor_parallel(t, how->tensor, worker);
    return !block_is_empty(out);
}

/* --------------------------------------------------------------------- tables */

static void make_boxes(fleet *f, const trainer *how, uint32_t rank, box_record *records)
{
    uint64_t n = 0, at = 0, bytes;
    buffer blob = {0};
    for (uint32_t key = 0; key < f->n_tensors; key++) {
        block b;
        if (!rank_holds(f, how, rank, &f->tensors[key], &b))
            continue;
        records[n++] = (box_record){
            .key = key, .block = b, .place = {.offset = at, .packed = true}};
        require(dtype_bytes(f->tensors[key].dtype, b.n_dims, b.extent, &bytes),
                "bytes");
        at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    box_table_encode(&blob, f->keys->entries, f->keys->count, records, n, rank, RANKS);
    double before = used_mb(), start = now_ms();
    require(box_table_decode(blob.data, blob.size, f->keys, NULL, &f->boxes[rank],
                             NULL) == FANIN_OK,
            "boxes");
    f->boxes_ms += now_ms() - start;
    f->boxes_mb += used_mb() - before;
    f->n_boxes += n;
    f->boxes_wire += blob.size;
    buffer_free(&blob);
}

static void fleet_make(fleet *f, const model *m, const trainer *how)
{
    *f = (fleet){.model = m};
    make_tensors(f);
    make_keys(f);
    box_record *records = calloc(f->n_tensors, sizeof *records);
    require(records != NULL, "no memory");
    for (uint32_t rank = 0; rank < RANKS; rank++)
        make_boxes(f, how, rank, records);
    free(records);
    printf("%s, %s: %u keys, %.2f TB, %llu boxes; tables %.2f MB on the wire, %.0f ms "
           "and %.1f MB in a worker that fetches all\n",
           m->name, how->name, f->keys->count, (double)f->keys->bytes / 1e12,
           (unsigned long long)f->n_boxes, (double)(f->keys_wire + f->boxes_wire) / 1e6,
           f->keys_ms + f->boxes_ms, f->keys_mb + f->boxes_mb);
}

static void fleet_free(fleet *f)
{
    for (uint32_t rank = 0; rank < RANKS; rank++)
        box_table_free(&f->boxes[rank]);
    key_table_free(&f->keys);
    for (uint32_t i = 0; i < f->n_tensors; i++)
        free(f->tensors[i].name);
    free(f->tensors);
}

/* ---------------------------------------------------------------------- plans */

typedef struct tally {
    double cut_ms; /* of all ranks and workers */
    double tables_ms_max, tables_mb_max, wire_mb_max;
    double plan_ms, plan_ms_max, plan_mb_max, all_mb_max;
    uint64_t pieces_max, bytes_max;
    uint64_t served[RANKS];
} tally;

/* What the client makes of its random id, which here is the same in every run. */
static uint64_t seed_of(uint32_t worker)
{
    digest id = digest_of(&worker, sizeof worker);
    uint64_t seed;
    memcpy(&seed, id.bytes, sizeof seed);
    return seed;
}

static size_t make_targets(const fleet *f, const engines *how, uint32_t worker,
                           plan_target *targets)
{
    size_t n = 0;
    uint64_t to = 0, bytes;
    for (uint32_t key = 0; key < f->n_tensors; key++) {
        block b;
        if (!worker_wants(f, how, worker, &f->tensors[key], &b))
            continue;
        targets[n++] = (plan_target){.key = key, .block = b, .to = to};
        require(dtype_bytes(f->tensors[key].dtype, b.n_dims, b.extent, &bytes),
                "bytes");
        to += bytes;
    }
    return n;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* What a worker has of the ranks' tables. */
typedef struct desk {
    key_set wanted;
    plan_source sources[RANKS];
    double mb;
} desk;

static void take_part(const fleet *f, uint32_t rank, desk *d, tally *t, double *ms,
                      double *wire_mb)
{
    buffer blob = {0};
    box_table *boxes;
    double start = now_ms();
    box_table_encode_part(&blob, f->boxes[rank], &d->wanted);
    t->cut_ms += now_ms() - start;
    require(!blob.failed, "no memory");
    double before = used_mb();
    start = now_ms();
    require(box_table_decode(blob.data, blob.size, f->keys, NULL, &boxes, NULL) ==
                FANIN_OK,
            "part");
    *ms += now_ms() - start;
    d->mb += used_mb() - before;
    *wire_mb += (double)blob.size / 1e6;
    d->sources[rank] = (plan_source){.rank = rank, .boxes = boxes};
    buffer_free(&blob);
}

/* As the client does: the key table, and the boxes of what the targets are of. */
static void make_desk(const fleet *f, const plan_target *targets, size_t n, desk *d,
                      tally *t)
{
    bool *marks = calloc(f->n_tensors, sizeof *marks);
    double ms = f->keys_ms, wire_mb = (double)f->keys_wire / 1e6;
    *d = (desk){.mb = f->keys_mb};
    require(marks != NULL, "no memory");
    for (size_t i = 0; i < n; i++)
        marks[targets[i].key] = true;
    require(key_set_of_marks(marks, f->n_tensors, &d->wanted), "no memory");
    free(marks);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        take_part(f, rank, d, t, &ms, &wire_mb);
    t->tables_ms_max = larger(ms, t->tables_ms_max);
    t->tables_mb_max = larger(d->mb, t->tables_mb_max);
    t->wire_mb_max = larger(wire_mb, t->wire_mb_max);
}

static void free_desk(desk *d)
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        box_table *boxes = (box_table *)(uintptr_t)d->sources[rank].boxes;
        box_table_free(&boxes);
    }
    key_set_free(&d->wanted);
}

static void count_plan(const plan *p, tally *t)
{
    uint64_t pieces = 0;
    for (size_t rank = 0; rank < p->n_ranks; rank++) {
        t->served[rank] += p->ranks[rank].bytes;
        pieces += p->ranks[rank].n_pieces;
    }
    t->pieces_max = pieces > t->pieces_max ? pieces : t->pieces_max;
    t->bytes_max = p->bytes > t->bytes_max ? p->bytes : t->bytes_max;
}

static plan *make_plan(const fleet *f, const plan_source *sources, uint32_t worker,
                       const plan_target *targets, size_t n, const key_set *keys)
{
    plan_rules rules = {.seed = seed_of(worker), .keys = keys};
    plan *p;
    require(plan_build(f->keys, sources, RANKS, targets, n, NULL, &rules, &p, NULL) ==
                FANIN_OK,
            "plan");
    return p;
}

static void measure_worker(const fleet *f, uint32_t worker, const plan_target *targets,
                           size_t n, tally *t)
{
    desk d;
    make_desk(f, targets, n, &d, t);
    double before = used_mb(), start = now_ms();
    plan *p = make_plan(f, d.sources, worker, targets, n, &d.wanted);
    double ms = now_ms() - start, mb = used_mb() - before;
    count_plan(p, t);
    t->plan_ms += ms / (WORKERS / MEASURED);
    t->plan_ms_max = larger(ms, t->plan_ms_max);
    t->plan_mb_max = larger(mb, t->plan_mb_max);
    t->all_mb_max = larger(d.mb + mb, t->all_mb_max);
    plan_free(&p);
    free_desk(&d);
}

static void plan_worker(const fleet *f, const engines *how, uint32_t worker,
                        plan_target *targets, tally *t)
{
    plan_source sources[RANKS];
    size_t n = make_targets(f, how, worker, targets);
    if (worker % MEASURED == 0) {
        measure_worker(f, worker, targets, n, t);
        return;
    }
    for (uint32_t rank = 0; rank < RANKS; rank++)
        sources[rank] = (plan_source){.rank = rank, .boxes = f->boxes[rank]};
    plan *p = make_plan(f, sources, worker, targets, n, NULL);
    count_plan(p, t);
    plan_free(&p);
}

/* By the mean of the stage that serves most. */
static double busiest_by_attainable(const trainer *how, const tally *t)
{
    uint32_t ranks = RANKS / how->stages;
    double fullest = 0, busiest = 0;
    for (uint32_t first = 0; first < RANKS; first += ranks) {
        double sum = 0;
        for (uint32_t rank = first; rank < first + ranks; rank++) {
            double served = (double)t->served[rank];
            sum += served;
            busiest = served > busiest ? served : busiest;
        }
        fullest = sum / ranks > fullest ? sum / ranks : fullest;
    }
    return busiest / fullest;
}

static void run(const fleet *f, const trainer *from, const engines *to)
{
    tally t = {0};
    plan_target *targets = calloc(f->n_tensors, sizeof *targets);
    require(targets != NULL, "no memory");
    for (uint32_t worker = 0; worker < WORKERS; worker++)
        plan_worker(f, to, worker, targets, &t);
    free(targets);
    printf(
        "  -> %-26s a worker pulls %5.1f GB; tables %5.2f MB on the wire, %5.1f ms, "
        "%4.1f MB; plan %5.1f ms (most %5.1f), %4.1f MB, %7llu pieces; all %4.1f MB; "
        "a rank cuts %.2f ms for each worker; busiest / attainable %.3f\n",
        to->name, (double)t.bytes_max / 1e9, t.wire_mb_max, t.tables_ms_max,
        t.tables_mb_max, t.plan_ms, t.plan_ms_max, t.plan_mb_max,
        (unsigned long long)t.pieces_max, t.all_mb_max,
        t.cut_ms / RANKS / (WORKERS / MEASURED), busiest_by_attainable(from, &t));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    for (size_t m = 0; m < sizeof models / sizeof *models; m++)
        for (size_t i = 0; i < sizeof trainers / sizeof *trainers; i++) {
            fleet f;
            if ((argc > 1 && !strstr(models[m].name, argv[1])) ||
                (argc > 2 && !strstr(trainers[i].name, argv[2])))
                continue;
            fleet_make(&f, &models[m], &trainers[i]);
            for (size_t e = 0; e < sizeof fleets / sizeof *fleets; e++)
                run(&f, &trainers[i], &fleets[e]);
            fleet_free(&f);
        }
    return 0;
}
