/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The client of inference workers. It connects to every trainer rank and pulls a publication. It
 * puts the tensors together in the caller's memory, or writes a PEFT adapter's or a model's
 * directory.
 *
 * Threads: one thread at a time uses a client. Any thread, and a signal handler, may call
 * fanin_client_cancel(). Callbacks other than the log's come in the calling thread. Of their client
 * they may call fanin_client_cancel() and nothing else. The calling thread does the work. Its
 * helper threads end before the call returns, except three kinds:
 * - A thread that asks for a host's name; getaddrinfo() does not give it back.
 * - A thread that makes the spare file, if pull options ask for one.
 * - Threads that read beside the calling one (fanin_client_config.threads). They sleep between
 *   calls.
 *
 * The last two kinds end when the client is disconnected or destroyed.
 *
 * Environment, fork: see fanin/types.h.
 *
 * Errors come as a status. If @p error is not NULL, it says what happened, which rank, and what to
 * do. Each call lists its own errors. Every call that takes a client can also give these:
 * - FANIN_ERR_ARGUMENT: the client or a required pointer is NULL, or a struct_size is not set. Fix
 *   the call.
 * - FANIN_ERR_STATE: there are no addresses yet. Call fanin_client_connect() first. Or a pull
 *   session of the client is open: end it first.
 * - FANIN_ERR_FORKED: the handle belongs to the parent process (fanin/types.h).
 * - FANIN_ERR_MEMORY: out of memory.
 * - FANIN_ERR_CANCELLED: fanin_client_cancel() was called.
 * - FANIN_ERR_INTERNAL: a bug in this library. Report it with its message.
 *
 * An error that a rank reports has that rank's status, number and address. If no list has the
 * status, its hundred says what to replace (fanin/error.h).
 */
#ifndef FANIN_CLIENT_H
#define FANIN_CLIENT_H

#include <fanin/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fanin_client fanin_client;
typedef struct fanin_result fanin_result;
typedef struct fanin_session fanin_session;
typedef struct fanin_destination fanin_destination;

/** How bytes travel. */
typedef int32_t fanin_path;
enum {
    FANIN_PATH_AUTO = 0, /**< by probe: the best that works */
    FANIN_PATH_STREAM = 1,
    FANIN_PATH_CMA = 2,
    FANIN_PATH_RDMA = 3,
    FANIN_PATH_CUDA_IPC = 4,
};

/** "auto", "stream", "cma", "rdma", "cuda_ipc"; NULL if unknown. Thread: any. */
FANIN_API const char *fanin_path_name(fanin_path path);

/** The path of that name, -1 if unknown. Thread: any. */
FANIN_API fanin_path fanin_path_from_name(const char *name);

typedef struct fanin_client_config {
    size_t struct_size;
    const char *server_name; /**< demand this job's name; default NULL: any */
    /** demand this world. All zero, which no trainer may announce: any */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    /** for one rank, and for each data connection to it, default 5000 */
    uint32_t connect_timeout_ms;
    /** a rank that owes an answer and is silent for so long is lost, default 5000 */
    uint32_t lost_ms;
    /** bytes asked for and not yet here, all ranks together, default 64 MiB */
    uint64_t max_inflight;
    uint64_t max_catalog; /**< bytes of catalog accepted a rank, default 256 MiB */
    /** data connections to each rank, at most 16. 0 (default): 4 to a rank on another host. To a
        rank on this host: one for each thread that reads the rank, at least 1 and at most 4.
        There, by TLS and unless threads is set, at most an eighth of the CPUs */
    uint32_t streams_per_rank;
    fanin_path path;  /**< default FANIN_PATH_AUTO */
    bool no_unix;     /**< TCP even on one host */
    bool no_ucx;      /**< never load UCX: no rdma */
    fanin_log_fn log; /**< default none, or what FANIN_LOG says (fanin/log.h) */
    void *log_cookie;
    /** go without checksums over TCP, where the network itself detects altered bytes (IPsec,
        WireGuard). Default: every frame and every reply with weights has a checksum. If one does
        not fit, the client asks again (FANIN_ERR_TRANSPORT). Unix sockets have none */
    bool no_checksums;
    /** the addresses may be those of some of the world's ranks, to look at these. A pull
        succeeds only if they hold everything */
    bool partial;
    /** threads that read at the same time into host memory on the paths stream and cma, with the
        calling one; at most 64. 1: the calling thread alone. 0 (default): half of the CPUs that
        the process may use (affinity, quota), and fewer for little data. By stream the default
        has at most 8. There are never more than data connections, nor than max_inflight / 4 MiB.
        With more threads than ranks, several threads read one rank. By TLS the threads do the
        handshakes of their data connections */
    uint32_t threads;
    /** believe a rank that listens on its Unix socket with this process's uid, in whatever
        container, and read there. Default: not if the rank is in another user or pid namespace,
        nor if the kernel does not show its process. The client asks such a rank over TCP, and
        the log tells so once (event "unix-stranger"). FANIN_TRUST_CONTAINERS=1 in the
        environment sets it as well. One-sided paths also need FANIN_SERVER_TRUST_CONTAINERS */
    bool trust_containers;
    /** a rank on a loopback address may be any user's, or of a user that the kernel does not
        tell. Default: it is this process's user's or root's, otherwise the call gives
        FANIN_ERR_AUTH. FANIN_TRUST_OTHER_USERS=1 in the environment sets it as well */
    bool trust_other_users;
    /** the launch's secret, see fanin/types.h. Ranks without it are FANIN_ERR_AUTH */
    const char *secret_file;
    /** certificates instead of a secret, see fanin/types.h. Other ranks are FANIN_ERR_AUTH */
    const char *tls_cert;
    const char *tls_key; /**< see tls_cert */
    const char *tls_ca;  /**< see tls_cert */
} fanin_client_config;

/** Defaults. @p size is the caller's sizeof(fanin_client_config); never writes past it. */
FANIN_API void fanin_client_config_init(fanin_client_config *config, size_t size);

