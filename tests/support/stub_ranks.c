/* SPDX-License-Identifier: Apache-2.0 */
#include "stub_ranks.h"

#include "host.h"
#include "digest.h"
#include "testing.h"
#include <poll.h>
#include <time.h>

#define NANOSECONDS UINT64_C(1000000000)

/* -------------------------------------------------------------------- time */

/* Of a wait for what is bound to come. */
#define REAL_MS 20000

static _Atomic uint64_t ahead_ns; /* a client's threads look at the time, too */
static bool held;
/* What is to happen; fn NULL: free. */
static struct event {
    uint64_t at_ns;
    void (*fn)(void *cookie);
    void *cookie;
} events_to_come[4];

int __real_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now);
int __wrap_clock_gettime(clockid_t id, struct timespec *now)
{
    static struct timespec start;
    if (id != CLOCK_MONOTONIC)
        return __real_clock_gettime(id, now);
    if (start.tv_sec == 0)
        (void)__real_clock_gettime(id, &start);
    uint64_t ns = (uint64_t)start.tv_nsec + ahead_ns;
    *now = (struct timespec){.tv_sec = start.tv_sec + (time_t)(ns / NANOSECONDS),
                             .tv_nsec = (long)(ns % NANOSECONDS)};
    return 0;
}

void stub_time_pass_ms(uint64_t ms)
{
    ahead_ns += ms * 1000000;
}

void stub_time_at_ms(uint64_t ms, void (*fn)(void *cookie), void *cookie)
{
    size_t i = 0;
    while (events_to_come[i].fn)
        assert_true(++i < sizeof events_to_come / sizeof *events_to_come);
    events_to_come[i] =
        (struct event){.at_ns = ahead_ns + ms * 1000000, .fn = fn, .cookie = cookie};
}

/* The next event until @p until_ns happens; false: there is none. */
static bool next_event(uint64_t until_ns)
{
    struct event *first = NULL;
    for (size_t i = 0; i < sizeof events_to_come / sizeof *events_to_come; i++) {
        struct event *e = &events_to_come[i];
        if (e->fn && e->at_ns <= until_ns && (!first || e->at_ns < first->at_ns))
            first = e;
    }
    if (!first)
        return false;
    struct event e = *first;
    first->fn = NULL;
    if (e.at_ns > ahead_ns)
        ahead_ns = e.at_ns;
    e.fn(e.cookie);
    return true;
}

void stub_time_hold(bool hold)
{
    held = hold;
}

int __real_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout)
{
    int ready = __real_epoll_wait(epoll, events, n, held && timeout ? REAL_MS : 0);
    if (ready != 0 || timeout == 0)
        return ready;
    uint64_t pass_ns = (uint64_t)timeout * 1000000;
    if (!held && next_event(timeout < 0 ? UINT64_MAX : ahead_ns + pass_ns))
        return __real_epoll_wait(epoll, events, n, 0);
    if (timeout < 0 || held)
        fail_msg("waits for what will never come");
    ahead_ns += pass_ns;
    return 0;
}

/* ------------------------------------------------------------- connections */

static void close_talk(stub_talk *t)
{
    if (t->source.fd < 0)
        return;
    loop_remove(t->rank->loop, &t->source);
    close(t->source.fd);
    t->source.fd = -1;
    framing_free(&t->in);
    buffer_free(&t->out);
}

void stub_talk_flush(stub_talk *t)
{
    while (t->source.fd >= 0 && t->sent < t->out.size) {
        size_t left = t->out.size - t->sent, most = t->rank->drips ? 1 : left;
        ssize_t n = send(t->source.fd, t->out.data + t->sent, most, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) {
            close_talk(t);
            return;
        }
        t->sent += n > 0 ? (size_t)n : 0;
        if (n < 0 || (size_t)n < left) {
            loop_want(t->rank->loop, &t->source, EPOLLIN | EPOLLOUT);
            return;
        }
    }
    if (t->source.fd < 0)
        return;
    t->out.size = t->sent = 0;
    loop_want(t->rank->loop, &t->source, EPOLLIN);
}

/* False: the connection is to be closed. */
static bool take_frames(stub_talk *t)
{
    framed f;
    framing_result result;
    while ((result = framing_take(&t->in, &f)) == FRAMING_WHOLE) {
        if (f.head.type < STUB_TYPES)
            t->rank->asked[f.head.type]++;
        t->rank->last_request = f.head.request;
        if (!t->rank->answer(t, &f.head, &f.body) || t->source.fd < 0)
            return false;
    }
    assert_int_equal(result, FRAMING_MORE);
    return true;
}

