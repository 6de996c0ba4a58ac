/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/options.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/pattern.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { OPTION_HELP = 0x4800, OPTION_FIRST = 0x5000 };

static option_list *listing; /**< NULL: command lines are read */

const command *command_find(const command *const *all, const char *name)
{
    while (*all != NULL && strcmp((*all)->name, name) != 0)
        all++;
    return *all;
}

void options_list_only(option_list *list)
{
    listing = list;
}

/* What numbers may be; commands may be stricter. */
static const struct number_range {
    const char *name;
    long long low, high;
} ranges[] = {
    {"base-port", 0, 65535},
    {"commits", 1, INT_MAX},
    {"layers", 1, 65536},
    {"limit", 1, LLONG_MAX},
    {"shrink", 1, 65536},
    {"max-file-bytes", 1, LLONG_MAX},
    {"count", 1, LLONG_MAX},
    {"data-threads", 1, 16},
    {"idle-ms", 1, UINT32_MAX},
    {"first-step", 1, LLONG_MAX},
    {"iterations", 1, INT_MAX},
    {"keep", 1, 64},
    {"lease-ms", 0, 3600000},
    {"max-attempts", 1, INT_MAX},
    {"max-bytes", 1, LLONG_MAX},
    {"min-step", 0, LLONG_MAX},
    {"nice", 0, 19},
    {"pairs", 1, INT_MAX},
    {"pause", 0, INT_MAX},
    {"phase", 1, INT_MAX},
    {"pull", 1, LLONG_MAX},
    {"r", 1, 65536},
    {"ready-fd", 0, INT_MAX},
    {"repeat", 1, INT_MAX},
    {"replicate", 1, 65536},
    {"shard-dim", 0, FANIN_MAX_DIMS - 1},
    {"step", 0, LLONG_MAX},
    {"steps", 1, LLONG_MAX},
    {"streams", 0, 16},
    {"threads", 0, 64},
    {"update-every", 0, INT_MAX},
    {"world-size", 1, 65536},
    {"workers", 1, 4096},
};

void options_common(common_options *options, struct poptOption table[COMMON_OPTIONS])
{
    const struct poptOption entries[COMMON_OPTIONS] = {
        {"timeout", 't', POPT_ARG_STRING, &options->timeout, 0,
         "give up after so long: 500ms, 30s, 2m; a bare number is seconds", "TIME"},
        {"json", 'j', POPT_ARG_NONE, &options->json, 0, "JSON on standard output",
         NULL},
        {"quiet", 'q', POPT_ARG_NONE, &options->quiet, 0, "no progress", NULL},
        {"verbose", 'v', POPT_ARG_NONE, &options->verbose, 0,
         "messages of the library on standard error", NULL},
        {"no-color", 0, POPT_ARG_NONE, &options->no_color, 0,
         "no colours (also: NO_COLOR in the environment)", NULL},
        {"help", 'h', POPT_ARG_NONE, NULL, OPTION_HELP, "this text", NULL},
        POPT_TABLEEND,
    };
    memcpy(table, entries, sizeof entries);
}

void options_connect(connect_options *options, struct poptOption table[CONNECT_OPTIONS])
{
    const struct poptOption entries[CONNECT_OPTIONS] = {
        {"world-size", 'n', POPT_ARG_INT, &options->world_size, 0,
         "TARGET is HOST:BASEPORT of so many ranks", "N"},
        {"path", 0, POPT_ARG_STRING, &options->path, 0,
         "auto, stream, cma, rdma or cuda_ipc (default auto)", "PATH"},
        {"no-unix", 0, POPT_ARG_NONE, &options->no_unix, 0, "TCP even on one host",
         NULL},
        {"no-ucx", 0, POPT_ARG_NONE, &options->no_ucx, 0, "never load UCX", NULL},
        {"trust-containers", 0, POPT_ARG_NONE, &options->trust_containers, 0,
         "this uid in other containers of this network is this user", NULL},
        {"trust-other-users", 0, POPT_ARG_NONE, &options->trust_other_users, 0,
         "ranks on loopback may be any user's", NULL},
        {"no-checksums", 0, POPT_ARG_NONE, &options->no_checksums, 0,
         "no checksums over TCP: the network tells altered bytes", NULL},
        {"threads", 0, POPT_ARG_INT, &options->threads, 0,
         "that read into host memory at once (default: by the CPUs)", "N"},
        {"streams", 0, POPT_ARG_INT, &options->streams, 0,
         "data connections to each rank, at most 16 (default: 1 on this host, else 4)",
         "N"},
        {"server-name", 0, POPT_ARG_STRING, &options->server_name, 0,
         "accept only this job's ranks", "NAME"},
        {"expect-world-id", 0, POPT_ARG_STRING, &options->world_id, 0,
         "accept only ranks of this world, 32 hexadecimal digits", "HEX"},
        CREDENTIAL_ROWS(&options->credentials),
        {"trace", 0, POPT_ARG_STRING, &options->trace, 0,
         "write what took how long, for 'nixl-fetch trace' and ui.perfetto.dev",
         "FILE"},
        POPT_TABLEEND,
    };
    memcpy(table, entries, sizeof entries);
}

