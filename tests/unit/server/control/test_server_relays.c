/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of readers that hand on what they have read: who is in them, and what they are told. */
#include "clock.h"
#include "control/session.h"
#include "failing_memory.h"
#include "server_peer.h"
#include "testing.h"

#include <stdatomic.h>
#include <sys/resource.h>

#define SIZE 1000
#define PATIENT 60000

static uint8_t memory[SIZE];

static fanin_server *start(uint32_t flags)
{
    fanin_server_config c = server_config();
    c.flags |= flags;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory, SIZE);
    server_commit(s, 5);
    return s;
}

static peer open_relay(fanin_server *s)
{
    return peer_open(s);
}

static msg_offer offer_of(uint64_t step, uint8_t holding, uint16_t port)
{
    msg_offer m = {.publication = RUN, .step = step, .port = port, .host = "host"};
    memset(m.holding, holding, sizeof m.holding);
    m.incarnation[0] = (uint8_t)port;
    m.incarnation[1] = (uint8_t)(port >> 8);
    return m;
}

static void request_offer(peer *p, const msg_offer *m)
{
    buffer b = {0};
    encode_offer(&b, ++p->request, m);
    peer_send(p, &b);
}

static void offer(peer *p, const msg_offer *m)
{
    request_offer(p, m);
    body in = peer_expect(p, MSG_OFFER_OK);
    assert_int_equal(decode_empty(&in), FANIN_OK);
}

static void offer_plainly(peer *p, uint16_t port)
{
    msg_offer m = offer_of(5, 1, port);
    offer(p, &m);
}

static void add_ask(buffer *b, peer *p, uint64_t step, uint8_t holding,
                    uint64_t version, uint32_t timeout_ms)
{
    msg_holders m = {
        .publication = RUN, .step = step, .version = version, .timeout_ms = timeout_ms};
    memset(m.holding, holding, sizeof m.holding);
    encode_holders(b, ++p->request, &m);
}

/* Who asks so knows nobody of the roster. */
static void ask(peer *p, uint64_t step, uint8_t holding, uint64_t version,
                uint32_t timeout_ms)
{
    buffer b = {0};
    add_ask(&b, p, step, holding, version, timeout_ms);
    peer_send(p, &b);
}

static void ask_knowing(peer *p, uint64_t step, uint64_t version, uint64_t roster)
{
    buffer b = {0};
    msg_holders m = {.publication = RUN,
                     .step = step,
                     .version = version,
                     .roster = roster,
                     .timeout_ms = PATIENT};
    memset(m.holding, 1, sizeof m.holding);
    encode_holders(&b, ++p->request, &m);
    peer_send(p, &b);
}

static msg_holders_ok heard; /* the last answer */

static uint64_t hear(peer *p)
{
    body in = peer_expect(p, MSG_HOLDERS_OK);
    holders_free(&heard);
    assert_int_equal(decode_holders_ok(&in, &heard), FANIN_OK);
    return heard.version;
}

static uint64_t hear_knowing(peer *p, uint64_t step, uint64_t version, uint64_t roster)
{
    ask_knowing(p, step, version, roster);
    return hear(p);
}

/* A bit a member of the list, the first number's lowest. The answer has told it. */
static uint64_t members(void)
{
    uint64_t bits = 0;
    assert_in_range(heard.members.size, 1, sizeof bits);
    for (size_t i = 0; i < heard.members.size; i++)
        bits |= (uint64_t)heard.members.data[i] << 8 * i;
    return bits;
}

static void expect_nothing_new(void)
{
    assert_int_equal(heard.members.size, 0);
    assert_int_equal(heard.n_entries, 0);
}

static void expect_entry(uint32_t i, uint32_t number, uint16_t port)
{
    char address[16];
    assert_true(i < heard.n_entries);
    const holder_entry *e = &heard.entries[i];
    snprintf(address, sizeof address, ":%u", (unsigned)port);
    assert_string_equal(e->address, address);
    assert_string_equal(e->host, "host");
    assert_int_equal(e->incarnation[0], (uint8_t)port);
    assert_int_equal(e->number, number);
}

/* ------------------------------------------------------------------ the list */