static void on_talk(loop_source *source, uint32_t events)
{
    stub_talk *t = (stub_talk *)source;
    bool open = true;
    while (open && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
        size_t room;
        uint8_t *to = framing_room(&t->in, &room);
        assert_non_null(to);
        ssize_t n = recv(source->fd, to, room, 0);
        if (n < 0 && errno == EAGAIN)
            break;
        framing_add(&t->in, n > 0 ? (size_t)n : 0);
        open = n > 0 && take_frames(t);
    }
    stub_talk_flush(t);
    if (!open)
        close_talk(t);
}

static void on_connection(loop_source *source, uint32_t events)
{
    stub_listener *l = (stub_listener *)source;
    stub_rank *r = l->rank;
    socket_address peer;
    (void)events;
    int fd = socket_accept(source->fd, &peer);
    size_t i = 0;
    while (i < STUB_TALKS && r->talks[i].source.fd >= 0)
        i++;
    assert_true(fd >= 0 && i < STUB_TALKS);
    r->talks[i] = (stub_talk){.source = {.fd = fd, .events = EPOLLIN, .ready = on_talk},
                              .rank = r,
                              .is_unix = l == &r->listeners[1]};
    framing_start(&r->talks[i].in, LIMIT_READ_REQUEST);
    assert_int_equal(loop_add(r->loop, &r->talks[i].source, NULL), FANIN_OK);
}

void stub_rank_hang_up(stub_rank *r)
{
    for (size_t i = 0; i < STUB_TALKS; i++)
        close_talk(&r->talks[i]);
}

stub_talk *stub_rank_talk(stub_rank *r, role of)
{
    for (size_t i = 0; i < STUB_TALKS; i++) {
        if (r->talks[i].source.fd >= 0 && r->talks[i].role == of)
            return &r->talks[i];
    }
    return NULL;
}

/* ------------------------------------------------------------------ answers */

bool stub_answer_error(stub_talk *t, uint64_t request, fanin_status code,
                       const char *message)
{
    msg_error m = {.code = code};
    snprintf(m.message, sizeof m.message, "%s", message);
    encode_error(&t->out, request, &m);
    return true;
}

void stub_seal_hello(stub_talk *t, const body *hello, size_t reply)
{
    uint8_t seal[SEAL_SIZE];
    checksum *sum = checksum_create();
    assert_non_null(sum);
    checksum_add(sum, hello->data - FRAME_SIZE, FRAME_SIZE + hello->size);
    checksum_add(sum, t->out.data + reply, t->out.size - reply);
    seal_encode(checksum_get(sum), seal);
    checksum_free(sum);
    buffer_append(&t->out, seal, sizeof seal);
}

static bool greet(stub_talk *t, uint64_t request, body *in)
{
    body hello = *in;
    msg_hello asked;
    msg_hello_ok m = t->rank->hello;
    assert_int_equal(decode_hello(&hello, &asked), FANIN_OK);
    t->role = asked.role;
    m.features &= asked.features;
    size_t start = t->out.size;
    encode_hello_ok(&t->out, request, &m);
    if (t->is_unix || !(m.features & FEATURE_SEALS))
        return true;
    stub_seal_hello(t, in, start);
    t->in.sealed = t->out.sealed = true;
    return true;
}

/* Tokens are told apart by their rank. */
static void fill_token(const stub_rank *r, uint8_t token[16])
{
    memset(token, (int)(0x10 + r->hello.rank), 16);
}

/* Whether the wait is answered now. */
static bool answer_wait(stub_talk *t)
{
    uint8_t token[16], offers[PATCH_OFFERS_BYTES];
    const stub_rank *r = t->rank;
    if (r->state == WIRE_STATE_PAUSED) {
        stub_answer_error(t, t->waits, FANIN_ERR_PAUSED, "the run is paused");
    } else if (r->state == WIRE_STATE_STABLE && r->step > 0 &&
               (t->wait.rule == WIRE_RULE_NEWEST || r->step >= t->wait.step)) {
        msg_wait_ok m = {.step = r->step, .catalog_version = r->version};
        digest id = digest_of(r->keys.data, r->keys.size);
        memcpy(m.key_digest, id.bytes, sizeof m.key_digest);
        if (t->wait.deltas && r->patches.generation > 0)
            m.patches = (bytes_view){offers, patch_offers_encode(&r->patches, offers)};
        fill_token(r, token);
        if (t->wait.begin_version == r->version && !r->old) {
            m.token = (bytes_view){token, sizeof token};
            m.lease_ms = 1000;
        }
        encode_wait_ok(&t->out, t->waits, &m);
    } else {
        return false;
    }
    t->waits = 0;
    return true;
}

