/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/world.h"
#include "fetch/failure.h"
#include "fetch/target.h"

#include <string.h>
#include <sys/random.h>

enum { DEFAULT_WORLD = 8, MAX_WORLD = 512 };

void world_init(world_options *options)
{
    *options = (world_options){.world_size = -1,
                               .base_port = -1,
                               .replicate = -1,
                               .shard_dim = -1,
                               .lease_ms = -1};
}

void world_table(world_options *options, bool size,
                 struct poptOption table[WORLD_OPTIONS])
{
    const struct poptOption entries[] = {
        {"base-port", 'p', POPT_ARG_INT, &options->base_port, 0,
         "rank r listens on PORT + r; 0 (default): ephemeral ports", "PORT"},
        {"replicate", 0, POPT_ARG_INT, &options->replicate, 0,
         "K ranks hold each shard (HSDP); K divides the world size", "K"},
        {"shard-dim", 0, POPT_ARG_INT, &options->shard_dim, 0,
         "cut tensors in this dimension (default 0)", "D"},
        {"lease-ms", 0, POPT_ARG_INT, &options->lease_ms, 0,
         "how long readers may delay an update (default 1000; 0: not at all)", "MS"},
        {"bind", 0, POPT_ARG_STRING, &options->bind, 0,
         "listen on this address (default 127.0.0.1)", "ADDRESS"},
        {"allow", 0, POPT_ARG_STRING, &options->allow, 0,
         "networks that may connect, with --open: 10.0.0.0/8,fd00::/8", "NETWORKS"},
        {"open", 0, POPT_ARG_NONE, &options->open, 0,
         "listen on a network; needs --bind and --allow", NULL},
        {"trusted-network", 0, POPT_ARG_NONE, &options->trusted, 0,
         "with --open: offer RDMA, which lets peers write", NULL},
        {"name", 0, POPT_ARG_STRING, &options->server_name, 0,
         "the job's name (default lora_param_server)", "NAME"},
        {"world-id", 0, POPT_ARG_STRING, &options->world_id, 0,
         "32 hexadecimal digits (default random)", "HEX"},
        POPT_TABLEEND,
    };
    const struct poptOption more[] = {
        {"world-size", 'n', POPT_ARG_INT, &options->world_size, 0,
         "number of ranks (default 8)", "N"},
        {"no-ucx", 0, POPT_ARG_NONE, &options->no_ucx, 0, "never load UCX", NULL},
    };
    const struct poptOption end = POPT_TABLEEND;
    size_t used = 0;
    if (size) {
        memcpy(table, more, sizeof(more));
        used = sizeof(more) / sizeof(more[0]);
    }
    memcpy(table + used, entries, sizeof(entries));
    used += sizeof(entries) / sizeof(entries[0]);
    while (used < WORLD_OPTIONS) {
        table[used++] = end;
    }
}

static int check(const command *self, const world_options *o, const rank_options *out)
{
    if (out->world_size > MAX_WORLD) {
        return failure_usage(self->name, "--world-size is 1 to %d", MAX_WORLD);
    }
    if ((uint64_t)out->base_port + out->world_size > 65536) {
        return failure_usage(self->name,
                             "--base-port and the ranks above it end at 65535");
    }
    if (out->world_size % out->replicate != 0) {
        return failure_usage(self->name, "--replicate %d does not divide the %u ranks",
                             o->replicate, out->world_size);
    }
    if (o->allow != NULL && !o->open) {
        return failure_usage(self->name, "--allow needs --open");
    }
    if (o->open && (o->bind == NULL || o->allow == NULL)) {
        return failure_usage(self->name, "--open needs --bind and --allow");
    }
    if (o->trusted && !o->open) {
        return failure_usage(self->name, "--trusted-network needs --open");
    }
    return 0;
}

int world_resolve(const command *self, const world_options *o, rank_options *out)
{
    out->world_size = o->world_size > 0 ? (uint32_t)o->world_size : DEFAULT_WORLD;
    out->base_port = o->base_port > 0 ? (uint16_t)o->base_port : 0;
    out->replicate = o->replicate >= 0 ? (uint32_t)o->replicate : 1;
    out->shard_dim = o->shard_dim > 0 ? (uint32_t)o->shard_dim : 0;
    out->lease_ms = o->lease_ms >= 0 ? (uint32_t)o->lease_ms : 1000;
    out->bind = o->bind;
    out->allow = o->allow;
    out->server_name = o->server_name;
    out->flags = (o->open ? (uint32_t)FANIN_SERVER_OPEN : 0) |
                 (o->trusted ? (uint32_t)FANIN_SERVER_TRUSTED_NETWORK : 0) |
                 (o->no_ucx ? (uint32_t)FANIN_SERVER_NO_UCX : 0);
    int code = check(self, o, out);
    if (code != 0) {
        return code;
    }
    if (o->world_id != NULL) {
        if (!target_world_id(o->world_id, out->world_id)) {
            return failure_usage(
                self->name,
                "--world-id '%s' is not 32 hexadecimal digits, not all "
                "zero",
                o->world_id);
        }
        return 0;
    }
    if (getrandom(out->world_id, sizeof(out->world_id), 0) !=
        (ssize_t)sizeof(out->world_id)) {
        return failure_local("cannot start ranks", FANIN_ERR_IO, "give --world-id",
                             "no random bits for the world id");
    }
    return 0;
}
