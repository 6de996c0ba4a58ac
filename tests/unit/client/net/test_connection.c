/* SPDX-License-Identifier: Apache-2.0 */
/* The control connection to one rank: greeting, odd frames, silence, its end and a new one. */
#include "net/connection.h"
#include "stub_ranks.h"
#include "testing.h"
#include <sys/resource.h>
#include <sys/socket.h>

#define CONNECT_MS 400
#define LOST_MS 1000

typedef struct scene {
    loop loop;
    connection_shared shared;
    stub_rank rank;
    connection *c;
} scene;

/* What became of requests. */
typedef struct heard {
    unsigned replies, lost;
    message_type last;
    uint64_t again; /* asked from within the reply so many times more */
} heard;

static int refused_send; /* errno of the next send; 0: it is sent */

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (!refused_send)
        return __real_sendmsg(fd, message, flags);
    errno = refused_send;
    refused_send = 0;
    return -1;
}

static int set_up(void **state)
{
    static scene s;
    static unsigned told;
    socket_address at;
    s = (scene){
        .shared = {.connect_ms = CONNECT_MS, .lost_ms = LOST_MS, .told = &told}};
    memset(s.shared.client_id, 0x31, sizeof s.shared.client_id);
    assert_int_equal(loop_init(&s.loop, NULL), FANIN_OK);
    s.shared.loop = &s.loop;
    stub_rank_start(&s.rank, &s.loop);
    s.rank.hello.rank = 3;
    s.rank.hello.world_size = 8;
    assert_int_equal(socket_resolve(s.rank.address, &at, NULL), FANIN_OK);
    assert_int_equal(connection_create(&s.shared, "trainer:6003", &at, &s.c, NULL),
                     FANIN_OK);
    *state = &s;
    return 0;
}

