/* SPDX-License-Identifier: Apache-2.0 */
/* A launch's secret between a rank and readers over TCP: who has it pulls, and nobody else gets
   anything, in bounded time and with a sentence that says why. */
#include "ends.h"
#include "log_catcher.h"
#include "open_files.h"
#include "rank_proxy.h"
#include "secrets.h"
#include "secured_peer.h"
#include "server_peer.h"
#include "testing.h"
#include "tls.h"
#include <sys/socket.h>

#define ROWS 60
#define COLUMNS 40000 /* nine megabytes: more than sockets and TLS hold */

static uint32_t published[ROWS * COLUMNS], landed[ROWS * COLUMNS];

/* Proofs from this one on, counted from 0, are another rank's; -1: none. For one there is no
   memory. */
static int proofs, false_from = -1, lacking = -1;
bool __real_tls_prove_rank(const tls *t, uint8_t out[TLS_PROOF_SIZE]);
bool __wrap_tls_prove_rank(const tls *t, uint8_t out[TLS_PROOF_SIZE]);
bool __wrap_tls_prove_rank(const tls *t, uint8_t out[TLS_PROOF_SIZE])
{
    bool good = __real_tls_prove_rank(t, out) && proofs != lacking;
    if (false_from >= 0 && proofs >= false_from)
        out[5] ^= 1;
    proofs++;
    return good;
}

/* A reader has no memory for the key that a rank's proof is checked with. */
static bool is_poor;
bool __real_launch_key(const openssl *o, const uint8_t root[KEY_SIZE],
                       const char *identity, uint8_t out[KEY_SIZE]);
bool __wrap_launch_key(const openssl *o, const uint8_t root[KEY_SIZE],
                       const char *identity, uint8_t out[KEY_SIZE]);
bool __wrap_launch_key(const openssl *o, const uint8_t root[KEY_SIZE],
                       const char *identity, uint8_t out[KEY_SIZE])
{
    return !(is_poor && strstr(identity, "/rank/")) &&
           __real_launch_key(o, root, identity, out);
}

static fanin_server *start(const char *secret, char address[32])
{
    fanin_server_config config = make_server_config();
    config.secret_file = secret;
    fanin_server *server = make_server(&config, address, 32);
    publish_matrix(server, published, ROWS, COLUMNS);
    return server;
}

static fanin_error error;

/* Connects and pulls; what came of it is in `error`. */
static fanin_status pull(const char *address, const char *secret, unsigned streams,
                         bool no_unix)
{
    fanin_client_config config = make_client_config();
    config.no_unix = no_unix;
    config.secret_file = secret;
    config.streams_per_rank = streams;
    config.connect_timeout_ms = config.lost_ms = 3000;
    fanin_client *client = make_client(&config);
    fanin_result *result = NULL;
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = 5000;
    fanin_box box;
    fanin_tensor tensor =
        make_tensor("matrix", FANIN_DTYPE_U32, ROWS, COLUMNS, &box, landed);
    memset(landed, 0, sizeof landed);
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = fanin_client_connect(client, &address, 1, 4000, &error);
    if (status == FANIN_OK)
        status = fanin_client_pull(client, &options, &tensor, 1, &result, &error);
    fanin_result_free(&result);
    fanin_client_destroy(&client);
    return status;
}

static void expect_right(void)
{
    assert_memory_equal(landed, published, sizeof landed);
}

static unsigned files;

static int count_files(void **state)
{
    files = open_files();
    return 0;
}

static int expect_as_many_files(void **state)
{
    assert_int_equal(open_files(), files);
    return 0;
}

#define CASE(name) TEST_WITH(name, count_files, expect_as_many_files)

CASE(who_has_it_pulls)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    assert_ok(pull(address, secret_of('1'), 1, true), error);
    expect_right();
    assert_ok(pull(address, secret_of('1'), 4, true), error);
    expect_right();
    assert_ok(pull(address, secret_of('2'), 1, false),
              error); /* the kernel says who it is */
    expect_right();
    fanin_server_destroy(&server, 0);
}

static void expect_refused(const char *words, const char *remedy)
{
    assert_int_equal(error.status, FANIN_ERR_AUTH);
    assert_says(error.message, words);
    assert_says(error.remedy, remedy);
    assert_null(strstr(error.message, "55555555")); /* of the secret: no port */
    assert_null(strstr(error.remedy, "55555555"));
}

