/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_config.h"
#include "error_set.h"
#include "peft/peft_maker.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

static fanin_status read_given(peft_maker *m, const char *text)
{
    json_error_t detail;
    m->config = json_loads(text, JSON_REJECT_DUPLICATES, &detail);
    m->given = true;
    if (!m->config && json_error_code(&detail) == json_error_out_of_memory)
        return error_set_memory(m->error);
    if (!json_is_object(m->config))
        return peft_refuse(m, UINT32_MAX,
                           "give the text of PEFT's adapter_config.json as peft_config",
                           "the metadata pair peft_config is no JSON object: %.120s at "
                           "line %d",
                           m->config ? "another value" : detail.text, detail.line);
    if (!json_is_string(peft_field(m, "peft_type")) && !peft_pair(m, "peft_type"))
        return peft_refuse(m, UINT32_MAX,
                           "give the text of PEFT's adapter_config.json as peft_config",
                           "the metadata pair peft_config has no peft_type");
    return FANIN_OK;
}

/* Whether a list of module names covers a path, as PEFT's target_modules do. */
static bool is_listed_module(const peft_maker *m, const json_t *targets,
                             const char *path, size_t size)
{
    for (size_t i = 0; i < json_array_size(targets) && !work_stopped(m->stop); i++) {
        const char *target = json_string_value(json_array_get(targets, i));
        if (target && peft_ends_with(path, size, target, strlen(target)))
            return true;
    }
    return false;
}

/* Whether target_modules cover a path. */
static fanin_status is_target(peft_maker *m, const json_t *targets, const char *path,
                              size_t size, pattern_result *out)
{
    const char *text = json_string_value(targets);
    if (json_is_array(targets)) {
        *out = is_listed_module(m, targets, path, size) ? PATTERN_YES : PATTERN_NO;
        return FANIN_OK;
    }
    *out = PATTERN_UNKNOWN; /* PEFT has defaults for known models */
    if (!text || strcasecmp(text, "all-linear") == 0 || strcasecmp(text, "all") == 0)
        return FANIN_OK;
    if (!m->target && !(m->target = pattern_compile(text, PATTERN_WHOLE, &m->budget)))
        return error_set_memory(m->error);
    *out = pattern_match(m->target, path, size, &m->budget);
    return *out < PATTERN_INVALID
               ? FANIN_OK
               : peft_refuse_pattern(m, "target_modules", m->target, *out, path, size);
}

/* @p dotless: whether names without a module's, which may be any module's, count. */
static bool has_parameter(const peft_maker *m, const json_t *parameters,
                          const peft_module *module, bool dotless)
{
    for (size_t i = 0; i < json_array_size(parameters) && !work_stopped(m->stop); i++) {
        const char *text = json_string_value(json_array_get(parameters, i));
        if (text && (dotless || strchr(text, '.')) && peft_parameter_of(text, module))
            return true;
    }
    return false;
}

/* Whether the layer is an embedding's, transposed: with ensure_weight_tying PEFT gives the modules
   that are tied to the embedding its matrices, and takes them from target_modules. */
static bool is_tied(const peft_maker *m, const peft_module *module)
{
    if (!json_is_true(peft_field(m, "ensure_weight_tying")))
        return false;
    for (uint32_t i = 0; i < m->modules.count && !work_stopped(m->stop); i++) {
        const peft_module *other = &m->modules.items[i];
        if (other->embedding && other->rank == module->rank &&
            other->in == module->out && other->out == module->in)
            return true;
    }
    return false;
}

/* Every layer must be one that a reader of the configuration makes. */
static fanin_status check_target_modules(peft_maker *m)
{
    const json_t *targets = peft_field(m, "target_modules");
    const json_t *parameters = peft_field(m, "target_parameters");
    for (uint32_t i = 0; i < m->modules.count; i++) {
        peft_module *module = &m->modules.items[i];
        pattern_result named = PATTERN_NO;
        fanin_status status =
            module->fused ? FANIN_OK
                          : is_target(m, targets, module->path, module->size, &named);
        if (status != FANIN_OK)
            return status;
        if (named == PATTERN_YES)
            continue;
        if (has_parameter(m, parameters, module, true)) {
            m->modules.n_fused += !module->fused;
            module->fused = true;
            continue;
        }
        module->tied = is_tied(m, module);
        /* Older configurations reach experts by target_modules. */
        if (module->tied || named == PATTERN_UNKNOWN || (module->fused && !parameters))
            continue;
        return peft_refuse(m, module->key,
                           "add the module to target_modules, or do not publish it",
                           "%.*s has a LoRA layer, but target_modules and "
                           "target_parameters do not name it",
                           (int)module->size, module->path);
    }
    return FANIN_OK;
}

