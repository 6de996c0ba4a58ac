/* SPDX-License-Identifier: Apache-2.0 */
#include "server_device.h"
#include "testing.h"

#define MOST_MEMORY 16

static void *allocated[MOST_MEMORY];

int device_tear_down(void **state)
{
    server_tear_down(state);
    for (size_t i = 0; i < MOST_MEMORY; i++)
        if (allocated[i])
            device_free(allocated[i]);
    return 0;
}

int device_tear_down_clean(void **state)
{
    fake_cuda_counts counts;
    device_tear_down(state);
    fake_cuda_count(&counts);
    assert_int_equal(counts.pinned, 0);
    assert_int_equal(counts.streams, 0);
    assert_int_equal(counts.mappings, 0);
    return 0;
}

uint8_t device_byte(size_t i)
{
    return (uint8_t)(i * 31 + (i >> 8) * 17 + (i >> 16));
}

uint8_t *device_alloc(int device, size_t bytes, fake_cuda_kind kind)
{
    uint8_t *memory = fake_cuda_alloc(device, bytes, kind);
    uint8_t *alias = fake_cuda_alias(memory);
    for (size_t i = 0; i < bytes; i++)
        alias[i] = device_byte(i);
    size_t i = 0;
    while (i < MOST_MEMORY && allocated[i])
        i++;
    assert_true(i < MOST_MEMORY);
    return allocated[i] = memory;
}

void device_free(void *memory)
{
    for (size_t i = 0; i < MOST_MEMORY; i++)
        if (allocated[i] == memory)
            allocated[i] = NULL;
    fake_cuda_free(memory);
}

const uint8_t *device_bytes(const void *memory)
{
    return fake_cuda_alias(memory);
}

puller device_serve(const fanin_tensor *t, size_t count)
{
    return puller_serve(puller_open_unix, t, count);
}

puller device_serve_bytes(void *memory, size_t size)
{
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, memory, size);
    return device_serve(&t, 1);
}
