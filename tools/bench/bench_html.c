/* SPDX-License-Identifier: Apache-2.0 */
/* A report as one HTML file, which loads nothing: percentiles, histograms, what readers cost. */
#include "bench/bench.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WIDTH = 760,
    LEFT = 20,
    RIGHT = 20,
    TOP = 16,
    HEIGHT = 130,
    BINS = 48,
    ROW = 26
};

static const char style[] =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 "
    "1em;color:#1b1f24;background:#fff}table{border-collapse:collapse;font-variant-"
    "numeric:tabular-nums}td,th{padding:.15em .8em;text-align:right;border-bottom:1px "
    "solid #d5dae0}td:first-child,th:first-child{text-align:left;padding-left:0}"
    "code{overflow-wrap:anywhere}svg{max-width:100%;height:auto}h2{margin-top:2em}"
    "figure{margin:1.5em 0}figcaption{font-weight:600}";

/* Attributes of text and lines stand in the pictures themselves, so that one can be cut out. */
static const char open_svg[] =
    "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
    "role=\"img\" font-family=\"system-ui,sans-serif\" font-size=\"12\" "
    "fill=\"#57606a\">\n";

static void put(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", out);
            break;
        case '<':
            fputs("&lt;", out);
            break;
        case '>':
            fputs("&gt;", out);
            break;
        case '"':
            fputs("&quot;", out);
            break;
        default:
            fputc((unsigned char)*text < 0x20 ? '?' : *text, out);
        }
    }
}

static void put_row(FILE *out, const char *name, const char *value)
{
    fputs("<tr><td>", out);
    put(out, name);
    fputs("</td><td style=\"text-align:left\"><code>", out);
    put(out, value);
    fputs("</code></td></tr>\n", out);
}

static bool has_limit(const bench_limit *l)
{
    return l->problem[0] == '\0' && l->ns.median > 0;
}

/* Pulls move their bytes as the limits do in these. */
static bool has_limits(const char *phase)
{
    return strcmp(phase, "total") == 0 || strcmp(phase, "read") == 0;
}

/* --------------------------------------------------------------------- histograms */

/* Times on a logarithmic axis. */
typedef struct axis {
    double low, high;
} axis;

static double place(axis a, double ns)
{
    double share = (log(ns) - log(a.low)) / (log(a.high) - log(a.low));
    return LEFT + share * (WIDTH - LEFT - RIGHT);
}

static axis axis_of(const bench *b, stats_figure f, bool limits)
{
    axis a = {(double)f.least, (double)f.most};
    for (size_t i = 0; limits && i < b->limits.count; i++) {
        double ns = (double)b->limits.items[i].ns.median;
        if (has_limit(&b->limits.items[i])) {
            a.low = ns < a.low ? ns : a.low;
            a.high = ns > a.high ? ns : a.high;
        }
    }
    a.low = (a.low > 1 ? a.low : 1) / 1.1;
    a.high = (a.high > a.low * 1.2 ? a.high : a.low * 1.2) * 1.1;
    return a;
}

static void put_ticks(FILE *out, axis a)
{
    static const int steps[] = {1, 2, 5};
    double room = 0;
    for (int decade = 0; decade < 20; decade++) {
        for (int i = 0; i < 3; i++) {
            double ns = steps[i] * pow(10, decade);
            double x = ns > a.low && ns < a.high ? place(a, ns) : -1;
            if (x < room) {
                continue;
            }
            room = x + 70;
            fprintf(out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">", x,
                    TOP + HEIGHT + 16);
            put(out, output_duration((uint64_t)ns).s);
            fprintf(out, "</text><path d=\"M%.1f %dv4\" stroke=\"#8c959f\"/>\n", x,
                    TOP + HEIGHT);
        }
    }
}

static void put_bars(FILE *out, axis a, const uint64_t *values, uint32_t count)
{
    uint32_t bins[BINS] = {0}, most = 1;
    double wide = (double)(WIDTH - LEFT - RIGHT) / BINS;
    for (uint32_t i = 0; i < count; i++) {
        double at = (place(a, (double)(values[i] > 0 ? values[i] : 1)) - LEFT) / wide;
        int bin = at < 0 ? 0 : at >= BINS ? BINS - 1 : (int)at;
        bins[bin]++;
        most = bins[bin] > most ? bins[bin] : most;
    }
    for (int i = 0; i < BINS; i++) {
        double tall = (double)bins[i] / most * HEIGHT;
        if (bins[i] > 0) {
            fprintf(out,
                    "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" "
                    "fill=\"#4c8dd6\"><title>%u</title></rect>\n",
                    LEFT + i * wide + .5, TOP + HEIGHT - tall, wide - 1, tall, bins[i]);
        }
    }
}

