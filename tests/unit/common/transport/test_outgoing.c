/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that a socket takes little by little. */
#include "socket.h"
#include "testing.h"
#include <sys/socket.h>

#define SIZE ((size_t)4 << 20) /* more than a socket holds */
#define KEEP 65536

static uint8_t bytes[SIZE];

static void fill(outgoing *o)
{
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    buffer_append(&o->bytes, bytes, SIZE);
}

TEST(all_bytes_arrive_in_order)
{
    int ends[2];
    outgoing o = {0};
    uint8_t got[100000];
    size_t at = 0;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    fill(&o);
    while (at < SIZE) {
        assert_int_equal(outgoing_flush(&o, NULL, ends[0]), 0);
        ssize_t n = recv(ends[1], got, sizeof got, 0);
        assert_true(n > 0);
        assert_memory_equal(got, bytes + at, (size_t)n);
        at += (size_t)n;
        size_t left = outgoing_left(&o);
        outgoing_trim(&o, KEEP);
        assert_int_equal(outgoing_left(&o), left);
        assert_true(o.sent < KEEP || o.sent < left); /* else it is given back */
    }
    assert_true(outgoing_is_empty(&o));
    assert_int_equal(o.bytes.capacity, 0);
    close(ends[1]);
    buffer_append(&o.bytes, "x", 1);
    assert_int_not_equal(outgoing_flush(&o, NULL, ends[0]), 0);
    close(ends[0]);
    outgoing_free(&o);
}

TEST(frames_stay_sealed)
{
    outgoing o = {.bytes.sealed = true};
    fill(&o);
    outgoing_sent(&o, SIZE - 1);
    assert_int_equal(outgoing_left(&o), 1);
    outgoing_sent(&o, 1);
    outgoing_trim(&o, SIZE * 4); /* little enough to be kept */
    assert_true(o.bytes.capacity >= SIZE && o.bytes.size == 0);
    outgoing_trim(&o, KEEP);
    assert_true(o.bytes.capacity == 0 && o.bytes.sealed);
    outgoing_free(&o);
}
