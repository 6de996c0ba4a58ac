/* SPDX-License-Identifier: Apache-2.0 */
/** @file What main() knows about a subcommand. */
#ifndef COMMAND_H
#define COMMAND_H

#include <stdbool.h>

typedef struct command {
    const char *name;
    const char *arguments; /**< "TARGET --run R [OPTION...]" */
    const char *summary;   /**< one line, for the list of commands */
    const char *help;      /**< examples and paragraphs, printed before the options */
    bool of_some;          /**< one address alone may be that of a rank among others */
    bool takes_directory;  /**< as a word behind TARGET and run */
    bool untraced;         /**< other processes do all of it: it has no --trace */
    /** @p argv[0] is "nixl-fetch NAME". Returns the exit status. */
    int (*run)(const struct command *self, int argc, const char **argv);
} command;

extern const command cmd_list, cmd_show, cmd_ping, cmd_pull, cmd_verify, cmd_watch,
    cmd_status, cmd_top, cmd_exporter, cmd_diff, cmd_bundle, cmd_map, cmd_serve,
    cmd_bench, cmd_doctor, cmd_secret, cmd_trace, cmd_relay;

/** The one of @p all, NULL at the end, that has this name; NULL if there is none. */
const command *command_find(const command *const *all, const char *name);

/** What shells ask for completion: "line WORD...", "options COMMAND", behind argv[0]. Returns the
    exit status. */
int complete(const command *const *all, int argc, const char *const *argv);

#endif
