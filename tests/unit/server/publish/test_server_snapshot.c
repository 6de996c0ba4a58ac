/* SPDX-License-Identifier: Apache-2.0 */
/* Snapshot publications of host memory: copies in two arenas, what readers of either get, and
   what the trainer may do meanwhile. */
#include "call.h"
#include "clock.h"
#include "server_peer.h"
#include "testing.h"

#include <stdatomic.h>
#include <sys/mman.h>

#define SIZE 1000

static uint8_t first[SIZE], second[SIZE];
static atomic_bool lacking; /* descriptors and memory */

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags)
{
    if (!atomic_load(&lacking))
        return __real_memfd_create(name, flags);
    errno = EMFILE;
    return -1;
}

void *__real_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    if (!atomic_load(&lacking))
        return __real_mmap64(at, n, prot, flags, fd, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

static void fill(uint8_t value)
{
    memset(first, value, SIZE);
    memset(second, value + 100, SIZE);
}

static fanin_server *start_published(uint32_t lease_ms)
{
    fanin_server *s = server_start_lease(lease_ms);
    server_put(s, RUN, "a", first, SIZE);
    server_put(s, RUN, "b", second, SIZE);
    fill(1);
    server_snapshot(s, 1);
    return s;
}

static void publish(fanin_server *s, uint64_t step)
{
    server_begin(s);
    fill((uint8_t)step);
    server_snapshot(s, step);
}

/* Waits for the newest step and begins it. */
static msg_begin_ok begin(puller *r, grant *g)
{
    msg_begin_ok ok = puller_begin(r);
    *g = r->grant;
    return ok;
}

/* Both shards hold what fill() wrote for that step. */
static void expect_step(puller *r, const grant *g, uint8_t step)
{
    uint8_t got[2 * SIZE];
    read_entry all = {.box = 0, .count = 2};
    peer_read(&r->data, g, &all, 1, got, sizeof got);
    for (size_t i = 0; i < SIZE; i++) {
        assert_int_equal(got[i], step);
        assert_int_equal(got[SIZE + i], step + 100);
    }
}

static void expect_refused(puller *r, const grant *g)
{
    read_entry one = {.box = 0, .length = 1};
    peer_request_read(&r->data, g->token, 1, &one, 1);
    peer_expect_error(&r->data, FANIN_ERR_STALE);
}

static fanin_status snapshot(fanin_server *s, uint64_t step, fanin_dtype cast,
                             fanin_error *error)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    o.cast = cast;
    return fanin_server_commit(s, RUN, step, &o, error);
}

/* ------------------------------------------------------------------- arenas */

SERVER_TEST(readers_get_copies)
{
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    grant g;
    fill(77); /* the trainer goes on at once */
    assert_int_equal(begin(&r, &g).first_region, 0);
    expect_step(&r, &g, 1);
    assert_true(peer_end(&r.control, &g, false).good);
    for (uint64_t step = 2; step < 6; step++) {
        publish(s, step);
        fill(77);
        msg_begin_ok ok = begin(&r, &g);
        assert_int_equal(ok.first_region, step % 2 == 0 ? 1 : 0);
        assert_int_equal(g.step, step);
        assert_int_equal(ok.epoch % 2, 0);
        expect_step(&r, &g, (uint8_t)step);
        assert_true(peer_end(&r.control, &g, false).good);
    }
}

SERVER_TEST(tables_describe_both_arenas)
{
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    key_table *keys;
    box_table *boxes;
    grant g = peer_newest(&r.control);
    peer_catalog(&r.control, &g, &keys, &boxes);
    region_table *regions = peer_regions(&r.control, &g, WIRE_PATH_STREAM);
    assert_int_equal(box_table_regions(boxes), 1);
    assert_int_equal(regions->count, 2);
    assert_int_equal(regions->entries[0].length, regions->entries[1].length);
    for (uint64_t i = 0; i < 2; i++) {
        box_place place;
        box_table_get(boxes, i, NULL, NULL, &place);
        assert_true(place.packed);
        assert_int_equal(place.region, 0);
        assert_int_equal(place.offset, 512 * 2 * i);
        assert_true(place.offset + SIZE <= regions->entries[0].length);
    }
    /* A step changes neither. */
    publish(s, 2);
    grant next = peer_newest(&r.control);
    assert_int_equal(next.catalog_version, g.catalog_version);
    region_table_free(&regions);
    box_table_free(&boxes);
    key_table_free(&keys);
}

