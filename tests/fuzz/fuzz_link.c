/* SPDX-License-Identifier: Apache-2.0 */
/* A reader of two ranks, and a link that alters what it and the first rank say to each other (lying_link.h).
   First byte: bits 0-2: what the reader asks for; 3: with checksums; 4: the second rank is read by cma where
   that works. Whatever comes of it, calls end, with a reason if they fail; they write where they were told to;
   nothing of that reader stays with the ranks; another reader gets what they hold, and so does this one once the
   link is honest. */
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
#define RANKS 2
#define BYTES 700
#define ROWS 8
#define COLUMNS 16
#define ROOM (COLUMNS + 3) /* of a row of the reader's memory */
#define UNTOUCHED 0xcc
#define CALL_MS 5000
#define MOST_MS 20000 /* also on a machine that others use */

static fanin_server *servers[RANKS];
static char addresses[RANKS][32];
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

static fanin_status connect_reader(fanin_client *reader, fanin_error *error)
{
    const char *ranks[RANKS] = {between.address, addresses[1]};
    return fanin_client_connect(reader, ranks, RANKS, CALL_MS, error);
}

static fanin_status pull_again(fanin_client *reader, landing *to)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = pull(reader, false, to, &error);
    if (status == FANIN_ERR_STATE) { /* nobody had answered */
        status = connect_reader(reader, &error);
        if (status == FANIN_OK)
            status = pull(reader, false, to, &error);
    }
    return status;
}

static void check_recovers(fanin_client *reader)
{
    landing to;
    lying_link_serve(&between, reader, NULL, 0);
    fanin_status status = pull_again(reader, &to);
    if (status == FANIN_ERR_CANCELLED) /* when the call before had ended */
        status = pull_again(reader, &to);
    check(status == FANIN_OK);
    check_landed(&to);
    lying_link_end(&between);
}

enum { PULL, PULL_VERIFIED, PULL_IN_PARTS, LIST, STATS, WATCH, ADAPTER, MODEL };

static fanin_status call(fanin_client *client, int what, landing *to,
                         fanin_error *error)
{
    fanin_status status = connect_reader(client, error);
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

/* Rank @p rank's part of a tensor of 4-byte elements: so many of its rows. */
static fanin_tensor shard(const char *name, uint32_t rank, uint64_t rows,
                          uint64_t columns, fanin_box *box)
{
    fanin_tensor t = make_tensor(name, FANIN_DTYPE_F32, rows, columns, box,
                                 &matrix[0][0] + rank * rows / RANKS * columns);
    box->offset[0] = rank * rows / RANKS;
    box->extent[0] = rows / RANKS;
    return t;
}

static void publish(fanin_server *server, const char *publication,
                    const fanin_tensor tensors[2], const fanin_pair *metadata, size_t n)
{
    fanin_error error = FANIN_ERROR_INIT;
    check(fanin_server_put(server, publication, tensors, 2, false, &error) == FANIN_OK);
    check(fanin_server_set_metadata(server, publication, metadata, n, &error) ==
          FANIN_OK);
    check(fanin_server_commit(server, publication, 1, NULL, &error) == FANIN_OK);
}

static void start_rank(uint32_t rank)
{
    static const fanin_pair metadata[] = {{"base_model_name_or_path", "base"},
                                          {"lora_alpha", "16"},
                                          {"config", "{\"hidden_size\": 16}"}};
    fanin_box boxes[4];
    fanin_server_config config = make_server_config();
    config.peer_cpu = 0; /* how often inputs come is not what they are */
    config.rank = rank;
    config.world_size = RANKS;
    servers[rank] = make_server(&config, addresses[rank], sizeof addresses[rank]);
    fanin_tensor all = make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &boxes[0],
                                   bytes + rank * BYTES / RANKS);
    boxes[0].offset[0] = rank * BYTES / RANKS;
    boxes[0].extent[0] = BYTES / RANKS;
    const fanin_tensor full[] = {all, shard("matrix", rank, ROWS, COLUMNS, &boxes[1])};
    const fanin_tensor lora[] = {
        shard("model.q.lora_A.weight", rank, ROWS, COLUMNS, &boxes[2]),
        shard("model.q.lora_B.weight", rank, COLUMNS, ROWS, &boxes[3])};
    publish(servers[rank], FULL, full, metadata + 2, 1);
    publish(servers[rank], LORA, lora, metadata, 2);
}

static void set_up(void)
{
    for (int i = 0; i < BYTES; i++)
        bytes[i] = (uint8_t)(i * 7 + 1);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        matrix[i / COLUMNS][i % COLUMNS] = (float)i;
    for (uint32_t rank = 0; rank < RANKS; rank++)
        start_rank(rank);
    const char *ranks[RANKS] = {addresses[0], addresses[1]};
    honest = connect_client(NULL, ranks, RANKS);
    lying_link_start(&between, fanin_server_port(servers[0]));
}

static fanin_server_stats stats_of(uint32_t rank)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    check(fanin_server_get_stats(servers[rank], &stats) == FANIN_OK);
    return stats;
}

/* Until only so many sessions are left, and no lease. */
static void check_left(uint32_t rank, uint64_t sessions)
{
    deadline soon = deadline_in_ms(MOST_MS);
    for (fanin_server_stats s;
         s = stats_of(rank), s.sessions != sessions || s.leases != 0;) {
        check(!deadline_passed(soon));
        sched_yield();
    }
}

/* What is there is the other reader's. */
static void check_ranks(void)
{
    static uint64_t sessions[RANKS];
    landing to;
    fanin_error error = FANIN_ERROR_INIT;
    check(pull(honest, false, &to, &error) == FANIN_OK);
    check_landed(&to);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        if (sessions[rank] == 0)
            sessions[rank] = stats_of(rank).sessions;
        check_left(rank, sessions[rank]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    landing to;
    fanin_error error = FANIN_ERROR_INIT;
    if (size == 0)
        return 0;
    if (!servers[0]) {
        set_up();
        check_ranks();
    }
    fanin_client_config config = make_client_config();
    config.no_checksums = !(data[0] & 8);
    config.path = data[0] & 16 ? FANIN_PATH_AUTO : FANIN_PATH_STREAM;
    fanin_client *reader = make_client(&config);
    int what = data[0] & 7;
    lying_link_serve(&between, reader, data + 1, size - 1);
    deadline soon = deadline_in_ms(MOST_MS);
    fanin_status status = call(reader, what, &to, &error);
    check(!deadline_passed(soon));
    lying_link_end(&between);
    check_recovers(reader);
    fanin_client_destroy(&reader);
    check(status == FANIN_OK || error.message[0] != '\0');
    if (size == 1) { /* nothing was altered */
        check(status == FANIN_OK);
        if (what <= PULL_IN_PARTS)
            check_landed(&to);
    }
    check_ranks();
    return 0;
}
