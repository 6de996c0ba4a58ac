/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/check.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/python.h"
#include "fetch/session.h"
#include "fetch/tensor_directory.h"

#include "digest.h"
#include "text.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define IDENTITY "fanin.json"

/* Tensors are pulled in batches, so that memory stays bounded. */
enum { BATCH_BYTES = 64 << 20, PIECE = 1 << 20 };
enum { SHOWN = 60 }; /* bytes of a configuration's value in a message */

typedef struct verifier {
    char *dir;    /**< --dir */
    char *engine; /**< --engine */
    const char *directory;
    session *session;
    const common_options *common;
    tensor_directory files;
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    char publication[96]; /**< of fanin.json */
    uint64_t step;
    fanin_dtype dtype;    /**< what F32 became when it was pulled; 0: nothing */
    int trust_config;     /**< how it was pulled */
    json_t *config;       /**< NULL: a model's, without one */
    bool told;            /**< the ranks have a configuration */
    char difference[256]; /**< from the ranks' configuration, "" if none */
    whole_tensors pairs;  /**< the ranks' tensors, and where the files have them */
    uint64_t done;
    progress bar;
    fanin_error error; /**< of a callback */
} verifier;

static fanin_status mismatch(fanin_error *error, const verifier *v, const char *name,
                             const char *problem)
{
    failure_set(error, FANIN_ERR_MISMATCH, "do not load the directory; pull again",
                "%s:%s %s", v->publication, name, problem);
    snprintf(error->key, sizeof error->key, "%s:%s", v->publication, name);
    return FANIN_ERR_MISMATCH;
}

static const char *config_name(const verifier *v)
{
    return options_is_model(v->publication) ? "config.json" : "adapter_config.json";
}

static bool read_step(const json_t *step, uint64_t *out)
{
    const char *text =
        json_string_value(step); /* beyond what JSON takes for an integer */
    char *end;
    if (text == NULL) {
        *out = (uint64_t)json_integer_value(step);
        return json_is_integer(step) && json_integer_value(step) >= 0;
    }
    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0;
}

static bool read_identity(verifier *v, const json_t *root)
{
    const char *world = json_string_value(json_object_get(root, "world_id"));
    const char *publication = json_string_value(json_object_get(root, "publication"));
    const char *dtype = json_string_value(json_object_get(root, "dtype"));
    if (world == NULL || publication == NULL ||
        !read_step(json_object_get(root, "step"), &v->step) ||
        !options_is_publication(publication) ||
        strlen(world) != 2 * sizeof v->world_id ||
        !hex_read(world, v->world_id, sizeof v->world_id))
        return false;
    snprintf(v->publication, sizeof v->publication, "%s", publication);
    v->dtype = dtype != NULL ? fanin_dtype_from_name(dtype) : 0;
    return dtype == NULL || v->dtype != 0;
}

static fanin_status load_files(verifier *v, const char *directory, fanin_error *error)
{
    json_t *identity = tensor_directory_json(directory, IDENTITY, error);
    if (identity == NULL)
        return error->status = FANIN_ERR_MISMATCH;
    bool good = read_identity(v, identity);
    bool configured =
        json_object_get(json_object_get(identity, "files"), config_name(v)) != NULL;
    json_decref(identity);
    if (!good)
        return failure_set(error, FANIN_ERR_MISMATCH,
                           "give a directory that 'nixl-fetch pull' made",
                           "%s/%s: fields are missing or wrong", directory, IDENTITY);
    if (configured || !options_is_model(v->publication)) {
        v->config = tensor_directory_json(directory, config_name(v), error);
        if (v->config == NULL)
            return error->status = FANIN_ERR_MISMATCH;
    }
    fanin_status status = tensor_directory_open(
        directory, options_is_model(v->publication), &v->files, error);
    if (status == FANIN_ERR_NOT_FOUND) /* the directory is there, but not whole */
        status = error->status = FANIN_ERR_MISMATCH;
    return status;
}

static int load_directory(verifier *v, const char *directory)
{
    fanin_error error = FANIN_ERROR_INIT;
    struct stat st;
    errno = 0;
    if (stat(directory, &st) != 0 || !S_ISDIR(st.st_mode)) {
        int reason = errno;
        bool other = reason != ENOENT && reason != ENOTDIR && reason != 0;
        return failure_local(
            "cannot verify", other ? FANIN_ERR_IO : FANIN_ERR_NOT_FOUND,
            "give a directory that 'nixl-fetch pull' made", "--dir %s: %s", directory,
            reason != 0 ? strerror(reason) : "is no directory");
    }
    return load_files(v, directory, &error) == FANIN_OK
               ? 0
               : failure_report("cannot verify", &error);
}