bool options_duration(const char *text, uint32_t *ms_out)
{
    static const struct {
        const char *suffix;
        double ms;
    } units[] = {{"", 1e3},  {"ms", 1},    {"s", 1e3},
                 {"m", 6e4}, {"min", 6e4}, {"h", 3.6e6}};
    char *end;
    if (!isdigit((unsigned char)text[0]) && text[0] != '.')
        return false;
    errno = 0;
    double value = strtod(text, &end);
    if (errno != 0 || end == text)
        return false;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i].suffix) == 0) {
            double ms = ceil(value * units[i].ms);
            if (!(ms >= 1.0 && ms <= 3.6e9))
                return false;
            *ms_out = (uint32_t)ms;
            return true;
        }
    }
    return false;
}

/* Optimal string alignment: insertions, deletions, substitutions, swaps of neighbours; of words
   of at most NEAREST_LENGTH bytes. Rows of the usual table, of which three are needed. */
static size_t distance(const char *a, const char *b)
{
    static size_t rows[3][OPTIONS_NEAREST_LENGTH + 1];
    size_t n = strlen(a);
    size_t m = strlen(b);
    for (size_t j = 0; j <= m; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t *row = rows[i % 3];
        const size_t *above = rows[(i + 2) % 3];
        const size_t *before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            row[j] = best;
        }
    }
    return rows[n % 3][m];
}

bool options_nearer(const char *word, const char *name, size_t *best)
{
    size_t n = strlen(word);
    size_t m = strlen(name);
    size_t least = n > m ? n - m : m - n;
    if (n > OPTIONS_NEAREST_LENGTH || m > OPTIONS_NEAREST_LENGTH)
        return false;
    if (*best == 0) { /* the first: what is still a typo */
        size_t most = 3 + n / 8;
        *best = n / 2 + 1 < most ? n / 2 + 1 : most;
    }
    if (least >= *best)
        return false;
    size_t d = distance(word, name);
    if (d >= *best)
        return false;
    *best = d > 0 ? d : 1;
    return true;
}

const char *options_nearest(const char *word, const char *const *names)
{
    const char *nearest = NULL;
    size_t best = 0;
    for (; *names != NULL; names++)
        if (options_nearer(word, *names, &best))
            nearest = *names;
    return nearest;
}

/* ------------------------------------------------------------- a command's table */

/* A command's options in order, those of included tables too. */
typedef struct flat_table {
    struct poptOption *options[MAX_OPTIONS];
    size_t count;
} flat_table;

static bool is_end(const struct poptOption *option)
{
    return option->longName == NULL && option->shortName == '\0' && option->arg == NULL;
}

static void flatten(struct poptOption *table, flat_table *flat)
{
    for (; !is_end(table); table++) {
        if ((table->argInfo & POPT_ARG_MASK) == POPT_ARG_INCLUDE_TABLE) {
            flatten(table->arg, flat);
        } else {
            if (flat->count == MAX_OPTIONS)
                abort(); /* no command line does that: a table has grown */
            flat->options[flat->count++] = table;
        }
    }
}

static bool is_among(const char *name, const char *names)
{
    for (size_t length; *names != '\0'; names += length + (names[length] == ' ')) {
        length = strcspn(names, " ");
        if (strlen(name) == length && strncmp(name, names, length) == 0)
            return true;
    }
    return false;
}

/* The first that is given and is among @p names, or is not. */
static const char *find_given(const arguments *parsed, const char *names, bool among)
{
    flat_table flat = {.count = 0};
    flatten(parsed->table, &flat);
    for (size_t i = 0; i < flat.count; i++) {
        const char *name = flat.options[i]->longName;
        if (parsed->given[i] && is_among(name, names) == among)
            return name;
    }
    return NULL;
}

const char *options_given(const arguments *parsed, const char *names)
{
    return find_given(parsed, names, true);
}

const char *options_given_other(const arguments *parsed, const char *names)
{
    return find_given(parsed, names, false);
}

