/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_file.h"
#include "array.h"
#include "clock.h"
#include "error_set.h"
#include "text.h"

#include <errno.h>
#include <fanin/types.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void trace_file_text(trace_file *f, const char *text);

/* --------------------------------------------------------------------- trace rows */

static int compare_row(const void *key, const void *element)
{
    const trace_row *a = key, *b = element;
    if (a->thread != b->thread)
        return a->thread < b->thread ? -1 : 1;
    return a->rank < b->rank ? -1 : a->rank > b->rank;
}

/* The row of @p thread (no other thread of the trace has it, also once that has ended) and @p rank;
   valid until the next call. @p is_new: this call has made it. NULL: no memory. */
static const trace_row *trace_rows_find(trace_rows *rows, uint32_t thread, int32_t rank,
                                        bool *is_new)
{
    const trace_row wanted = {thread, rank, (uint32_t)rows->n};
    bool found;
    size_t at =
        array_search(&wanted, rows->all, rows->n, sizeof wanted, compare_row, &found);
    *is_new = !found;
    if (found)
        return &rows->all[at];
    if (!array_reserve(&rows->all, &rows->room, rows->n + 1, sizeof wanted))
        return NULL;
    trace_row *row = &rows->all[at];
    memmove(row + 1, row, (rows->n++ - at) * sizeof *row);
    *row = wanted;
    return row;
}

/* --------------------------------------------------------------------- trace file */

#define LIMIT_BYTES (UINT64_C(64) << 20)
/* Every write ends with it, and the next one begins over it. */
#define CLOSING "\n]}\n"
/* The longest object that is added. */
#define LONGEST 1024

/* Writes @p from as JSON has it in quotation marks, cut at @p size. */
static void trace_escape(char *out, size_t size, const char *from)
{
    char clean[256];
    size_t used = 0;
    utf8_copy(clean, sizeof clean, from);
    if (!utf8_valid(clean, strlen(clean)))
        snprintf(clean, sizeof clean, "?");
    for (const char *c = clean; *c && used + 3 < size; c++) {
        if (*c == '"' || *c == '\\')
            out[used++] = '\\';
        out[used++] = (unsigned char)*c < 0x20 || *c == 0x7f ? ' ' : *c;
    }
    out[used] = '\0';
}

/* -------------------------------------------------------------- writing */

static bool trace_file_write_all(trace_file *f, const char *text, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t n = pwrite(f->fd, text + done, size - done, (off_t)(f->size + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            f->failed = n < 0 ? errno : ENOSPC;
            return false;
        }
        done += (size_t)n;
    }
    return true;
}

/* What a write that fails leaves behind is cut off: the file stays what it was. */
void trace_file_flush(trace_file *f)
{
    if (f->used == 0 || f->failed)
        return;
    if (f->size + f->used > LIMIT_BYTES) {
        f->failed = EFBIG;
        return;
    }
    size_t with_end = f->used;
    memcpy(f->text + with_end, CLOSING, sizeof CLOSING - 1);
    with_end += sizeof CLOSING - 1;
    if (trace_file_write_all(f, f->text, with_end))
        f->size += f->used;
    else if (ftruncate(f->fd, (off_t)f->size) == 0)
        (void)!pwrite(f->fd, CLOSING, sizeof CLOSING - 1, (off_t)f->size);
    f->used = 0;
}

/* The same, put together of pieces, of which none may be longer than is left of 1 KiB: formats
    cost more than all else that a span does. */
static void trace_file_begin(trace_file *f)
{
    if (f->used + LONGEST + sizeof CLOSING > sizeof f->text)
        trace_file_flush(f);
    f->used = f->failed ? 0 : f->used;
    trace_file_text(f, ",\n");
}

static void trace_file_text(trace_file *f, const char *text)
{
    size_t size = strlen(text);
    if (f->used + size + sizeof CLOSING > sizeof f->text)
        return;
    memcpy(f->text + f->used, text, size);
    f->used += size;
}

/* With so many digits at least. */
static void add_digits(trace_file *f, uint64_t number, size_t least)
{
    char digits[24];
    size_t at = sizeof digits;
    digits[--at] = '\0';
    while (number > 0 || sizeof digits - 1 - at < least) {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    }
    trace_file_text(f, digits + at);
}

/* Nanoseconds as microseconds with three digits behind the point. */
static void trace_file_micros(trace_file *f, uint64_t ns)
{
    add_digits(f, ns / 1000, 1);
    trace_file_text(f, ".");
    add_digits(f, ns % 1000, 3);
}

