/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/out_file.h"
#include "fetch/failure.h"
#include "fetch/whole_file.h"

#include <errno.h>
#include <stdbool.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int refuse(const char *path, const char *why)
{
    return failure_local("cannot write the results", FANIN_ERR_IO,
                         "give a file in a folder that is writable and has room",
                         "%s: %s", path, why);
}

static int refuse_existing(const char *path)
{
    return failure_local("cannot write the results", FANIN_ERR_EXISTS,
                         "remove it, or give another name", "%s: %s", path,
                         strerror(EEXIST));
}

int out_file_open(out_file *file, const char *path)
{
    struct stat there;
    *file = (out_file){.path = path};
    if (lstat(path, &there) == 0) {
        return refuse_existing(path);
    }
    int length = snprintf(file->temporary, sizeof file->temporary, "%s.XXXXXX", path);
    if (length >= (int)sizeof file->temporary) {
        file->temporary[0] = '\0';
        return refuse(path, strerror(ENAMETOOLONG));
    }
    int descriptor = mkostemp(file->temporary, O_CLOEXEC);
    if (descriptor < 0) {
        int saved = errno;
        file->temporary[0] = '\0';
        return refuse(path, strerror(saved));
    }
    file->stream = fdopen(descriptor, "w");
    if (file->stream == NULL) {
        int saved = errno;
        close(descriptor);
        out_file_discard(file);
        return refuse(path, strerror(saved));
    }
    return 0;
}

/* As open() would have made it. */
static int set_mode(int descriptor)
{
    mode_t mask = umask(0);
    umask(mask);
    return fchmod(descriptor, 0666 & ~mask);
}

int out_file_commit(out_file *file)
{
    errno = 0;
    bool good = fflush(file->stream) == 0 && !ferror(file->stream) &&
                set_mode(fileno(file->stream)) == 0 && fsync(fileno(file->stream)) == 0;
    int saved = errno;
    if (fclose(file->stream) != 0 && good) {
        good = false;
        saved = errno;
    }
    file->stream = NULL;
    if (good) {
        saved = whole_file_name(file->temporary, file->path);
        good = saved == 0;
    }
    out_file_discard(file);
    if (good) {
        return 0;
    }
    if (saved == EEXIST) {
        return refuse_existing(file->path);
    }
    return refuse(file->path, saved != 0 ? strerror(saved) : "a write failed");
}

void out_file_discard(out_file *file)
{
    if (file->stream != NULL) {
        (void)fclose(file->stream);
        file->stream = NULL;
    }
    if (file->temporary[0] != '\0') {
        unlink(file->temporary);
        file->temporary[0] = '\0';
    }
}
