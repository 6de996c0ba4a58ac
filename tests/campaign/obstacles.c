/* SPDX-License-Identifier: Apache-2.0 */
#include "obstacles.h"

#include "board.h"
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define SPOILT_PERCENT 4

static void put_fifo(const char *directory)
{
    (void)!mkfifo(directory, 0600);
}

static void put_directory(const char *directory)
{
    char path[300];
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", directory);
    (void)!mkdir(directory, 0700);
    (void)!mkfifo(path, 0600);
}

static void put_file(const char *directory)
{
    int fd = open(directory, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
}

static void put_link(const char *directory)
{
    (void)!symlink("nowhere/at/all", directory);
}

static void take_rights(const char *directory)
{
    (void)directory;
    umask(0777);
}

static void give_rights(const char *directory)
{
    (void)directory;
    umask(0);
}

bool obstacles_put(const char *directory, uint64_t *random)
{
    static void (*const ways[])(const char *) = {put_fifo, put_directory, put_file,
                                                 put_link, take_rights,   give_rights};
    if (board_random(random) % 100 >= SPOILT_PERCENT)
        return false;
    ways[board_random(random) % (sizeof ways / sizeof *ways)](directory);
    return true;
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *at)
{
    (void)s;
    (void)kind;
    (void)at;
    return remove(path);
}

void obstacles_clear(const char *directory)
{
    umask(022);
    (void)nftw(directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}