SERVER_TEST(who_offers_is_in_the_list_until_its_session_ends)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), b = peer_open_unix(s), p = peer_open(s);
    ask(&p, 5, 1, 0, PATIENT);
    uint64_t version = hear(&p);
    assert_true(version > 0);
    assert_int_equal(members(), 0);
    assert_int_equal(heard.n_entries, 0);

    ask(&p, 5, 1, version, PATIENT);
    assert_true(peer_silent(&p, 50));
    offer_plainly(&a, 7001);
    version = hear(&p);
    assert_int_equal(members(), 1);
    assert_int_equal(heard.n_entries, 1);
    expect_entry(0, 0, 7001);
    offer_plainly(&b, 7002);
    version = hear_knowing(&p, 5, version, heard.roster);
    assert_int_equal(members(), 3);
    assert_int_equal(heard.n_entries, 1);
    expect_entry(0, 1, 7002);

    offer_plainly(&b, 7002); /* nothing new */
    ask(&p, 5, 1, version, 30);
    assert_true(hear(&p) == version);
    expect_nothing_new();

    ask(&p, 5, 1, version, PATIENT);
    peer_close(&a);
    version = hear(&p);
    assert_int_equal(members(), 2);
    msg_offer gone = {.publication = RUN, .gone = true};
    offer(&b, &gone);
    offer(&b, &gone); /* it is none any more: no matter */
    hear_knowing(&p, 5, version, heard.roster);
    assert_int_equal(members(), 0);
    ask(&p, 5, 1, 0, PATIENT);
    hear(&p);
    assert_int_equal(members(), 0);
    assert_int_equal(heard.n_entries, 0);
    peer_close(&p);
    peer_close(&b);
    server_expect_idle(s);
}

SERVER_TEST(lists_are_of_a_step_and_a_holding)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), p = peer_open(s);
    offer_plainly(&a, 7001);
    ask(&p, 5, 2, 0, 0);
    uint64_t other = hear(&p);
    assert_int_equal(members(), 0);
    ask(&p, 4, 1, 0, 0);
    hear(&p);
    assert_int_equal(members(), 0);
    ask(&p, 5, 2, other, PATIENT); /* is not woken by the other list */
    msg_offer moved = offer_of(5, 2, 7001);
    ask(&p, 5, 1, 0, 0);
    uint64_t version = hear(&p);
    expect_entry(0, 0, 7001);
    offer(&a, &moved); /* a session has one offer of a publication */
    hear(&p);
    expect_entry(0, 0, 7001);
    assert_int_equal(members(), 1);
    ask(&p, 5, 1, version, 0);
    hear(&p);
    assert_int_equal(members(), 0);
}

/* A relay that has connected anew is in the list as long as either session is. */
SERVER_TEST(a_relay_may_have_two_sessions)
{
    fanin_server *s = start(0);
    peer before = open_relay(s), after = open_relay(s), p = peer_open(s);
    offer_plainly(&before, 7001);
    offer_plainly(&after, 7001);
    ask(&p, 5, 1, 0, 0);
    uint64_t version = hear(&p);
    assert_int_equal(members(), 3);
    expect_entry(0, 0, 7001);
    expect_entry(1, 1, 7001);
    peer_close(&before);
    version = hear_knowing(&p, 5, version, heard.roster);
    assert_int_equal(members(), 2);
    assert_int_equal(heard.n_entries, 0);
    peer_close(&after);
    hear_knowing(&p, 5, version, heard.roster);
    assert_int_equal(members(), 0);
}

/* ---------------------------------------------------------------- the roster */

static void offer_step(peer *p, uint64_t step, uint16_t port)
{
    msg_offer m = offer_of(step, 1, port);
    offer(p, &m);
}

SERVER_TEST(a_number_stays_from_step_to_step_and_is_told_once)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), b = open_relay(s), p = peer_open(s);
    offer_step(&a, 3, 7001);
    offer_step(&b, 3, 7002);
    uint64_t before = hear_knowing(&p, 3, 0, 0);
    assert_int_equal(members(), 3);
    assert_int_equal(heard.n_entries, 2);
    uint64_t roster = heard.roster;
    for (uint64_t step = 4; step <= 5; step++) {
        offer_step(&b, step, 7002);
        before = hear_knowing(&p, step - 1, before, roster);
        assert_int_equal(members(), 1);
        uint64_t now = hear_knowing(&p, step, 0, roster);
        assert_int_equal(members(), 2);
        offer_step(&a, step, 7001);
        before = hear_knowing(&p, step, now, roster);
        assert_int_equal(members(), 3);
        assert_int_equal(heard.n_entries, 0);
        assert_true(heard.roster == roster);
    }
    hear_knowing(&p, 4, 0, roster);
    assert_int_equal(members(), 0);
    ask(&p, 5, 1, 0, 0); /* who knows nobody hears of all */
    hear(&p);
    expect_entry(0, 0, 7001);
    expect_entry(1, 1, 7002);
}

