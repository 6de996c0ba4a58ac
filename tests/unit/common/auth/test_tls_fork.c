/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is forked while another thread is within OpenSSL, which may hold locks there. */
#include "secrets.h"
#include "testing.h"
#include "tls.h"
#include <pthread.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static uint8_t world[16] = {5};
static sem_t is_within, may_leave;
static bool stays;

/* What OpenSSL's handshake receives by. */
ssize_t __real_recv(int fd, void *to, size_t room, int flags);
ssize_t __wrap_recv(int fd, void *to, size_t room, int flags);
ssize_t __wrap_recv(int fd, void *to, size_t room, int flags)
{
    if (stays) {
        stays = false;
        sem_post(&is_within);
        sem_wait(&may_leave);
    }
    return __real_recv(fd, to, room, flags);
}

static void *shake(void *t)
{
    assert_int_equal(tls_handshake(t), TLS_WAIT);
    return NULL;
}

/* What a forked child gets that wants to be a reader. */
static fanin_status reader_in_child(void)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        tls_end *end;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status made = tls_end_of_reader(secret_of('1'), &end, &error);
        bool is_said = strstr(error.message, "OpenSSL, or used it") && error.remedy[0];
        _exit(made == FANIN_OK ? 0 : made == FANIN_ERR_FORKED && is_said ? 1 : 2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status) == 0 ? FANIN_OK : FANIN_ERR_FORKED;
}

static void a_child_of_who_shakes_hands_is_told(void **state)
{
    fanin_error error = FANIN_ERROR_INIT;
    tls_end *end;
    int fds[2];
    pthread_t thread;
    assert_ok(tls_end_of_rank(secret_of('1'), world, 0, &end, &error), error);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    tls *t = tls_new(end, fds[0]);
    assert_non_null(t);
    assert_int_equal(reader_in_child(), FANIN_OK);
    stays = true;
    assert_int_equal(pthread_create(&thread, NULL, shake, t), 0);
    sem_wait(&is_within);
    assert_int_equal(reader_in_child(), FANIN_ERR_FORKED);
    sem_post(&may_leave);
    pthread_join(thread, NULL);
    assert_int_equal(reader_in_child(), FANIN_OK);
    tls_free(&t);
    tls_end_free(&end);
    close(fds[0]);
    close(fds[1]);
}

int main(void)
{
    if (openssl_is_missing())
        return 77;
    sem_init(&is_within, 0, 0);
    sem_init(&may_leave, 0, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_of_who_shakes_hands_is_told),
    };
    return cmocka_run_group_tests_name("tls_fork", tests, NULL, secrets_tear_down);
}
