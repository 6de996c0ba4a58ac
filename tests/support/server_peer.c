/* SPDX-License-Identifier: Apache-2.0 */
#include "server_peer.h"
#include "ends.h"
#include "log_catcher.h"
#include "socket.h"
#include "testing.h"

#include <poll.h>
#include <pthread.h>

#define PATIENCE_MS 10000
#define MOST_SERVERS 8
#define MOST_FILES 16384

/* What is open: servers, and what peers have received last, by descriptor. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static fanin_server *servers[MOST_SERVERS];
static struct {
    bool is_open;
    uint8_t *body;
} peers[MOST_FILES];

/* --------------------------------------------------------------- the server */

/* Puts @p s in the place of @p old. */
static void note_server(const fanin_server *old, fanin_server *s)
{
    size_t i = 0;
    pthread_mutex_lock(&open_lock);
    while (i < MOST_SERVERS && servers[i] != old)
        i++;
    if (i < MOST_SERVERS)
        servers[i] = s;
    pthread_mutex_unlock(&open_lock);
    assert_true(i < MOST_SERVERS);
}

void server_close_peers(void)
{
    for (int fd = 0; fd < MOST_FILES; fd++)
        if (peers[fd].is_open)
            peer_close(&(peer){.fd = fd});
}

int server_tear_down(void **state)
{
    (void)state;
    server_close_peers();
    for (size_t i = 0; i < MOST_SERVERS; i++)
        if (servers[i])
            server_stop(&(fanin_server *){servers[i]}, 0);
    return 0;
}

fanin_server_config server_config(void)
{
    fanin_server_config c = make_server_config();
    c.log = log_catch;
    return c;
}

fanin_server *server_start(const fanin_server_config *config)
{
    fanin_server_config c = config ? *config : server_config();
    fanin_server *s = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_create(&c, &s, &error), error);
    note_server(NULL, s);
    return s;
}

fanin_server *server_start_lease(uint32_t lease_ms)
{
    fanin_server_config c = server_config();
    c.lease_ms = lease_ms;
    return server_start(&c);
}

void server_stop(fanin_server **s, uint32_t drain_ms)
{
    note_server(*s, NULL);
    fanin_server_destroy(s, drain_ms);
}

fanin_tensor byte_tensor(const char *name, fanin_box *box, void *memory, uint64_t size)
{
    return make_tensor(name, FANIN_DTYPE_U8, size, 0, box, memory);
}

void server_put(fanin_server *s, const char *publication, const char *name,
                void *memory, uint64_t size)
{
    fanin_box box;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_tensor t = byte_tensor(name, &box, memory, size);
    assert_ok(fanin_server_put(s, publication, &t, 1, true, &error), error);
}

void server_begin(fanin_server *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_begin_update(s, RUN, &error), error);
}

void server_commit(fanin_server *s, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_commit(s, RUN, step, NULL, &error), error);
}

fanin_server *server_publish(const fanin_server_config *config, void *memory,
                             uint64_t size)
{
    fanin_server *s = server_start(config);
    server_put(s, RUN, "a", memory, size);
    server_commit(s, 1);
    return s;
}

void server_snapshot(fanin_server *s, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    assert_ok(fanin_server_commit(s, RUN, step, &o, &error), error);
}

fanin_server_stats server_stats(fanin_server *s)
{
    fanin_server_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(fanin_server_get_stats(s, &stats), FANIN_OK);
    return stats;
}

fanin_status server_begin_run(void *server)
{
    return fanin_server_begin_update(server, RUN, NULL);
}

/* ----------------------------------------------------------------- the peer */

static bool ready(int fd, short events, int ms)
{
    struct pollfd p = {.fd = fd, .events = events};
    return poll(&p, 1, ms) == 1;
}

peer peer_of(int fd)
{
    assert_true(fd >= 0 && fd < MOST_FILES);
    peers[fd].is_open = true;
    return (peer){.fd = fd};
}

static peer connect_to(const socket_address *a)
{
    int fd;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(socket_connect_start(a, &fd, &error), error);
    peer p = peer_of(fd);
    assert_true(ready(p.fd, POLLOUT, PATIENCE_MS));
    assert_int_equal(socket_connect_result(p.fd), 0);
    return p;
}

static peer connect_to_port(uint16_t port)
{
    char text[32];
    socket_address a;
    snprintf(text, sizeof text, "127.0.0.1:%u", (unsigned)port);
    assert_int_equal(socket_resolve(text, &a, NULL), FANIN_OK);
    return connect_to(&a);
}

