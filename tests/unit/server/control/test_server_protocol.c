/* SPDX-License-Identifier: Apache-2.0 */
/* What a well-behaved client sees of a server, message by message. */
#include "core/server_state.h"
#include "gpu.h"
#include "server_peer.h"
#include "testing.h"

static uint8_t memory[3][1000];

static fanin_server *start_published(uint64_t step)
{
    fanin_server *s = server_start(NULL);
    for (size_t i = 0; i < sizeof memory; i++)
        ((uint8_t *)memory)[i] = (uint8_t)(i * 7 + i / 251);
    server_put(s, RUN, "b", memory[1], 1000);
    server_put(s, RUN, "a", memory[0], 700);
    server_commit(s, step);
    return s;
}

SERVER_TEST(hello_tells_who_answers)
{
    fanin_server_config c = server_config();
    c.name = "job";
    c.rank = 3;
    c.world_size = 8;
    c.lease_ms = 250;
    fanin_server *s = server_start(&c);
    peer p = peer_connect_unix(s);
    uint8_t id[16] = {9};
    msg_hello_ok ok = peer_hello(&p, ROLE_CONTROL, id);
    assert_string_equal(ok.server_name, "job_3");
    assert_int_equal(ok.rank, 3);
    assert_int_equal(ok.world_size, 8);
    assert_int_equal(ok.lease_ms, 250);
    uint32_t ipc = gpu_built() ? 1u << WIRE_PATH_CUDA_IPC : 0;
    assert_int_equal(ok.paths, 1u << WIRE_PATH_STREAM | 1u << WIRE_PATH_CMA | ipc);
    assert_memory_equal(ok.world_id, c.world_id, 16);
    assert_true(strlen(ok.host_id) > 32);
    assert_string_equal(ok.warnings, "");
    fanin_server *other = server_start(NULL);
    peer q = peer_connect(other);
    msg_hello_ok second = peer_hello(&q, ROLE_CONTROL, id);
    assert_memory_not_equal(second.incarnation, ok.incarnation, 16);
    assert_memory_not_equal(second.session, ok.session, 16);
}

static msg_list_entry *list(peer *p, const char *publication, uint32_t *count)
{
    buffer b = {0};
    msg_list_entry *entries;
    encode_list(&b, ++p->request, publication);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_LIST_OK);
    assert_int_equal(decode_list_ok(&in, &entries, count), FANIN_OK);
    return entries;
}

static uint64_t ms_since(uint64_t ns)
{
    return (clock_ns() - ns) / 1000000;
}

SERVER_TEST(list_tells_ages)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    uint32_t count;
    uint64_t began = clock_ns();
    server_put(s, RUN, "a", memory[0], 10);
    msg_list_entry *e = list(&p, RUN, &count);
    assert_int_equal(count, 1);
    assert_in_range(e->state_age_ms, 1, ms_since(began) + 1);
    assert_int_equal(e->commit_age_ms, 0); /* there was none */
    free(e);
    uint64_t before = clock_ns();
    server_commit(s, 1);
    uint64_t committed = clock_ns();
    while (ms_since(committed) < 5) /* so that the two ages differ */
        assert_true(peer_silent(&p, 5));
    uint64_t updated = clock_ns();
    server_begin(s);
    e = list(&p, RUN, &count);
    assert_int_equal(e->state, WIRE_STATE_WRITING);
    assert_in_range(e->state_age_ms, 1, ms_since(updated) + 1);
    assert_in_range(e->commit_age_ms, 6, ms_since(before) + 1);
    free(e);
    assert_int_equal(fanin_server_commit(s, RUN, 2, NULL, NULL), FANIN_OK);
    e = list(&p, RUN, &count);
    assert_true(e->commit_age_ms <= ms_since(updated) + 1);
    assert_true(e->state_age_ms <= e->commit_age_ms);
    free(e);
}

