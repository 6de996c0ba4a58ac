/* SPDX-License-Identifier: Apache-2.0 */
/* nixl-fetch secret: a launch's secret in a new file. */
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"
#include "fetch/tensor_directory.h"

#include "digest.h"

#include <stdio.h>
#include <string.h>

enum { SECRET = 32, LINE = 2 * SECRET + 1 };

/* False: the kernel gives none. */
static bool secret_draw(char line[LINE])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t bytes[SECRET];
    bool drawn = random_bytes(bytes, sizeof bytes);
    for (size_t i = 0; drawn && i < SECRET; i++) {
        line[2 * i] = digits[bytes[i] >> 4];
        line[2 * i + 1] = digits[bytes[i] & 15];
    }
    line[LINE - 1] = '\n';
    explicit_bzero(bytes, sizeof bytes);
    return drawn;
}

static int secret_make_file(const char *path)
{
    char line[LINE];
    fanin_error error = FANIN_ERROR_INIT;
    if (!secret_draw(line))
        return failure_local("cannot make a secret", FANIN_ERR_IO, "try again",
                             "%s: the kernel gives no random bytes", path);
    fanin_status status = whole_file_write(path, line, LINE, &error);
    explicit_bzero(line, sizeof line);
    if (status == FANIN_ERR_EXISTS)
        snprintf(error.remedy, sizeof error.remedy,
                 "remove it first, if nothing uses it");
    return status == FANIN_OK ? 0 : failure_report("cannot make a secret", &error);
}

static int run(const command *self, int argc, const char **argv)
{
    common_options common = {.timeout_ms = 1000};
    struct poptOption common_part[COMMON_OPTIONS];
    options_common(&common, common_part);
    struct poptOption table[] = {
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, common_part, 0, NULL, NULL}, POPT_TABLEEND};
    arguments parsed;
    int code = 0;
    if (options_parse(self, argc, argv, table, &common, &parsed, &code)) {
        if (parsed.count != 1)
            code = failure_usage(self->name, "give one FILE, which is not there yet");
        else
            code = secret_make_file(parsed.positional[0]);
        if (code == 0 && common.json)
            output_json(
                output_object("file", output_string(parsed.positional[0]), NULL));
    }
    options_free(&parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch secret launch.secret\n"
    "  nixl-fetch serve --adapter-shape small --secret-file launch.secret --info "
    "nixl_info.json\n"
    "\n"
    "32 random bytes as hexadecimal digits, mode 0600; never over a file that is\n"
    "there. Ranks and readers of one launch have the same secret, and it is theirs\n"
    "alone: by it they know each other over TCP, and nobody on the way reads or\n"
    "alters what they say.";

const command cmd_secret = {
    .name = "secret",
    .arguments = "FILE [OPTION...]",
    .summary = "make a file with a new launch's secret",
    .help = help,
    .run = run,
};