/**
 * Creates a client; copies @p config. The caller owns *@p client_out and ends it with
 * fanin_client_destroy(). The call waits for no rank. It takes as long as loading UCX does. A
 * failure to load UCX is no error. The call takes those of the descriptors 0 to 2 that are closed,
 * as fanin_server_create() does.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: an unknown path, more than 16 connections a rank or 64 threads, a time of
 *   0. Fix @p config.
 * - FANIN_ERR_LIMIT: no descriptor is left, or, with certificates, no thread. Raise `ulimit -n` or
 *   `ulimit -u`.
 * - FANIN_ERR_IO: the kernel gives no random bytes.
 * - Those of the secret or certificates (fanin/types.h), and of FANIN_LOG (fanin/log.h).
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_create(
    const fanin_client_config *config, fanin_client **client_out, fanin_error *error);

/**
 * Disconnects as fanin_client_disconnect() and frees; *@p client becomes NULL. NULL and *client ==
 * NULL are fine. No other call of this handle may be under way, fanin_client_cancel() included. In
 * a forked child it frees nothing. Blocks as fanin_client_disconnect().
 */
FANIN_API void fanin_client_destroy(fanin_client **client);

/**
 * Makes a running call of this client return FANIN_ERR_CANCELLED soon. If none runs, the next one
 * does. NULL is fine. Does not block. Thread: any, also from a signal handler.
 */
FANIN_API void fanin_client_cancel(fanin_client *client);

/**
 * Connects to all ranks at once and learns who they are. @p addresses: "host:port", "[v6]:port",
 * one a rank, in any order. Succeeds when all ranks of one world answer. It also succeeds when at
 * least one rank answers. It waits for silent ranks during at most half of the time. During each
 * pull the client goes on connecting to the others, or tries again. Only a pull that needs a silent
 * rank waits for it. If only a missing rank holds a tensor, the error names the rank, also while
 * the pull waits for a step.
 *
 * The client looks up all names at the same time, each once, in threads of their own. They run
 * getaddrinfo(), which has no deadline and cannot be ended from outside. At the deadline the call
 * returns, and such a thread stays until the name server has answered. A process has at most 64
 * such threads. Numeric addresses need none. Of a name with several addresses the client takes the
 * first that accepts a connection within a second, at the port where the name comes first; else the
 * first.
 *
 * The call checks the arguments first. Then it closes the connections that the client had, as
 * fanin_client_disconnect(). After an error the client has none. Blocks at most @p timeout_ms, and
 * as long as that closing takes.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no address, a malformed one, or one that comes twice. Give the address of
 *   every rank once.
 * - FANIN_ERR_UNREACHABLE: no rank answered (names the first rank), or a name does not resolve. Is
 *   the trainer running, is the address right?
 * - FANIN_ERR_CLOSED: the same, of a rank that is shutting down.
 * - FANIN_ERR_TIMEOUT: before the deadline no rank answered, or a name was not resolved.
 * - FANIN_ERR_WORLD: the ranks are of different worlds (says which are of which), or a rank comes
 *   twice. Or the world size is not the number of addresses. Or the configuration demands another
 *   world id or job. Restart or end the ranks of the earlier launch, or give the right addresses.
 * - FANIN_ERR_AUTH: the rank does not admit this client's address. Add its network to the trainer's
 *   allow. Or the process that listens on a loopback address is another user's, or the kernel does
 *   not say whose. Set trust_other_users if that is intended.
 * - FANIN_ERR_VERSION: the two ends have no protocol version in common. Use releases that have one.
 * - FANIN_ERR_PROTOCOL: another program answers there, or a rank breaks the protocol.
 * - FANIN_ERR_LIMIT: the rank has all the connections it may have. Or this process has too few
 *   descriptors, or 64 names that it still waits for. The remedy names the limit.
 * - FANIN_ERR_IO: this process gets no socket; sys_errno says why.
 * - FANIN_ERR_TRANSPORT: a checksum did not fit: the received bytes differ from those sent. Look at
 *   the network.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_connect(fanin_client *client, const char *const *addresses, size_t count,
                     uint32_t timeout_ms, fanin_error *error);

/**
 * Connects as fanin_client_connect(), but returns as soon as one rank has answered. The calls that
 * follow go on connecting to the others, each within its own time. They give the errors that
 * fanin_client_connect() would have given, FANIN_ERR_WORLD in particular. Blocks and fails as
 * fanin_client_connect().
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_connect_any(fanin_client *client, const char *const *addresses,
                         size_t count, uint32_t timeout_ms, fanin_error *error);

/**
 * Closes all connections, forgets catalogs and addresses, unmaps the ranks' memory, drops the spare
 * file. Waits for no rank, and takes as long as unmapping and freeing does.
 *
 * It does wait for one-sided reads that a pull left under way, if their fabric does not answer. It
 * also waits for a CUDA stream that a pull gave up. These waits end after 15 s in all, for any
 * number of ranks. Memory that such a read or stream could still use then stays allocated.
 */
FANIN_API void fanin_client_disconnect(fanin_client *client);

/** Which step a pull asks for. */
typedef int32_t fanin_step_rule;
enum {
    FANIN_STEP_NEWEST = 0,   /**< what is committed on all ranks */
    FANIN_STEP_EXACT = 1,    /**< this very step; waits for it; passed: SUPERSEDED */
    FANIN_STEP_AT_LEAST = 2, /**< this step or a later one */
};

/**
 * How far a pull is. The pulling thread calls it some 20 times a second while it reads, also when
 * nothing comes.
 */
typedef void (*fanin_progress_fn)(void *cookie, uint64_t bytes_done,
                                  uint64_t bytes_total);

/** What one rank has brought to a pull that is under way. */
typedef struct fanin_rank_progress {
    size_t struct_size;
    int32_t rank;
    fanin_path path;
    const char *address;
    /** bytes that this pull, or all reads of a session, read from the rank. On cuda_ipc one
        kernel reads all ranks; there it is the rank's share of what all have brought */
    uint64_t bytes_done, bytes_total;
    /** for how long the rank has owed bytes that the client asked for, and brought none; 0: it
        owes none */
    uint64_t quiet_ms;
} fanin_rank_progress;

/** How far a pull is, and by whom. */
typedef struct fanin_pull_progress {
    size_t struct_size;
    uint64_t bytes_done, bytes_total;
    const fanin_rank_progress *const *ranks; /**< those that it reads from */
    size_t n_ranks;
    /** the rank that the pull waits for: quiet for longest, and for at least a second; NULL:
        none */
    const fanin_rank_progress *slowest;
} fanin_pull_progress;

/** As fanin_progress_fn. @p progress, and all that it points to, is valid during the call. */
typedef void (*fanin_rank_progress_fn)(void *cookie,
                                       const fanin_pull_progress *progress);

