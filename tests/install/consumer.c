/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest use of both halves: a rank publishes a copy of four bytes, a client reads
   it. */
#include <fanin/fanin.h>
#include <stdio.h>
#include <string.h>

static int fail(const char *what, const fanin_error *error)
{
    fprintf(stderr, "%s: %s: %s\n", what, error->message, error->remedy);
    return 1;
}

static int publish(fanin_server *server, uint8_t *bytes, size_t size,
                   fanin_error *error)
{
    fanin_box box = {.extent = {size}, .address = bytes};
    fanin_tensor tensor = {
        .struct_size = sizeof tensor,
        .name = "weight",
        .dtype = FANIN_DTYPE_U8,
        .n_dims = 1,
        .shape = {size},
        .boxes = &box,
        .n_boxes = 1,
        .memory = {FANIN_MEMORY_HOST, -1},
    };
    fanin_commit_options how;
    fanin_commit_options_init(&how, sizeof how);
    how.flags = FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT;
    if (fanin_server_begin_update(server, "lora:0", error) ||
        fanin_server_put(server, "lora:0", &tensor, 1, false, error) ||
        fanin_server_commit(server, "lora:0", 1, &how, error))
        return fail("publish", error);
    return 0;
}

static int pull(fanin_client *client, uint16_t port, uint8_t *bytes, size_t size,
                fanin_error *error)
{
    char address[32];
    snprintf(address, sizeof(address), "127.0.0.1:%u", (unsigned)port);
    const char *addresses[] = {address};
    fanin_box box = {.extent = {size}, .address = bytes};
    fanin_tensor tensor = {
        .struct_size = sizeof tensor,
        .name = "weight",
        .dtype = FANIN_DTYPE_U8,
        .n_dims = 1,
        .shape = {size},
        .boxes = &box,
        .n_boxes = 1,
        .memory = {FANIN_MEMORY_HOST, -1},
    };
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    fanin_result *result = NULL;
    if (fanin_client_connect(client, addresses, 1, 5000, error) ||
        fanin_client_pull(client, &options, &tensor, 1, &result, error))
        return fail("pull", error);
    fanin_result_free(&result);
    return 0;
}

int main(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint8_t published[4] = {1, 2, 3, 4}, received[4] = {0};

    fanin_server_config server_config;
    fanin_server_config_init(&server_config, sizeof server_config);
    memset(server_config.world_id, 7, sizeof server_config.world_id);
    server_config.world_size = 1;
    fanin_client_config client_config;
    fanin_client_config_init(&client_config, sizeof client_config);

    fanin_server *server = NULL;
    fanin_client *client = NULL;
    int status = 1;
    if (fanin_server_create(&server_config, &server, &error) ||
        fanin_client_create(&client_config, &client, &error))
        fail("create", &error);
    else if (publish(server, published, sizeof(published), &error) == 0)
        status =
            pull(client, fanin_server_port(server), received, sizeof received, &error);
    fanin_client_destroy(&client);
    fanin_server_destroy(&server, 0);
    if (status == 0 && memcmp(published, received, sizeof(published)) != 0) {
        fprintf(stderr, "other bytes arrived\n");
        status = 1;
    }
    if (status == 0)
        printf("%s\n", fanin_version());
    return status;
}
