/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/trainer_options.h"
#include "fetch/failure.h"
#include "fetch/target.h"
#include "trainer/device_shards.h"

#include "digest.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_WORLD = 8, MAX_WORLD = 512 };

static void fill_tables(trainer_options *o)
{
    const struct poptOption publishing[PUBLISHING_OPTIONS] = {
        {"device", 0, POPT_ARG_STRING, &o->device, 0,
         "shards in memory of CUDA devices: 0,1 gives each half of the ranks; 'host' "
         "may be among them",
         "D[,D...]"},
        {"snapshot", 0, POPT_ARG_NONE, &o->snapshot, 0,
         "publish copies, which the next update does not touch", NULL},
        {"cast", 0, POPT_ARG_STRING, &o->cast, 0,
         "with --snapshot: publish F32 as bf16 or f16", "DTYPE"},
        {"no-stream-commit", 0, POPT_ARG_NONE, &o->no_stream, 0,
         "wait for the device before each commit instead of giving it the stream",
         NULL},
        POPT_TABLEEND,
    };
    const struct poptOption world[WORLD_OPTIONS] = {
        {"world-size", 'n', POPT_ARG_INT, &o->world_size, 0,
         "number of ranks (default 8)", "N"},
        {"no-ucx", 0, POPT_ARG_NONE, &o->no_ucx, 0, "never load UCX", NULL},
        {"trust-containers", 0, POPT_ARG_NONE, &o->trust_containers, 0,
         "this uid in other containers of this network is this user", NULL},
        CREDENTIAL_ROWS(&o->credentials),
        {"base-port", 'p', POPT_ARG_INT, &o->base_port, 0,
         "rank r listens on PORT + r; 0 (default): ephemeral ports", "PORT"},
        {"replicate", 0, POPT_ARG_INT, &o->replicate, 0,
         "K ranks hold each shard (HSDP); K divides the world size", "K"},
        {"shard-dim", 0, POPT_ARG_INT, &o->shard_dim, 0,
         "cut tensors in this dimension (default 0)", "D"},
        {"lease-ms", 0, POPT_ARG_INT, &o->lease_ms, 0,
         "how long readers may delay an update (default 1000; 0: not at all)", "MS"},
        {"data-threads", 0, POPT_ARG_INT, &o->data_threads, 0,
         "threads that each rank sends tensors with, 1 to 16 (default: by the CPUs)",
         "N"},
        {"nice", 0, POPT_ARG_INT, &o->nice, 0,
         "added to the nice value of the threads that serve (default 0)", "N"},
        {"bind", 0, POPT_ARG_STRING, &o->bind, 0,
         "listen on this address (default 127.0.0.1)", "ADDRESS"},
        {"allow", 0, POPT_ARG_STRING, &o->allow, 0,
         "networks that may connect, with --open: 10.0.0.0/8,fd00::/8", "NETWORKS"},
        {"open", 0, POPT_ARG_NONE, &o->open, 0,
         "listen on a network; needs --bind and --allow", NULL},
        {"insecure", 0, POPT_ARG_NONE, &o->insecure, 0,
         "with --open: do without a secret, and allow networks of any width", NULL},
        {"trusted-network", 0, POPT_ARG_NONE, &o->trusted, 0,
         "with --open: offer RDMA, which lets peers write", NULL},
        {"name", 0, POPT_ARG_STRING, &o->server_name, 0,
         "the job's name (default lora_param_server)", "NAME"},
        {"world-id", 0, POPT_ARG_STRING, &o->world_id, 0,
         "32 hexadecimal digits (default random)", "HEX"},
        POPT_TABLEEND,
    };
    memcpy(o->publishing_part, publishing, sizeof publishing);
    memcpy(o->world_part, world, sizeof world);
}

void trainer_options_init(trainer_options *o)
{
    *o = (trainer_options){.world_size = -1,
                           .base_port = -1,
                           .replicate = -1,
                           .shard_dim = -1,
                           .lease_ms = -1,
                           .data_threads = -1};
    source_table(&o->source, o->source_part);
    fill_tables(o);
}

bool device_list_parse(const char *text, int out[DEVICE_LIST], size_t *count_out)
{
    size_t count = 0;
    for (const char *at = text;;) {
        char *end;
        if (count == DEVICE_LIST)
            return false;
        if (strncmp(at, "host", 4) == 0) {
            out[count] = DEVICE_HOST;
            end = (char *)(uintptr_t)(at + 4);
        } else {
            errno = 0;
            long number = at[0] >= '0' && at[0] <= '9' ? strtol(at, &end, 10) : -1;
            if (number < 0 || number >= GPU_MAX_DEVICES || errno != 0)
                return false;
            out[count] = (int)number;
        }
        count++;
        if (*end == '\0') {
            *count_out = count;
            return true;
        }
        if (*end != ',')
            return false;
        at = end + 1;
    }
}

static int trainer_options_check_world(const command *self, const trainer_options *o,
                                       const rank_options *out)
{
    if (out->world_size > MAX_WORLD)
        return failure_usage(self->name, "--world-size is 1 to %d", MAX_WORLD);
    if ((uint64_t)out->base_port + out->world_size > 65536)
        return failure_usage(self->name,
                             "--base-port and the ranks above it end at 65535");
    if (out->world_size % out->replicate != 0)
        return failure_usage(self->name, "--replicate %d does not divide the %u ranks",
                             o->replicate, out->world_size);
    if (o->allow != NULL && !o->open)
        return failure_usage(self->name, "--allow needs --open");
    if (o->open && (o->bind == NULL || o->allow == NULL))
        return failure_usage(self->name, "--open needs --bind and --allow");
    if (o->insecure && !o->open)
        return failure_usage(self->name, "--insecure needs --open");
    if (o->trusted && !o->open)
        return failure_usage(self->name, "--trusted-network needs --open");
    return 0;
}

