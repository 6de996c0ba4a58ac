/* SPDX-License-Identifier: Apache-2.0 */
#include "lying_link.h"

#include "fuzz.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define QUIET_MS 5
#define CONNECTIONS 16 /* of a reader, who tries again */

static void happens(void *cookie, edit_kind kind, uint16_t number)
{
    const lying_link *l = cookie;
    const struct timespec pause = {.tv_nsec = (number & 63) * 1000000L};
    if (kind == EDIT_CANCEL)
        fanin_client_cancel(l->reader);
    else if (kind == EDIT_STALL)
        (void)nanosleep(&pause, NULL);
    else
        l->act(l->cookie, number);
}

/* -------------------------------------------------------------- connections */

static void close_all(lying_link *l)
{
    for (int i = 0; i < LINK_PAIRS; i++)
        link_pair_close(&l->pairs[i], true);
}

static void on_accept(lying_link *l)
{
    int reader = accept4(l->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (reader < 0)
        return;
    int rank = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    link_pair *p = l->pairs;
    while (p < l->pairs + LINK_PAIRS && p->fds[TO_READER] >= 0)
        p++;
    check(rank >= 0);
    if (!l->serves || l->accepted++ == CONNECTIONS || p == l->pairs + LINK_PAIRS ||
        connect(rank, (struct sockaddr *)&l->rank.storage, l->rank.length) != 0) {
        close(reader);
        close(rank);
        return;
    }
    socket_tune(reader);
    socket_tune(rank);
    check(fcntl(rank, F_SETFL, O_NONBLOCK) == 0);
    link_pair_open(p, (const int[]){[TO_RANK] = rank, [TO_READER] = reader},
                   l->played[0] && !l->talk.records ? l->played : NULL);
}

/* Nothing goes on: whoever waits does so for what was altered. */
static void at_rest(lying_link *l)
{
    close_all(l);
    l->serves = false;
    if (l->reader)
        fanin_client_cancel(l->reader);
}

/* ---------------------------------------------------------------- the thread */

static void on_wake(lying_link *l)
{
    uint64_t count;
    (void)!read(l->wake, &count, sizeof count);
    if (!l->ends)
        return;
    close_all(l);
    struct pollfd queue = {l->listener, POLLIN, 0};
    while (poll(&queue, 1, 0) > 0)
        on_accept(l); /* which closes what nobody asks for any more */
    l->ends = false;
    l->has_ended = true;
    pthread_cond_signal(&l->changed);
}

static void step(lying_link *l, const struct pollfd *polled)
{
    for (int i = 0; i < LINK_PAIRS; i++) {
        link_pair *p = &l->pairs[i];
        for (int from = 0; from < 2; from++) {
            if (p->fds[from] >= 0 && polled[2 + 2 * i + from].revents &&
                !link_pair_pass(p, from, &l->talk))
                link_pair_close(p, false);
        }
    }
    if (polled[1].revents)
        on_accept(l);
    if (polled[0].revents)
        on_wake(l);
}

static void *run(void *cookie)
{
    lying_link *l = cookie;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        struct pollfd polled[2 + 2 * LINK_PAIRS] = {{l->wake, POLLIN, 0},
                                                    {l->listener, POLLIN, 0}};
        for (int i = 0; i < 2 * LINK_PAIRS; i++)
            polled[2 + i] = (struct pollfd){l->pairs[i / 2].fds[i % 2], POLLIN, 0};
        int patience = l->serves && l->talk.edits.size > 0 ? QUIET_MS : -1;
        pthread_mutex_unlock(&l->lock);
        int n = poll(polled, 2 + 2 * LINK_PAIRS, patience);
        pthread_mutex_lock(&l->lock);
        if (n > 0)
            step(l, polled);
        else if (l->serves)
            at_rest(l);
    }
    return NULL;
}

static void wake(lying_link *l)
{
    uint64_t one = 1;
    check(write(l->wake, &one, sizeof one) == sizeof one);
}

void lying_link_start(lying_link *l, uint16_t rank, tls_end *const played[2],
                      void (*act)(void *cookie, uint16_t number), void *cookie)
{
    *l = (lying_link){.act = act, .cookie = cookie, .wake = eventfd(0, EFD_CLOEXEC)};
    l->played[TO_READER] = played[0];
    l->played[TO_RANK] = played[1];
    for (int i = 0; i < LINK_PAIRS; i++)
        link_pair_clear(&l->pairs[i]);
    check(l->wake >= 0 && socket_resolve("127.0.0.1:0", &l->rank, NULL) == FANIN_OK &&
          socket_listen(&l->rank, 16, &l->listener, NULL) == FANIN_OK);
    socket_set_port(&l->rank, rank); /* the same host */
    snprintf(l->address, sizeof l->address, "127.0.0.1:%u",
             (unsigned)socket_port(l->listener));
    check(pthread_mutex_init(&l->lock, NULL) == 0 &&
          pthread_cond_init(&l->changed, NULL) == 0 &&
          pthread_create(&l->thread, NULL, run, l) == 0);
}

void lying_link_serve(lying_link *l, fanin_client *reader, edits edits, bool records)
{
    pthread_mutex_lock(&l->lock);
    l->reader = reader;
    l->talk = (link_talk){
        .edits = edits, .records = records, .happens = happens, .cookie = l};
    l->accepted = 0;
    l->serves = true;
    l->has_ended = false;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void lying_link_end(lying_link *l)
{
    pthread_mutex_lock(&l->lock);
    l->reader = NULL;
    l->serves = false;
    l->ends = true;
    wake(l);
    while (!l->has_ended)
        pthread_cond_wait(&l->changed, &l->lock);
    pthread_mutex_unlock(&l->lock);
}
