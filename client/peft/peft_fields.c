/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_maker.h"

#include "error_set.h"
#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------- which fields there are, and trust */

/* Lists in lists in lists are more than any of PEFT's fields has. */
#define LIST_DEPTH 3

/* What the text of a metadata pair says. */
typedef enum field_kind {
    FIELD_UNTOLD, /* only in a whole configuration */
    FIELD_STRING,
    FIELD_INTEGER, /* positive */
    FIELD_NUMBER,  /* not negative */
    FIELD_BOOL,
    FIELD_BOOL_OR_STRING,
    FIELD_LIST, /* of strings */
    FIELD_LIST_OR_STRING,
    FIELD_OBJECT,
    FIELD_JSON,
} field_kind;

/* What a field of a configuration may hold. */
typedef enum trusted_kind {
    TRUSTED_NEVER,
    TRUSTED_PLAIN,  /* a string, number or truth value, or lists of them */
    TRUSTED_TABLE,  /* an object of numbers */
    TRUSTED_TOKENS, /* a list, or an object of lists */
    TRUSTED_PARTS   /* an object with the plain parts that are listed */
} trusted_kind;

typedef struct peft_known {
    const char *name;
    field_kind told;
    trusted_kind kind;        /* where the trainer is not trusted */
    const char *const *parts; /* NULL ends them */
} peft_known;

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

/*
 * Trusted is PEFT 0.21's LoraConfig but for auto_mapping (imports a class), megatron_core and
 * megatron_config (imports a module), revision (of the base model, whose code may be remote),
 * runtime_config (never of a file), and the files that CorDA reads and writes.
 */
static const peft_known fields[] = {
    {"alora_invocation_tokens", FIELD_UNTOLD, TRUSTED_PLAIN, NULL},
    {"alpha_pattern", FIELD_OBJECT, TRUSTED_TABLE, NULL},
    {"arrow_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("gks_adapter_names", "rng_seed", "router_temperature", "task_adapter_names",
           "top_k", "use_gks")},
    {"auto_mapping", FIELD_OBJECT, TRUSTED_NEVER, NULL},
    {"base_model_name_or_path", FIELD_STRING, TRUSTED_PLAIN, NULL},
    {"bias", FIELD_STRING, TRUSTED_PLAIN, NULL},
    {"corda_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("corda_method", "prune_temporary_fields", "use_float16_for_covariance",
           "verbose")},
    {"ensure_weight_tying", FIELD_UNTOLD, TRUSTED_PLAIN, NULL},
    {"eva_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("adjust_scaling_factors", "label_mask_value", "rho", "tau", "use_label_mask",
           "whiten")},
    {"exclude_modules", FIELD_LIST_OR_STRING, TRUSTED_PLAIN, NULL},
    {"fan_in_fan_out", FIELD_BOOL, TRUSTED_PLAIN, NULL},
    {"inference_mode", FIELD_BOOL, TRUSTED_PLAIN, NULL},
    {"init_lora_weights", FIELD_BOOL_OR_STRING, TRUSTED_PLAIN, NULL},
    {"kasa_config", FIELD_UNTOLD, TRUSTED_PARTS, PARTS("beta", "gamma")},
    {"layer_replication", FIELD_UNTOLD, TRUSTED_PLAIN, NULL},
    {"layers_pattern", FIELD_LIST_OR_STRING, TRUSTED_PLAIN, NULL},
    {"layers_to_transform", FIELD_JSON, TRUSTED_PLAIN, NULL},
    {"loftq_config", FIELD_UNTOLD, TRUSTED_PARTS, PARTS("loftq_bits", "loftq_iter")},
    {"lora_alpha", FIELD_NUMBER, TRUSTED_PLAIN, NULL},
    {"lora_bias", FIELD_BOOL, TRUSTED_PLAIN, NULL},
    {"lora_dropout", FIELD_NUMBER, TRUSTED_PLAIN, NULL},
    {"lora_ga_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("direction", "scale", "stable_gamma")},
    {"modules_to_save", FIELD_LIST, TRUSTED_PLAIN, NULL},
    {"monteclora_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("buffer_size", "dirichlet_prior", "kl_loss_weight", "num_samples",
           "sample_scaler", "use_entropy")},
    {"peft_type", FIELD_STRING, TRUSTED_PLAIN, NULL},
    {"peft_version", FIELD_STRING, TRUSTED_PLAIN, NULL},
    {"qalora_group_size", FIELD_UNTOLD, TRUSTED_PLAIN, NULL},
    {"r", FIELD_INTEGER, TRUSTED_PLAIN, NULL},
    {"rank_pattern", FIELD_OBJECT, TRUSTED_TABLE, NULL},
    {"revision", FIELD_STRING, TRUSTED_NEVER, NULL},
    {"target_modules", FIELD_LIST_OR_STRING, TRUSTED_PLAIN, NULL},
    {"target_parameters", FIELD_LIST, TRUSTED_PLAIN, NULL},
    {"task_type", FIELD_STRING, TRUSTED_PLAIN, NULL},
    {"trainable_token_indices", FIELD_JSON, TRUSTED_TOKENS, NULL},
    {"use_bdlora", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b")},
    {"use_dora", FIELD_BOOL, TRUSTED_PLAIN, NULL},
    {"use_qalora", FIELD_UNTOLD, TRUSTED_PLAIN, NULL},
    {"use_rslora", FIELD_BOOL, TRUSTED_PLAIN, NULL},
    {"velora_config", FIELD_UNTOLD, TRUSTED_PARTS,
     PARTS("init_type", "num_groups", "scale")},
};