/* Stores the number for one of the command's options; false after a message. */
static bool set_number(const command *self, const struct poptOption *option,
                       const char *text)
{
    long long low = 0;
    long long high = LLONG_MAX;
    char *end;
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        if (strcmp(ranges[i].name, option->longName) == 0) {
            low = ranges[i].low;
            high = ranges[i].high;
        }
    }
    errno = 0;
    bool digits = isdigit((unsigned char)text[0]) || text[0] == '-';
    long long value = strtoll(text, &end, 10);
    if (!digits || *end != '\0' || errno != 0 || value < low || value > high) {
        if (high == LLONG_MAX)
            failure_usage(self->name, "--%s '%s' is no whole number from %lld on",
                          option->longName, text, low);
        else
            failure_usage(self->name, "--%s '%s' is no whole number from %lld to %lld",
                          option->longName, text, low, high);
        return false;
    }
    if ((option->argInfo & POPT_ARG_MASK) == POPT_ARG_INT)
        *(int *)option->arg = (int)value;
    else
        *(long long *)option->arg = value;
    return true;
}

static bool is_number(const struct poptOption *option)
{
    unsigned kind = option->argInfo & POPT_ARG_MASK;
    return kind == POPT_ARG_INT || kind == POPT_ARG_LONGLONG;
}

static int options_bad_option(const command *self, const flat_table *flat,
                              poptContext context, int code)
{
    const char *option = poptBadOption(context, POPT_BADOPTION_NOALIAS);
    if (code == POPT_ERROR_BADOPT && strncmp(option, "--", 2) == 0) {
        const char *names[MAX_OPTIONS + 1] = {NULL};
        char word[64];
        for (size_t i = 0; i < flat->count; i++)
            names[i] = flat->options[i]->longName;
        snprintf(word, sizeof word, "%s", option + 2);
        word[strcspn(word, "=")] = '\0';
        const char *nearest = options_nearest(word, names);
        if (nearest != NULL)
            return failure_usage(self->name,
                                 "unknown option '%s', did you mean '--%s'?", option,
                                 nearest);
    }
    return failure_usage(self->name, "option '%s': %s", option, poptStrerror(code));
}

static void options_print_help(const command *self, int argc, const char **argv,
                               const struct poptOption *table)
{
    poptContext context = poptGetContext(NULL, argc, argv, table, 0);
    printf("%s\n\n%s\n\n", self->summary, self->help);
    fflush(stdout);
    poptSetOtherOptionHelp(context, self->arguments);
    poptPrintHelp(context, stdout, 0);
    poptFreeContext(context);
}

/* --timeout, or the environment's; false after a message. */
static bool resolve_timeout(const command *self, common_options *common)
{
    const char *text = common->timeout;
    const char *source = "--timeout";
    common->timeout_given = text != NULL;
    if (text == NULL) {
        text = getenv("NIXL_FETCH_TIMEOUT");
        source = "NIXL_FETCH_TIMEOUT";
    }
    if (text == NULL || (text[0] == '\0' && !common->timeout_given))
        return true;
    if (!options_duration(text, &common->timeout_ms)) {
        failure_usage(self->name, "%s '%s' is no time such as 500ms, 30s or 2m", source,
                      text);
        return false;
    }
    return true;
}

/* All options on one level, each of which is told of by its index; popt stores flags and lists
   only. */
static void split_table(const flat_table *flat, struct poptOption *out)
{
    for (size_t i = 0; i < flat->count; i++) {
        unsigned kind = flat->options[i]->argInfo & POPT_ARG_MASK;
        out[i] = *flat->options[i];
        if (is_number(&out[i]) || kind == POPT_ARG_STRING) {
            out[i].argInfo = POPT_ARG_STRING;
            out[i].arg = NULL;
        }
        if (out[i].val == 0)
            out[i].val = OPTION_FIRST + (int)i;
    }
    out[flat->count] = (struct poptOption)POPT_TABLEEND;
}

/* An option was read; false if its value is refused, after a message. */
static bool options_take(const command *self, const struct poptOption *option,
                         poptContext context)
{
    char *text = poptGetOptArg(context);
    bool good = true;
    if (is_number(option)) {
        good = text != NULL && set_number(self, option, text);
    } else if (text != NULL && text[0] == '\0') {
        failure_usage(self->name, "--%s is empty", option->longName);
        good = false;
    } else if ((option->argInfo & POPT_ARG_MASK) == POPT_ARG_STRING) {
        char **out = option->arg; /* the last one counts */
        free(*out);
        *out = text;
        text = NULL;
    }
    free(text);
    return good;
}

/* Reads the options; popt only splits words, so that each value is judged with its option's
   name. 0, or the value of an option that ends the command, or popt's error. */
static int options_read_options(const command *self, const flat_table *flat,
                                arguments *parsed, bool *good_out)
{
    int code;
    *good_out = true;
    while ((code = poptGetNextOpt(parsed->context)) >= OPTION_FIRST) {
        size_t index = (size_t)(code - OPTION_FIRST);
        parsed->given[index] = true;
        if (!options_take(self, flat->options[index], parsed->context)) {
            *good_out = false;
            return 0;
        }
    }
    return code;
}

