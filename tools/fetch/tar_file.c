/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/tar_file.h"

#include <inttypes.h>
#include <string.h>

enum { BLOCK = 512 };

/* A header's fields, as POSIX has them. */
typedef struct header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type;
    char link[100], magic[6], version[2], user[32], group[32], major[8], minor[8];
    char prefix[155], rest[12];
} header;

_Static_assert(sizeof(header) == BLOCK, "a tar header is a block");

void tar_file_add(FILE *archive, const char *name, uint64_t unix_s, const void *bytes,
                  size_t size)
{
    static const char zeros[BLOCK];
    header h = {.type = '0', .magic = "ustar", .version = {'0', '0'}};
    unsigned sum = 0;
    snprintf(h.name, sizeof h.name, "%s", name);
    snprintf(h.mode, sizeof h.mode, "%07o", 0600U);
    snprintf(h.uid, sizeof h.uid, "%07o", 0U);
    snprintf(h.gid, sizeof h.gid, "%07o", 0U);
    snprintf(h.size, sizeof h.size, "%011" PRIo64, (uint64_t)size & 077777777777);
    snprintf(h.mtime, sizeof h.mtime, "%011" PRIo64, unix_s & 077777777777);
    memset(h.checksum, ' ', sizeof h.checksum);
    for (size_t i = 0; i < sizeof h; i++) {
        sum += ((const unsigned char *)&h)[i];
    }
    snprintf(h.checksum, sizeof h.checksum, "%06o", sum & 0777777);
    fwrite(&h, sizeof h, 1, archive);
    fwrite(bytes, 1, size, archive);
    fwrite(zeros, 1, (BLOCK - size % BLOCK) % BLOCK, archive);
}

void tar_file_end(FILE *archive)
{
    static const char zeros[2 * BLOCK];
    fwrite(zeros, 1, sizeof zeros, archive);
}
