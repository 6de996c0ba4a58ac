/* SPDX-License-Identifier: Apache-2.0 */
#include "server_device.h"
#include "testing.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int device_set_up(void **state)
{
    (void)state;
    const char *library = getenv("FANIN_TEST_CUDA_LIBRARY");
    if (library)
        setenv("FANIN_CUDA_LIBRARY", library, 1);
    return library ? 0 : -1;
}

/* --------------------------------------------------------------------- log */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
char device_log_text[1024];
static char log_event[64];
static unsigned log_hits; /* of log_event */

static void on_log(void *cookie, fanin_log_level level, const char *event,
                   const char *message)
{
    (void)cookie, (void)level;
    pthread_mutex_lock(&log_lock);
    if (strcmp(event, log_event) == 0) {
        log_hits++;
        snprintf(device_log_text, sizeof device_log_text, "%s", message);
    }
    pthread_mutex_unlock(&log_lock);
}

void device_listen(const char *event)
{
    pthread_mutex_lock(&log_lock);
    snprintf(log_event, sizeof log_event, "%s", event);
    log_hits = 0;
    device_log_text[0] = '\0';
    pthread_mutex_unlock(&log_lock);
}

unsigned device_heard(void)
{
    pthread_mutex_lock(&log_lock);
    unsigned hits = log_hits;
    pthread_mutex_unlock(&log_lock);
    return hits;
}

void assert_says(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("\"%s\" does not say \"%s\"", text, words);
}

/* ----------------------------------------------------------------- memory */

uint8_t device_byte(size_t i)
{
    return (uint8_t)(i * 31 + (i >> 8) * 17 + (i >> 16));
}

uint8_t *device_alloc(int device, size_t bytes, fake_cuda_kind kind)
{
    uint8_t *memory = fake_cuda_alloc(device, bytes, kind);
    uint8_t *alias = fake_cuda_alias(memory);
    for (size_t i = 0; i < bytes; i++)
        alias[i] = device_byte(i);
    return memory;
}

const uint8_t *device_bytes(const void *memory)
{
    return fake_cuda_alias(memory);
}

/* ------------------------------------------------------------------ server */

fanin_server *device_start(uint32_t lease_ms)
{
    fanin_server_config c = server_config();
    c.log = on_log;
    c.lease_ms = lease_ms;
    return server_start(&c);
}

void device_peers(served *l)
{
    l->control = peer_open_unix(l->server);
    l->data = peer_data_unix(l->server, &l->control);
    l->grant = peer_lease(&l->control);
}

served device_serve(const fanin_tensor *t, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    served l = {.server = device_start(1000)};
    assert_ok(fanin_server_put(l.server, RUN, t, count, false, &error), error);
    server_commit(l.server, 1);
    device_peers(&l);
    return l;
}

served device_serve_bytes(void *memory, size_t size)
{
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, memory, size);
    return device_serve(&t, 1);
}

void device_leave(served *l)
{
    peer_close(&l->data);
    peer_close(&l->control);
    fanin_server_destroy(&l->server, 0);
}

void device_assert_clean(void)
{
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_int_equal(counts.pinned, 0);
    assert_int_equal(counts.streams, 0);
    assert_int_equal(counts.mappings, 0);
}
