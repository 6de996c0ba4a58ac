/* SPDX-License-Identifier: Apache-2.0 */
/* What a thread sends behind the caller's back: all of it, in order, once, or not if it was taken
   back. */
#include "net/late_sends.h"
#include "testing.h"
#include "thread.h"
#include <semaphore.h>

#define SENDS 5

typedef struct numbered {
    late_send send; /* first: it is handed back */
    unsigned number;
} numbered;

static late_sends *sends;
static numbered each[SENDS];
static unsigned sent[SENDS],
    n_sent; /* in this order; looked at when the thread has ended, or said so */
static sem_t came, may_go;
static bool one_cpu, no_thread;

unsigned __wrap_usable_cpus(void);
unsigned __wrap_usable_cpus(void)
{
    return one_cpu ? 1 : 2;
}

bool __real_worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie);
bool __wrap_worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie);
bool __wrap_worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie)
{
    return !no_thread && __real_worker_thread_start(thread, run, cookie);
}

static void record(late_send *send)
{
    sent[n_sent++] = ((numbered *)send)->number;
}

/* Says that it is being sent, and is for as long as the test wants. */
static void record_slowly(late_send *send)
{
    record(send);
    sem_post(&came);
    sem_wait(&may_go);
}

static int set_up(void **state)
{
    n_sent = 0;
    one_cpu = no_thread = false;
    sem_init(&came, 0, 0);
    sem_init(&may_go, 0, 0);
    for (unsigned i = 0; i < SENDS; i++)
        each[i] = (numbered){.send = {.run = record}, .number = i};
    sends = late_sends_create();
    assert_non_null(sends);
    return 0;
}

static int tear_down(void **state)
{
    late_sends_destroy(&sends);
    assert_null(sends);
    sem_destroy(&came);
    sem_destroy(&may_go);
    return 0;
}

static void expect_sent(unsigned n, const unsigned *order)
{
    assert_int_equal(n_sent, n);
    for (unsigned i = 0; i < n; i++)
        assert_int_equal(sent[i], order[i]);
}

static void all_are_sent_in_their_order(void **state)
{
    for (unsigned i = 0; i < SENDS; i++) {
        if (i == SENDS - 1)
            each[i].send.run = record_slowly;
        late_sends_add(sends, &each[i].send);
    }
    late_sends_go(sends);
    sem_wait(&came); /* nobody calls anything else */
    expect_sent(SENDS, (unsigned[]){0, 1, 2, 3, 4});
    sem_post(&may_go);
}

static void what_is_left_is_sent_at_the_end(void **state)
{
    for (unsigned i = 0; i < SENDS; i++)
        late_sends_add(sends, &each[i].send);
    late_sends_destroy(&sends);
    expect_sent(SENDS, (unsigned[]){0, 1, 2, 3, 4});
}

/* While one is sent, which nobody else waits for. */
static void what_is_taken_is_not_sent(void **state)
{
    each[0].send.run = record_slowly;
    for (unsigned i = 0; i < SENDS - 1; i++)
        late_sends_add(sends, &each[i].send);
    late_sends_go(sends);
    sem_wait(&came);
    late_sends_take(sends, &each[1].send);
    late_sends_take(sends, &each[3].send);
    late_sends_take(sends, &each[3].send); /* it is not there any more */
    late_sends_take(sends, &each[4].send); /* it never was */
    late_sends_add(sends, &each[1].send);  /* and it may be again */
    sem_post(&may_go);
    late_sends_destroy(&sends);
    expect_sent(3, (unsigned[]){0, 2, 1});
}

static void *take_first(void *cookie)
{
    late_sends_take(sends, &each[0].send);
    sem_post(cookie);
    return NULL;
}

/* Whoever takes back what is being sent has it when that is over. */
static void what_is_being_sent_is_waited_for(void **state)
{
    sem_t taken;
    pthread_t taker;
    sem_init(&taken, 0, 0);
    each[0].send.run = record_slowly;
    late_sends_add(sends, &each[0].send);
    late_sends_go(sends);
    sem_wait(&came);
    assert_int_equal(pthread_create(&taker, NULL, take_first, &taken), 0);
    assert_int_equal(sem_trywait(&taken), -1);
    assert_true(atomic_load(&each[0].send.queued));
    sem_post(&may_go);
    sem_wait(&taken);
    assert_false(atomic_load(&each[0].send.queued));
    pthread_join(taker, NULL);
    expect_sent(1, (unsigned[]){0});
    sem_destroy(&taken);
}

static void without_room_for_a_thread_there_is_none(void **state)
{
    one_cpu = true;
    assert_null(late_sends_create());
    one_cpu = false;
    no_thread = true;
    assert_null(late_sends_create());
    late_sends *none = NULL;
    late_sends_destroy(&none);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(all_are_sent_in_their_order),
        CASE(what_is_left_is_sent_at_the_end),
        CASE(what_is_taken_is_not_sent),
        CASE(what_is_being_sent_is_waited_for),
        CASE(without_room_for_a_thread_there_is_none),
    };
    return cmocka_run_group_tests_name("late sends", tests, NULL, NULL);
}
