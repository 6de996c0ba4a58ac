/* SPDX-License-Identifier: Apache-2.0 */
/* Two results of `bench --json`: whether the second one is slower than the first, beyond noise. */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOWER = 1,
    NOT_COMPARABLE = 2,
    MOST_BYTES = 256 << 20,
    MOST_SAMPLES = 10000000,
    MOST_DIFFERENCES = 16,
};

/* By how much the same limit may differ before it is another machine, or a busy one. */
static const double most_drift = 1.5;

typedef struct comparison {
    json_t *a, *b;
    const char *path_a, *path_b;
    char differences[MOST_DIFFERENCES][256];
    size_t n_differences;
    double drift; /**< of the limits, a factor >= 1 */
} comparison;

typedef struct series {
    uint64_t *values;
    uint32_t count;
} series;

/* ------------------------------------------------------------------------ reading */

static int refuse(const char *path, const char *why)
{
    return failure_local("cannot compare", FANIN_ERR_ARGUMENT,
                         "give what 'nixl-fetch bench --json' of this version printed",
                         "%s: %s", path, why);
}

/* All of the file; NULL after a message. */
static char *read_text(const char *path, size_t *size_out, int *code_out)
{
    size_t size = 0, room = 0;
    char *text = NULL;
    errno = 0;
    FILE *file = fopen(path, "re");
    while (file != NULL && size < MOST_BYTES) {
        if (size == room) {
            room = room > 0 ? 2 * room : 1 << 16;
            text = output_require(realloc(text, room));
        }
        size_t n = fread(text + size, 1, room - size, file);
        size += n;
        if (n == 0) {
            break;
        }
    }
    int failed = file == NULL || ferror(file) ? errno : 0;
    if (file != NULL) {
        (void)fclose(file);
    }
    if (failed == 0 && size < MOST_BYTES) {
        *size_out = size;
        return text;
    }
    free(text);
    *code_out =
        refuse(path, failed != 0 ? strerror(failed) : "it is larger than any result");
    return NULL;
}

static bool is_series(const json_t *list)
{
    size_t i;
    const json_t *value;
    if (!json_is_array(list) || json_array_size(list) == 0 ||
        json_array_size(list) > MOST_SAMPLES) {
        return false;
    }
    json_array_foreach(list, i, value)
    {
        if (!json_is_integer(value) || json_integer_value(value) < 0) {
            return false;
        }
    }
    return true;
}

/* What of it is not as bench writes it; NULL: all is. */
static const char *fault(const json_t *result)
{
    const json_t *samples = json_object_get(result, "samples");
    if (json_object_get(result, "error") != NULL) {
        return "it is an error, not a result";
    }
    if (json_integer_value(json_object_get(result, "schema")) != 1 ||
        !json_is_object(samples) || !json_is_array(json_object_get(result, "limits")) ||
        !json_is_object(json_object_get(result, "machine"))) {
        return "it is no result of bench";
    }
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        const json_t *list = json_object_get(samples, report_phases[i].name);
        if (!is_series(list)) {
            return "its samples are not such as bench writes";
        }
        if (json_array_size(list) !=
            json_array_size(json_object_get(samples, report_phases[0].name))) {
            return "its figures have different numbers of samples";
        }
    }
    return NULL;
}

static json_t *load(const char *path, int *code_out)
{
    size_t size = 0;
    json_error_t error;
    char *text = read_text(path, &size, code_out);
    if (text == NULL) {
        return NULL;
    }
    json_t *result = json_loadb(text, size, JSON_REJECT_DUPLICATES, &error);
    free(text);
    if (result == NULL) {
        char why[300];
        snprintf(why, sizeof why, "line %d: %.250s", error.line, error.text);
        *code_out = refuse(path, why);
        return NULL;
    }
    const char *why = fault(result);
    if (why != NULL) {
        json_decref(result);
        *code_out = refuse(path, why);
        return NULL;
    }
    return result;
}

/* --------------------------------------------------------------------- comparable? */

