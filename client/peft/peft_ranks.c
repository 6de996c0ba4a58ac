/* SPDX-License-Identifier: Apache-2.0 */
/* r and rank_pattern of a configuration against the layers. */
#include "error_set.h"
#include "peft/peft_maker.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_R 8 /* PEFT's, where a configuration gives none */

/* What a configuration says about ranks. */
typedef struct rank_rules {
    uint64_t r;
    pattern **patterns; /* in the order in which a reader of the file meets them */
    uint64_t *ranks;
    size_t count;
} rank_rules;

static void rules_free(rank_rules *rules)
{
    for (size_t i = 0; i < rules->count; i++)
        pattern_free(rules->patterns[i]);
    free(rules->patterns);
    free(rules->ranks);
    *rules = (rank_rules){0};
}

static fanin_status rules_read(peft_maker *m, rank_rules *out)
{
    const json_t *r = peft_field(m, "r"), *pattern = peft_field(m, "rank_pattern");
    *out = (rank_rules){.r = DEFAULT_R};
    if (r && json_integer_value(r) <= 0) /* 0 also where it is none */
        return peft_refuse(m, UINT32_MAX, PEFT_GIVE_CONFIG,
                           "peft_config's r is no positive integer");
    if (r)
        out->r = (uint64_t)json_integer_value(r);
    if (pattern && !json_is_object(pattern))
        return peft_refuse(m, UINT32_MAX, PEFT_GIVE_CONFIG,
                           "peft_config's rank_pattern is no object");
    size_t room = json_object_size(pattern) + 1;
    out->patterns = calloc(room, sizeof out->patterns[0]);
    out->ranks = calloc(room, sizeof out->ranks[0]);
    if (!out->patterns || !out->ranks)
        return error_set_memory(m->error);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)pattern, key, value)
    {
        if (json_integer_value(value) <= 0)
            return peft_refuse(m, UINT32_MAX, PEFT_GIVE_CONFIG,
                               "rank_pattern gives '%.100s' no positive integer", key);
        /* In the trainer's order, which the file keeps: the first match wins. */
        out->patterns[out->count] = pattern_compile(key, PATTERN_KEY, &m->budget);
        if (!out->patterns[out->count])
            return error_set_memory(m->error);
        out->ranks[out->count++] = (uint64_t)json_integer_value(value);
    }
    return FANIN_OK;
}

/* The ranks that the rules may mean for one module; more than one only where patterns are
   not understood. */
typedef struct rank_set {
    uint64_t values[64];
    size_t count;
    bool open; /* there are more */
} rank_set;

static void rank_set_add(rank_set *set, uint64_t value)
{
    for (size_t i = 0; i < set->count; i++) {
        if (set->values[i] == value)
            return;
    }
    if (set->count == sizeof set->values / sizeof set->values[0])
        set->open = true;
    else
        set->values[set->count++] = value;
}

static fanin_status rules_apply(peft_maker *m, const rank_rules *rules,
                                const char *path, size_t size, rank_set *out)
{
    for (size_t i = 0; i < rules->count && !work_stopped(m->stop); i++) {
        pattern_result result =
            pattern_match(rules->patterns[i], path, size, &m->budget);
        if (result >= PATTERN_INVALID)
            return peft_refuse_pattern(m, "rank_pattern", rules->patterns[i], result,
                                       path, size);
        if (result == PATTERN_NO)
            continue;
        rank_set_add(out, rules->ranks[i]);
        if (result == PATTERN_YES)
            return FANIN_OK;
    }
    rank_set_add(out, rules->r);
    return FANIN_OK;
}

/* The possible ranks of a module's wrapped parameters; which wrapper belongs to which
   parameter depends on the base model's order of them. */
