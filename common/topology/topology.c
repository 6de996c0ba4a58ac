/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"
#include "array.h"
#include "error_set.h"

#include <ctype.h>
#include <dirent.h>
#include <inttypes.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -------------------------------------------------------------------------- sysfs */

static bool sysfs_join(char out[PATH_MAX], const char *root, const char *name)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", root, name);
    return length > 0 && length < PATH_MAX;
}

/* The first line of a file below @p root, without its end; false: it is not there. */
static bool sysfs_line(const char *root, const char *name, char *out, size_t size)
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

/* The number (hexadecimal with 0x) that the file begins with, @p otherwise if there is none. */
static double sysfs_number(const char *root, const char *name, double otherwise)
{
    char text[64], *end;
    if (!sysfs_line(root, name, text, sizeof text))
        return otherwise;
    double number = strtod(text, &end);
    return end == text ? otherwise : number;
}

static bool sysfs_exists(const char *root, const char *name)
{
    char path[PATH_MAX];
    return sysfs_join(path, root, name) && access(path, F_OK) == 0;
}

static int by_version(const void *a, const void *b)
{
    return strverscmp(*(char *const *)a, *(char *const *)b);
}

static char **sysfs_names(const char *root, const char *folder, size_t *count_out)
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

static void sysfs_names_free(char **names, size_t count)
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

/* Where the link @p name below @p root leads: PCI address, path, NUMA node. */
static void sysfs_place(const char *root, const char *name, topology_place *out)
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

/* ----------------------------------------------------------------------- topology */

#define NVIDIA 0x10de
#define NAME_SIZE 256

/* ----------------------------------------------------------------- RDMA devices */

static void read_port(const char *sysfs, const char *nic, const char *number,
                      topology_port *out)
{
    char name[NAME_SIZE], text[64];
    *out = (topology_port){.number = (unsigned)strtoul(number, NULL, 10)};
    snprintf(name, sizeof name, "class/infiniband/%s/ports/%s/state", nic, number);
    out->state = (int)sysfs_number(sysfs, name, 0);
    snprintf(name, sizeof name, "class/infiniband/%s/ports/%s/rate", nic, number);
    out->gbps = sysfs_number(sysfs, name, 0);
    snprintf(name, sizeof name, "class/infiniband/%s/ports/%s/link_layer", nic, number);
    out->is_ethernet =
        sysfs_line(sysfs, name, text, sizeof text) && strcmp(text, "Ethernet") == 0;
    snprintf(name, sizeof name, "class/infiniband/%s/ports/%s/gid_attrs/ndevs/0", nic,
             number);
    if (sysfs_line(sysfs, name, text, sizeof text))
        snprintf(out->interface, sizeof out->interface, "%.31s", text);
}

static void read_nic(const char *sysfs, const char *nic, topology_nic *out)
{
    char name[NAME_SIZE];
    *out = (topology_nic){.n_ports = 0};
    snprintf(out->name, sizeof out->name, "%.31s", nic);
    snprintf(name, sizeof name, "class/infiniband/%s/device", nic);
    sysfs_place(sysfs, name, &out->place);
    snprintf(name, sizeof name, "class/infiniband/%s/ports", nic);
    size_t count;
    char **ports = sysfs_names(sysfs, name, &count);
    for (size_t i = 0; i < count && out->n_ports < TOPOLOGY_PORTS; i++)
        read_port(sysfs, nic, ports[i], &out->ports[out->n_ports++]);
    sysfs_names_free(ports, count);
}

static bool read_nics(const char *sysfs, topology *t)
{
    size_t count;
    char **names = sysfs_names(sysfs, "class/infiniband", &count);
    t->nics = calloc(count + 1, sizeof *t->nics);
    for (size_t i = 0; i < count && t->nics; i++)
        if (strlen(names[i]) < TOPOLOGY_NAME)
            read_nic(sysfs, names[i], &t->nics[t->n_nics++]);
    sysfs_names_free(names, count);
    return t->nics != NULL;
}

/* ------------------------------------------------------------------------- GPUs */

/* A display or 3D controller of NVIDIA's. */
static bool is_gpu(const char *sysfs, const char *device)
{
    char name[NAME_SIZE], text[64];
    snprintf(name, sizeof name, "bus/pci/devices/%s/vendor", device);
    if (!sysfs_line(sysfs, name, text, sizeof text) ||
        strtoul(text, NULL, 16) != NVIDIA)
        return false;
    snprintf(name, sizeof name, "bus/pci/devices/%s/class", device);
    if (!sysfs_line(sysfs, name, text, sizeof text))
        return false;
    unsigned long class = strtoul(text, NULL, 16) >> 8;
    return class == 0x0300 || class == 0x0302;
}