SERVER_TEST(list_shows_publications_and_states)
{
    fanin_server *s = start_published(4);
    server_put(s, "lora:other", "x", memory[2], 10);
    peer p = peer_open(s);
    uint32_t count;
    msg_list_entry *entries = list(&p, NULL, &count);
    assert_int_equal(count, 2);
    assert_string_equal(entries[0].publication, RUN);
    assert_int_equal(entries[0].step, 4);
    assert_int_equal(entries[0].state, WIRE_STATE_STABLE);
    assert_int_equal(entries[0].tensors, 2);
    assert_int_equal(entries[0].bytes, 1700);
    assert_int_equal(entries[0].epoch % 2, 0);
    assert_string_equal(entries[1].publication, "lora:other");
    assert_int_equal(entries[1].state, WIRE_STATE_UNPUBLISHED);
    free(entries);
    server_begin(s);
    entries = list(&p, RUN, &count);
    assert_int_equal(count, 1);
    assert_int_equal(entries[0].state, WIRE_STATE_WRITING);
    assert_int_equal(entries[0].epoch % 2, 1);
    free(entries);
    free(list(&p, "lora:absent", &count));
    assert_int_equal(count, 0);
}

static void catalog_and_bytes(peer *control, peer *data)
{
    key_table *keys;
    box_table *boxes;
    grant g = peer_lease(control);
    peer_catalog(control, &g, &keys, &boxes);
    assert_int_equal(keys->count, 2);
    assert_string_equal(keys->entries[0].name, "a");
    assert_int_equal(keys->entries[1].bytes, 1000);
    assert_int_equal(box_table_count(boxes), 2);
    uint8_t got[1700];
    read_entry all = {.box = 0, .count = 2};
    peer_read(data, &g, &all, 1, got, 1700);
    assert_memory_equal(got, memory[0], 700);
    assert_memory_equal(got + 700, memory[1], 1000);
    read_entry parts[] = {{.box = 1, .offset = 10, .length = 5},
                          {.box = 0, .count = 1},
                          {.box = 1, .offset = 999, .length = 1}};
    peer_read(data, &g, parts, 3, got, 706);
    assert_memory_equal(got, memory[1] + 10, 5);
    assert_memory_equal(got + 5, memory[0], 700);
    assert_int_equal(got[705], memory[1][999]);
    msg_end_ok end = peer_end(control, &g, false);
    assert_true(end.good);
    assert_int_equal(end.step, 9);
    assert_false(peer_end(control, &g, false).good);
    box_table_free(&boxes);
    key_table_free(&keys);
}

/* A page of the boxes of these keys. */
static msg_blob_page ask_part(peer *p, const grant *g, const void *keys, size_t size,
                              uint64_t offset)
{
    msg_blob_page page;
    msg_blob_request m = {
        .catalog_version = g->catalog_version, .offset = offset, .keys = {keys, size}};
    snprintf(m.publication, sizeof m.publication, RUN);
    peer_request_blob(p, MSG_BOXES, &m);
    body in = peer_expect(p, MSG_BOXES_OK);
    assert_int_equal(decode_blob_page(&in, &page), FANIN_OK);
    return page;
}

SERVER_TEST(boxes_of_some_keys)
{
    fanin_server *s = start_published(9);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    key_table *keys;
    box_table *boxes, *part;
    peer_catalog(&p, &g, &keys, &boxes);
    for (int again = 0; again < 2; again++) {
        msg_blob_page page = ask_part(&p, &g, "\x01\x01", 2, 0);
        uint64_t n;
        fanin_error error = FANIN_ERROR_INIT;
        assert_ok(
            box_table_decode(page.data.data, page.data.size, keys, NULL, &part, &error),
            error);
        assert_false(box_table_is_whole(part));
        assert_int_equal(box_table_count(part), 1);
        assert_int_equal(box_table_of_key(part, 1, &n), 1); /* its number of all */
        assert_int_equal(n, 1);
        box_table_free(&part);
        assert_int_equal(ask_part(&p, &g, "\x00\x02", 2, 0).total,
                         ask_part(&p, &g, "\x00\x02", 2, 1).total);
    }
    box_table_free(&boxes);
    key_table_free(&keys);
    peer_end(&p, &g, false);
}

