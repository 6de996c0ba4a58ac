/* SPDX-License-Identifier: Apache-2.0 */
#include "relay_readers.h"

#include "block.h"
#include "clock.h"
#include "ends.h"
#include "handing.h"
#include "host.h"
#include "testing.h"
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

reader_ways ways;

void ways_reset(world *of)
{
    ways = (reader_ways){.world = of, .path = FANIN_PATH_STREAM, .lost_ms = 2000};
}

/* ------------------------------------------------------------------------- readers */

static uint64_t wanted_bytes(const fanin_tensor *t)
{
    uint64_t bytes = fanin_dtype_bits(t->dtype) / 8;
    for (uint32_t d = 0; d < t->n_dims; d++)
        bytes *= t->boxes->extent[d];
    return bytes;
}

/* One worker's columns of the first tensor, rows of the second, and so on. */
static void describe_tensor(reader *r, size_t i, size_t slice)
{
    const world_tensor *t = &ways.world->tensors[i];
    fanin_box *box = &r->boxes[i];
    uint32_t across = (uint32_t)(i + 1) % t->n_dims;
    memcpy(box->extent, t->shape, sizeof box->extent);
    if (ways.slices > 0) {
        block b = block_chunk(t->n_dims, t->shape, across, (uint32_t)ways.slices,
                              (uint32_t)slice);
        memcpy(box->offset, b.offset, sizeof box->offset);
        memcpy(box->extent, b.extent, sizeof box->extent);
    }
    r->tensors[i] = world_boxes(t, box, 1);
    if (ways.floats && t->dtype == FANIN_DTYPE_F32)
        r->tensors[i].dtype = ways.floats;
    box->address = malloc(wanted_bytes(&r->tensors[i]) + 1);
}

void relay_reader_open(reader *r, size_t slice)
{
    fanin_client_config client;
    fanin_relay_config config;
    fanin_client_config_init(&client, sizeof client);
    client.lost_ms = ways.lost_ms;
    client.path = ways.path;
    client.no_unix = ways.no_unix;
    client.log = ways.log;
    fanin_relay_config_init(&config, sizeof config);
    config.client = &client;
    config.unit_bytes = UNIT;
    config.place = ways.place;
    const world *w = ways.world;
    r->error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(
        fanin_relay_create(&config, w->address_list, w->size, &r->relay, &r->error),
        r->error);
    r->options = make_options(FANIN_STEP_NEWEST, 0);
    r->options.dtype = ways.floats;
    r->tensors = calloc(w->n_tensors, sizeof *r->tensors);
    r->boxes = calloc(w->n_tensors, sizeof *r->boxes);
    for (size_t i = 0; i < w->n_tensors; i++)
        describe_tensor(r, i, slice);
}

void relay_reader_close(reader *r)
{
    fanin_relay_destroy(&r->relay);
    for (size_t i = 0; r->boxes && i < ways.world->n_tensors; i++)
        free(r->boxes[i].address);
    free(r->boxes);
    free(r->tensors);
    *r = (reader){0};
}

uint64_t reader_bytes(const reader *r)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < ways.world->n_tensors; i++)
        sum += wanted_bytes(&r->tensors[i]);
    return sum;
}

fanin_status relay_pull(void *cookie)
{
    reader *r = cookie;
    fanin_result *result = NULL;
    fanin_relay_release(r->relay); /* what it holds of the last one is lent */
    for (size_t i = 0; i < ways.world->n_tensors; i++)
        memset(r->boxes[i].address, 0xcc, wanted_bytes(&r->tensors[i]) + 1);
    fanin_status status = fanin_relay_pull_into(
        r->relay, &r->options, r->tensors, ways.world->n_tensors, &result, &r->error);
    r->info = (fanin_result_info){.struct_size = sizeof r->info};
    fanin_result_get(result, &r->info);
    snprintf(r->how, sizeof r->how, "%s",
             r->info.path_reason ? r->info.path_reason : "");
    fanin_result_free(&result);
    return status;
}

/* Where the element number @p at of the box lies in the whole tensor. */
static uint64_t element_of(const fanin_tensor *t, uint64_t at)
{
    const fanin_box *box = t->boxes;
    uint64_t whole = 0, pitch = 1;
    for (uint32_t d = t->n_dims; d-- > 0;) {
        whole += (box->offset[d] + at % box->extent[d]) * pitch;
        at /= box->extent[d];
        pitch *= t->shape[d];
    }
    return whole;
}

static void check_tensor(const reader *r, size_t i, uint64_t step)
{
    const fanin_tensor *t = &r->tensors[i];
    const uint8_t *bytes = t->boxes->address;
    uint64_t item = fanin_dtype_bits(t->dtype) / 8, n = wanted_bytes(t);
    uint8_t *whole = world_whole(ways.world, i, step);
    for (uint64_t at = 0; at < n; at += item) {
        if (memcmp(bytes + at, whole + element_of(t, at / item) * item, item) != 0)
            fail_msg("%s differs from step %llu at byte %llu", t->name,
                     (unsigned long long)step, (unsigned long long)at);
    }
    free(whole);
}

