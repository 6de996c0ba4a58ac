/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/adapter_internal.h"

#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* -------------------------------------------------------- what steps held */

/* Names and shapes are the key table's; of the world, for another launch begins anew. */
static digest what_of(const adapter_identity *identity)
{
    struct {
        uint8_t world_id[16];
        digest publication, key_table;
        uint64_t dtype;
    } what = {.publication =
                  digest_of(identity->publication, strlen(identity->publication)),
              .key_table = identity->key_table,
              .dtype = (uint64_t)identity->dtype};
    memcpy(what.world_id, identity->world_id, sizeof what.world_id);
    return digest_of(&what, sizeof what);
}

/* Files' digests, one after the other. */
static digest content_of(const identity_file *files, size_t count)
{
    digest both[2] = {{{0}}};
    for (size_t i = 0; i < count; i++) {
        if (files[i].in_pieces) {
            both[1] = files[i].content;
            both[0] = digest_of(both, sizeof both);
        }
    }
    return both[0];
}

/* Its place, or that of the oldest, emptied. */
static size_t contents_place(step_contents *c, const digest *what)
{
    for (size_t i = 0; i < STEPS_KEPT; i++) {
        if (c->list[i].steps > 0 && digest_equal(&c->list[i].what, what))
            return i;
    }
    size_t i = c->next;
    c->next = (c->next + 1) % STEPS_KEPT;
    memset(&c->list[i], 0, sizeof c->list[i]);
    c->list[i].what = *what;
    return i;
}

/*
 * Remembers that a step has these files; others than tensors' are not looked at. Steps that had the
 * same bytes, one after another: how many, and the first of them in *first_out; 1: none before
 * it had.
 */
static unsigned step_contents_note(step_contents *c, const adapter_identity *identity,
                                   const identity_file *files, size_t count,
                                   uint64_t *first_out)
{
    digest what = what_of(identity), content = content_of(files, count);
    size_t i = contents_place(c, &what);
    bool same = c->list[i].steps > 0 && digest_equal(&c->list[i].content, &content);
    if (!same) {
        c->list[i].content = content;
        c->list[i].first = identity->step;
        c->list[i].steps = 1;
    } else if (c->list[i].last != identity->step) {
        c->list[i].steps++;
    }
    bool again = same && c->list[i].last == identity->step;
    c->list[i].last = identity->step;
    *first_out = c->list[i].first;
    return again ? 1 : c->list[i].steps;
}

/* ------------------------------------------------------------- publishing */

/* From a filled temporary directory to the one that was asked for. */

/* One write of at most so much; larger ones gain nothing. */
#define WRITE_STEP ((uint64_t)8 << 20)

static int write_whole(int fd, const uint8_t *data, uint64_t size)
{
    int reason = 0;
    file_limit_guard guard = file_limit_enter();
    for (uint64_t done = 0; done < size && reason == 0;) {
        uint64_t left = size - done;
        ssize_t n =
            pwrite(fd, data + done, (size_t)(left < WRITE_STEP ? left : WRITE_STEP),
                   (off_t)done);
        if (n > 0)
            done += (uint64_t)n;
        else if (n == 0 || errno != EINTR)
            reason = n < 0 ? errno : EIO;
    }
    file_limit_leave(&guard);
    return reason;
}

/* Some filesystems cannot sync directories, and need not. */
static int sync_descriptor(int fd)
{
    if (fsync(fd) == 0 || errno == EINVAL || errno == EROFS || errno == ENOTSUP)
        return 0;
    return errno;
}

static fanin_status written(const adapter *a, const char *name, int reason,
                            fanin_error *error)
{
    return reason == 0
               ? FANIN_OK
               : adapter_io_error(&a->place, reason, "cannot write", name,
                                  "free space there, or give a directory elsewhere",
                                  error);
}

static fanin_status write_file(const adapter *a, const char *name, const char *text,
                               size_t size, fanin_error *error)
{
    int fd = openat(a->directory, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                    ADAPTER_FILE_MODE);
    int reason = fd < 0 ? errno : write_whole(fd, (const uint8_t *)text, size);
    if (reason == 0)
        reason = sync_descriptor(fd);
    if (fd >= 0 && close(fd) != 0 && reason == 0)
        reason = errno;
    return written(a, name, reason, error);
}

static fanin_status write_tensors(adapter *a, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < a->n_mapped && status == FANIN_OK; i++) {
        const mapped_file *m = &a->mapped[i];
        int reason = 0;
        if (m->anonymous)
            reason = write_whole(m->memory.file, m->memory.base, m->memory.size);
        if (reason == 0)
            reason = sync_descriptor(m->memory.file);
        status = written(a, a->files.files[i].name, reason, error);
    }
    return status;
}

