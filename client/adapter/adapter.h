/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A directory of tensors, a PEFT adapter's or a model's: made under a temporary name beside its
 * place, published by rename. The only part of the client that knows what LoRA is.
 *
 * Life: adapter_open (lock, nothing read yet) -> adapter_prepare (layout of the files from the
 * key table, configuration checked) -> adapter_reusable (step known) or adapter_map (files
 * allocated and mapped, side by side in one range of addresses) -> the pull fills ->
 * adapter_publish. adapter_close at any time removes what was not published.
 */
#ifndef ADAPTER_H
#define ADAPTER_H

#include "adapter/spare_file.h"
#include "adapter/tensor_files.h"
#include "catalog.h"
#include "clock.h"
#include "log.h"
#include "peft/peft_config.h"
#include <fanin/client.h>
#include <jansson.h>

/* What an adapter's file and configuration will be, kept from one pull to the next: tens of
   thousands of names are not sorted and written anew for each step. One thread. */

/** What it follows from. */
typedef struct adapter_layout_key {
    digest keys; /**< key_table's id: names, shapes, metadata */
    fanin_dtype dtype;
    bool trust_config;
} adapter_layout_key;

/** Of one adapter at a time; zeroed: none. */
typedef struct adapter_layout {
    bool there;
    adapter_layout_key key;
    char publication[FANIN_MAX_NAME + 1];
    tensor_files files; /**< with headers */
    peft_config config;
} adapter_layout;

/** Whether @p l (may be NULL) is what @p key and @p publication lead to. */
bool adapter_layout_fits(const adapter_layout *l, const adapter_layout_key *key,
                         const char *publication);
/** Frees *l. NULL is fine. */
void adapter_layout_free(adapter_layout **l);

/* ------------------------------ config.json of a model's directory. Pure. */

#define MODEL_CONFIG_FILE "config.json"

/** The pair of a publication's metadata that holds the model's configuration. */
#define MODEL_CONFIG_PAIR "config"

/**
 * The text of config.json: that pair of @p keys as it is, if it names no code that a reader could
 * load (auto_map, custom_pipelines, at any depth) or is @p trusted; else without that. No such
 * pair: out->text is NULL. To be freed with peft_config_free(). FANIN_ERR_MISMATCH (it is no JSON
 * object), FANIN_ERR_MEMORY.
 */
fanin_status model_config_make(const key_table *keys, bool trusted, peft_config *out,
                               fanin_error *error);

typedef struct adapter adapter;
typedef struct step_contents step_contents; /* adapter/adapter_internal.h */

/** A rank that has the step, by one life of its process. */
typedef struct identity_rank {
    bool has_step; /**< false: the rest says nothing */
    uint32_t rank;
    uint8_t incarnation[16];
} identity_rank;

/** What a directory holds. */
typedef struct adapter_identity {
    uint8_t world_id[16];
    const char *publication;
    uint64_t step;
    digest key_table;
    fanin_dtype dtype; /**< what F32 tensors were converted to; 0: nothing */
    /** who has the step now. One that was started again may have other bytes under its number */
    const identity_rank *ranks;
    size_t n_ranks;
    /** whether those of ranks for which @p which is true have all bytes between them */
    bool (*suffice)(void *cookie, const bool *which);
    void *cookie;
    /* how it came; says nothing of what it is */
    fanin_checksums transport_checksums;
    bool verified;
    json_t *base; /**< what patches may be applied to later; NULL: not known */
} adapter_identity;

/** What is to be made, and who may break it off. What it points to stays until adapter_close(). */
typedef struct adapter_terms {
    const char *directory;
    deadline at;
    bool (*cancelled)(void *cookie); /**< NULL: it never is */
    void *cookie;
    logger log;
    /** a model's: files of at most max_file_bytes of tensors each (0: 5 GB), an index if there are
        several, config.json if the metadata have one */
    bool is_model;
    uint64_t max_file_bytes;
    fanin_dtype dtype; /**< what F32 tensors are written as; 0: F32 */
    bool trust_config; /**< the configuration keeps all fields of the trainer's */
    /* What the client keeps of one directory for the next: NULL: nothing, else *it is made if it is
       NULL. */
    /** what the last adapter was laid out as, which adapter_prepare() takes if it fits, and
        adapter_close() leaves its own; not a model's */
    adapter_layout **layout;
    /** what the last directories held: adapter_publish() warns (event "same-bytes") of a step that
        has another step's bytes; to be freed by free() */
    step_contents **contents;
    spare_file **spare; /**< adapter_map() takes it if it fits; never made */
} adapter_terms;

/**
 * Takes the lock of the directory (a lock file beside it, flock; removed when closed), waiting at
 * most until terms->at for another process that makes the same directory; removes what dead
 * processes have left in the parent. Checks that the parent exists and can be written.
 * FANIN_ERR_TIMEOUT, FANIN_ERR_IO, FANIN_ERR_ARGUMENT, FANIN_ERR_EXISTS (the lock file may be
 * another user's), FANIN_ERR_CANCELLED.
 */
