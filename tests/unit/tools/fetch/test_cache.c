/* SPDX-License-Identifier: Apache-2.0 */
/* Steps kept while the trainer's tensors change between the catalog and the pull, and while the
   process is told to end. */
#include "fetch/cache.h"
#include "fetch/interrupt.h"
#include "testing.h"

#include <errno.h>
#include <fanin/server.h>
#include <fcntl.h>
#include <signal.h>

#define RUN "full:0"

static fanin_server *server;
static uint8_t memory[256];
static uint64_t rows; /* that the next pull finds; 0: those that there are */

static void publish(uint64_t n, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box box = {.extent = {n}, .address = memory};
    fanin_tensor tensor = {.struct_size = sizeof tensor,
                           .name = "t",
                           .dtype = FANIN_DTYPE_U8,
                           .n_dims = 1,
                           .shape = {n},
                           .boxes = &box,
                           .n_boxes = 1,
                           .memory = {FANIN_MEMORY_HOST, -1}};
    assert_int_equal(fanin_server_put(server, RUN, &tensor, 1, true, &error), FANIN_OK);
    memset(memory, (int)step, sizeof memory);
    assert_int_equal(fanin_server_commit(server, RUN, step, NULL, &error), FANIN_OK);
}

/* It is told which relay pulls when the catalog is there and the pull is still to come. */
void __real_interrupt_relay(fanin_relay *relay);
void __wrap_interrupt_relay(fanin_relay *relay);

void __wrap_interrupt_relay(fanin_relay *relay)
{
    __real_interrupt_relay(relay);
    if (relay != NULL && rows > 0) {
        publish(rows, 2);
        rows = 0;
    }
}

static int signals;

/* Found before that of libc: a signal comes while it waits for memory. */
int posix_fallocate(int file, off_t from, off_t size)
{
    if (signals++ > 0)
        return ftruncate(file, from + size) == 0 ? 0 : errno;
    raise(SIGTERM);
    return EINTR;
}

static void serve(session *s, char address[32])
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    config.world_size = 1;
    memset(config.world_id, 1, sizeof config.world_id);
    assert_int_equal(fanin_server_create(&config, &server, &error), FANIN_OK);
    snprintf(address, 32, "127.0.0.1:%u", fanin_server_port(server));
    s->target = (target){.addresses = calloc(1, sizeof(char *)), .count = 1};
    s->target.addresses[0] = strdup(address);
    snprintf(s->publication, sizeof s->publication, RUN);
    fanin_client_config_init(&s->config, sizeof s->config);
    assert_int_equal(fanin_client_create(&s->config, &s->client, &error), FANIN_OK);
    const char *all[] = {address};
    assert_int_equal(fanin_client_connect(s->client, all, 1, 5000, &error), FANIN_OK);
}

static cache begin(session *s, char address[32])
{
    size_t dropped;
    fanin_error error = FANIN_ERROR_INIT;
    serve(s, address);
    publish(100, 1);
    cache c = {.session = s, .n = 2, .copies = calloc(2, sizeof(cache_copy))};
    assert_int_equal(cache_follow_launch(&c, &dropped, &error), FANIN_OK);
    return c;
}

static void end(cache *c)
{
    session *s = c->session;
    cache_free(c);
    session_end(s);
    fanin_server_destroy(&server, 0);
}

/* @p n: how many rows the tensor has when its catalog has been read. */
static void keep_while_it_becomes(uint64_t n)
{
    char address[32];
    session s = {0};
    cache_step done;
    fanin_error error = FANIN_ERROR_INIT;
    cache c = begin(&s, address);
    rows = n;
    assert_int_equal(cache_pull(&c, 1, &done, &error), FANIN_ERR_STALE);
    assert_non_null(strstr(error.message, "changed its tensors"));
    assert_int_equal(cache_pull(&c, 1, &done, &error), FANIN_OK);
    assert_int_equal(done.step, 2);
    assert_int_equal(done.bytes, n);
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(c.copies[0].memory.bytes[i], 2);
    end(&c);
}

TEST(tensors_that_grow)
{
    keep_while_it_becomes(200);
}

TEST(tensors_that_shrink)
{
    keep_while_it_becomes(50);
}

/* Of many gigabytes that takes longer than a pod has to end. The last: it stays requested. */
TEST(a_signal_ends_the_wait_for_memory)
{
    char address[32];
    session s = {0};
    cache_step done;
    fanin_error error = FANIN_ERROR_INIT;
    cache c = begin(&s, address);
    c.directory = "/tmp";
    interrupt_install(s.client);
    assert_int_equal(cache_pull(&c, 1, &done, &error), FANIN_ERR_IO);
    assert_int_equal(signals, 1);
    assert_true(interrupt_requested());
    end(&c);
}
