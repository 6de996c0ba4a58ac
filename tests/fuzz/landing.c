/* SPDX-License-Identifier: Apache-2.0 */
#include "landing.h"

#include "ends.h"
#include "fuzz.h"
#include "on_device.h"
#include <string.h>

#define UNTOUCHED 0xcc

static landed *on_device(void)
{
    static landed *room;
    if (!room)
        room = device_room(DEVICE_OF_READERS, sizeof *room);
    return room;
}

void landing_prepare(landing *to)
{
    landed *lie = to->on_device ? on_device() : &to->here;
    to->step = 0;
    memset(&to->here, UNTOUCHED, sizeof to->here);
    if (to->on_device)
        device_copy(DEVICE_OF_READERS, lie, &to->here, sizeof *lie);
    to->tensors[0] =
        make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &to->boxes[0], lie->bytes);
    to->tensors[1] = make_tensor("matrix", FANIN_DTYPE_F32, ROWS, COLUMNS,
                                 &to->boxes[1], lie->matrix);
    to->boxes[1].stride[0] = sizeof lie->matrix[0];
    to->boxes[1].stride[1] = sizeof(float);
}

void landing_end(landing *to, fanin_result *result)
{
    uint8_t untouched[sizeof to->here.matrix[0] - COLUMNS * sizeof(float)];
    fanin_result_info info = {.struct_size = sizeof info};
    memset(untouched, UNTOUCHED, sizeof untouched);
    if (to->on_device)
        device_copy(DEVICE_OF_READERS, &to->here, on_device(), sizeof to->here);
    for (int row = 0; row < ROWS; row++)
        check(memcmp(&to->here.matrix[row][COLUMNS], untouched, sizeof untouched) == 0);
    fanin_result_get(result, &info);
    to->step = info.step;
    fanin_result_free(&result);
}

void landing_check(const landing *to)
{
    for (unsigned i = 0; i < BYTES; i++)
        check(to->here.bytes[i] == ranks_byte(to->step, i));
    for (unsigned i = 0; i < ROWS * COLUMNS; i++)
        check(to->here.matrix[i / COLUMNS][i % COLUMNS] ==
              ranks_element(to->step, i / COLUMNS, i % COLUMNS));
}
