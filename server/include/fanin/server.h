/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The parameter server: lives inside a trainer rank's process, registers that rank's shards by
 * reference and lets inference workers read them between two updates.
 *
 * Threads: every function may be called from any thread, several at once, unless its comment
 * says otherwise. The library's own threads, a control thread and data_threads data threads, block
 * all signals and sleep when idle; a data thread may have a helper that makes checksums.
 *
 * Fork: a handle that is used in a forked child gives FANIN_ERR_FORKED and touches nothing;
 * the child has no sockets of it, so it keeps no port and no reader of a killed rank (but a
 * child made by clone() itself does).
 *
 * Environment: create servers before other threads use getenv(): loading UCX sets and removes
 * UCX_MEM_EVENTS, UCX_HANDLE_ERRORS and UCX_DEBUG_SIGNO around dlopen(), where unset.
 *
 * A **publication** is a set of tensors that are committed and read together. Its name is
 * "lora:<run>"; "full:<run>" is a name too, for tensors that are no adapter. A run is 1 to 64
 * of A-Z a-z 0-9 . _ - but not "." or "..".
 *
 * Errors come as a status and, if @p error is not NULL, as what happened and what to do about
 * it. Each call lists its own. These two can come of every call that returns a status and are
 * not repeated:
 * - FANIN_ERR_ARGUMENT: the handle is NULL, or the publication's name is none. Fix the call.
 * - FANIN_ERR_FORKED: the handle belongs to the parent process. Create one in the child; that fails
 * so
 *   too if another thread of the parent was loading UCX or OpenSSL, or within OpenSSL, at the fork.
 */
#ifndef FANIN_SERVER_H
#define FANIN_SERVER_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fanin_server fanin_server;

enum {
    /** Listen on a network address. Needs bind (no wildcard), allow and a secret; serves networks
        by the stream path only, unless FANIN_SERVER_TRUSTED_NETWORK is given as well. */
    FANIN_SERVER_OPEN = 1,
    /** Peers in the allowed networks have no CPU budget; other peers do. A peer there that has
        proven itself by the launch's secret or a certificate is offered RDMA. With RDMA it may also
        write registered memory: remote keys of verbs are writable whatever is asked for. */
    FANIN_SERVER_TRUSTED_NETWORK = 2,
    /** Never load UCX: no rdma. */
    FANIN_SERVER_NO_UCX = 4,
    /** Who comes over the Unix socket with the server's uid is its own user, whatever container
        it lives in. Without it a process in another user or pid namespace, or one that the kernel
        does not show, is a stranger, which gets no one-sided path, and one in another mount
        namespace (ipc: for cuda_ipc) gets neither rdma nor cuda_ipc. FANIN_TRUST_CONTAINERS=1 in
        the environment sets it as well */
    FANIN_SERVER_TRUST_CONTAINERS = 8,
    /** An open server may do without the launch's secret, and allow networks that are wider than
        any private one (IPv4 /8, IPv6 /7). Everybody in them can read the weights, and anyone on
        the way can alter them. FANIN_INSECURE=1 in the environment sets it as well */
    FANIN_SERVER_INSECURE = 16,
};

