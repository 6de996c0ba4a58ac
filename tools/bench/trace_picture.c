/* SPDX-License-Identifier: Apache-2.0 */
/* A pull as a picture that needs no browser: a row for the call, one for each rank, what trainers
   did. */
#include "bench/trace_events.h"
#include "fetch/output.h"

#include <stdlib.h>
#include <string.h>

enum { WIDTH = 1000, LEFT = 120, RIGHT = 20, TOP = 64, ROW = 20, TICKS = 5 };

/* In the order of a pull, which is the legend's. */
static const struct {
    const char *name, *color;
} phases[] = {
    {"resolve", "#8c959f"}, {"connect", "#6e7781"},      {"wait", "#d4a72c"},
    {"catalog", "#8250df"}, {"plan", "#bf3989"},         {"paths", "#953800"},
    {"map", "#e16f24"},     {"begin", "#0550ae"},        {"read", "#1a7f37"},
    {"digest", "#4ac26b"},  {"end", "#54aeff"},          {"write", "#57606a"},
    {"publish", "#24292f"}, {"begin_update", "#cf222e"}, {"commit", "#ff8182"},
};
enum { PHASES = sizeof phases / sizeof *phases };

typedef struct picture {
    const trace_events *events;
    const trace_event *whole;
    double began_us, took_us;
    int *ranks; /* of the rows below the call's; trainers' are behind readers' */
    bool *trainers;
    size_t rows, capacity, room;
} picture;

static size_t picture_phase_of(const char *name)
{
    size_t i = 0;
    while (i < PHASES && strcmp(phases[i].name, name) != 0) {
        i++;
    }
    return i;
}

/* Of the pull itself, or a trainer's while it ran. */
static bool is_shown(const picture *p, const trace_event *e)
{
    if (picture_phase_of(e->name) == PHASES) {
        return false;
    }
    if (p->whole == NULL || (!e->trainer && e->n == p->whole->n)) {
        return true;
    }
    return e->trainer && e->began_us < p->began_us + p->took_us &&
           e->began_us + e->took_us > p->began_us;
}

static void find_span(picture *p)
{
    double last = 0;
    p->began_us = p->whole != NULL ? p->whole->began_us : 0;
    p->took_us = p->whole != NULL ? p->whole->took_us : 0;
    for (size_t i = 0; p->whole == NULL && i < p->events->count; i++) {
        const trace_event *e = &p->events->all[i];
        if (i == 0 || e->began_us < p->began_us) {
            p->began_us = e->began_us;
        }
        last = e->began_us + e->took_us > last ? e->began_us + e->took_us : last;
    }
    p->took_us = p->whole == NULL ? last - p->began_us : p->took_us;
    p->took_us = p->took_us > 0 ? p->took_us : 1;
}

/* 0: the call's. */
static size_t row_of(const picture *p, const trace_event *e)
{
    for (size_t i = 0; i < p->rows; i++) {
        if (p->ranks[i] == e->rank && p->trainers[i] == e->trainer) {
            return i + 1;
        }
    }
    return 0;
}

static void find_rows(picture *p)
{
    for (int kind = 0; kind < 2; kind++) {
        for (size_t i = 0; i < p->events->count; i++) {
            const trace_event *e = &p->events->all[i];
            if (e->rank < 0 || e->trainer != (kind == 1) || !is_shown(p, e) ||
                row_of(p, e) > 0) {
                continue;
            }
            p->ranks = output_room(p->ranks, p->rows, &p->capacity, sizeof *p->ranks);
            p->trainers = output_room(p->trainers, p->rows, &p->room, sizeof(bool));
            p->ranks[p->rows] = e->rank;
            p->trainers[p->rows++] = e->trainer;
        }
    }
}

/* By rank; readers' rows first. */
static void sort_rows(picture *p)
{
    for (size_t i = 1; i < p->rows; i++) {
        for (size_t j = i; j > 0 && p->trainers[j] == p->trainers[j - 1] &&
                           p->ranks[j] < p->ranks[j - 1];
             j--) {
            int rank = p->ranks[j];
            p->ranks[j] = p->ranks[j - 1];
            p->ranks[j - 1] = rank;
        }
    }
}

