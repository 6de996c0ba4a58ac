/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

/* Removes a directory that a pull of this bench made: never what a link leads to. */
static void remove_directory(const char *path)
{
    int descriptor = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = descriptor >= 0 ? fdopendir(descriptor) : NULL;
    if (directory == NULL) {
        if (descriptor >= 0) {
            close(descriptor);
        }
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

/* One pull into a directory; @p path is what it makes. */
static fanin_status pull_directory(bench *b, const fanin_pull_options *options,
                                   const char *path, bool check,
                                   fanin_result_info *info, fanin_error *error)
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
    if (made && check) {
        status = check_directory(&b->pattern, path, options->publication, info->step,
                                 &checked, error);
    }
    if (made) {
        remove_directory(path);
    }
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
    if (!b->directory) {
        return bench_pull_workers(b, &options, check, info, error);
    }
    snprintf(path, sizeof path, "%s/fanin-bench-%016" PRIx64 "-%" PRIu64, b->dest,
             b->mark, b->serial++);
    return pull_directory(b, &options, path, check, info, error);
}