/* Also who has heard nothing meanwhile. */
SERVER_TEST(a_number_that_is_taken_over_is_told_anew)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), b = open_relay(s), p = peer_open(s), q = peer_open(s);
    offer_plainly(&a, 7001);
    offer_plainly(&b, 7002);
    uint64_t first = hear_knowing(&p, 5, 0, 0), roster = heard.roster, version = first;
    for (uint16_t port = 7003; port <= 7005; port++) {
        offer_plainly(&a, port); /* another reader, with the number that is free */
        version = hear_knowing(&p, 5, version, roster);
        assert_int_equal(members(), 3);
        assert_int_equal(heard.n_entries, 1);
        expect_entry(0, 0, port);
        assert_true(heard.roster > roster);
        roster = heard.roster;
    }
    hear_knowing(&q, 5, first, first);
    assert_int_equal(members(), 3);
    assert_int_equal(heard.n_entries, 1);
    expect_entry(0, 0, 7005);
    msg_offer moved = offer_of(5, 1, 7005); /* it says something else of itself */
    snprintf(moved.place, sizeof moved.place, "a/r3");
    offer(&a, &moved);
    hear_knowing(&p, 5, version, roster);
    assert_int_equal(heard.n_entries, 1);
    assert_string_equal(heard.entries[0].place, "a/r3");
}

/* The roster has gone meanwhile, and its numbers begin anew. */
SERVER_TEST(a_roster_that_was_empty_tells_all_anew)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), b = open_relay(s), p = peer_open(s);
    msg_offer gone = {.publication = RUN, .gone = true};
    offer_plainly(&a, 7001);
    offer_plainly(&b, 7002);
    uint64_t version = hear_knowing(&p, 5, 0, 0), roster = heard.roster;
    for (int parked = 0; parked < 2; parked++) {
        if (parked) /* keeps the roster */
            ask_knowing(&p, 5, version, roster);
        offer(&a, &gone);
        offer(&b, &gone);
        if (parked)
            version = hear(&p);
        offer_plainly(&b, (uint16_t)(7003 + parked));
        version = hear_knowing(&p, 5, version, roster);
        assert_int_equal(members(), 1);
        assert_int_equal(heard.n_entries, 1);
        expect_entry(0, 0, (uint16_t)(7003 + parked));
        roster = heard.roster;
        offer_plainly(&a, 7001);
        version = hear_knowing(&p, 5, version, roster);
        assert_int_equal(heard.n_entries, 1);
        expect_entry(0, 1, 7001);
        roster = heard.roster;
    }
}

/* Whether this process may have so many descriptors. */
static bool may_open(rlim_t files)
{
    struct rlimit most;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &most), 0);
    most.rlim_cur = most.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &most) == 0 && most.rlim_cur >= files;
}

/* So many peers of a process that has little time may be slow to say hello. */
deadline __real_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms);
deadline __wrap_deadline_in_ms(uint64_t ms)
{
    return __real_deadline_in_ms(ms == HELLO_MS ? PATIENT : ms);
}

SERVER_TEST(a_roster_has_4096_numbers)
{
    enum { ROOM = LIMIT_HOLDERS };
    static peer all[ROOM];
    if (!may_open(2 * ROOM + 1000))
        skip();
    fanin_server_config c = server_config();
    c.max_sessions = 4 * ROOM;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory, SIZE);
    server_commit(s, 5);
    for (size_t i = 0; i < ROOM; i++) {
        all[i] = peer_open_unix(s);
        offer_plainly(&all[i], (uint16_t)(1024 + i));
    }
    peer p = peer_open_unix(s), late = peer_open_unix(s);
    msg_offer m = offer_of(4, 1, 1);
    request_offer(&late, &m); /* of another step, but nobody's place is free */
    assert_says(peer_expect_error(&late, FANIN_ERR_LIMIT).message, "4096 relays hold");
    uint64_t version = hear_knowing(&p, 5, 0, 0);
    assert_int_equal(heard.n_entries, ROOM);
    assert_int_equal(heard.members.size, ROOM / 8);
    for (size_t i = 0; i < ROOM / 8; i++)
        assert_int_equal(heard.members.data[i], 0xff);
    msg_offer gone = {.publication = RUN, .gone = true};
    offer(&all[2000], &gone);
    offer(&late, &m);
    version = hear_knowing(&p, 5, version, heard.roster);
    assert_int_equal(heard.n_entries, 1);
    expect_entry(0, 2000, 1);
    assert_int_equal(heard.members.data[2000 / 8], 0xfe);
    uint64_t roster = heard.roster;
    for (size_t i = 0; i < ROOM; i++)
        offer(&all[i], &gone);
    hear_knowing(&p, 5, version, roster);
    for (size_t i = 0; i < heard.members.size; i++)
        assert_int_equal(heard.members.data[i], 0);
    hear_knowing(&p, 4, 0, roster);
    assert_int_equal(heard.members.data[2000 / 8], 1);
    offer(&late, &gone);
    hear_knowing(&p, 5, version, roster);
    assert_int_equal(members(), 0);
}

