/* SPDX-License-Identifier: Apache-2.0 */
/* Which files are taken for a secret, and what others are told. */
#include "secret_file.h"
#include "testing.h"
#include <fcntl.h>
#include <sys/stat.h>

#define DIGITS "00112233445566778899aabbccddeeffFFEEDDCCBBAA99887766554433221100"

static char folder[] = "/tmp/secret-XXXXXX";
static char path[64];
static fanin_error error;
static uint8_t secret[SECRET_SIZE];

static int set_up(void **state)
{
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/secret", folder);
    return 0;
}

static int tear_down(void **state)
{
    unlink(path);
    return rmdir(folder);
}

static void make(const void *data, size_t size, mode_t mode)
{
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, size), size);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static fanin_status read_it(const char *file)
{
    error = (fanin_error)FANIN_ERROR_INIT;
    memset(secret, 0, sizeof secret);
    fanin_status status = secret_file_read(file, secret, &error);
    if (status != FANIN_OK) {
        assert_says(error.message, file);
        assert_true(error.remedy[0] != '\0');
        assert_null(strstr(error.message, "0011")); /* nothing of what it holds */
    }
    return status;
}

TEST(forms)
{
    static const uint8_t first[] = {0x00, 0x11, 0x22}, last[] = {0x22, 0x11, 0x00};
    make(DIGITS, 64, 0600);
    assert_ok(read_it(path), error);
    assert_memory_equal(secret, first, 3);
    assert_memory_equal(secret + SECRET_SIZE - 3, last, 3);
    assert_int_equal(secret[16], 0xff);
    make(DIGITS "\n", 65, 0400);
    assert_ok(read_it(path), error);
    make(DIGITS, 32, 0600);
    assert_ok(read_it(path), error);
    assert_memory_equal(secret, DIGITS, 32);
    make("0123456789012345678901234567890\n\n", 33,
         0600); /* its last byte is a newline's */
    assert_ok(read_it(path), error);
    assert_int_equal(secret[31], '\n');
}

TEST(other_contents)
{
    static const size_t sizes[] = {0, 1, 31, 63, 66, 1000};
    char text[1000];
    memset(text, '0', sizeof text);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        make(text, sizes[i], 0600);
        assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
        assert_says(error.remedy, "nixl-fetch secret");
    }
    text[63] = 'g';
    make(text, 64, 0600);
    assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
    memset(text, '0', 65); /* 65, and the last is none */
    make(text, 65, 0600);
    assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
    make(text, 33, 0600);
    assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
}

TEST(one_byte_is_no_secret)
{
    static const char *const digits[] = {"00", "ff", "aB"};
    char text[64];
    for (size_t i = 0; i < sizeof digits / sizeof *digits; i++) {
        for (size_t at = 0; at < sizeof text; at += 2)
            memcpy(text + at, digits[i], 2);
        make(text, sizeof text, 0600);
        assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
        assert_says(error.message, "guess");
        assert_says(error.remedy, "nixl-fetch secret");
        text[63] = '7';
        make(text, sizeof text, 0600);
        assert_ok(read_it(path), error);
    }
    memset(text, 0, sizeof text);
    make(text, SECRET_SIZE, 0600);
    assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
    text[SECRET_SIZE - 1] = 1;
    make(text, SECRET_SIZE, 0600);
    assert_ok(read_it(path), error);
}

TEST(modes)
{
    static const mode_t bad[] = {0604, 0602, 0601, 0644, 0620, 0660, 0610, 0777};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char said[16];
        make(DIGITS, 64, bad[i]);
        assert_int_equal(read_it(path), FANIN_ERR_AUTH);
        snprintf(said, sizeof said, "%04o", (unsigned)bad[i]);
        assert_says(error.message, said);
        assert_says(error.remedy, "chmod");
    }
    make(DIGITS, 64, 0440); /* as Kubernetes mounts it with fsGroup */
    assert_int_equal(read_it(path), geteuid() == 0 ? FANIN_OK : FANIN_ERR_AUTH);
}

TEST(owners)
{
    if (geteuid() != 0)
        skip();
    make(DIGITS, 64, 0400);
    assert_int_equal(chmod(folder, 0711), 0);
    assert_int_equal(chown(path, 4711, 4711), 0);
    assert_int_equal(read_it(path), FANIN_ERR_AUTH);
    assert_says(error.message, "4711");
    assert_says(error.remedy, "chown");
    assert_int_equal(seteuid(4711), 0); /* its own */
    fanin_status own = read_it(path);
    assert_int_equal(seteuid(0), 0);
    assert_ok(own, error);
    assert_int_equal(chmod(path, 0440), 0);
    assert_int_equal(seteuid(4711), 0);
    own = read_it(path);
    assert_int_equal(seteuid(0), 0);
    assert_int_equal(own, FANIN_ERR_AUTH);
}

TEST(other_kinds)
{
    char link[80];
    unlink(path);
    assert_int_equal(read_it(path), FANIN_ERR_NOT_FOUND);
    assert_int_equal(mkfifo(path, 0600), 0); /* which nobody writes to */
    assert_int_equal(read_it(path), FANIN_ERR_ARGUMENT);
    assert_int_equal(read_it(folder), FANIN_ERR_ARGUMENT);
    assert_int_equal(read_it("/dev/zero"), FANIN_ERR_ARGUMENT);
    make(DIGITS, 64, 0600);
    snprintf(link, sizeof link, "%s/link", folder);
    assert_int_equal(symlink("secret", link), 0);
    fanin_status through = read_it(link);
    unlink(link);
    assert_ok(through, error);
}

TEST(names)
{
    unsetenv(SECRET_ENV);
    assert_null(secret_file_of(NULL));
    assert_null(secret_file_of(""));
    assert_string_equal(secret_file_of("a"), "a");
    setenv(SECRET_ENV, "b", 1);
    assert_string_equal(secret_file_of(NULL), "b");
    assert_null(secret_file_of(""));
    assert_string_equal(secret_file_of("a"), "a");
    setenv(SECRET_ENV, "", 1);
    assert_null(secret_file_of(NULL));
    unsetenv(SECRET_ENV);
}

TESTS_BETWEEN(set_up, tear_down)
