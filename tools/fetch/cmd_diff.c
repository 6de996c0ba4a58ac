/* SPDX-License-Identifier: Apache-2.0 */
/* What has changed between two sides' tensors. */
#include "fetch/check.h"
#include "fetch/command.h"
#include "fetch/diff_report.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/memory_left.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EQUAL = 0, DIFFERENT = 1, TROUBLE = 2 };
enum { BLOCK = 64 * CHANGE_PIECE }; /**< elements that are read at once */

/* Which tensors, and how they are pulled. */
typedef struct diff_request {
    const char *pattern; /**< of names; NULL: all */
    fanin_step_rule rule;
    uint64_t step;
    uint64_t max_bytes; /**< 0: what the host has left */
    bool quiet, no_color;
} diff_request;

/* ---------------------------------------------------------------------- one side */

static bool diff_side_holds(const char *directory, const char *name)
{
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/%s", directory, name);
    return length < (int)sizeof path && access(path, F_OK) == 0;
}

static bool holds_model(const char *directory)
{
    return diff_side_holds(directory, TENSORS_OF_MODEL) ||
           diff_side_holds(directory, TENSORS_INDEX);
}

/* Whether @p path is a directory that holds tensors, or at least no nixl_info.json. */
static bool diff_side_is_directory(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode) &&
           (holds_model(path) || diff_side_holds(path, TENSORS_OF_ADAPTER) ||
            !diff_side_holds(path, "nixl_info.json"));
}

static bool diff_side_is_wanted(const diff_request *request, const char *name)
{
    return request->pattern == NULL || fnmatch(request->pattern, name, 0) == 0;
}

static fanin_status diff_side_open(diff_side *side, const char *path,
                                   const diff_request *request, fanin_error *error)
{
    fanin_status status =
        tensor_directory_open(path, holds_model(path), &side->files, error);
    if (status == FANIN_ERR_NOT_FOUND)
        return failure_set(error, status,
                           "give the directory of an adapter or a model, or a TARGET",
                           "%s holds neither " TENSORS_OF_ADAPTER
                           " nor " TENSORS_OF_MODEL " nor nixl_info.json",
                           path);
    if (status != FANIN_OK) {
        fanin_error cause = *error; /* which of both it is */
        return failure_set(error, status, cause.remedy, "%s: %s", path, cause.message);
    }
    for (size_t i = 0; i < side->files.count; i++) {
        const tensor_place *place = &side->files.tensors[i];
        const fanin_safetensors_entry *e = &place->entry;
        if (diff_side_is_wanted(request, e->name)) {
            whole_tensor *t = whole_tensors_add(&side->tensors, e->name, e->dtype,
                                                e->n_dims, e->shape, e->bytes);
            t->descriptor =
                fanin_safetensors_descriptor(side->files.files[place->file]);
            t->offset = e->offset;
        }
    }
    return status;
}

/* ------------------------------------------------------------------ what is pulled */

typedef struct taking {
    diff_side *side;
    const diff_request *request;
    bool model;
} taking;

/* The name that a file has for a tensor of the ranks. */
static const char *file_name(const char *name, bool model,
                             char room[FANIN_MAX_NAME + 64])
{
    return !model && fanin_adapter_name(name, room, FANIN_MAX_NAME + 64) ? room : name;
}

static bool diff_side_on_entry(void *cookie, const fanin_entry *e)
{
    const taking *taking = cookie;
    char room[FANIN_MAX_NAME + 64];
    if (diff_side_is_wanted(taking->request, file_name(e->name, taking->model, room)))
        (void)whole_tensors_add(&taking->side->tensors, e->name, e->dtype, e->n_dims,
                                e->shape, e->bytes);
    return true;
}