/* Finds the ranks' tensor in the file; false stops, with an error. */
static bool verify_on_entry(void *cookie, const fanin_entry *e)
{
    verifier *v = cookie;
    char name[FANIN_MAX_NAME + 64];
    const tensor_place *place = NULL;
    if (options_is_model(v->publication))
        place = tensor_directory_find(&v->files, e->name);
    else if (fanin_adapter_name(e->name, name, sizeof name))
        place = tensor_directory_find(&v->files, name);
    if (place == NULL) {
        mismatch(&v->error, v, e->name, "is not in the file");
        return false;
    }
    const fanin_safetensors_entry f = place->entry;
    bool cast = v->dtype != 0 && e->dtype == FANIN_DTYPE_F32; /* to half the bytes */
    if (f.dtype != (cast ? v->dtype : e->dtype) || f.n_dims != e->n_dims ||
        f.bytes != (cast ? e->bytes / 2 : e->bytes) ||
        memcmp(f.shape, e->shape, e->n_dims * sizeof f.shape[0]) != 0) {
        mismatch(&v->error, v, e->name, "has another dtype or shape in the file");
        return false;
    }
    whole_tensor *p =
        whole_tensors_add(&v->pairs, e->name, f.dtype, e->n_dims, e->shape, f.bytes);
    p->descriptor = fanin_safetensors_descriptor(v->files.files[place->file]);
    p->offset = f.offset;
    return true;
}

static bool verify_on_rank(void *cookie, const fanin_rank_info *info)
{
    verifier *v = cookie;
    if (info->status == FANIN_OK &&
        memcmp(info->world_id, v->world_id, sizeof v->world_id) != 0) {
        failure_set(&v->error, FANIN_ERR_SUPERSEDED, "pull again",
                    "rank %d belongs to world %s, the directory to world %s",
                    (int)info->rank, output_hex(info->world_id).s,
                    output_hex(v->world_id).s);
        v->error.rank = info->rank;
        snprintf(v->error.address, sizeof v->error.address, "%s", info->address);
        return false;
    }
    return true;
}

/* What begins at the @p from th byte of @p text, as a message shows it: cut between characters. */
static void show_text(char out[SHOWN + 7], const char *text, size_t from)
{
    char shown[SHOWN + 1];
    utf8_copy(shown, sizeof shown, text + from);
    snprintf(out, SHOWN + 7, "%s%s%s", from != 0 ? "..." : "", shown,
             strlen(shown) < strlen(text + from) ? "..." : "");
}

/* Long values are shown from shortly before where they differ. */
static void tell_values(verifier *v, const char *field, const json_t *here,
                        const json_t *there)
{
    char name[SHOWN + 7], shown[2][SHOWN + 7];
    char *texts[2];
    const json_t *values[2] = {here, there};
    for (size_t i = 0; i < 2; i++)
        texts[i] =
            output_require(values[i] != NULL ? json_dumps(values[i], JSON_ENCODE_ANY)
                                             : strdup("absent"));
    size_t from = 0;
    while (texts[0][from] != '\0' && texts[0][from] == texts[1][from])
        from++;
    from = from < SHOWN / 2 ? 0 : from - SHOWN / 4;
    while (from != 0 && ((unsigned char)texts[0][from] & 0xc0) == 0x80)
        from--;
    for (size_t i = 0; i < 2; i++) {
        show_text(shown[i], texts[i], from);
        free(texts[i]);
    }
    show_text(name, field, 0);
    snprintf(v->difference, sizeof v->difference,
             "%s is %s in the file, %s on the ranks", name, shown[0], shown[1]);
}

/* The first field in which the file's configuration is another than the ranks'. */
static void compare_config(verifier *v, const json_t *ranks)
{
    const char *field;
    json_t *value;
    json_t *all = json_deep_copy(v->config);
    json_object_update(all, (json_t *)(uintptr_t)ranks);
    json_object_foreach(all, field, value)
    {
        const json_t *here = json_object_get(v->config, field);
        const json_t *there = json_object_get(ranks, field);
        if (here == NULL || there == NULL || !json_equal(here, there)) {
            tell_values(v, field, here, there);
            break;
        }
    }
    json_decref(all);
}

