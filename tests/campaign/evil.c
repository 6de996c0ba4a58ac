/* SPDX-License-Identifier: Apache-2.0 */
/*
 * evil BOARD KIND SEED PORT...
 *
 * A stranger among the readers of a campaign, until it is killed. KIND:
 *   leases   begins pulls and never reads
 *   flood    asks for lists and pings as fast as they are answered
 *   deaf     asks and takes no answer
 *   garbage  connections of random bytes
 *   frames   well-formed frames of random kinds with random bodies
 *   idle     a hundred connections that say nothing
 */
#include "board.h"
#include "weights.h"
#include <arpa/inet.h>
#include <fanin/client.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define HEADER 24
#define HELLO 1
#define LIST 7
#define PING 25
#define KINDS 64
#define SOCKETS 100
#define LEASES 4

typedef struct evil {
    uint64_t random;
    char **ports;
    size_t n_ports;
    int sockets[SOCKETS];
    size_t n_sockets;
} evil;

static uint64_t draw(evil *e, uint64_t below)
{
    return board_random(&e->random) % below;
}

static int connected(evil *e)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    to.sin_port = htons((uint16_t)strtoul(e->ports[draw(e, e->n_ports)], NULL, 10));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        close(fd);
        fd = -1;
    }
    if (fd >= 0)
        (void)fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* proto/PROTOCOL.md, "Frames": little-endian, without a checksum. Returns its size. */
static size_t frame(uint8_t *out, uint16_t kind, uint64_t request, const void *body,
                    uint32_t length)
{
    static const uint8_t start[] = {'F', 'A', 'N', '1', 1, 0};
    memcpy(out, start, sizeof start);
    memcpy(out + 6, &kind, sizeof kind);
    memcpy(out + 8, &request, sizeof request);
    memcpy(out + 16, &length, sizeof length);
    memset(out + 20, 0, 4);
    memcpy(out + HEADER, body, length);
    return HEADER + length;
}

/* A session; its hello says version 1 to 1 and any client. */
static int session(evil *e)
{
    uint8_t body[26] = {0x84, 1, 1, 2, 1, 4, 1, 5, 0xc4, 16}, out[HEADER + sizeof body];
    int fd = connected(e);
    for (size_t i = 10; i < sizeof body; i++)
        body[i] = (uint8_t)draw(e, 256);
    size_t size = frame(out, HELLO, 1, body, sizeof body);
    if (fd >= 0)
        (void)!send(fd, out, size, MSG_NOSIGNAL);
    return fd;
}

static void fill_random(evil *e, uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)draw(e, 256);
}

/* Closes one of many at a time, so that there are always some. */
static void keep(evil *e, int fd)
{
    if (fd < 0)
        return;
    if (e->n_sockets == SOCKETS)
        close(e->sockets[--e->n_sockets]);
    e->sockets[e->n_sockets++] = fd;
}

static void garbage(evil *e)
{
    uint8_t bytes[512];
    int fd = connected(e);
    fill_random(e, bytes, sizeof bytes);
    if (draw(e, 2)) /* of a frame the rest */
        (void)frame(bytes, (uint16_t)draw(e, KINDS), 1, bytes + HEADER,
                    (uint32_t)draw(e, sizeof bytes - HEADER));
    if (fd >= 0)
        (void)!send(fd, bytes, 1 + draw(e, sizeof bytes), MSG_NOSIGNAL);
    keep(e, fd);
}

static void frames(evil *e)
{
    uint8_t body[64], out[HEADER + sizeof body];
    int fd = session(e);
    for (size_t i = 0; fd >= 0 && i < 50; i++) {
        fill_random(e, body, sizeof body);
        body[0] = (uint8_t)(0x80 + draw(e, 16)); /* a map of so many pairs */
        size_t size = frame(out, (uint16_t)draw(e, KINDS), i + 2, body,
                            (uint32_t)draw(e, sizeof body));
        (void)!send(fd, out, size, MSG_NOSIGNAL);
    }
    keep(e, fd);
    board_sleep(MS);
}

static void ask(evil *e, bool deaf)
{
    static uint8_t out[500 * (HEADER + 1)], answer[1 << 16];
    size_t size = 0;
    for (uint64_t i = 0; i < 500; i++)
        size += frame(out + size, i % 2 ? LIST : PING, i + 2, "\x80", 1);
    int fd = session(e);
    for (size_t i = 0; fd >= 0 && i < 100; i++) {
        if (send(fd, out, size, MSG_NOSIGNAL) != (ssize_t)size)
            break; /* what was cut cannot be gone on with */
        while (!deaf && recv(fd, answer, sizeof answer, 0) > 0)
            ;
    }
    keep(e, fd);
    board_sleep(MS);
}

/* By the library, as a stranger: over TCP. */
static void leases(evil *e)
{
    static fanin_client *clients[LEASES];
    static float place[8 * 2048];
    char texts[8][32];
    const char *addresses[8];
    tensor_shape shape = weights_shape(0);
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_pull_options options;
    fanin_box box = {.extent = {shape.rows, shape.columns}, .address = place};
    fanin_tensor tensor = {.struct_size = sizeof tensor,
                           .name = shape.name,
                           .dtype = FANIN_DTYPE_F32,
                           .n_dims = 2,
                           .shape = {shape.rows, shape.columns},
                           .boxes = &box,
                           .n_boxes = 1};
    fanin_session *session = NULL;
    fanin_client **client = &clients[draw(e, LEASES)];
    fanin_client_config_init(&config, sizeof config);
    fanin_pull_options_init(&options, sizeof options);
    config.no_unix = true;
    config.path = FANIN_PATH_STREAM;
    options.publication = RUN;
    options.timeout_ms = 500;
    for (size_t i = 0; i < e->n_ports && i < 8; i++) {
        snprintf(texts[i], sizeof texts[i], "127.0.0.1:%s", e->ports[i]);
        addresses[i] = texts[i];
    }
    if (!*client && (fanin_client_create(&config, client, &error) != FANIN_OK ||
                     fanin_client_connect(*client, addresses, e->n_ports, 500,
                                          &error) != FANIN_OK)) {
        fanin_client_destroy(client);
        board_sleep(5 * MS);
        return;
    }
    if (fanin_client_begin(*client, &options, &tensor, 1, &session, &error) != FANIN_OK)
        return;
    board_sleep(draw(e, 300) * MS);
    (void)!fanin_session_end(&session, NULL, &error);
}

static void act(evil *e, const char *kind)
{
    if (strcmp(kind, "leases") == 0)
        leases(e);
    else if (strcmp(kind, "flood") == 0)
        ask(e, false);
    else if (strcmp(kind, "deaf") == 0)
        ask(e, true);
    else if (strcmp(kind, "garbage") == 0)
        garbage(e);
    else if (strcmp(kind, "frames") == 0)
        frames(e);
    else if (e->n_sockets < SOCKETS)
        keep(e, connected(e));
    else
        board_sleep(10 * MS);
}

int main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    evil e = {.random = strtoull(argv[3], NULL, 10) | 1,
              .ports = argv + 4,
              .n_ports = (size_t)argc - 4};
    const board *b = board_open(argv[1]);
    signal(SIGPIPE, SIG_IGN);
    while (!atomic_load(&b->over))
        act(&e, argv[2]);
    return 0;
}
