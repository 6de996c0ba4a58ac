/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"

#include <stdio.h>
#include <string.h>

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
