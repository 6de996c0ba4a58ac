/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/session.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "clock.h"

#include <fanin/trace.h>
#include <malloc.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------------------- suggestions */

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
    if (options_nearer(s->word, entry->name, &s->best))
        snprintf(s->nearest, sizeof s->nearest, "%s", entry->name);
    return true;
}

static bool lists(const char *all, const char *name)
{
    size_t size = strlen(name);
    for (const char *p = all; (p = strstr(p, name)) != NULL; p += size) {
        bool begins = p == all || p[-1] == ' ';
        if (begins && (p[size] == '\0' || p[size] == ','))
            return true;
    }
    return false;
}

static bool suggest_on_publication(void *cookie, const fanin_publication_info *info)
{
    search *s = cookie;
    const char *run = options_run_of(info->name);
    if (lists(s->all, run))
        return true;
    if (strlen(s->all) + strlen(run) + 3 < sizeof s->all)
        output_append(s->all, sizeof s->all, "%s%s", s->all[0] != '\0' ? ", " : "",
                      run);
    if (options_nearer(s->word, run, &s->best))
        snprintf(s->nearest, sizeof s->nearest, "%s", run);
    return true;
}

/*
 * Makes the remedy of a NOT_FOUND error one that names the nearest key (name, NULL: no key was
 * asked for) or the nearest run, or the runs that there are. Asks the ranks, briefly; leaves
 * the error as it is if they do not answer.
 */
static void suggest(const session *s, const char *name, fanin_error *error)
{
    fanin_error ignored = FANIN_ERROR_INIT;
    search keys = {.word = name};
    search runs = {.word = s->run};
    if (error->status != FANIN_ERR_NOT_FOUND)
        return;
    if (name != NULL &&
        fanin_client_catalog(s->client, s->publication, NULL, PATIENCE_MS,
                             suggest_on_entry, &keys, &ignored) == FANIN_OK) {
        if (keys.nearest[0] != '\0')
            snprintf(error->remedy, sizeof error->remedy, "did you mean '%.200s'?",
                     keys.nearest);
        return;
    }
    if (fanin_client_list(s->client, PATIENCE_MS, suggest_on_publication, &runs,
                          &ignored) != FANIN_OK)
        return;
    if (runs.nearest[0] != '\0' && strcmp(runs.nearest, s->run) != 0)
        snprintf(error->remedy, sizeof error->remedy, "did you mean the run '%.64s'?",
                 runs.nearest);
    else if (runs.all[0] != '\0' && !lists(runs.all, s->run))
        snprintf(error->remedy, sizeof error->remedy, "the ranks have the runs %s",
                 runs.all);
}

int session_trace_start(const char *file)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (file == NULL || fanin_trace_start(file, &error) == FANIN_OK)
        return 0;
    return failure_report("cannot trace", &error);
}

int session_trace_stop(const char *file, int code)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (file == NULL || fanin_trace_stop(&error) == FANIN_OK || code != 0)
        return code;
    return failure_report("the trace is not whole", &error);
}

void session_log(void *verbose, fanin_log_level level, const char *event,
                 const char *message)
{
    static const char *const names[] = {"log", "error", "warning", "info", "debug"};
    if (level <= FANIN_LOG_WARNING || verbose != NULL)
        terminal_tell("nixl-fetch: %s: %s: %s",
                      names[level >= 1 && level <= 4 ? level : 0], event, message);
}

static void session_drop(void *cookie, fanin_log_level level, const char *event,
                         const char *message)
{
    (void)cookie;
    (void)level;
    (void)event;
    (void)message;
}

fanin_log_fn session_log_of(const common_options *common)
{
    const char *choice = getenv("FANIN_LOG");
    if (common->quiet)
        return session_drop;
    return common->verbose || choice == NULL || choice[0] == '\0' ? session_log : NULL;
}

bool session_parse(const command *self, invocation *line, int argc, const char **argv,
                   struct poptOption *table, int *status_out)
{
    const struct poptOption shared[SESSION_OPTIONS] = {
        {"run", 0, POPT_ARG_STRING, &line->run, 0,
         "the run, full:R of a whole model (default: the target file's, or 0)", "R"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, line->connect_part, 0, "Connection:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, line->common_part, 0,
         "Common options:", NULL},
        POPT_TABLEEND,
    };
    memcpy(line->shared, shared, sizeof shared);
    options_connect(&line->connect, line->connect_part);
    options_common(&line->common, line->common_part);
    return options_parse(self, argc, argv, table, &line->common, &line->parsed,
                         status_out);
}

const char *session_default_target(void)
{
    const char *text = getenv("NIXL_FETCH_SERVERS");
    if (text == NULL || text[0] == '\0')
        text = getenv("FANIN_TRAINER");
    return text;
}

