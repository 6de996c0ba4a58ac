/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"
#include "ucx_internal.h"
#include <string.h>

/* RDMA ports have a colon; the list may name network interfaces too. */
static bool first_port_of(const char *list, char name[UCX_DEVICE_NAME])
{
    while (list && *list) {
        const size_t length = strcspn(list, ",");
        if (list[0] != '^' && memchr(list, ':', length) && length < UCX_DEVICE_NAME) {
            memcpy(name, list, length);
            name[length] = '\0';
            return true;
        }
        list += length + (list[length] == ',');
    }
    return false;
}

bool ucx_device_choose(const char *sysfs, const char *wanted, const char *gpu,
                       char name[UCX_DEVICE_NAME])
{
    if (first_port_of(wanted, name))
        return true;
    topology *t;
    if (topology_read(sysfs, &t, NULL) != FANIN_OK)
        return false;
    const topology_gpu *near = gpu ? topology_gpu_at(t, gpu) : NULL;
    const bool found = topology_choose_port(t, near ? &near->place : NULL, name);
    topology_free(&t);
    return found;
}
