/* SPDX-License-Identifier: Apache-2.0 */
/* What somebody else needs to know of a run that is in trouble, in one file. */
#include "fetch/child.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/session.h"
#include "fetch/strike.h"
#include "fetch/terminal.h"
#include "fetch/whole_tensor.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------------ the archive */

enum { BLOCK = 512 };

/* A header's fields, as POSIX has them. */
typedef struct header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type;
    char link[100], magic[6], version[2], user[32], group[32], major[8], minor[8];
    char prefix[155], rest[12];
} header;

_Static_assert(sizeof(header) == BLOCK, "a tar header is a block");

/* @file A tar archive (ustar) in memory. */
static void tar_file_add(FILE *archive, const char *name, uint64_t unix_s,
                         const void *bytes, size_t size)
{
    static const char zeros[BLOCK];
    header h = {.type = '0', .magic = "ustar", .version = {'0', '0'}};
    unsigned sum = 0;
    snprintf(h.name, sizeof h.name, "%s", name);
    snprintf(h.mode, sizeof h.mode, "%07o", 0600U);
    snprintf(h.uid, sizeof h.uid, "%07o", 0U);
    snprintf(h.gid, sizeof h.gid, "%07o", 0U);
    snprintf(h.size, sizeof h.size, "%011" PRIo64, (uint64_t)size & 077777777777);
    snprintf(h.mtime, sizeof h.mtime, "%011" PRIo64, unix_s & 077777777777);
    memset(h.checksum, ' ', sizeof h.checksum);
    for (size_t i = 0; i < sizeof h; i++) {
        sum += ((const unsigned char *)&h)[i];
    }
    snprintf(h.checksum, sizeof h.checksum, "%06o", sum & 0777777);
    fwrite(&h, sizeof h, 1, archive);
    fwrite(bytes, 1, size, archive);
    fwrite(zeros, 1, (BLOCK - size % BLOCK) % BLOCK, archive);
}

/* Appends what ends an archive. */
static void tar_file_end(FILE *archive)
{
    static const char zeros[2 * BLOCK];
    fwrite(zeros, 1, sizeof zeros, archive);
}

enum { PART_MS = 8000, GRACE_MS = 2000, MAX_WORDS = 64, LOG_BYTES = 256 << 10 };

typedef struct bundler {
    char *out;
    char **logs;
    int no_pull;
    const char *target;
    bool json;
    char publication[OPTIONS_PUBLICATION]; /**< "": several, and none is chosen */
    uint64_t end_ns;
    time_t now;
    FILE *archive;
    json_t *parts;
    struct libscols_table *table; /**< NULL: JSON */
    char *words[MAX_WORDS]; /**< options of connections as they were given, owned */
    size_t n_words;
} bundler;

/* A command that is a part. */
typedef struct part {
    const char *name;
    const char *words[4]; /**< NULL at the end */
    bool asks;            /**< ranks */
    bool of_run;
    bool pulls;
} part;

static const part parts[] = {
    {"version", {"--version"}, false, false, false},
    {"doctor", {"doctor"}, true, false, false},
    {"status", {"status"}, true, true, false},
    {"ping", {"ping"}, true, false, false},
    {"list", {"list"}, true, false, false},
    {"keys", {"list"}, true, true, false},
    {"pull", {"bench", "--iterations", "1"}, true, true, true},
};

/* --------------------------------------------------------------------------- files */

static void bundle_add_file(const bundler *b, const char *name, const char *bytes,
                            size_t size)
{
    char path[100];
    snprintf(path, sizeof path, "nixl-fetch-bundle/%.60s", name);
    tar_file_add(b->archive, path, (uint64_t)b->now, bytes, size);
}

static void tell_part(const bundler *b, const char *name, int status, const char *why,
                      uint64_t ns, size_t bytes)
{
    char result[200] = "";
    if (status >= 0) {
        snprintf(result, sizeof result, "exit status %d", status);
    }
    output_append(result, sizeof result, "%s%s",
                  result[0] != '\0' && why[0] != '\0' ? ": " : "", why);
    json_array_append_new(
        b->parts, output_object("part", output_string(name), "exit_status",
                                status >= 0 ? json_integer(status) : json_null(), "why",
                                output_string(why), "ns", output_u64(ns), "bytes",
                                output_u64(bytes), NULL));
    if (b->table != NULL) {
        output_row(b->table, NULL, name, output_duration(ns).s, output_bytes(bytes).s,
                   result);
    }
}

/* A text that was written to memory. */
typedef struct text {
    char *bytes;
    size_t size;
} text;

static void add_text(const bundler *b, const char *name, text *t, const char *why)
{
    bundle_add_file(b, name, t->bytes, t->size);
    tell_part(b, name, -1, why, 0, t->size);
    free(t->bytes);
}

