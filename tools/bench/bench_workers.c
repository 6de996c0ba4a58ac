/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of an engine, each with a client and memory of its own, which pull at once. */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ------------------------------------------------------------------ their memory */

fanin_status bench_make_arena(const bench *b, const session *s, uint32_t rank,
                              arena *out, fanin_error *error)
{
    return arena_make(s->client, s->publication, b->line.common.timeout_ms,
                      b->dest_device, b->half,
                      b->mappings != NULL ? b->mappings[rank] : NULL, out, error);
}

int bench_open_workers(bench *b)
{
    b->n_others = (size_t)b->workers - 1;
    b->others = output_require(calloc(b->n_others + 1, sizeof b->others[0]));
    for (size_t i = 0; i < b->n_others; i++)
        b->others[i].arena.device = DEVICE_HOST;
    for (size_t i = 0; i < b->n_others; i++) {
        bench_worker *w = &b->others[i];
        fanin_error error = FANIN_ERROR_INIT;
        int code =
            session_start(&w->session, b->self, &b->line, b->target, b->line.run);
        code =
            code != 0 ? code : session_connect(&w->session, b->line.common.timeout_ms);
        if (code == 0 && bench_make_arena(b, &w->session, (uint32_t)i + 1, &w->arena,
                                          &error) != FANIN_OK)
            code = failure_report("cannot pull", &error);
        if (code != 0)
            return code;
    }
    interrupt_install(b->session.client); /* whose pull ends, ends the others' */
    return 0;
}

void bench_close_workers(bench *b)
{
    for (size_t i = 0; i < b->n_others; i++) {
        session_end(&b->others[i].session);
        arena_free(&b->others[i].arena);
    }
    free(b->others);
    b->others = NULL;
    b->n_others = 0;
}

/* --------------------------------------------------------------------- their pulls */

static void *bench_worker_work(void *cookie)
{
    bench_worker *w = cookie;
    fanin_result *result = NULL;
    w->error = (fanin_error)FANIN_ERROR_INIT;
    w->info = (fanin_result_info){.struct_size = sizeof w->info};
    w->status = fanin_client_pull_into(w->session.client, w->options, w->arena.into,
                                       &result, &w->error);
    if (w->status == FANIN_OK) {
        fanin_result_get(result, &w->info);
        w->info.path_reason = w->info.ranks_json = NULL;
    }
    fanin_result_free(&result);
    return NULL;
}

static fanin_status bench_worker_start(bench *b, const fanin_pull_options *options,
                                       fanin_error *error)
{
    for (size_t i = 0; i < b->n_others; i++) {
        bench_worker *w = &b->others[i];
        w->options = options;
        w->running = pthread_create(&w->thread, NULL, bench_worker_work, w) == 0;
        if (!w->running)
            return failure_set(error, FANIN_ERR_LIMIT, "raise ulimit -u",
                               "no thread for rank %zu of the engine", i + 1);
    }
    return FANIN_OK;
}

/* Waits for all; the first error counts. */
static fanin_status bench_worker_join(bench *b, fanin_status status, fanin_error *error)
{
    for (size_t i = 0; i < b->n_others; i++) {
        bench_worker *w = &b->others[i];
        if (w->running && status != FANIN_OK)
            fanin_client_cancel(w->session.client);
        if (w->running) {
            pthread_join(w->thread, NULL);
            w->running = false;
        }
        if (status == FANIN_OK && w->status != FANIN_OK) {
            *error = w->error;
            status = w->status;
        }
    }
    return status;
}

static void bench_worker_add(const bench *b, fanin_result_info *info)
{
    uint64_t tensors = info->tensors, bytes = info->bytes, reads = info->reads;
    for (size_t i = 0; i < b->n_others; i++) {
        const fanin_result_info *other = &b->others[i].info;
        tensors += other->tensors;
        bytes += other->bytes;
        reads += other->reads;
        if (other->total_ns > info->total_ns)
            *info = *other;
    }
    info->tensors = tensors;
    info->bytes = bytes;
    info->reads = reads;
}

static fanin_status check_arena(const bench *b, arena *a, uint64_t step,
                                fanin_error *error)
{
    const uint8_t *memory;
    fanin_status status = arena_read(a, &memory, error);
    for (size_t i = 0; status == FANIN_OK && i < a->count; i++) {
        const fanin_tensor *t = &a->tensors[i];
        for (size_t j = 0; status == FANIN_OK && j < t->n_boxes; j++) {
            const uint8_t *address = t->boxes[j].address;
            status = check_box(&b->pattern, b->session.publication, t, &t->boxes[j],
                               step, memory + (address - a->memory), error);
        }
    }
    return status;
}

