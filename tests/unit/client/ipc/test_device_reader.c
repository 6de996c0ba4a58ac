/* SPDX-License-Identifier: Apache-2.0 */
/* Reading by cuda_ipc: boxes with strides of their own land on devices and in host memory, which
   has to be told of each of them. What else there is to such reading test_device_pull.c shows. */
#include "device/devices.h"
#include "ipc/ipc.h"
#include "fake_cuda.h"
#include "plan_world.h"
#include "testing.h"

#define RANKS 3
#define KEYS (RANKS * WORLD_REGIONS * 2)

/* Who gathers for host memory. */
static const gather_set by_none = {.n = 0}, by_1 = {{1}, 1}, by_both = {{0, 1}, 2};

/* ------------------------------------------------------------------- fixture */

typedef struct bench {
    world w;
    landing l;
    fanin_client *client;
    path_plan plan;
    void *copies[WORLD_RANKS];
    const path_reader *readers[WORLD_RANKS];
    device_plan *tables;
    ipc_regions shards[WORLD_RANKS];
    region_table regions[WORLD_RANKS];
    region_entry entries[WORLD_RANKS][2 * WORLD_REGIONS];
    ipc_key keys[KEYS];
    void *exported[KEYS];
    device_source sources[WORLD_RANKS];
    memory_range ranges[1];
    size_t n_ranges;
    uint8_t *base;
    uint64_t told; /* bytes that landed() was told of */
} bench;

/* -------------------------------------------------------------------- worlds */

/* Boxes with strides of their own, to parts that are wanted with strides. */
static void make_odd(bench *b, fanin_dtype dtype)
{
    *b = (bench){0};
    world_init(&b->w, RANKS, 11);
    block all[6] = {{0}};
    for (uint32_t i = 0; i < 6; i++) {
        all[i] = (block){.n_dims = 3, .extent = {11 + i, 17, 33 + 2 * i}};
        world_key(&b->w, i % 2 ? FANIN_DTYPE_F32 : FANIN_DTYPE_I16, 3, all[i].extent);
    }
    for (uint32_t i = 0; i < 6; i++)
        world_hold(&b->w, i % RANKS, i, &all[i], i % WORLD_REGIONS, i,
                   i < 3 ? LAYOUT_MIXED : LAYOUT_ROWS);
    world_seal(&b->w, NULL);
    landing_init(&b->l, dtype);
    for (uint32_t i = 0; i < 6; i++) {
        block part = all[i];
        part.offset[0] = 1;
        part.extent[0] -= 2;
        part.offset[1] = i;
        part.extent[1] -= i;
        landing_add(&b->l, &b->w, i, &part, i % 3 != 2);
    }
}

/* A run of so many words of each rank, and a small tensor that is cut in that dimension. */
static void make_long(bench *b, uint64_t words, uint32_t dim, fanin_dtype dtype)
{
    const uint64_t shapes[2][2] = {{2, words}, {128, 128}};
    *b = (bench){0};
    world_init(&b->w, 2, 5);
    world_key(&b->w, FANIN_DTYPE_I64, 2, shapes[0]);
    world_key(&b->w, FANIN_DTYPE_F32, 2, shapes[1]);
    for (uint32_t i = 0; i < 2; i++) {
        block row = block_chunk(2, shapes[0], 0, 2, i);
        block half = block_chunk(2, shapes[1], dim, 2, i);
        world_hold(&b->w, i, 0, &row, 0, 0, LAYOUT_PACKED);
        world_hold(&b->w, i, 1, &half, 0, 0, LAYOUT_PACKED);
    }
    world_seal(&b->w, NULL);
    landing_whole(&b->l, &b->w, dtype);
}

/* ------------------------------------------------------------------ exporter */

static void copy_now(bench *b, int device, void *to, const void *from, size_t bytes)
{
    gpu_stream *stream;
    assert_works(
        device_memory_stream(b->client->devices->memory, device, &stream, ERROR));
    assert_works(gpu_copy(stream, to, from, bytes, ERROR));
    assert_works(gpu_stream_wait(stream, UINT64_MAX, ERROR));
}

/* Every region twice: the second arena holds the bytes, the first one nothing of use. */
static void export_region(bench *b, uint32_t rank, uint32_t k)
{
    const world_rank *r = &b->w.ranks[rank];
    uint32_t region = k % WORLD_REGIONS, at = rank * 2 * WORLD_REGIONS + k;
    gpu *g = b->client->devices->g;
    ipc_key *key = &b->keys[at];
    int device = (int)(rank % 2);
    size_t length = r->used[region] + 64;
    gpu_range range;
    gpu_device info;
    assert_works(gpu_alloc(g, device, length, &b->exported[at], ERROR));
    if (k >= WORLD_REGIONS)
        copy_now(b, device, (uint8_t *)b->exported[at] + 64, r->memory[region],
                 r->used[region]);
    *key = (ipc_key){.offset = 64, .length = length};
    assert_works(gpu_range_of(g, b->exported[at], &range, ERROR));
    assert_works(gpu_export(g, &range, key->handle, ERROR));
    assert_works(gpu_device_get(g, device, &info, ERROR));
    memcpy(key->uuid, info.uuid, sizeof key->uuid);
}

