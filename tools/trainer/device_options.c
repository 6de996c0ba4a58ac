/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/device_options.h"
#include "trainer/device_driver.h"
#include "fetch/failure.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void device_table(device_options *options, struct poptOption table[DEVICE_OPTIONS])
{
    const struct poptOption entries[DEVICE_OPTIONS] = {
        {"device", 0, POPT_ARG_STRING, &options->device, 0,
         "shards in memory of CUDA devices: 0,1 gives each half of the ranks; 'host' "
         "may be among them",
         "D[,D...]"},
        {"snapshot", 0, POPT_ARG_NONE, &options->snapshot, 0,
         "publish copies, which the next update does not touch", NULL},
        {"cast", 0, POPT_ARG_STRING, &options->cast, 0,
         "with --snapshot: publish F32 as bf16 or f16", "DTYPE"},
        {"no-stream-commit", 0, POPT_ARG_NONE, &options->no_stream, 0,
         "wait for the device before each commit instead of giving it the stream",
         NULL},
        POPT_TABLEEND,
    };
    memcpy(table, entries, sizeof(entries));
}

bool device_list_parse(const char *text, int out[DEVICE_LIST], size_t *count_out)
{
    size_t count = 0;
    for (const char *at = text;;) {
        char *end;
        if (count == DEVICE_LIST) {
            return false;
        }
        if (strncmp(at, "host", 4) == 0) {
            out[count] = DEVICE_HOST;
            end = (char *)(uintptr_t)(at + 4);
        } else {
            errno = 0;
            long number = at[0] >= '0' && at[0] <= '9' ? strtol(at, &end, 10) : -1;
            if (number < 0 || number >= DEVICE_MAX || errno != 0) {
                return false;
            }
            out[count] = (int)number;
        }
        count++;
        if (*end == '\0') {
            *count_out = count;
            return true;
        }
        if (*end != ',') {
            return false;
        }
        at = end + 1;
    }
}

int device_resolve(const command *self, device_options *options, rank_options *out)
{
    rank_publishing *p = &out->publishing;
    if (options->no_stream && options->device == NULL) {
        return failure_usage(self->name, "--no-stream-commit needs --device");
    }
    if (options->cast != NULL && !options->snapshot) {
        return failure_usage(self->name, "--cast needs --snapshot");
    }
    p->snapshot = options->snapshot != 0;
    p->no_stream = options->no_stream != 0;
    if (options->cast != NULL && (p->cast = options_half(options->cast)) == 0) {
        return failure_usage(self->name, "--cast is bf16 or f16, not '%s'",
                             options->cast);
    }
    if (options->device == NULL) {
        return 0;
    }
    if (!device_list_parse(options->device, options->devices, &p->n_devices)) {
        return failure_usage(self->name,
                             "--device '%s' is no list such as 0,1 or host,0",
                             options->device);
    }
    if (p->n_devices > out->world_size) {
        return failure_usage(self->name, "--device names more devices than ranks");
    }
    p->devices = options->devices;
    return 0;
}

int rank_device(const rank_options *options, uint32_t rank)
{
    const rank_publishing *p = &options->publishing;
    return p->n_devices > 0
               ? p->devices[(uint64_t)rank * p->n_devices / options->world_size]
               : DEVICE_HOST;
}

bool rank_works(const rank_options *options, uint32_t rank)
{
    int device = rank_device(options, rank);
    for (uint32_t other = 0; other < rank; other++) {
        if (rank_device(options, other) == device) {
            return false;
        }
    }
    return options->load != DEVICE_LOAD_NONE && device != DEVICE_HOST;
}