SERVER_TEST(a_lease_outlives_one_commit)
{
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    grant old, new;
    begin(&r, &old);
    publish(s, 2);
    expect_step(&r, &old, 1);
    begin(&r, &new);
    expect_step(&r, &new, 2);
    publish(s, 3); /* fills the first one's arena */
    expect_refused(&r, &old);
    assert_false(peer_end(&r.control, &old, false).good);
    expect_step(&r, &new, 2);
    assert_true(peer_end(&r.control, &new, false).good);
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.commits, 3);
    assert_int_equal(stats.updates, 2);
    assert_int_equal(stats.drains_expired, 0);
    assert_int_equal(stats.leases, 0);
}

static fanin_status snapshot_third(void *server)
{
    return snapshot(server, 3, 0, NULL);
}

/* Of the arena that is to be filled, not the first one alone. */
SERVER_TEST(every_holder_is_waited_for)
{
    fanin_server *s = start_published(3600000);
    puller r[2] = {puller_open_unix(s), puller_open_unix(s)};
    grant g[2];
    call commit;
    for (size_t i = 0; i < 2; i++)
        begin(&r[i], &g[i]);
    publish(s, 2);
    server_begin(s);
    call_start(&commit, snapshot_third, s);
    for (size_t i = 0; i < 2; i++) {
        assert_false(call_returns(&commit, 50));
        expect_step(&r[i], &g[i], 1);
        assert_true(peer_end(&r[i].control, &g[i], false).good);
    }
    assert_int_equal(call_end(&commit), FANIN_OK);
    assert_int_equal(server_stats(s).drains_expired, 0);
}

SERVER_TEST(begin_update_does_not_drain)
{
    fanin_server *s = start_published(60000);
    puller r = puller_open(s);
    grant g, more;
    begin(&r, &g);
    server_begin(s);
    assert_int_equal(peer_state(&r.control), WIRE_STATE_STABLE);
    fill(9);
    begin(&r, &more); /* readers still come */
    expect_step(&r, &more, 1);
    expect_step(&r, &g, 1);
    assert_true(peer_end(&r.control, &more, false).good);
    assert_true(peer_end(&r.control, &g, false).good);
    server_snapshot(s, 2);
    assert_int_equal(snapshot(s, 3, 0, NULL), FANIN_ERR_STATE); /* no update is open */
}

/* --------------------------------------------------------------- the catalog */

SERVER_TEST(new_shards_get_new_arenas)
{
    static uint8_t third[SIZE];
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    grant old, new;
    begin(&r, &old);
    memset(third, 33, SIZE);
    server_put(s, RUN, "c", third, SIZE);
    publish(s, 2);
    begin(&r, &new);
    assert_true(new.catalog_version > old.catalog_version);
    expect_step(&r, &new, 2);
    uint8_t got[SIZE];
    read_entry last = {.box = 2, .count = 1};
    peer_read(&r.data, &new, &last, 1, got, SIZE);
    assert_memory_equal(got, third, SIZE);
    /* The old arenas stay until the commit after. */
    expect_step(&r, &old, 1);
    publish(s, 3);
    expect_refused(&r, &old);
    assert_false(peer_end(&r.control, &old, false).good);
    expect_step(&r, &new, 2);
    assert_true(peer_end(&r.control, &new, false).good);
}

SERVER_TEST(metadata_keep_the_arenas)
{
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    grant old, new;
    fanin_pair pair = {"r", "16"};
    begin(&r, &old);
    assert_int_equal(fanin_server_set_metadata(s, RUN, &pair, 1, NULL), FANIN_OK);
    publish(s, 2);
    assert_int_equal(begin(&r, &new).first_region, 1); /* the other one */
    assert_true(new.catalog_version > old.catalog_version);
    expect_step(&r, &old, 1);
    expect_step(&r, &new, 2);
    assert_true(peer_end(&r.control, &old, false).good);
    assert_true(peer_end(&r.control, &new, false).good);
}

