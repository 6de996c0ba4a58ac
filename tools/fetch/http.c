/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/http.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MOST = 16,
    REQUEST = 4096,
    ASK_MS = 5000,
    TAKE_MS = 5000,
    WAIT_MS = 1000,
    DEAF_MS = 100
};

/** A scraper. */
typedef struct scraper {
    int fd; /**< -1: none */
    uint64_t end_ns;
    char request[REQUEST];
    size_t got;
    char *answer; /**< NULL: it still asks */
    size_t size, sent;
} scraper;

typedef struct http {
    int listener;
    uint64_t deaf_until_ns; /**< no connection is taken before */
    http_page_fn page;
    void *cookie;
    scraper scrapers[MOST];
} http;

/* ----------------------------------------------------------------- the listener */

/* "[::1]:9470" as host and port; false: it is none. */
static bool split(const char *address, char host[64], char port[8])
{
    const char *colon = strrchr(address, ':');
    bool bracket = address[0] == '[';
    if (colon == NULL || colon == address || strlen(colon + 1) > 5 ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1) || colon[1] == '\0' ||
        strtoul(colon + 1, NULL, 10) > 65535 || (bracket && colon[-1] != ']')) {
        return false;
    }
    const char *first = address + bracket;
    int length = (int)(colon - first) - bracket;
    snprintf(port, 8, "%s", colon + 1);
    return length > 0 && snprintf(host, 64, "%.*s", length, first) < 64;
}

static fanin_status fail(fanin_error *error, const char *address)
{
    return failure_set(error, FANIN_ERR_IO, "free the port, or give another --listen",
                       "cannot listen on %s: %s", address, strerror(errno));
}

fanin_status http_listen(const char *address, int *fd_out, unsigned *port_out,
                         fanin_error *error)
{
    char host[64], port[8];
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                             .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    if (!split(address, host, port) || getaddrinfo(host, port, &hints, &found) != 0) {
        return failure_set(error, FANIN_ERR_ARGUMENT,
                           "give a numeric address, as 127.0.0.1:9470",
                           "--listen '%s' is no ADDRESS:PORT", address);
    }
    int one = 1;
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    bool good =
        fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, MOST) == 0;
    fanin_status status = good ? FANIN_OK : fail(error, address);
    freeaddrinfo(found);
    struct sockaddr_storage at;
    socklen_t size = sizeof at;
    char service[8] = "0";
    if (good && getsockname(fd, (struct sockaddr *)&at, &size) == 0) {
        getnameinfo((struct sockaddr *)&at, size, NULL, 0, service, sizeof service,
                    NI_NUMERICSERV);
    }
    if (!good && fd >= 0) {
        close(fd);
    }
    *fd_out = fd;
    *port_out = (unsigned)strtoul(service, NULL, 10);
    return status;
}

/* ------------------------------------------------------------------ the scrapers */

static void dismiss(scraper *s)
{
    if (s->fd >= 0) {
        close(s->fd);
    }
    free(s->answer);
    *s = (scraper){.fd = -1};
}

/* A place that is free, or that of whoever has the least time left. */
static scraper *place(http *h)
{
    scraper *best = &h->scrapers[0];
    for (int i = 0; i < MOST; i++) {
        scraper *s = &h->scrapers[i];
        if (s->fd < 0) {
            return s;
        }
        best = s->end_ns < best->end_ns ? s : best;
    }
    dismiss(best);
    return best;
}

static void take_in(http *h)
{
    int fd = accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        scraper *s = place(h);
        s->fd = fd;
        s->end_ns = progress_in_ms(ASK_MS);
    } else { /* as long as no descriptor is left, it would be asked without end */
        h->deaf_until_ns = progress_in_ms(DEAF_MS);
    }
}

/* What HEAD gets is the same without the text. */
static void answer(scraper *s, const char *status, const char *more, const char *text)
{
    bool head_only = strncmp(s->request, "HEAD ", 5) == 0;
    FILE *stream = output_require(open_memstream(&s->answer, &s->size));
    fprintf(stream,
            "HTTP/1.1 %s\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            "Content-Length: %zu\r\n%sConnection: close\r\n\r\n%s",
            status, strlen(text), more, head_only ? "" : text);
    if (fclose(stream) != 0) {
        output_require(NULL);
    }
    s->end_ns = progress_in_ms(TAKE_MS);
}

