/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The client of inference workers: connects to every trainer rank, pulls a publication and
 * puts it together in the caller's memory or as a directory, a PEFT adapter's or a model's.
 *
 * Threads: one thread at a time uses a client; fanin_client_cancel() may come from any, also from a
 * signal handler. Callbacks come in the calling thread, but the log's. Of their client they may
 * call fanin_client_cancel() and nothing else. The calling thread does the work, with helper
 * threads that end before the call returns. Four kinds of thread do not:
 *
 * - one that asks for a host's name, which getaddrinfo() does not give back;
 * - one that makes the spare file, if pull options ask for that;
 * - those that read beside the calling one (fanin_client_config.threads), which sleep between
 * calls;
 * - one that tells four ranks or more that a pull by cma or cuda_ipc is over, and then sleeps.
 *
 * The last three end when the client is disconnected or destroyed.
 *
 * Fork: a handle used in a forked child gives FANIN_ERR_FORKED and touches nothing.
 *
 * Environment: create clients before other threads use getenv() (see fanin/server.h).
 *
 * Errors come as a status and, if @p error is not NULL, as what happened, which rank, and what
 * to do. Each call lists its own. These can come of every call that takes a client and are not
 * repeated:
 * - FANIN_ERR_ARGUMENT: the client is NULL, a required pointer is, or a struct_size is not
 *   set. Fix the call.
 * - FANIN_ERR_STATE: there are no addresses yet. Call fanin_client_connect() first. Or a pull
 *   session of the client is open: end it first.
 * - FANIN_ERR_FORKED: the handle belongs to the parent process. Create one in the child; that fails
 * so
 *   too if another thread of the parent was loading UCX or OpenSSL, or within OpenSSL, at the fork.
 * - FANIN_ERR_MEMORY: out of memory.
 * - FANIN_ERR_CANCELLED: fanin_client_cancel() was called.
 * - FANIN_ERR_INTERNAL: a bug in this library. Report it with its message.
 *
 * What a rank itself reports is told with that rank's status, number and address; of a status
 * that is in no list, its hundred says what to replace (fanin/error.h).
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
    /** demand this world; all zero, which no trainer may announce: any */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    /** for one rank, and for each data connection to it, default 5000 */
    uint32_t connect_timeout_ms;
    /** a rank that owes an answer and is silent for so long is lost, default 5000 */
    uint32_t lost_ms;
    /** bytes asked for and not yet here, all ranks together, default 64 MiB */
    uint64_t max_inflight;
    uint64_t max_catalog; /**< bytes of catalog accepted a rank, default 256 MiB */
    /** data connections; 0 (default): 4 to another host; on this one 1, or one for each thread that
        reads the rank, 4 at most, by TLS no more than an eighth of the CPUs unless `threads` is
        set; at most 16 */
    uint32_t streams_per_rank;
    fanin_path path;  /**< default FANIN_PATH_AUTO */
    bool no_unix;     /**< TCP even on one host */
    bool no_ucx;      /**< never load UCX: no rdma */
    fanin_log_fn log; /**< default none, or what FANIN_LOG says (fanin/log.h) */
    void *log_cookie;
    /** do without checksums over TCP, where the network itself tells altered bytes (IPsec,
        WireGuard). Default: every frame and every reply with weights has one, and what does not
        fit is FANIN_ERR_TRANSPORT and asked for again. Unix sockets have none */
    bool no_checksums;
    /** the addresses may be those of some of the world's ranks, to look at these; a pull
        succeeds only if they hold everything */
    bool partial;
    /** threads that read at once into host memory on the paths stream and cma, the calling one
        included: 0 (default): half of the CPUs that the process may use (affinity, quota), and
        fewer of little; 1: the calling thread alone; at most 64. By stream at most 8 unless told,
        never more than there are data connections, nor than max_inflight has 4 MiB: where they are
        more than the ranks, several read one rank. Those that read shake hands, by TLS, over the
        data connections that are theirs; over the control connections of eight ranks and more as
        many threads do, while they are made */
    uint32_t threads;
    /** a rank that listens on its Unix socket with this process's uid is believed and read there,
        whatever container it lives in. Default: not in another user or pid namespace, nor where the
        kernel does not show its process; those are asked over TCP, which the log tells once (event
        "unix-stranger"). FANIN_TRUST_CONTAINERS=1 in the environment sets it as well. One-sided
        paths need FANIN_SERVER_TRUST_CONTAINERS too */
    bool trust_containers;
    /** a rank on a loopback address may be any user's, and one whose user the kernel does not tell.
        Default: this process's own or root's, else FANIN_ERR_AUTH. FANIN_TRUST_OTHER_USERS=1 in the
        environment sets it as well */
    bool trust_other_users;
    /** the file with the launch's secret, 64 hexadecimal digits or 32 bytes: TCP connections are by
        TLS 1.3 then, to ranks that have the same secret and prove which rank they are; others are
        FANIN_ERR_AUTH. Unix sockets stay as they are. NULL (default): what the environment's
        FANIN_SECRET_FILE names, if anything; "": none. The file, to which symbolic links may lead,
        belongs to the process's user or to root, and others may not use it; its group may read one
        of root's. It is read once. Needs OpenSSL 3 when the client is created */
    const char *secret_file;
    /** instead of a secret: PEM files of this process's certificate (and what leads from it to an
        authority behind it), its key, and the authorities that the ranks' certificates are from.
        TCP connections are by TLS 1.3 then, both ends show a certificate, and this one's
        names "fanin://JOB/reader" among its subject's alternative names, the rank's
        "fanin://JOB/rank/N", or with a star for N any rank, of the same job; others are
        FANIN_ERR_AUTH. NULL (default): what the environment's FANIN_TLS_CERT, FANIN_TLS_KEY and
        FANIN_TLS_CA name, unless secret_file is given; "": none. All three or none. Owned as the
        secret's file is; others may not read the key, nor write any. A thread looks at them once a
        second, and new connections use what it has read (event "certificates") */
    const char *tls_cert;
    const char *tls_key; /**< see tls_cert */
    const char *tls_ca;  /**< see tls_cert */
} fanin_client_config;

