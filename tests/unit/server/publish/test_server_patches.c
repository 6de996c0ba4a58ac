/* SPDX-License-Identifier: Apache-2.0 */
/* Patches between snapshots: what a rank makes, keeps, tells and serves of them. What a reader gets
   of them is compared with the whole step, byte for byte. Built with FANIN_TEST_HOOKS. With
   ON_DEVICE the trainer's memory is a device's, of the stand-in driver: memory that the CPU can
   touch as well. */
#include "call.h"
#include "core/rules.h"
#include "server_peer.h"
#include "testing.h"

#include <stdatomic.h>

#ifdef ON_DEVICE
#include "gpu.h"
#include "server_device.h"
#include <cuda.h>
#endif

#define BYTES 300001 /* more than two segments */
#define ROWS 901     /* the copies' buffer holds an odd number of odd rows */
#define COLUMNS 303
#define PITCH 310
#define HEIGHT 211
#define WIDTH 307
#define BOXES 5
#define COPY_MOST (1 << 20)

/* The trainer's: of odd lengths, of rows with something between, transposed. */
static struct shards {
    uint8_t bytes[BYTES], rows[ROWS * PITCH], one[1];
    float cast[HEIGHT * WIDTH], kept[5];
} * shards;
/* As they are published, F32 as BF16. */
static const uint64_t sizes[BOXES] = {BYTES, ROWS *COLUMNS, 2 * HEIGHT *WIDTH, 20, 1};

static uint64_t seed;
static atomic_bool lacking; /* memory for patches */
static unsigned rules_off;

struct patch_maker *__real_patch_maker_open(const uint8_t *before, uint64_t length,
                                            uint64_t stretches, uint64_t most);
struct patch_maker *__wrap_patch_maker_open(const uint8_t *before, uint64_t length,
                                            uint64_t stretches, uint64_t most);
struct patch_maker *__wrap_patch_maker_open(const uint8_t *before, uint64_t length,
                                            uint64_t stretches, uint64_t most)
{
    return atomic_load(&lacking)
               ? NULL
               : __real_patch_maker_open(before, length, stretches, most);
}

#ifdef ON_DEVICE
static void *trainers_memory(size_t bytes)
{
    return memset(fake_cuda_alloc(0, bytes, FAKE_CUDA_MANAGED), 0, bytes);
}

static void free_trainers(void *memory)
{
    server_tear_down(NULL);
    fake_cuda_free(memory);
}

/* The first kernel of the patch, behind the copies, is refused. */
static void lack_memory(void)
{
    fake_cuda_fail("cuLaunchKernel", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 1, 1);
}
#else
static void *trainers_memory(size_t bytes)
{
    return calloc(1, bytes);
}

static void free_trainers(void *memory)
{
    free(memory);
}

static void lack_memory(void)
{
    atomic_store(&lacking, true);
}
#endif

static uint32_t draw(uint32_t below)
{
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(seed >> 33) % below;
}

/* ------------------------------------------------------------------ trainer */

static fanin_tensor tensor(const char *name, fanin_dtype dtype, uint64_t rows,
                           uint64_t columns, fanin_box *box, void *at)
{
    *box = (fanin_box){.extent = {rows, columns}, .address = at};
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = name,
                          .dtype = dtype,
                          .n_dims = 2,
                          .shape = {rows, columns},
                          .boxes = box,
                          .n_boxes = 1};
}

/* In the order of their names, which is that of the boxes. */
static void put_shards(fanin_server *s)
{
    fanin_box boxes[BOXES];
    fanin_tensor t[BOXES] = {
        tensor("a", FANIN_DTYPE_U8, 1, BYTES, &boxes[0], shards->bytes),
        tensor("b", FANIN_DTYPE_F8_E4M3, ROWS, COLUMNS, &boxes[1], shards->rows),
        tensor("c", FANIN_DTYPE_F32, HEIGHT, WIDTH, &boxes[2], shards->cast),
        tensor("d", FANIN_DTYPE_F32, 1, 5, &boxes[3], shards->kept),
        tensor("e", FANIN_DTYPE_U8, 1, 1, &boxes[4], shards->one),
    };
    boxes[1].stride[0] = PITCH;
    boxes[1].stride[1] = 1;
    boxes[2].stride[0] = sizeof(float);
    boxes[2].stride[1] = HEIGHT * sizeof(float);
    t[3].flags = FANIN_TENSOR_KEEP;
    assert_works(fanin_server_put(s, RUN, t, BOXES, true, ERROR));
}

