/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shares of peers: who counts as one, what strangers cannot take from the own user, who makes room
 * when there is none, and requests that never end.
 */
#include "control/rest.h"
#include "guests/admission.h"
#include "guests/peer.h"
#include "log_catcher.h"
#include "server_peer.h"
#include "testing.h"
#include <arpa/inet.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* Time passes when a test says so. */
static atomic_uint_fast64_t skew_ns;
static atomic_uint_fast64_t late_ns; /* the same for deadlines that are there */
static atomic_bool hasty;            /* a peer that stalls has no patience left */
static atomic_bool reluctant;        /* who found no session to end never looks again */
static atomic_bool no_memory;        /* for another listener in a set of epoll's */
static atomic_uint_fast64_t
    now_ns; /* buckets neither fill nor empty with time; 0: they do */
static atomic_uint comes_from; /* who connects, 10.0.0.n; 0: where he says */

uint64_t __real_clock_ns(void);
uint64_t __wrap_clock_ns(void);
uint64_t __wrap_clock_ns(void)
{
    uint64_t now = atomic_load(&now_ns);
    return now > 0 ? now : __real_clock_ns() + atomic_load(&skew_ns);
}

int __real_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags);
int __wrap_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags);
int __wrap_accept4(int fd, struct sockaddr *peer, socklen_t *size, int flags)
{
    int got = __real_accept4(fd, peer, size, flags);
    unsigned n = atomic_load(&comes_from);
    if (got >= 0 && n > 0 && peer->sa_family == AF_INET)
        ((struct sockaddr_in *)peer)->sin_addr.s_addr = htonl(0x0a000000 + n);
    return got;
}

deadline __real_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms)
{
    if (atomic_load(&reluctant) && ms == 50)
        return UINT64_MAX;
    return __real_deadline_in_ms(atomic_load(&hasty) && ms == 10000 ? 1 : ms);
}

bool __real_deadline_passed(deadline at);
bool __wrap_deadline_passed(deadline at);
bool __wrap_deadline_passed(deadline at)
{
    uint64_t late = atomic_load(&late_ns);
    return __real_deadline_passed(at == UINT64_MAX || at < late ? at : at - late);
}

int __real_epoll_ctl(int set, int what, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int set, int what, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int set, int what, int fd, struct epoll_event *event)
{
    int listens = 0;
    socklen_t size = sizeof listens;
    if (atomic_load(&no_memory) && what == EPOLL_CTL_ADD &&
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens) {
        errno = ENOMEM;
        return -1;
    }
    return __real_epoll_ctl(set, what, fd, event);
}

static int end(void **state)
{
    int result = server_tear_down(state);
    atomic_store(&skew_ns, 0);
    atomic_store(&late_ns, 0);
    atomic_store(&hasty, false);
    atomic_store(&reluctant, false);
    atomic_store(&no_memory, false);
    atomic_store(&now_ns, 0);
    atomic_store(&comes_from, 0);
    return result;
}

#define CASE(name) TEST_WITH(name, NULL, end)

/* ------------------------------------------------------------- who is one */

static fanin_server places = {.max_sessions = 8};

static peer_share *at(const char *address)
{
    socket_address a;
    assert_int_equal(socket_resolve(address, &a, NULL), FANIN_OK);
    peer_share *p = peer_share_of(&places, &a, false);
    assert_non_null(p);
    return p;
}

TEST(one_place_is_one_peer)
{
    socket_address of_unix = {.storage.ss_family = AF_UNIX};
    peer_share *own = peer_share_of(&places, &of_unix, true);
    assert_true(own->is_own);
    assert_ptr_equal(at("127.0.0.1:1"), at("127.99.3.4:2"));
    assert_ptr_equal(at("127.0.0.1:1"), at("[::1]:2"));
    assert_ptr_equal(at("127.0.0.1:1"), at("[::ffff:127.0.0.9]:2"));
    /* Another user at the Unix socket. */
    assert_ptr_equal(at("127.0.0.1:1"), peer_share_of(&places, &of_unix, false));
    assert_ptr_equal(at("10.0.0.7:1"), at("[::ffff:10.0.0.7]:2"));
    assert_ptr_not_equal(at("10.0.0.7:1"), at("10.0.0.8:1"));
    assert_ptr_equal(at("[fd00:1:2:3::1]:1"), at("[fd00:1:2:3:ffff::2]:1"));
    assert_ptr_not_equal(at("[fd00:1:2:3::1]:1"), at("[fd00:1:2:4::1]:1"));
    assert_false(at("127.0.0.1:1")->is_own);
    assert_string_equal(at("10.0.0.7:1")->name, "10.0.0.7");
    assert_string_equal(at("[fd00:1:2:3::1]:1")->name, "fd00:1:2:3::/64");
    assert_int_equal(places.n_peers, 6);
    peers_free(&places);
}

