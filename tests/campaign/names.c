/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <dlfcn.h>
#include <netdb.h>
#include <stdbool.h>
#include <string.h>

#define SILENT_NS UINT64_C(20000000000) /* as long as glibc asks several servers */
#define DOMAIN ".campaign"

typedef int lookup_fn(const char *, const char *, const struct addrinfo *,
                      struct addrinfo **);

static const board *the_board;

void names_by(const board *board)
{
    the_board = board;
}

static bool wait_for_answer(void)
{
    uint64_t until = board_now() + SILENT_NS;
    while (atomic_load(&the_board->names_silent) && board_now() < until)
        board_sleep(5000000);
    return !atomic_load(&the_board->names_silent);
}

/* In place of libc's, for the library too; parameters as netdb.h calls them. */
__attribute__((visibility("default"))) int getaddrinfo(const char *__name,
                                                       const char *__service,
                                                       const struct addrinfo *__req,
                                                       struct addrinfo **__pai)
{
    lookup_fn *real;
    void *found = dlsym(RTLD_NEXT, "getaddrinfo");
    const char *name = __name;
    size_t length = name ? strlen(name) : 0, domain = strlen(DOMAIN);
    memcpy(&real, &found, sizeof real);
    if (length > domain && strcmp(name + length - domain, DOMAIN) == 0) {
        if (!wait_for_answer())
            return EAI_AGAIN;
        name = "127.0.0.1";
    }
    return real(name, __service, __req, __pai);
}
