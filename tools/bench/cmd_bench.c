/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/check.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/report.h"
#include "fetch/session.h"
#include "clock.h"
#include "digest.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { START_MS = 300000 };

/* A client that knows nothing yet: what connecting costs belongs to the pull. */
static int pull_cold(bench *b, fanin_result_info *info)
{
    fanin_error error = FANIN_ERROR_INIT;
    session_end(&b->all[0].session);
    uint64_t start = clock_ns();
    int code = bench_connect(b, &b->all[0].session);
    uint64_t connected = clock_ns() - start;
    if (code == 0 && bench_pull(b, b->check_all, info, &error) != FANIN_OK)
        code = failure_report("cannot pull", &error);
    info->connect_ns += connected;
    info->total_ns += connected;
    info->fixed_ns += connected;
    return code;
}

/* One round of pulls. */
static int bench_measure(bench *b)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_result_info info;
    if (bench_pull(b, b->pattern.follows, &info, &error) != FANIN_OK)
        return failure_report("cannot pull", &error); /* the warm-up proves the bytes */
    for (int i = 0; i < b->iterations; i++) {
        if (b->cold) {
            int code = pull_cold(b, &info);
            if (code != 0)
                return code;
        } else if (bench_pull(b, b->check_all, &info, &error) != FANIN_OK) {
            return failure_report("cannot pull", &error);
        }
        bench_samples_add(&b->samples, &info);
        b->last = info;
        if (b->pause > 0 && i + 1 < b->iterations)
            poll(NULL, 0, b->pause);
        if (interrupt_requested())
            return interrupt_exit_code();
    }
    return 0;
}

enum { STREAM_THREADS = 8 }; /* the most that read streams, unless told */
enum { STREAMS = 4 };        /* a rank's, of which as many threads read, unless told */

static uint32_t lesser(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Threads that read streams, and bytes enough. */
static uint32_t stream_threads(const bench *b, uint32_t processors)
{
    const connect_options *told = &b->line.connect;
    uint32_t streams = told->streams > 0 ? (uint32_t)told->streams : STREAMS;
    uint32_t threads = told->threads > 0 ? (uint32_t)told->threads
                                         : lesser(processors / 2, STREAM_THREADS);
    return lesser(threads, b->rank_options.world_size * streams);
}

/* Raw reads, and TCP and TLS's cipher where pulls take them: by one thread, by as many as read
   streams, and reads by all CPUs. */
static void measure_links(bench *b, uint64_t most)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t all = processors > 1 ? (uint32_t)processors : 1;
    uint32_t half = stream_threads(b, all);
    uint32_t counts[] = {1, half, all};
    bool tcp = b->line.connect.no_unix != 0;
    const arena *a = &b->all[0].arena;
    const size_t n = sizeof counts / sizeof counts[0];
    for (size_t i = 0, last = 0; i < n && !interrupt_requested(); i++) {
        if (counts[i] > last) {
            bench_raw_read(&b->limits, &b->rank_options, b->ranks, a, most, counts[i]);
            last = counts[i];
        }
    }
    if (interrupt_requested())
        return;
    if (tcp)
        bench_tcp(&b->limits, a, 1);
    if (tcp && half > 1)
        bench_tcp(&b->limits, a, half);
    bool tls = tcp && session_is_secured(&b->all[0].session);
    if (tls)
        bench_cipher(&b->limits, a->size, 1);
    if (tls && half > 1)
        bench_cipher(&b->limits, a->size, half);
}

/* What can be said without this library of the bytes that were pulled. */
static void measure_limits(bench *b)
{
    bench_spread spread = {0};
    bool host = b->dest_device == DEVICE_HOST;
    bool devices = b->trainer.device != NULL;
    uint64_t most = b->mappings != NULL ? b->all[0].arena.bytes : UINT64_MAX;
    if (b->ranks != NULL)
        bench_spread_of(&b->rank_options, &spread);
    if (devices)
        bench_device_copies(&b->limits, &spread, b->dest_device);
    if (b->directory) {
        if (b->ranks != NULL && !interrupt_requested())
            bench_file_pages(&b->limits, &spread, b->dest, b->last.bytes);
        return;
    }
    if (host && !devices && b->ranks != NULL)
        measure_links(b, most);
    if (host && !interrupt_requested())
        bench_memcpy(&b->limits, &b->all[0].arena);
}

