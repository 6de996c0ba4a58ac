/* SPDX-License-Identifier: Apache-2.0 */
/* Certificates between a rank and readers over TCP: who has one of the job and the role reads or is
   read, and everybody else is refused by a sentence that says which file, which identity, and what
   to do. */
#include "certificates.h"
#include "ends.h"
#include "own_file.h"
#include "secrets.h"
#include "tls.h"
#include "testing.h"
#include "thread.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#define ROWS 60
#define COLUMNS 40000

static uint32_t published[ROWS * COLUMNS], landed[ROWS * COLUMNS];
static char folder[] = "/tmp/certified-XXXXXX";
static fanin_error error;

/* Somebody whose own end does not look at whom its certificate is for. */
static const identity *claims;
fanin_status __real_certificates_new(const openssl *o, const certificate_files *files,
                                     const identity *wanted, const logger *log,
                                     certificates **out, fanin_error *e);
fanin_status __wrap_certificates_new(const openssl *o, const certificate_files *files,
                                     const identity *wanted, const logger *log,
                                     certificates **out, fanin_error *e);
fanin_status __wrap_certificates_new(const openssl *o, const certificate_files *files,
                                     const identity *wanted, const logger *log,
                                     certificates **out, fanin_error *e)
{
    return __real_certificates_new(o, files, claims ? claims : wanted, log, out, e);
}

/* A file system that does not answer: whoever reads this file stays there until it is let go. A log
   that does not either has a word of the message instead. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    const char *hangs; /* what a file's name holds */
    bool is_there;     /* somebody is */
} disk = {.lock = PTHREAD_MUTEX_INITIALIZER};

fanin_status __real_own_file_read(const own_file_rules *rules, const char *path,
                                  void *out, size_t room, size_t *size_out,
                                  fanin_error *e);
fanin_status __wrap_own_file_read(const own_file_rules *rules, const char *path,
                                  void *out, size_t room, size_t *size_out,
                                  fanin_error *e);
static void stay(const char *where)
{
    const deadline until = deadline_in_ms(60000);
    pthread_mutex_lock(&disk.lock);
    while (disk.hangs && strstr(where, disk.hangs)) {
        disk.is_there = true;
        pthread_cond_broadcast(&disk.turn);
        assert_true(condition_wait(&disk.turn, &disk.lock, until));
    }
    pthread_mutex_unlock(&disk.lock);
}

fanin_status __wrap_own_file_read(const own_file_rules *rules, const char *path,
                                  void *out, size_t room, size_t *size_out,
                                  fanin_error *e)
{
    stay(path);
    return __real_own_file_read(rules, path, out, room, size_out, e);
}

static void hang(const char *name) /* NULL: no more */
{
    pthread_mutex_lock(&disk.lock);
    disk.hangs = name;
    disk.is_there = false;
    pthread_cond_broadcast(&disk.turn);
    pthread_mutex_unlock(&disk.lock);
}

static void wait_until_it_hangs(void)
{
    const deadline until = deadline_in_ms(10000);
    pthread_mutex_lock(&disk.lock);
    while (!disk.is_there)
        assert_true(condition_wait(&disk.turn, &disk.lock, until));
    pthread_mutex_unlock(&disk.lock);
}

typedef struct files {
    char cert[64], key[64], ca[64];
} files;

static files of(const char *name, const char *ca)
{
    files f;
    snprintf(f.cert, sizeof f.cert, "%s/%s.pem", folder, name);
    snprintf(f.key, sizeof f.key, "%s/%s.key", folder, name);
    snprintf(f.ca, sizeof f.ca, "%s/%s.pem", folder, ca);
    return f;
}

/* What the log said last of sessions and certificates. */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char logged[1024];
static void log_fn(void *cookie, fanin_log_level level, const char *event,
                   const char *message)
{
    (void)cookie;
    (void)level;
    pthread_mutex_lock(&log_lock);
    if (strcmp(event, "session-refused") == 0 || strcmp(event, "certificates") == 0)
        snprintf(logged, sizeof logged, "%s", message);
    pthread_mutex_unlock(&log_lock);
    if (strcmp(event, "certificates") == 0)
        stay(strstr(message, "read anew") ? "read anew" : "");
}

static bool is_logged(const char *words)
{
    pthread_mutex_lock(&log_lock);
    bool found = strstr(logged, words) != NULL;
    pthread_mutex_unlock(&log_lock);
    return found;
}