static int tear_down(void **state)
{
    scene *s = *state;
    stub_time_hold(false);
    connection_destroy(&s->c);
    stub_rank_stop(&s->rank);
    loop_finish(&s->loop);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* Until it is READY or DOWN. */
static connection_state settle(scene *s)
{
    connection_state at;
    while ((at = s->c->state) != CONNECTION_READY && at != CONNECTION_DOWN)
        loop_step(&s->loop, connection_tick(s->c));
    return at;
}

static connection_state open_it(scene *s)
{
    connection_start(s->c);
    return settle(s);
}

/* The same over TCP. */
static connection_state open_tcp(scene *s)
{
    s->shared.no_unix = true;
    stub_time_hold(true);
    return open_it(s);
}

static void on_reply(void *cookie, connection *c, message_type type, body *b);

static uint64_t ping(scene *s, heard *h)
{
    encode_empty(connection_out(s->c), s->c->next_request, MSG_PING);
    connection_ask(s->c, on_reply, h);
    return s->c->next_request - 1;
}

static void on_reply(void *cookie, connection *c, message_type type, body *b)
{
    heard *h = cookie;
    (void)b;
    h->replies += type != 0;
    h->lost += type == 0;
    h->last = type;
    if (type == 0 || h->again == 0)
        return;
    h->again--;
    encode_empty(connection_out(c), c->next_request, MSG_PING);
    connection_ask(c, on_reply, h);
}

static void run_until(scene *s, const unsigned *count, unsigned wanted)
{
    while (*count < wanted)
        loop_step(&s->loop, connection_tick(s->c));
}

static void assert_down(const scene *s, fanin_status status, const char *words)
{
    const fanin_error *fault = &s->c->fault;
    assert_int_equal(s->c->state, CONNECTION_DOWN);
    assert_string_equal(fault->address, "trainer:6003");
    if (fault->status != status || !strstr(fault->message, words))
        fail_msg("%s: \"%s\", not \"%s\"", fanin_status_name(fault->status),
                 fault->message, words);
}

/* ----------------------------------------------------------------- greeting */

static msg_hello greeted_with;

static bool note_hello(stub_talk *t, const frame *f, body *in)
{
    body copy = *in;
    if (f->type == MSG_HELLO)
        assert_int_equal(decode_hello(&copy, &greeted_with), FANIN_OK);
    return stub_answer(t, f, in);
}

CASE(on_this_host_it_is_a_unix_socket)
{
    scene *s = *state;
    s->rank.answer = note_hello;
    assert_false(s->c->known);
    assert_int_equal(s->c->fault.status, FANIN_ERR_UNREACHABLE);
    assert_int_equal(open_it(s), CONNECTION_READY);
    assert_true(s->c->is_unix && s->c->local);
    assert_false(s->c->in.sealed);
    assert_true(s->c->known);
    assert_int_equal(s->c->peer.rank, 3);
    assert_int_equal(s->c->generation, 1);
    assert_int_equal(greeted_with.role, ROLE_CONTROL);
    assert_memory_equal(greeted_with.id, s->shared.client_id, 16);
    assert_false(greeted_with.features & FEATURE_SEALS);
}

CASE(over_tcp_frames_are_sealed)
{
    scene *s = *state;
    heard h = {.again = 2};
    assert_int_equal(open_tcp(s), CONNECTION_READY);
    assert_false(s->c->is_unix);
    assert_true(s->c->in.sealed);
    ping(s, &h);
    run_until(s, &h.replies, 3);
    assert_int_equal(h.last, MSG_PONG);
}

CASE(who_knows_no_seals_gets_none)
{
    scene *s = *state;
    heard h = {0};
    s->rank.hello.features = 0;
    assert_int_equal(open_tcp(s), CONNECTION_READY);
    assert_false(s->c->in.sealed);
    ping(s, &h);
    run_until(s, &h.replies, 1);
    assert_int_equal(h.last, MSG_PONG);
}

/* Whoever took the Unix name of an address need not be who listens there. */
CASE(a_taken_name_is_left)
{
    scene *s = *state;
    strcpy(s->rank.hello.address, "127.0.0.1:1");
    stub_time_hold(true);
    assert_int_equal(open_it(s), CONNECTION_READY);
    assert_false(s->c->is_unix);
    assert_int_equal(s->rank.asked[MSG_HELLO], 2);
}

CASE(nobody_listens)
{
    scene *s = *state;
    for (int i = 0; i < 2; i++) {
        loop_remove(&s->loop, &s->rank.listeners[i].source);
        close(s->rank.listeners[i].source.fd);
        s->rank.listeners[i].source.fd = -1;
    }
    stub_time_hold(true);
    assert_int_equal(open_it(s), CONNECTION_DOWN);
    assert_down(s, FANIN_ERR_UNREACHABLE, "cannot be reached");
    assert_int_equal(s->c->fault.sys_errno, ECONNREFUSED);
    assert_false(s->c->silent);
}

/* ---------------------------------------------------------------- odd frames */

static const uint8_t http[] = "HTTP/1.1 400 Bad Request\r\n\r\n";

static void append_header(buffer *b, message_type type, uint64_t request,
                          uint32_t length)
{
    uint8_t header[FRAME_SIZE];
    frame_encode(&(frame){.type = type, .request = request, .length = length}, header);
    buffer_append(b, header, sizeof header);
}

/* Instead of an answer. */
typedef enum oddity {
    IS_HTTP,
    IS_ENDLESS,
    IS_SHORT,
    IS_ANOTHER,
    IS_ERROR,
    IS_NO_WORLD,
    IS_RELAY,
    IS_NEW_VERSION,
    IS_UNASKED,
    IS_COMPLAINT,
    IS_FLIPPED,
    IS_END,
    IS_NOTHING,
} oddity;

typedef struct odd_case {
    oddity is;
    fanin_status status;
    const char *words;
} odd_case;

static oddity odd;
static message_type odd_type;

static bool answer_oddly(stub_talk *t, const frame *f, body *in)
{
    if (f->type != odd_type)
        return stub_answer(t, f, in);
    switch (odd) {
    case IS_HTTP:
        buffer_append(&t->out, http, sizeof http);
        return true;
    case IS_ENDLESS:
        append_header(&t->out, f->type + 1, f->request, UINT32_MAX);
        return true;
    case IS_SHORT:
        append_header(&t->out, f->type + 1, f->request, 0);
        return true;
    case IS_ANOTHER:
        encode_empty(&t->out, f->request, MSG_PONG);
        return true;
    case IS_ERROR:
        return stub_answer_error(t, f->request, FANIN_ERR_AUTH, "not you");
    case IS_NO_WORLD:
        memset(t->rank->hello.world_id, 0, sizeof t->rank->hello.world_id);
        return stub_answer(t, f, in);
    case IS_RELAY:
        t->rank->hello.relay = true;
        return stub_answer(t, f, in);
    case IS_NEW_VERSION:
        t->rank->hello.version = VERSION_MAX + 1;
        return stub_answer(t, f, in);
    case IS_UNASKED:
        encode_empty(&t->out, f->request + 1000, MSG_PONG);
        return true;
    case IS_COMPLAINT:
        return stub_answer_error(t, 0, FANIN_ERR_LIMIT, "too many clients");
    case IS_FLIPPED:
        (void)stub_answer(t, f, in);
        t->out.data[t->out.size - 1] ^= 4;
        return true;
    default:
        return odd == IS_NOTHING;
    }
}

/* Not the trainer's fault. */
CASE(without_descriptors_the_limit_is_the_remedy)
{
    scene *s = *state;
    struct rlimit before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    const struct rlimit none = {.rlim_max = before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    connection_start(s->c);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_down(s, FANIN_ERR_UNREACHABLE, "cannot make a socket");
    assert_non_null(strstr(s->c->fault.remedy, "ulimit -n"));
}

static struct rlimit all_files;

/* Of both ends; none for anything new. */
static bool answer_without_descriptors(stub_talk *t, const frame *f, body *in)
{
    const struct rlimit none = {.rlim_max = all_files.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    return stub_answer(t, f, in);
}

/* Neither is it one to trust other users. */
CASE(who_cannot_be_looked_at_is_no_stranger)
{
    scene *s = *state;
    s->rank.answer = answer_without_descriptors;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &all_files), 0);
    connection_state at = open_tcp(s);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &all_files), 0);
    assert_int_equal(at, CONNECTION_DOWN);
    assert_down(s, FANIN_ERR_UNREACHABLE, "Too many open files");
    assert_non_null(strstr(s->c->fault.remedy, "ulimit -n"));
    s->rank.answer = stub_answer;
    assert_int_equal(open_it(s), CONNECTION_READY);
}

