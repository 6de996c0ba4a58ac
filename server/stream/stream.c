/* SPDX-License-Identifier: Apache-2.0 */
/* A server's data threads: which of them gets a connection, their common start and end. */
#include "stream/stream.h"
#include "error_set.h"
#include "stream/data_thread.h"

#include <stdlib.h>

struct stream {
    unsigned n;
    data_thread *threads[];
};

bool stream_adopt(fanin_server *s, const handover *h)
{
    const struct stream *t = s->stream;
    data_thread *least = t->threads[0];
    for (unsigned i = 1; i < t->n; i++)
        if (data_thread_load(t->threads[i]) < data_thread_load(least))
            least = t->threads[i];
    return data_thread_adopt(least, h);
}

void stream_wake(fanin_server *s)
{
    for (unsigned i = 0; i < s->stream->n; i++)
        data_thread_look(s->stream->threads[i]);
}

fanin_status stream_create(fanin_server *s, fanin_error *error)
{
    struct stream *t = calloc(1, sizeof *t + s->data_threads * sizeof *t->threads);
    if (!t)
        return error_set_memory(error);
    s->stream = t;
    fanin_status status = FANIN_OK;
    while (status == FANIN_OK && t->n < s->data_threads) {
        status = data_thread_start(s, &t->threads[t->n], error);
        t->n += status == FANIN_OK;
    }
    return status;
}

void stream_destroy(fanin_server *s)
{
    struct stream *t = s->stream;
    if (!t)
        return;
    for (unsigned i = 0; i < t->n; i++)
        data_thread_stop(t->threads[i]);
    for (unsigned i = 0; i < t->n; i++)
        data_thread_end(&t->threads[i]);
    free(t);
    s->stream = NULL;
}