/** Defaults. @p size is the caller's sizeof(fanin_client_config); never writes past it. */
FANIN_API void fanin_client_config_init(fanin_client_config *config, size_t size);

/**
 * Copies @p config; the caller owns *@p client_out and ends it with fanin_client_destroy().
 * Waits for nobody; takes as long as loading UCX does, which is not an error if it fails.
 * Takes those of the descriptors 0 to 2 that are closed, as fanin_server_create() does.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: an unknown path, more than 16 connections a rank or 64 threads, a time of
 *   0. Fix @p config.
 * - FANIN_ERR_LIMIT: no descriptor left, or, with certificates, no thread. Raise `ulimit -n`, or
 * `ulimit -u`.
 * - FANIN_ERR_IO: the kernel gives no random bytes.
 * Of a secret or certificates: FANIN_ERR_NOT_FOUND, there is no such file; FANIN_ERR_AUTH, its
 * owner or mode, a certificate that is somebody else's or has expired; FANIN_ERR_ARGUMENT, it holds
 * something else, both or not all are given; FANIN_ERR_IO, it cannot be read;
 * FANIN_ERR_UNSUPPORTED, there is no OpenSSL 3, or none that does TLS 1.3;
 * FANIN_ERR_MEMORY. All say what to do. Of FANIN_LOG: see fanin/log.h.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_create(
    const fanin_client_config *config, fanin_client **client_out, fanin_error *error);

/**
 * fanin_client_disconnect(), and frees; *@p client becomes NULL. NULL and *client == NULL are
 * fine. No other call of this handle may be under way, fanin_client_cancel() included. In a
 * forked child it frees nothing. Blocks as fanin_client_disconnect().
 */
FANIN_API void fanin_client_destroy(fanin_client **client);

/**
 * Makes a running call of this client return FANIN_ERR_CANCELLED soon; if none runs, the
 * next one does. NULL is fine. Does not block. Thread: any, also from a signal handler.
 */
FANIN_API void fanin_client_cancel(fanin_client *client);

