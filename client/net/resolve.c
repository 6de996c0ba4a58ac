/* SPDX-License-Identifier: Apache-2.0 */
#include "net/client_state.h"

#include "error_set.h"
#include "lookup.h"
#include <stdlib.h>
#include <string.h>

/* A name that is asked for. */
typedef struct question {
    loop_source source; /* first: the loop hands it back */
    lookup *lookup;
    loop *loop;
    size_t *left;
    char host[SOCKET_HOST];
} question;

/* An address whose name is not known yet. */
typedef struct unknown {
    question *question; /* NULL: it is known */
    uint16_t port;
} unknown;

static void on_answer(loop_source *source, uint32_t events)
{
    question *q = (question *)source;
    (void)events;
    loop_remove(q->loop, source);
    --*q->left;
}

static question *find(question *questions, size_t n, const char *host)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(questions[i].host, host) == 0)
            return &questions[i];
    return NULL;
}

static fanin_status ask(fanin_client *client, question *q, const char *host,
                        size_t *left, fanin_error *error)
{
    fanin_status status = lookup_start(host, &q->lookup, error);
    if (status != FANIN_OK)
        return status;
    memcpy(q->host, host, strlen(host) + 1);
    q->loop = &client->loop;
    q->left = left;
    q->source = (loop_source){
        .fd = lookup_fd(q->lookup), .events = EPOLLIN, .ready = on_answer};
    status = loop_add(&client->loop, &q->source, error);
    *left += status == FANIN_OK;
    return status;
}

/* What needs no lookup is final; the rest is asked for. */
static fanin_status begin(fanin_client *client, const char *const *addresses,
                          size_t count, socket_address *out, unknown *unknowns,
                          question *questions, size_t *n, size_t *left,
                          fanin_error *error)
{
    for (size_t i = 0; i < count; i++) {
        char host[SOCKET_HOST];
        fanin_status status = socket_resolve(addresses[i], &out[i], error);
        if (status == FANIN_OK)
            continue;
        if (status != FANIN_ERR_NOT_FOUND ||
            !socket_split(addresses[i], host, &unknowns[i].port))
            return status;
        question *q = find(questions, *n, host);
        unknowns[i].question = q ? q : &questions[(*n)++];
        if (!q)
            status = ask(client, unknowns[i].question, host, left, error);
        if (!q && status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

static fanin_status take_answers(const unknown *unknowns, size_t count,
                                 socket_address *out, fanin_error *error)
{
    for (size_t i = 0; i < count; i++) {
        if (!unknowns[i].question)
            continue;
        fanin_status status =
            lookup_result(unknowns[i].question->lookup, &out[i], error);
        if (status != FANIN_OK)
            return status;
        socket_set_port(&out[i], unknowns[i].port);
    }
    return FANIN_OK;
}

fanin_status resolve_all(fanin_client *client, const char *const *addresses,
                         size_t count, deadline at, socket_address *out,
                         fanin_error *error)
{
    size_t n = 0, left = 0;
    unknown *unknowns = calloc(count, sizeof *unknowns);
    question *questions = calloc(count, sizeof *questions);
    fanin_status status = unknowns && questions
                              ? begin(client, addresses, count, out, unknowns,
                                      questions, &n, &left, error)
                              : error_set_memory(error);
    if (status == FANIN_OK)
        status = client_run(client, &left, at, "connect", error);
    if (status == FANIN_OK || status == FANIN_ERR_TIMEOUT)
        status = take_answers(unknowns, count, out, error);
    for (size_t i = 0; i < n; i++) {
        if (questions[i].source.fd >= 0 && questions[i].lookup)
            loop_remove(&client->loop, &questions[i].source);
        lookup_drop(&questions[i].lookup);
    }
    free(unknowns);
    free(questions);
    return status;
}
