/* SPDX-License-Identifier: Apache-2.0 */
#include "samples.h"
#include "patch.h"
#include "ipc_key.h"
#include "digest.h"

#include <stdlib.h>

static buffer *add(samples *s, const char *name)
{
    sample *list = realloc(s->list, (s->count + 1) * sizeof *list);
    if (!list)
        abort();
    s->list = list;
    s->list[s->count] = (sample){.name = name};
    return &s->list[s->count++].bytes;
}

void samples_free(samples *s)
{
    for (size_t i = 0; i < s->count; i++)
        buffer_free(&s->list[i].bytes);
    free(s->list);
    *s = (samples){0};
}

static void fill(uint8_t id[16], uint8_t first)
{
    for (int i = 0; i < 16; i++)
        id[i] = (uint8_t)(first + i);
}

/* ------------------------------------------------------------- messages */

static void add_hellos(samples *s)
{
    msg_hello hello = {.version_min = 1,
                       .version_max = 1,
                       .role = ROLE_CONTROL,
                       .ucx_version = "1.22.0",
                       .software = "fanin 0.1.0",
                       .trace_id = "pull-17"};
    fill(hello.id, 0x10);
    encode_hello(add(s, "hello"), SAMPLE_REQUEST, &hello);
    msg_hello data = {.version_min = 1, .version_max = 3, .role = ROLE_DATA};
    fill(data.id, 0x40);
    encode_hello(add(s, "hello_data"), SAMPLE_REQUEST, &data);

    msg_hello_ok ok = {.version = 1,
                       .rank = 3,
                       .world_size = 8,
                       .server_name = "lora_param_server_3",
                       .ucx_version = "1.22.0",
                       .software = "fanin 0.1.0",
                       .host_id = "host",
                       .paths = 1u << WIRE_PATH_STREAM | 1u << WIRE_PATH_CMA,
                       .lease_ms = 1000,
                       .warnings = "locked memory is limited to 8 MiB",
                       .address = "127.0.0.1:6003"};
    fill(ok.world_id, 0x20);
    fill(ok.incarnation, 0x30);
    fill(ok.session, 0x40);
    encode_hello_ok(add(s, "hello_ok"), SAMPLE_REQUEST, &ok);
    ok.rank = 0;
    ok.world_size = 1;
    ok.relay = true;
    encode_hello_ok(add(s, "hello_ok_relay"), SAMPLE_REQUEST, &ok);
}

static void add_paths(samples *s)
{
    msg_open_path m = {.path = WIRE_PATH_RDMA, .address = {(const uint8_t *)"ucx", 3}};
    encode_open_path(add(s, "open_path"), SAMPLE_REQUEST, MSG_OPEN_PATH, &m);
    encode_open_path(add(s, "open_path_ok"), SAMPLE_REQUEST, MSG_OPEN_PATH_OK, &m);
    m = (msg_open_path){.path = WIRE_PATH_CMA, .address = {(const uint8_t *)"", 0}};
    m.witness = UINT64_C(0x7f0012345670);
    encode_open_path(add(s, "open_path_cma_ok"), SAMPLE_REQUEST, MSG_OPEN_PATH_OK, &m);
    m = (msg_open_path){.path = WIRE_PATH_CUDA_IPC,
                        .address = {(const uint8_t *)"", 0}};
    encode_open_path(add(s, "open_path_ipc"), SAMPLE_REQUEST, MSG_OPEN_PATH, &m);
    encode_open_path(add(s, "open_path_ipc_ok"), SAMPLE_REQUEST, MSG_OPEN_PATH_OK, &m);
}

static void add_lists(samples *s)
{
    msg_list_entry entries[2] = {
        {.publication = "lora:0",
         .step = 41,
         .epoch = 82,
         .catalog_version = 2,
         .tensors = 448,
         .bytes = 83886080,
         .state = WIRE_STATE_STABLE,
         .state_age_ms = 1500,
         .commit_age_ms = 2500,
         .taken_back = 41,
         .patches = 4,
         .patch_bytes = 1677721},
        {.publication = "lora:eval", .state = WIRE_STATE_UNPUBLISHED}};
    fill(entries[0].key_digest, 0x50);
    encode_list(add(s, "list_all"), SAMPLE_REQUEST, NULL);
    encode_list(add(s, "list"), SAMPLE_REQUEST, "lora:0");
    encode_list_ok(add(s, "list_ok"), SAMPLE_REQUEST, entries, 2);
    encode_list_ok(add(s, "list_ok_empty"), SAMPLE_REQUEST, NULL, 0);
}

