/* SPDX-License-Identifier: Apache-2.0 */
/* Words for the shells' completion, one a line, with a description after a tab. What files to
   offer is the shell's matter: ":files" (of JSON), ":any-files", ":directories". Never a message: a
   failure completes nothing. */
#include "fetch/output.h"
#include "trainer/models.h"
#include "fetch/session.h"
#include "clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* For all that is asked, and for a rank that does not answer. */
enum { PATIENCE_MS = 1500, RANK_MS = PATIENCE_MS / 3, MAX_PUBLICATIONS = 64 };

/* A command line up to the word that is completed. */
typedef struct line {
    const command *command;
    option_list list;
    const char *target, *size; /**< NULL: not given */
    int positional;            /**< words before the current one that are no options */
    const struct poptOption *wanting; /**< whose value the current word is; NULL */
} line;

static void offer(const char *word, const char *prefix, const char *description)
{
    if (strncmp(word, prefix, strlen(prefix)) == 0)
        printf(description != NULL ? "%s\t%s\n" : "%s\n", word, description);
}

/* ----------------------------------------------------------------- from the ranks */

/* Peers choose these words, and shells put them into a command line as they are: what a shell
   would act on, or take for another word, is not offered. */
static void offer_of_ranks(const char *word, const char *prefix)
{
    if (word[strspn(word, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                          "0123456789._:/+-@%,=")] == '\0')
        offer(word, prefix, NULL);
}

typedef struct lister {
    fanin_client *client;
    const char *prefix, *publication; /**< publication: whose keys are listed */
    bool keys, whole;                 /**< keys, or whole names of publications */
    uint64_t end_ns;                  /**< when the shell should have its words */
    char names[MAX_PUBLICATIONS][96]; /**< publications, each once */
    size_t count;
} lister;

static bool complete_on_publication(void *cookie, const fanin_publication_info *info)
{
    lister *l = cookie;
    for (size_t i = 0; i < l->count; i++)
        if (strcmp(l->names[i], info->name) == 0)
            return true;
    if (l->count < MAX_PUBLICATIONS && info->state != FANIN_PUBLICATION_UNPUBLISHED)
        snprintf(l->names[l->count++], sizeof l->names[0], "%s", info->name);
    return true;
}

static bool complete_on_entry(void *cookie, const fanin_entry *entry)
{
    const lister *l = cookie;
    char key[FANIN_MAX_NAME + 128];
    snprintf(key, sizeof key, "%s:%s", l->publication, entry->name);
    offer_of_ranks(key, l->prefix);
    return true;
}

static void offer_publications(lister *l)
{
    fanin_status status =
        fanin_client_list(l->client, (uint32_t)deadline_poll_ms(l->end_ns),
                          complete_on_publication, l, NULL);
    for (size_t i = 0; status == FANIN_OK && i < l->count; i++) {
        if (!l->keys) {
            offer_of_ranks(l->whole ? l->names[i] : options_run_of(l->names[i]),
                           l->prefix);
            continue;
        }
        size_t same = strlen(l->names[i]), typed = strlen(l->prefix);
        if (strncmp(l->names[i], l->prefix, same < typed ? same : typed) != 0)
            continue;
        l->publication = l->names[i];
        status = fanin_client_catalog(l->client, l->names[i], NULL,
                                      (uint32_t)deadline_poll_ms(l->end_ns),
                                      complete_on_entry, l, NULL);
    }
}

/* What is offered of what the ranks publish. */
typedef enum wanted { WANT_RUNS, WANT_PUBLICATIONS, WANT_KEYS } wanted;

static void offer_from_ranks(const line *line, wanted what, const char *prefix)
{
    fanin_client_config config;
    target where;
    fanin_error error = FANIN_ERROR_INIT;
    lister l = {.prefix = prefix,
                .keys = what == WANT_KEYS,
                .whole = what == WANT_PUBLICATIONS};
    const char *text = line->target != NULL ? line->target : session_default_target();
    unsigned long size = line->size != NULL ? strtoul(line->size, NULL, 10) : 0;
    if (text == NULL || size > TARGET_MAX_RANKS ||
        target_parse(text, (uint32_t)size, &where, &error) != FANIN_OK)
        return;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.connect_timeout_ms = RANK_MS;
    l.end_ns = deadline_in_ms(PATIENCE_MS);
    if (fanin_client_create(&config, &l.client, NULL) == FANIN_OK &&
        fanin_client_connect_any(l.client, (const char *const *)where.addresses,
                                 where.count, (uint32_t)deadline_poll_ms(l.end_ns),
                                 NULL) == FANIN_OK)
        offer_publications(&l);
    fanin_client_destroy(&l.client);
    target_free(&where);
}

/* ------------------------------------------------------------------ the words' kinds */