typedef struct fanin_pull_options {
    size_t struct_size;
    const char *publication; /**< "lora:<run>", "full:<run>" (fanin/server.h) */
    fanin_step_rule rule;    /**< default FANIN_STEP_NEWEST */
    uint64_t step;
    uint32_t timeout_ms;   /**< for the whole call, default 60000, never endless */
    uint32_t max_attempts; /**< give up after so many stale attempts; 0: by time only */
    fanin_progress_fn progress;
    void *progress_cookie;
    /** F32 tensors arrive as FANIN_DTYPE_BF16 or FANIN_DTYPE_F16, rounded to nearest even. In
        memory that is described as F32 they stay F32. In files, tensors that the trainer's model
        keeps in F32 stay so (the metadata pair "keep_f32"). 0 (default): as published */
    fanin_dtype dtype;
    /** device destinations: the pull waits, within timeout_ms, for the work that is on this
        stream when the call is made. Then it writes them. None: nothing uses the destinations
        when the call is made. The writes have ended when the call returns, so no stream has to
        wait for them */
    fanin_stream stream;
    /** fanin_client_pull_adapter(): after a pull of some size, keep a hidden file of that size
        ready beside the directory. The next pull into the same parent directory finds its memory
        made. A thread allocates the file's pages between calls. It registers them with CUDA if
        the client uses CUDA. The file costs the adapter's size once more. It lasts until the
        client is destroyed or disconnected, or until a pull finds that another process has made
        its directory. The client keeps none where less than the same size again would stay free.
        A published file is never used again */
    bool spare_file;
    /** fanin_client_pull_adapter(): adapter_config.json keeps every field of the trainer's
        configuration. Default: of a LoRA configuration it keeps the fields of PEFT that can load
        no code and name no file. A line of the log (warning, "adapter-config") names the fields
        that are left out. Methods other than LoRA are FANIN_ERR_MISMATCH.
        fanin_client_pull_model(): config.json keeps auto_map and custom_pipelines, which name
        code to load. Default: it leaves them out and logs that in the same way */
    bool trust_config;
    /** most bytes that the pull may bring: of the wanted tensors, or of the directory's files of
        tensors. More is FANIN_ERR_LIMIT before anything is read or made. 0: into the caller's
        memory, as many as its boxes hold. 0 of an adapter: a quarter of the size of the
        directory's file system. That is the size, not the free part, so adapters that exist
        already do not lower it. 0 of a model: as many as there is room for */
    uint64_t max_bytes;
    /** compare before the leases end, on every path: every rank digests the boxes that it
        served, and this process the bytes that landed. A difference is FANIN_ERR_TRANSPORT. It
        names rank and key, and nothing is published. Both ends read everything once more. Ranks
        of an older release are FANIN_ERR_UNSUPPORTED. A directory that exists already is not
        compared */
    bool verify;
    /** fanin_client_pull_model(): bytes of tensors in one of its files, as max_shard_size of
        save_pretrained(). A larger tensor gets a file of its own. 0 (default): 5 GB (5e9) */
    uint64_t max_file_bytes;
    /** besides or instead of progress, with the same cookie. Without it the log names a rank
        that brings nothing for 5 s, 10 s, 20 s and so on (warning, "slow-rank") */
    fanin_rank_progress_fn rank_progress;
    /** fanin_client_pull_into(): read what has changed since the step that the destination holds,
        if the ranks keep that (fanin_commit_options.deltas) and it is at most half of the whole.
        Otherwise the pull reads the whole, and fanin_result_info.whole_because says why. Every
        byte is the same either way. The caller promises that nobody else writes the destination
        between pulls, or says so by fanin_destination_touched(). Set verify as well if you are
        not sure: the pull then compares what the destination holds after the patches, and reads
        the whole by itself if that differs (warning, "delta-unequal"). Patches are read by the
        path stream; with another path, or a dtype that F32 arrives as, the pull reads the whole.
        Patches for memory of devices come into pinned host memory, which the client keeps. A pull
        by patches writes the destination when all ranks have confirmed the step, and not before:
        after an error it mostly still holds the step before, and the next pull goes on from there.
        The patches take memory of their own, at most half of the whole. progress counts their
        bytes; bytes_total grows when their sizes are known. Other calls ignore it */
    bool deltas;
    /** fanin_client_pull_model(): a directory that such a call with delta_from has made, of an
        earlier step. The pull copies its files and reads what has changed since, as deltas and
        verify say; base_step and whole_because tell what became of it. It reads the whole as well
        if nothing is there, or what is there was damaged, is another model's or another user's.
        If it is the directory to be made, the new one replaces it at one moment
        (FANIN_ERR_EXISTS: it is of another publication, or has files that no pull has made).
        fanin.json then tells what a later pull begins with. NULL (default): none */
    const char *delta_from;
} fanin_pull_options;

/** Defaults. @p size is the caller's sizeof(fanin_pull_options); never writes past it. */
FANIN_API void fanin_pull_options_init(fanin_pull_options *options, size_t size);

