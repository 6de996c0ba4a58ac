/* SPDX-License-Identifier: Apache-2.0 */
/* A reader of two ranks, and a link that alters what it and the first rank say to each other, while
   their trainer acts and the reader is cancelled (edits.h). First byte: bits 0-2: what the reader
   asks for; 3: with checksums; 4: the second rank is read by cma where that works; 5: by TLS, with
   a secret; 6: and the link does not know it, so that it alters TLS records; 7: the first rank is
   on the Unix socket, and by cma, as the second. Second byte: bit 0: the reader has two threads; 1:
   it waits in vain for a step first; 2: the link stays as it is afterwards, but alters
   nothing more, instead of closing what it has altered; then it does not know checksums either; 3:
   the ranks' memory is a CUDA device's, and read by cuda_ipc instead of cma; 4: the reader's is; 5:
   it pulls three times into memory that stays as it is between them, by patches where it can.
   Whatever comes of it, calls end, with a reason if they fail; they write where they were told to;
   what they bring is one step unless the link lied and knew how to be believed; nothing of that
   reader stays with the ranks; another reader gets what they hold, and so does this one once the
   link is honest; no device reads or writes what is not there. */
#include "changes.h"
#include "clock.h"
#include "ends.h"
#include "fuzz.h"
#include "landing.h"
#include "lying_link.h"
#include "on_device.h"
#include "pulled_directory.h"
#include "secrets.h"
#include <string.h>

#define CALL_MS 5000
#define VAIN_MS 10
/* Where the link stays: what it has altered may cost a pull, and whoever waits for what never
   comes. */
#define SHORT_MS 1000
#define LOST_MS 250
#define HEAD 2 /* bytes before the edits */

typedef struct scene {
    const char *secret_file; /* NULL: none */
    two_ranks *ranks;
    lying_link between;
    fanin_client *other;
    bool lands_on_device; /* the reader's memory; the other's is the host's */
} scene;

static fanin_pull_options of(const char *publication)
{
    fanin_pull_options o = make_options(FANIN_STEP_NEWEST, 0);
    o.publication = publication;
    o.timeout_ms = CALL_MS;
    return o;
}

/* ----------------------------------------------------------- what is called */

static fanin_status pull(fanin_client *client, bool verify, uint32_t timeout_ms,
                         landing *to, fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    fanin_result *result = NULL;
    o.verify = verify;
    o.timeout_ms = timeout_ms;
    landing_prepare(to);
    fanin_status status = fanin_client_pull(client, &o, to->tensors, 2, &result, error);
    landing_end(to, result);
    return status;
}

static fanin_status pull_in_parts(fanin_client *client, landing *to, fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    fanin_session *session = NULL;
    fanin_result *result = NULL;
    o.rule = FANIN_STEP_AT_LEAST;
    o.step = 1;
    landing_prepare(to);
    fanin_status status =
        fanin_client_begin(client, &o, to->tensors, 2, &session, error);
    for (size_t i = 0; i < 2 && status == FANIN_OK; i++)
        status = fanin_session_read(session, i, 1, error);
    if (status == FANIN_OK)
        status = fanin_session_end(&session, &result, error);
    fanin_session_abandon(&session);
    landing_end(to, result);
    return status;
}

/* For a step that never comes. */
static void wait_in_vain(fanin_client *client, landing *to, fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    fanin_result *result = NULL;
    o.rule = FANIN_STEP_AT_LEAST;
    o.step = UINT64_MAX / 2;
    o.timeout_ms = VAIN_MS;
    landing_prepare(to);
    (void)!fanin_client_pull(client, &o, to->tensors, 2, &result, error);
    landing_end(to, result);
}

static fanin_status pull_adapter(fanin_client *client, fanin_error *error)
{
    fanin_pull_options o = of(LORA);
    const char *directory = pulled_directory();
    fanin_status status = fanin_client_pull_adapter(client, &o, directory, NULL, error);
    pulled_directory_check(status == FANIN_OK, "adapter_model.safetensors");
    return status;
}

static fanin_status pull_model(fanin_client *client, fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    const char *directory = pulled_directory();
    fanin_status status = fanin_client_pull_model(client, &o, directory, NULL, error);
    pulled_directory_check(status == FANIN_OK, "model.safetensors");
    return status;
}

static bool on_publication(void *cookie, const fanin_publication_info *info)
{
    (void)cookie;
    check(strlen(info->name) > 0);
    return true;
}

static bool on_entry(void *cookie, const fanin_entry *entry)
{
    (void)cookie;
    check(strlen(entry->name) > 0 && entry->n_dims <= FANIN_MAX_DIMS);
    return true;
}

static bool on_pair(void *cookie, const char *key, const char *value)
{
    (void)cookie;
    (void)strlen(value);
    check(strlen(key) > 0);
    return true;
}

static fanin_status list(fanin_client *client, fanin_error *error)
{
    fanin_status status =
        fanin_client_list(client, CALL_MS, on_publication, NULL, error);
    if (status == FANIN_OK)
        status =
            fanin_client_catalog(client, FULL, NULL, CALL_MS, on_entry, NULL, error);
    if (status == FANIN_OK)
        status = fanin_client_metadata(client, FULL, CALL_MS, on_pair, NULL, error);
    return status;
}