static void make_shard(bench *b, uint32_t rank)
{
    ipc_regions *s = &b->shards[rank];
    b->regions[rank] =
        (region_table){.entries = b->entries[rank], .count = 2 * WORLD_REGIONS};
    for (uint32_t k = 0; k < 2 * WORLD_REGIONS; k++)
        b->entries[rank][k] =
            (region_entry){.id = k,
                           .length = b->w.ranks[rank].used[k % WORLD_REGIONS],
                           .memory = FANIN_MEMORY_CUDA};
    *s = (ipc_regions){.regions = &b->regions[rank],
                       .keys = &b->keys[rank * 2 * WORLD_REGIONS]};
}

static void map_for(bench *b, uint32_t rank, int device)
{
    static const uint8_t life[16] = {1};
    ipc_regions *s = &b->shards[rank];
    s->views = realloc(s->views, (s->n_views + 1) * sizeof *s->views);
    ipc_view *v = &s->views[s->n_views++];
    *v = (ipc_view){.device = device};
    v->mappings = calloc(2 * WORLD_REGIONS, sizeof *v->mappings);
    for (uint32_t k = 0; k < 2 * WORLD_REGIONS; k++)
        assert_works(ipc_map_take(b->client->devices->map, device, life, &s->keys[k],
                                  &v->mappings[k], ERROR));
    assert_works(ipc_map_open(b->client->devices->map, NULL, ERROR));
}

static void forget_copies(bench *b)
{
    for (size_t i = 0; i < b->plan.n_sources; i++)
        ipc_reader.forget(b->copies[i]);
}

/* No kernel reads beyond what a region is held against. */
static void check_reach(const source_copies *c)
{
    for (size_t d = 0; d < c->n_devices; d++) {
        const copy_list *list = &c->devices[d].list;
        for (uint64_t i = 0; i < list->n; i++) {
            const copy_entry *e = &list->entries[i];
            uint64_t last = e->from + (e->runs - 1) * (uint64_t)e->from_step;
            uint64_t end = (e->from_step > 0 ? last : e->from) + e->run;
            assert_true(end <= c->regions[e->base].reach);
        }
    }
}

static void list_copies(bench *b)
{
    const path_plan *p = &b->plan;
    const copies_target target = {
        .base = b->base, .ranges = b->ranges, .n_ranges = b->n_ranges};
    forget_copies(b);
    for (size_t i = 0; i < p->n_sources; i++) {
        plan_spans *spans;
        source_copies *copies;
        assert_works(plan_spans_build(p->plan, b->w.keys, p->sources, i, &b->regions[i],
                                      ipc_reader.span_rule, NULL, &spans, ERROR));
        assert_works(source_copies_build(spans, b->regions[i].count, &target, NULL,
                                         &copies, ERROR));
        check_reach(copies);
        b->copies[i] = copies;
        plan_spans_free(&spans);
    }
}

/* The world is sealed, the landing wanted. */
static void open_bench(bench *b)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    assert_works(fanin_client_create(&config, &b->client, ERROR));
    if (!client_gpu(b->client))
        fail_msg("%s", b->client->devices->missing);
    b->client->devices->map = ipc_map_create(b->client->devices->g);
    b->client->devices->memory = device_memory_create(b->client->devices->g);
    for (uint32_t i = 0; i < b->w.n_ranks; i++) {
        for (uint32_t k = 0; k < 2 * WORLD_REGIONS; k++)
            export_region(b, i, k);
        make_shard(b, i);
        map_for(b, i, 0);
        map_for(b, i, 1);
        b->sources[i] = (device_source){&b->shards[i], WORLD_REGIONS};
        b->readers[i] = &ipc_reader;
    }
    path_plan *c = &b->plan;
    c->sources = b->w.sources;
    c->n_sources = b->w.n_sources;
    assert_works(world_plan(&b->w, &b->l, &c->plan, ERROR));
    c->reader_of = b->readers;
}

static void close_bench(bench *b)
{
    fake_cuda_counts left;
    forget_copies(b);
    plan_free(&b->plan.plan);
    device_plan_free(&b->tables);
    for (uint32_t i = 0; i < b->w.n_ranks; i++) {
        for (size_t v = 0; v < b->shards[i].n_views; v++)
            ipc_view_drop(&b->shards[i].views[v], 2 * WORLD_REGIONS);
        free(b->shards[i].views);
    }
    ipc_map_sweep(b->client->devices->map);
    fake_cuda_count(&left);
    assert_int_equal(left.mappings, 0);
    for (uint32_t i = 0; i < KEYS; i++)
        gpu_free(b->client->devices->g, (int)(i / (2 * WORLD_REGIONS) % 2),
                 b->exported[i]);
    fanin_client_destroy(&b->client);
    landing_free(&b->l);
    world_free(&b->w);
}