/* ----------------------------------------------------------------------- the parts */

#define TRACE_PART "pull.trace.json"

/* Where a pull writes its trace: in a folder that is this user's alone. */
typedef struct trace_place {
    char folder[256], file[272];
} trace_place;

static bool make_place(trace_place *t)
{
    const char *temporary = getenv("TMPDIR");
    snprintf(t->folder, sizeof t->folder, "%.200s/nixl-fetch-XXXXXX",
             temporary != NULL && temporary[0] == '/' ? temporary : "/tmp");
    bool good = mkdtemp(t->folder) != NULL;
    snprintf(t->file, sizeof t->file, "%s/trace", t->folder);
    return good;
}

/* What the pull left there, also where it failed; then it is gone. */
static void take_trace(const bundler *b, const trace_place *t)
{
    struct stat st;
    int file = open(t->file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    size_t most = file >= 0 && fstat(file, &st) == 0 && st.st_size <= CHILD_OUTPUT
                      ? (size_t)st.st_size
                      : 0;
    char *bytes = output_require(malloc(most + 1));
    ssize_t n = most > 0 ? pread(file, bytes, most, 0) : 0;
    if (n > 0) {
        bundle_add_file(b, TRACE_PART, bytes, (size_t)n);
        tell_part(b, TRACE_PART, -1, "for ui.perfetto.dev and nixl-fetch trace", 0,
                  (size_t)n);
    } else {
        tell_part(b, TRACE_PART, -1, "the pull wrote none", 0, 0);
    }
    free(bytes);
    if (file >= 0) {
        close(file);
    }
    unlink(t->file);
    rmdir(t->folder);
}

/* The first line of what it said on its standard error. */
static void first_line(const char *err, char *out, size_t size)
{
    snprintf(out, size, "%.*s", (int)strcspn(err, "\n"), err);
}

/* The part's command line; @p trace "": it writes none. */
static void bundle_put_words(const bundler *b, const part *p, const char *limit,
                             const char *trace, const char *words[MAX_WORDS + 16])
{
    size_t count = 0;
    words[count++] = "nixl-fetch";
    for (size_t i = 0; p->words[i] != NULL; i++) {
        words[count++] = p->words[i];
    }
    if (p->asks) {
        words[count++] = b->target;
        for (size_t i = 0; i < b->n_words; i++) {
            words[count++] = b->words[i];
        }
        words[count++] = "--timeout";
        words[count++] = limit;
        words[count++] = "--json";
        words[count++] = "--quiet";
    }
    if (p->of_run) {
        words[count++] = "--run";
        words[count++] = b->publication;
    }
    if (trace[0] != '\0') {
        words[count++] = "--trace";
        words[count++] = trace;
    }
    words[count] = NULL;
}

static void tell_child(const bundler *b, const part *p, const child *c)
{
    char name[64], why[160];
    snprintf(why, sizeof why, "%s", c->why);
    if (why[0] == '\0' && c->status != 0 && c->err != NULL) {
        first_line(c->err, why, sizeof why);
    }
    if (why[0] == '\0' && c->status != 0) {
        snprintf(why, sizeof why, "see %s.json", p->name);
    }
    tell_part(b, p->name, c->status, why, c->ns, c->out_size);
    snprintf(name, sizeof name, "%s.%s", p->name, p->asks ? "json" : "txt");
    bundle_add_file(b, name, c->out, c->out_size);
    if (c->err_size > 0) {
        snprintf(name, sizeof name, "%s.stderr.txt", p->name);
        bundle_add_file(b, name, c->err, c->err_size);
    }
}

static void bundle_run_part(const bundler *b, const part *p)
{
    const char *words[MAX_WORDS + 16];
    char limit[32];
    trace_place trace;
    child c;
    uint32_t left = progress_left_ms(b->end_ns);
    uint32_t patience = left < PART_MS + GRACE_MS ? left : PART_MS + GRACE_MS;
    if (left == 0) {
        tell_part(b, p->name, -1, "left out: --timeout is over", 0, 0);
        return;
    }
    snprintf(limit, sizeof limit, "%ums",
             patience > 2 * GRACE_MS ? patience - GRACE_MS : (patience + 1) / 2);
    bool traced = p->pulls && make_place(&trace);
    bundle_put_words(b, p, limit, traced ? trace.file : "", words);
    child_run(NULL, words, patience, &c);
    tell_child(b, p, &c);
    child_free(&c);
    if (traced) {
        take_trace(b, &trace);
    } else if (p->pulls) {
        tell_part(b, TRACE_PART, -1, "left out: no folder could be made in TMPDIR", 0,
                  0);
    }
}

/* Why a part is left out; NULL: it is not. */
static const char *left_out(const bundler *b, const part *p)
{
    if (p->of_run && b->publication[0] == '\0') {
        return "left out: the target file names several publications, give --run R";
    }
    if (p->pulls && b->no_pull) {
        return "left out: --no-pull";
    }
    if (p->pulls && options_is_model(b->publication)) {
        return "left out: a whole model is not pulled to memory";
    }
    return NULL;
}

static void add_commands(const bundler *b)
{
    const size_t count = sizeof parts / sizeof parts[0];
    for (size_t i = 0; i < count && !interrupt_requested(); i++) {
        const char *why = left_out(b, &parts[i]);
        if (why != NULL) {
            tell_part(b, parts[i].name, -1, why, 0, 0);
        } else {
            bundle_run_part(b, &parts[i]);
        }
    }
}

static bool is_told(const char *variable)
{
    static const char *const starts[] = {"FANIN_", "NIXL_", "UCX_", "NCCL_",
                                         "CUDA_VISIBLE_DEVICES="};
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        if (strncmp(variable, starts[i], strlen(starts[i])) == 0) {
            return true;
        }
    }
    return false;
}

