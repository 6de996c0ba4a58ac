/* SPDX-License-Identifier: Apache-2.0 */
/* What a reader knows of the others by the rank's list: over steps, ranks and connections. */
#include "clock.h"
#include "relay_readers.h"
#include "testing.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LISTS 4
#define PORT 7001 /* of the first; nobody listens there */

static world w;
static holders_list *lists[LISTS];
static fanin_client_config config;
static const digest holding = {{1}};

static atomic_uint told; /* entries, to all of them */

fanin_status __real_decode_holders_ok(body *in, msg_holders_ok *out);
fanin_status __wrap_decode_holders_ok(body *in, msg_holders_ok *out);
fanin_status __wrap_decode_holders_ok(body *in, msg_holders_ok *out)
{
    fanin_status status = __real_decode_holders_ok(in, out);
    atomic_fetch_add(&told, out->n_entries);
    return status;
}

static int tear_down(void **state)
{
    for (size_t i = 0; i < LISTS; i++)
        list_destroy(&lists[i]);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static member self_of(size_t i)
{
    member m;
    memset(m.id, (int)(0xa0 + i), sizeof m.id);
    return m;
}

static void begin(size_t n)
{
    world_begin(&w, 2, CUT_CHUNK0, 1);
    ways_reset(&w);
    fanin_client_config_init(&config, sizeof config);
    for (size_t i = 0; i < n; i++)
        offer_falsely(&lists[i], &config, &holding, (uint16_t)(PORT + i), self_of(i));
}

static void offer_step(size_t i, uint64_t step)
{
    offer_step_falsely(lists[i], step, &holding, (uint16_t)(PORT + i), self_of(i));
}

/* Whether it knows those whose bits are set, and nobody else. */
static bool knows(size_t i, unsigned bits)
{
    uint64_t seen = UINT64_MAX;
    holder *all;
    size_t n;
    const member self = self_of(i);
    assert_true(list_copy(lists[i], &self, &seen, &all, &n));
    bool good = n == (size_t)__builtin_popcount(bits);
    for (size_t k = 0; k < n && good; k++) {
        unsigned other = all[k].who.id[0] - 0xa0u;
        char address[32];
        snprintf(address, sizeof address, "127.0.0.1:%u", PORT + other);
        good =
            other < LISTS && bits >> other & 1 && strcmp(all[k].address, address) == 0;
    }
    free(all);
    return good;
}

static void await(size_t i, unsigned bits)
{
    deadline until = deadline_in_ms(20000);
    while (!knows(i, bits) && !deadline_passed(until))
        usleep(1000);
    assert_true(knows(i, bits));
}

/* ... and is not told again. */
CASE(who_was_told_at_a_step_is_known_at_the_next)
{
    atomic_store(&told, 0);
    begin(3);
    await(1, 5);
    await(2, 3);
    for (uint64_t step = 2; step < 5; step++) {
        await(0, 6);
        world_commit(&w, step);
        offer_step(0, step);
        await(0, 0); /* the others are a step behind */
        offer_step(2, step);
        await(0, 4);
        await(1, 0);
        offer_step(1, step);
    }
    await(0, 6);
    await(1, 5);
    await(2, 3);
    assert_int_equal(atomic_load(&told), 9);
    list_destroy(&lists[1]);
    await(0, 4);
    await(2, 1);
    offer_falsely(&lists[1], &config, &holding, PORT + 1, self_of(1));
    offer_step(1, 4);
    await(0, 6);
}

/* Its numbers are others. */
CASE(the_next_rank_keeps_a_roster_of_its_own)
{
    begin(4);
    await(2, 0xb);
    await(3, 0x7);
    list_destroy(&lists[0]); /* so that numbers are free */
    list_destroy(&lists[1]);
    world_stop_rank(&w, 0);
    await(2, 8);
    await(3, 4);
}

/* Another reader has the number of one that has gone. */
CASE(who_takes_a_number_over_is_known_by_it)
{
    begin(2);
    await(0, 2);
    list_destroy(&lists[1]);
    await(0, 0);
    for (size_t i = 2; i < 4; i++)
        offer_falsely(&lists[i], &config, &holding, (uint16_t)(PORT + i), self_of(i));
    await(0, 0xc);
}

/* As long as the rank has not found out that the first connection is gone. */
CASE(who_has_connected_twice_is_one)
{
    begin(2);
    offer_falsely(&lists[2], &config, &holding, PORT + 1, self_of(1));
    offer_falsely(&lists[3], &config, &holding, PORT + 3, self_of(3));
    await(0, 0xa);
    list_destroy(&lists[1]);
    list_destroy(&lists[3]);
    await(0, 2);
}
