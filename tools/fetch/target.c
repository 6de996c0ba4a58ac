/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/target.h"
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"

#include "digest.h"
#include "socket.h"
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 32 << 20 };

static const char forms[] =
    "give HOST:PORT[,HOST:PORT...], HOST:BASEPORT with --world-size N, a "
    "nixl_info.json, or the directory that holds one";

/* Takes the place of rank @p index, which must be free. */
static fanin_status target_place(target *out, uint64_t index, const char *host,
                                 uint64_t port, fanin_error *error)
{
    bool v6 = strchr(host, ':') != NULL && host[0] != '[';
    if (port == 0 || port > 65535)
        return failure_set(error, FANIN_ERR_ARGUMENT, "give a smaller base port",
                           "rank %" PRIu64 " would listen on port %" PRIu64
                           " of %s, and ports end at 65535",
                           index, port, host);
    if (out->addresses[index] != NULL)
        return failure_set(error, FANIN_ERR_ARGUMENT, "name every rank once",
                           "rank %" PRIu64 " is named twice", index);
    if (asprintf(&out->addresses[index], v6 ? "[%s]:%" PRIu64 : "%s:%" PRIu64, host,
                 port) < 0)
        output_require(NULL);
    return FANIN_OK;
}

static fanin_status target_reserve(target *out, uint64_t count, fanin_error *error)
{
    if (count == 0 || count > TARGET_MAX_RANKS)
        return failure_set(error, FANIN_ERR_ARGUMENT, "1 to 65536 ranks are possible",
                           "a world of %" PRIu64 " ranks", count);
    out->addresses = output_require(calloc(count, sizeof out->addresses[0]));
    out->count = (uint32_t)count;
    return FANIN_OK;
}

/* Takes "host:port" or "[v6]:port" apart; blanks around it do not count. */
static fanin_status split(char *word, char host[SOCKET_HOST], uint16_t *port,
                          fanin_error *error)
{
    word += strspn(word, " ");
    for (size_t n = strlen(word); n > 0 && word[n - 1] == ' '; n--)
        word[n - 1] = '\0';
    if (!socket_split(word, host, port) || *port == 0)
        return failure_set(error, FANIN_ERR_ARGUMENT, forms, "'%.200s' is no HOST:PORT",
                           word);
    return FANIN_OK;
}

static fanin_status parse_list(const char *text, uint32_t world_size, target *out,
                               fanin_error *error)
{
    uint64_t count = 1;
    char host[SOCKET_HOST];
    uint16_t port = 0;
    for (const char *p = text; *p != '\0'; p++)
        count += *p == ',';
    if (count > 1 && world_size != 0 && world_size != count)
        return failure_set(error, FANIN_ERR_ARGUMENT, "leave out --world-size",
                           "%" PRIu64 " addresses for a world of %u ranks", count,
                           world_size);
    char *list = output_require(strdup(text)), *rest = list;
    fanin_status status =
        target_reserve(out, world_size != 0 ? world_size : count, error);
    out->in_rank_order = count == 1;
    for (uint32_t rank = 0; status == FANIN_OK && rank < out->count; rank++) {
        if (rank < count)
            status = split(strsep(&rest, ","), host, &port, error);
        if (status == FANIN_OK)
            status = target_place(out, rank, host,
                                  count == 1 ? (uint64_t)port + rank : port, error);
    }
    free(list);
    return status;
}

static fanin_status bad_file(fanin_error *error, const char *path, const char *problem)
{
    return failure_set(error, FANIN_ERR_ARGUMENT,
                       "it should hold host, base_port and world_size, or hosts",
                       "%s: %s", path, problem);
}