peer peer_connect(fanin_server *s)
{
    return connect_to_port(fanin_server_port(s));
}

peer peer_connect_unix(fanin_server *s)
{
    return peer_connect_unix_at(s, "127.0.0.1");
}

peer peer_connect_unix_at(fanin_server *s, const char *bind)
{
    socket_address a;
    socket_address tcp;
    char text[64];
    snprintf(text, sizeof text, "%s:%u", bind, (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(text, &tcp, NULL), FANIN_OK);
    socket_unix_address(geteuid(), &tcp, &a);
    return connect_to(&a);
}

void peer_close(peer *p)
{
    if (p->fd < 0)
        return;
    free(peers[p->fd].body);
    peers[p->fd].body = NULL;
    peers[p->fd].is_open = false;
    close(p->fd);
    p->fd = -1;
    p->body = NULL;
}

void peer_send_raw(peer *p, const void *data, size_t size)
{
    const char *from = data;
    while (size > 0) {
        ssize_t n = send(p->fd, from, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            assert_true(ready(p->fd, POLLOUT, PATIENCE_MS));
            continue;
        }
        assert_true(n > 0);
        from += n;
        size -= (size_t)n;
    }
}

void peer_send(peer *p, buffer *b)
{
    assert_false(b->failed);
    peer_send_raw(p, b->data, b->size);
    buffer_free(b);
}

bool peer_receive_raw(peer *p, void *to, size_t size)
{
    for (size_t got = 0; got < size;) {
        if (!ready(p->fd, POLLIN, PATIENCE_MS))
            fail_msg("nothing came for %d ms", PATIENCE_MS);
        ssize_t n = recv(p->fd, (char *)to + got, size - got, 0);
        if (n < 0 && errno == EAGAIN)
            continue;
        if (n <= 0)
            return false;
        got += (size_t)n;
    }
    return true;
}

void peer_receive(peer *p)
{
    uint8_t header[FRAME_SIZE];
    const char *why;
    assert_true(peer_receive_raw(p, header, sizeof header));
    assert_int_equal(frame_decode(header, &p->frame, &why), FANIN_OK);
    assert_true(p->frame.length <= LIMIT_READ_BYTES);
    free(peers[p->fd].body);
    p->body = peers[p->fd].body = malloc(p->frame.length + 1);
    assert_non_null(p->body);
    assert_true(peer_receive_raw(p, p->body, p->frame.length));
}

body peer_expect(peer *p, message_type type)
{
    peer_receive(p);
    body b = {.data = p->body, .size = p->frame.length};
    if (p->frame.type == MSG_ERROR && type != MSG_ERROR) {
        msg_error e;
        assert_int_equal(decode_error(&b, &e), FANIN_OK);
        fail_msg("message %d, not %d: %s", (int)MSG_ERROR, (int)type, e.message);
    }
    assert_int_equal(p->frame.type, type);
    return b;
}

msg_error peer_expect_error(peer *p, fanin_status code)
{
    msg_error e;
    body b = peer_expect(p, MSG_ERROR);
    assert_int_equal(decode_error(&b, &e), FANIN_OK);
    if (e.code != code)
        fail_msg("error %d, not %d: %s", (int)e.code, (int)code, e.message);
    assert_true(e.message[0] != '\0');
    return e;
}

void peer_expect_closed(peer *p)
{
    char byte;
    assert_false(peer_receive_raw(p, &byte, 1));
}

bool peer_silent(peer *p, int ms)
{
    return !ready(p->fd, POLLIN, ms);
}

/* ----------------------------------------------------------------- messages */

void peer_request_hello(peer *p, const msg_hello *m)
{
    buffer b = {0};
    encode_hello(&b, ++p->request, m);
    peer_send(p, &b);
}

msg_hello_ok peer_hello_with(peer *p, msg_hello m)
{
    msg_hello_ok ok;
    m.version_min = m.version_max = 1;
    peer_request_hello(p, &m);
    body in = peer_expect(p, MSG_HELLO_OK);
    assert_int_equal(decode_hello_ok(&in, &ok), FANIN_OK);
    assert_int_equal(p->frame.request, p->request);
    memcpy(p->session, ok.session, sizeof p->session);
    return ok;
}

msg_hello_ok peer_hello(peer *p, role r, const uint8_t id[16])
{
    msg_hello m = {.role = r, .software = "test"};
    memcpy(m.id, id, sizeof m.id);
    return peer_hello_with(p, m);
}

static const uint8_t some_id[16] = {1, 2, 3};

peer peer_open_at(uint16_t port)
{
    peer p = connect_to_port(port);
    peer_hello(&p, ROLE_CONTROL, some_id);
    return p;
}

peer peer_open(fanin_server *s)
{
    return peer_open_at(fanin_server_port(s));
}

peer peer_open_unix(fanin_server *s)
{
    peer p = peer_connect_unix(s);
    peer_hello(&p, ROLE_CONTROL, some_id);
    return p;
}

peer peer_watch(fanin_server *s, uint64_t features)
{
    peer p = peer_connect(s);
    buffer b = {0};
    peer_hello_with(&p, (msg_hello){.role = ROLE_CONTROL, .features = features});
    encode_watch(&b, ++p.request, &(msg_watch){.publication = RUN});
    peer_send(&p, &b);
    return p;
}

peer peer_data(fanin_server *s, const peer *control)
{
    peer p = peer_connect(s);
    peer_hello(&p, ROLE_DATA, control->session);
    assert_memory_equal(p.session, control->session, sizeof p.session);
    return p;
}

peer peer_data_unix(fanin_server *s, const peer *control)
{
    peer p = peer_connect_unix(s);
    peer_hello(&p, ROLE_DATA, control->session);
    return p;
}

void peer_ping(peer *p)
{
    buffer b = {0};
    encode_empty(&b, ++p->request, MSG_PING);
    peer_send(p, &b);
    peer_expect(p, MSG_PONG);
    assert_int_equal(p->frame.request, p->request);
}

void peer_await_count(peer *p, fanin_server *s, size_t counter, uint64_t value)
{
    uint64_t now = value;
    for (int i = 0; i < 20000; i++) {
        fanin_server_stats stats = server_stats(s);
        memcpy(&now, (char *)&stats + counter, sizeof now);
        if (now == value)
            break;
        peer_ping(p); /* a turn of the server's */
    }
    assert_int_equal(now, value);
}

void server_expect_idle(fanin_server *s)
{
    fanin_server *fresh = server_start(NULL);
    peer p = peer_open(s), of_fresh = peer_open(fresh);
    peer_ping(&of_fresh);
    uint64_t one = server_stats(fresh).session_memory;
    /* Its memory goes a moment after a session. */
    peer_await_count(&p, s, offsetof(fanin_server_stats, sessions), 1);
    peer_await_count(&p, s, offsetof(fanin_server_stats, session_memory), one);
    assert_int_equal(server_stats(s).leases, 0);
    peer_close(&p);
    peer_close(&of_fresh);
    server_stop(&fresh, 0);
}

msg_event peer_event(peer *watcher)
{
    msg_event e;
    body in = peer_expect(watcher, MSG_EVENT);
    assert_int_equal(decode_event(&in, &e), FANIN_OK);
    assert_string_equal(e.publication, RUN);
    return e;
}

void peer_await(peer *watcher, wire_state state)
{
    while (peer_event(watcher).state != (int32_t)state)
        continue;
}

msg_list_entry peer_entry(peer *p)
{
    buffer b = {0};
    msg_list_entry *entries;
    uint32_t count;
    encode_list(&b, ++p->request, RUN);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_LIST_OK);
    assert_int_equal(decode_list_ok(&in, &entries, &count), FANIN_OK);
    assert_int_equal(count, 1);
    msg_list_entry one = entries[0];
    free(entries);
    return one;
}

