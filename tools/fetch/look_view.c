/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/look_view.h"
#include "fetch/output.h"
#include "fetch/rank_states.h"
#include "fetch/terminal.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GAP = 2, WHO = 20 };

typedef struct drawing {
    const look_view *v;
    FILE *out;
    int used; /* lines */
} drawing;

/* Bytes of @p text that fill at most @p columns. */
static size_t look_view_cut(const char *text, int columns)
{
    size_t i = 0;
    for (int seen = 0; text[i] != '\0'; i++) {
        bool begins = ((unsigned char)text[i] & 0xc0) != 0x80;
        if (begins && seen++ == columns) {
            break;
        }
    }
    return i;
}

static void put_line(drawing *d, const char *style, const char *text)
{
    char *safe = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&safe, &size));
    terminal_put(stream, text);
    if (fclose(stream) != 0) {
        output_require(NULL);
    }
    bool styled = d->v->color && style[0] != '\0';
    fprintf(d->out, "%s%.*s%s\n", styled ? style : "",
            (int)look_view_cut(safe, d->v->columns), safe, styled ? "\033[0m" : "");
    free(safe);
    d->used++;
}

/* ------------------------------------------------------------------ what is wrong */

/* In how many lines a problem is told on a screen, at most: who and what stand in the first. */
static int lines_of(const look_view *v, const char *text)
{
    int width = v->columns - 2, length = (int)strlen(text);
    return v->lines == 0 || length <= width ? 1 : 2;
}

static void put_problem(drawing *d, const char *text)
{
    static const char style[] = "\033[31m";
    char line[sizeof((problem *)NULL)->text + 8];
    size_t first = strlen(text);
    if (lines_of(d->v, text) == 2) {
        first = look_view_cut(text, d->v->columns - 2);
        size_t blank = first;
        while (blank > 0 && text[blank] != ' ') {
            blank--;
        }
        first = blank > 0 ? blank : first;
    }
    snprintf(line, sizeof line, "  %.*s", (int)first, text);
    put_line(d, style, line);
    if (text[first] != '\0') {
        snprintf(line, sizeof line, "   %s%s", text[first] == ' ' ? "" : " ",
                 text + first);
        put_line(d, style, line);
    }
}

/* Shows the first @p each of every kind, or (@p d NULL) tells how many lines that takes. */
static int problems_of_each(drawing *d, const look_view *v, size_t each)
{
    int used = 0;
    const problem *list = v->problems->list;
    for (size_t first = 0, end; first < v->problems->count; first = end) {
        end = first;
        while (end < v->problems->count && list[end].weight == list[first].weight) {
            end++;
        }
        size_t shown = end - first <= each ? end - first : each;
        for (size_t i = first; i < first + shown; i++) {
            used += lines_of(v, list[i].text);
            if (d != NULL) {
                put_problem(d, list[i].text);
            }
        }
        if (first + shown < end) {
            char more[64];
            snprintf(more, sizeof more, "  ... and %zu more of this kind",
                     end - first - shown);
            used++;
            if (d != NULL) {
                put_line(d, "", more);
            }
        }
    }
    return used;
}

static void put_problems(drawing *d)
{
    const look_view *v = d->v;
    int half = v->lines / 2, spare = v->lines - 2 - (int)v->look->count;
    int room = v->lines == 0 ? INT_MAX : spare > half ? spare : half;
    size_t each = 1;
    while (each < v->problems->count && each < (size_t)room &&
           problems_of_each(NULL, v, each + 1) <= room) {
        each++;
    }
    (void)problems_of_each(d, v, v->lines == 0 ? v->problems->count : each);
}

/* ---------------------------------------------------------------------- the table */

typedef enum cell {
    RANK,
    STATE,
    STEP,
    AGE,
    HELD,
    HOLDER,
    LEASES,
    SESSIONS,
    STALE,
    DRAIN50,
    DRAIN99,
    RATE,
    PATH,
    CELLS
} cell;

static const struct {
    const char *name;
    bool right;
    int matters; /* the most have the least */
} cells[CELLS] = {
    [RANK] = {"RANK", true, 0},       [STATE] = {"STATE", false, 1},
    [STEP] = {"STEP", true, 2},       [AGE] = {"AGE", true, 3},
    [HELD] = {"HELD", true, 4},       [HOLDER] = {"BY", false, 7},
    [LEASES] = {"LEASES", true, 9},   [SESSIONS] = {"SESSIONS", true, 10},
    [STALE] = {"STALE", true, 6},     [DRAIN50] = {"DRAIN50", true, 11},
    [DRAIN99] = {"DRAIN99", true, 8}, [RATE] = {"SENDS", true, 5},
    [PATH] = {"PATH", false, 12},
};

