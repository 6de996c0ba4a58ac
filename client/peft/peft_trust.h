/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which fields of a trainer's configuration may reach a reader of adapter_config.json. Pure.
    */
#ifndef PEFT_TRUST_H
#define PEFT_TRUST_H

#include "buffer.h"

#include <jansson.h>

/**
 * Removes from a LoRA configuration what is not known to be harmless: fields that name code, files
 * or revisions (auto_mapping, megatron_core, ...) and fields that PEFT does not have, inside its
 * nested configurations too. A null stays: it asks for nothing. @p dropped gets the names, ", "
 * between them, without a NUL. Returns the name of a field that PEFT has, but whose value is of
 * another shape than PEFT's, and which therefore can be neither kept nor left out; NULL: none.
 */
const char *peft_trust_filter(json_t *config, buffer *dropped);

#endif