SERVER_TEST(shards_may_move_while_readers_go_on)
{
    static uint8_t moved[SIZE];
    fanin_server *s = start_published(60000);
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    memset(moved, 2, SIZE);
    server_put(s, RUN, "a", moved, SIZE); /* acts as begin_update */
    memset(first, 0xee, SIZE);
    assert_int_equal(peer_state(&r.control), WIRE_STATE_STABLE);
    expect_step(&r, &g, 1);
    assert_true(peer_end(&r.control, &g, false).good);
    memset(second, 102, SIZE);
    server_snapshot(s, 2);
    begin(&r, &g);
    expect_step(&r, &g, 2);
    assert_true(peer_end(&r.control, &g, false).good);
    /* One goes: the copy still has it until the next commit. */
    assert_int_equal(fanin_server_remove(s, RUN, "b", NULL), FANIN_OK);
    begin(&r, &g);
    expect_step(&r, &g, 2);
    assert_true(peer_end(&r.control, &g, false).good);
    server_snapshot(s, 3);
    begin(&r, &g);
    uint8_t got[SIZE];
    read_entry gone = {.box = 1, .length = 1}, there = {.box = 0, .count = 1};
    peer_request_read(&r.data, g.token, 1, &gone, 1);
    peer_expect_error(&r.data, FANIN_ERR_ARGUMENT);
    peer_read(&r.data, &g, &there, 1, got, SIZE);
    assert_memory_equal(got, moved, SIZE);
}

SERVER_TEST(removal_takes_the_arenas)
{
    fanin_server *s = start_published(0);
    puller r = puller_open(s);
    grant g, old;
    begin(&r, &old);
    publish(s, 2);
    begin(&r, &g);
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
    expect_refused(&r, &g);
    expect_refused(&r, &old);
    assert_false(peer_end(&r.control, &g, false).good);
    assert_false(peer_end(&r.control, &old, false).good);
    /* It may come back in the other way. */
    server_put(s, RUN, "a", first, SIZE);
    server_commit(s, 3);
    assert_int_equal(begin(&r, &g).first_region, 0);
}

SERVER_TEST(an_abort_leaves_the_last_snapshot)
{
    fanin_server *s = start_published(60000);
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    server_begin(s);
    fill(50);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_ERR_STATE);
    assert_int_equal(peer_state(&r.control), WIRE_STATE_STABLE);
    expect_step(&r, &g, 1);
    assert_true(peer_end(&r.control, &g, false).good);
    fill(2);
    server_snapshot(s, 2); /* alone, after an abort */
    begin(&r, &g);
    expect_step(&r, &g, 2);
}

/* ------------------------------------------------------------------ options */

SERVER_TEST(ways_are_not_mixed)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *s = start_published(0);
    server_begin(s);
    assert_int_equal(fanin_server_commit(s, RUN, 2, NULL, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "snapshot"));
    assert_int_equal(snapshot(s, 2, FANIN_DTYPE_BF16, NULL), FANIN_ERR_ARGUMENT);
    assert_int_equal(snapshot(s, 1, 0, NULL), FANIN_ERR_ARGUMENT); /* the step */
    assert_int_equal(snapshot(s, 2, 0, NULL), FANIN_OK);
    server_stop(&s, 0);
    s = server_start_lease(0);
    server_put(s, RUN, "a", first, SIZE);
    server_commit(s, 1);
    server_begin(s);
    assert_int_equal(snapshot(s, 2, 0, NULL), FANIN_ERR_STATE);
    server_commit(s, 2);
}

