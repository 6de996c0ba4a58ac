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

enum { BY_TCP, BY_NAME, WAKE, OTHERS, POLLED = OTHERS + 2 * LINK_PAIRS };

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

static void on_accept(lying_link *l, int by)
{
    int reader = accept4(l->listeners[by], NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (reader < 0)
        return;
    const socket_address *at = &l->ranks[by];
    int rank = socket(at->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    link_pair *p = l->pairs;
    while (p < l->pairs + LINK_PAIRS && p->fds[TO_READER] >= 0)
        p++;
    check(rank >= 0);
    if (!l->serves || l->accepted++ == CONNECTIONS || p == l->pairs + LINK_PAIRS ||
        connect(rank, (struct sockaddr *)&at->storage, at->length) != 0) {
        close(reader);
        close(rank);
        return;
    }
    socket_tune(reader);
    socket_tune(rank);
    check(fcntl(rank, F_SETFL, O_NONBLOCK) == 0);
    link_pair_open(
        p, (const int[]){[TO_RANK] = rank, [TO_READER] = reader},
        by == BY_TCP && l->played[0] && l->talk.unit == UNIT_FRAME ? l->played : NULL,
        by == BY_NAME ? l->address : NULL);
}

/* Nothing goes on: whoever waits does so for what was altered. */
static void at_rest(lying_link *l)
{
    if (!l->stays)
        close_all(l);
    l->serves = l->stays;
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
    struct pollfd queue = {l->listeners[BY_TCP], POLLIN, 0};
    while (poll(&queue, 1, 0) > 0)
        on_accept(l, BY_TCP); /* which closes what nobody asks for any more */
    if (l->listeners[BY_NAME] >= 0)
        close(l->listeners[BY_NAME]); /* with what waits */
    l->listeners[BY_NAME] = -1;
    l->ends = false;
    l->has_ended = true;
    pthread_cond_signal(&l->changed);
}

static void step(lying_link *l, const struct pollfd *polled)
{
    for (int i = 0; i < LINK_PAIRS; i++) {
        link_pair *p = &l->pairs[i];
        for (int from = 0; from < 2; from++) {
            if (p->fds[from] >= 0 && polled[OTHERS + 2 * i + from].revents &&
                !link_pair_pass(p, from, &l->talk))
                link_pair_close(p, false);
        }
    }
    for (int by = 0; by < 2; by++)
        if (polled[by].revents)
            on_accept(l, by);
    if (polled[WAKE].revents)
        on_wake(l);
}

static void *run(void *cookie)
{
    lying_link *l = cookie;
    pthread_mutex_lock(&l->lock);
    for (;;) {
        struct pollfd polled[POLLED] = {{l->listeners[BY_TCP], POLLIN, 0},
                                        {l->listeners[BY_NAME], POLLIN, 0},
                                        {l->wake, POLLIN, 0}};
        for (int i = 0; i < 2 * LINK_PAIRS; i++)
            polled[OTHERS + i] = (struct pollfd){l->pairs[i / 2].fds[i % 2], POLLIN, 0};
        int patience = l->reader && l->talk.edits.size > 0 ? QUIET_MS : -1;
        pthread_mutex_unlock(&l->lock);
        int n = poll(polled, POLLED, patience);
        pthread_mutex_lock(&l->lock);
        if (n > 0)
            step(l, polled);
        else if (l->reader)
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
    socket_address *at = &l->ranks[BY_TCP]; /* the link's own first: the same host */
    check(l->wake >= 0 && socket_resolve("127.0.0.1:0", at, NULL) == FANIN_OK &&
          socket_listen(at, 16, &l->listeners[BY_TCP], NULL) == FANIN_OK);
    socket_set_port(at, socket_port(l->listeners[BY_TCP]));
    snprintf(l->address, sizeof l->address, "%.31s", at->text);
    socket_unix_address(geteuid(), at, &l->name);
    socket_set_port(at, rank);
    socket_unix_address(geteuid(), at, &l->ranks[BY_NAME]);
    l->listeners[BY_NAME] = -1;
    check(pthread_mutex_init(&l->lock, NULL) == 0 &&
          pthread_cond_init(&l->changed, NULL) == 0 &&
          pthread_create(&l->thread, NULL, run, l) == 0);
}

void lying_link_serve(lying_link *l, fanin_client *reader, edits edits, link_kind kind,
                      bool stays)
{
    pthread_mutex_lock(&l->lock);
    l->reader = reader;
    l->talk = (link_talk){.edits = edits,
                          .unit = kind == LINK_RECORDS ? UNIT_RECORD
                                  : kind == LINK_NOISY ? UNIT_SEALED
                                                       : UNIT_FRAME,
                          .happens = happens,
                          .cookie = l};
    if (kind == LINK_BY_NAME)
        check(socket_listen(&l->name, 16, &l->listeners[BY_NAME], NULL) == FANIN_OK);
    l->accepted = 0;
    l->serves = true;
    l->stays = stays;
    l->has_ended = false;
    pthread_mutex_unlock(&l->lock);
    wake(l);
}

void lying_link_mend(lying_link *l)
{
    pthread_mutex_lock(&l->lock);
    l->talk.edits = (edits){0};
    l->accepted = 0;
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
