/* SPDX-License-Identifier: Apache-2.0 */
/* The data connections to one rank: requests and replies, what does not fit, and the end. */
#include "catalog/tables.h"
#include "open_files.h"
#include "stream/stream_link.h"
#include "stub_ranks.h"
#include "testing.h"

#define MIB ((uint64_t)1 << 20)
#define SIZE (9 * MIB + 5) /* three requests */
#define REQUESTS 3
#define CALL_MS 20000

typedef struct scene {
    stub_world world;
    publication *run;
    plan *plan;
    read_list list;
    uint8_t *memory;
    stream_link *link;
    stream_work work;
    stream_share share;
    uint64_t landed, needed;
    fanin_error error;
} scene;

static scene s;
static unsigned files; /* before the test */

/* What becomes of reads. */
typedef enum oddity {
    AS_EVER,
    IS_SHORT,
    IS_LONG,
    IS_OF_ANOTHER,
    IS_ANOTHER,
    IS_ERROR,
    IS_ANOTHER_SERVER, /* as the hello says */
    IS_FLIPPED,
    IS_CUT,     /* in the middle of the bytes */
    IS_UNASKED, /* with the hello already */
    IS_UNSEALED,
    IS_END,
    IS_NOTHING,
} oddity;

static oddity odd;
static unsigned most_at_once; /* reads without an answer */
static uint64_t kept[8];
static unsigned n_kept;

static bool answer_read(stub_talk *t, const frame *f, body *in)
{
    size_t start = t->out.size;
    switch (odd) {
    case IS_OF_ANOTHER: {
        frame other = *f;
        other.request++;
        return stub_answer(t, &other, in);
    }
    case IS_ANOTHER:
        encode_empty(&t->out, f->request, MSG_PONG);
        return true;
    case IS_ERROR:
        encode_error(&t->out, f->request,
                     &(msg_error){.code = FANIN_ERR_STALE,
                                  .message = "the lease has gone",
                                  .remedy = "be quicker"});
        return true;
    case IS_SHORT:
    case IS_LONG:
        encode_read_ok(&t->out, f->request,
                       (uint32_t)(s.list.requests[0].bytes + (odd == IS_LONG) -
                                  (odd == IS_SHORT)));
        return true;
    case IS_END:
    case IS_NOTHING:
        return odd == IS_NOTHING;
    case IS_CUT:
        encode_read_ok(&t->out, f->request, (uint32_t)s.list.requests[0].bytes);
        buffer_append(&t->out, t->rank->bytes, 1000);
        stub_talk_flush(t);
        return false;
    default:
        (void)stub_answer(t, f, in);
        if (odd == IS_FLIPPED)
            t->out.data[start + FRAME_SIZE + 7] ^= 1;
        return true;
    }
}

/* One entry's. */
static bool answer_digest(stub_talk *t, const frame *f)
{
    static const uint8_t bytes[2 * sizeof(digest)];
    size_t size = sizeof(digest);
    if (odd == IS_SHORT || odd == IS_NOTHING)
        size = odd == IS_SHORT ? size - 1 : 0;
    if (odd == IS_LONG)
        size = sizeof bytes;
    encode_digest_ok(&t->out, f->request, &(msg_digest_ok){.digests = {bytes, size}});
    return true;
}

static bool answer(stub_talk *t, const frame *f, body *in)
{
    if (f->type == MSG_READ)
        return answer_read(t, f, in);
    if (f->type == MSG_DIGEST)
        return answer_digest(t, f);
    msg_hello hello = {0};
    body copy = *in;
    bool of_data = f->type == MSG_HELLO && decode_hello(&copy, &hello) == FANIN_OK &&
                   hello.role == ROLE_DATA;
    if (of_data && odd == IS_UNSEALED)
        t->rank->hello.features = 0;
    uint8_t *incarnation = t->rank->hello.incarnation;
    incarnation[0] ^= of_data && odd == IS_ANOTHER_SERVER;
    size_t start = t->out.size;
    (void)stub_answer(t, f, in);
    if (of_data && odd == IS_UNSEALED)
        stub_seal_hello(t, in, start);
    t->rank->hello.features = FEATURES;
    incarnation[0] ^= of_data && odd == IS_ANOTHER_SERVER;
    if (of_data && odd == IS_UNASKED)
        encode_read_ok(&t->out, 77, 100);
    return true;
}

/* Answers come when the test says so. */
static bool keep(stub_talk *t, const frame *f, body *in)
{
    if (f->type != MSG_READ)
        return stub_answer(t, f, in);
    kept[n_kept++] = f->request;
    most_at_once = n_kept > most_at_once ? n_kept : most_at_once;
    return true;
}

static fanin_status on_need(void *cookie, uint64_t to, uint64_t length,
                            fanin_error *error)
{
    s.needed += length;
    return FANIN_OK;
}

