/* SPDX-License-Identifier: Apache-2.0 */
/* Data connections over TLS whose control connection is lost before they have shaken hands: they
   are secured as they were begun, and the rank says to them what it would have said before. */
#include "ends.h"
#include "error_set.h"
#include "net/client_state.h"
#include "rank_proxy.h"
#include "secrets.h"
#include "stream/stream_link_internal.h"
#include "testing.h"

#define CALL_MS 20000
#define CONTROL 0 /* its number at the proxy */

typedef struct scene {
    fanin_server *server;
    flip seen; /* alters nothing */
    rank_proxy proxy;
    fanin_client *client;
    connection *control;
    stream_link *link;
    stream_share share;
    stream_work work; /* that is told of a failure; nothing can be asked yet */
} scene;

static scene s;

static void begin(void)
{
    uint32_t published[4];
    fanin_server_config rank = make_server_config();
    fanin_client_config reader = make_client_config();
    char address[32];
    rank.secret_file = reader.secret_file = secret_of('1');
    reader.no_unix = true;
    s = (scene){.seen = {.at = UINT64_MAX}, .work = {.error = FANIN_ERROR_INIT}};
    s.server = make_server(&rank, address, sizeof address);
    publish_matrix(s.server, published, 2, 2);
    rank_proxy_start_flip(&s.proxy, fanin_server_port(s.server), &s.seen);
    const char *by = s.proxy.address;
    s.client = connect_client(&reader, &by, 1);
    s.control = s.client->peers[0].control;
    rank_proxy_hold(&s.proxy);
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(stream_link_create(s.client, s.control, 1, &s.link, &error), error);
    s.share = (stream_share){.loop = &s.client->loop};
    stream_link_start(s.link, &s.work, &s.share);
}

static int tear_down(void **state)
{
    stream_link_destroy(&s.link);
    fanin_client_destroy(&s.client);
    rank_proxy_stop(&s.proxy);
    fanin_server_destroy(&s.server, 0);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static fanin_server_stats stats(void)
{
    fanin_server_stats out = {.struct_size = sizeof out};
    assert_int_equal(fanin_server_get_stats(s.server, &out), FANIN_OK);
    return out;
}

/* One turn of the client's loop; fails the test when @p at has passed. */
static void turn(deadline at)
{
    assert_false(deadline_passed(at));
    loop_step(&s.client->loop, deadline_in_ms(5));
}

static void await_hello_of_tls(void)
{
    deadline at = deadline_in_ms(CALL_MS);
    while (!s.link->connections[0]->tls)
        turn(at);
    assert_true(stream_link_is_whole(s.link));
}

/* The rank knows that the session has ended, and hears of the data connection only now. */
static void let_it_shake_hands(void)
{
    deadline at = deadline_in_ms(CALL_MS);
    while (stats().sessions > 0)
        turn(at);
    assert_int_equal(s.link->connections[0]->stage, CONNECTING);
    assert_false(s.work.failed);
    rank_proxy_let_go(&s.proxy);
    while (!s.work.failed)
        turn(at);
}

static void expect_an_answer_by_tls(void)
{
    assert_says(s.work.error.message, "the session of this data connection is gone");
    assert_int_equal(s.work.error.status, FANIN_ERR_CLOSED);
    assert_int_equal(stats().sessions_refused, 0); /* which handshakes are that fail */
    assert_int_equal(stats().protocol_errors, 0);
}

CASE(amid_its_handshake)
{
    begin();
    await_hello_of_tls();
    rank_proxy_cut(&s.proxy, CONTROL);
    deadline at = deadline_in_ms(CALL_MS);
    while (s.control->state != CONNECTION_DOWN)
        turn(at);
    let_it_shake_hands();
    expect_an_answer_by_tls();
}

CASE(before_its_handshake)
{
    fanin_error lost = FANIN_ERROR_INIT;
    begin();
    connection_fail(s.control, &lost);
    await_hello_of_tls();
    let_it_shake_hands();
    expect_an_answer_by_tls();
}

/* None is begun that nobody could say how to secure. */
CASE(after_its_loss_none_is_begun)
{
    fanin_error lost = FANIN_ERROR_INIT, error = FANIN_ERROR_INIT;
    stream_link *none = NULL;
    begin();
    error_set(&lost, FANIN_ERR_CLOSED, NULL, "the rank has hung up");
    connection_fail(s.control, &lost);
    assert_int_equal(stream_link_create(s.client, s.control, 1, &none, &error),
                     FANIN_ERR_CLOSED);
    assert_says(error.message, "the rank has hung up");
    assert_null(none);
}

TESTS_BETWEEN(NULL, secrets_tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