CASE(others_are_refused)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    (void)pull(address, secret_of('2'), 1, true);
    expect_refused("another secret", "one launch");
    assert_says(error.message, secret_of('2'));
    assert_says(error.message, IDENTITY_READER);
    (void)pull(address, "", 1, true);
    expect_refused("demands the launch's secret", "--secret-file");
    fanin_server_stats stats = {.struct_size = sizeof stats};
    assert_int_equal(fanin_server_get_stats(server, &stats), FANIN_OK);
    assert_true(stats.sessions_refused >= 2);
    fanin_server_destroy(&server, 0);
    server = start("", address);
    (void)pull(address, secret_of('1'), 1, true);
    expect_refused("has no secret", "secret");
    assert_says(error.message, secret_of('1'));
    fanin_server_destroy(&server, 0);
}

/* A rank that has the readers' key, and that of another rank, or none. */
CASE(ranks_that_prove_nothing_are_refused)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    for (int from = 0; from < 2;
         from++) { /* the control connection's; the data connection's */
        proofs = 0;
        false_from = from;
        (void)pull(address, secret_of('1'), 1, true);
        expect_refused("does not prove to be \"fanin/1/rank/",
                       from ? "" : "new secret");
    }
    false_from = -1;
    assert_ok(pull(address, secret_of('1'), 1, true), error);
    fanin_server_destroy(&server, 0);
}

/* Neither is an intruder: that ends the job's pulls, and has people look for who has the secret. */
CASE(who_lacks_memory_is_no_impostor)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    lacking = proofs = 0; /* the control connection's */
    assert_int_equal(pull(address, secret_of('1'), 1, true), FANIN_ERR_UNREACHABLE);
    assert_says(error.message, "closed the connection");
    assert_says(error.remedy, "its log");
    lacking = 1; /* the data connection's: another one is made */
    proofs = 0;
    assert_ok(pull(address, secret_of('1'), 1, true), error);
    assert_true(proofs > 2);
    lacking = -1;
    is_poor = true;
    assert_int_equal(pull(address, secret_of('1'), 1, true), FANIN_ERR_MEMORY);
    is_poor = false;
    assert_says(error.message, "out of memory");
    assert_says(error.remedy, "free memory");
    fanin_server_destroy(&server, 0);
}

static void pull_by_link(const char *address, bool altered)
{
    fanin_status status = pull(address, secret_of('1'), 1, true);
    if (!altered)
        assert_ok(status, error);
    if (status == FANIN_OK)
        expect_right();
    else
        assert_true(error.message[0] != '\0');
}

CASE(no_altered_bit_arrives)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    rank_proxy_flip_all(fanin_server_port(server), pull_by_link);
    fanin_server_destroy(&server, 0);
}

static bool on_change(void *cookie, const fanin_watch_event *event)
{
    return true;
}

/* A bit of what goes this way once all is up: both ends say that it is the way, and where to look.
   */
static void altered(flip_way way, const char *words_of_reader,
                    const char *words_of_rank)
{
    char address[32];
    const char *addresses[] = {address};
    rank_proxy proxy;
    flip f = {.way = way, .at = UINT64_MAX};
    fanin_server_config of_rank = make_server_config();
    fanin_client_config of_reader = make_client_config();
    of_rank.secret_file = of_reader.secret_file = secret_of('1');
    of_rank.log = log_catch;
    of_reader.no_unix = true;
    log_listen("tls-broken");
    fanin_server *server = make_server(&of_rank, address, sizeof address);
    rank_proxy_start_flip(&proxy, fanin_server_port(server), &f);
    memcpy(address, proxy.address, sizeof address);
    fanin_client *client = connect_client(&of_reader, addresses, 1);
    atomic_store(&f.at, atomic_load(&f.passed[0][way]) + 20);
    error = (fanin_error)FANIN_ERROR_INIT;
    assert_int_equal(
        fanin_client_watch(client, "lora:0", 20000, on_change, NULL, &error),
        FANIN_ERR_TRANSPORT);
    assert_says(error.message, words_of_reader);
    assert_says(error.remedy, "alter what passes");
    log_expect(1, words_of_rank);
    fanin_client_destroy(&client);
    fanin_server_destroy(&server, 0);
    rank_proxy_stop(&proxy);
}

CASE(who_alters_is_told_of)
{
    altered(FLIP_TO_RANK, "alert bad record mac",
            "cannot go on by TLS: decryption failed or bad record mac");
    altered(FLIP_TO_CLIENT, "cannot go on by TLS: decryption failed or bad record mac",
            "alert bad record mac");
}

/* Where each connection breaks, for as long as the pull may take: its end says what it was, and the
   rank has not shaken hands as fast as it can all the while. */
CASE(a_way_that_alters_is_tried_with_pauses)
{
    char address[32];
    fanin_server *server = start(secret_of('1'), address);
    rank_proxy proxy;
    flip f = {.connection = FLIP_EACH, .way = FLIP_TO_CLIENT, .at = 2000};
    rank_proxy_start_flip(&proxy, fanin_server_port(server), &f);
    assert_int_equal(pull(proxy.address, secret_of('1'), 1, true), FANIN_ERR_TIMEOUT);
    assert_says(error.message,
                "cannot go on by TLS: decryption failed or bad record mac");
    assert_says(error.remedy, "alter what passes");
    assert_true(proxy.accepted[0] <
                250); /* some 140, and 700 with pauses that do not grow */
    fanin_server_destroy(&server, 0);
    rank_proxy_stop(&proxy);
}

