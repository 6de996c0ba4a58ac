/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the parts of peft_config.h's implementation share. */
#ifndef PEFT_MAKER_H
#define PEFT_MAKER_H

#include "array.h"
#include "peft/peft_config.h"
#include "peft/peft_pattern.h"
#include <jansson.h>

/* The LoRA layers that a publication's tensors form, and what their shapes prove. Pure. */

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
    const peft_tensor **saved; /**< one tensor of each module that is saved */
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

#define PEFT_GIVE_CONFIG                                                               \
    "give the trainer's own PEFT configuration as the metadata pair peft_config"

/** A configuration in the making. */
typedef struct peft_maker {
    const key_table *keys;
    const peft_names *names;
    const char *publication;
    fanin_error *error;
    peft_modules modules;
    json_t *config;       /**< an object */
    bool given;           /**< it began as the trainer's own */
    uint64_t num_experts; /**< from the metadata, 0: unknown */
    pattern_budget budget;
    work_stop *stop; /**< once it is stopped, nothing found is used */
    pattern *target; /**< of target_modules, a string; NULL: not made */
} peft_maker;

/** FANIN_ERR_MISMATCH about @p key (UINT32_MAX: none). */
fanin_status peft_refuse(const peft_maker *m, uint32_t key, const char *remedy,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

/** The value of a metadata pair, NULL: there is none. */
const char *peft_pair(const peft_maker *m, const char *key);

/** Merges the metadata pairs that bear fields' names into m->config. */
fanin_status peft_fields_merge(peft_maker *m);

/** The field's value, NULL where it is absent or null. */
json_t *peft_field(const peft_maker *m, const char *name);

/** json_object_set_new() for a configuration; false: out of memory (also @p value NULL). */
bool peft_set(json_t *object, const char *name, json_t *value);

/** An object's keys as a sorted list, NULL: out of memory. */
json_t *peft_sorted_keys(json_t *object);

/** FANIN_ERR_MISMATCH about a pattern in @p field that pattern_match() could not do with a path
    (PATTERN_INVALID, PATTERN_LIMIT), or FANIN_ERR_MEMORY. */
fanin_status peft_refuse_pattern(const peft_maker *m, const char *field,
                                 const pattern *p, pattern_result result,
                                 const char *path, size_t size);

/**
 * Groups m->names, which must outlive the result, into m->modules, to be freed with
 * peft_modules_free() also after an error. Linear. FANIN_ERR_MISMATCH (one matrix without the
 * other, or shapes that contradict each other; names the key), FANIN_ERR_MEMORY.
 */
fanin_status peft_modules_find(peft_maker *m);

/** What is done with the wrappers of one module, outermost first. */
typedef fanin_status (*peft_group_fn)(peft_maker *m, peft_module *const *group,
                                      size_t count, void *cookie);
/** Calls @p fn for each module whose parameters are wrapped, by path, until it fails.
    FANIN_ERR_MISMATCH (a wrapper is missing), FANIN_ERR_MEMORY, or what @p fn returned. */
fanin_status peft_each_group(peft_maker *m, peft_group_fn fn, void *cookie);

/** Checks r and rank_pattern against all layers. */
fanin_status peft_ranks_check(peft_maker *m);

/** Finds r, rank_pattern and target_parameters of a configuration that has none. */
fanin_status peft_ranks_derive(peft_maker *m);

/* Which fields of a trainer's configuration may reach a reader of adapter_config.json. Pure. */

/**
 * Removes from a LoRA configuration what is not known to be harmless: fields that name code, files
 * or revisions (auto_mapping, megatron_core, ...) and fields that PEFT does not have, inside its
 * nested configurations too. A null stays: it asks for nothing. @p dropped gets the names, ", "
 * between them, without a NUL. Returns the name of a field that PEFT has, but whose value is of
 * another shape than PEFT's, and which therefore can be neither kept nor left out; NULL: none.
 */
const char *peft_trust_filter(json_t *config, buffer *dropped);

#endif