static void add_stats(samples *s)
{
    stats_entry entries[2] = {{.publication = "lora:0",
                               .state = WIRE_STATE_DRAINING,
                               .step = 41,
                               .state_age_ms = 300,
                               .commit_age_ms = 2500,
                               .update_age_ms = 300,
                               .leases = 3,
                               .lease_age_ms = 1200,
                               .pending = true,
                               .bytes = 83886080,
                               .bytes_left = 85000000},
                              {.publication = "lora:eval",
                               .state = WIRE_STATE_PAUSED,
                               .reason = "evaluating"}};
    stats_holder holders[2] = {
        {.who = "10.0.0.7", .leases = 2, .age_ms = 1200, .held_up_ns = 500000000},
        {.publication = 1, .who = "this user", .leases = 1, .age_ms = 7}};
    stats_relay relay = {.address = "10.0.0.7:7000",
                         .place = "a/r3",
                         .step = 41,
                         .units = 512,
                         .landed = 500,
                         .bytes_origin = 1 << 20,
                         .bytes_relays = 1 << 26,
                         .bytes_handed_on = UINT64_C(1) << 33,
                         .late = 2,
                         .taken_over = 1};
    msg_stats_ok m = {.pulls_good = 100,
                      .pulls_stale = 2,
                      .sessions = 9,
                      .leases = 3,
                      .bytes_streamed = UINT64_C(1) << 40,
                      .publications = 2,
                      .drain_wait_ns_max = 31000000,
                      .drain_waits = {[0] = 40, [6] = 1},
                      .drain_wait_ns_total = 93000000,
                      .cpu_ns = 5000000,
                      .sends_waiting = 1,
                      .bytes_tls = 1 << 20,
                      .bytes_cma = UINT64_C(1) << 41,
                      .bytes_rdma = 1,
                      .bytes_cuda_ipc = UINT64_C(1) << 42,
                      .data_cpu_ns = 7000000,
                      .relays = 64,
                      .relay_units = 512,
                      .relay_bytes_origin = 1 << 26,
                      .relay_bytes_relays = UINT64_C(1) << 32,
                      .relay_late = 3,
                      .relay_taken_over = 1,
                      .entries = entries,
                      .holders = holders,
                      .told_relays = &relay,
                      .n_told_relays = 1,
                      .n_entries = 2,
                      .n_holders = 2};
    encode_stats(add(s, "stats_all"), SAMPLE_REQUEST, NULL);
    encode_stats(add(s, "stats"), SAMPLE_REQUEST, "lora:0");
    encode_stats_ok(add(s, "stats_ok"), SAMPLE_REQUEST, &m);
    encode_stats_ok(add(s, "stats_ok_empty"), SAMPLE_REQUEST, &(msg_stats_ok){0});
}

static void add_blobs(samples *s)
{
    msg_blob_request keys = {.offset = 1 << 20};
    fill(keys.digest, 0x50);
    msg_blob_request boxes = {.publication = "lora:0", .catalog_version = 2};
    msg_blob_request part = {.publication = "full:0",
                             .catalog_version = 2,
                             .keys = {(const uint8_t *)"\x02\x03\x01\xcc\xc8", 5}};
    msg_blob_request regions = {.publication = "lora:0",
                                .catalog_version = 2,
                                .path = WIRE_PATH_CMA,
                                .offset = 300};
    msg_blob_page page = {
        .total = 70000, .offset = 69996, .data = {(const uint8_t *)"\1\2\3\4", 4}};
    encode_blob_request(add(s, "keys"), SAMPLE_REQUEST, MSG_KEYS, &keys);
    encode_blob_request(add(s, "boxes"), SAMPLE_REQUEST, MSG_BOXES, &boxes);
    encode_blob_request(add(s, "boxes_part"), SAMPLE_REQUEST, MSG_BOXES, &part);
    encode_blob_request(add(s, "regions"), SAMPLE_REQUEST, MSG_REGIONS, &regions);
    encode_blob_page(add(s, "keys_ok"), SAMPLE_REQUEST, MSG_KEYS_OK, &page);
    encode_blob_page(add(s, "boxes_ok"), SAMPLE_REQUEST, MSG_BOXES_OK, &page);
    encode_blob_page(add(s, "regions_ok"), SAMPLE_REQUEST, MSG_REGIONS_OK,
                     &(msg_blob_page){0});
}