void options_expect_json(int argc, const char *const *argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--json") == 0 || strcmp(argv[i], "-j") == 0)
            output_use_json(true);
}

bool options_parse(const command *self, int argc, const char **argv,
                   struct poptOption *table, common_options *common, arguments *parsed,
                   int *status_out)
{
    flat_table flat = {.count = 0};
    bool good;
    *parsed = (arguments){.table = table};
    flatten(table, &flat);
    if (listing != NULL) {
        for (listing->count = 0; listing->count < flat.count; listing->count++)
            listing->options[listing->count] = *flat.options[listing->count];
        *status_out = 0;
        return false;
    }
    split_table(&flat, parsed->split);
    parsed->context = poptGetContext(NULL, argc, argv, parsed->split, 0);
    *status_out = EXIT_USAGE;
    options_expect_json(argc, argv); /* so that a wrong option is told as JSON too */
    int code = options_read_options(self, &flat, parsed, &good);
    if (code == OPTION_HELP) {
        options_print_help(self, argc, argv, table);
        *status_out = 0;
        return false;
    }
    if (code < -1) {
        options_bad_option(self, &flat, parsed->context, code);
        return false;
    }
    output_use_json(common->json != 0);
    for (const char *word; good && (word = poptGetArg(parsed->context)) != NULL;) {
        if (parsed->count == MAX_POSITIONAL) {
            failure_usage(self->name, "too many arguments, from '%s' on", word);
            return false;
        }
        parsed->positional[parsed->count++] = word;
    }
    return good && resolve_timeout(self, common);
}

static void free_value(const struct poptOption *option)
{
    unsigned kind = option->argInfo & POPT_ARG_MASK;
    if (kind == POPT_ARG_STRING) {
        char **text = option->arg;
        free(*text);
        *text = NULL;
    } else if (kind == POPT_ARG_ARGV) {
        char ***list = option->arg;
        for (char **p = *list; p != NULL && *p != NULL; p++)
            free(*p);
        free(*list);
        *list = NULL;
    }
}

void options_free(arguments *parsed)
{
    flat_table flat = {.count = 0};
    if (parsed->context != NULL)
        parsed->context = poptFreeContext(parsed->context);
    if (parsed->table != NULL)
        flatten(parsed->table, &flat);
    for (size_t i = 0; i < flat.count; i++)
        free_value(flat.options[i]);
    parsed->table = NULL;
}

fanin_dtype options_dtype(const char *text)
{
    static const struct {
        const char *alias, *name;
    } aliases[] = {
        {"bfloat16", "BF16"},
        {"float16", "F16"},
        {"half", "F16"},
        {"float32", "F32"},
        {"float", "F32"},
        {"float64", "F64"},
        {"double", "F64"},
        {"float8_e4m3fn", "F8_E4M3"},
        {"float8_e5m2", "F8_E5M2"},
        {"uint8", "U8"},
        {"int8", "I8"},
        {"fp16", "F16"},
        {"fp32", "F32"},
    };
    char upper[32];
    size_t i;
    for (i = 0; i < sizeof aliases / sizeof aliases[0]; i++)
        if (strcasecmp(text, aliases[i].alias) == 0)
            return fanin_dtype_from_name(aliases[i].name);
    for (i = 0; text[i] != '\0' && i + 1 < sizeof upper; i++)
        upper[i] = (char)toupper((unsigned char)text[i]);
    upper[i] = '\0';
    return fanin_dtype_from_name(upper);
}

fanin_dtype options_half(const char *text)
{
    fanin_dtype dtype = options_dtype(text);
    return half_converts(FANIN_DTYPE_F32, dtype) ? dtype : 0;
}

bool options_run_valid(const char *run)
{
    size_t length = strlen(run);
    return length >= 1 && length <= FANIN_MAX_RUN && strcmp(run, ".") != 0 &&
           strcmp(run, "..") != 0 &&
           strspn(run, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                       "0123456789._-") == length;
}

/* "lora:" and "full:" have one length. */
enum { KIND = 5 };

static bool options_has_kind(const char *word)
{
    return strncmp(word, "lora:", KIND) == 0 || strncmp(word, "full:", KIND) == 0;
}

bool options_is_publication(const char *word)
{
    return options_has_kind(word) && options_run_valid(word + KIND);
}

bool options_publication(const char *run, char out[OPTIONS_PUBLICATION])
{
    bool whole = options_has_kind(run);
    if (!options_run_valid(whole ? run + KIND : run))
        return false;
    snprintf(out, OPTIONS_PUBLICATION, "%s%s", whole ? "" : "lora:", run);
    return true;
}

const char *options_run_of(const char *publication)
{
    return strncmp(publication, "lora:", KIND) == 0 ? publication + KIND : publication;
}

bool options_is_model(const char *publication)
{
    return strncmp(publication, "full:", KIND) == 0;
}
