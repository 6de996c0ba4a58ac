/* SPDX-License-Identifier: Apache-2.0 */
#include "load_lock.h"
#include "thread.h"
#include "ucx_internal.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------ ucx log */

/* UCX's log handlers have no cookie, so the logger of the call that is being made is kept
   per thread. Nothing is shared between threads. */
static _Thread_local const logger *current_log;

ucx_scope ucx_scope_enter(const logger *log, bool threads)
{
    ucx_scope scope = {.outer = current_log, .threads = threads};
    current_log = log;
    if (threads)
        scope.signals = signals_block();
    return scope;
}

void ucx_scope_leave(const ucx_scope *scope)
{
    if (scope->threads)
        signals_restore(&scope->signals);
    current_log = scope->outer;
}

/* Whatever fails is also returned to the caller, who decides how bad that is: hence UCX's
   errors are warnings here. */
static fanin_log_level ucx_log_level_of(int level)
{
    if (level == UCX_LOG_FATAL)
        return FANIN_LOG_ERROR;
    return level <= UCX_LOG_WARN ? FANIN_LOG_WARNING : FANIN_LOG_DEBUG;
}

static void log_message(int level, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));

static void log_message(int level, const char *format, va_list arguments)
{
    char text[768];
    if (vsnprintf(text, sizeof(text), format, arguments) < 0)
        return;
    for (char *c = text; *c; c++)
        if (*c == '\n')
            *c = ' ';
    log_write(current_log, ucx_log_level_of(level), "ucx", "%s", text);
}

/* Outside of our calls messages come from UCX's own thread or from another user of the same
   library. If it was there before us, its user has decided where they go. */
static int on_foreign_ucx(const char *file, unsigned line, const char *function,
                          int level, const void *component, const char *format,
                          va_list arguments)
{
    (void)file, (void)line, (void)function, (void)component;
    if (!current_log)
        return UCX_LOG_CONTINUE;
    log_message(level, format, arguments);
    return UCX_LOG_STOP;
}

static int on_own_ucx(const char *file, unsigned line, const char *function, int level,
                      const void *component, const char *format, va_list arguments)
{
    (void)on_foreign_ucx(file, line, function, level, component, format, arguments);
    return UCX_LOG_STOP;
}

/* Routes the messages of @p u; once a process. */
static void ucx_log_install(const ucx *u)
{
    u->ucs_log_push_handler(u->ours ? on_own_ucx : on_foreign_ucx);
}

/* ----------------------------------------------------------------------- ucx load */

#define SONAME "libucp.so.0"

static const char install_hint[] =
    "install UCX 1.16 or newer (for example: pip install libucx-cu13) and name its "
    "libucp.so.0 in FANIN_UCX_LIBRARY";

/* The one library of the process and the lock around the environment while it is loaded. A
   mapped library belongs to the process anyway and UCX can neither be unloaded nor be there
   twice, so the table is kept until the process ends and never changes once it is
   published. */
static load_lock loading = LOAD_LOCK_INIT;
static ucx *loaded;

/* Left alone, UCX patches libc's mmap and installs signal handlers as soon as it is mapped.
   It reads these variables only then. */
static const char *const harmless[][2] = {
    {"UCX_MEM_EVENTS", "n"},
    {"UCX_HANDLE_ERRORS", "none"},
    {"UCX_DEBUG_SIGNO", "0"},
};
#define HARMLESS_COUNT (sizeof harmless / sizeof harmless[0])

static void *open_harmlessly(const char *file)
{
    bool added[HARMLESS_COUNT];
    for (size_t i = 0; i < HARMLESS_COUNT; i++)
        added[i] =
            !getenv(harmless[i][0]) && setenv(harmless[i][0], harmless[i][1], 0) == 0;
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < HARMLESS_COUNT; i++)
        if (added[i])
            unsetenv(harmless[i][0]);
    return handle;
}

/* The real path of the file that holds a symbol of @p handle. */
static bool file_of_symbol(void *handle, const char *symbol, char path[PATH_MAX])
{
    Dl_info info;
    void *address = dlsym(handle, symbol);
    return address && dladdr(address, &info) && info.dli_fname &&
           realpath(info.dli_fname, path);
}

/* libucs is found by soname, so another installation's may have been in the process. */
static bool is_of_one_installation(void *handle, const char *ucp_path, char reason[256])
{
    char ucs_path[PATH_MAX];
    if (!file_of_symbol(handle, "ucs_status_string", ucs_path)) {
        snprintf(reason, 256, "its libucs is not to be found");
        return false;
    }
    size_t directory = (size_t)(strrchr(ucp_path, '/') - ucp_path) + 1;
    if (strncmp(ucp_path, ucs_path, directory) == 0 &&
        !strchr(ucs_path + directory, '/'))
        return true;
    snprintf(reason, 256, "it is mixed with %.200s", ucs_path);
    return false;
}

static bool read_version(void *handle, ucx *u, char reason[256])
{
    void (*get_version)(unsigned *, unsigned *, unsigned *);
    void *symbol = dlsym(handle, "ucp_get_version");
    if (!symbol) {
        snprintf(reason, 256, "it has no function ucp_get_version");
        return false;
    }
    memcpy(&get_version, &symbol, sizeof get_version);
    get_version(&u->major, &u->minor, &u->release);
    snprintf(u->version, sizeof u->version, "%u.%u.%u", u->major, u->minor, u->release);
    if (u->major == UCX_MIN_MAJOR && u->minor >= UCX_MIN_MINOR)
        return true;
    snprintf(reason, 256, "it is UCX %s, and %u.%u or a later %u.x is needed",
             u->version, UCX_MIN_MAJOR, UCX_MIN_MINOR, UCX_MIN_MAJOR);
    return false;
}

