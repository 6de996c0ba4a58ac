/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where the ranks are: HOST:PORT[,HOST:PORT...], HOST:BASEPORT with a world size, or the
 * path of a nixl_info.json or of the directory that holds one.
 */
#ifndef TARGET_H
#define TARGET_H

#include <fanin/types.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct target {
    char **addresses; /**< "host:port" or "[v6]:port", one a rank */
    uint32_t count;
    bool in_rank_order;  /**< addresses[r] is rank r's; false: any order */
    char run[72];        /**< what the file says, "" if it says nothing */
    char **publications; /**< what the file says is published, "full:0"; each once */
    size_t n_publications;
    char *file;        /**< the nixl_info.json, NULL: none */
    char *server_name; /**< what the ranks must announce, NULL: the file says nothing */
    uint8_t world_id[FANIN_WORLD_ID_SIZE]; /**< likewise; all zero: it says nothing */
    char *secret_file; /**< the launch's secret, NULL: the file says nothing */
} target;

enum { TARGET_MAX_RANKS = 65536 };

/**
 * Reads @p text. @p world_size 0: not given. A word that ends in ".json", holds a '/', or
 * has no ':' and exists is a file, or a directory with a nixl_info.json:
 *   {"host": H, "base_port": P, "world_size": N}       ranks 0..N-1
 *   {"hosts": [{"host": H, "base_port": P, "ranks": R}, ...]}
 * R is a list of ranks, or a number of ranks that follow those of the entries before.
 * Rank r listens on base_port + r of its host. "publications" (["lora:0", "full:0"]) and "run_idx"
 * (a number or a string) are what commands use by default, see target_choose(); "world_id" (32
 * hexadecimal digits, not all zero) and "server_name" are what the ranks must announce,
 * "secret_file" names a file; other fields and publications of other kinds are ignored.
 *
 * FANIN_ERR_ARGUMENT: not understood; FANIN_ERR_NOT_FOUND: no such file; FANIN_ERR_IO: it
 * cannot be read. On failure @p out is empty.
 */
fanin_status target_parse(const char *text, uint32_t world_size, target *out,
                          fanin_error *error);

void target_free(target *t);

enum { TARGET_CHOICES = 512 };
/**
 * The publication that is meant where none is given: of those that the file names the one of
 * run_idx, else the only one; of a file that names none that of run_idx; else that of run "0".
 * NULL: there are several, which @p choices then lists. The text lives as long as @p t.
 */
const char *target_choose(const target *t, char choices[TARGET_CHOICES]);

/** Whether the text names a file or a directory, and no addresses. */
bool target_is_file(const char *text);

/** 32 hexadecimal digits that are not all zero, which would demand nothing. */
bool target_world_id(const char *text, uint8_t world_id[FANIN_WORLD_ID_SIZE]);

#endif
