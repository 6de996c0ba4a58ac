/* SPDX-License-Identifier: Apache-2.0 */
/* What has come at a relay, for readers that hold a lease of it. */
#include "control/parked.h"
#include "error_set.h"
#include "publish/filling.h"
#include "publish/lease.h"

#include <string.h>

/* Lock held. Writes into the output, as what it tells may change without the lock. */
static bool tell(session *s, const parked *q, bool is_over, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    const lease *l = lease_find(s->reader, q->token);
    msg_landed_ok m = {.serving = (uint32_t)server->stats.sends_waiting};
    landed_range whole;
    if (!l)
        error_set(error, FANIN_ERR_STALE, NULL,
                  lease_find_void(s->reader, q->token)
                      ? "the lease is gone: the weights are being rewritten"
                      : "this session has no such lease");
    else if (!filling_since(l->of, l->catalog->n_boxes, q->version, &whole, &m))
        error_set(error, FANIN_ERR_ARGUMENT, NULL,
                  "this lease never had such a version");
    else if (m.n_ranges > 0 || is_over)
        encode_landed_ok(&s->out.bytes, q->request, &m);
    else
        return false;
    return true;
}

bool answer_landed(session *s, const parked *q, bool is_over)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    pthread_mutex_lock(&server->lock);
    bool says = tell(s, q, is_over, &error);
    pthread_mutex_unlock(&server->lock);
    reply_error(s, q->request, &error);
    return says;
}

fanin_status handle_landed(session *s, uint64_t request, body *in)
{
    msg_landed m;
    fanin_status status = decode_landed(in, &m);
    if (status != FANIN_OK)
        return status;
    parked q = {.type = MSG_LANDED,
                .request = request,
                .version = m.version,
                .at = deadline_in_ms(m.timeout_ms)};
    memcpy(q.token, m.token, sizeof q.token);
    if (relay_part_of(s, request))
        park_or_answer(s, &q);
    return FANIN_OK;
}