static void add_patches(samples *s, msg_wait wait, msg_wait_ok wait_ok)
{
    const patch_offers offers = {.generation = 84,
                                 .directory_bytes = 8,
                                 .first_box = 3,
                                 .count = 2,
                                 .patches = {{80, 1200}, {76, 1000}}};
    uint8_t encoded[PATCH_OFFERS_BYTES];
    wait.deltas = true;
    wait_ok.patches.data = encoded;
    wait_ok.patches.size = patch_offers_encode(&offers, encoded);
    encode_wait(add(s, "wait_deltas"), SAMPLE_REQUEST, &wait);
    encode_wait_ok(add(s, "wait_begun_patches"), SAMPLE_REQUEST, &wait_ok);
}

static void add_leases(samples *s)
{
    msg_wait wait = {.publication = "lora:0",
                     .rule = WIRE_RULE_AT_LEAST,
                     .step = 42,
                     .timeout_ms = 60000};
    msg_wait_ok wait_ok = {.step = 42, .catalog_version = 2, .stable_ns = 12500000};
    fill(wait_ok.key_digest, 0x50);
    encode_wait(add(s, "wait"), SAMPLE_REQUEST, &wait);
    encode_wait_ok(add(s, "wait_ok"), SAMPLE_REQUEST, &wait_ok);
    wait_ok.digest_bytes = LIMIT_DIGEST_BYTES;
    encode_wait_ok(add(s, "wait_ok_digest_bytes"), SAMPLE_REQUEST, &wait_ok);
    wait_ok.digest_bytes = 0;
    uint8_t token[16];
    fill(token, 0x60);
    wait.begin_version = 2;
    wait_ok.token = (bytes_view){token, sizeof token};
    wait_ok.lease_ms = 1000;
    encode_wait(add(s, "wait_begin"), SAMPLE_REQUEST, &wait);
    encode_wait_ok(add(s, "wait_begun"), SAMPLE_REQUEST, &wait_ok);
    wait_ok.epoch = 84;
    wait_ok.word = SAMPLE_WORD;
    encode_wait_ok(add(s, "wait_begun_word"), SAMPLE_REQUEST, &wait_ok);
    wait_ok.epoch = wait_ok.word = 0;
    wait_ok.first_region = 1; /* of region_table_arenas */
    encode_wait_ok(add(s, "wait_begun_arena"), SAMPLE_REQUEST, &wait_ok);
    add_patches(s, wait, wait_ok);

    msg_begin begin = {.publication = "lora:0", .step = 42, .catalog_version = 2};
    msg_begin_ok granted = {.granted = true, .epoch = 84, .lease_ms = 1000};
    fill(granted.token, 0x60);
    msg_begin_ok refused = {.state = WIRE_STATE_DRAINING,
                            .step = 42,
                            .catalog_version = 2,
                            .why = "an update is about to begin"};
    encode_begin(add(s, "begin"), SAMPLE_REQUEST, &begin);
    encode_begin_ok(add(s, "begin_granted"), SAMPLE_REQUEST, &granted);
    granted.word = SAMPLE_WORD;
    encode_begin_ok(add(s, "begin_granted_word"), SAMPLE_REQUEST, &granted);
    granted.word = 0;
    granted.first_region = 1; /* of region_table_arenas */
    encode_begin_ok(add(s, "begin_granted_arena"), SAMPLE_REQUEST, &granted);
    encode_begin_ok(add(s, "begin_refused"), SAMPLE_REQUEST, &refused);
}