TEST(many_places_are_not_remembered_for_ever)
{
    peer_share *busy = at("10.0.0.1:1");
    busy->connections = 1;
    peer_share *refused = at("10.0.0.2:1"); /* and is being told why */
    refused->held = 1;
    for (unsigned i = 0; i < 2 * PEERS_KEPT; i++) {
        char address[32];
        snprintf(address, sizeof address, "11.0.%u.%u:1", i / 256, i % 256);
        (void)at(address);
    }
    assert_int_equal(places.n_peers, PEERS_KEPT);
    assert_ptr_equal(at("10.0.0.1:1"), busy);
    assert_ptr_equal(at("10.0.0.2:1"), refused);
    peers_free(&places);
}

/* A quarter of the memory is the own user's, who has it all otherwise. */
TEST(strangers_leave_memory_for_the_own_user)
{
    fanin_server s = {.max_memory = 1000, .has_unix = true};
    peer_share own = {.is_own = true}, one = {.is_own = false},
               other = {.is_own = false};
    size_t of_own = 0, of_one = 0, of_other = 0;
    assert_true(memory_account(&s, &one, &of_one, 500));
    assert_false(memory_fits(&s, &one, 1));
    assert_true(memory_fits(&s, &other, 250));
    assert_false(memory_fits(&s, &other, 251));
    assert_true(memory_account(&s, &other, &of_other, 250));
    assert_false(memory_account(&s, &other, &of_other, 251));
    assert_true(memory_fits(&s, &own, 249));
    assert_true(memory_account(&s, &own, &of_own, 249));
    assert_true(memory_account(&s, &one, &of_one, 0));
    assert_true(memory_account(&s, &other, &of_other, 0));
    assert_true(memory_account(&s, &own, &of_own, 1000));
    assert_true(memory_account(&s, &own, &of_own, 0));
    assert_int_equal(atomic_load(&s.memory), 0);
    assert_int_equal(atomic_load(&s.network_memory), 0);
}

/* Nor can they take it by what is kept for all, which the own user may. */
TEST(what_is_kept_for_all_is_the_strangers)
{
    fanin_server s = {.max_memory = 1000, .has_unix = true};
    peer_share own = {.is_own = true}, one = {.is_own = false};
    size_t of_own = 0, of_one = 0, of_all = 0;
    assert_true(memory_account(&s, NULL, &of_all, 300));
    assert_false(memory_fits(&s, &one, 451));
    assert_true(memory_account(&s, &one, &of_one, 450));
    assert_false(memory_account(&s, NULL, &of_all, 301));
    assert_true(memory_fits(&s, &own, 0)); /* for it there may be one more */
    assert_true(memory_account(&s, NULL, &of_all, 300));
    assert_true(memory_account(&s, &own, &of_own, 250));
    assert_true(memory_account(&s, &own, &of_own, 0));
    assert_true(memory_account(&s, &one, &of_one, 0));
    assert_true(memory_account(&s, NULL, &of_all, 0));
    assert_int_equal(atomic_load(&s.memory), 0);
    assert_int_equal(atomic_load(&s.network_memory), 0);
}

/* -------------------------------------------------------------- who is in */

static fanin_server *start_with(uint32_t max_sessions)
{
    static uint8_t memory[64];
    fanin_server_config c = server_config();
    c.max_sessions = max_sessions;
    return server_publish(&c, memory, sizeof memory);
}

