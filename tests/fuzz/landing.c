/* SPDX-License-Identifier: Apache-2.0 */
#include "landing.h"

#include "ends.h"
#include "fuzz.h"
#include <string.h>

#define UNTOUCHED 0xcc

void landing_prepare(landing *to)
{
    memset(to, UNTOUCHED, sizeof *to);
    to->tensors[0] =
        make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &to->boxes[0], to->bytes);
    to->tensors[1] = make_tensor("matrix", FANIN_DTYPE_F32, ROWS, COLUMNS,
                                 &to->boxes[1], to->matrix);
    to->boxes[1].stride[0] = sizeof to->matrix[0];
    to->boxes[1].stride[1] = sizeof(float);
}

void landing_end(landing *to, fanin_result *result)
{
    uint8_t untouched[sizeof to->matrix[0] - COLUMNS * sizeof(float)];
    fanin_result_info info = {.struct_size = sizeof info};
    memset(untouched, UNTOUCHED, sizeof untouched);
    for (int row = 0; row < ROWS; row++)
        check(memcmp(&to->matrix[row][COLUMNS], untouched, sizeof untouched) == 0);
    fanin_result_get(result, &info);
    to->step = info.step;
    fanin_result_free(&result);
}

void landing_check(const landing *to)
{
    for (unsigned i = 0; i < BYTES; i++)
        check(to->bytes[i] == ranks_byte(to->step, i));
    for (unsigned i = 0; i < ROWS * COLUMNS; i++)
        check(to->matrix[i / COLUMNS][i % COLUMNS] ==
              ranks_element(to->step, i / COLUMNS, i % COLUMNS));
}
