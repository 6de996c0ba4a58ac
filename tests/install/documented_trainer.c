/* SPDX-License-Identifier: Apache-2.0 */
/* What the documented trainer needs to be a program of two ranks: shards, and an optimizer that
   takes a step a line. usage: readme_trainer RANK BASE-PORT */
#include <fanin/types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 2, R = 8, IN = 64, STEPS = 2 };

int train(uint32_t rank, uint32_t world_size, uint16_t base_port,
          const uint8_t world_id[16], const fanin_tensor *shards, size_t n_shards,
          const fanin_pair *about, size_t n_about, uint64_t steps);
void forward_backward(void);
void optimizer_step(void);

static uint16_t a_rows[R / WORLD][IN], b_columns[IN][R / WORLD];
static int taken;

void forward_backward(void)
{
    printf("%d\n", taken);
    fflush(stdout);
    if (getchar() == EOF)
        exit(2);
}

void optimizer_step(void)
{
    taken++;
    memset(a_rows, taken, sizeof a_rows);
    memset(b_columns, taken, sizeof b_columns);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const uint8_t world_id[16] = {1};
    const uint32_t rank = (uint32_t)atoi(argv[1]);
    const uint64_t first = rank * (R / WORLD);
    fanin_box boxes[] = {
        {.offset = {first, 0}, .extent = {R / WORLD, IN}, .address = a_rows},
        {.offset = {0, first}, .extent = {IN, R / WORLD}, .address = b_columns},
    };
    const fanin_tensor shards[] = {
        {.struct_size = sizeof(fanin_tensor),
         .dtype = FANIN_DTYPE_BF16,
         .name = "base_model.model.q_proj.lora_A.weight",
         .n_dims = 2,
         .shape = {R, IN},
         .boxes = &boxes[0],
         .n_boxes = 1},
        {.struct_size = sizeof(fanin_tensor),
         .dtype = FANIN_DTYPE_BF16,
         .name = "base_model.model.q_proj.lora_B.weight",
         .n_dims = 2,
         .shape = {IN, R},
         .boxes = &boxes[1],
         .n_boxes = 1},
    };
    const fanin_pair about[] = {{"base_model_name_or_path", "base"},
                                {"lora_alpha", "16"}};
    return train(rank, WORLD, (uint16_t)atoi(argv[2]), world_id, shards, 2, about, 2,
                 STEPS);
}
