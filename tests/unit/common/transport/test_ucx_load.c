/* SPDX-License-Identifier: Apache-2.0 */
/* How UCX is found and loaded, and that the process around it stays as it was. Every case
   runs in a process of its own: what is loaded cannot be unloaded. */
#include "own_process.h"
#include "testing.h"
#include "ucx.h"
#include <dirent.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/wait.h>

#define OLD_UCX "/usr/lib/x86_64-linux-gnu/libucp.so.0"

extern char **environ;

/* Whether loading fails with both words in message or remedy. */
static bool is_refused(const char *word, const char *another)
{
    ucx *u = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    if (ucx_load(NULL, &u, &error) != FANIN_ERR_UNSUPPORTED || u)
        return false;
    const bool told = strstr(error.message, word) && strstr(error.message, another) &&
                      error.remedy[0];
    if (!told)
        fprintf(stderr, "message: %s; remedy: %s\n", error.message, error.remedy);
    return told;
}

static bool can_load(ucx **u)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (ucx_load(NULL, u, &error) == FANIN_OK)
        return true;
    printf("# %s\n", error.message);
    fflush(stdout);
    return false;
}

OWN_PROCESS(missing_file, .checked = false)
{
    setenv("FANIN_UCX_LIBRARY", "/nonexistent/libucp.so.0", 1);
    CHECK(is_refused("FANIN_UCX_LIBRARY", "/nonexistent/libucp.so.0"));
    return PASSED;
}

OWN_PROCESS(empty_name, .checked = false)
{
    ucx *u = NULL;
    if (!can_load(&u))
        return SKIPPED;
    setenv("FANIN_UCX_LIBRARY", "", 1);
    CHECK(is_refused("switched off", "FANIN_UCX_LIBRARY"));
    return PASSED;
}

OWN_PROCESS(another_library, .checked = false)
{
    setenv("FANIN_UCX_LIBRARY", "libm.so.6", 1);
    CHECK(is_refused("libm.so.6", "not libucp"));
    return PASSED;
}

OWN_PROCESS(too_old, .checked = false)
{
    /* With a list of folders it would get its other parts from another UCX. */
    if (access(OLD_UCX, R_OK) != 0 || getenv("LD_LIBRARY_PATH"))
        return SKIPPED;
    setenv("FANIN_UCX_LIBRARY", OLD_UCX, 1);
    ucx *u = NULL;
    if (ucx_load(NULL, &u, NULL) == FANIN_OK)
        return SKIPPED; /* the distribution's is new enough */
    CHECK(is_refused("it is UCX 1.", "1.16"));
    /* Still there, and still not to be used, when the variable is gone. */
    unsetenv("FANIN_UCX_LIBRARY");
    CHECK(is_refused("already loaded", "1.16"));
    return PASSED;
}

static void remember_message(void *cookie, fanin_log_level level, const char *event,
                             const char *message)
{
    (void)level;
    if (strcmp(event, "ucx-loaded") == 0)
        snprintf(cookie, 512, "%s", message);
}