/* --------------------------------------------------------------- without memory */

/* Of the allocations for the next offer that many work; -1: all. */
static atomic_long works = -1;
static atomic_bool has_failed;

fanin_status __real_decode_offer(body *in, msg_offer *out);
fanin_status __wrap_decode_offer(body *in, msg_offer *out);
fanin_status __wrap_decode_offer(body *in, msg_offer *out)
{
    long most = atomic_load(&works);
    if (most >= 0)
        failing_memory_start(most, false);
    return __real_decode_offer(in, out);
}

void __real_reply_error(session *s, uint64_t request, const fanin_error *error);
void __wrap_reply_error(session *s, uint64_t request, const fanin_error *error);
void __wrap_reply_error(session *s, uint64_t request, const fanin_error *error)
{
    atomic_store(&has_failed, failing_memory_stop());
    __real_reply_error(s, request, error);
}

/* True: it was refused for want of memory. */
static bool offer_with(peer *p, const msg_offer *m, long allocations)
{
    atomic_store(&works, allocations);
    request_offer(p, m);
    peer_receive(p);
    atomic_store(&works, -1);
    body in = {.data = p->body, .size = p->frame.length};
    msg_error e = {0};
    if (p->frame.type == MSG_OFFER_OK) {
        assert_false(atomic_load(&has_failed));
        return false;
    }
    assert_int_equal(decode_error(&in, &e), FANIN_OK);
    assert_int_equal(e.code, FANIN_ERR_MEMORY);
    assert_true(atomic_load(&has_failed));
    return true;
}

/* It is in no list then, and can offer again. */
SERVER_TEST(an_offer_without_memory_ends_the_one_before)
{
    enum { MOST = 50 };
    fanin_server *s = start(0);
    peer a = open_relay(s), p = peer_open(s);
    unsigned refused = 0;
    for (int before = 0; before < 2; before++) {
        for (long works_yet = 0; works_yet < MOST; works_yet++) {
            msg_offer m = offer_of(4, 1, 7001),
                      gone = {.publication = RUN, .gone = true};
            offer(&a, before ? &m : &gone);
            m.step = 5;
            bool fails = offer_with(&a, &m, works_yet);
            for (uint64_t step = 4; step <= 5; step++) {
                ask(&p, step, 1, 0, 0);
                hear(&p);
                assert_int_equal(members(), step == 5 && !fails);
                assert_int_equal(heard.n_entries, !fails);
            }
            offer(&a, &m);
            ask(&p, 5, 1, 0, 0);
            hear(&p);
            assert_int_equal(members(), 1);
            expect_entry(0, 0, 7001);
            refused += fails;
            if (!fails)
                break;
        }
    }
    assert_true(refused >= 4);
    assert_int_equal(server_stats(s).relays, 1);
    peer_close(&a);
    peer_close(&p);
    server_expect_idle(s);
}

/* ------------------------------------------------------------------ among many */

SERVER_TEST(a_session_among_many_hears_news_seldom)
{
    enum { RELAYS = 5, OTHERS = 42 }; /* 24 ms for all, and who asks */
    fanin_server *s = start(0);
    peer p = peer_open(s), relays[RELAYS];
    for (unsigned i = 0; i < OTHERS; i++)
        (void)peer_open(s);
    for (unsigned i = 0; i < RELAYS; i++)
        relays[i] = open_relay(s);
    ask(&p, 5, 1, 0, 0);
    uint64_t version = hear(&p), began = clock_ns();
    for (unsigned i = 0; i < RELAYS; i++) {
        offer_plainly(&relays[i], (uint16_t)(7001 + i));
        ask(&p, 5, 1, version, PATIENT);
        version = hear(&p);
        assert_int_equal(members(), (2u << i) - 1);
    }
    assert_true(clock_ns() - began >= (RELAYS - 1) * UINT64_C(24000000));
}

