/* SPDX-License-Identifier: Apache-2.0 */
/* A few tensors of thousands: real ranks give parts of their tables, and what is pulled by them is
   right, whichever way the tensors are cut and read. */
#include "local_world.h"
#include "testing.h"

#define TENSORS 4500
#define RANKS 4

static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static world_tensor tensors[TENSORS];
static char names[TENSORS][16];

static void make_tensors(void)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        snprintf(names[i], sizeof names[i], "t%05u", i);
        tensors[i] = (world_tensor){names[i], FANIN_DTYPE_BF16, 2, {3 + i % 7, 5}};
    }
}

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

/* Every step-th tensor from the first on, into memory of its own, at @p at. */
static void expect_pull(uint32_t first, uint32_t step, uint64_t at)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    static fanin_tensor wanted[TENSORS];
    static fanin_box boxes[TENSORS];
    size_t n = 0;
    for (uint32_t i = first; i < TENSORS; i += step, n++) {
        boxes[n] = (fanin_box){.extent = {tensors[i].shape[0], 5},
                               .address = malloc(world_bytes(&tensors[i]))};
        wanted[n] = world_boxes(&tensors[i], &boxes[n], 1);
    }
    assert_ok(fanin_client_pull(client, &options, wanted, n, NULL, &error), error);
    n = 0;
    for (uint32_t i = first; i < TENSORS; i += step, n++) {
        world_check(&w, i, at, boxes[n].address);
        free(boxes[n].address);
    }
}

static void pull_parts(world_cut cut, fanin_path path)
{
    world_start(&w, RANKS, cut, tensors, TENSORS);
    world_commit(&w, 1);
    client = world_client(&w, path);
    expect_pull(7, 100, 1);
    expect_pull(7, 50, 1);  /* some more */
    expect_pull(20, 40, 1); /* others */
    world_commit(&w, 2);
    expect_pull(7, 100, 2);
    /* another catalog, of which all that was wanted is fetched */
    world_stop_rank(&w, 1);
    world_restart_rank(&w, 1);
    world_commit(&w, 3);
    expect_pull(20, 40, 3);
    expect_pull(0, 1, 3); /* all */
    expect_pull(7, 100, 3);
    tear_down(NULL);
}

CASE(parts_are_pulled_by_stream)
{
    static const world_cut cuts[] = {CUT_CHUNK0, CUT_GRID, CUT_STRIDED, CUT_HSDP};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++)
        pull_parts(cuts[i], FANIN_PATH_STREAM);
}

CASE(parts_are_pulled_by_cma)
{
    if (!world_has_cma())
        skip();
    pull_parts(CUT_CHUNK0, FANIN_PATH_CMA);
    pull_parts(CUT_STRIDED, FANIN_PATH_CMA);
}

static bool count_entry(void *cookie, const fanin_entry *entry)
{
    size_t *n = cookie;
    assert_string_equal(entry->name, names[*n]);
    assert_true(entry->n_owners > 0);
    ++*n;
    return true;
}

/* Who lists a catalog sees all of it, also after parts; and replicas stand in for a lost rank by
   parts. */
CASE(parts_hide_nothing)
{
    size_t n = 0;
    world_start(&w, RANKS, CUT_HSDP, tensors, TENSORS);
    world_commit(&w, 1);
    client = world_client(&w, FANIN_PATH_STREAM);
    expect_pull(7, 100, 1);
    world_stop_rank(&w, 2);
    expect_pull(7, 100, 1);
    expect_pull(8, 100, 1);
    assert_ok(
        fanin_client_catalog(client, "lora:0", NULL, 20000, count_entry, &n, &error),
        error);
    assert_int_equal(n, TENSORS);
    expect_pull(8, 100, 1);
    tear_down(NULL);
}

int main(void)
{
    make_tensors();
    return tests_run(NULL);
}
