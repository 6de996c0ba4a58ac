/* SPDX-License-Identifier: Apache-2.0 */
/* Which allocations are mapped, and when. The driver's part is played here. */
#include "device/ipc_map.h"
#include "error_set.h"
#include "testing.h"

#define MOST 64
#define LENGTH 4096

fanin_status __wrap_gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                            void **base_out, fanin_error *error);
fanin_status __wrap_gpu_range_of(gpu *g, const void *pointer, gpu_range *out,
                                 fanin_error *error);
void __wrap_gpu_unmap(gpu *g, int device, void *base);

/* What the driver has been asked, and how it answers. */
static struct {
    unsigned opens, closes;
    unsigned refuses[MOST]; /* by handle: so many times */
    bool open[MOST];
    uint64_t length; /* of each allocation */
} driver;

static uint8_t memory[MOST];

fanin_status __wrap_gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                            void **base_out, fanin_error *error)
{
    (void)g;
    (void)device;
    unsigned which = handle[0];
    driver.opens++;
    if (driver.refuses[which] > 0) {
        driver.refuses[which]--;
        return error_set(error, FANIN_ERR_TRANSPORT, NULL, "handle %u is refused",
                         which);
    }
    driver.open[which] = true;
    *base_out = &memory[which];
    return FANIN_OK;
}

fanin_status __wrap_gpu_range_of(gpu *g, const void *pointer, gpu_range *out,
                                 fanin_error *error)
{
    (void)g;
    (void)error;
    *out = (gpu_range){.base = (uint64_t)(uintptr_t)pointer, .length = driver.length};
    return FANIN_OK;
}

void __wrap_gpu_unmap(gpu *g, int device, void *base)
{
    (void)g;
    (void)device;
    if (!base)
        return;
    driver.closes++;
    driver.open[(uint8_t *)base - memory] = false;
}

static ipc_map *map;
static ipc_mapping *taken[MOST];

static int set_up(void **state)
{
    driver.opens = driver.closes = 0;
    driver.length = LENGTH;
    memset(driver.refuses, 0, sizeof driver.refuses);
    memset(taken, 0, sizeof taken);
    map = ipc_map_create(NULL);
    return map ? 0 : -1;
}

static int tear_down(void **state)
{
    ipc_map_destroy(&map);
    for (unsigned i = 0; i < MOST; i++)
        assert_false(driver.open[i]);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static ipc_mapping *take(unsigned which)
{
    static const uint8_t life[16] = {1};
    ipc_key key = {.handle = {(uint8_t)which}, .length = LENGTH};
    ipc_mapping *out = NULL;
    assert_works(ipc_map_take(map, 0, life, &key, &out, ERROR));
    return out;
}

static void take_all(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        taken[i] = take(i);
}

static void open_wanted(void)
{
    assert_works(ipc_map_open(map, NULL, ERROR));
}

static void expect_mapped(unsigned which)
{
    assert_works(ipc_mapping_check(taken[which], ERROR));
    assert_int_equal(ipc_mapping_base(taken[which]), (uintptr_t)&memory[which]);
}

CASE(nothing_is_mapped_twice)
{
    fanin_error error = FANIN_ERROR_INIT;
    take_all(3);
    assert_ptr_equal(take(1), taken[1]);
    assert_int_equal(driver.opens, 0);
    assert_true(ipc_mapping_check(taken[0], &error) != FANIN_OK);
    open_wanted();
    open_wanted();
    assert_int_equal(driver.opens, 3);
    for (unsigned i = 0; i < 3; i++)
        expect_mapped(i);
    ipc_mapping_release(&taken[0]);
    ipc_mapping_release(&taken[1]); /* once of two */
    ipc_map_sweep(map);
    assert_int_equal(driver.closes, 1);
    assert_false(driver.open[0]);
}

/* Older memory may be in the way: it is swept, and only what was refused is tried again. */
CASE(what_is_refused_once_is_tried_again)
{
    take_all(5);
    open_wanted();
    ipc_mapping_release(&taken[0]);
    taken[5] = take(5);
    taken[6] = take(6);
    driver.refuses[5] = 1;
    open_wanted();
    assert_int_equal(driver.closes, 1);
    assert_int_equal(driver.opens, 8);
    expect_mapped(5);
    expect_mapped(6);
}

CASE(each_tells_why_it_is_not_mapped)
{
    fanin_error error = FANIN_ERROR_INIT;
    driver.refuses[2] = 2;
    take_all(4);
    open_wanted();
    assert_int_equal(ipc_mapping_check(taken[2], &error), FANIN_ERR_TRANSPORT);
    assert_string_equal(error.message, "handle 2 is refused");
    for (unsigned i = 0; i < 4; i++)
        if (i != 2)
            expect_mapped(i);
    /* Who still holds it later finds it mapped. */
    open_wanted();
    expect_mapped(2);
}

/* A kernel that believed the rank would read what is not there. */
CASE(what_is_shorter_than_said_is_not_mapped)
{
    fanin_error error = FANIN_ERROR_INIT;
    driver.length = LENGTH - 1;
    take_all(1);
    open_wanted();
    assert_int_equal(ipc_mapping_check(taken[0], &error), FANIN_ERR_PROTOCOL);
    assert_non_null(
        strstr(error.message, "4096 bytes, and the CUDA driver that it has 4095"));
    assert_int_equal(ipc_mapping_base(taken[0]), 0);
    assert_false(driver.open[0]);
    driver.length = LENGTH + 1; /* what lies around it may be mapped with it */
    open_wanted();
    expect_mapped(0);
}

CASE(what_is_let_go_is_not_mapped)
{
    take_all(2);
    ipc_mapping_release(&taken[1]);
    open_wanted();
    assert_int_equal(driver.opens, 1);
    assert_false(driver.open[1]);
    taken[1] = take(1); /* who takes it again finds it mapped after the next opening */
    open_wanted();
    assert_int_equal(driver.opens, 2);
    expect_mapped(1);
}

CASE(all_are_found_again_after_a_sweep)
{
    take_all(MOST);
    open_wanted();
    for (unsigned i = 0; i < MOST; i += 2)
        ipc_mapping_release(&taken[i]);
    ipc_map_sweep(map);
    assert_int_equal(driver.closes, MOST / 2);
    for (unsigned i = 0; i < MOST; i++) {
        ipc_mapping *again = take(i);
        if (i % 2 == 1)
            assert_ptr_equal(again, taken[i]);
        taken[i] = again;
    }
    open_wanted();
    assert_int_equal(driver.opens, MOST + MOST / 2);
    for (unsigned i = 0; i < MOST; i++)
        expect_mapped(i);
}

static bool at_once(void *cookie)
{
    (void)cookie;
    return true;
}

CASE(stopped_before_the_first)
{
    fanin_error error = FANIN_ERROR_INIT;
    work_stop stop = {.fn = at_once};
    take_all(3);
    assert_int_equal(ipc_map_open(map, &stop, &error), FANIN_ERR_TIMEOUT);
    assert_int_equal(driver.opens, 0);
    open_wanted();
    assert_int_equal(driver.opens, 3);
}
