/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/list_map.h"
#include "fetch/interrupt.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/shard_map.h"
#include "fetch/terminal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BAR = 24 };

typedef struct share {
    uint64_t boxes, bytes, replica_bytes;
} share;

/* Of tensors whose boxes leave something out, or overlap. */
typedef struct fault {
    uint64_t bytes;
    size_t tensors;
    char *first; /**< name of the first one, NULL: none */
} fault;

typedef struct dealing {
    share *ranks; /**< by number */
    size_t count;
    uint64_t bytes; /**< of the tensors */
    fault gaps, overlaps;
} dealing;

static share *list_map_share_of(dealing *d, uint32_t rank)
{
    if (rank >= d->count) {
        d->ranks =
            output_require(realloc(d->ranks, ((size_t)rank + 1) * sizeof d->ranks[0]));
        memset(&d->ranks[d->count], 0, (rank + 1 - d->count) * sizeof d->ranks[0]);
        d->count = (size_t)rank + 1;
    }
    return &d->ranks[rank];
}

static void list_map_note(fault *f, const char *name, uint64_t bytes)
{
    f->bytes += bytes;
    f->tensors += bytes > 0;
    if (bytes > 0 && f->first == NULL) {
        f->first = output_require(strdup(name));
    }
}

static bool list_map_on_entry(void *cookie, const fanin_entry *e)
{
    dealing *d = cookie;
    const shard_faults faults = shard_faults_of(e);
    for (size_t i = 0; i < e->n_owners; i++) {
        share *s = list_map_share_of(d, e->owners[i].rank);
        s->boxes++;
        s->bytes += e->owners[i].bytes;
        s->replica_bytes += shard_original(e, i) != i ? e->owners[i].bytes : 0;
    }
    d->bytes += e->bytes;
    list_map_note(&d->gaps, e->name, faults.gaps);
    list_map_note(&d->overlaps, e->name, faults.overlaps);
    return !interrupt_requested();
}

static void print_fault(const char *what, const fault *f)
{
    if (f->tensors > 0) {
        terminal_print("%s: %s in %zu tensors, the first %s", what,
                       output_bytes(f->bytes).s, f->tensors, f->first);
    }
}

static void print(const dealing *d, const missing *absent)
{
    uint64_t most = 1;
    for (size_t i = 0; i < d->count; i++) {
        most = d->ranks[i].bytes > most ? d->ranks[i].bytes : most;
    }
    struct libscols_table *table = output_table("RANK> BOXES> BYTES> REPLICAS> SHARE");
    for (size_t i = 0; i < d->count; i++) {
        const share *s = &d->ranks[i];
        char bar[BAR + 1] = "";
        memset(bar, '#', (size_t)((double)s->bytes / (double)most * BAR));
        output_row(table, NULL, output_number(i).s, output_number(s->boxes).s,
                   output_bytes(s->bytes).s, output_bytes(s->replica_bytes).s, bar);
    }
    output_print(table);
    terminal_print("tensors: %s", output_bytes(d->bytes).s);
    print_fault("gaps, which no rank holds", &d->gaps);
    print_fault("overlaps that are no replicas", &d->overlaps);
    missing_print(absent);
}

static void list_map_print_json(const session *s, const dealing *d,
                                const missing *absent)
{
    json_t *ranks = json_array();
    for (size_t i = 0; i < d->count; i++) {
        const share *of = &d->ranks[i];
        json_array_append_new(
            ranks, output_object("rank", output_u64(i), "boxes", output_u64(of->boxes),
                                 "bytes", output_u64(of->bytes), "replica_bytes",
                                 output_u64(of->replica_bytes), NULL));
    }
    output_json(output_object("publication", output_string(s->publication), "bytes",
                              output_u64(d->bytes), "gap_bytes",
                              output_u64(d->gaps.bytes), "overlap_bytes",
                              output_u64(d->overlaps.bytes), "map", ranks, "missing",
                              missing_json(absent), NULL));
}

int list_map(session *s, const common_options *common)
{
    fanin_error error = FANIN_ERROR_INIT;
    dealing d = {.ranks = NULL};
    missing absent;
    int code;
    if (fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             list_map_on_entry, &d, &error) != FANIN_OK) {
        code = session_failure(s, "cannot list keys", &error);
    } else {
        missing_gather(s, &absent);
        if (common->json) {
            list_map_print_json(s, &d, &absent);
        } else {
            print(&d, &absent);
        }
        code = missing_report(&absent);
        missing_free(&absent);
    }
    free(d.ranks);
    free(d.gaps.first);
    free(d.overlaps.first);
    return code;
}