static peer connect_from(fanin_server *s, const char *source)
{
    struct sockaddr_in a = {.sin_family = AF_INET};
    assert_int_equal(inet_pton(AF_INET, source, &a.sin_addr), 1);
    peer p = {.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    assert_return_code(bind(p.fd, (struct sockaddr *)&a, sizeof a), 0);
    inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
    a.sin_port = htons(fanin_server_port(s));
    assert_return_code(connect(p.fd, (struct sockaddr *)&a, sizeof a), 0);
    return p;
}

/* What a peer is told of its connection, not of a request. */
static msg_error expect_word(peer *p, fanin_status code)
{
    p->request = 0;
    return peer_expect_error(p, code);
}

static void pull_by_own_user(fanin_server *s)
{
    puller own = puller_open_unix(s);
    uint8_t got[64];
    read_entry all = {.box = 0, .length = sizeof got};
    own.grant = peer_lease(&own.control);
    peer_read(&own.data, &own.grant, &all, 1, got, sizeof got);
    puller_end(&own);
    puller_close(&own);
}

CASE(strangers_leave_room_for_the_own_user)
{
    fanin_server *s = start_with(16);
    peer p[40];
    msg_hello hello = {
        .version_min = VERSION_MIN, .version_max = VERSION_MAX, .role = ROLE_CONTROL};
    unsigned open = 0;
    for (unsigned i = 0; i < 40; i++) {
        char source[32];
        snprintf(source, sizeof source, "127.0.0.%u", i + 1);
        p[i] = connect_from(s, source);
        if (i < 4) { /* half of its half is for sessions */
            peer_hello_with(&p[i], hello);
            open++;
        } else if (i < 8) {
            peer_request_hello(&p[i], &hello);
            peer_expect_error(&p[i], FANIN_ERR_LIMIT);
        }
    }
    assert_int_equal(open, 4);
    for (unsigned i = 0; i < 4; i++)
        pull_by_own_user(s);
    for (unsigned i = 0; i < 40; i++)
        close(p[i].fd);
}

#define IN_USE 3
CASE(sessions_in_use_stay)
{
    fanin_server *s = start_with(4 * IN_USE);
    peer p[IN_USE] = {peer_open(s), peer_open(s), peer_watch(s, 0)};
    peer_lease(&p[0]);
    peer_event(&p[2]);
    peer_request_wait(&p[1], RUN, WIRE_RULE_EXACT, 9, 600000);
    atomic_store(&skew_ns, UINT64_C(3600) * 1000000000);
    peer late = peer_connect(s);
    msg_hello hello = {
        .version_min = VERSION_MIN, .version_max = VERSION_MAX, .role = ROLE_CONTROL};
    peer_request_hello(&late, &hello);
    peer_expect_error(&late, FANIN_ERR_LIMIT);
    assert_int_equal(server_stats(s).sessions_evicted, 0);
    for (unsigned i = 0; i < IN_USE; i++)
        peer_ping(&p[i]);
    peer_close(&late);
}

CASE(who_is_idle_for_longest_makes_room)
{
    fanin_server *s = start_with(12);
    peer p[3] = {peer_open(s), peer_open(s), peer_open(s)};
    atomic_store(&skew_ns, UINT64_C(20) * 1000000000);
    peer_ping(&p[0]); /* p[1] is now the first of those that are silent */
    atomic_store(&skew_ns, UINT64_C(25) * 1000000000);
    peer late = peer_open(s);
    assert_int_equal(server_stats(s).sessions_evicted, 1);
    msg_error why = expect_word(&p[1], FANIN_ERR_CLOSED);
    assert_non_null(strstr(why.message, "idle"));
    peer_expect_closed(&p[1]);
    peer_ping(&p[0]);
    peer_ping(&p[2]);
    peer_ping(&late);
}

/* Nothing can go for the stranger; that says nothing of the own user. */
CASE(who_finds_no_room_pauses_for_itself_alone)
{
    fanin_server *s = start_with(12);
    peer p[6], stranger = peer_connect(s);
    msg_hello hello = {
        .version_min = VERSION_MIN, .version_max = VERSION_MAX, .role = ROLE_CONTROL};
    for (unsigned i = 0; i < 6; i++)
        p[i] = peer_open_unix(s);
    atomic_store(&skew_ns, UINT64_C(20) * 1000000000);
    atomic_store(&reluctant, true);
    peer_request_hello(&stranger, &hello);
    peer_expect_error(&stranger, FANIN_ERR_LIMIT);
    peer late = peer_open_unix(s);
    assert_int_equal(server_stats(s).sessions_evicted, 1);
    expect_word(&p[0], FANIN_ERR_CLOSED);
    peer_ping(&late);
}

CASE(connections_make_room_too)
{
    fanin_server *s = start_with(8);
    peer p = peer_open(s), q = peer_open(s), d = peer_data(s, &p);
    peer e = peer_data(s, &q); /* one peer's four */
    atomic_store(&skew_ns, UINT64_C(20) * 1000000000);
    peer_ping(&q);
    peer late = peer_open(s); /* for p, and then for its session */
    expect_word(&p, FANIN_ERR_CLOSED);
    peer_expect_closed(&d); /* with its session */
    peer_ping(&e);
    peer_ping(&late);
    assert_int_equal(server_stats(s).sessions_evicted, 1);
}

/* --------------------------------------------------------- many of one place */

#define EACH 4 /* data connections of an engine */

static void engines_of_one_address(unsigned engines)
{
    struct rlimit limit;
    unsigned need = 2 * engines * (1 + EACH) + 400;
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max < need)
        skip();
    fanin_server *s = start_with(0);
    peer *p = calloc(engines * (1 + EACH), sizeof *p), *at = p;
    assert_non_null(p);
    for (unsigned i = 0; i < engines; i++) {
        *at = peer_open(s);
        for (unsigned k = 1; k <= EACH; k++)
            at[k] = peer_data(s, at);
        at += 1 + EACH;
    }
    assert_int_equal(server_stats(s).sessions, engines * (1 + EACH));
    assert_int_equal(server_stats(s).sessions_refused, 0);
    assert_int_equal(server_stats(s).requests_delayed, 0);
    for (peer *each = p; each < at; each++)
        peer_ping(each);
    pull_by_own_user(s);
    for (peer *each = p; each < at; each++)
        peer_close(each);
    free(p);
}