/* Appends an object to the list of events. */
static void trace_file_add(trace_file *f, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void trace_file_add(trace_file *f, const char *format, ...)
{
    char text[LONGEST];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    trace_file_begin(f);
    if (size > 0 && size < LONGEST)
        trace_file_text(f, text);
}

/* --------------------------------------------------------------- making */

static void read_line(const char *path, char *out, size_t size)
{
    FILE *file = fopen(path, "re");
    out[0] = '\0';
    if (file && fgets(out, (int)size, file))
        out[strcspn(out, "\n")] = '\0';
    if (file)
        fclose(file);
}

/* Two files of one boot share a clock; others are laid side by side by the time of day. */
static void write_beginning(trace_file *f)
{
    char boot[64], command[64], host[65] = "", shown[200], where[140];
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    read_line("/proc/self/comm", command, sizeof command);
    (void)gethostname(host, sizeof host - 1);
    trace_escape(shown, sizeof shown, command);
    trace_escape(where, sizeof where, host);
    f->used = (size_t)snprintf(
        f->text, sizeof f->text,
        "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"schema\":1,\"fanin\":\"%s\","
        "\"pid\":%d,"
        "\"host\":\"%s\",\"boot_id\":\"%.36s\",\"monotonic_ns\":\"%" PRIu64
        "\",\"realtime_ns\":\"%" PRIu64 "\"},\"traceEvents\":[\n"
        "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"tid\":%d,\"ts\":0,"
        "\"args\":{\"name\":\"%s, %s\"}}",
        fanin_version(), (int)getpid(), where, boot, clock_ns(), clock_unix_ns(),
        (int)getpid(), (int)getpid(), shown, where);
}

static fanin_status trace_file_refuse(const char *path, int code, fanin_error *error)
{
    const error_place place = {
        .phase = "trace",
        .remedy = code == EEXIST
                      ? "remove it, or give another name"
                      : error_remedy(code, "give a file that is not there yet, in a "
                                           "folder that is writable and has room")};
    return error_set_errno(error, code == EEXIST ? FANIN_ERR_EXISTS : FANIN_ERR_IO,
                           code, &place, "cannot make the trace %.200s", path);
}

static fanin_status make_at(trace_file *f, int folder, const char *name,
                            const char *shown, fanin_error *error)
{
    f->size = f->used = 0;
    f->failed = 0;
    f->fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                   0600);
    if (f->fd < 0)
        return trace_file_refuse(shown, errno, error);
    write_beginning(f);
    trace_file_flush(f);
    if (!f->failed)
        return FANIN_OK;
    int code = f->failed;
    (void)unlinkat(folder, name, 0);
    close(f->fd);
    f->fd = -1;
    return trace_file_refuse(shown, code, error);
}

fanin_status trace_file_make(trace_file *f, const char *path, fanin_error *error)
{
    return make_at(f, AT_FDCWD, path, path, error);
}

static bool is_own(uid_t owner)
{
    return owner == 0 || owner == geteuid();
}

/* In a folder that is another user's, or where that one's link leads to, nothing is made. @p folder
   ends in no slash, behind which the kernel would look at what a link leads to instead. */
static fanin_status make_in(trace_file *f, const char *folder, fanin_error *error)
{
    const error_place place = {.phase = "trace",
                               .remedy = "let FANIN_TRACE name a folder of this user"};
    struct stat link, there;
    char name[80], shown[320];
    if (lstat(folder, &link) != 0)
        return trace_file_refuse(folder, errno, error);
    int at =
        is_own(link.st_uid) ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (at < 0 && is_own(link.st_uid))
        return trace_file_refuse(folder, errno, error);
    if (at < 0 || fstat(at, &there) != 0 || !is_own(there.st_uid)) {
        if (at >= 0)
            close(at);
        return error_set(error, FANIN_ERR_AUTH, &place,
                         "FANIN_TRACE=%.200s belongs to another user", folder);
    }
    snprintf(name, sizeof name, "fanin-%d-%" PRIu64 ".json", (int)getpid(),
             clock_unix_ns());
    snprintf(shown, sizeof shown, "%.200s/%s", folder, name);
    fanin_status status = make_at(f, at, name, shown, error);
    close(at);
    return status;
}

fanin_status trace_file_make_in(trace_file *f, const char *folder, fanin_error *error)
{
    char bare[PATH_MAX];
    size_t size = strlen(folder);
    if (size >= sizeof bare)
        return trace_file_refuse(folder, ENAMETOOLONG, error);
    while (size > 1 && folder[size - 1] == '/')
        size--;
    memcpy(bare, folder, size);
    bare[size] = '\0';
    return make_in(f, bare, error);
}

