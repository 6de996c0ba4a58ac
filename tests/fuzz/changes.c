/* SPDX-License-Identifier: Apache-2.0 */
#include "changes.h"

#include "ends.h"
#include "fuzz.h"
#include <string.h>

#define GUARD 0xcc

void changes_prepare(changes *c)
{
    fanin_box box;
    memset(c, GUARD, sizeof *c);
    c->step = 0;
    c->doubted = false;
    const fanin_tensor slow =
        make_tensor("slow", FANIN_DTYPE_U8, SLOW, 0, &box, c->all + 1);
    check(fanin_destination_create(&slow, 1, &c->into, NULL) == FANIN_OK);
}

void changes_end(changes *c)
{
    fanin_destination_free(&c->into);
}

fanin_status changes_pull(fanin_client *client, changes *c, bool verify,
                          uint32_t timeout_ms, fanin_error *error)
{
    fanin_pull_options o = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_result *result = NULL;
    o.publication = CHANGES;
    o.timeout_ms = timeout_ms;
    o.verify = verify;
    o.deltas = true;
    fanin_status status = fanin_client_pull_into(client, &o, c->into, &result, error);
    check(c->all[0] == GUARD && c->all[SLOW + 1] == GUARD);
    fanin_result_get(result, &info);
    c->step = info.step;
    fanin_result_free(&result);
    return status;
}

void changes_check(const changes *c)
{
    for (unsigned i = 0; i < SLOW; i++)
        check(c->all[1 + i] == ranks_slow_byte(c->step, i));
}
