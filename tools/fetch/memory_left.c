/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/memory_left.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of a cgroup's version, in its folder; what the page cache takes the kernel gives back. */
typedef struct cgroup_files {
    const char *limits[2], *used, *cached[2];
} cgroup_files;

static const cgroup_files version_1 = {{"memory.limit_in_bytes"},
                                       "memory.usage_in_bytes",
                                       {"total_active_file", "total_inactive_file"}};
/* Above "high" the kernel holds the process up, above "max" it ends it. */
static const cgroup_files version_2 = {
    {"memory.max", "memory.high"}, "memory.current", {"active_file", "inactive_file"}};

/* The number behind @p word and blanks at the beginning of a line; @p none: there is no such line,
   or no number. */
static uint64_t number_behind(const char *path, const char *word, uint64_t none)
{
    char row[128], *end;
    size_t size = strlen(word);
    uint64_t found = none;
    FILE *stream = fopen(path, "re");
    while (stream != NULL && found == none && fgets(row, sizeof row, stream) != NULL) {
        if (strncmp(row, word, size) == 0 && (size == 0 || row[size] == ' ')) {
            uint64_t value = strtoull(row + size, &end, 10);
            found = end > row + size ? value : none;
        }
    }
    if (stream != NULL)
        fclose(stream);
    return found;
}

static uint64_t number_in(const char *folder, const char *file, const char *word,
                          uint64_t none)
{
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s/%s", folder, file);
    return length < (int)sizeof path ? number_behind(path, word, none) : none;
}

static uint64_t cgroup_left(const char *folder, const cgroup_files *files)
{
    uint64_t limit = UINT64_MAX;
    for (size_t i = 0; i < 2 && files->limits[i] != NULL; i++) {
        uint64_t one = number_in(folder, files->limits[i], "", UINT64_MAX);
        limit = one < limit ? one : limit;
    }
    if (limit == UINT64_MAX)
        return limit;
    uint64_t used = number_in(folder, files->used, "", 0);
    for (size_t i = 0; i < 2; i++) {
        uint64_t cached = number_in(folder, "memory.stat", files->cached[i], 0);
        used -= cached < used ? cached : used;
    }
    return used < limit ? limit - used : 0;
}

/* Of a group and those that it is in. A container may see its own group at the top, and be told
   another path of it: files that are not there say nothing. */
static void look_at_groups(const char *top, char *group, const cgroup_files *files,
                           memory_left *left)
{
    char folder[PATH_MAX];
    while (snprintf(folder, sizeof folder, "%s%s", top, group) < (int)sizeof folder) {
        uint64_t bytes = cgroup_left(folder, files);
        if (bytes < left->bytes) {
            left->bytes = bytes;
            snprintf(left->who, sizeof left->who, "the cgroup %s",
                     group[0] != '\0' ? group : "/");
        }
        char *slash = strrchr(group, '/');
        if (slash == NULL)
            return;
        *slash = '\0';
    }
}

static bool names_memory(char *controllers)
{
    bool named = false;
    for (char *one; !named && (one = strsep(&controllers, ",")) != NULL;)
        named = strcmp(one, "memory") == 0;
    return named;
}

/* Rows of "number:controllers:/group"; version 2 names no controllers. */
static void look_at_row(char *row, const char *sys, memory_left *left)
{
    char top[PATH_MAX];
    row[strcspn(row, "\n")] = '\0';
    char *rest = row;
    (void)strsep(&rest, ":");
    char *controllers = strsep(&rest, ":");
    if (rest == NULL || rest[0] != '/')
        return;
    rest[rest[1] == '\0' ? 0 : strlen(rest)] = '\0';
    bool second = controllers[0] == '\0';
    if (second || names_memory(controllers)) {
        snprintf(top, sizeof top, "%s/fs/cgroup%s", sys, second ? "" : "/memory");
        look_at_groups(top, rest, second ? &version_2 : &version_1, left);
    }
}

memory_left memory_left_find(const char *proc, const char *sys)
{
    memory_left left = {.who = "this host"};
    char path[PATH_MAX], row[PATH_MAX];
    uint64_t kib = number_in(proc, "meminfo", "MemAvailable:", UINT64_MAX / 1024);
    left.bytes = kib * 1024;
    snprintf(path, sizeof path, "%s/self/cgroup", proc);
    FILE *stream = fopen(path, "re");
    while (stream != NULL && fgets(row, sizeof row, stream) != NULL)
        look_at_row(row, sys, &left);
    if (stream != NULL)
        fclose(stream);
    return left;
}