/**
 * Fills memory of the caller, the host's or CUDA devices'. Each tensor says what is wanted:
 * - its name;
 * - its dtype and global shape, which equal the catalog's, or what options->dtype makes of them;
 * - the boxes to fill: the whole tensor or any part of it, each with address and byte strides.
 *
 * All boxes of a tensor are in the same kind of memory and on the same device. The library finds
 * both out unless the tensor says them. @p count 0 is an error. The pull reads no other tensors.
 *
 * On success all boxes hold the bytes of one step. On failure their content is undefined. Nothing
 * writes the boxes after the return. The memory stays the caller's. Free *@p result_out (may be
 * NULL) with fanin_result_free().
 *
 * Blocks at most options->timeout_ms. After that it waits at most a minute for one-sided reads and
 * device copies that are under way and cannot be recalled. Only a fabric or device that hangs for
 * longer may still write the boxes.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: the options are invalid: no publication, a time of 0. Or a tensor that the
 *   message names is invalid. A box has no address or lies beyond the address space, boxes are in
 *   different kinds of memory, or all boxes are empty. Fix them.
 * - FANIN_ERR_NOT_FOUND: the run (names those there are) or the tensor does not exist.
 * - FANIN_ERR_MISMATCH: a tensor is published with another dtype or shape. Or the ranks' catalogs
 *   contradict each other; fix the trainer.
 * - FANIN_ERR_INCOMPLETE: the ranks' boxes do not tile what is wanted, or overlap. Names tensor and
 *   block. Fix what the trainer puts.
 * - FANIN_ERR_LIMIT: more bytes than options->max_bytes, or a catalog larger than max_catalog.
 *   Raise it if that is right.
 * - FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work with a rank. Or the
 *   destination is CUDA memory and there is no CUDA. Or options->verify meets a rank of an older
 *   release.
 * - FANIN_ERR_STALE: the trainer rewrote the weights while they were read, at every attempt. Pull
 *   again; the message says what would help.
 * - FANIN_ERR_SUPERSEDED: the exact step has passed. Ask for the newest, or for a least step.
 * - FANIN_ERR_PAUSED, at once: a rank whose bytes no other rank holds has paused the run; names the
 *   rank. Pull again when the trainer has resumed it.
 * - FANIN_ERR_TIMEOUT: the deadline passed; names the ranks that are gone, silent or behind.
 * - FANIN_ERR_UNREACHABLE, FANIN_ERR_CLOSED: a rank is gone, and no other rank holds the same
 *   bytes.
 * - FANIN_ERR_WORLD, FANIN_ERR_AUTH, FANIN_ERR_VERSION, FANIN_ERR_PROTOCOL: as
 *   fanin_client_connect(), since the pull connects lost ranks again.
 * - FANIN_ERR_TRANSPORT: the path failed again and again, or a CUDA device has failed. Or the
 *   forced path lacks something on this host, or the bytes that landed differ from the ranks'
 *   digests.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_pull(fanin_client *client, const fanin_pull_options *options,
                  const fanin_tensor *tensors, size_t count, fanin_result **result_out,
                  fanin_error *error);

/**
 * Begins a pull that fills memory in several calls. It is for memory that is used in between: a few
 * layers are read, installed, and then overwritten by the next ones. All bytes are of one step.
 * Bytes that fanin_session_read() has filled count only once fanin_session_end() has succeeded.
 * Until then they may be torn.
 *
 * The call connects what is down, waits for the step, fetches catalogs and plans everything. It
 * chooses and prepares paths, and takes leases of all ranks that serve bytes. If the trainer
 * updates before the call has the leases, the call starts again by itself.
 *
 * @p options and @p all are as of fanin_client_pull(), with these differences:
 * - timeout_ms is for the whole session, from this call to the end of fanin_session_end().
 * - max_attempts does not count.
 * - stream: each read comes after the work that is on it when that read is called.
 * - progress tells of all bytes of the session.
 *
 * @p all may go when this returns. The memory of its boxes stays until the session has ended. The
 * caller ends *@p session_out with fanin_session_end() or fanin_session_abandon().
 *
 * Until then every other call of the client gives FANIN_ERR_STATE, except fanin_client_cancel(),
 * fanin_client_disconnect() and fanin_client_destroy(). The last two abandon the session; the
 * caller still ends it. Sessions of other clients are independent.
 *
 * Between the calls no thread of the library runs (some sleep), and the client asks no rank. Ranks
 * do not mind. They ask nothing either, and hold a lease for as long as their weights stay
 * unchanged. But an update waits for the lease only until its lease time is over (lease_ms,
 * fanin/server.h). A later update makes the session stale, also an idle one. A rank closes
 * connections that were silent for its idle_ms (5 minutes). The session is over then.
 *
 * Blocks at most options->timeout_ms. Errors: those of fanin_client_pull(), except those found
 * while reading.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_begin(
    fanin_client *client, const fanin_pull_options *options, const fanin_tensor *all,
    size_t count, fanin_session **session_out, fanin_error *error);

/**
 * Fills the boxes of the session's tensors [@p first, @p first + @p count). Call it any number of
 * times, in any order, also for tensors that were read before. Tensors without boxes and a count of
 * 0 are fine. The first read of a part plans how it is read. Later sessions of the same layout that
 * cut the parts alike reuse the plan.
 *
 * Nothing writes the boxes after the return, and nothing writes other boxes. With options->verify
 * the part is compared before the call returns.
 *
 * After an error other than FANIN_ERR_ARGUMENT the session has failed. It has given its leases
 * back. Do not use anything that it has read. Further reads and the end give the same error. Blocks
 * until the session's deadline at most, and as fanin_client_pull() says.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: the session is NULL, or has no such tensors.
 * - FANIN_ERR_FORKED: the session belongs to the parent process.
 * - FANIN_ERR_STATE: the client was disconnected or destroyed.
 * - FANIN_ERR_STALE: a rank has rewritten its weights since the session began. Only paths that ask
 *   the rank (stream) tell this here; otherwise the end does. Begin again.
 * - FANIN_ERR_CLOSED, FANIN_ERR_UNREACHABLE: a rank that the session needs is gone, or its
 *   connection was lost. A lease goes with its connection, so the session does not connect again.
 *   Begin again.
 * - FANIN_ERR_TRANSPORT: a path or a device failed, or the bytes that landed differ from a rank's
 *   digest. Begin again: the new session takes another path if there is one.
 * - FANIN_ERR_UNSUPPORTED: options->verify meets a rank of an older release.
 * - FANIN_ERR_TIMEOUT: the session's time is over; names a rank that owes an answer.
 * - FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY, FANIN_ERR_PROTOCOL, FANIN_ERR_LIMIT: as everywhere.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_session_read(fanin_session *session,
                                                           size_t first, size_t count,
                                                           fanin_error *error);

/**
 * Asks the ranks that the session has read. FANIN_OK: all that fanin_session_read() has filled so
 * far is of fanin_session_step() for good, whatever becomes of the session. The leases stay, and
 * the session goes on. What is read later needs another confirmation, or the end. A caller that
 * hands on what it has read confirms it first.
 *
 * After an error other than FANIN_ERR_ARGUMENT the session has failed, as of fanin_session_read().
 * What was confirmed before stays good. Costs one round trip. Blocks until the session's deadline
 * at most.
 *
 * Errors: those of fanin_session_read(), and
 * - FANIN_ERR_STALE: a rank has rewritten its weights meanwhile (names it). Begin again.
 * - FANIN_ERR_UNSUPPORTED: a rank of an older release. Use fanin_session_end().
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_session_confirm(fanin_session *session,
                                                              fanin_error *error);

/** The step that the session reads; 0 for NULL. Does not block. */
FANIN_API uint64_t fanin_session_step(const fanin_session *session);