static double x_of(const picture *p, double us)
{
    double at = (us - p->began_us) / p->took_us;
    at = at < 0 ? 0 : at > 1 ? 1 : at;
    return LEFT + at * (WIDTH - LEFT - RIGHT);
}

static void put_span(const picture *p, const trace_event *e, FILE *out)
{
    bool bad = strcmp(e->outcome, "FANIN_OK") != 0;
    double from = x_of(p, e->began_us), to = x_of(p, e->began_us + e->took_us);
    fprintf(out,
            "<rect x=\"%.2f\" y=\"%zu\" width=\"%.2f\" height=\"%d\" fill=\"%s\"%s>"
            "<title>",
            from, TOP + row_of(p, e) * ROW + 3, to - from > 0.5 ? to - from : 0.5,
            ROW - 6, phases[picture_phase_of(e->name)].color,
            bad ? " stroke=\"#cf222e\" stroke-width=\"2\"" : "");
    output_xml(out, e->name);
    fprintf(out, " %s%s", output_duration((uint64_t)(e->took_us * 1000)).s,
            bad ? ", " : "");
    output_xml(out, bad ? e->outcome : "");
    fputs("</title></rect>\n", out);
}

static void put_axis(const picture *p, size_t height, FILE *out)
{
    for (int i = 0; i <= TICKS; i++) {
        double x = LEFT + (double)i * (WIDTH - LEFT - RIGHT) / TICKS;
        fprintf(
            out,
            "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%zu\" stroke=\"#d0d7de\"/>"
            "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n",
            x, TOP, x, height, x, TOP - 6,
            output_duration((uint64_t)(p->took_us * 1000 * i / TICKS)).s);
    }
    fprintf(out, "<text x=\"8\" y=\"%d\">call</text>\n", TOP + 14);
    for (size_t i = 0; i < p->rows; i++) {
        fprintf(out, "<text x=\"8\" y=\"%zu\">%srank %d</text>\n",
                TOP + (i + 1) * ROW + 14, p->trainers[i] ? "trainer, " : "",
                p->ranks[i]);
    }
}

static void put_legend(const picture *p, FILE *out)
{
    double x = 8;
    for (size_t i = 0; i < PHASES; i++) {
        bool used = false;
        for (size_t j = 0; j < p->events->count && !used; j++) {
            const trace_event *e = &p->events->all[j];
            used = picture_phase_of(e->name) == i && is_shown(p, e);
        }
        if (!used) {
            continue;
        }
        fprintf(out,
                "<rect x=\"%.0f\" y=\"27\" width=\"10\" height=\"10\" fill=\"%s\"/>"
                "<text x=\"%.0f\" y=\"36\">%s</text>\n",
                x, phases[i].color, x + 14, phases[i].name);
        x += 28 + 7.0 * (double)strlen(phases[i].name);
    }
}

void trace_picture(const trace_events *events, const trace_event *whole, FILE *out)
{
    picture p = {.events = events, .whole = whole};
    find_span(&p);
    find_rows(&p);
    sort_rows(&p);
    size_t height = TOP + (p.rows + 1) * ROW + 10;
    fprintf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %zu\" width=\"%d\" "
        "height=\"%zu\" font-family=\"system-ui,sans-serif\" font-size=\"12\" "
        "fill=\"#24292f\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
        "<text x=\"8\" y=\"16\" font-weight=\"600\">",
        WIDTH, height, WIDTH, height);
    output_xml(out, whole != NULL ? whole->about : "all");
    fprintf(out, ": %s in all", output_duration((uint64_t)(p.took_us * 1000)).s);
    fputs("</text>\n", out);
    put_legend(&p, out);
    put_axis(&p, height - 10, out);
    for (size_t i = 0; i < events->count; i++) {
        if (is_shown(&p, &events->all[i])) {
            put_span(&p, &events->all[i], out);
        }
    }
    fputs("</svg>\n", out);
    free(p.ranks);
    free(p.trainers);
}
