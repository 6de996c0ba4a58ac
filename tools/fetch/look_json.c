/* SPDX-License-Identifier: Apache-2.0 */
/* A look for programs. */
#include "fetch/look.h"
#include "fetch/output.h"
#include "fetch/rank_states.h"

static json_t *rank_json(const look_rank *r)
{
    json_t *o = output_object("rank", output_rank(r->at.rank), "address",
                              output_string(r->at.address), "status",
                              output_string(fanin_status_name(r->at.status)), "message",
                              output_string(r->at.message), NULL);
    if (look_answered(r) && r->there) {
        output_set(o, "state", output_string(state_name(r->is.state)), "step",
                   output_u64(r->is.step), "state_age_ns",
                   output_age_ns(r->is.state_age_ms), "commit_age_ns",
                   output_age_ns(r->is.commit_age_ms), "update_age_ns",
                   output_age_ns(r->is.update_age_ms), "reason",
                   output_string(r->reason), NULL);
    }
    if (look_answered(r) && r->stats.counted) {
        json_t *holders = json_array(), *read = json_object();
        look_read reads[LOOK_PATHS];
        look_reads(&r->stats, reads);
        for (size_t i = 0; i < LOOK_PATHS; i++) {
            json_object_set_new(read, reads[i].path, output_u64(reads[i].bytes));
        }
        for (size_t i = 0; i < r->n_holders; i++) {
            json_array_append_new(
                holders,
                output_object("who", output_string(r->holders[i].who), "age_ns",
                              output_age_ns(r->holders[i].age_ms), NULL));
        }
        output_set(o, "leases", output_u64(r->is.leases), "lease_age_ns",
                   output_age_ns(r->is.lease_age_ms), "holders", holders, "sessions",
                   output_u64(r->stats.sessions), "pulls_good",
                   output_u64(r->stats.pulls_good), "pulls_stale",
                   output_u64(r->stats.pulls_stale), "bytes_streamed",
                   output_u64(r->stats.bytes_streamed), "bytes_read", read,
                   "drain_p50_ns", output_u64(look_drain_ns(&r->stats, 50)),
                   "drain_p99_ns", output_u64(look_drain_ns(&r->stats, 99)), "cpu_ns",
                   output_u64(r->stats.cpu_ns), "sends_waiting",
                   output_u64(r->stats.sends_waiting), "rtt_ns",
                   output_u64(r->stats.rtt_ns), NULL);
    }
    return o;
}

json_t *look_json(const session *s, const look *l, const problems *p)
{
    json_t *ranks = json_array(), *list = json_array();
    for (uint32_t i = 0; i < l->count; i++) {
        json_array_append_new(ranks, rank_json(&l->ranks[i]));
    }
    for (size_t i = 0; i < p->count; i++) {
        json_array_append_new(
            list, output_object("kind", output_string(p->list[i].kind), "rank",
                                output_rank(p->list[i].rank), "fails",
                                json_boolean(p->list[i].status != FANIN_OK), "text",
                                output_string(p->list[i].text), "remedy",
                                output_string(p->list[i].remedy), NULL));
    }
    return output_object("publication", output_string(s->publication), "healthy",
                         json_boolean(problems_verdict(p) == FANIN_OK), "step",
                         output_u64(l->newest), "problems", list, "ranks", ranks, NULL);
}
