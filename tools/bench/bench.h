/* SPDX-License-Identifier: Apache-2.0 */
/** @file Parts of `bench`: figures over several pulls, and limits beside them. */
#ifndef BENCH_H
#define BENCH_H

#include "bench/arena.h"
#include "fetch/check.h"
#include "fetch/session.h"
#include "trainer/ranks.h"
#include "trainer/trainer_options.h"

#include <jansson.h>

enum {
    BENCH_MAX_ITERATIONS = 100000,
    BENCH_MAX_PHASES = 16,
    BENCH_MAX_LIMITS = 32,
    BENCH_MAX_ROUNDS = 100,
};

/** A percentile is the least sample that so many of them do not exceed. */
typedef struct stats_figure {
    uint64_t median, least, most, p90, p99;
    uint32_t count; /**< samples; 0: all else is 0 */
} stats_figure;

/** Over @p count values, which are sorted. */
stats_figure stats_figure_of(uint64_t *values, uint32_t count);

/** Samples of every phase of report_phases, in nanoseconds. */
typedef struct bench_samples {
    uint64_t *values; /**< [phase][iteration] */
    uint32_t capacity, count;
} bench_samples;

void bench_samples_init(bench_samples *s, uint32_t iterations);
void bench_samples_add(bench_samples *s, const fanin_result_info *info);
void bench_samples_free(bench_samples *s);

/** What the machine does without this library. */
typedef struct bench_limit {
    char name[80];
    char problem[160]; /**< why there is no figure, "": there is one */
    uint64_t bytes, pieces;
    uint32_t threads; /**< of the CPU; 0: it has no part in it */
    stats_figure ns;
} bench_limit;

typedef struct bench_limits {
    bench_limit items[BENCH_MAX_LIMITS];
    size_t count;
} bench_limits;

/** An empty one to be filled; the last one again if there are too many. */
bench_limit *bench_limit_add(bench_limits *limits, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Calls @p work for each of @p n items of @p size bytes, all at once: the calling thread for the
    first one. 0, or errno if there was no thread for one, behind those that there were. */
int bench_together(void *(*work)(void *), void *items, size_t size, uint32_t n);

/** What was measured: @p count times, or @p problem, NULL if there is none. */
void bench_limit_end(bench_limit *limit, uint64_t *times, uint32_t count,
                     const char *problem);

/** process_vm_readv of the ranks' shards in pieces of at most 1 MiB into @p a's memory; of @p most
    bytes of them. */
void bench_raw_read(bench_limits *limits, const rank_options *options, const ranks *r,
                    const arena *a, uint64_t most, uint32_t threads);
/** As many bytes as @p a has by TCP over 127.0.0.1 into its memory: so many connections, each with
    a thread that sends, from memory of its own, and one that receives. */
void bench_tcp(bench_limits *limits, const arena *a, uint32_t threads);
/** What OpenSSL takes to encrypt, or to decrypt, so many bytes with the cipher of TLS in records of
    16 KiB that the CPU's caches hold, by so many threads; nothing else of TLS. */
void bench_cipher(bench_limits *limits, uint64_t bytes, uint32_t threads);
/** memcpy of as many bytes as @p a has, by one thread. */
void bench_memcpy(bench_limits *limits, const arena *a);

/** Bytes of the pull that each device holds: what the ranks hold there, as they publish it. */
typedef struct bench_spread {
    int devices[DEVICE_LIST];
    uint64_t bytes[DEVICE_LIST];
    size_t count;
} bench_spread;
void bench_spread_of(const rank_options *options, bench_spread *out);

/** Copies of as many bytes in one piece between each of the spread's devices and @p to (a device,
    or DEVICE_HOST: pinned memory), one after the other and all at once. */
void bench_device_copies(bench_limits *limits, const bench_spread *spread, int to);
/** What a fresh file of @p bytes in @p directory costs: its pages, by one thread and by four,
    pinning them, and the devices' copies into them. */
void bench_file_pages(bench_limits *limits, const bench_spread *spread,
                      const char *directory, uint64_t bytes);

/** Where, when and by which command line something was measured. */
typedef struct about {
    char processor[128], kernel[160],
        devices[512]; /**< devices: "": none were asked for */
    char date[32];    /**< UTC, as in RFC 3339 */
    uint32_t cores;   /**< that this process may use */
    uint64_t memory_bytes;
    char *command; /**< as a shell would take it */
} about;

/** To be freed. */
void about_make(int argc, const char **argv, about *out);
/** Also names the CUDA devices, whose driver is loaded for it. */
void about_devices(about *a);
void about_free(about *a);

/** A rank of the engine. All of them pull at the same time. */
typedef struct bench_worker {
    struct bench *bench;
    session session;
    arena arena; /**< with --mapping of its part, else of all tensors */
    /* one pull */
    fanin_result_info info;
    fanin_status status;
    fanin_error error;
} bench_worker;

typedef struct bench {
    const command *self;
    invocation line;
    trainer_options trainer;
    char *dest, *pull_dtype, **mappings;
    int iterations, cold, repeat, commits, check_all, spare_file, verify, pause,
        workers;

    rank_options rank_options;
    source source;
    ranks *ranks;      /**< NULL: ranks that run already */
    char *target;      /**< theirs, or of our own ranks */
    bench_worker *all; /**< `workers` of them; NULL: not yet */
    bool directory;    /**< dest is one */
    int dest_device;   /**< of memory; DEVICE_HOST: the host's */
    fanin_dtype half;
    fanin_pull_options options; /**< of the pull that is under way */
    check_pattern pattern;
    bench_samples samples;
    bench_limits limits;
    fanin_result_info last;
    char reason[256];
    uint64_t peak_bytes, serial;
    uint64_t mark; /**< random: in names of directories, which nobody foresees */
    about about;
} bench;

/** One pull; @p info is filled but for its strings. */
fanin_status bench_pull(bench *b, bool check, fanin_result_info *info,
                        fanin_error *error);

/** A client that is connected. 0, or an exit status after a message. session_end() in either case.
    */
int bench_connect(const bench *b, session *s);
/** A client and memory for each rank of the engine. 0, or an exit status after a message. */
int bench_open_workers(bench *b);
void bench_close_workers(bench *b);

/** All that was measured, on stdout. */
void bench_tell_json(const bench *b);
void bench_tell_text(const bench *b);
#endif