/**
 * Ends the leases on all ranks. FANIN_OK: all that was read is of fanin_session_step(). The caller
 * knows whether all tensors were read. The result's bytes and tensors count the reads, repeated
 * ones again. *@p result_out may be NULL; free it with fanin_result_free().
 *
 * In any case the session is gone, *@p session is NULL, and the client may be used again. In a
 * forked child nothing is freed. Blocks until the session's deadline at most.
 *
 * Errors. After each of them do not use anything that was read:
 * - FANIN_ERR_STALE: a rank has rewritten its weights meanwhile (names it). Begin again.
 * - The error of an earlier read; otherwise as fanin_session_read().
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_session_end(fanin_session **session,
                                                          fanin_result **result_out,
                                                          fanin_error *error);

/**
 * Gives the leases back without waiting for any rank, and frees; *@p session becomes NULL. Do not
 * use anything that was read. NULL and *session == NULL are fine. In a forked child it frees
 * nothing. Does not block.
 */
FANIN_API void fanin_session_abandon(fanin_session **session);

/* ---------------------------------------------------- prepared destinations */

/**
 * Describes a destination once, for pulls that are repeated. The call copies @p tensors (as of
 * fanin_client_pull()) and what they point to, except the boxes' memory. It checks them and finds
 * out where that memory is. While plan and catalogs stay valid, fanin_client_pull_into() looks at
 * no description. For a large adapter the descriptions are most of a pull's cost besides reading.
 * @p tensors may go or change when this returns; the destination stays as it was.
 *
 * A destination belongs to no client. Any number of clients, in any threads, may pull into it, but
 * into the same memory one after the other. It stays valid through new steps, catalogs, connections
 * and trainers; the pull finds what does not fit. CUDA memory may be freed and allocated again at
 * the same address. The pull then finds that memory again, which takes as long as a pull without a
 * destination. Host memory must stay for as long as the destination is used.
 *
 * The caller ends *@p destination_out with fanin_destination_free(). It takes some 400 bytes for
 * each tensor of one box. Waits for nothing. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no tensors, or an invalid one, as of fanin_client_pull().
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_destination_create(const fanin_tensor *tensors, size_t count,
                         fanin_destination **destination_out, fanin_error *error);

/**
 * Frees; *@p destination becomes NULL. NULL and *destination == NULL are fine. No call that was
 * given it may be under way. Sessions that were begun into it, and pulled bytes, do not need it.
 * Does not block. Thread: any.
 */
FANIN_API void fanin_destination_free(fanin_destination **destination);

/**
 * Says that something other than a pull has written the destination's memory, or may have: a reload
 * from disk, a process that was put to sleep. The next pull reads the whole, whatever
 * options->deltas says. Pulls and sessions into the destination need not be told. Another
 * destination that describes the same memory does. NULL is fine. Does not block. Thread: any.
 */
FANIN_API void fanin_destination_touched(fanin_destination *destination);

/**
 * Pulls into a prepared destination; NULL is FANIN_ERR_ARGUMENT. Blocks and fails as
 * fanin_client_pull(). With options->deltas it may read only what has changed, and also
 * FANIN_ERR_PROTOCOL can come of a rank whose patches contradict what it said of them: the memory
 * is as it was. If the deadline passes while patches are applied, the call finishes that, which
 * takes milliseconds.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_into(
    fanin_client *client, const fanin_pull_options *options, fanin_destination *into,
    fanin_result **result_out, fanin_error *error);

/**
 * Begins a session of a prepared destination, as fanin_client_begin(); NULL is FANIN_ERR_ARGUMENT.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_begin_into(
    fanin_client *client, const fanin_pull_options *options, fanin_destination *into,
    fanin_session **session_out, fanin_error *error);

/**
 * Writes the publication as a PEFT adapter directory: adapter_model.safetensors,
 * adapter_config.json and fanin.json (identity). The directory appears whole, by rename, or not at
 * all. No other user may write to it. Two processes of one user that ask for one directory at once
 * pull once. The pull removes what killed pulls have left in the parent directory, as
 * fanin_sweep_adapter_directory().
 *
 * @p directory does not exist, is empty, or holds the same identity. The identity is world id,
 * publication, step, key table, and the dtype that F32 was converted to. If it is the same, the
 * call compares the files with their digests and asks the ranks for no tensor. The result says
 * "reused".
 *
 * A rank that was started again may have other bytes of the same step. Unless the ranks that were
 * not have all of it, the call pulls and replaces the directory at one moment, and logs which rank
 * it was (event "started-again").
 *
 * These are FANIN_ERR_EXISTS:
 * - another content;
 * - what another user could have put there: a link, or a directory, file or lock that is not ours
 *   or that others may write to;
 * - a parent that belongs to another user than root, or that others may write to and that is not
 *   sticky; the call then makes nothing;
 * - a name that in the end is not that of the directory that was filled.
 *
 * Blocks at most options->timeout_ms, plus what fsync takes and what fanin_client_pull() says.
 *
 * Errors: those of fanin_client_pull(), and
 * - FANIN_ERR_ARGUMENT: no directory, or a name that is invalid or longer than 200 bytes. Or a
 *   "full:<run>", which fanin_client_pull_model() takes; that call in turn takes no "lora:<run>".
 * - FANIN_ERR_EXISTS: something else is there; says what. Remove it, or pull into another place.
 *   Also a directory that would be replaced, with a file in it that no pull has made.
 * - FANIN_ERR_IO: the disk is full, permission or the parent directory is missing, or a limit of
 *   file sizes is reached. sys_errno says which. Also a directory that would be replaced, on a file
 *   system that cannot exchange two.
 * - FANIN_ERR_LIMIT: also a file larger than a quarter of its file system, if max_bytes is 0.
 * - FANIN_ERR_MISMATCH: also metadata that are missing or contradict the tensors: names them.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_adapter(
    fanin_client *client, const fanin_pull_options *options, const char *directory,
    fanin_result **result_out, fanin_error *error);

/**
 * Writes the publication as a model's directory, as Hugging Face's save_pretrained() lays it out:
 * - model-00001-of-0000N.safetensors and so on, with model.safetensors.index.json; or one
 *   model.safetensors, if options->max_file_bytes lets all tensors be in one file;
 * - config.json, if the publication's metadata have "config";
 * - fanin.json (identity).
 *
 * Tensors keep the names under which they are published. The call writes layers in the order of
 * their numbers. @p directory is as of fanin_client_pull_adapter(). A directory of the same
 * identity in files of another size is FANIN_ERR_EXISTS.
 *
 * The files are mapped while they fill, and go to the disk as they fill. So the memory that is held
 * is the kernel's cache of them. Where a file system has no shared mappings, the model is in this
 * process's memory until it is written (log event "adapter-no-mmap"). Each file takes a descriptor.
 *
 * Blocks as fanin_client_pull_adapter() does.
 *
 * Errors: those of fanin_client_pull_adapter(), but if max_bytes is 0, a file system is filled as
 * far as it goes, and
 * - FANIN_ERR_MISMATCH: also a "config" that is no JSON object, or a name that safetensors cannot
 *   hold.
 * - FANIN_ERR_LIMIT: also more than 99,999 files. Raise max_file_bytes.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_model(
    fanin_client *client, const fanin_pull_options *options, const char *directory,
    fanin_result **result_out, fanin_error *error);

/**
 * Removes from @p directory what killed pulls into it have left. These are half-made directories
 * (".<name>.fanin-tmp-<16 hex digits>") and lock files (".<name>.fanin-lock") of this user. It
 * removes none whose name's lock is held. On a filesystem that other hosts share it removes
 * nothing, since locks there tell nothing of other hosts. *@p removed_out (may be NULL) counts the
 * half-made directories that are gone. Files that cannot be removed stay.
 *
 * Waits for nothing, and blocks as long as deleting takes. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no directory, or one in which other users may rename files. Keep adapters
 *   in a directory that only you can write to.
 * - FANIN_ERR_IO: the directory cannot be read; sys_errno says why.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_sweep_adapter_directory(
    const char *directory, uint64_t *removed_out, fanin_error *error);

/**
 * The name under which fanin_client_pull_adapter() writes the tensor @p name: with PEFT's prefix,
 * without wrappers' components and PEFT's adapter name. Returns false, and writes nothing, if the
 * name does not fit @p capacity or @p name is invalid. FANIN_MAX_NAME + 32 bytes always suffice.
 * Thread: any.
 */