CASE(many_engines_behind_one_address)
{
    engines_of_one_address(52);
}

CASE(very_many_engines_behind_one_address)
{
    engines_of_one_address(512);
}

/* ------------------------------------------------------ requests without end */

CASE(requests_that_never_end)
{
    static const uint8_t first = 'F';
    fanin_server *s = start_with(8);
    peer p = peer_open(s), d = peer_data(s, &p);
    peer_ping(&d); /* it has arrived at its thread */
    atomic_store(&hasty, true);
    peer_send_raw(&d, &first, 1);
    peer_expect_closed(&d);
    peer_ping(&p);
    peer_send_raw(&p, &first, 1);
    msg_error why = expect_word(&p, FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(why.message, "not whole"));
    peer_expect_closed(&p);
}

/* ------------------------------------------------------------------ floods */

static peer_share all_others;

#define BATCH 500

static fanin_server *start_with_cpu(uint32_t peer_cpu)
{
    static uint8_t memory[64];
    fanin_server_config c = server_config();
    c.peer_cpu = peer_cpu;
    return server_publish(&c, memory, sizeof memory);
}

static void send_pings(peer *p, unsigned n)
{
    buffer b = {0};
    while (n-- > 0)
        encode_empty(&b, ++p->request, MSG_PING);
    peer_send(p, &b);
}

static void take_pongs(peer *p, unsigned n)
{
    while (n-- > 0)
        peer_expect(p, MSG_PONG);
}

/* Floods until the server lets it wait, in which no answer comes. How many are still to come. */
static unsigned flood(fanin_server *s, peer *p)
{
    for (unsigned i = 0; i < 20000; i++) {
        send_pings(p, BATCH);
        for (unsigned left = BATCH; left > 0; left--) {
            while (peer_silent(p, 1))
                if (server_stats(s).requests_delayed > 0)
                    return left;
            peer_expect(p, MSG_PONG);
        }
    }
    fail_msg("the server answers without end");
    return 0;
}