/**
 * Connects to all ranks at once and learns who they are. @p addresses: "host:port",
 * "[v6]:port", one a rank, in any order. Succeeds when all ranks of one world answer, or when
 * at least one does (the others go on connecting, or are tried again, during each pull; who is
 * silent is waited for during half of the time at most, and by pulls that need it. A pull
 * whose bytes only a missing rank holds names it, also while it waits for a step).
 *
 * Names are looked up side by side, each once, by threads of their own (getaddrinfo() has
 * neither a deadline nor an end from outside): at the deadline the call returns, and such a
 * thread stays until the name server has answered it; at most 64 of them in a process.
 * Addresses in numbers need none.
 *
 * Arguments are checked first; then connections that the client had are closed, as by
 * fanin_client_disconnect(), and after an error it has none. Blocks at most @p timeout_ms, and
 * as long as that closing takes.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no address, an address twice or malformed. Give the address of every
 *   rank once.
 * - FANIN_ERR_UNREACHABLE: nobody answered (names the first rank), or a name does not resolve.
 *   Is the trainer running, is the address right?
 * - FANIN_ERR_CLOSED: the same, of a rank that is shutting down.
 * - FANIN_ERR_TIMEOUT: nobody answered, or a name was not resolved, before the deadline.
 * - FANIN_ERR_WORLD: different worlds (says which ranks are of which), a rank twice, another
 *   world size than addresses, another world id or job than the configuration demands. Restart
 *   or end the ranks of the earlier launch, or give the right addresses.
 * - FANIN_ERR_AUTH: the rank does not admit this client's address. Add its network to the
 *   trainer's allow. Or the process that listens on a loopback address is another user's, or the
 *   kernel does not say whose: set trust_other_users if that is meant.
 * - FANIN_ERR_VERSION: no protocol version in common. Use releases that have one.
 * - FANIN_ERR_PROTOCOL: something else answers there, or a rank breaks the protocol.
 * - FANIN_ERR_LIMIT: the rank has all the connections it may; this process has too few
 *   descriptors, or 64 names that are still waited for. The remedy names the limit.
 * - FANIN_ERR_IO: this process gets no socket; sys_errno says why.
 * - FANIN_ERR_TRANSPORT: a checksum did not fit: what came is not what was sent. Look at the
 *   network.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_connect(fanin_client *client, const char *const *addresses, size_t count,
                     uint32_t timeout_ms, fanin_error *error);

/**
 * fanin_client_connect() that returns as soon as one rank has answered. The calls that follow
 * go on connecting to the others, each within its own time, and find what
 * fanin_client_connect() would have said of them: FANIN_ERR_WORLD in particular. Blocks and
 * fails as that does.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_connect_any(fanin_client *client, const char *const *addresses,
                         size_t count, uint32_t timeout_ms, fanin_error *error);

/**
 * Closes all connections, forgets catalogs and addresses, unmaps what was mapped of ranks,
 * drops the spare file. Waits for no rank, and takes as long as unmapping and freeing does.
 * Only one-sided reads that a pull left under way, and whose fabric does not answer, are
 * waited for, and a CUDA stream that a pull gave up waiting for: at most 15 s in all, however
 * many ranks there are; what they could still use stays allocated then.
 */
FANIN_API void fanin_client_disconnect(fanin_client *client);

/** Which step a pull asks for. */
typedef int32_t fanin_step_rule;
enum {
    FANIN_STEP_NEWEST = 0,   /**< whatever is committed on all ranks */
    FANIN_STEP_EXACT = 1,    /**< this very step; waits for it; passed: SUPERSEDED */
    FANIN_STEP_AT_LEAST = 2, /**< this step or a later one */
};

/** How far a pull is; called in the pulling thread while it reads, some 20 times a second, also
    when nothing comes. */
typedef void (*fanin_progress_fn)(void *cookie, uint64_t bytes_done,
                                  uint64_t bytes_total);

/** What one rank has brought to a pull that is under way. */
typedef struct fanin_rank_progress {
    size_t struct_size;
    int32_t rank;
    fanin_path path;
    const char *address;
    /** of what this pull reads from it, of all reads of a session; on cuda_ipc, where one kernel
        reads all ranks, its share of what all have brought */
    uint64_t bytes_done, bytes_total;
    /** for how long it has owed bytes that it was asked for, and brought none; 0: it owes none */
    uint64_t quiet_ms;
} fanin_rank_progress;

/** How far a pull is, and by whom. */
typedef struct fanin_pull_progress {
    size_t struct_size;
    uint64_t bytes_done, bytes_total;
    const fanin_rank_progress *const *ranks; /**< those that it reads from */
    size_t n_ranks;
    /** of them the one that it waits for: quiet for longest, and for a second at least; NULL: none
        */
    const fanin_rank_progress *slowest;
} fanin_pull_progress;

/** As fanin_progress_fn; everything that @p progress leads to is valid during the call. */
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
    /** F32 tensors arrive as FANIN_DTYPE_BF16 or FANIN_DTYPE_F16, rounded to nearest even, but in
        memory that is described as F32 they stay so, and in files those that the trainer says
        its model keeps in F32 (the metadata pair "keep_f32"); 0 (default): as published */
    fanin_dtype dtype;
    /** device destinations: they are written only after the work that is on this stream when the
        call is made, for which the call waits (within timeout_ms); none: they are not in use
        when the call is made. The writes have ended when the call returns: no stream has to wait
        for them */
    fanin_stream stream;
    /** fanin_client_pull_adapter(): once a pull of a size has succeeded, keep a hidden file of that
        size ready beside the directory. The next pull into the same parent directory finds its
        memory made. A thread allocates the file's pages between calls, and registers them with CUDA
        if the client uses it. Costs the adapter's size once more, until the client is destroyed or
        disconnected, or until a pull finds that another process has made its directory. Where less
        than as much again would be free, none is kept. A file that was published is never used
        again */
    bool spare_file;
    /** fanin_client_pull_adapter(): adapter_config.json keeps every field of the trainer's
        configuration. Default: of a LoRA configuration only the fields of PEFT that can load no
        code and name no file; the others are left out, and a line of the log (warning,
        "adapter-config") names them; other methods than LoRA are FANIN_ERR_MISMATCH.
        fanin_client_pull_model(): config.json keeps auto_map and custom_pipelines, which name code
        to load; default: they are left out, and told in the same way */
    bool trust_config;
    /** FANIN_ERR_LIMIT, before anything is read or made, if the pull would bring more bytes: the
        tensors' that are wanted, or of the directory's files of tensors. 0: into the caller's
        memory as many as its boxes hold; of an adapter a quarter of the size of the directory's
        file system (of the size, not of what is free: adapters that are there already do not lower
        it); of a model as many as there is room for */
    uint64_t max_bytes;
    /** compare before the leases end: every rank digests the boxes that it served, this process
        what has landed, on every path. Unequal: FANIN_ERR_TRANSPORT, naming rank and key, and
        nothing is published. Reads everything once more on both ends, and needs ranks of this
        release (FANIN_ERR_UNSUPPORTED). A directory that is there already is not compared */
    bool verify;
    /** fanin_client_pull_model(): bytes of tensors in one of its files, what save_pretrained()
        calls max_shard_size; a larger tensor gets a file of its own. 0 (default): 5 GB (5e9) */
    uint64_t max_file_bytes;
    /** besides or instead of progress, with its cookie. Without it a rank that brings nothing for 5
        s, 10 s, 20 s and so on is named in the log (warning, "slow-rank") */
    fanin_rank_progress_fn rank_progress;
} fanin_pull_options;