static bool on_stats(void *cookie, const fanin_rank_info *rank,
                     const fanin_rank_stats *stats)
{
    (void)cookie;
    check(rank != NULL);
    for (size_t i = 0; stats && i < stats->n_entries; i++)
        check(strlen(stats->entries[i]->name) + strlen(stats->entries[i]->reason) > 0);
    for (size_t i = 0; stats && i < stats->n_holders; i++)
        check(strlen(stats->holders[i]->who) > 0 && stats->holders[i]->publication);
    return true;
}

static bool on_pong(void *cookie, const fanin_rank_info *rank, uint64_t rtt_ns)
{
    (void)cookie;
    (void)rtt_ns;
    check(rank != NULL);
    return true;
}

static fanin_status ask_stats(fanin_client *client, fanin_error *error)
{
    fanin_status status =
        fanin_client_stats(client, NULL, CALL_MS, on_stats, NULL, error);
    if (status == FANIN_OK)
        status = fanin_client_ping(client, CALL_MS, on_pong, NULL, error);
    return status;
}

static bool on_change(void *cookie, const fanin_watch_event *event)
{
    (void)cookie;
    (void)event;
    return false; /* the first one is enough */
}

static fanin_status watch(fanin_client *client, fanin_error *error)
{
    return fanin_client_watch(client, FULL, CALL_MS, on_change, NULL, error);
}

static fanin_status connect_reader(const scene *s, fanin_client *reader,
                                   fanin_error *error)
{
    const char *addresses[RANKS] = {s->between.address, ranks_addresses(s->ranks)[1]};
    return fanin_client_connect(reader, addresses, RANKS, CALL_MS, error);
}

enum { PULL, PULL_VERIFIED, PULL_IN_PARTS, LIST, STATS, WATCH, ADAPTER, MODEL };

/* Each may fail. */
static fanin_status pull_changes(fanin_client *reader, changes *c, bool verify,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (int i = 0; i < 3; i++) {
        status = changes_pull(reader, c, verify, CALL_MS, error);
        if (status == FANIN_OK && !c->doubted)
            changes_check(c);
    }
    return status;
}

static fanin_status call(fanin_client *reader, int what, landing *to,
                         fanin_error *error)
{
    switch (what) {
    case LIST:
        return list(reader, error);
    case STATS:
        return ask_stats(reader, error);
    case WATCH:
        return watch(reader, error);
    case PULL_IN_PARTS:
        return pull_in_parts(reader, to, error);
    case ADAPTER:
        return pull_adapter(reader, error);
    case MODEL:
        return pull_model(reader, error);
    default:
        return pull(reader, what == PULL_VERIFIED, CALL_MS, to, error);
    }
}

/* ------------------------------------------------------------- what must be */

static fanin_status pull_again(const scene *s, fanin_client *reader,
                               uint32_t timeout_ms, landing *to)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = pull(reader, false, timeout_ms, to, &error);
    if (status == FANIN_ERR_STATE) { /* nobody had answered */
        status = connect_reader(s, reader, &error);
        if (status == FANIN_OK)
            status = pull(reader, false, timeout_ms, to, &error);
    }
    return status;
}

/* The link alters nothing: whatever was here, what comes is right. */
static void check_changes(fanin_client *reader, changes *c, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (!c->into)
        return;
    check(changes_pull(reader, c, c->doubted, CALL_MS, &error) == FANIN_OK);
    check(c->step == step);
    changes_check(c);
}

/* By a link that has closed what it had altered. */
static void check_recovers(scene *s, fanin_client *reader, uint64_t step, changes *c)
{
    landing to = {.on_device = s->lands_on_device};
    lying_link_serve(&s->between, reader, (edits){0}, LINK_BY_TCP, false);
    fanin_status status = pull_again(s, reader, CALL_MS, &to);
    /* It was cancelled when the call before had ended, and what had come until then is read first.
       */
    for (int i = 0; i < 2 && status != FANIN_OK; i++)
        status = pull_again(s, reader, CALL_MS, &to);
    check(status == FANIN_OK && to.step == step);
    landing_check(&to);
    check_changes(reader, c, step);
    lying_link_end(&s->between);
}

/* By one that has not, and alters nothing more. */
static void check_goes_on(scene *s, fanin_client *reader, uint64_t step, changes *c)
{
    landing to = {.on_device = s->lands_on_device};
    deadline soon = deadline_in_ms(MOST_MS);
    while (pull_again(s, reader, SHORT_MS, &to) != FANIN_OK)
        check(!deadline_passed(soon));
    check(to.step == step);
    landing_check(&to);
    check_changes(reader, c, step);
    lying_link_end(&s->between);
}

static void check_other(scene *s, uint64_t step)
{
    landing to = {0};
    fanin_error error = FANIN_ERROR_INIT;
    check(pull(s->other, false, CALL_MS, &to, &error) == FANIN_OK && to.step == step);
    landing_check(&to);
    ranks_check_left(s->ranks);
}