static fanin_status commit_with(fanin_server *s, uint64_t step, uint32_t deltas,
                                fanin_error *error)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    o.cast = FANIN_DTYPE_BF16;
    o.deltas = deltas;
    return fanin_server_commit(s, RUN, step, &o, error);
}

/* About one of @p one_of bytes of all shards becomes another. */
static void change(uint32_t one_of)
{
    uint8_t *all = (uint8_t *)shards;
    for (size_t i = 0; i < sizeof *shards; i++)
        if (draw(one_of) == 0)
            all[i] ^= (uint8_t)(1 + draw(255));
}

static void next(fanin_server *s, uint64_t step, uint32_t deltas)
{
    server_begin(s);
    change(500);
    assert_works(commit_with(s, step, deltas, ERROR));
}

static fanin_server *start(void)
{
    fanin_server *s = server_start_lease(0);
    atomic_store(&lacking, false);
    atomic_store(&server_rules_off, rules_off);
    atomic_store(&server_on_fill, NULL);
    put_shards(s);
    change(2);
    assert_works(commit_with(s, 1, 4, ERROR));
    return s;
}

/* ------------------------------------------------------------------- reader */

static bool ask(puller *r, patch_offers *offers)
{
    peer_request_patches(&r->control, WIRE_RULE_NEWEST, 0);
    return peer_patches(&r->control, offers);
}

static puller open(fanin_server *s, patch_offers *offers)
{
    puller r = puller_open(s);
    assert_true(ask(&r, offers));
    return r;
}

static void read_range(puller *r, uint64_t box, uint64_t from, uint64_t length,
                       void *to)
{
    read_entry e = {.box = box, .offset = from, .length = length};
    peer_read(&r->data, &r->grant, &e, 1, to, length);
}

/* A copy, as its region lies in memory. */
typedef struct copy {
    uint8_t bytes[COPY_MOST];
    uint64_t length;
} copy;

static copy held, whole;
static uint8_t directory[4096], changes[COPY_MOST];

/* Under the puller's lease. */
static void read_whole(puller *r, copy *out)
{
    key_table *keys;
    box_table *boxes;
    peer_catalog(&r->control, &r->grant, &keys, &boxes);
    assert_int_equal(box_table_count(boxes), BOXES);
    memset(out, 0, sizeof *out);
    for (uint64_t i = 0; i < BOXES; i++) {
        box_place place;
        box_table_get(boxes, i, NULL, NULL, &place);
        out->length = place.offset + sizes[i];
        read_range(r, i, 0, sizes[i], out->bytes + place.offset);
    }
    box_table_free(&boxes);
    key_table_free(&keys);
}

static void apply_segment(copy *to, uint64_t base, const uint8_t *at, uint64_t count)
{
    uint64_t left = to->length - base;
    assert_true(
        patch_segment_is_sound(at, count, left < PATCH_SEGMENT ? left : PATCH_SEGMENT));
    for (uint64_t i = 0; i < count; i++) {
        uint64_t place = base + 2 * (at[2 * i] + 256 * (uint64_t)at[2 * i + 1]);
        const uint8_t *word = at + 2 * (count + i);
        to->bytes[place] = word[0];
        if (place + 1 < to->length)
            to->bytes[place + 1] = word[1];
    }
}

/* Patch @p k of the lease's generation, in pieces. False: it is none, or not whole. */
static bool apply(puller *r, const patch_offers *offers, uint64_t k, copy *to)
{
    uint64_t first[64], bytes = offers->patches[k].bytes;
    uint64_t box = offers->first_box + PATCH_BOXES * k;
    assert_int_equal(offers->directory_bytes, patch_directory_bytes(to->length));
    read_range(r, box, 0, offers->directory_bytes, directory);
    for (uint64_t at = 0; at < bytes; at += 1000)
        read_range(r, box + 1, at, bytes - at < 1000 ? bytes - at : 1000, changes + at);
    if (!patch_directory_read(directory, to->length, bytes, first))
        return false;
    for (uint64_t i = 0; i < patch_segments(to->length); i++)
        apply_segment(to, i * PATCH_SEGMENT, changes + PATCH_CHANGE * first[i],
                      first[i + 1] - first[i]);
    return true;
}

