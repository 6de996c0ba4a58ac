/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A snapshot lies in one arena or the other, each with a region for every device of its rank. A
 * worker that knows a part of the catalog maps what it reads of both. The trainer is a process,
 * forked before the driver is used.
 */
#include "ends.h"
#include "fake_cuda.h"
#include "testing.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

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

static void describe(void)
{
    for (size_t i = 0; i < TENSORS; i++) {
        snprintf(m.names[i], sizeof m.names[i], "w%04zu", i);
        m.tensors[i] =
            make_tensor(m.names[i], FANIN_DTYPE_F32, ELEMENTS, 0, &m.boxes[i], NULL);
    }
}

/* A float that tells device and step. */
static float told(size_t device, uint64_t step)
{
    return (float)(100 * step + device);
}

/* ----------------------------------------------------------------- the trainer */

static void write_step(float *const *memory, uint64_t step)
{
    for (size_t d = 0; d < DEVICES; d++) {
        float *all = fake_cuda_alias(memory[d]);
        for (size_t i = 0; i < OF_DEVICE * ELEMENTS; i++)
            all[i] = told(d, step);
    }
}

/* A step for each byte that comes. */
static bool train(int channel)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *server;
    fanin_server_config config = make_server_config();
    fanin_commit_options options;
    float *memory[DEVICES];
    fanin_commit_options_init(&options, sizeof options);
    options.flags = FANIN_COMMIT_SNAPSHOT;
    if (fanin_server_create(&config, &server, &error) != FANIN_OK)
        return false;
    for (size_t i = 0; i < TENSORS; i++) {
        size_t d = i / OF_DEVICE, at = i % OF_DEVICE;
        if (at == 0)
            memory[d] = fake_cuda_alloc((int)d, OF_DEVICE * BYTES, FAKE_CUDA_MALLOC);
        m.boxes[i].address = memory[d] + at * ELEMENTS;
    }
    uint16_t port = fanin_server_port(server);
    bool good = fanin_server_put(server, "full:0", m.tensors, TENSORS, false, &error) ==
                FANIN_OK;
    char byte;
    for (uint64_t step = 1; good && read(channel, &byte, 1) == 1; step++) {
        good = fanin_server_begin_update(server, "full:0", &error) == FANIN_OK;
        write_step(memory, step);
        good = good && fanin_server_commit(server, "full:0", step, &options, &error) ==
                           FANIN_OK;
        good = good && write(channel, &port, sizeof port) == sizeof port;
    }
    fanin_server_destroy(&server, 0);
    return good;
}

static pid_t start_trainer(int *channel)
{
    int ends[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ends[0]);
        _exit(train(ends[1]) ? 0 : 1);
    }
    close(ends[1]);
    *channel = ends[0];
    return pid;
}

/* ------------------------------------------------------------------ the worker */

static uint16_t next_step(int channel)
{
    uint16_t port;
    assert_int_equal(write(channel, "x", 1), 1);
    assert_int_equal(read(channel, &port, sizeof port), sizeof port);
    return port;
}

static fanin_client *connect_by_ipc(uint16_t port)
{
    char address[32];
    const char *addresses[] = {address};
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_CUDA_IPC;
    snprintf(address, sizeof address, "127.0.0.1:%u", (unsigned)port);
    return connect_client(&config, addresses, 1);
}

/* Some tensors of the device in the middle, in each of several steps. */
TEST(a_part_is_read_of_both_arenas)
{
    const size_t device = 1;
    static float into[WANTED][ELEMENTS];
    fanin_client *client = NULL;
    int channel;
    pid_t trainer = start_trainer(&channel);
    fanin_tensor *wanted = &m.tensors[device * OF_DEVICE + 100];
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint16_t port = next_step(channel);
        fanin_pull_options options = make_options(FANIN_STEP_EXACT, step);
        options.publication = "full:0";
        client = client ? client : connect_by_ipc(port);
        for (size_t i = 0; i < WANTED; i++)
            m.boxes[device * OF_DEVICE + 100 + i].address = into[i];
        memset(into, 0, sizeof into);
        assert_works(fanin_client_pull(client, &options, wanted, WANTED, NULL, ERROR));
        for (size_t i = 0; i < WANTED * ELEMENTS; i++)
            assert_true(into[i / ELEMENTS][i % ELEMENTS] == told(device, step));
    }
    fanin_client_destroy(&client);
    close(channel);
    assert_int_equal(tests_await(trainer), 0);
}

int main(void)
{
    setenv("FAKE_CUDA_DEVICES", "3", 1);
    describe();
    return tests_run(NULL);
}
