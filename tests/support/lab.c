/* SPDX-License-Identifier: Apache-2.0 */
#include "lab.h"

#include "fetch/pattern.h"
#include "testing.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

typedef enum verb { START, SIGNAL, STOP } verb;

typedef struct request {
    verb verb;
    lab_order order;
    uint32_t rank;
    int number;
} request;

typedef struct answer {
    bool good;
    uint16_t ports[LAB_RANKS];
} answer;

uint64_t lab_step(uint32_t life)
{
    return 1 + (uint64_t)life * 1000000;
}

lab_order lab_order_of(uint32_t world_size)
{
    return (lab_order){.shape = "small",
                       .world_size = world_size,
                       .replicate = 1,
                       .base_port = lab_free_ports(world_size),
                       .world = 0x42};
}

/* ------------------------------------------------------------- the process */

/* A later life's bytes are handed to the ranks; those of the first they make themselves. */
static bool give_bytes(rank_world *w, uint32_t life)
{
    for (size_t i = 0; i < w->tensors.count && life > 0; i++) {
        tensor_spec *t = &w->tensors.tensors[i];
        uint8_t *bytes = malloc(t->bytes);
        if (!bytes)
            return false;
        pattern_fill(bytes, pattern_start(rank_world_seed(t), lab_step(life)), 0,
                     t->bytes);
        t->data = bytes;
    }
    return true;
}

static void end_world(rank_world *w)
{
    uint32_t n = w->ranks ? w->options.world_size : 0;
    for (uint32_t i = 0; i < n; i++)
        kill(ranks_slot(w->ranks, i)->pid, SIGKILL);
    for (size_t i = 0; i < w->tensors.count; i++)
        free((void *)(uintptr_t)w->tensors.tensors[i].data);
    rank_world_free(w);
    *w = (rank_world){0};
}

/* For the ranks, which are about to be forked. */
static void change_environment(const lab_order *o, bool set)
{
    for (size_t i = 0; i < sizeof o->environment / sizeof *o->environment; i++) {
        char name[sizeof *o->environment];
        snprintf(name, sizeof name, "%s", o->environment[i]);
        char *value = strchr(name, '=');
        if (!value)
            continue;
        *value++ = '\0';
        if (set)
            setenv(name, value, 1);
        else
            unsetenv(name);
    }
}

static void init(rank_world *w, const lab_order *o)
{
    rank_world_init(w, o->shape, o->dtype ? o->dtype : FANIN_DTYPE_BF16, o->world_size);
}

static answer begin_world(rank_world *w, const lab_order *o)
{
    answer a = {0};
    end_world(w);
    init(w, o);
    w->options.tensors = &w->tensors;
    w->options.replicate = o->replicate;
    w->options.base_port = o->base_port;
    w->options.flags = o->flags;
    w->options.first_step = o->step ? o->step : 1;
    w->options.bind = o->bind[0] ? o->bind : NULL;
    w->options.allow = o->allow[0] ? o->allow : NULL;
    w->options.publishing = (rank_publishing){.devices = o->devices,
                                              .n_devices = o->n_devices,
                                              .snapshot = o->snapshot,
                                              .cast = o->cast};
    memset(w->options.world_id, o->world, sizeof w->options.world_id);
    change_environment(o, true);
    a.good = give_bytes(w, o->life) && ranks_start(&w->options, &w->ranks) == 0 &&
             ranks_wait_ready(w->ranks, 60000) == 0;
    change_environment(o, false);
    for (uint32_t i = 0; a.good && i < o->world_size; i++)
        a.ports[i] = ranks_slot(w->ranks, i)->port;
    return a;
}

static answer signal_rank(const rank_world *w, uint32_t rank, int number)
{
    pid_t pid = ranks_slot(w->ranks, rank)->pid;
    siginfo_t info;
    int what = number == SIGKILL ? WEXITED : number == SIGSTOP ? WSTOPPED : WCONTINUED;
    return (answer){.good = kill(pid, number) == 0 &&
                            waitid(P_PID, (id_t)pid, &info, what | WNOWAIT) == 0};
}