typedef struct fanin_server_config {
    size_t struct_size;
    const char *name; /**< default "lora_param_server"; rank r announces "<name>_<r>" */
    /** required, not all zero: 128 random bits,
        the same on all ranks, new every launch */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint32_t rank;       /**< < world_size */
    uint32_t world_size; /**< 1..65536 */
    const char *bind;    /**< numeric address, default "127.0.0.1" */
    const char *allow;   /**< networks "10.0.0.0/8,fd00::/8", for an open server */
    uint16_t base_port;  /**< listens on base_port + rank; 0: ephemeral, see _port() */
    uint32_t flags;      /**< FANIN_SERVER_... */
    /** the most that readers can delay begin_update; default 1000;
        0: begin_update never waits */
    uint32_t lease_ms;
    /** control and data connections, at least 2; half of them at most are for control, so that
        every client that connects can also pull, and half for one peer (an IPv4 address, a /64 of
        IPv6, this host without its own user's Unix socket). Default 0: as many as the hard
        limit of open files has room for, at most 5120, which is twice what 512 workers take */
    uint32_t max_sessions;
    /** bytes for all sessions together, default 256 MiB; one network peer has half of it at most,
        and all of them three quarters where the own user has a Unix socket, together with what is
        kept for all: chunks of pinned memory, and what parts of catalogs are made from */
    uint64_t max_memory;
    uint32_t idle_ms; /**< a session silent for so long is closed, default 300000 */
    fanin_log_fn log; /**< default none, or what FANIN_LOG says (fanin/log.h) */
    void *log_cookie;
    /** threads that send tensors to readers, at most 16: how many readers, or connections of one, a
        rank serves at the same time. Default 0: a quarter of the CPUs that the process may use, at
        least 1 and at most 4. Each is started when a connection comes that the others would have to
        share, and sleeps while its connections ask for nothing. They share max_memory, of which
        each needs 8 MiB */
    uint32_t data_threads;
    /** thousandths of one CPU that the requests of one peer (see max_sessions) may take, at most
        1000. What it did not take for 20 s it may take at once; beyond that its requests wait. All
        peers together have twice as much. Sending tensors is counted apart (stranger_cpu); the own
        user by its Unix socket and who has proven the launch's secret are not counted. Default 50;
        0: no limit */
    uint32_t peer_cpu;
    /** of each minute, how many ms one network peer's leases may hold begin_update, commit and
        pause up; default 2000. All together have two and a half times as much. A peer is an address
        (all of 127/8 and ::1 one, of IPv6 a /64), without those of a trusted network and those that
        know the secret. When less than lease_ms (or, of a small share, half of it) is left, the
        peer's leases are not waited for until as much is back: what it reads then ends stale when
        an update begins first. 60000: nobody has a share, only lease_ms counts */
    uint32_t stranger_share_ms;
    /** the same for the server's own user on this host, for each address of a trusted network, and,
        with a secret, for everybody; default 60000 */
    uint32_t own_share_ms;
    /** added to the nice value that the creating thread has, for the library's threads that serve
        readers, -20..19; default 0. Below 0 it takes a privilege (CAP_SYS_NICE); without it the
        value stays, and the log says so (event "nice") */
    int32_t nice;
    /** the file with the launch's secret, 64 hexadecimal digits or 32 bytes: TCP connections are by
        TLS 1.3 then, of readers that have the same secret, and others are refused; the Unix socket
        stays as it is. NULL (default): what the environment's FANIN_SECRET_FILE names, if anything;
        "": none. The file, to which symbolic links may lead, belongs to the process's user or to
        root, and others may not use it; its group may read one of root's. It is read once. Needs
        OpenSSL 3 when the server is created */
    const char *secret_file;
    /** thousandths of one CPU that sending tensors to strangers, and making digests for them, may
        take, all together, at most 16000; half of it for one peer. Strangers are as for
        stranger_share_ms. What was not taken for 20 s may be taken at once; beyond that they are
        sent more slowly. Default 0: a tenth of the CPUs that the process may use */
    uint32_t stranger_cpu;
    /** instead of a secret: PEM files of this process's certificate (and what leads from it to an
        authority behind it), its key, and the authorities that the readers' certificates are from.
        TCP connections are by TLS 1.3 then, both ends show a certificate, and this rank's
        names "fanin://JOB/rank/N" among its subject's alternative names, or with a star for N any
        rank, a reader's "fanin://JOB/reader" of the same job; others are refused.
        NULL (default): what the environment's FANIN_TLS_CERT, FANIN_TLS_KEY and FANIN_TLS_CA name,
        unless secret_file is given; "": none. All three or none. Owned as the secret's file is;
        others may not read the key, nor write any. A thread looks at them once a second, and new
        connections use what it has read (event "certificates") */
    const char *tls_cert;
    const char *tls_key; /**< see tls_cert */
    const char *tls_ca;  /**< see tls_cert */
} fanin_server_config;

