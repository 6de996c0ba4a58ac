/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The parameter server. It lives inside a trainer rank's process and registers that rank's shards
 * by reference. Inference workers read the shards between two updates.
 *
 * Threads: any thread may call any function, several at once, unless its comment says otherwise.
 * The library has a control thread and data_threads data threads. A data thread may have a helper
 * that makes checksums. All of them block all signals and sleep when idle.
 *
 * Environment, fork: see fanin/types.h. A forked child has no sockets of the server. So the child
 * keeps neither the port nor the readers of a killed rank. A child made by clone() itself does.
 *
 * A **publication** is a set of tensors that are committed and read together. Its name is
 * "lora:<run>", or "full:<run>" for tensors that are no adapter. A run has 1 to 64 characters: A-Z,
 * a-z, 0-9, dot, underscore and hyphen. It is not "." or "..".
 *
 * A **peer** is one place that readers connect from: an IPv4 address, a /64 of IPv6 or this host
 * (127/8 and ::1). The server's own user is a peer of its own, if it connects by the Unix socket. A
 * **stranger** is a peer other than the own user, of a server that has no secret and no
 * certificates. With FANIN_SERVER_TRUSTED_NETWORK no peer is a stranger.
 *
 * Errors come as a status. If @p error is not NULL, it says what happened and what to do. Each call
 * lists its own errors. Every call that returns a status can also give these:
 * - FANIN_ERR_ARGUMENT: the handle is NULL, or the publication's name is invalid. Fix the call.
 * - FANIN_ERR_FORKED: the handle belongs to the parent process (fanin/types.h).
 */
#ifndef FANIN_SERVER_H
#define FANIN_SERVER_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fanin_server fanin_server;

enum {
    /** Listen on a network address. Needs bind (no wildcard), allow, and a secret or
        certificates. Networks get the stream path only, unless FANIN_SERVER_TRUSTED_NETWORK is
        given as well. */
    FANIN_SERVER_OPEN = 1,
    /** Peers in the allowed networks are no strangers. A peer that has proven itself by the
        secret or a certificate is offered RDMA. With RDMA it may also write registered memory:
        remote keys of verbs are writable whatever the server asks for. */
    FANIN_SERVER_TRUSTED_NETWORK = 2,
    /** Never load UCX: no rdma. */
    FANIN_SERVER_NO_UCX = 4,
    /** A process that connects by the Unix socket with the server's uid is the own user, in
        whatever container. Without the flag, another user or pid namespace makes the process
        another user, and so does a process that the kernel does not show. Such a process gets no
        one-sided path. A process in another mount namespace gets neither rdma nor cuda_ipc, and
        one in another ipc namespace no cuda_ipc. FANIN_TRUST_CONTAINERS=1 in the environment
        sets the flag as well */
    FANIN_SERVER_TRUST_CONTAINERS = 8,
    /** An open server may do without secret and certificates, and may allow networks wider than
        any private one (IPv4 /8, IPv6 /7). Everybody in the networks can then read the weights.
        Anyone on the way can alter them. FANIN_INSECURE=1 in the environment sets the flag as
        well */
    FANIN_SERVER_INSECURE = 16,
    /** The server is a relay, rank 0 of 1: a reader that hands on what it has read. It plays no
        rank, so readers that want ranks refuse it by name */
    FANIN_SERVER_RELAY = 32,
    /** Readers may not hand on to each other what they have read: offers are refused */
    FANIN_SERVER_NO_RELAYS = 64,
};