/* Strangers wait, the own user does not, and every request is answered in the end. */
static void floods_wait(bool on_data)
{
    fanin_server *s = start_with_cpu(1);
    peer control = peer_open(s), data = peer_data(s, &control);
    peer *p = on_data ? &data : &control;
    unsigned left = flood(s, p);
    pull_by_own_user(s);
    atomic_store(&skew_ns, UINT64_C(3600) * 1000000000); /* and the bucket is full */
    take_pongs(p, left);
    peer_ping(&control);
    peer_ping(&data);
}

CASE(floods_of_requests_wait)
{
    floods_wait(false);
}

CASE(floods_on_data_connections_wait)
{
    floods_wait(true);
}

static void request_all(puller *r, bool digests, uint64_t size)
{
    read_entry all = {.box = 0, .length = size};
    if (digests)
        peer_request_digest(&r->data, &r->grant, size, 0, &all, 1);
    else
        peer_request_read(&r->data, r->grant.token, size, &all, 1);
}

/* Reads without end wait for their share, and their answers come in the end. */
static void reads_wait(bool digests)
{
    static uint8_t memory[64 << 10]; /* an answer leaves at once */
    message_type answer = digests ? MSG_DIGEST_OK : MSG_READ_OK;
    fanin_server_config config = server_config();
    config.stranger_cpu = 1;
    log_listen("sent-slowly");
    fanin_server *s = server_publish(&config, memory, sizeof memory);
    puller stranger = puller_open(s);
    puller_begin(&stranger);
    for (unsigned i = 0; server_stats(s).requests_delayed == 0; i++) {
        assert_in_range(i, 0, 10000);
        request_all(&stranger, digests, sizeof memory);
        while (peer_silent(&stranger.data, 1) && server_stats(s).requests_delayed == 0)
            ;
        if (server_stats(s).requests_delayed == 0)
            peer_expect(&stranger.data, answer);
    }
    pull_by_own_user(s);
    log_expect(1, "larger stranger_cpu");
    atomic_store(&skew_ns, UINT64_C(3600) * 1000000000);
    peer_expect(&stranger.data, answer);
    puller_close(&stranger);
}

CASE(tensors_for_strangers_wait)
{
    reads_wait(false);
}

CASE(digests_for_strangers_wait)
{
    reads_wait(true);
}

#define MANY 200 /* more turns than one look at the queue has */

/* Takes some of what is there; how many bytes. */
static uint64_t drain_some(const peer *p, deadline by)
{
    static uint8_t some[1 << 16];
    ssize_t n = recv(p->fd, some, sizeof some, MSG_DONTWAIT);
    assert_true((n > 0 || (n < 0 && errno == EAGAIN)) && !deadline_passed(by));
    return n > 0 ? (uint64_t)n : 0;
}

/* Who has taken its bytes, and is sent no more for a while, is not dropped for taking none. */
CASE(who_rests_does_not_stall)
{
    static uint8_t memory[4 << 20];
    const uint64_t all = 2 * (FRAME_SIZE + sizeof memory);
    fanin_server_config config = server_config();
    config.stranger_cpu = config.data_threads = 1;
    fanin_server *s = server_publish(&config, memory, sizeof memory);
    puller stranger = puller_open(s), own = puller_open_unix(s);
    puller_begin(&stranger);
    request_all(&stranger, false, sizeof memory);
    peer_await_count(&own.data, s, offsetof(fanin_server_stats, sends_waiting), 1);
    peer_charge_send(s, &all_others, UINT64_C(1000000000));
    request_all(&stranger, false, sizeof memory); /* which wakes the thread too */
    deadline by = deadline_in_ms(20000);
    uint64_t taken = 0;
    while (server_stats(s).requests_delayed == 0)
        taken += drain_some(&stranger.data, by);
    atomic_store(&late_ns, UINT64_C(15) * 1000000000);
    for (unsigned i = 0; i < MANY; i++)
        peer_ping(&own.data);
    atomic_store(&late_ns, 0);
    /* Each hour fills the bucket, which sending empties again in 10 ms of CPU time. */
    by = deadline_in_ms(20000);
    while (taken < all) {
        if (peer_silent(&stranger.data, 10))
            atomic_fetch_add(&skew_ns, UINT64_C(3600) * 1000000000);
        taken += drain_some(&stranger.data, by);
    }
    assert_int_equal(taken, all);
}

