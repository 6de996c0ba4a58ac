/* SPDX-License-Identifier: Apache-2.0 */
/* What is made of a launch's secret stays where it belongs: none of it is logged, and none of what
   is good for other connections is left in the memory of a process that has closed what had it.
   (OpenSSL gives the memory of a connection back with that one's traffic secrets in it.) What is
   looked for is kept here as its complement alone. */
#include "digest.h"
#include "ends.h"
#include "secrets.h"
#include "testing.h"
#include "tls_internal.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>

#define ROWS 30
#define COLUMNS 10000
#define MOST_NEEDLES 32
#define NEEDLE                                                                         \
    16 /* bytes of a key that are looked for: an AES key's, or half of another's */
#define WINDOW ((size_t)1 << 20)
#define LARGEST                                                                        \
    ((uintptr_t)1                                                                      \
     << 30) /* sanitizers' own are larger, and hold no bytes of the program */

static uint32_t published[ROWS * COLUMNS], landed[ROWS * COLUMNS];

/* Complements of keys, and what each is. */
static struct {
    const char *name;
    uint8_t bytes[KEY_SIZE];
} needles[MOST_NEEDLES];
static size_t n_needles, n_launch,
    n_wanted; /* all, the launch's own, those that are looked for */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[1 << 20]; /* all that was logged */
static size_t n_lines;

static void look_for(const char *name, const uint8_t key[KEY_SIZE])
{
    pthread_mutex_lock(&lock);
    assert_true(n_needles < MOST_NEEDLES);
    needles[n_needles].name = name;
    for (size_t i = 0; i < KEY_SIZE; i++)
        needles[n_needles].bytes[i] = key[i] ^ 0xff;
    n_needles++;
    pthread_mutex_unlock(&lock);
}

/* OpenSSL tells them as lines of text: a name, the connection, and the secret. */
static void on_secret(const SSL *ssl, const char *line)
{
    uint8_t secret[KEY_SIZE];
    const char *text = strrchr(line, ' ');
    (void)ssl;
    if (strstr(line, "_TRAFFIC_SECRET_0 ") && hex_read(text + 1, secret, sizeof secret))
        look_for("a connection's traffic secret", secret);
    explicit_bzero(secret, sizeof secret);
}

static openssl listening; /* OpenSSL, whose contexts tell on_secret() */
static const openssl *whole;

static SSL_CTX *make_telling(const SSL_METHOD *method)
{
    void (*tell)(SSL_CTX *, void (*)(const SSL *, const char *));
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *library = dlopen(named ? named : "libssl.so.3", RTLD_NOW);
    *(void **)&tell = dlsym(library, "SSL_CTX_set_keylog_callback");
    SSL_CTX *made = whole->SSL_CTX_new(method);
    tell(made, on_secret);
    return made;
}

/* Each connection's, of either end. */
fanin_status __real_openssl_load(const openssl **out, fanin_error *error);
fanin_status __wrap_openssl_load(const openssl **out, fanin_error *error);
fanin_status __wrap_openssl_load(const openssl **out, fanin_error *error)
{
    *out = NULL;
    fanin_status status = __real_openssl_load(&whole, error);
    if (status != FANIN_OK)
        return status;
    listening = *whole;
    listening.SSL_CTX_new = make_telling;
    *out = &listening;
    return FANIN_OK;
}

static void on_log(void *cookie, fanin_log_level level, const char *event,
                   const char *message)
{
    pthread_mutex_lock(&lock);
    int n =
        snprintf(lines + n_lines, sizeof lines - n_lines, "%s %s\n", event, message);
    n_lines += (size_t)n;
    assert_true(n_lines < sizeof lines);
    pthread_mutex_unlock(&lock);
}

/* ------------------------------------------------------------------ looking */

static uint8_t complement_of(uint8_t byte)
{
    return byte ^ 0xff;
}

static bool is_at(const uint8_t *data, const uint8_t *complement)
{
    for (size_t i = 0; i < NEEDLE; i++)
        if (data[i] != complement_of(complement[i]))
            return false;
    return true;
}