static _Noreturn void serve(int channel)
{
    rank_world w = {0};
    request r;
    while (recv(channel, &r, sizeof r, 0) == (ssize_t)sizeof r) {
        answer a = {.good = true};
        if (r.verb == START)
            a = begin_world(&w, &r.order);
        else if (r.verb == SIGNAL)
            a = signal_rank(&w, r.rank, r.number);
        else
            end_world(&w);
        if (send(channel, &a, sizeof a, MSG_NOSIGNAL) != (ssize_t)sizeof a)
            break;
    }
    end_world(&w);
    _exit(0);
}

void lab_open(lab *l, bool own_network)
{
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(NULL);
    pid_t parent = getpid();
    l->pid = fork();
    assert_true(l->pid >= 0);
    if (l->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(pair[0]);
        if (getppid() != parent || (own_network && unshare(CLONE_NEWNET) != 0))
            _exit(1);
        answer ready = {.good = true};
        if (send(pair[1], &ready, sizeof ready, MSG_NOSIGNAL) < 0)
            _exit(1);
        serve(pair[1]);
    }
    close(pair[1]);
    l->channel = pair[0];
    answer ready = {0};
    assert_int_equal(recv(l->channel, &ready, sizeof ready, 0), sizeof ready);
}

/* --------------------------------------------------------------- this side */

static answer ask(lab *l, const request *r)
{
    answer a = {0};
    assert_int_equal(send(l->channel, r, sizeof *r, MSG_NOSIGNAL), sizeof *r);
    assert_int_equal(recv(l->channel, &a, sizeof a, 0), sizeof a);
    assert_true(a.good);
    return a;
}

void lab_close(lab *l)
{
    close(l->channel);
    assert_int_equal(waitpid(l->pid, NULL, 0), l->pid);
}

void lab_restart(lab *l, const lab_order *order)
{
    ask(l, &(request){.verb = START, .order = *order});
}

void lab_start(lab *l, const lab_order *order, rank_world *w)
{
    answer a = ask(l, &(request){.verb = START, .order = *order});
    init(w, order);
    rank_world_describe(w, order->bind[0] ? order->bind : "127.0.0.1", a.ports);
}

void lab_signal(lab *l, uint32_t rank, int number)
{
    ask(l, &(request){.verb = SIGNAL, .rank = rank, .number = number});
}

void lab_stop(lab *l)
{
    ask(l, &(request){.verb = STOP});
}

static bool is_free(uint16_t port)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    bool bound = bind(fd, (struct sockaddr *)&at, sizeof at) == 0;
    close(fd);
    return bound;
}

/* Ports below those that the kernel gives away, of which each process that runs tests beside others
   has its own: a name is bound for them, until it and its children have ended. */
#define FIRST_PORT 20000
#define BLOCK 64
#define BLOCKS 180

static bool claim_block(uint32_t block)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1,
                          "fanin-tests-ports-%u", (unsigned)block);
    socklen_t size =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (bind(fd, (struct sockaddr *)&name, size) == 0)
        return true;
    close(fd);
    return false;
}

static uint32_t own_ports(void)
{
    static uint32_t first;
    for (uint32_t i = 0; i < BLOCKS && first == 0; i++) {
        uint32_t block = ((uint32_t)getpid() + i) % BLOCKS;
        if (claim_block(block))
            first = FIRST_PORT + block * BLOCK;
    }
    assert_int_not_equal(first, 0);
    return first;
}

uint16_t lab_free_ports(uint32_t n)
{
    uint32_t first = own_ports(), found = 0;
    for (uint32_t port = first; port < first + BLOCK; port++) {
        found = is_free((uint16_t)port) ? found + 1 : 0;
        if (found == n)
            return (uint16_t)(port - n + 1);
    }
    fail_msg("no %u neighbouring ports are free", n);
    return 0;
}
