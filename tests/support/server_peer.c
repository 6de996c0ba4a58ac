/* SPDX-License-Identifier: Apache-2.0 */
#include "server_peer.h"
#include "clock.h"
#include "socket.h"
#include "testing.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATIENCE_MS 10000

/* --------------------------------------------------------------- the server */

fanin_server_config server_config(void)
{
    fanin_server_config c;
    fanin_server_config_init(&c, sizeof c);
    memset(c.world_id, 7, sizeof c.world_id);
    c.flags = FANIN_SERVER_NO_UCX;
    return c;
}

fanin_server *server_start(const fanin_server_config *config)
{
    fanin_server_config c = config ? *config : server_config();
    fanin_server *s = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_create(&c, &s, &error), error);
    return s;
}

fanin_tensor byte_tensor(const char *name, fanin_box *box, void *memory, uint64_t size)
{
    *box = (fanin_box){.extent = {size}, .address = memory};
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = name,
                          .dtype = FANIN_DTYPE_U8,
                          .n_dims = 1,
                          .shape = {size},
                          .boxes = box,
                          .n_boxes = 1};
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

/* ----------------------------------------------------------------- the peer */

static bool ready(int fd, short events, int ms)
{
    struct pollfd p = {.fd = fd, .events = events};
    return poll(&p, 1, ms) == 1;
}

static peer connect_to(const socket_address *a)
{
    peer p = {.fd = -1};
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(socket_connect_start(a, &p.fd, &error), error);
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
    close(p->fd);
    free(p->body);
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

/* False: the connection ended. */
static bool receive_exactly(peer *p, void *to, size_t size)
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
    assert_true(receive_exactly(p, header, sizeof header));
    assert_int_equal(frame_decode(header, &p->frame, &why), FANIN_OK);
    assert_true(p->frame.length <= LIMIT_READ_BYTES);
    free(p->body);
    p->body = malloc(p->frame.length + 1);
    assert_non_null(p->body);
    assert_true(receive_exactly(p, p->body, p->frame.length));
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
    assert_false(receive_exactly(p, &byte, 1));
}

bool peer_silent(peer *p, int ms)
{
    return !ready(p->fd, POLLIN, ms);
}

/* ----------------------------------------------------------------- messages */

msg_hello_ok peer_hello(peer *p, role r, const uint8_t id[16])
{
    buffer b = {0};
    msg_hello m = {.version_min = 1, .version_max = 1, .role = r, .software = "test"};
    memcpy(m.id, id, sizeof m.id);
    encode_hello(&b, ++p->request, &m);
    peer_send(p, &b);
    body in = peer_expect(p, MSG_HELLO_OK);
    msg_hello_ok ok;
    assert_int_equal(decode_hello_ok(&in, &ok), FANIN_OK);
    assert_int_equal(p->frame.request, p->request);
    memcpy(p->session, ok.session, sizeof p->session);
    return ok;
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
    grant g = {.step = ok.step, .catalog_version = ok.catalog_version};
    memcpy(g.key_digest, ok.key_digest, sizeof g.key_digest);
    return g;
}

msg_begin_ok peer_begin(peer *p, grant *g)
{
    buffer b = {0};
    msg_begin m = {
        .publication = RUN, .step = g->step, .catalog_version = g->catalog_version};
    encode_begin(&b, ++p->request, &m);
    peer_send(p, &b);
    msg_begin_ok ok;
    body in = peer_expect(p, MSG_BEGIN_OK);
    assert_int_equal(decode_begin_ok(&in, &ok), FANIN_OK);
    memcpy(g->token, ok.token, sizeof g->token);
    g->epoch = ok.epoch;
    return ok;
}

grant peer_lease(peer *p)
{
    grant g = peer_wait(p, WIRE_RULE_NEWEST, 0);
    msg_begin_ok ok = peer_begin(p, &g);
    if (!ok.granted)
        fail_msg("begin was refused: %s", ok.why);
    return g;
}

msg_end_ok peer_end(peer *p, const grant *g, bool abandon)
{
    buffer b = {0};
    msg_end m = {.abandon = abandon};
    memcpy(m.token, g->token, sizeof m.token);
    encode_end(&b, ++p->request, &m);
    peer_send(p, &b);
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

buffer peer_blob(peer *p, message_type type, const grant *g, int32_t path)
{
    buffer blob = {0};
    msg_blob_page page;
    do {
        buffer b = {0};
        msg_blob_request m = {.path = path, .offset = blob.size};
        if (type == MSG_KEYS) {
            memcpy(m.digest, g->key_digest, sizeof m.digest);
        } else {
            snprintf(m.publication, sizeof m.publication, RUN);
            m.catalog_version = g->catalog_version;
        }
        encode_blob_request(&b, ++p->request, type, &m);
        peer_send(p, &b);
        body in = peer_expect(p, (message_type)(type + 1));
        assert_int_equal(decode_blob_page(&in, &page), FANIN_OK);
        assert_int_equal(page.offset, blob.size);
        buffer_append(&blob, page.data.data, page.data.size);
        assert_false(blob.failed);
    } while (blob.size < page.total);
    return blob;
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
