/* SPDX-License-Identifier: Apache-2.0 */
/** @file The LoRA layers that a publication's tensors form, and what their shapes prove. Pure. */
#ifndef PEFT_MODULES_H
#define PEFT_MODULES_H

#include "peft/peft_names.h"

/** One LoRA layer: its lora_A and lora_B (or lora_embedding_A and _B), proven a pair. */
typedef struct peft_module {
    const char *path; /**< of the module that is a target; not NUL-terminated */
    uint32_t size;    /**< bytes of path */
    uint32_t
        /** how many ".base_layer" followed it: PEFT nests a wrapper for each
            parameter of one module; 0 is the outermost */
        depth;
    uint32_t key;  /**< of its first matrix, for messages */
    uint64_t rank; /**< rows of A = columns of B; with fused experts r times experts */
    uint64_t in, out;
    bool fused;     /**< wraps a parameter that holds all experts */
    bool embedding; /**< has lora_embedding_A and _B */
    bool tied;      /**< has the matrices of an embedding, see ensure_weight_tying */
    bool magnitude, bias, diagonal;
} peft_module;

typedef struct peft_modules {
    peft_module *items; /**< in the order of names */
    uint32_t count, n_fused;
    const peft_tensor *
        *saved; /**< one tensor of each module that came as modules_to_save */
    uint32_t n_saved;
    const peft_tensor *malformed; /**< a PEFT_MALFORMED tensor, NULL: none */
} peft_modules;

void peft_modules_free(peft_modules *modules);

/**
 * The end of a path that PEFT's target_modules need to find the module: its last component,
 * and as many before it as it takes not to begin with a number.
 */
const char *peft_suffix(const char *path, size_t size, size_t *size_out);

/** The order of two texts as bytes, as of strcmp(). */
int peft_compare(const char *a, size_t a_size, const char *b, size_t b_size);
/** Whether @p path is @p end or ends with it behind a dot. */
bool peft_ends_with(const char *path, size_t size, const char *end, size_t end_size);

#define PEFT_WRAPPERS_MAX 8 /**< parameters of one module */

/** The last component of a target parameter of this module, NULL: it is none's. */
const char *peft_parameter_of(const char *target, const peft_module *module);

#endif
