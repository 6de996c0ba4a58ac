/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/keys.h"

#include <stdio.h>
#include <stdlib.h>

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Ranks in order, each once; NULL if there are none, or no memory. */
static uint32_t *sorted_ranks(const fanin_entry *entry, size_t *count_out)
{
    *count_out = 0;
    uint32_t *ranks = malloc((entry->n_owners + 1) * sizeof(ranks[0]));
    if (ranks == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < entry->n_owners; i++) {
        ranks[i] = entry->owners[i].rank;
    }
    qsort(ranks, entry->n_owners, sizeof(ranks[0]), by_number);
    for (size_t i = 0; i < entry->n_owners; i++) {
        if (*count_out == 0 || ranks[*count_out - 1] != ranks[i]) {
            ranks[(*count_out)++] = ranks[i];
        }
    }
    return ranks;
}

char *keys_ranks(const fanin_entry *entry)
{
    char *text = NULL;
    size_t size = 0;
    size_t count;
    uint32_t *ranks = sorted_ranks(entry, &count);
    FILE *stream = open_memstream(&text, &size);
    for (size_t i = 0; ranks != NULL && stream != NULL && i < count;) {
        size_t last = i;
        while (last + 1 < count && ranks[last + 1] == ranks[last] + 1) {
            last++;
        }
        fprintf(stream, "%s%u", i > 0 ? "," : "", ranks[i]);
        if (last > i) {
            fprintf(stream, "-%u", ranks[last]);
        }
        i = last + 1;
    }
    if (stream == NULL || fclose(stream) != 0) {
        free(text);
        text = NULL;
    }
    free(ranks);
    return text;
}

json_t *keys_rank_list(const fanin_entry *entry)
{
    size_t count;
    uint32_t *ranks = sorted_ranks(entry, &count);
    json_t *list = json_array();
    for (size_t i = 0; ranks != NULL && i < count; i++) {
        json_array_append_new(list, json_integer(ranks[i]));
    }
    free(ranks);
    return list;
}

json_t *keys_dims(const uint64_t *values, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(list, json_integer((json_int_t)values[i]));
    }
    return list;
}
