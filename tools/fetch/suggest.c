/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/suggest.h"
#include "fetch/output.h"

#include <stdio.h>
#include <string.h>

enum { PATIENCE_MS = 2000 };

typedef struct search {
    const char *word;
    size_t best;
    char nearest[FANIN_MAX_NAME + 1];
    char all[160]; /**< runs, as far as there is room */
} search;

static bool suggest_on_entry(void *cookie, const fanin_entry *entry)
{
    search *s = cookie;
    if (options_nearer(s->word, entry->name, &s->best)) {
        snprintf(s->nearest, sizeof s->nearest, "%s", entry->name);
    }
    return true;
}

static bool lists(const char *all, const char *name)
{
    size_t size = strlen(name);
    for (const char *p = all; (p = strstr(p, name)) != NULL; p += size) {
        bool begins = p == all || p[-1] == ' ';
        if (begins && (p[size] == '\0' || p[size] == ',')) {
            return true;
        }
    }
    return false;
}

static bool suggest_on_publication(void *cookie, const fanin_publication_info *info)
{
    search *s = cookie;
    const char *run = options_run_of(info->name);
    if (lists(s->all, run)) {
        return true;
    }
    if (strlen(s->all) + strlen(run) + 3 < sizeof s->all) {
        output_append(s->all, sizeof s->all, "%s%s", s->all[0] != '\0' ? ", " : "",
                      run);
    }
    if (options_nearer(s->word, run, &s->best)) {
        snprintf(s->nearest, sizeof s->nearest, "%s", run);
    }
    return true;
}

void suggest(const session *s, const char *name, fanin_error *error)
{
    fanin_error ignored = FANIN_ERROR_INIT;
    search keys = {.word = name};
    search runs = {.word = s->run};
    if (error->status != FANIN_ERR_NOT_FOUND) {
        return;
    }
    if (name != NULL &&
        fanin_client_catalog(s->client, s->publication, NULL, PATIENCE_MS,
                             suggest_on_entry, &keys, &ignored) == FANIN_OK) {
        if (keys.nearest[0] != '\0') {
            snprintf(error->remedy, sizeof error->remedy, "did you mean '%.200s'?",
                     keys.nearest);
        }
        return;
    }
    if (fanin_client_list(s->client, PATIENCE_MS, suggest_on_publication, &runs,
                          &ignored) != FANIN_OK) {
        return;
    }
    if (runs.nearest[0] != '\0' && strcmp(runs.nearest, s->run) != 0) {
        snprintf(error->remedy, sizeof error->remedy, "did you mean the run '%.64s'?",
                 runs.nearest);
    } else if (runs.all[0] != '\0' && !lists(runs.all, s->run)) {
        snprintf(error->remedy, sizeof error->remedy, "the ranks have the runs %s",
                 runs.all);
    }
}
