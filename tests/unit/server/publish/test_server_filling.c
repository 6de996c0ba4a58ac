/* SPDX-License-Identifier: Apache-2.0 */
/* Publications that fill: what readers may read before all is there, and how they are told. */
#include "call.h"
#include "clock.h"
#include "publish/filling.h"
#include "server_peer.h"
#include "testing.h"

#include <pthread.h>
#include <stdatomic.h>

#define BOXES 64
#define SIZE 4096

static uint8_t memory[BOXES][SIZE];

/* A server that has put BOXES boxes. */
static fanin_server *start_with(fanin_server_config c)
{
    fanin_server *s = server_start(&c);
    char name[16];
    for (unsigned i = 0; i < BOXES; i++) {
        snprintf(name, sizeof name, "%08x", i);
        server_put(s, RUN, name, memory[i], SIZE);
    }
    return s;
}

static fanin_server *start(uint32_t lease_ms)
{
    fanin_server_config c = server_config();
    c.lease_ms = lease_ms;
    return start_with(c);
}

static void fill(fanin_server *s, uint64_t step)
{
    assert_works(server_fill(s, RUN, step, ERROR));
}

static void prove(fanin_server *s, uint64_t step, uint32_t first, uint32_t count)
{
    assert_works(server_prove(s, RUN, step, &(landed_range){first, count}, 1, ERROR));
}

static fanin_status try_to_prove(fanin_server *s, const char *name, uint64_t step,
                                 uint32_t first, uint32_t count, fanin_error *error)
{
    const landed_range ranges[] = {{0, 0}, {first, count}};
    return server_prove(s, name, step, ranges, 2, error);
}

/* ------------------------------------------------------------------ what is told */

static landed_range told[LIMIT_LANDED_RANGES];

static void ask(peer *p, const grant *g, uint64_t version, uint32_t timeout_ms)
{
    buffer b = {0};
    msg_landed m = {.version = version, .timeout_ms = timeout_ms};
    memcpy(m.token, g->token, sizeof m.token);
    encode_landed(&b, ++p->request, &m);
    peer_send(p, &b);
}

static msg_landed_ok hear(peer *p)
{
    msg_landed_ok m;
    body in = peer_expect(p, MSG_LANDED_OK);
    assert_int_equal(decode_landed_ok(&in, &m, told), FANIN_OK);
    return m;
}

static void expect_range(const msg_landed_ok *m, uint32_t i, uint32_t first,
                         uint32_t count)
{
    assert_true(i < m->n_ranges);
    assert_int_equal(m->ranges[i].first, first);
    assert_int_equal(m->ranges[i].count, count);
}

static bool confirm(peer *p, const grant *g)
{
    buffer b = {0};
    msg_end m = {.keep = true};
    msg_end_ok ok;
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_END_OK);
    assert_int_equal(decode_end_ok(&in, &ok), FANIN_OK);
    return ok.good;
}

/* ------------------------------------------------------------------ cases */

static void refuse_read(puller *r, uint64_t first, uint64_t count)
{
    read_entry all = {.box = first, .count = count}, one = {.box = first, .length = 9};
    peer_request_read(&r->data, r->grant.token, count * SIZE, &all, 1);
    assert_says(peer_expect_error(&r->data, FANIN_ERR_STALE).message,
                "has not come yet");
    if (count > 1)
        return;
    peer_request_read(&r->data, r->grant.token, 9, &one, 1);
    peer_expect_error(&r->data, FANIN_ERR_STALE);
    peer_request_digest(&r->data, &r->grant, SIZE, 0, &all, 1);
    peer_expect_error(&r->data, FANIN_ERR_STALE);
}

SERVER_TEST(only_proven_boxes_are_read)
{
    fanin_server *s = start(0);
    fill(s, 7);
    puller r = puller_open(s);
    puller_begin(&r);
    assert_int_equal(r.grant.step, 7);
    memset(memory, 0xee, sizeof memory);
    refuse_read(&r, 0, 1);
    memset(memory[3], 3, SIZE);
    memset(memory[4], 4, SIZE);
    prove(s, 7, 3, 2);
    puller_expect(&r, 3, 3, SIZE);
    puller_expect(&r, 4, 4, SIZE);
    refuse_read(&r, 2, 1);
    refuse_read(&r, 2, 2);
    refuse_read(&r, 3, 3);
    refuse_read(&r, BOXES - 1, 1);
    prove(s, 7, 0, BOXES);
    puller_expect(&r, BOXES - 1, 0xee, SIZE);
    assert_int_equal(server_stats(s).pulls_stale, 0);
    puller_end(&r);
}

