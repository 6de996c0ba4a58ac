/* SPDX-License-Identifier: Apache-2.0 */
/* r and rank_pattern of a configuration against the layers. */
#include "error_set.h"

#include "peft/peft_maker.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* --------------------------------------------------------------- deriving */

/* r, rank_pattern and target_parameters where the trainer gave no configuration. */

/* What one rank belongs to: a module, or a parameter of one. */
typedef struct unit {
    const char *path;
    size_t size;
    const char *suffix; /* end of path */
    uint64_t rank;
    uint32_t key;
    char *owned; /* path, where it is no module's */
} unit;

typedef struct unit_list {
    unit *items;
    size_t count;
} unit_list;

static void add_rank_unit(unit_list *units, const peft_module *module, char *owned,
                          uint64_t rank)
{
    unit *u = &units->items[units->count++];
    *u = (unit){.path = owned ? owned : module->path,
                .size = owned ? strlen(owned) : module->size,
                .rank = rank,
                .key = module->key,
                .owned = owned};
    size_t size;
    u->suffix = peft_suffix(u->path, u->size, &size);
}

/* Two wrappers shaped as the two projections into and out of the experts. */
static bool is_gate_up_and_down(peft_module *const *group, size_t count)
{
    return count == 2 && group[1]->in == group[0]->out && group[1]->out % 2 == 0 &&
           group[1]->out / 2 == group[0]->in;
}

/*
 * The parameters that the wrappers of a module belong to, outermost first. PEFT wraps in the
 * base model's order, of which the tensors tell something only for the usual pair.
 */
static bool name_parameters(const peft_maker *m, peft_module *const *group,
                            size_t count, const char *names[PEFT_WRAPPERS_MAX])
{
    const json_t *targets = peft_field(m, "target_parameters");
    size_t found = 0;
    for (size_t i = 0; i < json_array_size(targets) && !work_stopped(m->stop); i++) {
        const char *name =
            peft_parameter_of(json_string_value(json_array_get(targets, i)), group[0]);
        if (name && found == count)
            return false;
        if (name)
            names[found++] = name;
    }
    if (targets && found != count)
        return false;
    bool same = true;
    for (size_t i = 1; i < count; i++)
        same = same && group[i]->rank == group[0]->rank;
    if (targets && same)
        return true;
    if (!is_gate_up_and_down(group, count))
        return false;
    static const char down[] = "down_proj", gate_up[] = "gate_up_proj";
    if (targets && ((strcmp(names[0], down) != 0 && strcmp(names[1], down) != 0) ||
                    (strcmp(names[0], gate_up) != 0 && strcmp(names[1], gate_up) != 0)))
        return false;
    names[0] = down;
    names[1] = gate_up;
    return true;
}

/* The path of a parameter, and its name as PEFT's target_parameters have it: the module's
   last two components and its own. */
static char *parameter_path(const peft_module *module, const char *name,
                            const char **target)
{
    char *path;
    if (asprintf(&path, "%.*s.%s", (int)module->size, module->path, name) < 0)
        return NULL;
    const char *dot = memrchr(path, '.', module->size);
    if (dot)
        dot = memrchr(path, '.', (size_t)(dot - path));
    *target = dot ? dot + 1 : path;
    return path;
}

static fanin_status refuse_fused(const peft_maker *m, const peft_module *module,
                                 const char *why)
{
    return peft_refuse(m, module->key, PEFT_GIVE_CONFIG,
                       "%.*s holds all experts in one tensor and %s", (int)module->size,
                       module->path, why);
}

/* What is derived. */
typedef struct derivation {
    uint64_t r;      /* what the metadata say, 0: nothing */
    json_t *targets; /* an object whose keys are the target parameters found */
    unit_list units; /* has room for all layers */
} derivation;

static fanin_status derive_group(peft_maker *m, peft_module *const *group, size_t count,
                                 void *cookie)
{
    derivation *d = cookie;
    const char *names[PEFT_WRAPPERS_MAX] = {"", "", "", "", "", "", "", ""};
    if (!name_parameters(m, group, count, names))
        return refuse_fused(m, group[0],
                            "its parameters' names cannot be told from it");
    uint64_t experts = m->num_experts;
    if (experts == 0 && d->r != 0 && group[0]->rank % d->r == 0)
        experts = group[0]->rank / d->r;
    if (experts == 0)
        return refuse_fused(m, group[0],
                            "the metadata tell neither r nor num_experts that fit it");
    for (size_t i = 0; i < count; i++) {
        if (group[i]->rank % experts != 0)
            return refuse_fused(m, group[i],
                                "its rows are no multiple of the number of experts");
        const char *target;
        char *path = parameter_path(group[i], names[i], &target);
        if (!path)
            return error_set_memory(m->error);
        add_rank_unit(&d->units, group[i], path, group[i]->rank / experts);
        if (!peft_set(d->targets, target, json_null()))
            return error_set_memory(m->error);
    }
    return FANIN_OK;
}