/** Defaults. @p size is the caller's sizeof(fanin_server_config); never writes past it. */
FANIN_API void fanin_server_config_init(fanin_server_config *config, size_t size);

/**
 * Binds, listens and starts the library's threads. @p config and what it points to are copied;
 * the caller owns *@p server_out and ends it with fanin_server_destroy(). Waits for nobody;
 * takes as long as loading UCX does.
 *
 * May raise the process's soft limit of open files (event "descriptor-limit").
 * Takes those of the descriptors 0 to 2 that are closed, for good, so that no connection and no
 * file gets such a number. Reads and writes of them go on failing with EBADF.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: rank, world size, world id, name, a number or a flag is out of range;
 *   the address is not numeric, a wildcard, not this host's, or not loopback without
 *   FANIN_SERVER_OPEN; an open server without a (valid) allow-list, or, on another address than
 *   loopback and without FANIN_SERVER_INSECURE, without a secret or with a network wider than any
 *   private one. Fix the configuration.
 * - FANIN_ERR_EXISTS: the port is in use; names it. Take another one, or end who has it.
 * - FANIN_ERR_LIMIT: max_sessions needs more open files than the hard limit allows, or no
 *   thread can be started. Raise `ulimit -n` or the limit of threads, or lower max_sessions.
 *   With base_port 0: no port of this host is free. Give one.
 * - FANIN_ERR_IO: the kernel refuses a socket, an epoll set or random bytes; sys_errno says
 *   why.
 * - FANIN_ERR_MEMORY: out of memory.
 * Of a secret or certificates: FANIN_ERR_NOT_FOUND, there is no such file; FANIN_ERR_AUTH, its
 * owner or mode, a certificate that is somebody else's or has expired; FANIN_ERR_ARGUMENT, it holds
 * something else, both or not all are given; FANIN_ERR_IO, it cannot be read;
 * FANIN_ERR_UNSUPPORTED, there is no OpenSSL 3, or none that does TLS 1.3. All say what to do.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_create(
    const fanin_server_config *config, fanin_server **server_out, fanin_error *error);

/** The TCP port that the server listens on; 0 for NULL or in a forked child. Does not block. */
FANIN_API uint16_t fanin_server_port(const fanin_server *server);

