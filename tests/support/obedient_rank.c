/* SPDX-License-Identifier: Apache-2.0 */
#include "obedient_rank.h"

#include "ends.h"
#include "testing.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define RUN "lora:0"

/* ------------------------------------------------------------- in its process */

void obedient_need(bool good)
{
    if (!good)
        _exit(1);
}

static void put_shard(obedience *o)
{
    fanin_box box;
    const fanin_tensor tensor =
        make_tensor("a", FANIN_DTYPE_U8, o->ranks * o->size, 0, &box, o->memory);
    box.offset[0] = o->number * o->size;
    box.extent[0] = o->size;
    obedient_need(fanin_server_put(o->server, RUN, &tensor, 1, false, NULL) ==
                  FANIN_OK);
}

static void begin_update(obedience *o)
{
    obedient_need(fanin_server_begin_update(o->server, RUN, NULL) == FANIN_OK);
}

static void commit_next(obedience *o)
{
    memset(o->bytes, (int)(++o->step & 0xff), o->size);
    obedient_need(fanin_server_commit(o->server, RUN, o->step, NULL, NULL) == FANIN_OK);
}

void obedient_obey(obedience *o, char word)
{
    switch (word) {
    case 'u':
        begin_update(o);
        memset(o->bytes, OVERWRITTEN, o->size);
        break;
    case 'e':
        commit_next(o);
        break;
    case 'c':
        begin_update(o);
        commit_next(o);
        break;
    case 'r':
        obedient_need(fanin_server_remove(o->server, RUN, NULL, NULL) == FANIN_OK);
        break;
    case 'a':
        put_shard(o);
        commit_next(o);
        break;
    default:
        if (!o->more || !o->more(o, word))
            _exit(0);
    }
}

void obedient_serve(obedience *o)
{
    char address[OBEDIENT_ADDRESS], word;
    fanin_server_config config = make_server_config();
    config.rank = o->number;
    config.world_size = o->ranks;
    config.lease_ms = o->lease_ms;
    o->server = make_server(&config, address, sizeof address);
    put_shard(o);
    commit_next(o);
    obedient_need(write(o->answers, address, sizeof address) == sizeof address);
    while (read(STDIN_FILENO, &word, 1) == 1) {
        obedient_obey(o, word);
        obedient_need(write(o->answers, &word, 1) == 1);
    }
    _exit(0);
}

/* -------------------------------------------------------------- the test's side */

void obedient_fork(obedient_rank *r, unsigned number, void (*live)(obedience *))
{
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC) || (r->pid = fork()) < 0)
        abort();
    if (r->pid == 0) {
        obedience o = {.number = number, .ranks = 1, .answers = from[1]};
        dup2(to[0], STDIN_FILENO);
        close(to[0]);
        close(to[1]);
        close(from[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        live(&o);
        _exit(1);
    }
    close(to[0]);
    close(from[1]);
    r->to = to[1];
    r->from = from[0];
}

void obedient_address(const obedient_rank *r, char out[OBEDIENT_ADDRESS])
{
    assert_int_equal(read(r->from, out, OBEDIENT_ADDRESS), OBEDIENT_ADDRESS);
}

void obedient_tell(const obedient_rank *r, const char *words)
{
    for (; *words; words++) {
        char done;
        assert_int_equal(write(r->to, words, 1), 1);
        assert_int_equal(read(r->from, &done, 1), 1);
    }
}

void obedient_kill(obedient_rank *r)
{
    int status;
    kill(r->pid, SIGKILL);
    assert_int_equal(waitpid(r->pid, &status, 0), r->pid);
    r->pid = 0;
}

void obedient_end(obedient_rank *r)
{
    if (r->pid)
        obedient_kill(r);
    close(r->to);
    close(r->from);
}