FANIN_API FANIN_MUST_CHECK bool fanin_adapter_name(const char *name, char *out,
                                                   size_t capacity);

/** What guarded the bytes of a pull on their way. */
typedef int32_t fanin_checksums;
enum {
    FANIN_CHECKSUMS_NONE = 0, /**< some came over a network without checksums of ours */
    FANIN_CHECKSUMS_ALL =
        1, /**< what came over a network came with checksums, or by TLS, and they fit */
    FANIN_CHECKSUMS_LOCAL = 2, /**< nothing came over a network */
};

/** What a pull did. Strings live as long as the result. */
typedef struct fanin_result_info {
    size_t struct_size;
    uint64_t step;
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint64_t bytes;   /**< of tensor data */
    uint64_t tensors; /**< filled or written */
    uint64_t reads;   /**< read requests or one-sided gets */
    uint32_t restarts, stale;
    bool reused;             /**< the directory was there already; no rank was read */
    fanin_path path;         /**< of most bytes */
    const char *path_reason; /**< why this path */
    /* nanoseconds; total is the whole call */
    uint64_t connect_ns, catalog_ns, plan_ns, wait_ns, begin_ns, read_ns, scatter_ns,
        end_ns, write_ns, total_ns;
    uint64_t fixed_ns; /**< total minus first read posted to last byte in place */
    /** array of ranks: rank, address, path, reason, bytes, reads, read_ns, connections,
        checksums (true, false or "local"). The time read_ns is from the first read posted to the
        rank's last byte in place. On cuda_ipc one kernel reads all ranks */
    const char *ranks_json;
    /** opening other processes' CUDA memory, in a thread: beside catalog and plan of a first
        pull, else part of connect_ns */
    uint64_t map_ns;
    /** making copy tables on devices; part of connect_ns where memory is mapped meanwhile, else of
        plan_ns */
    uint64_t table_ns;
    fanin_checksums transport_checksums; /**< of what was read; reused: NONE */
    bool verified;      /**< the ranks' digests are those of what has landed */
    uint64_t verify_ns; /**< comparing them */
    /** of options->deltas: the step that patches were applied to, which may be 0; 0 as well if the
        whole was read (whole_because). bytes and tensors are those of the step either way */
    uint64_t base_step;
    /** read of patches, with their directories, in all attempts */
    uint64_t patch_bytes;
    uint64_t apply_ns; /**< applying them */
    /** a sentence: why the whole was read; NULL: it was not, or nobody asked for less */
    const char *whole_because;
} fanin_result_info;

/** Fills @p info up to its struct_size; NULL as a result: with zeros. Does not block. */
FANIN_API void fanin_result_get(const fanin_result *result, fanin_result_info *info);
/** Frees, also after the client; *@p result becomes NULL. NULL and *result == NULL are fine. */
FANIN_API void fanin_result_free(fanin_result **result);

/* -------------------------------------------------------------- catalogs */

typedef struct fanin_rank_info {
    size_t struct_size;
    int32_t rank;        /**< -1: never answered */
    uint32_t world_size; /**< 0: never answered */
    const char *address;
    const char *server_name; /**< "" if it never answered */
    uint8_t world_id[16], incarnation[16];
    const char *software;    /**< library version of the rank */
    const char *ucx_version; /**< "" without UCX */
    fanin_status status;     /**< FANIN_OK: connected */
    const char *message;     /**< why not, "" otherwise */
    bool silent; /**< not connected: it refused nothing, and said nothing in time */
} fanin_rank_info;

typedef struct fanin_publication_info {
    size_t struct_size;
    const char *name;
    uint32_t rank; /**< whose view this is */
    int32_t state; /**< FANIN_PUBLICATION_... */
    uint64_t step; /**< last committed */
    uint64_t epoch, catalog_version;
    uint64_t tensors, bytes; /**< bytes held by this rank */
    uint8_t key_digest[16];
    /** Milliseconds when the rank answered: since it has this state, or since the commit that
        renewed it; and since the last commit. 0: not known (an older rank, nothing committed) */
    uint64_t state_age_ms, commit_age_ms;
    /** 1 and the last step that was withdrawn (fanin_server_withdraw()), whatever came since. 0:
        none. By it a step that was wrong differs from one whose next update was aborted */
    uint64_t taken_back;
    /** how many steps the patches of this rank lead back (fanin_commit_options.deltas), and bytes
        of the newest. 0: it keeps none, or it is an older rank */
    uint64_t patches, patch_bytes;
} fanin_publication_info;
enum {
    FANIN_PUBLICATION_UNPUBLISHED = 0,
    FANIN_PUBLICATION_STABLE = 1,
    FANIN_PUBLICATION_DRAINING = 2,
    FANIN_PUBLICATION_WRITING = 3,
    FANIN_PUBLICATION_PAUSED = 4, /**< the trainer's memory is away for now */
};

