/* SPDX-License-Identifier: Apache-2.0 */
/* Ends that want no answer, as older clients send them, what ends tell of one-sided reads, and ends
   that keep the lease. */
#include "server_peer.h"
#include "testing.h"

#define SIZE 1000

static uint8_t memory[SIZE];

/* A session that has opened cma, and its lease. */
typedef struct reader_here {
    peer p;
    grant g;
    msg_begin_ok lease;
} reader_here;

static peer open_cma(fanin_server *s)
{
    peer p = peer_open_unix(s);
    peer_request_path(&p, WIRE_PATH_CMA);
    peer_expect(&p, MSG_OPEN_PATH_OK);
    return p;
}

static reader_here lease_here(fanin_server *s)
{
    reader_here r = {.p = open_cma(s)};
    r.g = peer_newest(&r.p);
    r.lease = peer_begin(&r.p, &r.g);
    assert_true(r.lease.granted);
    return r;
}

static fanin_server *start(void)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory, SIZE);
    server_commit(s, 1);
    return s;
}

/* ------------------------------------------------------------------ quiet ends */

static void send_quiet_end(peer *p, const grant *g)
{
    buffer b = {0};
    msg_end m = {.quiet = true};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
}

SERVER_TEST(a_quiet_end_is_taken_and_not_answered)
{
    fanin_server *s = start();
    reader_here r = lease_here(s);
    assert_int_equal(server_stats(s).leases, 1);
    send_quiet_end(&r.p, &r.g);
    peer_ping(&r.p); /* its answer is the next frame */
    assert_int_equal(server_stats(s).leases, 0);
    assert_int_equal(server_stats(s).pulls_good, 1);
    send_quiet_end(&r.p, &r.g); /* a token that is none any more */
    peer_ping(&r.p);
    assert_int_equal(server_stats(s).pulls_good, 1);
}

/* ------------------------------------------------------------------ what ends tell */

static void end_with(peer *p, const grant *g, msg_end m)
{
    buffer b = {0};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
    peer_ping(p); /* its answer comes after the end's, if there is one */
}

SERVER_TEST(what_was_read_one_sided_is_counted_within_bounds)
{
    fanin_server *s = start();
    reader_here r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = 5, .bytes_rdma = 7});
    fanin_server_stats now = server_stats(s);
    assert_int_equal(now.bytes_cma, 5);
    assert_int_equal(now.bytes_rdma, 0); /* this session has no such path */
    assert_int_equal(now.bytes_streamed, 0);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = 5}); /* no lease */
    assert_int_equal(server_stats(s).bytes_cma, 5);

    r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .abandon = true, .bytes_cma = 5});
    assert_int_equal(server_stats(s).bytes_cma, 5);

    r = lease_here(s);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = UINT64_MAX});
    uint64_t all = server_stats(s).bytes_cma - 5;
    assert_in_range(all, 1, 1 << 20); /* what there is */

    peer tcp = peer_open(s);
    grant g = peer_lease(&tcp);
    end_with(&tcp, &g, (msg_end){.quiet = true, .bytes_cma = 5, .bytes_cuda_ipc = 5});
    assert_int_equal(server_stats(s).bytes_cma, all + 5);
    assert_int_equal(server_stats(s).bytes_cuda_ipc, 0);
}

/* ------------------------------------------------------------------ ends that keep */

static bool confirm(peer *p, const grant *g, msg_end m)
{
    buffer b = {0};
    msg_end_ok ok;
    m.keep = true;
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_END_OK);
    assert_int_equal(decode_end_ok(&in, &ok), FANIN_OK);
    return ok.good;
}

SERVER_TEST(an_end_may_keep_the_lease)
{
    fanin_server *s = start();
    reader_here r = lease_here(s);
    for (unsigned i = 0; i < 3; i++)
        assert_true(confirm(&r.p, &r.g, (msg_end){.bytes_cma = 5}));
    assert_int_equal(server_stats(s).leases, 1);
    assert_int_equal(server_stats(s).pulls_good,
                     0); /* it is one pull, which ends once */
    assert_int_equal(server_stats(s).bytes_cma, 0);
    end_with(&r.p, &r.g, (msg_end){.quiet = true, .bytes_cma = 15});
    assert_int_equal(server_stats(s).leases, 0);
    assert_int_equal(server_stats(s).pulls_good, 1);
    assert_int_equal(server_stats(s).bytes_cma, 15);
    assert_false(confirm(&r.p, &r.g, (msg_end){0}));

    r = lease_here(s);
    confirm(&r.p, &r.g, (msg_end){.abandon = true}); /* gives back what it keeps */
    assert_int_equal(server_stats(s).leases, 0);
}

SERVER_TEST(a_kept_lease_is_waited_for_and_goes_with_its_epoch)
{
    fanin_server *s = server_start_lease(300);
    server_put(s, RUN, "a", memory, SIZE);
    server_commit(s, 1);
    reader_here r = lease_here(s);
    assert_true(confirm(&r.p, &r.g, (msg_end){0}));
    server_begin(
        s); /* as long as the lease lasts, which no confirmation makes longer */
    assert_int_equal(server_stats(s).drains_expired, 1);
    assert_false(confirm(&r.p, &r.g, (msg_end){0}));
    server_commit(s, 2);
    assert_false(confirm(&r.p, &r.g, (msg_end){0}));
    assert_false(peer_end(&r.p, &r.g, false).good);
    assert_int_equal(server_stats(s).pulls_stale, 1);
}
