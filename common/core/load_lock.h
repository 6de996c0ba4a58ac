/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Locks of what is loaded once a process, which takes long and is another library's work. A child
 * that is forked meanwhile has the lock, and half of the library, for ever: it is told, instead of
 * waiting. So it is with what any thread may hold for a moment, and a child can do without; and
 * with a library that has locks of its own, while any thread is within it.
 */
#ifndef LOAD_LOCK_H
#define LOAD_LOCK_H

#include <fanin/error.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

/* Libraries that are loaded at run time: tables of their functions; and staying loaded
    oneself. */

/** A function by the name that the library exports, and where in the table its pointer belongs. */
typedef struct library_function {
    const char *name;
    size_t offset;
} library_function;

/** Fills @p table from what dlopen() gave. NULL: with all of them; else the name of the first that
    the library has not, static as @p functions are. */
const char *library_table_read(void *handle, const library_function *functions,
                               size_t count, void *table);

/** Keeps the file that holds this code mapped until the process ends, for what is still called
    after the last call into the library. Thread: any. */
void pin_own_library(void);

/** Of static storage. */
typedef struct load_lock {
    pthread_mutex_t mutex;
    atomic_bool known, lost;
    atomic_uint within; /**< threads */
    struct load_lock *next;
} load_lock;

#define LOAD_LOCK_INIT                                                                 \
    {                                                                                  \
        .mutex = PTHREAD_MUTEX_INITIALIZER                                             \
    }

/** False: this process was forked while its parent had it. It is not held then, and never will be.
    Thread: any. */
bool load_lock_take(load_lock *l);
void load_lock_give(load_lock *l);
/** A thread goes into what was loaded, and comes back: any number of them at once, also into each
    other. A fork waits for them, 100 ms at most; what is forked meanwhile all the same does not get
    the lock either. The lock was taken before. Thread: any; does not block. */
void load_lock_enter(load_lock *l);
void load_lock_leave(load_lock *l);
/** FANIN_ERR_FORKED: why @p what, a library, cannot be had. */
fanin_status load_lock_lost(const char *what, fanin_error *error);

#endif
