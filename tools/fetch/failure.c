/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/terminal.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static bool json_wanted;
static int output_errno; /**< of the first write that failed */

int failure_exit_code(fanin_status status)
{
    if (status >= 0) {
        return 0;
    }
    int group = -(status / 100);
    return EXIT_GROUP + (group < 1 ? 1 : group > 6 ? 6 : group);
}

void failure_use_json(bool json)
{
    json_wanted = json;
}

static void print_line(const char *what, const fanin_error *error)
{
    const char *why =
        error->message[0] != '\0' ? error->message : fanin_status_text(error->status);
    terminal_tell("nixl-fetch: %s: %s%s%s", what, why,
                  error->remedy[0] != '\0' ? ": " : "", error->remedy);
}

static void print_json(int code, const char *status, const fanin_error *error)
{
    json_t *body = json_pack("{s:i, s:s}", "code", code, "status", status);
    output_set_string(body, "message", error->message);
    json_object_set_new(body, "rank",
                        error->rank >= 0 ? json_integer(error->rank) : json_null());
    output_set_string(body, "key", error->key);
    output_set_string(body, "address", error->address);
    output_set_string(body, "phase", error->phase);
    output_set_string(body, "remedy", error->remedy);
    output_json_line(json_pack("{s:o}", "error", body));
}

int failure_report(const char *what, const fanin_error *error)
{
    print_line(what, error);
    if (json_wanted) {
        print_json(error->status, fanin_status_name(error->status), error);
    }
    /* Ctrl-C reaches the ranks of a bench too: what they do then is not the cause. */
    if (interrupt_requested()) {
        return interrupt_exit_code();
    }
    return failure_exit_code(error->status);
}

static void fill(fanin_error *error, fanin_status status, const char *remedy,
                 const char *format, va_list arguments)
{
    *error = (fanin_error)FANIN_ERROR_INIT;
    error->status = status;
    vsnprintf(error->message, sizeof(error->message), format, arguments);
    snprintf(error->remedy, sizeof(error->remedy), "%s", remedy != NULL ? remedy : "");
}

fanin_status failure_set(fanin_error *error, fanin_status status, const char *remedy,
                         const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fill(error, status, remedy, format, arguments);
    va_end(arguments);
    return status;
}

int failure_local(const char *what, fanin_status status, const char *remedy,
                  const char *format, ...)
{
    fanin_error error;
    va_list arguments;
    va_start(arguments, format);
    fill(&error, status, remedy, format, arguments);
    va_end(arguments);
    return failure_report(what, &error);
}

int failure_usage(const char *command, const char *format, ...)
{
    fanin_error error;
    char remedy[64] = "see 'nixl-fetch --help'";
    va_list arguments;
    if (command != NULL) {
        snprintf(remedy, sizeof(remedy), "see 'nixl-fetch %s --help'", command);
    }
    va_start(arguments, format);
    fill(&error, FANIN_ERR_ARGUMENT, remedy, format, arguments);
    va_end(arguments);
    print_line(command != NULL ? command : "usage", &error);
    if (json_wanted) {
        print_json(FANIN_ERR_ARGUMENT, fanin_status_name(FANIN_ERR_ARGUMENT), &error);
    }
    return EXIT_USAGE;
}

void failure_warn(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    terminal_tell("nixl-fetch: warning: %s", text);
}

void failure_flush_output(void)
{
    errno = 0;
    if (fflush(stdout) != 0 && output_errno == 0) {
        output_errno = errno;
    }
}

int failure_of_output(int code)
{
    failure_flush_output();
    if (output_errno == 0 && !ferror(stdout)) {
        return code;
    }
    json_wanted = false; /* there is nowhere to */
    return failure_local("cannot write the output", FANIN_ERR_IO,
                         "give standard output a place with room", "%s",
                         output_errno != 0 ? strerror(output_errno)
                                           : "an earlier write failed");
}
