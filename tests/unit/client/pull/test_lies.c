/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks that lie, one way at a time. Whatever they send, the client returns an error that names the
 * rank or the key, in bounded memory, and then works with an honest rank.
 */
#include "ends.h"
#include "open_files.h"
#include "pack.h"
#include "stub_ranks.h"
#include "testing.h"
#include <sys/resource.h>

#define ROWS 64
#define COLUMNS 64
#define SIZE (ROWS * COLUMNS)
#define STEP 7
#define CONNECT_MS 300
#define PULL_MS 500
#define DRIP_MS 20
/* A lie is at most a megabyte long; more memory than a few of that is too much. */
#define GROWTH_KIB (24 * 1024)
#define CATALOG_MAX (4 << 20)

/* Where a rank lies: in its answer to a frame of this type, of data connections alone if it is
   their hello. */
#define DATA_HELLO ((message_type)0x100)

typedef struct lie {
    const char *name;
    message_type of;
    stub_answer_fn answer;
    fanin_status wanted[3]; /* one of these; 0: no more */
    const char *words;      /* in the message; NULL: whatever fits */
} lie;

static const lie *told;  /* by the rank of the test; NULL: it is honest */
static bool was_refused; /* a read, for once */

static struct {
    fanin_client *client;
    stub_rank rank;
    fanin_error error;
    unsigned files;
} s;

/* ------------------------------------------------------------ what fits anywhere */

static bool silent(stub_talk *t, const frame *f, body *in)
{
    return true;
}

static bool closes(stub_talk *t, const frame *f, body *in)
{
    return false;
}

/* Bytes that mean nothing, always the same. */
static void append_garbage(buffer *b, size_t size)
{
    for (uint32_t x = 2463534242u; size-- > 0;) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        buffer_append(b, &(uint8_t){(uint8_t)x}, 1);
    }
}

static bool put_head(stub_talk *t, const frame *f, uint32_t length)
{
    uint8_t head[FRAME_SIZE];
    frame_encode(&(frame){.type = f->type + 1, .request = f->request, .length = length},
                 head);
    buffer_append(&t->out, head, sizeof head);
    return true;
}

/* A right header, and a body of garbage. */
static bool garbage(stub_talk *t, const frame *f, body *in)
{
    put_head(t, f, 200);
    append_garbage(&t->out, 200);
    return true;
}

static bool noise(stub_talk *t, const frame *f, body *in)
{
    append_garbage(&t->out, 4096);
    return true;
}

static bool other_type(stub_talk *t, const frame *f, body *in)
{
    encode_empty(&t->out, f->request, MSG_PONG);
    return true;
}

static bool other_request(stub_talk *t, const frame *f, body *in)
{
    frame other = *f;
    other.request += 1000;
    return stub_answer(t, &other, in);
}

static bool fails(stub_talk *t, const frame *f, body *in)
{
    return stub_answer_error(t, f->request, FANIN_ERR_INTERNAL, "xxx");
}

static bool stale(stub_talk *t, const frame *f, body *in)
{
    return stub_answer_error(t, f->request, FANIN_ERR_STALE, "the catalog has changed");
}

/* ------------------------------------------------------------------------ hellos */

static bool http(stub_talk *t, const frame *f, body *in)
{
    static const char words[] = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    buffer_append(&t->out, words, sizeof words - 1);
    return true;
}

static bool magic(stub_talk *t, const frame *f, body *in)
{
    (void)stub_answer(t, f, in);
    t->out.data[0] ^= 0x20;
    return true;
}

static bool major(stub_talk *t, const frame *f, body *in)
{
    (void)stub_answer(t, f, in);
    t->out.data[4] = 2;
    return true;
}

static bool huge(stub_talk *t, const frame *f, body *in)
{
    return put_head(t, f, UINT32_MAX);
}

static bool never_ends(stub_talk *t, const frame *f, body *in);

/* One byte after the other, too slowly. */
static void drip(void *cookie)
{
    stub_talk *t = cookie;
    if (t->source.fd < 0 || !told || told->answer != never_ends)
        return; /* another test's */
    buffer_append(&t->out, "", 1);
    stub_talk_flush(t);
    stub_time_at_ms(DRIP_MS, drip, t);
}

