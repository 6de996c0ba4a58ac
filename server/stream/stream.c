/* SPDX-License-Identifier: Apache-2.0 */
/* A server's data threads: which of them gets a connection, their common start and end. */
#include "stream/stream.h"
#include "error_set.h"
#include "stream/data_thread.h"

#include <stdatomic.h>
#include <stdlib.h>

#define CPUS_A_THREAD 4
#define AUTOMATIC_MOST 4

struct stream {
    atomic_uint n; /* the control thread adds to it, any thread looks */
    data_thread *threads[];
};

unsigned stream_threads_for(unsigned cpus, uint64_t max_memory)
{
    uint64_t n = cpus / CPUS_A_THREAD, room = max_memory / DATA_THREAD_MEMORY;
    n = n < room ? n : room;
    n = n < AUTOMATIC_MOST ? n : AUTOMATIC_MOST;
    return n > 0 ? (unsigned)n : 1;
}

static fanin_status add(fanin_server *s, fanin_error *error)
{
    struct stream *t = s->stream;
    unsigned n = t->n;
    fanin_status status = data_thread_start(s, &t->threads[n], error);
    if (status == FANIN_OK)
        t->n = n + 1; /* from here on others may look at it */
    return status;
}

bool stream_adopt(fanin_server *s, const handover *h)
{
    const struct stream *t = s->stream;
    data_thread *least = t->threads[0];
    for (unsigned i = 1; i < t->n; i++)
        if (data_thread_load(t->threads[i]) < data_thread_load(least))
            least = t->threads[i];
    if (data_thread_load(least) > 0 && t->n < s->data_threads &&
        add(s, NULL) == FANIN_OK)
        least = t->threads[t->n - 1];
    return data_thread_adopt(least, h);
}

void stream_wake(fanin_server *s)
{
    for (unsigned i = 0; i < s->stream->n; i++)
        data_thread_look(s->stream->threads[i]);
}

uint64_t stream_cpu_ns(const fanin_server *s)
{
    uint64_t all = 0;
    for (unsigned i = 0; i < s->stream->n; i++)
        all += data_thread_cpu_ns(s->stream->threads[i]);
    return all;
}

fanin_status stream_create(fanin_server *s, fanin_error *error)
{
    s->stream = calloc(1, sizeof *s->stream + s->data_threads * sizeof(data_thread *));
    return s->stream ? add(s, error) : error_set_memory(error);
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