/* use_dora, lora_bias, kasa_config: what is there must be read, what is read must be there.
   @p value makes what stands for "set". @p with: a key of a layer that has the part, @p without:
   of any; UINT32_MAX: there is none. */
static fanin_status check_extra(peft_maker *m, const char *field, const char *part,
                                json_t *(*value)(void), uint32_t with, uint32_t without)
{
    const json_t *set = peft_field(m, field);
    bool wanted = json_is_true(set) || json_is_object(set);
    if (with != UINT32_MAX && !set && !m->given)
        return peft_set(m->config, field, value()) ? FANIN_OK
                                                   : error_set_memory(m->error);
    if (with != UINT32_MAX && !wanted)
        return peft_refuse(m, with, "set the field, or do not publish these tensors",
                           "a %s is published, but %s is not set", part, field);
    if (wanted && with == UINT32_MAX && without != UINT32_MAX)
        return peft_refuse(m, without, "publish them too, or do not set the field",
                           "%s is set, but no %s is published", field, part);
    return FANIN_OK;
}

static fanin_status check_extras(peft_maker *m)
{
    uint32_t magnitude = UINT32_MAX, bias = UINT32_MAX, diagonal = UINT32_MAX,
             any = UINT32_MAX;
    for (uint32_t i = m->modules.count; i-- > 0;) {
        const peft_module *module = &m->modules.items[i];
        any = module->key;
        magnitude = module->magnitude ? any : magnitude;
        bias = module->bias ? any : bias;
        diagonal = module->diagonal ? any : diagonal;
    }
    fanin_status status =
        check_extra(m, "use_dora", "lora_magnitude_vector", json_true, magnitude, any);
    if (status == FANIN_OK)
        status = check_extra(m, "lora_bias", "bias of lora_B", json_true, bias, any);
    if (status == FANIN_OK)
        status = check_extra(m, "kasa_config", "lora_diag", json_object, diagonal, any);
    return status;
}

/* Whether some tensor lies in a module of that name. */
static bool has_module(const peft_maker *m, const char *module)
{
    size_t size = strlen(module);
    for (uint32_t i = 0; i < m->names->count && !work_stopped(m->stop); i++) {
        const peft_name *name = &m->names->tensors[i].name;
        for (const char *at = name->text; (at = strstr(at, module)) != NULL; at++) {
            if ((at == name->text || at[-1] == '.') && at[size] == '.')
                return true;
        }
    }
    return false;
}

/* Modules that came as modules_to_save: listed in a given configuration, or added. */
static fanin_status check_saved(peft_maker *m)
{
    json_t *list = peft_field(m, "modules_to_save");
    for (uint32_t i = 0; i < m->modules.n_saved; i++) {
        const peft_tensor *saved = m->modules.saved[i];
        const char *path = saved->name.text + PEFT_PREFIX_SIZE;
        size_t size = saved->name.module - PEFT_PREFIX_SIZE;
        if (is_listed_module(m, list, path, size))
            continue;
        if (m->given || (list && peft_pair(m, "modules_to_save")))
            return peft_refuse(
                m, saved->key,
                "add the module to modules_to_save, or do not publish it",
                "%.*s is published as a saved module, but modules_to_save "
                "does not name it",
                (int)size, path);
        if (!list) {
            list = json_array();
            if (!peft_set(m->config, "modules_to_save", list))
                return error_set_memory(m->error);
        }
        size_t suffix_size;
        const char *suffix = peft_suffix(path, size, &suffix_size);
        if (json_array_append_new(list, json_stringn(suffix, suffix_size)) != 0)
            return error_set_memory(m->error);
    }
    bool any = !list || json_array_size(list) == 0;
    for (size_t i = 0; i < json_array_size(list) && !any; i++) {
        const char *module = json_string_value(json_array_get(list, i));
        any = module && *module && has_module(m, module);
    }
    return any ? FANIN_OK
               : peft_refuse(
                     m, UINT32_MAX,
                     "publish the saved modules' tensors, or empty modules_to_save",
                     "modules_to_save names modules of which no tensor is "
                     "published");
}

/* What ends the paths of all layers but those of target parameters. NULL: out of memory. */
static json_t *collect_suffixes(const peft_maker *m)
{
    json_t *names = json_object();
    bool good = names != NULL;
    for (uint32_t i = 0; i < m->modules.count && good; i++) {
        const peft_module *module = &m->modules.items[i];
        if (module->fused)
            continue;
        char text[PEFT_NAME_SIZE];
        size_t size;
        const char *suffix = peft_suffix(module->path, module->size, &size);
        memcpy(text, suffix, size);
        text[size] = '\0';
        good = json_object_get(names, text) || peft_set(names, text, json_null());
    }
    json_t *list = good ? peft_sorted_keys(names) : NULL;
    json_decref(names);
    return list;
}