/** Defaults. @p size is the caller's sizeof(fanin_pull_options); never writes past it. */
FANIN_API void fanin_pull_options_init(fanin_pull_options *options, size_t size);

/**
 * Fills memory of the caller, the host's or CUDA devices'. Each tensor names what is wanted:
 * name, dtype and global shape (must equal the catalog's, or what options->dtype makes of it),
 * and the boxes to fill: the whole tensor or any part of it, each with address and byte
 * strides, all boxes of a tensor in the same kind of memory and on the same device (found out
 * unless the tensor says them). @p count 0 is an error; tensors that are not named are not
 * read.
 *
 * On success all boxes hold the bytes of one step. On failure their content is undefined, also if
 * no step was agreed upon: a pull whose ranks hold something that will probably do may begin to
 * read before they have said so. Nothing writes them after the return. The memory stays the
 * caller's. *@p result_out (may be NULL) is to be freed with fanin_result_free().
 *
 * Blocks at most options->timeout_ms. But one-sided reads and copies of a device that are
 * under way and cannot be recalled are waited for, at most a minute; only what a fabric or a
 * device that hangs does after that may still write the boxes.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: options, or a tensor that it names, are wrong in themselves: no
 *   publication, a time of 0, a box without address or beyond the address space, boxes in different
 *   kinds of memory, all boxes empty. Fix them.
 * - FANIN_ERR_NOT_FOUND: no such run (names those there are) or tensor.
 * - FANIN_ERR_MISMATCH: a tensor is published with another dtype or shape; or the ranks'
 *   catalogs contradict each other, which the trainer has to mend.
 * - FANIN_ERR_INCOMPLETE: the ranks' boxes do not tile what is wanted, or overlap: names
 *   tensor and block. Fix what the trainer puts.
 * - FANIN_ERR_LIMIT: more bytes than options->max_bytes, or a catalog larger than max_catalog.
 *   Raise it if that is right.
 * - FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work with a rank;
 *   the destination is CUDA memory and there is no CUDA; to verify, and a rank of an older
 *   release.
 * - FANIN_ERR_STALE: the trainer rewrote the weights while they were read, at every attempt.
 *   Pull again; the message says what would help.
 * - FANIN_ERR_SUPERSEDED: the exact step has passed. Ask for the newest, or for a least step.
 * - FANIN_ERR_PAUSED: a rank whose bytes no other one holds has paused the run; at once, names
 *   the rank. Pull again when the trainer has resumed it.
 * - FANIN_ERR_TIMEOUT: the deadline passed; names the ranks that are gone, silent or behind.
 * - FANIN_ERR_UNREACHABLE, FANIN_ERR_CLOSED: a rank is gone, and no other one holds what it
 *   held.
 * - FANIN_ERR_WORLD, FANIN_ERR_AUTH, FANIN_ERR_VERSION, FANIN_ERR_PROTOCOL: as
 *   fanin_client_connect(), as lost ranks are connected again.
 * - FANIN_ERR_TRANSPORT: the path failed again and again, a CUDA device has failed, the path
 *   that is forced lacks something on this host, or what landed is not what the ranks verify.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_pull(fanin_client *client, const fanin_pull_options *options,
                  const fanin_tensor *tensors, size_t count, fanin_result **result_out,
                  fanin_error *error);

/**
 * Begins a pull that fills memory in several calls: for memory that is used in between (a few
 * layers that are read, installed and read over by the next ones). All bytes are of one step:
 * what fanin_session_read() has filled counts only once fanin_session_end() has succeeded; until
 * then it may be torn. Connects what is down, waits for the step, fetches catalogs, plans
 * everything, chooses and prepares paths, and takes leases of all ranks that serve bytes. Attempts
 * that the trainer overtakes before it has the leases start again by themselves.
 *
 * @p options and @p all as of fanin_client_pull(), with these differences: timeout_ms is for the
 * whole session, from this call to the end of fanin_session_end(); max_attempts does not count;
 * `stream`: each read comes after the work that is on it when that read is called; progress tells
 * of all bytes of the session. @p all may go when this returns, the memory of its boxes not before
 * the session has ended. The caller ends *@p session_out with fanin_session_end() or
 * fanin_session_abandon().
 *
 * Until then every other call of the client is FANIN_ERR_STATE, but for fanin_client_cancel(),
 * fanin_client_disconnect() and fanin_client_destroy(); those two abandon the session, which is
 * still to be ended. Sessions of other clients are no matter.
 *
 * Between the calls nothing runs: no thread of the library's (some sleep), no question to a rank.
 * Ranks do not mind: they ask nothing either, and hold a lease for as long as their weights stand.
 * But the trainer's updates wait for it only until its lease time is over (`lease_ms`,
 * fanin/server.h); one that comes later makes the session stale, also if it was idle then. A rank
 * closes connections that were silent for its idle_ms (5 minutes), and the session is over then.
 *
 * Blocks at most options->timeout_ms. Errors: those of fanin_client_pull() but for what is found
 * while reading.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_begin(
    fanin_client *client, const fanin_pull_options *options, const fanin_tensor *all,
    size_t count, fanin_session **session_out, fanin_error *error);

/**
 * Fills the boxes of the tensors [@p first, @p first + @p count) of those that the session has: any
 * number of calls, in any order, also of tensors that were read before. Tensors without boxes and
 * a count of 0 are fine. What a part is read by is planned when it is first read, and kept for
 * later sessions of the same layout: cut alike in each of them.
 *
 * Nothing writes the boxes after the return; what is not asked for is not written. With
 * options->verify the part is compared before it returns.
 *
 * After an error, but for an argument that is wrong, the session has failed: its leases are given
 * back, nothing that it has read may be used, further reads and the end tell the same error. Blocks
 * until the session's deadline at most, and as fanin_client_pull() says.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: the session is NULL, or has no such tensors.
 * - FANIN_ERR_FORKED: the session belongs to the parent process.
 * - FANIN_ERR_STATE: the client was disconnected or destroyed.
 * - FANIN_ERR_STALE: a rank has rewritten its weights since the session began. Told here only by
 *   paths that ask the rank (stream); else by the end. Begin again.
 * - FANIN_ERR_CLOSED, FANIN_ERR_UNREACHABLE: a rank that the session needs is gone, or its
 *   connection was lost: a lease goes with its connection, so nothing is connected anew. Begin
 *   again.
 * - FANIN_ERR_TRANSPORT: a path failed, a device has, or what landed is not what a rank verifies.
 *   Begin again: it goes by another path where there is one.
 * - FANIN_ERR_UNSUPPORTED: to verify, and a rank of an older release.
 * - FANIN_ERR_TIMEOUT: the session's time is over; names a rank that owes an answer.
 * - FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY, FANIN_ERR_PROTOCOL, FANIN_ERR_LIMIT: as everywhere.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_session_read(fanin_session *session,
                                                           size_t first, size_t count,
                                                           fanin_error *error);

/** The step that the session reads; 0 for NULL. Does not block. */
FANIN_API uint64_t fanin_session_step(const fanin_session *session);

