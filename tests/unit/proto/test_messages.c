/* SPDX-License-Identifier: Apache-2.0 */
/* Frames and bodies: values come back, and what PROTOCOL.md forbids is refused. */
#include "pack.h"
#include "recode.h"
#include "samples.h"
#include "cursor.h"
#include "testing.h"

static body body_of(const buffer *b)
{
    return (body){.data = b->data + FRAME_SIZE, .size = b->size - FRAME_SIZE};
}

/* A body from fields given as pairs of key and a little integer. */
static buffer numbers(size_t n, uint64_t (*pairs)[2])
{
    buffer b = {0};
    pack_map(&b, n);
    for (size_t i = 0; i < n; i++) {
        pack_uint(&b, pairs[i][0]);
        pack_uint(&b, pairs[i][1]);
    }
    return b;
}

static void expect(const buffer *b, message_type type, fanin_status expected,
                   const char *why)
{
    body in = {.data = b->data, .size = b->size};
    buffer out = {0};
    fanin_status status = recode_message(type, 0, &in, &out);
    if (status != expected)
        fail_msg("%s: %s", fanin_status_name(status), in.why ? in.why : "-");
    if (why)
        assert_string_equal(in.why, why);
    buffer_free(&out);
}

/* ------------------------------------------------------------- frames */

TEST(frames_come_back)
{
    frame f = {.type = (message_type)0xabcd, .request = UINT64_MAX - 1, .length = 77};
    frame again;
    uint8_t bytes[FRAME_SIZE];
    const char *why = NULL;
    frame_encode(&f, bytes);
    assert_memory_equal(bytes, "FAN1\1\0\xcd\xab", 8);
    assert_int_equal(frame_decode(bytes, &again, &why), FANIN_OK);
    assert_int_equal(again.type, 0xabcd);
    assert_true(again.request == UINT64_MAX - 1);
    assert_int_equal(again.length, 77);
}

TEST(foreign_frames_are_refused)
{
    frame f = {.type = MSG_PING, .request = 1, .length = 1}, out;
    uint8_t good[FRAME_SIZE], bytes[FRAME_SIZE];
    const char *why = NULL;
    frame_encode(&f, good);
    for (size_t i = 0; i < 6; i++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[i] ^= 2;
        assert_int_equal(frame_decode(bytes, &out, &why),
                         i == 4 ? FANIN_ERR_VERSION : FANIN_ERR_PROTOCOL);
        assert_non_null(why);
    }
    for (size_t i = 20; i < 24; i++) {
        memcpy(bytes, good, sizeof bytes);
        bytes[i] = 1;
        assert_int_equal(frame_decode(bytes, &out, &why), FANIN_ERR_PROTOCOL);
    }
    memcpy(bytes, good, sizeof bytes);
    bytes[0] = 0x16;
    assert_int_equal(frame_decode(bytes, &out, &why), FANIN_ERR_PROTOCOL);
    assert_string_equal(why, "TLS is not spoken here");
}

/* ------------------------------------------------------------- the rules of bodies */

TEST(bodies_follow_the_rules)
{
    buffer b = numbers(2, (uint64_t[][2]){{1, 0}, {2, 9}});
    expect(&b, MSG_END_OK, FANIN_ERR_PROTOCOL, "a boolean is expected");
    buffer_append(&b, "\0", 1);
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, "bytes after the body's map");
    b.size -= 2;
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, NULL);
    b.size = 0;
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, "an object is missing");
    pack_array(&b, 0);
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, "a map is expected");
    buffer_free(&b);

    b = numbers(2, (uint64_t[][2]){{3, 1}, {2, 1}});
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, "keys are not ascending");
    buffer_free(&b);
    b = numbers(2, (uint64_t[][2]){{3, 1}, {3, 1}});
    expect(&b, MSG_PING, FANIN_ERR_PROTOCOL, "keys are not ascending");
    buffer_free(&b);
}