static bool never_ends(stub_talk *t, const frame *f, body *in)
{
    stub_time_at_ms(DRIP_MS, drip, t);
    return put_head(t, f, 1 << 20);
}

/* An array of 2^32 - 1 elements. */
static bool bomb(stub_talk *t, const frame *f, body *in)
{
    static const uint8_t bytes[] = {0x81, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff};
    put_head(t, f, sizeof bytes);
    buffer_append(&t->out, bytes, sizeof bytes);
    return true;
}

static bool not_allowed(stub_talk *t, const frame *f, body *in)
{
    return stub_answer_error(t, f->request, FANIN_ERR_AUTH, "xxx");
}

static bool other_rank(stub_talk *t, const frame *f, body *in)
{
    t->rank->hello.rank = 5;
    return stub_answer(t, f, in);
}

static bool large_world(stub_talk *t, const frame *f, body *in)
{
    t->rank->hello.world_size = 65536;
    return stub_answer(t, f, in);
}

static bool no_world(stub_talk *t, const frame *f, body *in)
{
    memset(t->rank->hello.world_id, 0, sizeof t->rank->hello.world_id);
    return stub_answer(t, f, in);
}

static bool later_version(stub_talk *t, const frame *f, body *in)
{
    t->rank->hello.version = 9;
    return stub_answer(t, f, in);
}

static bool digests(stub_talk *t, const frame *f, body *in)
{
    static const uint8_t none[16];
    encode_digest_ok(&t->out, f->request,
                     &(msg_digest_ok){.digests = {none, sizeof none}});
    return true;
}

static bool unasked(stub_talk *t, const frame *f, body *in)
{
    (void)stub_answer(t, f, in);
    encode_read_ok(&t->out, 77, SIZE);
    return true;
}

/* -------------------------------------------------------------------------- waits */

static bool later_step(stub_talk *t, const frame *f, body *in)
{
    t->rank->step = STEP + 1;
    return stub_answer(t, f, in);
}

/* Than was asked for, which no rank may answer. */
static bool earlier_step(stub_talk *t, const frame *f, body *in)
{
    encode_wait_ok(&t->out, f->request,
                   &(msg_wait_ok){.step = STEP - 1, .catalog_version = 1});
    return true;
}

static bool flood(stub_talk *t, const frame *f, body *in)
{
    for (int i = 0; i < 10000; i++)
        encode_empty(&t->out, UINT64_MAX, MSG_PONG);
    return true;
}

/* ------------------------------------------------------------------------- tables */

static const key_entry key = {.name = (char *)(uintptr_t) "t",
                              .dtype = FANIN_DTYPE_U8,
                              .n_dims = 2,
                              .shape = {ROWS, COLUMNS},
                              .bytes = SIZE};

static bool other_digest(stub_talk *t, const frame *f, body *in)
{
    key_entry other = key;
    other.name = (char *)(uintptr_t) "u";
    buffer_clear(&t->rank->keys);
    key_table_encode(&t->rank->keys, &other, 1, NULL, 0);
    return stub_answer(t, f, in);
}

/* Of keys: when it announces them, by their right digest. */
static bool garbage_keys(stub_talk *t, const frame *f, body *in)
{
    buffer_clear(&t->rank->keys);
    append_garbage(&t->rank->keys, 500);
    return stub_answer(t, f, in);
}

static bool huge_count_of_keys(stub_talk *t, const frame *f, body *in)
{
    buffer_clear(&t->rank->keys);
    pack_array(&t->rank->keys, UINT32_MAX);
    append_garbage(&t->rank->keys, 20);
    return stub_answer(t, f, in);
}

/* Of the first page: what it says of itself, for @p size bytes less than there are. */
static bool page_of(stub_talk *t, const frame *f, uint64_t total, uint64_t offset,
                    size_t less)
{
    const buffer *b = f->type == MSG_KEYS ? &t->rank->keys : &t->rank->boxes;
    encode_blob_page(&t->out, f->request, f->type + 1,
                     &(msg_blob_page){total, offset, {b->data, b->size - less}});
    return true;
}

