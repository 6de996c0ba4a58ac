/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

/* Removes a directory that this bench made. */
static void remove_directory(const char *path)
{
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return;
    }
    for (const struct dirent *e; (e = readdir(directory)) != NULL;) {
        if (e->d_name[0] != '.') {
            unlinkat(dirfd(directory), e->d_name, 0);
        }
    }
    closedir(directory);
    rmdir(path);
}

static fanin_status check_arena(bench *b, uint64_t step, fanin_error *error)
{
    const uint8_t *memory;
    fanin_status status = arena_read(&b->arena, &memory, error);
    for (size_t i = 0; status == FANIN_OK && i < b->arena.count; i++) {
        const fanin_tensor *t = &b->arena.tensors[i];
        const uint8_t *address = t->boxes[0].address;
        status = check_memory(&b->pattern, b->session.publication, t->name, t->dtype,
                              step, memory + (address - b->arena.memory),
                              arena_bytes(&b->arena, i), error);
    }
    return status;
}

static fanin_status pull_memory(bench *b, const fanin_pull_options *options, bool check,
                                fanin_result **result, fanin_error *error)
{
    fanin_status status = check ? arena_spoil(&b->arena, error) : FANIN_OK;
    if (status == FANIN_OK) {
        status = fanin_client_pull(b->session.client, options, b->arena.tensors,
                                   b->arena.count, result, error);
    }
    return status;
}

fanin_status bench_pull(bench *b, bool check, fanin_result_info *info,
                        fanin_error *error)
{
    fanin_result *result = NULL;
    fanin_pull_options options;
    char path[4096];
    uint64_t checked;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = b->session.publication;
    options.timeout_ms = b->line.common.timeout_ms;
    options.dtype = b->half;
    options.spare_file = b->spare_file != 0;
    options.verify = b->verify != 0;
    *info = (fanin_result_info){.struct_size = sizeof *info};
    snprintf(path, sizeof path, "%s/fanin-bench-%d-%" PRIu64,
             b->directory ? b->dest : "", (int)getpid(), b->serial++);
    fanin_status status =
        !b->directory ? pull_memory(b, &options, check, &result, error)
        : options_is_model(options.publication)
            ? fanin_client_pull_model(b->session.client, &options, path, &result, error)
            : fanin_client_pull_adapter(b->session.client, &options, path, &result,
                                        error);
    if (status == FANIN_OK) {
        fanin_result_get(result, info);
        snprintf(b->reason, sizeof b->reason, "%s",
                 info->path_reason != NULL ? info->path_reason : "");
        info->path_reason = info->ranks_json = NULL;
    }
    if (status == FANIN_OK && check) {
        status = b->directory
                     ? check_directory(&b->pattern, path, b->session.publication,
                                       info->step, &checked, error)
                     : check_arena(b, info->step, error);
    }
    if (b->directory) {
        remove_directory(path);
    }
    fanin_result_free(&result);
    return status;
}
