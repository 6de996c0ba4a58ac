/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a GPU has and a CPU lacks, for a kernel's source compiled for the CPU: 32 fibers are a warp.
 * Included before the source. Aligned addresses only, which a CPU would forgive and a GPU does not.
 * And memory that ends at pages that nobody may touch. C++, for one source a program.
 */
#ifndef WARP_H
#define WARP_H

#include "testing.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <vector_functions.h>

extern "C" {
#include "random.h"
}

#define WARP 32
#define STACK 65536

struct fiber {
    ucontext_t context;
    bool done;
    unsigned shuffles;
    uint32_t passed
        [2]; /* in an even shuffle and in an odd one: lanes are at most one apart */
};

static fiber lanes[WARP];
static ucontext_t scheduler;
static unsigned current;
static char stacks[WARP][STACK];
static struct {
    unsigned x;
} threadIdx, blockIdx, gridDim;

template <typename T> static void check_aligned(const T *at)
{
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0)
        fail_msg("%zu bytes are moved at %p", sizeof(T), static_cast<const void *>(at));
}

template <typename T> static T __ldcs(const T *at)
{
    check_aligned(at);
    return *at;
}

template <typename T> static void __stcs(T *at, T value)
{
    check_aligned(at);
    *at = value;
}

static uint32_t __shfl_sync(unsigned mask, uint32_t value, unsigned lane)
{
    assert_int_equal(mask, ~0u);
    fiber *own = &lanes[current];
    unsigned turn = own->shuffles++ % 2;
    own->passed[turn] = value;
    swapcontext(&own->context, &scheduler);
    const fiber *other = &lanes[lane % WARP];
    assert_false(other->done && other->shuffles != own->shuffles);
    return other->passed[turn];
}

#undef __launch_bounds__
#define __launch_bounds__(...)

static void (*kernel)(); /* for each lane, with what it was launched with */

static void lane_main()
{
    kernel();
    lanes[current].done = true;
    swapcontext(&lanes[current].context, &scheduler);
}

static void make_lane(fiber *f, char *stack)
{
    f->done = false;
    f->shuffles = 0;
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = STACK;
    makecontext(&f->context, lane_main, 0);
}

static void run_warp(unsigned warp)
{
    unsigned left = WARP;
    for (unsigned i = 0; i < WARP; i++)
        make_lane(&lanes[i], stacks[i]);
    while (left > 0)
        for (current = 0; current < WARP; current++) {
            if (lanes[current].done)
                continue;
            threadIdx.x = warp * WARP + current;
            swapcontext(&scheduler, &lanes[current].context);
            left -= lanes[current].done;
        }
}

static void run_blocks(void (*run)(), unsigned blocks, unsigned warps)
{
    kernel = run;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (unsigned warp = 0; warp < warps; warp++)
            run_warp(warp);
}

#define PAGE 4096u
#define SPACE (1u << 17)

/* ------------------------------------------------------------------------- memory */

static random_source source_of_chance = {11};

static uint64_t below(uint64_t n)
{
    return random_below(&source_of_chance, n);
}

/* SPACE bytes between pages that nobody may touch. */
static char *guarded()
{
    char *all = static_cast<char *>(
        mmap(nullptr, SPACE + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    assert_true(all != MAP_FAILED);
    assert_int_equal(mprotect(all + PAGE, SPACE, PROT_READ | PROT_WRITE), 0);
    return all + PAGE;
}

/* The same, filled with bytes by chance. */
static char *guarded_chance()
{
    char *all = guarded();
    for (uint32_t i = 0; i < SPACE; i++)
        all[i] = static_cast<char>(random_next(&source_of_chance));
    return all;
}

#endif