/* Answers a whole request; half of one waits for more. */
static void judge(http *h, scraper *s)
{
    static const char wanted[] = " /metrics";
    size_t length = sizeof wanted - 1;
    s->request[s->got] = '\0';
    const char *path = strchr(s->request, ' ');
    if (strlen(s->request) < s->got) {
        answer(s, "400 Bad Request", "", "a zero byte is no text\n");
    } else if (strstr(s->request, "\r\n\r\n") == NULL) {
        if (s->got == REQUEST - 1) {
            answer(s, "431 Request Header Fields Too Large", "",
                   "a request may have 4095 bytes\n");
        }
    } else if (strncmp(s->request, "GET ", 4) != 0 &&
               strncmp(s->request, "HEAD ", 5) != 0) {
        answer(s, "405 Method Not Allowed", "Allow: GET, HEAD\r\n",
               "only GET and HEAD are known\n");
    } else if (strncmp(path, wanted, length) != 0 ||
               strchr(" ?", path[length]) == NULL) {
        answer(s, "404 Not Found", "", "there is only /metrics\n");
    } else {
        answer(s, "200 OK", "", h->page(h->cookie));
    }
}

static void hear(http *h, scraper *s)
{
    ssize_t n = recv(s->fd, s->request + s->got, REQUEST - 1 - s->got, 0);
    if (n > 0) {
        s->got += (size_t)n;
        judge(h, s);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
        dismiss(s);
    }
}

static void say(scraper *s)
{
    ssize_t n = send(s->fd, s->answer + s->sent, s->size - s->sent, MSG_NOSIGNAL);
    if (n > 0) {
        s->sent += (size_t)n;
    }
    if (s->sent == s->size) {
        shutdown(s->fd, SHUT_WR);
    }
    if (s->sent == s->size || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        dismiss(s);
    }
}

/* ---------------------------------------------------------------------- the loop */

/* Signals come while it waits, and at no other moment: none is overlooked. */
static int wait_for(struct pollfd *polled, nfds_t count, uint32_t ms)
{
    struct timespec most = {.tv_sec = ms / 1000,
                            .tv_nsec = (long)(ms % 1000) * 1000000};
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    int some = interrupt_requested() ? 0 : ppoll(polled, count, &most, &before);
    int why = errno;
    sigprocmask(SIG_SETMASK, &before, NULL);
    errno = why;
    return some;
}

static void serve(http *h, scraper *s)
{
    if (s->answer == NULL) {
        hear(h, s);
    } else {
        say(s);
    }
}

static void dismiss_all(http *h)
{
    for (int i = 0; i < MOST; i++) {
        dismiss(&h->scrapers[i]);
    }
}

/* poll() may be given no more than the process may have descriptors: nothing that is not open. */
static void turn(http *h)
{
    uint32_t deaf_ms = progress_left_ms(h->deaf_until_ns);
    struct pollfd polled[MOST + 1];
    scraper *whose[MOST + 1];
    nfds_t count = 0;
    for (int i = 0; i < MOST; i++) {
        scraper *s = &h->scrapers[i];
        if (s->fd >= 0) {
            whose[count] = s;
            polled[count++] = (struct pollfd){
                s->fd, (short)(s->answer != NULL ? POLLOUT : POLLIN), 0};
        }
    }
    nfds_t scrapers = count;
    if (deaf_ms == 0) {
        polled[count++] = (struct pollfd){h->listener, POLLIN, 0};
    }
    int some = wait_for(polled, count, deaf_ms > 0 ? deaf_ms : WAIT_MS);
    if (some < 0 && errno == EINVAL) { /* the limit is lower now than what is open */
        dismiss_all(h);
        h->deaf_until_ns = progress_in_ms(DEAF_MS);
        return;
    }
    for (nfds_t i = 0; i < scrapers; i++) {
        if (some > 0 && polled[i].revents != 0) {
            serve(h, whose[i]);
        } else if (progress_left_ms(whose[i]->end_ns) == 0) {
            dismiss(whose[i]);
        }
    }
    if (some > 0 && count > scrapers && polled[scrapers].revents != 0) {
        take_in(h);
    }
}

void http_serve(int fd, http_page_fn page, void *cookie)
{
    http *h = output_require(calloc(1, sizeof *h));
    *h = (http){.listener = fd, .page = page, .cookie = cookie};
    for (int i = 0; i < MOST; i++) {
        h->scrapers[i].fd = -1;
    }
    while (!interrupt_requested()) {
        turn(h);
    }
    dismiss_all(h);
    close(fd);
    free(h);
}