#define MANY 60000

/* As if strangers had taken all that they may but @p left bytes. */
static uint64_t crowd(fanin_server *s, uint64_t left)
{
    uint64_t taken = s->max_memory / 4 * 3 - left;
    atomic_fetch_add(&s->memory, taken);
    atomic_fetch_add(&s->network_memory, taken);
    return taken;
}

/* A rank of many tensors, published. */
static fanin_server *start_with_many(uint64_t max_memory)
{
    static fanin_tensor t[MANY];
    static fanin_box boxes[MANY];
    static char names[MANY][16];
    static uint8_t memory[1];
    for (unsigned i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "%08u", i);
        t[i] = byte_tensor(names[i], &boxes[i], memory, sizeof memory);
    }
    fanin_server_config c = server_config();
    c.data_threads = 1;
    c.max_memory = max_memory;
    fanin_server *s = server_start(&c);
    assert_int_equal(fanin_server_put(s, RUN, t, MANY, false, NULL), FANIN_OK);
    server_commit(s, 1);
    return s;
}

static void uncrowd(fanin_server *s, uint64_t taken)
{
    atomic_fetch_sub(&s->memory, taken);
    atomic_fetch_sub(&s->network_memory, taken);
}

/* A connection's memory goes a moment after the connection. */
static void expect_no_network_memory(fanin_server *s)
{
    peer own = peer_open_unix(s);
    for (int i = 0; i < 20000 && atomic_load(&s->network_memory); i++)
        peer_ping(&own); /* a turn of the server's */
    assert_int_equal(atomic_load(&s->network_memory), 0);
    peer_close(&own);
}

/* What the server keeps to make parts from counts, as strangers' memory does; where it does not fit
   the whole table is the answer. The own user may have its quarter for it. */
SERVER_TEST(parts_count_as_memory)
{
    static const struct {
        unsigned mib; /* a quarter of which it may be */
        bool is_crowded, is_own, fits;
    } cases[] = {{32, false, false, false},
                 {256, false, false, true},
                 {256, true, false, false},
                 {256, true, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool fits = cases[i].fits;
        fanin_server *s = start_with_many((uint64_t)cases[i].mib << 20);
        peer p = cases[i].is_own ? peer_open_unix(s) : peer_open(s);
        grant g = peer_lease(&p);
        uint64_t whole = ask_part(&p, &g, "", 0, 0).total;
        uint64_t taken = cases[i].is_crowded ? crowd(s, 8 << 20) : 0;
        int64_t before = (int64_t)server_stats(s).session_memory;
        uint64_t part = ask_part(&p, &g, "\x01\x01", 2, 0).total;
        /* less than nothing where the memory of an answer went meanwhile */
        int64_t kept = (int64_t)server_stats(s).session_memory - before;
        assert_int_equal(part < whole, fits);
        assert_int_equal(kept > (int64_t)(MANY * sizeof(key_entry)), fits);
        assert_true(kept < (int64_t)(s->max_memory / 4));
        uncrowd(s, taken);
        peer_end(&p, &g, false);
        peer_close(&p);
        assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
        server_expect_idle(s);
        expect_no_network_memory(s);
        server_stop(&s, 0);
    }
}

/* Who asks first has no room; the own user has, and keeps to its answer as the others do to theirs.
   */
SERVER_TEST(strangers_take_no_parts_away)
{
    fanin_server *s = start_with_many((uint64_t)256 << 20);
    peer stranger = peer_open(s), own = peer_open_unix(s);
    grant g = peer_lease(&own), h = peer_lease(&stranger);
    uint64_t whole = ask_part(&own, &g, "", 0, 0).total;
    uint64_t taken = crowd(s, 8 << 20);
    assert_int_equal(ask_part(&stranger, &h, "\x01\x01", 2, 0).total, whole);
    assert_true(ask_part(&own, &g, "\x01\x01", 2, 0).total < whole);
    uncrowd(s, taken);
    assert_int_equal(ask_part(&stranger, &h, "\x01\x01", 2, 0).total, whole);
    peer_end(&stranger, &h, false);
    peer_end(&own, &g, false);
}

SERVER_TEST(boxes_of_keys_that_are_not_there)
{
    static const struct {
        uint8_t bytes[4];
        size_t size;
    } bad[] = {{{0}, 1},       {{0, 0}, 2},         {{0, 3}, 2},
               {{2, 1}, 2},    {{0, 1, 0, 1}, 4},   {{1, 0xcc, 1}, 3},
               {{1, 0xc0}, 2}, {{0xcd, 0, 0, 1}, 4}};
    fanin_server *s = start_published(9);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        peer p = peer_open(s);
        grant g = peer_lease(&p);
        msg_blob_request m = {.catalog_version = g.catalog_version,
                              .keys = {bad[i].bytes, bad[i].size}};
        snprintf(m.publication, sizeof m.publication, RUN);
        peer_request_blob(&p, MSG_BOXES, &m);
        (void)peer_expect_error(&p, FANIN_ERR_PROTOCOL);
        peer_expect_closed(&p);
    }
}

