/* SPDX-License-Identifier: Apache-2.0 */
/* Several trainers of one user on one host and one port: a client gets the one it asked for. */
#include "ends.h"
#include "rank_proxy.h"
#include "testing.h"

#define PUBLICATION "lora:0"

typedef struct trainer {
    const char *bind; /* in numbers, as in an address */
    uint64_t value;   /* of its only tensor */
    fanin_server *server;
    char address[64];
} trainer;

static fanin_tensor tensor_at(fanin_box *box, void *memory)
{
    return make_tensor("number", FANIN_DTYPE_U64, 1, 0, box, memory);
}

/* False: this host does not have the address. */
static bool start(trainer *t, const char *bind, uint16_t port, uint64_t value)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config = make_server_config();
    *t = (trainer){.bind = bind, .value = value};
    memset(config.world_id, (int)value, sizeof config.world_id);
    config.bind = bind;
    config.base_port = port;
    if (fanin_server_create(&config, &t->server, &error) != FANIN_OK) {
        assert_int_equal(error.status, FANIN_ERR_ARGUMENT);
        return false;
    }
    snprintf(t->address, sizeof t->address, strchr(bind, ':') ? "[%s]:%u" : "%s:%u",
             bind, (unsigned)fanin_server_port(t->server));
    return true;
}

static void publish(trainer *t)
{
    fanin_box box;
    fanin_tensor tensor = tensor_at(&box, &t->value);
    assert_works(fanin_server_put(t->server, PUBLICATION, &tensor, 1, false, ERROR));
    assert_works(fanin_server_commit(t->server, PUBLICATION, 1, NULL, ERROR));
}

static uint64_t pull(const char *address, bool no_unix)
{
    fanin_client_config config = make_client_config();
    config.no_unix = no_unix;
    fanin_client *client = connect_client(&config, &address, 1);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    uint64_t landed = 0;
    fanin_box box;
    fanin_tensor tensor = tensor_at(&box, &landed);
    assert_works(fanin_client_pull(client, &options, &tensor, 1, NULL, ERROR));
    fanin_client_destroy(&client);
    return landed;
}

TEST(each_address_has_its_trainer)
{
    static const char *const binds[] = {"127.0.0.1", "127.0.0.2", "127.1.2.3", "::1"};
    trainer all[4];
    size_t n = 0;
    uint16_t port = 0;
    for (size_t i = 0; i < 4; i++) {
        if (!start(&all[n], binds[i], port, i + 1))
            continue;
        publish(&all[n]);
        port = fanin_server_port(all[n++].server);
    }
    assert_true(n >= 3);
    for (size_t i = 0; i < 2 * n; i++)
        assert_int_equal(pull(all[i % n].address, i >= n), all[i % n].value);
    char localhost[32];
    snprintf(localhost, sizeof localhost, "localhost:%u", (unsigned)port);
    assert_int_equal(pull(localhost, false), all[0].value);
    /* One of them ends, another one is not taken for it. */
    fanin_server_destroy(&all[1].server, 0);
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = make_client(NULL);
    const char *gone = all[1].address;
    assert_int_equal(fanin_client_connect(client, &gone, 1, 2000, &error),
                     FANIN_ERR_UNREACHABLE);
    fanin_client_destroy(&client);
    for (size_t i = 0; i < n; i++)
        fanin_server_destroy(&all[i].server, 0);
}

static void nothing(void *cookie)
{
}

/* Whoever has taken the Unix name of an address says another one: TCP it is. */
TEST(a_foreign_unix_socket_is_left)
{
    trainer t;
    assert_true(start(&t, "127.0.0.1", 0, 42));
    publish(&t);
    for (int keeps = 0; keeps < 2; keeps++) {
        rank_proxy proxy;
        rank_proxy_start(&proxy, fanin_server_port(t.server), MSG_WATCH, nothing, NULL);
        atomic_store(&proxy.keeps_address, keeps != 0);
        assert_int_equal(pull(proxy.address, false), 42);
        /* control and data */
        assert_int_equal(atomic_load(&proxy.accepted[0]), keeps ? 2 : 0);
        assert_int_equal(atomic_load(&proxy.accepted[1]), keeps ? 1 : 2);
        rank_proxy_stop(&proxy);
    }
    fanin_server_destroy(&t.server, 0);
}