static void add_environment(const bundler *b)
{
    text t = {NULL, 0};
    struct utsname host;
    FILE *stream = output_require(open_memstream(&t.bytes, &t.size));
    if (uname(&host) == 0) {
        fprintf(stream, "%s %s %s\n", host.sysname, host.release, host.machine);
    }
    for (char **p = environ; *p != NULL; p++) {
        if (is_told(*p)) {
            strike_line(&(striking){0}, stream, *p, strlen(*p));
            fputc('\n', stream);
        }
    }
    fclose(stream);
    add_text(b, "environment.txt", &t, "");
}

/* The last bytes of a file from the first whole line on; false: errno says why not. */
static bool read_tail(const char *path, text *out)
{
    struct stat st;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0 || fstat(file, &st) != 0 || !S_ISREG(st.st_mode)) {
        errno = file >= 0 ? EINVAL : errno;
        if (file >= 0) {
            close(file);
        }
        return false;
    }
    off_t from = st.st_size > LOG_BYTES ? st.st_size - LOG_BYTES : 0;
    out->bytes = output_require(calloc(1, LOG_BYTES + 1));
    ssize_t n = pread(file, out->bytes, LOG_BYTES, from);
    close(file);
    out->size = n > 0 ? (size_t)n : 0;
    if (from > 0) { /* of a line that is cut what must be struck out cannot be told */
        const char *first = memchr(out->bytes, '\n', out->size);
        size_t cut = first != NULL ? (size_t)(first - out->bytes) + 1 : out->size;
        out->size -= cut;
        memmove(out->bytes, out->bytes + cut, out->size);
    }
    return true;
}

static void add_log(const bundler *b, const char *path, size_t number)
{
    char name[32], why[160];
    text tail, t = {NULL, 0};
    striking s = {0};
    snprintf(name, sizeof name, "log.%zu.txt", number);
    snprintf(why, sizeof why, "%.120s", path);
    if (!read_tail(path, &tail)) {
        output_append(why, sizeof why, ": %.30s", strerror(errno));
        tell_part(b, name, -1, why, 0, 0);
        return;
    }
    FILE *stream = output_require(open_memstream(&t.bytes, &t.size));
    for (size_t at = 0, length; at < tail.size; at += length + 1) {
        const char *end = memchr(tail.bytes + at, '\n', tail.size - at);
        length = end != NULL ? (size_t)(end - tail.bytes) - at : tail.size - at;
        strike_line(&s, stream, tail.bytes + at, length);
        fputc('\n', stream);
    }
    fclose(stream);
    free(tail.bytes);
    add_text(b, name, &t, why);
}

/* --------------------------------------------------------------------- the command */

static json_t *bundle_told(const bundler *b)
{
    return output_object("target", output_string(b->target), "publication",
                         output_string(b->publication), "time_s",
                         output_u64((uint64_t)b->now), "parts", json_incref(b->parts),
                         NULL);
}

static void add_manifest(const bundler *b)
{
    json_t *all = bundle_told(b);
    json_object_set_new(all, "schema", json_integer(1));
    char *dumped = output_require(json_dumps(all, JSON_INDENT(2) | JSON_ENSURE_ASCII));
    bundle_add_file(b, "manifest.json", dumped, strlen(dumped));
    free(dumped);
    json_decref(all);
}

