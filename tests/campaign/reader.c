/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reader BOARD INDEX SEED PATH TIMEOUT_MS DIRECTORY ADDRESS...
 *
 * A worker of a campaign: pulls for ever with one client, into memory between guard pages or, if
 * DIRECTORY is not "-", into adapters there, and judges each result by itself. PATH: stream-unix,
 * stream-tcp, or a path's name; relay-unix or relay-tcp: by a relay, which hands on what it has
 * read until the next call; relay-verify and relay-liar: likewise, at a site of their own, where
 * all verify, as the liar alters what it hands on. A line on standard output for each call:
 *
 *   VERDICT STATUS TOOK_MS TIMEOUT_MS STEP LIFE BEGAN_NS DISTURBED|TEXT
 *
 * In a campaign of deltas (weights.h) memory is described once, and pulled into by deltas. It is
 * left as it is between calls, but for some, before which it is scribbled on and said to be
 * touched. TEXT of a good one: by patches, or why not.
 *
 * VERDICT: good; failed (an error, which is allowed); wrong (bytes, a step that was not asked for,
 * a launch that had ended, or an adapter that a failed call has left); written (memory changed
 * after a failed call had returned). DISTURBED: 1 if this process was stopped or limited meanwhile,
 * whose time means nothing.
 *
 * Now and then something stands in the way of its adapters (obstacles.h).
 *
 * Mutants (mutant.h): "hang" never ends a call; "leak" leaves a descriptor open in each eighth;
 * "write" changes memory after a failed one; "stale" goes on with the weights of its first launch;
 * "wedge" fails for ever; "starve" as long as the trainer trains; "trusting" does not verify where
 * one lies.
 *
 * Built with FANIN_TEST_HOOKS it has one rule less, which the campaign must notice: mutant
 * "unchecked" believes what it has read without asking the ranks at the end; "base" applies patches
 * to whatever there is.
 */
#include "board.h"
#include "memory.h"
#include "mutant.h"
#include "names.h"
#include "obstacles.h"
#include "weights.h"
#include <fanin/client.h>
#include <fanin/relay.h>
#include <fanin/safetensors.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef FANIN_TEST_HOOKS
#include "net/client_rules.h"
#endif

#define MS UINT64_C(1000000)
#define NEW_CLIENT_PERCENT 4

typedef struct reader {
    board *board;
    board_reader *told;
    const char *const *addresses;
    size_t world;
    uint64_t random;
    uint32_t timeout_ms;
    const char *path, *directory; /* directory NULL: into memory */
    fanin_client *client;
    fanin_relay *relay; /* instead, of a path that names it */
    char *memory;       /* of all tensors, one after the other, between guards */
    char *bytes;        /* the same for the CPU */
    size_t size;
    fanin_tensor tensors[N_TENSORS];
    fanin_box boxes[N_TENSORS];
    tensor_shape shapes[N_TENSORS];
    fanin_destination *prepared; /* NULL: this is no campaign of deltas */
    char *kept;     /* what the memory held after a failed call: nobody may write */
    bool untouched; /* after one */
    uint64_t life, step;
} reader;

/* What is known before a call of what may come. */
typedef struct expectation {
    uint64_t life;   /* of all ranks; 0: they differ, or are not there */
    uint64_t newest; /* of any rank: its predecessor has ended before the call */
    uint64_t step;   /* the latest that a rank had committed */
} expectation;

typedef struct outcome {
    const char *verdict;
    fanin_status status;
    uint64_t life, step;
    char text[1024];
} outcome;

/* ---------------------------------------------------------------------- memory */

static void get_memory(reader *r)
{
    for (size_t i = 0; i < N_TENSORS; i++)
        r->size += weights_bytes(i);
    r->memory = memory_guarded(r->size, 1);
    r->bytes = memory_bytes(r->memory);
    if (!(r->kept = malloc(r->size)))
        exit(2);
}

static void scribble(reader *r)
{
    weights_scribble(r->bytes, r->size);
    memory_send(r->memory, r->size);
}

/* After a failed call. What is prepared may still hold a step, which patches go onto. */
static void keep(reader *r)
{
    if (!r->prepared)
        scribble(r);
    memory_fetch(r->memory, r->size);
    memcpy(r->kept, r->bytes, r->size);
    r->untouched = true;
}

static bool is_touched(reader *r)
{
    memory_fetch(r->memory, r->size);
    return memcmp(r->bytes, r->kept, r->size) != 0;
}