static void on_landed(void *cookie, uint64_t to, uint64_t length)
{
    assert_true(s.landed + length <= s.needed);
    s.landed += length;
}

static void make_plan(void)
{
    const uint64_t to = 0;
    const bool use = true;
    announcement now = {.valid = true, .step = 1, .version = 1};
    stub_rank *r = &s.world.ranks[0];
    now.keys = digest_of(r->keys.data, r->keys.size);
    assert_ok(tables_sync(s.world.client, s.run, &now, &use, deadline_in_ms(CALL_MS),
                          &s.error),
              s.error);
    const plan_source source = {0, s.run->shards[0].boxes};
    assert_ok(plan_build(s.run->keys, &source, 1, NULL, 0, &to, &(plan_rules){0},
                         &s.plan, &s.error),
              s.error);
    assert_ok(
        read_list_build(s.plan, 0, source.boxes, s.run->keys, NULL, &s.list, &s.error),
        s.error);
    assert_int_equal(s.list.n_requests, REQUESTS);
}

static void open_link(unsigned connections)
{
    connection *control = s.world.client->peers[0].control;
    assert_ok(
        stream_link_create(s.world.client, control, connections, &s.link, &s.error),
        s.error);
}

static void start_within(uint64_t window)
{
    s.work = (stream_work){.plan = s.plan,
                           .pieces = &s.plan->ranks[0],
                           .list = &s.list,
                           .base = s.memory,
                           .need = on_need,
                           .landed = on_landed,
                           .error = FANIN_ERROR_INIT};
    s.share = (stream_share){.loop = &s.world.client->loop, .max_inflight = window};
    memset(s.memory, 0xcc, SIZE + 1);
    s.needed = s.landed = 0;
    stream_link_start(s.link, &s.work, &s.share);
}

static void start(void)
{
    start_within(UINT64_MAX);
}

/* Until all is there or something failed. */
static void run(void)
{
    while (!s.work.failed && s.work.done_requests < REQUESTS) {
        loop_step(&s.world.client->loop, deadline_in_ms(CALL_MS));
        stream_link_pump(s.link, &s.share);
    }
}

static void begin(bool tcp)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.no_unix = tcp;
    memset(&s, 0, sizeof s);
    files = open_files();
    s.error = (fanin_error)FANIN_ERROR_INIT;
    odd = AS_EVER;
    n_kept = most_at_once = 0;
    stub_time_hold(tcp);
    stub_world_start_with(&s.world, 1, 1, SIZE, &config);
    s.world.ranks[0].answer = answer;
    s.run = tables_of(s.world.client, STUB_RUN);
    s.memory = malloc(SIZE + 1);
    assert_true(s.run && s.memory);
    make_plan();
}