/* The rank's log may come after its alert. */
static void expect_logged(const char *words)
{
    for (int i = 0; i < 2000 && !is_logged(words); i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    pthread_mutex_lock(&log_lock);
    assert_says(logged, words);
    pthread_mutex_unlock(&log_lock);
}

static fanin_status make(const files *f, fanin_server **out)
{
    fanin_server_config config = make_server_config();
    config.secret_file = "";
    config.tls_cert = f->cert;
    config.tls_key = f->key;
    config.tls_ca = f->ca;
    config.log = log_fn;
    error = (fanin_error)FANIN_ERROR_INIT;
    return fanin_server_create(&config, out, &error);
}

static fanin_server *start(const char *name, const char *ca, char address[32])
{
    fanin_server *server = NULL;
    const files f = of(name, ca);
    assert_ok(make(&f, &server), error);
    snprintf(address, 32, "127.0.0.1:%u", fanin_server_port(server));
    publish_matrix(server, published, ROWS, COLUMNS);
    return server;
}

static fanin_status pull_by(const char *address, const fanin_client_config *config)
{
    fanin_client *client = NULL;
    fanin_result *result = NULL;
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_box box;
    fanin_tensor tensor =
        make_tensor("matrix", FANIN_DTYPE_U32, ROWS, COLUMNS, &box, landed);
    memset(landed, 0, sizeof landed);
    error = (fanin_error)FANIN_ERROR_INIT;
    options.timeout_ms = 5000;
    fanin_status status = fanin_client_create(config, &client, &error);
    if (status == FANIN_OK)
        status = fanin_client_connect(client, &address, 1, 4000, &error);
    if (status == FANIN_OK)
        status = fanin_client_pull(client, &options, &tensor, 1, &result, &error);
    fanin_result_free(&result);
    fanin_client_destroy(&client);
    if (status == FANIN_OK)
        assert_memory_equal(landed, published, sizeof landed);
    return status;
}

static fanin_client_config reader_of(const files *f)
{
    fanin_client_config config = make_client_config();
    config.no_unix = true;
    config.connect_timeout_ms = config.lost_ms = 3000;
    config.secret_file = "";
    config.tls_cert = f->cert;
    config.tls_key = f->key;
    config.tls_ca = f->ca;
    return config;
}

static fanin_status pull(const char *address, const char *name, const char *ca)
{
    const files f = of(name, ca);
    const fanin_client_config config = reader_of(&f);
    return pull_by(address, &config);
}

static void expect_refused(const char *words)
{
    assert_int_equal(error.status, FANIN_ERR_AUTH);
    assert_says(error.message, words);
    assert_true(error.remedy[0] != '\0');
}

TEST(who_has_one_pulls)
{
    static const char *const ranks[] = {"rank0", "ranks"};
    char address[32];
    for (int i = 0; i < 2; i++) {
        fanin_server *server = start(ranks[i], "ca", address);
        assert_ok(pull(address, "reader", "ca"), error);
        assert_ok(pull(address, "both", "ca"), error);
        assert_ok(pull(address, "chained", "ca"), error);
        fanin_server_destroy(&server, 0);
    }
}

/* What a reader's own end does not find, the rank does. */
TEST(readers_are_refused)
{
    static const identity rank = {.job = "job", .role = AS_ANY_RANK};
    char address[32];
    fanin_server *server = start("rank0", "ca", address);
    (void)pull(address, "foreign", "ca");
    expect_refused("does not believe the certificate");
    assert_says(error.message, "foreign.pem (\"fanin://job/reader\")");
    expect_logged("\"fanin://job/reader\", is not believed");
    (void)pull(address, "served", "ca");
    expect_refused("does not believe the certificate");
    expect_logged("purpose");
    claims = &rank; /* a rank's certificate; its own rank's at that */
    (void)pull(address, "rank0", "ca");
    claims = NULL;
    expect_refused("");
    expect_logged("\"fanin://job/rank/0\", and not for \"fanin://job/reader\"");
    fanin_server_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(fanin_server_get_stats(server, &stats), FANIN_OK);
    assert_true(stats.sessions_refused >= 3);
    fanin_server_destroy(&server, 0);
}

TEST(ranks_are_refused)
{
    static const identity other_rank = {.job = "job", .role = AS_RANK, .rank = 3},
                          other_job = {.job = "job2", .role = AS_READER},
                          reader = {.job = "job", .role = AS_READER},
                          relay = {.job = "job", .role = AS_RELAY};
    static const struct {
        const char *cert;
        const identity *claims;
        const char *words;
    } cases[] = {
        {"rank3", &other_rank,
         "is rank 0, and its certificate is not \"fanin://job/rank/0\""},
        {"reader", &reader, "\"fanin://job/reader\", and is to be a rank of \"job\""},
        {"elsewhere", &other_job, "for \"fanin://job2/reader\", and is to be"},
        {"relay", &relay, "\"fanin://job/relay/worker-7\", and is to be a rank of"},
        {"foreign-rank", &other_rank,
         "for \"fanin://job/rank/3\" that is not believed"},
    };
    char address[32];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fanin_server *server = NULL;
        claims = cases[i].claims;
        server = start(cases[i].cert, "ca", address);
        claims = NULL;
        (void)pull(address, "reader", "ca");
        expect_refused(cases[i].words);
        fanin_server_destroy(&server, 0);
    }
}