static void differ(comparison *c, const char *what, const json_t *a, const json_t *b)
{
    char *of_a = a != NULL ? json_dumps(a, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    char *of_b = b != NULL ? json_dumps(b, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    if (c->n_differences < MOST_DIFFERENCES) {
        snprintf(c->differences[c->n_differences++], sizeof c->differences[0],
                 "%s: %.60s and %.60s", what, of_a != NULL ? of_a : "none",
                 of_b != NULL ? of_b : "none");
    }
    free(of_a);
    free(of_b);
}

static void compare_members(comparison *c, const json_t *a, const json_t *b,
                            const char *const *names)
{
    for (; *names != NULL; names++) {
        const json_t *of_a = json_object_get(a, *names);
        const json_t *of_b = json_object_get(b, *names);
        if (of_a == NULL || of_b == NULL || !json_equal(of_a, of_b)) {
            differ(c, *names, of_a, of_b);
        }
    }
}

/* The least time of a byte; 0: not known. */
static double limit_ns(const json_t *limit)
{
    double bytes = json_number_value(json_object_get(limit, "bytes"));
    double ns = json_number_value(json_object_get(limit, "min_ns"));
    return bytes > 0 && ns > 0 ? ns / bytes : 0;
}

static const json_t *limit_like(const json_t *list, const json_t *limit)
{
    size_t i;
    const json_t *other;
    json_array_foreach(list, i, other)
    {
        if (json_equal(json_object_get(other, "name"),
                       json_object_get(limit, "name")) &&
            json_equal(json_object_get(other, "threads"),
                       json_object_get(limit, "threads"))) {
            return other;
        }
    }
    return NULL;
}

static void compare_limits(comparison *c)
{
    const json_t *of_a = json_object_get(c->a, "limits");
    const json_t *of_b = json_object_get(c->b, "limits");
    size_t i;
    const json_t *limit;
    c->drift = 1;
    if (json_array_size(of_a) != json_array_size(of_b)) {
        differ(c, "limits", NULL, NULL);
    }
    json_array_foreach(of_a, i, limit)
    {
        const json_t *other = limit_like(of_b, limit);
        const char *name = json_string_value(json_object_get(limit, "name"));
        double x = limit_ns(limit), y = other != NULL ? limit_ns(other) : 0;
        double drift = x > 0 && y > 0 ? (x > y ? x / y : y / x) : 1;
        c->drift = drift > c->drift ? drift : c->drift;
        if (other == NULL || (x > 0) != (y > 0) || drift > most_drift) {
            char what[120];
            snprintf(what, sizeof what, "limit '%.80s', min_ns",
                     name != NULL ? name : "");
            differ(c, what, json_object_get(limit, "min_ns"),
                   json_object_get(other, "min_ns"));
        }
    }
}

static void compare_kinds(comparison *c)
{
    static const char *const members[] = {
        "tensors",  "bytes",       "world_size", "destination", "device",
        "path",     "cold",        "snapshot",   "layout",      "workers",
        "mappings", "all_checked", "verify",     "pull_dtype",  "spare_file",
        "pause_ns", "secured",     "no_unix",    "checksums",   NULL};
    static const char *const machine[] = {"processor", "cores", "memory_bytes",
                                          "devices", NULL};
    compare_members(c, c->a, c->b, members);
    compare_members(c, json_object_get(c->a, "machine"),
                    json_object_get(c->b, "machine"), machine);
    compare_limits(c);
    const json_t *of_a = json_object_get(json_object_get(c->a, "samples"), "total");
    const json_t *of_b = json_object_get(json_object_get(c->b, "samples"), "total");
    if (json_array_size(of_a) < STATS_LEAST_SAMPLES ||
        json_array_size(of_b) < STATS_LEAST_SAMPLES) {
        json_t *x = output_u64(json_array_size(of_a));
        json_t *y = output_u64(json_array_size(of_b));
        differ(c, "too few samples (5 are needed)", x, y);
        json_decref(x);
        json_decref(y);
    }
}

/* ------------------------------------------------------------------------ figures */

static series series_of(const json_t *result, const char *phase)
{
    const json_t *list = json_object_get(json_object_get(result, "samples"), phase);
    series s = {.count = (uint32_t)json_array_size(list)};
    s.values = output_require(malloc(s.count * sizeof s.values[0]));
    for (uint32_t i = 0; i < s.count; i++) {
        s.values[i] = (uint64_t)json_integer_value(json_array_get(list, i));
    }
    return s;
}

static uint64_t median_of(const series *s)
{
    uint64_t *copy = output_require(malloc(s->count * sizeof copy[0]));
    memcpy(copy, s->values, s->count * sizeof copy[0]);
    uint64_t median = stats_figure_of(copy, s->count).median;
    free(copy);
    return median;
}

/* One figure as an object; NULL: neither took time. */
static json_t *figure(const comparison *c, const char *phase)
{
    series a = series_of(c->a, phase), b = series_of(c->b, phase);
    uint64_t of_a = median_of(&a), of_b = median_of(&b);
    json_t *o = NULL;
    if (of_a > 0 || of_b > 0) {
        o = output_object("name", output_string(phase), "a_ns", output_u64(of_a),
                          "b_ns", output_u64(of_b), "a_count", output_u64(a.count),
                          "b_count", output_u64(b.count), NULL);
    }
    if (of_a > 0 && of_b > 0) {
        stats_ratio r = stats_compare(a.values, a.count, b.values, b.count);
        double low = r.low / c->drift, high = r.high * c->drift;
        output_set(o, "ratio", json_real(r.ratio), "low", json_real(low), "high",
                   json_real(high), "verdict",
                   output_string(low > 1    ? "slower"
                                 : high < 1 ? "faster"
                                            : "same"),
                   NULL);
    }
    free(a.values);
    free(b.values);
    return o;
}

static void print_row(struct libscols_table *table, const json_t *o)
{
    char numbers[3][32] = {"", "", ""};
    static const char *const names[] = {"ratio", "low", "high"};
    const char *verdict = json_string_value(json_object_get(o, "verdict"));
    for (int i = 0; i < 3 && verdict != NULL; i++) {
        snprintf(numbers[i], sizeof numbers[i], "%.3f",
                 json_real_value(json_object_get(o, names[i])));
    }
    uint64_t a = (uint64_t)json_integer_value(json_object_get(o, "a_ns"));
    uint64_t b = (uint64_t)json_integer_value(json_object_get(o, "b_ns"));
    bool same = verdict != NULL && strcmp(verdict, "same") == 0;
    output_row(table, NULL, json_string_value(json_object_get(o, "name")),
               output_duration(a).s, output_duration(b).s, numbers[0], numbers[1],
               numbers[2], same ? "within noise" : verdict);
}

static int tell_figures(const comparison *c, json_t *figures)
{
    struct libscols_table *table = output_table("PHASE A> B> B/A> FROM> TO> B-IS");
    size_t i;
    const json_t *o;
    json_array_foreach(figures, i, o)
    {
        print_row(table, o);
    }
    printf("A: %s\nB: %s\n", c->path_a, c->path_b);
    output_print(table);
    printf(
        "medians, and where their ratio lies with 99 %% confidence; limits of the two "
        "runs differ by up to %.1f %%, which is added\n",
        100 * (c->drift - 1));
    return 0;
}

static int tell(const comparison *c, bool json)
{
    json_t *figures = json_array();
    const char *verdict = "same";
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        json_t *o = figure(c, report_phases[i].name);
        if (o == NULL) {
            continue;
        }
        json_array_append_new(figures, o);
        const char *one = json_string_value(json_object_get(o, "verdict"));
        if (strcmp(report_phases[i].name, "total") == 0 && one != NULL) {
            verdict = one;
        }
    }
    int code = strcmp(verdict, "slower") == 0 ? SLOWER : 0;
    if (json) {
        output_json(output_object("comparable", json_true(), "differences",
                                  json_array(), "drift", json_real(c->drift), "verdict",
                                  output_string(verdict), "figures",
                                  json_incref(figures), NULL));
    } else {
        tell_figures(c, figures);
    }
    json_decref(figures);
    return code;
}

static int tell_differences(const comparison *c, bool json)
{
    json_t *list = json_array();
    for (size_t i = 0; i < c->n_differences; i++) {
        json_array_append_new(list, output_string(c->differences[i]));
        failure_warn("%s and %s cannot be compared: %s", c->path_a, c->path_b,
                     c->differences[i]);
    }
    if (json) {
        output_json(output_object("comparable", json_false(), "differences", list,
                                  "drift", json_real(c->drift), "verdict", json_null(),
                                  "figures", json_array(), NULL));
    } else {
        json_decref(list);
    }
    return NOT_COMPARABLE;
}

int bench_compare(const char *path_a, const char *path_b, bool json)
{
    static comparison c; /* large */
    int code = 0;
    c = (comparison){.path_a = path_a, .path_b = path_b};
    c.a = load(path_a, &code);
    c.b = c.a != NULL ? load(path_b, &code) : NULL;
    if (c.b != NULL) {
        compare_kinds(&c);
        code = c.n_differences > 0 ? tell_differences(&c, json) : tell(&c, json);
    }
    json_decref(c.a);
    json_decref(c.b);
    return code;
}