CASE(a_greeting_must_be_one)
{
    scene *s = *state;
    static const odd_case cases[] = {
        {IS_HTTP, FANIN_ERR_PROTOCOL, "sent something else"},
        {IS_ENDLESS, FANIN_ERR_PROTOCOL, "announced a reply beyond the limit"},
        {IS_SHORT, FANIN_ERR_PROTOCOL, "sent a malformed greeting"},
        {IS_ANOTHER, FANIN_ERR_PROTOCOL, "does not fit the request"},
        {IS_ERROR, FANIN_ERR_AUTH, "not you"},
        {IS_NO_WORLD, FANIN_ERR_PROTOCOL, "all zero"},
        {IS_RELAY, FANIN_ERR_WORLD, "is a relay"},
        {IS_NEW_VERSION, FANIN_ERR_VERSION, "was not offered"},
        {IS_END, FANIN_ERR_UNREACHABLE, "closed the connection"},
        {IS_NOTHING, FANIN_ERR_UNREACHABLE, "accepted but did not answer in time"},
    };
    s->rank.answer = answer_oddly;
    odd_type = MSG_HELLO;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        msg_hello_ok hello = s->rank.hello;
        odd = cases[i].is;
        assert_int_equal(open_it(s), CONNECTION_DOWN);
        assert_down(s, cases[i].status, cases[i].words);
        assert_int_equal(s->c->silent, odd == IS_NOTHING);
        s->rank.hello = hello;
    }
    assert_false(s->c->known);
    s->rank.answer = stub_answer;
    assert_int_equal(open_it(s), CONNECTION_READY);
    assert_false(s->c->silent);
}

