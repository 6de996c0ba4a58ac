/* SPDX-License-Identifier: Apache-2.0 */
/* Frames out of bytes that come in any pieces. */
#include "framing.h"
#include "samples.h"
#include "testing.h"

/* Hands over at most @p most bytes of it; how many. */
static size_t feed(framing *f, const uint8_t *data, size_t most)
{
    size_t room;
    uint8_t *to = framing_room(f, &room);
    assert_non_null(to);
    if (room > most)
        room = most;
    memcpy(to, data, room);
    framing_add(f, room);
    return room;
}

/* The next frame of what was sent, after the bytes that were taken. */
static void expect_frame(const framed *got, const buffer *sent, size_t *at, bool sealed)
{
    size_t whole = FRAME_SIZE + got->head.length;
    frame head;
    const char *why;
    assert_int_equal(seal_decode(sent->data + *at, sealed, &head, &why), FANIN_OK);
    assert_int_equal(head.type, got->head.type);
    assert_true(head.request == got->head.request && head.length == got->body.size);
    assert_memory_equal(got->body.data, sent->data + *at + FRAME_SIZE, got->body.size);
    *at += whole + seal_size(sealed);
}

/* Bytes come until @p first, then @p step at a time. */
static void take_all(const buffer *sent, bool sealed, bool exact, size_t first,
                     size_t step)
{
    framing f = {0};
    framed got;
    framing_start(&f, LIMIT_REPLY);
    f.sealed = sealed;
    f.exact = exact;
    size_t fed = 0, taken = 0;
    while (fed < sent->size) {
        size_t most = fed < first ? first - fed : step;
        fed += feed(&f, sent->data + fed,
                    most < sent->size - fed ? most : sent->size - fed);
        while (framing_take(&f, &got) == FRAMING_WHOLE)
            expect_frame(&got, sent, &taken, sealed);
        assert_int_equal(got.status, FANIN_OK);
        /* Nothing behind the frame at hand. */
        assert_true(!exact || fed - taken <= f.need);
    }
    assert_int_equal(taken, sent->size);
    framing_free(&f);
}

TEST(frames_come_in_any_pieces)
{
    for (int sealed = 0; sealed < 2; sealed++) {
        buffer sent = samples_as_stream(sealed);
        for (int exact = 0; exact < 2; exact++) {
            for (size_t first = 0; first <= sent.size; first++)
                take_all(&sent, sealed, exact, first, sent.size);
            for (size_t step = 1; step < 64; step++)
                take_all(&sent, sealed, exact, 0, step);
        }
        buffer_free(&sent);
    }
}

static framing_result take_of(const void *data, size_t size, bool sealed, framed *got)
{
    framing f = {0};
    framing_start(&f, LIMIT_REQUEST);
    f.sealed = sealed;
    size_t fed = feed(&f, data, size);
    assert_int_equal(fed, size);
    framing_result result = framing_take(&f, got);
    framing_free(&f);
    return result;
}

TEST(foreign_bytes_are_refused)
{
    static const struct {
        size_t at;
        uint8_t byte;
        fanin_status status;
        const char *why;
    } cases[] = {
        {0, 0x16, FANIN_ERR_PROTOCOL, "TLS is not spoken here"},
        {3, '2', FANIN_ERR_PROTOCOL, "not a frame of this protocol"},
        {4, 2, FANIN_ERR_VERSION, "the frame has another major version"},
        {5, 1, FANIN_ERR_PROTOCOL, "unknown frame flags"},
        {23, 1, FANIN_ERR_PROTOCOL, "the frame's reserved field is not zero"},
    };
    uint8_t head[FRAME_SIZE];
    framed got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        frame_encode(&(frame){.type = MSG_PING, .request = 7, .length = 1}, head);
        head[cases[i].at] = cases[i].byte;
        assert_int_equal(take_of(head, sizeof head, false, &got), FRAMING_BAD);
        assert_int_equal(got.status, cases[i].status);
        assert_string_equal(got.why, cases[i].why);
        assert_true(got.head.request == 0);
    }
}

TEST(long_bodies_are_refused_by_their_header)
{
    uint8_t head[FRAME_SIZE];
    framed got;
    frame f = {.type = MSG_PING, .request = 7, .length = LIMIT_REQUEST};
    frame_encode(&f, head);
    assert_int_equal(take_of(head, sizeof head, false, &got), FRAMING_MORE);
    f.length++;
    frame_encode(&f, head);
    assert_int_equal(take_of(head, sizeof head, false, &got), FRAMING_BAD);
    assert_int_equal(got.status, FANIN_ERR_PROTOCOL);
    assert_string_equal(got.why, "the request is too long");
    assert_true(got.head.request == 7);
}

