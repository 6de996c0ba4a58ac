/* SPDX-License-Identifier: Apache-2.0 */
/* fanin.json: what a directory holds. */
#include "adapter_internal.h"
#include "error_set.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FORMAT 1
#define IDENTITY_MAX 65536 /* bytes of fanin.json */
#define REMEDY "give another directory, or remove this one; nothing is overwritten"

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

char *adapter_identity_text(const adapter_identity *identity, uint64_t file_size,
                            const digest *file, size_t config_size)
{
    char world[33], table[33], content[33];
    digest_hex(identity->world_id, world);
    digest_hex(identity->key_table.bytes, table);
    digest_hex(file->bytes, content);
    json_t *root = json_pack(
        "{s:i, s:s, s:s, s:s, s:o, s:s, s:{s:{s:I}, s:{s:I, s:s}}}", "format", FORMAT,
        "fanin_version", fanin_version(), "world_id", world, "publication",
        identity->publication, "step", step_json(identity->step), "key_table", table,
        "files", CONFIG_FILE, "bytes", (json_int_t)config_size, MODEL_FILE, "bytes",
        (json_int_t)file_size, "xxh3_128_of_4mib_pieces", content);
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

/* NULL: there is none, or it is not what adapter_identity_text() writes. */
static json_t *read_identity(int directory)
{
    int fd = openat(directory, IDENTITY_FILE,
                    O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return NULL;
    char *text = malloc(IDENTITY_MAX);
    size_t size = 0;
    ssize_t n = text ? 1 : 0;
    while (n > 0 && size < IDENTITY_MAX) {
        n = read(fd, text + size, IDENTITY_MAX - size);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            size += (size_t)n;
    }
    close(fd);
    json_t *root =
        n == 0 && text ? json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL) : NULL;
    free(text);
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

static bool hex_equal(const json_t *root, const char *field, const uint8_t bytes[16])
{
    char hex[33];
    digest_hex(bytes, hex);
    return strcmp(json_string_value(json_object_get(root, field)), hex) == 0;
}

/* What distinguishes the content from what was asked for, in a few words; NULL: nothing. */
static const char *difference(const json_t *root, const adapter_identity *identity)
{
    const char *publication = json_string_value(json_object_get(root, "publication"));
    if (strcmp(publication, identity->publication) != 0)
        return "another publication";
    if (!hex_equal(root, "world_id", identity->world_id))
        return "another life of the trainer (world id)";
    if (!step_equal(json_object_get(root, "step"), identity->step))
        return "another step";
    if (!hex_equal(root, "key_table", identity->key_table.bytes))
        return "other tensors or metadata of the same step";
    const char *dtype = json_string_value(json_object_get(root, "dtype"));
    const char *wanted = identity->dtype ? fanin_dtype_name(identity->dtype) : "";
    if (strcmp(dtype ? dtype : "", wanted) != 0)
        return "the same step with another dtype";
    return NULL;
}

static bool file_has(int directory, const json_t *root, const char *name,
                     uint64_t *bytes_out)
{
    const json_t *files = json_object_get(root, "files");
    const json_t *bytes = json_object_get(json_object_get(files, name), "bytes");
    struct stat info;
    *bytes_out = (uint64_t)json_integer_value(bytes);
    return json_is_integer(bytes) && fstatat(directory, name, &info, 0) == 0 &&
           S_ISREG(info.st_mode) && info.st_size == json_integer_value(bytes);
}

static fanin_status refuse(const adapter *a, fanin_error *error, const char *what)
{
    error_place where = {.phase = "write", .remedy = REMEDY};
    return error_set(error, FANIN_ERR_EXISTS, &where, "'%.250s' %.200s",
                     a->place.directory, what);
}

static fanin_status refuse_other(const adapter *a, const json_t *root,
                                 const adapter_identity *identity, const char *why,
                                 fanin_error *error)
{
    char *step = json_dumps(json_object_get(root, "step"), JSON_ENCODE_ANY);
    char text[400];
    snprintf(text, sizeof(text),
             "holds %s: step %.24s of %.80s, world %.32s; asked for is step %" PRIu64
             " of %.80s",
             why, step ? step : "?",
             json_string_value(json_object_get(root, "publication")),
             json_string_value(json_object_get(root, "world_id")), identity->step,
             identity->publication);
    free(step);
    return refuse(a, error, text);
}

/* @p entry_out: the name of something in it, "" if it is empty. */
static fanin_status first_entry(const adapter *a, int directory,
                                char entry_out[NAME_MAX + 1], fanin_error *error)
{
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        int reason = errno;
        if (fd >= 0)
            close(fd);
        return adapter_io_error(&a->place, reason, "cannot read", NULL, NULL, error);
    }
    entry_out[0] = '\0';
    for (struct dirent *entry;
         entry_out[0] == '\0' && (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            snprintf(entry_out, NAME_MAX + 1, "%s", entry->d_name);
    }
    closedir(dir);
    return FANIN_OK;
}

static fanin_status compare(const adapter *a, int directory, const json_t *root,
                            const adapter_identity *identity, bool *reuse_out,
                            fanin_error *error)
{
    const char *why = difference(root, identity);
    if (why)
        return refuse_other(a, root, identity, why, error);
    uint64_t model, config;
    bool whole = file_has(directory, root, MODEL_FILE, &model);
    whole = file_has(directory, root, CONFIG_FILE, &config) && whole;
    if (!whole || (a->layout.file_size != 0 && model != a->layout.file_size))
        return refuse(a, error, "holds the step asked for, but its files were damaged");
    *reuse_out = true;
    return FANIN_OK;
}

static fanin_status look_inside(const adapter *a, int directory, bool is_link,
                                const adapter_identity *identity, bool *reuse_out,
                                fanin_error *error)
{
    json_t *root = read_identity(directory);
    if (root) {
        fanin_status status = compare(a, directory, root, identity, reuse_out, error);
        json_decref(root);
        return status;
    }
    char entry[NAME_MAX + 1] = "";
    fanin_status status = first_entry(a, directory, entry, error);
    if (status)
        return status;
    if (entry[0] == '\0')
        return is_link
                   ? refuse(a, error, "is a symbolic link, which cannot be replaced")
                   : FANIN_OK;
    char text[NAME_MAX + 100];
    snprintf(text, sizeof(text), "holds '%.100s' and no readable %s", entry,
             IDENTITY_FILE);
    return refuse(a, error, text);
}

fanin_status adapter_reusable(adapter *a, const adapter_identity *identity,
                              bool *reuse_out, fanin_error *error)
{
    *reuse_out = false;
    struct stat info;
    if (fstatat(a->place.parent, a->place.name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            return FANIN_OK;
        return adapter_io_error(&a->place, errno, "cannot look at", NULL, NULL, error);
    }
    bool is_link = S_ISLNK(info.st_mode);
    if (!is_link && !S_ISDIR(info.st_mode))
        return refuse(a, error, "is there and is no directory");
    int directory =
        openat(a->place.parent, a->place.name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0 && is_link)
        return refuse(a, error, "is a symbolic link that leads to no directory");
    if (directory < 0)
        return adapter_io_error(&a->place, errno, "cannot open", NULL, NULL, error);
    fanin_status status =
        look_inside(a, directory, is_link, identity, reuse_out, error);
    close(directory);
    return status;
}
