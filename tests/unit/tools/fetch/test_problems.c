/* SPDX-License-Identifier: Apache-2.0 */
/* A rank that still sends when the others have sent all: slow, or the last of a pull that goes
   well. */
#include "fetch/look.h"
#include "testing.h"

enum { RANKS = 3, SECOND = 1000000000 };

typedef struct run {
    look_rank ranks[RANKS], earlier[RANKS];
    look look, before; /**< before: nothing until look_on() */
} run;

/* Readers have had all leases for 3 s, and all of ranks 0 and 2. */
static void start(run *r)
{
    *r =
        (run){.look = {.ranks = r->ranks, .count = RANKS, .asked = RANKS, .newest = 1}};
    for (int32_t i = 0; i < RANKS; i++) {
        look_rank *one = &r->ranks[i];
        one->at.rank = i;
        one->there = true;
        one->is = (fanin_publication_stats){.state = FANIN_PUBLICATION_STABLE,
                                            .step = 1,
                                            .leases = 1,
                                            .lease_age_ms = 3000};
        one->stats.counted = true;
        one->stats.bytes_streamed = 1 << 20;
        snprintf(one->at.address, sizeof one->at.address, "127.0.0.1:%d", 6000 + i);
    }
    r->ranks[1].stats.sends_waiting = 1;
}

static void look_on(run *r)
{
    memcpy(r->earlier, r->ranks, sizeof r->earlier);
    r->before = (look){.ranks = r->earlier, .count = RANKS};
}

/* The text of what is found to be slow; "": nothing is. */
static const char *slow(const run *r)
{
    static char text[sizeof((problem *)NULL)->text];
    problems found;
    text[0] = '\0';
    problems_find(&r->look, r->before.count > 0 ? &r->before : NULL, SECOND, 0, &found);
    for (size_t i = 0; i < found.count; i++) {
        if (strcmp(found.list[i].kind, "slow") == 0) {
            assert_int_equal(found.list[i].rank, 1);
            snprintf(text, sizeof text, "%s", found.list[i].text);
        }
    }
    problems_free(&found);
    return text;
}

TEST(one_look_tells_nothing)
{
    run r;
    start(&r);
    assert_true(problems_need_another(&r.look));
    assert_string_equal(slow(&r), "");
}

TEST(a_rank_of_which_nothing_is_taken_is_slow)
{
    run r;
    start(&r);
    look_on(&r);
    assert_string_equal(slow(&r),
                        "rank 1 is slow: readers have waited 3 s for what it sends, "
                        "for 1 s the network or they have taken nothing; 2 of the "
                        "others have sent all");
}

TEST(a_rank_that_sends_on_is_not_slow)
{
    run r;
    start(&r);
    look_on(&r);
    r.ranks[1].stats.bytes_streamed += 100000000;
    assert_string_equal(slow(&r), "");
}

TEST(where_all_send_or_nobody_does_one_look_is_enough)
{
    run r;
    start(&r);
    r.ranks[0].stats.sends_waiting = r.ranks[2].stats.sends_waiting = 1;
    assert_false(problems_need_another(&r.look));
    look_on(&r);
    assert_string_equal(slow(&r), "");
    for (int i = 0; i < RANKS; i++)
        r.ranks[i].stats.sends_waiting = 0;
    assert_false(problems_need_another(&r.look));
}

/* Relays are told in the first line, with what has left the ranks for all readers. */
TEST(relays_are_told)
{
    run r;
    start(&r);
    problems none = {0};
    const session s = {.publication = "full:0"};
    char *text = look_summary(&s, &r.look, &none);
    assert_string_equal(text, "full:0: step 1, 3 of 3 ranks answer, nothing is wrong");
    free(text);
    for (int i = 0; i < RANKS; i++) {
        r.ranks[i].is.bytes = 1000;
        r.ranks[i].is.bytes_left = 1020;
    }
    r.ranks[0].stats.relays = 64;
    look_relay relays[] = {{.place = "a/r3"}, {.place = "a/r4"}, {.place = "b"}};
    r.ranks[0].relays = relays;
    r.ranks[0].n_relays = 1;
    text = look_summary(&s, &r.look, &none);
    assert_says(text, "3 of 3 ranks answer, 64 relays, 1.02 models left");
    free(text);
    r.ranks[0].n_relays = 2; /* another rack of the same site */
    text = look_summary(&s, &r.look, &none);
    assert_says(text, "64 relays, 1.02 models left");
    free(text);
    r.ranks[0].n_relays = 3;
    text = look_summary(&s, &r.look, &none);
    assert_says(text, "64 relays in 2 sites, 1.02 models left");
    free(text);
}