static fanin_status parse_host(const json_t *entry, const char *path, target *out,
                               uint64_t *next, fanin_error *error)
{
    const json_t *host = json_object_get(entry, "host");
    const json_t *port = json_object_get(entry, "base_port");
    const json_t *ranks = json_object_get(entry, "ranks");
    const char *name = json_string_value(host);
    if (name == NULL || name[0] == '\0' || !json_is_integer(port) ||
        json_integer_value(port) < 0 || json_integer_value(port) > 65535)
        return bad_file(error, path, "a host without a name or with a bad base_port");
    bool list = json_is_array(ranks);
    if (!list && (!json_is_integer(ranks) || json_integer_value(ranks) < 0 ||
                  json_integer_value(ranks) > TARGET_MAX_RANKS))
        return bad_file(error, path,
                        "\"ranks\" is neither a list of ranks nor a number of them");
    uint64_t base = (uint64_t)json_integer_value(port);
    uint64_t n = list ? json_array_size(ranks) : (uint64_t)json_integer_value(ranks);
    for (uint64_t i = 0; i < n; i++) {
        json_int_t rank = list ? -1 : (json_int_t)*next;
        const json_t *item = list ? json_array_get(ranks, i) : NULL;
        if (json_is_integer(item))
            rank = json_integer_value(item);
        if (rank < 0 || rank >= out->count)
            return bad_file(error, path,
                            "a rank that is not below the number of ranks");
        fanin_status status =
            target_place(out, (uint64_t)rank, name, base + (uint64_t)rank, error);
        if (status != FANIN_OK)
            return status;
        *next = (uint64_t)rank + 1;
    }
    return FANIN_OK;
}

static fanin_status parse_hosts(const json_t *hosts, const char *path,
                                uint64_t world_size, target *out, fanin_error *error)
{
    uint64_t count = 0;
    uint64_t next = 0;
    size_t i;
    const json_t *entry;
    json_array_foreach(hosts, i, entry)
    {
        const json_t *ranks = json_object_get(entry, "ranks");
        json_int_t n = json_is_array(ranks) ? (json_int_t)json_array_size(ranks)
                                            : json_integer_value(ranks);
        count += n > 0 && n <= TARGET_MAX_RANKS ? (uint64_t)n : 0;
    }
    if (world_size != 0 && world_size != count)
        return failure_set(error, FANIN_ERR_ARGUMENT, "correct world_size or the hosts",
                           "%s: the hosts have %" PRIu64
                           " ranks, world_size is %" PRIu64,
                           path, count, world_size);
    fanin_status status = target_reserve(out, count, error);
    json_array_foreach(hosts, i, entry)
    {
        if (status == FANIN_OK)
            status = parse_host(entry, path, out, &next, error);
    }
    return status;
}

/* "run_idx": a number or a name. */
static fanin_status parse_run(const json_t *run, const char *path, target *out,
                              fanin_error *error)
{
    if (run == NULL || json_is_null(run))
        return FANIN_OK;
    if (json_is_integer(run) && json_integer_value(run) >= 0)
        snprintf(out->run, sizeof out->run, "%lld", (long long)json_integer_value(run));
    else if (json_is_string(run))
        snprintf(out->run, sizeof out->run, "%s", json_string_value(run));
    return options_run_valid(out->run)
               ? FANIN_OK
               : bad_file(error, path,
                          "\"run_idx\" is neither a number from 0 on nor 1 to 64 of "
                          "A-Z a-z 0-9 . _ -");
}

static bool is_named(const target *t, const char *publication)
{
    size_t i = 0;
    while (i < t->n_publications && strcmp(t->publications[i], publication) != 0)
        i++;
    return i < t->n_publications;
}

/* "publications": a list of names; those of kinds that this release does not know are left out. */
static fanin_status parse_publications(const json_t *list, const char *path,
                                       target *out, fanin_error *error)
{
    size_t i;
    const json_t *entry;
    if (list == NULL || json_is_null(list))
        return FANIN_OK;
    if (!json_is_array(list))
        return bad_file(error, path, "\"publications\" is not a list");
    out->publications =
        output_require(calloc(json_array_size(list) + 1, sizeof out->publications[0]));
    json_array_foreach(list, i, entry)
    {
        const char *name = json_string_value(entry);
        if (name == NULL)
            return bad_file(error, path, "one of \"publications\" is no name");
        if (options_is_publication(name) && !is_named(out, name))
            out->publications[out->n_publications++] = output_require(strdup(name));
    }
    return FANIN_OK;
}

