/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/whole_tensor.h"
#include "fetch/failure.h"
#include "fetch/output.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

fanin_status whole_tensors_pull(fanin_client *client, const fanin_pull_options *options,
                                const whole_tensor *list, size_t count, uint8_t *memory,
                                fanin_result **result_out, fanin_error *error)
{
    fanin_tensor *tensors = output_require(calloc(count + 1, sizeof tensors[0]));
    fanin_box *boxes = output_require(calloc(count + 1, sizeof boxes[0]));
    for (size_t i = 0; i < count; i++) {
        const whole_tensor *t = &list[i];
        memcpy(boxes[i].extent, t->shape, sizeof t->shape);
        boxes[i].address = memory;
        tensors[i] = (fanin_tensor){.struct_size = sizeof tensors[i],
                                    .name = t->name,
                                    .dtype = t->dtype,
                                    .n_dims = t->n_dims,
                                    .boxes = &boxes[i],
                                    .n_boxes = t->bytes > 0,
                                    .memory = {FANIN_MEMORY_HOST, -1}};
        memcpy(tensors[i].shape, t->shape, sizeof t->shape);
        memory += t->bytes;
    }
    fanin_status status =
        fanin_client_pull(client, options, tensors, count, result_out, error);
    free(tensors);
    free(boxes);
    return status;
}

void whole_tensors_free(whole_tensor *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(list[i].name);
    }
    free(list);
}

uint8_t *whole_tensors_memory(uint64_t bytes, size_t *mapped_out, fanin_error *error)
{
    *mapped_out = bytes > 0 ? (size_t)bytes : 1;
    uint8_t *memory = mmap(NULL, *mapped_out, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        failure_set(error, FANIN_ERR_MEMORY, "free memory",
                    "no memory for %s of tensors", output_bytes(bytes).s);
        return NULL;
    }
    return memory;
}
