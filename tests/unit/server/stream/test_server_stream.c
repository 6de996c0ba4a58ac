/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes on data connections: every layout in memory arrives in packed row-major order. */
#include "block.h"
#include "dtype.h"
#include "random.h"
#include "ends.h"
#include "server_peer.h"
#include "stream/stream.h"
#include "testing.h"

#include <poll.h>
#include <sys/socket.h>

#define ARENA ((size_t)6 << 20)

static uint8_t *arena;

static int set_up(void **state)
{
    arena = malloc(ARENA);
    for (size_t i = 0; arena && i < ARENA; i++)
        arena[i] = (uint8_t)(i * 31 + (i >> 8) * 17 + (i >> 16));
    return arena ? 0 : -1;
}

static int tear_down(void **state)
{
    free(arena);
    return 0;
}

static puller serve(const fanin_tensor *t, size_t count)
{
    return puller_serve(puller_open, t, count);
}

/* The packed bytes of a box, one element group at a time. */
static void pack(const fanin_tensor *t, const fanin_box *b, uint8_t *out)
{
    dtype_unit unit = dtype_get_unit(t->dtype);
    uint64_t extent[FANIN_MAX_DIMS], index[FANIN_MAX_DIMS] = {0}, groups = 1;
    int64_t packed[FANIN_MAX_DIMS];
    bool is_packed = true;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        extent[i] = b->extent[i] / (i + 1 == t->n_dims ? unit.elements : 1);
        groups *= extent[i];
        is_packed = is_packed && b->stride[i] == 0;
    }
    block_packed_strides(t->n_dims, extent, unit.bytes, packed);
    for (uint64_t n = 0; n < groups; n++, out += unit.bytes) {
        const uint8_t *from = b->address;
        for (uint32_t i = 0; i < t->n_dims; i++)
            from += (int64_t)index[i] * (is_packed ? packed[i] : b->stride[i]);
        memcpy(out, from, unit.bytes);
        for (uint32_t i = t->n_dims; i-- > 0;) {
            if (++index[i] < extent[i])
                break;
            index[i] = 0;
        }
    }
}

/* Reads the one box of @p t whole and in odd pieces. */
static void check_box(const fanin_tensor *t)
{
    uint64_t bytes;
    assert_true(dtype_bytes(t->dtype, t->n_dims, t->boxes->extent, &bytes));
    uint8_t *want = malloc(bytes);
    pack(t, t->boxes, want);
    puller l = serve(t, 1);
    puller_expect_box(&l, want, bytes);
    server_tear_down(NULL);
    free(want);
}

SERVER_TEST(every_layout_is_packed_on_the_way)
{
    fanin_box box = {.extent = {40, 30, 20}, .address = arena + 1000000};
    fanin_tensor t = {.struct_size = sizeof t,
                      .name = "t",
                      .dtype = FANIN_DTYPE_BF16,
                      .n_dims = 3,
                      .shape = {40, 30, 20},
                      .boxes = &box,
                      .n_boxes = 1};
    static const int64_t strides[][3] = {
        {0, 0, 0},      /* packed */
        {1200, 40, 2},  /* packed, said so */
        {1300, 40, 2},  /* padded: runs of 1200 bytes */
        {1300, 42, 2},  /* runs of 40 bytes */
        {2, 80, 2400},  /* transposed: runs of 2 bytes */
        {1200, 40, -2}, /* backwards */
        {-1200, -40, -2}, {-2000, 50, 2}, {1200, 0, 2}, /* one row many times */
    };
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        memcpy(box.stride, strides[i], sizeof strides[i]);
        check_box(&t);
    }
    box = (fanin_box){.extent = {100, 4000}, .stride = {5000, 1}, .address = arena};
    fanin_tensor rows = {.struct_size = sizeof t,
                         .name = "rows",
                         .dtype = FANIN_DTYPE_U8,
                         .n_dims = 2,
                         .shape = {100, 4000},
                         .boxes = &box,
                         .n_boxes = 1};
    check_box(&rows);
    rows.dtype = FANIN_DTYPE_F4;
    check_box(&rows);
    rows.dtype = FANIN_DTYPE_F6_E2M3;
    box.stride[0] = -4000;
    box.address = arena + 1000000;
    check_box(&rows);
    box.stride[1] = 5; /* bytes between neighbouring groups of three */
    check_box(&rows);
}

