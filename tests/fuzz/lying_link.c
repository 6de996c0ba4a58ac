/* SPDX-License-Identifier: Apache-2.0 */
#include "lying_link.h"

#include "checksum.h"
#include "fuzz.h"
#include "messages.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define QUIET_MS 5
#define CONNECTIONS 16 /* of a reader, who tries again */
#define PIECE 65536

/* ------------------------------------------------------------------ passing */

static bool put(int fd, const void *data, size_t size)
{
    return size == 0 ||
           send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;
}

/* @p sealed: with checksums that fit, as of who says it. @p before: what the one behind the body is of, too. */
static bool put_frame(int fd, const altered *a, bool sealed, const buffer *before)
{
    buffer out = {0};
    uint8_t head[FRAME_SIZE], seal[SEAL_SIZE];
    frame f = a->head;
    f.length = (uint32_t)a->body.size ^ a->lie;
    frame_encode(&f, head);
    if (sealed && !before)
        seal_header(head);
    if (before)
        buffer_append(&out, before->data, before->size);
    buffer_append(&out, head, sizeof head);
    buffer_append(&out, a->body.data, a->body.size);
    size_t start = before ? before->size : 0;
    if (sealed) {
        seal_encode(checksum_of(out.data, out.size), seal);
        buffer_append(&out, seal, sizeof seal);
    }
    bool good = !out.failed && put(fd, out.data + start, out.size - start);
    buffer_free(&out);
    return good;
}

static void happens(void *cookie, edit_kind kind, uint16_t number)
{
    const lying_link *l = cookie;
    const struct timespec pause = {.tv_nsec = (number & 63) * 1000000L};
    if (kind == EDIT_CANCEL)
        fanin_client_cancel(l->reader);
    else if (kind == EDIT_STALL)
        (void)nanosleep(&pause, NULL);
    else
        l->act(number);
}

/* Alters a whole frame and passes it on. False: the connection ends. */
static bool pass_frame(lying_link *l, link_pair *p, int to, const frame *f,
                       const uint8_t *bytes)
{
    altered a = {.head = *f};
    bool answers_hello = to == TO_READER && !p->begun[to] && p->sealed;
    bool sealed = answers_hello || (p->begun[to] && p->sealed);
    const buffer *before = answers_hello ? &p->hello : NULL;
    buffer_append(&a.body, bytes, f->length);
    edits_apply(l->edits, to, l->passed[to]++, &a, happens, l);
    bool good = !a.body.failed && put_frame(p->fds[to], &a, sealed, before) &&
                (!a.twice || put_frame(p->fds[to], &a, sealed, before)) && !a.last;
    buffer_free(&a.body);
    return good;
}

/* Of a hello or its answer, which is whole: whether both ends want checksums. */
static void greet(link_pair *p, int to, const frame *f, const uint8_t *whole)
{
    msg_hello hello;
    msg_hello_ok answer;
    body b = {.data = whole + FRAME_SIZE, .size = f->length};
    if (to == TO_RANK) {
        buffer_append(&p->hello, whole, FRAME_SIZE + f->length);
        p->sealed =
            decode_hello(&b, &hello) == FANIN_OK && (hello.features & FEATURE_SEALS);
    } else {
        p->sealed = p->sealed && f->type == MSG_HELLO_OK &&
                    decode_hello_ok(&b, &answer) == FANIN_OK &&
                    (answer.features & FEATURE_SEALS);
    }
}

/* Passes on what has come whole. False: the connection ends. */
static bool pass_whole(lying_link *l, link_pair *p, int to)
{
    buffer *come = &p->come[to];
    while (come->size >= FRAME_SIZE) {
        frame f;
        const char *why;
        if (seal_decode(come->data, p->begun[to] && p->sealed, &f, &why) != FANIN_OK)
            return false; /* who was lied to about checksums speaks otherwise than the other */
        size_t whole = FRAME_SIZE + (size_t)f.length;
        if (come->size < whole)
            return true;
        if (!p->begun[to])
            greet(p, to, &f, come->data);
        if (to == TO_READER || p->begun[TO_RANK])
            whole += seal_size(p->sealed);
        if (come->size < whole)
            return true;
        if (!pass_frame(l, p, to, &f, come->data + FRAME_SIZE))
            return false;
        p->begun[to] = true;
        memmove(come->data, come->data + whole, come->size - whole);
        come->size -= whole;
    }
    return true;
}

static bool pass(lying_link *l, link_pair *p, int to)
{
    buffer *come = &p->come[to];
    if (!buffer_reserve(come, PIECE))
        return false;
    ssize_t n = recv(p->fds[1 - to], come->data + come->size, PIECE, MSG_DONTWAIT);
    if (n <= 0)
        return n < 0 && errno == EAGAIN;
    come->size += (size_t)n;
    return pass_whole(l, p, to);
}

/* -------------------------------------------------------------- connections */

/* @p at_once: without the minute that the kernel keeps the port of a connection for; what is under way is
   lost. */
static void close_pair(link_pair *p, bool at_once)
{
    struct linger none = {.l_onoff = at_once};
    for (int i = 0; i < 2; i++) {
        if (p->fds[i] >= 0) {
            (void)setsockopt(p->fds[i], SOL_SOCKET, SO_LINGER, &none, sizeof none);
            close(p->fds[i]);
        }
        buffer_free(&p->come[i]);
    }
    buffer_free(&p->hello);
    *p = (link_pair){.fds = {-1, -1}};
}

static void close_all(lying_link *l)
{
    for (int i = 0; i < LINK_PAIRS; i++)
        close_pair(&l->pairs[i], true);
}

static void on_accept(lying_link *l)
{
    int reader = accept4(l->listener, NULL, NULL, SOCK_CLOEXEC);
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
    p->fds[TO_READER] = reader;
    p->fds[TO_RANK] = rank;
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
        for (int to = 0; to < 2; to++) {
            if (p->fds[1 - to] >= 0 && polled[2 + 2 * i + 1 - to].revents &&
                !pass(l, p, to))
                close_pair(p, false);
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
        int patience = l->serves && l->edits.size > 0 ? QUIET_MS : -1;
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

void lying_link_start(lying_link *l, uint16_t rank, void (*act)(uint16_t number))
{
    *l = (lying_link){.act = act, .wake = eventfd(0, EFD_CLOEXEC)};
    for (int i = 0; i < LINK_PAIRS; i++)
        l->pairs[i].fds[TO_RANK] = l->pairs[i].fds[TO_READER] = -1;
    check(l->wake >= 0 && socket_resolve("127.0.0.1:0", &l->rank, NULL) == FANIN_OK &&
          socket_listen(&l->rank, 16, &l->listener, NULL) == FANIN_OK);
    socket_set_port(&l->rank, rank); /* the same host */
    snprintf(l->address, sizeof l->address, "127.0.0.1:%u",
             (unsigned)socket_port(l->listener));
    check(pthread_mutex_init(&l->lock, NULL) == 0 &&
          pthread_cond_init(&l->changed, NULL) == 0 &&
          pthread_create(&l->thread, NULL, run, l) == 0);
}

void lying_link_serve(lying_link *l, fanin_client *reader, edits edits)
{
    pthread_mutex_lock(&l->lock);
    l->reader = reader;
    l->edits = edits;
    l->accepted = l->passed[TO_RANK] = l->passed[TO_READER] = 0;
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
