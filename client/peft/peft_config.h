/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * adapter_config.json: the trainer's own, checked against the tensors as far as that can be
 * proven, or derived from the tensors and the publication's metadata. Pure.
 */
#ifndef PEFT_CONFIG_H
#define PEFT_CONFIG_H

#include "catalog.h"
#include "worker_pool.h"

/* Tensor names: from what a trainer's modules call a tensor to what PEFT calls it in a file.
   Pure. */

#define PEFT_PREFIX "base_model.model."
#define PEFT_PREFIX_SIZE (sizeof(PEFT_PREFIX) - 1) /**< bytes, without the NUL */
/** Room for any name on disk and its NUL: prefixes are added, everything else shrinks. */
#define PEFT_NAME_SIZE (FANIN_MAX_NAME + sizeof(PEFT_PREFIX))

/** What a tensor is to PEFT. */
typedef enum peft_part {
    PEFT_OTHER, /**< no part of a LoRA layer */
    PEFT_LORA_A,
    PEFT_LORA_B,
    PEFT_LORA_B_BIAS,
    PEFT_EMBEDDING_A,
    PEFT_EMBEDDING_B,
    PEFT_MAGNITUDE,    /**< DoRA's vector */
    PEFT_DIAGONAL,     /**< KaSA's singular values */
    PEFT_SAVED_MODULE, /**< came as <module>.modules_to_save.<adapter>.<parameter> */
    PEFT_MALFORMED, /**< names a part of a LoRA layer in a form that no reader knows */
} peft_part;

/** A name on disk. */
typedef struct peft_name {
    const char *text;
    uint32_t size; /**< bytes, without the final NUL */
    /** the first so many bytes are PEFT_PREFIX and the module's path;
        0 for PEFT_OTHER and PEFT_MALFORMED */
    uint32_t module;
    peft_part part;
} peft_name;

/**
 * The name on disk of @p name (at most FANIN_MAX_NAME bytes): wrappers' components
 * (`_fsdp_wrapped_module` and the like) and PEFT's adapter name dropped, the prefix added
 * where it is lacking. The result lies in @p buffer.
 */
peft_name peft_name_on_disk(const char *name, char buffer[PEFT_NAME_SIZE]);

typedef struct peft_tensor {
    peft_name name;
    uint32_t key; /**< index in the key table */
} peft_tensor;

typedef struct peft_names {
    peft_tensor *tensors; /**< ascending by name as bytes, no duplicates */
    uint32_t count;
    char *storage;
} peft_names;

/**
 * The names of all keys. @p publication is for messages. Linear where the table's order
 * survives. To be freed with peft_names_free() also after an error.
 * FANIN_ERR_MISMATCH (two keys with one name on disk: names both), FANIN_ERR_MEMORY.
 */
fanin_status peft_names_make(const key_table *keys, const char *publication,
                             peft_names *out, fanin_error *error);
void peft_names_free(peft_names *names);

/** "publication:name" for an error's key; cut if need be. Returns @p out. */
const char *peft_full_key(const char *publication, const char *name, char out[640]);

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
 * without what may load code (peft_fields.c); or the fields are derived. Other pairs that
 * bear the name of one of PEFT's fields fill what is not there and must not contradict what is.
 * FANIN_ERR_MISMATCH (names key or pair, and the remedy), FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (@p
 * stop, which may be NULL).
 */
fanin_status peft_config_make(const key_table *keys, const peft_names *names,
                              const char *publication, bool trusted, work_stop *stop,
                              peft_config *out, fanin_error *error);
void peft_config_free(peft_config *config);

#endif
