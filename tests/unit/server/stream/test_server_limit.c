/* SPDX-License-Identifier: Apache-2.0 */
/* max_bytes_per_second: one limit for all readers of all servers, who may end while they wait. */
#include "clock.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "stream/stream.h"
#include "testing.h"

#define MIB ((size_t)1 << 20)
#define RATE (32 * MIB)
#define READS 16 /* of 1 MiB, by each of four readers */
#define HOUR_NS (UINT64_C(3600) * 1000000000)

static uint8_t memory[MIB];

static int set_up(void **state)
{
    atomic_store(&limit_bucket.full_at, 0);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, server_tear_down)

static fanin_server *start(void)
{
    fanin_server_config config = server_config();
    config.max_bytes_per_second = RATE;
    config.data_threads = 1;
    config.flags = 0; /* UCX would be there */
    return server_publish(&config, memory, sizeof memory);
}

static void ask(puller *r)
{
    read_entry all = {.box = 0, .length = MIB};
    peer_request_read(&r->data, r->grant.token, MIB, &all, 1);
}

static puller ask_at(fanin_server *s, puller (*open)(fanin_server *))
{
    puller r = open(s);
    puller_begin(&r);
    ask(&r);
    return r;
}

CASE(all_readers_of_all_servers_share_it)
{
    puller readers[4];
    fanin_server *servers[] = {start(), start()};
    uint64_t began = clock_ns();
    for (size_t i = 0; i < 4; i++)
        readers[i] = ask_at(servers[i % 2], i < 2 ? puller_open : puller_open_unix);
    for (int n = 1; n <= READS; n++) {
        for (size_t i = 0; i < 4; i++) {
            peer_expect(&readers[i].data, MSG_READ_OK);
            if (n < READS)
                ask(&readers[i]);
        }
    }
    /* 64 MiB, but for what may be sent at once, by two threads. */
    uint64_t burst = RATE / (1000000000 / LIMIT_WINDOW_NS) + 2 * MIB;
    uint64_t least = (4 * READS * MIB - burst) * 1000 / RATE;
    assert_in_range((clock_ns() - began) / 1000000, least, UINT32_MAX);
}

CASE(who_waits_goes_on)
{
    log_listen("sent-slowly"); /* of strangers whose CPU time is used up */
    fanin_server *s = start();
    bucket_take(&limit_bucket, clock_ns(), HOUR_NS);
    puller r = ask_at(s, puller_open);
    assert_true(peer_silent(&r.data, 50));
    peer_ping(&r.control);
    bucket_give(&limit_bucket, HOUR_NS);
    peer_expect(&r.data, MSG_READ_OK);
    log_expect(0, "");
    assert_int_equal(server_stats(s).requests_delayed, 0);
}

/* One-sided reads of the network cannot be held back. */
CASE(rdma_is_not_offered)
{
    peer p = peer_open_unix(start());
    peer_request_path(&p, WIRE_PATH_RDMA);
    msg_error e = peer_expect_error(&p, FANIN_ERR_UNSUPPORTED);
    assert_says(e.message, "limits its bytes a second");
}

CASE(who_waits_can_end)
{
    fanin_server *s = start();
    bucket_take(&limit_bucket, clock_ns(), HOUR_NS);
    puller leaves = ask_at(s, puller_open);
    assert_true(peer_silent(&leaves.data, 50));
    puller_close(&leaves);
    server_expect_idle(s);
    puller stays = ask_at(s, puller_open_unix);
    assert_true(peer_silent(&stays.data, 50));
    server_stop(&s, 0);
    peer_expect_closed(&stays.data);
}
