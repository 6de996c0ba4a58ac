/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/whole_tensor.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void whole_tensor_describe(const whole_tensor *t, uint8_t *memory, fanin_box *box,
                           fanin_tensor *out)
{
    *box = (fanin_box){.address = memory};
    memcpy(box->extent, t->shape, sizeof t->shape);
    *out = (fanin_tensor){.struct_size = sizeof *out,
                          .name = t->name,
                          .dtype = t->dtype,
                          .n_dims = t->n_dims,
                          .boxes = box,
                          .n_boxes = t->bytes > 0,
                          .memory = {FANIN_MEMORY_HOST, -1}};
    memcpy(out->shape, t->shape, sizeof t->shape);
}

fanin_status whole_tensors_pull(fanin_client *client, const fanin_pull_options *options,
                                const whole_tensor *list, size_t count, uint8_t *memory,
                                fanin_result **result_out, fanin_error *error)
{
    fanin_tensor *tensors = output_require(calloc(count + 1, sizeof tensors[0]));
    fanin_box *boxes = output_require(calloc(count + 1, sizeof boxes[0]));
    for (size_t i = 0; i < count; i++) {
        whole_tensor_describe(&list[i], memory, &boxes[i], &tensors[i]);
        memory += list[i].bytes;
    }
    fanin_status status =
        fanin_client_pull(client, options, tensors, count, result_out, error);
    free(tensors);
    free(boxes);
    return status;
}

void whole_tensors_free(whole_tensor *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(list[i].name);
    }
    free(list);
}

uint8_t *whole_tensors_memory(uint64_t bytes, size_t *mapped_out, fanin_error *error)
{
    *mapped_out = bytes > 0 ? (size_t)bytes : 1;
    uint8_t *memory = mmap(NULL, *mapped_out, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        failure_set(error, FANIN_ERR_MEMORY, "free memory",
                    "no memory for %s of tensors", output_bytes(bytes).s);
        return NULL;
    }
    return memory;
}

/* --------------------------------------------------------------------- files */

static bool whole_file_write_all(int file, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = write(file, bytes, size);
        if (n <= 0 && errno != EINTR) {
            return false;
        }
        bytes += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return fsync(file) == 0;
}

/* The file hidden gets the name path, if nothing has it. 0 or errno: EEXIST; hidden may be there
   still. */
static int give_name(const char *hidden, const char *path)
{
    bool named = renameat2(AT_FDCWD, hidden, AT_FDCWD, path, RENAME_NOREPLACE) == 0;
    /* Some file systems know but the other way, NFS among them. */
    named = named || ((errno == EINVAL || errno == ENOSYS) && link(hidden, path) == 0);
    return named ? 0 : errno;
}

/* 0, or an errno. @p hidden is a template of mkostemp(), whose files are the owner's alone. */
static int whole_file_make(const char *path, char *hidden, const void *bytes,
                           size_t size)
{
    int file = mkostemp(hidden, O_CLOEXEC);
    if (file < 0) {
        return errno;
    }
    errno = 0;
    bool good = whole_file_write_all(file, bytes, size);
    int reason = good ? 0 : errno != 0 ? errno : ENOSPC;
    close(file);
    if (good) {
        reason = give_name(hidden, path);
    }
    unlink(hidden);
    return reason;
}

fanin_status whole_file_write(const char *path, const void *bytes, size_t size,
                              fanin_error *error)
{
    char hidden[PATH_MAX];
    sigset_t all, before;
    const char *slash = strrchr(path, '/');
    int folder = slash != NULL ? (int)(slash - path) + 1 : 0;
    int length =
        snprintf(hidden, sizeof hidden, "%.*s.nixl-fetch-XXXXXX", folder, path);
    int reason = length < 0 || length >= (int)sizeof hidden ? ENAMETOOLONG : 0;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before); /* nothing stays half made */
    reason = reason != 0 ? reason : whole_file_make(path, hidden, bytes, size);
    sigprocmask(SIG_SETMASK, &before, NULL);
    return reason == 0
               ? FANIN_OK
               : failure_set(error, reason == EEXIST ? FANIN_ERR_EXISTS : FANIN_ERR_IO,
                             reason == EEXIST ? "remove it, or give another name"
                                              : "give a file in a directory that can "
                                                "be written",
                             "%s: %s", path, strerror(reason));
}
