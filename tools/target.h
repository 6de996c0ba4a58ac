/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where the ranks are: HOST:PORT[,HOST:PORT...], HOST:BASEPORT with a world size, or the
 * path of a nixl_info.json.
 */
#ifndef TARGET_H
#define TARGET_H

#include <fanin/error.h>
#include <stdint.h>

typedef struct target {
    char **addresses; /**< "host:port" or "[v6]:port", one a rank */
    uint32_t count;
    char run[72]; /**< what the file says, "" if it says nothing */
} target;

enum { TARGET_MAX_RANKS = 65536 };

/**
 * Reads @p text. @p world_size 0: not given. A word that ends in ".json" or holds a '/'
 * is a file:
 *   {"host": H, "base_port": P, "world_size": N}       ranks 0..N-1
 *   {"hosts": [{"host": H, "base_port": P, "ranks": R}, ...]}
 * R is a list of ranks, or a number of ranks that follow those of the entries before.
 * Rank r listens on base_port + r of its host. "run_idx" (a number or a string) is the
 * run that commands use by default; other fields are ignored.
 *
 * FANIN_ERR_ARGUMENT: not understood; FANIN_ERR_IO: the file cannot be read;
 * FANIN_ERR_MEMORY. On failure @p out is empty.
 */
fanin_status target_parse(const char *text, uint32_t world_size, target *out,
                          fanin_error *error);

void target_free(target *t);

#endif