static bool on_config(void *cookie, const char *name, const char *text)
{
    (void)name;
    verifier *v = cookie;
    json_t *ranks = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    if (json_is_object(ranks) && json_is_object(v->config))
        compare_config(v, ranks);
    else
        snprintf(v->difference, sizeof v->difference, "%s",
                 v->config == NULL ? "it is not in the directory" : "it is no object");
    v->told = true;
    json_decref(ranks);
    return true;
}

/* Asked before the bytes are pulled: that pull proves that the step still stands. */
static fanin_status ask_config(verifier *v, fanin_error *error)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = v->publication;
    options.timeout_ms = session_left_ms(v->session);
    options.trust_config = v->trust_config != 0;
    fanin_status status =
        fanin_client_adapter_config(v->session->client, &options, on_config, v, error);
    if (status == FANIN_OK && v->config != NULL && !v->told)
        snprintf(v->difference, sizeof v->difference, "the ranks publish none");
    return status;
}

/* Catalog against file; the worlds first, since all else follows from them. */
static fanin_status verify_pair_up(verifier *v, fanin_error *error)
{
    session *s = v->session;
    fanin_status status = fanin_client_ranks(s->client, verify_on_rank, v, error);
    if (status == FANIN_OK && v->error.status == FANIN_OK)
        status = fanin_client_catalog(s->client, v->publication, NULL,
                                      session_left_ms(s), verify_on_entry, v, error);
    if (v->error.status != FANIN_OK) {
        *error = v->error;
        return error->status;
    }
    if (status == FANIN_OK && v->pairs.count != v->files.count)
        status = failure_set(error, FANIN_ERR_MISMATCH, "pull again",
                             "the file has %zu tensors, the ranks publish %zu",
                             v->files.count, v->pairs.count);
    return status;
}

static fanin_status verify_compare(const verifier *v, const whole_tensor *p,
                                   const uint8_t *memory, fanin_error *error)
{
    static uint8_t piece[PIECE];
    for (uint64_t done = 0; done < p->bytes; done += PIECE) {
        size_t size = p->bytes - done < PIECE ? (size_t)(p->bytes - done) : PIECE;
        const uint8_t *ranks = memory + done;
        if (!check_read(p->descriptor, p->offset + done, piece, size))
            return failure_set(error, FANIN_ERR_IO, "check the disk",
                               "the file cannot be read: %s",
                               errno != 0 ? strerror(errno) : "it became shorter");
        if (memcmp(piece, ranks, size) != 0) {
            size_t i = 0;
            while (piece[i] == ranks[i])
                i++;
            char text[128];
            snprintf(text, sizeof text,
                     "differs from byte %" PRIu64
                     " on: 0x%02x in the file, 0x%02x on the ranks",
                     done + i, piece[i], ranks[i]);
            return mismatch(error, v, p->name, text);
        }
    }
    return FANIN_OK;
}

/* Pulls pairs [first, end) to @p memory, at the directory's step. */
static fanin_status pull_batch(verifier *v, size_t first, size_t end, uint8_t *memory,
                               fanin_error *error)
{
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = v->publication;
    options.rule = FANIN_STEP_EXACT;
    options.step = v->step;
    options.timeout_ms = session_left_ms(v->session);
    options.dtype = v->dtype;
    fanin_status status =
        whole_tensors_pull(v->session->client, &options, &v->pairs.list[first],
                           end - first, memory, &result, error);
    if (status == FANIN_OK) {
        fanin_result_get(result, &info);
        if (memcmp(info.world_id, v->world_id, sizeof v->world_id) != 0)
            status = failure_set(error, FANIN_ERR_SUPERSEDED, "pull again",
                                 "the ranks are of another world than the directory");
    }
    fanin_result_free(&result);
    return status;
}

static fanin_status verify_batch(verifier *v, size_t first, size_t end, uint64_t bytes,
                                 fanin_error *error)
{
    size_t mapped;
    uint8_t *memory = whole_tensors_memory(bytes, &mapped, error);
    if (memory == NULL)
        return error->status;
    fanin_status status = pull_batch(v, first, end, memory, error);
    const uint8_t *from = memory;
    for (size_t i = first; status == FANIN_OK && i < end; i++) {
        status = verify_compare(v, &v->pairs.list[i], from, error);
        from += v->pairs.list[i].bytes;
        v->done += v->pairs.list[i].bytes;
        progress_update(&v->bar, v->done, v->pairs.bytes, NULL);
    }
    munmap(memory, mapped);
    return status;
}

