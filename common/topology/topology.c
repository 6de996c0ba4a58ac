/* SPDX-License-Identifier: Apache-2.0 */
#include "topology_internal.h"

#include "error_set.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
