/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What server and client have in common: version, dtypes, boxes, tensors, pairs, and these rules.
 *
 * Environment: create servers and clients before other threads use getenv(). While fanin loads UCX,
 * it sets UCX_MEM_EVENTS, UCX_HANDLE_ERRORS and UCX_DEBUG_SIGNO where they are unset. It removes
 * them after dlopen().
 *
 * Fork: a call with a parent's handle gives FANIN_ERR_FORKED in the child, and touches nothing.
 * Create a new handle in the child. That fails with FANIN_ERR_FORKED too, if another thread of the
 * parent was loading UCX or OpenSSL, or ran inside OpenSSL, at the fork.
 *
 * Secret and certificates: both ends use the launch's secret, or both use certificates. TCP
 * connections then use TLS 1.3. Unix sockets stay as they are. Creation of the server or client
 * needs OpenSSL 3. The configurations of both have these fields:
 * - secret_file: a file with the launch's secret, 64 hexadecimal digits or 32 bytes. Each end
 *   proves that it has the same secret, and a rank proves its number. The library reads the file
 *   once. NULL (default): the file that FANIN_SECRET_FILE in the environment names, if it is set.
 *   "": no secret.
 * - tls_cert: a PEM file with this process's certificate, and behind it the certificates that lead
 *   to an authority. NULL (default) for all three: the files that FANIN_TLS_CERT, FANIN_TLS_KEY and
 *   FANIN_TLS_CA in the environment name, unless secret_file is given. "": no certificates. Give
 *   all three files or none.
 * - tls_key: a PEM file with the key of tls_cert.
 * - tls_ca: a PEM file with the authorities that sign the other end's certificates.
 *
 * Both ends show a certificate. A rank's names "fanin://JOB/rank/N" among its subject's alternative
 * names, with a star for N any rank. A reader's names "fanin://JOB/reader", with the same JOB. One
 * that hands on what it has read names "fanin://JOB/relay/NAME", too, with a name of yours. A
 * thread looks at the three files once a second. New connections use what it has read (event
 * "certificates").
 *
 * Each file belongs to the process's user or to root. Symbolic links may lead to it. Others may not
 * use the secret, read the key or write any of the files. The group may read a secret or key that
 * is root's.
 *
 * Creation fails with these errors. Each message names the file and the remedy:
 * - FANIN_ERR_NOT_FOUND: the file is missing.
 * - FANIN_ERR_AUTH: the file has another owner or too wide a mode, or the certificate has expired
 *   or is for somebody else.
 * - FANIN_ERR_ARGUMENT: the file holds something else, or secret and certificates are both given,
 *   or not all three files are.
 * - FANIN_ERR_IO: the file cannot be read.
 * - FANIN_ERR_UNSUPPORTED: OpenSSL 3 is missing, or does not support TLS 1.3.
 * - FANIN_ERR_MEMORY: out of memory.
 */
#ifndef FANIN_TYPES_H
#define FANIN_TYPES_H

#include <fanin/error.h>
#include <fanin/log.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FANIN_VERSION_MAJOR 0
#define FANIN_VERSION_MINOR 1
#define FANIN_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/** Version of the library that is loaded, "0.1.0". Thread: any. Static storage. */
FANIN_API const char *fanin_version(void);

#define FANIN_MAX_DIMS 8         /**< dimensions of a tensor */
#define FANIN_MAX_NAME 512       /**< bytes of a tensor's name, without the final NUL */
#define FANIN_MAX_RUN 64         /**< bytes of a run's name */
#define FANIN_PROTOCOL_VERSION 1 /**< of the wire, the newest that is spoken */
#define FANIN_WORLD_ID_SIZE 16   /**< bytes of a world id */

/**
 * Element types: those of the safetensors format, in that format's order (README of safetensors,
 * "Format"). F4 and F6 elements are packed. Extents and offsets in the last dimension then fall
 * on whole bytes: multiples of 2 elements of F4, and of 4 elements of F6.
 */
