/* SPDX-License-Identifier: Apache-2.0 */
/* What a client digests of its destination: equal whoever makes it, wherever it lies. Device 0 has
   the digest kernel, device 1 cannot load it. The driver is a stand-in. */
#include "pull/held_digest.h"

#include "fake_cuda.h"
#include "random.h"
#include "testing.h"
#include <cuda.h>

#define SIZE ((size_t)1 << 21)
#define PARTS 400
#define SOON deadline_in_ms(20000)

typedef struct scene {
    uint8_t *memory, *bytes; /* as the library and as the CPU sees it */
    strided views[PARTS];
    held_part parts[PARTS];
    uint64_t n;
} scene;

static gpu *g;
static fanin_error failure = FANIN_ERROR_INIT;

static held_part part_of(void *cookie, uint64_t index)
{
    const scene *s = cookie;
    return s->parts[index];
}

/* A view of runs of which some may go backwards, or a run of one, or bytes. */
static held_part random_part(scene *s, random_source *r, uint64_t index)
{
    held_part p = {.runs = 1,
                   .length = 1 + random_below(r, random_below(r, 8) ? 5000 : 70000)};
    strided *v = &s->views[index];
    p.at = s->memory + random_below(r, SIZE - p.length + 1);
    if (index % 3 == 0)
        return p;
    *v = (strided){.n_dims = (uint32_t)random_below(r, 4),
                   .run = 2 * (1 + random_below(r, random_below(r, 3) ? 40 : 3000)),
                   .convert = index % 5 == 0 ? CONVERT_F32_BF16 : CONVERT_NONE};
    int64_t pitch = (int64_t)v->run + (int64_t)random_below(r, 3) * 8;
    int64_t low = 0;
    for (uint32_t i = v->n_dims; i-- > 0;) {
        v->extent[i] = 1 + random_below(r, 6);
        v->to[i] = random_below(r, 4) ? pitch : -pitch;
        v->from[i] = 1; /* nobody reads the source */
        low += v->to[i] < 0 ? v->to[i] * (int64_t)(v->extent[i] - 1) : 0;
        pitch = pitch * (int64_t)v->extent[i] + 16;
    }
    p.view = v;
    p.at = s->memory + SIZE / 2 - low;
    p.runs = strided_runs(v);
    if (index % 4 == 0) { /* one run of it */
        p.first = random_below(r, p.runs);
        p.runs = 1;
    }
    return p;
}

static scene *make_scene(int device)
{
    random_source r = {7};
    scene *s = calloc(1, sizeof *s);
    s->memory =
        device < 0 ? malloc(SIZE) : fake_cuda_alloc(device, SIZE, FAKE_CUDA_MALLOC);
    s->bytes = device < 0 ? s->memory : fake_cuda_alias(s->memory);
    for (size_t i = 0; i < SIZE; i++)
        s->bytes[i] = (uint8_t)random_next(&r);
    for (s->n = 0; s->n < PARTS; s->n++)
        s->parts[s->n] = random_part(s, &r, s->n);
    return s;
}

static void free_scene(scene *s, int device)
{
    if (device < 0)
        free(s->memory);
    else
        fake_cuda_free(s->memory);
    free(s);
}

/* Parts of a few bytes each, of one who asks. */
typedef struct many {
    const scene *s;
    uint64_t stride;
} many;

static held_part part_of_many(void *cookie, uint64_t index)
{
    const many *m = cookie;
    return (held_part){
        .at = m->s->memory + index * m->stride, .runs = 1, .length = 1 + index % 9};
}

/* By the CPU, run by run. */
static digest wanted(const scene *s, const held_part *p)
{
    box_digest *sum = box_digest_create();
    const uint8_t *at = s->bytes + (p->at - s->memory);
    if (!p->view)
        box_digest_add(sum, at, p->length, CONVERT_NONE);
    for (uint64_t i = p->first; p->view && i < p->first + p->runs; i++) {
        int64_t to;
        strided_run(p->view, i, NULL, &to);
        box_digest_add(sum, at + to, convert_bytes(p->view->convert, p->view->run),
                       CONVERT_NONE);
    }
    digest d = box_digest_take(sum);
    box_digest_free(sum);
    return d;
}

/* All parts; how many kernels digested. */
static uint64_t check(scene *s, const memory_range *ranges, size_t n_ranges)
{
    static digest got[PARTS];
    fake_cuda_counts before, after;
    held *h = held_create(g, ranges, n_ranges);
    fake_cuda_count(&before);
    for (uint64_t at = 0, n = 0; at < s->n; at += n) {
        assert_ok(held_digest(h, part_of, s, at, s->n, SOON, got + at, &n, &failure),
                  failure);
        assert_true(n > 0 && n <= s->n - at);
    }
    fake_cuda_count(&after);
    assert_true(held_free(h, SOON));
    for (uint64_t i = 0; i < s->n; i++) {
        digest want = wanted(s, &s->parts[i]);
        if (!digest_equal(&want, &got[i]))
            fail_msg("part %llu differs", (unsigned long long)i);
    }
    return after.digests - before.digests;
}

/* One kernel takes many parts where a device has it, none elsewhere. */
TEST(places_are_equal)
{
    for (int device = -1; device < 2; device++) {
        scene *s = make_scene(device);
        const memory_range range = {s->memory, SIZE, device};
        uint64_t kernels = check(s, &range, 1);
        if (device == 0)
            assert_in_range(kernels, 1, 2);
        else
            assert_int_equal(kernels, 0);
        free_scene(s, device);
    }
}

