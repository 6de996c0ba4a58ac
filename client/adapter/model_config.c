/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/model_config.h"

#include "buffer.h"
#include "error_set.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static const char *find_pair(const key_table *keys)
{
    for (uint32_t i = 0; i < keys->n_pairs; i++) {
        if (strcmp(keys->pairs[i].key, MODEL_CONFIG_PAIR) == 0)
            return keys->pairs[i].value;
    }
    return NULL;
}

/* What makes a reader that trusts the directory run the code of somebody else. */
static bool names_code(const char *field)
{
    return strcmp(field, "auto_map") == 0 || strcmp(field, "custom_pipelines") == 0;
}

/* Depth is bounded by the parser's. */
static void remove_code(json_t *value, buffer *dropped)
{
    const char *field;
    json_t *member;
    void *next;
    for (size_t i = 0; i < json_array_size(value); i++)
        remove_code(json_array_get(value, i), dropped);
    json_object_foreach_safe(value, next, field, member)
    {
        if (!names_code(field)) {
            remove_code(member, dropped);
            continue;
        }
        if (dropped->size > 0)
            buffer_append(dropped, ", ", 2);
        buffer_append(dropped, field, strlen(field));
        json_object_del(value, field);
    }
}

/* The text again, if nothing was dropped, else what is left. */
static fanin_status write_text(const char *text, const json_t *root, buffer *dropped,
                               peft_config *out, fanin_error *error)
{
    if (dropped->size > 0) {
        buffer_append(dropped, "", 1);
        out->text = json_dumps(root, JSON_INDENT(2) | JSON_ENSURE_ASCII);
        out->dropped = dropped->failed ? NULL : strdup((const char *)dropped->data);
    } else {
        out->text = strdup(text);
    }
    if (dropped->failed || !out->text || (dropped->size > 0 && !out->dropped)) {
        peft_config_free(out);
        return error_set_memory(error);
    }
    out->size = strlen(out->text);
    return FANIN_OK;
}

fanin_status model_config_make(const key_table *keys, bool trusted, peft_config *out,
                               fanin_error *error)
{
    const char *text = find_pair(keys);
    error_place place = {.phase = "plan",
                         .remedy = "let the trainer publish the model's config.json "
                                   "under '" MODEL_CONFIG_PAIR "', or nothing"};
    *out = (peft_config){.text = NULL};
    if (!text)
        return FANIN_OK;
    json_error_t why;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    buffer dropped = {.data = NULL};
    fanin_status status;
    if (!json_is_object(root)) {
        status = error_set(error, FANIN_ERR_MISMATCH, &place,
                           "the model's configuration in the metadata is no JSON "
                           "object: %.100s",
                           root ? "it is something else" : why.text);
    } else {
        if (!trusted)
            remove_code(root, &dropped);
        status = write_text(text, root, &dropped, out, error);
    }
    buffer_free(&dropped);
    json_decref(root);
    return status;
}