static void describe(reader *r)
{
    char *at = r->memory;
    for (size_t i = 0; i < N_TENSORS; i++) {
        r->shapes[i] = weights_shape(i);
        r->boxes[i] = (fanin_box){.extent = {r->shapes[i].rows, r->shapes[i].columns},
                                  .address = at};
        r->tensors[i] =
            (fanin_tensor){.struct_size = sizeof *r->tensors,
                           .name = r->shapes[i].name,
                           .dtype = FANIN_DTYPE_F32,
                           .n_dims = 2,
                           .shape = {r->shapes[i].rows, r->shapes[i].columns},
                           .boxes = &r->boxes[i],
                           .n_boxes = 1};
        at += weights_bytes(i);
    }
}

static void prepare(reader *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (weights_change_little() &&
        fanin_destination_create(r->tensors, N_TENSORS, &r->prepared, &error) !=
            FANIN_OK) {
        fprintf(stderr, "reader: %s\n", error.message);
        exit(2);
    }
}

/* --------------------------------------------------------------------- judging */

static expectation expect(const reader *r)
{
    expectation e = {.life = atomic_load(&r->board->ranks[0].life)};
    for (size_t i = 0; i < r->world; i++) {
        uint64_t step = atomic_load(&r->board->ranks[i].step);
        uint64_t life = atomic_load(&r->board->ranks[i].life);
        e.step = step > e.step ? step : e.step;
        e.newest = life > e.newest ? life : e.newest;
        e.life = life == e.life ? life : 0;
    }
    return e;
}

static bool check_memory(const reader *r, outcome *o)
{
    memory_fetch(r->memory, r->size);
    for (size_t i = 0; i < N_TENSORS; i++)
        if (!weights_check(o->life, o->step, i,
                           r->bytes + ((char *)r->boxes[i].address - r->memory),
                           o->text))
            return false;
    return true;
}

static bool check_file(const char *directory, outcome *o)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_safetensors *file = NULL;
    char path[512];
    bool good = true;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", directory);
    if (fanin_safetensors_open(path, &file, &error) != FANIN_OK) {
        snprintf(o->text, sizeof o->text, "%s", error.message);
        return false;
    }
    good = fanin_safetensors_count(file) == N_TENSORS;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    for (size_t i = 0; good && i < N_TENSORS; i++) {
        fanin_safetensors_entry entry = {.struct_size = sizeof entry};
        tensor_shape shape = weights_shape(i);
        static char bytes[1 << 20];
        bool found = false;
        for (size_t k = 0; k < N_TENSORS && !found; k++)
            found = fanin_safetensors_get(file, k, &entry) &&
                    strcmp(entry.name, shape.name) == 0;
        good = found && entry.bytes == weights_bytes(i) &&
               entry.bytes <= sizeof bytes &&
               pread(fd, bytes, entry.bytes, (off_t)entry.offset) ==
                   (ssize_t)entry.bytes &&
               weights_check(o->life, o->step, i, bytes, o->text);
    }
    if (fd >= 0)
        close(fd);
    fanin_safetensors_close(&file);
    return good;
}

/* A rank of a launch before is needed for that launch's steps, and had ended. */
static bool check_launch(const expectation *before, outcome *o)
{
    if (o->life >= before->newest)
        return true;
    snprintf(o->text, sizeof o->text,
             "launch %016" PRIx64 " came, and a rank was of %016" PRIx64 " before",
             o->life, before->newest);
    return false;
}

/* Whether the step is one that this call could give: none that is older than what was there. */
static bool check_step(reader *r, const expectation *before,
                       const fanin_pull_options *options, outcome *o)
{
    bool good = true;
    if (before->life == o->life && o->step < before->step)
        good = false;
    if (r->life == o->life && o->step < r->step)
        good = false;
    if (options->rule == FANIN_STEP_EXACT && o->step != options->step)
        good = false;
    if (options->rule == FANIN_STEP_AT_LEAST && o->step < options->step)
        good = false;
    if (!good)
        snprintf(o->text, sizeof o->text,
                 "rule %d of step %" PRIu64 ", %" PRIu64 " was committed, %" PRIu64
                 " was here, and %" PRIu64 " came",
                 (int)options->rule, options->step, before->step, r->step, o->step);
    r->life = o->life;
    r->step = o->step;
    return good;
}

/* ----------------------------------------------------------------------- calls */

static void end_client(reader *r)
{
    fanin_client_destroy(&r->client);
    fanin_relay_destroy(&r->relay);
}

static bool is_relay(const reader *r)
{
    return strncmp(r->path, "relay-", 6) == 0;
}