SERVER_TEST(what_has_come_is_told_from_the_version_that_is_known)
{
    fanin_server *s = start(0);
    fill(s, 1);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    ask(&p, &g, 0, 0);
    msg_landed_ok m = hear(&p);
    assert_int_equal(m.n_ranges, 0);
    assert_int_equal(m.version, 0);

    prove(s, 1, 8, 2);
    prove(s, 1, 2, 3);
    prove(s, 1, 3, 8); /* of which 5 .. 7 and 10 are new */
    prove(s, 1, 2, 9); /* none is */
    ask(&p, &g, 0, 60000);
    m = hear(&p);
    assert_int_equal(m.n_ranges, 4);
    expect_range(&m, 0, 8, 2);
    expect_range(&m, 1, 2, 3);
    expect_range(&m, 2, 5, 3);
    expect_range(&m, 3, 10, 1);
    ask(&p, &g, 3, 60000);
    m = hear(&p);
    assert_int_equal(m.n_ranges, 1);
    expect_range(&m, 0, 10, 1);
    assert_int_equal(m.version, 4);

    ask(&p, &g, 4, 60000); /* is parked, and answered by the next */
    assert_true(peer_silent(&p, 50));
    prove(s, 1, 20, 1);
    m = hear(&p);
    assert_int_equal(m.version, 5);
    expect_range(&m, 0, 20, 1);
    ask(&p, &g, 5, 30); /* its time ends it */
    m = hear(&p);
    assert_int_equal(m.version, 5);
    assert_int_equal(m.n_ranges, 0);
    ask(&p, &g, 6, 60000);
    assert_says(peer_expect_error(&p, FANIN_ERR_ARGUMENT).message, "version");
    ask(&p, &g, UINT64_MAX, 60000);
    peer_expect_error(&p, FANIN_ERR_ARGUMENT);
}

SERVER_TEST(a_session_among_48_is_told_at_most_once_in_6_ms)
{
    fanin_server *s = start(0);
    fill(s, 1);
    for (unsigned i = 0; i < 47; i++)
        (void)peer_open(s);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    msg_landed_ok m = {0};
    uint64_t began = clock_ns(), boxes = 0;
    unsigned answers = 0;
    for (unsigned i = 0; i < BOXES; i++) {
        prove(s, 1, i, 1);
        if (i > 0 && peer_silent(&p, 1))
            continue;
        if (i > 0) {
            m = hear(&p);
            answers++;
        }
        for (uint32_t k = 0; k < m.n_ranges; k++)
            boxes += m.ranges[k].count;
        ask(&p, &g, m.version, 60000);
    }
    while (boxes < BOXES) {
        m = hear(&p);
        answers++;
        for (uint32_t k = 0; k < m.n_ranges; k++)
            boxes += m.ranges[k].count;
        ask(&p, &g, m.version, 60000);
    }
    assert_int_equal(boxes, BOXES);
    assert_true(answers <= (clock_ns() - began) / 6000000 + 2);
}

SERVER_TEST(a_new_epoch_has_nothing_proven)
{
    fanin_server *s = start(0);
    fill(s, 1);
    prove(s, 1, 0, BOXES);
    puller r = puller_open(s);
    puller_begin(&r);
    ask(&r.control, &r.grant, 1, 60000);
    server_begin(s);
    assert_says(peer_expect_error(&r.control, FANIN_ERR_STALE).message, "rewritten");
    assert_false(confirm(&r.control, &r.grant));
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(try_to_prove(s, RUN, 1, 0, 1, &error), FANIN_ERR_STALE);
    fill(s, 1); /* the same step, or one below, is filled anew */
    puller_begin(&r);
    refuse_read(&r, 0, 1);
    assert_int_equal(try_to_prove(s, RUN, 2, 0, 1, &error), FANIN_ERR_STALE);
    assert_says(error.message, "step 2");
    prove(s, 1, 0, 1);
    puller_expect(&r, 0, memory[0][0], SIZE);
    assert_true(confirm(&r.control, &r.grant));

    server_begin(s);
    server_commit(s, 2); /* and a plain commit is whole */
    puller_begin(&r);
    puller_expect(&r, BOXES - 1, memory[BOXES - 1][0], SIZE);
    ask(&r.control, &r.grant, 0, 60000);
    msg_landed_ok m = hear(&r.control);
    expect_range(&m, 0, 0, BOXES);
    ask(&r.control, &r.grant, m.version, 0);
    assert_int_equal(hear(&r.control).n_ranges, 0);
    assert_int_equal(try_to_prove(s, RUN, 2, 0, 1, &error), FANIN_ERR_STALE);
    puller_end(&r);
}

