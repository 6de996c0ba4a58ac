/* SPDX-License-Identifier: Apache-2.0 */
/** @file What stand-in ranks serve: an adapter or a whole model, made of the pattern or read from a
    directory. */
#ifndef SOURCE_H
#define SOURCE_H

#include "trainer/models.h"
#include "fetch/options.h"
#include "fetch/tensor_directory.h"

enum { SOURCE_OPTIONS = 11 };

typedef struct source_options {
    char *adapter, *directory; /**< directories: of an adapter, of a model */
    char *model, *shape, *dtype;
    int r, fused;
    int full; /**< the whole model; also set by those who see that a run is "full:R" */
    int layers, shrink;
    bool masters; /**< not an option: F32 unless --dtype says otherwise, for casts */
} source_options;

typedef struct source {
    tensor_list tensors;
    fanin_pair pairs[8];
    size_t n_pairs;
    bool full; /**< a whole model, to be published as "full:R" */
    /* storage of the above */
    char *config, number_r[16], number_alpha[16];
    tensor_directory files;
    void **maps; /**< one a file */
    size_t *map_sizes;
} source;

/** Fills @p table, to be included. */
void source_table(source_options *options, struct poptOption table[SOURCE_OPTIONS]);

/**
 * Makes tensors and metadata; @p fallback: the adapter shape if none of the options was
 * given, NULL: that is wrong usage. 0, or an exit status after a message; source_close() in
 * either case.
 */
int source_open(const command *self, const source_options *options,
                const char *fallback, source *out);
void source_close(source *s);

#endif