/* However many addresses they have; but who knows the launch's secret does not wait for them. */
CASE(all_strangers_have_two_shares)
{
    fanin_server s = {.peer_cpu = 50, .stranger_cpu = 200};
    peer_share peers[4] = {{.is_own = false}}, own = {.is_own = true};
    peer_share known = {.has_proven = true};
    const uint64_t second = UINT64_C(1000000000);
    for (unsigned i = 0; i < 3; i++)
        peer_charge(&s, &peers[i],
                    700 * 1000 * 1000); /* of a second that each may take at once */
    assert_true(peer_must_rest(&s, &peers[0]));
    assert_true(peer_must_rest(&s, &peers[3])); /* which has had nothing */
    assert_false(peer_must_rest(&s, &known));
    assert_false(peer_must_rest(&s, &own));
    peer_refund(&s, &peers[1], 700 * 1000 * 1000);
    assert_false(peer_must_rest(&s, &peers[3]));
    /* What is sent: four seconds at once, two of them to one. */
    peer_charge_send(&s, &peers[0], 2 * second + second / 10);
    assert_true(peer_send_must_rest(&s, &peers[0]));
    assert_false(peer_send_must_rest(&s, &peers[1]));
    peer_charge_send(&s, &peers[1], 2 * second);
    assert_true(peer_send_must_rest(&s, &peers[2]));
    assert_false(peer_send_is_counted(&s, &own));
    assert_true(peer_send_is_counted(&s, &peers[0]));
    s.flags = FANIN_SERVER_TRUSTED_NETWORK;
    assert_false(peer_send_is_counted(&s, &peers[0]));
}

/* ------------------------------------------------------------ peer by peer */

static bool of_odd_peers_only;

static bool may_go(void *cookie, void *of)
{
    const peer_share *peers = cookie;
    const peer_turn *t = of;
    return !of_odd_peers_only || (t->from - peers) % 2 == 1;
}

/* Three of the first peer, two of the second, one of the third. */
static void make_queue(peer_turns *q, peer_turn t[6], const peer_share of[3])
{
    static const int peer_of[6] = {0, 0, 0, 1, 1, 2};
    *q = (peer_turns){.n = 0};
    for (int i = 0; i < 6; i++) {
        t[i] = (peer_turn){.waits = false};
        turns_append(q, &t[i], &t[i], &of[peer_of[i]]);
    }
}

static void expect_turns(peer_turns *q, const peer_turn *t, peer_share *of,
                         const char *expected)
{
    for (; *expected; expected++) {
        const peer_turn *next = turns_next(q, may_go, of);
        assert_ptr_equal(next, &t[*expected - '0']);
        assert_false(next->waits);
    }
    assert_null(turns_next(q, may_go, of));
}

TEST(each_peer_has_one_turn)
{
    peer_share of[3] = {{.is_own = false}};
    peer_turns q;
    peer_turn t[6];
    make_queue(&q, t, of);
    expect_turns(&q, t, of, "035142");
    /* Who may not go on yet keeps its place. */
    make_queue(&q, t, of);
    of_odd_peers_only = true;
    expect_turns(&q, t, of, "34");
    of_odd_peers_only = false;
    expect_turns(&q, t, of, "0512");
    assert_int_equal(q.n, 0);
}

TEST(who_leaves_has_no_turn)
{
    static const char *const without[6] = {"13524", "03524", "03514",
                                           "04512", "03512", "03142"};
    peer_share of[3] = {{.is_own = false}};
    peer_turns q;
    peer_turn t[6];
    for (int i = 0; i < 6; i++) {
        make_queue(&q, t, of);
        turns_leave(&q, &t[i]);
        assert_false(t[i].waits);
        expect_turns(&q, t, of, without[i]);
    }
    for (int i = 0; i < 6; i++) { /* the last of all too, and then somebody comes */
        make_queue(&q, t, of);
        for (int k = 5; k >= 0; k--)
            turns_leave(&q, &t[(i + k) % 6]);
        assert_int_equal(q.n, 0);
        turns_append(&q, &t[i], &t[i], of);
        expect_turns(&q, t, of, (const char[]){(char)('0' + i), 0});
    }
}