const char *target_choose(const target *t, char choices[TARGET_CHOICES])
{
    const char *chosen = NULL;
    size_t fit = 0;
    choices[0] = '\0';
    if (t->n_publications == 0)
        return t->run[0] != '\0' ? t->run : "0";
    for (size_t i = 0; i < t->n_publications; i++) {
        const char *name = t->publications[i];
        if (strcmp(strchr(name, ':') + 1, t->run) == 0) {
            chosen = name;
            fit++;
        }
        output_append(choices, TARGET_CHOICES, "%s%s", i > 0 ? ", " : "", name);
    }
    if (fit == 0 && t->n_publications == 1)
        return t->publications[0];
    return fit == 1 ? chosen : NULL;
}

/* It names the secret, and never is it. */
static fanin_status parse_secret_file(const json_t *file, const char *path, target *out,
                                      fanin_error *error)
{
    if (file == NULL || json_is_null(file))
        return FANIN_OK;
    if (!json_is_string(file) || json_string_value(file)[0] != '/')
        return bad_file(error, path, "\"secret_file\" is no absolute path");
    out->secret_file = output_require(strdup(json_string_value(file)));
    return FANIN_OK;
}

/* What the ranks must announce: "world_id" and "server_name". */
static fanin_status parse_demands(const json_t *root, const char *path, target *out,
                                  fanin_error *error)
{
    const json_t *world = json_object_get(root, "world_id");
    const json_t *name = json_object_get(root, "server_name");
    if (world != NULL && !json_is_null(world) &&
        (!json_is_string(world) ||
         !target_world_id(json_string_value(world), out->world_id)))
        return bad_file(error, path,
                        "\"world_id\" is not 32 hexadecimal digits, not all zero");
    fanin_status status =
        parse_secret_file(json_object_get(root, "secret_file"), path, out, error);
    if (status != FANIN_OK || name == NULL || json_is_null(name))
        return status;
    if (!json_is_string(name) || json_string_value(name)[0] == '\0')
        return bad_file(error, path, "\"server_name\" is no name");
    out->server_name = output_require(strdup(json_string_value(name)));
    return FANIN_OK;
}

static fanin_status parse_base(const json_t *root, const char *path, uint64_t size,
                               target *out, fanin_error *error)
{
    const char *host = json_string_value(json_object_get(root, "host"));
    const json_t *port = json_object_get(root, "base_port");
    if (host == NULL || host[0] == '\0' || !json_is_integer(port) ||
        json_integer_value(port) < 1 || json_integer_value(port) > 65535 || size == 0)
        return bad_file(error, path, "host, base_port or world_size is missing or bad");
    fanin_status status = target_reserve(out, size, error);
    for (uint32_t rank = 0; status == FANIN_OK && rank < out->count; rank++)
        status = target_place(out, rank, host,
                              (uint64_t)json_integer_value(port) + rank, error);
    return status;
}