/* Ranks of snapshots make some commits at first, which are timed; others stay with their first
   step. */
static void set_updates(bench *b)
{
    rank_options *o = &b->rank_options;
    o->update_every_ms = -1;
    if (o->publishing.snapshot) {
        o->publishing.timed = true;
        o->steps = (uint64_t)b->commits + 2; /* the first two make the arenas */
        o->update_every_ms = 0;
    }
}

static int start_ranks(bench *b)
{
    static char zero[] = "0";
    static char *runs[] = {zero};
    if (b->line.connect.world_size != 0)
        b->trainer.world_size = b->line.connect.world_size;
    b->trainer.no_ucx = b->line.connect.no_ucx;
    b->trainer.trust_containers = b->line.connect.trust_containers;
    rank_options *o = &b->rank_options;
    o->runs = b->line.run != NULL ? &b->line.run : runs;
    o->n_runs = 1;
    b->trainer.source.full |= b->mappings != NULL;
    b->trainer.credentials = b->line.connect.credentials;
    int code = trainer_runs_resolve(b->self, &b->trainer, o);
    code = code != 0
               ? code
               : trainer_options_resolve(b->self, &b->trainer, "small", &b->source, o);
    if (code != 0)
        return code;
    char name[OPTIONS_PUBLICATION];
    rank_publication(o, 0, name);
    free(b->line.run); /* as popt gave it, to options_free() */
    b->line.run = output_require(strdup(name));
    o->runs = &b->line.run;
    if (o->server_name == NULL)
        o->server_name = b->line.connect.server_name;
    o->first_step = 1;
    o->extents = true;
    o->readers_gone = true;
    o->log = session_log_of(&b->line.common);
    o->log_cookie = b->line.common.verbose ? b : NULL;
    set_updates(b);
    code = ranks_start(o, &b->ranks);
    code = code != 0 ? code : ranks_wait_ready(b->ranks, START_MS);
    if (code == 0 && o->steps > 0)
        code = ranks_wait_step(b->ranks, o->first_step + o->steps - 1, START_MS);
    if (code == 0) {
        b->target = ranks_target(b->ranks);
        b->line.connect.world_size = 0; /* the list says it */
    }
    return code;
}

static int ask_pattern(bench *b)
{
    fanin_error error = FANIN_ERROR_INIT;
    const session *s = &b->all[0].session;
    if (check_ask(s->client, s->publication, b->line.common.timeout_ms, &b->pattern,
                  &error) != FANIN_OK)
        return failure_report("cannot pull", &error);
    if (b->check_all && !b->pattern.follows)
        return failure_local(
            "cannot pull", FANIN_ERR_UNSUPPORTED, "leave out --check-pattern",
            "%s does not say that its bytes follow the pattern", s->publication);
    return 0;
}

static int bench_all(bench *b)
{
    uint32_t rounds = (uint32_t)b->repeat;
    bench_samples_init(&b->samples, (uint32_t)b->iterations * rounds);
    int code = bench_open_workers(b);
    code = code != 0 ? code : ask_pattern(b);
    for (uint32_t round = 0; code == 0 && round < rounds; round++)
        code = bench_measure(b);
    b->peak_bytes = report_peak_bytes();
    if (code != 0)
        return code;
    measure_limits(b);
    if (interrupt_requested())
        return interrupt_exit_code();
    if (b->trainer.device != NULL || b->dest_device != DEVICE_HOST)
        about_devices(&b->about);
    (b->line.common.json ? bench_tell_json : bench_tell_text)(b);
    return 0;
}