static fanin_status fused_ranks(peft_maker *m, const rank_rules *rules,
                                const peft_module *module, rank_set *out)
{
    const json_t *targets = peft_field(m, "target_parameters");
    for (size_t i = 0; i < json_array_size(targets) && !work_stopped(m->stop); i++) {
        const char *target = json_string_value(json_array_get(targets, i));
        const char *parameter = target ? peft_parameter_of(target, module) : NULL;
        if (!parameter)
            continue;
        char *path;
        int size =
            asprintf(&path, "%.*s.%s", (int)module->size, module->path, parameter);
        if (size < 0)
            return error_set_memory(m->error);
        fanin_status status = rules_apply(m, rules, path, (size_t)size, out);
        free(path);
        if (status != FANIN_OK)
            return status;
    }
    if (out->count == 0) { /* an older way to reach them: anything may be meant */
        for (size_t i = 0; i < rules->count; i++)
            rank_set_add(out, rules->ranks[i]);
        rank_set_add(out, rules->r);
    }
    return FANIN_OK;
}

static bool divides_into(const rank_set *set, uint64_t rows, uint64_t experts)
{
    for (size_t i = 0; i < set->count; i++) {
        if (experts != 0 ? rows % experts == 0 && rows / experts == set->values[i]
                         : rows % set->values[i] == 0)
            return true;
    }
    return set->open;
}

/* Whether one number of experts explains the rows of all wrappers of one module. */
static bool share_experts(const peft_maker *m, peft_module *const *group,
                          const rank_set *sets, size_t count)
{
    if (m->num_experts != 0 || sets[0].open) {
        for (size_t i = 0; i < count; i++) {
            if (!divides_into(&sets[i], group[i]->rank, m->num_experts))
                return false;
        }
        return true;
    }
    for (size_t c = 0; c < sets[0].count; c++) {
        if (group[0]->rank % sets[0].values[c] != 0)
            continue;
        uint64_t experts = group[0]->rank / sets[0].values[c];
        size_t i = 1;
        while (i < count && divides_into(&sets[i], group[i]->rank, experts))
            i++;
        if (i == count)
            return true;
    }
    return false;
}

static fanin_status check_group(peft_maker *m, peft_module *const *group, size_t count,
                                void *cookie)
{
    const rank_rules *rules = cookie;
    rank_set sets[PEFT_WRAPPERS_MAX] = {0};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < count && status == FANIN_OK; i++)
        status = fused_ranks(m, rules, group[i], &sets[i]);
    if (status != FANIN_OK || share_experts(m, group, sets, count))
        return status;
    return peft_refuse(
        m, group[0]->key,
        "let r and rank_pattern of peft_config be those of the tensors",
        "lora_A of %.*s has %" PRIu64 " rows, which is not its configured rank "
        "(%" PRIu64 ") times the number of experts",
        (int)group[0]->size, group[0]->path, group[0]->rank, sets[0].values[0]);
}

static fanin_status check_plain(peft_maker *m, const rank_rules *rules,
                                const peft_module *module)
{
    rank_set set = {0};
    fanin_status status = rules_apply(m, rules, module->path, module->size, &set);
    if (status != FANIN_OK)
        return status;
    if (divides_into(&set, module->rank, 1))
        return FANIN_OK;
    return peft_refuse(
        m, module->key,
        "let r and rank_pattern of the configuration be those of the tensors",
        "lora_A of %.*s has %" PRIu64 " rows, the configuration gives it rank %" PRIu64,
        (int)module->size, module->path, module->rank, set.values[set.count - 1]);
}

fanin_status peft_ranks_check(peft_maker *m)
{
    rank_rules rules;
    fanin_status status = rules_read(m, &rules);
    for (uint32_t i = 0; i < m->modules.count && status == FANIN_OK; i++) {
        if (!m->modules.items[i].fused && !m->modules.items[i].tied)
            status = check_plain(m, &rules, &m->modules.items[i]);
    }
    if (status == FANIN_OK)
        status = peft_each_group(m, check_group, &rules);
    rules_free(&rules);
    return status;
}
