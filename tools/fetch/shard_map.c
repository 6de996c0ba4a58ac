/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/shard_map.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"

#include <inttypes.h>
#include <langinfo.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { ROWS = 16, MARGIN = 4, HUES = 360, GOLDEN = 137 };

size_t shard_original(const fanin_entry *e, size_t index)
{
    const fanin_owner *o = &e->owners[index];
    for (size_t i = 0; i < index; i++)
        if (memcmp(e->owners[i].offset, o->offset, e->n_dims * sizeof o->offset[0]) ==
                0 &&
            memcmp(e->owners[i].extent, o->extent, e->n_dims * sizeof o->extent[0]) ==
                0)
            return i;
    return index;
}

uint64_t shard_distinct_bytes(const fanin_entry *e)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < e->n_owners; i++)
        bytes += shard_original(e, i) == i ? e->owners[i].bytes : 0;
    return bytes;
}

static bool meet(const fanin_entry *e, const fanin_owner *a, const fanin_owner *b)
{
    bool both = a->bytes > 0 && b->bytes > 0;
    for (uint32_t d = 0; d < e->n_dims && both; d++)
        both = a->offset[d] < b->offset[d] + b->extent[d] &&
               b->offset[d] < a->offset[d] + a->extent[d];
    return both;
}

/* Whether boxes overlap that are no replicas of each other. */
static bool any_meet(const fanin_entry *e, const fanin_owner *const *boxes,
                     size_t count)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < i; j++)
            if (meet(e, boxes[i], boxes[j]))
                return true;
    }
    return false;
}