SERVER_TEST(a_pull_over_tcp_and_over_unix)
{
    fanin_server *s = start_published(9);
    peer tcp = peer_open(s), local = peer_open_unix(s);
    peer tcp_data = peer_data(s, &tcp), local_data = peer_data(s, &local);
    catalog_and_bytes(&tcp, &tcp_data);
    catalog_and_bytes(&local, &local_data);
    peer_ping(&tcp);
    peer_ping(&tcp_data);
    assert_int_equal(server_stats(s).pulls_good, 2);
}

SERVER_TEST(regions_without_keys_have_no_addresses)
{
    fanin_server *s = start_published(1);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    region_table *regions = peer_regions(&p, &g, WIRE_PATH_STREAM);
    assert_int_equal(regions->count, 1); /* both lie in neighbouring pages */
    assert_int_equal(regions->entries[0].base, 0);
    assert_int_equal(regions->entries[0].rkey_size, 0);
    assert_int_equal(regions->entries[0].length, 2000);
    region_table_free(&regions);
    peer_request_path(&p, WIRE_PATH_CMA);
    peer_expect_error(&p, FANIN_ERR_UNSUPPORTED);
    peer_request_path(&p, WIRE_PATH_STREAM);
    peer_expect(&p, MSG_OPEN_PATH_OK);
}

/* ------------------------------------------------------------------- waits */

SERVER_TEST(a_wait_is_answered_by_the_commit)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 10000);
    peer_ping(&p); /* the wait is parked: the answer to a later request comes first */
    server_put(s, RUN, "a", memory[0], 10);
    assert_true(peer_silent(&p, 20));
    server_commit(s, 3);
    msg_wait_ok ok;
    body in = peer_expect(&p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.step, 3);
    /* at least 5, exactly 5: the first step that is not below answers both */
    peer_request_wait(&p, RUN, WIRE_RULE_AT_LEAST, 5, 10000);
    peer_request_wait(&p, RUN, WIRE_RULE_EXACT, 5, 10000);
    server_begin(s);
    server_commit(s, 4);
    peer_ping(&p);
    server_begin(s);
    server_commit(s, 6);
    for (int i = 0; i < 2; i++) {
        in = peer_expect(&p, MSG_WAIT_OK);
        assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
        assert_int_equal(ok.step, 6);
    }
    assert_true(ok.stable_ns > 0);
}