typedef struct fanin_server_config {
    size_t struct_size;
    const char *name; /**< default "lora_param_server"; rank r announces "<name>_<r>" */
    /** required, not all zero: 128 random bits. All ranks give the same, and every launch a new
        one */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint32_t rank;       /**< < world_size */
    uint32_t world_size; /**< 1..65536 */
    const char *bind;    /**< numeric address, default "127.0.0.1" */
    const char *allow;   /**< networks "10.0.0.0/8,fd00::/8", for an open server */
    uint16_t base_port;  /**< listens on base_port + rank; 0: ephemeral, see _port() */
    uint32_t flags;      /**< FANIN_SERVER_... */
    /** the most that readers can delay begin_update; default 1000; 0: begin_update never waits */
    uint32_t lease_ms;
    /** control and data connections, at least 2. At most half of them are control connections,
        so that every client that connects can also pull. One peer other than the own user has at
        most half of them. Default 0: as many as the hard limit of open files has room for, at
        most 5120. 512 workers take half of 5120 */
    uint32_t max_sessions;
    /** bytes for all sessions together, default 256 MiB. One network peer has at most half of
        them. Where the own user has a Unix socket, all network peers have three quarters. These
        three quarters include memory that the server keeps for all: chunks of pinned memory, the
        sources of catalog parts, and 3 MiB of digests */
    uint64_t max_memory;
    uint32_t idle_ms; /**< a session silent for so long is closed, default 300000 */
    fanin_log_fn log; /**< default none, or what FANIN_LOG says (fanin/log.h) */
    void *log_cookie;
    /** threads that send tensors to readers, at most 16: the number of connections that a rank
        serves at the same time. Default 0: a quarter of the CPUs that the process may use, at
        least 1 and at most 4. The server starts a thread when a connection comes that the
        running threads would have to share. A thread sleeps while its connections ask for
        nothing. Each thread needs 8 MiB of max_memory */
    uint32_t data_threads;
    /** thousandths of one CPU that the requests of one peer may take, at most 1000. A peer may
        take at once what it did not take in the last 20 s. Beyond that its requests wait. All
        peers together have twice as much. The own user, and readers that have proven the secret
        or a certificate, have no limit. Sending tensors does not count here; see stranger_cpu.
        Default 50; 0: no limit */
    uint32_t peer_cpu;
    /** ms of each minute for which one stranger's leases may hold up begin_update, commit and
        pause; default 2000. All strangers together have two and a half times as much. An update
        waits for the stranger's leases only if lease_ms of this is left, or half of it if that
        is less. Otherwise an update makes the stranger's reads stale. 60000: no limit but
        lease_ms */
    uint32_t stranger_share_ms;
    /** as stranger_share_ms, for each peer that is no stranger; default 60000 */
    uint32_t own_share_ms;
    /** added to the creating thread's nice value, for the library's threads that serve readers;
        -20..19, default 0. A value below 0 needs a privilege (CAP_SYS_NICE). Without it the nice
        value stays, and the log says so (event "nice") */
    int32_t nice;
    /** the launch's secret, see fanin/types.h. TCP connections of readers without it are refused */
    const char *secret_file;
    /** thousandths of one CPU that sending tensors to strangers may take, and making digests for
        them; at most 16000 for all strangers together. One stranger has half of it. Strangers
        may take at once what they did not take in the last 20 s. Beyond that the server sends
        more slowly. Default 0: a tenth of the CPUs that the process may use */
    uint32_t stranger_cpu;
    /** certificates instead of a secret, see fanin/types.h. TCP connections of other readers are
        refused */
    const char *tls_cert;
    const char *tls_key; /**< see tls_cert */
    const char *tls_ca;  /**< see tls_cert */
    /** bytes of tensors a second that the server streams to all readers together, at least
        1000000. Servers of one process that have a limit share it. Readers that take memory of
        this host by cma or cuda_ipc do not count; rdma is not offered. Default 0: no limit */
    uint64_t max_bytes_per_second;
} fanin_server_config;

/** Defaults. @p size is the caller's sizeof(fanin_server_config); never writes past it. */
FANIN_API void fanin_server_config_init(fanin_server_config *config, size_t size);

/**
 * Binds, listens and starts the library's threads. The call copies @p config and what it points to.
 * The caller owns *@p server_out and ends it with fanin_server_destroy(). The call waits for no
 * peer. It takes as long as loading UCX does.
 *
 * The call may raise the process's soft limit of open files (event "descriptor-limit"). It takes
 * those of the descriptors 0 to 2 that are closed, for good. So no connection and no file gets such
 * a number. Reads and writes of them go on failing with EBADF.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: rank, world size, world id, name, a number or a flag is out of range. Fix
 *   the configuration.
 * - FANIN_ERR_ARGUMENT, of the address: it is not numeric, is a wildcard or is not this host's. Or
 *   it is not loopback, without FANIN_SERVER_OPEN.
 * - FANIN_ERR_ARGUMENT, of an open server: it has no valid allow-list. Or, without
 *   FANIN_SERVER_INSECURE and not on loopback, it has no secret and no certificates, or allows a
 *   network wider than any private one.
 * - FANIN_ERR_EXISTS: the port is in use; the message names it. Take another port, or end the
 *   process that has it.
 * - FANIN_ERR_LIMIT: max_sessions needs more open files than the hard limit allows, or no thread
 *   can start. Raise `ulimit -n` or the limit of threads, or lower max_sessions. With base_port 0:
 *   no port of this host is free. Give one.
 * - FANIN_ERR_IO: the kernel refuses a socket, an epoll set or random bytes; sys_errno says why.
 * - FANIN_ERR_MEMORY: out of memory.
 * - Those of the secret or certificates (fanin/types.h), and of FANIN_LOG (fanin/log.h).
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_create(
    const fanin_server_config *config, fanin_server **server_out, fanin_error *error);

/** The TCP port that the server listens on; 0 for NULL or in a forked child. Does not block. */
FANIN_API uint16_t fanin_server_port(const fanin_server *server);

