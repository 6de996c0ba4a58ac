/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls that compare with the rank's digests, on a real GPU, between two processes: what the kernel
 * digests is what libxxhash digests of the same bytes (one end on a device, the other on the host),
 * and bytes that differ are named. Prints TAP; exit status 77 without a GPU.
 */
#include "messages.h"
#include "ends.h"
#include "fetch/pattern.h"
#include "rank_proxy.h"
#include "two_ends.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ROWS = 1003,
    COLUMNS = 1501,
    PITCH = 4 * (COLUMNS + 3), /* rows with gaps */
    BYTES = 5000003,           /* more than a request, and no whole pieces */
    ROOM = ROWS * PITCH + BYTES + 4096,
    ALTERED = 500 * PITCH + 4 * 700, /* in the middle of F32 */
    TIMEOUT_MS = 30000,
};
#define HOST DEVICE_HOST

static const char *place(int device)
{
    static const char *const names[] = {"the host", "device 0", "device 1"};
    return names[device + 1];
}

/* ------------------------------------------------------------------------- tensors */

/* Two tensors in one stretch of memory: F32 with gaps, then bytes from an odd address on. */
typedef struct pair {
    fanin_tensor tensors[2];
    fanin_box boxes[2];
} pair;

static void lay_out(pair *p, uint8_t *memory, fanin_dtype dtype)
{
    int64_t item = dtype == FANIN_DTYPE_F32 ? 4 : 2;
    p->tensors[0] = make_tensor("floats", dtype, ROWS, COLUMNS, &p->boxes[0], memory);
    p->boxes[0].stride[0] = PITCH;
    p->boxes[0].stride[1] = item;
    p->tensors[1] = make_tensor("bytes", FANIN_DTYPE_U8, BYTES, 0, &p->boxes[1],
                                memory + ROWS * PITCH + 1);
}

/* Once a process and place; of a device it is never given back: the process ends soon. */
static uint8_t *allocate(int device, fanin_error *error)
{
    static uint8_t here[ROOM];
    void *memory = NULL;
    if (device == HOST)
        return here;
    return gpu_alloc(cuda, device, ROOM, &memory, error) == FANIN_OK ? memory : NULL;
}

/* ------------------------------------------------------------------------- the rank */

static bool slow; /* it said that a CPU digests its memory */

static void say(void *cookie, fanin_log_level level, const char *event,
                const char *message)
{
    (void)cookie;
    slow = slow || strcmp(event, "slow-digests") == 0;
    if (level <= FANIN_LOG_WARNING)
        fprintf(stderr, "# %s: %s\n", event, message);
}

/* "lora:device" and "lora:host". */
static bool publish(fanin_server *server, const char *name, int device,
                    gpu_stream *stream, uint8_t **memory_out, fanin_error *error)
{
    static uint8_t bytes[ROOM];
    pair p;
    uint8_t *memory = allocate(device, error);
    if (!memory)
        return false;
    pattern_fill(bytes, pattern_start(pattern_seed(name), 1), 0, sizeof bytes);
    lay_out(&p, memory, FANIN_DTYPE_F32);
    *memory_out = memory;
    return copy(device, stream, memory, bytes, sizeof bytes, error) &&
           fanin_server_put(server, name, p.tensors, 2, false, error) == FANIN_OK &&
           fanin_server_commit(server, name, 1, NULL, error) == FANIN_OK;
}

enum { ANEW = 2 }; /* and 0 or 1: which publication is committed anew */

static bool commit_anew(fanin_server *server, bool host, uint64_t step,
                        fanin_error *error)
{
    const char *name = host ? "lora:host" : "lora:device";
    return fanin_server_begin_update(server, name, error) == FANIN_OK &&
           fanin_server_commit(server, name, step, NULL, error) == FANIN_OK;
}

/* Writes the port, then a byte for each that it reads: what it is told to alter, it alters without
   saying so. */
static int serve(int in, int out)
{
    fanin_error error = FANIN_ERROR_INIT;
    gpu_stream *stream;
    int status;
    uint8_t *memory[2], byte, order;
    fanin_server *server = publisher_server(say, &stream, &status);
    if (!server)
        return status;
    if (!publish(server, "lora:device", 0, stream, &memory[0], &error) ||
        !publish(server, "lora:host", HOST, stream, &memory[1], &error) || slow) {
        fprintf(stderr, "# %s\n", slow ? "no digest kernel" : error.message);
        return 1;
    }
    uint16_t port = fanin_server_port(server);
    if (write(out, &port, sizeof port) != sizeof port)
        return 1;
    for (uint64_t step = 2; read(in, &order, 1) == 1; step++) {
        bool good;
        if (order >= ANEW) {
            good = commit_anew(server, order > ANEW, step, &error);
        } else {
            int device = order == 0 ? 0 : HOST;
            uint8_t *at = memory[order] + ALTERED;
            good = copy(device, stream, &byte, at, 1, &error);
            byte ^= 1;
            good = good && copy(device, stream, at, &byte, 1, &error);
        }
        if (!good || write(out, &order, 1) != 1)
            return 1;
    }
    fanin_server_destroy(&server, 1000);
    return 0;
}

/* ------------------------------------------------------------------------- the worker */

typedef struct rank {
    int down, up;
    uint16_t port;
    uint8_t order; /* which memory is altered: of the device, of the host */
} rank;