static void add_reads(samples *s)
{
    static const read_entry entries[] = {
        {.box = 0, .count = 300},
        {.box = 301, .offset = 4096, .length = 65536},
        {.box = 37247, .count = 1},
    };
    msg_read read = {.bytes = 1000000, .entries = entries, .n_entries = 3};
    fill(read.token, 0x60);
    encode_read(add(s, "read"), SAMPLE_REQUEST, &read);
    encode_digest(add(s, "digest"), SAMPLE_REQUEST, &read);
    read.dtype = FANIN_DTYPE_BF16;
    encode_digest(add(s, "digest_bf16"), SAMPLE_REQUEST, &read);
    uint8_t digests[3 * 16] = {0};
    fill(digests, 0x10);
    fill(digests + 16, 0x20);
    fill(digests + 32, 0x30);
    encode_digest_ok(add(s, "digest_ok"), SAMPLE_REQUEST,
                     &(msg_digest_ok){.digests = {digests, sizeof digests}});
    encode_read_ok(add(s, "read_ok"), SAMPLE_REQUEST, 1000000);

    msg_end end = {.abandon = false}, abandon = {.abandon = true},
            quiet = {.quiet = true},
            told = {.bytes_cma = 48,
                    .bytes_rdma = 1 << 20,
                    .bytes_cuda_ipc = UINT64_C(1) << 40};
    fill(end.token, 0x60);
    fill(abandon.token, 0x60);
    fill(quiet.token, 0x60);
    fill(told.token, 0x60);
    encode_end(add(s, "end"), SAMPLE_REQUEST, &end);
    encode_end(add(s, "end_told"), SAMPLE_REQUEST, &told);
    encode_end(add(s, "end_abandon"), SAMPLE_REQUEST, &abandon);
    encode_end(add(s, "end_begun"), SAMPLE_REQUEST,
               &(msg_end){.abandon = true, .begin = SAMPLE_REQUEST - 1});
    encode_end(add(s, "end_quiet"), SAMPLE_REQUEST, &quiet);
    end.keep = true;
    encode_end(add(s, "end_keep"), SAMPLE_REQUEST, &end);
    encode_end_ok(add(s, "end_ok"), SAMPLE_REQUEST,
                  &(msg_end_ok){.good = true, .step = 42});
}

static void add_relays(samples *s)
{
    msg_offer offer = {.publication = "full:0",
                       .step = 42,
                       .port = 7000,
                       .host = "host",
                       .place = "a/r3",
                       .units = 512,
                       .landed = 500,
                       .bytes_origin = 64 << 20,
                       .bytes_relays = 448 << 20,
                       .bytes_handed_on = UINT64_C(1) << 33,
                       .late = 2,
                       .taken_over = 1};
    fill(offer.holding, 0x70);
    fill(offer.incarnation, 0x30);
    encode_offer(add(s, "offer"), SAMPLE_REQUEST, &offer);
    msg_offer gone = {.publication = "full:0", .step = 42, .gone = true};
    encode_offer(add(s, "offer_gone"), SAMPLE_REQUEST, &gone);
    encode_empty(add(s, "offer_ok"), SAMPLE_REQUEST, MSG_OFFER_OK);

    msg_holders holders = {.publication = "full:0",
                           .step = 42,
                           .version = 7,
                           .timeout_ms = 30000,
                           .roster = 5};
    fill(holders.holding, 0x70);
    encode_holders(add(s, "holders"), SAMPLE_REQUEST, &holders);
    holder_entry entries[] = {
        {.address = "10.0.0.7:7000", .host = "host", .place = "a/r3"},
        {.address = ":7001", .host = "other", .local = true, .number = 1},
        {.address = "[fd00::7]:7000", .number = 9}};
    fill(entries[0].incarnation, 0x30);
    fill(entries[1].incarnation, 0x31);
    fill(entries[2].incarnation, 0x32);
    msg_holders_ok known = {.version = 9,
                            .roster = 8,
                            .entries = entries,
                            .n_entries = 3,
                            .members = {(const uint8_t *)"\x01\x02", 2}};
    encode_holders_ok(add(s, "holders_ok"), SAMPLE_REQUEST, &known);
    known = (msg_holders_ok){.version = 9, .roster = 8};
    encode_holders_ok(add(s, "holders_ok_same"), SAMPLE_REQUEST, &known);

    msg_landed landed = {.version = 3, .timeout_ms = 30000};
    fill(landed.token, 0x60);
    encode_landed(add(s, "landed"), SAMPLE_REQUEST, &landed);
    static const landed_range ranges[] = {{0, 16}, {4194303, 1}};
    encode_landed_ok(
        add(s, "landed_ok"), SAMPLE_REQUEST,
        &(msg_landed_ok){.version = 5, .serving = 3, .ranges = ranges, .n_ranges = 2});
    encode_landed_ok(add(s, "landed_ok_none"), SAMPLE_REQUEST,
                     &(msg_landed_ok){.version = 3});
}

