/* SPDX-License-Identifier: Apache-2.0 */
/* Reading by cuda_ipc: what another process exports lands on devices and in host memory. That
   process is this program once more, which makes the same world again. */
#include "device/devices.h"
#include "pull/choose_path.h"
#include "ipc/ipc.h"
#include "fake_cuda.h"
#include "plan_world.h"
#include "testing.h"

#include <fcntl.h>
#include <pthread.h>

#define KEYS (WORLD_RANKS * WORLD_REGIONS * 2)
#define SHAPE(...) ((const uint64_t[]){__VA_ARGS__})

/* Who gathers for host memory. */
static const gather_set by_none = {.n = 0}, by_0 = {{0}, 1}, by_1 = {{1}, 1},
                        by_both = {{0, 1}, 2};

/* ------------------------------------------------------------------- fixture */

typedef struct bench {
    world w;
    landing l;
    const char *kind; /* of the world, for the exporter: and its parameters */
    uint32_t ranks, dim;
    pid_t child;
    int until;
    fanin_client *client;
    path_plan plan;
    void *copies[WORLD_RANKS];
    const path_reader *readers[WORLD_RANKS];
    device_plan *tables;
    ipc_regions shards[WORLD_RANKS];
    region_table regions[WORLD_RANKS];
    region_entry entries[WORLD_RANKS][2 * WORLD_REGIONS];
    ipc_key keys[KEYS];
    device_source sources[WORLD_RANKS];
    memory_range ranges[2];
    size_t n_ranges;
    uint8_t *base;
    uint64_t told; /* bytes that landed() was told of */
} bench;

/* -------------------------------------------------------------------- worlds */

/* Tensors of several kinds, cut into rows or columns by all ranks. */
static void make_chunks(bench *b, uint32_t ranks, uint32_t dim, fanin_dtype dtype)
{
    *b = (bench){.kind = "chunks", .ranks = ranks, .dim = dim};
    world_init(&b->w, ranks, 7);
    world_key(&b->w, FANIN_DTYPE_F32, 2, SHAPE(640, 1024));
    world_key(&b->w, FANIN_DTYPE_F32, 2, SHAPE(96, 52));
    world_key(&b->w, FANIN_DTYPE_BF16, 2, SHAPE(1536, 4096));
    world_key(&b->w, FANIN_DTYPE_BF16, 2, SHAPE(512, 512));
    world_key(&b->w, FANIN_DTYPE_U8, 2, SHAPE(1023, 517));
    for (uint32_t i = 0; i < ranks; i++)
        world_hold_chunks(&b->w, i, dim, ranks, i);
    world_seal(&b->w, NULL);
    landing_whole(&b->l, &b->w, dtype);
}

/* As in a file: one tensor behind the other. */
static void close_gaps(landing *l, const world *w)
{
    l->size = 0;
    for (uint32_t i = 0; i < w->n_keys; i++) {
        const key_entry *e = &w->entries[i];
        bool halves = l->dtype && e->dtype == FANIN_DTYPE_F32;
        l->to_of_key[i] = l->size;
        l->size += e->bytes / (halves ? 2 : 1);
    }
}

