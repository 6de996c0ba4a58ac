/* SPDX-License-Identifier: Apache-2.0 */
#include "secrets.h"
#include "openssl.h"
#include "testing.h"
#include <fcntl.h>

static char folder[] = "/tmp/secrets-XXXXXX";
static char paths[128][48];
static bool made;

const char *secret_of(char digit)
{
    char text[65];
    char *path = paths[(unsigned)digit % 128];
    if (path[0])
        return path;
    if (!made)
        assert_non_null(mkdtemp(folder));
    made = true;
    snprintf(path, sizeof paths[0], "%s/%c", folder, digit);
    memset(text, '5', 64);
    text[0] = '0'; /* whatever the digit is: one byte alone is no secret */
    text[63] = digit;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, 64), 64);
    close(fd);
    return path;
}

fanin_status tls_end_of_rank(const char *file, const uint8_t world_id[16],
                             uint32_t rank, tls_end **out, fanin_error *error)
{
    char name[IDENTITY_MOST];
    rank_identity(world_id, rank, name);
    return tls_end_by_secret(file, name, out, error);
}

void secrets_remove(void)
{
    for (size_t i = 0; i < 128; i++)
        if (paths[i][0])
            unlink(paths[i]);
    if (made)
        rmdir(folder);
}

int secrets_tear_down(void **state)
{
    (void)state;
    secrets_remove();
    return 0;
}

bool openssl_is_missing(void)
{
    const openssl *o;
    fanin_error error = FANIN_ERROR_INIT;
    if (openssl_load(&o, &error) == FANIN_OK)
        return false;
    printf("1..0 # SKIP %s\n", error.message);
    return true;
}

static tls_end *certified(const char *from, const char *name, identity wanted)
{
    char cert[64], key[64], ca[64];
    tls_end *end = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    const certificate_files files = {cert, key, ca};
    snprintf(cert, sizeof cert, "%s/%s.pem", from, name);
    snprintf(key, sizeof key, "%s/%s.key", from, name);
    snprintf(ca, sizeof ca, "%s/ca.pem", from);
    if (tls_end_by_certificate(&files, &wanted, NULL, &end, &error) != FANIN_OK &&
        error.status != FANIN_ERR_UNSUPPORTED) /* no OpenSSL 3 here */
        fail_msg("%s (%s)", error.message, error.remedy);
    return end;
}

bool certified_ends_of(uint32_t rank, tls_end *out[2])
{
    char place[] = "/tmp/certificates-XXXXXX", name[16], command[600];
    const char *source = getenv("FANIN_SOURCE_DIR");
    assert_non_null(mkdtemp(place));
    snprintf(name, sizeof name, "rank%u", (unsigned)rank);
    snprintf(command, sizeof command,
             "command -v openssl >/dev/null && '%s/tests/support/make-certificates' %s",
             source ? source : ".", place);
    if (system(command) == 0) { /* NOLINT(cert-env33-c): the tree's own */
        out[0] = certified(place, name, (identity){.role = AS_RANK, .rank = rank});
        out[1] = certified(place, "reader", (identity){.role = AS_READER});
    }
    snprintf(command, sizeof command, "rm -rf %s", place);
    assert_int_equal(system(command), 0); /* NOLINT(cert-env33-c): its own folder */
    return out[0] && out[1];
}