static void add_others(samples *s)
{
    encode_watch(add(s, "watch"), SAMPLE_REQUEST,
                 &(msg_watch){.publication = "lora:0"});
    encode_event(
        add(s, "event"), SAMPLE_REQUEST,
        &(msg_event){.publication = "lora:0", .step = 43, .state = WIRE_STATE_STABLE});
    encode_empty(add(s, "ping"), SAMPLE_REQUEST, MSG_PING);
    encode_empty(add(s, "pong"), SAMPLE_REQUEST, MSG_PONG);
    encode_error(add(s, "error"), SAMPLE_REQUEST,
                 &(msg_error){.code = FANIN_ERR_SUPERSEDED,
                              .message = "step 40 has passed",
                              .remedy = "ask for the newest step",
                              .key = "lora:0:model.norm",
                              .step = 43});
    encode_error(add(s, "error_short"), 0, &(msg_error){.code = FANIN_ERR_PROTOCOL});
}

samples samples_of_messages(void)
{
    samples s = {0};
    add_hellos(&s);
    add_paths(&s);
    add_lists(&s);
    add_stats(&s);
    add_blobs(&s);
    add_leases(&s);
    add_reads(&s);
    add_relays(&s);
    add_others(&s);
    return s;
}

/* ------------------------------------------------------------- tables */

static const key_entry keys[] = {
    {.name = "a.lora_A.weight",
     .dtype = FANIN_DTYPE_BF16,
     .n_dims = 2,
     .shape = {8, 896},
     .bytes = 14336},
    {.name = "a.lora_B.weight",
     .dtype = FANIN_DTYPE_BF16,
     .n_dims = 2,
     .shape = {4864, 8},
     .bytes = 77824},
    {.name = "b",
     .dtype = FANIN_DTYPE_F4,
     .n_dims = 3,
     .shape = {5, 6, 8},
     .bytes = 120},
    {.name = "b.\xc3\xa4",
     .dtype = FANIN_DTYPE_F32,
     .n_dims = 1,
     .shape = {0},
     .bytes = 0},
};
#define N_KEYS (sizeof keys / sizeof *keys)

buffer samples_as_stream(bool sealed)
{
    buffer all = {0};
    samples list = samples_of_messages();
    for (size_t i = 0; i < list.count; i++) {
        buffer *b = &list.list[i].bytes;
        if (b->data[6] == MSG_READ_OK)
            continue; /* its body would follow */
        if (sealed) {
            uint8_t seal[SEAL_SIZE];
            seal_header(b->data);
            seal_encode(checksum_of(b->data, b->size), seal);
            buffer_append(b, seal, sizeof seal);
        }
        buffer_append(&all, b->data, b->size);
    }
    samples_free(&list);
    return all;
}

samples samples_of_keys(void)
{
    static const fanin_pair pairs[] = {{"lora_alpha", "16"}, {"r", "8"}};
    static const key_entry scalar = {
        .name = "scale", .dtype = FANIN_DTYPE_F32, .bytes = 4};
    samples s = {0};
    key_table_encode(add(&s, "key_table"), keys, N_KEYS, pairs, 2);
    key_table_encode(add(&s, "key_table_scalar"), &scalar, 1, NULL, 0);
    key_table_encode(add(&s, "key_table_empty"), NULL, 0, NULL, 0);
    return s;
}

