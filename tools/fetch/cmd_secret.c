/* SPDX-License-Identifier: Apache-2.0 */
/* nixl-fetch secret: a launch's secret in a new file. */
#include "fetch/failure.h"
#include "fetch/options.h"
#include "fetch/output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

enum { SECRET = 32, LINE = 2 * SECRET + 1 };

/* False: the kernel gives none. */
static bool secret_draw(char line[LINE])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t bytes[SECRET];
    bool drawn = getrandom(bytes, sizeof bytes, 0) == (ssize_t)sizeof bytes;
    for (size_t i = 0; drawn && i < SECRET; i++) {
        line[2 * i] = digits[bytes[i] >> 4];
        line[2 * i + 1] = digits[bytes[i] & 15];
    }
    line[LINE - 1] = '\n';
    explicit_bzero(bytes, sizeof bytes);
    return drawn;
}

static int secret_cannot(const char *path, int reason)
{
    bool exists = reason == EEXIST;
    return failure_local("cannot make a secret",
                         exists ? FANIN_ERR_EXISTS : FANIN_ERR_IO,
                         exists ? "remove it first, if nothing uses it"
                                : "give a file in a directory that can be written",
                         "%s: %s", path, strerror(reason));
}

/* Never over a file that is there, nor through a link. What was begun and failed is taken away. */
static int secret_make_file(const char *path)
{
    char line[LINE];
    if (!secret_draw(line)) {
        return secret_cannot(path, EIO);
    }
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) {
        explicit_bzero(line, sizeof line);
        return secret_cannot(path, errno);
    }
    errno = 0;
    bool good = write(file, line, LINE) == LINE && fsync(file) == 0;
    int reason = errno != 0 ? errno : ENOSPC;
    explicit_bzero(line, sizeof line);
    good = close(file) == 0 && good;
    if (!good) {
        unlink(path);
        return secret_cannot(path, reason);
    }
    return 0;
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
        if (parsed.count != 1) {
            code = failure_usage(self->name, "give one FILE, which is not there yet");
        } else {
            code = secret_make_file(parsed.positional[0]);
        }
        if (code == 0 && common.json) {
            output_json(
                output_object("file", output_string(parsed.positional[0]), NULL));
        }
    }
    options_free(&parsed);
    return code;
}

const command cmd_secret = {
    .name = "secret",
    .arguments = "FILE [OPTION...]",
    .summary = "make a file with a new launch's secret",
    .help =
        "Examples:\n"
        "  nixl-fetch secret launch.secret\n"
        "  nixl-fetch serve --adapter-shape small --secret-file launch.secret --info "
        "nixl_info.json\n"
        "\n"
        "32 random bytes as hexadecimal digits, mode 0600; never over a file that is "
        "there. Ranks\n"
        "and readers of one launch have the same secret, and it is theirs alone: by it "
        "they know\n"
        "each other over TCP, and nobody on the way reads or alters what they say.",
    .run = run,
};
