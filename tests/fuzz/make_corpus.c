/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the seeds of fuzz_framing, fuzz_messages, fuzz_scan, fuzz_catalog and fuzz_patch below the
   folder named. */
#include "frame.h"
#include "patch.h"
#include "samples.h"
#include <stdio.h>
#include <stdlib.h>

static const char *root;

static void write_seed(const char *target, const char *name, const buffer *head,
                       const uint8_t *data, size_t size)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s/%s", root, target, name);
    FILE *file = fopen(path, "wbe");
    bool good = file != NULL;
    if (good && head)
        good = fwrite(head->data, 1, head->size, file) == head->size;
    good = good && fwrite(data, 1, size, file) == size;
    if (!good || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

static void write_messages(void)
{
    samples all = samples_of_messages();
    for (size_t i = 0; i < all.count; i++) {
        const sample *s = &all.list[i];
        write_seed("messages", s->name, NULL, s->bytes.data, s->bytes.size);
        if (s->bytes.size > FRAME_SIZE)
            write_seed("scan", s->name, NULL, s->bytes.data + FRAME_SIZE,
                       s->bytes.size - FRAME_SIZE);
    }
    samples_free(&all);
}

/* Bit 0 of the first byte: sealed, bit 1: exact; the others are the size of steps. */
static void write_streams(void)
{
    for (uint8_t i = 0; i < 2; i++) {
        buffer all = samples_as_stream(i), head = {0};
        buffer_append(&head, (uint8_t[]){(uint8_t)(i | i << 1 | 7 << 2)}, 1);
        write_seed("framing", i ? "sealed" : "plain", &head, all.data, all.size);
        buffer_free(&all);
        buffer_free(&head);
    }
}

static void write_tables(const samples *all, const buffer *head)
{
    for (size_t i = 0; i < all->count; i++)
        write_seed("catalog", all->list[i].name, head, all->list[i].bytes.data,
                   all->list[i].bytes.size);
}

static void put_number(buffer *b, uint32_t number)
{
    for (int i = 0; i < 4; i++, number >>= 8)
        buffer_append(b, &(uint8_t){(uint8_t)number}, 1);
}

static void put_words(buffer *b, uint32_t first, uint32_t step, uint32_t count)
{
    for (uint32_t i = 0, word = first; i < count; i++, word += step)
        buffer_append(b, ((uint8_t[]){(uint8_t)word, (uint8_t)(word >> 8)}), 2);
}

typedef struct patch_seed {
    const char *name;
    uint8_t head[3];
    uint8_t segments;
    uint16_t first, step; /* words that change, in each segment */
    int8_t told; /* changes more than there are, if they are told by a number */
} patch_seed;

static void put_patch(buffer *b, const patch_seed *s)
{
    static const uint32_t counts[4] = {40, 300, 25, 7};
    uint32_t sum = 0;
    for (size_t i = 0; i < s->segments; i++)
        sum += counts[i];
    if (s->told != 0)
        put_number(b, PATCH_CHANGE * (uint32_t)((int)sum + s->told));
    for (size_t i = 0; i < s->segments; i++)
        put_number(b, counts[i]);
    for (size_t i = 0; i < s->segments; i++) {
        put_words(b, s->first, s->step, counts[i]);
        put_words(b, 0x1234, 0x0f0f, counts[i]);
    }
}

/* fuzz_patch.c says what the first three bytes mean, and which world has how many segments. */
static void write_patches(void)
{
    static const patch_seed seeds[] = {
        {"odd", {0, 1}, 2, 0, 211, 0},
        {"odd_end", {0, 1}, 2, 59990, 1, 0},
        {"odd_last", {0, 1}, 2, 24300, 1, 0},
        {"odd_chain", {0, 3}, 2, 0, 97, 0},
        {"ranks", {1, 1, 2}, 2, 1, 160, 0},
        {"ranks_one_unchanged", {1, 0, 1}, 2, 0, 31, 0},
        {"columns", {2, 2}, 4, 0, 64, 0},
        {"columns_strided", {3, 1}, 4, 2, 33, 0},
        {"cube", {4, 2}, 2, 0, 77, 0},
        {"descending", {2, 1}, 4, 0, 0, 0},
        {"segment_more", {0, 5}, 3, 0, 9, 0},
        {"segment_less", {0, 9}, 1, 0, 9, 0},
        {"told_less", {0, 17}, 2, 0, 9, -1},
        {"told_more", {0, 17}, 2, 0, 9, 1},
    };
    buffer b = {0};
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        buffer_append(&b, seeds[i].head, sizeof seeds[i].head);
        for (int k = 0; k < 3; k++)
            put_patch(&b, &seeds[i]);
        write_seed("patch", seeds[i].name, NULL, b.data, b.size);
        buffer_clear(&b);
    }
    buffer_append(&b, ((uint8_t[]){2, 1, 0}), 3);
    for (int i = 0; i < 4; i++)
        put_number(&b, 0x8000); /* whose changes nobody asks for */
    write_seed("patch", "too_large", NULL, b.data, b.size);
    buffer_free(&b);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    root = argv[1];
    write_messages();
    write_streams();
    write_patches();

    samples keys = samples_of_keys(), boxes = samples_of_boxes();
    samples regions = samples_of_regions();
    const buffer *first = &keys.list[0].bytes;
    buffer head = {0};
    buffer_append(&head, "\0", 1);
    write_tables(&keys, &head);
    head.size = 0;
    buffer_append(
        &head, ((uint8_t[]){1, (uint8_t)first->size, (uint8_t)(first->size >> 8)}), 3);
    buffer_append(&head, first->data, first->size);
    write_tables(&boxes, &head);
    head.size = 0;
    buffer_append(&head, "\2", 1);
    write_tables(&regions, &head);
    buffer_free(&head);
    samples_free(&keys);
    samples_free(&boxes);
    samples_free(&regions);
    return 0;
}
