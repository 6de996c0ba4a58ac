/* SPDX-License-Identifier: Apache-2.0 */
/* Peers that do what no client does: each gets a refusal, and the server goes on. */
#include "clock.h"
#include "open_files.h"
#include "random.h"
#include "server_peer.h"
#include "testing.h"
#include "tls.h"

#include <poll.h>
#include <sys/socket.h>

static uint8_t memory[2][1000];
static fanin_server *server;
static unsigned files; /* before it */

static int set_up(void **state)
{
    files = open_files();
    server = server_start(NULL);
    server_put(server, RUN, "a", memory[0], 1000);
    server_put(server, RUN, "b", memory[1], 1000);
    server_commit(server, 1);
    server_put(server, "lora:other", "x", memory[0], 10);
    assert_int_equal(fanin_server_commit(server, "lora:other", 1, NULL, NULL), 0);
    return 0;
}

/* After each test the server still serves, and nothing was left behind. */
static int tear_down(void **state)
{
    server_close_peers();
    puller r = puller_open(server);
    puller_begin(&r);
    puller_expect(&r, 0, 0, 1000);
    puller_end(&r);
    puller_close(&r);
    server_expect_idle(server);
    int status = server_tear_down(state);
    assert_int_equal(open_files(), files);
    return status;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static void send_header(peer *p, uint16_t type, uint32_t length)
{
    uint8_t header[FRAME_SIZE];
    frame f = {.type = (message_type)type, .request = ++p->request, .length = length};
    frame_encode(&f, header);
    peer_send_raw(p, header, sizeof header);
}

static void expect_end(peer *p, fanin_status code)
{
    peer_expect_error(p, code);
    peer_expect_closed(p);
    peer_close(p);
}

CASE(garbage_is_refused)
{
    static const char *const words[] = {"GET / HTTP/1.1\r\nHost: rank\r\n\r\n",
                                        "FAN1FAN1FAN1FAN1FAN1FAN1"};
    for (size_t i = 0; i < 2; i++) {
        peer p = peer_connect(server);
        peer_send_raw(&p, words[i], strlen(words[i]));
        peer_receive(&p);
        assert_int_equal(p.frame.type, MSG_ERROR);
        peer_expect_closed(&p);
        peer_close(&p);
    }
    assert_int_equal(server_stats(server).protocol_errors, 2);
}

/* Of a rank without a secret. */
CASE(tls_is_refused_in_its_own_words)
{
    static const char hello[] =
        "\x16\x03\x01\x02\x01\x01\xfc\x03\x03\x20zzzzzzzzzzzzzzzz";
    char heard[TLS_ALERT_SIZE];
    peer p = peer_connect(server);
    peer_send_raw(&p, hello, sizeof hello - 1);
    assert_true(peer_receive_raw(&p, heard, sizeof heard));
    assert_memory_equal(heard, TLS_NO_SECRET_ALERT, sizeof heard);
    peer_expect_closed(&p);
    peer_close(&p);
    assert_int_equal(server_stats(server).sessions_refused, 1);
}

CASE(hello_must_come_first_and_be_short)
{
    peer p = peer_connect(server);
    send_header(&p, MSG_LIST, 0);
    expect_end(&p, FANIN_ERR_PROTOCOL);
    p = peer_connect(server);
    send_header(&p, MSG_HELLO, LIMIT_BEFORE_HELLO + 1);
    expect_end(&p, FANIN_ERR_PROTOCOL);
    p = peer_connect(server);
    msg_hello m = {.version_min = 9, .version_max = 12, .role = ROLE_CONTROL};
    peer_request_hello(&p, &m);
    msg_error e = peer_expect_error(&p, FANIN_ERR_VERSION);
    assert_non_null(strstr(e.message, "9 to 12"));
    peer_expect_closed(&p);
    peer_close(&p);
    p = peer_open(server);
    m.version_min = 1;
    peer_request_hello(&p, &m);
    expect_end(&p, FANIN_ERR_PROTOCOL); /* twice */
}

CASE(who_says_nothing_is_dropped)
{
    peer p = peer_connect(server), q = peer_connect(server);
    uint64_t start = clock_ns();
    send_header(&q, MSG_HELLO, 100); /* and nothing more */
    peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    peer_expect_closed(&p);
    peer_expect_error(&q, FANIN_ERR_TIMEOUT);
    assert_true(clock_ns() - start > UINT64_C(1500000000));
}

CASE(odd_messages_of_a_session)
{
    /* Unknown requests are answered, and the session goes on. */
    peer p = peer_open(server);
    static const uint16_t unknown[] = {0, 3, 32, 39, 1000, 65535};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        send_header(&p, unknown[i], 5);
        peer_send_raw(&p, "\xff\xff\xff\xff\xff", 5);
        peer_expect_error(&p, FANIN_ERR_UNSUPPORTED);
        assert_int_equal(p.frame.request, p.request);
    }
    peer_ping(&p);
    peer_close(&p);
    /* Replies, reads, too long and malformed bodies end it. */
    static const struct {
        uint16_t type;
        uint32_t length;
    } bad[] = {{MSG_HELLO_OK, 0}, {MSG_BEGIN_OK, 0},      {MSG_EVENT, 0},
               {MSG_ERROR, 0},    {MSG_READ, 0},          {MSG_LIST, LIMIT_REQUEST + 1},
               {MSG_WAIT, 0},     {MSG_PING, UINT32_MAX}, {MSG_DIGEST, 0},
               {MSG_OFFER_OK, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        p = peer_open(server);
        send_header(&p, bad[i].type, bad[i].length);
        peer_expect_error(&p, FANIN_ERR_PROTOCOL);
        assert_int_equal(p.frame.request, p.request);
        peer_expect_closed(&p);
        peer_close(&p);
    }
    p = peer_open(server);
    send_header(&p, MSG_BEGIN, 5);
    peer_send_raw(&p, "\xdf\xff\xff\xff\xff", 5); /* a map of 2^32 - 1 entries */
    expect_end(&p, FANIN_ERR_PROTOCOL);
    /* The same on data connections. */
    p = peer_open(server);
    for (size_t i = 0; i < 3; i++) {
        peer d = peer_data(server, &p);
        static const uint16_t types[] = {MSG_BEGIN, MSG_READ_OK, MSG_READ};
        send_header(&d, types[i], i < 2 ? 0 : LIMIT_READ_REQUEST + 1);
        expect_end(&d, FANIN_ERR_PROTOCOL);
    }
    peer d = peer_data(server, &p);
    send_header(&d, 77, 0);
    peer_expect_error(&d, FANIN_ERR_UNSUPPORTED);
    peer_ping(&d);
}

static void expect_refused(peer *d, const uint8_t token[16], uint64_t bytes,
                           read_entry entry, fanin_status code)
{
    peer_request_read(d, token, bytes, &entry, 1);
    peer_expect_error(d, code);
    assert_int_equal(d->frame.request, d->request);
}

CASE(reads_stay_inside_the_boxes)
{
    puller r = puller_open(server);
    puller_begin(&r);
    static const struct {
        read_entry entry;
        uint64_t bytes;
    } bad[] = {{{.box = 0, .offset = 1, .length = 1000}, 1000},
               {{.box = 0, .offset = 1000, .length = 1}, 1},
               {{.box = 0, .offset = INT64_MAX, .length = 1}, 1},
               {{.box = 2, .count = 1}, 1000},
               {{.box = 0, .count = 3}, 3000},
               {{.box = 1, .count = 2}, 2000},
               {{.box = LIMIT_BOXES - 1, .count = 1}, 1},
               {{.box = 0, .count = 1}, 999},
               {{.box = 0, .count = 1}, 1001},
               {{.box = 0, .count = 2}, 1000}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_refused(&r.data, r.grant.token, bad[i].bytes, bad[i].entry,
                       FANIN_ERR_ARGUMENT);
    assert_int_equal(server_stats(server).reads_refused, 10);
    assert_int_equal(server_stats(server).bytes_streamed, 0);
}

CASE(reads_need_a_lease_of_the_session)
{
    read_entry one = {.box = 0, .length = 10};
    peer p = peer_open(server), q = peer_open(server);
    peer d = peer_data(server, &p), e = peer_data(server, &q);
    grant none = {.token = {1}}, g = peer_lease(&p);
    expect_refused(&d, none.token, 10, one, FANIN_ERR_STALE);
    expect_refused(&e, g.token, 10, one, FANIN_ERR_STALE); /* another session's */
    assert_false(peer_end(&q, &g, false).good);            /* nor can it end it */
    uint8_t got[10];
    peer_read(&d, &g, &one, 1, got, 10);
    /* A lease of one publication does not read another: boxes are its own. */
    buffer b = {0};
    msg_begin m = {.publication = "lora:other", .step = 1};
    peer_request_wait(&p, m.publication, WIRE_RULE_NEWEST, 0, 1000);
    body in = peer_expect(&p, MSG_WAIT_OK);
    msg_wait_ok ok;
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    m.catalog_version = ok.catalog_version;
    encode_begin(&b, ++p.request, &m);
    peer_send(&p, &b);
    in = peer_expect(&p, MSG_BEGIN_OK);
    msg_begin_ok begun;
    assert_int_equal(decode_begin_ok(&in, &begun), FANIN_OK);
    assert_true(begun.granted);
    expect_refused(&d, begun.token, 11, (read_entry){.box = 0, .length = 11},
                   FANIN_ERR_ARGUMENT);
    expect_refused(&d, begun.token, 1000, (read_entry){.box = 1, .count = 1},
                   FANIN_ERR_ARGUMENT);
    /* After end and after a removal the token is worth nothing. */
    assert_true(peer_end(&p, &g, false).good);
    expect_refused(&d, g.token, 10, one, FANIN_ERR_STALE);
    assert_int_equal(fanin_server_remove(server, "lora:other", NULL, NULL), 0);
    expect_refused(&d, begun.token, 10, one, FANIN_ERR_STALE);
}

CASE(catalogs_beyond_their_end)
{
    peer p = peer_open(server);
    grant g = peer_newest(&p);
    msg_blob_request m = {.publication = RUN, .catalog_version = g.catalog_version};
    static const uint64_t offsets[] = {100000, UINT64_MAX};
    for (size_t i = 0; i < 2; i++) {
        m.offset = offsets[i];
        peer_request_blob(&p, MSG_BOXES, &m);
        peer_expect_error(&p, FANIN_ERR_ARGUMENT);
    }
    m.offset = 0;
    m.catalog_version++;
    peer_request_blob(&p, MSG_BOXES, &m);
    peer_expect_error(&p, FANIN_ERR_STALE);
    m.path = WIRE_PATH_CMA;
    m.catalog_version--;
    peer_request_blob(&p, MSG_REGIONS, &m);
    peer_expect_error(&p, FANIN_ERR_UNSUPPORTED); /* no rkeys for the asking */
    peer_request_blob(&p, MSG_KEYS, &m);          /* digest of zeros */
    peer_expect_error(&p, FANIN_ERR_STALE);
    snprintf(m.publication, sizeof m.publication, "lora:none");
    peer_request_blob(&p, MSG_BOXES, &m);
    peer_expect_error(&p, FANIN_ERR_NOT_FOUND);
}

/* Asks for more than it takes: the server stops reading its requests. */
CASE(who_does_not_read_is_bounded)
{
    peer p = peer_open(server);
    buffer b = {0};
    for (int i = 0; i < 1000; i++)
        encode_list(&b, 1, NULL);
    assert_false(b.failed);
    uint64_t sent = 0;
    struct pollfd room = {.fd = p.fd, .events = POLLOUT};
    while (poll(&room, 1, 300) == 1 && sent < (64 << 20)) {
        ssize_t n = send(p.fd, b.data + sent % b.size, b.size - sent % b.size,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        sent += n > 0 ? (uint64_t)n : 0;
    }
    buffer_free(&b);
    assert_true(sent < (64 << 20));
    assert_true(server_stats(server).session_memory < (16 << 20));
    peer other = peer_open(server);
    peer_ping(&other);
}

/* More than are told why. */
CASE(crowds_are_turned_away)
{
    enum { CROWD = 40, PLACES = 8 };
    fanin_server_config config = server_config();
    config.max_sessions = PLACES;
    fanin_server *small = server_start(&config);
    peer own = peer_open_unix(small);
    for (size_t i = 0; i < CROWD; i++)
        (void)peer_connect(small);
    while (server_stats(small).sessions_refused < CROWD - PLACES)
        peer_ping(&own);
    server_close_peers();
    server_stop(&small, 0);
}

CASE(random_bytes_and_bent_frames)
{
    random_source seed = {4711};
    for (int round = 0; round < 300; round++) {
        peer p = round % 2 ? peer_open(server) : peer_connect(server);
        uint8_t noise[400];
        size_t size = random_next(&seed) % sizeof noise;
        for (size_t i = 0; i < size; i++)
            noise[i] = (uint8_t)random_next(&seed);
        if (round % 3) {
            frame f = {.type = (message_type)(random_next(&seed) % 34),
                       .request = 1,
                       .length = (uint32_t)(size > FRAME_SIZE ? size - FRAME_SIZE : 0)};
            if (size >= FRAME_SIZE)
                frame_encode(&f, noise);
        }
        send(p.fd, noise, size, MSG_NOSIGNAL);
        peer_close(&p);
    }
}

/* The first server of a process opens what the process keeps. */
static int start_once(void **state)
{
    (void)server_start(NULL);
    return server_tear_down(state);
}

TESTS_BETWEEN(start_once, NULL)