/**
 * Ends the leases on all ranks. FANIN_OK: all that was read is of fanin_session_step(). Whether all
 * tensors were read is the caller's business; the result's bytes and tensors count what was, and
 * again what was read again. *@p result_out (may be NULL: nobody wants it) is to be freed with
 * fanin_result_free().
 *
 * In any case the session is gone, *@p session is NULL, and the client may be used again; only in
 * a forked child nothing is freed. Blocks until the session's deadline at most.
 *
 * Errors, after each of which nothing that was read may be used:
 * - FANIN_ERR_STALE: a rank has rewritten its weights meanwhile (names it). Begin again.
 * - That of an earlier read; else as of fanin_session_read().
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_session_end(fanin_session **session,
                                                          fanin_result **result_out,
                                                          fanin_error *error);

/**
 * Gives the leases back without waiting for anybody, and frees; *@p session becomes NULL. Nothing
 * that was read may be used. NULL and *session == NULL are fine. In a forked child it frees
 * nothing. Does not block.
 */
FANIN_API void fanin_session_abandon(fanin_session **session);

/* ---------------------------------------------------- prepared destinations */

/**
 * Describes a destination once, for pulls that are repeated: copies what @p tensors, as of
 * fanin_client_pull(), point to but for the boxes' memory, checks it, and finds out where that
 * memory is. A pull by fanin_client_pull_into() then looks at no description while plan and
 * catalogs stand: of a large adapter that is most of what it costs besides reading. @p tensors may
 * go or change when this returns; the destination stays what it was.
 *
 * It belongs to no client: any number of them, in any threads, may pull into it (into the same
 * memory one after the other). It stands through new steps, catalogs, connections and trainers:
 * what does
 * not fit is found by the pull. CUDA memory that was freed and allocated again at the same address
 * is found anew, which takes as long as a pull without; host memory must be there for as long as
 * the destination is used.
 *
 * The caller ends *@p destination_out with fanin_destination_free(). Some 400 bytes for each tensor
 * of one box. Waits for nobody. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no tensors, or one that is wrong in itself, as of fanin_client_pull().
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_destination_create(const fanin_tensor *tensors, size_t count,
                         fanin_destination **destination_out, fanin_error *error);

/**
 * Frees; *@p destination becomes NULL. NULL and *destination == NULL are fine. No call that was
 * given it may be under way; sessions that were begun into it, and what was pulled, do without.
 * Does not block. Thread: any.
 */
