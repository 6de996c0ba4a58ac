/* SPDX-License-Identifier: Apache-2.0 */
/* A process that is forked while another thread is within OpenSSL, which may hold locks there. */
#include "secrets.h"
#include "testing.h"
#include "tls_internal.h"
#include <pthread.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <sys/wait.h>

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
        fanin_status made = tls_end_by_secret(secret_of('1'), NULL, &end, &error);
        bool is_said = strstr(error.message, "OpenSSL, or used it") && error.remedy[0];
        _exit(made == FANIN_OK ? 0 : made == FANIN_ERR_FORKED && is_said ? 1 : 2);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status) == 0 ? FANIN_OK : FANIN_ERR_FORKED;
}

TEST(a_child_of_who_shakes_hands_is_told)
{
    tls_end *end;
    int fds[2];
    pthread_t thread;
    assert_works(tls_end_of_rank(secret_of('1'), world, 0, &end, ERROR));
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

/* Whether a child forked at the end of a call that moves data may use OpenSSL. */
static openssl theirs;
static fanin_status reading, writing;

static int read_and_fork(SSL *ssl, void *to, size_t room, size_t *got)
{
    int result = theirs.SSL_read_ex(ssl, to, room, got);
    reading = reader_in_child();
    return result;
}

static int write_and_fork(SSL *ssl, const void *from, size_t size, size_t *taken)
{
    int result = theirs.SSL_write_ex(ssl, from, size, taken);
    writing = reader_in_child();
    return result;
}

static void say(tls *from, int fd, tls *to, int other)
{
    uint8_t byte = 1;
    const struct iovec all = {&byte, 1};
    assert_int_equal(tls_send(from, fd, &all, 1), 1);
    assert_int_equal(tls_receive(to, other, &byte, 1), 1);
}

TEST(a_child_of_who_is_asked_for_new_keys_is_told)
{
    tls_end *ends[2];
    tls *t[2];
    int fds[2];
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    assert_works(tls_end_of_rank(secret_of('1'), world, 0, &ends[0], ERROR));
    assert_works(tls_end_by_secret(secret_of('1'), NULL, &ends[1], ERROR));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    for (int i = 0; i < 2; i++)
        assert_non_null(t[i] = tls_new(ends[i], fds[i]));
    for (int turn = 0; turn < 4; turn++)
        for (int i = 1; i >= 0; i--)
            steps[i] = steps[i] == TLS_WAIT ? tls_handshake(t[i]) : steps[i];
    assert_true(steps[0] == TLS_UP && steps[1] == TLS_UP);
    theirs = *ends[0]->o;
    openssl *o = (openssl *)(uintptr_t)ends[0]->o;
    o->SSL_read_ex = read_and_fork;
    o->SSL_write_ex = write_and_fork;
    say(t[1], fds[1], t[0], fds[0]);
    assert_true(reading == FANIN_OK && writing == FANIN_OK);
    assert_int_equal(o->SSL_key_update(t[1]->ssl, 1), 1); /* and wants an answer */
    say(t[1], fds[1], t[0], fds[0]);
    assert_int_equal(reading, FANIN_ERR_FORKED);
    say(t[0], fds[0], t[1], fds[1]); /* the answer goes before it */
    assert_int_equal(writing, FANIN_ERR_FORKED);
    assert_int_equal(reading, FANIN_ERR_FORKED);
    say(t[0], fds[0], t[1], fds[1]);
    assert_true(reading == FANIN_OK && writing == FANIN_OK);
    *o = theirs;
    for (int i = 0; i < 2; i++) {
        tls_free(&t[i]);
        tls_end_free(&ends[i]);
        close(fds[i]);
    }
}

TESTS_BETWEEN(NULL, secrets_tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    sem_init(&is_within, 0, 0);
    sem_init(&may_leave, 0, 0);
    return tests_run(NULL);
}