/**
 * Registers @p count shards under @p publication, all or none. Creates the publication if it
 * is not there. Descriptions are copied. The boxes' memory stays the caller's and must stay
 * valid until the shard is removed, replaced or the server destroyed. Strides may be negative
 * or non-packed. Memory may be the host's or any CUDA device's, all boxes of one tensor the
 * same; kind and device are found out unless the tensor says them. Device memory that has no
 * IPC handle (PyTorch's expandable_segments, stream-ordered pools, managed memory) is served
 * by stream, which the log tells with the remedy (event "no-ipc"). Inside begin_update ..
 * commit the change belongs to that update; outside of one, new shards become visible with the
 * next commit.
 *
 * Of one publication every rank puts every name, with the same dtype and shape: a rank that holds
 * nothing of a tensor puts it without boxes. Readers refuse ranks that differ (FANIN_ERR_MISMATCH),
 * but only ranks that answer: names that nobody but a dead rank has put are unknown to a reader
 * that never heard of them, and it takes what the others have for all.
 *
 * @p replace false: a name that is there already is an error. @p replace true: an existing
 * shard is exchanged if pointer, allocation, dtype, shape, boxes or strides differ, and
 * nothing happens if all are equal. Outside an update an exchange acts as
 * fanin_server_begin_update() first: the publication is unreadable until the next commit (of a
 * snapshot publication the last snapshot stays readable).
 *
 * Blocks only to exchange shards: at most lease_ms for readers, and until a snapshot's copy of
 * the shards that is under way has ended, at most 60 s.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: a bad name, a name twice in the call, an unknown dtype; a box outside
 *   the global shape, or boxes that overlap; NULL as address of a box that is not empty; a box
 *   that reaches beyond its CUDA allocation; memory of another kind or device than the tensor
 *   says. Fix the tensor that it names.
 * - FANIN_ERR_EXISTS: the shard is there and @p replace is false. Replace or remove it.
 * - FANIN_ERR_LIMIT: more than 2^20 tensors or 2^22 boxes a publication, 4096 publications, or
 *   65536 names of publications in this server's life. Spread the tensors, or remove old
 *   publications.
 * - FANIN_ERR_UNSUPPORTED: the tensor says CUDA memory, and the build or the machine has no
 *   CUDA.
 * - FANIN_ERR_TIMEOUT: a snapshot's copy of the shards has not ended for 60 s; nothing has
 *   changed. Find out what its stream waits for.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_put(fanin_server *server,
                                                         const char *publication,
                                                         const fanin_tensor *tensors,
                                                         size_t count, bool replace,
                                                         fanin_error *error);

/**
 * Removes one shard, or the whole publication if @p name is NULL. Outside an update it acts as
 * begin_update first; when it returns, the library does not touch the memory any more and
 * readers' tokens are void (a snapshot of a shard that was removed alone stays readable until
 * the next commit).
 *
 * Blocks at most lease_ms for readers, and at most 60 s for a snapshot's copy that is under
 * way.
 *
 * Workers of this host may still map CUDA memory that they read by cuda_ipc, and to free
 * memory that another process maps is undefined in CUDA. They close the mapping at their next
 * pull, which finds a new catalog version, and when they end. Who may still map it, and how
 * much, is logged (event "still-mapped"), here, when a shard is replaced and when the server
 * is destroyed; the statistics count such sessions (ipc_mappers).
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: no such publication or shard.
 * - FANIN_ERR_TIMEOUT: a snapshot's copy of the shards has not ended for 60 s; no shard was
 *   removed. Find out what its stream waits for.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_remove(fanin_server *server,
                                                            const char *publication,
                                                            const char *name,
                                                            fanin_error *error);

/**
 * Replaces the publication's metadata (copied; the same on all ranks, travels with the key
 * table; visible from the next commit on). Creates the publication if it is not there. Keys
 * this project gives a meaning, all values strings: "peft_config" (the whole
 * adapter_config.json), or "lora_alpha", "r", "base_model_name_or_path", "use_rslora",
 * "rank_pattern", "alpha_pattern" (JSON objects), "task_type", "lora_dropout", "bias",
 * "target_modules" (JSON), and so on. A worker that makes an adapter directory needs
 * "peft_config", or "base_model_name_or_path" and "lora_alpha".
 *
 * Waits for other calls that change the publication, not for readers.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: a key twice or empty, not UTF-8, more than 1 MiB in all.
 * - FANIN_ERR_LIMIT: as fanin_server_put(), of publications and their names.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_server_set_metadata(fanin_server *server, const char *publication,
                          const fanin_pair *pairs, size_t count, fanin_error *error);

/**
 * Announces that the trainer is about to write @p publication in place. The server tells new
 * readers to wait.
 *
 * Blocks until the running readers are done, at most lease_ms from this call. For readers of one
 * peer it blocks at most for what the peer has left of its share (stranger_share_ms, own_share_ms).
 * Then it voids their tokens. It also waits for what is just being sent: one copy into a socket, or
 * out of a CUDA device, which it gives up after 10 s.
 *
 * Creates the publication if it is not there. Called again during an update it takes a new epoch
 * and returns at once. Of a snapshot publication it returns at once too: readers go on.
 *
 * Errors:
 * - FANIN_ERR_STATE: another thread is in begin_update of the same publication, or it is
 *   paused. Update it from one thread at a time; resume it first.
 * - FANIN_ERR_LIMIT: as fanin_server_put(), of publications and their names.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_begin_update(
    fanin_server *server, const char *publication, fanin_error *error);

enum {
    /** Publish copies instead of the shards' own memory: the server copies them into one of
        two arenas that it owns (host memory, and memory of each CUDA device that holds
        shards), so that readers do not delay the next update and are not overtaken by it.
        Costs twice the shards' memory. To be given at every commit of a publication or at
        none. */
    FANIN_COMMIT_SNAPSHOT = 1,
    /** Return when the commit has taken effect, not before. */
    FANIN_COMMIT_WAIT = 2,
};