/* Others may be about to come: all that do so soon after the first hear when it does. */
SERVER_TEST(among_many_who_asks_first_hears_a_little_later)
{
    enum { PEERS = 48 }; /* 6 ms */
    fanin_server *s = start(0);
    peer peers[PEERS];
    for (unsigned i = 0; i < PEERS; i++)
        peers[i] = peer_open(s);
    for (unsigned i = 0; i < PEERS; i++) {
        uint64_t began = clock_ns();
        ask(&peers[i], 5, 1, 0, PATIENT);
        hear(&peers[i]);
        assert_true(clock_ns() - began >= UINT64_C(6000000));
    }
}

/* ------------------------------------------------------------------ refusals */

static void refuse(peer *p, const msg_offer *m, fanin_status code, const char *words)
{
    request_offer(p, m);
    msg_error e = peer_expect_error(p, code);
    char both[sizeof e.message + sizeof e.remedy + 4];
    snprintf(both, sizeof both, "%s (%s)", e.message, e.remedy);
    assert_says(both, words);
}

/* It is wrong, whoever holds it. Those before it are not. */
SERVER_TEST(a_step_that_was_taken_back_has_no_list)
{
    fanin_server *s = start(0);
    peer p = open_relay(s), q = peer_open(s);
    msg_offer m = offer_of(5, 1, 7001);
    offer(&p, &m);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_OK);
    assert_int_equal(fanin_server_commit(s, RUN, 6, NULL, NULL), FANIN_OK);
    ask(&q, 5, 1, 0, PATIENT);
    assert_says(peer_expect_error(&q, FANIN_ERR_STALE).message, "step 5");
    m.step = 4;
    offer(&p, &m);
    m.step = 5;
    refuse(&p, &m, FANIN_ERR_STALE, "was taken back");
    ask(&q, 4, 1, 0, PATIENT);
    hear(&q);
    assert_int_equal(members(), 1);
}

/* A rank remembers some, and what is older than these it does not trust. */
SERVER_TEST(a_step_is_not_trusted_where_its_withdrawal_may_be_forgotten)
{
    fanin_server *s = start(0);
    peer q = peer_open(s);
    for (uint64_t step = 7; step < 7 + 2 * 65; step += 2) {
        assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_OK);
        assert_int_equal(fanin_server_commit(s, RUN, step, NULL, NULL), FANIN_OK);
    }
    ask(&q, 5, 1, 0, PATIENT);
    assert_says(peer_expect_error(&q, FANIN_ERR_STALE).message, "step 5");
    ask(&q, 134, 1, 0, PATIENT);
    hear(&q);
    assert_int_equal(members(), 0);
}

SERVER_TEST(lies_are_refused)
{
    fanin_server *s = start(0);
    peer p = open_relay(s);
    msg_offer m = offer_of(5, 1, 7001);
    snprintf(m.publication, sizeof m.publication, "full:none");
    refuse(&p, &m, FANIN_ERR_NOT_FOUND, RUN);
    m = offer_of(6, 1, 7001); /* nobody can have it */
    refuse(&p, &m, FANIN_ERR_STALE, "step 6");
    m = offer_of(5, 1, 0);
    refuse(&p, &m, FANIN_ERR_ARGUMENT, "port");
    m = offer_of(5, 1, 7001);
    snprintf(m.place, sizeof m.place, "a\x1b[2J");
    refuse(&p, &m, FANIN_ERR_ARGUMENT, "site/rack");
    m = offer_of(4, 1, 7001); /* of a step before it may have */
    offer(&p, &m);
    peer q = peer_open(s);
    static const uint64_t versions[] = {0, UINT64_MAX, UINT64_MAX / 2};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        ask(&q, 4, 1, versions[i], PATIENT);
        uint64_t version = hear(&q);
        assert_int_equal(members(), 1);
        assert_int_equal(heard.n_entries, 1);
        ask(&q, 4, 1, version - 1, PATIENT); /* goes back: hears it again */
        assert_true(hear(&q) == version);
        hear_knowing(&q, 4, 0, UINT64_MAX - i); /* hears of nobody, by its own word */
        assert_int_equal(members(), 1);
        assert_int_equal(heard.n_entries, 0);
        assert_true(heard.roster <= version);
    }
}