static bool is_liar(const reader *r)
{
    return strcmp(r->path, "relay-liar") == 0;
}

/* Whether it is where one lies. */
static bool must_verify(const reader *r)
{
    return is_liar(r) || strcmp(r->path, "relay-verify") == 0;
}

static bool make_client(reader *r, outcome *o)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    bool stream = strncmp(r->path, "stream-", 7) == 0;
    bool tcp = strcmp(r->path, "stream-tcp") == 0 || strcmp(r->path, "relay-tcp") == 0;
    if (!is_relay(r))
        config.path = fanin_path_from_name(stream ? "stream" : r->path);
    config.no_unix = tcp;
    config.threads = 2;
    config.lost_ms = 1000;
    fanin_relay_config relay;
    fanin_relay_config_init(&relay, sizeof relay);
    relay.client = &config;
    relay.place = must_verify(r) ? "liars" : NULL;
    if (is_relay(r))
        o->status =
            fanin_relay_create(&relay, r->addresses, r->world, &r->relay, &error);
    else
        o->status = fanin_client_create(&config, &r->client, &error);
    if (o->status == FANIN_OK && !is_relay(r))
        o->status = fanin_client_connect(r->client, r->addresses, r->world,
                                         r->timeout_ms, &error);
    if (o->status == FANIN_OK)
        return true;
    end_client(r);
    snprintf(o->text, sizeof o->text, "%s", error.message);
    return false;
}

static fanin_status read_in_parts(reader *r, const fanin_pull_options *options,
                                  fanin_result **result, fanin_error *error)
{
    fanin_session *session = NULL;
    size_t half = N_TENSORS / 2;
    fanin_status status =
        r->prepared
            ? fanin_client_begin_into(r->client, options, r->prepared, &session, error)
            : fanin_client_begin(r->client, options, r->tensors, N_TENSORS, &session,
                                 error);
    if (status == FANIN_OK)
        status = fanin_session_read(session, half, N_TENSORS - half, error);
    if (status == FANIN_OK)
        status = fanin_session_read(session, 0, half, error);
    if (session) {
        fanin_error last = FANIN_ERROR_INIT;
        fanin_status ending = fanin_session_end(&session, result, &last);
        if (status == FANIN_OK && ending != FANIN_OK)
            *error = last;
        status = status == FANIN_OK ? ending : status;
    }
    return status;
}

/* Into memory that holds the step before, mostly. */
static fanin_status pull_changes(reader *r, fanin_pull_options *options,
                                 fanin_result **result, fanin_error *error)
{
    options->verify = board_random(&r->random) % 2;
    options->deltas = true;
    switch (board_random(&r->random) % 16) {
    case 0:
        scribble(r);
        fanin_destination_touched(r->prepared);
        break;
    case 1:
        options->deltas = false;
        break;
    case 2:
        return read_in_parts(r, options, result, error);
    default:
        break;
    }
    return fanin_client_pull_into(r->client, options, r->prepared, result, error);
}

static fanin_status call(reader *r, fanin_pull_options *options, const char *directory,
                         fanin_result **result, fanin_error *error)
{
    options->verify = board_random(&r->random) % 8 == 0;
    if (must_verify(r))
        options->verify = !mutant_is("trusting");
    if (directory) {
        options->spare_file = board_random(&r->random) % 2;
        return fanin_client_pull_adapter(r->client, options, directory, result, error);
    }
    r->untouched = false;
    if (r->prepared)
        return pull_changes(r, options, result, error);
    if (is_relay(r) &&
        board_random(&r->random) % 2 == 0) /* what it hands on is overwritten */
        return fanin_relay_pull_into(r->relay, options, r->tensors, N_TENSORS, result,
                                     error);
    fanin_relay_release(r->relay);
    scribble(r);
    if (is_relay(r))
        return fanin_relay_pull_into(r->relay, options, r->tensors, N_TENSORS, result,
                                     error);
    if (board_random(&r->random) % 4 == 0)
        return read_in_parts(r, options, result, error);
    return fanin_client_pull(r->client, options, r->tensors, N_TENSORS, result, error);
}

static void choose_rule(reader *r, const expectation *before,
                        fanin_pull_options *options)
{
    uint64_t ahead = board_random(&r->random) % 3;
    bool goes_on = before->life && !atomic_load(&r->board->calm_ns);
    switch (goes_on ? board_random(&r->random) % 6 : 5) {
    case 0:
        options->rule = FANIN_STEP_AT_LEAST;
        options->step = before->step + ahead;
        break;
    case 1:
        options->rule = FANIN_STEP_EXACT;
        options->step = before->step + ahead + 1;
        break;
    default:
        break;
    }
}