static int tear_down(void **state)
{
    stub_time_hold(false);
    stream_link_destroy(&s.link);
    free(s.list.requests);
    free(s.list.entries);
    plan_free(&s.plan);
    free(s.memory);
    stub_world_stop(&s.world);
    assert_int_equal(open_files(), files);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void assert_whole(void)
{
    if (s.work.failed)
        fail_msg("%s", s.work.error.message);
    for (uint64_t i = 0; i < SIZE; i++) {
        if (s.memory[i] != stub_byte(i))
            fail_msg("byte %zu", (size_t)i);
    }
    assert_int_equal(s.memory[SIZE], 0xcc);
    assert_int_equal(s.work.bytes, SIZE);
    assert_int_equal(s.landed, SIZE);
    assert_int_equal(s.share.inflight, 0);
}

static void assert_failed(fanin_status status, const char *words)
{
    assert_true(s.work.failed);
    if (s.work.error.status != status || !strstr(s.work.error.message, words))
        fail_msg("%s: \"%s\", not \"%s\"", fanin_status_name(s.work.error.status),
                 s.work.error.message, words);
    assert_int_equal(s.work.error.rank, 0);
    assert_string_equal(s.work.error.address, s.world.ranks[0].address);
}

/* ---------------------------------------------------------------- what works */

CASE(all_bytes_come)
{
    begin(false);
    open_link(1);
    start();
    run();
    assert_whole();
    assert_int_equal(s.world.ranks[0].asked[MSG_READ], REQUESTS);
}

CASE(a_link_is_used_again)
{
    begin(false);
    open_link(1);
    for (int i = 0; i < 2; i++) {
        start();
        run();
        assert_whole();
        assert_true(stream_link_stop(s.link));
    }
    assert_int_equal(s.world.ranks[0].asked[MSG_HELLO], 2); /* control and data */
}

CASE(connections_share_the_work)
{
    begin(false);
    open_link(3);
    assert_int_equal(stream_link_count(s.link), 3);
    start();
    run();
    assert_whole();
    assert_int_equal(s.world.ranks[0].asked[MSG_HELLO], 4);
    assert_int_equal(s.world.ranks[0].asked[MSG_READ], REQUESTS);
}

/* Answers what was kept, in the order of the requests. */
static void answer_kept(void)
{
    stub_talk *t = stub_rank_talk(&s.world.ranks[0], ROLE_DATA);
    for (unsigned i = 0; i < n_kept; i++) {
        /* 1 was the hello, and each work goes on with the numbers */
        const read_request *r = &s.list.requests[(kept[i] - 2) % REQUESTS];
        const uint8_t *bytes =
            t->rank->bytes + s.plan->ranks[0].pieces[r->first_piece].offset;
        encode_read_ok(&t->out, kept[i], (uint32_t)r->bytes);
        buffer_append(&t->out, bytes, r->bytes);
    }
    n_kept = 0;
    stub_talk_flush(t);
}

/* More connections take their part of the next work. */
CASE(a_link_is_widened)
{
    begin(false);
    open_link(1);
    for (unsigned n = 1; n <= 3; n++) {
        assert_ok(stream_link_widen(s.link, n, &s.error), s.error);
        assert_int_equal(stream_link_count(s.link), n);
        start();
        run();
        assert_whole();
        assert_true(stream_link_stop(s.link));
        assert_true(stream_link_is_whole(s.link));
    }
    assert_ok(stream_link_widen(s.link, 2, &s.error), s.error);
    assert_int_equal(stream_link_count(s.link), 3);
    stub_world_settle(&s.world);
    assert_int_equal(s.world.ranks[0].asked[MSG_HELLO], 4);
}

/* Whoever a connection was dealt to reads it, in a loop and a window of his own, until all are
   gathered. */
CASE(connections_are_dealt)
{
    loop other;
    begin(false);
    assert_int_equal(loop_init(&other, NULL), FANIN_OK);
    stream_share mine = {.loop = &s.world.client->loop, .max_inflight = 1},
                 theirs = {.loop = &other, .max_inflight = UINT64_MAX};
    open_link(2);
    assert_ok(stream_link_deal(s.link, 0, &mine, &s.error), s.error);
    assert_ok(stream_link_deal(s.link, 1, &theirs, &s.error), s.error);
    s.world.ranks[0].answer = keep;
    start();
    stub_world_settle(&s.world);
    stream_link_pump(s.link, &mine);
    stub_world_settle(&s.world);
    assert_int_equal(
        n_kept, 1); /* there is no room for more, and nobody turns the other loop */
    assert_int_equal(mine.inflight, s.list.requests[0].bytes);
    assert_int_equal(theirs.inflight, 0);
    answer_kept();
    s.world.ranks[0].answer = answer;
    while (!s.work.failed && s.work.done_requests < REQUESTS) {
        loop_step(&other, 0);
        stream_link_pump(s.link, &theirs);
        loop_step(&s.world.client->loop, 0);
    }
    assert_true(s.world.ranks[0].asked[MSG_HELLO] == 3);
    stream_link_gather(s.link);
    assert_true(stream_link_stop(s.link));
    loop_finish(&other);
    start();
    run();
    assert_whole();
}

CASE(sealed_bytes_come)
{
    begin(true);
    open_link(2);
    start();
    run();
    assert_whole();
}

CASE(the_window_bounds_what_is_asked)
{
    const struct {
        uint64_t window;
        unsigned at_once;
    } cases[] = {{1, 1}, {8 * MIB, 2}, {UINT64_MAX, REQUESTS}};
    begin(false);
    open_link(1);
    s.world.ranks[0].answer = keep;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        most_at_once = 0;
        start_within(cases[i].window);
        while (s.work.done_requests < REQUESTS) {
            stream_link_pump(s.link, &s.share);
            stub_world_settle(&s.world);
            assert_true(n_kept > 0);
            assert_true(s.share.inflight <= cases[i].window || n_kept == 1);
            answer_kept();
            stub_world_settle(&s.world);
        }
        assert_whole();
        assert_true(stream_link_stop(s.link));
        assert_true(most_at_once <= cases[i].at_once);
    }
}

/* How many are asked for at once of a rank that answers none, by one connection. */
static unsigned asked_at_once(bool tcp)
{
    begin(tcp);
    s.world.ranks[0].answer = keep;
    open_link(1);
    start();
    stub_world_settle(&s.world);
    assert_false(stream_link_stop(s.link)); /* they are still on their way */
    unsigned asked = n_kept;
    tear_down(NULL);
    return asked;
}

CASE(tcp_on_one_host_has_little_under_way)
{
    assert_int_equal(asked_at_once(false), REQUESTS);
    assert_int_equal(asked_at_once(true), 2);
    begin(false); /* for the teardown */
}