SERVER_TEST(a_wait_ends_with_where_the_rank_is)
{
    fanin_server_config c = server_config();
    c.rank = 3;
    c.world_size = 4;
    fanin_server *s = server_start(&c);
    peer p = peer_open(s);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 1);
    msg_error e = peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(e.message, "rank 3"));
    server_put(s, RUN, "a", memory[0], 10);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 1);
    e = peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    assert_says(e.message, "rank 3 has not committed " RUN " yet");
    server_commit(s, 7);
    server_begin(s);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 1);
    e = peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(e.message, "rank 3 is at step 7 (writing)"));
    server_commit(s, 8);
    peer_request_wait(&p, RUN, WIRE_RULE_AT_LEAST, 9, 1);
    e = peer_expect_error(&p, FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(e.message, "rank 3 is at step 8 (stable)"));
    peer_request_wait(&p, "lora:1", WIRE_RULE_NEWEST, 0, 10000);
    e = peer_expect_error(&p, FANIN_ERR_NOT_FOUND);
    assert_non_null(strstr(e.message, "lora:1"));
    assert_non_null(strstr(e.message, RUN));
}

/* A wait that begins too, if it is answered at once. */
static msg_wait_ok wait_and_begin(peer *p, uint64_t catalog_version, uint8_t token[16])
{
    buffer b = {0};
    msg_wait m = {
        .publication = RUN, .timeout_ms = 10000, .begin_version = catalog_version};
    encode_wait(&b, ++p->request, &m);
    peer_send(p, &b);
    msg_wait_ok ok;
    body in = peer_expect(p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    if (ok.token.size > 0)
        memcpy(token, ok.token.data, 16);
    return ok;
}

SERVER_TEST(a_wait_may_begin_too)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    server_put(s, RUN, "a", memory[0], 10);
    server_commit(s, 1);
    grant g = peer_newest(&p);
    msg_wait_ok ok = wait_and_begin(&p, g.catalog_version, g.token);
    assert_int_equal(ok.token.size, 16);
    assert_int_equal(ok.step, 1);
    assert_true(ok.lease_ms > 0);
    assert_int_equal(server_stats(s).leases, 1);
    assert_int_equal(server_stats(s).begins_granted, 1);
    assert_true(peer_end(&p, &g, false).good);
    /* Another catalog: where the rank is, and nothing more. */
    ok = wait_and_begin(&p, g.catalog_version + 1, g.token);
    assert_int_equal(ok.token.size, 0);
    assert_int_equal(ok.catalog_version, g.catalog_version);
    assert_int_equal(server_stats(s).leases, 0);
    /* The lease is one like others: the update ends it. */
    ok = wait_and_begin(&p, g.catalog_version, g.token);
    assert_int_equal(ok.token.size, 16);
    server_begin(s); /* waits for the lease time */
    assert_false(peer_end(&p, &g, false).good);
}

SERVER_TEST(a_parked_wait_begins_nothing)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    server_put(s, RUN, "a", memory[0], 10);
    server_commit(s, 1);
    grant g = peer_newest(&p);
    server_begin(s);
    buffer b = {0};
    msg_wait m = {
        .publication = RUN, .timeout_ms = 10000, .begin_version = g.catalog_version};
    encode_wait(&b, ++p.request, &m);
    peer_send(&p, &b);
    peer_ping(&p); /* it is parked */
    server_commit(s, 2);
    msg_wait_ok ok;
    body in = peer_expect(&p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.step, 2);
    assert_int_equal(ok.catalog_version, g.catalog_version);
    assert_int_equal(ok.token.size, 0);
    assert_int_equal(server_stats(s).leases, 0);
}

/* Who has all leases that a session may have is still told where the rank is. */
SERVER_TEST(a_wait_begins_no_lease_too_many)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    server_put(s, RUN, "a", memory[0], 10);
    server_commit(s, 1);
    grant g = peer_newest(&p);
    for (int i = 0; i < 64; i++)
        assert_int_equal(wait_and_begin(&p, g.catalog_version, g.token).token.size, 16);
    msg_wait_ok ok = wait_and_begin(&p, g.catalog_version, g.token);
    assert_int_equal(ok.step, 1);
    assert_int_equal(ok.token.size, 0);
    assert_int_equal(server_stats(s).leases, 64);
}