static bool huge_total(stub_talk *t, const frame *f, body *in)
{
    return page_of(t, f, UINT64_C(1) << 60, 0, 0);
}

/* Not where it was asked for. */
static bool other_offset(stub_talk *t, const frame *f, body *in)
{
    return page_of(t, f, t->rank->keys.size, 1, 1);
}

static bool empty_page(stub_talk *t, const frame *f, body *in)
{
    return page_of(t, f, t->rank->keys.size, 0, t->rank->keys.size);
}

static bool beyond_total(stub_talk *t, const frame *f, body *in)
{
    return page_of(t, f, 1, 0, 0);
}

/* After much of it, again and again: what each attempt leaves behind adds up. */
static bool stale_keys(stub_talk *t, const frame *f, body *in)
{
    static const uint8_t zeros[LIMIT_PAGE / 8];
    msg_blob_request m;
    assert_int_equal(decode_blob_request(in, MSG_KEYS, &m), FANIN_OK);
    if (m.offset >= 3 * sizeof zeros)
        return stale(t, f, in);
    encode_blob_page(
        &t->out, f->request, MSG_KEYS_OK,
        &(msg_blob_page){4 * sizeof zeros - 1, m.offset, {zeros, sizeof zeros}});
    return true;
}

static bool garbage_boxes(stub_talk *t, const frame *f, body *in)
{
    buffer_clear(&t->rank->boxes);
    append_garbage(&t->rank->boxes, 500);
    return stub_answer(t, f, in);
}

static bool huge_count_of_boxes(stub_talk *t, const frame *f, body *in)
{
    buffer *b = &t->rank->boxes;
    buffer_clear(b);
    pack_uint(b, BOXES_EXPLICIT);
    pack_uint(b, 0);
    pack_uint(b, LIMIT_BOXES);
    return stub_answer(t, f, in);
}

/* The first half of the rows, and @p rows from @p first on that are said to be of @p of. */
static void put_boxes(stub_rank *r, uint64_t first, uint64_t rows, uint32_t of)
{
    const key_entry twice[] = {key, key};
    box_record boxes[2] = {
        {.block = {.n_dims = 2, .extent = {ROWS / 2, COLUMNS}},
         .place = {.packed = true}},
        {.key = of,
         .block = {.n_dims = 2, .offset = {first, 0}, .extent = {rows, COLUMNS}},
         .place = {.offset = first * COLUMNS, .packed = true}}};
    buffer_clear(&r->boxes);
    box_table_encode(&r->boxes, twice, 2, boxes, 2, 0, 1);
}

static bool outside(stub_talk *t, const frame *f, body *in)
{
    put_boxes(t->rank, ROWS / 2, ROWS / 2 + 1, 0);
    return stub_answer(t, f, in);
}

static bool other_key(stub_talk *t, const frame *f, body *in)
{
    put_boxes(t->rank, ROWS / 2, ROWS / 2, 1);
    return stub_answer(t, f, in);
}

static bool hole(stub_talk *t, const frame *f, body *in)
{
    put_boxes(t->rank, ROWS / 2 + 1, ROWS / 2 - 1, 0);
    return stub_answer(t, f, in);
}

static bool overlap(stub_talk *t, const frame *f, body *in)
{
    put_boxes(t->rank, ROWS / 2 - 1, ROWS / 2 + 1, 0);
    return stub_answer(t, f, in);
}

static bool regions_gone(stub_talk *t, const frame *f, body *in)
{
    return stub_answer_error(t, f->request, FANIN_ERR_NOT_FOUND, "it is gone");
}

/* ------------------------------------------------------------- leases and bytes */

static bool refused(stub_talk *t, const frame *f, body *in)
{
    encode_begin_ok(&t->out, f->request,
                    &(msg_begin_ok){.state = WIRE_STATE_DRAINING,
                                    .step = STEP,
                                    .catalog_version = 1,
                                    .why = "busy"});
    return true;
}