/* Boxes with strides of their own, to parts that are wanted with strides. */
static void make_odd(bench *b, fanin_dtype dtype)
{
    *b = (bench){.kind = "odd", .ranks = 3};
    world_init(&b->w, 3, 11);
    block all[6] = {{0}};
    for (uint32_t i = 0; i < 6; i++) {
        all[i] = (block){.n_dims = 3, .extent = {11 + i, 17, 33 + 2 * i}};
        world_key(&b->w, i % 2 ? FANIN_DTYPE_F32 : FANIN_DTYPE_I16, 3, all[i].extent);
    }
    for (uint32_t i = 0; i < 6; i++)
        world_hold(&b->w, i % 3, i, &all[i], i % WORLD_REGIONS, i,
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

/* ------------------------------------------------------------------ exporter */

/* Every region twice: the second arena holds the bytes, the first one nothing of use. */
static void export_region(gpu *g, const world_rank *r, uint32_t rank, int region,
                          bool filled, ipc_key *out)
{
    void *memory;
    gpu_range range;
    gpu_stream *stream;
    fanin_error error = FANIN_ERROR_INIT;
    int device = (int)(rank % 2);
    size_t length = r->used[region] + 64;
    if (gpu_alloc(g, device, length, &memory, &error) ||
        gpu_stream_create(g, device, &stream, &error))
        _exit(2);
    if (filled && (gpu_copy(stream, (uint8_t *)memory + 64, r->memory[region],
                            r->used[region], &error) ||
                   gpu_stream_wait(stream, UINT64_MAX, &error)))
        _exit(3);
    gpu_device info;
    *out = (ipc_key){.offset = 64, .length = length};
    if (gpu_range_of(g, memory, &range, &error) ||
        gpu_export(g, &range, out->handle, &error) ||
        gpu_device_get(g, device, &info, &error))
        _exit(4);
    memcpy(out->uuid, info.uuid, sizeof out->uuid);
    gpu_stream_destroy(&stream);
}

/* Arguments: kind, ranks, dimension, where the keys go, whose end ends it. */
static int be_exporter(char **arguments)
{
    gpu *g;
    static bench b;
    static ipc_key keys[KEYS];
    fanin_error error = FANIN_ERROR_INIT;
    logger nobody = {0};
    const world *w = &b.w;
    int out = atoi(arguments[3]), until = atoi(arguments[4]);
    if (strcmp(arguments[0], "chunks") == 0)
        make_chunks(&b, (uint32_t)atoi(arguments[1]), (uint32_t)atoi(arguments[2]), 0);
    else
        make_odd(&b, 0);
    if (gpu_load(&nobody, &g, &error))
        return 1;
    size_t n = 0;
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        for (int k = 0; k < 2 * WORLD_REGIONS; k++)
            export_region(g, &w->ranks[i], i, k % WORLD_REGIONS, k >= WORLD_REGIONS,
                          &keys[n++]);
    }
    if (write(out, keys, n * sizeof *keys) != (ssize_t)(n * sizeof *keys))
        return 5;
    char end;
    (void)!read(until, &end, 1);
    return 0;
}

static void start_exporter(bench *b)
{
    int keys[2], until[2];
    char ranks[12], dim[12], out[12], end[12];
    assert_int_equal(pipe(keys), 0);
    assert_int_equal(pipe(until), 0);
    assert_int_equal(fcntl(until[1], F_SETFD, FD_CLOEXEC), 0);
    snprintf(ranks, sizeof(ranks), "%u", b->ranks);
    snprintf(dim, sizeof dim, "%u", b->dim);
    snprintf(out, sizeof out, "%d", keys[1]);
    snprintf(end, sizeof end, "%d", until[0]);
    b->child = fork();
    assert_true(b->child >= 0);
    if (b->child == 0) {
        execl("/proc/self/exe", "export", b->kind, ranks, dim, out, end, (char *)NULL);
        _exit(127);
    }
    close(keys[1]);
    close(until[0]);
    b->until = until[1];
    size_t size = (size_t)b->w.n_ranks * 2 * WORLD_REGIONS * sizeof(ipc_key), got = 0;
    while (got < size) {
        ssize_t n = read(keys[0], (char *)b->keys + got, size - got);
        if (n <= 0)
            fail_msg("the exporter failed");
        got += (size_t)n;
    }
    close(keys[0]);
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
    start_exporter(b);
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    assert_works(fanin_client_create(&config, &b->client, ERROR));
    if (!client_gpu(b->client))
        fail_msg("%s", b->client->devices->missing);
    b->client->devices->map = ipc_map_create(b->client->devices->g);
    b->client->devices->memory = device_memory_create(b->client->devices->g);
    for (uint32_t i = 0; i < b->w.n_ranks; i++) {
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
    fanin_client_destroy(&b->client);
    close(b->until);
    assert_int_equal(tests_await(b->child), 0);
    landing_free(&b->l);
    world_free(&b->w);
}

static void build(bench *b, gather_set gather)
{
    static const int owners[WORLD_RANKS] = {0, 1, 0, 1}; /* of four ranks at most */
    device_plan_parts parts = {.plan = &b->plan,
                               .copies = b->copies,
                               .reader = &ipc_reader,
                               .gather = gather,
                               .owners = owners};
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

static path_reading reading_of(bench *b, bool pinned, const fanin_stream *after)
{
    return (path_reading){.client = b->client,
                          .plan = &b->plan,
                          .base = b->base,
                          .pinned = pinned,
                          .landed = landed,
                          .cookie = b,
                          .after = after};
}

static void read_all(bench *b, bool pinned)
{
    device_reader *r;
    path_reading how = reading_of(b, pinned, NULL);
    b->told = 0;
    assert_works(device_reader_start(&how, b->tables, b->sources, &r, ERROR));
    for (bool done = false; !done;)
        assert_works(device_reader_step(r, deadline_in_ms(1000), &done, ERROR));
    assert_true(device_reader_destroy(&r));
}

/* ------------------------------------------------------------- destinations */

static void copy_now(bench *b, int device, void *to, const void *from, size_t bytes)
{
    gpu_stream *stream;
    assert_works(
        device_memory_stream(b->client->devices->memory, device, &stream, ERROR));
    assert_works(gpu_copy(stream, to, from, bytes, ERROR));
    assert_works(gpu_stream_wait(stream, UINT64_MAX, ERROR));
}

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
    read_all(b, false);
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

static void land_on_host(bench *b, gather_set gather, bool contiguous)
{
    b->base = b->l.bytes;
    b->ranges[0] = (memory_range){b->l.bytes, b->l.size, -1};
    b->n_ranges = 1;
    landing_clear(&b->l);
    build(b, gather);
    assert_int_equal(b->tables->contiguous, contiguous);
    read_all(b, false);
    landing_compare(&b->w, &b->l);
    if (b->l.dtype == 0)
        assert_int_equal(b->told, count_touched(&b->l));
}

/* Straight by the copy engines. */
static void land_on_pinned(bench *b, gather_set gather)
{
    void *memory;
    uint8_t *bytes = b->l.bytes;
    assert_works(gpu_host_alloc(b->client->devices->g, b->l.size + 1, &memory, ERROR));
    b->base = memory;
    b->ranges[0] = (memory_range){memory, b->l.size, -1};
    b->n_ranges = 1;
    build(b, gather);
    assert_true(b->tables->contiguous);
    b->l.bytes = memory;
    landing_clear(&b->l);
    read_all(b, true);
    landing_compare(&b->w, &b->l);
    b->l.bytes = bytes;
    assert_int_equal(b->told, b->l.size);
    gpu_host_free(b->client->devices->g, memory);
}

/* --------------------------------------------------------------------- tests */

TEST(chunks_land_on_devices)
{
    for (uint32_t dim = 0; dim < 2; dim++) {
        bench b;
        make_chunks(&b, 4, dim, dim ? FANIN_DTYPE_F16 : 0);
        open_bench(&b);
        land_on_device(&b, 0, false);
        land_on_device(&b, 1, true);
        close_bench(&b);
    }
}

TEST(chunks_land_in_host_memory)
{
    for (uint32_t dim = 0; dim < 2; dim++) {
        bench b;
        make_chunks(&b, 3, dim, dim ? FANIN_DTYPE_BF16 : 0);
        open_bench(&b);
        land_on_host(&b, dim ? by_1 : by_0, false);
        land_on_host(&b, by_both, false);
        close_bench(&b);
    }
}

TEST(files_land_by_whole_chunks)
{
    for (uint32_t i = 0; i < 2; i++) {
        bench b;
        make_chunks(&b, 4, i, i ? FANIN_DTYPE_BF16 : 0);
        close_gaps(&b.l, &b.w);
        open_bench(&b);
        land_on_host(&b, by_0, true);
        land_on_pinned(&b, by_1);
        assert_true(b.tables->n_chunks > GATHER_LANES);
        land_on_host(&b, by_both, true);
        land_on_pinned(&b, by_both);
        close_bench(&b);
    }
}

TEST(odd_boxes_land_anywhere)
{
    for (int convert = 0; convert < 2; convert++) {
        bench b;
        make_odd(&b, convert ? FANIN_DTYPE_BF16 : 0);
        open_bench(&b);
        land_on_device(&b, 1, false);
        land_on_device(&b, 1, true);
        land_on_host(&b, by_1, false);
        land_on_host(&b, by_both, false);
        close_bench(&b);
    }
}

/* One half of the memory is on a device. */
TEST(both_kinds_land_at_once)
{
    bench b;
    void *memory;
    make_chunks(&b, 2, 0, 0);
    open_bench(&b);
    uint64_t half = b.l.to_of_key[2], rest = b.l.size - half;
    assert_works(gpu_alloc(b.client->devices->g, 0, rest, &memory, ERROR));
    /* As addresses, wherever the two lie. */
    plan_free(&b.plan.plan);
    for (uint32_t i = 0; i < b.w.n_keys; i++)
        b.l.to_of_key[i] +=
            i < 2 ? (uint64_t)(uintptr_t)b.l.bytes : (uint64_t)(uintptr_t)memory - half;
    assert_works(world_plan(&b.w, &b.l, &b.plan.plan, ERROR));
    for (uint32_t i = 0; i < b.w.n_keys; i++)
        b.l.to_of_key[i] -=
            i < 2 ? (uint64_t)(uintptr_t)b.l.bytes : (uint64_t)(uintptr_t)memory - half;
    memory_range host = {b.l.bytes, half, -1}, device = {memory, rest, 0};
    bool first = host.base < device.base;
    b.ranges[0] = first ? host : device;
    b.ranges[1] = first ? device : host;
    b.n_ranges = 2;
    landing_clear(&b.l);
    copy_now(&b, 0, memory, b.l.bytes + half, rest);
    build(&b, by_1);
    path_reading how = reading_of(&b, false, NULL);
    how.landed = NULL;
    device_reader *r;
    assert_works(device_reader_start(&how, b.tables, b.sources, &r, ERROR));
    for (bool done = false; !done;)
        assert_works(device_reader_step(r, deadline_in_ms(1000), &done, ERROR));
    assert_true(device_reader_destroy(&r));
    copy_now(&b, 0, b.l.bytes + half, memory, rest);
    landing_compare(&b.w, &b.l);
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

/* A device destination, with the plan made and nothing read. */
static void *prepare_device(bench *b)
{
    void *memory;
    make_chunks(b, 2, 0, 0);
    open_bench(b);
    assert_works(gpu_alloc(b->client->devices->g, 0, b->l.size, &memory, ERROR));
    b->base = memory;
    b->ranges[0] = (memory_range){memory, b->l.size, 0};
    b->n_ranges = 1;
    build(b, by_none);
    return memory;
}

static void *release_soon(void *argument)
{
    (void)argument;
    fake_cuda_release(0);
    return NULL;
}

TEST(a_kernel_under_way_is_waited_for)
{
    bench b;
    pthread_t thread;
    void *memory = prepare_device(&b);
    path_reading how = reading_of(&b, false, NULL);
    device_reader *r;
    bool done = true;
    fake_cuda_hold_kernel(0, 1);
    assert_works(device_reader_start(&how, b.tables, b.sources, &r, ERROR));
    assert_true(fake_cuda_wait_kernel_held(0));
    assert_works(device_reader_step(r, deadline_in_ms(1), &done, ERROR));
    assert_false(done);
    /* The pull gives up; the kernel goes on until it is done. */
    assert_int_equal(pthread_create(&thread, NULL, release_soon, NULL), 0);
    assert_true(device_reader_destroy(&r));
    pthread_join(thread, NULL);
    copy_now(&b, 0, b.l.bytes, memory, b.l.size);
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

TEST(the_callers_stream_comes_first)
{
    bench b;
    void *memory = prepare_device(&b);
    fake_cuda_counts before, after;
    fanin_stream callers = {.handle = (void *)2, .device = 0};
    path_reading how = reading_of(&b, false, &callers);
    device_reader *r;
    bool done = true;
    fake_cuda_hold(0);
    fake_cuda_count(&before);
    assert_works(device_reader_start(&how, b.tables, b.sources, &r, ERROR));
    assert_works(device_reader_step(r, deadline_in_ms(2), &done, ERROR));
    assert_false(done);
    fake_cuda_count(&after);
    assert_int_equal(after.kernels, before.kernels);
    /* Given up, nothing of it is left on a stream that could write. */
    assert_true(device_reader_destroy(&r));
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    fake_cuda_count(&after);
    assert_int_equal(after.kernels, before.kernels);
    assert_works(device_reader_start(&how, b.tables, b.sources, &r, ERROR));
    for (done = false; !done;)
        assert_works(device_reader_step(r, deadline_in_ms(1000), &done, ERROR));
    assert_true(device_reader_destroy(&r));
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

TEST(a_failed_device_is_an_error)
{
    bench b;
    fanin_error error = FANIN_ERROR_INIT;
    void *memory = prepare_device(&b);
    path_reading how = reading_of(&b, false, NULL);
    device_reader *r;
    bool done = false;
    fanin_status status;
    fake_cuda_hold_kernel(0, 1);
    assert_ok(device_reader_start(&how, b.tables, b.sources, &r, &error), error);
    assert_true(fake_cuda_wait_kernel_held(0));
    fake_cuda_break(0);
    fake_cuda_release(0);
    do
        status = device_reader_step(r, deadline_in_ms(1000), &done, &error);
    while (status == FANIN_OK && !done);
    assert_int_equal(status, FANIN_ERR_TRANSPORT);
    assert_true(device_reader_destroy(&r));
    fake_cuda_repair(0);
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

TEST(arenas_outside_of_the_table_are_refused)
{
    bench b;
    fanin_error error = FANIN_ERROR_INIT;
    void *memory = prepare_device(&b);
    path_reading how = reading_of(&b, false, NULL);
    device_reader *r;
    b.sources[1].first_region = WORLD_REGIONS + 1;
    assert_int_equal(device_reader_start(&how, b.tables, b.sources, &r, &error),
                     FANIN_ERR_PROTOCOL);
    assert_true(device_reader_destroy(&r));
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

/* A region table that was fetched anew is not the one that the copies were made from. */
TEST(regions_that_have_become_shorter_are_refused)
{
    bench b;
    fake_cuda_counts before, after;
    fanin_error error = FANIN_ERROR_INIT;
    void *memory = prepare_device(&b);
    path_reading how = reading_of(&b, false, NULL);
    device_reader *r;
    fake_cuda_count(&before);
    b.entries[1][0].length--;
    b.entries[1][WORLD_REGIONS].length--;
    assert_int_equal(device_reader_start(&how, b.tables, b.sources, &r, &error),
                     FANIN_ERR_PROTOCOL);
    assert_non_null(strstr(error.message, "rank 1's region"));
    assert_true(device_reader_destroy(&r));
    fake_cuda_count(&after);
    assert_int_equal(after.kernels, before.kernels);
    /* Where it is not read, it may be as short as it likes. */
    b.entries[1][WORLD_REGIONS].length++;
    b.entries[1][1].length = 0;
    read_all(&b, false);
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

TEST(mappings_are_shared_and_swept)
{
    bench b;
    void *memory = prepare_device(&b);
    ipc_map *map = b.client->devices->map;
    static const uint8_t life[16] = {1}, other[16] = {2};
    ipc_mapping *again = NULL, *later = NULL;
    fake_cuda_counts before, after;
    fake_cuda_count(&before);
    assert_works(ipc_map_take(map, 0, life, &b.keys[0], &again, ERROR));
    assert_works(ipc_map_open(map, NULL, ERROR));
    assert_ptr_equal(again, b.shards[0].views[0].mappings[0]);
    fake_cuda_count(&after);
    assert_int_equal(after.opens, before.opens);
    /* Another life of the process: whatever the handle says, it is other memory. */
    assert_works(ipc_map_take(map, 0, other, &b.keys[0], &later, ERROR));
    assert_works(ipc_map_open(map, NULL, ERROR));
    ipc_mapping_release(&later);
    ipc_mapping_release(&again);
    fake_cuda_count(&after);
    assert_int_equal(after.mappings, before.mappings + 1);
    ipc_map_sweep(map);
    fake_cuda_count(&after);
    assert_int_equal(after.mappings, before.mappings);
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

TEST(idle_publications_are_unmapped)
{
    bench b;
    void *memory = prepare_device(&b);
    fake_cuda_counts before, after;
    shard_table tables[WORLD_RANKS] = {{0}};
    peer peers[WORLD_RANKS] = {{0}};
    publication p = {.shards = tables, .n_peers = b.w.n_ranks, .used_ns = 100};
    b.client->publications = &p;
    b.client->peers = peers;
    b.client->n_peers = b.w.n_ranks;
    assert_works(path_states_open(b.client, &p, ERROR));
    for (uint32_t i = 0; i < b.w.n_ranks; i++) {
        path_state *s = path_state_of(b.client, &p, i);
        s->path = &ipc_reader;
        ipc_regions *kept = malloc(sizeof *kept);
        assert_non_null(kept);
        *kept = b.shards[i];
        kept->hold.drop = ipc_regions_drop;
        kept->keys = NULL; /* the bench's, not the state's */
        s->hold = &kept->hold;
        b.shards[i].n_views = 0;
        b.shards[i].views = NULL;
    }
    fake_cuda_count(&before);
    assert_true(before.mappings > 0);
    path_unmap_idle(b.client, 100);
    fake_cuda_count(&after);
    assert_int_equal(after.mappings, before.mappings);
    assert_ptr_equal(path_taken(&p, 0)->path, &ipc_reader);
    path_unmap_idle(b.client, 101);
    fake_cuda_count(&after);
    assert_int_equal(after.mappings, 0);
    assert_null(path_taken(&p, 0)->path); /* decided, mapped anew */
    path_states_free(b.client, &p);
    path_states_close(b.client);
    b.client->publications = NULL;
    b.client->peers = NULL;
    b.client->n_peers = 0;
    gpu_free(b.client->devices->g, 0, memory);
    close_bench(&b);
}

/* ---------------------------------------------------------------------- main */

int main(int argc, char **argv)
{
    setenv("FANIN_CUDA_LIBRARY", getenv("FANIN_TEST_CUDA_LIBRARY"), 1);
    if (argc == 6)
        return be_exporter(argv + 1);
    return tests_run(NULL);
}
