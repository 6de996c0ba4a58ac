/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx_child.h"
#include "ucx_internal.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROLE "ucx-child"
#define REPLY_MS 10000

uint64_t ucx_child_word(uint64_t i)
{
    return (i + 1) * 0x9E3779B97F4A7C15u;
}

/* ------------------------------------------------------------ in the process */

typedef struct process {
    int fd;
    ucx *u;
    ucx_server *server; /**< kind SAFE */
    ucx_region *region;
    ucx_worker worker; /**< kind RMA */
    uint64_t *words;
    size_t mapped; /**< words that are still mapped */
} process;

static bool process_progress(process *p)
{
    if (p->server)
        return ucx_server_progress(p->server);
    const ucx_scope scope = ucx_scope_enter(&p->worker.log, false);
    while (p->u->ucp_worker_progress(p->worker.worker) > 0)
        ;
    const bool asleep = p->u->ucp_worker_arm(p->worker.worker) == UCS_OK;
    ucx_scope_leave(&scope);
    return asleep;
}

static bool send_all(int fd, const void *data, size_t size)
{
    return send(fd, data, size, MSG_NOSIGNAL) == (ssize_t)size;
}

static bool process_open(process *p, ucx_child_kind kind)
{
    const fanin_memory host = {.kind = FANIN_MEMORY_HOST, .device = -1};
    const uint8_t *address, *key;
    size_t address_size, key_size;
    void *packed = NULL;
    if (ucx_load(NULL, &p->u, NULL) != FANIN_OK)
        return false;
    if (kind == UCX_CHILD_SAFE) {
        if (ucx_server_create(p->u, UCX_PATH_HOST, NULL, &p->server, NULL) !=
                FANIN_OK ||
            ucx_region_create(p->server, p->words, UCX_CHILD_BYTES, host, &p->region,
                              NULL) != FANIN_OK)
            return false;
        address = ucx_server_address(p->server, &address_size);
        key = ucx_region_rkey(p->region, &key_size);
    } else {
        ucx_mapping mapping;
        if (ucx_worker_open(&p->worker, p->u, UCX_ROLE_SERVER_HOST,
                            UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP, NULL, NULL,
                            NULL) != FANIN_OK ||
            ucx_mapping_open(&p->worker, p->words, UCX_CHILD_BYTES, host, true,
                             &mapping, NULL) != FANIN_OK ||
            p->u->ucp_rkey_pack(p->worker.context, mapping.handle, &packed,
                                &key_size) != UCS_OK)
            return false;
        address = (const uint8_t *)p->worker.address;
        address_size = p->worker.address_size;
        key = packed;
    }
    return send_all(p->fd, address, address_size) && send_all(p->fd, key, key_size) &&
           send_all(p->fd, &p->words, sizeof p->words);
}

static uint64_t count_changed(process *p)
{
    uint64_t changed = 0;
    while (!process_progress(p))
        ;
    for (size_t i = 0; i < p->mapped; i++)
        changed += p->words[i] != ucx_child_word(i);
    return changed;
}

static uint64_t process_obey(process *p, uint8_t order)
{
    struct stat output;
    switch (order) {
    case UCX_CHILD_COUNT_CHANGED:
        return count_changed(p);
    case UCX_CHILD_UNMAP:
        p->mapped = UCX_CHILD_WORDS / 2;
        return (uint64_t)munmap(p->words + p->mapped, UCX_CHILD_BYTES / 2);
    case UCX_CHILD_COUNT_OUTPUT:
        fflush(NULL);
        return fstat(STDOUT_FILENO, &output) == 0 ? (uint64_t)output.st_size
                                                  : UINT64_MAX;
    default:
        return UINT64_MAX;
    }
}

static int process_run(process *p)
{
    uint8_t order;
    for (;;) {
        struct pollfd wait[2] = {
            {.fd = p->fd, .events = POLLIN},
            {.fd = p->server ? ucx_server_fd(p->server) : p->worker.fd,
             .events = POLLIN},
        };
        if (!process_progress(p))
            continue;
        if (poll(wait, 2, -1) < 0 || !wait[0].revents)
            continue;
        const ssize_t got = recv(p->fd, &order, sizeof(order), 0);
        if (got <= 0)
            return 0;
        const uint64_t answer = process_obey(p, order);
        if (!send_all(p->fd, &answer, sizeof(answer)))
            return 0;
    }
}

int ucx_child_main(int argc, char **argv)
{
    if (argc != 4 || strcmp(argv[1], ROLE) != 0)
        return -1;
    process p = {.fd = atoi(argv[3]), .mapped = UCX_CHILD_WORDS};
    const int output = memfd_create("output", MFD_CLOEXEC);
    p.words = mmap(NULL, UCX_CHILD_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p.words == MAP_FAILED || dup2(output, STDOUT_FILENO) < 0 ||
        dup2(output, STDERR_FILENO) < 0)
        return 2;
    for (size_t i = 0; i < UCX_CHILD_WORDS; i++)
        p.words[i] = ucx_child_word(i);
    if (!process_open(&p, (ucx_child_kind)atoi(argv[2])))
        return 3;
    const int status = process_run(&p);
    ucx_region_destroy(&p.region);
    ucx_server_destroy(&p.server);
    return status;
}

/* ------------------------------------------------------------ in the test */

static ssize_t receive(int fd, void *to, size_t size)
{
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (poll(&wait, 1, REPLY_MS) != 1)
        return -1;
    return recv(fd, to, size, 0);
}

static void child_exec(int fd, ucx_child_kind kind)
{
    char kind_text[16], fd_text[16];
    snprintf(kind_text, sizeof kind_text, "%d", (int)kind);
    snprintf(fd_text, sizeof fd_text, "%d", fd);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(fd, F_SETFD, 0);
    execl("/proc/self/exe", "/proc/self/exe", ROLE, kind_text, fd_text, (char *)NULL);
    _exit(127);
}

bool ucx_child_start(ucx_child *c, ucx_child_kind kind)
{
    int pair[2];
    *c = (ucx_child){.fd = -1};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return false;
    c->pid = fork();
    if (c->pid == 0)
        child_exec(pair[1], kind);
    close(pair[1]);
    c->fd = pair[0];
    const ssize_t address = receive(c->fd, c->address, sizeof c->address);
    const ssize_t rkey = receive(c->fd, c->rkey, sizeof c->rkey);
    if (address > 0 && rkey > 0 && receive(c->fd, &c->base, sizeof c->base) == 8) {
        c->address_size = (size_t)address;
        c->rkey_size = (size_t)rkey;
        return true;
    }
    ucx_child_stop(c);
    return false;
}

uint64_t ucx_child_ask(ucx_child *c, ucx_child_order order)
{
    const uint8_t message = (uint8_t)order;
    uint64_t answer;
    if (!send_all(c->fd, &message, sizeof message) ||
        receive(c->fd, &answer, sizeof(answer)) != sizeof(answer))
        return UINT64_MAX;
    return answer;
}

bool ucx_child_stop(ucx_child *c)
{
    int status = -1;
    if (c->fd >= 0)
        close(c->fd);
    if (c->pid > 0)
        while (waitpid(c->pid, &status, 0) < 0)
            ;
    *c = (ucx_child){.fd = -1};
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
