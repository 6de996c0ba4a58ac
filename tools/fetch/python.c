/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/python.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void python_start(python *p, const command *self, const common_options *common)
{
    *p = (python){.command = self};
    python_add(p, "python3");
    python_add(p, "-c");
    python_add(p, python_program);
    python_add(p, self->name);
    python_add(p, common->json ? "json" : "");
}

void python_add(python *p, const char *word)
{
    p->words = output_room(p->words, p->count, &p->capacity, sizeof(char *));
    p->words[p->count++] = word != NULL ? word : "";
}

void python_add_self(python *p)
{
    static char path[PATH_MAX]; /* "": /proc is not there, and nothing can be started */
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    python_add(p, path);
}

static char *format_word(const char *format, ...) __attribute__((format(printf, 1, 2)));

static char *format_word(const char *format, ...)
{
    char *word = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&word, format, arguments);
    va_end(arguments);
    return output_require(length >= 0 ? word : NULL);
}

void python_add_target(python *p, const session *s, const invocation *line)
{
    python_add(p, s->target_text);
    for (const struct poptOption *o = line->connect_part; o->longName != NULL; o++) {
        unsigned kind = o->argInfo & POPT_ARG_MASK;
        if (kind == POPT_ARG_STRING && *(char **)o->arg != NULL)
            python_add(p, format_word("--%s=%s", o->longName, *(char **)o->arg));
        else if (kind == POPT_ARG_NONE && *(int *)o->arg != 0)
            python_add(p, format_word("--%s", o->longName));
        else if (kind == POPT_ARG_INT && *(int *)o->arg != 0)
            python_add(p, format_word("--%s=%d", o->longName, *(int *)o->arg));
    }
}

void python_add_looks(python *p, const session *s, const invocation *line)
{
    unsetenv("FANIN_TRACE"); /* each look would leave a file */
    python_add_self(p);
    python_add(p, "status");
    python_add_target(p, s, line);
    python_add(p, format_word("--run=%s", s->publication));
    python_add(p, format_word("--timeout=%ums", line->common.timeout_ms));
    python_add(p, "--json");
    if (line->common.quiet)
        python_add(p, "--quiet");
    if (line->common.verbose)
        python_add(p, "--verbose");
}

int python_become(python *p)
{
    python_add(p, NULL);
    p->words[p->count - 1] = NULL;
    setenv("PYTHONSAFEPATH", "1", 1); /* modules are not the working directory's */
    execvp(p->words[0], (char *const *)p->words);
    int reason = errno;
    free(p->words);
    return failure_local(p->command->name, FANIN_ERR_IO,
                         "put a python3 first into the PATH that has fanin's package, "
                         "of this version",
                         "cannot run python3: %s", strerror(reason));
}
