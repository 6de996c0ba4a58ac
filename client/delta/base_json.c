/* SPDX-License-Identifier: Apache-2.0 */
#include "delta/base.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static json_t *copy_json(const base_rank *rank)
{
    char incarnation[33];
    digest_hex(rank->incarnation, incarnation);
    return json_pack("{s:s, s:I, s:I}", "incarnation", incarnation, "catalog_version",
                     (json_int_t)rank->version, "generation",
                     (json_int_t)rank->generation);
}

json_t *base_json(const base_step *step, uint64_t seed)
{
    char plan[33], number[17];
    json_t *ranks = json_array();
    bool good = ranks != NULL;
    for (size_t i = 0; i < step->n && good; i++)
        good = json_array_append_new(ranks, copy_json(&step->ranks[i])) == 0;
    digest_hex(step->of.bytes, plan);
    snprintf(number, sizeof number, "%016" PRIx64, seed);
    json_t *json = good ? json_pack("{s:s, s:s, s:O}", "plan", plan, "seed", number,
                                    "ranks", ranks)
                        : NULL;
    json_decref(ranks);
    return json;
}

static bool read_digits(const json_t *json, uint8_t *out, size_t size)
{
    const char *text = json_string_value(json);
    return text && strlen(text) == 2 * size && hex_read(text, out, size);
}

static bool read_copy(const json_t *json, base_rank *out)
{
    const json_t *version = json_object_get(json, "catalog_version");
    const json_t *generation = json_object_get(json, "generation");
    out->version = (uint64_t)json_integer_value(version);
    out->generation = (uint64_t)json_integer_value(generation);
    return json_is_integer(version) && json_is_integer(generation) &&
           read_digits(json_object_get(json, "incarnation"), out->incarnation,
                       sizeof out->incarnation);
}

base_step *base_of_json(const json_t *json, uint64_t step, uint64_t *seed)
{
    const json_t *ranks = json_object_get(json, "ranks");
    const char *number = json_string_value(json_object_get(json, "seed"));
    size_t n = json_array_size(ranks);
    base_step *out = calloc(1, sizeof *out + n * sizeof out->ranks[0]);
    if (!out)
        return NULL;
    out->step = step;
    out->n = n;
    bool good = number && read_digits(json_object_get(json, "plan"), out->of.bytes,
                                      sizeof out->of.bytes);
    for (size_t i = 0; i < n && good; i++)
        good = read_copy(json_array_get(ranks, i), &out->ranks[i]);
    if (good) {
        *seed = strtoull(number, NULL, 16);
        return out;
    }
    free(out);
    return NULL;
}