TEST(altered_bits_are_noticed)
{
    buffer sent = {.sealed = true};
    framed got;
    encode_empty(&sent, 7, MSG_PING);
    assert_int_equal(take_of(sent.data, sent.size, true, &got), FRAMING_WHOLE);
    assert_int_equal(take_of(sent.data, sent.size, false, &got), FRAMING_BAD);
    for (size_t bit = 0; bit < 8 * sent.size; bit++) {
        sent.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(take_of(sent.data, sent.size, true, &got), FRAMING_BAD);
        assert_int_equal(got.status, FANIN_ERR_TRANSPORT);
        assert_true(got.head.request == 0);
        sent.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    buffer_free(&sent);
}

TEST(no_more_than_a_longest_frame_waits)
{
    static const uint8_t nothing[LIMIT_REQUEST];
    framing f = {0};
    framing_start(&f, LIMIT_BEFORE_HELLO);
    size_t fed = 0, more;
    while ((more = feed(&f, nothing, sizeof nothing)) > 0)
        fed += more;
    assert_int_equal(fed, FRAME_SIZE + LIMIT_BEFORE_HELLO + SEAL_SIZE);
    framing_drop(&f);
    assert_true(feed(&f, nothing, sizeof nothing) > 0);
    framing_free(&f);
}

/* ------------------------------------------------------------- greetings */

static buffer answer_to(const buffer *hello, uint64_t features)
{
    buffer answer = {0};
    framing f = {0};
    body in = {.data = hello->data + FRAME_SIZE, .size = hello->size - FRAME_SIZE};
    encode_hello_ok(&answer, 1,
                    &(msg_hello_ok){.version = VERSION_MAX,
                                    .features = features,
                                    .world_size = 1,
                                    .server_name = "rank_0"});
    framing_seal_hello_ok(&f, &in, &answer, 0);
    assert_true(f.sealed && answer.sealed && !answer.failed);
    return answer;
}

/* What comes of the first @p size bytes of an answer, which come byte by byte. */
static framing_result greet(const buffer *hello, const buffer *answer, size_t size,
                            bool agreed, framing *f, framed *got)
{
    framing_result result = FRAMING_MORE;
    framing_start(f, LIMIT_REPLY);
    framing_expect_hello_ok(f, hello->data, hello->size, agreed);
    for (size_t i = 0; i < size && result == FRAMING_MORE; i++) {
        assert_int_equal(feed(f, answer->data + i, 1), 1);
        result = framing_take(f, got);
    }
    return result;
}

TEST(greetings_say_whether_frames_are_sealed)
{
    buffer hello = {0}, error = {0};
    framing f = {0};
    framed got;
    encode_hello(&hello, 1, &(msg_hello){.features = FEATURES});
    encode_error(&error, 1, &(msg_error){.code = FANIN_ERR_LIMIT});
    buffer sealed = answer_to(&hello, FEATURES), plain = answer_to(&hello, 0);
    for (int agreed = 0; agreed < 2; agreed++) {
        assert_int_equal(greet(&hello, &sealed, sealed.size, agreed, &f, &got),
                         FRAMING_WHOLE);
        assert_true(f.sealed && got.head.type == MSG_HELLO_OK);
        assert_int_equal(greet(&hello, &sealed, sealed.size - 1, agreed, &f, &got),
                         FRAMING_MORE);
        /* An error has no checksum, an answer without the feature only if that was agreed. */
        assert_int_equal(greet(&hello, &error, error.size, agreed, &f, &got),
                         FRAMING_WHOLE);
        assert_false(f.sealed);
        assert_int_equal(
            greet(&hello, &plain, plain.size - SEAL_SIZE, agreed, &f, &got),
            agreed ? FRAMING_MORE : FRAMING_WHOLE);
        assert_false(f.sealed);
        assert_int_equal(greet(&hello, &plain, plain.size, true, &f, &got),
                         FRAMING_WHOLE);
        hello.data[FRAME_SIZE + 1] ^= 1; /* another hello was answered */
        assert_int_equal(greet(&hello, &sealed, sealed.size, agreed, &f, &got),
                         FRAMING_BAD);
        assert_int_equal(got.status, FANIN_ERR_TRANSPORT);
        hello.data[FRAME_SIZE + 1] ^= 1;
    }
    framing_free(&f);
    buffer_free(&hello);
    buffer_free(&error);
    buffer_free(&sealed);
    buffer_free(&plain);
}

/* ------------------------------------------------------------- bodies elsewhere */

TEST(bodies_may_be_received_elsewhere)
{
    for (int sealed = 0; sealed < 2; sealed++) {
        framing f = {.exact = true};
        framed got;
        buffer sent = {.sealed = sealed};
        uint8_t header[FRAME_SIZE], seal[SEAL_SIZE];
        framing_start(&f, LIMIT_READ_BYTES);
        f.sealed = sealed;
        encode_read_ok(&sent, 9, LIMIT_READ_BYTES);
        assert_int_equal(feed(&f, sent.data, sent.size - 1), FRAME_SIZE - 1);
        assert_int_equal(framing_peek(&f, &got), FRAMING_MORE);
        assert_int_equal(feed(&f, sent.data + FRAME_SIZE - 1, 9), 1);
        assert_int_equal(framing_peek(&f, &got), FRAMING_WHOLE);
        assert_true(got.head.type == MSG_READ_OK &&
                    got.head.length == LIMIT_READ_BYTES);
        framing_take_header(&f, header);
        assert_memory_equal(header, sent.data, FRAME_SIZE);
        if (sealed) {
            assert_int_equal(feed(&f, (const uint8_t *)"12345", 5), 5);
            assert_int_equal(framing_take_seal(&f, seal), FRAMING_MORE);
            assert_int_equal(feed(&f, (const uint8_t *)"678FAN1", 7), 3);
            assert_int_equal(framing_take_seal(&f, seal), FRAMING_WHOLE);
            assert_memory_equal(seal, "12345678", SEAL_SIZE);
        }
        sent.size = 0;
        encode_empty(&sent, 10, MSG_PING);
        for (size_t i = 0; i < sent.size; i++) {
            assert_int_equal(framing_take(&f, &got), FRAMING_MORE);
            assert_int_equal(feed(&f, sent.data + i, 1), 1);
        }
        assert_int_equal(framing_take(&f, &got), FRAMING_WHOLE);
        assert_true(got.head.request == 10);
        framing_free(&f);
        buffer_free(&sent);
    }
}
