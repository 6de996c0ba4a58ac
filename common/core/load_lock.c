/* SPDX-License-Identifier: Apache-2.0 */
#include "load_lock.h"
#include "clock.h"
#include "error_set.h"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------ library table */

const char *library_table_read(void *handle, const library_function *functions,
                               size_t count, void *table)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(handle, functions[i].name);
        if (!symbol)
            return functions[i].name;
        memcpy((char *)table + functions[i].offset, &symbol, sizeof symbol);
    }
    return NULL;
}

void pin_own_library(void)
{
    static const char here;
    Dl_info info;
    if (dladdr(&here, &info) && info.dli_fname)
        (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

/* ---------------------------------------------------------------------- load lock */

#define WAIT_MS 100
#define LOOK_NS 100000

static pthread_once_t once = PTHREAD_ONCE_INIT;
static load_lock *_Atomic all;

/* Who is within a library is so for moments, mostly: then the child can use it too. */
static void load_lock_before_fork(void)
{
    static const struct timespec look = {.tv_nsec = LOOK_NS};
    deadline at = deadline_in_ms(WAIT_MS);
    for (load_lock *l = atomic_load(&all); l; l = l->next)
        while (atomic_load(&l->within) > 0 && !deadline_passed(at))
            nanosleep(&look, NULL);
}

/* Who held a lock is not here. */
static void load_lock_in_child(void)
{
    for (load_lock *l = atomic_load(&all); l; l = l->next) {
        bool is_free = pthread_mutex_trylock(&l->mutex) == 0;
        if (is_free)
            pthread_mutex_unlock(&l->mutex);
        if (!is_free || atomic_load(&l->within) > 0)
            atomic_store(&l->lost, true);
    }
}

static void load_lock_install(void)
{
    (void)pthread_atfork(load_lock_before_fork, NULL, load_lock_in_child);
}

bool load_lock_take(load_lock *l)
{
    pthread_once(&once, load_lock_install);
    if (!atomic_exchange(&l->known, true)) {
        l->next = atomic_load(&all);
        while (!atomic_compare_exchange_weak(&all, &l->next, l))
            ;
    }
    if (atomic_load(&l->lost))
        return false;
    pthread_mutex_lock(&l->mutex);
    return true;
}

void load_lock_give(load_lock *l)
{
    pthread_mutex_unlock(&l->mutex);
}

void load_lock_enter(load_lock *l)
{
    atomic_fetch_add(&l->within, 1);
}

void load_lock_leave(load_lock *l)
{
    atomic_fetch_sub(&l->within, 1);
}

fanin_status load_lock_lost(const char *what, fanin_error *error)
{
    const error_place place = {
        .phase = "load",
        .remedy = "fork before the first client or server is made, or start a new "
                  "program in the child"};
    return error_set(error, FANIN_ERR_FORKED, &place,
                     "this process was forked while its parent loaded %s", what);
}