static bool put_bytes(stub_talk *t, const frame *f, uint32_t said, size_t sent)
{
    encode_read_ok(&t->out, f->request, said);
    buffer_append(&t->out, t->rank->bytes, sent);
    return true;
}

static bool shorter(stub_talk *t, const frame *f, body *in)
{
    return put_bytes(t, f, SIZE - 1, SIZE - 1);
}

static bool longer(stub_talk *t, const frame *f, body *in)
{
    return put_bytes(t, f, SIZE + 1, SIZE);
}

static bool cut(stub_talk *t, const frame *f, body *in)
{
    put_bytes(t, f, SIZE, SIZE / 2);
    stub_talk_flush(t);
    return false;
}

/* One read too many, it says. */
static bool full(stub_talk *t, const frame *f, body *in)
{
    return stub_answer_error(t, f->request, FANIN_ERR_LIMIT, "xxx");
}

static bool full_once(stub_talk *t, const frame *f, body *in)
{
    bool first = !was_refused;
    was_refused = true;
    return first ? full(t, f, in) : stub_answer(t, f, in);
}

static bool not_good(stub_talk *t, const frame *f, body *in)
{
    encode_end_ok(&t->out, f->request, &(msg_end_ok){.good = false, .step = STEP});
    return true;
}

#define UNREACHABLE FANIN_ERR_UNREACHABLE
#define PROTOCOL FANIN_ERR_PROTOCOL
#define CLOSED FANIN_ERR_CLOSED
#define TIMEOUT FANIN_ERR_TIMEOUT
#define STALE FANIN_ERR_STALE

/* A connection that closes is tried again until the time is up, or does not come back. */
#define GONE                                                                           \
    {                                                                                  \
        CLOSED, UNREACHABLE, TIMEOUT                                                   \
    }