static void build(bench *b, gather_set gather)
{
    device_plan_parts parts = {
        .plan = &b->plan, .copies = b->copies, .reader = &ipc_reader, .gather = gather};
    device_plan_free(&b->tables);
    list_copies(b);
    assert_works(device_plan_build(b->client->devices->g, &parts, &b->tables, ERROR));
    assert_true(device_plan_fits(b->tables, &parts));
}

static void landed(void *cookie, uint64_t to, uint64_t length)
{
    bench *b = cookie;
    assert_true(to <= b->l.size && length <= b->l.size - to);
    b->told += length;
}

static void read_all(bench *b)
{
    device_reader *r;
    const path_reading how = {.client = b->client,
                              .plan = &b->plan,
                              .base = b->base,
                              .landed = landed,
                              .cookie = b};
    b->told = 0;
    assert_works(device_reader_start(&how, b->tables, b->sources, &r, ERROR));
    for (bool done = false; !done;)
        assert_works(device_reader_step(r, deadline_in_ms(1000), &done, ERROR));
    assert_true(device_reader_destroy(&r));
}

/* ------------------------------------------------------------- destinations */

/* What is read once needs no memory of the device, unless it is much, as odd boxes are. */
static void check_table(const device_part *part, bool once)
{
    uint64_t n = part->table ? gpu_table_count(part->table) : part->n_entries;
    assert_true(n > 0);
    assert_int_equal(part->table == NULL, once && n <= AREA_ENTRIES);
}

/* All of it on one device. */
static void land_on_device(bench *b, int device, bool once)
{
    void *memory;
    b->plan.once = once;
    assert_works(
        gpu_alloc(b->client->devices->g, device, b->l.size + 1, &memory, ERROR));
    b->base = memory;
    b->ranges[0] = (memory_range){memory, b->l.size, device};
    b->n_ranges = 1;
    landing_clear(&b->l);
    copy_now(b, device, memory, b->l.bytes, b->l.size);
    build(b, by_none);
    check_table(&b->tables->parts[0], once);
    read_all(b);
    copy_now(b, device, b->l.bytes, memory, b->l.size);
    landing_compare(&b->w, &b->l);
    assert_int_equal(b->told, 0);
    gpu_free(b->client->devices->g, device, memory);
}

/* No byte of a tensor is what untouched ones are, unless it was converted. */
static uint64_t count_touched(const landing *l)
{
    uint64_t n = 0;
    landing mark = {.bytes = malloc(l->size + 1), .size = l->size};
    landing_clear(&mark);
    for (uint64_t i = 0; i < l->size; i++)
        n += l->bytes[i] != mark.bytes[i];
    free(mark.bytes);
    return n;
}

static void land_on_host(bench *b, gather_set gather)
{
    b->base = b->l.bytes;
    b->ranges[0] = (memory_range){b->l.bytes, b->l.size, -1};
    b->n_ranges = 1;
    landing_clear(&b->l);
    build(b, gather);
    assert_false(b->tables->contiguous);
    read_all(b);
    landing_compare(&b->w, &b->l);
    if (b->l.dtype == 0)
        assert_int_equal(b->told, count_touched(&b->l));
}

/* --------------------------------------------------------------------- tests */

TEST(odd_boxes_land_anywhere)
{
    for (int convert = 0; convert < 2; convert++) {
        bench b;
        make_odd(&b, convert ? FANIN_DTYPE_BF16 : 0);
        open_bench(&b);
        land_on_device(&b, 1, false);
        land_on_device(&b, 1, true);
        land_on_host(&b, by_1);
        land_on_host(&b, by_both);
        close_bench(&b);
    }
}

/* Kernels of other processes do not hold up copy engines. */
TEST(long_runs_that_are_read_once_are_copied_by_engines)
{
    static const struct {
        uint64_t words;
        uint32_t dim;
        fanin_dtype dtype;
        bool kernel;
    } ways[] = {{2200000, 0, 0, false},
                {2200000, 0, FANIN_DTYPE_BF16, true},
                {2200000, 1, 0, true},
                {1000000, 0, 0, true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        bench b;
        fake_cuda_counts before, after;
        make_long(&b, ways[i].words, ways[i].dim, ways[i].dtype);
        open_bench(&b);
        fake_cuda_count(&before);
        land_on_device(&b, 0, true);
        fake_cuda_count(&after);
        assert_int_equal(after.kernels - before.kernels, ways[i].kernel);
        close_bench(&b);
    }
}

static int set_up(void **state)
{
    return setenv("FAKE_CUDA_OWN_IPC", "1", 1);
}

TESTS_BETWEEN(set_up, NULL)