static tls_end *end_of(const char *name, identity_role role)
{
    const files f = of(name, "ca");
    const certificate_files paths = {f.cert, f.key, f.ca};
    const identity wanted = {.role = role, .rank = 0};
    tls_end *end = NULL;
    assert_ok(tls_end_by_certificate(&paths, &wanted, NULL, &end, &error), error);
    return end;
}

/* What a reader that wants a relay thinks of who listens by that certificate. */
static tls_fault meet(const char *name, identity_role role, bool *is_relay)
{
    static const uint8_t id[16];
    tls_end *ends[2] = {end_of(name, role), end_of("relay", AS_READER)};
    tls *t[2];
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    for (int i = 0; i < 2; i++)
        assert_non_null(t[i] = tls_new(ends[i], fds[i]));
    tls_expect_relay(t[1]);
    for (int turn = 0; turn < 16; turn++)
        (void)tls_handshake(t[turn % 2]);
    tls_fault fault = tls_failed(t[1]);
    *is_relay = tls_check_relay(t[1], id, id, NULL, 0);
    for (int i = 0; i < 2; i++) {
        tls_free(&t[i]);
        tls_end_free(&ends[i]);
        close(fds[i]);
    }
    return fault;
}

/* A worker's certificate names it as a reader and as a relay; a rank's is no relay's. */
TEST(ranks_and_relays_are_told_apart)
{
    bool is_relay;
    assert_int_equal(meet("relay", AS_RELAY, &is_relay), TLS_FINE);
    assert_true(is_relay);
    assert_int_equal(meet("rank0", AS_RANK, &is_relay), TLS_OTHER_NAME);
    assert_false(is_relay);
    assert_int_equal(meet("ranks", AS_RANK, &is_relay), TLS_OTHER_NAME);
    fanin_server_config c = make_server_config();
    const files f = of("reader", "ca");
    fanin_server *server = NULL;
    c.flags |= FANIN_SERVER_RELAY;
    c.tls_cert = f.cert;
    c.tls_key = f.key;
    c.tls_ca = f.ca;
    assert_int_equal(fanin_server_create(&c, &server, &error), FANIN_ERR_AUTH);
    assert_says(error.message, "needs \"fanin://JOB/relay/NAME\"");
}

/* One end has no certificate, or a secret instead. */
TEST(both_ends_need_one)
{
    char address[32];
    fanin_client_config plain = make_client_config();
    plain.no_unix = true;
    plain.connect_timeout_ms = 3000;
    fanin_server *server = start("rank0", "ca", address);
    plain.secret_file = plain.tls_cert = plain.tls_key = plain.tls_ca = "";
    (void)pull_by(address, &plain);
    expect_refused("demands a certificate");
    assert_says(error.remedy, "--tls-cert");
    plain.secret_file = secret_of('1');
    (void)pull_by(address, &plain);
    expect_refused("did not use the secret");
    fanin_server_destroy(&server, 0);
    fanin_server_config config = make_server_config();
    config.secret_file = secret_of('1');
    server = make_server(&config, address, 32);
    (void)pull(address, "reader", "ca");
    expect_refused("takes no certificates");
    fanin_server_destroy(&server, 0);
    config.secret_file = "";
    server = make_server(&config, address, 32);
    (void)pull(address, "reader", "ca");
    expect_refused("has no certificate, and this process has one");
    fanin_server_destroy(&server, 0);
}