static fanin_status diff_side_make_room(diff_side *side, const diff_request *request,
                                        fanin_error *error)
{
    uint64_t most = request->max_bytes > 0 ? request->max_bytes
                                           : memory_left_find("/proc", "/sys").bytes;
    if (side->tensors.bytes > most)
        return failure_set(
            error, FANIN_ERR_LIMIT,
            request->max_bytes > 0
                ? "raise --max-bytes, or use --pattern"
                : "use --pattern, or pull into a directory and give that",
            "%s are %s of tensors, more than %s", side->publication,
            output_bytes(side->tensors.bytes).s, output_bytes(most).s);
    side->memory = whole_tensors_memory(side->tensors.bytes, &side->mapped, error);
    return side->memory != NULL ? FANIN_OK : error->status;
}

static void diff_side_on_progress(void *cookie, const fanin_pull_progress *p)
{
    progress_update(cookie, p->bytes_done, p->bytes_total, p->slowest);
}

static fanin_status pull(diff_side *side, session *s, const diff_request *request,
                         fanin_error *error)
{
    progress bar;
    fanin_pull_options options;
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_pull_options_init(&options, sizeof options);
    options.publication = s->publication;
    options.rule = request->rule;
    options.step = request->step;
    options.timeout_ms = session_left_ms(s);
    options.rank_progress = diff_side_on_progress;
    options.progress_cookie = &bar;
    progress_start(&bar, s->publication, request->quiet, request->no_color);
    waiting *waiting = request->quiet ? NULL : waiting_start(s, options.step);
    fanin_status status =
        whole_tensors_pull(s->client, &options, side->tensors.list, side->tensors.count,
                           side->memory, &result, error);
    waiting_end(&waiting);
    progress_end(&bar);
    fanin_result_get(result, &info);
    side->step = info.step;
    fanin_result_free(&result);
    return status;
}