void check_bytes(const reader *r, uint64_t step)
{
    assert_int_equal(r->info.step, step);
    assert_memory_equal(r->info.world_id, ways.world->id, sizeof ways.world->id);
    for (size_t i = 0; i < ways.world->n_tensors; i++) {
        const uint8_t *bytes = r->boxes[i].address;
        if (r->tensors[i].dtype == ways.world->tensors[i].dtype)
            check_tensor(r, i, step);
        assert_int_equal(bytes[wanted_bytes(&r->tensors[i])], 0xcc);
    }
}

void expect_pull(reader *r, uint64_t step)
{
    assert_ok(relay_pull(r), r->error);
    check_bytes(r, step);
}

fanin_status pull_of_others(reader *r)
{
    deadline until = deadline_in_ms(20000);
    uint64_t before = stats_of(r).bytes_from_relays;
    fanin_status status;
    do
        status = relay_pull(r);
    while (status == FANIN_OK && stats_of(r).bytes_from_relays == before &&
           !deadline_passed(until));
    assert_true(stats_of(r).bytes_from_relays > before);
    return status;
}

void expect_pull_of_others(reader *r, uint64_t step)
{
    assert_ok(pull_of_others(r), r->error);
    check_bytes(r, step);
}

fanin_relay_stats stats_of(const reader *r)
{
    fanin_relay_stats s = {.struct_size = sizeof s};
    fanin_relay_get_stats(r->relay, &s);
    return s;
}

/* ---------------------------------------------------------------- other processes */

/* ThreadSanitizer ends a child of a process with threads when it starts one of its own. */
static bool children_have_threads(void)
{
#if defined(__SANITIZE_THREAD__)
    return false;
#elif defined(__has_feature)
    return !__has_feature(thread_sanitizer);
#else
    return true;
#endif
}

pid_t fork_holder(void)
{
    int ready[2];
    if (!children_have_threads())
        skip();
    char byte = 0;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        static reader r;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        relay_reader_open(&r, 0);
        byte = relay_pull(&r) == FANIN_OK;
        (void)!write(ready[1], &byte, 1);
        for (;;)
            pause();
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    close(ready[0]);
    return child;
}

/* ------------------------------------------------------------------- false relays */

void offer_step_falsely(holders_list *list, uint64_t step, const digest *holding,
                        uint16_t port, member self)
{
    const world *w = ways.world;
    msg_offer m = {.publication = "lora:0", .step = step, .port = port, .local = true};
    memcpy(m.holding, holding->bytes, sizeof m.holding);
    memcpy(m.incarnation, self.id, sizeof m.incarnation);
    host_id(NULL, m.host);
    list_rank *ranks = calloc(w->size, sizeof *ranks);
    for (size_t i = 0; i < w->size; i++) {
        snprintf(ranks[i].address, sizeof ranks[i].address, "%s", w->address_list[i]);
        member rank = handing_member(w->ranks[i].server);
        memcpy(ranks[i].incarnation, rank.id, sizeof rank.id);
    }
    assert_true(list_offer(list, w->id, ranks, w->size, &m, NULL));
    free(ranks);
    deadline until = deadline_in_ms(20000);
    while (!list_is_known(list) && !deadline_passed(until))
        usleep(1000);
}

void offer_falsely(holders_list **list, const fanin_client_config *config,
                   const digest *holding, uint16_t port, member self)
{
    static const logger quiet;
    uint64_t seen = 0;
    holder *all;
    size_t n;
    assert_int_equal(list_create(config, &quiet, eventfd(0, 0), list, NULL), FANIN_OK);
    offer_step_falsely(*list, 1, holding, port, self);
    assert_true(list_copy(*list, &self, &seen, &all, &n));
    free(all);
}

void false_relay_cut(false_relay *x, const reader *like)
{
    const world *w = ways.world;
    assert_int_equal(parts_cut(&x->parts, like->tensors, w->n_tensors, UNIT, NULL),
                     FANIN_OK);
}

void false_relay_serve(false_relay *x, size_t n, size_t proven)
{
    fanin_server_config c = make_server_config();
    char address[32];
    fanin_client_config_init(&x->config, sizeof x->config);
    memcpy(c.world_id, ways.world->id, sizeof c.world_id);
    c.flags |= FANIN_SERVER_RELAY;
    x->server = make_server(&c, address, sizeof address);
    assert_int_equal(fanin_server_put(x->server, "lora:0", x->parts.own, n, true, NULL),
                     FANIN_OK);
    assert_int_equal(handing_fill(x->server, "lora:0", 1, NULL), FANIN_OK);
    landed_range all = {.count = (uint32_t)proven};
    assert_int_equal(handing_prove(x->server, "lora:0", 1, &all, proven > 0, NULL),
                     FANIN_OK);
}

void false_relay_offer(false_relay *x, uint16_t port)
{
    offer_falsely(&x->list, &x->config, &x->parts.holding, port,
                  handing_member(x->server));
}

void false_relay_open(false_relay *x, size_t n, size_t proven)
{
    false_relay_serve(x, n, proven);
    false_relay_offer(x, fanin_server_port(x->server));
}

void false_relay_close(false_relay *x)
{
    list_destroy(&x->list);
    fanin_server_destroy(&x->server, 0);
    parts_free(&x->parts);
}