/** One box that one rank holds. */
typedef struct fanin_owner {
    uint32_t rank;
    uint64_t offset[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
    uint64_t bytes;
    uint32_t region;        /**< number in the rank's region table */
    uint64_t region_offset; /**< bytes */
    bool packed;
} fanin_owner;

typedef struct fanin_entry {
    size_t struct_size;
    const char *name;
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t bytes; /**< of the whole tensor */
    const fanin_owner *owners;
    size_t n_owners;
} fanin_entry;

/** Callbacks get pointers that are valid during the call; return false to stop. */
typedef bool (*fanin_rank_fn)(void *cookie, const fanin_rank_info *info);
typedef bool (*fanin_publication_fn)(void *cookie, const fanin_publication_info *info);
typedef bool (*fanin_entry_fn)(void *cookie, const fanin_entry *entry);

/** The ranks as last seen: @p fn once for each address. Does not block. */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_ranks(fanin_client *client,
                                                           fanin_rank_fn fn,
                                                           void *cookie,
                                                           fanin_error *error);

/**
 * Asks every rank what it publishes: one call of @p fn a rank and publication. The call asks
 * connected ranks at once, the others as soon as they are connected. Each rank counts for itself.
 * One that refused, or gave no answer within @p timeout_ms, is left out. fanin_client_ranks() then
 * says why.
 *
 * Blocks at most @p timeout_ms. FANIN_OK if one rank answered.
 *
 * Errors:
 * - FANIN_ERR_WORLD: the ranks do not belong together, as fanin_client_connect().
 * - Any other of fanin_client_connect(): no rank answered. The error is the first rank's.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_list(fanin_client *client,
                                                          uint32_t timeout_ms,
                                                          fanin_publication_fn fn,
                                                          void *cookie,
                                                          fanin_error *error);

/**
 * Lists the publication's tensors in canonical (byte) order of names, with every rank's boxes. @p
 * name not NULL: that tensor only. Waits for a first commit; blocks at most @p timeout_ms.
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: the run or tensor does not exist.
 * - FANIN_ERR_MISMATCH, FANIN_ERR_LIMIT, FANIN_ERR_STALE, FANIN_ERR_PAUSED, FANIN_ERR_TIMEOUT: as
 *   fanin_client_pull(); and those of fanin_client_connect().
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_catalog(
    fanin_client *client, const char *publication, const char *name,
    uint32_t timeout_ms, fanin_entry_fn fn, void *cookie, fanin_error *error);

/**
 * Lists the publication's metadata; @p fn gets pairs as (key, value). They are the same on all
 * ranks. The call takes those of the first rank that answers, and waits for a first commit there.
 * Blocks and fails as fanin_client_catalog().
 */
typedef bool (*fanin_pair_fn)(void *cookie, const char *key, const char *value);
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_metadata(
    fanin_client *client, const char *publication, uint32_t timeout_ms,
    fanin_pair_fn fn, void *cookie, fanin_error *error);

/**
 * Makes the text that fanin_client_pull_adapter() would write into adapter_config.json. @p fn gets
 * the file's name and its text, once. Of a "full:<run>" it is config.json of
 * fanin_client_pull_model(). If the publication has none, the call does not call @p fn. Of @p
 * options only publication, timeout_ms and trust_config count. Blocks at most options->timeout_ms.
 *
 * Errors: those of fanin_client_catalog(), and
 * - FANIN_ERR_MISMATCH: tensors and metadata make no configuration: names what is missing.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_adapter_config(fanin_client *client, const fanin_pull_options *options,
                            fanin_pair_fn fn, void *cookie, fanin_error *error);

/**
 * Waits for a step as a pull with these options does, and reads nothing of it. It returns once the
 * ranks that a pull needs have committed a step. *@p step (may be NULL) is that step. Of the
 * options, publication, rule, step and timeout_ms count. The connections stay.
 *
 * Blocks at most options->timeout_ms.
 *
 * Errors: those of fanin_client_connect(), and
 * - FANIN_ERR_NOT_FOUND: the run does not exist (names those there are).
 * - FANIN_ERR_SUPERSEDED, FANIN_ERR_PAUSED: as fanin_client_pull().
 * - FANIN_ERR_MISMATCH, FANIN_ERR_LIMIT, FANIN_ERR_STALE: of catalogs. The call fetches them only
 *   to find out whether a pull needs the ranks that are missing or behind.
 * - FANIN_ERR_TIMEOUT: names the ranks that are behind.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_wait(fanin_client *client, const fanin_pull_options *options,
                  uint64_t *step, fanin_error *error);

/** What fanin_client_watch() reports. */
typedef struct fanin_watch_event {
    size_t struct_size;
    uint64_t step;        /**< committed on every connected rank */
    uint64_t step_newest; /**< of the rank that is furthest */
    uint64_t spread_ns;   /**< between the first and the last rank's commit of step */
    int32_t slowest_rank;
} fanin_watch_event;
typedef bool (*fanin_watch_fn)(void *cookie, const fanin_watch_event *event);

/** What one rank is doing with a publication. */
typedef struct fanin_rank_state {
    size_t struct_size;
    uint32_t rank;
    const char *address;
    int32_t state;         /**< FANIN_PUBLICATION_... */
    uint64_t step;         /**< last committed; 0: none */
    uint64_t state_age_ms; /**< since it has this state; 0: not known */
} fanin_rank_state;
/** @p quiet_ms: for how long no step has been committed on all ranks. */
typedef bool (*fanin_quiet_fn)(void *cookie, uint64_t quiet_ms,
                               const fanin_rank_state *ranks, size_t count);

/**
 * Watches as fanin_client_watch(), and also reports silence. When @p quiet_ms (not 0) have passed
 * without a call of @p fn, @p quiet gets the state of every rank. It too ends the watch by
 * returning false. @p quiet may be NULL: never.
 *
 * Errors: those of fanin_client_watch(), and
 * - FANIN_ERR_ARGUMENT: @p quiet_ms is 0.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_follow(fanin_client *client, const char *publication, uint32_t timeout_ms,
                    fanin_watch_fn fn, uint32_t quiet_ms, fanin_quiet_fn quiet,
                    void *cookie, fanin_error *error);

/**
 * Calls @p fn once for each step committed on all ranks, until @p fn returns false. That is
 * FANIN_OK. If nothing is published yet, the call waits. All ranks must be there. The call closes
 * the connections when it ends; the next call makes them again. Blocks at most @p timeout_ms.
 *
 * Errors:
 * - FANIN_ERR_TIMEOUT: the time is over.
 * - FANIN_ERR_NOT_FOUND: the ranks publish other runs and not this one; the message names those.
 * - FANIN_ERR_WORLD, and the others of fanin_client_connect(): a rank is missing, or was lost.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_watch(fanin_client *client, const char *publication, uint32_t timeout_ms,
                   fanin_watch_fn fn, void *cookie, fanin_error *error);

/**
 * What a rank says of one publication. Ages are in milliseconds when the rank answered, rounded up.
 * 0: there is none, or it is not known.
 */
typedef struct fanin_publication_stats {
    size_t struct_size;
    const char *name;
    int32_t state; /**< FANIN_PUBLICATION_... */
    uint64_t step; /**< last committed */
    uint64_t state_age_ms, commit_age_ms;
    uint64_t update_age_ms; /**< since begin_update of the update that is under way */
    uint64_t leases, lease_age_ms; /**< that readers hold; the oldest one's age */
    bool pending;                  /**< a commit waits for its stream */
    const char *reason;            /**< of a pause, "" otherwise */
    /** of what this rank holds of it, and what readers have got of that since the last commit. One
        pull of everything takes as much as all ranks hold. Older ranks tell neither */
    uint64_t bytes, bytes_left;
} fanin_publication_stats;

/** A session that holds leases of a publication. */
typedef struct fanin_lease_holder {
    size_t struct_size;
    const char *publication;
    const char *who;     /**< "10.0.0.7", "this user" (the rank's), "this host" */
    uint64_t leases;     /**< that it holds */
    uint64_t age_ms;     /**< of the oldest */
    uint64_t held_up_ns; /**< for which all leases from there have held updates up */
} fanin_lease_holder;

/** An engine that hands on what it has read, as it told the rank. */
typedef struct fanin_told_relay {
    size_t struct_size;
    const char *publication;
    const char *address; /**< "10.0.0.7:7000"; ":7000": on the rank's own host */
    const char *place;   /**< "": it told none */
    uint64_t step;
    uint64_t units, landed; /**< of the step: how many there are, and how many it has */
    uint64_t bytes_origin, bytes_relays, bytes_handed_on; /**< since it began */
    uint64_t late, taken_over; /**< units of the step: see fanin_server_stats */
} fanin_told_relay;

/** What a rank says of itself. Counters are since it was created; 0: not known. */
typedef struct fanin_rank_stats {
    size_t struct_size;
    bool counted; /**< false: an older release, which tells states and ages alone */
    uint64_t rtt_ns;
    uint64_t pulls_good, pulls_stale, pulls_abandoned; /**< as in fanin_server_stats */
    uint64_t begins_granted, begins_refused;
    uint64_t updates, commits;
    uint64_t sessions, leases; /**< now */
    uint64_t bytes_streamed;   /**< on data connections */
    uint64_t drain_wait_ns_max;
    uint64_t drain_waits[FANIN_DRAIN_BUCKETS]; /**< fanin/types.h */
    uint64_t
        publications; /**< that there are; at most 64 are told, in the order of names */
    const fanin_publication_stats *const *entries;
    size_t n_entries;
    /** at most 64. The rank tells them only to its own user on its host and to readers that have
        proven the launch's secret. So the list can be empty although there are leases */
    const fanin_lease_holder *const *holders;
    size_t n_holders;
    uint64_t drain_wait_ns_total;
    uint64_t cpu_ns; /**< CPU time of the thread that serves control connections */
    uint64_t sends_waiting; /**< now: as in fanin_server_stats */
    uint64_t bytes_tls, bytes_cma, bytes_rdma, bytes_cuda_ipc; /**< likewise */
    uint64_t data_cpu_ns; /**< CPU time of the threads that send tensors */
    /** as in fanin_server_stats, of the rank that relays offer to: the first one that answers */
    uint64_t relays, relay_units, relay_bytes_origin, relay_bytes_relays, relay_late,
        relay_taken_over;
    /** at most 64, told to the same readers as holders */
    const fanin_told_relay *const *told_relays;
    size_t n_told_relays;
} fanin_rank_stats;

/** @p stats is NULL if the rank gave no answer: @p rank says why. */
typedef bool (*fanin_stats_fn)(void *cookie, const fanin_rank_info *rank,
                               const fanin_rank_stats *stats);

/**
 * Asks every rank at once for its state, of one publication (@p publication) or of all (NULL). The
 * call calls @p fn once for each address, until @p fn returns false. It takes no lease, and costs a
 * rank some microseconds. Each rank counts for itself. @p fn gets NULL for one that refused, or
 * gave no answer within @p timeout_ms.
 *
 * Blocks at most @p timeout_ms. FANIN_OK if one rank answered.
 *
 * Errors, after @p fn was called: as fanin_client_list().
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_stats(fanin_client *client, const char *publication, uint32_t timeout_ms,
                   fanin_stats_fn fn, void *cookie, fanin_error *error);

/**
 * Measures the round trip to every rank. @p fn gets the rank's info and @p rtt_ns in nanoseconds;
 * 0: no answer. The call asks connected ranks at once, the others as soon as they are connected.
 * Each rank counts for itself. Blocks at most @p timeout_ms. FANIN_OK if one rank answered.
 *
 * Errors, after @p fn was called for all ranks: as fanin_client_list().
 */
typedef bool (*fanin_ping_fn)(void *cookie, const fanin_rank_info *info,
                              uint64_t rtt_ns);
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_ping(fanin_client *client,
                                                          uint32_t timeout_ms,
                                                          fanin_ping_fn fn,
                                                          void *cookie,
                                                          fanin_error *error);

#ifdef __cplusplus
}
#endif
#endif