TEST(unknown_fields)
{
    buffer b = numbers(3, (uint64_t[][2]){{1, 5}, {40, 1}, {63, 1}});
    expect(&b, MSG_PING, FANIN_OK, NULL);
    buffer_free(&b);
    b = numbers(2, (uint64_t[][2]){{1, 5}, {64, 1}});
    expect(&b, MSG_PING, FANIN_ERR_UNSUPPORTED,
           "a field that must be understood is unknown here");
    buffer_free(&b);
    /* Between and behind known fields; of any kind. */
    pack_map(&b, 4);
    pack_uint(&b, 1);
    pack_bool(&b, true);
    pack_uint(&b, 2);
    pack_uint(&b, 42);
    pack_uint(&b, 9);
    pack_array(&b, 2);
    pack_map(&b, 1);
    pack_uint(&b, 1);
    pack_text(&b, "x", 1);
    pack_int(&b, -5);
    pack_uint(&b, 10);
    pack_bin(&b, "\xff", 1);
    body in = {.data = b.data, .size = b.size};
    msg_end_ok m;
    assert_int_equal(decode_end_ok(&in, &m), FANIN_OK);
    assert_true(m.good);
    assert_int_equal(m.step, 42);
    buffer_free(&b);
}

/* Which arena holds the bytes is critical, and there only if it is another than the first. */
TEST(begin_ok_names_the_arena)
{
    for (uint32_t first = 0; first < 4; first += 3) {
        buffer b = {0};
        msg_begin_ok m = {.granted = true, .first_region = first}, again;
        encode_begin_ok(&b, 1, &m);
        body in = body_of(&b);
        assert_int_equal(in.data[0] & 15, first ? 5 : 4);
        if (first) /* the last key, beyond those that may be ignored */
            assert_int_equal(in.data[in.size - 2], 64);
        assert_int_equal(decode_begin_ok(&in, &again), FANIN_OK);
        assert_int_equal(again.first_region, first);
        buffer_free(&b);
    }
    buffer b = {0};
    pack_map(&b, 5);
    pack_uint(&b, 1);
    pack_bool(&b, false);
    const uint64_t refused[][2] = {{5, 1}, {6, 1}, {7, 1}, {64, 1}};
    for (size_t i = 0; i < 4; i++) {
        pack_uint(&b, refused[i][0]);
        pack_uint(&b, refused[i][1]);
    }
    expect(&b, MSG_BEGIN_OK, FANIN_ERR_UNSUPPORTED,
           "a field that must be understood is unknown here");
    buffer_free(&b);
}

/* Without any one of its required fields a message is refused; with all it is not. */
TEST(required_fields)
{
    samples all = samples_of_messages();
    int refused = 0;
    for (size_t i = 0; i < all.count; i++) {
        const buffer *bytes = &all.list[i].bytes;
        frame f;
        const char *why;
        frame_decode(bytes->data, &f, &why);
        body whole = body_of(bytes);
        size_t fields = whole.size ? whole.data[0] & 15 : 0;
        for (size_t missing = 0; missing < fields && f.type != MSG_READ_OK; missing++) {
            buffer cut = {0};
            pack_map(&cut, fields - 1);
            const uint8_t *at = whole.data + 1, *end = whole.data + whole.size;
            for (size_t j = 0; j < fields; j++) {
                size_t key, value;
                static const scan_limits limits = {4, 1000};
                assert_true(scan_object(at, (size_t)(end - at), &limits, &key, &why));
                assert_true(scan_object(at + key, (size_t)(end - at) - key, &limits,
                                        &value, &why));
                if (j != missing)
                    buffer_append(&cut, at, key + value);
                at += key + value;
            }
            body in = {.data = cut.data, .size = cut.size};
            buffer out = {0};
            if (recode_message(f.type, 0, &in, &out) != FANIN_OK) {
                assert_string_equal(in.why, "a required field is missing");
                refused++;
            } else {
                /* Optional: encoding again leaves it out again. */
                assert_int_equal(out.size - FRAME_SIZE, cut.size);
            }
            buffer_free(&out);
            buffer_free(&cut);
        }
    }
    assert_true(refused > 60);
    samples_free(&all);
}

TEST(cut_or_damaged_bodies_never_crash)
{
    samples all = samples_of_messages();
    for (size_t i = 0; i < all.count; i++) {
        frame f;
        const char *why;
        frame_decode(all.list[i].bytes.data, &f, &why);
        body whole = body_of(&all.list[i].bytes);
        for (size_t size = 0; size < whole.size && f.type != MSG_READ_OK; size++) {
            uint8_t *copy = malloc(size ? size : 1);
            memcpy(copy, whole.data, size);
            body in = {.data = copy, .size = size};
            buffer out = {0};
            assert_int_equal(recode_message(f.type, 0, &in, &out), FANIN_ERR_PROTOCOL);
            assert_non_null(in.why);
            buffer_free(&out);
            free(copy);
        }
    }
    samples_free(&all);
}