static bool read_gpus(const char *sysfs, topology *t)
{
    size_t count;
    char name[NAME_SIZE];
    char **names = sysfs_names(sysfs, "bus/pci/devices", &count);
    t->gpus = calloc(count + 1, sizeof *t->gpus);
    for (size_t i = 0; i < count && t->gpus; i++) {
        if (strlen(names[i]) > 15 || !is_gpu(sysfs, names[i]))
            continue;
        snprintf(name, sizeof name, "bus/pci/devices/%s", names[i]);
        sysfs_place(sysfs, name, &t->gpus[t->n_gpus++].place);
    }
    sysfs_names_free(names, count);
    return t->gpus != NULL;
}

static unsigned count_names(const char *sysfs, const char *folder, const char *prefix)
{
    size_t count;
    unsigned matching = 0;
    char **names = sysfs_names(sysfs, folder, &count);
    for (size_t i = 0; i < count; i++)
        matching += strncmp(names[i], prefix, strlen(prefix)) == 0 &&
                    (!*prefix || isdigit((unsigned char)names[i][strlen(prefix)]));
    sysfs_names_free(names, count);
    return matching;
}

fanin_status topology_read(const char *sysfs, topology **out, fanin_error *error)
{
    topology *t = calloc(1, sizeof *t);
    if (!t || !read_nics(sysfs, t) || !read_gpus(sysfs, t)) {
        topology_free(&t);
        return error_set_memory(error);
    }
    t->has_peer_memory = sysfs_exists(sysfs, "module/nvidia_peermem") ||
                         sysfs_exists(sysfs, "module/nv_peer_mem");
    t->iommus = count_names(sysfs, "class/iommu", "");
    t->numa_nodes = count_names(sysfs, "devices/system/node", "node");
    *out = t;
    return FANIN_OK;
}

void topology_free(topology **t)
{
    if (!*t)
        return;
    free((*t)->nics);
    free((*t)->gpus);
    free(*t);
    *t = NULL;
}

/* Hexadecimal digits and separators of a PCI address; the domain may be of 4 or 8 digits. */
static bool parse_pci(const char *text, unsigned out[4])
{
    return sscanf(text, "%x:%x:%x.%x", &out[0], &out[1], &out[2], &out[3]) == 4;
}

const topology_gpu *topology_gpu_at(const topology *t, const char *pci)
{
    unsigned wanted[4], one[4];
    if (!parse_pci(pci, wanted))
        return NULL;
    for (size_t i = 0; i < t->n_gpus; i++)
        if (parse_pci(t->gpus[i].place.pci, one) &&
            memcmp(one, wanted, sizeof one) == 0)
            return &t->gpus[i];
    return NULL;
}

bool topology_is_active(const topology_nic *nic)
{
    for (unsigned i = 0; i < nic->n_ports; i++)
        if (nic->ports[i].state == TOPOLOGY_ACTIVE)
            return true;
    return false;
}

/* ----------------------------------------------------------------------- distance */

/* A device below a switch has the switch's downstream and upstream ports above it. */
#define SWITCH_DEPTH 2

/* Components of a path: "a/b/c" has three. */
static unsigned depth(const char *path)
{
    unsigned n = path[0] != '\0';
    for (; *path; path++)
        n += *path == '/';
    return n;
}

/* Components that both paths begin with. */
static unsigned common_depth(const char *a, const char *b)
{
    unsigned n = 0;
    size_t at = 0;
    for (; a[at] && a[at] == b[at]; at++)
        n += a[at] == '/';
    bool a_ends = a[at] == '\0' || a[at] == '/', b_ends = b[at] == '\0' || b[at] == '/';
    return n + (at > 0 && a_ends && b_ends && a[at - 1] != '/');
}

topology_distance topology_between(const topology_place *a, const topology_place *b)
{
    if (!a->path[0] || !b->path[0])
        return a->numa >= 0 && a->numa == b->numa ? DISTANCE_NODE : DISTANCE_UNKNOWN;
    if (strcmp(a->path, b->path) == 0)
        return DISTANCE_SELF;
    unsigned common = common_depth(a->path, b->path);
    unsigned below_a = depth(a->path) - common, below_b = depth(b->path) - common;
    if (common >= 2) /* the root complex and a bridge */
        return below_a <= SWITCH_DEPTH && below_b <= SWITCH_DEPTH ? DISTANCE_SWITCH
                                                                  : DISTANCE_BRIDGE;
    if (common == 1)
        return DISTANCE_HOST;
    if (a->numa < 0 || b->numa < 0)
        return DISTANCE_UNKNOWN;
    return a->numa == b->numa ? DISTANCE_NODE : DISTANCE_SYSTEM;
}

const char *topology_distance_name(topology_distance distance)
{
    static const char *const names[] = {"X", "PIX", "PXB", "PHB", "NODE", "SYS", "?"};
    return names[distance];
}