static const lie lies[] = {
    {"hello_silent", MSG_HELLO, silent, {UNREACHABLE}, "did not answer in time"},
    {"hello_noise", MSG_HELLO, noise, {PROTOCOL}, NULL},
    {"hello_http", MSG_HELLO, http, {PROTOCOL}, NULL},
    {"hello_magic", MSG_HELLO, magic, {PROTOCOL}, NULL},
    {"hello_major", MSG_HELLO, major, {FANIN_ERR_VERSION}, NULL},
    {"hello_huge_length", MSG_HELLO, huge, {PROTOCOL}, "limit"},
    {"hello_never_ends",
     MSG_HELLO,
     never_ends,
     {UNREACHABLE},
     "did not answer in time"},
    {"hello_garbage", MSG_HELLO, garbage, {PROTOCOL}, NULL},
    {"hello_bomb", MSG_HELLO, bomb, {PROTOCOL}, NULL},
    {"hello_other_type", MSG_HELLO, other_type, {PROTOCOL}, NULL},
    {"hello_error", MSG_HELLO, not_allowed, {FANIN_ERR_AUTH}, "xxx"},
    {"hello_rank", MSG_HELLO, other_rank, {FANIN_ERR_WORLD, PROTOCOL}, NULL},
    {"hello_world_size", MSG_HELLO, large_world, {FANIN_ERR_WORLD}, "65536"},
    {"hello_no_world", MSG_HELLO, no_world, {PROTOCOL}, "all zero"},
    {"hello_version", MSG_HELLO, later_version, {FANIN_ERR_VERSION}, NULL},
    {"hello_close", MSG_HELLO, closes, {UNREACHABLE, CLOSED}, "closed"},

    {"wait_other_type", MSG_WAIT, other_type, {PROTOCOL}, "does not fit"},
    {"wait_other_request", MSG_WAIT, other_request, {PROTOCOL}, "was not made"},
    {"wait_garbage", MSG_WAIT, garbage, {PROTOCOL}, NULL},
    {"wait_later_step", MSG_WAIT, later_step, {FANIN_ERR_SUPERSEDED}, "step 8"},
    {"wait_earlier_step", MSG_WAIT, earlier_step, {PROTOCOL}, "step 6"},
    {"wait_unasked_flood", MSG_WAIT, flood, {PROTOCOL}, "was not made"},
    {"wait_silent", MSG_WAIT, silent, {TIMEOUT}, NULL},
    {"wait_close", MSG_WAIT, closes, GONE, NULL},

    {"keys_other_digest", MSG_KEYS, other_digest, {PROTOCOL}, "not the announced one"},
    {"keys_garbage", MSG_WAIT, garbage_keys, {PROTOCOL}, NULL},
    {"keys_huge_count",
     MSG_WAIT,
     huge_count_of_keys,
     {PROTOCOL, FANIN_ERR_LIMIT},
     NULL},
    {"keys_huge_total", MSG_KEYS, huge_total, {FANIN_ERR_LIMIT}, "larger"},
    {"keys_offset", MSG_KEYS, other_offset, {PROTOCOL}, "does not follow"},
    {"keys_empty_page", MSG_KEYS, empty_page, {PROTOCOL}, NULL},
    {"keys_beyond_total", MSG_KEYS, beyond_total, {PROTOCOL}, NULL},
    {"keys_error", MSG_KEYS, fails, {FANIN_ERR_INTERNAL}, "xxx"},
    {"keys_stale", MSG_KEYS, stale_keys, {STALE, TIMEOUT}, NULL},
    {"keys_close", MSG_KEYS, closes, GONE, NULL},
    {"boxes_garbage", MSG_BOXES, garbage_boxes, {PROTOCOL}, NULL},
    {"boxes_huge_count", MSG_BOXES, huge_count_of_boxes, {PROTOCOL}, NULL},
    {"boxes_huge_total", MSG_BOXES, huge_total, {FANIN_ERR_LIMIT}, "larger"},
    {"boxes_outside", MSG_BOXES, outside, {PROTOCOL}, NULL},
    {"boxes_other_key", MSG_BOXES, other_key, {PROTOCOL}, NULL},
    {"boxes_hole", MSG_BOXES, hole, {FANIN_ERR_INCOMPLETE}, "row 32"},
    {"boxes_overlap", MSG_BOXES, overlap, {FANIN_ERR_INCOMPLETE}, "row 31"},
    {"boxes_stale", MSG_BOXES, stale, {STALE, TIMEOUT}, NULL},
    {"boxes_close", MSG_BOXES, closes, GONE, NULL},

    {"begin_refused", MSG_BEGIN, refused, {STALE, TIMEOUT}, NULL},
    {"begin_garbage", MSG_BEGIN, garbage, {PROTOCOL}, NULL},
    {"begin_close", MSG_BEGIN, closes, GONE, NULL},
    {"data_garbage", DATA_HELLO, garbage, {PROTOCOL}, NULL},
    {"data_digests", DATA_HELLO, digests, {PROTOCOL}, "malformed"},
    {"data_silent", DATA_HELLO, silent, {TIMEOUT, UNREACHABLE}, NULL},
    {"data_unasked", DATA_HELLO, unasked, {PROTOCOL}, "does not fit"},
    {"read_short", MSG_READ, shorter, {PROTOCOL}, "does not fit"},
    {"read_long", MSG_READ, longer, {PROTOCOL}, "does not fit"},
    {"read_other_request", MSG_READ, other_request, {PROTOCOL}, "does not fit"},
    {"read_other_type", MSG_READ, other_type, {PROTOCOL}, "does not fit"},
    {"read_error", MSG_READ, fails, {FANIN_ERR_INTERNAL}, "xxx"},
    {"read_limit", MSG_READ, full, {TIMEOUT, FANIN_ERR_LIMIT}, "xxx"},
    {"read_silent", MSG_READ, silent, {TIMEOUT, UNREACHABLE}, NULL},
    {"read_close", MSG_READ, closes, GONE, NULL},
    {"read_close_in_body", MSG_READ, cut, GONE, NULL},
    {"end_not_good", MSG_END, not_good, {STALE}, NULL},
    {"end_garbage", MSG_END, garbage, {PROTOCOL}, NULL},
    {"end_close", MSG_END, closes, GONE, NULL},
};

