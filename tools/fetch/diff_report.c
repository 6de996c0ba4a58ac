/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/diff_report.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 20, NAMED = 3 };

static const char *const kind_names[] = {
    [DIFF_SAME] = "same",   [DIFF_CHANGED] = "changed", [DIFF_DTYPE] = "dtype",
    [DIFF_SHAPE] = "shape", [DIFF_ONLY_A] = "only-a",   [DIFF_ONLY_B] = "only-b",
};

static const char *name_of(const diff_row *row)
{
    return (row->of[0] != NULL ? row->of[0] : row->of[1])->name;
}

static size_t count_kind(const diff_report *r, diff_kind kind)
{
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++)
        count += r->rows[i].kind == kind;
    return count;
}

bool diff_report_equal(const diff_report *r)
{
    return count_kind(r, DIFF_SAME) == r->count;
}

static int by_change(const void *a, const void *b)
{
    static const int places[] = {
        [DIFF_CHANGED] = 0, [DIFF_DTYPE] = 1,  [DIFF_SHAPE] = 2,
        [DIFF_ONLY_A] = 3,  [DIFF_ONLY_B] = 4, [DIFF_SAME] = 5};
    const diff_row *x = a, *y = b;
    double p = change_relative(&x->change), q = change_relative(&y->change);
    if (places[x->kind] != places[y->kind])
        return places[x->kind] - places[y->kind];
    return p != q ? (p < q) - (p > q) : strcmp(name_of(x), name_of(y));
}

void diff_report_sort(diff_report *r)
{
    if (r->count > 0)
        qsort(r->rows, r->count, sizeof r->rows[0], by_change);
}

/* ------------------------------------------------------------------------ sentences */

/* How the command line's word is told: with what was pulled. */
static output_text side_text(const diff_side *side)
{
    output_text text;
    snprintf(text.s, sizeof text.s, "%.120s", side->what);
    if (side->memory != NULL)
        output_append(text.s, sizeof text.s, ", step %" PRIu64, side->step);
    return text;
}

/* "3 tensors have NaN in B: x, y, z, ..." */
static void add_sentence(json_t *list, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void add_sentence(json_t *list, const char *format, ...)
{
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    json_array_append_new(list, output_string(length >= 0 ? text : ""));
    if (length >= 0)
        free(text);
}

static void say_special(json_t *list, const diff_report *r, unsigned side, bool nan)
{
    char names[NAMED * (FANIN_MAX_NAME + 8) + 8] = "";
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++) {
        const change *c = &r->rows[i].change;
        if ((nan ? c->nans : c->infinite)[side] > 0) {
            if (count < NAMED)
                output_append(names, sizeof names, "%s%s", count > 0 ? ", " : "",
                              name_of(&r->rows[i]));
            count++;
        }
    }
    if (count > 0)
        add_sentence(list, "%zu %s %s in %c: %s%s", count,
                     count == 1 ? "tensor has" : "tensors have",
                     nan ? "NaN" : "infinite elements", side == 0 ? 'A' : 'B', names,
                     count > NAMED ? ", ..." : "");
}

static void say_changed(json_t *list, const diff_report *r)
{
    size_t changed = count_kind(r, DIFF_CHANGED);
    size_t both = changed + count_kind(r, DIFF_SAME) + count_kind(r, DIFF_DTYPE) +
                  count_kind(r, DIFF_SHAPE);
    const bool steps = r->sides[0].memory != NULL && r->sides[1].memory != NULL;
    if (changed > 0) {
        double most = change_relative(&r->rows[0].change);
        char size[64] = "from zero, or to or from what is no finite number";
        if (isfinite(most))
            snprintf(size, sizeof size, "by %.3g %% of its norm", 100.0 * most);
        add_sentence(list, "%zu of %zu tensors changed, the most %s (%s)", changed,
                     both, name_of(&r->rows[0]), size);
    } else if (diff_report_equal(r)) {
        add_sentence(list, "nothing changed: all %zu tensors are equal%s", both,
                     !steps || r->sides[0].step != r->sides[1].step
                         ? ": did the optimizer write?"
                         : "");
    } else {
        add_sentence(list, "no tensor changed of those that both have alike");
    }
}

static json_t *summary(const diff_report *r)
{
    static const struct {
        diff_kind kind;
        const char *text;
    } others[] = {{DIFF_DTYPE, "have another dtype"},
                  {DIFF_SHAPE, "have another shape"},
                  {DIFF_ONLY_A, "are in A only"},
                  {DIFF_ONLY_B, "are in B only"}};
    json_t *list = json_array();
    say_changed(list, r);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        size_t count = count_kind(r, others[i].kind);
        if (count > 0)
            add_sentence(list, "%zu of the tensors %s", count, others[i].text);
    }
    for (unsigned side = 0; side < 2; side++) {
        say_special(list, r, side, true);
        say_special(list, r, side, false);
    }
    return list;
}

/* ----------------------------------------------------------------------------- text */

static output_text diff_report_number(double value)
{
    output_text text;
    snprintf(text.s, sizeof text.s, "%.4g", value);
    return text;
}

