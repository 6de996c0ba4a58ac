/* SPDX-License-Identifier: Apache-2.0 */
/* A reader and a rank, and a link that alters what they say to each other (lying_link.h). First byte: what the
   reader asks for. Whatever comes of it, calls end, with a reason if they fail; they write where they were
   told to; nothing of that reader stays with the rank; and another reader gets what the rank holds. */
#include "ends.h"
#include "fuzz.h"
#include "lying_link.h"
#include "pulled_directory.h"
#include "clock.h"
#include <sched.h>
#include <stdio.h>
#include <string.h>

#define FULL "full:0"
#define LORA "lora:0"
#define BYTES 700
#define ROWS 8
#define COLUMNS 16
#define ROOM (COLUMNS + 3) /* of a row of the reader's memory */
#define UNTOUCHED 0xcc
#define CALL_MS 1000
#define MOST_MS 20000 /* also on a machine that others use */

static fanin_server *server;
static fanin_client *honest;
static lying_link between;
static uint8_t bytes[BYTES];
static float matrix[ROWS][COLUMNS];

/* What a reader's memory is. */
typedef struct landing {
    uint8_t bytes[BYTES];
    float matrix[ROWS][ROOM];
    fanin_box boxes[2];
    fanin_tensor tensors[2];
} landing;

static void prepare(landing *to)
{
    memset(to, UNTOUCHED, sizeof *to);
    to->tensors[0] =
        make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &to->boxes[0], to->bytes);
    to->tensors[1] = make_tensor("matrix", FANIN_DTYPE_F32, ROWS, COLUMNS,
                                 &to->boxes[1], to->matrix);
    to->boxes[1].stride[0] = sizeof to->matrix[0];
    to->boxes[1].stride[1] = sizeof(float);
}

static void check_around(const landing *to)
{
    static const uint8_t untouched[(ROOM - COLUMNS) * sizeof(float)] = {
        UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED,
        UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED, UNTOUCHED};
    for (int row = 0; row < ROWS; row++)
        check(memcmp(&to->matrix[row][COLUMNS], untouched, sizeof untouched) == 0);
}

static void check_landed(const landing *to)
{
    check(memcmp(to->bytes, bytes, sizeof bytes) == 0);
    for (int row = 0; row < ROWS; row++)
        check(memcmp(to->matrix[row], matrix[row], sizeof matrix[row]) == 0);
}

/* -------------------------------------------------------------------- calls */

static fanin_pull_options of(const char *publication)
{
    fanin_pull_options o = make_options(FANIN_STEP_NEWEST, 0);
    o.publication = publication;
    o.timeout_ms = CALL_MS;
    return o;
}

static fanin_status pull(fanin_client *client, bool verify, landing *to,
                         fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    o.verify = verify;
    prepare(to);
    fanin_status status = fanin_client_pull(client, &o, to->tensors, 2, NULL, error);
    check_around(to);
    return status;
}

