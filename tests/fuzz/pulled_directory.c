/* SPDX-License-Identifier: Apache-2.0 */
#include "pulled_directory.h"

#include "fuzz.h"
#include <fanin/safetensors.h>
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char folder[200], directory[240];

static void remove_folder(void)
{
    (void)rmdir(folder);
}

const char *pulled_directory(void)
{
    if (folder[0] == '\0') {
        const char *root = getenv("TMPDIR");
        int n = snprintf(folder, sizeof folder, "%s/fanin-fuzz-XXXXXX",
                         root && root[0] ? root : "/tmp");
        check(n > 0 && (size_t)n < sizeof folder && mkdtemp(folder) != NULL);
        snprintf(directory, sizeof directory, "%s/out", folder);
        (void)atexit(remove_folder);
    }
    return directory;
}

static unsigned entries_of(const char *path, bool removes)
{
    unsigned n = 0;
    DIR *d = opendir(path);
    check(d != NULL);
    for (struct dirent *e; (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        n++;
        check(!removes || unlinkat(dirfd(d), e->d_name, 0) == 0);
    }
    closedir(d);
    return n;
}

void pulled_directory_check(bool pulled, const char *file)
{
    char path[300];
    fanin_safetensors *tensors = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    check(entries_of(folder, false) == pulled);
    if (!pulled)
        return;
    snprintf(path, sizeof path, "%s/%s", directory, file);
    check(fanin_safetensors_open(path, &tensors, &error) == FANIN_OK);
    fanin_safetensors_close(&tensors);
    check(entries_of(directory, true) > 0 && rmdir(directory) == 0);
}
