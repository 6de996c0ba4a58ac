/* SPDX-License-Identifier: Apache-2.0 */
#include "secrets.h"
#include "testing.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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
    text[63] = digit;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, 64), 64);
    close(fd);
    return path;
}

void secrets_remove(void)
{
    for (size_t i = 0; i < 128; i++)
        if (paths[i][0])
            unlink(paths[i]);
    if (made)
        rmdir(folder);
}