/* Its time is up. */
static void give_up(void *talk)
{
    stub_talk *t = talk;
    if (t->source.fd < 0 || t->waits == 0)
        return;
    stub_answer_error(t, t->waits, FANIN_ERR_TIMEOUT, "not yet");
    t->waits = 0;
    stub_talk_flush(t);
}

static bool answer_list(stub_talk *t, uint64_t request)
{
    const stub_rank *r = t->rank;
    msg_list_entry entry = {.publication = STUB_RUN,
                            .step = r->step,
                            .catalog_version = r->version,
                            .state = r->state,
                            .state_age_ms = r->state_age_ms,
                            .tensors = 1};
    digest id = digest_of(r->keys.data, r->keys.size);
    memcpy(entry.key_digest, id.bytes, sizeof entry.key_digest);
    encode_list_ok(&t->out, request, &entry, r->version > 0);
    return true;
}

static bool answer_blob(stub_talk *t, const frame *f, body *in)
{
    const stub_rank *r = t->rank;
    msg_blob_request m;
    const buffer *blob = f->type == MSG_KEYS    ? &r->keys
                         : f->type == MSG_BOXES ? &r->boxes
                                                : &r->regions;
    assert_int_equal(decode_blob_request(in, f->type, &m), FANIN_OK);
    if (f->type != MSG_KEYS && m.catalog_version != r->version)
        return stub_answer_error(t, f->request, FANIN_ERR_STALE, "another version");
    msg_blob_page page = {.total = blob->size,
                          .offset = m.offset,
                          .data = {blob->data + m.offset, blob->size - m.offset}};
    encode_blob_page(&t->out, f->request, f->type + 1, &page);
    return true;
}

static bool answer_begin(stub_talk *t, uint64_t request, body *in)
{
    const stub_rank *r = t->rank;
    msg_begin m;
    assert_int_equal(decode_begin(in, &m), FANIN_OK);
    msg_begin_ok ok = {.granted = m.step == r->step && m.catalog_version == r->version,
                       .epoch = r->patches.generation ? r->patches.generation : r->step,
                       .lease_ms = 1000,
                       .state = r->state,
                       .step = r->step,
                       .catalog_version = r->version,
                       .why = "another step"};
    fill_token(r, ok.token);
    encode_begin_ok(&t->out, request, &ok);
    return true;
}

/* Of its one box, or of a patch: of what there is. */
static void append_entry(stub_talk *t, const read_entry *e)
{
    const stub_rank *r = t->rank;
    uint64_t number = e->box - r->patches.first_box;
    bool of_patch = r->patches.generation > 0 && e->box >= r->patches.first_box;
    bytes_view from = {r->bytes, r->size};
    if (of_patch && number < PATCH_BOXES * PATCHES_MOST)
        from = (bytes_view){r->patch_boxes[number].data, r->patch_boxes[number].size};
    uint64_t offset = e->count ? 0 : e->offset, length = e->count ? r->size : e->length;
    assert_true(of_patch || offset + length <= r->size);
    for (uint64_t i = 0; i < length; i += 65536) {
        static const uint8_t zeros[65536];
        uint64_t step = length - i < sizeof zeros ? length - i : sizeof zeros;
        bool is_there = offset + i + step <= from.size;
        buffer_append(&t->out, is_there ? from.data + offset + i : zeros, step);
    }
}

static bool answer_read(stub_talk *t, uint64_t request, body *in)
{
    static read_entry entries[LIMIT_READ_ENTRIES];
    msg_read m;
    assert_int_equal(decode_read(in, &m, entries), FANIN_OK);
    bool sealed = t->out.sealed;
    size_t start = t->out.size;
    encode_read_ok(&t->out, request, (uint32_t)m.bytes);
    for (uint32_t i = 0; i < m.n_entries; i++)
        append_entry(t, &entries[i]);
    if (!sealed)
        return true;
    uint8_t seal[SEAL_SIZE];
    seal_encode(checksum_of(t->out.data + start, t->out.size - start), seal);
    buffer_append(&t->out, seal, sizeof seal);
    return true;
}