/** How a commit is made; grows in later versions. */
typedef struct fanin_commit_options {
    size_t struct_size;
    uint32_t flags; /**< FANIN_COMMIT_... */
    /** snapshots: F32 shards without FANIN_TENSOR_KEEP are published as FANIN_DTYPE_BF16 or
        FANIN_DTYPE_F16, rounded to nearest even; 0: as they are. The same at every commit */
    fanin_dtype cast;
    /** the CUDA stream that writes the shards (any context of the device; not while it is captured
        into a graph); none: all writes are done. Stays the caller's, and may be destroyed when
        the call has returned */
    fanin_stream stream;
} fanin_commit_options;

/** By reference, no cast, no stream, no waiting. @p size: as fanin_server_config_init(). */
FANIN_API void fanin_commit_options_init(fanin_commit_options *options, size_t size);

/**
 * Declares the publication's bytes to be those of @p step and lets readers in; wakes waiting
 * pulls. Everything written by this thread, or ordered before this call, is published.
 * @p options may be NULL: by reference, at once. A first commit needs no begin_update.
 *
 * With a stream the commit takes effect when the work that is on the stream now is done; this
 * call does not wait for that. What comes before that moment and takes the bytes back
 * withdraws the commit: a begin_update (unless it is a snapshot), an abort, a withdrawal, a
 * removal, a shard that is replaced, the server's end. The step is never published then, which
 * the log (event "commit-withdrawn") and the statistics tell. If the stream's device fails,
 * the commit never takes effect (event "commit-failed").
 *
 * Work put on the stream later is ordered behind a snapshot's copy, so a begin_update does not
 * withdraw it: the trainer may run ahead of its stream, and writes the shards on this stream,
 * or on one that it orders behind it. Between begin_update and commit, and after an abort,
 * readers go on with the last snapshot. A snapshot without a stream is complete when the call
 * returns, and so is one that has host memory: that is copied by this thread and a few helpers
 * when the stream has got there. Shards that are being copied can be replaced or removed only
 * when the stream has got there: put and remove wait for that.
 *
 * Blocks: by reference for nobody. A commit whose predecessor has not taken effect waits for
 * it; a snapshot waits at most lease_ms for readers of the arena that it fills, and for its
 * copies as said above; FANIN_COMMIT_WAIT waits for the effect. No wait for a stream is longer
 * than 60 s.
 *
 * Errors. Nothing of the step is published then, and the update is open as before, but where
 * it says otherwise:
 * - FANIN_ERR_ARGUMENT: a step that is not above the last committed one, no such publication,
 *   options that are wrong in themselves, another cast than before, a device that there is
 *   not.
 * - FANIN_ERR_STATE: no update is open, or the publication is paused; snapshot and reference
 *   mixed; a stream that is being captured; overtaken: an update, an abort, a withdrawal or a
 *   removal by another thread came first, which decides.
 * - FANIN_ERR_TIMEOUT: the commit before, or the stream, has not got there for 60 s. With
 *   FANIN_COMMIT_WAIT and a commit that was made, it stays pending. Find out what the stream
 *   waits for.
 * - FANIN_ERR_UNSUPPORTED: a stream, and no CUDA; or a device that cannot run the copy kernel.
 * - FANIN_ERR_TRANSPORT: a CUDA device has failed. The trainer's log says how.
 * - FANIN_ERR_LIMIT: the shards have more than 2^64 bytes, or more than one copy table holds.
 * - FANIN_ERR_MEMORY: out of memory, of the host or, for arenas, of the device that it names.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_server_commit(fanin_server *server, const char *publication, uint64_t step,
                    const fanin_commit_options *options, fanin_error *error);

/**
 * Ends an update without publishing, or withdraws its commit if that has not taken effect: the
 * publication stays unreadable (its bytes may be half-written) until a later begin_update and
 * commit, or a commit alone. Of a snapshot publication the last snapshot stays readable. While
 * it is paused see fanin_server_pause(). Does not block.
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: no such publication.
 * - FANIN_ERR_STATE: no update is open.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_abort_update(
    fanin_server *server, const char *publication, fanin_error *error);

/**
 * Takes a published step back at once, or a commit that waits for its stream, for a caller
 * that finds the bytes written outside of an update: tokens are voided, so pulls that are
 * reading start again, and the publication stays unreadable until a later begin_update and
 * commit, or a commit alone. The step is not shown again. Waits for no reader; blocks until
 * what is just being sent has left, as fanin_server_begin_update().
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: no such publication.
 * - FANIN_ERR_STATE: nothing of it is readable by reference: an update is open, it is paused,
 *   was never committed, or is a snapshot, which nobody can write.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_withdraw(fanin_server *server,
                                                              const char *publication,
                                                              fanin_error *error);

/**
 * Announces that the trainer is about to take the shards' memory away (offload, an engine's
 * sleep, a checkpoint that is loaded over it). Acts as begin_update: blocks until the running
 * readers are done, at most lease_ms, then voids their tokens. Before that it waits for a commit
 * that is pending on a stream, at most 60 s.
 *
 * From then until fanin_server_resume() no thread of the library touches the shards' memory, and
 * none of it is registered for one-sided reads. Workers of this host may still map CUDA memory, see
 * fanin_server_remove(). Every pull, also one that waits already, fails at once with
 * FANIN_ERR_PAUSED, "... is paused: <reason>". Steps stay what they are.
 *
 * Of a snapshot publication the last snapshot, which is memory of the server, stays readable;
 * only the shards are left alone.
 *
 * While it is paused, put and remove are allowed and wait for nobody, set_metadata too;
 * begin_update and commit are FANIN_ERR_STATE. abort_update gives the step up that was
 * published: for a caller that brings other values back and commits them after resume, which
 * then shows nothing until that commit (a snapshot stays readable). Paused again: only the
 * reason changes.
 *
 * @p reason is UTF-8, one sentence that readers get to see, cut to 255 bytes; NULL or "":
 * "trainer memory offloaded".
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: the reason is not UTF-8.
 * - FANIN_ERR_NOT_FOUND: no such publication (none is created).
 * - FANIN_ERR_STATE: an update is open, or another thread is in begin_update. Commit or abort
 *   it first.
 * - FANIN_ERR_TIMEOUT: a commit's stream has not got there for 60 s; nothing has changed. Find
 *   out what it waits for.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_pause(fanin_server *server,
                                                           const char *publication,
                                                           const char *reason,
                                                           fanin_error *error);

/**
 * Ends a pause. What was stable is so again, at the same step under a new epoch, from the
 * shards as they are put now: the caller promises that all their bytes, moved or not, are
 * those of that step. What was not published stays so until a commit. Readers fetch the
 * catalog anew only if shards or metadata changed, or if memory was registered for one-sided
 * reads. Waits for nobody.
 *
 * Errors, after which it stays paused:
 * - FANIN_ERR_NOT_FOUND: no such publication.
 * - FANIN_ERR_STATE: it is not paused.
 * - FANIN_ERR_LIMIT: the shards have more than 2^64 bytes.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_resume(fanin_server *server,
                                                            const char *publication,
                                                            fanin_error *error);

/** Called once per key or publication, under no lock; return false to stop. */
typedef bool (*fanin_name_fn)(void *cookie, const char *name);

