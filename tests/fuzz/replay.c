/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a fuzz target without libFuzzer: once for each file of the directory named, and for
   some hundreds of damaged copies of each, the same ones every time. */
#include "fuzz.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUT_MAX ((size_t)1 << 20)

static int mutants = 300; /* of each file */
static uint64_t random_state = 1;

static uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* The target gets its own allocation of exactly that size, so that a read beyond it is seen
   by AddressSanitizer and valgrind. */
static void run_once(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) {
        fprintf(stderr, "out of memory\n");
        exit(1);
    }
    if (size)
        memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void run_mutants(uint8_t *data, size_t size, uint8_t *scratch)
{
    for (int i = 0; i < mutants && size > 0; i++) {
        size_t length = random_next() % 4 ? size : random_next() % (size + 1);
        memcpy(scratch, data, length);
        for (uint64_t edits = random_next() % 4; length > 0 && edits > 0; edits--) {
            static const uint8_t telling[] = {0x00, 0x01, 0x7f, 0x80, 0xc0, 0xdf, 0xff};
            uint64_t choice = random_next();
            scratch[random_next() % length] =
                choice & 1 ? (uint8_t)(choice >> 8)
                           : telling[(choice >> 8) % sizeof(telling)];
        }
        run_once(scratch, length);
    }
}

static bool run_file(const char *path, uint8_t *data, uint8_t *scratch)
{
    FILE *file = fopen(path, "rbe");
    if (!file) {
        perror(path);
        return false;
    }
    size_t size = fread(data, 1, INPUT_MAX, file);
    bool whole = !ferror(file) && fgetc(file) == EOF;
    fclose(file);
    if (!whole) {
        fprintf(stderr, "%s: unreadable or larger than %zu bytes\n", path, INPUT_MAX);
        return false;
    }
    run_once(data, size);
    run_mutants(data, size, scratch);
    return true;
}

int main(int argc, char **argv)
{
    if (argc != 2 && argc != 3) {
        fprintf(stderr, "usage: %s CORPUS [MUTANTS]\n", argv[0]);
        return 2;
    }
    if (argc == 3)
        mutants = atoi(argv[2]);
    struct dirent **names = NULL;
    int count = scandir(argv[1], &names, NULL, alphasort);
    if (count < 0) {
        perror(argv[1]);
        return 1;
    }
    uint8_t *data = malloc(INPUT_MAX), *scratch = malloc(INPUT_MAX);
    bool good = data && scratch;
    int files = 0;
    for (int i = 0; i < count; i++) {
        if (good && names[i]->d_name[0] != '.') {
            char path[4096];
            snprintf(path, sizeof path, "%s/%s", argv[1], names[i]->d_name);
            good = run_file(path, data, scratch);
            files++;
        }
        free(names[i]);
    }
    free(names);
    free(data);
    free(scratch);
    printf("%d inputs, %d mutants each\n", files, mutants);
    return good && files > 0 ? 0 : 1;
}