/**
 * Registers @p count shards under @p publication, all or none. Creates the publication if it does
 * not exist. The call copies the descriptions. The boxes' memory stays the caller's. It must stay
 * valid until the shard is removed or replaced, or the server destroyed. Strides may be negative or
 * non-packed.
 *
 * Memory is the host's or any CUDA device's. All boxes of one tensor have the same kind and device.
 * The library finds kind and device out unless the tensor says them. Some device memory has no IPC
 * handle: PyTorch's expandable_segments, stream-ordered pools, managed memory. The server sends it
 * by stream, and the log tells so with the remedy (event "no-ipc").
 *
 * Between begin_update and commit the change belongs to that update. Otherwise new shards become
 * visible with the next commit.
 *
 * All ranks put all names of a publication, with the same dtype and shape. A rank that holds
 * nothing of a tensor puts it without boxes. Readers refuse ranks that differ (FANIN_ERR_MISMATCH),
 * as far as the ranks answer. If only a dead rank has put a name, a new reader does not know the
 * name. It takes the other ranks' names for all.
 *
 * @p replace false: a name that exists is an error. @p replace true: the call exchanges a shard
 * whose pointer, allocation, dtype, shape, boxes or strides differ. If all are equal, nothing
 * happens. Outside an update an exchange acts as fanin_server_begin_update() first. The publication
 * is then unreadable until the next commit. Of a snapshot publication the last snapshot stays
 * readable.
 *
 * Blocks only to exchange shards: at most lease_ms for readers, and at most 60 s for a running copy
 * of a snapshot.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT, of the tensor that the message names. Its name is bad or comes twice; its
 *   dtype is unknown. Its boxes overlap, or a box lies outside the global shape. A box that is not
 *   empty has the address NULL, or reaches beyond its CUDA allocation. The memory is of another
 *   kind or device than the tensor says. Fix the tensor.
 * - FANIN_ERR_EXISTS: the shard exists and @p replace is false. Replace or remove it.
 * - FANIN_ERR_LIMIT: more than 2^20 tensors or 2^22 boxes a publication, or 4096 publications. Or
 *   more than 65536 names of publications in this server's life. Spread the tensors, or remove old
 *   publications.
 * - FANIN_ERR_UNSUPPORTED: the tensor says CUDA memory, and the build or the machine has no CUDA.
 * - FANIN_ERR_TIMEOUT: a snapshot's copy of the shards has not ended for 60 s; nothing has changed.
 *   Find out what its stream waits for.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_put(fanin_server *server,
                                                         const char *publication,
                                                         const fanin_tensor *tensors,
                                                         size_t count, bool replace,
                                                         fanin_error *error);

/**
 * Removes one shard, or the whole publication if @p name is NULL. Outside an update it acts as
 * begin_update first. After the return the library does not touch the memory, and readers' tokens
 * are void. If one shard of a snapshot was removed, its copy stays readable until the next commit.
 *
 * Blocks at most lease_ms for readers, and at most 60 s for a snapshot's copy that is under way.
 *
 * Workers of this host may still map CUDA memory that they read by cuda_ipc. CUDA leaves undefined
 * what happens when memory is freed that another process maps. A worker closes the mapping at its
 * next pull, which finds a new catalog version, and when it ends. The log tells which workers may
 * still map the memory, and how much of it (event "still-mapped"). It does so here, when a shard is
 * replaced, and when the server is destroyed. The statistics count such sessions (ipc_mappers).
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: the publication or shard does not exist.
 * - FANIN_ERR_TIMEOUT: a snapshot's copy of the shards has not ended for 60 s; no shard was
 *   removed. Find out what its stream waits for.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_remove(fanin_server *server,
                                                            const char *publication,
                                                            const char *name,
                                                            fanin_error *error);

/**
 * Replaces the publication's metadata, which the call copies. All ranks give the same pairs. The
 * metadata travel with the key table and become visible with the next commit. Creates the
 * publication if it does not exist.
 *
 * fanin gives these keys a meaning; all values are strings: "peft_config" (the whole
 * adapter_config.json), "lora_alpha", "r", "base_model_name_or_path", "use_rslora", "task_type",
 * "lora_dropout", "bias". The values of "rank_pattern" and "alpha_pattern" are JSON objects, that
 * of "target_modules" is JSON. Other fields of PEFT's configuration work alike. A worker that makes
 * an adapter directory needs "peft_config", or "base_model_name_or_path" and "lora_alpha".
 *
 * Waits for other calls that change the publication, not for readers.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: a key comes twice or is empty, a text is not UTF-8, or all have more than 1
 *   MiB.
 * - FANIN_ERR_LIMIT: as fanin_server_put(), of publications and their names.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_server_set_metadata(fanin_server *server, const char *publication,
                          const fanin_pair *pairs, size_t count, fanin_error *error);

/**
 * Announces that the trainer is about to write @p publication in place. The server tells new
 * readers to wait. Creates the publication if it does not exist.
 *
 * Blocks until the running readers are done, at most lease_ms from this call. For one peer's
 * readers it blocks at most for what is left of the peer's share (stranger_share_ms, own_share_ms).
 * Then it voids their tokens. It also waits for a copy that is under way into a socket or out of a
 * CUDA device. It gives up such a copy after 10 s.
 *
 * Called again during an update, it takes a new epoch and returns at once. Of a snapshot
 * publication it also returns at once: readers go on. The server does not know two writers apart:
 * the commit of one publishes what the other has written so far. Write it from one thread.
 *
 * Errors:
 * - FANIN_ERR_STATE: another thread is in begin_update of the publication, or the publication is
 *   paused. Update it from one thread at a time; resume it first.
 * - FANIN_ERR_LIMIT: as fanin_server_put(), of publications and their names.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_begin_update(
    fanin_server *server, const char *publication, fanin_error *error);

enum {
    /** Publish copies instead of the shards' own memory. The server copies the shards into one
        of two arenas that it owns: host memory, and memory of each CUDA device that holds
        shards. So readers do not delay the next update, and the update does not overtake them.
        Costs twice the shards' memory. Give the flag at every commit of a publication or at
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
        FANIN_DTYPE_F16, rounded to nearest even; 0: as they are. Give the same at every commit */
    fanin_dtype cast;
    /** the CUDA stream that writes the shards, in any context of the device. It must not be
        captured into a graph now. None: all writes are done. It stays the caller's, who may
        destroy it when the call has returned */
    fanin_stream stream;
    /** snapshots: how many patches the server keeps, at most 16; default 0: none. A patch is what
        has changed since the step before. Readers that hold that step read the patch instead of the
        whole. The server makes one while a reader is connected that has asked for them, and for as
        many commits more as it keeps, since that reader may come back. It makes them only of
        snapshots that lie in host memory alone, or on one CUDA device; else the log tells why
        there is none (event "no-patches"). A commit of host memory then takes about twice as long.
        On a device kernels make the patch behind the copies, and the caller's stream does not wait
        for them. All patches together take at most an eighth of the copy's bytes, of pinned host
        memory for a device. A commit of host memory needs twice as much more for a moment. A step
        that changes more, or finds no memory, has no patch, and its readers read the whole. They
        also do after new shards were put */
    uint32_t deltas;
} fanin_commit_options;