static bool ucx_load_read_functions(void *handle, ucx *u, char reason[256])
{
    static const library_function functions[] = {
#define X(name) {#name, offsetof(ucx, name)},
        UCX_FUNCTIONS(X)
#undef X
    };
    const char *missing = library_table_read(handle, functions,
                                             sizeof functions / sizeof functions[0], u);
    if (missing) {
        snprintf(reason, 256, "it has no function %s", missing);
        return false;
    }
    ucp_lib_attr_t attributes = {.field_mask = UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL};
    if (u->ucp_lib_query(&attributes) == UCS_OK &&
        attributes.max_thread_level == UCS_THREAD_MODE_MULTI)
        return true;
    snprintf(reason, 256, "it was built without support for threads");
    return false;
}

static bool ucx_load_examine(void *handle, ucx *u, char reason[256])
{
    char path[PATH_MAX];
    if (!file_of_symbol(handle, "ucp_get_version", path)) {
        snprintf(reason, 256, "it is not libucp");
        return false;
    }
    snprintf(u->path, sizeof u->path, "%.511s", path);
    return read_version(handle, u, reason) &&
           ucx_load_read_functions(handle, u, reason) &&
           is_of_one_installation(handle, path, reason);
}

static fanin_status ucx_load_refuse(fanin_error *error, const char *remedy,
                                    const char *text)
{
    const error_place place = {.phase = "load", .remedy = remedy};
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place, "%s", text);
}

/* FANIN_UCX_LIBRARY: exactly that file. */
static fanin_status open_named(const char *file, void *present, void **out,
                               fanin_error *error)
{
    char text[512], wanted[PATH_MAX], found[PATH_MAX];
    if (!file[0])
        return ucx_load_refuse(error, "unset FANIN_UCX_LIBRARY to use UCX",
                               "UCX is switched off: FANIN_UCX_LIBRARY is empty");
    if (present && file_of_symbol(present, "ucp_get_version", found)) {
        if (realpath(file, wanted) && strcmp(wanted, found) == 0) {
            *out = present;
            return FANIN_OK;
        }
        snprintf(text, sizeof(text),
                 "FANIN_UCX_LIBRARY is %.200s, but UCX is already loaded from %.200s",
                 file, found);
        return ucx_load_refuse(
            error, "a process can hold one UCX: name that file, or none", text);
    }
    *out = open_harmlessly(file);
    if (*out)
        return FANIN_OK;
    snprintf(text, sizeof(text), "FANIN_UCX_LIBRARY: %.400s", dlerror());
    return ucx_load_refuse(
        error, "let FANIN_UCX_LIBRARY name a libucp.so.0, or unset it", text);
}

/* Where the dynamic loader looks; the build tree's run paths name the UCX of the build. */
static fanin_status open_found(void **out, fanin_error *error)
{
    char text[512];
    *out = open_harmlessly(SONAME);
    if (*out)
        return FANIN_OK;
    snprintf(text, sizeof(text), "no UCX: %.400s", dlerror());
    return ucx_load_refuse(error, install_hint, text);
}

static fanin_status ucx_load_find(void **out, bool *ours_out, fanin_error *error)
{
    const char *named = getenv("FANIN_UCX_LIBRARY");
    void *present = dlopen(SONAME, RTLD_NOW | RTLD_NOLOAD);
    *ours_out = !present;
    if (named)
        return open_named(named, present, out, error);
    if (present) {
        *out = present;
        return FANIN_OK;
    }
    return open_found(out, error);
}

static fanin_status ucx_load_load(const logger *log, fanin_error *error)
{
    void *handle = NULL;
    char reason[256];
    ucx *u = calloc(1, sizeof *u);
    if (!u)
        return error_set_memory(error);
    fanin_status status = ucx_load_find(&handle, &u->ours, error);
    if (status != FANIN_OK || loaded) {
        free(u);
        return status;
    }
    if (!ucx_load_examine(handle, u, reason)) {
        char text[768];
        const char *named = getenv("FANIN_UCX_LIBRARY");
        snprintf(text, sizeof(text), "%s%.255s cannot be used: %s",
                 u->ours ? "" : "the UCX already loaded from ",
                 u->path[0] ? u->path : (named ? named : SONAME), reason);
        free(u);
        return ucx_load_refuse(error, install_hint, text);
    }
    pin_own_library(); /* UCX keeps a pointer to our log handler */
    ucx_log_install(u);
    log_write(log, FANIN_LOG_INFO, "ucx-loaded", "UCX %s, %s%s", u->version, u->path,
              u->ours ? "" : " (was loaded already and is left as it is)");
    loaded = u;
    return FANIN_OK;
}

fanin_status ucx_load(const logger *log, ucx **out, fanin_error *error)
{
    if (!load_lock_take(&loading))
        return load_lock_lost("UCX", error);
    const ucx_scope scope = ucx_scope_enter(log, true);
    fanin_status status = ucx_load_load(log, error);
    ucx_scope_leave(&scope);
    if (status == FANIN_OK)
        *out = loaded;
    load_lock_give(&loading);
    return status;
}

void ucx_unload(ucx **u)
{
    if (u)
        *u = NULL;
}

const char *ucx_version(const ucx *u)
{
    return u->version;
}

const char *ucx_library_path(const ucx *u)
{
    return u->path;
}