static bool is_hex_at(const char *data, const uint8_t *complement)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < 2 * NEEDLE; i++) {
        unsigned byte = complement_of(complement[i / 2]);
        unsigned digit = i % 2 ? byte & 15 : byte >> 4;
        if ((data[i] | 0x20) != (digits[digit] | 0x20))
            return false;
    }
    return true;
}

typedef struct found {
    unsigned count;
    char what[1000];
} found;

/* Pairs of bytes that something that is looked for begins with. */
static bool begins[1 << 16];

static void mark_beginnings(size_t wanted)
{
    memset(begins, 0, sizeof begins);
    n_wanted = wanted;
    for (size_t k = 0; k < 2 * n_wanted; k++) {
        const uint8_t *half = needles[k / 2].bytes + k % 2 * NEEDLE;
        char digits[3];
        begins[complement_of(half[0]) | complement_of(half[1]) << 8] = true;
        for (int upper = 0; upper < 2; upper++) {
            snprintf(digits, sizeof digits, upper ? "%02X" : "%02x",
                     complement_of(half[0]));
            begins[digits[0] | digits[1] << 8] = true;
        }
    }
}

static void look_at(const uint8_t *data, size_t left, const char *where, found *f)
{
    for (size_t k = 0; k < 2 * n_wanted; k++) {
        const uint8_t *half = needles[k / 2].bytes + k % 2 * NEEDLE;
        bool is_raw = is_at(data, half);
        if (!is_raw &&
            (left < 2 * (size_t)NEEDLE || !is_hex_at((const char *)data, half)))
            continue;
        f->count++;
        size_t used = strlen(f->what);
        snprintf(f->what + used, sizeof f->what - used, "%s, %s, in %s; ",
                 needles[k / 2].name, is_raw ? "bytes" : "digits", where);
    }
}

/* Of each key either half, as bytes and as digits. */
static void look_in(const uint8_t *data, size_t size, const char *where, found *f)
{
    for (size_t i = 0; i + NEEDLE <= size; i++)
        if (begins[data[i] | data[i + 1] << 8])
            look_at(data + i, size - i, where, f);
}

/* What has been read of this process is no place of its own. */
static uint8_t *window;

static void look_in_range(int fd, uintptr_t from, uintptr_t to, const char *where,
                          found *f)
{
    for (uintptr_t at = from; at < to; at += WINDOW - 2 * NEEDLE) {
        size_t most = to - at < WINDOW ? to - at : WINDOW;
        ssize_t n = pread(fd, window, most, (off_t)at);
        if (n > 0)
            look_in(window, (size_t)n, where, f);
    }
}

/* For what all connections have. */
static found look_in_memory(void)
{
    found f = {0};
    char line[400];
    mark_beginnings(n_launch);
    FILE *maps = fopen("/proc/self/maps", "re");
    int fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    assert_non_null(maps);
    assert_true(fd >= 0);
    window =
        mmap(NULL, WINDOW, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(window, MAP_FAILED);
    while (fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char mode[5];
        int name = 0;
        assert_int_equal(
            sscanf(line, "%lx-%lx %4s %*s %*s %*s %n", &from, &to, mode, &name), 3);
        line[strcspn(line, "\n")] = '\0';
        const uintptr_t own = (uintptr_t)window;
        /* The kernel joins neighbouring mappings: on both sides of it. */
        if (mode[0] != 'r' || mode[1] != 'w' || to - from > LARGEST)
            continue;
        if (from <= own && own < to) {
            look_in_range(fd, from, own, line + name, &f);
            look_in_range(fd, own + WINDOW, to, line + name, &f);
        } else {
            look_in_range(fd, from, to, line + name, &f);
        }
    }
    munmap(window, WINDOW);
    close(fd);
    fclose(maps);
    return f;
}

/* -------------------------------------------------------------------- launch */

static char path[] = "/tmp/leaks-XXXXXX";

/* A secret that nobody has by chance, as digits. Here it is wiped. */
static void write_secret(void)
{
    uint8_t secret[KEY_SIZE];
    int fd = mkstemp(path); /* mode 0600 */
    assert_true(fd >= 0);
    assert_int_equal(getrandom(secret, sizeof secret, 0), sizeof secret);
    look_for("the secret", secret);
    for (size_t i = 0; i < sizeof secret; i++) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", secret[i]);
        assert_int_equal(write(fd, digits, 2), 2);
    }
    close(fd);
    explicit_bzero(secret, sizeof secret);
}