fanin_status adapter_open(const adapter_terms *terms, adapter **out,
                          fanin_error *error);

/**
 * Names, order, headers and offsets of the safetensors files and the text of the
 * configuration. May be called again with another table (a catalog that moved).
 * *to_of_key_out: where in the range each key's bytes go, owned by the adapter; *span_out: bytes
 * of the range (of one file, its size).
 * FANIN_ERR_MISMATCH (metadata contradict tensors; two keys with one name on disk; names key
 * and remedy), FANIN_ERR_LIMIT (too many files), FANIN_ERR_MEMORY.
 */
fanin_status adapter_prepare(adapter *a, const key_table *keys, const char *publication,
                             const uint64_t **to_of_key_out, uint64_t *span_out,
                             fanin_error *error);

/**
 * FANIN_OK with *reuse_out true: the directory holds this identity, its files have their digests
 * and are those that adapter_prepare() made, and no other user can have put it there or
 * can change it; false: it is absent, or empty and ours, or holds the step of ranks that were
 * started again since, which is logged (event "started-again"): adapter_publish() replaces it.
 * FANIN_ERR_EXISTS: anything else (says what and that it is never overwritten). Reads the files
 * whole, in threads, until the deadline.
 * FANIN_ERR_IO, FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED.
 */
fanin_status adapter_reusable(adapter *a, const adapter_identity *identity,
                              bool *reuse_out, fanin_error *error);

/**
 * The directory whose files adapter_recall() begins with. If it is the place's own, it is no
 * obstacle to adapter_reusable(), and adapter_publish() replaces it, at one moment. *@p out: its
 * fanin.json, to be decref'd; NULL: *@p because says why nothing can begin with it. After
 * adapter_open().
 */
void adapter_begin_with(adapter *a, const char *directory, json_t **out,
                        const char **because);
/** The mapped files get the tensors of the older ones, unless they have them; *@p because: those
    are not alike, or cannot be read. The files are undefined then. After adapter_map().
    FANIN_ERR_IO (no room), FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED. */
fanin_status adapter_recall(adapter *a, const char **because, fanin_error *error);

/** FANIN_ERR_LIMIT if the files that were prepared have more than @p max_bytes; 0: an adapter's
    more than a quarter of the size (not of the free space, which other adapters take) of the
    directory's file system, a model's as much as there is room for. */
fanin_status adapter_check_size(const adapter *a, uint64_t max_bytes,
                                fanin_error *error);
/** A spare file that fits; else creates and maps the files, headers in place. A disk that is too
    full, or a limit of file sizes or descriptors, is FANIN_ERR_IO here if that is known already.
    Kept between attempts of one pull. */
fanin_status adapter_map(adapter *a, uint8_t **base_out, fanin_error *error);
/** Bytes [offset, offset+length) of the range are about to be written: makes their space. Not
    asked, a full disk would be SIGBUS. FANIN_ERR_IO, FANIN_ERR_MEMORY; of many bytes also
    FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED. Thread: the pulling one. */
fanin_status adapter_need(adapter *a, uint64_t offset, uint64_t length,
                          fanin_error *error);
/** Whether CUDA's copy engine may write what is mapped. */
bool adapter_is_pinned(const adapter *a);

/** The pull tells what has landed: bytes [offset, offset+length) of the range, of one file, are
    final unless the attempt is given up. Digests of whole 4 MiB pieces are made on the way, in
    threads of the adapter's. Thread: the pulling one. */
void adapter_landed(adapter *a, uint64_t offset, uint64_t length);
/** The same of DIGEST_PIECE bytes of an adapter's file, from a multiple of that on, whose digest is
    @p known: nobody reads them again. */
void adapter_digested(adapter *a, uint64_t offset, const digest *known);
/** What adapter_recall() has brought, and patches have changed, is final: all has landed. Thread:
    the pulling one. */
void adapter_recalled(adapter *a);
/** A new attempt: everything will land again. */
void adapter_restart(adapter *a);

/** Waits for the digests, writes the configuration and fanin.json, fsyncs files and directory,
    renames, fsyncs the parent. FANIN_ERR_IO, EXISTS, INTERNAL (bytes that never landed). */
fanin_status adapter_publish(adapter *a, const adapter_identity *identity,
                             fanin_error *error);
/** Starts making the next spare file beside the directory, pinned if @p g is not NULL, unless
    *spare fits already; hands it the published file's mapping to let go of. If nothing was made,
    for another process has brought the adapter, *spare goes: that process has one. Last before
    adapter_close(). */
void adapter_make_spare(adapter *a, spare_file **spare, gpu *g);
void adapter_close(adapter **a);

/** What guarded a pull's bytes on their way: true, false or "local"; NULL: out of memory. */
json_t *guard_json(fanin_checksums guard);

#endif
