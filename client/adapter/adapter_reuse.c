/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/adapter_internal.h"

#include "adapter/file_pages.h"
#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ------------------------------------------------------------- fanin.json */

/* fanin.json: what a directory holds. */

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

static json_t *incarnations_json(const adapter_identity *identity)
{
    json_t *all = json_object();
    bool good = all != NULL;
    for (size_t i = 0; i < identity->n_ranks && good; i++) {
        const identity_rank *r = &identity->ranks[i];
        char rank[16], hex[33];
        if (!r->has_step)
            continue;
        snprintf(rank, sizeof rank, "%" PRIu32, r->rank);
        digest_hex(r->incarnation, hex);
        good = json_object_set_new(all, rank, json_string(hex)) == 0;
    }
    if (good)
        return all;
    json_decref(all);
    return NULL;
}

char *adapter_identity_text(const adapter_identity *identity,
                            const identity_file *files, size_t count)
{
    char world[33], table[33];
    digest_hex(identity->world_id, world);
    digest_hex(identity->key_table.bytes, table);
    json_t *root = json_pack(
        "{s:i, s:s, s:s, s:s, s:o, s:s, s:o, s:o, s:o, s:b}", "format", FORMAT,
        "fanin_version", fanin_version(), "world_id", world, "publication",
        identity->publication, "step", step_json(identity->step), "key_table", table,
        "incarnations", incarnations_json(identity), "files", files_json(files, count),
        "transport_checksums", guard_json(identity->transport_checksums), "verified",
        (int)identity->verified);
    /* Without a conversion the key table says it all. */
    bool good = root != NULL;
    if (good && identity->dtype != 0)
        good = json_object_set_new(root, "dtype",
                                   json_string(fanin_dtype_name(identity->dtype))) == 0;
    if (good && identity->base)
        good = json_object_set(root, "delta_base", identity->base) == 0;
    if (!good) {
        json_decref(root);
        return NULL;
    }
    char *text = json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS);
    json_decref(root);
    return text;
}

static json_t *adapter_identity_parse(const char *text, size_t size)
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

/* Whether hex are the digits of these bytes. */
static bool hex_equal(const char *hex, const uint8_t bytes[16])
{
    char text[33];
    digest_hex(bytes, text);
    return strcmp(text, hex) == 0;
}