static int configure(session *s, const invocation *line)
{
    fanin_client_config *config = &s->config;
    const common_options *common = &line->common;
    const connect_options *connect = &line->connect;
    fanin_client_config_init(config, sizeof *config);
    config->log = session_log_of(common);
    config->log_cookie = common->verbose ? s : NULL;
    config->no_unix = connect->no_unix != 0;
    config->no_ucx = connect->no_ucx != 0;
    config->trust_containers = connect->trust_containers != 0;
    config->trust_other_users = connect->trust_other_users != 0;
    config->no_checksums = connect->no_checksums != 0;
    config->threads = (uint32_t)connect->threads;
    config->streams_per_rank = (uint32_t)connect->streams;
    config->server_name = connect->server_name;
    CREDENTIALS_GIVE(config, &connect->credentials);
    if (common->timeout_ms < config->connect_timeout_ms)
        config->connect_timeout_ms = common->timeout_ms;
    if (connect->path != NULL) {
        config->path = fanin_path_from_name(connect->path);
        if (config->path < 0)
            return failure_usage(
                s->command->name,
                "path '%s' is none of auto, stream, cma, rdma, cuda_ipc",
                connect->path);
        if (config->no_ucx && strcmp(connect->path, "rdma") == 0)
            return failure_usage(s->command->name, "--no-ucx excludes --path rdma");
    }
    if (connect->world_id != NULL &&
        !target_world_id(connect->world_id, config->world_id))
        return failure_usage(s->command->name,
                             "--expect-world-id '%s' is not 32 hexadecimal digits, not "
                             "all zero",
                             connect->world_id);
    return 0;
}

/* What the target file says of its ranks is demanded of them, unless an option says more. */
static void demand(session *s, const connect_options *connect)
{
    fanin_client_config *config = &s->config;
    if (connect->server_name == NULL)
        config->server_name = s->target.server_name;
    if (connect->world_id == NULL)
        memcpy(config->world_id, s->target.world_id, sizeof config->world_id);
    /* An option says more than the environment, which says more than the target file. */
    if (config->secret_file == NULL && getenv("FANIN_SECRET_FILE") == NULL &&
        config->tls_cert == NULL && getenv("FANIN_TLS_CERT") == NULL)
        config->secret_file = s->target.secret_file;
    s->demanding = connect->server_name != NULL || connect->world_id != NULL;
}

/* As the library takes what it is given: NULL is the environment's, "" none. */
static bool is_given(const char *given, const char *variable)
{
    const char *file = given != NULL ? given : getenv(variable);
    return file != NULL && file[0] != '\0';
}

bool session_is_secured(const session *s)
{
    return is_given(s->config.secret_file, "FANIN_SECRET_FILE") ||
           is_given(s->config.tls_cert, "FANIN_TLS_CERT");
}

void session_be_patient(session *s, const invocation *line)
{
    enum { HOUR_MS = 3600000 };
    const char *environment = getenv("NIXL_FETCH_TIMEOUT");
    if (options_is_model(s->publication) && !line->common.timeout_given &&
        (environment == NULL || environment[0] == '\0'))
        s->end_ns = deadline_in_ms(HOUR_MS);
}

int session_choose_run(session *s, const char *run)
{
    char choices[TARGET_CHOICES];
    run = run != NULL ? run : target_choose(&s->target, choices);
    if (run == NULL)
        return 0;
    if (!options_publication(run, s->publication))
        return failure_usage(s->command->name, "run '%s' is not " OPTIONS_RUNS, run);
    snprintf(s->run, sizeof s->run, "%s", options_run_of(s->publication));
    return 0;
}

int session_need_run(const session *s)
{
    char choices[TARGET_CHOICES];
    if (s->publication[0] != '\0')
        return 0;
    (void)target_choose(&s->target, choices);
    return failure_usage(s->command->name,
                         "%s names several publications, give one of %s",
                         s->target.file, choices);
}

int session_start(session *s, const command *self, const invocation *line,
                  const char *target_text, const char *run)
{
    const int world_size = line->connect.world_size;
    fanin_error error = FANIN_ERROR_INIT;
    *s = (session){.command = self,
                   .target_text = target_text,
                   .end_ns = deadline_in_ms(line->common.timeout_ms)};
    char publication[OPTIONS_PUBLICATION];
    if (line->run != NULL && !options_publication(line->run, publication))
        return failure_usage(self->name, "--run '%s' is not " OPTIONS_RUNS, line->run);
    int code = configure(s, line);
    if (code != 0)
        return code;
    if (target_parse(target_text, (uint32_t)world_size, &s->target, &error) !=
        FANIN_OK) {
        code = failure_report("cannot use the target", &error);
        return error.status == FANIN_ERR_ARGUMENT && !target_is_file(target_text)
                   ? EXIT_USAGE
                   : code;
    }
    code = session_choose_run(s, run);
    if (code != 0)
        return code;
    demand(s, &line->connect);
    s->config.partial = self->of_some && s->target.count == 1 && world_size == 0 &&
                        s->target.file == NULL;
    if (fanin_client_create(&s->config, &s->client, &error) != FANIN_OK)
        return failure_report("cannot make a client", &error);
    interrupt_install(s->client);
    return 0;
}

