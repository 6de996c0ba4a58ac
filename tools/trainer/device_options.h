/* SPDX-License-Identifier: Apache-2.0 */
/** @file The options that say in which memory ranks hold shards and how they publish them. */
#ifndef DEVICE_OPTIONS_H
#define DEVICE_OPTIONS_H

#include "fetch/options.h"
#include "trainer/ranks.h"

enum { DEVICE_OPTIONS = 5, DEVICE_LIST = 512 };

typedef struct device_options {
    char *device, *cast;
    int snapshot, no_stream;
    int devices[DEVICE_LIST]; /**< storage of rank_publishing.devices */
} device_options;

/** Fills @p table, to be included. */
void device_table(device_options *options, struct poptOption table[DEVICE_OPTIONS]);

/** Checks and writes to @p out what it is about; needs out->world_size. 0, or an exit status
    after a message. */
int device_resolve(const command *self, device_options *options, rank_options *out);

/** "0,1", "host,0": numbers of devices, or DEVICE_HOST. False: it is no such list. */
bool device_list_parse(const char *text, int out[DEVICE_LIST], size_t *count_out);

/** The device of a rank's memory, or DEVICE_HOST. */
int rank_device(const rank_options *options, uint32_t rank);
/** Whether it is the one that works, with rank_options.load. */
bool rank_works(const rank_options *options, uint32_t rank);

#endif