/* Gives the last weights of the launch before instead of those that came, as a mutant. */
static void be_stale(reader *r, const fanin_pull_options *options, outcome *o)
{
    static char *kept;
    static uint64_t life, step;
    if (!kept && !(kept = malloc(r->size)))
        exit(2);
    memory_fetch(r->memory, r->size);
    if (life == 0 || o->life == life) {
        memcpy(kept, r->bytes, r->size);
        life = o->life;
        step = o->step;
    } else if (options->rule == FANIN_STEP_NEWEST) {
        memcpy(r->bytes, kept, r->size);
        memory_send(r->memory, r->size);
        o->life = life;
        o->step = step;
    }
}

/* Alters a byte of each tensor that it hands on. */
static void lie(const reader *r)
{
    for (size_t i = 0; i < N_TENSORS; i++)
        r->bytes[(char *)r->boxes[i].address - r->memory] ^= 1;
    memory_send(r->memory, r->size);
}

static void tell_how(const fanin_result_info *info, outcome *o)
{
    size_t n = strlen(o->text);
    if (info->base_step > 0)
        snprintf(o->text + n, sizeof o->text - n, "%spatches since step %" PRIu64,
                 n > 0 ? ", by " : "", info->base_step);
    else if (info->whole_because)
        snprintf(o->text + n, sizeof o->text - n, "%swhole: %s", n > 0 ? ", " : "",
                 info->whole_because);
}

static bool is_there(const char *path)
{
    struct stat is;
    return lstat(path, &is) == 0;
}

static void pull(reader *r, outcome *o)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = RUN;
    options.timeout_ms = r->timeout_ms;
    expectation before = expect(r);
    choose_rule(r, &before, &options);
    char directory[256] = "";
    if (r->directory) {
        snprintf(directory, sizeof directory, "%s/%" PRIu64, r->directory,
                 atomic_load(&r->told->pulls));
        if (obstacles_put(directory, &r->random))
            atomic_fetch_add(&r->told->acts, 1);
    }
    fanin_result *result = NULL;
    bool there = is_there(directory); /* an obstacle, or of a life that was killed */
    o->status = call(r, &options, r->directory ? directory : NULL, &result, &error);
    if (o->status == FANIN_OK) {
        fanin_result_info info = {.struct_size = sizeof info};
        fanin_result_get(result, &info);
        o->life = weights_life(info.world_id);
        o->step = info.step;
        if (mutant_is("stale") && !r->directory)
            be_stale(r, &options, o);
        bool good = (r->directory ? check_file(directory, o) : check_memory(r, o)) &&
                    check_launch(&before, o) && check_step(r, &before, &options, o);
        o->verdict = good ? "good" : "wrong";
        if (is_liar(r))
            lie(r);
        tell_how(&info, o);
    } else {
        bool left = r->directory && !there && is_there(directory);
        o->verdict = left ? "wrong" : "failed";
        snprintf(o->text, sizeof o->text, "%s%s: %s",
                 left ? "has left a directory: " : "", error.phase, error.message);
        keep(r);
    }
    fanin_result_free(&result);
    if (r->directory)
        obstacles_clear(directory);
}

/* ------------------------------------------------------------------------ life */

static void tell(const outcome *o, const reader *r, uint64_t began, bool disturbed)
{
    char text[sizeof o->text];
    size_t n = 0;
    for (const char *c = o->text; *c; c++)
        text[n++] = *c == '\n' ? ' ' : *c;
    text[n] = 0;
    printf("%s %s %" PRIu64 " %u %" PRIu64 " %016" PRIx64 " %" PRIu64 " %d|%s\n",
           o->verdict, fanin_status_name(o->status), (board_now() - began) / MS,
           r->timeout_ms, o->step, o->life, began, disturbed, text);
    fflush(stdout);
}

/* What is wrong with this process, if it is a mutant, from its 20th call on. True: it fails. */
static bool be_wrong(reader *r)
{
    uint64_t calls = atomic_load(&r->told->pulls);
    if (mutant_is("hang") && calls == 20)
        board_sleep(UINT64_C(1000000) * MS);
    if (mutant_is("leak") && calls % 8 == 0)
        (void)!open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (mutant_is("write") && r->untouched) {
        r->bytes[r->size / 2] ^= 1;
        memory_send(r->memory, r->size);
    }
    bool starves = mutant_is("starve") && !atomic_load(&r->board->calm_ns);
    return (mutant_is("wedge") || starves) && calls >= 20;
}

