/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/change.h"
#include "fetch/numbers.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

/* A piece of both tensors. */
typedef struct piece {
    uint64_t bits[2][CHANGE_PIECE];
    double values[2][2 * CHANGE_PIECE]; /**< of an element one, or two */
    double steps[2 * CHANGE_PIECE];     /**< from the old ones to the new ones */
    size_t count, parts;
    bool one_dtype;
} piece;

/* Squares that a double cannot hold are made of numbers that are scaled. */
static double norm_of(const double *values, size_t count)
{
    double parts[4] = {0.0}, most = 0.0; /* sums that need not wait for each other */
    for (size_t i = 0; i < count; i++) {
        parts[i % 4] += values[i] * values[i];
    }
    double sum = parts[0] + parts[1] + (parts[2] + parts[3]);
    if (sum > 1e-280 && sum < 1e280) {
        return sqrt(sum);
    }
    for (size_t i = 0; i < count; i++) {
        most = fmax(most, fabs(values[i]));
    }
    sum = 0.0;
    for (size_t i = 0; most > 0.0 && isfinite(most) && i < count; i++) {
        sum += values[i] / most * (values[i] / most);
    }
    return isfinite(most) ? most * sqrt(sum) : most;
}

static bool is_changed(const piece *p, size_t i)
{
    bool changed = false;
    if (p->one_dtype) {
        return p->bits[0][i] != p->bits[1][i];
    }
    for (size_t j = i * p->parts; j < (i + 1) * p->parts; j++) {
        double x = p->values[0][j], y = p->values[1][j];
        changed |= x != y && !(isnan(x) && isnan(y));
    }
    return changed;
}

/* Whether an element is finite; counts what is not. */
static bool count_special(change *c, unsigned side, const double *values, size_t parts)
{
    bool nan = false, infinite = false;
    for (size_t j = 0; j < parts; j++) {
        nan |= isnan(values[j]);
        infinite |= isinf(values[j]);
    }
    c->nans[side] += nan;
    c->infinite[side] += infinite && !nan;
    return !nan && !infinite;
}

/* The step of an element that is finite in both. */
static void step(change *c, piece *p, fanin_dtype dtype, size_t i)
{
    size_t at = i * p->parts;
    double size = 0.0;
    for (size_t j = at; j < at + p->parts; j++) {
        p->steps[j] = p->values[1][j] - p->values[0][j];
        size = p->parts == 1 ? fabs(p->steps[j]) : hypot(size, p->steps[j]);
    }
    if (p->one_dtype &&
        numbers_difference(dtype, p->bits[0][i], p->bits[1][i], &p->steps[at])) {
        size = fabs(p->steps[at]);
    }
    c->largest = size > c->largest ? size : c->largest;
}

/* What is not finite counts, and is no part of norms: becomes 0. Of elements of two numbers, or of
   integers of 64 bits. */
static void compare_slowly(change *c, piece *p, fanin_dtype dtype)
{
    for (size_t i = 0; i < p->count; i++) {
        size_t at = i * p->parts;
        bool finite[2];
        c->changed += is_changed(p, i);
        for (unsigned side = 0; side < 2; side++) {
            finite[side] = count_special(c, side, &p->values[side][at], p->parts);
        }
        if (finite[0] && finite[1]) {
            step(c, p, dtype, i);
        } else {
            memset(&p->steps[at], 0, p->parts * sizeof p->steps[0]);
        }
        c->lost += finite[0] != finite[1];
        for (unsigned side = 0; side < 2; side++) {
            if (!finite[side]) {
                memset(&p->values[side][at], 0, p->parts * sizeof(double));
            }
        }
    }
}

/* The same of other elements: no calls and few branches, as whole models come this way. */
static void compare(change *c, piece *p)
{
    uint64_t changed = 0, lost = 0, nans[2] = {0}, odd[2] = {0};
    double largest = c->largest;
    for (size_t i = 0; i < p->count; i++) {
        double x = p->values[0][i], y = p->values[1][i];
        bool finite_x = fabs(x) <= DBL_MAX, finite_y = fabs(y) <= DBL_MAX;
        bool same = p->one_dtype ? p->bits[0][i] == p->bits[1][i]
                                 : x == y || (x != x && y != y);
        double d = finite_x && finite_y ? y - x : 0.0;
        changed += !same;
        lost += finite_x != finite_y;
        nans[0] += x != x;
        nans[1] += y != y;
        odd[0] += !finite_x;
        odd[1] += !finite_y;
        largest = fabs(d) > largest ? fabs(d) : largest;
        p->steps[i] = d;
        p->values[0][i] = finite_x ? x : 0.0;
        p->values[1][i] = finite_y ? y : 0.0;
    }
    c->changed += changed;
    c->lost += lost;
    c->largest = largest;
    for (unsigned side = 0; side < 2; side++) {
        c->nans[side] += nans[side];
        c->infinite[side] += odd[side] - nans[side];
    }
}

void change_add(change *c, const fanin_dtype dtypes[2], const uint8_t *const bytes[2],
                size_t count)
{
    piece p; /* large: only what is used is written */
    p.count = count;
    p.parts = numbers_parts(dtypes[0]);
    p.one_dtype = dtypes[0] == dtypes[1];
    for (unsigned side = 0; side < 2; side++) {
        numbers_bits(dtypes[side], bytes[side], count, p.bits[side]);
        numbers_values(dtypes[side], p.bits[side], count, p.values[side]);
    }
    if (p.parts > 1 || (p.one_dtype && fanin_dtype_bits(dtypes[0]) == 64)) {
        compare_slowly(c, &p, dtypes[0]);
    } else {
        compare(c, &p);
    }
    size_t numbers = count * p.parts;
    for (unsigned side = 0; side < 2; side++) {
        c->norm[side] = hypot(c->norm[side], norm_of(p.values[side], numbers));
    }
    c->norm_of_change = hypot(c->norm_of_change, norm_of(p.steps, numbers));
    c->elements += count;
}

double change_relative(const change *c)
{
    if (c->changed == 0) {
        return 0.0;
    }
    if (c->lost > 0 || (c->norm[0] == 0.0 && c->norm_of_change > 0.0)) {
        return INFINITY;
    }
    return c->norm[0] > 0.0 ? c->norm_of_change / c->norm[0] : 0.0;
}
