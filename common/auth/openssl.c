/* SPDX-License-Identifier: Apache-2.0 */
#include "openssl.h"
#include "error_set.h"
#include "load_lock.h"

#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#define SONAME "libssl.so.3"
#define MAJOR(version) ((version) >> 28)
/* The process may end while threads of a server still use it: it is not to clean up by then. */
#define INIT_NO_ATEXIT UINT64_C(0x00080000)

static const char install_hint[] = "TLS needs OpenSSL 3: install it (Debian: "
                                   "libssl3), or name its libssl.so.3 in "
                                   "FANIN_OPENSSL_LIBRARY";

static load_lock loading = LOAD_LOCK_INIT;
static openssl table;
static bool loaded;

static fanin_status openssl_refuse(fanin_error *error, const char *file,
                                   const char *why)
{
    const error_place place = {.phase = "load", .remedy = install_hint};
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place, "no TLS: %s%s%.400s",
                     file ? file : "", file ? " cannot be used: " : "", why);
}

/* Of libssl and, by its dependence, of the libcrypto that it was linked with. */
static bool openssl_read_functions(void *handle, openssl *o, char why[128])
{
    static const library_function functions[] = {
#define X(type, name, parameters) {#name, offsetof(openssl, name)},
        OPENSSL_FUNCTIONS(X)
#undef X
    };
    const char *missing = library_table_read(handle, functions,
                                             sizeof functions / sizeof functions[0], o);
    if (missing)
        snprintf(why, 128, "it has no function %s", missing);
    return !missing;
}

static fanin_status load(fanin_error *error)
{
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    const char *file = named ? named : SONAME;
    char why[128];
    if (!file[0])
        return openssl_refuse(error, NULL, "FANIN_OPENSSL_LIBRARY is empty");
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return openssl_refuse(error, NULL, dlerror());
    if (!openssl_read_functions(handle, &table, why))
        return openssl_refuse(error, file, why);
    if (MAJOR(table.OpenSSL_version_num()) != 3)
        return openssl_refuse(error, file, "it is not of version 3");
    if (table.OPENSSL_init_ssl(INIT_NO_ATEXIT, NULL) != 1)
        return openssl_refuse(error, file, "it does not start");
    loaded = true;
    return FANIN_OK;
}

fanin_status openssl_load(const openssl **out, fanin_error *error)
{
    *out = NULL;
    if (!load_lock_take(&loading))
        return load_lock_lost("OpenSSL, or used it", error);
    fanin_status status = loaded ? FANIN_OK : load(error);
    load_lock_give(&loading);
    *out = status == FANIN_OK ? &table : NULL;
    return status;
}

const openssl *openssl_of_callback(void)
{
    return &table;
}

void openssl_enter(const openssl *o)
{
    load_lock_enter(&loading);
    o->ERR_clear_error();
    errno = 0;
}

void openssl_leave(void)
{
    load_lock_leave(&loading);
}

/* OpenSSL's numbers: a library's, and its reason; those that all have in common are flagged. */
#define CODE(library, reason) ((unsigned long)(library) << 23 | (reason))
#define LIBRARY_EVP 6
#define COMMON 0x80000ul
#define FATAL 0x40000ul
#define LIBRARIES 256ul /* of common reasons, those before say which library failed */

/* A first reason that says no more than that a library, or all of it, failed: what it needs was
   there before. */
static bool is_unexplained(unsigned long code)
{
    unsigned long reason = OPENSSL_REASON(code);
    return ((reason & COMMON) && ((reason & FATAL) || (reason ^ COMMON) < LIBRARIES)) ||
           code == CODE(LIBRARY_EVP, 134) || /* EVP_R_INITIALIZATION_ERROR */
           code == CODE(LIBRARY_EVP, 190);   /* EVP_R_NOT_ABLE_TO_COPY_CTX */
}

/* Not every place in OpenSSL that has no memory says so. malloc() does, as long as no alert is
   sent: that clears errno. */
static bool says_no_memory(const openssl *o, unsigned long *first_out)
{
    bool no_memory = errno == ENOMEM;
    unsigned long first = o->ERR_get_error();
    for (unsigned long code = first; code != 0; code = o->ERR_get_error())
        no_memory |= OPENSSL_REASON(code) == OPENSSL_NO_MEMORY;
    *first_out = first;
    return no_memory;
}

unsigned long openssl_fault(const openssl *o)
{
    unsigned long first;
    return says_no_memory(o, &first) || is_unexplained(first) ? OPENSSL_NO_MEMORY
                                                              : first;
}

bool openssl_lacks_memory(const openssl *o)
{
    unsigned long first;
    return says_no_memory(o, &first);
}