/* Random layouts of random shapes, against the element-wise model. */
SERVER_TEST(random_layouts)
{
    random_source seed = {20240607};
    for (int round = 0; round < 60; round++) {
        fanin_box box = {.address = arena + ARENA / 2};
        fanin_tensor t = {.struct_size = sizeof t,
                          .name = "t",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 1 + (uint32_t)(random_next(&seed) % 4),
                          .boxes = &box,
                          .n_boxes = 1};
        for (uint32_t i = 0; i < t.n_dims; i++) {
            t.shape[i] = box.extent[i] = 1 + random_next(&seed) % 9;
            box.stride[i] = (int64_t)(random_next(&seed) % 4001) - 2000;
        }
        check_box(&t);
    }
}

SERVER_TEST(reads_are_pipelined)
{
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, arena, ARENA);
    puller l = serve(&t, 1);
    /* Nothing is received before everything is asked for: 60 replies of 100,000 bytes. */
    uint64_t first = l.data.request + 1;
    for (uint64_t i = 0; i < 60; i++) {
        read_entry part = {.box = 0, .offset = i * 100000, .length = 100000};
        peer_request_read(&l.data, l.grant.token, 100000, &part, 1);
    }
    for (uint64_t i = 0; i < 60; i++) {
        body in = peer_expect(&l.data, MSG_READ_OK);
        assert_int_equal(l.data.frame.request, first + i);
        assert_int_equal(in.size, 100000);
        assert_memory_equal(in.data, arena + i * 100000, 100000);
        if (i == 30)
            peer_ping(&l.control); /* is not behind the bytes */
    }
    /* The last one is counted when it has been sent. */
    peer_await_count(&l.data, l.server, offsetof(fanin_server_stats, reads_streamed),
                     60);
    assert_int_equal(server_stats(l.server).bytes_streamed, 6000000);
}

SERVER_TEST(many_small_boxes_in_one_read)
{
    enum { COUNT = 5000, SIZE = 300 };
    static fanin_tensor t[COUNT];
    static fanin_box boxes[COUNT];
    static char name[COUNT][16];
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(name[i], sizeof name[i], "%06zu", i);
        t[i] = byte_tensor(name[i], &boxes[i], arena + (COUNT - i) * 700, SIZE);
    }
    puller l = serve(t, COUNT);
    uint8_t *got = malloc(COUNT * SIZE);
    read_entry all = {.box = 0, .count = COUNT};
    peer_read(&l.data, &l.grant, &all, 1, got, COUNT * SIZE);
    for (size_t i = 0; i < COUNT; i++)
        assert_memory_equal(got + i * SIZE, boxes[i].address, SIZE);
    read_entry each[1000];
    for (size_t i = 0; i < 1000; i++)
        each[i] = (read_entry){.box = 4999 - i, .offset = i % 200, .length = 100};
    peer_read(&l.data, &l.grant, each, 1000, got, 100000);
    for (size_t i = 0; i < 1000; i++)
        assert_memory_equal(got + i * 100, (char *)boxes[4999 - i].address + i % 200,
                            100);
    free(got);
}