/* Names come from the trainer, and end in a log. */
static void note_dropped(buffer *dropped, const char *field, const char *part)
{
    const char *const texts[] = {dropped->size > 0 ? ", " : "", field, part ? "." : "",
                                 part ? part : ""};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        for (const char *at = texts[i]; *at; at++)
            buffer_append(dropped, isprint((unsigned char)*at) ? at : "?", 1);
    }
}

static bool is_plain_text(const json_t *value, unsigned depth)
{
    if (!json_is_array(value))
        return !json_is_object(value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (depth == 0 || !is_plain_text(json_array_get(value, i), depth - 1))
            return false;
    }
    return true;
}

/* An object whose values are all numbers, or all plain. */
static bool is_object_of(json_t *value, bool numbers)
{
    const char *key;
    json_t *item;
    if (!json_is_object(value))
        return false;
    json_object_foreach(value, key, item)
    {
        if (numbers ? !json_is_number(item) : !is_plain_text(item, LIST_DEPTH))
            return false;
    }
    return true;
}

static bool is_in_list(const char *name, const char *const *names)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names != NULL;
}

/* False: a known part has no plain value. */
static bool filter_parts(json_t *object, const peft_known *field, buffer *dropped)
{
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, key, value)
    {
        bool known = is_in_list(key, field->parts);
        if (known && !is_plain_text(value, LIST_DEPTH))
            return false;
        if (known || json_is_null(value))
            continue;
        note_dropped(dropped, field->name, key);
        json_object_del(object, key);
    }
    return true;
}

static bool has_trusted_kind(json_t *value, trusted_kind kind)
{
    switch (kind) {
    case TRUSTED_TABLE:
        return is_object_of(value, true);
    case TRUSTED_TOKENS:
        return is_plain_text(value, LIST_DEPTH) || is_object_of(value, false);
    case TRUSTED_PARTS:
        return json_is_object(value);
    default:
        break;
    }
    return is_plain_text(value, LIST_DEPTH);
}

static const peft_known *find_field(const char *name)
{
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (strcmp(fields[i].name, name) == 0)
            return &fields[i];
    }
    return NULL;
}

/* What PEFT writes into every file, and imports only where megatron_config is set. */
static bool is_default(const char *name, const json_t *value)
{
    const char *text = json_string_value(value);
    return strcmp(name, "megatron_core") == 0 && text &&
           strcmp(text, "megatron.core") == 0;
}

