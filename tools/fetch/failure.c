/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/failure.h"
#include "fetch/output.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

json_t *failure_json(const fanin_error *error)
{
    json_t *body = output_object(
        "code", json_integer(error->status), "status",
        output_string(fanin_status_name(error->status)), "message",
        output_string(error->message), "rank", output_rank(error->rank), "key",
        output_string(error->key), "address", output_string(error->address), "phase",
        output_string(error->phase), "remedy", output_string(error->remedy), NULL);
    return output_object("error", body, NULL);
}

static bool is_of_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Whether @p word is in @p text, and not as a part of a longer one. */
static bool mentions(const char *text, const char *word)
{
    size_t size = strlen(word);
    for (const char *p = text; (p = strstr(p, word)) != NULL; p++)
        if ((p == text || !is_of_word(p[-1])) && !is_of_word(p[size]))
            return true;
    return false;
}

static void failure_tell(const char *what, const fanin_error *error)
{
    const char *why =
        error->message[0] != '\0' ? error->message : fanin_status_text(error->status);
    bool keyed = error->key[0] != '\0' && !mentions(why, error->key);
    terminal_tell("nixl-fetch: %s: %s%s%s%s%s%s", what, why, keyed ? " (key '" : "",
                  keyed ? error->key : "", keyed ? "')" : "",
                  error->remedy[0] != '\0' ? ": " : "", error->remedy);
    if (output_uses_json())
        output_json_line(failure_json(error));
}

int failure_report(const char *what, const fanin_error *error)
{
    failure_tell(what, error);
    /* Ctrl-C reaches the ranks of a bench too: what they do then is not the cause. */
    if (interrupt_requested())
        return interrupt_exit_code();
    return exit_code_of(error->status);
}

static void failure_fill(fanin_error *error, fanin_status status, const char *remedy,
                         const char *format, va_list arguments)
{
    *error = (fanin_error)FANIN_ERROR_INIT;
    error->status = status;
    vsnprintf(error->message, sizeof error->message, format, arguments);
    snprintf(error->remedy, sizeof error->remedy, "%s", remedy != NULL ? remedy : "");
}

fanin_status failure_set(fanin_error *error, fanin_status status, const char *remedy,
                         const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    failure_fill(error, status, remedy, format, arguments);
    va_end(arguments);
    return status;
}

int failure_local(const char *what, fanin_status status, const char *remedy,
                  const char *format, ...)
{
    fanin_error error;
    va_list arguments;
    va_start(arguments, format);
    failure_fill(&error, status, remedy, format, arguments);
    va_end(arguments);
    return failure_report(what, &error);
}

int failure_usage(const char *command, const char *format, ...)
{
    fanin_error error;
    char remedy[64] = "see 'nixl-fetch --help'";
    va_list arguments;
    if (command != NULL)
        snprintf(remedy, sizeof remedy, "see 'nixl-fetch %s --help'", command);
    va_start(arguments, format);
    failure_fill(&error, FANIN_ERR_ARGUMENT, remedy, format, arguments);
    va_end(arguments);
    failure_tell(command != NULL ? command : "usage", &error);
    return EXIT_USAGE;
}

void failure_warn(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    terminal_tell("nixl-fetch: warning: %s", text);
}

int failure_of_output(int code)
{
    output_flush();
    if (output_errno() == 0 && !ferror(stdout))
        return code;
    output_use_json(false); /* there is nowhere to */
    return failure_local("cannot write the output", FANIN_ERR_IO,
                         "give standard output a place with room", "%s",
                         output_errno() != 0 ? strerror(output_errno())
                                             : "an earlier write failed");
}