static void once(reader *r)
{
    uint64_t began = board_now(), stops = atomic_load(&r->told->stops);
    outcome o = {.verdict = "failed"};
    if (be_wrong(r))
        o.status = FANIN_ERR_INTERNAL;
    else if (r->untouched && is_touched(r))
        o.verdict = "written";
    else if (r->client || r->relay || make_client(r, &o))
        pull(r, &o);
    r->untouched = r->untouched && strcmp(o.verdict, "written") != 0;
    atomic_fetch_add(&r->told->pulls, 1);
    tell(&o, r, began, stops != atomic_load(&r->told->stops));
    if (board_random(&r->random) % 100 < NEW_CLIENT_PERCENT)
        end_client(r);
    if (o.status != FANIN_OK)
        board_sleep(10 * MS);
}

/* Sockets that are open; by name on standard error, if told to. */
static unsigned sockets_open(bool told)
{
    unsigned n = 0;
    DIR *descriptors = opendir("/proc/self/fd");
    for (struct dirent *e; descriptors && (e = readdir(descriptors));) {
        struct stat is;
        if (fstatat(dirfd(descriptors), e->d_name, &is, 0) != 0 ||
            !S_ISSOCK(is.st_mode))
            continue;
        n++;
        struct sockaddr_storage own = {0};
        socklen_t size = sizeof own;
        int fd = (int)strtol(e->d_name, NULL, 10);
        if (told && getsockname(fd, (struct sockaddr *)&own, &size) == 0)
            fprintf(stderr, "reader: socket %d of family %d is open\n", fd,
                    own.ss_family);
    }
    if (descriptors)
        closedir(descriptors);
    return n;
}

/* Threads; by name on standard error, if told to. A driver begins some when it likes, of devices
   and of peers: those that it names begin with "cuda", and the others have the program's name. The
   library's threads have names of their own. */
static unsigned threads_running(bool told)
{
    unsigned n = 0;
    char path[300], name[32] = "", program[32] = "";
    (void)pthread_getname_np(pthread_self(), program, sizeof program);
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *e; tasks && (e = readdir(tasks));) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
        FILE *file = e->d_name[0] != '.' ? fopen(path, "re") : NULL;
        bool ours = file && fscanf(file, "%31s", name) == 1 &&
                    strcmp(name, program) != 0 && strncmp(name, "cuda", 4) != 0;
        n += ours;
        if (ours && told)
            fprintf(stderr, "reader: thread %s runs: %s\n", e->d_name, name);
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return n;
}

/* Of a client that is gone; what looks up a name for it may go on for a while. */
static bool has_left(unsigned sockets, unsigned threads)
{
    for (int i = 0; i < 500 && threads_running(false) > threads; i++)
        board_sleep(10 * MS);
    if (sockets_open(false) == sockets && threads_running(false) <= threads)
        return false;
    fprintf(stderr, "reader: %u sockets and %u threads before its first client\n",
            sockets, threads);
    (void)sockets_open(true);
    (void)threads_running(true);
    return true;
}

int main(int argc, char **argv)
{
    if (argc < 8)
        return 2;
    reader r = {.board = board_open(argv[1]),
                .random = strtoull(argv[3], NULL, 10) | 1,
                .path = argv[4],
                .timeout_ms = (uint32_t)strtoul(argv[5], NULL, 10),
                .directory = strcmp(argv[6], "-") == 0 ? NULL : argv[6],
                .addresses = (const char *const *)argv + 7,
                .world = (size_t)argc - 7};
    size_t index = strtoul(argv[2], NULL, 10);
    if (index >= BOARD_READERS || r.world > BOARD_RANKS)
        return 2;
    r.told = &r.board->readers[index];
#ifdef FANIN_TEST_HOOKS
    atomic_store(&client_rules_off,
                 mutant_is("base") ? CLIENT_RULE_BASE : CLIENT_RULE_END_CHECK);
#endif
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of its write */
    names_by(r.board);
    get_memory(&r);
    describe(&r);
    prepare(&r);
    const unsigned sockets = sockets_open(false), threads = threads_running(false);
    while (!atomic_load(&r.board->over))
        once(&r);
    end_client(&r);
    fanin_destination_free(&r.prepared);
    free(r.kept);
    if (has_left(sockets, threads))
        return 5;
    return memory_left(1) ? 4 : 0;
}