/* All who wait are told, and the next connection is a good one. */
static void answer_with(scene *s, const odd_case *o)
{
    heard first = {0}, second = {0};
    uint64_t generation = s->c->generation;
    s->rank.answer = answer_oddly;
    odd = o->is;
    odd_type = MSG_PING;
    assert_int_equal(open_it(s), CONNECTION_READY);
    assert_int_equal(s->c->generation, generation + 1);
    ping(s, &first);
    ping(s, &second);
    run_until(s, &second.lost, 1);
    assert_int_equal(first.lost, 1);
    assert_int_equal(first.replies + second.replies, 0);
    assert_down(s, o->status, o->words);
    assert_int_equal(s->c->fault.rank, 3);
}

CASE(an_answer_must_be_one)
{
    static const odd_case cases[] = {
        {IS_HTTP, FANIN_ERR_PROTOCOL, "rank 3 at trainer:6003 sent something else"},
        {IS_ENDLESS, FANIN_ERR_PROTOCOL, "announced a reply beyond the limit"},
        {IS_UNASKED, FANIN_ERR_PROTOCOL, "answered a request that was not made"},
        {IS_COMPLAINT, FANIN_ERR_LIMIT, "too many clients"},
        {IS_END, FANIN_ERR_CLOSED, "closed the connection"},
        {IS_NOTHING, FANIN_ERR_UNREACHABLE, "owes an answer and fell silent"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        answer_with(*state, &cases[i]);
}

CASE(a_sealed_answer_must_fit)
{
    scene *s = *state;
    static const odd_case cases[] = {
        {IS_HTTP, FANIN_ERR_TRANSPORT, "do not agree on a frame"},
        {IS_FLIPPED, FANIN_ERR_TRANSPORT, "do not agree on a frame"},
        {IS_COMPLAINT, FANIN_ERR_LIMIT, "too many clients"},
    };
    s->shared.no_unix = true;
    stub_time_hold(true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        answer_with(s, &cases[i]);
}

/* What a rank says of a request is the request's. */
CASE(an_error_is_of_its_request)
{
    scene *s = *state;
    heard h = {0};
    s->rank.answer = answer_oddly;
    odd = IS_ERROR;
    odd_type = MSG_PING;
    assert_int_equal(open_it(s), CONNECTION_READY);
    ping(s, &h);
    run_until(s, &h.replies, 1);
    assert_int_equal(h.last, MSG_ERROR);
    assert_int_equal(s->c->state, CONNECTION_READY);
}

/* ----------------------------------------------------------------- requests */

static bool say_nothing(stub_talk *t, const frame *f, body *in)
{
    return f->type != MSG_HELLO || stub_answer(t, f, in);
}

static void send_bytes(scene *s, const buffer *b, size_t from, size_t size)
{
    int fd = stub_rank_talk(&s->rank, ROLE_CONTROL)->source.fd;
    assert_int_equal(send(fd, b->data + from, size, 0), size);
}

CASE(answers_come_in_pieces_and_many_at_once)
{
    scene *s = *state;
    heard h[3] = {{0}};
    buffer answers = {0};
    s->rank.answer = say_nothing;
    assert_int_equal(open_it(s), CONNECTION_READY);
    for (size_t i = 0; i < 3; i++)
        encode_empty(&answers, ping(s, &h[i]), MSG_PONG);
    size_t one = answers.size / 3;
    for (size_t i = 0; i < one; i++) {
        assert_int_equal(h[0].replies, 0);
        send_bytes(s, &answers, i, 1);
        run_until(s, &s->rank.asked[MSG_PING], 3);
        loop_step(&s->loop, 0);
    }
    assert_int_equal(h[0].replies, 1);
    send_bytes(s, &answers, one, one + one / 2);
    run_until(s, &h[1].replies, 1);
    assert_int_equal(h[2].replies, 0);
    send_bytes(s, &answers, one * 2 + one / 2, answers.size - one * 2 - one / 2);
    run_until(s, &h[2].replies, 1);
    assert_int_equal(h[0].replies + h[1].replies, 2);
    buffer_free(&answers);
}

/* The answer to a request that was forgotten, or to none, and what follows it. */
CASE(forgotten_answers_are_dropped)
{
    scene *s = *state;
    heard gone = {0}, other = {0};
    buffer answers = {0};
    s->rank.answer = say_nothing;
    assert_int_equal(open_it(s), CONNECTION_READY);
    encode_empty(&answers, ping(s, &gone), MSG_PONG);
    assert_true(connection_owes(s->c));
    connection_forget(s->c, &gone);
    assert_false(connection_owes(s->c));
    encode_empty(&answers, ping(s, &other), MSG_PONG);
    send_bytes(s, &answers, 0, answers.size);
    run_until(s, &other.replies, 1);
    assert_int_equal(gone.replies + gone.lost, 0);
    buffer_free(&answers);
}

CASE(a_kept_request_has_many_answers)
{
    scene *s = *state;
    heard h = {0};
    buffer events = {0};
    s->rank.answer = say_nothing;
    assert_int_equal(open_it(s), CONNECTION_READY);
    uint64_t request = ping(s, &h);
    connection_keep(s->c, &h);
    assert_false(connection_owes(s->c)); /* it may come, or not */
    for (int i = 0; i < 3; i++)
        encode_event(&events, request, &(msg_event){.publication = "x"});
    send_bytes(s, &events, 0, events.size);
    run_until(s, &h.replies, 3);
    assert_int_equal(h.last, MSG_EVENT);
    connection_fail(s->c, &s->c->fault);
    assert_int_equal(h.lost, 1);
    buffer_free(&events);
}

CASE(the_end_is_told_to_who_waits)
{
    scene *s = *state;
    heard h = {0};
    assert_int_equal(open_it(s), CONNECTION_READY);
    ping(s, &h);
    connection_destroy(&s->c);
    assert_null(s->c);
    assert_int_equal(h.lost, 1);
    assert_int_equal(h.replies, 0);
}

CASE(without_a_connection_nothing_is_asked)
{
    scene *s = *state;
    heard h = {0};
    ping(s, &h);
    assert_int_equal(h.lost, 1);
    assert_int_equal(s->rank.asked[MSG_PING], 0);
}

/* What the kernel does not take is lost, or half of it has left: nobody would ever answer. */
CASE(a_send_that_fails_ends_the_connection)
{
    static const int reasons[] = {ENOBUFS, ENOMEM, EHOSTUNREACH};
    scene *s = *state;
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
        heard first = {0}, second = {0};
        s->rank.answer = say_nothing;
        assert_int_equal(open_it(s), CONNECTION_READY);
        ping(s, &first);
        refused_send = reasons[i];
        ping(s, &second);
        assert_down(s, FANIN_ERR_CLOSED, "rank 3 at trainer:6003 could not be sent");
        assert_int_equal(s->c->fault.sys_errno, reasons[i]);
        assert_int_equal(first.lost, 1);
        assert_int_equal(second.lost, 1);
    }
}

/* A refusal that came before the end is read. */
CASE(a_closed_end_is_told_by_reading)
{
    scene *s = *state;
    heard h = {0};
    s->rank.answer = say_nothing;
    assert_int_equal(open_it(s), CONNECTION_READY);
    refused_send = EPIPE;
    ping(s, &h);
    assert_int_equal(s->c->state, CONNECTION_READY);
    stub_rank_hang_up(&s->rank);
    run_until(s, &h.lost, 1);
    assert_down(s, FANIN_ERR_CLOSED, "closed the connection");
}

/* Data connections belong to the session, and do as the control connection does. */
CASE(data_connections_greet_alike)
{
    scene *s = *state;
    for (int sealed = 0; sealed < 2; sealed++) {
        buffer out = {0};
        framing in = {0};
        msg_hello m;
        framing_start(&in, LIMIT_REPLY);
        assert_int_equal(sealed ? open_tcp(s) : open_it(s), CONNECTION_READY);
        connection_encode_data_hello(s->c, &out, &in);
        body b = {.data = out.data + FRAME_SIZE, .size = out.size - FRAME_SIZE};
        assert_int_equal(decode_hello(&b, &m), FANIN_OK);
        assert_int_equal(m.role, ROLE_DATA);
        assert_memory_equal(m.id, s->rank.hello.session, sizeof m.id);
        assert_int_equal(m.features, sealed ? FEATURE_SEALS : 0);
        assert_int_equal(in.hello, sealed ? out.size : 0);
        buffer_free(&out);
        framing_free(&in);
        connection_fail(s->c, &s->c->fault);
    }
}

/* ------------------------------------------------------------------ silence */

/* Steps through so much time, as a call that waits does. */
static void wait_ms(scene *s, uint64_t ms)
{
    deadline at = deadline_in_ms(ms);
    while (!deadline_passed(at))
        loop_step(&s->loop, deadline_sooner(at, connection_tick(s->c)));
    (void)connection_tick(s->c);
}

CASE(who_owes_an_answer_is_asked_for_a_sign)
{
    scene *s = *state;
    heard h = {0};
    odd_type = MSG_LIST;
    odd = IS_NOTHING;
    s->rank.answer = answer_oddly;
    assert_int_equal(open_it(s), CONNECTION_READY);
    encode_list(connection_out(s->c), s->c->next_request, NULL);
    connection_ask(s->c, on_reply, &h);
    wait_ms(s, 3 * LOST_MS);
    assert_int_equal(s->c->state, CONNECTION_READY);
    assert_in_range(s->rank.asked[MSG_PING], 3, 7); /* one each half of the time */
    assert_int_equal(h.replies + h.lost, 0);
    s->rank.answer = say_nothing;
    wait_ms(s, LOST_MS);
    assert_down(s, FANIN_ERR_UNREACHABLE, "owes an answer and fell silent");
    assert_true(s->c->silent);
    assert_int_equal(h.lost, 1);
}

CASE(who_owes_nothing_may_be_silent)
{
    scene *s = *state;
    s->rank.answer = say_nothing;
    assert_int_equal(open_it(s), CONNECTION_READY);
    stub_time_pass_ms(10 * LOST_MS);
    assert_true(connection_tick(s->c) == UINT64_MAX);
    assert_int_equal(s->c->state, CONNECTION_READY);
    connection_set_owing(s->c, true); /* from now on */
    assert_true(connection_owes(s->c));
    wait_ms(s, LOST_MS - 1);
    assert_int_equal(s->c->state, CONNECTION_READY);
    assert_int_equal(s->rank.asked[MSG_PING], 1);
    wait_ms(s, 1);
    assert_down(s, FANIN_ERR_UNREACHABLE, "fell silent");
}

/* It may have been the caller who was away. */
CASE(connecting_late_has_its_time_again)
{
    scene *s = *state;
    odd_type = MSG_HELLO;
    odd = IS_NOTHING;
    s->rank.answer = answer_oddly;
    connection_start(s->c);
    loop_step(&s->loop, connection_tick(s->c));
    stub_time_pass_ms(2 * CONNECT_MS);
    connection_start(s->c);
    assert_int_equal(connection_tick(s->c), deadline_in_ms(CONNECT_MS));
    assert_int_not_equal(s->c->state, CONNECTION_DOWN);
    wait_ms(s, CONNECT_MS);
    assert_down(s, FANIN_ERR_UNREACHABLE, "did not answer in time");
}

/* ---------------------------------------------------------------------- again */

CASE(a_new_life_is_another_generation)
{
    scene *s = *state;
    heard h = {0};
    assert_int_equal(open_it(s), CONNECTION_READY);
    stub_rank_hang_up(&s->rank);
    while (s->c->state == CONNECTION_READY)
        loop_step(&s->loop, deadline_in_ms(LOST_MS));
    assert_down(s, FANIN_ERR_CLOSED, "rank 3 at trainer:6003 closed the connection");
    s->rank.hello.rank = 5;
    assert_int_equal(open_it(s), CONNECTION_READY);
    assert_int_equal(s->c->generation, 2);
    assert_int_equal(s->c->peer.rank, 5);
    ping(s, &h);
    run_until(s, &h.replies, 1);
}