static output_text look_view_holder_of(const look_rank *r)
{
    output_text text = {"-"};
    if (r->n_holders > 0) {
        snprintf(text.s, sizeof text.s, "%.*s", WHO, r->holders[0].who);
    }
    if (r->n_holders > 1) {
        output_append(text.s, sizeof text.s, " +%zu", r->n_holders - 1);
    }
    return text;
}

/* What everybody tells, and who does not answer. */
static output_text state_cell(const look_rank *r, cell which)
{
    output_text text = {"-"};
    bool good = look_answered(r) && r->there;
    if (which == RANK && r->at.rank >= 0) {
        return output_number((uint64_t)r->at.rank);
    }
    if (which == STATE) {
        snprintf(text.s, sizeof text.s, "%s",
                 good               ? rank_state_name(r->is.state)
                 : look_answered(r) ? "absent"
                                    : "no answer");
    } else if (which == STEP && good) {
        return output_number(r->is.step);
    } else if (which == AGE && good) {
        return output_age(r->is.commit_age_ms);
    }
    return text;
}

static output_text path_cell(const look_rate *rate)
{
    output_text text = {"-"};
    if (rate->path != NULL) {
        snprintf(text.s, sizeof text.s, "%s", rate->path);
    }
    return text;
}

static output_text cell_of(const look_rank *r, const look_rate *rate, cell which)
{
    const output_text none = {"-"};
    if (which <= AGE) {
        return state_cell(r, which);
    }
    if (!look_answered(r) || !r->stats.counted) {
        return none;
    }
    uint64_t drain = look_drain_ns(&r->stats, which == DRAIN50 ? 50 : 99);
    switch (which) {
    case HELD:
        return output_age(r->is.lease_age_ms);
    case HOLDER:
        return look_view_holder_of(r);
    case LEASES:
        return output_number(r->is.leases);
    case SESSIONS:
        return output_number(r->stats.sessions);
    case STALE:
        return output_number(r->stats.pulls_stale);
    case RATE:
        return !rate->known       ? none
               : rate->bytes == 0 ? output_number(0)
                                  : output_rate(rate->bytes, rate->ns);
    case PATH:
        return path_cell(rate);
    default:
        return drain > 0 ? output_duration(drain) : none;
    }
}

typedef struct row {
    const look_rank *rank;
    const look_rate *rate;
    size_t wrong; /* the first problem that it has; as many as there are: none */
} row;

static int by_problem(const void *a, const void *b)
{
    const row *x = a, *y = b;
    return x->wrong != y->wrong ? (x->wrong > y->wrong) - (x->wrong < y->wrong)
                                : x->rank->at.rank - y->rank->at.rank;
}

static row *sorted(const look_view *v)
{
    row *rows = output_require(calloc(v->look->count + 1, sizeof *rows));
    for (uint32_t i = 0; i < v->look->count; i++) {
        rows[i] = (row){.rank = &v->look->ranks[i], .rate = &v->rates->list[i]};
        while (rows[i].wrong < v->problems->count &&
               !problem_is_of(&v->problems->list[rows[i].wrong], rows[i].rank)) {
            rows[i].wrong++;
        }
    }
    qsort(rows, v->look->count, sizeof *rows, by_problem);
    return rows;
}

/* The widths of columns; 0: there is no room for it. */
static void look_view_measure(const look_view *v, const row *rows, size_t count,
                              int widths[CELLS])
{
    int room = v->columns;
    memset(widths, 0, CELLS * sizeof *widths);
    for (int matters = 0; matters < CELLS; matters++) {
        int which = 0;
        while (cells[which].matters != matters) {
            which++;
        }
        int width = (int)strlen(cells[which].name);
        for (size_t i = 0; i < count; i++) {
            int own = (int)strlen(cell_of(rows[i].rank, rows[i].rate, (cell)which).s);
            width = own > width ? own : width;
        }
        int takes = width + (matters > 0 ? GAP : 0);
        if (takes <= room) {
            widths[which] = width;
            room -= takes;
        }
    }
}