TEST(own_certificates_are_checked)
{
    static const struct {
        const char *cert, *words;
        fanin_status status;
    } cases[] = {
        {"rank0",
         "is for \"fanin://job/rank/0\", and this process needs \"fanin://JOB/reader\"",
         FANIN_ERR_AUTH},
        {"nobody", "is for nobody", FANIN_ERR_AUTH},
        {"two", "of one job alone", FANIN_ERR_AUTH},
        {"expired", "has expired", FANIN_ERR_AUTH},
        {"missing", "cannot read the certificate file", FANIN_ERR_NOT_FOUND},
    };
    fanin_server *server = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(pull("127.0.0.1:1", cases[i].cert, "ca"), cases[i].status);
        assert_says(error.message, cases[i].words);
        assert_says(error.message, cases[i].cert);
    }
    files f = of("rank3", "ca");
    assert_int_equal(make(&f, &server), FANIN_ERR_AUTH);
    assert_says(error.message, "needs \"fanin://JOB/rank/0\"");
    f = of("rank0", "ca");
    snprintf(f.key, sizeof f.key, "%s/rank3.key", folder);
    assert_int_equal(make(&f, &server), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "rank3.key is not that of the certificate");
    f = of("rank0", "ca");
    memcpy(f.ca, f.key, sizeof f.ca);
    assert_int_equal(make(&f, &server), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "holds no certificate");
    f = of("rank0", "ca");
    memcpy(f.key, f.cert, sizeof f.key);
    assert_int_equal(make(&f, &server), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "holds no private key");
    assert_null(server);
}

TEST(files_of_others_are_refused)
{
    fanin_server *server = NULL;
    files f = of("rank0", "ca");
    const struct {
        const char *path;
        mode_t mode;
        const char *words;
    } cases[] = {
        {f.key, 0640, "has mode 0640: others than its owner may use it"},
        {f.cert, 0664, "has mode 0664: others than its owner may write it"},
        {f.ca, 0646, "has mode 0646: others than its owner may write it"},
    };
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(chmod(cases[i].path, cases[i].mode), 0);
        fanin_status status = make(&f, &server);
        assert_int_equal(chmod(cases[i].path, 0600), 0);
        if (geteuid() == 0 &&
            cases[i].mode == 0640) { /* root's group may read root's */
            assert_ok(status, error);
            fanin_server_destroy(&server, 0);
            continue;
        }
        assert_int_equal(status, FANIN_ERR_AUTH);
        assert_says(error.message, cases[i].words);
        assert_says(error.remedy, "chmod");
    }
    assert_int_equal(chmod(f.cert, 0644), 0); /* it is no secret */
    assert_ok(make(&f, &server), error);
    fanin_server_destroy(&server, 0);
}

TEST(one_kind_is_given)
{
    fanin_client *client = NULL;
    const files f = of("reader", "ca");
    fanin_client_config config = reader_of(&f);
    config.secret_file = secret_of('1');
    assert_int_equal(fanin_client_create(&config, &client, &error), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "both a launch's secret and certificates");
    config.secret_file = NULL;
    config.tls_key = "";
    assert_int_equal(fanin_client_create(&config, &client, &error), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "without its key");
    /* What is configured goes before the environment's of the other kind; that of both is refused.
       */
    config = reader_of(&f);
    config.secret_file = NULL;
    setenv("FANIN_SECRET_FILE", "/nowhere", 1);
    assert_ok(fanin_client_create(&config, &client, &error), error);
    fanin_client_destroy(&client);
    setenv("FANIN_TLS_CERT", f.cert, 1);
    setenv("FANIN_TLS_KEY", f.key, 1);
    setenv("FANIN_TLS_CA", f.ca, 1);
    config.tls_cert = config.tls_key = config.tls_ca = NULL;
    assert_int_equal(fanin_client_create(&config, &client, &error), FANIN_ERR_ARGUMENT);
    unsetenv("FANIN_SECRET_FILE");
    assert_ok(fanin_client_create(&config, &client, &error), error);
    fanin_client_destroy(&client);
    unsetenv("FANIN_TLS_CERT");
    unsetenv("FANIN_TLS_KEY");
    unsetenv("FANIN_TLS_CA");
}

static void replace(const char *name, const char *by)
{
    char from[64], to[64], step[64];
    static const char *const kinds[] = {"pem", "key"};
    for (int i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "%s/%s.%s", folder, by, kinds[i]);
        snprintf(to, sizeof to, "%s/%s.%s", folder, name, kinds[i]);
        snprintf(step, sizeof step, "%s/step", folder);
        assert_int_equal(link(from, step), 0);
        assert_int_equal(rename(step, to), 0);
    }
}