/* --------------------------------------------------------------------- trace text */

/* Above every number that a kernel gives a thread. */
#define FIRST_ROW (UINT32_C(1) << 23)

static void tell_row(trace_file *f, pid_t pid, const trace_thread *t,
                     const trace_row *row, uint32_t shown, const char *about)
{
    char thread[40], address[2 * TRACE_ABOUT], who[2 * TRACE_ABOUT + 16];
    trace_escape(thread, sizeof thread, t->name);
    trace_escape(address, sizeof address, about);
    if (row->rank == -1)
        snprintf(who, sizeof who, "%s %u", thread, t->tid);
    else if (row->rank < 0)
        snprintf(who, sizeof who, "rank ? at %s", address);
    else if (t->tid == (uint32_t)pid)
        snprintf(who, sizeof who, "rank %d", (int)row->rank);
    else
        snprintf(who, sizeof who, "rank %d, thread %u", (int)row->rank, t->tid);
    trace_file_add(
        f,
        "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"ts\":0,"
        "\"args\":{\"name\":\"%s\"}}",
        (int)pid, shown, who);
}

static void put_member(trace_file *f, const char *name, uint64_t value)
{
    trace_file_text(f, name);
    add_digits(f, value, 1);
}

/* What the viewer shows beside the span: only what there is. */
static void put_arguments(trace_file *f, const trace_span *s)
{
    char about[2 * TRACE_ABOUT];
    trace_file_text(f, "\"args\":{\"outcome\":\"");
    trace_file_text(f, fanin_status_name(s->outcome));
    trace_file_text(f, "\"");
    if (s->place.pull > 0) {
        put_member(f, ",\"pull\":", s->place.pull);
        put_member(f, ",\"attempt\":", s->place.attempt);
    }
    if (s->rank >= 0)
        put_member(f, ",\"rank\":", (uint64_t)s->rank);
    else if (s->rank < -1)
        trace_file_text(f, ",\"rank\":null");
    if (s->step > 0)
        put_member(f, ",\"step\":", s->step);
    if (s->bytes > 0)
        put_member(f, ",\"bytes\":", s->bytes);
    if (s->scatter_ns > 0)
        put_member(f, ",\"scatter_ns\":", s->scatter_ns);
    if (s->about[0]) {
        trace_escape(about, sizeof about, s->about);
        trace_file_text(f, ",\"about\":\"");
        trace_file_text(f, about);
        trace_file_text(f, "\"");
    }
    trace_file_text(f, "}}");
}

static const char *color_of(const trace_span *s)
{
    if (s->outcome == FANIN_ERR_STALE)
        return ",\"cname\":\"bad\",";
    return s->outcome == FANIN_OK ? "," : ",\"cname\":\"terrible\",";
}

bool trace_text_span(trace_file *f, trace_rows *rows, pid_t pid,
                     const trace_thread *thread, const trace_span *s)
{
    bool is_new;
    const trace_row *row = trace_rows_find(rows, thread->number, s->rank, &is_new);
    if (!row)
        return false;
    uint32_t shown = s->rank == -1 ? thread->tid : FIRST_ROW + row->number;
    if (is_new)
        tell_row(f, pid, thread, row, shown, s->about);
    trace_file_begin(f);
    trace_file_text(f, "{\"ph\":\"X\",\"name\":\"");
    trace_file_text(f, trace_name_text(s->name));
    trace_file_text(f, s->name >= TRACE_BEGIN_UPDATE ? "\",\"cat\":\"trainer\""
                                                     : "\",\"cat\":\"pull\"");
    put_member(f, ",\"pid\":", (uint64_t)pid);
    put_member(f, ",\"tid\":", shown);
    trace_file_text(f, ",\"ts\":");
    trace_file_micros(f, s->began_ns);
    trace_file_text(f, ",\"dur\":");
    trace_file_micros(f, s->ended_ns > s->began_ns ? s->ended_ns - s->began_ns : 0);
    trace_file_text(f, color_of(s));
    put_arguments(f, s);
    return true;
}

void trace_text_lost(trace_file *f, pid_t pid, uint64_t at_ns, uint64_t spans)
{
    trace_file_add(f,
                   "{\"ph\":\"i\",\"s\":\"p\",\"name\":\"lost\",\"pid\":%d,\"tid\":%d,"
                   "\"ts\":%" PRIu64 ".%03u,\"args\":{\"spans\":%" PRIu64 "}}",
                   (int)pid, (int)pid, at_ns / 1000, (unsigned)(at_ns % 1000), spans);
}