/* Whether @p held, of generation @p base, becomes the newest step, byte for byte. */
static bool leads_from(puller *r, uint64_t base)
{
    patch_offers o;
    uint64_t k = 0;
    assert_true(ask(r, &o));
    bool same = puller_begin(r).epoch == o.generation;
    while (k < o.count && o.patches[k].from != base)
        k++;
    bool found = same && k < o.count;
    for (k = found ? k + 1 : 0; k > 0 && found; k--)
        found = apply(r, &o, k - 1, &held);
    if (found)
        read_whole(r, &whole);
    puller_end(r);
    return found && memcmp(&held, &whole, sizeof held) == 0;
}

/* ------------------------------------------------------------------- chains */

SERVER_TEST(a_chain_leads_to_the_newest_step)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    assert_int_equal(o.count, 0);
    assert_int_equal(o.first_box, BOXES);
    uint64_t base = puller_begin(&r).epoch;
    assert_int_equal(o.generation, base);
    read_whole(&r, &held);
    puller_end(&r);
    for (uint64_t step = 2; step < 6; step++)
        next(s, step, 4);
    assert_true(leads_from(&r, base));
    next(s, 6, 4); /* the first makes room */
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 4);
    for (uint32_t k = 0; k < 4; k++)
        assert_true(o.patches[k].from > base);
    assert_false(leads_from(&r, base));
    next(s, 7, 2);
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 2);
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.patches_made, 6);
    assert_int_equal(stats.patches_lacking, 0);
    assert_true(stats.bytes_patches > 4 * o.directory_bytes);
    assert_true(stats.bytes_patches < stats.bytes_streamed);
}

/* More than one thread copies, and what is long is cut. */
SERVER_TEST(threads_find_all)
{
    const uint64_t size = 70 << 20;
    uint8_t *memory = trainers_memory(size), *before = malloc(size);
    fanin_server *s = server_start_lease(0);
    patch_offers o;
    uint64_t *first = calloc(patch_segments(size) + 1, sizeof *first);
    server_put(s, RUN, "a", memory, size);
    assert_works(commit_with(s, 1, 1, ERROR));
    puller r = open(s, &o);
    memcpy(before, memory, size);
    server_begin(s);
    for (uint32_t i = 0; i < 50000; i++)
        memory[draw((uint32_t)size)] ^= 1;
    assert_works(commit_with(s, 2, 1, ERROR));
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 1);
    puller_begin(&r);
    assert_true(o.patches[0].bytes < COPY_MOST);
    uint8_t *told = malloc(o.directory_bytes);
    read_range(&r, 1, 0, o.directory_bytes, told);
    read_range(&r, 2, 0, o.patches[0].bytes, changes);
    assert_true(patch_directory_read(told, size, o.patches[0].bytes, first));
    for (uint64_t i = 0; i < patch_segments(size); i++)
        for (uint64_t j = 0, n = first[i + 1] - first[i]; j < n; j++) {
            const uint8_t *at = changes + 4 * first[i];
            uint64_t place = at[2 * j] + 256 * (uint64_t)at[2 * j + 1];
            memcpy(before + i * PATCH_SEGMENT + 2 * place, at + 2 * (n + j), 2);
        }
    assert_memory_equal(before, memory, size);
    free(told);
    free(first);
    free(before);
    free_trainers(memory);
}

SERVER_TEST(a_wait_that_was_parked_tells_them)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    uint64_t base = o.generation;
    peer_request_patches(&r.control, WIRE_RULE_AT_LEAST, 2);
    peer_ping(&r.data);
    next(s, 2, 4);
    assert_true(peer_patches(&r.control, &o));
    assert_int_equal(o.count, 1);
    assert_int_equal(o.patches[0].from, base);
    /* Who does not ask is not told. */
    msg_wait_ok ok;
    peer_request_wait(&r.control, RUN, WIRE_RULE_NEWEST, 0, 10000);
    body in = peer_expect(&r.control, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.patches.size, 0);
}

