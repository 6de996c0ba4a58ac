/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What an adapter's file and configuration will be, kept from one pull to the next: tens of
 * thousands of names are not sorted and written anew for each step. One thread.
 */
#ifndef ADAPTER_LAYOUT_H
#define ADAPTER_LAYOUT_H

#include "adapter/tensor_files.h"
#include "peft/peft_config.h"

/** What it follows from. */
typedef struct adapter_layout_key {
    digest keys; /**< key_table's id: names, shapes, metadata */
    fanin_dtype dtype;
    bool trust_config;
} adapter_layout_key;

/** Of one adapter at a time; zeroed: none. */
typedef struct adapter_layout {
    bool there;
    adapter_layout_key key;
    char publication[FANIN_MAX_NAME + 1];
    tensor_files files; /**< with headers */
    peft_config config;
} adapter_layout;

/** Whether @p l (may be NULL) is what @p key and @p publication lead to. */
bool adapter_layout_fits(const adapter_layout *l, const adapter_layout_key *key,
                         const char *publication);
/** Moves what is given, which is empty then, into @p l in place of what was there. A publication
    whose name is too long is none: freed. */
void adapter_layout_put(adapter_layout *l, const adapter_layout_key *key,
                        const char *publication, tensor_files *files,
                        peft_config *config);
/** Moves it out; it is there. */
void adapter_layout_take(adapter_layout *l, tensor_files *files, peft_config *config);
/** Frees *l. NULL is fine. */
void adapter_layout_free(adapter_layout **l);

#endif
