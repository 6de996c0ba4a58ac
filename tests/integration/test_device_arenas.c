/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A snapshot lies in one arena or the other, each with a region for every device of its rank. A
 * worker that knows a part of the catalog maps what it reads of both. Both ends are this process.
 */
#include "ends.h"
#include "fake_cuda.h"
#include "testing.h"

#define DEVICES 3
#define OF_DEVICE 1400 /* together more than are told as a whole */
#define TENSORS (DEVICES * OF_DEVICE)
#define WANTED 10
#define ELEMENTS 16
#define BYTES (ELEMENTS * sizeof(float))
#define STEPS 4

typedef struct model {
    char names[TENSORS][16];
    fanin_box boxes[TENSORS];
    fanin_tensor tensors[TENSORS];
} model;

static model m;

static float *memory[DEVICES]; /* the trainer's */

static void describe(void)
{
    for (size_t i = 0; i < TENSORS; i++) {
        size_t d = i / OF_DEVICE, at = i % OF_DEVICE;
        if (at == 0)
            memory[d] = fake_cuda_alloc((int)d, OF_DEVICE * BYTES, FAKE_CUDA_MALLOC);
        snprintf(m.names[i], sizeof m.names[i], "w%04zu", i);
        m.tensors[i] = make_tensor(m.names[i], FANIN_DTYPE_F32, ELEMENTS, 0,
                                   &m.boxes[i], memory[d] + at * ELEMENTS);
    }
}

/* A float that tells device and step. */
static float told(size_t device, uint64_t step)
{
    return (float)(100 * step + device);
}

static void commit(fanin_server *server, uint64_t step)
{
    fanin_commit_options options;
    fanin_commit_options_init(&options, sizeof options);
    options.flags = FANIN_COMMIT_SNAPSHOT;
    assert_works(fanin_server_begin_update(server, "full:0", ERROR));
    for (size_t d = 0; d < DEVICES; d++) {
        float *all = fake_cuda_alias(memory[d]);
        for (size_t i = 0; i < OF_DEVICE * ELEMENTS; i++)
            all[i] = told(d, step);
    }
    assert_works(fanin_server_commit(server, "full:0", step, &options, ERROR));
}

/* Some tensors of the device in the middle, in each of several steps. */
TEST(a_part_is_read_of_both_arenas)
{
    const size_t device = 1;
    static float into[WANTED][ELEMENTS];
    char address[32];
    const char *addresses[] = {address};
    const fanin_server_config ours = make_server_config();
    fanin_client_config config = make_client_config();
    describe();
    fanin_server *server = make_server(&ours, address, sizeof address);
    assert_works(fanin_server_put(server, "full:0", m.tensors, TENSORS, false, ERROR));
    config.path = FANIN_PATH_CUDA_IPC;
    fanin_client *client = NULL;
    fanin_tensor *wanted = &m.tensors[device * OF_DEVICE + 100];
    for (size_t i = 0; i < WANTED; i++)
        m.boxes[device * OF_DEVICE + 100 + i].address = into[i];
    for (uint64_t step = 1; step <= STEPS; step++) {
        commit(server, step);
        fanin_pull_options options = make_options(FANIN_STEP_EXACT, step);
        options.publication = "full:0";
        client = client ? client : connect_client(&config, addresses, 1);
        memset(into, 0, sizeof into);
        assert_works(fanin_client_pull(client, &options, wanted, WANTED, NULL, ERROR));
        for (size_t i = 0; i < WANTED * ELEMENTS; i++)
            assert_true(into[i / ELEMENTS][i % ELEMENTS] == told(device, step));
    }
    fanin_client_destroy(&client);
    fanin_server_destroy(&server, 0);
}

static int set_up(void **state)
{
    return setenv("FAKE_CUDA_DEVICES", "3", 1) || setenv("FAKE_CUDA_OWN_IPC", "1", 1);
}

TESTS_BETWEEN(set_up, NULL)
