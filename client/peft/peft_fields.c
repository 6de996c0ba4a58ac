/* SPDX-License-Identifier: Apache-2.0 */
/* Refusals, and PEFT's fields: metadata pairs are strings, here they become values. */
#include "error_set.h"
#include "peft/peft_maker.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

typedef enum field_kind {
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

static const struct {
    const char *name;
    field_kind kind;
} fields[] = {
    {"alpha_pattern", FIELD_OBJECT},
    {"auto_mapping", FIELD_OBJECT},
    {"base_model_name_or_path", FIELD_STRING},
    {"bias", FIELD_STRING},
    {"exclude_modules", FIELD_LIST_OR_STRING},
    {"fan_in_fan_out", FIELD_BOOL},
    {"inference_mode", FIELD_BOOL},
    {"init_lora_weights", FIELD_BOOL_OR_STRING},
    {"layers_pattern", FIELD_LIST_OR_STRING},
    {"layers_to_transform", FIELD_JSON},
    {"lora_alpha", FIELD_NUMBER},
    {"lora_bias", FIELD_BOOL},
    {"lora_dropout", FIELD_NUMBER},
    {"modules_to_save", FIELD_LIST},
    {"peft_type", FIELD_STRING},
    {"peft_version", FIELD_STRING},
    {"r", FIELD_INTEGER},
    {"rank_pattern", FIELD_OBJECT},
    {"revision", FIELD_STRING},
    {"target_modules", FIELD_LIST_OR_STRING},
    {"target_parameters", FIELD_LIST},
    {"task_type", FIELD_STRING},
    {"trainable_token_indices", FIELD_JSON},
    {"use_dora", FIELD_BOOL},
    {"use_rslora", FIELD_BOOL},
};

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
        const char *text = peft_pair(m, fields[i].name);
        fanin_status status =
            text ? merge_field(m, fields[i].name, fields[i].kind, text) : FANIN_OK;
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

static int compare_text(const void *a, const void *b)
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
        qsort(keys, count, sizeof keys[0], compare_text);
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