static fanin_status derive_targets(peft_maker *m)
{
    const json_t *parameters = peft_field(m, "target_parameters");
    for (uint32_t i = 0; i < m->modules.count; i++) {
        const peft_module *module = &m->modules.items[i];
        if (!module->fused && has_parameter(m, parameters, module, false))
            return peft_refuse(
                m, module->key, PEFT_GIVE_CONFIG,
                "%.*s holds a target parameter whose number of experts is "
                "unknown",
                (int)module->size, module->path);
    }
    if (peft_field(m, "target_modules"))
        return check_target_modules(m);
    json_t *list = collect_suffixes(m);
    return list && peft_set(m->config, "target_modules", list)
               ? FANIN_OK
               : error_set_memory(m->error);
}

/* PEFT's defaults for what neither metadata nor tensors say. */
static bool set_defaults(peft_maker *m)
{
    json_t *defaults = json_pack(
        "{s:s, s:s, s:s, s:f, s:b, s:b, s:b, s:b, s:b, s:n, s:n, s:n, s:n, s:n, s:{}, "
        "s:{}}",
        "peft_type", "LORA", "task_type", "CAUSAL_LM", "bias", "none", "lora_dropout",
        0.0, "inference_mode", true, "init_lora_weights", true, "fan_in_fan_out", false,
        "use_rslora", false, "use_dora", false, /* and what is null or empty */
        "auto_mapping", "revision", "layers_pattern", "layers_to_transform",
        "modules_to_save", "rank_pattern", "alpha_pattern");
    bool good = defaults && json_object_update_missing(m->config, defaults) == 0;
    json_decref(defaults);
    return good;
}

static fanin_status derive_config(peft_maker *m)
{
    if (!peft_field(m, "lora_alpha"))
        return peft_refuse(
            m, UINT32_MAX, "add lora_alpha (or the whole peft_config) to the metadata",
            "the metadata of %s have no lora_alpha, and nothing else tells "
            "how the adapter is scaled",
            m->publication);
    if (m->modules.malformed)
        return peft_refuse(
            m, m->modules.malformed->key,
            "publish lora_A and lora_B as <module>.lora_A.weight",
            "the tensor's name is not one that PEFT gives to a part of a "
            "LoRA layer");
    fanin_status status = peft_ranks_derive(m);
    if (status == FANIN_OK)
        status = derive_targets(m);
    if (status != FANIN_OK)
        return status;
    if (m->modules.n_fused > 0 && json_number_value(peft_field(m, "lora_dropout")) > 0)
        return peft_refuse(m, UINT32_MAX, "set lora_dropout to 0",
                           "lora_dropout is set, which PEFT refuses for experts in one "
                           "tensor");
    return FANIN_OK;
}

static fanin_status require_base_model(const peft_maker *m)
{
    const char *base = json_string_value(peft_field(m, "base_model_name_or_path"));
    if (base && *base)
        return FANIN_OK;
    return peft_refuse(m, UINT32_MAX,
                       m->given
                           ? "set base_model_name_or_path in peft_config, or add it "
                             "to the metadata"
                           : "add base_model_name_or_path to the metadata",
                       "the metadata of %s do not name the base model", m->publication);
}

/* Of other methods than LoRA nothing is known: neither which fields load code, nor which tensors
   there must be. */
static fanin_status check_foreign(const peft_maker *m, const char *type, bool trusted)
{
    if (!trusted)
        return peft_refuse(m, UINT32_MAX,
                           "train with LoRA; or, if you trust the trainer and it "
                           "publishes every tensor under the name that PEFT's file "
                           "has, pull with trust_config (--trust-config)",
                           "peft_type is %.40s, of which it is not known which fields "
                           "load code and which tensors there are",
                           type);
    for (uint32_t i = 0; i < m->names->count && !work_stopped(m->stop); i++) {
        const peft_tensor *t = &m->names->tensors[i];
        const char *dot = strrchr(t->name.text, '.');
        if (t->name.part == PEFT_MALFORMED && dot && strncmp(dot, ".lora_", 6) != 0)
            return peft_refuse(m, t->key,
                               "train with LoRA, or publish the names of PEFT's file",
                               "peft_type is %.40s, and '%.200s' is not how its file "
                               "names a tensor",
                               type, t->name.text);
    }
    return FANIN_OK;
}