/* What distinguishes the content from what is asked for, in a few words; NULL: nothing. */
static const char *adapter_identity_difference(const json_t *root,
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

/* ---------------------------------------------------- whose step it holds */

#define SINCE_TEXT 80

typedef enum acquaintance { RANK_SAME, RANK_ANOTHER, RANK_UNKNOWN } acquaintance;

static acquaintance recognize(const json_t *incarnations, const identity_rank *r)
{
    char rank[16];
    snprintf(rank, sizeof rank, "%" PRIu32, r->rank);
    const char *hex = json_string_value(json_object_get(incarnations, rank));
    if (!hex)
        return RANK_UNKNOWN;
    return hex_equal(hex, r->incarnation) ? RANK_SAME : RANK_ANOTHER;
}

/* Why the bytes may be others than those that the ranks have now; "": they are the same. A replica
   that came or went, or was started again, does not matter: all that the others had then they have
   now. */
static fanin_status find_restarted(const json_t *root, const adapter_identity *identity,
                                   char since_out[SINCE_TEXT], fanin_error *error)
{
    const json_t *incarnations = json_object_get(root, "incarnations");
    acquaintance found = RANK_SAME;
    uint32_t culprit = 0;
    bool *same = calloc(identity->n_ranks + 1, sizeof *same);
    since_out[0] = '\0';
    if (!same)
        return error_set_memory(error);
    for (size_t i = 0; i < identity->n_ranks; i++) {
        const identity_rank *r = &identity->ranks[i];
        acquaintance this = r->has_step ? recognize(incarnations, r) : RANK_SAME;
        same[i] = r->has_step && this == RANK_SAME;
        if (this == RANK_SAME || found == RANK_ANOTHER ||
            (found == RANK_UNKNOWN && this == RANK_UNKNOWN))
            continue;
        found = this;
        culprit = r->rank;
    }
    if (found != RANK_SAME && !identity->suffice(identity->cookie, same))
        snprintf(since_out, SINCE_TEXT,
                 !incarnations ? "it does not say of which incarnations of the ranks"
                 : found == RANK_ANOTHER ? "rank %" PRIu32 " was started again since"
                                         : "rank %" PRIu32 " did not have it then",
                 culprit);
    free(same);
    return FANIN_OK;
}

/* The size of one of the other files; false: it does not say. */
static bool adapter_identity_bytes(const json_t *root, const char *file,
                                   uint64_t *bytes_out)
{
    const json_t *files = json_object_get(root, "files");
    const json_t *bytes = json_object_get(json_object_get(files, file), "bytes");
    *bytes_out = (uint64_t)json_integer_value(bytes);
    return json_is_integer(bytes) && json_integer_value(bytes) >= 0;
}

/* The digest of one of the other files in hex digits; NULL: it has none (directories of earlier
    versions have none of adapter_config.json). */
static const char *adapter_identity_digest(const json_t *root, const char *file)
{
    const json_t *found = json_object_get(json_object_get(root, "files"), file);
    const char *pieces = json_string_value(json_object_get(found, IN_PIECES));
    return pieces ? pieces : json_string_value(json_object_get(found, WHOLE));
}

/* -------------------------------------------------- what is there already */

/* What is in the place already: nothing, the adapter that is asked for, or something else. Only
   what no other user can have made or can change is used, and everything is judged on the
   descriptors that are then read. */

#define REMEDY "give another directory, or remove this one; nothing is overwritten"

static fanin_status refuse_existing(const adapter *a, fanin_error *error,
                                    const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static fanin_status refuse_existing(const adapter *a, fanin_error *error,
                                    const char *format, ...)
{
    char what[251];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    error_place where = {.phase = "write", .remedy = REMEDY};
    return error_set(error, FANIN_ERR_EXISTS, &where, "'%.200s' %s", a->place.directory,
                     what);
}

static fanin_status refuse_own_file(const adapter *a, const char *file,
                                    const char *what, fanin_error *error)
{
    return refuse_existing(a, error, "cannot be reused: '%.100s' in it %.120s", file,
                           what);
}

/* Bytes that are not those of fanin.json, whoever changed them. */
static fanin_status refuse_damaged(const adapter *a, const char *file,
                                   fanin_error *error)
{
    return refuse_existing(
        a, error,
        "holds the step asked for, but it was damaged: %s is not as " IDENTITY_FILE
        " says",
        file);
}

static fanin_status refuse_other(const adapter *a, const json_t *root,
                                 const adapter_identity *identity, const char *why,
                                 fanin_error *error)
{
    char *step = json_dumps(json_object_get(root, "step"), JSON_ENCODE_ANY);
    fanin_status status = refuse_existing(
        a, error,
        "holds %s: step %.24s of %.80s, world %.32s; asked for is step %" PRIu64
        " of %.80s",
        why, step ? step : "?", json_string_value(json_object_get(root, "publication")),
        json_string_value(json_object_get(root, "world_id")), identity->step,
        identity->publication);
    free(step);
    return status;
}

/* Never waits for a FIFO's writer. */
fanin_status adapter_open_file(const adapter *a, int directory, const char *name,
                               int *file_out, uint64_t *size_out, fanin_error *error)
{
    int fd = openat(directory, name,
                    O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
    *file_out = -1;
    if (fd < 0 && errno == ENOENT)
        return FANIN_OK;
    if (fd < 0 && errno == ELOOP)
        return refuse_own_file(a, name, "is a symbolic link", error);
    if (fd < 0)
        return adapter_io_error(&a->place, errno, "cannot read", name, REMEDY, error);
    struct stat info;
    char why[OWNERSHIP_TEXT];
    bool known = fstat(fd, &info) == 0, regular = known && S_ISREG(info.st_mode);
    if (regular && !ownership_doubtful(&info, why)) {
        *file_out = fd;
        *size_out = (uint64_t)info.st_size;
        return FANIN_OK;
    }
    close(fd);
    return refuse_own_file(a, name, regular ? why : "is no regular file", error);
}

/* Likewise all of it, to be freed; NULL with FANIN_OK: it is not there or larger than @p most. */
static fanin_status read_small_file(const adapter *a, int directory, const char *name,
                                    uint64_t most, char **text_out, size_t *size_out,
                                    fanin_error *error)
{
    int fd;
    uint64_t size = 0;
    *text_out = NULL;
    fanin_status status = adapter_open_file(a, directory, name, &fd, &size, error);
    if (status != FANIN_OK || fd < 0)
        return status;
    char *text = size <= most ? malloc((size_t)size + 1) : NULL;
    bool good = text && file_read(fd, text, (size_t)size, 0);
    int reason = errno; /* 0: it was cut meanwhile, as if it were not there */
    close(fd);
    if (good) {
        *text_out = text;
        *size_out = (size_t)size;
        return FANIN_OK;
    }
    if (size <= most && !text)
        return error_set_memory(error);
    if (text && reason != 0)
        status = adapter_io_error(&a->place, reason, "cannot read", name, NULL, error);
    free(text);
    return status;
}

/* Its bytes must be those that this pull would write: neither by a damage, nor by another
   version of this library, nor by trust_config may there be fields that this pull drops. */
static fanin_status check_text(const adapter *a, int directory, const json_t *root,
                               const adapter_text *wanted, fanin_error *error)
{
    uint64_t bytes;
    char *text = NULL;
    size_t size = 0;
    if (!adapter_identity_bytes(root, wanted->name, &bytes) || bytes > SIZE_MAX / 2)
        return refuse_damaged(a, wanted->name, error);
    fanin_status status =
        read_small_file(a, directory, wanted->name, bytes, &text, &size, error);
    if (status != FANIN_OK)
        return status;
    const char *hex = adapter_identity_digest(root, wanted->name);
    digest found = digest_of(text ? text : "", text ? size : 0);
    if (!text || size != bytes || (hex && !hex_equal(hex, found.bytes)))
        status = refuse_damaged(a, wanted->name, error);
    else if (size != wanted->size || memcmp(text, wanted->text, size) != 0)
        status = refuse_existing(
            a, error,
            "holds the step asked for with another %s than this pull would "
            "write",
            wanted->name);
    free(text);
    return status;
}

fanin_status adapter_read_identity(const adapter *a, int directory, json_t **out,
                                   fanin_error *error)
{
    char *text;
    size_t size = 0;
    fanin_status status =
        read_small_file(a, directory, IDENTITY_FILE, IDENTITY_MAX, &text, &size, error);
    *out = text ? adapter_identity_parse(text, size) : NULL;
    free(text);
    return status;
}

static bool may_read_on(void *cookie)
{
    return adapter_may_go_on(cookie, "reading", NULL) == FANIN_OK;
}

static fanin_status check_digest(adapter *a, int file, const tensor_file *wanted,
                                 const char *hex, fanin_error *error)
{
    digest found;
    switch (file_digest(file, wanted->layout.file_size, may_read_on, a, &found)) {
    case FILE_READ_OK:
        return hex_equal(hex, found.bytes) ? FANIN_OK
                                           : refuse_damaged(a, wanted->name, error);
    case FILE_READ_SHORT:
        return refuse_damaged(a, wanted->name, error);
    case FILE_READ_ERROR:
        return adapter_io_error(&a->place, errno, "cannot read", wanted->name, NULL,
                                error);
    case FILE_READ_STOPPED:
        return adapter_may_go_on(a, "reading", error);
    case FILE_READ_MEMORY:
        break;
    }
    return error_set_memory(error);
}

static fanin_status check_tensors(adapter *a, int directory, const json_t *root,
                                  const tensor_file *wanted, fanin_error *error)
{
    int file;
    uint64_t bytes, size = 0;
    const char *hex = adapter_identity_digest(root, wanted->name);
    if (!hex || !adapter_identity_bytes(root, wanted->name, &bytes))
        return refuse_damaged(a, wanted->name, error);
    fanin_status status =
        adapter_open_file(a, directory, wanted->name, &file, &size, error);
    if (status != FANIN_OK)
        return status;
    bool fits = file >= 0 && size == bytes && size == wanted->layout.file_size;
    status = fits ? check_digest(a, file, wanted, hex, error)
                  : refuse_damaged(a, wanted->name, error);
    if (file >= 0)
        close(file);
    return status;
}

/* Names and number of the files: those of a model may be cut in another way. */
static fanin_status check_list(const adapter *a, const json_t *root,
                               const adapter_text *texts, size_t n_texts,
                               fanin_error *error)
{
    const json_t *files = json_object_get(root, "files");
    bool same = json_object_size(files) == a->files.count + n_texts;
    for (size_t i = 0; i < a->files.count && same; i++)
        same = json_object_get(files, a->files.files[i].name) != NULL;
    for (size_t i = 0; i < n_texts && same; i++)
        same = json_object_get(files, texts[i].name) != NULL;
    if (same)
        return FANIN_OK;
    return refuse_existing(
        a, error,
        "holds the step asked for in other files than this pull would write "
        "(max_file_bytes)");
}

static fanin_status check_files(adapter *a, int directory, const json_t *root,
                                fanin_error *error)
{
    adapter_text texts[ADAPTER_TEXTS];
    size_t n = adapter_texts(a, texts);
    fanin_status status = FANIN_OK;
    if (a->terms.is_model)
        status = check_list(a, root, texts, n, error);
    for (size_t i = 0; i < n && status == FANIN_OK; i++)
        status = check_text(a, directory, root, &texts[i], error);
    for (size_t i = 0; i < a->files.count && status == FANIN_OK; i++)
        status = check_tensors(a, directory, root, &a->files.files[i], error);
    return status;
}

/* @p since_out: as of find_restarted(); the files are not looked at then. */
static fanin_status compare_with(adapter *a, int directory, const json_t *root,
                                 const adapter_identity *identity,
                                 char since_out[SINCE_TEXT], fanin_error *error)
{
    const char *why = adapter_identity_difference(root, identity);
    since_out[0] = '\0';
    if (why)
        return refuse_other(a, root, identity, why, error);
    fanin_status status = find_restarted(root, identity, since_out, error);
    if (status == FANIN_OK && since_out[0] == '\0')
        status = check_files(a, directory, root, error);
    return status;
}

/* A config.json of somebody else's is none of ours, though a pull may make one. */
static bool is_listed(const json_t *root, const char *name)
{
    return strcmp(name, IDENTITY_FILE) == 0 ||
           (adapter_makes_file(name) &&
            json_object_get(json_object_get(root, "files"), name) != NULL);
}

/* @p entry_out: the name of something in it, "": there is nothing. @p unlisted: that @p root does
   not tell of. */
static fanin_status find_in_directory(const adapter *a, int directory,
                                      const json_t *root, bool unlisted,
                                      char entry_out[NAME_MAX + 1], fanin_error *error)
{
    DIR *dir = adapter_list(directory);
    if (!dir)
        return adapter_io_error(&a->place, errno, "cannot read", NULL, NULL, error);
    entry_out[0] = '\0';
    for (struct dirent *one; entry_out[0] == '\0' && (one = readdir(dir)) != NULL;) {
        if (strcmp(one->d_name, ".") != 0 && strcmp(one->d_name, "..") != 0 &&
            !(unlisted && is_listed(root, one->d_name)))
            snprintf(entry_out, NAME_MAX + 1, "%s", one->d_name);
    }
    closedir(dir);
    return FANIN_OK;
}

/* FANIN_ERR_EXISTS: something in it was made by no pull. */
static fanin_status check_makers(const adapter *a, int directory, const json_t *root,
                                 fanin_error *error)
{
    char entry[NAME_MAX + 1] = "";
    fanin_status status = find_in_directory(a, directory, root, true, entry, error);
    return status != FANIN_OK || entry[0] == '\0'
               ? status
               : refuse_existing(a, error,
                                 "cannot be replaced: '%.100s' in it was made by no "
                                 "pull",
                                 entry);
}

/* -1: none. */
static bool same_directory(int one, int other)
{
    struct stat a, b;
    return one >= 0 && other >= 0 && fstat(one, &a) == 0 && fstat(other, &b) == 0 &&
           a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

fanin_status adapter_check_replaced(const adapter *a, fanin_error *error)
{
    json_t *root = NULL;
    fanin_status status;
    int there = openat(a->place.parent, a->temporary,
                       O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (!same_directory(there, a->replaced))
        status =
            refuse_existing(a, error, "was exchanged while its content was pulled");
    else
        status = adapter_read_identity(a, a->replaced, &root, error);
    if (status == FANIN_OK)
        status = check_makers(a, a->replaced, root, error);
    json_decref(root);
    if (there >= 0)
        close(there);
    return status;
}

/* The older directory is replaced if all of it was made by pulls of this publication. */
static fanin_status replace(adapter *a, int directory, const json_t *root,
                            const adapter_identity *identity, fanin_error *error)
{
    const char *publication = json_string_value(json_object_get(root, "publication"));
    if (strcmp(publication, identity->publication) != 0)
        return refuse_other(a, root, identity, "another publication", error);
    fanin_status status = check_makers(a, directory, root, error);
    if (status == FANIN_OK)
        a->replaced = directory;
    return status;
}

/* It has the step of ranks that are not there any more. */
static fanin_status replace_outlived(adapter *a, int directory, const json_t *root,
                                     const adapter_identity *identity,
                                     const char *since, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = replace(a, directory, root, identity, &why);
    if (status == FANIN_OK)
        log_write(&a->terms.log, FANIN_LOG_WARNING, "started-again",
                  "'%s' holds step %" PRIu64 " of %s, but %s: it is pulled again",
                  a->place.directory, identity->step, identity->publication, since);
    else if (status == FANIN_ERR_EXISTS)
        return refuse_existing(a, error, "holds the step asked for, but %s: %.140s",
                               since, why.message);
    return status == FANIN_OK ? FANIN_OK : error_copy(error, &why);
}

/* What differs from what this pull would make is replaced, if that is wanted, and always if it only
   differs by who had the step. */
static fanin_status compare_or_replace(adapter *a, int directory, const json_t *root,
                                       const adapter_identity *identity,
                                       bool *reuse_out, fanin_error *error)
{
    char since[SINCE_TEXT];
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = compare_with(a, directory, root, identity, since, &why);
    if (since[0] != '\0')
        return replace_outlived(a, directory, root, identity, since, error);
    if (status == FANIN_ERR_EXISTS && same_directory(a->old, directory))
        return replace(a, directory, root, identity, error);
    *reuse_out = status == FANIN_OK;
    return status == FANIN_OK ? FANIN_OK : error_copy(error, &why);
}

/* The directory is ours; it may be empty, and is then replaced. */
static fanin_status look_inside(adapter *a, int directory, const struct stat *info,
                                const adapter_identity *identity, bool *reuse_out,
                                fanin_error *error)
{
    char entry[NAME_MAX + 1] = "", why[OWNERSHIP_TEXT];
    fanin_status status = find_in_directory(a, directory, NULL, false, entry, error);
    if (status != FANIN_OK || entry[0] == '\0')
        return status;
    if (ownership_doubtful(info, why))
        return refuse_existing(a, error, "cannot be reused: it %s", why);
    json_t *root;
    status = adapter_read_identity(a, directory, &root, error);
    if (status == FANIN_OK)
        status =
            root ? compare_or_replace(a, directory, root, identity, reuse_out, error)
                 : refuse_existing(a, error,
                                   "holds '%.100s' and no readable " IDENTITY_FILE,
                                   entry);
    json_decref(root);
    return status;
}

/* Why the place could not be opened as a directory of ours. */
static fanin_status refuse_unopened(const adapter *a, int reason, fanin_error *error)
{
    struct stat info;
    char why[OWNERSHIP_TEXT];
    if (fstatat(a->place.parent, a->place.name, &info, AT_SYMLINK_NOFOLLOW) != 0)
        return adapter_io_error(&a->place, reason, "cannot open", NULL, NULL, error);
    if (S_ISLNK(info.st_mode))
        return refuse_existing(a, error, "is a symbolic link, which is not followed");
    if (!S_ISDIR(info.st_mode))
        return refuse_existing(a, error, "is there and is no directory");
    if (!ownership_doubtful(&info, why))
        return adapter_io_error(&a->place, reason, "cannot open", NULL, NULL, error);
    return refuse_existing(a, error, "cannot be used: it %s", why);
}

fanin_status adapter_reusable(adapter *a, const adapter_identity *identity,
                              bool *reuse_out, fanin_error *error)
{
    if (a->replaced >= 0)
        close(a->replaced);
    a->replaced = -1;
    *reuse_out = false;
    int directory = openat(a->place.parent, a->place.name,
                           O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (directory < 0)
        return errno == ENOENT ? FANIN_OK : refuse_unopened(a, errno, error);
    struct stat info;
    fanin_status status;
    if (fstat(directory, &info) != 0)
        status =
            adapter_io_error(&a->place, errno, "cannot look at", NULL, NULL, error);
    else if (info.st_uid != geteuid())
        status = refuse_unopened(a, EACCES, error);
    else
        status = look_inside(a, directory, &info, identity, reuse_out, error);
    if (a->replaced != directory)
        close(directory);
    return status;
}
