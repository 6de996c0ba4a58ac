/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx/one_sided_internal.h"

#include "device/devices.h"
#include "error_set.h"
#include <stdlib.h>
#include <sys/mman.h>

/* Made by the first one-sided pull, kept until the client's UCX end goes. */
fanin_status one_sided_make_staging(ucx_end *end, fanin_error *error)
{
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    if (!end->staging) {
        void *memory = mmap(NULL, STAGING_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED)
            return error_set_memory(error);
        end->staging = memory;
    }
    if (end->staging_local)
        return FANIN_OK;
    return ucx_local_create(end->client, end->staging, STAGING_BYTES, host,
                            &end->staging_local, error);
}

/* Registers a range for gets that land in it. */
static fanin_status register_range(one_sided *o, const memory_range *r, ucx_local **out,
                                   fanin_error *error)
{
    fanin_memory memory = {FANIN_MEMORY_HOST, -1};
    if (r->device < 0)
        return ucx_local_create(o->end->client, r->base, r->length, memory, out, error);
    memory = (fanin_memory){FANIN_MEMORY_CUDA, r->device};
    gpu *g = device_sink_gpu(o->r->sink);
    fanin_status status = gpu_context_enter(g, r->device, error);
    if (status != FANIN_OK)
        return status;
    status = ucx_local_create(o->end->client, r->base, r->length, memory, out, error);
    gpu_context_leave(g);
    return status;
}

void one_sided_register(one_sided *o)
{
    size_t n = o->r->n_ranges;
    bool refused[2] = {false, !o->r->sink};
    o->locals = calloc(n + 1, sizeof *o->locals);
    for (; o->locals && o->n_locals < n; o->n_locals++) {
        const memory_range *r = &o->r->ranges[o->n_locals];
        bool *no = &refused[r->device >= 0];
        fanin_error why = FANIN_ERROR_INIT;
        if (*no)
            continue;
        if (register_range(o, r, &o->locals[o->n_locals], &why) == FANIN_OK) {
            if (r->device >= 0)
                o->context = r->device;
            continue;
        }
        *no = true;
        log_write(&o->r->client->log, FANIN_LOG_INFO, "destination",
                  "the destination%s is not registered, reads go through staging: %s",
                  r->device >= 0 ? " on a device" : "", why.message);
    }
}

/* Slots on each device that has destinations, if UCX can write there. */
static void make_device_slots(one_sided *o)
{
    size_t n = o->r->sink ? device_sink_devices(o->r->sink) : 0;
    for (size_t i = 0; i < n; i++) {
        get *gets = &o->gets[FIRST_DEVICE + i * DEVICE_SLOTS];
        int device = device_sink_device_at(o->r->sink, i);
        uint8_t *memory;
        ucx_local *local;
        fanin_error why = FANIN_ERROR_INIT;
        if (device_memory_staging(o->r->client->devices->memory, o->end->client, device,
                                  SPAN_MAX, &memory, &local, &why) != FANIN_OK) {
            log_write(&o->r->client->log, FANIN_LOG_INFO, "destination",
                      "nothing is read straight into device %d, but through host "
                      "memory: %s",
                      device, why.message);
            continue;
        }
        o->context = device;
        for (size_t j = 0; j < DEVICE_SLOTS; j++) {
            gets[j].slot = memory + j * SPAN_MAX;
            gets[j].local = local;
            gets[j].device = device;
        }
    }
}

/* Room for entries of each staged get; the host's slots must be readable by devices. */
static fanin_status make_copies(one_sided *o, fanin_error *error)
{
    unsigned area = 0;
    fanin_client *client = o->r->client;
    if (!o->r->sink)
        return FANIN_OK;
    if (!device_sink_attach(o->r->sink, &client->loop, &client->devices->memory)) {
        (void)device_sink_failed(o->r->sink, error);
        return FANIN_ERR_TRANSPORT;
    }
    fanin_status status = device_memory_pin(client->devices->memory, o->end->staging,
                                            STAGING_BYTES, error);
    if (status != FANIN_OK)
        return status;
    make_device_slots(o);
    for (size_t i = 0; i < o->n_gets; i++) {
        if (o->gets[i].slot)
            sink_job_init(&o->gets[i].copy, o->r->sink, area++, o);
    }
    return FANIN_OK;
}

fanin_status one_sided_make_gets(one_sided *o, fanin_error *error)
{
    size_t on_devices = o->r->sink ? device_sink_devices(o->r->sink) : 0;
    o->n_gets = FIRST_DEVICE + on_devices * DEVICE_SLOTS;
    o->gets = calloc(o->n_gets, sizeof *o->gets);
    if (!o->gets)
        return error_set_memory(error);
    for (size_t i = 0; i < o->n_gets; i++) {
        o->gets[i].reader = o;
        o->gets[i].device = -1;
        o->gets[i].job.run = get_scatter;
    }
    for (size_t i = 0; i < STAGING_SLOTS; i++) {
        o->gets[i].slot = o->end->staging + i * SPAN_MAX;
        o->gets[i].local = o->end->staging_local;
    }
    return make_copies(o, error);
}