static fanin_status verify_all(verifier *v, fanin_error *error)
{
    fanin_status status = verify_pair_up(v, error);
    status = status != FANIN_OK ? status : ask_config(v, error);
    for (size_t first = 0; status == FANIN_OK && first < v->pairs.count;) {
        size_t end = first + 1;
        uint64_t bytes = v->pairs.list[first].bytes;
        while (end < v->pairs.count && bytes + v->pairs.list[end].bytes <= BATCH_BYTES)
            bytes += v->pairs.list[end++].bytes;
        status = interrupt_requested()
                     ? failure_set(error, FANIN_ERR_CANCELLED, "", "interrupted")
                     : verify_batch(v, first, end, bytes, error);
        first = end;
    }
    if (status == FANIN_OK && v->difference[0] != '\0')
        status = failure_set(error, FANIN_ERR_MISMATCH,
                             "do not load the directory; pull again", "%s: %s",
                             config_name(v), v->difference);
    return status;
}

static void verify_tell(const verifier *v)
{
    if (v->common->json) {
        json_t *names = json_array();
        for (size_t i = 0; i < v->files.n_files; i++)
            json_array_append_new(names, output_string(v->files.names[i]));
        if (v->config != NULL)
            json_array_append_new(names, output_string(config_name(v)));
        output_json(output_object(
            "result", output_string("equal"), "files", names, "publication",
            output_string(v->publication), "step", output_u64(v->step), "world_id",
            output_digits(v->world_id), "tensors", output_u64(v->pairs.count), "bytes",
            output_u64(v->pairs.bytes), NULL));
        return;
    }
    printf("equal: %zu tensors, %" PRIu64 " bytes of %s at step %" PRIu64,
           v->pairs.count, v->pairs.bytes, v->publication, v->step);
    if (v->files.n_files == 1)
        printf(" (%s)", v->files.names[0]);
    else
        printf(" (%zu files)", v->files.n_files);
    if (v->config != NULL)
        printf(", and their configuration (%s)", config_name(v));
    putchar('\n');
}

static int verify_target(verifier *v)
{
    fanin_error error = FANIN_ERROR_INIT;
    int code = session_connect(v->session, session_left_ms(v->session));
    if (code != 0)
        return code;
    progress_start(&v->bar, "verify", v->common->quiet != 0, v->common->no_color != 0);
    fanin_status status = verify_all(v, &error);
    progress_end(&v->bar);
    if (status != FANIN_OK) {
        bool moved = status == FANIN_ERR_SUPERSEDED || status == FANIN_ERR_STALE;
        if (moved)
            snprintf(error.remedy, sizeof error.remedy, "pull again");
        return failure_report(moved                          ? "stale"
                              : status == FANIN_ERR_MISMATCH ? "not equal"
                                                             : "cannot verify",
                              &error);
    }
    verify_tell(v);
    return 0;
}

static int verify_directory(verifier *v, const invocation *line)
{
    session *s = v->session;
    int code = load_directory(v, v->directory);
    if (code == 0 && line->run == NULL)
        code = session_choose_run(s, v->publication);
    if (code == 0 && strcmp(s->publication, v->publication) != 0)
        return failure_local("cannot verify", FANIN_ERR_MISMATCH, "give its own run",
                             "%s holds %s, not %s", v->directory, v->publication,
                             s->publication);
    session_be_patient(s, line);
    return code != 0 ? code : verify_target(v);
}

/* ---------------------------------------------------------------- what an engine serves */

static void add_given(python *p, const char *option, const char *value)
{
    if (value != NULL) {
        python_add(p, option);
        python_add(p, value);
    }
}

/* The target as Python takes it. */
static char *trainer_of(const target *t)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    fputs(t->file != NULL ? t->file : "", stream);
    for (uint32_t i = 0; t->file == NULL && i < t->count; i++)
        fprintf(stream, "%s%s", i > 0 ? "," : "", t->addresses[i]);
    fclose(stream);
    return output_require(text);
}

/* Digests of what an engine holds are its workers' to make, in Python; so the comparison is there.
   Nothing is connected here. */
