/* SPDX-License-Identifier: Apache-2.0 */
/* The doctor asks ranks one of which hangs in an update and one of which publishes nothing. Time
   goes by as the test says: the library finds this program's clock before that of libc. */
#include "doctor/doctor.h"
#include "local_world.h"
#include "testing.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>

static _Atomic time_t later_s;

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock,
                                                         struct timespec *out)
{
    int result = (int)syscall(SYS_clock_gettime, clock, out);
    out->tv_sec += atomic_load(&later_s);
    return result;
}

static void examine(const world *w, const doctor_facts *facts, doctor_ranks *out)
{
    fanin_client *client = world_client(w, FANIN_PATH_STREAM);
    assert_works(doctor_ask(client, facts, "", 20000, out, ERROR));
    fanin_client_destroy(&client);
}

TEST(ranks_that_hang_are_found)
{
    world w = {.flags = FANIN_SERVER_NO_UCX};
    doctor_ranks found;
    doctor_report *report = calloc(1, sizeof *report);
    doctor_facts *facts = calloc(1, sizeof *facts);
    assert_true(report && facts);
    world_start(&w, 3, CUT_CHUNK0, world_lora, world_lora_count);
    world_commit_rank(&w, 0, 1);
    world_commit_rank(&w, 2, 1);
    assert_works(fanin_server_begin_update(w.ranks[2].server, "lora:0", ERROR));
    examine(&w, facts, &found);
    assert_int_equal(found.stuck, 0);
    assert_int_equal(found.empty, 1);
    assert_int_equal(found.empty_rank, 1);
    atomic_store(&later_s, 64);
    examine(&w, facts, &found);
    assert_int_equal(found.stuck, 1);
    assert_int_equal(found.stuck_rank, 2);
    assert_string_equal(found.stuck_name, "lora:0");
    assert_string_equal(found.stuck_state, "writing");
    assert_true(found.stuck_ms >= 64000);
    doctor_judge_ranks(facts, &found, report);
    bool told = false;
    for (unsigned i = 0; i < report->n; i++)
        told =
            told || strstr(report->findings[i].text, "rank 2 has been writing lora:0");
    assert_true(told);
    assert_works(fanin_server_abort_update(w.ranks[2].server, "lora:0", ERROR));
    world_stop(&w);
    free(facts);
    free(report);
}