/* ------------------------------------------------------------------------- a pull */

static bool answer(stub_talk *t, const frame *f, body *in)
{
    msg_hello hello = {0};
    body copy = *in;
    message_type of = f->type;
    if (of == MSG_HELLO && decode_hello(&copy, &hello) == FANIN_OK &&
        hello.role == ROLE_DATA)
        of = DATA_HELLO;
    return told && of == told->of ? told->answer(t, f, in) : stub_answer(t, f, in);
}

static void start_rank(const lie *l)
{
    told = l;
    stub_rank_start(&s.rank, &s.client->loop);
    s.rank.answer = answer;
    stub_rank_put(&s.rank, 0, 1, SIZE);
    buffer_clear(&s.rank.keys);
    buffer_clear(&s.rank.boxes);
    key_table_encode(&s.rank.keys, &key, 1, NULL, 0);
    box_table_encode(&s.rank.boxes, &key, 1,
                     &(box_record){.block = {.n_dims = 2, .extent = {ROWS, COLUMNS}},
                                   .place = {.packed = true}},
                     1, 0, 1);
    stub_rank_commit(&s.rank, STEP);
}

static void begin_by(const lie *l, fanin_path path)
{
    fanin_client_config config = make_client_config();
    config.connect_timeout_ms = config.lost_ms = CONNECT_MS;
    config.max_catalog = CATALOG_MAX;
    config.path = path;
    s.files = open_files();
    s.client = make_client(&config);
    s.error = (fanin_error)FANIN_ERROR_INIT;
    was_refused = false;
    start_rank(l);
}

static void end(void)
{
    stub_rank_stop(&s.rank);
    fanin_client_destroy(&s.client);
    assert_int_equal(open_files(), s.files);
}

/* As a pull of one call, or in two reads of a session. */
static fanin_status read_matrix(const fanin_pull_options *options,
                                const fanin_tensor *tensor, bool session)
{
    fanin_session *of = NULL;
    if (!session)
        return fanin_client_pull(s.client, options, tensor, 1, NULL, &s.error);
    fanin_status status =
        fanin_client_begin(s.client, options, tensor, 1, &of, &s.error);
    for (size_t i = 0; i < 2 && status == FANIN_OK; i++)
        status = fanin_session_read(of, 0, 1, &s.error);
    if (status == FANIN_OK)
        return fanin_session_end(&of, NULL, &s.error);
    if (of) /* what a read has met is what the end says */
        assert_int_equal(fanin_session_end(&of, NULL, NULL), status);
    return status;
}

/* Connects and pulls the matrix; the first error of the two. */
static fanin_status pull(bool session)
{
    static uint8_t memory[SIZE + 64];
    const char *addresses[] = {s.rank.address};
    fanin_box box;
    fanin_tensor tensor = make_tensor("t", FANIN_DTYPE_U8, ROWS, COLUMNS, &box, memory);
    fanin_pull_options options = make_options(FANIN_STEP_EXACT, STEP);
    options.timeout_ms = PULL_MS;
    memset(memory, 0xcc, sizeof memory);
    fanin_status status =
        fanin_client_connect(s.client, addresses, 1, CONNECT_MS * 2, &s.error);
    if (status == FANIN_OK)
        status = read_matrix(&options, &tensor, session);
    if (status == FANIN_OK)
        assert_memory_equal(memory, s.rank.bytes, SIZE);
    for (size_t i = SIZE; i < sizeof memory; i++)
        assert_int_equal(memory[i], 0xcc);
    return status;
}

/* Sanitizers keep freed memory and shadow all of it: there the peak means nothing. */
static bool peak_means_memory(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#elif defined(__has_feature)
    return !__has_feature(address_sanitizer) && !__has_feature(thread_sanitizer);
#else
    return true;
#endif
}

static long peak_kib(void)
{
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_maxrss;
}