wire_state peer_state(peer *p)
{
    return (wire_state)peer_entry(p).state;
}

void peer_request_wait(peer *p, const char *publication, wire_rule rule, uint64_t step,
                       uint32_t timeout_ms)
{
    buffer b = {0};
    msg_wait m = {.rule = rule, .step = step, .timeout_ms = timeout_ms};
    snprintf(m.publication, sizeof m.publication, "%s", publication);
    encode_wait(&b, ++p->request, &m);
    peer_send(p, &b);
}

grant peer_wait(peer *p, wire_rule rule, uint64_t step)
{
    msg_wait_ok ok;
    peer_request_wait(p, RUN, rule, step, PATIENCE_MS);
    body in = peer_expect(p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(p->frame.request, p->request);
    grant g = {.step = ok.step,
               .catalog_version = ok.catalog_version,
               .digest_bytes = ok.digest_bytes};
    memcpy(g.key_digest, ok.key_digest, sizeof g.key_digest);
    return g;
}

grant peer_newest(peer *p)
{
    return peer_wait(p, WIRE_RULE_NEWEST, 0);
}

void peer_request_patches(peer *p, wire_rule rule, uint64_t step)
{
    buffer b = {0};
    msg_wait m = {.publication = RUN,
                  .rule = rule,
                  .step = step,
                  .timeout_ms = PATIENCE_MS,
                  .deltas = true};
    encode_wait(&b, ++p->request, &m);
    peer_send(p, &b);
}

bool peer_patches(peer *p, patch_offers *out)
{
    msg_wait_ok ok;
    body in = peer_expect(p, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    return patch_offers_decode(ok.patches, out);
}

void peer_request_begin(peer *p, const grant *g)
{
    buffer b = {0};
    msg_begin m = {
        .publication = RUN, .step = g->step, .catalog_version = g->catalog_version};
    encode_begin(&b, ++p->request, &m);
    peer_send(p, &b);
}

msg_begin_ok peer_begin(peer *p, grant *g)
{
    peer_request_begin(p, g);
    msg_begin_ok ok;
    body in = peer_expect(p, MSG_BEGIN_OK);
    assert_int_equal(decode_begin_ok(&in, &ok), FANIN_OK);
    memcpy(g->token, ok.token, sizeof g->token);
    g->epoch = ok.epoch;
    return ok;
}

grant peer_lease(peer *p)
{
    grant g = peer_newest(p);
    msg_begin_ok ok = peer_begin(p, &g);
    if (!ok.granted)
        fail_msg("begin was refused: %s", ok.why);
    return g;
}

void peer_request_end(peer *p, const grant *g, bool abandon)
{
    buffer b = {0};
    msg_end m = {.abandon = abandon};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
}

msg_end_ok peer_end(peer *p, const grant *g, bool abandon)
{
    peer_request_end(p, g, abandon);
    msg_end_ok ok;
    body in = peer_expect(p, MSG_END_OK);
    assert_int_equal(decode_end_ok(&in, &ok), FANIN_OK);
    return ok;
}

void peer_request_read(peer *p, const uint8_t token[16], uint64_t bytes,
                       const read_entry *entries, uint32_t n)
{
    buffer b = {0};
    msg_read m = {.bytes = bytes, .entries = entries, .n_entries = n};
    memcpy(m.token, token, sizeof m.token);
    encode_read(&b, ++p->request, &m);
    peer_send(p, &b);
}

void peer_read(peer *p, const grant *g, const read_entry *entries, uint32_t n, void *to,
               uint64_t bytes)
{
    peer_request_read(p, g->token, bytes, entries, n);
    body in = peer_expect(p, MSG_READ_OK);
    assert_int_equal(p->frame.request, p->request);
    assert_int_equal(in.size, bytes);
    memcpy(to, in.data, bytes);
}

void peer_request_digest(peer *p, const grant *g, uint64_t bytes, uint32_t dtype,
                         const read_entry *entries, uint32_t n)
{
    buffer b = {0};
    msg_read m = {.bytes = bytes, .entries = entries, .n_entries = n, .dtype = dtype};
    memcpy(m.token, g->token, sizeof m.token);
    encode_digest(&b, ++p->request, &m);
    peer_send(p, &b);
}

void peer_digest(peer *p, const grant *g, uint64_t bytes, uint32_t dtype,
                 const read_entry *entries, uint32_t n, digest *out)
{
    msg_digest_ok ok;
    peer_request_digest(p, g, bytes, dtype, entries, n);
    body in = peer_expect(p, MSG_DIGEST_OK);
    assert_int_equal(decode_digest_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.digests.size, n * sizeof *out);
    memcpy(out, ok.digests.data, ok.digests.size);
}

void peer_request_path(peer *p, wire_path path)
{
    buffer b = {0};
    msg_open_path m = {.path = path, .address = {(const uint8_t *)"", 0}};
    encode_open_path(&b, ++p->request, MSG_OPEN_PATH, &m);
    peer_send(p, &b);
}

void peer_request_blob(peer *p, message_type type, const msg_blob_request *m)
{
    buffer b = {0};
    encode_blob_request(&b, ++p->request, type, m);
    peer_send(p, &b);
}

void peer_request_regions(peer *p, const grant *g, wire_path path)
{
    msg_blob_request m = {
        .publication = RUN, .catalog_version = g->catalog_version, .path = path};
    peer_request_blob(p, MSG_REGIONS, &m);
}

buffer peer_blob(peer *p, message_type type, const grant *g, int32_t path)
{
    buffer blob = {0};
    msg_blob_page page;
    do {
        msg_blob_request m = {.path = path, .offset = blob.size};
        if (type == MSG_KEYS) {
            memcpy(m.digest, g->key_digest, sizeof m.digest);
        } else {
            snprintf(m.publication, sizeof m.publication, RUN);
            m.catalog_version = g->catalog_version;
        }
        peer_request_blob(p, type, &m);
        body in = peer_expect(p, (message_type)(type + 1));
        assert_int_equal(decode_blob_page(&in, &page), FANIN_OK);
        assert_int_equal(page.offset, blob.size);
        buffer_append(&blob, page.data.data, page.data.size);
        assert_false(blob.failed);
    } while (blob.size < page.total);
    return blob;
}

region_table *peer_regions(peer *p, const grant *g, wire_path path)
{
    region_table *t;
    fanin_error error = FANIN_ERROR_INIT;
    buffer blob = peer_blob(p, MSG_REGIONS, g, path);
    assert_ok(region_table_decode(blob.data, blob.size, NULL, &t, &error), error);
    buffer_free(&blob);
    return t;
}

void peer_catalog(peer *p, const grant *g, key_table **keys, box_table **boxes)
{
    fanin_error error = FANIN_ERROR_INIT;
    buffer blob = peer_blob(p, MSG_KEYS, g, 0);
    assert_ok(key_table_decode(blob.data, blob.size, NULL, keys, &error), error);
    assert_memory_equal((*keys)->id.bytes, g->key_digest, 16);
    buffer_free(&blob);
    blob = peer_blob(p, MSG_BOXES, g, 0);
    assert_ok(box_table_decode(blob.data, blob.size, *keys, NULL, boxes, &error),
              error);
    buffer_free(&blob);
}

uint32_t peer_count_keys(peer *p, const grant *g)
{
    key_table *keys;
    box_table *boxes;
    peer_catalog(p, g, &keys, &boxes);
    uint32_t count = keys->count;
    box_table_free(&boxes);
    key_table_free(&keys);
    return count;
}

/* ---------------------------------------------------------------- the puller */

puller puller_open(fanin_server *s)
{
    puller r = {.server = s, .control = peer_open(s)};
    r.data = peer_data(s, &r.control);
    return r;
}

puller puller_open_unix(fanin_server *s)
{
    puller r = {.server = s, .control = peer_open_unix(s)};
    r.data = peer_data_unix(s, &r.control);
    return r;
}

puller puller_serve(puller (*open)(fanin_server *), const fanin_tensor *t, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *s = server_start(NULL);
    assert_ok(fanin_server_put(s, RUN, t, count, false, &error), error);
    server_commit(s, 1);
    puller r = open(s);
    puller_begin(&r);
    return r;
}

msg_begin_ok puller_begin(puller *r)
{
    r->grant = peer_newest(&r->control);
    msg_begin_ok ok = peer_begin(&r->control, &r->grant);
    if (!ok.granted)
        fail_msg("begin was refused: %s", ok.why);
    return ok;
}

void puller_expect(puller *r, uint64_t box, uint8_t value, size_t size)
{
    uint8_t *got = malloc(size);
    read_entry one = {.box = box, .count = 1};
    peer_read(&r->data, &r->grant, &one, 1, got, size);
    for (size_t i = 0; i < size; i++)
        if (got[i] != value)
            fail_msg("byte %zu is %d, not %d", i, got[i], value);
    free(got);
}

void puller_expect_box(puller *r, const uint8_t *want, size_t bytes)
{
    uint8_t *got = malloc(bytes);
    read_entry all = {.box = 0, .count = 1};
    peer_read(&r->data, &r->grant, &all, 1, got, bytes);
    assert_memory_equal(got, want, bytes);
    for (size_t at = 0, step = 1; at < bytes; at += step, step = step * 3 + 1) {
        size_t length = bytes - at < step ? bytes - at : step;
        read_entry part = {.box = 0, .offset = at, .length = length};
        peer_read(&r->data, &r->grant, &part, 1, got, length);
        assert_memory_equal(got, want + at, length);
    }
    free(got);
}

void puller_end(puller *r)
{
    assert_true(peer_end(&r->control, &r->grant, false).good);
}

void puller_close(puller *r)
{
    peer_close(&r->data);
    peer_close(&r->control);
}
