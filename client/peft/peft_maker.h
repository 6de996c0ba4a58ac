/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the parts of peft_config.h's implementation share. */
#ifndef PEFT_MAKER_H
#define PEFT_MAKER_H

#include "peft/peft_modules.h"
#include "peft/peft_pattern.h"

#include <jansson.h>

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
    pattern
        *target; /**< of target_modules, where that is a string; NULL: not yet made */
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

#endif
