/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "topology_internal.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool sysfs_join(char out[PATH_MAX], const char *root, const char *name)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", root, name);
    return length > 0 && length < PATH_MAX;
}

bool sysfs_line(const char *root, const char *name, char *out, size_t size)
{
    char path[PATH_MAX];
    FILE *file = sysfs_join(path, root, name) ? fopen(path, "re") : NULL;
    if (!file)
        return false;
    bool good = fgets(out, (int)size, file) != NULL;
    fclose(file);
    if (good)
        out[strcspn(out, "\n")] = '\0';
    return good;
}

double sysfs_number(const char *root, const char *name, double otherwise)
{
    char text[64], *end;
    if (!sysfs_line(root, name, text, sizeof text))
        return otherwise;
    double number = strtod(text, &end);
    return end == text ? otherwise : number;
}

bool sysfs_exists(const char *root, const char *name)
{
    char path[PATH_MAX];
    return sysfs_join(path, root, name) && access(path, F_OK) == 0;
}

static int by_version(const void *a, const void *b)
{
    return strverscmp(*(char *const *)a, *(char *const *)b);
}

char **sysfs_names(const char *root, const char *folder, size_t *count_out)
{
    char path[PATH_MAX];
    char **names = NULL;
    size_t count = 0, capacity = 0;
    DIR *directory = sysfs_join(path, root, folder) ? opendir(path) : NULL;
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        if (entry->d_name[0] == '.')
            continue;
        if (!array_reserve(&names, &capacity, count + 1, sizeof *names))
            break;
        names[count] = strdup(entry->d_name);
        if (!names[count])
            break;
        count++;
    }
    if (directory)
        closedir(directory);
    if (count > 1)
        qsort(names, count, sizeof *names, by_version);
    *count_out = count;
    return names;
}

void sysfs_names_free(char **names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

static bool is_pci_address(const char *name)
{
    unsigned domain, bus, device, function;
    char rest;
    return sscanf(name, "%x:%x:%x.%x%c", &domain, &bus, &device, &function, &rest) == 4;
}

void sysfs_place(const char *root, const char *name, topology_place *out)
{
    char path[PATH_MAX], real[PATH_MAX], base[PATH_MAX];
    *out = (topology_place){.numa = -1};
    if (!sysfs_join(path, root, name) || !realpath(path, real) || !realpath(root, base))
        return;
    const char *last = strrchr(real, '/');
    if (last && is_pci_address(last + 1))
        snprintf(out->pci, sizeof out->pci, "%.15s", last + 1);
    char devices[] = "/devices/";
    const char *below = strstr(real + strlen(base), devices);
    if (out->pci[0] && below)
        snprintf(out->path, sizeof out->path, "%.*s", TOPOLOGY_PATH - 1,
                 below + strlen(devices));
    out->numa = (int)sysfs_number(real, "numa_node", -1);
}
