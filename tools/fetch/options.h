/* SPDX-License-Identifier: Apache-2.0 */
/** @file Command lines: options that commands share, durations, --help, typo suggestions. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "fetch/command.h"

#include <fanin/client.h>
#include <popt.h>
#include <stdint.h>

enum {
    COMMON_OPTIONS = 7, /**< entries of the tables, the end included */
    CONNECT_OPTIONS = 17,
    MAX_POSITIONAL = 512, /**< files of a world's processes */
    MAX_OPTIONS = 96,     /**< of one command; checked when it reads them */
};

/** What every command takes. */
typedef struct common_options {
    int json, quiet, verbose, no_color;
    char *timeout;       /**< as given */
    uint32_t timeout_ms; /**< set the command's default before options_parse() */
    bool timeout_given;  /**< on the command line; the environment does not count */
} common_options;

/** By what this end proves who it is; NULL: what the environment names. */
typedef struct credential_files {
    char *secret_file, *tls_cert, *tls_key, *tls_ca;
} credential_files;

/* clang-format off */
/** Rows of a table of options that fill a credential_files. */
#define CREDENTIAL_ROWS(c) \
    {"secret-file", 0, POPT_ARG_STRING, &(c)->secret_file, 0, \
     "the launch's secret: TLS over TCP (also: FANIN_SECRET_FILE in the environment)", "FILE"}, \
    {"tls-cert", 0, POPT_ARG_STRING, &(c)->tls_cert, 0, \
     "instead of a secret: this end's certificate, PEM (also: FANIN_TLS_CERT)", "FILE"}, \
    {"tls-key", 0, POPT_ARG_STRING, &(c)->tls_key, 0, "its key (also: FANIN_TLS_KEY)", "FILE"}, \
    {"tls-ca", 0, POPT_ARG_STRING, &(c)->tls_ca, 0, \
     "authorities of the other end's certificate (also: FANIN_TLS_CA)", "FILE"}
/* clang-format on */

/** Hands them to a fanin_client_config or a fanin_server_config. */
#define CREDENTIALS_GIVE(config, c)                                                    \
    ((config)->secret_file = (c)->secret_file, (config)->tls_cert = (c)->tls_cert,     \
     (config)->tls_key = (c)->tls_key, (config)->tls_ca = (c)->tls_ca)

/** What every command takes that talks to ranks. */
typedef struct connect_options {
    int world_size;
    int no_unix, no_ucx, no_checksums, trust_containers, trust_other_users;
    int threads; /**< 0: by the CPUs */
    int streams; /**< data connections a rank; 0: by where it is */
    char *path;  /**< NULL: auto; checked by options_parse() */
    char *server_name;
    char *world_id;
    credential_files credentials;
    char *trace; /**< file to be made; NULL: none */
} connect_options;

/** A parsed command line; free with options_free(). */
typedef struct arguments {
    const char *positional[MAX_POSITIONAL];
    int count;
    poptContext context; /**< owns the positional arguments */
    struct poptOption *table;
    struct poptOption split[MAX_OPTIONS + 1]; /**< the same, as popt is to read it */
    bool
        given[MAX_OPTIONS]; /**< which of the table's options are on the command line */
} arguments;

/** Fill @p table, to be included in the command's own table. */
void options_common(common_options *options, struct poptOption table[COMMON_OPTIONS]);
void options_connect(connect_options *options,
                     struct poptOption table[CONNECT_OPTIONS]);

/** The first of the options @p names (long ones, "run path") that is on the command line, NULL:
    none. */
const char *options_given(const arguments *parsed, const char *names);

/** The first option on the command line that is none of @p names; NULL: none. */
const char *options_given_other(const arguments *parsed, const char *names);

/** A command's options, in order. */
typedef struct option_list {
    struct poptOption options[MAX_OPTIONS]; /**< their texts are static */
    size_t count;
} option_list;

/** From now on options_parse() only tells the command's options, in @p list. */
void options_list_only(option_list *list);

/** Failures are told as JSON if one of the words from the second on asks for that, whatever the
    others are. */
void options_expect_json(int argc, const char *const *argv);

/**
 * Parses. Numbers must be whole and in their option's range, texts not empty. The value of
 * --timeout or NIXL_FETCH_TIMEOUT goes to common->timeout_ms.
 * Returns false if the command is over: help was printed or usage was wrong; *status_out
 * is then the exit status. @p table and what it includes must live until options_free().
 */
bool options_parse(const command *self, int argc, const char **argv,
                   struct poptOption *table, common_options *common, arguments *parsed,
                   int *status_out);

/** Frees the context and every string that options wrote through the table. */
void options_free(arguments *parsed);

/** "500ms", "30s", "2m", "1h", a bare number is seconds; 1 ms to 1000 h. */
bool options_duration(const char *text, uint32_t *ms_out);

enum { OPTIONS_NEAREST_LENGTH = 640 };

/** Whether @p name is nearer to @p word than what was seen so far, and near enough for a typo.
    *@p best is 0 at first. */
bool options_nearer(const char *word, const char *name, size_t *best);

/** The nearest of @p names (NULL at the end) if it is near enough for a typo, else NULL. */
const char *options_nearest(const char *word, const char *const *names);

/** "bf16", "BF16", "bfloat16", "float32", ...: 0 if unknown. */
fanin_dtype options_dtype(const char *text);
/** The dtype that F32 can become, of --cast and --dtype; 0: it is another. */
fanin_dtype options_half(const char *text);

/** A run's name: [A-Za-z0-9._-]{1,64}, neither "." nor "..". */
bool options_run_valid(const char *run);

enum { OPTIONS_PUBLICATION = 96 };
/** What --run means: "lora:R" for "R" and "lora:R", "full:R" for "full:R". False: R is no name. */
bool options_publication(const char *run, char out[OPTIONS_PUBLICATION]);
/** Whether a word is a publication's whole name, "lora:R" or "full:R". */
bool options_is_publication(const char *word);
/** How a publication is told: "R" for "lora:R", anything else as it is. */
const char *options_run_of(const char *publication);
/** Whether it is a whole model's. */
bool options_is_model(const char *publication);
#define OPTIONS_RUNS "R, lora:R or full:R, R being 1 to 64 of A-Z a-z 0-9 . _ -"

#endif
