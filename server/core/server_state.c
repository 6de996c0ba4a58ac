/* SPDX-License-Identifier: Apache-2.0 */
#include "core/server_state.h"
#include "core/rules.h"
#include "error_set.h"

#include <unistd.h>

#ifdef FANIN_TEST_HOOKS
atomic_uint server_rules_off;
void (*_Atomic server_on_send)(void);
void (*_Atomic server_on_fill)(void);
#endif

fanin_status server_check(const fanin_server *s, fanin_error *error)
{
    if (!s)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the server is NULL");
    if (s->pid != getpid()) {
        error_place place = {.remedy = "create a server in the process that uses it"};
        return error_set(error, FANIN_ERR_FORKED, &place,
                         "the server belongs to the parent process");
    }
    return FANIN_OK;
}