/* What is derived from it for all connections. */
static void derive(void)
{
    const openssl *o;
    uint8_t secret[KEY_SIZE], root[KEY_SIZE], key[KEY_SIZE];
    uint8_t world[16];
    char identity[IDENTITY_MOST];
    assert_works(openssl_load(&o, ERROR));
    assert_works(secret_file_read(path, secret, ERROR));
    assert_true(launch_root(o, secret, root));
    look_for("the root", root);
    assert_true(launch_key(o, root, IDENTITY_READER, key));
    look_for("the readers' key", key);
    memset(world, 7, sizeof world);
    rank_identity(world, 0, identity);
    assert_true(launch_key(o, root, identity, key));
    look_for("the rank's key", key);
    explicit_bzero(secret, sizeof secret);
    explicit_bzero(root, sizeof root);
    explicit_bzero(key, sizeof key);
}

/* A pull over control and data connections, and one that another secret refuses. */
static void launch(bool look_meanwhile)
{
    char address[32];
    fanin_server_config ranks = make_server_config();
    ranks.secret_file = path;
    ranks.log = on_log;
    fanin_server *server = make_server(&ranks, address, sizeof address);
    publish_matrix(server, published, ROWS, COLUMNS);
    for (int round = 0; round < 2; round++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_client_config readers = make_client_config();
        readers.no_unix = true;
        readers.secret_file = round == 0 ? path : secret_of('2');
        readers.streams_per_rank = 2;
        readers.log = on_log;
        readers.connect_timeout_ms = 3000;
        fanin_client *client = make_client(&readers);
        const char *const addresses[] = {address};
        fanin_result *result = NULL;
        fanin_box box;
        fanin_tensor tensor =
            make_tensor("matrix", FANIN_DTYPE_U32, ROWS, COLUMNS, &box, landed);
        fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
        fanin_status status = fanin_client_connect(client, addresses, 1, 4000, &error);
        if (round == 0) {
            assert_ok(status, error);
            assert_ok(fanin_client_pull(client, &options, &tensor, 1, &result, &error),
                      error);
        } else {
            assert_int_equal(status, FANIN_ERR_AUTH);
            on_log(NULL, FANIN_LOG_ERROR, error.message, error.remedy);
        }
        if (round == 0 && look_meanwhile)
            assert_true(look_in_memory().count > 0);
        fanin_result_free(&result);
        fanin_client_destroy(&client);
    }
    fanin_server_destroy(&server, 0);
}

TEST(nothing_of_it_is_logged)
{
    found f = {0};
    launch(false);
    mark_beginnings(n_needles);
    assert_true(n_needles >= 8); /* of the connections as well */
    look_in((const uint8_t *)lines, n_lines, "the log", &f);
    assert_string_equal(f.what, "");
    assert_says(lines, "session-open");
    /* It would be found. */
    char leak[2 * NEEDLE + 1];
    for (size_t i = 0; i < NEEDLE; i++)
        snprintf(leak + 2 * i, 3, "%02X", complement_of(needles[0].bytes[i]));
    look_in((const uint8_t *)leak, sizeof leak, "a leak", &f);
    assert_int_equal(f.count, 1);
    explicit_bzero(leak, sizeof leak);
}

TEST(nothing_of_it_is_left_in_memory)
{
    launch(true);
    found f = look_in_memory();
    assert_string_equal(f.what, "");
}

static int set_up(void **state)
{
    write_secret();
    derive();
    n_launch = n_needles;
    return 0;
}

static int tear_down(void **state)
{
    unlink(path);
    secrets_remove();
    return 0;
}

TESTS_BETWEEN(set_up, tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