/* A rank that never answered has not said which one it is; the target's order says it. */
static void place_rank(const session *s, fanin_error *error)
{
    for (uint32_t i = 0; s->target.in_rank_order && i < s->target.count; i++)
        if (error->rank < 0 && strcmp(s->target.addresses[i], error->address) == 0)
            error->rank = (int32_t)i;
}

/* The size of the ranks' world, if the error is that others were asked for; 0: it is not. */
static unsigned other_size(const fanin_error *error)
{
    unsigned size, given;
    const char *at = strstr(error->message, "says the world size");
    bool is = at != NULL && sscanf(at, "says the world size is %u, but %u addresses",
                                   &size, &given) == 2;
    return is ? size : 0;
}

enum { LOOK_MS = 1000 }; /* who is silent for so long may live as well */

typedef struct leaving {
    unsigned size, index;
    bool some; /**< ranks that live, or may, have an address beyond */
} leaving;

static bool session_on_rank(void *cookie, const fanin_rank_info *info)
{
    leaving *l = cookie;
    bool none =
        info->status == FANIN_ERR_UNREACHABLE || info->status == FANIN_ERR_PROTOCOL;
    l->some = l->some || (l->index >= l->size && (info->silent || !none));
    l->index++;
    return true;
}

/* Whether no rank would be left out if there were but @p size addresses. If those that answer are
   of several launches, @p error becomes that. */
static bool would_take_all(const session *s, unsigned size, fanin_error *error)
{
    const char *const *addresses = (const char *const *)s->target.addresses;
    fanin_client_config config = s->config;
    fanin_client *client = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    leaving left = {.size = size};
    config.partial = true; /* of any size */
    config.connect_timeout_ms = LOOK_MS;
    fanin_status status = fanin_client_create(&config, &client, &why);
    if (status == FANIN_OK) {
        interrupt_install(client);
        status = fanin_client_connect(client, addresses, s->target.count,
                                      session_left_ms(s), &why);
    }
    if (status == FANIN_OK)
        status = fanin_client_ranks(client, session_on_rank, &left, &why);
    else if (status == FANIN_ERR_WORLD)
        *error = why;
    interrupt_install(s->client);
    fanin_client_destroy(&client);
    return status == FANIN_OK && !left.some && !interrupt_requested();
}

/* Makes the remedy of a WORLD error one for the words on the command line. */
static void explain_world(const session *s, fanin_error *error)
{
    if (error->status != FANIN_ERR_WORLD || s->demanding)
        return; /* what an option demands the remedy speaks of */
    unsigned size = other_size(error);
    if (s->target.file != NULL)
        output_append(
            error->remedy, sizeof error->remedy,
            "; %.120s names the ranks: a trainer that starts anew writes it anew",
            s->target.file);
    else if (s->target.count == 1)
        snprintf(error->remedy, sizeof error->remedy,
                 "give --world-size N, or the address of every rank");
    else if (s->target.in_rank_order && size > 0 && would_take_all(s, size, error))
        snprintf(error->remedy, sizeof error->remedy, "give --world-size %u", size);
}

int session_failure(const session *s, const char *what, fanin_error *error)
{
    place_rank(s, error);
    explain_world(s, error);
    suggest(s, s->key, error);
    return failure_report(what, error);
}

uint32_t session_left_ms(const session *s)
{
    uint32_t left_ms = (uint32_t)deadline_poll_ms(s->end_ns);
    return left_ms > 0 ? left_ms : 1;
}

/* Until one rank has answered, or with @p all until each has or can be said not to. Ranks that are
   silent until the time is over are unreachable, whichever clock was first: that of the
   connections or that of the call. */
static fanin_status session_connect_to(const session *s, bool all, uint32_t timeout_ms,
                                       fanin_error *error)
{
    const char *const *addresses = (const char *const *)s->target.addresses;
    fanin_status status = (all ? fanin_client_connect : fanin_client_connect_any)(
        s->client, addresses, s->target.count, timeout_ms, error);
    if (status == FANIN_ERR_TIMEOUT)
        status = error->status = FANIN_ERR_UNREACHABLE;
    return status;
}