static int compare_ranks(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The rank of most units, the largest of those; 0: out of memory. */
static uint64_t most_common_rank(const unit_list *units)
{
    uint64_t *ranks = calloc(units->count + 1, sizeof ranks[0]);
    if (!ranks)
        return 0;
    for (size_t i = 0; i < units->count; i++)
        ranks[i] = units->items[i].rank;
    qsort(ranks, units->count, sizeof ranks[0], compare_ranks);
    uint64_t best = 0;
    size_t most = 0;
    for (size_t i = 0, run = 0; i < units->count; i++) {
        run = i > 0 && ranks[i] == ranks[i - 1] ? run + 1 : 1;
        if (run >= most) {
            most = run;
            best = ranks[i];
        }
    }
    free(ranks);
    return best;
}

static size_t suffix_size(const unit *u)
{
    return (size_t)(u->path + u->size - u->suffix);
}

static int compare_suffixes(const void *a, const void *b)
{
    const unit *x = a, *y = b;
    return peft_compare(x->suffix, suffix_size(x), y->suffix, suffix_size(y));
}

/* Of one name by path, so that the result does not depend on how qsort() treats equals. */
static int compare_units(const void *a, const void *b)
{
    const unit *x = a, *y = b;
    int order = compare_suffixes(a, b);
    return order != 0 ? order : peft_compare(x->path, x->size, y->path, y->size);
}

static bool add_pattern(json_t *patterns, const char *anchor, const char *text,
                        size_t size, uint64_t rank)
{
    buffer key = {0};
    buffer_append(&key, anchor, strlen(anchor));
    pattern_escape(&key, text, size);
    buffer_append(&key, "", 1);
    bool good = !key.failed && peft_set(patterns, (const char *)key.data,
                                        json_integer((json_int_t)rank));
    buffer_free(&key);
    return good;
}

/* One pattern for all units of one name where they share a rank, else one for each; these
   are anchored, so that none matches another module whose path ends alike. */
static bool fill_patterns(json_t *patterns, unit_list *units, uint64_t r)
{
    qsort(units->items, units->count, sizeof units->items[0], compare_units);
    for (size_t i = 0, end; i < units->count; i = end) {
        const unit *first = &units->items[i];
        bool same = true;
        for (end = i + 1;
             end < units->count && compare_suffixes(first, &units->items[end]) == 0;
             end++)
            same = same && units->items[end].rank == first->rank;
        if (same) {
            if (first->rank != r && !add_pattern(patterns, "", first->suffix,
                                                 suffix_size(first), first->rank))
                return false;
            continue;
        }
        for (size_t k = i; k < end; k++) {
            const unit *u = &units->items[k];
            if (u->rank != r && !add_pattern(patterns, "^", u->path, u->size, u->rank))
                return false;
        }
    }
    return true;
}

static fanin_status set_ranks(peft_maker *m, derivation *d)
{
    unit_list *units = &d->units;
    uint64_t r = d->r;
    bool has_r = false;
    for (size_t i = 0; i < units->count; i++)
        has_r = has_r || units->items[i].rank == r;
    if (r != 0 && !has_r && !peft_field(m, "rank_pattern"))
        return peft_refuse(
            m, units->items[0].key, "correct the metadata pair r, or leave it out",
            "the metadata say that r is %" PRIu64 "; lora_A of %.*s has rank %" PRIu64
            " and no layer has that",
            r, (int)units->items[0].size, units->items[0].path, units->items[0].rank);
    if (r == 0)
        r = most_common_rank(units);
    if (r == 0 || !peft_set(m->config, "r", json_integer((json_int_t)r)))
        return error_set_memory(m->error);
    if (peft_field(m, "rank_pattern"))
        return peft_ranks_check(m);
    json_t *patterns = json_object();
    bool good = patterns && fill_patterns(patterns, units, r) &&
                json_object_set(m->config, "rank_pattern", patterns) == 0;
    json_decref(patterns);
    return good ? FANIN_OK : error_set_memory(m->error);
}

static bool set_target_parameters(peft_maker *m, json_t *found)
{
    return json_object_size(found) == 0 || peft_field(m, "target_parameters") ||
           peft_set(m->config, "target_parameters", peft_sorted_keys(found));
}

static fanin_status derive_units(peft_maker *m, derivation *d)
{
    for (uint32_t i = 0; i < m->modules.count; i++) {
        const peft_module *module = &m->modules.items[i];
        if (!module->fused)
            add_rank_unit(&d->units, module, NULL, module->rank);
    }
    fanin_status status = peft_each_group(m, derive_group, d);
    if (status != FANIN_OK)
        return status;
    if (!set_target_parameters(m, d->targets))
        return error_set_memory(m->error);
    return set_ranks(m, d);
}

fanin_status peft_ranks_derive(peft_maker *m)
{
    uint64_t r = (uint64_t)json_integer_value(peft_field(m, "r"));
    if (m->modules.count == 0) {
        if (r != 0 && peft_field(m, "target_modules"))
            return FANIN_OK;
        return peft_refuse(
            m, UINT32_MAX, PEFT_GIVE_CONFIG,
            "no tensor of %s is part of a LoRA layer, so that no adapter "
            "configuration can be derived",
            m->publication);
    }
    derivation d = {.r = r,
                    .targets = json_object(),
                    .units.items = calloc(m->modules.count, sizeof(unit))};
    fanin_status status =
        d.units.items && d.targets ? derive_units(m, &d) : error_set_memory(m->error);
    json_decref(d.targets);
    for (size_t i = 0; i < d.units.count; i++)
        free(d.units.items[i].owned);
    free(d.units.items);
    return status;
}
