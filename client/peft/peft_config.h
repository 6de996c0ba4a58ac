/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * adapter_config.json: the trainer's own, checked against the tensors as far as that can be
 * proven, or derived from the tensors and the publication's metadata. Pure.
 */
#ifndef PEFT_CONFIG_H
#define PEFT_CONFIG_H

#include "peft/peft_names.h"
#include "work_stop.h"

/** adapter_config.json, to be freed with peft_config_free(). */
typedef struct peft_config {
    char *text;
    size_t size;   /**< bytes of text */
    char *dropped; /**< names of the fields that were not trusted; NULL: none */
} peft_config;

/**
 * The text of adapter_config.json for a publication with these tensors and keys->pairs as its
 * metadata.
 *
 * With "peft_config" in the metadata that object is written back, whole if it is @p trusted, else
 * without what may load code (peft_trust.h); or the fields are derived. Other pairs that
 * bear the name of one of PEFT's fields fill what is not there and must not contradict what is.
 * FANIN_ERR_MISMATCH (names key or pair, and the remedy), FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (@p
 * stop, which may be NULL).
 */
fanin_status peft_config_make(const key_table *keys, const peft_names *names,
                              const char *publication, bool trusted, work_stop *stop,
                              peft_config *out, fanin_error *error);
void peft_config_free(peft_config *config);

#endif