SERVER_TEST(options_are_checked)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", first, SIZE);
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    assert_int_equal(o.struct_size, sizeof o);
    o.struct_size = 0;
    assert_int_equal(fanin_server_commit(s, RUN, 1, &o, NULL), FANIN_ERR_ARGUMENT);
    fanin_commit_options_init(&o, sizeof o);
    o.flags = 1u << 31;
    assert_int_equal(fanin_server_commit(s, RUN, 1, &o, NULL), FANIN_ERR_ARGUMENT);
    o.flags = 0;
    o.cast = FANIN_DTYPE_BF16;
    assert_int_equal(fanin_server_commit(s, RUN, 1, &o, NULL), FANIN_ERR_ARGUMENT);
    static const fanin_dtype casts[] = {FANIN_DTYPE_F32, FANIN_DTYPE_I8, -1, 999};
    for (size_t i = 0; i < sizeof casts / sizeof *casts; i++)
        assert_int_equal(snapshot(s, 1, casts[i], NULL), FANIN_ERR_ARGUMENT);
    /* An older caller's struct ends before the cast; what lies behind it is not its. */
    fanin_commit_options_init(&o, sizeof o);
    o.struct_size = offsetof(fanin_commit_options, cast);
    o.flags = FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT;
    o.cast = 999;
    o.stream.handle = &o;
    assert_int_equal(fanin_server_commit(s, RUN, 1, &o, NULL), FANIN_OK);
    /* init never writes beyond the caller's struct. */
    memset(&o, 0x5a, sizeof o);
    fanin_commit_options_init(&o, offsetof(fanin_commit_options, cast));
    assert_int_equal(o.cast, 0x5a5a5a5a);
    assert_int_equal(o.flags, 0);
}

/* ------------------------------------------------------------------- copies */

static float values[6][4]; /* published transposed */

static fanin_tensor flat_floats(const fanin_box *flat)
{
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = "f",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 1,
                          .shape = {24},
                          .boxes = flat,
                          .n_boxes = 1};
}

static void put_floats(fanin_server *s)
{
    fanin_box box = {.extent = {4, 6}, .stride = {4, 16}, .address = values};
    fanin_tensor t = {.struct_size = sizeof t,
                      .name = "t",
                      .dtype = FANIN_DTYPE_F32,
                      .n_dims = 2,
                      .shape = {4, 6},
                      .boxes = &box,
                      .n_boxes = 1};
    fanin_box flat = {.extent = {24}, .address = values};
    fanin_tensor f = flat_floats(&flat);
    fanin_box bytes = {.extent = {SIZE}, .address = first};
    fanin_tensor u = byte_tensor("u", &bytes, first, SIZE);
    fanin_tensor all[] = {f, t, u};
    assert_works(fanin_server_put(s, RUN, all, 3, false, ERROR));
    for (size_t i = 0; i < 6; i++)
        for (size_t j = 0; j < 4; j++)
            values[i][j] = (float)(i * 4 + j) - 12.5f;
}

static uint16_t bf16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16); /* these values are exact */
}

SERVER_TEST(strides_are_packed)
{
    fanin_server *s = server_start_lease(0);
    put_floats(s);
    server_snapshot(s, 1);
    float expected[4][6], got[4][6];
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 6; j++)
            expected[i][j] = values[j][i];
    memset(values, 0, sizeof values);
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    read_entry one = {.box = 1, .count = 1};
    peer_read(&r.data, &g, &one, 1, got, sizeof got);
    assert_memory_equal(got, expected, sizeof got);
}

/* As a router among F32 masters that are published as BF16. */
SERVER_TEST(what_is_kept_is_not_cast)
{
    fanin_server *s = server_start_lease(0);
    put_floats(s);
    fanin_box flat = {.extent = {24}, .address = values};
    fanin_tensor f = flat_floats(&flat);
    f.flags = FANIN_TENSOR_KEEP;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_put(s, RUN, &f, 1, true, &error), error);
    assert_int_equal(snapshot(s, 1, FANIN_DTYPE_BF16, NULL), FANIN_OK);
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    key_table *keys;
    box_table *boxes;
    peer_catalog(&r.control, &g, &keys, &boxes);
    assert_int_equal(keys->entries[0].dtype, FANIN_DTYPE_F32);
    assert_int_equal(keys->entries[0].bytes, sizeof values);
    assert_int_equal(keys->entries[1].dtype, FANIN_DTYPE_BF16);
    read_entry one = {.box = 0, .count = 1};
    float got[24];
    peer_read(&r.data, &g, &one, 1, got, sizeof got);
    assert_memory_equal(got, values, sizeof got);
    key_table_free(&keys);
    box_table_free(&boxes);
    f.flags = 2;
    assert_int_equal(fanin_server_put(s, RUN, &f, 1, true, &error), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "a flag is unknown");
}