/* @p r NULL: the head. */
static void put_row(drawing *d, const row *r, const int widths[CELLS],
                    const char *style)
{
    char line[1024] = "";
    for (int which = 0; which < CELLS; which++) {
        output_text text = {""};
        if (r != NULL) {
            text = cell_of(r->rank, r->rate, (cell)which);
        } else {
            snprintf(text.s, sizeof text.s, "%s", cells[which].name);
        }
        if (widths[which] > 0) {
            output_append(line, sizeof line, "%*s%*s", which > 0 ? GAP : 0, "",
                          cells[which].right ? widths[which] : -widths[which], text.s);
        }
    }
    size_t end = strlen(line);
    while (end > 0 && line[end - 1] == ' ') {
        line[--end] = '\0';
    }
    put_line(d, style, line);
}

static void put_table(drawing *d)
{
    const look_view *v = d->v;
    row *rows = sorted(v);
    int left = v->lines == 0 ? INT_MAX : v->lines - d->used - 1, widths[CELLS];
    size_t count = v->look->count, shown = count;
    if (left < (int)count) {
        shown = left > 1 ? (size_t)left - 1 : 0;
    }
    look_view_measure(v, rows, shown, widths);
    put_row(d, NULL, widths, "\033[1m");
    for (size_t i = 0; i < shown; i++) {
        bool wrong = rows[i].wrong < v->problems->count;
        put_row(d, &rows[i], widths, wrong ? "\033[31m" : "");
    }
    size_t more = 0;
    while (shown + more < count && rows[shown + more].wrong < v->problems->count) {
        more++;
    }
    if (shown < count && left > 0) {
        char text[96];
        snprintf(text, sizeof text, "... and %zu more ranks%s", count - shown,
                 more == 0 ? ", nothing is wrong with them" : "");
        if (more > 0) {
            output_append(text, sizeof text, ", something is wrong with %zu", more);
        }
        put_line(d, "", text);
    }
    free(rows);
}

static void put_relays(drawing *d, const look_rank *r)
{
    char line[1024];
    int left = d->v->lines == 0 ? INT_MAX : d->v->lines - d->used - 1;
    if (r->n_relays == 0 || left < 1) {
        return;
    }
    snprintf(line, sizeof line, "%-24s %8s %13s %9s %9s %9s %5s %5s", "RELAY", "STEP",
             "UNITS", "ORIGIN", "RELAYS", "HANDED", "LATE", "TAKEN");
    put_line(d, "\033[1m", line);
    for (size_t i = 0; i < r->n_relays && (int)i < left; i++) {
        const fanin_told_relay *t = &r->relays[i].told;
        char units[48];
        snprintf(units, sizeof units, "%" PRIu64 "/%" PRIu64, t->landed, t->units);
        snprintf(line, sizeof line,
                 "%-24.63s %8" PRIu64 " %13s %9.20s %9.20s %9.20s %5" PRIu64
                 " %5" PRIu64 "%s%.63s",
                 r->relays[i].address, t->step, units, output_bytes(t->bytes_origin).s,
                 output_bytes(t->bytes_relays).s, output_bytes(t->bytes_handed_on).s,
                 t->late, t->taken_over, r->relays[i].place[0] != '\0' ? "  " : "",
                 r->relays[i].place);
        put_line(d, "", line);
    }
}

char *look_view_text(const look_view *v)
{
    char *text = NULL;
    size_t size = 0;
    drawing d = {.v = v, .out = output_require(open_memstream(&text, &size))};
    char head[512];
    uint32_t there = 0;
    for (uint32_t i = 0; i < v->look->count; i++) {
        there += look_answered(&v->look->ranks[i]);
    }
    snprintf(head, sizeof head, "%s: step %" PRIu64 ", %u of %u ranks answer%s%s  %s",
             v->title, v->look->newest, there, v->look->asked, look_relays(v->look).s,
             v->problems->count == 0 ? ", nothing is wrong" : "", v->tail);
    put_line(&d, "\033[1m", head);
    put_problems(&d);
    put_table(&d);
    for (uint32_t i = 0; i < v->look->count; i++) {
        put_relays(&d, &v->look->ranks[i]);
    }
    if (fclose(d.out) != 0) {
        output_require(NULL);
    }
    return text;
}