SERVER_TEST(a_pause_leaves_nothing_proven)
{
    fanin_server *s = start(0);
    fill(s, 1);
    prove(s, 1, 0, BOXES);
    assert_works(fanin_server_pause(s, RUN, "moved", ERROR));
    assert_works(fanin_server_resume(s, RUN, ERROR));
    puller r = puller_open(s);
    puller_begin(&r);
    refuse_read(&r, 0, 1);
}

SERVER_TEST(bad_proofs_are_refused)
{
    fanin_server *s = start(0);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(try_to_prove(s, "lora:none", 1, 0, 1, &error),
                     FANIN_ERR_NOT_FOUND);
    assert_int_equal(try_to_prove(s, RUN, 0, 0, 1, &error), FANIN_ERR_STALE);
    assert_int_equal(server_fill(s, "lora:none", 1, &error), FANIN_ERR_ARGUMENT);
    fill(s, 1);
    assert_int_equal(server_fill(s, RUN, 2, &error), FANIN_ERR_STATE);
    assert_int_equal(try_to_prove(s, RUN, 1, 1, BOXES, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(try_to_prove(s, RUN, 1, UINT32_MAX, UINT32_MAX, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(try_to_prove(s, RUN, 1, 0, 0, &error), FANIN_OK);
    puller r = puller_open(s);
    puller_begin(&r);
    refuse_read(&r, 1, 1);
}

SERVER_TEST(parked_requests_are_few_and_end_with_the_session)
{
    fanin_server *s = start(0);
    fill(s, 1);
    peer p = peer_open(s), other = peer_open(s);
    grant g = peer_lease(&p);
    for (unsigned i = 0; i < 16; i++)
        ask(&p, &g, 0, 3600000);
    ask(&p, &g, 0, 3600000);
    assert_says(peer_expect_error(&p, FANIN_ERR_LIMIT).message, "16 parked");
    ask(&other, &g, 0, 3600000); /* a token of another session */
    peer_expect_error(&other, FANIN_ERR_STALE);
    peer_close(&other);
    peer_end(&p, &g, false);
    for (unsigned i = 0; i < 16; i++)
        peer_expect_error(&p, FANIN_ERR_STALE);
    g = peer_lease(&p);
    for (unsigned i = 0; i < 16; i++)
        ask(&p, &g, 0, 3600000);
    peer_ping(&p);
    peer_close(&p);
    server_expect_idle(s);
    prove(s, 1, 0, 1);
    p = peer_open(s);
    g = peer_lease(&p);
    ask(&p, &g, 1, 3600000);
    peer_ping(&p);
    server_stop(&s, 0);
    assert_false(peer_silent(&p, 10000)); /* CLOSED, or at least the end */
}

#define MANY 20000

SERVER_TEST(more_ranges_than_fit_come_one_after_the_other)
{
    static fanin_box parts[MANY];
    fanin_server *s = server_start_lease(0);
    fanin_tensor t = byte_tensor("a", parts, memory[0], MANY);
    t.n_boxes = MANY;
    for (uint32_t i = 0; i < MANY; i++)
        parts[i] = (fanin_box){.offset = {i}, .extent = {1}, .address = memory[0]};
    assert_works(fanin_server_put(s, RUN, &t, 1, false, ERROR));
    fill(s, 1);
    for (uint32_t i = 0; i < MANY; i += 2)
        prove(s, 1, i, 1);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    uint64_t known = 0;
    while (known < MANY / 2) {
        ask(&p, &g, known, 60000);
        msg_landed_ok m = hear(&p);
        for (uint32_t i = 0; i < m.n_ranges; i++)
            expect_range(&m, i, 2 * (uint32_t)(known + i), 1);
        known += m.n_ranges;
        assert_int_equal(m.version, known);
    }
}

/* ------------------------------------------------------------------ the role */

SERVER_TEST(a_relay_says_that_it_is_no_rank)
{
    fanin_server_config c = server_config();
    c.flags |= FANIN_SERVER_RELAY;
    fanin_server *s = start_with(c);
    peer old = peer_connect(s), p = peer_connect(s);
    peer_request_hello(&old, &(msg_hello){.version_min = 1,
                                          .version_max = 1,
                                          .role = ROLE_CONTROL,
                                          .features = FEATURES & ~FEATURE_RELAYS});
    assert_says(peer_expect_error(&old, FANIN_ERR_UNSUPPORTED).message, "no rank");
    peer_expect_closed(&old);
    msg_hello_ok ok = peer_hello_with(
        &p, (msg_hello){.role = ROLE_CONTROL, .features = FEATURE_RELAYS});
    assert_true(ok.relay);
    assert_true(ok.features & FEATURE_RELAYS);
    peer d = peer_data(s, &p);
    peer_ping(&d);
}

/* ------------------------------------------------------- beside a relay that fills */

#define STEPS 40

typedef struct relay {
    fanin_server *server;
    atomic_bool stop;
    uint64_t good, stale; /* boxes of the reader; its leases that ended early */
} relay;

/* Reads what has come of one lease, and confirms each. False: the lease is gone. */
static bool read_what_comes(relay *l, puller *r)
{
    uint64_t version = 0, boxes = 0;
    uint8_t got[SIZE];
    while (boxes < BOXES) {
        ask(&r->control, &r->grant, version, 60000);
        peer_receive(&r->control);
        if (r->control.frame.type != MSG_LANDED_OK)
            return false;
        msg_landed_ok m;
        body in = {.data = r->control.body, .size = r->control.frame.length};
        assert_int_equal(decode_landed_ok(&in, &m, told), FANIN_OK);
        version = m.version;
        for (uint32_t i = 0; i < m.n_ranges; i++)
            for (uint32_t k = 0; k < m.ranges[i].count; k++, boxes++) {
                read_entry one = {.box = m.ranges[i].first + k, .count = 1};
                peer_request_read(&r->data, r->grant.token, SIZE, &one, 1);
                peer_receive(&r->data);
                if (r->data.frame.type != MSG_READ_OK)
                    return false;
                memcpy(got, r->data.body, SIZE);
                if (!confirm(&r->control, &r->grant))
                    return false;
                for (size_t at = 0; at < SIZE; at++)
                    assert_int_equal(got[at], (uint8_t)(r->grant.step + one.box));
                l->good++;
            }
    }
    return true;
}

static void *read_all_the_time(void *cookie)
{
    relay *l = cookie;
    puller r = puller_open_unix(l->server);
    while (!atomic_load(&l->stop)) {
        r.grant = peer_newest(&r.control);
        if (!peer_begin(&r.control, &r.grant).granted)
            continue;
        l->stale += !read_what_comes(l, &r);
        peer_end(&r.control, &r.grant, false);
    }
    puller_close(&r);
    return NULL;
}

/* A hand-written reader beside a relay that overwrites its copy step by step: each box that was
   confirmed is of its step. */
SERVER_TEST(confirmed_boxes_are_of_their_step)
{
    relay l = {.server = start(20)};
    pthread_t reader;
    atomic_init(&l.stop, false);
    fill(l.server, 1);
    assert_int_equal(pthread_create(&reader, NULL, read_all_the_time, &l), 0);
    for (uint64_t step = 2; step < STEPS; step++) {
        server_begin(l.server);
        memset(memory, 0xff, sizeof memory);
        fill(l.server, step);
        for (uint32_t i = 0; i < BOXES; i++) {
            uint32_t box = (i * 37 + (uint32_t)step) % BOXES;
            memset(memory[box], (int)(step + box), SIZE);
            prove(l.server, step, box, 1);
            if (i % 16 == 0)
                usleep(2000);
        }
    }
    atomic_store(&l.stop, true);
    pthread_join(reader, NULL); /* it reads the last step to its end */
    assert_true(l.good >= BOXES);
}