/**
 * Names of the publications (@p publication NULL) or of one publication's tensors, in byte
 * order. Waits for calls that change that publication, not for readers.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p fn is NULL.
 * - FANIN_ERR_NOT_FOUND: no such publication.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_list(fanin_server *server,
                                                          const char *publication,
                                                          fanin_name_fn fn,
                                                          void *cookie,
                                                          fanin_error *error);

/** Counters since creation, and gauges. */
typedef struct fanin_server_stats {
    size_t struct_size;
    uint64_t pulls_good;      /**< ends that were confirmed */
    uint64_t pulls_stale;     /**< ends or reads whose epoch had gone */
    uint64_t pulls_abandoned; /**< leases whose session closed before an end */
    uint64_t begins_granted, begins_refused;
    uint64_t bytes_streamed; /**< sent on data connections */
    uint64_t reads_streamed, reads_refused;
    uint64_t updates, commits, aborts;
    uint64_t commits_withdrawn; /**< never published: see fanin_server_commit() */
    uint64_t drain_wait_ns_total, drain_wait_ns_max; /**< spent inside begin_update */
    uint64_t drains_expired; /**< begin_updates that ran into the lease time */
    uint64_t sessions_opened, sessions_refused, protocol_errors;
    uint64_t sessions, leases, publications, tensors, session_memory; /**< now */
    uint64_t ipc_mappers; /**< sessions now that may map CUDA memory of this process */
    uint64_t publications_paused; /**< now */
    uint64_t sessions_evicted;    /**< that were idle, and closed for others */
    uint64_t
        requests_delayed; /**< times that a connection's requests waited for its peer's share of CPU
                               time */
    uint64_t
        log_lines_left_out; /**< that peers caused, told of by their number alone */
    uint64_t
        drains_cut; /**< updates that did not wait for a peer that had had its share */
    uint64_t
        held_up_ns_max;  /**< longest time that one peer's leases held an update up */
    char held_up_by[64]; /**< whose, "": nobody's */
    /** updates and pauses by how long they waited for readers (fanin/types.h) */
    uint64_t drain_waits[FANIN_DRAIN_BUCKETS];
    /** data connections now with bytes to send that the peer, or the network, does not take yet */
    uint64_t sends_waiting;
    uint64_t bytes_tls; /**< of bytes_streamed, those inside TLS */
    /** read by one-sided paths, which this process does not see: as readers told when their pulls
        had ended good, with gaps that were read along, at most the rank's whole publication for
        each; older releases do not tell */
    uint64_t bytes_cma, bytes_rdma, bytes_cuda_ipc;
    /** CPU time of the thread that serves control connections, and of those that send tensors */
    uint64_t control_cpu_ns, data_cpu_ns;
} fanin_server_stats;

