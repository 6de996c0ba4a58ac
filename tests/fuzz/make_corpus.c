/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the seeds of fuzz_framing, fuzz_messages, fuzz_scan and fuzz_catalog below the folder
   named. */
#include "frame.h"
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

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    root = argv[1];
    write_messages();
    write_streams();

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