static void bundle_tell(const bundler *b, const char *path, size_t size)
{
    if (b->table != NULL) {
        output_print(b->table);
        terminal_print("%s: %s; look it over before you hand it on", path,
                       output_bytes(size).s);
    } else {
        json_t *object = bundle_told(b);
        output_set(object, "file", output_string(path), "bytes", output_u64(size),
                   NULL);
        output_json(object);
    }
}

static int write_bundle(bundler *b, const char *path)
{
    char *bytes = NULL;
    size_t size = 0;
    fanin_error error = FANIN_ERROR_INIT;
    b->archive = output_require(open_memstream(&bytes, &size));
    b->parts = json_array();
    b->table = b->json ? NULL : output_table("PART TIME> BYTES> RESULT");
    add_environment(b);
    add_commands(b);
    for (size_t i = 0; b->logs != NULL && b->logs[i] != NULL; i++) {
        add_log(b, b->logs[i], i);
    }
    add_manifest(b);
    tar_file_end(b->archive);
    fclose(b->archive);
    int code = 0;
    if (interrupt_requested()) {
        failure_warn("interrupted, nothing is written");
        code = interrupt_exit_code();
    } else if (whole_file_write(path, bytes, size, &error) != FANIN_OK) {
        code = failure_report("cannot write the bundle", &error);
    }
    free(bytes);
    if (code == 0) {
        bundle_tell(b, path, size);
    } else {
        scols_unref_table(b->table);
    }
    json_decref(b->parts);
    return code;
}

/* The options of a table as they were given, for another command line. */
static void take_options(bundler *b, const struct poptOption *table)
{
    char *word = NULL;
    for (; table->longName != NULL; table++) {
        unsigned kind = table->argInfo & POPT_ARG_MASK;
        int length = 0;
        if (kind == POPT_ARG_STRING && *(char **)table->arg != NULL) {
            length = asprintf(&word, "--%s=%s", table->longName, *(char **)table->arg);
        } else if (kind == POPT_ARG_NONE && *(int *)table->arg != 0) {
            length = asprintf(&word, "--%s", table->longName);
        } else if (kind == POPT_ARG_INT && *(int *)table->arg != 0) {
            length = asprintf(&word, "--%s=%d", table->longName, *(int *)table->arg);
        }
        if (length != 0 && b->n_words < MAX_WORDS) {
            b->words[b->n_words++] = output_require(length > 0 ? word : NULL);
        }
    }
}

/* Wrong words are told here, once, and not by every part. */
static int bundle(session *s, const invocation *line, void *cookie)
{
    bundler *b = cookie;
    char path[64];
    struct tm utc;
    b->now = time(NULL);
    b->end_ns = progress_in_ms(line->common.timeout_ms);
    snprintf(b->publication, sizeof b->publication, "%s", s->publication);
    take_options(b, line->connect_part);
    b->target = s->target_text;
    b->json = line->common.json != 0;
    session_disconnect(s);
    gmtime_r(&b->now, &utc);
    strftime(path, sizeof path, "nixl-fetch-%Y%m%dT%H%M%SZ.tar", &utc);
    int code = write_bundle(b, b->out != NULL ? b->out : path);
    for (size_t i = 0; i < b->n_words; i++) {
        free(b->words[i]);
    }
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 60000};
    bundler b = {.out = NULL};
    struct poptOption table[] = {
        {"out", 'o', POPT_ARG_STRING, &b.out, 0,
         "the file; must not exist (default: nixl-fetch-TIME.tar)", "FILE"},
        {"log", 'l', POPT_ARG_ARGV, &b.logs, 0,
         "also the last lines of this file; may be repeated", "FILE"},
        {"no-pull", 0, POPT_ARG_NONE, &b.no_pull, 0, "without a pull to memory", NULL},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, bundle, &b);
}

const command cmd_bundle = {
    .name = "bundle",
    .arguments = "TARGET [RUN] [OPTION...]",
    .summary = "one file with all that others need to know of a run's trouble",
    .help =
        "Examples:\n"
        "  nixl-fetch bundle nixl_info.json\n"
        "  nixl-fetch bundle nixl_info.json --run 0 --log engine.log -o trouble.tar\n"
        "\n"
        "A tar of what version, doctor, status, ping, list and one pull to memory say, "
        "with\n"
        "the pull's trace and the last lines of logs. It has these variables of the\n"
        "environment: FANIN_*, NIXL_*, UCX_*, NCCL_*, CUDA_VISIBLE_DEVICES. It\n"
        "strikes out users of URLs, and values whose names have SECRET, KEY, TOKEN,\n"
        "PASSWORD or CREDENTIAL in them. Each part has a deadline; manifest.json says "
        "which\n"
        "failed, and why. The exit status is 0 if the file was written, whatever it\n"
        "says.",
    .run = run,
};