fanin_status session_try(const session *s, fanin_error *error)
{
    return session_connect_to(s, false, session_left_ms(s), error);
}

int session_reach(const session *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    return session_try(s, &error) == FANIN_OK
               ? 0
               : session_failure(s, "cannot connect", &error);
}

int session_connect(const session *s, uint32_t timeout_ms)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (session_connect_to(s, true, timeout_ms, &error) != FANIN_OK)
        return session_failure(s, "cannot connect", &error);
    missing_warn(s);
    return 0;
}

void session_disconnect(session *s)
{
    interrupt_detach();
    fanin_client_destroy(&s->client);
    malloc_trim(0);
}

fanin_status session_renew(session *s, const invocation *line, fanin_error *error)
{
    target next;
    const connect_options *connect = &line->connect;
    fanin_status status =
        target_parse(s->target_text, (uint32_t)connect->world_size, &next, error);
    if (status != FANIN_OK)
        return status;
    session_disconnect(s);
    target_free(&s->target);
    s->target = next;
    CREDENTIALS_GIVE(&s->config, &connect->credentials);
    demand(s, connect);
    s->end_ns = deadline_in_ms(line->common.timeout_ms);
    status = fanin_client_create(&s->config, &s->client, error);
    if (status != FANIN_OK)
        return status;
    interrupt_install(s->client);
    return session_try(s, error);
}

void session_end(session *s)
{
    interrupt_detach();
    fanin_client_destroy(&s->client);
    target_free(&s->target);
}

bool session_take_run(const command *self, invocation *line, int *at_out)
{
    arguments *parsed = &line->parsed;
    int at = 0;
    *at_out = -1;
    while (at < parsed->count && !options_is_publication(parsed->positional[at]))
        at++;
    if (at == parsed->count)
        return true;
    const char *word = parsed->positional[at];
    char given[OPTIONS_PUBLICATION];
    if (line->run != NULL &&
        !(options_publication(line->run, given) && strcmp(given, word) == 0)) {
        failure_usage(self->name, "--run '%s' is not '%s'", line->run, word);
        return false;
    }
    free(line->run);
    line->run = output_require(strdup(word)); /* as popt gives it, to options_free() */
    parsed->count--;
    memmove(&parsed->positional[at], &parsed->positional[at + 1],
            (size_t)(parsed->count - at) * sizeof parsed->positional[0]);
    *at_out = at;
    return true;
}

/* session_parse(), and the words of a command that needs a target: TARGET (or the
   environment's, if a run comes first), a run, @p words more words, and one that the command may
   do without. Returns TARGET's text; NULL if the command is over, *status_out is then the exit
   status. */
static const char *session_begin(const command *self, invocation *line, int argc,
                                 const char **argv, struct poptOption *table, int words,
                                 int *status_out)
{
    if (!session_parse(self, line, argc, argv, table, status_out))
        return NULL;
    const char *text = session_default_target();
    int first = 0;
    int run_at;
    *status_out = EXIT_USAGE;
    if (!session_take_run(self, line, &run_at))
        return NULL;
    if (run_at != 0 && line->parsed.count > words) {
        text = line->parsed.positional[0];
        first = 1;
    }
    if (line->parsed.count > first + words && self->takes_directory)
        words++;
    if (line->parsed.count > first + words) {
        failure_usage(self->name, "unexpected argument '%s'",
                      line->parsed.positional[first + words]);
        return NULL;
    }
    if (line->parsed.count < first + words || text == NULL || text[0] == '\0') {
        failure_usage(self->name, words > 0 ? "TARGET and KEY are needed"
                                            : "no TARGET, and neither "
                                              "NIXL_FETCH_SERVERS nor FANIN_TRAINER in "
                                              "the environment");
        return NULL;
    }
    for (int i = 0; i < words; i++)
        line->words[i] = line->parsed.positional[first + i];
    return text;
}

int session_run(const command *self, int argc, const char **argv, invocation *line,
                struct poptOption *table, int words, session_fn fn, void *cookie)
{
    session s = {0};
    int code;
    const char *where = session_begin(self, line, argc, argv, table, words, &code);
    if (where != NULL && self->untraced && line->connect.trace != NULL) {
        code = failure_usage(self->name, "--trace: it reads no weights itself; "
                                         "trace 'nixl-fetch pull'");
    } else if (where != NULL) {
        code = session_trace_start(line->connect.trace);
        if (code == 0) {
            code = session_start(&s, self, line, where, line->run);
            code = code != 0 ? code : fn(&s, line, cookie);
            session_end(&s);
            code = session_trace_stop(line->connect.trace, code);
        }
    }
    options_free(&line->parsed);
    return code;
}
