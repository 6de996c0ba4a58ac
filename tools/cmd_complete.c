/* SPDX-License-Identifier: Apache-2.0 */
/* Words for the shell's completion, one a line. Never a message: a failure completes
   nothing. */
#include "command.h"
#include "models.h"
#include "session.h"

#include <fanin/client.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_MS = 1500, MAX_PUBLICATIONS = 64 };

static void print_with_prefix(const char *word, const char *prefix)
{
    if (strncmp(word, prefix, strlen(prefix)) == 0) {
        puts(word);
    }
}

static void complete_static(const char *what, const char *prefix)
{
    if (strcmp(what, "commands") == 0) {
        for (size_t i = 0; commands[i] != NULL; i++) {
            if (!commands[i]->hidden) {
                print_with_prefix(commands[i]->name, prefix);
            }
        }
    } else if (strcmp(what, "models") == 0) {
        for (size_t i = 0; i < n_models; i++) {
            print_with_prefix(models[i].name, prefix);
        }
    } else if (strcmp(what, "shapes") == 0) {
        for (size_t i = 0; i < n_adapter_shapes; i++) {
            print_with_prefix(adapter_shapes[i].name, prefix);
        }
    }
}

/* Options of the command @p name, by its own table. */
static void complete_options(const char *name)
{
    const command *found = command_find(name);
    const char *argv[] = {name, NULL};
    if (found != NULL && !found->hidden) {
        options_list_only();
        (void)found->run(found, 1, argv);
    }
}

typedef struct lister {
    fanin_client *client;
    const char *prefix;
    bool keys;
    char names[MAX_PUBLICATIONS][96]; /**< publications, each once */
    size_t count;
} lister;

static bool on_publication(void *cookie, const fanin_publication_info *info)
{
    lister *l = cookie;
    for (size_t i = 0; i < l->count; i++) {
        if (strcmp(l->names[i], info->name) == 0) {
            return true;
        }
    }
    if (l->count < MAX_PUBLICATIONS && info->state != FANIN_PUBLICATION_UNPUBLISHED) {
        snprintf(l->names[l->count++], sizeof(l->names[0]), "%s", info->name);
    }
    return true;
}

typedef struct key_printer {
    const char *publication, *prefix;
} key_printer;

static bool on_entry(void *cookie, const fanin_entry *entry)
{
    const key_printer *p = cookie;
    char key[FANIN_MAX_NAME + 128];
    snprintf(key, sizeof(key), "%s:%s", p->publication, entry->name);
    print_with_prefix(key, p->prefix);
    return true;
}

static void print_publications(lister *l)
{
    fanin_status status =
        fanin_client_list(l->client, PATIENCE_MS, on_publication, l, NULL);
    for (size_t i = 0; status == FANIN_OK && i < l->count; i++) {
        if (!l->keys) {
            const char *run = strchr(l->names[i], ':');
            print_with_prefix(run != NULL ? run + 1 : l->names[i], l->prefix);
            continue;
        }
        key_printer p = {l->names[i], l->prefix};
        status = fanin_client_catalog(l->client, l->names[i], NULL, PATIENCE_MS,
                                      on_entry, &p, NULL);
    }
}

static void complete_from_ranks(const char *text, uint32_t world_size, lister *l)
{
    fanin_client_config config;
    target where;
    fanin_error error = FANIN_ERROR_INIT;
    if (target_parse(text, world_size, &where, &error) != FANIN_OK) {
        return;
    }
    fanin_client_config_init(&config, sizeof(config));
    config.no_ucx = true;
    config.connect_timeout_ms = PATIENCE_MS;
    if (fanin_client_create(&config, &l->client, NULL) == FANIN_OK &&
        fanin_client_connect(l->client, (const char *const *)where.addresses,
                             where.count, PATIENCE_MS, NULL) == FANIN_OK) {
        print_publications(l);
    }
    fanin_client_destroy(&l->client);
    target_free(&where);
}

static int run(const command *self, int argc, const char **argv)
{
    (void)self;
    const char *what = argc > 1 ? argv[1] : "";
    const char *prefix = argc > 2 ? argv[2] : "";
    bool keys = strcmp(what, "keys") == 0;
    if (strcmp(what, "options") == 0) {
        complete_options(prefix);
        return 0;
    }
    if (!keys && strcmp(what, "runs") != 0) {
        complete_static(what, prefix);
        return 0;
    }
    const char *text =
        argc > 3 && argv[3][0] != '\0' ? argv[3] : session_default_target();
    unsigned long size = argc > 4 ? strtoul(argv[4], NULL, 10) : 0;
    lister l = {.prefix = prefix, .keys = keys};
    if (text != NULL && size <= TARGET_MAX_RANKS) {
        complete_from_ranks(text, (uint32_t)size, &l);
    }
    return 0;
}

/* __complete options COMMAND, commands|models|shapes PREFIX, keys|runs PREFIX TARGET [WORLD-SIZE] */
const command cmd_complete = {
    .name = "__complete",
    .arguments = "",
    .summary = "words for the shell's completion",
    .help = "",
    .hidden = true,
    .run = run,
};
