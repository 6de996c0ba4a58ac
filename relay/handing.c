/* SPDX-License-Identifier: Apache-2.0 */
#include "handing.h"

#include "core/server_state.h"
#include "publish/filling.h"
#include <string.h>

fanin_status handing_fill(fanin_server *s, const char *publication, uint64_t step,
                          fanin_error *error)
{
    return server_fill(s, publication, step, error);
}

fanin_status handing_prove(fanin_server *s, const char *publication, uint64_t step,
                           const landed_range *ranges, size_t n, fanin_error *error)
{
    return server_prove(s, publication, step, ranges, n, error);
}

member handing_member(const fanin_server *s)
{
    member m;
    memcpy(m.id, s->incarnation, sizeof m.id);
    return m;
}

const char *handing_host(const fanin_server *s)
{
    return s->host;
}
