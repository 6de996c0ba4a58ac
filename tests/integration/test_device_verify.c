/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls from device memory into device memory that compare with the rank's digests: what is equal,
 * and what is not. Device 0 has the digest kernel, device 1 cannot load it. The driver is a
 * stand-in.
 */
#include "fake_cuda.h"
#include "gpu.h"
#include "testing.h"
#include "verify_scene.h"
#include <cuda.h>

/* A rank on one device, a destination on another or the same. */
typedef struct stage {
    verify_scene scene;
    void *published, *landed;
} stage;

static void set_up(stage *s, int from, int to, void (*trigger)(void *))
{
    s->published = fake_cuda_alloc(from, SCENE_BYTES, FAKE_CUDA_MALLOC);
    s->landed = fake_cuda_alloc(to, SCENE_BYTES, FAKE_CUDA_MALLOC);
    scene_start(&s->scene, s->published, fake_cuda_alias(s->published), trigger);
}

static void tear_down(stage *s)
{
    fake_cuda_counts counts;
    scene_stop(&s->scene);
    fake_cuda_free(s->published);
    fake_cuda_free(s->landed);
    fake_cuda_count(&counts);
    assert_int_equal(counts.pinned, 0);
    assert_int_equal(counts.streams, 0);
    assert_int_equal(counts.allocations, 0);
}

/* How many kernels digested. */
static uint64_t pull_equal(stage *s, fanin_dtype dtype, int64_t gap)
{
    fanin_result_info info;
    fake_cuda_counts before, after;
    int64_t row = SCENE_COLUMNS * (dtype ? 2 : 4) + gap;
    fake_cuda_count(&before);
    assert_works(scene_pull(&s->scene, dtype, s->landed, row, &info, ERROR));
    fake_cuda_count(&after);
    assert_int_equal(info.path, FANIN_PATH_STREAM);
    assert_true(info.verified);
    return after.digests - before.digests;
}

/* The rank digests once as each dtype, and keeps that for the next pull. */
TEST(devices_digest_what_they_hold)
{
    static const fanin_dtype dtypes[] = {0, FANIN_DTYPE_BF16, FANIN_DTYPE_F16};
    for (int pair = 0; pair < 4; pair++) {
        stage s;
        int from = pair / 2, to = pair % 2;
        set_up(&s, from, to, scene_leave_alone);
        for (int i = 0; i < 3; i++)
            for (int64_t gap = 0; gap < 100; gap += 98) {
                uint64_t kernels = pull_equal(&s, dtypes[i], gap);
                assert_int_equal(kernels, (from == 0 && gap == 0) + (to == 0));
            }
        tear_down(&s);
    }
}

TEST(unequal_bytes_are_named)
{
    for (int pair = 0; pair < 4; pair++)
        for (int half = 0; half < 2; half++) {
            stage s;
            fanin_error error = FANIN_ERROR_INIT;
            fanin_result_info info;
            set_up(&s, pair / 2, pair % 2, scene_write_in_silence);
            fanin_status status =
                scene_pull(&s.scene, half ? FANIN_DTYPE_BF16 : 0, s.landed,
                           SCENE_COLUMNS * (half ? 2 : 4), &info, &error);
            scene_assert_unequal(&s.scene, status, SCENE_A, &error);
            tear_down(&s);
        }
}

/* Trainer and worker are this process; device 1 is asked for the kernel once. */
static int load_driver(void **state)
{
    gpu *g;
    const logger quiet = {0};
    fanin_error error = FANIN_ERROR_INIT;
    if (gpu_load(&quiet, &g, &error) != FANIN_OK)
        return -1;
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
    fanin_status status = gpu_prepare(g, 1, GPU_DIGEST, NULL);
    fake_cuda_fail("cuModuleLoadData", CUDA_SUCCESS, 0, 0);
    return status != FANIN_OK ? 0 : -1;
}

TESTS_BETWEEN(load_driver, NULL)