/* --mapping: a worker each. */
static int resolve_mappings(bench *b)
{
    b->workers = 1;
    while (b->mappings != NULL && b->mappings[b->workers] != NULL)
        b->workers++;
    return b->workers > 1 && b->cold
               ? failure_usage(b->self->name, "--cold is for one worker")
               : 0;
}

/* --dest and --pull-dtype. */
static int bench_resolve(bench *b)
{
    const char *name = b->self->name;
    b->dest_device = DEVICE_HOST;
    if (b->dest != NULL && strncmp(b->dest, "device:", 7) == 0) {
        int list[DEVICE_LIST];
        size_t count;
        if (!device_list_parse(b->dest + 7, list, &count) || count != 1 ||
            list[0] == DEVICE_HOST)
            return failure_usage(name, "--dest is memory, device:N or a directory");
        b->dest_device = list[0];
    } else {
        b->directory = b->dest != NULL && strcmp(b->dest, "memory") != 0;
    }
    if (!random_bytes(&b->mark, sizeof b->mark))
        return failure_local("cannot pull", FANIN_ERR_IO, "try again",
                             "no random bits for the names of directories");
    if (b->pull_dtype != NULL && (b->half = options_half(b->pull_dtype)) == 0)
        return failure_usage(name, "--pull-dtype is bf16 or f16, not '%s'",
                             b->pull_dtype);
    return 0;
}

static int check_numbers(const bench *b)
{
    const char *name = b->self->name;
    if (b->iterations > BENCH_MAX_ITERATIONS)
        return failure_usage(name, "--iterations is 1 to %d", BENCH_MAX_ITERATIONS);
    if (b->repeat > BENCH_MAX_ROUNDS)
        return failure_usage(name, "--repeat is 1 to %d", BENCH_MAX_ROUNDS);
    if (b->commits > RANK_COMMITS - 2)
        return failure_usage(name, "--commits is 1 to %d", RANK_COMMITS - 2);
    return 0;
}

/* Options that would do nothing. */
static int bench_check_idle(const bench *b)
{
    static const char own[] =
        "model r fused adapter-shape dtype adapter full layers shrink model-dir device "
        "snapshot cast "
        "no-stream-commit base-port bind replicate shard-dim lease-ms data-threads "
        "nice "
        "allow open insecure name trusted-network world-id commits";
    const arguments *parsed = &b->line.parsed;
    const char *given = parsed->count > 0 ? options_given(parsed, own) : NULL;
    if (given != NULL)
        return failure_usage(b->self->name,
                             "--%s is for own ranks, and TARGET names others", given);
    if (!b->trainer.snapshot && options_given(parsed, "commits") != NULL)
        return failure_usage(b->self->name, "--commits needs --snapshot");
    if (b->mappings != NULL && b->directory)
        return failure_usage(b->self->name, "--mapping is for memory as --dest");
    if (b->spare_file && !b->directory)
        return failure_usage(b->self->name, "--spare-file needs a directory as --dest");
    return 0;
}

static int bench_check_usage(bench *b)
{
    int code = check_numbers(b);
    if (code != 0)
        return code;
    int run_at;
    if (!session_take_run(b->self, &b->line, &run_at))
        return EXIT_USAGE;
    if (b->line.parsed.count > 1)
        return failure_usage(b->self->name, "unexpected argument '%s'",
                             b->line.parsed.positional[1]);
    code = resolve_mappings(b);
    code = code != 0 ? code : bench_resolve(b);
    code = code != 0 ? code : bench_check_idle(b);
    if (code != 0 || b->line.parsed.count == 0)
        return code;
    b->target = output_require(strdup(b->line.parsed.positional[0]));
    return 0;
}

static void close_all(bench *b)
{
    about_free(&b->about);
    bench_close_workers(b);
    ranks_free(&b->ranks);
    source_close(&b->source);
    bench_samples_free(&b->samples);
    free(b->target);
}

static bench whole; /* large */