/* The numbers of patches count backwards from the lease's generation. */
SERVER_TEST(a_lease_of_the_step_before_has_its_own)
{
    patch_offers o, later;
    fanin_server *s = start();
    puller r = open(s, &o);
    puller_begin(&r);
    read_whole(&r, &held);
    puller_end(&r);
    next(s, 2, 4);
    assert_true(ask(&r, &o));
    puller_begin(&r);
    next(s, 3, 4);
    assert_true(ask(&r, &later));
    assert_int_equal(later.patches[1].from, o.patches[0].from);
    assert_true(apply(&r, &o, 0, &held));
    read_whole(&r, &whole);
    assert_memory_equal(&held, &whole, sizeof held);
    puller_end(&r);
}

/* ------------------------------------------------------------- none is made */

SERVER_TEST(without_who_asks_there_are_none)
{
    patch_offers o;
    fanin_server *s = start();
    next(s, 2, 4);
    puller r = open(s, &o);
    assert_int_equal(o.count, 0);
    next(s, 3, 4);
    assert_int_equal(server_stats(s).patches_made, 1);
    puller_close(&r);
    peer watcher = peer_open(s);
    peer_await_count(&watcher, s, offsetof(fanin_server_stats, sessions), 1);
    for (uint64_t step = 4; step < 8; step++) /* who asked may come back */
        next(s, step, 4);
    assert_int_equal(server_stats(s).patches_made, 5);
    next(s, 8, 4);
    assert_int_equal(server_stats(s).patches_made, 5);
    assert_int_equal(server_stats(s).patches_lacking, 0);
}

SERVER_TEST(without_deltas_nothing_is_told)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    next(s, 3, 0);
    assert_false(ask(&r, &o));
    next(s, 4, 4); /* made of a step that is held, and the chain's first */
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 1);
    assert_works(fanin_server_remove(s, RUN, NULL, ERROR));
    server_put(s, RUN, "a", shards->bytes, BYTES);
    server_commit(s, 5);
    assert_false(ask(&r, &o));
}

SERVER_TEST(another_catalog_ends_the_chain)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    fanin_pair pair = {"lr", "1"};
    assert_works(fanin_server_set_metadata(s, RUN, &pair, 1, ERROR));
    next(s, 3, 4);
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 0);
    uint64_t base = puller_begin(&r).epoch;
    read_whole(&r, &held);
    puller_end(&r);
    next(s, 4, 4);
    assert_true(leads_from(&r, base));
    assert_int_equal(server_stats(s).patches_lacking, 1);
}

SERVER_TEST(what_is_too_large_or_finds_no_memory_is_left_out)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    server_begin(s);
    change(5);
    assert_works(commit_with(s, 3, 4, ERROR));
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 0);
    next(s, 4, 4);
    lack_memory();
    next(s, 5, 4);
    assert_true(ask(&r, &o));
    assert_int_equal(o.count, 0);
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.patches_made, 2);
    assert_int_equal(stats.patches_lacking, 2);
    assert_int_equal(stats.commits, 5);
}

SERVER_TEST(all_together_have_their_room)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    puller_begin(&r);
    read_whole(&r, &whole);
    puller_end(&r);
    for (uint64_t step = 2; step < 18; step++) {
        server_begin(s);
        change(150);
        assert_works(commit_with(s, step, 16, ERROR));
    }
    assert_true(ask(&r, &o));
    assert_in_range(o.count, 2, 10);
    uint64_t sum = 0;
    for (uint32_t k = 0; k < o.count; k++)
        sum += o.patches[k].bytes + o.directory_bytes;
    assert_true(sum <= whole.length / 8);
    assert_true(sum + sum / o.count * 2 > whole.length / 8);
}

/* ----------------------------------------------------------------- withdrawn */

static fanin_server *filled;

static void abort_it(void)
{
    for (size_t i = 0; i < sizeof shards->bytes; i += 100)
        shards->bytes[i] ^= 1; /* what is copied nevertheless */
    assert_works(fanin_server_abort_update(filled, RUN, ERROR));
}

/* A step that was withdrawn after its copy changes nothing for readers: the next patch leads on
   from the published one, and holds what both have changed. */
