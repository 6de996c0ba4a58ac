/* SPDX-License-Identifier: Apache-2.0 */
/* Digests of what an engine holds are its workers' to make, in Python; so the comparison is there.
   */
#include "fetch/engine_proof.h"
#include "fetch/child.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/terminal.h"

#include <stdlib.h>
#include <string.h>

/* GRACE_MS: it tells itself that its time is over. */
enum { MAX_WORDS = 32, GRACE_MS = 5000, RAISED = 1 };

#define PYTHON "python3"
#define REMEDY                                                                         \
    "put a " PYTHON " first into the PATH that has fanin's package, of this version"

typedef struct words {
    const char *at[MAX_WORDS + 1];
    size_t count;
} words;

static void engine_proof_add(words *w, const char *option, const char *value)
{
    if (value != NULL && w->count + 2 <= MAX_WORDS) {
        w->at[w->count++] = option;
        w->at[w->count++] = value;
    }
}

/* The target as Python takes it; to be freed. */
static char *trainer_of(const target *t)
{
    size_t size = 1;
    for (uint32_t i = 0; t->file == NULL && i < t->count; i++) {
        size += strlen(t->addresses[i]) + 1;
    }
    char *text = output_require(t->file != NULL ? strdup(t->file) : calloc(1, size));
    char *end = text;
    for (uint32_t i = 0; t->file == NULL && i < t->count; i++) {
        end = stpcpy(stpcpy(end, i > 0 ? "," : ""), t->addresses[i]);
    }
    return text;
}

static void engine_proof_put_words(const session *s, const common_options *common,
                                   words *w)
{
    static char left[32], world[2 * FANIN_WORLD_ID_SIZE + 1];
    static const uint8_t none[FANIN_WORLD_ID_SIZE];
    const fanin_client_config *config = &s->config;
    uint32_t left_ms = session_left_ms(s);
    snprintf(left, sizeof left, "%u.%03u", left_ms / 1000, left_ms % 1000);
    snprintf(world, sizeof world, "%.*s", 2 * FANIN_WORLD_ID_SIZE,
             output_hex(config->world_id, sizeof none).s);
    *w = (words){.at = {PYTHON, "-m", "fanin.check"}, .count = 3};
    engine_proof_add(w, "--run", s->publication);
    engine_proof_add(w, "--timeout", left);
    engine_proof_add(w, "--server-name", config->server_name);
    engine_proof_add(w, "--world-id",
                     memcmp(config->world_id, none, sizeof none) != 0 ? world : NULL);
    engine_proof_add(w, "--secret-file", config->secret_file);
    engine_proof_add(w, "--tls-cert", config->tls_cert);
    engine_proof_add(w, "--tls-key", config->tls_key);
    engine_proof_add(w, "--tls-ca", config->tls_ca);
    if (common->json) {
        w->at[w->count++] = "--json";
    }
    w->at[w->count++] = "--";
}

/* Line by line, since engine and ranks have chosen names in it. */
static void pass_on(char *text, void (*tell)(const char *format, ...))
{
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line != NULL;
         line = strtok_r(NULL, "\n", &rest)) {
        tell("%s", line);
    }
}

static const char *last_line(char *text)
{
    size_t size = strlen(text);
    while (size > 0 && text[size - 1] == '\n') {
        text[--size] = '\0';
    }
    const char *line = strrchr(text, '\n');
    return line != NULL ? line + 1 : text;
}

static int engine_proof_tell(child *c)
{
    if (c->status < 0) {
        return failure_local("cannot verify", FANIN_ERR_TIMEOUT,
                             "give a longer --timeout", PYTHON " -m fanin.check %s",
                             c->why);
    }
    if (c->status == CHILD_ABSENT) {
        return failure_local("cannot verify", FANIN_ERR_IO, REMEDY,
                             "there is no " PYTHON);
    }
    if (c->status == RAISED) {
        return failure_local("cannot verify", FANIN_ERR_IO, REMEDY,
                             PYTHON " has failed: %s", last_line(c->err));
    }
    pass_on(c->err, terminal_tell);
    pass_on(c->out, terminal_print);
    return c->status;
}

/* Of whole weights, where nobody says which. */
static int choose_run(session *s, const invocation *line)
{
    char run[OPTIONS_PUBLICATION];
    if (line->run != NULL || options_is_model(s->publication)) {
        return 0;
    }
    snprintf(run, sizeof run, "full:%s",
             s->target.run[0] != '\0' ? s->target.run : "0");
    return session_choose_run(s, run);
}

int engine_proof(session *s, const invocation *line, const char *url)
{
    words w;
    child c;
    int code = choose_run(s, line);
    if (code != 0) {
        return code;
    }
    session_be_patient(s, line);
    char *trainer = trainer_of(&s->target);
    engine_proof_put_words(s, &line->common, &w);
    w.at[w.count++] = url;
    w.at[w.count++] = trainer;
    setenv("PYTHONSAFEPATH", "1", 1); /* modules are not the working directory's */
    child_run(PYTHON, w.at, session_left_ms(s) + GRACE_MS, &c);
    code = engine_proof_tell(&c);
    child_free(&c);
    free(trainer);
    return code;
}