#define CROWD 50
static fanin_server asked = {.peer_cpu = 50};
static peer_share many, alone;
static const session *went;

static void use_up(void)
{
    peer_charge(&asked, &all_others, UINT64_C(3000000000));
}

static void go(session *s)
{
    went = s;
    use_up();
}

/* Fifty connections of one address, then one of another. */
CASE(many_connections_have_one_turn)
{
    static session crowd[CROWD], one, late, known;
    peer_share proven = {.has_proven = true};
    struct control c = {.server = &asked, .rest_until = UINT64_MAX};
    use_up();
    for (int i = 0; i < CROWD; i++) {
        crowd[i] = (session){.control = &c, .from = &many};
        assert_true(must_rest(&crowd[i]));
    }
    one = late = known = (session){.control = &c, .from = &alone};
    known.from = &proven;
    assert_true(must_rest(&one));
    atomic_fetch_add(&skew_ns, UINT64_C(3600) * 1000000000);
    rest_turns(&c, go);
    assert_ptr_equal(went, &crowd[0]);
    atomic_fetch_add(&skew_ns, UINT64_C(3600) * 1000000000);
    assert_true(must_rest(&late)); /* behind all that were there before */
    assert_false(must_rest(&known));
    rest_turns(&c, go);
    assert_ptr_equal(went, &one);
    for (int i = 1; i < 3; i++) {
        atomic_fetch_add(&skew_ns, UINT64_C(3600) * 1000000000);
        rest_turns(&c, go);
        assert_ptr_equal(went, i == 1 ? &crowd[1] : &late);
    }
    assert_true(c.crowded);
    for (int i = 2; i < CROWD; i++)
        rest_leave(&crowd[i]);
    rest_turns(&c, go);
    assert_false(c.crowded);
    assert_int_equal(c.rest_until, UINT64_MAX);
}

CASE(who_waits_may_leave)
{
    fanin_server *s = start_with_cpu(1);
    peer p = peer_open(s), q = peer_open(s), own = peer_open_unix(s);
    (void)flood(s, &p);
    peer_close(&p);
    peer_close(&q);
    atomic_store(&skew_ns, UINT64_C(3600) * 1000000000);
    peer_await_count(&own, s, offsetof(fanin_server_stats, sessions), 1);
}

#define SECOND UINT64_C(1000000000)

/* What accepting has taken, and the share of 10.0.0.2, are used up so far. */
static void use_up_accepting(fanin_server *s, uint64_t accepted_ns)
{
    socket_address a;
    assert_int_equal(socket_resolve("10.0.0.2:1", &a, NULL), FANIN_OK);
    pthread_mutex_lock(&s->lock);
    peer_share *had = peer_share_of(s, &a, false);
    pthread_mutex_unlock(&s->lock);
    atomic_store(&now_ns, clock_ns());
    bucket_take(&had->work, clock_ns(), 3600 * SECOND);
    bucket_take(&s->control->tcp.accepts, clock_ns(), accepted_ns);
}

