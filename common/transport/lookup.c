/* SPDX-License-Identifier: Apache-2.0 */
#include "lookup.h"

#include "clock.h"
#include "error_set.h"
#include "load_lock.h"
#include "thread.h"
#include "wake.h"
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Threads that wait for an answer, also to calls that have given up. */
#define LOOKUPS_MOST 64
#define ADDRESSES_MOST 8 /* of a name */
#define CHOICE_MS 1000

struct lookup {
    char host[SOCKET_HOST];
    uint16_t port;
    int event; /* closed by whoever lets go last: its number must not be another's meanwhile */
    atomic_int holders; /* the caller and the thread */
    atomic_bool done;
    int code, system_code; /* of getaddrinfo */
    socket_address address;
};

static atomic_int running;

static void lookup_let_go(lookup *l)
{
    if (atomic_fetch_sub(&l->holders, 1) > 1)
        return;
    close(l->event);
    free(l);
}

/* What accepts among the connections that are being made: its number; @p n: nothing yet. Those that
   failed are closed. */
static size_t lookup_accepted(struct pollfd *tries, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (tries[i].fd < 0 || tries[i].revents == 0)
            continue;
        if (socket_connect_result(tries[i].fd) == 0)
            return i;
        close(tries[i].fd);
        tries[i].fd = -1;
    }
    return n;
}

static bool lookup_tries(const struct pollfd *tries, size_t n)
{
    bool any = false;
    for (size_t i = 0; i < n; i++)
        any = any || tries[i].fd >= 0;
    return any;
}

/* Which of a name's addresses leads to the rank: the first that accepts a connection; 0 if none
   does in time, so that the call names that address's failure. */
static size_t lookup_choose(const socket_address *addresses, size_t n)
{
    struct pollfd tries[ADDRESSES_MOST];
    size_t chosen = n;
    deadline at = deadline_in_ms(CHOICE_MS);
    for (size_t i = 0; i < n; i++) {
        tries[i] = (struct pollfd){.events = POLLOUT};
        (void)socket_connect_start(&addresses[i], &tries[i].fd, NULL);
    }
    while (chosen == n && lookup_tries(tries, n) && !deadline_passed(at)) {
        if (poll(tries, n, deadline_poll_ms(at)) > 0)
            chosen = lookup_accepted(tries, n);
    }
    for (size_t i = 0; i < n; i++)
        if (tries[i].fd >= 0)
            close(tries[i].fd);
    return chosen == n ? 0 : chosen;
}

static void lookup_ask(lookup *l)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    struct addrinfo *found = NULL;
    socket_address addresses[ADDRESSES_MOST] = {0};
    size_t n = 0;
    l->code = getaddrinfo(l->host, NULL, &hints, &found);
    l->system_code = errno;
    for (const struct addrinfo *a = l->code == 0 ? found : NULL;
         a && n < ADDRESSES_MOST; a = a->ai_next) {
        if (a->ai_addrlen > sizeof addresses[n].storage)
            continue;
        memcpy(&addresses[n].storage, a->ai_addr, a->ai_addrlen);
        addresses[n].length = a->ai_addrlen;
        socket_set_port(&addresses[n++], l->port);
    }
    if (n != 0)
        l->address = addresses[n > 1 ? lookup_choose(addresses, n) : 0];
    else if (l->code == 0)
        l->code = EAI_NONAME;
    if (found)
        freeaddrinfo(found);
}

static void *lookup_run(void *cookie)
{
    lookup *l = cookie;
    pthread_setname_np(pthread_self(), "fanin-lookup"); /* before it waits */
    lookup_ask(l);
    atomic_store(&l->done, true);
    wake_up(l->event);
    lookup_let_go(l);
    atomic_fetch_sub(&running, 1);
    return NULL;
}

fanin_status lookup_start(const char *host, uint16_t port, lookup **out,
                          fanin_error *error)
{
    error_place place = {.phase = "connect", .address = host};
    fanin_error why = FANIN_ERROR_INIT;
    pthread_t thread;
    lookup *l = calloc(1, sizeof *l);
    if (!l)
        return error_set_memory(error);
    snprintf(l->host, sizeof l->host, "%s", host);
    l->port = port;
    atomic_init(&l->holders, 2);
    l->event = wake_open();
    pin_own_library(); /* the thread may still run when the library is unloaded */
    bool many = atomic_fetch_add(&running, 1) >= LOOKUPS_MOST;
    int code = l->event < 0 ? errno : many ? EAGAIN : 0;
    if (code == 0 &&
        thread_start(&thread, "fanin-lookup", lookup_run, l, &why) != FANIN_OK)
        code = why.sys_errno;
    if (code == 0) {
        pthread_detach(thread);
        *out = l;
        return FANIN_OK;
    }
    atomic_fetch_sub(&running, 1);
    if (l->event >= 0)
        close(l->event);
    free(l);
    place.remedy =
        error_remedy(code, "check the name server, or give the address in numbers");
    if (many)
        return error_set(
            error, FANIN_ERR_LIMIT, &place,
            "the name %s is not looked up: %d names still wait for an answer", host,
            LOOKUPS_MOST);
    return error_set_errno(error, FANIN_ERR_LIMIT, code, &place,
                           "the name %s cannot be looked up", host);
}

int lookup_fd(const lookup *l)
{
    return l->event;
}

bool lookup_done(const lookup *l)
{
    return atomic_load(&l->done);
}

fanin_status lookup_result(const lookup *l, socket_address *out, fanin_error *error)
{
    error_place place = {.phase = "connect",
                         .address = l->host,
                         .remedy = "check the name server, or give the address in "
                                   "numbers"};
    if (!lookup_done(l))
        return error_set(error, FANIN_ERR_TIMEOUT, &place,
                         "the name %s was not resolved before the deadline", l->host);
    if (l->code == 0) {
        *out = l->address;
        return FANIN_OK;
    }
    place.remedy = "check the name, or give the address in numbers";
    if (l->code == EAI_SYSTEM)
        return error_set_errno(error, FANIN_ERR_UNREACHABLE, l->system_code, &place,
                               "the name %s cannot be resolved", l->host);
    return error_set(error, FANIN_ERR_UNREACHABLE, &place,
                     "the name %s cannot be resolved: %s", l->host,
                     gai_strerror(l->code));
}

void lookup_drop(lookup **l)
{
    if (*l)
        lookup_let_go(*l);
    *l = NULL;
}