FANIN_API void fanin_destination_free(fanin_destination **destination);

/**
 * fanin_client_pull() into a prepared destination; NULL is FANIN_ERR_ARGUMENT. Blocks and fails as
 * that does.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_into(
    fanin_client *client, const fanin_pull_options *options, fanin_destination *into,
    fanin_result **result_out, fanin_error *error);

/** fanin_client_begin() of a prepared destination; likewise. */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_begin_into(
    fanin_client *client, const fanin_pull_options *options, fanin_destination *into,
    fanin_session **session_out, fanin_error *error);

/**
 * Writes the publication as a PEFT adapter directory: adapter_model.safetensors,
 * adapter_config.json and fanin.json (identity). @p directory must not exist or be empty, or
 * hold the same identity (world id, publication, step, key table, and the dtype that F32 was
 * converted to): then its files are read and compared with their digests, no tensor is asked
 * of the ranks, and the result says "reused". Another content is FANIN_ERR_EXISTS, and so is
 * what another user could have put there: links, a directory, file or lock that is not ours or
 * that others may write to. A parent that others may write to and that is not sticky, or that
 * belongs to another user but root, is FANIN_ERR_EXISTS before anything is made. So is a name that
 * after all does not bear the directory that was filled.
 *
 * The directory appears whole, by rename, or not at all, and nobody else may write to it. Two
 * processes of one user that ask for one directory at once pull once. The pull removes what killed
 * pulls have left in the parent directory: fanin_sweep_adapter_directory().
 *
 * Blocks at most options->timeout_ms, plus what fsync takes and what fanin_client_pull() says.
 *
 * Errors: those of fanin_client_pull(), and
 * - FANIN_ERR_ARGUMENT: no directory, or a name that is none or longer than 200 bytes; a
 *   "full:<run>", which fanin_client_pull_model() takes (and that no "lora:<run>").
 * - FANIN_ERR_EXISTS: something else is there; says what. Remove it, or pull into another
 *   place.
 * - FANIN_ERR_IO: the disk is full, there is no permission or no parent directory, a limit of
 *   file sizes; sys_errno says which.
 * - FANIN_ERR_LIMIT: also a file larger than a quarter of its file system, if max_bytes is 0.
 * - FANIN_ERR_MISMATCH: also metadata that are missing or contradict the tensors: names them.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_adapter(
    fanin_client *client, const fanin_pull_options *options, const char *directory,
    fanin_result **result_out, fanin_error *error);

/**
 * Writes the publication as a model's directory, as Hugging Face's save_pretrained() lays it
 * out: model-00001-of-0000N.safetensors and so on with model.safetensors.index.json, or one
 * model.safetensors, if options->max_file_bytes let all tensors be in one; config.json, if the
 * publication's metadata have "config"; fanin.json (identity). Tensors keep the names under which
 * they are published; layers are written in the order of their numbers. What is said of
 * @p directory by fanin_client_pull_adapter() is true here too; a directory of the same identity
 * in files of another size is FANIN_ERR_EXISTS.
 *
 * The files are mapped while they fill, and on their way to the disk as they do: memory that is
 * held is the kernel's cache of them. Where a file system has no shared mappings, the model is in
 * this process's memory until it is written (a line of the log, "adapter-no-mmap"). One
 * descriptor a file.
 *
 * Blocks as fanin_client_pull_adapter() does.
 *
 * Errors: those of fanin_client_pull_adapter(), but a file system is filled as far as it goes if
 * max_bytes is 0, and
 * - FANIN_ERR_MISMATCH: also a "config" that is no JSON object, or a name that safetensors
 *   cannot hold.
 * - FANIN_ERR_LIMIT: also more than 99,999 files. Raise max_file_bytes.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_pull_model(
    fanin_client *client, const fanin_pull_options *options, const char *directory,
    fanin_result **result_out, fanin_error *error);

/**
 * Removes from @p directory what pulls into it have left that were killed: half-made directories
 * (".<name>.fanin-tmp-<16 hex digits>") and lock files (".<name>.fanin-lock") of this user, if
 * nobody holds the lock of that name. Elsewhere than on filesystems of this host, whose locks
 * tell nothing of other hosts, it removes nothing. *@p removed_out (may be NULL): half-made
 * directories that are gone. What cannot be removed stays.
 *
 * Waits for nobody, blocks as long as deleting takes. Thread: any.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: no directory, or one in which other users may rename what lies there.
 *   Keep adapters in a directory that only you can write to.
 * - FANIN_ERR_IO: it cannot be read; sys_errno says why.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_sweep_adapter_directory(
    const char *directory, uint64_t *removed_out, fanin_error *error);

/**
 * The name under which fanin_client_pull_adapter() writes the tensor @p name: with PEFT's
 * prefix, without wrappers' components and PEFT's adapter name. False, and nothing written:
 * it does not fit @p capacity (FANIN_MAX_NAME + 32 always suffice) or @p name is no name.
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
    /* nanoseconds; total is the whole call. Where a warm pull by cuda_ipc reads ahead of its
       leases: beginning that is begin's, and read is what is left of it when they are held */
    uint64_t connect_ns, catalog_ns, plan_ns, wait_ns, begin_ns, read_ns, scatter_ns,
        end_ns, write_ns, total_ns;
    uint64_t fixed_ns; /**< total minus first read posted to last byte in place */
    /** array: rank, address, path, reason, bytes, reads, read_ns (from the first read posted to
        this rank's last byte in place; on cuda_ipc one kernel reads all ranks), connections,
        checksums (true, false, or "local") */
    const char *ranks_json;
    /** opening other processes' CUDA memory, in a thread: beside catalog and plan of a first pull,
        else part of connect_ns */
    uint64_t map_ns;
    /** making copy tables on devices; part of connect_ns where memory is mapped meanwhile, else of
        plan_ns */
    uint64_t table_ns;
    fanin_checksums transport_checksums; /**< of what was read; reused: NONE */
    bool verified;      /**< the ranks' digests are those of what has landed */
    uint64_t verify_ns; /**< comparing them */
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
    /** Milliseconds since it has this state, or since the commit that renewed it, and since the
        last commit, as the rank answered; 0: not known (an older rank, nothing committed) */
    uint64_t state_age_ms, commit_age_ms;
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
 * Asks every rank what it publishes: one call a rank and publication. Ranks that are connected
 * are asked at once, the others as soon as they are. Each is judged by itself: one that gave
 * no answer until @p timeout_ms had passed, or refused, is left out, and fanin_client_ranks()
 * says why.
 *
 * Blocks at most @p timeout_ms. FANIN_OK if one rank answered.
 *
 * Errors:
 * - FANIN_ERR_WORLD: the ranks do not belong together, as fanin_client_connect().
 * - Any other of fanin_client_connect(): nobody answered; why the first rank did not.
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_list(fanin_client *client,
                                                          uint32_t timeout_ms,
                                                          fanin_publication_fn fn,
                                                          void *cookie,
                                                          fanin_error *error);