static void expect_refusal(const lie *l, fanin_status status)
{
    bool wanted = false;
    for (size_t i = 0; i < 3 && l->wanted[i]; i++)
        wanted = wanted || l->wanted[i] == status;
    if (!wanted)
        fail_msg("%s (%s)", fanin_status_name(status), s.error.message);
    assert_int_equal(s.error.status, status);
    assert_true(s.error.message[0]);
    assert_says(s.error.message, l->words ? l->words : "");
    /* The liar by its address, or the tensor or publication that it lies about. */
    if (strcmp(s.error.address, s.rank.address) != 0 && !s.error.key[0])
        fail_msg("\"%s\" names neither address nor key", s.error.message);
}

static void expose(const lie *l, bool session)
{
    begin_by(l, FANIN_PATH_AUTO);
    long before_kib = peak_kib();
    expect_refusal(l, pull(session));
    long grown_kib = peak_kib() - before_kib;
    if (peak_means_memory() && grown_kib > GROWTH_KIB)
        fail_msg("it took %ld KiB of memory", grown_kib);
    stub_rank_stop(&s.rank);
    start_rank(NULL);
    assert_ok(pull(session), s.error);
    end();
}

static void lie_to_pull(void **state)
{
    expose(*state, false);
}

static void lie_to_session(void **state)
{
    expose(*state, true);
}

/* Until there is a lease, a session is what a pull is. */
__attribute__((constructor)) static void add_lies(void)
{
    bool leased = false;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        void *given = (void *)(uintptr_t)&lies[i];
        leased = leased || lies[i].of == MSG_BEGIN;
        tests_add(lies[i].name, lie_to_pull, NULL, NULL, given);
        if (leased)
            tests_add(lies[i].name, lie_to_session, NULL, NULL, given);
    }
}

/* The controls: the rank tells the truth, at once or bit by bit, and is believed. */
TEST(the_truth_is_believed)
{
    for (int drips = 0; drips < 2; drips++) {
        begin_by(NULL, FANIN_PATH_AUTO);
        s.rank.drips = drips;
        assert_ok(pull(false), s.error);
        assert_ok(pull(true), s.error);
        end();
    }
}

static bool small_page(stub_talk *t, const frame *f, body *in)
{
    const buffer *b = f->type == MSG_KEYS ? &t->rank->keys : &t->rank->boxes;
    msg_blob_request m;
    assert_int_equal(decode_blob_request(in, f->type, &m), FANIN_OK);
    encode_blob_page(&t->out, f->request, f->type + 1,
                     &(msg_blob_page){b->size, m.offset, {b->data + m.offset, 1}});
    return true;
}

TEST(pages_may_be_small)
{
    static const lie rows[] = {{.of = MSG_KEYS, .answer = small_page},
                               {.of = MSG_BOXES, .answer = small_page}};
    for (size_t i = 0; i < 2; i++) {
        begin_by(&rows[i], FANIN_PATH_AUTO);
        assert_ok(pull(false), s.error);
        end();
    }
}

/* A pull asks again, as what the rank is short of becomes free; a session, whose first read may be
   in use, says so. */
TEST(one_read_too_many_is_asked_for_again)
{
    static const lie once = {.of = MSG_READ, .answer = full_once};
    for (int session = 0; session < 2; session++) {
        begin_by(&once, FANIN_PATH_AUTO);
        assert_int_equal(pull(session), session ? FANIN_ERR_LIMIT : FANIN_OK);
        assert_ok(pull(session), s.error);
        end();
    }
}

/* What has gone is not told as a path that is not possible. */
TEST(what_has_gone_is_told)
{
    static const lie gone = {.of = MSG_REGIONS, .answer = regions_gone};
    static const fanin_path paths[] = {FANIN_PATH_AUTO, FANIN_PATH_CUDA_IPC};
    for (size_t i = 0; i < 2; i++) {
        begin_by(&gone, paths[i]);
        s.rank.hello.paths |= 1u << WIRE_PATH_CUDA_IPC;
        assert_int_equal(pull(false), FANIN_ERR_NOT_FOUND);
        assert_null(strstr(s.error.message, "not possible"));
        end();
    }
}
