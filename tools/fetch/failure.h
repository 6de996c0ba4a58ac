/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * How failures are told: one line "nixl-fetch: what: why: what to do" on stderr, an error
 * object on stdout with --json, and an exit status by class of failure.
 */
#ifndef FAILURE_H
#define FAILURE_H

#include "fetch/interrupt.h"

#include <fanin/error.h>
#include <jansson.h>
#include <stdbool.h>

/** The object that is printed with --json. */
json_t *failure_json(const fanin_error *error);

/** Tells @p error, or that the user interrupted. @p what: "cannot pull". The exit status. */
int failure_report(const char *what, const fanin_error *error);

/** Tells a failure of the tool's own with a status of the library's. The exit status. */
int failure_local(const char *what, fanin_status status, const char *remedy,
                  const char *format, ...) __attribute__((format(printf, 4, 5)));

/** Fills an error of the tool's own; returns @p status. */
fanin_status failure_set(fanin_error *error, fanin_status status, const char *remedy,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

/** A wrong command line; names the command's help. Returns EXIT_USAGE. */
int failure_usage(const char *command, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** At the end: @p code, or after a message that of an output that cannot be written. */
int failure_of_output(int code);

/** A warning on stderr. */
void failure_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
