/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the parts of adapter.h's implementation share. */
#ifndef ADAPTER_INTERNAL_H
#define ADAPTER_INTERNAL_H

#include "adapter/adapter.h"
#include "adapter/file_pages.h"
#include "adapter/tensor_files.h"
#include "peft/peft_config.h"
#include <dirent.h>
#include <jansson.h>
#include <limits.h>
#include <stdatomic.h>
#include <sys/stat.h>

/* ------------------- fanin.json, which says what a directory holds. Pure. */

#define IDENTITY_MAX ((uint64_t)32 << 20) /**< bytes of fanin.json */

/** One of the other files. */
typedef struct identity_file {
    const char *name;
    uint64_t bytes;
    bool in_pieces; /**< the digest is that of its pieces' digests */
    digest content;
} identity_file;

/** Its text, to be freed; NULL: out of memory. */
char *adapter_identity_text(const adapter_identity *identity,
                            const identity_file *files, size_t count);

#define ADAPTER_FILE "adapter_model.safetensors"
#define ADAPTER_CONFIG_FILE "adapter_config.json"
#define IDENTITY_FILE "fanin.json"
#define LOCK_SUFFIX ".fanin-lock" /**< of the hidden file beside the directory */

/** Bytes of a directory's name: what temporary names and locks add to it fits as well. */
#define ADAPTER_NAME_MAX 200

/** Where an adapter directory is to be: its parent, open, and its name there. */
typedef struct adapter_place {
    char *directory; /**< as the caller wrote it, for messages */
    int parent;
    char name[NAME_MAX + 1];
} adapter_place;

/** A file of tensors, mapped. */
typedef struct mapped_file {
    file_memory memory; /**< of one file among several: base is the range's */
    bool anonymous;     /**< the mapping is not the file's: written when published */
    piece_digests *digests;
} mapped_file;

/** A small file that is written when everything else is there. */
typedef struct adapter_text {
    const char *name, *text;
    size_t size;
} adapter_text;

enum { ADAPTER_TEXTS = 2 };

struct adapter {
    adapter_place place;
    int lock;
    adapter_terms terms;

    /* what is to be written */
    tensor_files files;
    peft_config config;      /**< text NULL: there is none */
    adapter_layout *kept;    /**< the client's; NULL: nothing is kept */
    adapter_layout_key key;  /**< of files and config */
    const char *publication; /**< of them, the caller's; NULL: not to be kept */
    bool headed;             /**< the files have their headers */

    int replaced; /**< the directory in the place that is to be replaced, open; -1: none */

    /* the directory that adapter_recall() begins with */
    int old;       /**< -1: there is none */
    bool recalled; /**< the files have its tensors */

    /* the temporary directory and the files in it */
    char temporary[NAME_MAX + 1]; /**< "": none */
    int directory;
    uint8_t *base;       /**< where files.span bytes are mapped */
    uint64_t span;       /**< bytes of that range if it was reserved as a whole */
    mapped_file *mapped; /**< as many as files.count; NULL: none */
    size_t n_mapped;
    worker_pool *pool; /**< of digests */
    file_pages *pages; /**< of files made as bytes come; NULL: all are there */
};

/** "adapter" or "model", for messages. */
const char *adapter_kind(const adapter *a);
/** The small files but fanin.json; their number. */
size_t adapter_texts(const adapter *a, adapter_text out[ADAPTER_TEXTS]);

#define OWNERSHIP_TEXT 128
/** True: another user owns the file or may write to it; @p why_out says it ("belongs to uid 7,
    ..."). False: only we and root could have made it what it is. */
bool ownership_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT]);
/** FANIN_ERR_EXISTS: others may rename what is made there. To be called before anything is. */
fanin_status adapter_check_parent(const adapter_place *place, fanin_error *error);

/** Whether pulls make files of this name. */
bool adapter_makes_file(const char *name);

/* ------------------------------- what a directory holds (adapter_reuse.c) */

/** A file of the directory that no other user can have made what it is; *@p file_out -1: it is not
    there. FANIN_ERR_EXISTS: somebody else could, or it is no file. FANIN_ERR_IO. */
fanin_status adapter_open_file(const adapter *a, int directory, const char *name,
                               int *file_out, uint64_t *size_out, fanin_error *error);
/** Its fanin.json likewise, to be decref'd; NULL with FANIN_OK: it is not there, or not what
    adapter_identity_text() makes. */
fanin_status adapter_read_identity(const adapter *a, int directory, json_t **out,
                                   fanin_error *error);
/** What was to be replaced has the temporary name now: FANIN_ERR_EXISTS if that is something else,
    or if something is in it that no pull has made. */
fanin_status adapter_check_replaced(const adapter *a, fanin_error *error);

/** A place's errors: FANIN_ERR_IO with errno, "<what> '<directory>/<file>'". @p remedy: unless it
    is descriptors that are lacking. */
fanin_status adapter_io_error(const adapter_place *place, int sys_errno,
                              const char *what, const char *file, const char *remedy,
                              fanin_error *error);

/** Takes the lock; *lock_out is to be given to adapter_unlock(). See adapter_open(). */
fanin_status adapter_take_lock(const adapter *a, int *lock_out, fanin_error *error);
/** Removes the lock's file and lets go. */
void adapter_unlock(const adapter_place *place, int lock);

/** A new temporary directory's name. */
void adapter_temporary_name(const adapter_place *place, char out[NAME_MAX + 1]);
/** What is in a directory, from its beginning; NULL with errno. */
DIR *adapter_list(int directory);
/** Removes a directory of ours with the files that a pull makes; false with errno: it is still
    there, also because something else is in it. @p held: it, open, which is closed; -1: it is
    opened. */
bool adapter_remove_directory(int parent, const char *name, int held);
/** Removes what dead processes have left beside the directory, whose lock is held. */
void adapter_remove_leftovers(const adapter *a);

/** FANIN_OK: go on. FANIN_ERR_CANCELLED or FANIN_ERR_TIMEOUT otherwise; @p doing says what
    was interrupted. */
fanin_status adapter_may_go_on(const adapter *a, const char *doing, fanin_error *error);

/** Ends the helper threads, unmaps, removes the temporary directory if there is one. */
void adapter_discard(adapter *a);

/* What a client's last directories held, by the digests that are made anyway: a trainer that
   commits steps and writes nothing is found by those who pull them. One thread. */

#define STEPS_KEPT 32 /**< publications, or forms of one, that are remembered */

/** Zeroed: none. */
struct step_contents {
    struct {
        digest what;    /**< of which publication of which world, and in what form */
        digest content; /**< of all its files of tensors */
        uint64_t first, last; /**< steps that had it */
        unsigned steps;       /**< that were seen; 0: there is none here */
    } list[STEPS_KEPT];
    size_t next;
};

#endif
