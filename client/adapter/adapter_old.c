/* SPDX-License-Identifier: Apache-2.0 */
/* An older directory, whose files are what patches are applied to. Nothing in it is written. It
   counts only as far as no other user can have made it: the ranks' digests, which what comes of it
   has to have, protect from damage, not from who makes bytes for them. */
#include "adapter/adapter_internal.h"

#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

/* Between two steps of a copy the deadline and cancel are looked at. */
#define COPY_STEP ((uint64_t)64 << 20)

/* NULL: it is a directory of this user alone. */
static const char *open_old(adapter *a, const char *directory)
{
    struct stat info;
    char why[OWNERSHIP_TEXT];
    a->old = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (a->old < 0)
        return errno == ENOENT    ? "there is no older directory"
               : errno == ENOTDIR ? "what is given as the older directory is none"
               : errno == EACCES  ? "this user may not read the older directory"
                                  : "the older directory cannot be opened";
    if (fstat(a->old, &info) != 0)
        return "the older directory cannot be looked at";
    if (info.st_uid != geteuid())
        return "the older directory belongs to another user";
    if (ownership_doubtful(&info, why))
        return "the older directory may be written by other users (chmod go-w)";
    return NULL;
}

void adapter_begin_with(adapter *a, const char *directory, json_t **out,
                        const char **because)
{
    *out = NULL;
    *because = open_old(a, directory);
    if (*because)
        return;
    fanin_status status = adapter_read_identity(a, a->old, out, NULL);
    if (!*out)
        *because = status == FANIN_ERR_EXISTS
                       ? "others own or may write fanin.json of the older directory"
                       : "the older directory has no readable fanin.json";
}

/* Whether the file at hand begins with the header of the one to be made. */
static bool has_header(int file, const safetensors_layout *layout)
{
    uint8_t *header = malloc(layout->header_size);
    bool same = header && file_read(file, header, layout->header_size, 0) &&
                memcmp(header, layout->header, layout->header_size) == 0;
    free(header);
    return same;
}

/* Of the disk that is written. */
static bool disk_is_full(int reason)
{
    return reason == ENOSPC || reason == EDQUOT || reason == EFBIG;
}

/* From file to file: the kernel makes the space, and clears no pages before. It never lets both
   have one block, as copy_file_range() may: what is written into such a one by its mapping needs
   another, and is a signal on a full disk. Bytes that were copied, at most @p size; 0: the file
   ends; -1 with errno. */
static ssize_t copy_some(int file, const mapped_file *to, uint64_t at, size_t size)
{
    off_t from = (off_t)at;
    ssize_t n = -1;
    errno = 0;
    if (!to->anonymous && lseek(to->memory.file, from, SEEK_SET) == from)
        n = sendfile(to->memory.file, file, &from, size);
    if (n >= 0 || disk_is_full(errno))
        return n;
    return file_read(file, to->memory.base + at, size, at) ? (ssize_t)size
           : errno == 0                                    ? 0
                                                           : -1;
}

static fanin_status copy_tensors(adapter *a, size_t index, int file,
                                 const char **because, fanin_error *error)
{
    const tensor_file *made = &a->files.files[index];
    uint64_t at = made->layout.header_size, size = made->layout.file_size;
    fanin_status status = FANIN_OK;
    while (at < size && status == FANIN_OK) {
        uint64_t left = size - at, step = left < COPY_STEP ? left : COPY_STEP;
        ssize_t n = copy_some(file, &a->mapped[index], at, (size_t)step);
        if (n < 0 && disk_is_full(errno))
            return adapter_io_error(&a->place, errno, "cannot write", made->name,
                                    "free space there, or give a directory elsewhere",
                                    error);
        if (n <= 0) {
            *because = n == 0 ? "a file of the older directory became shorter"
                              : "a file of the older directory cannot be read";
            return FANIN_OK;
        }
        at += (uint64_t)n;
        status = adapter_may_go_on(a, "copying the older directory for", error);
    }
    return status;
}

static fanin_status recall_file(adapter *a, size_t index, const char **because,
                                fanin_error *error)
{
    const tensor_file *made = &a->files.files[index];
    uint64_t size = 0;
    int file = -1;
    fanin_status status = FANIN_OK;
    fanin_status opened = adapter_open_file(a, a->old, made->name, &file, &size, NULL);
    if (opened != FANIN_OK)
        *because = opened == FANIN_ERR_EXISTS
                       ? "others own or may write a file of the older directory, or it "
                         "is no regular one"
                       : "a file of the older directory cannot be opened";
    else if (file < 0)
        *because = "a file is missing in the older directory";
    else if (size != made->layout.file_size || !has_header(file, &made->layout))
        *because = "the older directory has not the files that are to be made";
    else
        status = copy_tensors(a, index, file, because, error);
    if (file >= 0)
        close(file);
    return status;
}

fanin_status adapter_recall(adapter *a, const char **because, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *because = NULL;
    for (size_t i = 0;
         i < a->n_mapped && !a->recalled && !*because && status == FANIN_OK; i++)
        status = recall_file(a, i, because, error);
    a->recalled = status == FANIN_OK && !*because;
    return status;
}