/* ------------------------------------------------------------- what does not */

typedef struct odd_case {
    oddity is;
    fanin_status status;
    const char *words;
} odd_case;

static void fail_by(const odd_case *o)
{
    odd = o->is;
    open_link(1);
    start();
    run();
    assert_failed(o->status, o->words);
    if (o->is == IS_ERROR)
        assert_string_equal(s.work.error.remedy, "be quicker");
    assert_false(stream_link_stop(s.link));
    stream_link_destroy(&s.link);
    odd = AS_EVER;
    open_link(1); /* another one works */
    start();
    run();
    assert_whole();
    stream_link_destroy(&s.link);
    stub_world_settle(&s.world);
}

CASE(a_reply_must_fit)
{
    static const odd_case cases[] = {
        {IS_SHORT, FANIN_ERR_PROTOCOL, "does not fit the read"},
        {IS_LONG, FANIN_ERR_PROTOCOL, "does not fit the read"},
        {IS_OF_ANOTHER, FANIN_ERR_PROTOCOL, "does not fit the read"},
        {IS_ANOTHER, FANIN_ERR_PROTOCOL, "does not fit the read"},
        {IS_UNASKED, FANIN_ERR_PROTOCOL, "does not fit the read"},
        {IS_ERROR, FANIN_ERR_STALE, "the lease has gone"},
        {IS_ANOTHER_SERVER, FANIN_ERR_CLOSED, "has another server at its address"},
        {IS_CUT, FANIN_ERR_CLOSED, "closed a data connection"},
        {IS_END, FANIN_ERR_CLOSED, "closed a data connection"},
    };
    begin(false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        fail_by(&cases[i]);
}

static bool count_digested(void *cookie, uint64_t request, const uint8_t *digests)
{
    static const digest zero;
    assert_memory_equal(digests, &zero, sizeof zero);
    ++*(unsigned *)cookie;
    return true;
}

/* Nobody looks at digests that are more or fewer than what was asked for. */
CASE(digests_must_fit)
{
    static const oddity cases[] = {IS_SHORT, IS_LONG, IS_NOTHING, AS_EVER};
    unsigned digested = 0;
    begin(false);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        odd = cases[i];
        open_link(1);
        start();
        s.work.digested = count_digested;
        s.work.digested_cookie = &digested;
        run();
        assert_int_equal(digested, odd == AS_EVER ? REQUESTS : 0);
        if (odd != AS_EVER)
            assert_failed(FANIN_ERR_PROTOCOL, "digests that do not fit the request");
        stream_link_destroy(&s.link);
        stub_world_settle(&s.world);
    }
}

CASE(sums_must_fit)
{
    static const odd_case cases[] = {
        {IS_FLIPPED, FANIN_ERR_TRANSPORT, "a checksum does not fit"},
        {IS_UNSEALED, FANIN_ERR_PROTOCOL, "gives no checksums on a data connection"},
    };
    begin(true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        fail_by(&cases[i]);
}

CASE(who_refuses_data_connections_is_told)
{
    begin(false);
    for (int i = 0; i < 2; i++) {
        loop_source *listener = &s.world.ranks[0].listeners[i].source;
        loop_remove(&s.world.client->loop, listener);
        close(listener->fd);
        listener->fd = -1;
    }
    connection *control = s.world.client->peers[0].control;
    fanin_status status =
        stream_link_create(s.world.client, control, 1, &s.link, &s.error);
    assert_int_equal(status, FANIN_ERR_UNREACHABLE);
    assert_null(s.link);
}

static fanin_status refuse(void *cookie, uint64_t to, uint64_t length,
                           fanin_error *error)
{
    error->status = FANIN_ERR_IO;
    return FANIN_ERR_IO;
}

/* Where bytes go is made ready before they come; that may fail. */
CASE(a_destination_may_fail)
{
    begin(false);
    open_link(1);
    start();
    s.work.need = refuse;
    run();
    assert_true(s.work.failed);
    assert_int_equal(s.work.error.status, FANIN_ERR_IO);
    assert_int_equal(s.memory[0], 0xcc);
    assert_int_equal(s.landed, 0);
}

/* -------------------------------------------------------------------- the end */

/* Nothing is written any more, whatever comes. */
CASE(a_stopped_link_writes_nothing)
{
    begin(false);
    open_link(1);
    s.world.ranks[0].answer = keep;
    start();
    stub_world_settle(&s.world);
    assert_int_equal(n_kept, REQUESTS);
    assert_false(stream_link_stop(s.link)); /* replies are on their way */
    stream_link_destroy(&s.link);
    answer_kept();
    stub_world_settle(&s.world);
    for (uint64_t i = 0; i <= SIZE; i++)
        assert_int_equal(s.memory[i], 0xcc);
}