/* Half a handshake, and what is none, ends soon, and keeps nobody else from reading. */
CASE(unfinished_handshakes_end)
{
    static const uint8_t half[] = {0x16, 3, 1, 2, 0, 1};
    char address[32];
    uint8_t heard;
    fanin_server *server = start(secret_of('1'), address);
    peer slow = peer_connect(server), wrong = peer_connect(server);
    peer_send_raw(&slow, half, sizeof half);
    peer_send_raw(&wrong, "\x16\x03\x01\x00\x10garbage, garbage", 21);
    assert_ok(pull(address, secret_of('1'), 1, true), error);
    peer_expect_closed(&slow);
    assert_true(peer_receive_raw(&wrong, &heard, 1));
    assert_int_equal(heard, TLS_NO_SECRET_ALERT[0]); /* an alert's first byte */
    while (peer_receive_raw(&wrong, &heard, 1))
        ;
    server_close_peers();
    fanin_server_destroy(&server, 0);
}

static peer speak(fanin_server *server, const tls_end *end, role as,
                  const uint8_t session[16])
{
    peer p = secured_peer(server, end);
    peer_hello(&p, as, session);
    return p;
}

/* Each has the launch's key, and none attaches to another's session or reads by another's lease:
   the id of a
   session is told to its own control connection alone, and no connection without TLS is heard. */
CASE(sessions_are_their_own)
{
    static uint8_t memory[64];
    const uint8_t guess[16] = {1};
    const read_entry all = {.box = 0, .length = sizeof memory};
    tls_end *reader;
    uint8_t got[sizeof memory];
    fanin_server_config config = server_config();
    config.secret_file = secret_of('1');
    fanin_server *server = server_publish(&config, memory, sizeof memory);
    assert_ok(tls_end_by_secret(secret_of('1'), NULL, &reader, &error), error);
    peer one = speak(server, reader, ROLE_CONTROL, guess);
    peer other = speak(server, reader, ROLE_CONTROL, guess);
    assert_memory_not_equal(one.session, other.session, sizeof one.session);
    peer data = speak(server, reader, ROLE_DATA, one.session);
    peer theirs = speak(server, reader, ROLE_DATA, other.session);
    grant g = peer_lease(&one);
    peer_read(&data, &g, &all, 1, got, sizeof got);
    /* By its own connection and the other's lease, and by a session that it has thought up. */
    peer_request_read(&theirs, g.token, sizeof memory, &all, 1);
    peer_expect_error(&theirs, FANIN_ERR_STALE);
    peer stranger = secured_peer(server, reader);
    peer_request_hello(&stranger, &(msg_hello){.version_min = VERSION_MIN,
                                               .version_max = VERSION_MAX,
                                               .role = ROLE_DATA,
                                               .id = {1}});
    assert_says(peer_expect_error(&stranger, FANIN_ERR_CLOSED).message, "is gone");
    /* Outside of TLS the right id is of no use. */
    stranger = peer_connect(server);
    msg_hello hello = {
        .version_min = VERSION_MIN, .version_max = VERSION_MAX, .role = ROLE_DATA};
    memcpy(hello.id, one.session, sizeof hello.id);
    peer_request_hello(&stranger, &hello);
    stranger.request = 0;
    peer_expect_error(&stranger, FANIN_ERR_AUTH);
    peer_read(&data, &g, &all, 1, got, sizeof got);
    server_close_peers();
    secured_peers_end();
    tls_end_free(&reader);
    server_stop(&server, 0);
}

CASE(bad_files_are_told)
{
    fanin_client *client = NULL;
    fanin_server *server = NULL;
    fanin_client_config reader = make_client_config();
    fanin_server_config rank = make_server_config();
    reader.secret_file = rank.secret_file = "/nowhere/secret";
    assert_int_equal(fanin_client_create(&reader, &client, &error),
                     FANIN_ERR_NOT_FOUND);
    assert_says(error.message, "/nowhere/secret");
    assert_int_equal(fanin_server_create(&rank, &server, &error), FANIN_ERR_NOT_FOUND);
    assert_says(error.remedy, "nixl-fetch secret");
    assert_true(!client && !server);
}

/* The first server of a process opens what the process keeps. */
static int start_once(void **state)
{
    char address[32];
    fanin_server *server = start("", address);
    fanin_server_destroy(&server, 0);
    return 0;
}

TESTS_BETWEEN(start_once, secrets_tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