const char *peft_trust_filter(json_t *config, buffer *dropped)
{
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(config, next, key, value)
    {
        const peft_known *field = find_field(key);
        if (json_is_null(value) || is_default(key, value))
            continue;
        if (!field || field->kind == TRUSTED_NEVER) {
            note_dropped(dropped, key, NULL);
            json_object_del(config, key);
        } else if (!has_trusted_kind(value, field->kind) ||
                   (field->kind == TRUSTED_PARTS &&
                    !filter_parts(value, field, dropped))) {
            return field->name;
        }
    }
    return NULL;
}

/* ----------------------------------------------------------------- fields */

/* Refusals, and PEFT's fields: metadata pairs are strings, here they become values. */

fanin_status peft_refuse(const peft_maker *m, uint32_t key, const char *remedy,
                         const char *format, ...)
{
    char text[512], full[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    error_place place = {.phase = "plan", .remedy = remedy};
    if (key != UINT32_MAX)
        place.key = peft_full_key(m->publication, m->keys->entries[key].name, full);
    return error_set(m->error, FANIN_ERR_MISMATCH, &place, "%s", text);
}

fanin_status peft_refuse_pattern(const peft_maker *m, const char *field,
                                 const pattern *p, pattern_result result,
                                 const char *path, size_t size)
{
    if (result == PATTERN_MEMORY)
        return error_set_memory(m->error);
    if (result == PATTERN_INVALID)
        return peft_refuse(m, UINT32_MAX,
                           "correct the pattern in the trainer's configuration",
                           "the pattern '%.200s' in %s is no regular expression: %s",
                           pattern_text(p), field, pattern_problem(p));
    return peft_refuse(m, UINT32_MAX,
                       "write the pattern without nested repetitions, or list the "
                       "modules by name",
                       "the pattern '%.200s' in %s takes too long to match %.*s",
                       pattern_text(p), field, (int)size, path);
}

/* What a person would have to write instead. */
static const char *const kind_texts[] = {
    [FIELD_STRING] = "a string",
    [FIELD_INTEGER] = "a positive integer",
    [FIELD_NUMBER] = "a number that is not negative",
    [FIELD_BOOL] = "true or false",
    [FIELD_BOOL_OR_STRING] = "true, false or a name",
    [FIELD_LIST] = "a JSON array of strings",
    [FIELD_LIST_OR_STRING] = "a JSON array of strings, or a string",
    [FIELD_OBJECT] = "a JSON object",
    [FIELD_JSON] = "JSON",
};

static bool is_string_list(const json_t *value)
{
    if (!json_is_array(value))
        return false;
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (!json_is_string(json_array_get(value, i)))
            return false;
    }
    return true;
}

/* Of the kinds that are written as JSON. */
static bool has_kind(const json_t *value, field_kind kind)
{
    switch (kind) {
    case FIELD_INTEGER:
        return json_integer_value(value) > 0;
    case FIELD_NUMBER:
        return json_is_number(value) && json_number_value(value) >= 0;
    case FIELD_LIST_OR_STRING:
        return json_is_string(value) || is_string_list(value);
    case FIELD_LIST:
        return is_string_list(value);
    case FIELD_OBJECT:
        return json_is_object(value);
    default:
        return true;
    }
}

static json_t *parse_bool(const char *text)
{
    if (strcmp(text, "true") == 0 || strcmp(text, "True") == 0)
        return json_true();
    if (strcmp(text, "false") == 0 || strcmp(text, "False") == 0)
        return json_false();
    return NULL;
}

/* NULL: the text is no such value, or memory ran out (*memory). The text is UTF-8. */
static json_t *parse_field(field_kind kind, const char *text, bool *memory)
{
    json_error_t detail;
    json_t *value =
        kind == FIELD_BOOL || kind == FIELD_BOOL_OR_STRING ? parse_bool(text) : NULL;
    *memory = false;
    if (value || kind == FIELD_BOOL)
        return value;
    if (kind != FIELD_STRING && kind != FIELD_BOOL_OR_STRING) {
        value = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &detail);
        *memory = !value && (json_error_code(&detail) == json_error_out_of_memory ||
                             detail.text[0] == '\0');
        if (value || *memory || kind != FIELD_LIST_OR_STRING || text[0] == '[') {
            bool has = value && has_kind(value, kind);
            if (!has)
                json_decref(value);
            return has ? value : NULL;
        }
    }
    value = json_string(text);
    *memory = !value;
    return value;
}

