/* SPDX-License-Identifier: Apache-2.0 */
/* Checksums that a thread makes of what is being sent. */
#include "thread.h"
#include "stream/stream_sum.h"
#include "testing.h"

#define ROUNDS 300
#define PARTS 5
#define PART 70001

static uint8_t memory[PARTS * PART];
static gather gathered; /* too large for a stack */

/* One "sendmsg" after the other, of which some take all that was gathered, some a part or nothing:
   the sum is that of what has left, in order. */
TEST(what_has_left_is_summed_up)
{
    if (usable_cpus() < 2)
        skip();
    side_sum *s = side_sum_create();
    checksum *sum = checksum_create(), *expected = checksum_create();
    assert_non_null(s);
    for (size_t i = 0; i < sizeof memory; i++)
        memory[i] = (uint8_t)(i * 7 + i / 251);
    gathered.n = PARTS;
    for (int i = 0; i < PARTS; i++)
        gathered.iov[i] =
            (struct iovec){memory + (size_t)(PARTS - 1 - i) * PART, PART - (size_t)i};
    for (uint64_t round = 0; round < ROUNDS; round++) {
        const size_t skip = round * 977 % (2 * PART);
        const uint64_t all = (uint64_t)PARTS * (PART - 2) - skip;
        const uint64_t left = round % 3 == 0 ? all : all * (round % 7) / 7;
        side_sum_begin(s, sum, &gathered, skip, all);
        side_sum_end(s, left);
        gather_sum(&gathered, skip, left, expected);
        assert_true(checksum_get(sum) == checksum_get(expected));
    }
    side_sum_destroy(&s);
    assert_null(s);
    side_sum_destroy(&s);
    checksum_free(sum);
    checksum_free(expected);
}

TEST(a_gather_is_summed_up_in_its_order)
{
    const char head[] = "skipped", one[] = "one", two[] = "two and more";
    checksum *sum = checksum_create();
    gathered.n = 3;
    gathered.iov[0] = (struct iovec){(void *)head, 7};
    gathered.iov[1] = (struct iovec){(void *)one, 3};
    gathered.iov[2] = (struct iovec){(void *)two, 12};
    gather_sum(&gathered, 7, 6, sum);
    assert_true(checksum_get(sum) == checksum_of("onetwo", 6));
    checksum_reset(sum);
    gather_sum(&gathered, 8, 14, sum);
    assert_true(checksum_get(sum) == checksum_of("netwo and more", 14));
    checksum_free(sum);
}