size_t topology_bridges(const topology_place *place, char (*pci)[16], size_t most)
{
    size_t count = 0;
    const char *path = place->path, *end = strrchr(path, '/');
    while (end && end > path) {
        const char *start = end;
        while (start > path && start[-1] != '/')
            start--;
        if (start == path) /* the root complex is no bridge */
            break;
        if (count < most)
            snprintf(pci[count], 16, "%.*s", (int)(end - start), start);
        count++;
        end = start - 1;
    }
    return count;
}

/* ------------------------------------------------------------------- choosing */

bool topology_choose_port(const topology *t, const topology_place *near,
                          char name[TOPOLOGY_NAME + 8])
{
    topology_distance nearest = DISTANCE_UNKNOWN;
    double fastest = -1;
    for (size_t i = 0; i < t->n_nics; i++) {
        const topology_nic *nic = &t->nics[i];
        topology_distance distance =
            near ? topology_between(&nic->place, near) : DISTANCE_SELF;
        for (unsigned j = 0; j < nic->n_ports; j++) {
            const topology_port *port = &nic->ports[j];
            bool better = distance != nearest && fastest >= 0 ? distance < nearest
                                                              : port->gbps > fastest;
            if (port->state != TOPOLOGY_ACTIVE || !better)
                continue;
            nearest = distance;
            fastest = port->gbps;
            snprintf(name, TOPOLOGY_NAME + 8, "%s:%u", nic->name, port->number);
        }
    }
    return fastest >= 0;
}

/* ---------------------------------------------------------------------- cpu quota */

#define PREFIX "0::" /* of the line that is version 2's */

/* "/a/b" of /proc/self/cgroup, without a slash at its end; empty: the root, or unknown. */
static void own_group(const char *proc, char out[PATH_MAX])
{
    char name[PATH_MAX], line[PATH_MAX];
    out[0] = '\0';
    int length = snprintf(name, sizeof name, "%s/self/cgroup", proc);
    FILE *file = length > 0 && length < (int)sizeof name ? fopen(name, "re") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, PREFIX, strlen(PREFIX)) == 0)
            snprintf(out, PATH_MAX, "%s", line + strlen(PREFIX));
    }
    if (file)
        fclose(file);
    if (strcmp(out, "/") == 0)
        out[0] = '\0';
}

unsigned cpu_quota(const char *proc, const char *sys)
{
    char group[PATH_MAX], name[PATH_MAX + 32], text[64];
    unsigned least = UINT_MAX;
    own_group(proc, group);
    for (;;) {
        uint64_t time, period;
        snprintf(name, sizeof name, "fs/cgroup%s/cpu.max", group);
        if (sysfs_line(sys, name, text, sizeof text) &&
            sscanf(text, "%" SCNu64 " %" SCNu64, &time, &period) == 2 && period > 0) {
            uint64_t cpus = time / period + (time % period > 0);
            least = cpus < least ? (unsigned)cpus : least;
        }
        char *last = strrchr(group, '/');
        if (!last)
            return least > 0 ? least : 1;
        *last = '\0';
    }
}

/* ---------------------------------------------------------------------------- acs */

#define CONFIG_SIZE 4096
#define EXTENDED_START 0x100
#define ACS_CAPABILITY 0x000d
#define ACS_CONTROL 6            /* offset in the capability */
#define ACS_REDIRECT_BITS 0x000c /* P2P Request Redirect, P2P Completion Redirect */
#define MOST_CAPABILITIES 64     /* a chain that loops ends here */

static uint32_t dword(const uint8_t *config, unsigned at)
{
    return config[at] | (uint32_t)config[at + 1] << 8 | (uint32_t)config[at + 2] << 16 |
           (uint32_t)config[at + 3] << 24;
}

acs_state acs_of_bridge(const char *sysfs, const char *pci)
{
    char path[PATH_MAX];
    uint8_t config[CONFIG_SIZE];
    int length =
        snprintf(path, sizeof path, "%s/bus/pci/devices/%s/config", sysfs, pci);
    FILE *file = length > 0 && length < PATH_MAX ? fopen(path, "rbe") : NULL;
    if (!file)
        return ACS_UNKNOWN;
    size_t size = fread(config, 1, sizeof config, file);
    fclose(file);
    if (size < sizeof config) /* others than root get 64 bytes */
        return ACS_UNKNOWN;
    unsigned at = EXTENDED_START;
    for (int i = 0;
         i < MOST_CAPABILITIES && at >= EXTENDED_START && at <= CONFIG_SIZE - 8; i++) {
        uint32_t header = dword(config, at);
        if ((header & 0xffff) == ACS_CAPABILITY) {
            unsigned control = config[at + ACS_CONTROL] | config[at + ACS_CONTROL + 1]
                                                              << 8;
            return control & ACS_REDIRECT_BITS ? ACS_REDIRECTS : ACS_OFF;
        }
        at = header >> 20 & ~3U;
    }
    return ACS_OFF;
}