static bool leads_past_a_withdrawn_step(void)
{
    patch_offers o;
    fanin_server *s = filled = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    assert_true(ask(&r, &o));
    uint64_t base = puller_begin(&r).epoch;
    read_whole(&r, &held);
    puller_end(&r);
    server_begin(s);
    atomic_store(&server_on_fill, abort_it);
    assert_int_equal(commit_with(s, 3, 4, NULL), FANIN_ERR_STATE);
    atomic_store(&server_on_fill, NULL);
    assert_true(ask(&r, &o));
    bool stands = o.generation == base && o.count == 1;
    change(500);
    assert_works(commit_with(s, 4, 4, ERROR));
    bool leads = leads_from(&r, base);
    server_close_peers();
    server_stop(&s, 0);
    return stands && leads;
}

static void check(bool (*holds)(void), unsigned rules)
{
    assert_true(holds());
    rules_off = rules;
    assert_false(holds());
    rules_off = 0;
}

SERVER_TEST(a_withdrawn_step_leaves_no_patch)
{
    check(leads_past_a_withdrawn_step, RULE_PATCH_BASE);
    check(leads_past_a_withdrawn_step, RULE_PATCH_ANNOUNCE);
}

/* ------------------------------------------------------------------- refused */

static void expect_refused(puller *r, uint64_t box, uint64_t other, fanin_status code)
{
    read_entry e[] = {{.box = box, .length = 1}, {.box = other, .length = 1}};
    peer_request_read(&r->data, r->grant.token, 2, e, 2);
    peer_expect_error(&r->data, code);
}

SERVER_TEST(what_is_no_patch_is_refused)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    next(s, 3, 4);
    assert_true(ask(&r, &o));
    puller_begin(&r);
    uint64_t first = o.first_box, length = o.patches[0].bytes;
    uint8_t two[2];
    read_entry e = {.box = first, .count = PATCH_BOXES};
    peer_read(&r.data, &r.grant, &e, 1, changes, o.directory_bytes + length);
    expect_refused(&r, first, 0, FANIN_ERR_ARGUMENT);
    expect_refused(&r, 0, first, FANIN_ERR_ARGUMENT);
    expect_refused(&r, first, first + 2, FANIN_ERR_ARGUMENT);
    expect_refused(&r, first + 3, first + 1, FANIN_ERR_ARGUMENT);
    expect_refused(&r, first + 4, first + 4, FANIN_ERR_STALE);
    expect_refused(&r, first + 31, first + 31, FANIN_ERR_STALE);
    expect_refused(&r, first + 32, first + 32, FANIN_ERR_ARGUMENT);

    e = (read_entry){.box = first + 1, .offset = length - 1, .length = 2};
    peer_request_read(&r.data, r.grant.token, 2, &e, 1);
    peer_expect_error(&r.data, FANIN_ERR_ARGUMENT);
    e = (read_entry){.box = first, .count = PATCH_BOXES + 1};
    peer_request_read(&r.data, r.grant.token, 3, &e, 1);
    peer_expect_error(&r.data, FANIN_ERR_ARGUMENT);
    e = (read_entry){.box = first, .length = 1};
    peer_request_digest(&r.data, &r.grant, 1, 0, &e, 1);
    assert_says(peer_expect_error(&r.data, FANIN_ERR_ARGUMENT).message, "digests");
    /* The lease is as good as before. */
    read_range(&r, first + 1, length - 2, 2, two);
    puller_end(&r);
}

SERVER_TEST(options_are_checked)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *s = start();
    server_begin(s);
    assert_int_equal(commit_with(s, 2, 17, &error), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "16 deltas");
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.deltas = 1;
    assert_int_equal(fanin_server_commit(s, RUN, 2, &o, &error), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "by reference has no deltas");
    assert_works(commit_with(s, 2, 16, ERROR));
}

/* ------------------------------------------------------------------ devices */

#ifdef ON_DEVICE
static fake_cuda_counts counts(void)
{
    fake_cuda_counts now;
    fake_cuda_count(&now);
    return now;
}