/**
 * The publication's tensors in canonical (byte) order of names, with every rank's boxes.
 * @p name not NULL: that tensor only. Waits for a first commit until the timeout, for which it
 * blocks at most.
 *
 * Errors:
 * - FANIN_ERR_NOT_FOUND: no such run or tensor.
 * - FANIN_ERR_MISMATCH, FANIN_ERR_LIMIT, FANIN_ERR_STALE, FANIN_ERR_PAUSED, FANIN_ERR_TIMEOUT:
 *   as fanin_client_pull(); and those of fanin_client_connect().
 */
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_catalog(
    fanin_client *client, const char *publication, const char *name,
    uint32_t timeout_ms, fanin_entry_fn fn, void *cookie, fanin_error *error);

/**
 * The publication's metadata; @p fn gets pairs as (key, value). They are the same on all
 * ranks: those of the first rank that answers are taken. Waits for a first commit there until
 * the timeout. Blocks and fails as fanin_client_catalog().
 */
typedef bool (*fanin_pair_fn)(void *cookie, const char *key, const char *value);
FANIN_API FANIN_MUST_CHECK fanin_status fanin_client_metadata(
    fanin_client *client, const char *publication, uint32_t timeout_ms,
    fanin_pair_fn fn, void *cookie, fanin_error *error);

