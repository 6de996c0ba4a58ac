/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer rank that publishes one LoRA matrix and rewrites it in place. usage: trainer RANK */
#include <fanin/server.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 2, R = 8, IN = 64 };
static uint16_t rows[R / WORLD][IN]; /* this rank's rows of lora_A [R, IN], bf16 */

static int check(fanin_status status, const fanin_error *e)
{
    if (status != FANIN_OK)
        fprintf(stderr, "%s\n  %s\n", e->message, e->remedy);
    return status != FANIN_OK;
}

int main(int argc, char **argv)
{
    fanin_error e = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    config.rank = argc > 1 ? (uint32_t)atoi(argv[1]) : 0;
    config.world_size = WORLD;
    memset(config.world_id, 1, 16); /* in earnest: random, broadcast from rank 0 */
    fanin_server *server = NULL;
    if (check(fanin_server_create(&config, &server, &e), &e))
        return 1;
    fanin_box box = {.extent = {R / WORLD, IN}, .address = rows};
    box.offset[0] = config.rank * (R / WORLD);
    fanin_tensor shard = {.struct_size = sizeof(shard),
                          .dtype = FANIN_DTYPE_BF16,
                          .name = "base_model.model.q_proj.lora_A.weight",
                          .n_dims = 2,
                          .shape = {R, IN},
                          .boxes = &box,
                          .n_boxes = 1};
    int failed = check(fanin_server_put(server, "lora:0", &shard, 1, false, &e), &e);
    printf("%u\n", (unsigned)fanin_server_port(server));
    fflush(stdout);
    for (uint64_t step = 1; !failed && getchar() != EOF; step++) { /* a line: a step */
        failed = check(fanin_server_begin_update(server, "lora:0", &e), &e);
        memset(rows, (int)step, sizeof rows); /* optimizer.step() */
        if (!failed)
            failed = check(fanin_server_commit(server, "lora:0", step, NULL, &e), &e);
    }
    fanin_server_destroy(&server, 1000);
    return failed;
}
