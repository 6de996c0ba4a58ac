/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looking at ranks one of which is stopped, killed, or accepts and says nothing: the others are
 * judged by what they say, within the one time that the call was given, wherever the odd one
 * stands.
 */
#include "ends.h"
#include "lab.h"
#include "testing.h"
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#define RANKS 3
/* A rank that says nothing costs so much; those that live are asked before. */
#define PATIENCE_MS 1000
#define LONG_MS 20000 /* costs nothing where one rank that lives is enough */

typedef enum oddity { STOPPED, KILLED, MUTE } oddity;

typedef struct scene {
    lab lab;
    rank_world world;
    fanin_client *client;
    uint32_t odd;
    int mute; /* accepts, and says nothing */
    char address[32];
} scene;

static int listen_mute(char address[32])
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &size), 0);
    snprintf(address, 32, "127.0.0.1:%u", (unsigned)ntohs(at.sin_port));
    return fd;
}

static void set_up(scene *s, uint32_t odd)
{
    *s = (scene){.odd = odd, .mute = -1};
    const lab_order order = lab_order_of(RANKS);
    lab_open(&s->lab, false);
    lab_start(&s->lab, &order, &s->world);
    s->client = make_client(NULL);
}

static void strike(scene *s, oddity what)
{
    if (what == MUTE) {
        s->mute = listen_mute(s->address);
        s->world.address_list[s->odd] = s->address;
    } else {
        lab_signal(&s->lab, s->odd, what == KILLED ? SIGKILL : SIGSTOP);
    }
}

static void tear_down(scene *s)
{
    fanin_client_destroy(&s->client);
    if (s->mute >= 0)
        close(s->mute);
    rank_world_free(&s->world);
    lab_close(&s->lab);
}

typedef struct seen {
    const scene *scene;
    uint32_t calls, good[RANKS], publications[RANKS];
    bool silent;
    char message[256];
} seen;

static bool on_rank(void *cookie, const fanin_rank_info *info)
{
    seen *n = cookie;
    uint32_t place = n->calls++;
    n->good[place] += info->status == FANIN_OK;
    if (place == n->scene->odd) {
        n->silent = info->silent;
        snprintf(n->message, sizeof n->message, "%s", info->message);
    }
    return true;
}

static bool on_ping(void *cookie, const fanin_rank_info *info, uint64_t rtt_ns)
{
    seen *n = cookie;
    assert_int_equal(info->status == FANIN_OK, rtt_ns > 0);
    return on_rank(cookie, info) && n->calls <= RANKS;
}

static bool on_publication(void *cookie, const fanin_publication_info *info)
{
    seen *n = cookie;
    n->publications[info->rank]++;
    return true;
}

static bool on_pair(void *cookie, const char *key, const char *value)
{
    ++*(unsigned *)cookie;
    return true;
}

/* All but the odd one are there, and it is told what is the matter with that one. */
static void check(const scene *s, const seen *n, oddity what, const char *why)
{
    assert_int_equal(n->calls, RANKS);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(n->good[i], i != s->odd);
    assert_int_equal(n->silent, what != KILLED);
    assert_non_null(strstr(n->message, what == KILLED ? "" : why));
    assert_non_null(strstr(n->message, s->world.address_list[s->odd]));
}

static void ping(scene *s, oddity what, const char *why)
{
    seen n = {.scene = s};
    assert_works(fanin_client_ping(s->client, PATIENCE_MS, on_ping, &n, ERROR));
    check(s, &n, what, why);
}

static void list(scene *s, oddity what, const char *why)
{
    seen n = {.scene = s}, after = {.scene = s};
    assert_works(fanin_client_list(s->client, PATIENCE_MS, on_publication, &n, ERROR));
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(n.publications[i], i != s->odd);
    assert_works(fanin_client_ranks(s->client, on_rank, &after, ERROR));
    check(s, &after, what, why);
}

static void ask_for_metadata(scene *s)
{
    unsigned pairs = 0;
    assert_works(fanin_client_metadata(s->client, "lora:0", PATIENCE_MS, on_pair,
                                       &pairs, ERROR));
    assert_true(pairs > 0);
}

/* The rank is odd before anybody has connected. */
static void try_new_client(oddity what, uint32_t odd)
{
    scene s;
    set_up(&s, odd);
    strike(&s, what);
    assert_works(fanin_client_connect_any(s.client, s.world.address_list, RANKS,
                                          LONG_MS, ERROR));
    ask_for_metadata(&s);
    list(&s, what, "accepted but did not answer in time");
    ping(&s, what, "accepted but did not answer in time");
    tear_down(&s);
}

/* It becomes odd afterwards; a stopped one is there again when it goes on. */
static void try_old_client(oddity what, uint32_t odd)
{
    scene s;
    set_up(&s, odd);
    assert_works(
        fanin_client_connect(s.client, s.world.address_list, RANKS, 10000, ERROR));
    strike(&s, what);
    ask_for_metadata(&s);
    ping(&s, what, "fell silent");
    list(&s, what, "accepted but did not answer in time");
    if (what == STOPPED) {
        seen n = {.scene = &s};
        lab_signal(&s.lab, odd, SIGCONT);
        assert_works(fanin_client_list(s.client, 10000, on_publication, &n, ERROR));
        assert_int_equal(n.publications[odd], 1);
    }
    tear_down(&s);
}

TEST(a_stopped_rank)
{
    for (uint32_t odd = 0; odd < RANKS; odd++)
        try_new_client(STOPPED, odd);
}

TEST(a_killed_rank)
{
    for (uint32_t odd = 0; odd < RANKS; odd++)
        try_new_client(KILLED, odd);
}

TEST(a_mute_rank)
{
    for (uint32_t odd = 0; odd < RANKS; odd++)
        try_new_client(MUTE, odd);
}

TEST(a_rank_that_stops_later)
{
    for (uint32_t odd = 0; odd < RANKS; odd++)
        try_old_client(STOPPED, odd);
}

TEST(a_rank_that_dies_later)
{
    try_old_client(KILLED, 1);
}