static box_record chunk(uint32_t key, uint32_t world, uint32_t index, uint32_t region,
                        uint64_t offset)
{
    box_record r = {.key = key,
                    .place = {.region = region, .offset = offset, .packed = true}};
    r.block = block_chunk(keys[key].n_dims, keys[key].shape, 0, world, index);
    return r;
}

/* Of keys 0 and 2. */
static void add_part(samples *s, const char *name)
{
    key_range ranges[] = {{0, 1}, {2, 1}};
    const key_set wanted = {.ranges = ranges, .n = 2};
    const buffer *blob = &s->list[s->count - 1].bytes;
    buffer table = {0};
    key_table *decoded = NULL;
    box_table *whole = NULL;
    key_table_encode(&table, keys, N_KEYS, NULL, 0);
    if (key_table_decode(table.data, table.size, NULL, &decoded, NULL) != FANIN_OK ||
        box_table_decode(blob->data, blob->size, decoded, NULL, &whole, NULL) !=
            FANIN_OK)
        abort();
    box_table_encode_part(add(s, name), whole, &wanted);
    box_table_free(&whole);
    key_table_free(&decoded);
    buffer_free(&table);
}

samples samples_of_boxes(void)
{
    samples s = {0};
    /* Rank 1 of 4: rows 2..3, 1216..2431 and 2..3; the last key is empty. */
    box_record chunks[] = {chunk(0, 4, 1, 0, 64), chunk(1, 4, 1, 0, 3712),
                           chunk(2, 4, 1, 1, 0)};
    box_table_encode(add(&s, "box_table_chunks"), keys, N_KEYS, chunks, 3, 1, 4);
    add_part(&s, "box_table_chunks_part");
    box_record cuts[] = {
        {.key = 0,
         .block = {.n_dims = 2, .offset = {0, 448}, .extent = {4, 448}},
         .place = {.region = 0, .offset = 1024, .stride = {1792, 2}}},
        {.key = 0,
         .block = {.n_dims = 2, .offset = {4, 0}, .extent = {4, 896}},
         .place = {.region = 0, .offset = 16384, .packed = true}},
        {.key = 2,
         .block = {.n_dims = 3, .offset = {0, 0, 4}, .extent = {5, 6, 4}},
         .place = {.region = 2, .offset = 200, .stride = {-12, 2, 1}}},
    };
    box_table_encode(add(&s, "box_table_explicit"), keys, N_KEYS, cuts, 3, 0, 2);
    add_part(&s, "box_table_explicit_part");
    box_table_encode(add(&s, "box_table_nothing"), keys, N_KEYS, NULL, 0, 0, 2);
    return s;
}

/* One region an arena, each in an allocation of its own. */
static void add_arenas(samples *s)
{
    uint8_t bytes[2][IPC_KEY_SIZE];
    region_entry regions[2];
    for (int i = 0; i < 2; i++) {
        ipc_key key = {.offset = 512, .length = 2 << 20};
        for (uint8_t j = 0; j < 4; j++)
            fill(key.handle + 16 * j, (uint8_t)(0x80 + 0x40 * i + 16 * j));
        fill(key.uuid, 0x70);
        ipc_key_encode(&key, bytes[i]);
        regions[i] = (region_entry){.id = (uint32_t)i,
                                    .length = 0x12345,
                                    .memory = FANIN_MEMORY_CUDA,
                                    .device = 1,
                                    .rkey = bytes[i],
                                    .rkey_size = IPC_KEY_SIZE};
    }
    region_table_encode(add(s, "region_table_arenas"), regions, 2);
}

samples samples_of_regions(void)
{
    static const region_entry regions[] = {
        {.id = 0,
         .base = UINT64_C(0x7f0012345000),
         .length = 1 << 20,
         .memory = FANIN_MEMORY_HOST,
         .device = -1,
         .rkey = (const uint8_t *)"rkey-0",
         .rkey_size = 6},
        {.id = 1,
         .base = UINT64_C(0x7f2000000000),
         .length = UINT64_C(5) << 32,
         .memory = FANIN_MEMORY_CUDA,
         .device = 0},
    };
    samples s = {0};
    region_table_encode(add(&s, "region_table"), regions, 2);
    region_table_encode(add(&s, "region_table_empty"), NULL, 0);
    add_arenas(&s);
    return s;
}