static fanin_status pull_in_parts(fanin_client *client, landing *to, fanin_error *error)
{
    fanin_pull_options o = of(FULL);
    fanin_session *session = NULL;
    o.rule = FANIN_STEP_AT_LEAST;
    o.step = 1;
    prepare(to);
    fanin_status status =
        fanin_client_begin(client, &o, to->tensors, 2, &session, error);
    for (size_t i = 0; i < 2 && status == FANIN_OK; i++)
        status = fanin_session_read(session, i, 1, error);
    if (status == FANIN_OK)
        status = fanin_session_end(&session, NULL, error);
    else
        fanin_session_abandon(&session);
    check_around(to);
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

enum { PULL, PULL_VERIFIED, PULL_IN_PARTS, LIST, STATS, WATCH, ADAPTER, MODEL, CALLS };

static fanin_status call(fanin_client *client, int what, landing *to,
                         fanin_error *error)
{
    const char *address = between.address;
    fanin_status status = fanin_client_connect(client, &address, 1, CALL_MS, error);
    if (status != FANIN_OK)
        return status;
    switch (what) {
    case LIST:
        return list(client, error);
    case STATS:
        return ask_stats(client, error);
    case WATCH:
        return watch(client, error);
    case PULL_IN_PARTS:
        return pull_in_parts(client, to, error);
    case ADAPTER:
        return pull_adapter(client, error);
    case MODEL:
        return pull_model(client, error);
    default:
        return pull(client, what == PULL_VERIFIED, to, error);
    }
}

/* --------------------------------------------------------------------- ends */

static void publish(const char *publication, const fanin_tensor tensors[2],
                    const fanin_pair *metadata, size_t n)
{
    fanin_error error = FANIN_ERROR_INIT;
    check(fanin_server_put(server, publication, tensors, 2, false, &error) == FANIN_OK);
    check(fanin_server_set_metadata(server, publication, metadata, n, &error) ==
          FANIN_OK);
    check(fanin_server_commit(server, publication, 1, NULL, &error) == FANIN_OK);
}

static void set_up(void)
{
    static char address[32];
    const char *addresses = address;
    fanin_box boxes[4];
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (uint8_t)(i * 7 + 1);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        matrix[i / COLUMNS][i % COLUMNS] = (float)i;
    fanin_server_config config = make_server_config();
    config.peer_cpu = 0; /* how often inputs come is not what they are */
    server = make_server(&config, address, sizeof address);
    const fanin_tensor full[] = {
        make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &boxes[0], bytes),
        make_tensor("matrix", FANIN_DTYPE_F32, ROWS, COLUMNS, &boxes[1], matrix)};
    const fanin_tensor lora[] = {make_tensor("model.q.lora_A.weight", FANIN_DTYPE_F32,
                                             ROWS, COLUMNS, &boxes[2], matrix),
                                 make_tensor("model.q.lora_B.weight", FANIN_DTYPE_F32,
                                             COLUMNS, ROWS, &boxes[3], matrix)};
    const fanin_pair metadata[] = {{"base_model_name_or_path", "base"},
                                   {"lora_alpha", "16"},
                                   {"config", "{\"hidden_size\": 16}"}};
    publish(FULL, full, metadata + 2, 1);
    publish(LORA, lora, metadata, 2);
    honest = connect_client(NULL, &addresses, 1);
    lying_link_start(&between, fanin_server_port(server));
}

static fanin_server_stats stats_now(void)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    check(fanin_server_get_stats(server, &stats) == FANIN_OK);
    return stats;
}

/* What is there is the other reader's. */
static void check_rank(void)
{
    static uint64_t sessions;
    landing to;
    fanin_error error = FANIN_ERROR_INIT;
    check(pull(honest, false, &to, &error) == FANIN_OK);
    check_landed(&to);
    if (sessions == 0)
        sessions = stats_now().sessions;
    deadline soon = deadline_in_ms(MOST_MS);
    for (fanin_server_stats s;
         s = stats_now(), s.sessions != sessions || s.leases != 0;) {
        check(!deadline_passed(soon));
        sched_yield();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    landing to;
    fanin_error error = FANIN_ERROR_INIT;
    if (size == 0)
        return 0;
    if (!server) {
        set_up();
        check_rank();
    }
    fanin_client_config config = make_client_config();
    config.no_unix = config.no_checksums = true;
    fanin_client *reader = make_client(&config);
    int what = data[0] % CALLS;
    lying_link_serve(&between, reader, data + 1, size - 1);
    deadline soon = deadline_in_ms(MOST_MS);
    fanin_status status = call(reader, what, &to, &error);
    check(!deadline_passed(soon));
    lying_link_end(&between);
    fanin_client_destroy(&reader);
    check(status == FANIN_OK || error.message[0] != '\0');
    if (size == 1) { /* nothing was altered */
        check(status == FANIN_OK);
        if (what <= PULL_IN_PARTS)
            check_landed(&to);
    }
    check_rank();
    return 0;
}