/* What an input says of the link. */
typedef struct lying {
    edits lies;
    link_kind kind;
    bool believed; /* it knows how to be; what it says then stays believed */
    bool stays;
} lying;

static lying lying_of(const scene *s, const uint8_t *data, size_t size)
{
    lying l = {.lies = {data + HEAD, size - HEAD}};
    bool sealed = data[0] & 8, stays = data[1] & 4;
    if (data[0] & 128)
        l.kind = LINK_BY_NAME;
    else if (s->secret_file && data[0] & 64)
        l.kind = LINK_RECORDS;
    else if (!s->secret_file && sealed && stays)
        l.kind = LINK_NOISY;
    l.believed = l.kind != LINK_RECORDS && l.kind != LINK_NOISY;
    l.stays = stays && !l.believed;
    return l;
}

static void check_call(scene *s, fanin_client *reader, const uint8_t head[HEAD],
                       const lying *l, changes *c)
{
    c->doubted = l->believed && edits_lie(l->lies);
    landing to = {.on_device = s->lands_on_device};
    fanin_error error = FANIN_ERROR_INIT;
    lying_link_serve(&s->between, reader, l->lies, l->kind, l->stays);
    deadline soon = deadline_in_ms(MOST_MS);
    fanin_status status = connect_reader(s, reader, &error);
    if (status == FANIN_OK && head[1] & 2)
        wait_in_vain(reader, &to, &error);
    if (status == FANIN_OK && c->into)
        status = pull_changes(reader, c, (head[0] & 7) == PULL_VERIFIED, &error);
    else if (status == FANIN_OK)
        status = call(reader, head[0] & 7, &to, &error);
    check(!deadline_passed(soon));
    if (l->stays)
        lying_link_mend(&s->between);
    else
        lying_link_end(&s->between);
    check(status == FANIN_OK || error.message[0] != '\0');
    check(status == FANIN_OK || l->lies.size > 0);
    if (to.step > 0 && !c->doubted)
        landing_check(&to);
}

/* -------------------------------------------------------------------- scenes */

static fanin_client_config config_of_reader(const scene *s)
{
    fanin_client_config config = make_client_config();
    config.secret_file = s->secret_file;
    return config;
}

static void set_scene(scene *s, const char *secret_file, tls_end *const played[2],
                      bool on_device)
{
    s->secret_file = secret_file;
    s->ranks = ranks_start(secret_file, on_device);
    lying_link_start(&s->between, ranks_port(s->ranks, 0), played, ranks_act, s->ranks);
    const fanin_client_config config = config_of_reader(s);
    s->other = connect_client(&config, ranks_addresses(s->ranks), RANKS);
    check_other(s, 1);
}

/* A rank's and a reader's that the link plays. False: OpenSSL is missing. */
static bool play(const char *file, tls_end *played[2])
{
    fanin_error error = FANIN_ERROR_INIT;
    bool good = tls_end_of_rank(file, make_server_config().world_id, 0, &played[0],
                                &error) == FANIN_OK &&
                tls_end_by_secret(file, NULL, &played[1], &error) == FANIN_OK;
    check(good || error.status == FANIN_ERR_UNSUPPORTED);
    return good;
}

/* With a secret, or the one without where OpenSSL is missing; on a device, or the host's where
   there is none. */
static scene *scene_of(bool secured, bool on_device)
{
    static scene scenes[2][2];
    static tls_end *played[2], *none[2];
    if (!scenes[0][0].ranks) {
        const char *file = secret_of('1');
        int kinds = device_is_there() ? 2 : 1;
        bool can_tls = play(file, played);
        (void)atexit(secrets_remove);
        for (int kind = 0; kind < kinds; kind++) {
            set_scene(&scenes[0][kind], NULL, none, kind == 1);
            if (can_tls)
                set_scene(&scenes[1][kind], file, played, kind == 1);
        }
    }
    return &scenes[secured && scenes[1][0].ranks][on_device && scenes[0][1].ranks];
}

static fanin_client *make_reader(const scene *s, const uint8_t head[HEAD], bool stays)
{
    fanin_client_config config = config_of_reader(s);
    config.no_checksums = !(head[0] & 8);
    config.path = head[0] & 16 ? FANIN_PATH_AUTO : FANIN_PATH_STREAM;
    config.threads = config.streams_per_rank = head[1] & 1 ? 2 : 1;
    if (stays)
        config.connect_timeout_ms = config.lost_ms = LOST_MS;
    return make_client(&config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < HEAD)
        return 0;
    scene *s = scene_of(data[0] & 32, data[1] & 8);
    s->lands_on_device = data[1] & 16 && device_is_there();
    const lying l = lying_of(s, data, size);
    fanin_client *reader = make_reader(s, data, l.stays);
    changes c = {.into = NULL};
    if (data[1] & 32)
        changes_prepare(&c);
    check_call(s, reader, data, &l, &c);
    uint64_t step = ranks_settle(s->ranks);
    if (l.stays)
        check_goes_on(s, reader, step, &c);
    else
        check_recovers(s, reader, step, &c);
    changes_end(&c);
    fanin_client_destroy(&reader);
    check(device_mappings() == 0);
    check_other(s, step);
    return 0;
}
