/* SPDX-License-Identifier: Apache-2.0 */
/* A name server that does not answer costs a call no more than its own time. */
#include "lookup.h"
#include "testing.h"

#include <fanin/client.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

int __real_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);
int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out);

static sem_t asked, answer, answered;
static atomic_uint n_asked, n_nameless;

static struct addrinfo *numeric_address(const char *text)
{
    struct addrinfo numeric = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM};
    struct addrinfo *out;
    assert_int_equal(__real_getaddrinfo(text, NULL, &numeric, &out), 0);
    return out;
}

/* "silent*" waits for `answer`; what is known is 127.0.0.7, and of "several" 127.0.0.8, too. */
int __wrap_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                       struct addrinfo **out)
{
    if (hints->ai_flags & AI_NUMERICHOST)
        return __real_getaddrinfo(host, port, hints, out);
    atomic_fetch_add(&n_asked, 1);
    char name[16];
    pthread_getname_np(pthread_self(), name, sizeof name);
    atomic_fetch_add(&n_nameless, strcmp(name, "fanin-lookup") != 0);
    if (strcmp(host, "unknown") == 0)
        return EAI_NONAME;
    if (strncmp(host, "silent", 6) == 0) {
        sem_post(&asked);
        while (sem_wait(&answer) != 0)
            ;
        sem_post(&answered);
    }
    *out = numeric_address("127.0.0.7");
    if (strcmp(host, "several") == 0)
        (*out)->ai_next = numeric_address("127.0.0.8");
    return 0;
}

/* Every test waits for as many questions as it makes, and lets all be answered. */
static void wait_until_asked(void)
{
    while (sem_wait(&asked) != 0)
        ;
}

/* Waits until they are taken: the next test's questions must not get them. */
static void let_answer(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        sem_post(&answer);
    for (unsigned i = 0; i < n; i++)
        while (sem_wait(&answered) != 0)
            ;
}

static void wait_for(const lookup *l)
{
    struct pollfd wait = {.fd = lookup_fd(l), .events = POLLIN};
    while (poll(&wait, 1, -1) != 1)
        ;
    assert_true(lookup_done(l));
}

TEST(names_are_found_or_not)
{
    lookup *l;
    socket_address a;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(lookup_start("known", 6001, &l, &error), error);
    wait_for(l);
    assert_ok(lookup_result(l, &a, &error), error);
    assert_string_equal(a.text, "127.0.0.7:6001");
    lookup_drop(&l);
    assert_ok(lookup_start("unknown", 6001, &l, &error), error);
    wait_for(l);
    assert_int_equal(lookup_result(l, &a, &error), FANIN_ERR_UNREACHABLE);
    assert_non_null(strstr(error.message, "the name unknown cannot be resolved"));
    lookup_drop(&l);
    lookup_drop(&l);
}

static void expect_of_several(const socket_address *wanted, uint16_t port)
{
    lookup *l;
    socket_address a;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(lookup_start("several", port, &l, &error), error);
    wait_for(l);
    assert_ok(lookup_result(l, &a, &error), error);
    assert_string_equal(a.text, wanted->text);
    lookup_drop(&l);
}

TEST(of_several_addresses_one_that_accepts_is_taken)
{
    socket_address first, second;
    fanin_error error = FANIN_ERROR_INIT;
    int fd;
    assert_ok(socket_resolve("127.0.0.8:0", &second, &error), error);
    assert_ok(socket_listen(&second, 1, &fd, &error), error);
    uint16_t port = socket_port(fd);
    socket_set_port(&second, port);
    expect_of_several(&second, port);
    close(fd);
    assert_ok(socket_resolve("127.0.0.7:0", &first, &error), error);
    socket_set_port(&first, port);
    expect_of_several(&first, port); /* both refuse */
}

TEST(an_answer_may_come_after_the_interest)
{
    lookup *l;
    socket_address a;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(lookup_start("silent", 6001, &l, &error), error);
    wait_until_asked();
    assert_false(lookup_done(l));
    assert_int_equal(lookup_result(l, &a, &error), FANIN_ERR_TIMEOUT);
    assert_non_null(strstr(error.message, "the name silent was not resolved"));
    lookup_drop(&l);
    let_answer(1);
}

/* ------------------------------------------------------------ of a client */

static fanin_client *make_client(void)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.path = FANIN_PATH_STREAM;
    config.no_unix = true;
    fanin_client *client = NULL;
    assert_works(fanin_client_create(&config, &client, ERROR));
    return client;
}

TEST(a_call_ends_at_its_deadline)
{
    unsigned before = atomic_load(&n_asked);
    fanin_client *client = make_client();
    fanin_error error = FANIN_ERROR_INIT;
    static const char *const ranks[] = {"127.0.0.1:1", "silent:6001", "silent:6002",
                                        "silent2:6003"};
    assert_int_equal(fanin_client_connect(client, ranks, 4, 50, &error),
                     FANIN_ERR_TIMEOUT);
    assert_string_equal(error.address, "silent");
    assert_non_null(strstr(error.remedy, "name server"));
    wait_until_asked();
    wait_until_asked();
    assert_int_equal(atomic_load(&n_asked), before + 2); /* each name once */
    assert_int_equal(atomic_load(&n_nameless), 0);
    let_answer(2);
    fanin_client_destroy(&client);
}

static void *cancel_when_asked(void *cookie)
{
    wait_until_asked();
    fanin_client_cancel(cookie);
    return NULL;
}

TEST(a_call_can_be_cancelled)
{
    fanin_client *client = make_client();
    fanin_error error = FANIN_ERROR_INIT;
    static const char *const ranks[] = {"silent:6001"};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, cancel_when_asked, client), 0);
    assert_int_equal(fanin_client_connect(client, ranks, 1, 600000, &error),
                     FANIN_ERR_CANCELLED);
    pthread_join(thread, NULL);
    let_answer(1);
    fanin_client_destroy(&client);
}

TEST(unknown_names_are_named)
{
    fanin_client *client = make_client();
    fanin_error error = FANIN_ERROR_INIT;
    static const char *const ranks[] = {"known:1", "unknown:6002"};
    assert_int_equal(fanin_client_connect(client, ranks, 2, 5000, &error),
                     FANIN_ERR_UNREACHABLE);
    assert_string_equal(error.address, "unknown");
    fanin_client_destroy(&client);
}

int main(void)
{
    if (sem_init(&asked, 0, 0) != 0 || sem_init(&answer, 0, 0) != 0 ||
        sem_init(&answered, 0, 0) != 0)
        return 1;
    return tests_run(NULL);
}
