/* SPDX-License-Identifier: Apache-2.0 */
/* An inference worker that pulls the matrix of trainer.c. usage: worker ADDRESS ADDRESS */
#include <fanin/client.h>
#include <stdio.h>

enum { R = 8, IN = 64 };
static uint16_t lora_a[R][IN];

int main(int argc, char **argv)
{
    fanin_error e = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    fanin_client *client = NULL;
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    options.timeout_ms = 10000;
    fanin_box whole = {.extent = {R, IN}, .address = lora_a};
    fanin_tensor wanted = {.struct_size = sizeof wanted,
                           .dtype = FANIN_DTYPE_BF16,
                           .name = "base_model.model.q_proj.lora_A.weight",
                           .n_dims = 2,
                           .shape = {R, IN},
                           .boxes = &whole,
                           .n_boxes = 1};
    const char *const *ranks = (const char *const *)argv + 1;
    fanin_result *result = NULL;
    fanin_status status = fanin_client_create(&config, &client, &e);
    if (status == FANIN_OK)
        status = fanin_client_connect(client, ranks, (size_t)argc - 1, 5000, &e);
    if (status == FANIN_OK)
        status = fanin_client_pull(client, &options, &wanted, 1, &result, &e);
    if (status == FANIN_OK) {
        fanin_result_info info = {.struct_size = sizeof info};
        fanin_result_get(result, &info);
        printf("step %llu by %s, first element %#x, last %#x\n",
               (unsigned long long)info.step, fanin_path_name(info.path), lora_a[0][0],
               lora_a[R - 1][IN - 1]);
    } else {
        fprintf(stderr, "%s\n  %s\n", e.message, e.remedy);
    }
    fanin_result_free(&result);
    fanin_client_destroy(&client);
    return status != FANIN_OK;
}