/** Sets by reference, no cast, no stream, no waiting, no deltas. @p size: as
    fanin_server_config_init(). */
FANIN_API void fanin_commit_options_init(fanin_commit_options *options, size_t size);

/**
 * Declares the publication's bytes to be those of @p step, lets readers in and wakes waiting pulls.
 * The commit publishes everything that this thread wrote, and writes that are ordered before this
 * call. @p options may be NULL: by reference, at once. A first commit needs no begin_update.
 *
 * With a stream, the commit takes effect when the work that is on the stream now is done. The call
 * does not wait for that. Some calls withdraw a commit that has not taken effect: abort_update,
 * withdraw, remove, a put that replaces a shard, and destroy. So does begin_update, except for
 * snapshots. The step is then never published. The log (event "commit-withdrawn") and the
 * statistics tell so. If the stream's device fails, the commit never takes effect (event
 * "commit-failed").
 *
 * A snapshot orders its copy before work that comes to the stream later. So a begin_update does not
 * withdraw it, and the trainer may run ahead of its stream. The trainer writes the shards on this
 * stream, or on one that it orders behind this one. Between begin_update and commit, and after an
 * abort, readers go on with the last snapshot.
 *
 * A snapshot without a stream is complete when the call returns. So is a snapshot with host memory:
 * this thread and a few helpers copy it once the stream's work is done. While the copy is pending,
 * put and remove of its shards wait for the stream.
 *
 * Blocks: by reference not at all, except for a predecessor. A commit whose predecessor has not
 * taken effect waits for it. A snapshot waits at most lease_ms for readers of the arena that it
 * fills, and for its copies as said above. FANIN_COMMIT_WAIT waits for the effect. A wait for a
 * stream ends after 60 s.
 *
 * Errors. Unless an error says otherwise, nothing of the step is published and the update stays
 * open:
 * - FANIN_ERR_ARGUMENT: @p step is not above the last committed one, or the publication does not
 *   exist. Or the options are invalid, name another cast than before, or a device that does not
 *   exist.
 * - FANIN_ERR_STATE: no update is open, or the publication is paused. Or snapshot and reference are
 *   mixed, or the stream is being captured.
 * - FANIN_ERR_STATE, overtaken: another thread's update, abort, withdrawal or removal came first,
 *   and decides.
 * - FANIN_ERR_TIMEOUT: the work of the stream, or of the commit before, has not ended for 60 s.
 *   With FANIN_COMMIT_WAIT the commit may be made already; it stays pending. Find out what the
 *   stream waits for.
 * - FANIN_ERR_UNSUPPORTED: a stream is given and there is no CUDA, or a device cannot run the copy
 *   kernel.
 * - FANIN_ERR_TRANSPORT: a CUDA device has failed. The trainer's log says how.
 * - FANIN_ERR_LIMIT: the shards have more than 2^64 bytes, or more than one copy table holds.
 * - FANIN_ERR_MEMORY: out of memory, of the host or, for arenas, of the device that it names.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_server_commit(fanin_server *server, const char *publication, uint64_t step,
                    const fanin_commit_options *options, fanin_error *error);

/**
 * Ends an update without publishing, or withdraws its commit if that has not taken effect. The
 * publication stays unreadable, because its bytes may be half-written. A later commit, with or
 * without a begin_update before it, makes it readable. Of a snapshot publication the last snapshot
 * stays readable. While the publication is paused see fanin_server_pause(). Does not block.
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: the publication does not exist.
 * - FANIN_ERR_STATE: no update is open.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_abort_update(
    fanin_server *server, const char *publication, fanin_error *error);

/**
 * Takes back a published step at once, or a commit that waits for its stream. It is for a caller
 * that finds that the bytes were written outside of an update. The call voids tokens, so pulls that
 * are reading start again. The publication stays unreadable until a later commit, with or without a
 * begin_update before it. The step is not shown again. Waits for no reader. Blocks until a copy
 * that is under way has ended, as fanin_server_begin_update().
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: the publication does not exist.
 * - FANIN_ERR_STATE: nothing of it is readable by reference. An update is open, or it is paused,
 *   was never committed, or is a snapshot, which the trainer cannot write.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_withdraw(fanin_server *server,
                                                              const char *publication,
                                                              fanin_error *error);

/**
 * Announces that the trainer is about to take the shards' memory away: offload, an engine's sleep,
 * a checkpoint that is loaded over it. First it waits for a commit that is pending on a stream, at
 * most 60 s. Then it acts as begin_update: it blocks until the running readers are done, at most
 * lease_ms, and voids their tokens.
 *
 * From then until fanin_server_resume() no thread of the library touches the shards' memory. None
 * of the memory is registered for one-sided reads. Workers of this host may still map CUDA memory,
 * see fanin_server_remove(). Every pull, also one that waits already, fails at once with
 * FANIN_ERR_PAUSED, "... is paused: <reason>". Steps stay as they are. Of a snapshot publication
 * the last snapshot stays readable, since it is memory of the server.
 *
 * While it is paused:
 * - put, remove and set_metadata are allowed; put and remove wait for no reader.
 * - begin_update and commit give FANIN_ERR_STATE.
 * - abort_update withdraws the published step, for a caller that brings other values back. That
 *   caller commits them after resume. Until that commit readers see nothing, but a snapshot stays
 *   readable.
 * - pause changes only the reason.
 *
 * @p reason is UTF-8, one sentence for readers, cut to 255 bytes. NULL or "": "trainer memory
 * offloaded".
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: the reason is not UTF-8.
 * - FANIN_ERR_NOT_FOUND: the publication does not exist; the call creates none.
 * - FANIN_ERR_STATE: an update is open, or another thread is in begin_update. Commit or abort it
 *   first.
 * - FANIN_ERR_TIMEOUT: the work of a commit's stream has not ended for 60 s; nothing has changed.
 *   Find out what the stream waits for.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_pause(fanin_server *server,
                                                           const char *publication,
                                                           const char *reason,
                                                           fanin_error *error);

/**
 * Ends a pause. A stable publication is stable again, at the same step under a new epoch, from the
 * shards as they are put now. The caller promises that all their bytes, moved or not, are those of
 * that step. An unpublished one stays unpublished until a commit. Readers fetch the catalog again
 * only if shards or metadata changed, or if memory was registered for one-sided reads. Waits for no
 * reader.
 *
 * Errors, after which it stays paused:
 * - FANIN_ERR_NOT_FOUND: the publication does not exist.
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
 * Lists names in byte order: the publications' (@p publication NULL), or those of one publication's
 * tensors. Waits for calls that change that publication, not for readers.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p fn is NULL.
 * - FANIN_ERR_NOT_FOUND: the publication does not exist.
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
    /** bytes that readers read by one-sided paths. This process does not see the reads; readers
        tell it when a pull has ended good. The bytes include gaps that were read along, at most
        the rank's whole publication for each pull. Readers of older releases do not tell */
    uint64_t bytes_cma, bytes_rdma, bytes_cuda_ipc;
    /** CPU time of the thread that serves control connections, and of those that send tensors */
    uint64_t control_cpu_ns, data_cpu_ns;
    /** offers now of readers that hand on what they have read (relays) */
    uint64_t relays;
    /** as relays told: the units that they got, and bytes of them from ranks and from each other;
        units that came late and were asked of somebody else; and units that another relay had to
        take from the trainer */
    uint64_t relay_units, relay_bytes_origin, relay_bytes_relays, relay_late,
        relay_taken_over;
    /** of bytes_streamed, those of patches */
    uint64_t bytes_patches;
    /** commits for which a patch was asked: those that have one, and those that have none */
    uint64_t patches_made, patches_lacking;
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
 * Writes the same counters in the Prometheus text exposition format 0.0.4. Writes at most @p
 * capacity bytes with a final NUL. *@p length_out is the length that a large enough buffer would
 * hold, without the NUL. @p length_out may be NULL, and so may @p buffer if @p capacity is 0. Does
 * not block.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p buffer is NULL although @p capacity is not 0.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_server_prometheus(fanin_server *server,
                                                                char *buffer,
                                                                size_t capacity,
                                                                size_t *length_out);

/**
 * Stops listening and lets running pulls end for at most @p drain_ms. Then it closes everything,
 * joins the threads, frees, and sets *server to NULL. NULL and *server == NULL are fine. After it
 * returns the library does not touch the shards' memory. In a forked child it frees nothing. No
 * other call of this handle may be under way, nor come after it.
 *
 * Blocks at most drain_ms and a little. Copies out of the shards can hang in a CUDA device: those
 * of snapshots on a stream, and those of reads. The call then waits at most 70 s more, for all
 * copies together. Then it leaves the copies alone. The memory that they write stays allocated
 * (events "commit-stuck", "device-stalled").
 */
FANIN_API void fanin_server_destroy(fanin_server **server, uint32_t drain_ms);

#ifdef __cplusplus
}
#endif
#endif