static output_text share(const change *c)
{
    output_text text = {"-"};
    if (c->elements > 0) {
        double percent = 100.0 * (double)c->changed / (double)c->elements;
        snprintf(text.s, sizeof text.s, percent >= 99.95 ? "%.0f %%" : "%.3g %%",
                 percent);
    }
    return text;
}

/* "a" if both sides say so, else "a -> b". */
static output_text both(const char *a, const char *b)
{
    output_text text;
    snprintf(text.s, sizeof text.s, "%.90s", a != NULL ? a : b);
    if (a != NULL && b != NULL && strcmp(a, b) != 0)
        output_append(text.s, sizeof text.s, " -> %.90s", b);
    return text;
}

static output_text counts(const uint64_t of[2])
{
    output_text text = {""};
    if (of[0] > 0 || of[1] > 0)
        snprintf(text.s, sizeof text.s, "%" PRIu64 " -> %" PRIu64, of[0], of[1]);
    return text;
}

static void diff_report_add_row(struct libscols_table *table, const diff_row *row)
{
    output_text dims[2];
    const char *dtypes[2] = {NULL, NULL}, *shapes[2] = {NULL, NULL};
    const change *c = &row->change;
    const bool told = row->compared;
    for (unsigned side = 0; side < 2; side++) {
        if (row->of[side] != NULL) {
            dims[side] = output_dims(row->of[side]->shape, row->of[side]->n_dims);
            dtypes[side] = fanin_dtype_name(row->of[side]->dtype);
            shapes[side] = dims[side].s;
        }
    }
    output_row(table, NULL, kind_names[row->kind],
               told ? diff_report_number(change_relative(c)).s : "-",
               told ? share(c).s : "-", told ? diff_report_number(c->norm[0]).s : "-",
               told ? diff_report_number(c->norm[1]).s : "-",
               told ? diff_report_number(c->norm_of_change).s : "-",
               told ? diff_report_number(c->largest).s : "-", counts(c->nans).s,
               counts(c->infinite).s, both(dtypes[0], dtypes[1]).s,
               both(shapes[0], shapes[1]).s, name_of(row));
}

void diff_report_print(const diff_report *r, size_t limit)
{
    size_t index, most = limit > 0 ? limit : ROWS, differ = 0;
    json_t *value, *sentences = summary(r);
    terminal_print("A: %s", side_text(&r->sides[0]).s);
    terminal_print("B: %s", side_text(&r->sides[1]).s);
    json_array_foreach(sentences, index, value)
    {
        terminal_print("%s", json_string_value(value));
    }
    json_decref(sentences);
    while (differ < r->count && r->rows[differ].kind != DIFF_SAME)
        differ++;
    if (differ > 0) {
        struct libscols_table *table =
            output_table("WHAT RELATIVE> CHANGED> NORM-A> NORM-B> NORM-OF-CHANGE> "
                         "LARGEST> NAN> INF> DTYPE SHAPE NAME");
        for (size_t i = 0; i < differ && i < most; i++)
            diff_report_add_row(table, &r->rows[i]);
        output_print(table);
    }
    if (differ > most)
        terminal_print("and %zu more: --limit", differ - most);
}

/* ----------------------------------------------------------------------------- JSON */

/* Null: too large for a number, or from zero. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *side_json(const diff_side *side)
{
    return output_object("what", output_string(side->what), "publication",
                         output_string(side->publication), "step",
                         side->memory != NULL ? output_u64(side->step) : json_null(),
                         "tensors", output_u64(side->tensors.count), "bytes",
                         output_u64(side->tensors.bytes), NULL);
}

static json_t *diff_report_tensor_json(const whole_tensor *t)
{
    return t == NULL ? json_null()
                     : output_object("dtype", output_string(fanin_dtype_name(t->dtype)),
                                     "shape", output_list(t->shape, t->n_dims), NULL);
}

static json_t *change_json(const change *c)
{
    return output_object(
        "elements", output_u64(c->elements), "changed", output_u64(c->changed),
        "norm_a", real(c->norm[0]), "norm_b", real(c->norm[1]), "norm_of_change",
        real(c->norm_of_change), "relative", real(change_relative(c)), "largest",
        real(c->largest), "nan_a", output_u64(c->nans[0]), "nan_b",
        output_u64(c->nans[1]), "infinite_a", output_u64(c->infinite[0]), "infinite_b",
        output_u64(c->infinite[1]), NULL);
}

void diff_report_json(const diff_report *r, size_t limit)
{
    json_t *rows = json_array();
    size_t most = limit > 0 && limit < r->count ? limit : r->count;
    for (size_t i = 0; i < most; i++) {
        const diff_row *row = &r->rows[i];
        json_array_append_new(
            rows, output_object("name", output_string(name_of(row)), "what",
                                output_string(kind_names[row->kind]), "a",
                                diff_report_tensor_json(row->of[0]), "b",
                                diff_report_tensor_json(row->of[1]), "change",
                                row->compared ? change_json(&row->change) : json_null(),
                                NULL));
    }
    output_json(output_object("equal", json_boolean(diff_report_equal(r)), "summary",
                              summary(r), "a", side_json(&r->sides[0]), "b",
                              side_json(&r->sides[1]), "tensors", rows, NULL));
}