static int diff_side_by_name(const void *a, const void *b)
{
    const whole_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

/* As files have the names. */
static void rename_all(diff_side *side, bool model)
{
    char room[FANIN_MAX_NAME + 64];
    for (size_t i = 0; i < side->tensors.count; i++) {
        char *name =
            output_require(strdup(file_name(side->tensors.list[i].name, model, room)));
        free(side->tensors.list[i].name);
        side->tensors.list[i].name = name;
    }
    if (side->tensors.count > 0)
        qsort(side->tensors.list, side->tensors.count, sizeof side->tensors.list[0],
              diff_side_by_name);
}

static fanin_status diff_side_pull(diff_side *side, session *s,
                                   const diff_request *request, fanin_error *error)
{
    bool model = options_is_model(s->publication);
    taking taking = {.side = side, .request = request, .model = model};
    snprintf(side->publication, sizeof side->publication, "%s", s->publication);
    fanin_status status =
        fanin_client_catalog(s->client, s->publication, NULL, session_left_ms(s),
                             diff_side_on_entry, &taking, error);
    if (status == FANIN_OK && side->tensors.count == 0)
        return FANIN_OK; /* nothing is like the pattern: the caller says so */
    status = status != FANIN_OK ? status : diff_side_make_room(side, request, error);
    status = status != FANIN_OK ? status : pull(side, s, request, error);
    if (status == FANIN_OK)
        rename_all(side, model);
    return status;
}

/* -------------------------------------------------------------------------- bytes */

/* Bytes [@p at, @p at + @p size) of a tensor: where they are, or read into @p room. NULL after an
   error. */
static const uint8_t *diff_side_bytes(const diff_side *side, const whole_tensor *t,
                                      uint64_t at, size_t size, uint8_t *room,
                                      fanin_error *error)
{
    if (side->memory != NULL)
        return side->memory + t->offset + at;
    errno = 0;
    if (!check_read(t->descriptor, t->offset + at, room, size)) {
        failure_set(error, FANIN_ERR_IO, "check the disk",
                    "%s: the file of %s cannot be read: %s", side->what, t->name,
                    errno != 0 ? strerror(errno) : "it became shorter");
        return NULL;
    }
    return room;
}

static void diff_side_close(diff_side *side)
{
    if (side->memory != NULL)
        munmap(side->memory, side->mapped);
    whole_tensors_free(&side->tensors);
    tensor_directory_close(&side->files);
    *side = (diff_side){.what = NULL};
}

/* ---------------------------------------------------------------------- both sides */

typedef struct differ {
    const command *self;
    invocation *line;
    char *pattern;
    long long limit, max_bytes;
    int wait_step;
    const char *words[2]; /**< NULL: not given */
    const char *runs[2];  /**< likewise; of the target before it */
    diff_side sides[2];
    diff_report report;
    uint64_t done, total; /**< elements' bytes */
    progress bar;
} differ;

/* As diff(1) has it: whatever stands in the way of an answer is 2. */
static int trouble(int code)
{
    return code >= EXIT_SIGNAL ? code : TROUBLE;
}

/* ----------------------------------------------------------------------- comparing */

/* Elements [@p at, @p at + @p count) of both, at most BLOCK. */
static fanin_status compare_block(differ *d, diff_row *row, uint64_t at, size_t count,
                                  fanin_error *error)
{
    static uint8_t rooms[2][BLOCK * 8];
    const fanin_dtype dtypes[2] = {row->of[0]->dtype, row->of[1]->dtype};
    const uint8_t *bytes[2];
    for (unsigned side = 0; side < 2; side++) {
        bytes[side] = diff_side_bytes(
            &d->sides[side], row->of[side], numbers_bytes(dtypes[side], at),
            (size_t)numbers_bytes(dtypes[side], count), rooms[side], error);
        if (bytes[side] == NULL)
            return error->status;
    }
    for (size_t done = 0; done < count; done += CHANGE_PIECE) {
        const uint8_t *const from[2] = {bytes[0] + numbers_bytes(dtypes[0], done),
                                        bytes[1] + numbers_bytes(dtypes[1], done)};
        change_add(&row->change, dtypes, from,
                   count - done < CHANGE_PIECE ? count - done : CHANGE_PIECE);
    }
    d->done += numbers_bytes(dtypes[0], count);
    progress_update(&d->bar, d->done, d->total, NULL);
    return FANIN_OK;
}

static fanin_status diff_compare(differ *d, diff_row *row, fanin_error *error)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < row->of[0]->n_dims; i++)
        elements *= row->of[0]->shape[i];
    fanin_status status = FANIN_OK;
    for (uint64_t at = 0; status == FANIN_OK && at < elements; at += BLOCK) {
        size_t count = elements - at < BLOCK ? (size_t)(elements - at) : BLOCK;
        status = interrupt_requested()
                     ? failure_set(error, FANIN_ERR_CANCELLED, "", "interrupted")
                     : compare_block(d, row, at, count, error);
    }
    row->compared = status == FANIN_OK;
    return status;
}

static diff_kind kind_of(const diff_row *row)
{
    const whole_tensor *a = row->of[0], *b = row->of[1];
    if (a == NULL || b == NULL)
        return a == NULL ? DIFF_ONLY_B : DIFF_ONLY_A;
    if (a->n_dims != b->n_dims ||
        memcmp(a->shape, b->shape, a->n_dims * sizeof a->shape[0]) != 0)
        return DIFF_SHAPE;
    return a->dtype != b->dtype ? DIFF_DTYPE : DIFF_SAME;
}

static fanin_status diff_judge(differ *d, diff_row *row, fanin_error *error)
{
    row->kind = kind_of(row);
    bool comparable =
        (row->kind == DIFF_SAME || row->kind == DIFF_DTYPE) &&
        numbers_parts(row->of[0]->dtype) == numbers_parts(row->of[1]->dtype);
    fanin_status status = comparable ? diff_compare(d, row, error) : FANIN_OK;
    if (row->kind == DIFF_SAME && row->change.changed > 0)
        row->kind = DIFF_CHANGED;
    return status;
}