static int resolve_world(const command *self, const trainer_options *o,
                         rank_options *out)
{
    out->world_size = o->world_size > 0 ? (uint32_t)o->world_size : DEFAULT_WORLD;
    out->base_port = o->base_port > 0 ? (uint16_t)o->base_port : 0;
    out->replicate = o->replicate >= 0 ? (uint32_t)o->replicate : 1;
    out->shard_dim = o->shard_dim > 0 ? (uint32_t)o->shard_dim : 0;
    out->lease_ms = o->lease_ms >= 0 ? (uint32_t)o->lease_ms : 1000;
    out->data_threads = o->data_threads > 0 ? (uint32_t)o->data_threads : 0;
    out->nice = o->nice;
    out->bind = o->bind;
    out->allow = o->allow;
    out->server_name = o->server_name;
    out->credentials = o->credentials;
    out->flags = (o->open ? (uint32_t)FANIN_SERVER_OPEN : 0) |
                 (o->trusted ? (uint32_t)FANIN_SERVER_TRUSTED_NETWORK : 0) |
                 (o->insecure ? (uint32_t)FANIN_SERVER_INSECURE : 0) |
                 (o->no_ucx ? (uint32_t)FANIN_SERVER_NO_UCX : 0) |
                 (o->trust_containers ? (uint32_t)FANIN_SERVER_TRUST_CONTAINERS : 0);
    int code = trainer_options_check_world(self, o, out);
    if (code != 0)
        return code;
    if (o->world_id != NULL) {
        if (!target_world_id(o->world_id, out->world_id))
            return failure_usage(
                self->name,
                "--world-id '%s' is not 32 hexadecimal digits, not all "
                "zero",
                o->world_id);
        return 0;
    }
    if (!random_bytes(out->world_id, sizeof out->world_id))
        return failure_local("cannot start ranks", FANIN_ERR_IO, "give --world-id",
                             "no random bits for the world id");
    return 0;
}

static int resolve_publishing(const command *self, trainer_options *o,
                              rank_options *out)
{
    rank_publishing *p = &out->publishing;
    if (o->no_stream && o->device == NULL)
        return failure_usage(self->name, "--no-stream-commit needs --device");
    if (o->cast != NULL && !o->snapshot)
        return failure_usage(self->name, "--cast needs --snapshot");
    p->snapshot = o->snapshot != 0;
    p->no_stream = o->no_stream != 0;
    if (o->cast != NULL && (p->cast = options_half(o->cast)) == 0)
        return failure_usage(self->name, "--cast is bf16 or f16, not '%s'", o->cast);
    if (o->device == NULL)
        return 0;
    if (!device_list_parse(o->device, o->devices, &p->n_devices))
        return failure_usage(
            self->name, "--device '%s' is no list such as 0,1 or host,0", o->device);
    if (p->n_devices > out->world_size)
        return failure_usage(self->name, "--device names more devices than ranks");
    p->devices = o->devices;
    return 0;
}

int trainer_options_resolve(const command *self, trainer_options *o,
                            const char *fallback, source *source_out, rank_options *out)
{
    int code = resolve_world(self, o, out);
    code = code != 0 ? code : resolve_publishing(self, o, out);
    if (code != 0)
        return code;
    o->source.masters = out->publishing.cast != 0;
    code = source_open(self, &o->source, fallback, source_out);
    out->full = source_out->full;
    out->tensors = &source_out->tensors;
    out->pairs = source_out->pairs;
    out->n_pairs = source_out->n_pairs;
    return code;
}

/* Without the kind. */
static const char *bare(const char *run)
{
    const char *colon = options_is_publication(run) ? strchr(run, ':') : NULL;
    return colon != NULL ? colon + 1 : run;
}

int trainer_runs_resolve(const command *self, trainer_options *o,
                         const rank_options *out)
{
    char name[OPTIONS_PUBLICATION];
    const char *adapter = NULL;
    for (size_t i = 0; i < out->n_runs; i++) {
        if (!options_publication(out->runs[i], name))
            return failure_usage(self->name, "run '%s' is not " OPTIONS_RUNS,
                                 out->runs[i]);
        if (options_is_model(name))
            o->source.full = 1;
        else if (options_is_publication(out->runs[i]))
            adapter = out->runs[i];
        for (size_t j = 0; j < i; j++) {
            if (strcmp(bare(out->runs[i]), bare(out->runs[j])) == 0)
                return failure_usage(self->name, "run '%s' is given twice",
                                     out->runs[i]);
        }
    }
    if (adapter != NULL && (o->source.full || o->source.directory != NULL))
        return failure_usage(self->name, "run '%s' cannot be a whole model", adapter);
    return 0;
}

void rank_publication(const rank_options *options, size_t run,
                      char out[OPTIONS_PUBLICATION])
{
    snprintf(out, OPTIONS_PUBLICATION, "%s:%s", options->full ? "full" : "lora",
             bare(options->runs[run]));
}

int rank_device(const rank_options *options, uint32_t rank)
{
    const rank_publishing *p = &options->publishing;
    return p->n_devices > 0
               ? p->devices[(uint64_t)rank * p->n_devices / options->world_size]
               : DEVICE_HOST;
}