static const char *const limit_colors[] = {"#c0392b", "#b7791f", "#6b4fbb",
                                           "#2f855a", "#0e7490", "#9d174d"};
enum { N_COLORS = sizeof limit_colors / sizeof limit_colors[0] };

static void limit_name(const bench_limit *l, char *out, size_t size)
{
    snprintf(out, size, "%s", l->name);
    if (l->threads > 0) {
        output_append(out, size, ", %u thread%s", l->threads,
                      l->threads == 1 ? "" : "s");
    }
}

static size_t put_limits(FILE *out, axis a, const bench *b)
{
    size_t n = 0;
    for (size_t i = 0; i < b->limits.count; i++) {
        const bench_limit *l = &b->limits.items[i];
        const char *color = limit_colors[n % N_COLORS];
        char name[160];
        if (!has_limit(l)) {
            continue;
        }
        double x = place(a, (double)l->ns.median);
        limit_name(l, name, sizeof name);
        fprintf(out,
                "<path d=\"M%.1f %dv%d\" stroke=\"%s\" stroke-width=\"2\"/><text "
                "x=\"%d\" y=\"%d\" fill=\"%s\">limit: ",
                x, TOP, HEIGHT, color, LEFT, TOP + HEIGHT + 36 + (int)n * 16, color);
        put(out, name);
        fprintf(out, ", %s</text>\n", output_duration(l->ns.median).s);
        n++;
    }
    return n;
}

static void put_histogram(FILE *out, const bench *b, uint32_t phase)
{
    const char *name = report_phases[phase].name;
    const uint64_t *values = b->samples.values + (size_t)phase * b->samples.capacity;
    stats_figure f = bench_figure_part(&b->samples, phase, 0, b->samples.count);
    bool limits = has_limits(name);
    axis a = axis_of(b, f, limits);
    int tall = TOP + HEIGHT + 28 + (limits ? 16 * (int)b->limits.count : 0);
    fprintf(out, "<figure><figcaption>%s: median %s of %u</figcaption>\n", name,
            output_duration(f.median).s, f.count);
    fprintf(out, open_svg, WIDTH, tall, WIDTH);
    put_bars(out, a, values, b->samples.count);
    fprintf(out, "<path d=\"M%d %dh%d\" stroke=\"#8c959f\"/>\n", LEFT, TOP + HEIGHT,
            WIDTH - LEFT - RIGHT);
    put_ticks(out, a);
    if (limits) {
        put_limits(out, a, b);
    }
    fputs("</svg></figure>\n", out);
}

/* ------------------------------------------------------------------------- tables */

static void put_figure(FILE *out, const char *name, stats_figure f)
{
    const uint64_t values[] = {f.median, f.p90, f.p99, f.least, f.most};
    fputs("<tr><td>", out);
    put(out, name);
    fprintf(out, "</td><td>%u</td>", f.count);
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        fprintf(out, "<td>%s</td>", output_duration(values[i]).s);
    }
    fputs("</tr>\n", out);
}

static void put_figures(FILE *out, const bench *b)
{
    fputs("<h2>Figures</h2>\n<table><tr><th>phase</th><th>samples</th><th>median</th>"
          "<th>p90</th><th>p99</th><th>min</th><th>max</th></tr>\n",
          out);
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        stats_figure f = bench_figure_part(&b->samples, i, 0, b->samples.count);
        if (f.most > 0) {
            put_figure(out, report_phases[i].name, f);
        }
    }
    for (size_t i = 0; i < b->limits.count; i++) {
        char name[160], whole[180];
        if (has_limit(&b->limits.items[i])) {
            limit_name(&b->limits.items[i], name, sizeof name);
            snprintf(whole, sizeof whole, "limit: %s", name);
            put_figure(out, whole, b->limits.items[i].ns);
        }
    }
    fputs("</table>\n", out);
}