/* Readers ask together with the offer. Their requests would fill the session's places, were they
   parked: a refused offer is made again. */
SERVER_TEST(who_is_refused_an_offer_has_nothing_parked)
{
    fanin_server *s = start(0);
    peer p = open_relay(s);
    const msg_offer m = offer_of(6, 1, 7001);
    for (unsigned i = 0; i < 17; i++) {
        buffer b = {0};
        encode_offer(&b, ++p.request, &m);
        add_ask(&b, &p, 6, 1, 0, 3600000);
        add_ask(&b, &p, 6, 2, 0, 3600000);
        peer_send(&p, &b);
        (void)peer_expect_error(&p, FANIN_ERR_STALE);
        for (int list = 0; list < 2; list++) {
            hear(&p);
            assert_int_equal(members(), 0);
        }
    }
    peer_close(&p);
    server_expect_idle(s);
}

/* What no encoder of ours sends: one byte of an offer's place is another one. */
static void refuse_altered(const char *place, size_t at, uint8_t byte,
                           const char *words)
{
    fanin_server *s = start(0);
    peer p = open_relay(s);
    buffer b = {0};
    msg_offer m = offer_of(5, 1, 7001);
    snprintf(m.place, sizeof m.place, "%s", place);
    encode_offer(&b, ++p.request, &m);
    uint8_t *found = memmem(b.data, b.size, place, strlen(place));
    assert_non_null(found);
    found[at] = byte;
    peer_send(&p, &b);
    assert_says(peer_expect_error(&p, FANIN_ERR_PROTOCOL).message, words);
    peer_close(&p);
    server_expect_idle(s);
}

SERVER_TEST(a_place_that_is_no_text_is_refused)
{
    static const char most[] =
        "a23456789012345678901234567890123456789012345678901234567890123";
    refuse_altered("garbage", 3, 0xff, "not UTF-8");
    refuse_altered("garbage", 3, 0x00, "holds a NUL");
    refuse_altered(most, (size_t)-1, sizeof most, "length is out of range");
}

SERVER_TEST(the_trainer_may_forbid_relays)
{
    fanin_server *s = start(FANIN_SERVER_NO_RELAYS);
    peer p = open_relay(s);
    msg_offer m = offer_of(5, 1, 7001);
    refuse(&p, &m, FANIN_ERR_UNSUPPORTED, "relays=True");
    ask(&p, 5, 1, 0, PATIENT);
    assert_says(peer_expect_error(&p, FANIN_ERR_UNSUPPORTED).message, "forbids");
    assert_int_equal(server_stats(s).protocol_errors, 0);
    peer_ping(&p);
}

SERVER_TEST(a_relay_keeps_no_list)
{
    fanin_server *s = start(FANIN_SERVER_RELAY);
    peer p = peer_connect(s);
    peer_hello_with(&p, (msg_hello){.role = ROLE_CONTROL, .features = FEATURE_RELAYS});
    msg_offer m = offer_of(5, 1, 7001);
    refuse(&p, &m, FANIN_ERR_UNSUPPORTED, "trainer's ranks");
}

/* ------------------------------------------------------------------ what is bounded */

SERVER_TEST(a_session_offers_as_often_as_it_likes_and_is_in_the_list_once)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), p = peer_open(s);
    offer_plainly(&a, 1);
    ask(&p, 5, 1, 0, 0);
    uint64_t first = hear(&p), memory_then = server_stats(s).session_memory;
    for (uint16_t port = 2; port <= 4096; port++) {
        msg_offer m = offer_of(5, 1, port);
        request_offer(&a, &m);
        if (port % 64 == 0)
            for (unsigned i = 0; i < (port == 64 ? 63 : 64); i++)
                peer_expect(&a, MSG_OFFER_OK);
    }
    ask(&p, 5, 1, first, 0);
    hear(&p);
    assert_int_equal(members(), 1);
    assert_int_equal(heard.n_entries, 1);
    expect_entry(0, 0, 4096);
    peer_ping(&a);
    assert_true(server_stats(s).session_memory < memory_then + (1 << 20));
    peer_close(&a);
    peer_close(&p);
    server_expect_idle(s);
}

