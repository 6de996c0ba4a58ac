/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of every kind that a trainer or a worker may bring, on a real GPU: cudaMalloc's, the
 * virtual-memory API's as PyTorch's expandable_segments use it, a stream-ordered pool's, managed
 * and pinned. One process publishes a tensor in each, this one pulls them into memory of several
 * kinds. Prints TAP; exit status 77 without a GPU.
 */
#include "fetch/pattern.h"
#include "two_ends.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ROWS = 1200,
    COLUMNS = 2560, /* bytes: 3 MB, so that it lies across two mapped parts of 2 MiB */
    BYTES = ROWS * COLUMNS,
    TIMEOUT_MS = 30000,
};

typedef enum kind { MALLOC, VIRTUAL, POOL, MANAGED, PINNED, KINDS } kind;
static const char *const names[KINDS] = {"malloc", "virtual", "pool", "managed",
                                         "pinned"};

/* ---------------------------------------------------------------- memory of each kind */

#define FIND(name)                                                                     \
    __typeof__(&name) p_##name = (__typeof__(&name))(uintptr_t)driver_symbol(#name)

static void *map_virtual(int device)
{
    FIND(cuMemAddressReserve);
    FIND(cuMemCreate);
    FIND(cuMemMap);
    FIND(cuMemSetAccess);
    const size_t part = (size_t)2 << 20;
    const size_t parts = (BYTES + part - 1) / part;
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUmemAccessDesc access = {.location = properties.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr base;
    if (p_cuMemAddressReserve == NULL || p_cuMemCreate == NULL || p_cuMemMap == NULL ||
        p_cuMemSetAccess == NULL ||
        p_cuMemAddressReserve(&base, parts * part, 0, 0, 0) != CUDA_SUCCESS)
        return NULL;
    for (size_t i = 0; i < parts; i++) {
        CUmemGenericAllocationHandle handle;
        if (p_cuMemCreate(&handle, part, &properties, 0) != CUDA_SUCCESS ||
            p_cuMemMap(base + i * part, part, 0, handle, 0) != CUDA_SUCCESS)
            return NULL;
    }
    return p_cuMemSetAccess(base, parts * part, &access, 1) == CUDA_SUCCESS
               ? (void *)(uintptr_t)base
               : NULL;
}

/* Never given back: the process ends soon. NULL: the driver has none of that kind. */
static void *allocate(int device, kind k, gpu_stream *stream)
{
    fanin_error error = FANIN_ERROR_INIT;
    void *memory = NULL;
    CUdeviceptr pointer = 0;
    if (k == MALLOC)
        return gpu_alloc(cuda, device, BYTES, &memory, &error) == FANIN_OK ? memory
                                                                           : NULL;
    if (k == PINNED)
        return gpu_host_alloc(cuda, BYTES, &memory, &error) == FANIN_OK ? memory : NULL;
    if (k == VIRTUAL)
        return map_virtual(device);
    FIND(cuMemAllocAsync);
    FIND(cuMemAllocManaged);
    CUresult r = CUDA_ERROR_NOT_SUPPORTED;
    if (k == POOL && p_cuMemAllocAsync != NULL)
        r = p_cuMemAllocAsync(&pointer, BYTES, gpu_stream_handle(stream));
    else if (k == MANAGED && p_cuMemAllocManaged != NULL)
        r = p_cuMemAllocManaged(&pointer, BYTES, CU_MEM_ATTACH_GLOBAL);
    return r == CUDA_SUCCESS ? (void *)(uintptr_t)pointer : NULL;
}

/* ------------------------------------------------------------------------- the server */

static fanin_tensor tensor_of(void *memory, fanin_box *box)
{
    fanin_tensor t = {.struct_size = sizeof t,
                      .name = "w",
                      .dtype = FANIN_DTYPE_U8,
                      .n_dims = 2,
                      .shape = {ROWS, COLUMNS},
                      .boxes = box,
                      .n_boxes = 1,
                      .memory = {FANIN_MEMORY_DETECT, -1}};
    *box = (fanin_box){.extent = {ROWS, COLUMNS}, .address = memory};
    return t;
}

static void fill(uint8_t *out, kind k)
{
    pattern_fill(out, pattern_start(pattern_seed(names[k]), 1), 0, BYTES);
}

static void say(void *cookie, fanin_log_level level, const char *event,
                const char *message)
{
    (void)cookie;
    if (level <= FANIN_LOG_WARNING)
        fprintf(stderr, "# %s: %s\n", event, message);
}

/* Whether the driver has functions for that kind. */
static bool known(kind k)
{
    return k == VIRTUAL   ? driver_symbol("cuMemCreate") != NULL
           : k == POOL    ? driver_symbol("cuMemAllocAsync") != NULL
           : k == MANAGED ? driver_symbol("cuMemAllocManaged") != NULL
                          : true;
}

static bool publish(fanin_server *server, gpu_stream *stream, kind k,
                    fanin_error *error)
{
    char name[32];
    static uint8_t bytes[BYTES];
    fanin_box box;
    void *memory = allocate(0, k, stream);
    if (memory == NULL)
        return false;
    fill(bytes, k);
    snprintf(name, sizeof name, "lora:%s", names[k]);
    fanin_tensor t = tensor_of(memory, &box);
    if (!copy(0, stream, memory, bytes, BYTES, error))
        return false;
    /* What contradicts the pointer is refused. */
    fanin_tensor wrong = t;
    wrong.memory = k == PINNED ? (fanin_memory){FANIN_MEMORY_CUDA, 0}
                               : (fanin_memory){FANIN_MEMORY_CUDA, 7};
    if (fanin_server_put(server, name, &wrong, 1, false, error) == FANIN_OK) {
        fprintf(stderr, "# %s: memory that is elsewhere was taken\n", name);
        return false;
    }
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.stream = (fanin_stream){gpu_stream_handle(stream), 0};
    options.flags = FANIN_COMMIT_WAIT;
    return fanin_server_put(server, name, &t, 1, false, error) == FANIN_OK &&
           fanin_server_commit(server, name, 1, &options, error) == FANIN_OK;
}

/* What the server's process says first. */
typedef struct greeting {
    uint16_t port;
    uint8_t there[KINDS]; /* whether a kind is published */
} greeting;

/* Lives until @p in ends. */
static int serve(int in, int out)
{
    gpu_stream *stream;
    greeting g;
    int status;
    char end;
    fanin_server *server = publisher_server(say, &stream, &status);
    if (!server)
        return status;
    for (kind k = 0; k < KINDS; k++) {
        fanin_error error = FANIN_ERROR_INIT;
        g.there[k] = publish(server, stream, k, &error);
        if (!g.there[k] && known(k))
            fprintf(stderr, "# %s: %s\n", names[k], error.message);
    }
    g.port = fanin_server_port(server);
    if (write(out, &g, sizeof g) != sizeof g)
        return 1;
    while (read(in, &end, 1) > 0) {
    }
    fanin_server_destroy(&server, 1000);
    return 0;
}

/* ------------------------------------------------------------------------- the worker */

/* Pulls all of it, then the inner columns into every second place of other memory. */
static void pull(fanin_client *client, kind from, kind to, int device, void *memory,
                 gpu_stream *stream)
{
    static uint8_t got[BYTES], wanted[BYTES];
    char publication[32], what[96], detail[600] = "";
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options;
    fanin_result *pulled = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_box box;
    snprintf(publication, sizeof(publication), "lora:%s", names[from]);
    snprintf(what, sizeof what, "%s memory into %s memory of device %d", names[from],
             names[to], device);
    fanin_pull_options_init(&options, sizeof options);
    options.publication = publication;
    options.timeout_ms = TIMEOUT_MS;
    fanin_tensor t = tensor_of(memory, &box);
    memset(got, 0xee, BYTES);
    bool good =
        copy(device, stream, memory, got, BYTES, &error) &&
        fanin_client_pull(client, &options, &t, 1, &pulled, &error) == FANIN_OK &&
        copy(device, stream, got, memory, BYTES, &error);
    if (good) {
        fanin_result_get(pulled, &info);
        fill(wanted, from);
        bool direct = info.path == FANIN_PATH_CUDA_IPC;
        good = memcmp(got, wanted, BYTES) == 0 && direct == (from == MALLOC);
        snprintf(detail, sizeof detail, "%s, %.500s", fanin_path_name(info.path),
                 info.path_reason);
    } else {
        snprintf(detail, sizeof detail, "%s", error.message);
    }
    fanin_result_free(&pulled);
    /* A part: 7 columns less on either side, to places that are not neighbours. */
    box.offset[1] = 7;
    box.extent[1] = COLUMNS / 2 - 14;
    box.stride[0] = COLUMNS;
    box.stride[1] = 2;
    if (good) {
        memset(got, 0xee, BYTES);
        good = copy(device, stream, memory, got, BYTES, &error) &&
               fanin_client_pull(client, &options, &t, 1, NULL, &error) == FANIN_OK &&
               copy(device, stream, got, memory, BYTES, &error);
        for (uint64_t i = 0; good && i < BYTES; i++) {
            uint64_t column = i % COLUMNS;
            bool inside = column % 2 == 0 && column / 2 < box.extent[1];
            good = got[i] == (inside ? wanted[i - column + 7 + column / 2] : 0xee);
        }
        if (!good)
            snprintf(detail, sizeof detail, "a part of it: %.500s", error.message);
    }
    result(good, what, detail);
}

static void work(const char *address, const uint8_t there[KINDS])
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client *client = NULL;
    fanin_client_config_init(&config, sizeof config);
    if (fanin_client_create(&config, &client, &error) != FANIN_OK ||
        fanin_client_connect(client, &address, 1, TIMEOUT_MS, &error) != FANIN_OK) {
        result(false, "connect", error.message);
        return;
    }
    for (int device = 0; device < gpu_count(cuda) && device < 2; device++) {
        gpu_stream *stream = NULL;
        if (device_open(device, &stream, &error) != FANIN_OK) {
            result(false, "device", error.message);
            break;
        }
        for (kind to = 0; to < KINDS; to++) {
            void *memory = allocate(device, to, stream);
            for (kind from = 0; memory != NULL && from < KINDS; from++) {
                if (there[from])
                    pull(client, from, to, device, memory, stream);
            }
        }
    }
    fanin_client_destroy(&client);
}

int main(void)
{
    publisher p;
    greeting g;
    char address[32];
    fanin_error error = FANIN_ERROR_INIT;
    int status = publisher_start(&p, serve, &g, sizeof g);
    if (status != 0)
        return status;
    if (device_open(0, NULL, &error) != FANIN_OK)
        return 1;
    for (kind k = 0; k < KINDS; k++) {
        if (known(k))
            result(g.there[k], "published", names[k]);
    }
    snprintf(address, sizeof address, "127.0.0.1:%u", g.port);
    work(address, g.there);
    return publisher_end(&p);
}