SERVER_TEST(whoever_does_not_ask_pays_nothing)
{
    patch_offers o;
    uint64_t zeroed = fake_cuda_calls("cuMemsetD8Async");
    fanin_server *s = server_start_lease(0);
    put_shards(s);
    for (uint64_t step = 1; step < 4; step++) {
        server_begin(s);
        assert_works(commit_with(s, step, 0, ERROR));
    }
    fake_cuda_counts before = counts();
    next(s, 4, 0);
    assert_int_equal(fake_cuda_calls("cuMemsetD8Async"), zeroed);
    next(s, 5, 4);
    next(s, 6, 4);
    next(s, 7, 4);
    assert_int_equal(fake_cuda_calls("cuMemsetD8Async"), zeroed + 2);
    fake_cuda_counts after = counts();
    assert_int_equal(after.kernels, before.kernels + 4);
    assert_int_equal(after.pinned, before.pinned);
    assert_int_equal(after.allocations, before.allocations);
    puller r = open(s, &o);
    next(s, 8, 4);
    after = counts();
    assert_int_equal(after.kernels, before.kernels + 8);
    assert_int_equal(after.pinned, before.pinned + 1);
    assert_true(after.pinned_bytes - before.pinned_bytes < sizeof *shards / 8 + 128);
    puller_close(&r);
}

/* Deltas are switched on later: what was between boxes has to be the same in both arenas first. */
SERVER_TEST(arenas_that_were_there_are_zeroed_first)
{
    patch_offers o;
    fanin_server *s = server_start_lease(0);
    put_shards(s);
    assert_works(commit_with(s, 1, 0, ERROR));
    next(s, 2, 0);
    puller r = puller_open(s);
    assert_false(ask(&r, &o));
    next(s, 3, 4);
    assert_int_equal(server_stats(s).patches_made, 0);
    uint64_t base = puller_begin(&r).epoch;
    read_whole(&r, &held);
    puller_end(&r);
    next(s, 4, 4);
    assert_int_equal(server_stats(s).patches_made, 1);
    assert_true(leads_from(&r, base));
}

static CUstream new_stream(void)
{
    CUcontext context;
    CUstream made;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    assert_int_equal(cuCtxPushCurrent(context), CUDA_SUCCESS);
    assert_int_equal(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return made;
}

static void free_stream(CUstream made)
{
    CUcontext context;
    assert_int_equal(cuStreamDestroy(made), CUDA_SUCCESS);
    assert_int_equal(cuCtxPopCurrent(&context), CUDA_SUCCESS);
    assert_int_equal(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

/* It waits for the copies alone. The step is told when its patch is there. */
SERVER_TEST(the_trainers_stream_does_not_wait_for_a_patch)
{
    patch_offers o;
    CUstream made = new_stream();
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", shards->bytes,
               1000); /* one entry; eight shares of a segment */
    assert_works(commit_with(s, 1, 4, ERROR));
    puller r = open(s, &o);
    uint64_t base = o.generation;
    server_begin(s);
    shards->bytes[7] ^= 1;
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = FANIN_COMMIT_SNAPSHOT;
    options.cast = FANIN_DTYPE_BF16;
    options.deltas = 4;
    options.stream = (fanin_stream){.handle = made};
    fake_cuda_hold_kernel(0, 4);
    assert_works(fanin_server_commit(s, RUN, 2, &options, ERROR));
    assert_true(fake_cuda_wait_kernel_held(0));
    assert_int_equal(cuStreamSynchronize(made), CUDA_SUCCESS);
    assert_true(ask(&r, &o));
    assert_int_equal(o.generation, base);
    fake_cuda_release(0);
    peer_request_patches(&r.control, WIRE_RULE_AT_LEAST, 2);
    assert_true(peer_patches(&r.control, &o));
    assert_int_equal(o.patches[0].from, base);
    assert_int_equal(o.patches[0].bytes, PATCH_CHANGE);
    free_stream(made);
}

/* A reader still has the oldest patch when the publication goes. */
SERVER_TEST(a_patch_outlives_its_publication)
{
    patch_offers o;
    fanin_server *s = start();
    puller r = open(s, &o);
    next(s, 2, 4);
    assert_true(ask(&r, &o));
    puller_begin(&r);
    read_range(&r, o.first_box, 0, o.directory_bytes, directory);
    assert_works(fanin_server_remove(s, RUN, NULL, ERROR));
    puller_close(&r);
    server_stop(&s, 0);
    assert_int_equal(counts().pinned, 0);
}

#endif

static int set_up(void **state)
{
#ifdef ON_DEVICE
    assert_works(gpu_load(&(logger){0}, &(gpu *){NULL}, ERROR));
#endif
    shards = trainers_memory(sizeof *shards);
    return 0;
}

TESTS_BETWEEN(set_up, NULL)