static void put_about(FILE *out, const bench *b)
{
    const about *a = &b->about;
    char machine[1200];
    snprintf(machine, sizeof machine, "%s, %u cores, %s, %s%s%s", a->processor,
             a->cores, output_bytes(a->memory_bytes).s, a->kernel,
             a->devices[0] != '\0' ? ", " : "", a->devices);
    fputs("<table>\n", out);
    put_row(out, "command", a->command);
    put_row(out, "date", a->date);
    put_row(out, "machine", machine);
    put_row(out, "library", fanin_version());
    put_row(out, "path", fanin_path_name(b->last.path));
    put_row(out, "bytes of a pull", output_bytes(b->last.bytes).s);
    put_row(out, "tensors", output_number(b->last.tensors).s);
    put_row(out, "ranks", output_number(b->session.target.count).s);
    put_row(out, "bytes",
            !b->pattern.follows ? "not proven: the ranks follow no pattern"
            : b->check_all      ? "every one of each pull proven"
                                : "every one of the first pull proven");
    fputs("</table>\n", out);
}

/* ----------------------------------------------------------------- what readers cost */

static double reach_of(const bench *b, const bench_loss *l)
{
    double reach = 0.0005;
    for (uint32_t i = 0; i < b->n_counts; i++) {
        reach = fmax(reach, fmax(fabs(l->rows[i].least), fabs(l->rows[i].most)));
    }
    return reach;
}

static void put_loss_row(FILE *out, const bench_loss_row *row, uint32_t readers,
                         uint32_t number, double reach)
{
    const double middle = WIDTH / 2.0, scale = (WIDTH / 2.0 - 110) / reach;
    double y = TOP + ROW * (number + .5);
    const char *color = readers == 0 ? "#8c959f" : "#4c8dd6";
    fprintf(out,
            "<text x=\"%d\" y=\"%.1f\">%u reader%s</text><path d=\"M%.1f %.1fH%.1f\" "
            "stroke=\"%s\" stroke-width=\"3\"/><circle cx=\"%.1f\" cy=\"%.1f\" r=\"5\" "
            "fill=\"%s\"/><text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%+.3f "
            "%%</text>\n",
            LEFT, y + 4, readers, readers == 1 ? "" : "s", middle + scale * row->least,
            y, middle + scale * row->most, color, middle + scale * row->loss, y, color,
            WIDTH - RIGHT, y + 4, 100 * row->loss);
}

static void put_loss(FILE *out, const bench *b, const bench_loss *l)
{
    double reach = reach_of(b, l);
    int bottom = TOP + ROW * (int)b->n_counts;
    char where[40] = "host memory";
    if (l->device != DEVICE_HOST) {
        snprintf(where, sizeof where, "GPU %d", l->device);
    }
    fprintf(out,
            "<figure><figcaption>%s, %s, %s: a step takes %s alone; median, least and "
            "most of %d rounds</figcaption>\n",
            where, b->load_name, b->trainer.snapshot ? "snapshots" : "by reference",
            output_duration((uint64_t)l->step_idle_ns).s, b->pairs);
    fprintf(out, open_svg, WIDTH, bottom + 24, WIDTH);
    fprintf(out, "<path d=\"M%.1f %dV%d\" stroke=\"#8c959f\"/>\n", WIDTH / 2.0, TOP,
            bottom);
    for (uint32_t i = 0; i < b->n_counts; i++) {
        put_loss_row(out, &l->rows[i], b->counts[i], i, reach);
    }
    fprintf(
        out,
        "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">0</text><text x=\"%d\" "
        "y=\"%d\" text-anchor=\"middle\">%.2f %% lost</text><text x=\"%d\" y=\"%d\" "
        "text-anchor=\"middle\">%.2f %%</text></svg></figure>\n",
        WIDTH / 2.0, bottom + 16, WIDTH - 110, bottom + 16, 100 * reach, 110,
        bottom + 16, -100 * reach);
}

void bench_tell_html(const bench *b, FILE *out)
{
    fprintf(out,
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width\">"
            "<title>nixl-fetch bench, %s</title><style>%s</style></head><body>\n"
            "<h1>nixl-fetch bench</h1>\n",
            b->about.date, style);
    put_about(out, b);
    put_figures(out, b);
    if (b->n_losses > 0) {
        fputs("<h2>What readers cost a trainer</h2>\n", out);
    }
    for (size_t i = 0; i < b->n_losses; i++) {
        put_loss(out, b, &b->losses[i]);
    }
    fputs("<h2>Pulls</h2>\n", out);
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        if (bench_figure_part(&b->samples, i, 0, b->samples.count).most > 0) {
            put_histogram(out, b, i);
        }
    }
    fputs("</body></html>\n", out);
}