/* What it makes the server keep is its own. */
/* A turn is charged when it has answered: the second answer comes after the first one's charge. */
static uint64_t charged_after_ping(fanin_server *s, peer *p)
{
    peer_ping(p);
    peer_ping(p);
    return server_stats(s).session_memory;
}

SERVER_TEST(lists_are_charged_to_who_is_in_them)
{
    fanin_server *s = start(0);
    peer p = peer_open(s), a = open_relay(s);
    const uint64_t list = LIMIT_HOLDERS / 8; /* bytes at least */
    uint64_t version = 0, charged[2];
    for (int park = 0; park < 2; park++) {
        for (uint8_t i = 0; i < 15; i++) {
            ask(&p, 5, (uint8_t)(10 + i), version, park ? PATIENT : 0);
            version = park ? version : hear(&p);
        }
        charged[park] = charged_after_ping(s, &p);
    }
    assert_true(charged[1] >= charged[0] + 15 * list);
    offer_plainly(&a, 7001);
    uint64_t before = charged_after_ping(s, &a);
    msg_offer gone = {.publication = RUN, .gone = true};
    offer(&a, &gone);
    assert_true(charged_after_ping(s, &a) + list + sizeof(holder_entry) <= before);
    peer_close(&p);
    peer_close(&a);
    server_expect_idle(s);
}

SERVER_TEST(a_session_offers_few_publications)
{
    fanin_server *s = start(0);
    peer a = open_relay(s);
    for (unsigned i = 0; i <= 16; i++) {
        msg_offer m = offer_of(1, 1, 7001);
        snprintf(m.publication, sizeof m.publication, "lora:n%u", i);
        server_put(s, m.publication, "a", memory, SIZE);
        assert_works(fanin_server_commit(s, m.publication, 1, NULL, ERROR));
        if (i < 16)
            offer(&a, &m);
        else
            refuse(&a, &m, FANIN_ERR_LIMIT, "16 publications");
    }
    msg_offer gone = {.publication = "lora:n3", .gone = true};
    offer(&a, &gone);
    offer_plainly(&a, 7001);
}

SERVER_TEST(parked_requests_are_few)
{
    fanin_server *s = start(0);
    peer p = peer_open(s), a = open_relay(s);
    ask(&p, 5, 1, 0, 0);
    uint64_t version = hear(&p);
    for (unsigned i = 0; i < 16; i++)
        ask(&p, 5, 1, version, 3600000);
    ask(&p, 5, 1, version, 3600000);
    assert_says(peer_expect_error(&p, FANIN_ERR_LIMIT).message, "16 parked");
    offer_plainly(&a, 7001);
    for (unsigned i = 0; i < 16; i++) { /* all hear it in the end */
        hear(&p);
        expect_entry(0, 0, 7001);
    }
    for (unsigned i = 0; i < 16; i++)
        ask(&p, 5, 1, heard.version, 3600000);
    peer_ping(&p);
    peer_close(&p);
    peer_close(&a);
    server_expect_idle(s);
    p = peer_open(s);
    ask(&p, 5, 1, 0, 0);
    ask(&p, 5, 1, hear(&p), 3600000);
    peer_ping(&p);
    server_stop(&s, 0);
    assert_false(peer_silent(&p, 10000)); /* CLOSED, or at least the end */
    holders_free(&heard);
}

/* It asks anew at each step, and a list that nobody enters or leaves says nothing. */
SERVER_TEST(who_offers_the_next_step_is_rid_of_its_parked_requests)
{
    fanin_server *s = start(0);
    peer p = peer_open(s);
    ask(&p, 4, 2, 0, 0);
    uint64_t version = hear(&p);
    msg_offer before = offer_of(4, 1, 7001), now = offer_of(5, 1, 7001);
    offer(&p, &before);
    ask(&p, 4, 2, version, 3600000);
    assert_true(peer_silent(&p, 50));
    offer(&p, &now);
    assert_true(hear(&p) == version);
    expect_nothing_new();
    ask(&p, 5, 2, 0, 0);
    ask(&p, 5, 2, hear(&p), 3600000); /* of what it offers now it waits */
    offer(&p, &now);
    assert_true(peer_silent(&p, 50));
    peer_close(&p);
    server_expect_idle(s);
}