static int become_check(const session *s, const invocation *line, const char *url)
{
    static const uint8_t none[FANIN_WORLD_ID_SIZE];
    const fanin_client_config *config = &s->config;
    const output_text world = output_hex(config->world_id);
    uint32_t left_ms = session_left_ms(s);
    char left[32];
    python p;
    snprintf(left, sizeof left, "%u.%03u", left_ms / 1000, left_ms % 1000);
    python_start(&p, s->command, &line->common);
    python_add(&p, left);
    add_given(&p, "--run", s->publication);
    add_given(&p, "--server-name", config->server_name);
    add_given(&p, "--world-id",
              memcmp(config->world_id, none, sizeof none) != 0 ? world.s : NULL);
    add_given(&p, "--secret-file", config->secret_file);
    add_given(&p, "--tls-cert", config->tls_cert);
    add_given(&p, "--tls-key", config->tls_key);
    add_given(&p, "--tls-ca", config->tls_ca);
    python_add(&p, "--");
    python_add(&p, url);
    python_add(&p, trainer_of(&s->target));
    return python_become(&p);
}

static int verify_engine(const verifier *v, session *s, const invocation *line)
{
    const char *other = options_given_other(
        &line->parsed,
        "engine run world-size timeout json quiet verbose no-color "
        "server-name expect-world-id secret-file tls-cert tls-key tls-ca");
    if (other != NULL || line->words[0] != NULL)
        return failure_usage(s->command->name, "--engine and %s%s do not go together",
                             other != NULL ? "--" : "a directory, ",
                             other != NULL ? other : line->words[0]);
    char run[OPTIONS_PUBLICATION];
    int code = 0;
    if (line->run == NULL && !options_is_model(s->publication)) {
        snprintf(run, sizeof run, "full:%s",
                 s->target.run[0] != '\0' ? s->target.run : "0");
        code = session_choose_run(s, run);
    }
    session_be_patient(s, line);
    return code != 0 ? code : become_check(s, line, v->engine);
}

static int open_and_verify(session *s, const invocation *line, void *cookie)
{
    verifier *v = cookie;
    if (v->engine != NULL)
        return verify_engine(v, s, line);
    v->session = s;
    v->common = &line->common;
    if (v->dir != NULL && line->words[0] != NULL)
        return failure_usage(s->command->name, "--dir and '%s' are two directories",
                             line->words[0]);
    v->directory = v->dir != NULL ? v->dir : line->words[0];
    if (v->directory == NULL)
        return failure_usage(s->command->name, "--dir DIR is needed");
    int code = verify_directory(v, line);
    whole_tensors_free(&v->pairs);
    json_decref(v->config);
    tensor_directory_close(&v->files);
    return code;
}

static int verify_command(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 60000};
    verifier v = {.error = FANIN_ERROR_INIT};
    struct poptOption table[] = {
        {"dir", 'd', POPT_ARG_STRING, &v.dir, 0,
         "the directory, if it is not the word behind the run", "DIR"},
        {"trust-config", 0, POPT_ARG_NONE, &v.trust_config, 0,
         "it was pulled with --trust-config", NULL},
        {"engine", 'e', POPT_ARG_STRING, &v.engine, 0,
         "compare what this engine serves with what is trained, by Python", "URL"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, open_and_verify, &v);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch verify 127.0.0.1:6000 --world-size 8 --run 0 --dir adapter\n"
    "  nixl-fetch verify nixl_info.json full:0 /data/me/model-100\n"
    "  nixl-fetch verify nixl_info.json full:0 --engine http://10.0.0.7:8000\n"
    "\n"
    "Reads every byte of the directory's step from the ranks, under leases, and\n"
    "compares; likewise the configuration. Exit status 0: all is equal, with the\n"
    "files that were compared. 12: stale, the ranks have moved on to another step or\n"
    "another life, nothing can be said. 14: a key or a field differs, named, or a\n"
    "file is missing.\n"
    "\n"
    "With --engine, 'python3 -m fanin.check' of the PATH compares digests of what\n"
    "the engine's workers hold with digests of what the ranks train. Exit status 14:\n"
    "a tensor is served otherwise, named. 15: Python or fanin's package is not\n"
    "there.";

const command cmd_verify = {
    .name = "verify",
    .arguments = "TARGET [RUN] [DIR | --engine URL] [OPTION...]",
    .summary = "compare a pulled directory, or what an engine serves, with the ranks",
    .help = help,
    .takes_directory = true,
    .run = verify_command,
};
