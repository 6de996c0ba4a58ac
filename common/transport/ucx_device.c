/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx_internal.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A number at the beginning of a file of one line, -1 if there is none. */
static double number_in(const char *directory, const char *device, const char *port,
                        const char *file)
{
    char path[1024];
    double number = -1;
    const int length = snprintf(path, sizeof(path), "%s/%s/ports/%s/%s", directory,
                                device, port, file);
    if (length < 0 || (size_t)length >= sizeof(path))
        return -1;
    FILE *stream = fopen(path, "re");
    if (stream && fscanf(stream, "%lf", &number) != 1)
        number = -1;
    if (stream)
        fclose(stream);
    return number;
}

typedef struct choice {
    double rate;
    char name[UCX_DEVICE_NAME];
} choice;

/* Faster, then first by name: the same for all processes of a host. */
static void consider(choice *best, const char *directory, const char *device,
                     const char *port)
{
    choice c;
    const int length = snprintf(c.name, sizeof(c.name), "%s:%s", device, port);
    if (length < 0 || (size_t)length >= sizeof(c.name) ||
        number_in(directory, device, port, "state") != 4) /* 4: ACTIVE */
        return;
    c.rate = number_in(directory, device, port, "rate");
    if (!best->name[0] || c.rate > best->rate ||
        (c.rate == best->rate && strcmp(c.name, best->name) < 0))
        *best = c;
}

static void consider_ports(choice *best, const char *directory, const char *device)
{
    char path[512];
    const int length = snprintf(path, sizeof(path), "%s/%s/ports", directory, device);
    DIR *ports = length > 0 && (size_t)length < sizeof(path) ? opendir(path) : NULL;
    for (struct dirent *port; ports && (port = readdir(ports));)
        if (port->d_name[0] != '.')
            consider(best, directory, device, port->d_name);
    if (ports)
        closedir(ports);
}

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

bool ucx_device_choose(const char *directory, const char *wanted,
                       char name[UCX_DEVICE_NAME])
{
    if (first_port_of(wanted, name))
        return true;
    choice best = {.rate = -1};
    DIR *devices = opendir(directory);
    for (struct dirent *device; devices && (device = readdir(devices));)
        if (device->d_name[0] != '.')
            consider_ports(&best, directory, device->d_name);
    if (devices)
        closedir(devices);
    memcpy(name, best.name, sizeof(best.name));
    return best.name[0] != '\0';
}