static void order(const rank *r, uint8_t what)
{
    uint8_t done;
    if (write(r->down, &what, 1) != 1 || read(r->up, &done, 1) != 1)
        abort();
}

static void alter(void *cookie)
{
    const rank *r = cookie;
    order(r, r->order);
}

static fanin_client *connect_to(const char *address, fanin_path path)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client *client = NULL;
    fanin_client_config_init(&config, sizeof config);
    config.path = path;
    if (fanin_client_create(&config, &client, &error) == FANIN_OK &&
        fanin_client_connect(client, &address, 1, TIMEOUT_MS, &error) == FANIN_OK)
        return client;
    result(false, "connect", error.message);
    fanin_client_destroy(&client);
    return NULL;
}

/* @p dtype other than F32: the floats alone, converted. */
static fanin_status pull(fanin_client *client, bool host, fanin_dtype dtype,
                         uint8_t *memory, fanin_result_info *info, fanin_error *error)
{
    fanin_pull_options options;
    fanin_result *pulled = NULL;
    pair p;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = host ? "lora:host" : "lora:device";
    options.timeout_ms = TIMEOUT_MS;
    options.verify = true;
    options.dtype = dtype == FANIN_DTYPE_F32 ? 0 : dtype;
    lay_out(&p, memory, dtype);
    fanin_status status = fanin_client_pull(
        client, &options, p.tensors, dtype == FANIN_DTYPE_F32 ? 2 : 1, &pulled, error);
    *info = (fanin_result_info){.struct_size = sizeof *info};
    fanin_result_get(pulled, info);
    fanin_result_free(&pulled);
    return status;
}

/* Of host and device memory, as each dtype. */
static void check_equal(const rank *r, fanin_path path, int device, uint8_t *memory)
{
    static const fanin_dtype dtypes[] = {FANIN_DTYPE_F32, FANIN_DTYPE_BF16,
                                         FANIN_DTYPE_F16};
    char address[32], what[96], detail[600];
    snprintf(address, sizeof(address), "127.0.0.1:%u", r->port);
    fanin_client *client = connect_to(address, path);
    for (int host = 0; client && host < 2; host++)
        for (int i = 0; i < 3; i++) {
            fanin_error error = FANIN_ERROR_INIT;
            fanin_result_info info;
            fanin_status status = pull(client, host, dtypes[i], memory, &info, &error);
            snprintf(what, sizeof what, "%s to %s, %s", place(host ? HOST : 0),
                     place(device), fanin_dtype_name(dtypes[i]));
            snprintf(detail, sizeof detail, "%s, read %.2f ms, verify %.2f ms %.400s",
                     fanin_path_name(info.path), (double)info.read_ns / 1e6,
                     (double)info.verify_ns / 1e6, error.message);
            result(status == FANIN_OK && info.verified, what, detail);
        }
    fanin_client_destroy(&client);
}

/* The rank writes when it is asked for digests. A new step has none that are kept. */
static void check_unequal(rank *r, fanin_path path, int device, uint8_t *memory)
{
    char what[96], detail[600];
    for (r->order = 0; r->order < 2; r->order++) {
        rank_proxy proxy;
        rank_proxy_start(&proxy, r->port, MSG_DIGEST, alter, r);
        fanin_client *client = connect_to(proxy.address, path);
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        order(r, ANEW + r->order);
        fanin_status status =
            client ? pull(client, r->order == 1, FANIN_DTYPE_F32, memory, &info, &error)
                   : FANIN_ERR_CLOSED;
        snprintf(what, sizeof what, "%s altered, to %s, %s",
                 place(r->order == 1 ? HOST : 0), place(device), fanin_path_name(path));
        snprintf(detail, sizeof detail, "%.500s", error.message);
        result(status == FANIN_ERR_TRANSPORT && error.rank == 0 &&
                   strcmp(error.key, "floats") == 0,
               what, detail);
        error = (fanin_error)FANIN_ERROR_INIT;
        order(r, ANEW + r->order);
        status =
            client ? pull(client, r->order == 1, FANIN_DTYPE_F32, memory, &info, &error)
                   : FANIN_ERR_CLOSED;
        result(status == FANIN_OK && info.verified, "and then equal", error.message);
        fanin_client_destroy(&client);
        rank_proxy_stop(&proxy);
    }
}

static void work(rank *r)
{
    static const fanin_path paths[] = {FANIN_PATH_AUTO, FANIN_PATH_STREAM};
    int devices = gpu_load(NULL, &cuda, NULL) == FANIN_OK ? gpu_count(cuda) : 0;
    for (int device = HOST; device < devices && device < 2; device++) {
        fanin_error error = FANIN_ERROR_INIT;
        bool good =
            device == HOST || gpu_prepare(cuda, device, GPU_DIGEST, &error) == FANIN_OK;
        uint8_t *memory = good ? allocate(device, &error) : NULL;
        if (!memory) {
            result(false, "a device with its kernel", error.message);
            return;
        }
        for (size_t i = 0; i < 2; i++) {
            check_equal(r, paths[i], device, memory);
            check_unequal(r, paths[i], device, memory);
        }
    }
}

int main(void)
{
    publisher p;
    rank r = {0};
    int status = publisher_start(&p, serve, &r.port, sizeof r.port);
    if (status != 0)
        return status;
    r.down = p.down;
    r.up = p.up;
    work(&r);
    return publisher_end(&p);
}