/* Both lists ascend by name: each name once. */
static void diff_pair_up(differ *d)
{
    const whole_tensors *a = &d->sides[0].tensors, *b = &d->sides[1].tensors;
    diff_report *r = &d->report;
    r->rows = output_require(calloc(a->count + b->count + 1, sizeof r->rows[0]));
    for (size_t i = 0, j = 0; i < a->count || j < b->count;) {
        int order = i == a->count   ? 1
                    : j == b->count ? -1
                                    : strcmp(a->list[i].name, b->list[j].name);
        diff_row *row = &r->rows[r->count++];
        row->of[0] = order <= 0 ? &a->list[i++] : NULL;
        row->of[1] = order >= 0 ? &b->list[j++] : NULL;
    }
    r->sides = d->sides;
    d->total = a->bytes;
}

static int compare_all(differ *d)
{
    const common_options *common = &d->line->common;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = FANIN_OK;
    diff_pair_up(d);
    if (d->report.count == 0)
        return trouble(failure_local("cannot compare", FANIN_ERR_NOT_FOUND,
                                     d->pattern != NULL ? "see --pattern" : "",
                                     "there are no %stensors to compare",
                                     d->pattern != NULL ? "such " : ""));
    progress_start(&d->bar, "diff", common->quiet != 0, common->no_color != 0);
    for (size_t i = 0; status == FANIN_OK && i < d->report.count; i++)
        status = diff_judge(d, &d->report.rows[i], &error);
    progress_end(&d->bar);
    if (status != FANIN_OK)
        return trouble(failure_report("cannot compare", &error));
    diff_report_sort(&d->report);
    (common->json ? diff_report_json : diff_report_print)(&d->report, (size_t)d->limit);
    return diff_report_equal(&d->report) ? EQUAL : DIFFERENT;
}

/* --------------------------------------------------------------------------- sides */

/* Takes "@STEP" off a word that is no path; false: it has none. */
static bool diff_take_step(char *word, uint64_t *step_out)
{
    char *at = strrchr(word, '@');
    if (at == NULL || at[1] == '\0' || strspn(at + 1, "0123456789") != strlen(at + 1) ||
        strlen(at + 1) > 18 || access(word, F_OK) == 0)
        return false;
    *step_out = strtoull(at + 1, NULL, 10);
    *at = '\0';
    return true;
}

static int pull_side(differ *d, session *s, diff_side *side, const diff_request *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    return diff_side_pull(side, s, r, &error) == FANIN_OK
               ? 0
               : session_failure(s,
                                 d->wait_step && r->rule == FANIN_STEP_AT_LEAST
                                     ? "cannot compare with the next step"
                                     : "cannot pull",
                                 &error);
}

/* The session's step is side @p i; of --wait-step its next one is the other side. */
static int pull_sides(differ *d, session *s, unsigned i, diff_request *request)
{
    int code = session_need_run(s);
    session_be_patient(s, d->line);
    code = code != 0 ? code : session_reach(s);
    code = code != 0 ? code : pull_side(d, s, &d->sides[i], request);
    if (code == 0 && d->wait_step && d->sides[0].tensors.count > 0) {
        request->rule = FANIN_STEP_AT_LEAST;
        request->step = d->sides[0].step + 1;
        d->sides[1].what = d->sides[0].what;
        code = pull_side(d, s, &d->sides[1], request);
    }
    return code;
}

static int open_target(differ *d, unsigned i, diff_request *request)
{
    session s = {0};
    const char *run = d->runs[i] != NULL ? d->runs[i] : d->line->run;
    char *text = output_require(strdup(d->words[i]));
    if (diff_take_step(text, &request->step))
        request->rule = FANIN_STEP_EXACT;
    int code = session_start(&s, d->self, d->line, text, run);
    code = code != 0 ? code : pull_sides(d, &s, i, request);
    session_end(&s);
    free(text);
    return code;
}

