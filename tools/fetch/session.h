/* SPDX-License-Identifier: Apache-2.0 */
/** @file A command's connection: target, client, signals, log, and the run it is about. */
#ifndef SESSION_H
#define SESSION_H

#include "fetch/options.h"
#include "fetch/target.h"

typedef struct session {
    const command *command;
    const char *target_text; /**< as it was given */
    target target;
    fanin_client *client;
    char run
        [80]; /**< as people write it: "<run>", or "full:<run>"; "": none is chosen */
    char publication[OPTIONS_PUBLICATION];
    const char *key;            /**< that is asked for, NULL: none */
    fanin_client_config config; /**< the client's; names are the target's or the command
                                   line's */
    bool demanding;             /**< an option says who the ranks must be */
    uint64_t end_ns;            /**< when the command's --timeout is over */
} session;

/** A fanin_log_fn: prints to stderr; @p verbose is not NULL: also what is routine. */
void session_log(void *verbose, fanin_log_level level, const char *event,
                 const char *message);

/** Where a command's client or ranks log: session_log; nowhere with --quiet; NULL, which is where
    FANIN_LOG says, unless --verbose is given. */
fanin_log_fn session_log_of(const common_options *common);

/** Whether its connections by TCP are TLS: it has a secret or a certificate. Once it was opened. */
bool session_is_secured(const session *s);

enum { SESSION_OPTIONS = 4 };

/** The command line that commands with a TARGET have in common; zero but for
    common.timeout_ms before it is parsed. */
typedef struct invocation {
    common_options common;
    connect_options connect;
    char *run;
    const char
        *words[MAX_POSITIONAL]; /**< what follows TARGET and run; NULL: nothing */
    arguments parsed;
    struct poptOption shared[SESSION_OPTIONS]; /**< include it in the command's table */
    struct poptOption common_part[COMMON_OPTIONS], connect_part[CONNECT_OPTIONS];
} invocation;

/** The entry of a command's table that includes what an invocation brings. */
#define SESSION_TABLE(invocation)                                                      \
    {                                                                                  \
        NULL, 0, POPT_ARG_INCLUDE_TABLE, (invocation)->shared, 0, NULL, NULL           \
    }

/** Fills the shared options and parses the command line; false: the command is over with
    *status_out. options_free(&line->parsed) in either case. */
bool session_parse(const command *self, invocation *line, int argc, const char **argv,
                   struct poptOption *table, int *status_out);

/** Takes the first word that is a publication's name from those that were parsed, as --run.
    *@p at_out: where it stood, -1: there is none. False after a message: --run names another one.
    **/
bool session_take_run(const command *self, invocation *line, int *at_out);

/** The environment's target: NIXL_FETCH_SERVERS, else FANIN_TRAINER; NULL or "": none. */
const char *session_default_target(void);

/**
 * Parses the target, creates the client and chooses the run (@p run, else target_choose(), which
 * may leave it open: session_need_run()). Nothing is connected yet. Returns 0 or the exit status
 * after a message; session_end() in either case.
 */
int session_start(session *s, const command *self, const invocation *line,
                  const char *target_text, const char *run);

/** A whole model takes its time: with neither --timeout nor NIXL_FETCH_TIMEOUT a command about one
    has an hour from now on. */
void session_be_patient(session *s, const invocation *line);

/** Chooses another run. 0, or the exit status after a message. */
int session_choose_run(session *s, const char *run);

/** Whether the command has a run: 0. The target file may name several, and the command line none:
    the
    exit status after a message. */
int session_need_run(const session *s);

/** failure_report() of what ranks answered, or not, with a remedy for the words on the command line
    and the number of the rank that the target says is at the error's address. */
int session_failure(const session *s, const char *what, fanin_error *error);

/** What is left of the command's --timeout, which began with session_start(); at least 1. */
uint32_t session_left_ms(const session *s);

/** Connects within what is left, until one rank has answered: the calls that follow see to the
    others. Errors are fanin_client_connect_any()'s, but ranks that are silent are
    unreachable. */
fanin_status session_try(const session *s, fanin_error *error);
/** The same: 0, or the exit status after a message. */
int session_reach(const session *s);

/** Connects to all ranks; warns about those that did not answer. 0, or the exit status after a
    message. */
int session_connect(const session *s, uint32_t timeout_ms);

/** Gives the client and its memory back early; names of run and publication stay. */
void session_disconnect(session *s);

/** Reads the target again, which may lead to another launch by now, and connects as session_try()
    with a --timeout of its own. The target and what it demands stay if it cannot be read. */
fanin_status session_renew(session *s, const invocation *line, fanin_error *error);

void session_end(session *s);

/** What a command does with a session that is open; returns the exit status. */
typedef int (*session_fn)(session *s, const invocation *line, void *cookie);

/**
 * A command that needs a target: session_parse(), TARGET (or the environment's), a run ("full:0",
 * as --run), @p words more words and perhaps a directory, session_start() with --run, @p fn, and
 * the end of all that. Returns the exit status.
 */
int session_run(const command *self, int argc, const char **argv, invocation *line,
                struct poptOption *table, int words, session_fn fn, void *cookie);

/** Starts the trace of --trace, if @p file is not NULL: before a command connects. 0, or the exit
    status. */
int session_trace_start(const char *file);
/** Ends it, when the client is gone. @p code, or if that is 0 and the trace is not whole the exit
    status. */
int session_trace_stop(const char *file, int code);

#endif
