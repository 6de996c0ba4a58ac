/* SPDX-License-Identifier: Apache-2.0 */
/* The session of docs/how-to/c-programs.md as a program: a trainer of one rank, two layers, one
   step. */
#include <fanin/fanin.h>
#include <stdio.h>
#include <string.h>

enum { LAYERS = 2, FLOATS = 1000, STEP = 7 };

fanin_status update(fanin_client *client, uint64_t step, const fanin_tensor *tensors,
                    const size_t *first, size_t n_layers, fanin_error *error);
void install_layer(size_t layer);

static float trained[LAYERS][FLOATS], pulled[LAYERS][FLOATS];
static int installed;

void install_layer(size_t layer)
{
    installed += memcmp(trained[layer], pulled[layer], sizeof trained[layer]) == 0;
}

static void describe(float (*memory)[FLOATS], fanin_box *boxes, fanin_tensor *tensors)
{
    static const char *const names[LAYERS] = {"layers.0.weight", "layers.1.weight"};
    for (size_t i = 0; i < LAYERS; i++) {
        boxes[i] = (fanin_box){.extent = {FLOATS}, .address = memory[i]};
        tensors[i] = (fanin_tensor){.struct_size = sizeof tensors[i],
                                    .name = names[i],
                                    .dtype = FANIN_DTYPE_F32,
                                    .n_dims = 1,
                                    .shape = {FLOATS},
                                    .boxes = &boxes[i],
                                    .n_boxes = 1};
    }
}

static fanin_status train(fanin_server **server, fanin_error *error)
{
    fanin_box boxes[LAYERS];
    fanin_tensor shards[LAYERS];
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, 5, sizeof config.world_id);
    for (size_t i = 0; i < LAYERS * FLOATS; i++)
        trained[i / FLOATS][i % FLOATS] = (float)i;
    describe(trained, boxes, shards);
    fanin_status status = fanin_server_create(&config, server, error);
    if (status == FANIN_OK)
        status = fanin_server_put(*server, "full:0", shards, LAYERS, false, error);
    if (status == FANIN_OK)
        status = fanin_server_commit(*server, "full:0", STEP, NULL, error);
    return status;
}

int main(void)
{
    static const size_t first[LAYERS + 1] = {0, 1, 2};
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *server = NULL;
    fanin_client *client = NULL;
    fanin_client_config config;
    fanin_box boxes[LAYERS];
    fanin_tensor tensors[LAYERS];
    char address[32];
    const char *addresses[] = {address};
    fanin_client_config_init(&config, sizeof config);
    describe(pulled, boxes, tensors);
    fanin_status status = train(&server, &error);
    snprintf(address, sizeof address, "127.0.0.1:%d", fanin_server_port(server));
    if (status == FANIN_OK)
        status = fanin_client_create(&config, &client, &error);
    if (status == FANIN_OK)
        status = fanin_client_connect(client, addresses, 1, 20000, &error);
    if (status == FANIN_OK)
        status = update(client, STEP, tensors, first, LAYERS, &error);
    if (status != FANIN_OK)
        fprintf(stderr, "%s\n", error.message);
    fanin_client_destroy(&client);
    fanin_server_destroy(&server, 1000);
    return status != FANIN_OK || installed != LAYERS;
}