SERVER_TEST(connections_share_the_thread)
{
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, arena, ARENA);
    puller l = serve(&t, 1);
    peer more[15];
    for (size_t i = 0; i < 15; i++)
        more[i] = i % 2 ? peer_data(l.server, &l.control)
                        : peer_data_unix(l.server, &l.control);
    peer none = peer_connect(l.server);
    msg_hello hello = {.version_min = 1, .version_max = 1, .role = ROLE_DATA};
    memcpy(hello.id, l.control.session, 16);
    peer_request_hello(&none, &hello);
    peer_expect_error(&none, FANIN_ERR_LIMIT); /* the seventeenth */
    peer_close(&none);
    /* One that never takes its bytes does not keep the others from theirs. */
    for (int i = 0; i < 3; i++) {
        read_entry all = {.box = 0, .length = LIMIT_READ_BYTES};
        peer_request_read(&l.data, l.grant.token, LIMIT_READ_BYTES, &all, 1);
    }
    for (size_t i = 0; i < 15; i++) {
        read_entry part = {.box = 0, .offset = i, .length = 1000000};
        peer_request_read(&more[i], l.grant.token, 1000000, &part, 1);
    }
    for (size_t i = 0; i < 15; i++) {
        body in = peer_expect(&more[i], MSG_READ_OK);
        assert_memory_equal(in.data, arena + i, 1000000);
        peer_close(&more[i]);
    }
}

TEST(as_many_threads_as_there_are_cpus_for)
{
    static const struct {
        unsigned cpus;
        uint64_t mib;
        unsigned threads;
    } cases[] = {{1, 256, 1},  {2, 256, 1},   {7, 256, 1}, {8, 256, 2}, {12, 256, 3},
                 {16, 256, 4}, {128, 256, 4}, {16, 24, 3}, {16, 8, 1},  {16, 0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(stream_threads_for(cases[i].cpus, cases[i].mib << 20),
                         cases[i].threads);
}

/* Each connection has one of its own, as long as there may be more. */
SERVER_TEST(threads_come_with_connections)
{
    enum { MOST = 3, CONNECTIONS = 5 };
    fanin_server_config c = server_config();
    c.data_threads = MOST;
    fanin_server *s = server_start(&c);
    peer control = peer_open(s), data[CONNECTIONS];
    assert_int_equal(threads_named("fanin-data", NULL), 1);
    for (unsigned i = 0; i < CONNECTIONS; i++) {
        data[i] = peer_data(s, &control);
        assert_int_equal(threads_named("fanin-data", NULL), i < MOST ? i + 1 : MOST);
    }
    for (unsigned i = 0; i < CONNECTIONS; i++)
        peer_close(&data[i]);
    data[0] = peer_data(s, &control); /* theirs are kept */
    assert_int_equal(threads_named("fanin-data", NULL), MOST);
    peer_close(&data[0]);
    peer_close(&control);
}

SERVER_TEST(data_connections_end_with_their_session)
{
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, arena, ARENA);
    puller l = serve(&t, 1);
    peer idle = peer_data(l.server, &l.control);
    for (int i = 0; i < 3; i++) {
        read_entry all = {.box = 0, .length = LIMIT_READ_BYTES};
        peer_request_read(&l.data, l.grant.token, LIMIT_READ_BYTES, &all, 1);
    }
    peer_close(&l.control);
    peer_expect_closed(&idle);
    while (recv(l.data.fd, (char[4096]){0}, 4096, 0) != 0) {
        struct pollfd p = {.fd = l.data.fd, .events = POLLIN};
        assert_int_equal(poll(&p, 1, 10000), 1);
        if (p.revents & POLLHUP)
            break;
    }
    server_expect_idle(l.server);
    assert_int_equal(server_stats(l.server).pulls_abandoned, 1);
    /* The dead session's id opens nothing. */
    peer late = peer_connect(l.server);
    msg_hello hello = {.version_min = 1, .version_max = 1, .role = ROLE_DATA};
    memcpy(hello.id, l.control.session, 16);
    peer_request_hello(&late, &hello);
    peer_expect_error(&late, FANIN_ERR_CLOSED);
}

TESTS_BETWEEN(set_up, tear_down)