static fanin_status parse_object(const json_t *root, const char *path,
                                 uint32_t world_size, target *out, fanin_error *error)
{
    const json_t *world = json_object_get(root, "world_size");
    const json_t *hosts = json_object_get(root, "hosts");
    if (!json_is_object(root))
        return bad_file(error, path, "not an object");
    if (world != NULL && (!json_is_integer(world) || json_integer_value(world) < 1 ||
                          json_integer_value(world) > TARGET_MAX_RANKS))
        return bad_file(error, path, "a bad world_size");
    if (hosts != NULL && !json_is_array(hosts))
        return bad_file(error, path, "\"hosts\" is not a list");
    uint64_t size = (uint64_t)json_integer_value(world);
    if (size != 0 && world_size != 0 && size != world_size)
        return bad_file(error, path, "another world_size than --world-size");
    size = size != 0 ? size : world_size;
    fanin_status status = parse_run(json_object_get(root, "run_idx"), path, out, error);
    if (status == FANIN_OK)
        status =
            parse_publications(json_object_get(root, "publications"), path, out, error);
    status = status != FANIN_OK ? status : parse_demands(root, path, out, error);
    if (status != FANIN_OK)
        return status;
    return hosts != NULL ? parse_hosts(hosts, path, size, out, error)
                         : parse_base(root, path, size, out, error);
}

/* Of a file that cannot be read, or is none. */
static fanin_status target_unreadable(fanin_error *error, const char *path, int reason,
                                      const char *why)
{
    if (reason < 0)
        return failure_set(error, FANIN_ERR_ARGUMENT, forms, "the target %s %s", path,
                           why);
    fanin_status status =
        reason == ENOENT || reason == ENOTDIR ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO;
    failure_set(error, status,
                "check the path of nixl_info.json; the trainer writes it", "%s: %s",
                path, why);
    error->sys_errno = reason;
    return status;
}

static fanin_status target_parse_file(const char *text, uint32_t world_size,
                                      target *out, fanin_error *error)
{
    json_error_t why;
    struct stat st;
    int reason;
    bool directory = stat(text, &st) == 0 && S_ISDIR(st.st_mode);
    if (asprintf(&out->file, "%s%s", text, directory ? "/nixl_info.json" : "") < 0)
        output_require(NULL);
    json_t *root = json_file_read(out->file, MAX_FILE, &why, &reason);
    if (reason != 0)
        return target_unreadable(error, out->file, reason, why.text);
    if (root == NULL)
        return bad_file(error, out->file, why.text);
    fanin_status status = parse_object(root, out->file, world_size, out, error);
    json_decref(root);
    return status;
}

bool target_is_file(const char *text)
{
    size_t length = strlen(text);
    return strchr(text, '/') != NULL ||
           (length > 5 && strcmp(text + length - 5, ".json") == 0) ||
           (strchr(text, ':') == NULL && access(text, F_OK) == 0);
}

bool target_world_id(const char *text, uint8_t world_id[FANIN_WORLD_ID_SIZE])
{
    static const uint8_t zero[FANIN_WORLD_ID_SIZE];
    return strlen(text) == 2 * FANIN_WORLD_ID_SIZE &&
           hex_read(text, world_id, FANIN_WORLD_ID_SIZE) &&
           memcmp(world_id, zero, sizeof zero) != 0;
}

fanin_status target_parse(const char *text, uint32_t world_size, target *out,
                          fanin_error *error)
{
    *out = (target){0};
    fanin_status status;
    if (text[0] == '\0') {
        status = failure_set(error, FANIN_ERR_ARGUMENT, forms, "the target is empty");
    } else if (target_is_file(text)) {
        status = target_parse_file(text, world_size, out, error);
        out->in_rank_order = true;
    } else if (strpbrk(text, ":,") == NULL) {
        status = failure_set(error, FANIN_ERR_ARGUMENT, forms,
                             "'%.200s' has no port, and no file or directory has that "
                             "name",
                             text);
    } else {
        status = parse_list(text, world_size, out, error);
    }
    if (status != FANIN_OK)
        target_free(out);
    return status;
}

void target_free(target *t)
{
    for (uint32_t i = 0; t->addresses != NULL && i < t->count; i++)
        free(t->addresses[i]);
    for (size_t i = 0; i < t->n_publications; i++)
        free(t->publications[i]);
    free(t->publications);
    free(t->addresses);
    free(t->file);
    free(t->server_name);
    free(t->secret_file);
    *t = (target){0};
}
