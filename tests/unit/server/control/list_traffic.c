/* SPDX-License-Identifier: Apache-2.0 */
/* SESSIONS=512 STEPS=8 SPREAD=0 list-traffic: what lists of relays cost the control thread of the
   rank that keeps them. All sessions offer each step, one after the other within SPREAD ms, and ask
   who holds it until they know all, as readers' threads do (relay/list.c); their requests for the
   step before are left behind. */
#include "clock.h"
#include "server_peer.h"
#include "testing.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

#define PER_HOST 8

typedef struct relay {
    peer p;
    uint64_t request, version, roster;
    size_t known;
} relay;

static size_t n;
static uint64_t bytes, spread_ns;

static void offer(relay *r, size_t i, uint64_t step, buffer *b)
{
    msg_offer m = {.publication = RUN,
                   .step = step,
                   .port = (uint32_t)(1024 + i),
                   .place = "pod-17/rack-3",
                   .units = 4096};
    snprintf(m.host, sizeof m.host, "6d1c9c364a5e4d0b9a351f2f6f%06x-f0000000-effffffc",
             (unsigned)(i / PER_HOST));
    memcpy(m.incarnation, &i, sizeof i);
    encode_offer(b, ++r->p.request, &m);
}

static void ask(relay *r, uint64_t step, buffer b)
{
    msg_holders m = {.publication = RUN,
                     .step = step,
                     .version = r->version,
                     .timeout_ms = 10000,
                     .roster = r->roster};
    encode_holders(&b, r->request = ++r->p.request, &m);
    peer_send(&r->p, &b);
}

/* An answer to an older request is passed over. */
static void hear(relay *r, uint64_t step)
{
    msg_holders_ok m;
    peer_receive(&r->p);
    bytes += r->p.frame.length;
    if (r->p.frame.type != MSG_HOLDERS_OK || r->p.frame.request != r->request)
        return;
    body in = {.data = r->p.body, .size = r->p.frame.length};
    assert_int_equal(decode_holders_ok(&in, &m), FANIN_OK);
    r->version = m.version;
    r->roster = m.roster;
    r->known = m.members.size > 0 ? 0 : r->known;
    for (size_t i = 0; i < m.members.size; i++)
        r->known += (size_t)__builtin_popcount(m.members.data[i]);
    holders_free(&m);
    ask(r, step, (buffer){0});
}

static size_t count_ready(const relay *all)
{
    size_t ready = 0;
    for (size_t i = 0; i < n; i++)
        ready += all[i].known == n;
    return ready;
}

/* Those whose time has come; how many that are by now. */
static size_t come(relay *all, size_t come, uint64_t began, uint64_t step)
{
    for (; come < n && clock_ns() - began >= spread_ns / n * come; come++) {
        all[come].version = all[come].known = 0;
        buffer b = {0};
        offer(&all[come], come, step, &b);
        ask(&all[come], step, b);
    }
    return come;
}

static void run_step(relay *all, struct pollfd *fds, uint64_t step)
{
    uint64_t began = clock_ns();
    for (size_t i = 0; i < n; i++)
        all[i].known = 0;
    for (size_t there = 0; count_ready(all) < n;) {
        there = come(all, there, began, step);
        int told = poll(fds, (nfds_t)n, there < n ? 1 : 10000);
        assert_true(told > 0 || there < n);
        for (size_t i = 0; i < n; i++)
            if (fds[i].revents)
                hear(&all[i], step);
    }
}

static size_t number_of(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoul(text, NULL, 10) : otherwise;
}

SERVER_TEST(list_traffic)
{
    static uint8_t memory[1000];
    static const struct rlimit most = {65536, 65536};
    n = number_of("SESSIONS", 512);
    uint64_t steps = number_of("STEPS", 8);
    spread_ns = number_of("SPREAD", 0) * 1000000;
    (void)setrlimit(RLIMIT_NOFILE, &most);
    fanin_server_config c = server_config();
    c.max_sessions = (uint32_t)(4 * n);
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory, sizeof memory);
    relay *all = calloc(n, sizeof *all);
    struct pollfd *fds = calloc(n, sizeof *fds);
    for (size_t i = 0; i < n; i++) {
        all[i].p = peer_open_unix(s);
        fds[i] = (struct pollfd){.fd = all[i].p.fd, .events = POLLIN};
    }
    for (uint64_t step = 1; step <= steps; step++) {
        if (step > 1)
            server_begin(s);
        server_commit(s, step);
        uint64_t before = server_stats(s).control_cpu_ns, began = clock_ns();
        bytes = 0;
        run_step(all, fds, step);
        printf("# step %d: %.1f ms of CPU, %.0f ms, %.1f MB\n", (int)step,
               (double)(server_stats(s).control_cpu_ns - before) / 1e6,
               (double)(clock_ns() - began) / 1e6, (double)bytes / 1e6);
    }
    free(all);
    free(fds);
}
