/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks in words: those that do the same are told together, and no number is cut. */
#include "fetch/missing.h"
#include "testing.h"

static fanin_rank_state state_of(uint32_t rank, int32_t state, uint64_t step)
{
    return (fanin_rank_state){.struct_size = sizeof(fanin_rank_state),
                              .rank = rank,
                              .state = state,
                              .step = step};
}

TEST(groups)
{
    char text[200];
    const fanin_rank_state ranks[] = {
        state_of(2, FANIN_PUBLICATION_WRITING, 0),
        state_of(1, FANIN_PUBLICATION_STABLE, 7),
        state_of(0, FANIN_PUBLICATION_STABLE, 7),
    };
    rank_states_text(ranks, 3, text, sizeof text);
    assert_string_equal(text, "ranks 0-1 stable at step 7; rank 2 writing");
    rank_states_text(ranks, 0, text, sizeof text);
    assert_string_equal(text, "");
}

TEST(long_lists_end_behind_a_number)
{
    enum { COUNT = 64 };
    fanin_rank_state ranks[COUNT];
    char text[300];
    for (uint32_t i = 0; i < COUNT; i++)
        ranks[i] = state_of(2 * i + 1, FANIN_PUBLICATION_STABLE, 3);
    rank_states_text(ranks, COUNT, text, sizeof text);
    const char *end = strstr(text, ",... (64) stable at step 3");
    assert_non_null(end);
    assert_memory_equal(text, "ranks 1,3,", 10);
    for (const char *at = text + strlen("ranks "); at <= end; at = strchr(at, ',') + 1)
        assert_int_equal(strtoul(at, NULL, 10) % 2, 1);
}

TEST(groups_without_room_are_left_out)
{
    fanin_rank_state ranks[16];
    char text[120];
    for (uint32_t i = 0; i < 16; i++)
        ranks[i] = state_of(i, FANIN_PUBLICATION_STABLE, 100 + i);
    rank_states_text(ranks, 16, text, sizeof text);
    assert_string_equal(text,
                        "rank 0 stable at step 100; rank 1 stable at step 101; "
                        "rank 2 stable at step 102; rank 3 stable at step 103; ...");
}
