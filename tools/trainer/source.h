/* SPDX-License-Identifier: Apache-2.0 */
/** @file What stand-in ranks serve: a model's adapter made of the pattern, or a directory. */
#ifndef SOURCE_H
#define SOURCE_H

#include "trainer/models.h"
#include "fetch/options.h"

#include <fanin/safetensors.h>

enum { SOURCE_OPTIONS = 7 };

typedef struct source_options {
    char *adapter; /**< a directory */
    char *model, *shape, *dtype;
    int r, fused;
    bool masters; /**< not an option: F32 unless --dtype says otherwise, for casts */
} source_options;

typedef struct source {
    tensor_list tensors;
    fanin_pair pairs[8];
    size_t n_pairs;
    /* storage of the above */
    char *config, number_r[16], number_alpha[16];
    fanin_safetensors *file;
    void *map;
    size_t map_size;
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