/**
 * Fills @p stats up to its struct_size. Does not block.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p stats is NULL, or its struct_size is not set.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_server_get_stats(fanin_server *server, fanin_server_stats *stats);

/**
 * The same as Prometheus text exposition format 0.0.4. Writes at most @p capacity bytes with a
 * final NUL; @p length_out (may be NULL) gets the length that a large enough buffer would
 * hold, without the NUL. @p buffer may be NULL if @p capacity is 0. Does not block.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no buffer although @p capacity is not 0.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_prometheus(fanin_server *server,
                                                                char *buffer,
                                                                size_t capacity,
                                                                size_t *length_out);

/**
 * Stops listening, lets running pulls end for at most @p drain_ms, closes everything, joins
 * the threads, frees, sets *server to NULL. NULL and *server == NULL are fine. After it
 * returns the library does not touch the shards' memory. In a forked child it frees nothing.
 * No other call of this handle may be under way, nor come after it.
 *
 * Blocks at most drain_ms and a little. If CUDA devices do not finish copies out of the shards (of
 * snapshots on a stream, of reads), the call waits at most 70 s more, for all of them together.
 * Then it leaves the copies alone, and what they write to stays allocated (events "commit-stuck",
 * "device-stalled").
 */
FANIN_API void fanin_server_destroy(fanin_server **server, uint32_t drain_ms);

#ifdef __cplusplus
}
#endif
#endif
