/* SPDX-License-Identifier: Apache-2.0 */
#include "sysfs_tree.h"

#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void fail(const char *what)
{
    perror(what);
    abort();
}

const char *sysfs_tree_make(char out[256])
{
    const char *parent = getenv("TMPDIR");
    snprintf(out, 256, "%.200s/sysfs-XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(out))
        fail("mkdtemp");
    return out;
}

static int remove_one(const char *path, const struct stat *info, int kind,
                      struct FTW *at)
{
    (void)info;
    (void)kind;
    (void)at;
    return remove(path);
}

void sysfs_tree_remove(const char *root)
{
    nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* The folders above @p path. */
static void make_parents(char *path)
{
    for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(path, 0755);
        *slash = '/';
    }
}

void sysfs_tree_file(const char *root, const char *text, const char *format, ...)
{
    char path[PATH_MAX];
    int used = snprintf(path, sizeof path, "%s/", root);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path + used, sizeof path - (size_t)used, format, arguments);
    va_end(arguments);
    make_parents(path);
    FILE *file = fopen(path, "w");
    if (!file || fprintf(file, "%s\n", text) < 0 || fclose(file) != 0)
        fail(path);
}

static void make_link(const char *root, const char *target, const char *name)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", root, name);
    make_parents(path);
    if (symlink(target, path) != 0)
        fail(path);
}

void sysfs_tree_pci(const char *root, const char *path, const char *vendor,
                    const char *class, int numa)
{
    char text[32], target[PATH_MAX], name[128];
    const char *address = strrchr(path, '/') + 1;
    snprintf(text, sizeof text, "%d", numa);
    sysfs_tree_file(root, vendor, "devices/%s/vendor", path);
    sysfs_tree_file(root, class, "devices/%s/class", path);
    sysfs_tree_file(root, text, "devices/%s/numa_node", path);
    snprintf(target, sizeof target, "../../../devices/%s", path);
    snprintf(name, sizeof name, "bus/pci/devices/%s", address);
    make_link(root, target, name);
}

void sysfs_tree_nic(const char *root, const char *name, const char *path, double gbps,
                    int state, const char *link)
{
    char text[64], target[PATH_MAX], place[256];
    snprintf(text, sizeof text, "%d: %s", state, state == 4 ? "ACTIVE" : "DOWN");
    sysfs_tree_file(root, text, "class/infiniband/%s/ports/1/state", name);
    snprintf(text, sizeof text, "%g Gb/sec (4X NDR)", gbps);
    sysfs_tree_file(root, text, "class/infiniband/%s/ports/1/rate", name);
    sysfs_tree_file(root, link, "class/infiniband/%s/ports/1/link_layer", name);
    if (!path)
        return;
    snprintf(target, sizeof target, "../../../devices/%s", path);
    snprintf(place, sizeof place, "class/infiniband/%s/device", name);
    make_link(root, target, place);
}

typedef struct slot {
    const char *complex; /* root complex, root port, switch's upstream port */
    const char *gpu, *nic, *name;
    int numa;
} slot;

void sysfs_tree_dgx(const char *root)
{
    static const slot slots[] = {
        {"pci0000:15/0000:15:01.0/0000:16:00.0", "0000:1b:00.0", "0000:18:00.0",
         "mlx5_0", 0},
        {"pci0000:37/0000:37:01.0/0000:38:00.0", "0000:43:00.0", "0000:40:00.0",
         "mlx5_3", 0},
        {"pci0000:48/0000:48:01.0/0000:49:00.0", "0000:52:00.0", "0000:4f:00.0",
         "mlx5_4", 0},
        {"pci0000:59/0000:59:01.0/0000:5a:00.0", "0000:61:00.0", "0000:5e:00.0",
         "mlx5_5", 0},
        {"pci0000:97/0000:97:01.0/0000:98:00.0", "0000:9d:00.0", "0000:9a:00.0",
         "mlx5_6", 1},
        {"pci0000:b7/0000:b7:01.0/0000:b8:00.0", "0000:c3:00.0", "0000:c0:00.0",
         "mlx5_9", 1},
        {"pci0000:c7/0000:c7:01.0/0000:c8:00.0", "0000:d1:00.0", "0000:ce:00.0",
         "mlx5_10", 1},
        {"pci0000:d7/0000:d7:01.0/0000:d8:00.0", "0000:df:00.0", "0000:dc:00.0",
         "mlx5_11", 1},
    };
    char path[256];
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        const slot *s = &slots[i];
        snprintf(path, sizeof path, "%s/0000:f0:0%zu.0/%s", s->complex, 2 * i, s->gpu);
        sysfs_tree_pci(root, path, "0x10de", "0x030200", s->numa);
        snprintf(path, sizeof path, "%s/0000:f0:0%zu.1/%s", s->complex, 2 * i, s->nic);
        sysfs_tree_pci(root, path, "0x15b3", "0x020700", s->numa);
        sysfs_tree_nic(root, s->name, path, 400, 4, "InfiniBand");
    }
    static const char *const storage[] = {"mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"};
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "pci0000:%s/0000:%s:01.0/0000:%s:00.%d",
                 i < 2 ? "26" : "a7", i < 2 ? "26" : "a7", i < 2 ? "29" : "aa", i % 2);
        sysfs_tree_pci(root, path, "0x15b3", "0x020000", i / 2);
        sysfs_tree_nic(root, storage[i], path, 200, i == 1 ? 1 : 4, "Ethernet");
    }
    sysfs_tree_file(root, "", "module/nvidia_peermem/version");
    sysfs_tree_file(root, "", "devices/system/node/node0/meminfo");
    sysfs_tree_file(root, "", "devices/system/node/node1/meminfo");
}

void sysfs_tree_cloud(const char *root)
{
    sysfs_tree_pci(root, "pci0000:00/0000:00:05.0", "0x10de", "0x030200", -1);
    sysfs_tree_pci(root, "pci0000:00/0000:00:06.0", "0x10de", "0x030200", -1);
    sysfs_tree_pci(root, "pci0000:00/0000:00:07.0", "0x15b3", "0x020000", -1);
    sysfs_tree_pci(root, "pci0000:00/0000:00:03.0", "0x1af4", "0x020000", -1);
    sysfs_tree_nic(root, "mlx5_0", "pci0000:00/0000:00:07.0", 100, 4, "Ethernet");
    sysfs_tree_file(root, "", "class/iommu/dmar0/x");
}

void sysfs_tree_laptop(const char *root)
{
    sysfs_tree_pci(root, "pci0000:00/0000:00:02.0", "0x8086", "0x030000", -1);
    sysfs_tree_file(root, "", "devices/system/node/node0/meminfo");
}
