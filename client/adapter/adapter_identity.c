/* SPDX-License-Identifier: Apache-2.0 */
/* fanin.json: what a directory holds. */
#include "adapter/adapter_identity.h"

#include "adapter/adapter_internal.h"
#include <inttypes.h>
#include <string.h>

#define FORMAT 1
#define WHOLE "xxh3_128"
#define IN_PIECES "xxh3_128_of_4mib_pieces"

json_t *guard_json(fanin_checksums guard)
{
    if (guard == FANIN_CHECKSUMS_LOCAL)
        return json_string("local");
    return json_boolean(guard == FANIN_CHECKSUMS_ALL);
}

/* A step beyond what JSON libraries take for an integer is written as a string. */
static json_t *step_json(uint64_t step)
{
    if (step <= INT64_MAX)
        return json_integer((json_int_t)step);
    return json_sprintf("%" PRIu64, step);
}

static bool step_equal(const json_t *value, uint64_t step)
{
    json_t *wanted = step_json(step);
    bool equal = wanted && json_equal(value, wanted);
    json_decref(wanted);
    return equal;
}

static json_t *files_json(const identity_file *files, size_t count)
{
    json_t *list = json_object();
    bool good = list != NULL;
    for (size_t i = 0; i < count && good; i++) {
        char hex[33];
        digest_hex(files[i].content.bytes, hex);
        good = json_object_set_new(
                   list, files[i].name,
                   json_pack("{s:I, s:s}", "bytes", (json_int_t)files[i].bytes,
                             files[i].in_pieces ? IN_PIECES : WHOLE, hex)) == 0;
    }
    if (good)
        return list;
    json_decref(list);
    return NULL;
}

char *adapter_identity_text(const adapter_identity *identity,
                            const identity_file *files, size_t count)
{
    char world[33], table[33];
    digest_hex(identity->world_id, world);
    digest_hex(identity->key_table.bytes, table);
    json_t *root = json_pack(
        "{s:i, s:s, s:s, s:s, s:o, s:s, s:o, s:o, s:b}", "format", FORMAT,
        "fanin_version", fanin_version(), "world_id", world, "publication",
        identity->publication, "step", step_json(identity->step), "key_table", table,
        "files", files_json(files, count), "transport_checksums",
        guard_json(identity->transport_checksums), "verified", (int)identity->verified);
    /* Without a conversion the key table says it all. */
    if (root && identity->dtype != 0 &&
        json_object_set_new(root, "dtype",
                            json_string(fanin_dtype_name(identity->dtype))) != 0) {
        json_decref(root);
        return NULL;
    }
    char *text = root ? json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    return text;
}

json_t *adapter_identity_parse(const char *text, size_t size)
{
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
    bool good = json_is_object(root) &&
                json_integer_value(json_object_get(root, "format")) == FORMAT &&
                json_is_string(json_object_get(root, "publication")) &&
                json_is_string(json_object_get(root, "world_id")) &&
                json_is_string(json_object_get(root, "key_table")) &&
                json_is_object(json_object_get(root, "files"));
    if (good)
        return root;
    json_decref(root);
    return NULL;
}

bool hex_equal(const char *hex, const uint8_t bytes[16])
{
    char text[33];
    digest_hex(bytes, text);
    return strcmp(text, hex) == 0;
}

const char *adapter_identity_difference(const json_t *root,
                                        const adapter_identity *identity)
{
    const char *publication = json_string_value(json_object_get(root, "publication"));
    const char *world = json_string_value(json_object_get(root, "world_id"));
    const char *table = json_string_value(json_object_get(root, "key_table"));
    if (strcmp(publication, identity->publication) != 0)
        return "another publication";
    if (!hex_equal(world, identity->world_id))
        return "another life of the trainer (world id)";
    if (!step_equal(json_object_get(root, "step"), identity->step))
        return "another step";
    if (!hex_equal(table, identity->key_table.bytes))
        return "other tensors or metadata of the same step";
    const char *dtype = json_string_value(json_object_get(root, "dtype"));
    const char *wanted = identity->dtype ? fanin_dtype_name(identity->dtype) : "";
    if (strcmp(dtype ? dtype : "", wanted) != 0)
        return "the same step with another dtype";
    return NULL;
}

bool adapter_identity_bytes(const json_t *root, const char *file, uint64_t *bytes_out)
{
    const json_t *files = json_object_get(root, "files");
    const json_t *bytes = json_object_get(json_object_get(files, file), "bytes");
    *bytes_out = (uint64_t)json_integer_value(bytes);
    return json_is_integer(bytes) && json_integer_value(bytes) >= 0;
}

const char *adapter_identity_digest(const json_t *root, const char *file)
{
    const json_t *found = json_object_get(json_object_get(root, "files"), file);
    const char *pieces = json_string_value(json_object_get(found, IN_PIECES));
    return pieces ? pieces : json_string_value(json_object_get(found, WHOLE));
}

size_t adapter_identity_count(const json_t *root)
{
    return json_object_size(json_object_get(root, "files"));
}