bool stub_answer(stub_talk *t, const frame *f, body *in)
{
    switch (f->type) {
    case MSG_HELLO:
        return greet(t, f->request, in);
    case MSG_WAIT:
        assert_int_equal(decode_wait(in, &t->wait), FANIN_OK);
        t->waits = f->request;
        if (answer_wait(t))
            return true;
        t->wait.begin_version = 0; /* as a server: nobody waits under a lease */
        if (t->rank->impatient)
            stub_time_at_ms(t->wait.timeout_ms, give_up, t);
        return true;
    case MSG_LIST:
        return answer_list(t, f->request);
    case MSG_KEYS:
    case MSG_BOXES:
    case MSG_REGIONS:
        return answer_blob(t, f, in);
    case MSG_BEGIN:
        return answer_begin(t, f->request, in);
    case MSG_READ:
        return answer_read(t, f->request, in);
    case MSG_END:
        encode_end_ok(&t->out, f->request,
                      &(msg_end_ok){.good = true, .step = t->rank->step});
        return true;
    case MSG_PING:
        encode_empty(&t->out, f->request, MSG_PONG);
        return true;
    default:
        fail_msg("no answer to a frame of type %d", f->type);
        return false;
    }
}

/* -------------------------------------------------------------------- ranks */

static void listen_on(stub_rank *r, stub_listener *l, const socket_address *at)
{
    l->rank = r;
    l->source = (loop_source){.fd = -1, .events = EPOLLIN, .ready = on_connection};
    assert_int_equal(socket_listen(at, 16, &l->source.fd, NULL), FANIN_OK);
    assert_int_equal(loop_add(r->loop, &l->source, NULL), FANIN_OK);
}

void stub_rank_start(stub_rank *r, loop *l)
{
    socket_address tcp, name;
    *r = (stub_rank){.loop = l, .answer = stub_answer};
    for (size_t i = 0; i < STUB_TALKS; i++)
        r->talks[i].source.fd = -1;
    assert_int_equal(socket_resolve("127.0.0.1:0", &tcp, NULL), FANIN_OK);
    listen_on(r, &r->listeners[0], &tcp);
    socket_set_port(&tcp, socket_port(r->listeners[0].source.fd));
    socket_unix_address(geteuid(), &tcp, &name);
    listen_on(r, &r->listeners[1], &name);
    snprintf(r->address, sizeof r->address, "%.31s", tcp.text);
    r->hello = (msg_hello_ok){.version = VERSION_MAX,
                              .features = FEATURES,
                              .world_size = 1,
                              .server_name = "stub_0",
                              .paths = 1u << WIRE_PATH_STREAM,
                              .lease_ms = 1000};
    snprintf(r->hello.address, sizeof r->hello.address, "%s", r->address);
    memset(r->hello.world_id, 0x66, sizeof r->hello.world_id);
    memset(r->hello.incarnation, 0x67, sizeof r->hello.incarnation);
    memset(r->hello.session, 0x68, sizeof r->hello.session);
    host_id(NULL, r->hello.host_id);
}

void stub_rank_stop(stub_rank *r)
{
    stub_rank_hang_up(r);
    for (size_t i = 0; i < 2; i++) {
        loop_remove(r->loop, &r->listeners[i].source);
        close(r->listeners[i].source.fd);
    }
    buffer_free(&r->keys);
    buffer_free(&r->boxes);
    buffer_free(&r->regions);
    for (size_t i = 0; i < PATCH_BOXES * PATCHES_MOST; i++)
        buffer_free(&r->patch_boxes[i]);
    free(r->bytes);
}

uint8_t stub_byte(uint64_t offset)
{
    return (uint8_t)(offset * 131 >> 3);
}

void stub_rank_put(stub_rank *r, uint32_t part, uint32_t parts, uint64_t size)
{
    key_entry key = {.name = "t",
                     .dtype = FANIN_DTYPE_U8,
                     .n_dims = 1,
                     .shape = {parts * size},
                     .bytes = parts * size};
    box_record box = {.block = {.n_dims = 1, .offset = {part * size}, .extent = {size}},
                      .place = {.packed = true}};
    region_entry region = {
        .base = 4096, .length = size, .memory = FANIN_MEMORY_HOST, .device = -1};
    buffer_clear(&r->keys);
    buffer_clear(&r->boxes);
    buffer_clear(&r->regions);
    key_table_encode(&r->keys, &key, 1, NULL, 0);
    box_table_encode(&r->boxes, &key, 1, &box, 1, part, parts);
    region_table_encode(&r->regions, &region, 1);
    free(r->bytes);
    r->bytes = malloc(size);
    r->size = size;
    assert_non_null(r->bytes);
    for (uint64_t i = 0; i < size; i++)
        r->bytes[i] = stub_byte(part * size + i);
    r->version++;
}

void stub_rank_commit(stub_rank *r, uint64_t step)
{
    r->step = step;
    r->state = WIRE_STATE_STABLE;
    for (size_t i = 0; i < STUB_TALKS; i++) {
        stub_talk *t = &r->talks[i];
        if (t->source.fd >= 0 && t->waits && answer_wait(t))
            stub_talk_flush(t);
    }
}

