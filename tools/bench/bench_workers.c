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

int bench_connect(const bench *b, session *s)
{
    int code = session_start(s, b->self, &b->line, b->target, b->line.run);
    code = code != 0 ? code : session_need_run(s);
    return code != 0 ? code : session_connect(s, b->line.common.timeout_ms);
}

int bench_open_workers(bench *b)
{
    int code = 0;
    b->all = output_require(calloc((size_t)b->workers, sizeof b->all[0]));
    for (int i = 0; i < b->workers; i++)
        b->all[i] = (bench_worker){.bench = b, .arena.device = DEVICE_HOST};
    for (int i = 0; code == 0 && i < b->workers; i++) {
        bench_worker *w = &b->all[i];
        fanin_error error = FANIN_ERROR_INIT;
        code = bench_connect(b, &w->session);
        if (code == 0 && !b->directory &&
            arena_make(w->session.client, w->session.publication,
                       b->line.common.timeout_ms, b->dest_device, b->half,
                       b->mappings != NULL ? b->mappings[i] : NULL, &w->arena,
                       &error) != FANIN_OK)
            code = failure_report("cannot pull", &error);
    }
    if (code == 0)
        interrupt_install(b->all[0].session.client); /* whose pull ends, ends all */
    return code;
}

void bench_close_workers(bench *b)
{
    for (int i = 0; b->all != NULL && i < b->workers; i++) {
        session_end(&b->all[i].session);
        arena_free(&b->all[i].arena);
    }
    free(b->all);
    b->all = NULL;
}

/* --------------------------------------------------------------------- their pulls */

/* Its texts end with @p result; of the first one the path's reason is kept. */
static void take_result(bench *b, const fanin_result *result, bool first,
                        fanin_result_info *info)
{
    fanin_result_get(result, info);
    if (first)
        snprintf(b->reason, sizeof b->reason, "%s",
                 info->path_reason != NULL ? info->path_reason : "");
    info->path_reason = info->ranks_json = NULL;
}

/* Warm, a worker has described its memory long ago; a new one does it first of all. */
static void *bench_worker_work(void *cookie)
{
    bench_worker *w = cookie;
    bench *b = w->bench;
    const arena *a = &w->arena;
    fanin_result *result = NULL;
    w->error = (fanin_error)FANIN_ERROR_INIT;
    w->info = (fanin_result_info){.struct_size = sizeof w->info};
    w->status = b->cold ? fanin_client_pull(w->session.client, &b->options, a->tensors,
                                            a->count, &result, &w->error)
                        : fanin_client_pull_into(w->session.client, &b->options,
                                                 a->into, &result, &w->error);
    if (w->status == FANIN_OK)
        take_result(b, result, w == b->all, &w->info);
    for (int i = 0; w->status != FANIN_OK && i < b->workers; i++)
        if (&b->all[i] != w)
            fanin_client_cancel(b->all[i].session.client);
    fanin_result_free(&result);
    return NULL;
}

/* The first failure that is not only the end that another one made. */
static fanin_status find_failure(const bench *b, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (int i = 0; i < b->workers; i++) {
        const bench_worker *w = &b->all[i];
        if (w->status != FANIN_OK &&
            (status == FANIN_OK || status == FANIN_ERR_CANCELLED)) {
            *error = w->error;
            status = w->status;
        }
    }
    return status;
}

/* The slowest one's, with tensors, bytes and reads of all. */
static void bench_sum_up(const bench *b, fanin_result_info *info)
{
    uint64_t tensors = 0, bytes = 0, reads = 0;
    for (int i = 0; i < b->workers; i++) {
        const fanin_result_info *one = &b->all[i].info;
        tensors += one->tensors;
        bytes += one->bytes;
        reads += one->reads;
        if (i == 0 || one->total_ns > info->total_ns)
            *info = *one;
    }
    info->tensors = tensors;
    info->bytes = bytes;
    info->reads = reads;
}

static fanin_status check_arena(const bench *b, bench_worker *w, fanin_error *error)
{
    const uint8_t *memory;
    const arena *a = &w->arena;
    fanin_status status = arena_read(&w->arena, &memory, error);
    for (size_t i = 0; status == FANIN_OK && i < a->count; i++) {
        const fanin_tensor *t = &a->tensors[i];
        for (size_t j = 0; status == FANIN_OK && j < t->n_boxes; j++) {
            const uint8_t *address = t->boxes[j].address;
            status = check_box(&b->pattern, w->session.publication, t, &t->boxes[j],
                               w->info.step, memory + (address - a->memory), error);
        }
    }
    return status;
}

/* All ranks of the engine pull at once. */
static fanin_status pull_workers(bench *b, bool check, fanin_result_info *info,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (int i = 0; check && status == FANIN_OK && i < b->workers; i++)
        status = arena_spoil(&b->all[i].arena, error);
    if (status != FANIN_OK)
        return status;
    if (bench_together(bench_worker_work, b->all, sizeof b->all[0],
                       (uint32_t)b->workers) != 0)
        return failure_set(error, FANIN_ERR_LIMIT, "raise ulimit -u",
                           "no thread for each of the engine's %d ranks", b->workers);
    status = find_failure(b, error);
    if (status == FANIN_OK)
        bench_sum_up(b, info);
    for (int i = 0; check && status == FANIN_OK && i < b->workers; i++)
        status = check_arena(b, &b->all[i], error);
    return status;
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

/* One pull into a directory, which is removed again. */
static fanin_status bench_pull_directory(bench *b, bool check, fanin_result_info *info,
                                         fanin_error *error)
{
    fanin_result *result = NULL;
    uint64_t checked;
    char path[4096];
    const char *publication = b->options.publication;
    snprintf(path, sizeof path, "%s/fanin-bench-%016" PRIx64 "-%" PRIu64, b->dest,
             b->mark, b->serial++);
    fanin_status status = (options_is_model(publication) ? fanin_client_pull_model
                                                         : fanin_client_pull_adapter)(
        b->all[0].session.client, &b->options, path, &result, error);
    bool made = status == FANIN_OK; /* else what lies there is somebody's */
    if (made)
        take_result(b, result, true, info);
    if (made && check)
        status = check_directory(&b->pattern, path, publication, info->step, &checked,
                                 error);
    if (made)
        bench_worker_remove_directory(path);
    fanin_result_free(&result);
    return status;
}

fanin_status bench_pull(bench *b, bool check, fanin_result_info *info,
                        fanin_error *error)
{
    fanin_pull_options *options = &b->options;
    fanin_pull_options_init(options, sizeof *options);
    options->publication = b->all[0].session.publication;
    options->timeout_ms = b->line.common.timeout_ms;
    options->dtype = b->half;
    options->spare_file = b->spare_file != 0;
    options->verify = b->verify != 0;
    *info = (fanin_result_info){.struct_size = sizeof *info};
    return (b->directory ? bench_pull_directory : pull_workers)(b, check, info, error);
}