SERVER_TEST(f32_is_cast)
{
    fanin_server *s = server_start_lease(0);
    put_floats(s);
    memset(first, 0x7f, SIZE);
    assert_int_equal(snapshot(s, 1, FANIN_DTYPE_BF16, NULL), FANIN_OK);
    uint16_t flat[24], turned[24], got[48];
    for (size_t i = 0; i < 24; i++) {
        flat[i] = bf16_of(values[i / 4][i % 4]);
        turned[i] = bf16_of(values[i % 6][i / 6]);
    }
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    key_table *keys;
    box_table *boxes;
    peer_catalog(&r.control, &g, &keys, &boxes);
    assert_int_equal(keys->entries[0].dtype, FANIN_DTYPE_BF16);
    assert_int_equal(keys->entries[0].bytes, 48);
    assert_int_equal(keys->entries[1].dtype, FANIN_DTYPE_BF16);
    assert_int_equal(keys->entries[2].dtype, FANIN_DTYPE_U8);
    assert_int_equal(keys->entries[2].bytes, SIZE);
    read_entry both = {.box = 0, .count = 2}, other = {.box = 2, .count = 1};
    uint8_t bytes[SIZE];
    peer_read(&r.data, &g, &both, 1, got, sizeof got);
    assert_memory_equal(got, flat, sizeof flat);
    assert_memory_equal(got + 24, turned, sizeof turned);
    peer_read(&r.data, &g, &other, 1, bytes, SIZE);
    assert_memory_equal(bytes, first, SIZE);
    key_table_free(&keys);
    box_table_free(&boxes);
}

/* Enough for several threads and batches. */
static void copy_large_shards(bool are_lacking)
{
    const size_t size = (size_t)100 << 20, piece = (size_t)4 << 20;
    uint8_t *large = malloc(size), *got = malloc(piece);
    assert_true(large && got);
    for (size_t i = 0; i < size / 8; i++)
        memcpy(large + 8 * i, &(uint64_t){i * UINT64_C(0x9e3779b97f4a7c15)}, 8);
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "large", large, size);
    server_put(s, RUN, "small", first, SIZE);
    server_snapshot(s, 1);
    memset(large, 1, 2 * piece);
    server_begin(s);
    server_snapshot(s, 2); /* has the other arena */
    server_begin(s);
    memset(large, 2, piece);
    atomic_store(&lacking, are_lacking);
    server_snapshot(s, 3);
    atomic_store(&lacking, false);
    puller r = puller_open(s);
    grant g;
    begin(&r, &g);
    for (size_t at = 0; at < size; at += piece) {
        read_entry part = {.box = 0, .offset = at, .length = piece};
        peer_read(&r.data, &g, &part, 1, got, piece);
        assert_memory_equal(got, large + at, piece);
    }
    assert_true(peer_end(&r.control, &g, false).good);
    server_stop(&s, 0);
    free(large);
    free(got);
}

SERVER_TEST(large_shards_are_copied_by_threads)
{
    copy_large_shards(false);
}

/* A rank at its limits publishes its step all the same. */
SERVER_TEST(a_commit_needs_no_descriptor_and_no_memory)
{
    copy_large_shards(true);
}

SERVER_TEST(nothing_can_be_published)
{
    fanin_server *s = server_start_lease(0);
    server_begin(s);
    server_snapshot(s, 1);
    server_begin(s);
    server_snapshot(s, 2);
    puller r = puller_open(s);
    grant g;
    assert_int_equal(begin(&r, &g).first_region, 0);
    assert_true(peer_end(&r.control, &g, false).good);
}