/* Comes from 10.0.0.2 and is closed, be it before it has seen that it was connected. */
static void come_in_vain(fanin_server *s)
{
    socket_address a;
    char where[32];
    int fd;
    atomic_store(&comes_from, 2);
    snprintf(where, sizeof where, "127.0.0.1:%u", (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(where, &a, NULL), FANIN_OK);
    assert_works(socket_connect_start(&a, &fd, ERROR));
    peer p = peer_of(fd);
    peer_expect_closed(&p);
    peer_close(&p);
}

/* Nobody waits in the kernel's queue behind those who are over their share. */
CASE(who_had_its_share_is_in_nobodys_way)
{
    fanin_server *s = start_with_cpu(50);
    use_up_accepting(s, 3 * SECOND);
    for (unsigned i = 0; i < 20; i++) {
        come_in_vain(s);
        atomic_store(&comes_from, 3);
        peer honest = peer_open(s);
        peer_ping(&honest);
    }
    assert_int_equal(server_stats(s).requests_delayed, 0);
    assert_int_equal(server_stats(s).sessions_refused, 20);
}

/* To close them takes no more than accepting does, and then the listener rests. */
CASE(to_close_takes_its_share_as_well)
{
    fanin_server *s = start_with_cpu(50);
    use_up_accepting(s, 5 * SECOND);
    come_in_vain(s);
    peer own = peer_open_unix(s);
    peer_await_count(&own, s, offsetof(fanin_server_stats, requests_delayed), 1);
    assert_int_equal(server_stats(s).sessions_refused, 1);
}

/* Who is over its share waits as ever while accepting is not. */
CASE(who_had_its_share_waits_otherwise)
{
    fanin_server *s = start_with_cpu(50);
    use_up_accepting(s, 1);
    atomic_store(&comes_from, 2);
    peer p = peer_connect(s), own = peer_open_unix(s);
    peer_await_count(&own, s, offsetof(fanin_server_stats, sessions), 2);
    peer_send_raw(&p, "F", 1);
    peer_await_count(&own, s, offsetof(fanin_server_stats, requests_delayed), 1);
    assert_int_equal(server_stats(s).sessions_refused, 0);
}

/* However little memory the kernel has. */
CASE(listeners_that_have_rested_listen)
{
    fanin_server *s = start_with_cpu(10); /* it rests for less than a second */
    atomic_store(&no_memory, true);
    deadline by = deadline_in_ms(20000);
    while (server_stats(s).requests_delayed == 0 && !deadline_passed(by)) {
        peer p = peer_connect(s);
        peer_close(&p);
    }
    assert_true(server_stats(s).requests_delayed > 0);
    peer late = peer_open(s);
    peer_ping(&late);
}

CASE(without_a_limit_nobody_waits)
{
    fanin_server *s = start_with_cpu(0);
    peer p = peer_open(s);
    for (unsigned i = 0; i < 100; i++) {
        send_pings(&p, BATCH);
        take_pongs(&p, BATCH);
    }
    assert_int_equal(server_stats(s).requests_delayed, 0);
}

/* --------------------------------------------------------- the Unix socket */

/* Connects as another user and hears why not, again and again, until it is killed. */
static pid_t connect_as_another(fanin_server *s)
{
    socket_address a, tcp;
    char where[32];
    snprintf(where, sizeof where, "127.0.0.1:%u", (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(where, &tcp, NULL), FANIN_OK);
    socket_unix_address(0, &tcp, &a);
    pid_t child = fork();
    if (child != 0)
        return child;
    if (setuid(65534) != 0 || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        _exit(1);
    for (;;) {
        char heard;
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&a.storage, a.length) == 0)
            (void)!recv(fd, &heard, 1, 0);
        close(fd);
    }
}

/* They wait like the connections of a network; the own user's, among them, do not count. */
CASE(other_users_on_the_unix_socket_wait)
{
    if (geteuid() != 0)
        skip();
    fanin_server *s = start_with_cpu(1);
    for (unsigned i = 0; i < BATCH; i++) {
        peer p = peer_connect_unix(s);
        peer_close(&p);
    }
    assert_int_equal(server_stats(s).requests_delayed, 0);
    pid_t child = connect_as_another(s);
    deadline by = deadline_in_ms(20000);
    while (server_stats(s).requests_delayed < 3 && !deadline_passed(by))
        pull_by_own_user(s);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_true(server_stats(s).requests_delayed >= 3);
    pull_by_own_user(s);
}

/* ------------------------------------------------------------------- the log */

#define GARBAGE 200

CASE(lines_of_strangers_are_few_and_counted)
{
    static const char garbage[] = "GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n";
    fanin_server *s = start_with_cpu(0);
    log_listen("left-out");
    for (unsigned i = 0; i < GARBAGE; i++) {
        peer p = peer_connect(s);
        peer_send_raw(&p, garbage, sizeof garbage);
        peer_expect_error(&p, FANIN_ERR_PROTOCOL);
        peer_close(&p);
    }
    log_await("more of this host");
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.protocol_errors, GARBAGE);
    assert_in_range(stats.log_lines_left_out, 1, GARBAGE - 1);
}