/* Before anything is made of the fields. */
static fanin_status drop_untrusted(peft_maker *m, char **dropped_out)
{
    buffer dropped = {0};
    const char *foreign = peft_trust_filter(m->config, &dropped);
    if (foreign) {
        buffer_free(&dropped);
        return peft_refuse(m, UINT32_MAX,
                           "correct the field, or pull with trust_config "
                           "(--trust-config) if you trust the trainer",
                           "peft_config's %s is not what PEFT has there", foreign);
    }
    if (dropped.size > 0)
        buffer_append(&dropped, "", 1);
    if (dropped.failed) {
        buffer_free(&dropped);
        return error_set_memory(m->error);
    }
    *dropped_out = (char *)dropped.data;
    return FANIN_OK;
}

static fanin_status make_config_text(peft_maker *m, bool trusted, char **dropped_out)
{
    const char *given = peft_pair(m, "peft_config");
    fanin_status status = FANIN_OK;
    if (given)
        status = read_given(m, given);
    else if (!(m->config = json_object()))
        status = error_set_memory(m->error);
    if (status == FANIN_OK)
        status = peft_fields_merge(m);
    if (status == FANIN_OK)
        status = require_base_model(m);
    if (status != FANIN_OK)
        return status;
    const char *type = json_string_value(peft_field(m, "peft_type"));
    bool lora = !type || strcasecmp(type, "LORA") == 0;
    if (!lora && !m->given)
        return peft_refuse(m, UINT32_MAX, PEFT_GIVE_CONFIG,
                           "peft_type is %.40s; only LORA can be derived", type);
    if (!lora)
        return check_foreign(m, type, trusted);
    if (!trusted)
        status = drop_untrusted(m, dropped_out);
    if (status == FANIN_OK)
        status = peft_modules_find(m);
    if (status == FANIN_OK)
        status = m->given ? check_target_modules(m) : derive_config(m);
    if (status == FANIN_OK && m->given)
        status = peft_ranks_check(m);
    if (status == FANIN_OK)
        status = check_extras(m);
    if (status == FANIN_OK)
        status = check_saved(m);
    if (status == FANIN_OK && !m->given && !set_defaults(m))
        status = error_set_memory(m->error);
    return status;
}

/* The same object with its fields in order, NULL: out of memory. What is inside of them keeps
   the order that it has: in PEFT's patterns the first that matches wins. */
static json_t *sorted_fields(json_t *config)
{
    json_t *names = peft_sorted_keys(config), *sorted = json_object();
    bool good = names && sorted;
    for (size_t i = 0; good && i < json_array_size(names); i++) {
        const char *name = json_string_value(json_array_get(names, i));
        good = json_object_set(sorted, name, json_object_get(config, name)) == 0;
    }
    json_decref(names);
    if (good)
        return sorted;
    json_decref(sorted);
    return NULL;
}

/* As PEFT writes it, with two blanks, and with as few digits as all numbers need to be read
   back the same. */
static char *dump_config(const json_t *config)
{
    for (size_t digits = 15; digits <= 17; digits++) {
        char *text = json_dumps(config, JSON_INDENT(2) | JSON_ENSURE_ASCII |
                                            JSON_REAL_PRECISION(digits));
        json_t *again = text ? json_loads(text, 0, NULL) : NULL;
        bool same = again && json_equal(again, config);
        json_decref(again);
        if (same || digits == 17 || !text)
            return text;
        free(text);
    }
    return NULL;
}

fanin_status peft_config_make(const key_table *keys, const peft_names *names,
                              const char *publication, bool trusted, work_stop *stop,
                              peft_config *out, fanin_error *error)
{
    *out = (peft_config){0};
    peft_maker m = {.keys = keys,
                    .names = names,
                    .publication = publication,
                    .error = error,
                    .budget = PATTERN_BUDGET,
                    .stop = stop};
    m.budget.stop = stop;
    fanin_status status = make_config_text(&m, trusted, &out->dropped);
    if (status == FANIN_OK) {
        json_t *sorted = sorted_fields(m.config);
        out->text = sorted ? dump_config(sorted) : NULL;
        json_decref(sorted);
        out->size = out->text ? strlen(out->text) : 0;
        if (!out->text)
            status = error_set_memory(error);
    }
    if (stop && stop->stopped)
        status = work_broken_off(stop, "plan", "the configuration was looked through",
                                 error);
    pattern_free(m.target);
    json_decref(m.config);
    peft_modules_free(&m.modules);
    if (status != FANIN_OK)
        peft_config_free(out);
    return status;
}

void peft_config_free(peft_config *config)
{
    free(config->text);
    free(config->dropped);
    *config = (peft_config){0};
}