static int shard_map_ascending(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Elements of dimensions from @p d on that a box holds: slab by slab, between two edges of boxes.
   */
static uint64_t elements_in(const fanin_entry *e, uint32_t d,
                            const fanin_owner *const *boxes, size_t count)
{
    uint64_t elements = 0;
    if (d == e->n_dims || count == 0 || interrupt_requested())
        return count > 0;
    uint64_t *edges = output_require(calloc(2 * count, sizeof *edges));
    const fanin_owner **in = output_require(calloc(count, sizeof(fanin_owner *)));
    for (size_t i = 0; i < count; i++) {
        edges[2 * i] = boxes[i]->offset[d];
        edges[2 * i + 1] = boxes[i]->offset[d] + boxes[i]->extent[d];
    }
    qsort(edges, 2 * count, sizeof *edges, shard_map_ascending);
    for (size_t slab = 0; slab + 1 < 2 * count; slab++) {
        uint64_t from = edges[slab], to = edges[slab + 1];
        size_t n = 0;
        for (size_t i = 0; i < count && from < to; i++) {
            bool holds = boxes[i]->offset[d] <= from &&
                         to <= boxes[i]->offset[d] + boxes[i]->extent[d];
            if (holds)
                in[n++] = boxes[i];
        }
        elements += n > 0 ? (to - from) * elements_in(e, d + 1, in, n) : 0;
    }
    free(in);
    free(edges);
    return elements;
}

shard_faults shard_faults_of(const fanin_entry *e)
{
    const fanin_owner **boxes =
        output_require(calloc(e->n_owners + 1, sizeof(fanin_owner *)));
    uint64_t held = 0, there;
    size_t count = 0;
    for (size_t i = 0; i < e->n_owners; i++) {
        if (e->owners[i].bytes > 0 && shard_original(e, i) == i) {
            boxes[count++] = &e->owners[i];
            held += e->owners[i].bytes;
        }
    }
    there = held;
    if (any_meet(e, boxes, count))
        there = elements_in(e, 0, boxes, count) * fanin_dtype_bits(e->dtype) / 8;
    free(boxes);
    return (shard_faults){.gaps = e->bytes - there, .overlaps = held - there};
}

shard_style shard_style_of(bool no_color)
{
    struct winsize window;
    const char *plain = getenv("NO_COLOR");
    bool terminal = isatty(STDOUT_FILENO) == 1;
    bool known =
        terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0;
    return (shard_style){.columns = known ? window.ws_col : 80,
                         .utf8 = strcmp(nl_langinfo(CODESET), "UTF-8") == 0,
                         .color = terminal && !no_color &&
                                  (plain == NULL || plain[0] == '\0')};
}

/* A tensor as a sheet: of a vector one row, of a scalar one element. */
typedef struct sheet {
    const fanin_entry *e;
    uint64_t high, wide;
    uint32_t across; /**< the dimension to the right */
} sheet;

static sheet sheet_of(const fanin_entry *e)
{
    return (sheet){.e = e,
                   .high = e->n_dims > 1 ? e->shape[0] : 1,
                   .wide = e->n_dims > 1    ? e->shape[1]
                           : e->n_dims == 1 ? e->shape[0]
                                            : 1,
                   .across = e->n_dims > 1 ? 1 : 0};
}

/* Where a box lies on the sheet. */
typedef struct box {
    uint64_t row, column, rows, columns;
} box;

static box box_of(const sheet *s, const fanin_owner *o)
{
    return (box){.row = s->e->n_dims > 1 ? o->offset[0] : 0,
                 .column = s->e->n_dims > 0 ? o->offset[s->across] : 0,
                 .rows = s->e->n_dims > 1 ? o->extent[0] : 1,
                 .columns = s->e->n_dims > 0 ? o->extent[s->across] : 1};
}

/* The first owner of an element in the middle of further dimensions; NULL: nobody. */
static const fanin_owner *owner_at(const sheet *s, uint64_t row, uint64_t column)
{
    for (size_t i = 0; i < s->e->n_owners; i++) {
        const fanin_owner *o = &s->e->owners[i];
        box b = box_of(s, o);
        bool in = row - b.row < b.rows && column - b.column < b.columns;
        for (uint32_t d = 2; d < s->e->n_dims; d++)
            in = in && s->e->shape[d] / 2 - o->offset[d] < o->extent[d];
        if (in)
            return o;
    }
    return NULL;
}

static char glyph_of(uint32_t rank)
{
    static const char glyphs[] =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    return rank < sizeof glyphs - 1 ? glyphs[rank] : '#';
}

static void put_cell(FILE *stream, const fanin_owner *o, const shard_style *style)
{
    static const int colors[] = {41, 42, 43, 44, 45, 46};
    if (o == NULL)
        fputs(style->utf8 ? "\xc2\xb7" : ".", stream);
    else if (style->color)
        fprintf(stream, "\033[30;%dm%c\033[0m",
                colors[o->rank % (sizeof colors / sizeof colors[0])],
                glyph_of(o->rank));
    else
        fputc(glyph_of(o->rank), stream);
}

static void put_edge(FILE *stream, const shard_style *style, uint64_t cells, bool top)
{
    const char *left = !style->utf8 ? "+" : top ? "\xe2\x94\x8c" : "\xe2\x94\x94";
    const char *right = !style->utf8 ? "+" : top ? "\xe2\x94\x90" : "\xe2\x94\x98";
    fprintf(stream, "  %s", left);
    for (uint64_t i = 0; i < cells; i++)
        fputs(style->utf8 ? "\xe2\x94\x80" : "-", stream);
    fprintf(stream, "%s\n", right);
}

/* The element in the middle of cell @p i of @p cells. */
static uint64_t shard_map_middle(uint64_t i, uint64_t cells, uint64_t elements)
{
    return (uint64_t)(((double)i + 0.5) * (double)elements / (double)cells);
}

void shard_map_draw(FILE *stream, const fanin_entry *e, const shard_style *style)
{
    const sheet s = sheet_of(e);
    const char *side = style->utf8 ? "\xe2\x94\x82" : "|";
    uint64_t room = (uint64_t)style->columns - 2 * MARGIN;
    uint64_t wide = s.wide < room ? s.wide : room, high = s.high < ROWS ? s.high : ROWS;
    put_edge(stream, style, wide, true);
    for (uint64_t i = 0; i < high && wide > 0; i++) {
        fprintf(stream, "  %s", side);
        for (uint64_t j = 0; j < wide; j++)
            put_cell(stream,
                     owner_at(&s, shard_map_middle(i, high, s.high),
                              shard_map_middle(j, wide, s.wide)),
                     style);
        fprintf(stream, "%s\n", side);
    }
    put_edge(stream, style, wide, false);
    fprintf(stream, "  %" PRIu64 " rows down, %" PRIu64 " columns to the right%s\n",
            s.high, s.wide, e->n_dims > 2 ? ", the middle of further dimensions" : "");
}

/* ------------------------------------------------------------------------------ SVG */

enum { SVG_SIDE = 960, SVG_EDGE = 40 };

/* UTF-8 as the content of an element; what XML cannot have becomes blanks. */
static void put_xml(FILE *stream, const char *text)
{
    while (*text != '\0') {
        if (strncmp(text, "\xef\xbf\xbe", 3) == 0 ||
            strncmp(text, "\xef\xbf\xbf", 3) == 0) { /* U+FFFE and U+FFFF */
            fputc(' ', stream);
            text += 3;
            continue;
        }
        if (strchr("&<>\"", *text) != NULL)
            fprintf(stream, "&#%d;", *text);
        else
            fputc((unsigned char)*text < 0x20 ? ' ' : *text, stream);
        text++;
    }
}

/* What others wrote, as a terminal would get it, and as XML. */
static void put_text(FILE *stream, const char *text)
{
    char *safe = NULL;
    size_t size = 0;
    FILE *memory = output_require(open_memstream(&safe, &size));
    terminal_put(memory, text);
    fclose(memory);
    put_xml(stream, safe);
    free(safe);
}

static void shard_map_put_box(FILE *stream, const sheet *s, const fanin_owner *o,
                              double height)
{
    box b = box_of(s, o);
    double x = (double)b.column / (double)s->wide * SVG_SIDE;
    double y = (double)b.row / (double)s->high * height;
    double w = (double)b.columns / (double)s->wide * SVG_SIDE;
    double h = (double)b.rows / (double)s->high * height;
    fprintf(stream,
            "<g><title>rank %u: offset %s, extent %s, %" PRIu64 " bytes</title>"
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" "
            "fill=\"hsl(%u,60%%,70%%)\" fill-opacity=\"0.7\" stroke=\"#333\"/>"
            "<text x=\"%.2f\" y=\"%.2f\">%u</text></g>\n",
            o->rank, output_dims(o->offset, s->e->n_dims).s,
            output_dims(o->extent, s->e->n_dims).s, o->bytes, SVG_EDGE + x,
            SVG_EDGE + y, w, h, o->rank * GOLDEN % HUES, SVG_EDGE + x + 4,
            SVG_EDGE + y + 14, o->rank);
}

void shard_map_svg(FILE *stream, const char *key, const fanin_entry *e)
{
    const sheet s = sheet_of(e);
    double ratio = s.wide > 0 ? (double)s.high / (double)s.wide : 1.0;
    double height = SVG_SIDE * (ratio < 0.05 ? 0.05 : ratio > 1.0 ? 1.0 : ratio);
    fprintf(stream,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"12\">\n<text x=\"%d\" y=\"24\">",
            SVG_SIDE + 2 * SVG_EDGE, height + 2 * SVG_EDGE, SVG_EDGE);
    put_text(stream, key);
    fprintf(stream, " %s %s</text>\n", fanin_dtype_name(e->dtype),
            output_dims(e->shape, e->n_dims).s);
    fprintf(stream,
            "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%.2f\" fill=\"none\" "
            "stroke=\"#c00\" stroke-dasharray=\"4\"/>\n",
            SVG_EDGE, SVG_EDGE, SVG_SIDE, height);
    for (size_t i = 0; i < e->n_owners && s.wide > 0 && s.high > 0; i++)
        if (shard_original(e, i) == i)
            shard_map_put_box(stream, &s, &e->owners[i], height);
    fputs("</svg>\n", stream);
}
