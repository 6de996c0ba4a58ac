/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_server.h"

#include "catalog.h"
#include "host.h"
#include "messages.h"
#include "pack.h"
#include "testing.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_CONNECTIONS 16
#define STEP 7
/* Between two bytes of a hello that never ends. */
#define DRIP_MS 20

struct fake_connection {
    int fd; /* -1: free */
    buffer in;
    uint64_t drip; /* the request whose answer drips; 0: none */
    size_t dripped;
};

static bool is(const fake_server *f, mischief m)
{
    return f->mischief == m;
}

/* ----------------------------------------------------------------- sending */

/* False: the peer is gone or takes nothing. */
static bool put(const fake_server *f, fake_connection *c, const void *data, size_t size)
{
    const uint8_t *at = data;
    while (size > 0) {
        size_t piece = is(f, HONEST_BYTE_BY_BYTE) ? 1 : size;
        ssize_t n = send(c->fd, at, piece, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

static bool put_buffer(const fake_server *f, fake_connection *c, buffer *b)
{
    bool sent = put(f, c, b->data, b->size);
    buffer_free(b);
    return sent;
}

/* Bytes that mean nothing, always the same. */
static void append_garbage(buffer *b, size_t size)
{
    uint32_t x = 2463534242u;
    for (size_t i = 0; i < size; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        uint8_t byte = (uint8_t)x;
        buffer_append(b, &byte, 1);
    }
}

/* A frame with a right header and a body of garbage. */
static bool put_garbage(const fake_server *f, fake_connection *c, uint64_t request,
                        message_type type)
{
    buffer b = {0};
    uint8_t head[FRAME_SIZE];
    frame_encode(&(frame){.type = type, .request = request, .length = 200}, head);
    buffer_append(&b, head, sizeof head);
    append_garbage(&b, 200);
    return put_buffer(f, c, &b);
}

static bool put_error(const fake_server *f, fake_connection *c, uint64_t request,
                      fanin_status code)
{
    buffer b = {0};
    msg_error m = {.code = code, .remedy = "go away", .key = "?"};
    memset(m.message, 'x', sizeof m.message - 1);
    encode_error(&b, request, &m);
    return put_buffer(f, c, &b);
}

static bool put_pong(const fake_server *f, fake_connection *c, uint64_t request)
{
    buffer b = {0};
    encode_empty(&b, request, MSG_PONG);
    return put_buffer(f, c, &b);
}

/* ------------------------------------------------------------------- hello */

static bool greet(const fake_server *f, fake_connection *c, uint64_t request)
{
    buffer b = {0};
    msg_hello_ok m = {.version = is(f, HELLO_VERSION) ? 9 : 1,
                      .rank = is(f, HELLO_RANK) ? 5 : 0,
                      .world_size = is(f, HELLO_WORLD_SIZE) ? 65536 : 1,
                      .server_name = "lora_param_server_0",
                      .paths = 1u << WIRE_PATH_STREAM |
                               (is(f, REGIONS_GONE) ? 1u << WIRE_PATH_CUDA_IPC : 0),
                      .lease_ms = 1000};
    memset(m.world_id, is(f, HELLO_NO_WORLD) ? 0 : 0x66, sizeof m.world_id);
    host_id(NULL, m.host_id);
    memset(m.incarnation, 0x67, sizeof m.incarnation);
    memset(m.session, 0x68, sizeof m.session);
    encode_hello_ok(&b, request, &m);
    if (is(f, HELLO_MAGIC))
        b.data[0] ^= 0x20;
    if (is(f, HELLO_MAJOR))
        b.data[4] = 2;
    return put_buffer(f, c, &b);
}

/* Announces 4 GiB and gives as much of it as is taken. */
static bool put_huge(const fake_server *f, fake_connection *c, uint64_t request)
{
    static const uint8_t zeros[65536];
    uint8_t head[FRAME_SIZE];
    frame_encode(
        &(frame){.type = MSG_HELLO_OK, .request = request, .length = UINT32_MAX}, head);
    bool taken = put(f, c, head, sizeof head);
    for (int i = 0; i < 1024 && taken; i++)
        taken = put(f, c, zeros, sizeof zeros);
    return taken;
}

static bool put_bomb(const fake_server *f, fake_connection *c, uint64_t request)
{
    static const uint8_t body[] = {0x81, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff};
    uint8_t head[FRAME_SIZE];
    frame_encode(
        &(frame){.type = MSG_HELLO_OK, .request = request, .length = sizeof(body)},
        head);
    return put(f, c, head, sizeof head) && put(f, c, body, sizeof(body));
}

static bool on_control_hello(const fake_server *f, fake_connection *c, uint64_t request)
{
    switch (f->mischief) {
    case HELLO_HUGE_LENGTH:
        return put_huge(f, c, request);
    case HELLO_NEVER_ENDS:
        c->drip = request;
        return true;
    case HELLO_GARBAGE:
        return put_garbage(f, c, request, MSG_HELLO_OK);
    case HELLO_BOMB:
        return put_bomb(f, c, request);
    case HELLO_OTHER_TYPE:
        return put_pong(f, c, request);
    case HELLO_ERROR:
        return put_error(f, c, request, FANIN_ERR_AUTH);
    case HELLO_CLOSE:
        return false;
    default:
        return greet(f, c, request);
    }
}

static bool on_data_hello(const fake_server *f, fake_connection *c, uint64_t request)
{
    if (is(f, DATA_SILENT))
        return true;
    if (is(f, DATA_GARBAGE))
        return put_garbage(f, c, request, MSG_HELLO_OK);
    buffer b = {0};
    if (is(f, DATA_DIGESTS)) {
        static const uint8_t none[16];
        encode_digest_ok(&b, request, &(msg_digest_ok){.digests = {none, sizeof none}});
        return put_buffer(f, c, &b);
    }
    if (!greet(f, c, request))
        return false;
    if (is(f, DATA_UNASKED)) {
        encode_read_ok(&b, 77, FAKE_BYTES);
        return put_buffer(f, c, &b);
    }
    return true;
}

static bool on_hello(const fake_server *f, fake_connection *c, uint64_t request,
                     body *in)
{
    msg_hello m;
    if (decode_hello(in, &m) != FANIN_OK)
        return false;
    return m.role == ROLE_DATA ? on_data_hello(f, c, request)
                               : on_control_hello(f, c, request);
}

/* -------------------------------------------------------------------- wait */

static bool on_wait(const fake_server *f, fake_connection *c, uint64_t request,
                    body *in)
{
    msg_wait asked;
    if (decode_wait(in, &asked) != FANIN_OK)
        return false;
    buffer b = {0};
    msg_wait_ok m = {.step = asked.rule == WIRE_RULE_NEWEST ? STEP : asked.step,
                     .catalog_version = 3};
    memcpy(m.key_digest, f->key_digest.bytes, sizeof m.key_digest);
    switch (f->mischief) {
    case WAIT_OTHER_TYPE:
        return put_pong(f, c, request);
    case WAIT_GARBAGE:
        return put_garbage(f, c, request, MSG_WAIT_OK);
    case WAIT_OTHER_REQUEST:
        request += 1000;
        break;
    case WAIT_LATER_STEP:
        m.step++;
        break;
    case WAIT_EARLIER_STEP:
        m.step--;
        break;
    case WAIT_UNASKED_FLOOD:
        for (int i = 0; i < 100000; i++) {
            if (!put_pong(f, c, UINT64_MAX))
                return false;
        }
        return true;
    case WAIT_SILENT:
        return true;
    case WAIT_CLOSE:
        return false;
    default:
        break;
    }
    encode_wait_ok(&b, request, &m);
    return put_buffer(f, c, &b);
}

/* ------------------------------------------------------------------ tables */

static void make_keys(fake_server *f)
{
    key_entry entry = {.name = FAKE_NAME,
                       .dtype = FANIN_DTYPE_F32,
                       .n_dims = 2,
                       .shape = {FAKE_ROWS, FAKE_COLUMNS},
                       .bytes = FAKE_BYTES};
    if (is(f, KEYS_GARBAGE)) {
        append_garbage(&f->keys, 500);
    } else if (is(f, KEYS_HUGE_COUNT)) {
        pack_array(&f->keys, UINT32_MAX);
        append_garbage(&f->keys, 20);
    } else {
        key_table_encode(&f->keys, &entry, 1, NULL, 0);
    }
    f->key_digest = digest_of(f->keys.data, f->keys.size);
    if (is(f, KEYS_OTHER_DIGEST))
        f->key_digest.bytes[5] ^= 1;
}

static box_record record(uint64_t first, uint64_t rows)
{
    return (box_record){
        .block = {.n_dims = 2, .offset = {first, 0}, .extent = {rows, FAKE_COLUMNS}},
        .place = {.offset = first * FAKE_COLUMNS * 4, .packed = true}};
}

static void make_boxes(fake_server *f)
{
    key_entry entries[2] = {{.name = FAKE_NAME,
                             .dtype = FANIN_DTYPE_F32,
                             .n_dims = 2,
                             .shape = {FAKE_ROWS, FAKE_COLUMNS},
                             .bytes = FAKE_BYTES}};
    entries[1] = entries[0];
    box_record boxes[2] = {record(0, FAKE_ROWS / 2),
                           record(FAKE_ROWS / 2, FAKE_ROWS / 2)};
    uint32_t n = 2;
    switch (f->mischief) {
    case BOXES_OUTSIDE:
        boxes[1].block.extent[0]++;
        break;
    case BOXES_OTHER_KEY:
        boxes[1].key = 1;
        break;
    case BOXES_HOLE:
        boxes[1] = record(FAKE_ROWS / 2 + 1, FAKE_ROWS / 2 - 1);
        break;
    case BOXES_OVERLAP:
        boxes[1] = record(FAKE_ROWS / 2 - 1, FAKE_ROWS / 2 + 1);
        break;
    case BOXES_GARBAGE:
        append_garbage(&f->boxes, 500);
        return;
    case BOXES_HUGE_COUNT:
        pack_uint(&f->boxes, BOXES_EXPLICIT);
        pack_uint(&f->boxes, 0);
        pack_uint(&f->boxes, LIMIT_BOXES);
        return;
    default:
        break;
    }
    box_table_encode(&f->boxes, entries, 2, boxes, n, 0, 1);
}

static bool put_page(const fake_server *f, fake_connection *c, uint64_t request,
                     message_type type, const buffer *blob, uint64_t offset)
{
    bool keys = type == MSG_KEYS;
    if (offset >= blob->size)
        return false;
    msg_blob_page page = {.total = blob->size,
                          .offset = offset,
                          .data = {blob->data + offset, blob->size - offset}};
    if (is(f, HONEST_SMALL_PAGES))
        page.data.size = 1;
    if (keys ? is(f, KEYS_HUGE_TOTAL) : is(f, BOXES_HUGE_TOTAL))
        page.total = UINT64_C(1) << 60;
    if (keys && is(f, KEYS_OFFSET))
        page.data.size = --page.total - ++page.offset; /* not where it was asked for */
    if (keys && is(f, KEYS_EMPTY_PAGE))
        page.data.size = 0;
    if (keys && is(f, KEYS_BEYOND_TOTAL))
        page.total = offset + 1;
    buffer b = {0};
    encode_blob_page(&b, request, type + 1, &page);
    return put_buffer(f, c, &b);
}

/* Three pages of zeros, then "the catalog has changed". */
static bool put_stale_keys(const fake_server *f, fake_connection *c, uint64_t request,
                           uint64_t offset)
{
    static const uint8_t zeros[LIMIT_PAGE];
    if (offset >= 3 * sizeof zeros)
        return put_error(f, c, request, FANIN_ERR_STALE);
    msg_blob_page page = {
        .total = 4 * sizeof zeros - 1, .offset = offset, .data = {zeros, sizeof zeros}};
    buffer b = {0};
    encode_blob_page(&b, request, MSG_KEYS_OK, &page);
    return put_buffer(f, c, &b);
}

static bool on_blob(const fake_server *f, fake_connection *c, const frame *h, body *in)
{
    msg_blob_request m;
    if (decode_blob_request(in, h->type, &m) != FANIN_OK)
        return false;
    if (is(f, h->type == MSG_KEYS ? KEYS_CLOSE : BOXES_CLOSE))
        return false;
    if (h->type == MSG_KEYS && is(f, KEYS_ERROR))
        return put_error(f, c, h->request, FANIN_ERR_INTERNAL);
    if (h->type == MSG_KEYS && is(f, KEYS_STALE))
        return put_stale_keys(f, c, h->request, m.offset);
    if (h->type == MSG_BOXES && is(f, BOXES_STALE))
        return put_error(f, c, h->request, FANIN_ERR_STALE);
    return put_page(f, c, h->request, h->type,
                    h->type == MSG_KEYS ? &f->keys : &f->boxes, m.offset);
}

/* --------------------------------------------------------- begin, read, end */

static bool on_begin(const fake_server *f, fake_connection *c, uint64_t request)
{
    if (is(f, BEGIN_CLOSE))
        return false;
    if (is(f, BEGIN_GARBAGE))
        return put_garbage(f, c, request, MSG_BEGIN_OK);
    buffer b = {0};
    msg_begin_ok m = {.granted = !is(f, BEGIN_REFUSED),
                      .epoch = 2,
                      .lease_ms = 1000,
                      .state = WIRE_STATE_DRAINING,
                      .step = STEP,
                      .catalog_version = 3,
                      .why = "busy"};
    memset(m.token, 0x69, sizeof m.token);
    encode_begin_ok(&b, request, &m);
    return put_buffer(f, c, &b);
}

/* Where the bytes that an entry asks for begin. */
static uint64_t offset_of(const read_entry *e)
{
    return e->box * (FAKE_BYTES / 2) + (e->count ? 0 : e->offset);
}

static bool on_read(fake_server *f, fake_connection *c, uint64_t request, body *in)
{
    static read_entry entries[LIMIT_READ_ENTRIES];
    msg_read m;
    if (decode_read(in, &m, entries) != FANIN_OK)
        return false;
    uint64_t from = offset_of(&m.entries[0]), size = m.bytes;
    if (from > FAKE_BYTES || size > FAKE_BYTES - from)
        return false;
    if (is(f, READ_LIMIT) || (is(f, HONEST_AT_LIMIT) && !f->at_limit)) {
        f->at_limit = true;
        return put_error(f, c, request, FANIN_ERR_LIMIT);
    }
    buffer b = {0};
    switch (f->mischief) {
    case READ_SHORT:
        size--;
        break;
    case READ_LONG:
        size++;
        break;
    case READ_OTHER_REQUEST:
        request++;
        break;
    case READ_OTHER_TYPE:
        return put_pong(f, c, request);
    case READ_ERROR:
        return put_error(f, c, request, FANIN_ERR_INTERNAL);
    case READ_SILENT:
        return true;
    case READ_CLOSE:
        return false;
    default:
        break;
    }
    encode_read_ok(&b, request, (uint32_t)size);
    buffer_append(&b, f->bytes + from, size > m.bytes ? m.bytes : size);
    if (is(f, READ_CLOSE_IN_BODY)) {
        b.size -= (size_t)size / 2;
        (void)put_buffer(f, c, &b); /* closed in either case */
        return false;
    }
    return put_buffer(f, c, &b);
}

static bool on_end(const fake_server *f, fake_connection *c, uint64_t request)
{
    if (is(f, END_CLOSE))
        return false;
    if (is(f, END_GARBAGE))
        return put_garbage(f, c, request, MSG_END_OK);
    buffer b = {0};
    msg_end_ok m = {.good = !is(f, END_NOT_GOOD), .step = STEP};
    encode_end_ok(&b, request, &m);
    return put_buffer(f, c, &b);
}

static bool on_frame(fake_server *f, fake_connection *c, const frame *h, body *in)
{
    switch (h->type) {
    case MSG_HELLO:
        return on_hello(f, c, h->request, in);
    case MSG_WAIT:
        return on_wait(f, c, h->request, in);
    case MSG_REGIONS:
        return is(f, REGIONS_GONE) && put_error(f, c, h->request, FANIN_ERR_NOT_FOUND);
    case MSG_KEYS:
    case MSG_BOXES:
        return on_blob(f, c, h, in);
    case MSG_BEGIN:
        return on_begin(f, c, h->request);
    case MSG_READ:
        return on_read(f, c, h->request, in);
    case MSG_END:
        return on_end(f, c, h->request);
    case MSG_PING:
        return put_pong(f, c, h->request);
    default:
        return false;
    }
}

/* -------------------------------------------------------------------- loop */

static void close_connection(fake_connection *c)
{
    close(c->fd);
    buffer_free(&c->in);
    *c = (fake_connection){.fd = -1};
}

/* Takes what came; false: close. */
static bool on_input(fake_server *f, fake_connection *c)
{
    if (!buffer_reserve(&c->in, 65536))
        return false;
    ssize_t n = recv(c->fd, c->in.data + c->in.size, 65536, MSG_DONTWAIT);
    if (n <= 0)
        return false;
    c->in.size += (size_t)n;
    for (;;) {
        frame h;
        const char *why;
        if (c->in.size < FRAME_SIZE)
            return true;
        if (frame_decode(c->in.data, &h, &why) != FANIN_OK)
            return false;
        size_t whole = FRAME_SIZE + (size_t)h.length;
        if (c->in.size < whole)
            return true;
        body in = {.data = c->in.data + FRAME_SIZE, .size = h.length};
        if (!on_frame(f, c, &h, &in))
            return false;
        memmove(c->in.data, c->in.data + whole, c->in.size - whole);
        c->in.size -= whole;
    }
}

static void on_accept(const fake_server *f)
{
    int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    int one = 1;
    struct timeval limit = {.tv_sec = 5};
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    fake_connection *c = f->connections;
    while (c->fd >= 0 && c < f->connections + MAX_CONNECTIONS)
        c++;
    if (is(f, ACCEPT_CLOSE) || c == f->connections + MAX_CONNECTIONS) {
        close(fd);
        return;
    }
    c->fd = fd;
    static const char http[] = "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";
    buffer b = {0};
    if (is(f, ACCEPT_GARBAGE))
        append_garbage(&b, 4096);
    if (is(f, ACCEPT_HTTP))
        buffer_append(&b, http, sizeof http - 1);
    (void)put_buffer(f, c, &b); /* who does not listen hears nothing */
}

static void drip(const fake_server *f, fake_connection *c)
{
    uint8_t head[FRAME_SIZE];
    frame_encode(&(frame){.type = MSG_HELLO_OK, .request = c->drip, .length = 1 << 20},
                 head);
    uint8_t byte = c->dripped < sizeof head ? head[c->dripped] : 0;
    c->dripped++;
    if (!put(f, c, &byte, 1))
        close_connection(c);
}

static void *serve(void *cookie)
{
    fake_server *f = cookie;
    for (;;) {
        struct pollfd polled[2 + MAX_CONNECTIONS] = {{f->wake, POLLIN, 0},
                                                     {f->listener, POLLIN, 0}};
        int timeout = -1;
        for (int i = 0; i < MAX_CONNECTIONS; i++) {
            const fake_connection *c = &f->connections[i];
            short events = is(f, ACCEPT_SILENT) ? 0 : POLLIN;
            polled[2 + i] = (struct pollfd){c->fd, events, 0};
            if (c->fd >= 0 && c->drip)
                timeout = DRIP_MS;
        }
        int n = poll(polled, 2 + MAX_CONNECTIONS, timeout);
        if (polled[0].revents)
            return NULL;
        for (int i = 0; i < MAX_CONNECTIONS; i++) {
            fake_connection *c = &f->connections[i];
            if (n == 0 && c->fd >= 0 && c->drip)
                drip(f, c);
            else if (c->fd >= 0 && polled[2 + i].revents && !on_input(f, c))
                close_connection(c);
        }
        if (polled[1].revents)
            on_accept(f);
    }
}

void fake_server_start(fake_server *f, mischief mischief)
{
    *f = (fake_server){.mischief = mischief};
    for (size_t i = 0; i < FAKE_BYTES; i++)
        f->bytes[i] = (uint8_t)(i * 131 >> 3);
    make_keys(f);
    make_boxes(f);
    f->connections = calloc(MAX_CONNECTIONS, sizeof *f->connections);
    assert_non_null(f->connections);
    for (int i = 0; i < MAX_CONNECTIONS; i++)
        f->connections[i].fd = -1;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    f->wake = eventfd(0, EFD_CLOEXEC);
    f->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(f->wake >= 0 && f->listener >= 0);
    assert_int_equal(bind(f->listener, (struct sockaddr *)&at, size), 0);
    assert_int_equal(listen(f->listener, 16), 0);
    assert_int_equal(getsockname(f->listener, (struct sockaddr *)&at, &size), 0);
    snprintf(f->address, sizeof f->address, "127.0.0.1:%u",
             (unsigned)ntohs(at.sin_port));
    assert_int_equal(pthread_create(&f->thread, NULL, serve, f), 0);
}

void fake_server_stop(fake_server *f)
{
    uint64_t one = 1;
    assert_int_equal(write(f->wake, &one, sizeof one), sizeof one);
    pthread_join(f->thread, NULL);
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        if (f->connections[i].fd >= 0)
            close_connection(&f->connections[i]);
    }
    free(f->connections);
    close(f->listener);
    close(f->wake);
    buffer_free(&f->keys);
    buffer_free(&f->boxes);
}
