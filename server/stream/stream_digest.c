/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_digest.h"

#include "array.h"
#include "convert.h"
#include <stdlib.h>
#include <string.h>

static bool holds_floats(const job *j)
{
    for (uint32_t i = 0; i < j->n_ranges; i++) {
        const job_range *r = &j->ranges[i];
        if (r->length % 4 != 0 || (r->at - j->catalog->boxes[r->box].start) % 4 != 0)
            return false;
    }
    return true;
}

static bool has_digest_room(digester *d, uint32_t n)
{
    if (!d->sum && !(d->sum = box_digest_create()))
        return false;
    return array_reserve(&d->digests, &d->capacity, n, sizeof *d->digests);
}

const char *digester_start(digester *d, const job *j, uint64_t request, uint32_t dtype,
                           fanin_status *code_out)
{
    int convert =
        dtype == 0 ? CONVERT_NONE : convert_between(FANIN_DTYPE_F32, (int32_t)dtype);
    *code_out = FANIN_ERR_ARGUMENT;
    if (convert < 0)
        return "F32 tensors are not converted to that dtype";
    if (convert != CONVERT_NONE && !holds_floats(j))
        return "a range to be converted holds parts of elements";
    *code_out = FANIN_ERR_MEMORY;
    if (!has_digest_room(d, j->n_ranges))
        return "the server is out of memory";
    d->on = true;
    d->request = request;
    d->convert = (uint32_t)convert;
    d->range = 0;
    d->left = j->ranges[0].whole;
    (void)box_digest_take(d->sum); /* of a job that was given up */
    return NULL;
}

void digester_add(digester *d, const job *j, const uint8_t *data, size_t size)
{
    while (size > 0 && d->range < j->n_ranges) {
        size_t step = size < d->left ? size : (size_t)d->left;
        box_digest_add(d->sum, data, step, d->convert);
        data += step;
        size -= step;
        d->left -= step;
        if (d->left > 0)
            continue;
        d->digests[d->range++] = box_digest_take(d->sum);
        d->left = d->range < j->n_ranges ? j->ranges[d->range].whole : 0;
    }
}

void digester_add_pieces(digester *d, const job *j, const digest_list *made)
{
    for (uint64_t at = 0; at < made->n_pieces;) {
        uint64_t length = convert_bytes(d->convert, d->left);
        box_digest_add_pieces(d->sum, made->digests + at, length);
        d->digests[d->range++] = box_digest_take(d->sum);
        d->left = d->range < j->n_ranges ? j->ranges[d->range].whole : 0;
        at += box_digest_pieces(length);
    }
}

size_t digester_memory(const digester *d)
{
    return d->capacity * sizeof *d->digests + (d->sum ? 8192 : 0);
}

void digester_free(digester *d)
{
    box_digest_free(d->sum);
    free(d->digests);
    memset(d, 0, sizeof *d);
}
