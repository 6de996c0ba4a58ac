/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that shake hands: all are handed back in the loop's thread, also those that nobody came
   to. */
#include "clock.h"
#include "net/handshakes.h"
#include "testing.h"
#include "thread.h"
#include <stdatomic.h>

#define HANDSHAKES 20
#define THREADS 3
#define CALL_MS 20000

static loop owner;
static pthread_t caller;
static handshake all[HANDSHAKES];
static unsigned made, left; /* handed back */

static atomic_uint calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static bool is_shut; /* handshakes wait; guarded by lock, as is: */
static unsigned waiting;

tls_step __wrap_tls_handshake(tls *t);
tls_step __wrap_tls_handshake(tls *t)
{
    assert_false(pthread_equal(pthread_self(), caller));
    assert_ptr_equal(t, &calls);
    atomic_fetch_add(&calls, 1);
    pthread_mutex_lock(&lock);
    waiting++;
    pthread_cond_broadcast(&changed);
    while (is_shut && condition_wait(&changed, &lock, deadline_in_ms(CALL_MS)))
        ;
    bool forgotten = is_shut;
    waiting--;
    pthread_mutex_unlock(&lock);
    return forgotten ? TLS_UP : TLS_FAILED;
}

static void shut(bool is)
{
    pthread_mutex_lock(&lock);
    is_shut = is;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Those that threads have begun go on when all others are here. */
static void on_back(handshake *h, bool is_made)
{
    assert_true(pthread_equal(pthread_self(), caller));
    assert_false(h->is_out);
    if (is_made)
        assert_int_equal(h->step, TLS_FAILED);
    made += is_made;
    left += !is_made;
    if (left == HANDSHAKES - THREADS)
        shut(false);
}

static handshakes *begin(void)
{
    assert_int_equal(loop_init(&owner, NULL), FANIN_OK);
    condition_init(&changed);
    made = left = 0;
    atomic_store(&calls, 0);
    handshakes *h = handshakes_open(&owner, THREADS);
    assert_non_null(h);
    for (unsigned i = 0; i < HANDSHAKES; i++) {
        all[i] = (handshake){.tls = (tls *)&calls, .back = on_back};
        handshakes_go_on(h, &all[i]);
        assert_true(all[i].is_out);
    }
    return h;
}

static void end(handshakes **h)
{
    handshakes_close(h);
    assert_null(*h);
    assert_int_equal(atomic_load(&calls), made);
    assert_int_equal(made + left, HANDSHAKES);
    loop_finish(&owner);
    pthread_cond_destroy(&changed);
}

static void threads_make_all(void **state)
{
    handshakes *h = begin();
    while (made < HANDSHAKES)
        loop_step(&owner, deadline_in_ms(CALL_MS));
    end(&h);
    assert_int_equal(left, 0);
}

static void what_nobody_has_begun_is_handed_back(void **state)
{
    shut(true);
    handshakes *h = begin();
    deadline at = deadline_in_ms(CALL_MS);
    pthread_mutex_lock(&lock);
    while (waiting < THREADS && condition_wait(&changed, &lock, at))
        ;
    assert_int_equal(waiting, THREADS);
    pthread_mutex_unlock(&lock);
    end(&h);
    assert_int_equal(left, HANDSHAKES - THREADS);
}

/* What was made and not told of yet is told of. */
static void what_is_made_is_handed_back(void **state)
{
    handshakes *h = begin();
    deadline at = deadline_in_ms(CALL_MS);
    while (atomic_load(&calls) < HANDSHAKES && !deadline_passed(at))
        sched_yield();
    end(&h);
    assert_int_equal(made, HANDSHAKES);
}

static void none_is_fine(void **state)
{
    handshakes *h = NULL;
    assert_int_equal(loop_init(&owner, NULL), FANIN_OK);
    assert_null(handshakes_open(&owner, 0));
    handshakes_close(&h);
    h = handshakes_open(&owner, 1);
    assert_non_null(h);
    handshakes_close(&h);
    loop_finish(&owner);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_make_all),
        cmocka_unit_test(what_nobody_has_begun_is_handed_back),
        cmocka_unit_test(what_is_made_is_handed_back),
        cmocka_unit_test(none_is_fine),
    };
    caller = pthread_self();
    return cmocka_run_group_tests_name("handshakes", tests, NULL, NULL);
}