/* Lists of names are sets to PEFT. */
static bool same_set(const json_t *a, const json_t *b)
{
    if (json_array_size(a) != json_array_size(b))
        return false;
    json_t *names = json_object();
    bool same = names != NULL;
    for (size_t i = 0; same && i < json_array_size(a); i++)
        same = peft_set(names, json_string_value(json_array_get(a, i)), json_null());
    for (size_t i = 0; same && i < json_array_size(b); i++)
        same = json_object_get(names, json_string_value(json_array_get(b, i))) != NULL;
    json_decref(names);
    return same;
}

static bool same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return fabs(json_number_value(a) - json_number_value(b)) <= 0;
    if (is_string_list(a) && is_string_list(b))
        return same_set(a, b);
    return json_equal(a, b) != 0;
}

bool peft_set(json_t *object, const char *name, json_t *value)
{
    return json_object_set_new(object, name, value) == 0;
}

json_t *peft_field(const peft_maker *m, const char *name)
{
    json_t *value = json_object_get(m->config, name);
    return json_is_null(value) ? NULL : value;
}

const char *peft_pair(const peft_maker *m, const char *key)
{
    for (uint32_t i = 0; i < m->keys->n_pairs; i++) {
        if (strcmp(m->keys->pairs[i].key, key) == 0)
            return m->keys->pairs[i].value;
    }
    return NULL;
}

static fanin_status merge_field(peft_maker *m, const char *name, field_kind kind,
                                const char *text)
{
    /* How Python and JSON write "nothing". */
    if (text[0] == '\0' || strcmp(text, "null") == 0 || strcmp(text, "None") == 0)
        return FANIN_OK;
    bool memory;
    json_t *value = parse_field(kind, text, &memory);
    if (memory)
        return error_set_memory(m->error);
    if (!value)
        return peft_refuse(m, UINT32_MAX,
                           "correct the metadata that the trainer publishes",
                           "the metadata pair %s is '%.80s', which is not %s", name,
                           text, kind_texts[kind]);
    const json_t *there = peft_field(m, name);
    if (!there)
        return peft_set(m->config, name, value) ? FANIN_OK : error_set_memory(m->error);
    bool same = same_value(there, value);
    json_decref(value);
    if (!same)
        return peft_refuse(
            m, UINT32_MAX,
            "let the metadata pair agree with peft_config, or leave it out",
            "the metadata pair %s is '%.80s', which contradicts peft_config", name,
            text);
    return FANIN_OK;
}

fanin_status peft_fields_merge(peft_maker *m)
{
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const char *text =
            fields[i].told == FIELD_UNTOLD ? NULL : peft_pair(m, fields[i].name);
        fanin_status status =
            text ? merge_field(m, fields[i].name, fields[i].told, text) : FANIN_OK;
        if (status != FANIN_OK)
            return status;
    }
    const char *experts = peft_pair(m, "num_experts");
    if (!experts)
        return FANIN_OK;
    bool memory;
    json_t *number = parse_field(FIELD_INTEGER, experts, &memory);
    if (memory)
        return error_set_memory(m->error);
    m->num_experts = (uint64_t)json_integer_value(number);
    json_decref(number);
    if (m->num_experts == 0)
        return peft_refuse(m, UINT32_MAX,
                           "correct the metadata that the trainer publishes",
                           "the metadata pair num_experts is '%.80s', which is not %s",
                           experts, kind_texts[FIELD_INTEGER]);
    return FANIN_OK;
}

static int compare_json_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

json_t *peft_sorted_keys(json_t *object)
{
    size_t count = 0;
    const char **keys = calloc(json_object_size(object) + 1, sizeof keys[0]);
    json_t *list = json_array(), *value;
    const char *key;
    if (keys) {
        json_object_foreach(object, key, value) keys[count++] = key;
        qsort(keys, count, sizeof keys[0], compare_json_keys);
    }
    bool good = keys && list;
    for (size_t i = 0; i < count && good; i++)
        good = json_array_append_new(list, json_string(keys[i])) == 0;
    free(keys);
    if (good)
        return list;
    json_decref(list);
    return NULL;
}