/* Until the log says so, or 10 s are over. */
static void connect_until(const char *address, const char *words)
{
    for (int i = 0; i < 200 && !is_logged(words); i++) {
        assert_ok(pull(address, "reader", "ca"), error);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    expect_logged(words);
}

TEST(new_files_are_read)
{
    char address[32];
    replace("turning", "ranks");
    fanin_server *server = start("turning", "ca", address);
    assert_ok(pull(address, "reader", "ca"), error);
    replace("turning", "elsewhere");
    connect_until(address, "new ones cannot be used, those read before stay");
    expect_logged("fanin://job2/reader");
    replace("turning", "rank0");
    connect_until(address, "read anew");
    fanin_server_destroy(&server, 0);
}

/* @p name.pem: @p a and what is left of @p b without so many bytes. */
static void join_files(const char *name, const char *a, const char *b, long without)
{
    char command[320];
    snprintf(
        command, sizeof command,
        "cd %s && cat %s.pem >step && head -c -%ld %s.pem >>step && mv step %s.pem",
        folder, a, without, b, name);
    assert_int_equal(system(command), 0); /* NOLINT(cert-env33-c): its own folder */
}

/* A file that was being written, or copied to a full disk. What cannot be read is not left out
   without a word. */
TEST(torn_files_are_refused)
{
    fanin_server *server = NULL;
    char address[32];
    const files f = of("rank0", "several");
    join_files("several", "other", "ca", 100);
    assert_int_equal(make(&f, &server), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "several.pem is damaged");
    assert_says(error.message, "number 2");
    join_files("torn", "leaf", "middle", 100);
    assert_int_equal(pull("127.0.0.1:1", "torn", "ca"), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "torn.pem is damaged");
    join_files("several", "other", "ca", 0);
    server = start("rank0", "several", address);
    assert_ok(pull(address, "reader", "ca"), error);
    join_files("several", "other", "ca", 100);
    connect_until(address, "new ones cannot be used, those read before stay");
    expect_logged("several.pem is damaged");
    assert_ok(pull(address, "reader", "ca"), error);
    fanin_server_destroy(&server, 0);
}

/* Of the same file system as everything else of the rank, but for the thread that looks. */
TEST(files_that_do_not_answer_stop_nobody)
{
    char address[32];
    replace("turning", "ranks");
    fanin_server *server = start("turning", "ca", address);
    hang("turning");
    replace("turning", "rank0");
    wait_until_it_hangs();
    connect_until(address, "does not answer");
    hang(NULL);
    expect_logged("read anew");
    assert_ok(pull(address, "reader", "ca"), error);
    hang("turning");
    replace("turning", "ranks");
    wait_until_it_hangs();
    fanin_server_destroy(&server, 0); /* which leaves the thread to itself */
    hang(NULL);
}

static atomic_bool let_go;

/* Later than the end waits for files. */
static void *let_go_later(void *cookie)
{
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    atomic_store(&let_go, true);
    hang(NULL);
    return cookie;
}

/* The thread that looks is in the log: connections are made meanwhile, and the end waits for it. */
TEST(a_log_that_does_not_answer_stops_nobody)
{
    char address[32];
    pthread_t thread;
    replace("telling", "ranks");
    fanin_server *server = start("telling", "ca", address);
    hang("read anew");
    replace("telling", "rank0");
    wait_until_it_hangs();
    assert_ok(pull(address, "reader", "ca"), error);
    assert_int_equal(pthread_create(&thread, NULL, let_go_later, NULL), 0);
    fanin_server_destroy(&server, 0);
    /* Else the log's function, the owner's, would have outlived the server. */
    assert_true(let_go);
    pthread_join(thread, NULL);
}

static int tear_down(void **state)
{
    char command[128];
    secrets_remove();
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command); /* NOLINT(cert-env33-c): of the test's own folder */
}

TESTS_BETWEEN(NULL, tear_down)

int main(void)
{
    const openssl *o;
    char command[512];
    const char *source = getenv("FANIN_SOURCE_DIR");
    if (openssl_load(&o, &error) != FANIN_OK || !source || !mkdtemp(folder)) {
        printf("1..0 # SKIP %s\n", error.message);
        return 77;
    }
    snprintf(
        command, sizeof command,
        "command -v openssl >/dev/null && '%s/tests/support/make-certificates' '%s'",
        source, folder);
    if (system(command) != 0) { /* NOLINT(cert-env33-c): the build's own */
        printf("1..0 # SKIP it needs the command openssl\n");
        (void)tear_down(NULL);
        return 77;
    }
    condition_init(&disk.turn);
    return tests_run(NULL);
}
