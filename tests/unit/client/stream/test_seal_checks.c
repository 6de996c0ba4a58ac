/* SPDX-License-Identifier: Apache-2.0 */
/* Checksums of bodies that threads check. */
#include "thread.h"
#include "stream/stream_link.h"
#include "testing.h"

#define BODIES 200
#define WRONG 77
#define PIECES 3

static uint8_t memory[PIECES * 1000];
/* The second one's ranges land upside down; what it reads along the way is not asked for. */
static strided views[] = {
    {.n_dims = 1, .extent = {3}, .from = {5000}, .to = {-400}, .run = 100},
    {.n_dims = 1, .extent = {3}, .from = {100}, .to = {-400}, .run = 100}};
static plan_reading readings[] = {{.outer = 1, .landing = 2}};
static const plan whole = {.views = views, .n_views = 2, .readings = readings};
static const piece pieces[PIECES] = {{.to = 2000, .length = 1000},
                                     {.to = 807, .length = 10100, .view = 1},
                                     {.to = 1500, .length = 1}};

typedef struct verdicts {
    size_t n, unfit;
    uint64_t bytes;
} verdicts;

static void count(void *owner, uint64_t bytes, bool fits)
{
    verdicts *v = owner;
    v->n++;
    v->unfit += !fits;
    v->bytes += bytes;
}

/* Header and pieces, in their order. */
static void seal(sealed_body *b)
{
    uint8_t all[FRAME_SIZE + 1301];
    size_t n = FRAME_SIZE;
    memcpy(all, b->header, FRAME_SIZE);
    static const struct {
        size_t at, length;
    } runs[] = {{2000, 1000}, {807, 100}, {407, 100}, {7, 100}, {1500, 1}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; n += runs[i++].length)
        memcpy(all + n, b->base + runs[i].at, runs[i].length);
    assert_int_equal(n, sizeof all);
    seal_encode(checksum_of(all, n), b->seal);
}

static sealed_body *take(seal_checks *c, uint8_t number, verdicts *v)
{
    sealed_body *b = seal_checks_take(c);
    if (!b)
        return NULL;
    memset(b->header, number, FRAME_SIZE);
    b->plan = &whole;
    b->pieces = pieces;
    b->n_pieces = PIECES;
    b->base = memory;
    b->bytes = number;
    b->owner = v;
    b->verdict = count;
    seal(b);
    return b;
}

static seal_checks *start(loop *l)
{
    if (usable_cpus() < 2)
        skip();
    for (size_t i = 0; i < sizeof memory; i++)
        memory[i] = (uint8_t)(i * 31 + i / 256);
    assert_works(loop_init(l, ERROR));
    seal_checks *c = seal_checks_create(l);
    assert_non_null(c);
    return c;
}

TEST(each_body_has_its_verdict)
{
    loop l;
    seal_checks *c = start(&l);
    verdicts v = {0};
    uint64_t bytes = 0;
    for (int i = 0; i < BODIES; i++) {
        sealed_body *b;
        while (!(b = take(c, (uint8_t)i, &v))) { /* they do not keep up */
            if (!seal_checks_help(c))
                loop_step(&l, UINT64_MAX);
            loop_step(&l, 0);
        }
        b->seal[i % SEAL_SIZE] ^= i == WRONG;
        bytes += (uint8_t)i;
        seal_checks_submit(c, b);
    }
    while (v.n < BODIES)
        loop_step(&l, UINT64_MAX);
    assert_int_equal(v.n, BODIES);
    assert_int_equal(v.unfit, 1);
    assert_int_equal(v.bytes, bytes);
    seal_checks_destroy(&c);
    assert_null(c);
    loop_finish(&l);
}

TEST(what_is_not_asked_for_any_more_has_none)
{
    loop l;
    seal_checks *c = start(&l);
    verdicts v = {0};
    seal_checks_give_back(take(c, 1, &v));
    seal_checks_submit(c, take(c, 2, &v));
    seal_checks_submit(c, take(c, 3, &v));
    assert_non_null(take(c, 4, &v)); /* it never comes */
    seal_checks_destroy(&c);
    loop_step(&l, 0);
    assert_int_equal(v.n, 0);
    loop_finish(&l);
}

TEST(without_threads_nobody_is_helped)
{
    assert_null(seal_checks_take(NULL));
    assert_false(seal_checks_help(NULL));
}