/* Of copies it says which arena holds the step. */
SERVER_TEST(a_wait_that_begins_names_the_arena)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    server_put(s, RUN, "a", memory[0], 10);
    for (uint64_t step = 1; step <= 3; step++) {
        if (step > 1)
            server_begin(s);
        server_snapshot(s, step);
        grant g = peer_newest(&p);
        msg_begin_ok begun = peer_begin(&p, &g);
        assert_true(begun.granted);
        msg_wait_ok ok = wait_and_begin(&p, g.catalog_version, g.token);
        assert_int_equal(ok.token.size, 16);
        assert_int_equal(ok.first_region, begun.first_region);
        assert_true(step != 2 || ok.first_region != 0);
        assert_true(peer_end(&p, &g, false).good);
    }
}

SERVER_TEST(a_session_has_a_limited_number_of_waits)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    for (int i = 0; i < 16; i++)
        peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 10000);
    uint64_t oldest = p.request - 15;
    peer_request_wait(&p, "lora:1", WIRE_RULE_NEWEST, 0, 10000);
    peer_expect_error(&p, FANIN_ERR_LIMIT);
    assert_int_equal(p.frame.request, p.request);
    for (int i = 0; i < 3; i++) { /* the oldest of the publication makes room */
        peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 10000);
        peer_expect_error(&p, FANIN_ERR_CANCELLED);
        assert_int_equal(p.frame.request, oldest + (uint64_t)i);
    }
    server_put(s, RUN, "a", memory[0], 10);
    server_commit(s, 1);
    for (int i = 0; i < 16; i++)
        peer_expect(&p, MSG_WAIT_OK);
}

SERVER_TEST(destroy_ends_waits)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_open(s);
    peer_request_wait(&p, RUN, WIRE_RULE_NEWEST, 0, 10000);
    peer_ping(&p);
    server_stop(&s, 0);
    assert_null(s);
    /* with an answer, or at least with the end of the connection */
    assert_false(peer_silent(&p, 10000));
}

/* ----------------------------------------------------------------- watches */

static void expect_event(peer *p, wire_state state, uint64_t step)
{
    msg_event e = peer_event(p);
    assert_int_equal(e.state, state);
    assert_int_equal(e.step, step);
}

SERVER_TEST(a_watch_reports_every_change)
{
    fanin_server *s = server_start(NULL);
    peer p = peer_watch(s, 0);
    expect_event(&p, WIRE_STATE_UNPUBLISHED, 0);
    server_put(s, RUN, "a", memory[0], 10);
    server_commit(s, 1);
    server_begin(s);
    assert_works(fanin_server_abort_update(s, RUN, ERROR));
    server_commit(s, 2);
    assert_works(fanin_server_remove(s, RUN, NULL, ERROR));
    expect_event(&p, WIRE_STATE_STABLE, 1);
    expect_event(&p, WIRE_STATE_DRAINING, 1);
    expect_event(&p, WIRE_STATE_WRITING, 1);
    expect_event(&p, WIRE_STATE_UNPUBLISHED, 1);
    expect_event(&p, WIRE_STATE_STABLE, 2);
    expect_event(&p, WIRE_STATE_DRAINING, 2);
    expect_event(&p, WIRE_STATE_WRITING, 2);
    expect_event(&p, WIRE_STATE_UNPUBLISHED, 2);
}

/* -------------------------------------------------------------------- begin */

SERVER_TEST(a_session_has_a_limited_number_of_leases)
{
    fanin_server *s = start_published(5);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    for (int i = 0; i < 64; i++)
        assert_true(peer_begin(&p, &g).granted);
    peer_request_begin(&p, &g);
    peer_expect_error(&p, FANIN_ERR_LIMIT);
    assert_true(peer_end(&p, &g, true).good);
    assert_true(peer_begin(&p, &g).granted);
    assert_int_equal(server_stats(s).leases, 64);
}