/* ------------------------------------------------------------- ranges */

TEST(hello_ranges)
{
    msg_hello m = {.version_min = 2, .version_max = 1, .role = ROLE_DATA}, out;
    buffer b = {0};
    encode_hello(&b, 1, &m);
    body in = body_of(&b);
    assert_int_equal(decode_hello(&in, &out), FANIN_ERR_PROTOCOL);
    b.size = 0;
    m.version_max = 9;
    m.role = (role)3;
    encode_hello(&b, 1, &m);
    in = body_of(&b);
    assert_int_equal(decode_hello(&in, &out), FANIN_ERR_PROTOCOL);
    b.size = 0;
    m.role = ROLE_CONTROL;
    m.features = UINT64_C(1) << 40;
    memset(m.trace_id, 't', sizeof m.trace_id - 1);
    encode_hello(&b, 1, &m);
    in = body_of(&b);
    assert_int_equal(decode_hello(&in, &out), FANIN_OK);
    assert_memory_equal(&m, &out, sizeof m);
    buffer_free(&b);
}

TEST(hello_ok_ranges)
{
    msg_hello_ok m = {.version = 1, .rank = 8, .world_size = 8, .server_name = "s"};
    msg_hello_ok out;
    buffer b = {0};
    encode_hello_ok(&b, 1, &m);
    body in = body_of(&b);
    assert_int_equal(decode_hello_ok(&in, &out), FANIN_ERR_PROTOCOL);
    assert_string_equal(in.why, "the rank is not below the world size");
    b.size = 0;
    m.rank = 65535;
    m.world_size = 65537;
    encode_hello_ok(&b, 1, &m);
    in = body_of(&b);
    assert_int_equal(decode_hello_ok(&in, &out), FANIN_ERR_PROTOCOL);
    b.size = 0;
    m.world_size = 65536;
    encode_hello_ok(&b, 1, &m);
    in = body_of(&b);
    assert_int_equal(decode_hello_ok(&in, &out), FANIN_OK);
    assert_int_equal(out.rank, 65535);
    b.size = 0;
    m.server_name[0] = '\0';
    encode_hello_ok(&b, 1, &m);
    in = body_of(&b);
    assert_int_equal(decode_hello_ok(&in, &out), FANIN_ERR_PROTOCOL);
    buffer_free(&b);
}