/* ------------------------------------------------------------------ patches */

static void put_little(buffer *b, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++)
        buffer_append(b, &(uint8_t){(uint8_t)(value >> 8 * i)}, 1);
}

static void make_patch(const stub_rank *r, const uint8_t *is, buffer *directory,
                       buffer *changes)
{
    for (uint64_t start = 0; start < r->size; start += PATCH_SEGMENT) {
        buffer places = {0}, words = {0};
        for (uint64_t at = start; at < r->size && at < start + PATCH_SEGMENT; at += 2) {
            uint64_t length = at + 1 < r->size ? 2 : 1;
            if (memcmp(r->bytes + at, is + at, length) == 0)
                continue;
            put_little(&places, (at - start) / 2, 2);
            put_little(&words, is[at] | (length > 1 ? is[at + 1] << 8 : 0), 2);
        }
        put_little(directory, places.size / 2, 4);
        buffer_append(changes, places.data, places.size);
        buffer_append(changes, words.data, words.size);
        buffer_free(&places);
        buffer_free(&words);
    }
}

void stub_rank_patch(stub_rank *r, uint64_t step, uint8_t *bytes, uint32_t most)
{
    patch_offers *o = &r->patches;
    uint64_t from = o->generation ? o->generation : r->step;
    o->count = o->count + 1 < most ? o->count + 1 : most;
    buffer_free(&r->patch_boxes[PATCH_BOXES * (PATCHES_MOST - 1)]);
    buffer_free(&r->patch_boxes[PATCH_BOXES * (PATCHES_MOST - 1) + 1]);
    for (size_t i = PATCHES_MOST - 1; i > 0; i--) {
        o->patches[i] = o->patches[i - 1];
        memcpy(&r->patch_boxes[PATCH_BOXES * i], &r->patch_boxes[PATCH_BOXES * (i - 1)],
               PATCH_BOXES * sizeof(buffer));
    }
    memset(r->patch_boxes, 0, PATCH_BOXES * sizeof(buffer));
    make_patch(r, bytes, &r->patch_boxes[0], &r->patch_boxes[1]);
    o->patches[0] = (struct patch_offer){from, r->patch_boxes[1].size};
    o->generation = step;
    o->directory_bytes = patch_directory_bytes(r->size);
    o->first_box = 1;
    free(r->bytes);
    r->bytes = bytes;
    stub_rank_commit(r, step);
}

/* -------------------------------------------------------------------- world */

void stub_world_start_with(stub_world *w, size_t ranks, uint32_t parts, uint64_t size,
                           const fanin_client_config *config)
{
    fanin_error error = FANIN_ERROR_INIT;
    const char *addresses[STUB_RANKS];
    *w = (stub_world){.size = ranks};
    assert_ok(fanin_client_create(config, &w->client, &error), error);
    for (size_t i = 0; i < ranks; i++) {
        stub_rank *r = &w->ranks[i];
        stub_rank_start(r, &w->client->loop);
        r->hello.rank = (uint32_t)i;
        r->hello.world_size = (uint32_t)ranks;
        stub_rank_put(r, (uint32_t)i % parts, parts, size);
        stub_rank_commit(r, 1);
        addresses[i] = r->address;
    }
    assert_ok(fanin_client_connect(w->client, addresses, ranks, 1000, &error), error);
}

void stub_world_start(stub_world *w, size_t ranks, uint32_t parts, uint64_t size)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    stub_world_start_with(w, ranks, parts, size, &config);
}

void stub_world_stop(stub_world *w)
{
    for (size_t i = 0; i < w->size; i++)
        stub_rank_stop(&w->ranks[i]);
    fanin_client_destroy(&w->client);
    memset(events_to_come, 0, sizeof events_to_come); /* of its ranks */
}

void stub_world_reconnect(stub_world *w)
{
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(client_ensure_connected(w->client, true, deadline_in_ms(1000), &error),
              error);
    for (size_t i = 0; i < w->size; i++)
        assert_true(peer_ready(&w->client->peers[i]));
}

void stub_world_settle(stub_world *w)
{
    struct pollfd under_way = {.fd = w->client->loop.epoll, .events = POLLIN};
    while (poll(&under_way, 1, 0) > 0)
        loop_step(&w->client->loop, 0);
}

unsigned stub_world_asked(const stub_world *w, message_type type)
{
    unsigned n = 0;
    for (size_t i = 0; i < w->size; i++)
        n += w->ranks[i].asked[type];
    return n;
}