/* An empty directory that we made before may be private. Another user's has no say. */
static void keep_mode(const adapter *a)
{
    struct stat there;
    if (fstatat(a->place.parent, a->place.name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISDIR(there.st_mode) && there.st_uid == geteuid() &&
        fchmod(a->directory, there.st_mode & 07777 & ~(mode_t)(S_IWGRP | S_IWOTH)) != 0)
        log_write(&a->terms.log, FANIN_LOG_WARNING, "adapter-mode",
                  "the permissions of '%s' could not be kept", a->place.directory);
}

static fanin_status refuse_rename(const adapter *a, fanin_error *error)
{
    int reason = errno;
    error_place where = {.phase = "write",
                         .remedy =
                             "give another directory; nothing is ever overwritten"};
    if (reason == ENOTEMPTY || reason == EEXIST || reason == ENOTDIR)
        return error_set(error, FANIN_ERR_EXISTS, &where,
                         "'%.300s' appeared while its content was pulled",
                         a->place.directory);
    return adapter_io_error(
        &a->place, reason, "cannot rename the finished directory to", NULL,
        reason == EBUSY ? "give a directory below the mount point" : NULL, error);
}

/* False with errno: they did not. On some file systems they cannot. */
static bool exchange_names(const adapter *a)
{
    int parent = a->place.parent;
    return renameat2(parent, a->temporary, parent, a->place.name, RENAME_EXCHANGE) == 0;
}

/* The older directory and what was made change names, and back if the older one is not what it
   was. What comes into it while it has the place is found: nobody finds it by its name after. */
static fanin_status take_place(adapter *a, fanin_error *error)
{
    int parent = a->place.parent;
    bool exchanged = a->replaced >= 0 && exchange_names(a);
    if (a->replaced >= 0 && !exchanged && errno != ENOENT)
        return refuse_rename(a, error);
    if (!exchanged) {
        if (a->replaced >= 0)
            close(a->replaced);
        a->replaced = -1;
        return renameat(parent, a->temporary, parent, a->place.name) == 0
                   ? FANIN_OK
                   : refuse_rename(a, error);
    }
    fanin_status status = adapter_check_replaced(a, error);
    if (status != FANIN_OK && !exchange_names(a))
        a->temporary[0] = '\0'; /* whoever's it is */
    return status;
}

/* Under the temporary name there is the older directory, if there is any. */
static void remove_replaced(adapter *a)
{
    char reason[64];
    if (a->replaced >= 0 &&
        !adapter_remove_directory(a->place.parent, a->temporary, -1))
        log_write(&a->terms.log, FANIN_LOG_WARNING, "adapter-leftover",
                  "could not remove %s beside '%s', which has replaced it (%s): files "
                  "in it that no pull has made stay there",
                  a->temporary, a->place.directory,
                  strerror_r(errno, reason, sizeof reason));
    a->temporary[0] = '\0';
}

static bool is_same_directory(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* A name is anybody's who may write to a directory on the way to it: what bears it now must be the
   directory that was filled. What else is there is another's, and stays. */
static fanin_status look_who_came(adapter *a, fanin_error *error)
{
    struct stat filled, in_parent, by_path;
    if (fstat(a->directory, &filled) == 0 &&
        fstatat(a->place.parent, a->place.name, &in_parent, AT_SYMLINK_NOFOLLOW) == 0 &&
        lstat(a->place.directory, &by_path) == 0 &&
        is_same_directory(&filled, &in_parent) && is_same_directory(&filled, &by_path))
        return FANIN_OK;
    a->temporary[0] = '\0';
    error_place where = {.phase = "write",
                         .remedy = "pull into a directory whose parents only you can "
                                   "write to; see who else writes to these"};
    return error_set(error, FANIN_ERR_EXISTS, &where,
                     "'%.300s' is not the directory that was filled: somebody "
                     "exchanged it, or a directory on the way to it",
                     a->place.directory);
}

/* All that can fail without anybody seeing it happens before the rename. */
static fanin_status appear_in_place(adapter *a, fanin_error *error)
{
    keep_mode(a);
    int reason = sync_descriptor(a->directory);
    if (reason != 0)
        return adapter_io_error(&a->place, reason, "cannot sync", NULL, NULL, error);
    int parent = a->place.parent;
    fanin_status status = take_place(a, error);
    if (status == FANIN_OK)
        status = look_who_came(a, error);
    if (status != FANIN_OK)
        return status;
    reason = sync_descriptor(parent);
    if (reason == 0) {
        remove_replaced(a);
        return FANIN_OK;
    }
    /* Whether it would survive a crash is not known: take it back. */
    unsigned flags = a->replaced >= 0 ? RENAME_EXCHANGE : 0;
    if (renameat2(parent, a->place.name, parent, a->temporary, flags) != 0)
        a->temporary[0] = '\0';
    return adapter_io_error(&a->place, reason, "cannot sync the parent of", NULL, NULL,
                            error);
}

/* What fanin.json says of all the others: tensors, then texts. */
static fanin_status list_files(adapter *a, identity_file *out, size_t *count_out,
                               fanin_error *error)
{
    adapter_text texts[ADAPTER_TEXTS];
    size_t n_texts = adapter_texts(a, texts), n = 0;
    for (size_t i = 0; i < a->n_mapped; i++, n++) {
        out[n] = (identity_file){.name = a->files.files[i].name,
                                 .bytes = a->mapped[i].memory.size,
                                 .in_pieces = true};
        if (!piece_digests_finish(a->mapped[i].digests, &out[n].content))
            return error_set(error, FANIN_ERR_INTERNAL, NULL,
                             "some bytes of '%.300s' were not landed exactly once",
                             a->place.directory);
    }
    for (size_t i = 0; i < n_texts; i++, n++)
        out[n] = (identity_file){.name = texts[i].name,
                                 .bytes = texts[i].size,
                                 .content = digest_of(texts[i].text, texts[i].size)};
    *count_out = n;
    return FANIN_OK;
}

static fanin_status write_texts(adapter *a, const char *identity, fanin_error *error)
{
    adapter_text texts[ADAPTER_TEXTS];
    size_t n = adapter_texts(a, texts);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++)
        status = write_file(a, texts[i].name, texts[i].text, texts[i].size, error);
    return status != FANIN_OK
               ? status
               : write_file(a, IDENTITY_FILE, identity, strlen(identity), error);
}

/* It may be meant, so that it is no error; told at the second step, the fourth, the eighth and so
   on. */
static void tell_same_bytes(const adapter *a, const adapter_identity *identity,
                            const identity_file *files, size_t count)
{
    uint64_t first = 0;
    step_contents *kept = a->terms.contents ? *a->terms.contents : NULL;
    unsigned steps =
        kept ? step_contents_note(kept, identity, files, count, &first) : 1;
    if (steps < 2 || (steps & (steps - 1)) != 0)
        return;
    log_write(&a->terms.log, FANIN_LOG_WARNING, "same-bytes",
              "%s step %" PRIu64 " has the very bytes of step %" PRIu64
              " (%u steps pulled with them): did the optimizer write into the tensors "
              "that are published? nixl-fetch diff --wait-step compares two steps",
              identity->publication, identity->step, first, steps);
}

/* The text of fanin.json, to be freed. @p files: room for all. */
static fanin_status make_identity(adapter *a, const adapter_identity *identity,
                                  identity_file *files, size_t *count_out,
                                  char **text_out, fanin_error *error)
{
    fanin_status status = list_files(a, files, count_out, error);
    if (status == FANIN_OK &&
        !(*text_out = adapter_identity_text(identity, files, *count_out)))
        status = error_set_memory(error);
    return status;
}

fanin_status adapter_publish(adapter *a, const adapter_identity *identity,
                             fanin_error *error)
{
    if (a->n_mapped == 0 || a->temporary[0] == '\0')
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "there is no file to publish");
    file_pages_stop(&a->pages);
    char *text = NULL;
    size_t count = 0;
    identity_file *files = calloc(a->n_mapped + ADAPTER_TEXTS, sizeof files[0]);
    fanin_status status = files
                              ? make_identity(a, identity, files, &count, &text, error)
                              : error_set_memory(error);
    if (status == FANIN_OK)
        status = write_tensors(a, error);
    if (status == FANIN_OK)
        status = write_texts(a, text, error);
    free(text);
    if (status == FANIN_OK)
        status = appear_in_place(a, error);
    if (status == FANIN_OK)
        tell_same_bytes(a, identity, files, count);
    free(files);
    if (status == FANIN_OK && a->config.dropped)
        log_write(&a->terms.log, FANIN_LOG_WARNING, "adapter-config",
                  "'%s' lacks fields of the trainer's configuration that may load code "
                  "or are not known: %s; a pull with trust_config keeps them",
                  a->place.directory, a->config.dropped);
    return status;
}