/* Parts of two devices and the host in turn. */
TEST(places_may_mix)
{
    scene *s = make_scene(0);
    const memory_range halves[] = {{s->memory, SIZE / 4, 0},
                                   {s->memory + SIZE / 4, SIZE - SIZE / 4, 0}};
    uint64_t kernels = check(s, halves, 2);
    assert_in_range(kernels, 1, 2);
    scene *here = make_scene(-1);
    const memory_range both[] = {{here->memory, SIZE, -1}, {s->memory, SIZE, 0}};
    const memory_range turned[] = {both[1], both[0]};
    for (uint64_t i = 0; i < s->n; i++) {
        if (i % 10 < 5)
            s->parts[i].at = here->memory + (s->parts[i].at - s->memory);
    }
    /* What the CPU compares with are the same bytes. */
    held *h = held_create(g, here->memory < s->memory ? both : turned, 2);
    for (uint64_t at = 0, n = 0; at < s->n; at += n) {
        digest got[PARTS];
        assert_ok(held_digest(h, part_of, s, at, s->n, SOON, got, &n, &failure),
                  failure);
        assert_in_range(n, 1, 5);
        for (uint64_t i = 0; i < n; i++) {
            digest want = wanted(here, &here->parts[at + i]);
            assert_true(digest_equal(&want, &got[i]));
        }
    }
    assert_true(held_free(h, SOON));
    free_scene(here, -1);
    free_scene(s, 0);
}

/* Kernels for what comes next begin ahead, and none twice: of two who ask in turns, in parts of one
   list each. */
TEST(lists_are_begun_ahead)
{
    enum { MANY = 40000 };
    scene *s = make_scene(0);
    const memory_range range = {s->memory, SIZE, 0};
    digest *got[2] = {calloc(MANY, sizeof **got), calloc(MANY, sizeof **got)};
    many asked[2] = {{s, 1}, {s, 2}};
    uint64_t at[2] = {0}, n, lists = 0;
    held *h = held_create(g, &range, 1);
    uint64_t before = fake_cuda_calls("cuLaunchKernel");
    for (int who = 0; at[0] < MANY || at[1] < MANY; who = !who) {
        if (at[who] == MANY)
            continue;
        assert_ok(held_digest(h, part_of_many, &asked[who], at[who], MANY, SOON,
                              got[who] + at[who], &n, &failure),
                  failure);
        at[who] += n;
        lists++;
        if (lists == 1)
            assert_int_equal(fake_cuda_calls("cuLaunchKernel") - before, 2);
    }
    assert_in_range(lists, 4, 20);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel") - before, lists);
    assert_true(held_free(h, SOON));
    for (uint64_t i = 0; i < 2 * MANY; i++) {
        const held_part p = part_of_many(&asked[i % 2], i / 2);
        digest want = wanted(s, &p);
        assert_true(digest_equal(&want, &got[i % 2][i / 2]));
    }
    free(got[0]);
    free(got[1]);
    free_scene(s, 0);
}

/* Runs of two bytes that nothing joins: more than one kernel is told. */
TEST(too_many_runs_are_left_to_the_cpu)
{
    scene *s = make_scene(0);
    s->views[0] = (strided){
        .n_dims = 2, .extent = {40000, 1}, .from = {1, 1}, .to = {6, 2}, .run = 2};
    s->parts[0] = (held_part){.at = s->memory, .view = &s->views[0], .runs = 40000};
    s->n = 2;
    const memory_range range = {s->memory, SIZE, 0};
    assert_int_equal(check(s, &range, 1), 1);
    free_scene(s, 0);
}

TEST(broken_devices_are_said)
{
    scene *s = make_scene(0);
    const memory_range range = {s->memory, SIZE, 0};
    held *h = held_create(g, &range, 1);
    static digest got[PARTS];
    uint64_t n;
    fake_cuda_hold(0);
    assert_int_equal(
        held_digest(h, part_of, s, 0, s->n, deadline_in_ms(1), got, &n, &failure),
        FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(failure.message, "device 0"));
    /* What it may still read is not freed. */
    assert_false(held_free(h, deadline_in_ms(1)));
    fake_cuda_break(0);
    assert_int_equal(held_digest(h, part_of, s, 0, s->n, SOON, got, &n, &failure),
                     FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(failure.message, "device 0"));
    fake_cuda_release(0);
    fake_cuda_repair(0);
    assert_true(held_free(h, SOON));
    free_scene(s, 0);
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_int_equal(counts.pinned, 0);
    assert_int_equal(counts.streams, 0);
}

static int set_up(void **state)
{
    const logger quiet = {0};
    fanin_error error = FANIN_ERROR_INIT;
    if (gpu_load(&quiet, &g, &error) != FANIN_OK)
        return -1;
    /* Device 1 is asked once. */
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, 0, 1);
    fanin_status status = gpu_prepare(g, 1, GPU_DIGEST, &error);
    fake_cuda_fail("cuModuleLoadData", CUDA_SUCCESS, 0, 0);
    bool said = strstr(error.message, "digest kernel on device 1") != NULL;
    return status != FANIN_OK && said && gpu_prepare(g, 1, GPU_DIGEST, NULL) != FANIN_OK
               ? 0
               : -1;
}

TESTS_BETWEEN(set_up, NULL)
