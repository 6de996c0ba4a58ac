/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one stranger costs a trainer, and what the own user gets meanwhile. Everything is in this
 * process, over the loopback: the trainer, which writes a tensor and commits every 26 ms; the own
 * user's client, which pulls by the Unix socket; the stranger, which comes by TCP.
 *
 *     bench_attacks [SECONDS]      of each measurement; default 5
 *
 *   - leases: the stranger always has a fresh lease and ends none before it has another. Calm and
 *     attacked in turn, with the share that peers have unless told otherwise and without shares;
 *   - waits: begin_update and commit while 240 sessions have 16 waits and 16 watches each.
 */
#include "clock.h"
#include "ends.h"
#include "server_peer.h"
#include "testing.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SIZE 1000000
#define STEP_NS 25000000
#define ROUNDS 4
#define HELD 2
#define SESSIONS 240
#define UPDATES 1000
#define DEFAULT_SHARE_MS 2000
#define NO_SHARES_MS 60000
#define NEVER ((uint64_t)1 << 62)

static uint8_t memory[SIZE], pulled[SIZE];
static unsigned seconds = 5;
static fanin_server *server;
static atomic_bool over;
static atomic_uint pulls;

static void rest(long ns)
{
    nanosleep(&(struct timespec){0, ns}, NULL);
}

static fanin_server *start(uint32_t share_ms)
{
    fanin_server_config c = server_config();
    c.stranger_share_ms = share_ms;
    return server_publish(&c, memory, sizeof memory);
}

/* ------------------------------------------------------------------ who reads */

static void *pull_always(void *address)
{
    fanin_box box;
    fanin_tensor t = make_tensor("a", FANIN_DTYPE_U8, sizeof pulled, 0, &box, pulled);
    fanin_client *client = connect_client(NULL, &(const char *){address}, 1);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    while (!atomic_load(&over)) {
        atomic_fetch_add(
            &pulls, fanin_client_pull(client, &options, &t, 1, NULL, NULL) == FANIN_OK);
        rest(10000000);
    }
    fanin_client_destroy(&client);
    return NULL;
}

static void *hold_leases(void *unused)
{
    (void)unused;
    peer p = peer_open(server);
    grant held[HELD + 1];
    unsigned n = 0;
    while (!atomic_load(&over)) {
        grant g = peer_newest(&p);
        if (peer_begin(&p, &g).granted)
            held[n++] = g;
        if (n > HELD) {
            peer_end(&p, &held[0], true);
            memmove(held, held + 1, HELD * sizeof *held);
            n--;
        }
        rest(5000000);
    }
    peer_close(&p);
    return NULL;
}

/* ------------------------------------------------------------------ the trainer */

/* Steps a second; *step: the last one committed. */
static double train(uint64_t *step)
{
    uint64_t before = *step, since = clock_ns();
    deadline end = deadline_in_ms((uint64_t)seconds * 1000);
    while (!deadline_passed(end)) {
        rest(STEP_NS);
        server_begin(server);
        memset(memory, (int)*step, sizeof memory);
        server_commit(server, ++*step);
    }
    return (double)(*step - before) / ((double)(clock_ns() - since) / 1e9);
}

/* Steps a second, with what reads beside it. */
static double measure(bool attacked, uint64_t *step)
{
    char address[64];
    pthread_t own, stranger;
    snprintf(address, sizeof address, "127.0.0.1:%u", fanin_server_port(server));
    atomic_store(&over, false);
    atomic_store(&pulls, 0);
    pthread_create(&own, NULL, pull_always, address);
    if (attacked)
        pthread_create(&stranger, NULL, hold_leases, NULL);
    double rate = train(step);
    unsigned good = atomic_load(&pulls);
    atomic_store(&over, true);
    pthread_join(own, NULL);
    if (attacked)
        pthread_join(stranger, NULL);
    printf("  %-8s %6.2f steps/s, %5.1f pulls/s of the own user\n",
           attacked ? "attacked" : "calm", rate, good / (double)seconds);
    fflush(stdout);
    return rate;
}

static void leases(uint32_t share_ms, const char *what)
{
    uint64_t step = 1;
    double calm = 0, attacked = 0;
    printf("a stranger that holds leases, %s:\n", what);
    server = start(share_ms);
    for (int i = 0; i < ROUNDS; i++) {
        calm += measure(false, &step);
        attacked += measure(true, &step);
    }
    fanin_server_stats s = server_stats(server);
    printf("  attacked/calm %.3f; longest wait %.0f ms, for %s; %" PRIu64
           " updates did not wait\n",
           attacked / calm, (double)s.held_up_ns_max / 1e6, s.held_up_by, s.drains_cut);
    server_stop(&server, 0);
}

static void leases_with_shares(void **state)
{
    (void)state;
    leases(DEFAULT_SHARE_MS, "2 s of each minute");
}

static void leases_without_shares(void **state)
{
    (void)state;
    leases(NO_SHARES_MS, "without shares");
}

/* ------------------------------------------------------------------- waits */

static void park(fanin_server *s)
{
    peer p = peer_open(s);
    msg_watch m = {0};
    snprintf(m.publication, sizeof m.publication, "%s", RUN);
    for (int i = 0; i < 16; i++) {
        buffer b = {0};
        peer_request_wait(&p, RUN, WIRE_RULE_AT_LEAST, NEVER, 600000);
        encode_watch(&b, ++p.request, &m);
        peer_send(&p, &b);
    }
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void print_times(const char *what, uint64_t *ns)
{
    qsort(ns, UPDATES, sizeof *ns, compare);
    printf("  %-12s median %7.1f us, 99 of 100 within %7.1f us, all within %7.1f us\n",
           what, (double)ns[UPDATES / 2] / 1e3, (double)ns[UPDATES * 99 / 100] / 1e3,
           (double)ns[UPDATES - 1] / 1e3);
}

static void waits(unsigned sessions)
{
    static uint64_t begins[UPDATES], commits[UPDATES];
    server = start(DEFAULT_SHARE_MS);
    for (unsigned i = 0; i < sessions; i++)
        park(server);
    printf("%u sessions with 16 waits and 16 watches each:\n", sessions);
    for (unsigned i = 0; i < UPDATES; i++) {
        rest(3000000);
        uint64_t at = clock_ns();
        server_begin(server);
        begins[i] = clock_ns() - at;
        at = clock_ns();
        server_commit(server, 2 + i);
        commits[i] = clock_ns() - at;
    }
    print_times("begin_update", begins);
    print_times("commit", commits);
    server_close_peers();
    server_stop(&server, 0);
}

static void updates_beside_waits(void **state)
{
    (void)state;
    waits(0);
    waits(SESSIONS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest parts[] = {
        server_test(leases_with_shares),
        server_test(leases_without_shares),
        server_test(updates_beside_waits),
    };
    if (argc > 1)
        seconds = (unsigned)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests_name("attacks", parts, NULL, NULL);
}
