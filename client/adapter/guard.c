/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/guard.h"

json_t *guard_json(fanin_checksums guard)
{
    if (guard == FANIN_CHECKSUMS_LOCAL)
        return json_string("local");
    return json_boolean(guard == FANIN_CHECKSUMS_ALL);
}