/**
 * What fanin_client_pull_adapter() would write into adapter_config.json: @p fn gets the file's
 * name and its text, once. Of a "full:<run>" it is config.json of fanin_client_pull_model(), and
 * @p fn is not called if the publication has none. Of @p options only publication, timeout_ms and
 * trust_config count. Blocks at most options->timeout_ms.
 *
 * Errors: those of fanin_client_catalog(), and
 * - FANIN_ERR_MISMATCH: tensors and metadata make no configuration: names what is missing.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_adapter_config(fanin_client *client, const fanin_pull_options *options,
                            fanin_pair_fn fn, void *cookie, fanin_error *error);

/**
 * Waits for a step as a pull with these options does, and reads nothing of it: until the ranks
 * that a pull needs have committed one. *@p step (may be NULL) is that step. Of the options,
 * publication, rule, step and timeout_ms count. The connections stay.
 *
 * Blocks at most options->timeout_ms.
 *
 * Errors: those of fanin_client_connect(), and
 * - FANIN_ERR_NOT_FOUND: no such run (names those there are).
 * - FANIN_ERR_SUPERSEDED, FANIN_ERR_PAUSED: as fanin_client_pull().
 * - FANIN_ERR_MISMATCH, FANIN_ERR_LIMIT, FANIN_ERR_STALE: of catalogs, which it fetches only
 *   to find out whether ranks that are missing or behind can be done without.
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
 * fanin_client_watch() that also speaks while nothing happens: each time that @p quiet_ms (not
 * 0) have passed without a call of @p fn, @p quiet gets the state of every rank. It ends the
 * watch by returning false, too. @p quiet may be NULL: never.
 *
 * Errors: those of fanin_client_watch(), and
 * - FANIN_ERR_ARGUMENT: @p quiet_ms is 0.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_follow(fanin_client *client, const char *publication, uint32_t timeout_ms,
                    fanin_watch_fn fn, uint32_t quiet_ms, fanin_quiet_fn quiet,
                    void *cookie, fanin_error *error);

/**
 * Calls @p fn once for each step committed on all ranks, until @p fn returns false, which is
 * FANIN_OK. If nothing is published yet, it waits. Every rank has to be there. The connections
 * are closed when it ends, and made again by the next call. Blocks at most @p timeout_ms.
 *
 * Errors:
 * - FANIN_ERR_TIMEOUT: the time is over.
 * - FANIN_ERR_NOT_FOUND: the ranks publish other runs and not this one; the message names
 *   those.
 * - FANIN_ERR_WORLD, and what else fanin_client_connect() says: a rank is missing, or was
 *   lost.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_watch(fanin_client *client, const char *publication, uint32_t timeout_ms,
                   fanin_watch_fn fn, void *cookie, fanin_error *error);

/** What a rank says of one publication. Ages in milliseconds as the rank answered, rounded up; 0:
    there is
    none, or it is not known. */
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
    /** at most 64; told only to the rank's own user on its host and to who has proven the launch's
        secret, so none may be here although there are leases */
    const fanin_lease_holder *const *holders;
    size_t n_holders;
    uint64_t drain_wait_ns_total;
    uint64_t cpu_ns; /**< CPU time of the thread that serves control connections */
    uint64_t sends_waiting; /**< now: as in fanin_server_stats */
    uint64_t bytes_tls, bytes_cma, bytes_rdma, bytes_cuda_ipc; /**< likewise */
    uint64_t data_cpu_ns; /**< CPU time of the threads that send tensors */
} fanin_rank_stats;

/** @p stats is NULL if the rank gave no answer: @p rank says why. */
typedef bool (*fanin_stats_fn)(void *cookie, const fanin_rank_info *rank,
                               const fanin_rank_stats *stats);

/**
 * Asks every rank at once what it is at, of one publication (@p publication) or of all (NULL): @p
 * fn once for each address, until it returns false. Takes no lease, and costs a rank some
 * microseconds. Each rank is judged by itself: who gave no answer until @p timeout_ms had passed,
 * or refused, is told with a NULL.
 *
 * Blocks at most @p timeout_ms. FANIN_OK if one rank answered.
 *
 * Errors, @p fn was called nevertheless:
 * - FANIN_ERR_WORLD: the ranks do not belong together, as fanin_client_connect().
 * - Any other of fanin_client_connect(): nobody answered; why the first rank did not.
 */
FANIN_API FANIN_MUST_CHECK fanin_status
fanin_client_stats(fanin_client *client, const char *publication, uint32_t timeout_ms,
                   fanin_stats_fn fn, void *cookie, fanin_error *error);

/**
 * Round trip to every rank: @p fn gets rank infos; rtt in ns through @p rtt_ns, 0: no answer.
 * Ranks that are connected are asked at once, the others as soon as they are; each is judged
 * by itself, and has until @p timeout_ms, for which the call blocks at most. FANIN_OK if one
 * rank answered.
 *
 * Errors, after @p fn was called for all ranks:
 * - FANIN_ERR_WORLD: the ranks do not belong together, as fanin_client_connect().
 * - Any other of fanin_client_connect(): nobody answered; why the first rank did not.
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
