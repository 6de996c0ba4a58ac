/* SPDX-License-Identifier: Apache-2.0 */
/** @file One message of each kind and small tables, always the same: golden bytes, seeds. */
#ifndef SAMPLES_H
#define SAMPLES_H

#include "catalog.h"
#include "messages.h"

#define SAMPLE_REQUEST UINT64_C(0x1122334455667788)
/** Where an epoch stands in the sample server's memory. */
#define SAMPLE_WORD UINT64_C(0x7f0012345678)

typedef struct sample {
    const char *name;
    buffer bytes;
} sample;

typedef struct samples {
    sample *list;
    size_t count;
} samples;

samples samples_of_messages(void); /**< whole frames */
/** Those that are whole, one behind the other, with checksums or without. */
buffer samples_as_stream(bool sealed);
samples samples_of_keys(void); /**< key tables */
/** Box tables, each against the key table samples_of_keys().list[0]. */
samples samples_of_boxes(void);
samples samples_of_regions(void);
void samples_free(samples *s);

#endif
