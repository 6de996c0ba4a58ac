/* SPDX-License-Identifier: Apache-2.0 */
#include "two_ends.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

gpu *cuda;
static int number, bad;

fanin_status device_open(int device, gpu_stream **stream, fanin_error *error)
{
    fanin_status status = gpu_load(NULL, &cuda, error);
    if (status == FANIN_OK)
        status = gpu_context_enter(cuda, device, error);
    return status == FANIN_OK && stream ? gpu_stream_create(cuda, device, stream, error)
                                        : status;
}

void *driver_symbol(const char *name)
{
    const char *file = getenv("FANIN_CUDA_LIBRARY");
    void *library = dlopen(file ? file : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}

void result(bool good, const char *what, const char *detail)
{
    printf("%sok %d - %s%s%s\n", good ? "" : "not ", ++number, what,
           detail[0] != '\0' ? ": " : "", detail);
    fflush(stdout);
    bad += !good;
}

bool copy(int device, gpu_stream *stream, void *to, const void *from, size_t bytes,
          fanin_error *error)
{
    if (device == DEVICE_HOST) {
        memcpy(to, from, bytes);
        return true;
    }
    return gpu_copy(stream, to, from, bytes, error) == FANIN_OK &&
           gpu_stream_wait(stream, UINT64_MAX, error) == FANIN_OK;
}

int publisher_start(publisher *p, int (*serve)(int in, int out), void *greeting,
                    size_t size)
{
    int down[2], up[2], status = 0;
    if (pipe(down) != 0 || pipe(up) != 0)
        return 1;
    *p = (publisher){.pid = fork(), .down = down[1], .up = up[0]};
    if (p->pid == 0) {
        close(down[1]);
        close(up[0]);
        _exit(serve(down[0], up[1]));
    }
    close(down[0]);
    close(up[1]);
    if (read(p->up, greeting, size) == (ssize_t)size)
        return 0;
    waitpid(p->pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != SKIPPED)
        return 1;
    puts("1..0 # SKIP no GPU");
    return SKIPPED;
}

int publisher_end(publisher *p)
{
    int status = 0;
    close(p->down);
    waitpid(p->pid, &status, 0);
    result(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the server ends", "");
    printf("1..%d\n", number);
    return bad != 0;
}

fanin_server *publisher_server(fanin_log_fn log, gpu_stream **stream, int *status)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server *server = NULL;
    *status = SKIPPED;
    if (device_open(0, stream, &error) != FANIN_OK)
        return NULL;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, 7, sizeof config.world_id);
    config.world_size = 1;
    config.log = log;
    *status = 1;
    if (fanin_server_create(&config, &server, &error) != FANIN_OK)
        fprintf(stderr, "# %s\n", error.message);
    return server;
}
