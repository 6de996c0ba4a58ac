/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor names and metadata of a hostile trainer. Input: lines. "=KEY VALUE" is a metadata
 * pair, "ROWS COLUMNS NAME" a tensor. Whatever comes of it is a configuration, of an adapter and of
 * a model, or a reason.
 */
#include "adapter/adapter.h"
#include "fuzz.h"
#include "peft/peft_config.h"
#include "text.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ITEMS 64

typedef struct publication {
    key_table table;
    key_entry entries[ITEMS];
    fanin_pair pairs[ITEMS];
} publication;

/* As a key table that was decoded: all text is UTF-8. */
static void add_line(publication *p, char *line)
{
    if (!utf8_valid(line, strlen(line)))
        return;
    if (line[0] == '=') {
        char *blank = strchr(line, ' ');
        if (!blank || p->table.n_pairs == ITEMS)
            return;
        *blank = '\0';
        p->pairs[p->table.n_pairs++] = (fanin_pair){line + 1, blank + 1};
        return;
    }
    char *end;
    uint64_t rows = strtoull(line, &end, 10), columns = strtoull(end, &end, 10);
    if (*end != ' ' || strlen(end + 1) > FANIN_MAX_NAME || p->table.count == ITEMS)
        return;
    p->entries[p->table.count++] = (key_entry){.name = end + 1,
                                               .dtype = FANIN_DTYPE_BF16,
                                               .n_dims = columns ? 2 : 1,
                                               .shape = {rows, columns}};
}

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const key_entry *)a)->name, ((const key_entry *)b)->name);
}

static bool trusted; /* of the run that is under way */

/* Nothing that a reader could load code by comes from an untrusted configuration. */
static void check_harmless(json_t *config)
{
    static const char *const fields[] = {"auto_mapping", "megatron_config", "revision",
                                         "trust_remote_code", "runtime_config"};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        json_t *value = json_object_get(config, fields[i]);
        check(trusted || !value || json_is_null(value));
    }
}

static void make(const publication *p)
{
    peft_names names = {0};
    fanin_error error = FANIN_ERROR_INIT;
    peft_config made = {0};
    fanin_status status = peft_names_make(&p->table, "lora:0", &names, &error);
    for (uint32_t i = 1; i < names.count && !status; i++)
        check(strcmp(names.tensors[i - 1].name.text, names.tensors[i].name.text) < 0);
    if (!status)
        status =
            peft_config_make(&p->table, &names, "lora:0", trusted, NULL, &made, &error);
    if (status) {
        check(status == FANIN_ERR_MISMATCH && error.message[0] != '\0');
    } else {
        json_t *config = json_loadb(made.text, made.size, JSON_REJECT_DUPLICATES, NULL);
        check(json_is_object(config));
        check(json_is_string(json_object_get(config, "base_model_name_or_path")));
        check_harmless(config);
        json_decref(config);
    }
    peft_config_free(&made);
    peft_names_free(&names);
}

static void check_no_code(json_t *value)
{
    const char *field;
    json_t *member;
    for (size_t i = 0; i < json_array_size(value); i++)
        check_no_code(json_array_get(value, i));
    json_object_foreach(value, field, member)
    {
        check(strcmp(field, "auto_map") != 0 && strcmp(field, "custom_pipelines") != 0);
        check_no_code(member);
    }
}

static void make_of_model(const publication *p)
{
    fanin_error error = FANIN_ERROR_INIT;
    peft_config made;
    if (model_config_make(&p->table, trusted, &made, &error) != FANIN_OK) {
        check(error.status == FANIN_ERR_MISMATCH && error.message[0] != '\0');
    } else if (made.text) {
        json_t *config = json_loadb(made.text, made.size, JSON_REJECT_DUPLICATES, NULL);
        check(json_is_object(config));
        if (!trusted)
            check_no_code(config);
        json_decref(config);
    }
    peft_config_free(&made);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    check(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    publication p = {0};
    p.table.entries = p.entries;
    p.table.pairs = p.pairs;
    char *rest = text;
    for (char *line; (line = strsep(&rest, "\n")) != NULL;)
        add_line(&p, line);
    qsort(p.entries, p.table.count, sizeof p.entries[0], compare_entries);
    for (int i = 0; i < 2; i++) {
        trusted = i > 0;
        make(&p);
        make_of_model(&p);
    }
    free(text);
    return 0;
}