TEST(pages_stay_in_their_table)
{
    static const struct {
        uint64_t total, offset;
        size_t size;
        bool good;
    } rows[] = {
        {4, 0, 4, true},           {4, 1, 3, true},  {4, 1, 4, false}, {4, 5, 0, false},
        {4, UINT64_MAX, 1, false}, {4, 4, 0, false}, {0, 0, 0, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        msg_blob_page m = {rows[i].total,
                           rows[i].offset,
                           {(const uint8_t *)"abcd", rows[i].size}},
                      out;
        buffer b = {0};
        encode_blob_page(&b, 1, MSG_KEYS_OK, &m);
        body in = body_of(&b);
        assert_int_equal(decode_blob_page(&in, &out),
                         rows[i].good ? FANIN_OK : FANIN_ERR_PROTOCOL);
        if (rows[i].good && rows[i].size) {
            assert_int_equal(out.data.size, rows[i].size);
            assert_true(out.data.data >= b.data && out.data.data < b.data + b.size);
        }
        buffer_free(&b);
    }
}

TEST(states_paths_and_rules_are_enumerated)
{
    msg_event event = {.publication = "lora:0", .state = WIRE_STATE_PAUSED + 1};
    msg_wait wait = {.publication = "lora:0", .rule = WIRE_RULE_AT_LEAST + 1};
    msg_open_path path = {.path = 0};
    msg_watch watch = {.publication = ""};
    msg_error wrong = {.code = 5}, unknown = {.code = -299};
    struct {
        message_type type;
        buffer b;
    } rows[6] = {{.type = MSG_EVENT}, {.type = MSG_WAIT},  {.type = MSG_OPEN_PATH},
                 {.type = MSG_WATCH}, {.type = MSG_ERROR}, {.type = MSG_ERROR}};
    encode_event(&rows[0].b, 1, &event);
    encode_wait(&rows[1].b, 1, &wait);
    encode_open_path(&rows[2].b, 1, MSG_OPEN_PATH, &path);
    encode_watch(&rows[3].b, 1, &watch);
    encode_error(&rows[4].b, 1, &wrong);
    encode_error(&rows[5].b, 1, &unknown); /* of a later version: let through */
    for (size_t i = 0; i < 6; i++) {
        body in = body_of(&rows[i].b);
        buffer out = {0};
        assert_int_equal(recode_message(rows[i].type, 1, &in, &out),
                         i == 5 ? FANIN_OK : FANIN_ERR_PROTOCOL);
        buffer_free(&out);
        buffer_free(&rows[i].b);
    }
}

TEST(foreign_bytes_in_texts_are_replaced)
{
    msg_error m = {.code = FANIN_ERR_IO, .message = "cannot open \xff\xfe"}, out;
    buffer b = {0};
    encode_error(&b, 1, &m);
    body in = body_of(&b);
    assert_int_equal(decode_error(&in, &out), FANIN_OK);
    assert_string_equal(out.message, "cannot open ??");
    buffer_free(&b);
}

TEST(texts_that_are_too_long_are_refused)
{
    char name[81];
    memset(name, 'n', sizeof name);
    for (size_t size = 79; size <= 80; size++) {
        buffer b = {0};
        pack_map(&b, 1);
        pack_uint(&b, 1);
        pack_text(&b, name, size);
        expect(&b, MSG_WATCH, size == 79 ? FANIN_OK : FANIN_ERR_PROTOCOL, NULL);
        buffer_free(&b);
    }
}

/* ------------------------------------------------------------- lists and reads */

TEST(lists_of_publications)
{
    static msg_list_entry entries[LIMIT_PUBLICATIONS + 1];
    msg_list_entry *again;
    uint32_t count;
    for (size_t i = 0; i <= LIMIT_PUBLICATIONS; i++) {
        memset(entries[i].publication, 'p', 79);
        entries[i].step = entries[i].bytes = entries[i].epoch = UINT64_MAX;
        entries[i].tensors = entries[i].catalog_version = UINT64_MAX;
    }
    buffer b = {0};
    encode_list_ok(&b, 1, entries, LIMIT_PUBLICATIONS);
    assert_true(b.size - FRAME_SIZE <= LIMIT_REPLY);
    body in = body_of(&b);
    assert_int_equal(decode_list_ok(&in, &again, &count), FANIN_OK);
    assert_int_equal(count, LIMIT_PUBLICATIONS);
    assert_memory_equal(again, entries, count * sizeof *again);
    free(again);
    b.size = 0;
    encode_list_ok(&b, 1, entries, LIMIT_PUBLICATIONS + 1);
    in = body_of(&b);
    assert_int_equal(decode_list_ok(&in, &again, &count), FANIN_ERR_PROTOCOL);
    assert_null(again);
    buffer_free(&b);
}

static fanin_status stats_status(const msg_stats_ok *m)
{
    msg_stats_ok again;
    buffer b = {0};
    encode_stats_ok(&b, 1, m);
    body in = body_of(&b);
    fanin_status status = decode_stats_ok(&in, &again);
    if (status == FANIN_OK) {
        assert_int_equal(again.n_entries, m->n_entries);
        assert_int_equal(again.n_holders, m->n_holders);
        assert_int_equal(again.n_told_relays, m->n_told_relays);
        assert_true(again.drain_waits[FANIN_DRAIN_BUCKETS - 1] ==
                    m->drain_waits[FANIN_DRAIN_BUCKETS - 1]);
    }
    stats_free(&again);
    buffer_free(&b);
    return status;
}

/* As many publications and holders as there may be, each at its longest, are one reply. */
TEST(statistics_are_bounded)
{
    static stats_entry entries[LIMIT_STATS + 1];
    static stats_holder holders[LIMIT_STATS + 1];
    static stats_relay relays[LIMIT_STATS + 1];
    for (size_t i = 0; i <= LIMIT_STATS; i++) {
        memset(entries[i].publication, 'p', 79);
        memset(entries[i].reason, 'r', 255);
        memset(holders[i].who, 'w', 63);
        holders[i].publication = LIMIT_STATS - 1;
        memset(relays[i].address, 'a', 63);
        memset(relays[i].place, 'p', 63);
    }
    msg_stats_ok m = {.drain_waits[FANIN_DRAIN_BUCKETS - 1] = UINT64_MAX,
                      .entries = entries,
                      .holders = holders,
                      .n_entries = LIMIT_STATS,
                      .n_holders = LIMIT_STATS,
                      .told_relays = relays,
                      .n_told_relays = LIMIT_STATS};
    assert_int_equal(stats_status(&m), FANIN_OK);
    m.n_entries--; /* a holder of none of them */
    assert_int_equal(stats_status(&m), FANIN_ERR_PROTOCOL);
    m.n_entries = LIMIT_STATS + 1;
    assert_int_equal(stats_status(&m), FANIN_ERR_PROTOCOL);
    m.n_entries = LIMIT_STATS;
    m.n_holders = LIMIT_STATS + 1;
    assert_int_equal(stats_status(&m), FANIN_ERR_PROTOCOL);
    m.n_holders = 0;
    m.n_told_relays = LIMIT_STATS + 1;
    assert_int_equal(stats_status(&m), FANIN_ERR_PROTOCOL);
    m.n_told_relays = 1;
    relays[0].publication = m.n_entries = 1;
    assert_int_equal(stats_status(&m), FANIN_ERR_PROTOCOL);
    m = (msg_stats_ok){0};
    assert_int_equal(stats_status(&m), FANIN_OK);
    body none = {.data = (const uint8_t *)"\x80", .size = 1};
    assert_int_equal(decode_stats_ok(&none, &m), FANIN_ERR_PROTOCOL);
    stats_free(&m);
}

static void refuse_holders(const msg_holders_ok *m, const char *words)
{
    msg_holders_ok again;
    buffer b = {0};
    encode_holders_ok(&b, 1, m);
    body in = body_of(&b);
    assert_int_equal(decode_holders_ok(&in, &again), FANIN_ERR_PROTOCOL);
    assert_says(in.why, words);
    holders_free(&again);
    buffer_free(&b);
}

/* As many holders as a list may have, each at its longest, are one reply. */
TEST(lists_of_holders_are_bounded)
{
    static holder_entry entries[LIMIT_HOLDERS + 1];
    for (size_t i = 0; i <= LIMIT_HOLDERS; i++) {
        memset(entries[i].address, 'a', 63);
        memset(entries[i].host, 'h', 63);
        memset(entries[i].place, 'p', 63);
        entries[i].local = true;
        entries[i].number = (uint32_t)(LIMIT_HOLDERS - 1 - i % LIMIT_HOLDERS);
    }
    static const uint8_t members[LIMIT_HOLDERS / 8 + 1] = {1};
    msg_holders_ok m = {.version = 9,
                        .entries = entries,
                        .n_entries = LIMIT_HOLDERS,
                        .members = {members, LIMIT_HOLDERS / 8}};
    msg_holders_ok again;
    buffer b = {0};
    encode_holders_ok(&b, 1, &m);
    assert_true(b.size <= FRAME_SIZE + LIMIT_REPLY);
    body in = body_of(&b);
    assert_int_equal(decode_holders_ok(&in, &again), FANIN_OK);
    assert_int_equal(again.n_entries, LIMIT_HOLDERS);
    assert_memory_equal(again.entries, entries, LIMIT_HOLDERS * sizeof *entries);
    assert_int_equal(again.members.size, LIMIT_HOLDERS / 8);
    holders_free(&again);
    buffer_free(&b);
    m.n_entries++;
    refuse_holders(&m, "too many holders");
    m.n_entries = 1;
    entries[0].number = LIMIT_HOLDERS;
    refuse_holders(&m, "number");
    m.n_entries = 0;
    m.members.size++;
    refuse_holders(&m, "length");
}

static fanin_status landed_status(const landed_range *ranges, uint32_t n)
{
    static landed_range room[LIMIT_LANDED_RANGES];
    msg_landed_ok m = {.version = 1, .ranges = ranges, .n_ranges = n}, again;
    buffer b = {0};
    encode_landed_ok(&b, 1, &m);
    body in = body_of(&b);
    fanin_status status = decode_landed_ok(&in, &again, room);
    if (status == FANIN_OK) {
        assert_int_equal(again.n_ranges, n);
        assert_memory_equal(again.ranges, ranges, n * sizeof *ranges);
        assert_true(b.size <= FRAME_SIZE + LIMIT_REPLY);
    }
    buffer_free(&b);
    return status;
}

TEST(landed_ranges_are_bounded)
{
    static landed_range ranges[LIMIT_LANDED_RANGES + 1];
    for (uint32_t i = 0; i <= LIMIT_LANDED_RANGES; i++)
        ranges[i] = (landed_range){LIMIT_BOXES - 1 - i, 1};
    assert_int_equal(landed_status(ranges, LIMIT_LANDED_RANGES), FANIN_OK);
    assert_int_equal(landed_status(ranges, LIMIT_LANDED_RANGES + 1),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(landed_status(&(landed_range){0, LIMIT_BOXES}, 1), FANIN_OK);
    assert_int_equal(landed_status(&(landed_range){0, LIMIT_BOXES + 1}, 1),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(landed_status(&(landed_range){1, LIMIT_BOXES}, 1),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(landed_status(&(landed_range){LIMIT_BOXES, 1}, 1),
                     FANIN_ERR_PROTOCOL);
    assert_int_equal(landed_status(&(landed_range){7, 0}, 1), FANIN_ERR_PROTOCOL);

    buffer b = {0}; /* a first without its count */
    pack_map(&b, 2);
    pack_uint(&b, 1);
    pack_uint(&b, 1);
    pack_uint(&b, 3);
    pack_array(&b, 1);
    pack_uint(&b, 0);
    expect(&b, MSG_LANDED_OK, FANIN_ERR_PROTOCOL,
           "the number of ranges is out of range");
    buffer_free(&b);
}

static fanin_status read_status(uint64_t bytes, const read_entry *entries, uint32_t n)
{
    static read_entry room[LIMIT_READ_ENTRIES];
    msg_read m = {.bytes = bytes, .entries = entries, .n_entries = n}, out;
    buffer b = {0};
    encode_read(&b, 1, &m);
    body in = body_of(&b);
    fanin_status status = decode_read(&in, &out, room);
    if (!status) {
        assert_int_equal(out.n_entries, n);
        assert_memory_equal(room, entries, n * sizeof *entries);
    }
    buffer_free(&b);
    return status;
}

TEST(reads_are_bounded)
{
    const uint64_t most = LIMIT_READ_BYTES;
    read_entry whole = {.box = 5, .count = 3};
    read_entry range = {.box = 5, .offset = 1000, .length = 24};
    read_entry both[] = {whole, range};
    assert_int_equal(read_status(3, &whole, 1), FANIN_OK);
    assert_int_equal(read_status(2, &whole, 1), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(most, &whole, 1), FANIN_OK);
    assert_int_equal(read_status(most + 1, &whole, 1), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(24, &range, 1), FANIN_OK);
    assert_int_equal(read_status(25, &range, 1), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(23, &range, 1), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(0, &range, 1), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(27, both, 2), FANIN_OK);
    assert_int_equal(read_status(26, both, 2), FANIN_ERR_PROTOCOL);
    assert_int_equal(read_status(24, &range, 0), FANIN_ERR_PROTOCOL);

    read_entry nothing = {.box = 5, .offset = 1};
    assert_int_equal(read_status(1, &nothing, 1), FANIN_ERR_PROTOCOL);
    read_entry large = {.box = 0, .length = most};
    assert_int_equal(read_status(most, &large, 1), FANIN_OK);
    large.length++;
    assert_int_equal(read_status(most, &large, 1), FANIN_ERR_PROTOCOL);
    read_entry beyond = {.box = LIMIT_BOXES - 1, .count = 1};
    assert_int_equal(read_status(1, &beyond, 1), FANIN_OK);
    beyond.count = 2;
    assert_int_equal(read_status(2, &beyond, 1), FANIN_ERR_PROTOCOL);
    beyond = (read_entry){.box = LIMIT_BOXES, .count = 1};
    assert_int_equal(read_status(1, &beyond, 1), FANIN_ERR_PROTOCOL);
}

TEST(reads_of_many_entries)
{
    static read_entry entries[LIMIT_READ_ENTRIES + 1];
    for (uint32_t i = 0; i <= LIMIT_READ_ENTRIES; i++)
        entries[i] = (read_entry){
            .box = LIMIT_BOXES - 1 - i, .offset = UINT64_C(1) << 40, .length = 1000};
    assert_int_equal(
        read_status(LIMIT_READ_ENTRIES * 1000, entries, LIMIT_READ_ENTRIES), FANIN_OK);
    assert_int_equal(
        read_status((LIMIT_READ_ENTRIES + 1) * 1000, entries, LIMIT_READ_ENTRIES + 1),
        FANIN_ERR_PROTOCOL);
    buffer b = {0};
    encode_read(
        &b, 1,
        &(msg_read){.bytes = 1, .entries = entries, .n_entries = LIMIT_READ_ENTRIES});
    assert_true(b.size - FRAME_SIZE <= LIMIT_READ_REQUEST);
    buffer_free(&b);
}