typedef int32_t fanin_dtype;
enum {
    FANIN_DTYPE_BOOL = 1,
    FANIN_DTYPE_F4,
    FANIN_DTYPE_F6_E2M3,
    FANIN_DTYPE_F6_E3M2,
    FANIN_DTYPE_U8,
    FANIN_DTYPE_I8,
    FANIN_DTYPE_F8_E5M2,
    FANIN_DTYPE_F8_E4M3,
    FANIN_DTYPE_F8_E8M0,
    FANIN_DTYPE_F8_E4M3FNUZ,
    FANIN_DTYPE_F8_E5M2FNUZ,
    FANIN_DTYPE_I16,
    FANIN_DTYPE_U16,
    FANIN_DTYPE_F16,
    FANIN_DTYPE_BF16,
    FANIN_DTYPE_I32,
    FANIN_DTYPE_U32,
    FANIN_DTYPE_F32,
    FANIN_DTYPE_C64,
    FANIN_DTYPE_F64,
    FANIN_DTYPE_I64,
    FANIN_DTYPE_U64,
};

/** safetensors' name of a dtype ("BF16"), NULL if unknown. Thread: any. Static storage. */
FANIN_API const char *fanin_dtype_name(fanin_dtype dtype);

/** The dtype with safetensors' name @p name, 0 if unknown. Thread: any. */
FANIN_API fanin_dtype fanin_dtype_from_name(const char *name);

/** Bits of one element, 0 for an unknown dtype. Thread: any. */
FANIN_API uint32_t fanin_dtype_bits(fanin_dtype dtype);

/** Where memory is. */
typedef struct fanin_memory {
    int32_t kind;   /**< FANIN_MEMORY_... */
    int32_t device; /**< CUDA device; -1: host or detect */
} fanin_memory;
enum {
    FANIN_MEMORY_DETECT = 0, /**< the library finds out */
    FANIN_MEMORY_HOST = 1,
    FANIN_MEMORY_CUDA = 2,
};

/** A CUDA stream of the caller's. */
typedef struct fanin_stream {
    /** cudaStream_t or CUstream. NULL: no stream is given. The default streams are (void *)1
        (cudaStreamLegacy) and (void *)2 (cudaStreamPerThread), not 0 */
    void *handle;
    int32_t device; /**< CUDA device of the stream */
} fanin_stream;

/**
 * An N-dimensional block of a tensor and where it lies in memory. The layout of this
 * struct never changes. Entries at and beyond the tensor's n_dims are ignored.
 */
typedef struct fanin_box {
    uint64_t offset[FANIN_MAX_DIMS]; /**< elements, in the whole tensor */
    uint64_t extent[FANIN_MAX_DIMS]; /**< elements */
    int64_t stride[FANIN_MAX_DIMS];  /**< bytes between neighbours; all 0: packed */
    void *address;                   /**< of the first element; NULL only when empty */
} fanin_box;

enum {
    /** A shard of F32 that a commit's cast leaves as it is. All ranks give it alike. */
    FANIN_TENSOR_KEEP = 1,
};

/** A shard that a trainer rank publishes, or a destination that a worker wants filled. */
typedef struct fanin_tensor {
    /** sizeof(fanin_tensor); also the step from one array element to the next */
    size_t struct_size;
    const char *name; /**< without the publication: key = "<publication>:<name>" */
    fanin_dtype dtype;
    uint32_t n_dims;                /**< 0: a scalar */
    uint64_t shape[FANIN_MAX_DIMS]; /**< of the whole tensor, elements */
    const fanin_box *boxes;
    size_t n_boxes;      /**< 0: this rank holds nothing of the tensor (empty shard) */
    fanin_memory memory; /**< of all boxes */
    uint32_t flags;      /**< FANIN_TENSOR_...; of destinations 0 */
} fanin_tensor;

/**
 * Counts of updates by how long they waited for readers. The upper limits are 100 us, 300 us, 1 ms,
 * 3 ms, 10 ms and so on up to 30 s. The last count is of longer waits.
 */
#define FANIN_DRAIN_BUCKETS 13

/** A string pair of a publication's metadata. */
typedef struct fanin_pair {
    const char *key;
    const char *value;
} fanin_pair;

#ifdef __cplusplus
}
#endif
#endif