OWN_PROCESS(loaded_before, .checked = false)
{
    /* Where it is, found out by another process, since one keeps what it has loaded. */
    char path[512] = "", message[512] = "";
    int pipe_fds[2];
    CHECK(pipe(pipe_fds) == 0);
    ucx *u = NULL;
    const pid_t pid = fork();
    if (pid == 0) {
        if (!can_load(&u))
            _exit(SKIPPED);
        const char *found = ucx_library_path(u);
        _exit(write(pipe_fds[1], found, strlen(found)) > 0 ? PASSED : FAILED);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    if (WEXITSTATUS(status) != PASSED)
        return WEXITSTATUS(status);
    CHECK(read(pipe_fds[0], path, sizeof path - 1) > 0);

    setenv("UCX_MEM_EVENTS", "n", 1);
    CHECK(dlopen(path, RTLD_NOW | RTLD_LOCAL));
    const logger log = {.fn = remember_message, .cookie = message};
    CHECK(ucx_load(&log, &u, NULL) == FANIN_OK);
    CHECK(strcmp(ucx_library_path(u), path) == 0);
    CHECK(strstr(message, path) && strstr(message, ucx_version(u)));
    CHECK(strstr(message, "loaded already"));
    setenv("FANIN_UCX_LIBRARY", "/nonexistent/libucp.so.0", 1);
    CHECK(is_refused("/nonexistent/libucp.so.0", "already loaded"));
    setenv("FANIN_UCX_LIBRARY", path, 1);
    ucx *again = NULL;
    CHECK(ucx_load(NULL, &again, NULL) == FANIN_OK && again == u);
    ucx_unload(&again);
    CHECK(!again);
    return PASSED;
}

/* ------------------------------------------------------------ what must not change */

static const char *const patched[] = {"mmap",  "munmap", "mremap", "brk",
                                      "shmat", "shmdt",  "madvise"};
#define PATCHED (sizeof(patched) / sizeof(patched[0]))

typedef struct surroundings {
    char *environment;
    size_t environment_size;
    struct sigaction actions[65];
    uint8_t code[PATCHED][16];
} surroundings;

static void look_around(surroundings *s)
{
    memset(s, 0, sizeof *s);
    FILE *stream = open_memstream(&s->environment, &s->environment_size);
    for (char **entry = environ; *entry; entry++)
        fprintf(stream, "%s\n", *entry);
    fclose(stream);
    for (int i = 1; i < 65; i++)
        (void)sigaction(i, NULL, &s->actions[i]);
    for (size_t i = 0; i < PATCHED; i++)
        memcpy(s->code[i], dlsym(RTLD_DEFAULT, patched[i]), sizeof s->code[i]);
}

static bool handlers_are_equal(const surroundings *a, const surroundings *b)
{
    for (int i = 1; i < 65; i++)
        if (a->actions[i].sa_handler != b->actions[i].sa_handler)
            return false;
    return true;
}

static int open_both_ends(ucx *u, ucx_server **server, ucx_client **client)
{
    static char bytes[64];
    const fanin_memory host = {.kind = FANIN_MEMORY_HOST, .device = -1};
    ucx_region *region;
    CHECK(ucx_server_create(u, UCX_PATH_HOST, NULL, server, NULL) == FANIN_OK);
    CHECK(ucx_region_create(*server, bytes, sizeof bytes, host, &region, NULL) ==
          FANIN_OK);
    CHECK(ucx_client_create(u, UCX_PATH_HOST, NULL, NULL, client, NULL) == FANIN_OK);
    ucx_region_destroy(&region);
    return PASSED;
}

OWN_PROCESS(leaves_the_process_alone, .checked = false)
{
    surroundings before, after;
    ucx *u = NULL;
    ucx_server *server;
    ucx_client *client;
    look_around(&before);
    if (!can_load(&u))
        return SKIPPED;
    CHECK(open_both_ends(u, &server, &client) == PASSED);
    look_around(&after);
    CHECK(before.environment_size == after.environment_size);
    CHECK(strcmp(before.environment, after.environment) == 0);
    CHECK(handlers_are_equal(&before, &after));
    CHECK(memcmp(before.code, after.code, sizeof before.code) == 0);
    ucx_client_destroy(&client);
    ucx_server_destroy(&server);
    free(before.environment);
    free(after.environment);
    return PASSED;
}

/* Shows that the test above can see it, and that the user's settings win. */
OWN_PROCESS(users_settings_win, .checked = false)
{
    surroundings before, after;
    ucx *u = NULL;
    setenv("UCX_MEM_EVENTS", "y", 1);
    setenv("UCX_HANDLE_ERRORS", "bt", 1);
    look_around(&before);
    if (!can_load(&u))
        return SKIPPED;
    look_around(&after);
    CHECK(strcmp(before.environment, after.environment) == 0);
    CHECK(!handlers_are_equal(&before, &after));
    CHECK(memcmp(before.code, after.code, sizeof before.code) != 0);
    free(before.environment);
    free(after.environment);
    return PASSED;
}

/* Blocked signals of a thread of this process, as /proc shows them. */
static uint64_t blocked_signals(const char *thread)
{
    char path[64], line[256];
    uint64_t mask = 0;
    snprintf(path, sizeof path, "/proc/self/task/%.20s/status", thread);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file))
        (void)sscanf(line, "SigBlk: %" SCNx64, &mask);
    if (file)
        fclose(file);
    return mask;
}

OWN_PROCESS(ucx_threads_take_no_signals, .checked = false)
{
    ucx *u = NULL;
    ucx_server *server;
    ucx_client *client;
    if (!can_load(&u))
        return SKIPPED;
    CHECK(open_both_ends(u, &server, &client) == PASSED);
    char own[16];
    snprintf(own, sizeof own, "%d", (int)getpid());
    CHECK(blocked_signals(own) == 0);
    unsigned threads = 0;
    DIR *directory = opendir("/proc/self/task");
    for (struct dirent *entry; (entry = readdir(directory));) {
        if (entry->d_name[0] == '.' || strcmp(entry->d_name, own) == 0)
            continue;
        threads++;
        const uint64_t mask = blocked_signals(entry->d_name);
        CHECK(mask & (1u << (SIGINT - 1)));
        CHECK(mask & (1u << (SIGTERM - 1)));
        CHECK(mask & (1u << (SIGCHLD - 1)));
    }
    closedir(directory);
    CHECK(threads > 0);
    return PASSED;
}

OWN_PROCESS(has_the_modules, .checked = false)
{
    /* The wheel keeps them in lib/ucx beside libucp. */
    ucx *u = NULL;
    ucx_server *server;
    ucx_client *client;
    if (!can_load(&u))
        return SKIPPED;
    CHECK(open_both_ends(u, &server, &client) == PASSED);
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[1024], directory[512];
    snprintf(directory, sizeof directory, "%s", ucx_library_path(u));
    *strrchr(directory, '/') = '\0';
    bool found = false;
    while (fgets(line, sizeof(line), maps))
        found = found || (strstr(line, directory) && strstr(line, "libuct_cma"));
    fclose(maps);
    CHECK(found);
    return PASSED;
}