static struct poptOption option_table[] = {
    {"dest", 'd', POPT_ARG_STRING, &whole.dest, 0,
     "memory (default), memory of a CUDA device, or a directory to make others in",
     "memory|device:N|DIR"},
    {"mapping", 0, POPT_ARG_ARGV, &whole.mappings, 0,
     "into parameters as a recorded mapping has them; repeated: of one rank each",
     "FILE"},
    {"iterations", 'i', POPT_ARG_INT, &whole.iterations, 0, "pulls (default 10)", "N"},
    {"cold", 0, POPT_ARG_NONE, &whole.cold, 0,
     "a new client for each pull: connection, catalog and plan anew", NULL},
    {"repeat", 0, POPT_ARG_INT, &whole.repeat, 0, "rounds of pulls (default 1)", "N"},
    {"check-pattern", 0, POPT_ARG_NONE, &whole.check_all, 0,
     "prove every byte of each pull, not of the first one only", NULL},
    {"pull-dtype", 0, POPT_ARG_STRING, &whole.pull_dtype, 0,
     "pull F32 tensors as bf16 or f16", "DTYPE"},
    {"spare-file", 0, POPT_ARG_NONE, &whole.spare_file, 0,
     "into a directory: keep the next pull's file ready", NULL},
    {"verify", 0, POPT_ARG_NONE, &whole.verify, 0,
     "compare each pull with digests that the ranks make", NULL},
    {"pause", 0, POPT_ARG_INT, &whole.pause, 0,
     "wait between pulls, as workers do (default 0)", "MS"},
    {"commits", 0, POPT_ARG_INT, &whole.commits, 0,
     "with --snapshot: commits that are timed first (default 20)", "N"},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, whole.trainer.source_part, 0,
     "What own ranks serve:", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, whole.trainer.publishing_part, 0,
     "How they publish:", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, whole.trainer.world_part + OF_TRAINER_ALONE, 0,
     "Own ranks:", NULL},
    SESSION_TABLE(&whole.line),
    POPT_TABLEEND,
};

static int measure_all(bench *b, int argc, const char **argv)
{
    int code = bench_check_usage(b);
    if (code != 0)
        return code;
    about_make(argc, argv, &b->about);
    code = b->target != NULL ? 0 : start_ranks(b);
    code = code != 0 ? code : session_trace_start(b->line.connect.trace);
    return code != 0 ? code : session_trace_stop(b->line.connect.trace, bench_all(b));
}

static int bench_run(const command *self, int argc, const char **argv)
{
    whole = (bench){.self = self,
                    .line.common.timeout_ms = 60000,
                    .iterations = 10,
                    .repeat = 1,
                    .commits = 20,
                    .dest_device = DEVICE_HOST};
    int code;
    trainer_options_init(&whole.trainer);
    if (session_parse(self, &whole.line, argc, argv, option_table, &code)) {
        code = measure_all(&whole, argc, argv);
        close_all(&whole);
    }
    options_free(&whole.line.parsed);
    return code;
}
static const char help[] =
    "Examples:\n"
    "  nixl-fetch bench --adapter-shape dense --world-size 8 --path stream\n"
    "  nixl-fetch bench --model qwen3-30b-a3b --r 16 --dest /dev/shm --iterations 5\n"
    "  nixl-fetch bench 10.0.0.1:6000 --world-size 8 --run 0 --json\n"
    "  nixl-fetch bench --adapter-shape moe --device 0,1 --dest device:1 --snapshot\n"
    "\n"
    "Without TARGET it starts ranks of its own. Figures are medians; 'fixed' is the\n"
    "pull's time less that from the first read posted to the last byte in place. The\n"
    "limits are raw process_vm_readv of the same shards in pieces of 1 MiB into the\n"
    "same memory, memcpy, and with --no-unix TCP over 127.0.0.1; of devices, copies\n"
    "of as many bytes in one piece.";

const command cmd_bench = {
    .name = "bench",
    .arguments = "[TARGET] [RUN] [OPTION...]",
    .summary = "measure pulls by phase, beside what the machine can do",
    .help = help,
    .run = bench_run,
};
