/* SPDX-License-Identifier: Apache-2.0 */
/** @file The options that say what stand-in ranks serve, how, and where; of serve and bench. */
#ifndef TRAINER_OPTIONS_H
#define TRAINER_OPTIONS_H

#include "trainer/ranks.h"
#include "trainer/source.h"

enum {
    PUBLISHING_OPTIONS = 5, /**< entries of the tables, the end included */
    WORLD_OPTIONS = 21,
    OF_TRAINER_ALONE = 7, /**< of them: what commands that connect have already */
    DEVICE_LIST = 512,
};

typedef struct trainer_options {
    source_options source;
    /* how they publish */
    char *device, *cast;
    int snapshot, no_stream;
    int devices[DEVICE_LIST]; /**< storage of rank_publishing.devices */
    /* their world; -1 where a number was not given */
    int world_size, base_port, replicate, shard_dim, lease_ms, data_threads, nice;
    int open, trusted, insecure, no_ucx, trust_containers;
    char *bind, *allow, *server_name, *world_id;
    credential_files credentials;
    /* to be included in the command's table, the last one from OF_TRAINER_ALONE on if that
       has --world-size, --no-ucx, --trust-containers, --secret-file and --tls-cert, -key, -ca */
    struct poptOption source_part[SOURCE_OPTIONS], publishing_part[PUBLISHING_OPTIONS],
        world_part[WORLD_OPTIONS];
} trainer_options;

/** Defaults and tables. */
void trainer_options_init(trainer_options *o);

/** Checks, makes the tensors (source_open(), with @p fallback) and writes to @p out what it is
    about; a random world id if none is given. 0, or an exit status after a message;
    source_close() in either case. */
int trainer_options_resolve(const command *self, trainer_options *o,
                            const char *fallback, source *source_out,
                            rank_options *out);

/** Before trainer_options_resolve(): the runs of @p out are names, each once, and of one kind; one
    of "full:R" asks for a whole model. 0, or an exit status after a message. */
int trainer_runs_resolve(const command *self, trainer_options *o,
                         const rank_options *out);
/** What a run of rank_options is published as. */
void rank_publication(const rank_options *options, size_t run,
                      char out[OPTIONS_PUBLICATION]);

/** "0,1", "host,0": numbers of devices, or DEVICE_HOST. False: it is no such list. */
bool device_list_parse(const char *text, int out[DEVICE_LIST], size_t *count_out);

/** The device of a rank's memory, or DEVICE_HOST. */
int rank_device(const rank_options *options, uint32_t rank);

#endif