static void offer_value(const line *line, const char *prefix)
{
    const char *name = line->wanting->longName, *value = line->wanting->argDescrip;
    bool known = false;
    static const struct {
        const char *option;
        const char *const words[10];
    } fixed[] = {
        {"path", {"auto", "stream", "cma", "rdma", "cuda_ipc"}},
        {"dtype", {"bf16", "f16", "f32", "f64", "f8_e4m3", "f8_e5m2", "i8", "u8"}},
        {"cast", {"bf16", "f16"}},
        {"pull-dtype", {"bf16", "f16"}},
        {"mapping", {":files"}},
        {"dest", {"memory", "device:0", ":directories"}},
        {"delta-from", {":directories"}},
        {"info", {":files"}},
        {"memory", {"host", ":directories"}},
    };
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        for (size_t j = 0; strcmp(name, fixed[i].option) == 0 && fixed[i].words[j];
             j++) {
            const char *word = fixed[i].words[j];
            known = true;
            offer(word, word[0] == ':' ? "" : prefix, NULL);
        }
    }
    if (!known && (strcmp(value, "DIR") == 0 || strcmp(value, "FILE") == 0))
        offer(value[0] == 'D' ? ":directories" : ":any-files", "", NULL);
    for (size_t i = 0; strcmp(name, "model") == 0 && i < n_models; i++)
        offer(models[i].name, prefix, models[i].kv_rank > 0 ? "with --full" : NULL);
    for (size_t i = 0; strcmp(name, "adapter-shape") == 0 && i < n_adapter_shapes; i++)
        offer(adapter_shapes[i].name, prefix, NULL);
    if (strcmp(name, "run") == 0)
        offer_from_ranks(line, WANT_RUNS, prefix);
}

static void offer_options(const line *line, const char *prefix)
{
    char word[64];
    for (size_t i = 0; i < line->list.count; i++) {
        const struct poptOption *o = &line->list.options[i];
        snprintf(word, sizeof word, "--%s", o->longName);
        offer(word, prefix, o->descrip);
    }
}

/* ------------------------------------------------------------------------ the line */

static void learn_options(const command *c, option_list *out)
{
    const char *argv[] = {c->name, NULL};
    options_list_only(out);
    (void)c->run(c, 1, argv);
}

/* A line each: long name, what its value is called, description and letter, by tabs. */
static void list_options(const command *c)
{
    option_list list = {.count = 0};
    if (c != NULL)
        learn_options(c, &list);
    for (size_t i = 0; i < list.count; i++) {
        const struct poptOption *o = &list.options[i];
        printf("--%s\t%s\t%s\t%.1s\n", o->longName,
               o->argDescrip != NULL ? o->argDescrip : "", o->descrip, &o->shortName);
    }
}

/* The option that @p word is, if its value is the next word. */
static const struct poptOption *option_wanting(const line *line, const char *word)
{
    for (size_t i = 0; i < line->list.count; i++) {
        const struct poptOption *o = &line->list.options[i];
        bool is = word[1] == '-' ? strcmp(word + 2, o->longName) == 0
                                 : word[1] == o->shortName && word[2] == '\0';
        if (is && o->argDescrip != NULL && word[1] != '\0')
            return o;
    }
    return NULL;
}

static void scan(line *line, int count, const char *const *words)
{
    for (int i = 0; i < count; i++) {
        if (line->wanting != NULL) {
            if (strcmp(line->wanting->longName, "world-size") == 0)
                line->size = words[i];
            line->wanting = NULL;
        } else if (words[i][0] == '-') {
            line->wanting = option_wanting(line, words[i]);
            line->size = strncmp(words[i], "--world-size=", 13) == 0 ? words[i] + 13
                                                                     : line->size;
        } else if (line->positional++ == 0) {
            line->target = words[i];
        }
    }
}

static void complete_argument(line *line, const char *prefix)
{
    bool two_sides = strcmp(line->command->name, "diff") == 0;
    bool takes_key = strcmp(line->command->name, "show") == 0;
    bool takes_directory = line->command->takes_directory;
    bool has_target = line->target != NULL || session_default_target() != NULL;
    bool takes_file =
        line->positional == 0 && strcmp(line->command->name, "serve") != 0;
    if (strcmp(line->command->name, "secret") == 0)
        takes_file = false;                   /* it is a new one */
    if (two_sides && line->positional >= 1) { /* a run of the one, or the other */
        offer_from_ranks(line, WANT_PUBLICATIONS, prefix);
        takes_file = true;
    }
    if (takes_key && has_target && line->positional <= 1) {
        offer_from_ranks(line, WANT_KEYS, prefix);
    } else if (takes_directory && has_target && line->positional == 1) {
        offer_from_ranks(line, WANT_PUBLICATIONS, prefix);
        offer(":directories", "", NULL);
    } else if (takes_directory && line->positional == 2) {
        offer(":directories", "", NULL);
    } else if (takes_file) {
        offer(":files", "", NULL);
    }
}

/* @p words after the program's name; the last one is completed. */
static void complete_line(const command *const *all, int count,
                          const char *const *words)
{
    static const char *const others[] = {"help", "--help", "--version"};
    const char *current = words[count - 1];
    static line line; /* large */
    if (count == 1 || strcmp(words[0], "help") == 0) {
        for (; *all != NULL; all++)
            offer((*all)->name, current, (*all)->summary);
        for (size_t i = 0; count == 1 && i < sizeof others / sizeof others[0]; i++)
            offer(others[i], current, NULL);
        return;
    }
    line.command = command_find(all, words[0]);
    if (line.command == NULL)
        return;
    learn_options(line.command, &line.list);
    scan(&line, count - 2, words + 1);
    if (line.wanting != NULL)
        offer_value(&line, current);
    else if (current[0] == '-')
        offer_options(&line, current);
    else
        complete_argument(&line, current);
}

int complete(const command *const *all, int argc, const char *const *argv)
{
    const char *what = argc > 2 ? argv[1] : "";
    if (strcmp(what, "line") == 0)
        complete_line(all, argc - 2, argv + 2);
    else if (strcmp(what, "options") == 0)
        list_options(command_find(all, argv[2]));
    return 0;
}