/* All that leave a list at the same time would be told of each other. */
SERVER_TEST(who_offers_the_next_step_is_told_no_news_of_the_one_before)
{
    fanin_server *s = start(0);
    peer p = peer_open(s);
    msg_offer before = offer_of(4, 2, 7001), now = offer_of(5, 1, 7001);
    ask(&p, 4, 2, 0, 0);
    uint64_t version = hear(&p);
    buffer b = {0}; /* in one piece: nothing is told meanwhile */
    add_ask(&b, &p, 4, 2, version, PATIENT);
    encode_offer(&b, ++p.request, &before);
    encode_offer(&b, ++p.request, &now);
    peer_send(&p, &b);
    (void)peer_expect(&p, MSG_OFFER_OK);
    (void)peer_expect(&p, MSG_OFFER_OK);
    assert_true(hear(&p) == version);
    expect_nothing_new();
}

/* ------------------------------------------------------------------ what is counted */

SERVER_TEST(what_relays_tell_is_counted)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), p = peer_open(s);
    msg_offer m = offer_of(5, 1, 7001);
    m.bytes_origin = 1000; /* of before this session */
    offer(&a, &m);
    offer_plainly(&p, 7002);
    fanin_server_stats now = server_stats(s);
    assert_int_equal(now.relays, 2);
    assert_int_equal(now.relay_bytes_origin, 0);
    m.bytes_origin = 1100;
    m.bytes_relays = 500;
    m.landed = 7;
    m.late = 2;
    m.taken_over = 1;
    offer(&a, &m);
    m.landed = 10;
    offer(&a, &m);
    m.step = 4; /* units are of a step */
    m.landed = 3;
    m.bytes_relays = 400; /* it counts from 0 again */
    offer(&a, &m);
    now = server_stats(s);
    assert_int_equal(now.relays, 2);
    assert_int_equal(now.relay_bytes_origin, 100);
    assert_int_equal(now.relay_bytes_relays, 900);
    assert_int_equal(now.relay_units, 13);
    assert_int_equal(now.relay_late, 4);
    assert_int_equal(now.relay_taken_over, 2);
    peer_close(&a);
    peer_await_count(&p, s, offsetof(fanin_server_stats, relays), 1);
    m = (msg_offer){.publication = RUN, .gone = true};
    offer(&p, &m);
    assert_int_equal(server_stats(s).relays, 0);
}

static stats_entry entry_now(peer *p)
{
    buffer b = {0};
    msg_stats_ok m;
    encode_stats(&b, ++p->request, RUN);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_STATS_OK);
    assert_int_equal(decode_stats_ok(&in, &m), FANIN_OK);
    assert_int_equal(m.n_entries, 1);
    stats_entry e = m.entries[0];
    stats_free(&m);
    return e;
}

SERVER_TEST(bytes_that_leave_are_those_of_the_step)
{
    fanin_server *s = start(0);
    puller r = puller_open(s);
    puller_begin(&r);
    puller_expect(&r, 0, memory[0], SIZE);
    peer_ping(&r.data);
    stats_entry e = entry_now(&r.control);
    assert_int_equal(e.bytes, SIZE);
    assert_int_equal(e.bytes_left, SIZE);
    server_begin(s);
    server_commit(s, 6);
    assert_int_equal(entry_now(&r.control).bytes_left, 0);
}

/* Who may know holders of leases is told of relays, too. */
SERVER_TEST(relays_are_told_to_their_own_user)
{
    fanin_server *s = start(0);
    peer a = open_relay(s), own = peer_open_unix(s), stranger = peer_open(s);
    msg_offer m = offer_of(5, 1, 7001);
    m.units = 9;
    m.landed = 7;
    snprintf(m.place, sizeof m.place, "a/r3");
    offer(&a, &m);
    for (unsigned i = 0; i < 2; i++) {
        peer *p = i ? &stranger : &own;
        buffer b = {0};
        msg_stats_ok ok;
        encode_stats(&b, ++p->request, NULL);
        peer_send(p, &b);
        body in = peer_expect(p, MSG_STATS_OK);
        assert_int_equal(decode_stats_ok(&in, &ok), FANIN_OK);
        assert_int_equal(ok.n_told_relays, i ? 0 : 1);
        if (i == 0) {
            assert_string_equal(ok.told_relays[0].address, ":7001");
            assert_string_equal(ok.told_relays[0].place, "a/r3");
            assert_int_equal(ok.told_relays[0].landed, 7);
        }
        stats_free(&ok);
    }
}
