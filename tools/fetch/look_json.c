/* SPDX-License-Identifier: Apache-2.0 */
/* A look for programs. */
#include "fetch/look.h"
#include "fetch/output.h"
#include "fetch/rank_states.h"

static json_t *drain_waits_json(const fanin_rank_stats *s)
{
    json_t *list = json_array();
    uint64_t bound = 100000;
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++) {
        bool last = i + 1 == FANIN_DRAIN_BUCKETS;
        json_array_append_new(
            list, output_object("bound_ns", last ? json_null() : output_u64(bound),
                                "updates", output_u64(s->drain_waits[i]), NULL));
        bound = look_drain_bound_after(i, bound);
    }
    return list;
}

/* What a rank counts. */
static void add_counts(json_t *o, const look_rank *r)
{
    const fanin_rank_stats *s = &r->stats;
    json_t *holders = json_array(), *read = json_object();
    look_read reads[LOOK_PATHS];
    look_reads(s, reads);
    for (size_t i = 0; i < LOOK_PATHS; i++) {
        json_object_set_new(read, reads[i].path, output_u64(reads[i].bytes));
    }
    for (size_t i = 0; i < r->n_holders; i++) {
        json_array_append_new(
            holders, output_object("who", output_string(r->holders[i].who), "age_ns",
                                   output_age_ns(r->holders[i].age_ms), NULL));
    }
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"leases", r->is.leases},
        {"rank_leases", s->leases},
        {"sessions", s->sessions},
        {"pulls_good", s->pulls_good},
        {"pulls_stale", s->pulls_stale},
        {"pulls_abandoned", s->pulls_abandoned},
        {"begins_granted", s->begins_granted},
        {"begins_refused", s->begins_refused},
        {"updates", s->updates},
        {"commits", s->commits},
        {"bytes_streamed", s->bytes_streamed},
        {"drain_p50_ns", look_drain_ns(s, 50)},
        {"drain_p99_ns", look_drain_ns(s, 99)},
        {"drain_wait_ns", s->drain_wait_ns_total},
        {"cpu_ns", s->cpu_ns},
        {"data_cpu_ns", s->data_cpu_ns},
        {"sends_waiting", s->sends_waiting},
        {"rtt_ns", s->rtt_ns},
    };
    output_set(o, "lease_age_ns", output_age_ns(r->is.lease_age_ms), "holders", holders,
               "bytes_read", read, "drain_waits", drain_waits_json(s), NULL);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        json_object_set_new(o, numbers[i].name, output_u64(numbers[i].value));
    }
}

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
        add_counts(o, r);
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