static fanin_status spoil(bench *b, fanin_error *error)
{
    fanin_status status = arena_spoil(&b->arena, error);
    for (size_t i = 0; status == FANIN_OK && i < b->n_others; i++)
        status = arena_spoil(&b->others[i].arena, error);
    return status;
}

static fanin_status check_all(bench *b, uint64_t step, fanin_error *error)
{
    fanin_status status = check_arena(b, &b->arena, step, error);
    for (size_t i = 0; status == FANIN_OK && i < b->n_others; i++)
        status = check_arena(b, &b->others[i].arena, b->others[i].info.step, error);
    return status;
}

/* Warm, a worker has described its memory long ago; a new one does it first of all. */
static fanin_status bench_worker_pull(const bench *b, const fanin_pull_options *options,
                                      fanin_result **result, fanin_error *error)
{
    const arena *a = &b->arena;
    return b->cold ? fanin_client_pull(b->session.client, options, a->tensors, a->count,
                                       result, error)
                   : fanin_client_pull_into(b->session.client, options, a->into, result,
                                            error);
}

/* All ranks of the engine pull at once; info is the slowest one's, but for tensors, bytes and
   reads, which are of all. The first one's ranks_json and path_reason are kept in b. */
static fanin_status pull_workers(bench *b, const fanin_pull_options *options,
                                 bool check, fanin_result_info *info,
                                 fanin_error *error)
{
    fanin_result *result = NULL;
    fanin_status status = check ? spoil(b, error) : FANIN_OK;
    if (status != FANIN_OK)
        return status;
    status = bench_worker_start(b, options, error);
    if (status == FANIN_OK)
        status = bench_worker_pull(b, options, &result, error);
    if (status == FANIN_OK) {
        fanin_result_get(result, info);
        snprintf(b->reason, sizeof b->reason, "%s",
                 info->path_reason != NULL ? info->path_reason : "");
        info->path_reason = info->ranks_json = NULL;
    }
    fanin_result_free(&result);
    uint64_t step = info->step;
    status = bench_worker_join(b, status, error);
    if (status == FANIN_OK)
        bench_worker_add(b, info);
    return status == FANIN_OK && check ? check_all(b, step, error) : status;
}

/* Removes a directory that a pull of this bench made: never what a link leads to. */
static void bench_worker_remove_directory(const char *path)
{
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = descriptor >= 0 ? fdopendir(descriptor) : NULL;
    if (directory == NULL) {
        if (descriptor >= 0)
            close(descriptor);
        return;
    }
    for (const struct dirent *e; (e = readdir(directory)) != NULL;)
        if (e->d_name[0] != '.')
            unlinkat(dirfd(directory), e->d_name, 0);
    closedir(directory);
    rmdir(path);
}

/* One pull into a directory; @p path is what it makes. */
static fanin_status bench_worker_pull_directory(bench *b,
                                                const fanin_pull_options *options,
                                                const char *path, bool check,
                                                fanin_result_info *info,
                                                fanin_error *error)
{
    fanin_result *result = NULL;
    uint64_t checked;
    fanin_status status = (options_is_model(options->publication)
                               ? fanin_client_pull_model
                               : fanin_client_pull_adapter)(b->session.client, options,
                                                            path, &result, error);
    bool made = status == FANIN_OK; /* else what lies there is somebody's */
    if (made) {
        fanin_result_get(result, info);
        snprintf(b->reason, sizeof b->reason, "%s",
                 info->path_reason != NULL ? info->path_reason : "");
        info->path_reason = info->ranks_json = NULL;
    }
    if (made && check)
        status = check_directory(&b->pattern, path, options->publication, info->step,
                                 &checked, error);
    if (made)
        bench_worker_remove_directory(path);
    fanin_result_free(&result);
    return status;
}

/* What the command line says of each pull. */
static void pull_options(const bench *b, fanin_pull_options *out)
{
    fanin_pull_options_init(out, sizeof *out);
    out->publication = b->session.publication;
    out->timeout_ms = b->line.common.timeout_ms;
    out->dtype = b->half;
    out->spare_file = b->spare_file != 0;
    out->verify = b->verify != 0;
}

fanin_status bench_pull(bench *b, bool check, fanin_result_info *info,
                        fanin_error *error)
{
    fanin_pull_options options;
    char path[4096];
    pull_options(b, &options);
    *info = (fanin_result_info){.struct_size = sizeof *info};
    if (!b->directory)
        return pull_workers(b, &options, check, info, error);
    snprintf(path, sizeof path, "%s/fanin-bench-%016" PRIx64 "-%" PRIu64, b->dest,
             b->mark, b->serial++);
    return bench_worker_pull_directory(b, &options, path, check, info, error);
}