static int open_side(differ *d, unsigned i)
{
    const common_options *common = &d->line->common;
    fanin_error error = FANIN_ERROR_INIT;
    diff_request request = {.pattern = d->pattern,
                            .max_bytes = (uint64_t)d->max_bytes,
                            .quiet = common->quiet != 0,
                            .no_color = common->no_color != 0};
    d->sides[i].what = d->words[i];
    if (!diff_side_is_directory(d->words[i]))
        return open_target(d, i, &request);
    if (d->wait_step)
        return failure_usage("diff",
                             "--wait-step is for a TARGET, and %s is a "
                             "directory of tensors",
                             d->words[i]);
    return diff_side_open(&d->sides[i], d->words[i], &request, &error) == FANIN_OK
               ? 0
               : failure_report("cannot compare", &error);
}

/* A [RUN] B [RUN]; 0 or the exit status after a message. */
static int diff_take_words(differ *d)
{
    const arguments *parsed = &d->line->parsed;
    int count = 0, wanted = d->wait_step ? 1 : 2;
    for (int i = 0; i < parsed->count; i++) {
        const char *word = parsed->positional[i];
        bool run = options_is_publication(word);
        if (run && count > 0 && d->runs[count - 1] == NULL)
            d->runs[count - 1] = word;
        else if (run || count == wanted)
            return failure_usage("diff", "unexpected argument '%s'", word);
        else
            d->words[count++] = word;
    }
    if (count < wanted)
        return failure_usage("diff", d->wait_step ? "a TARGET is needed"
                                                  : "two directories or TARGETs are "
                                                    "needed, or --wait-step and one");
    return 0;
}

static int diff_run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 60000};
    differ d = {.self = self, .line = &line};
    int code;
    struct poptOption table[] = {
        {"pattern", 'k', POPT_ARG_STRING, &d.pattern, 0,
         "only tensors whose names are like this, with *, ? and [...]", "PATTERN"},
        {"limit", 0, POPT_ARG_LONGLONG, &d.limit, 0,
         "so many rows at most (default: 20, with --json all)", "N"},
        {"wait-step", 0, POPT_ARG_NONE, &d.wait_step, 0,
         "a TARGET's step with its next one, which is waited for", NULL},
        {"max-bytes", 0, POPT_ARG_LONGLONG, &d.max_bytes, 0,
         "refuse to pull more bytes (default: what the host has left)", "N"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    if (session_parse(self, &line, argc, argv, table, &code)) {
        code = diff_take_words(&d);
        for (unsigned i = 0; code == 0 && i < 2 && d.words[i] != NULL; i++)
            code = open_side(&d, i);
        code = code != 0 ? trouble(code) : compare_all(&d);
    }
    for (unsigned i = 0; i < 2; i++)
        diff_side_close(&d.sides[i]);
    free(d.report.rows);
    options_free(&line.parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch diff adapter-100 adapter-101\n"
    "  nixl-fetch diff adapter-100 nixl_info.json --run 0\n"
    "  nixl-fetch diff nixl_info.json lora:0 nixl_info.json lora:1\n"
    "  nixl-fetch diff --wait-step nixl_info.json --timeout 10m\n"
    "\n"
    "A and B are directories of an adapter or a model, or TARGETs (TARGET@STEP: that\n"
    "very step), which are pulled to memory. Tells of each tensor its norms, its\n"
    "change and what is NaN or infinite, the largest relative change first.\n"
    "--wait-step: did the optimizer write anything? Exit status, as diff's, 0: byte\n"
    "for byte the same, 1: different, 2: trouble.";

const command cmd_diff = {
    .name = "diff",
    .arguments = "A [RUN] B [RUN] | --wait-step TARGET [RUN] [OPTION...]",
    .summary = "what has changed between two steps, directories or runs",
    .help = help,
    .run = diff_run,
};
