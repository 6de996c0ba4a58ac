/* SPDX-License-Identifier: Apache-2.0 */
#include "schedule.h"

#include "array.h"
#include <stdlib.h>
#include <string.h>

#define MS UINT64_C(1000000)
#define NEVER UINT64_MAX
#define LATE 3               /* so many times the usual */
#define OWNER_LATE 5         /* so many times its own pace */
#define JITTER_NS (100 * MS) /* below that nothing is late */
#define UNKNOWN_NS                                                                     \
    (1000 * MS)           /* a read takes less, a duty twice that: no pace is known */
#define LOOK_NS (20 * MS) /* how often owners' lateness is looked at */
#define AVOID_NS                                                                       \
    (100 * MS) /* who has failed is left alone for so long, then twice ... */
#define AVOID_DOUBLINGS 6
/* Duties of a reader, if there are so many units: neighbours are dealt together beyond that, as one
   read of several units costs less than several reads. */
#define DUTIES_LEAST 64

typedef struct unit_state {
    uint32_t owner;   /* of schedule.members */
    uint32_t holders; /* sources that have it */
    uint32_t busy;    /* 1 + the source that it is asked of, 0: none */
    bool proven;
} unit_state;

typedef struct source {
    bool used;
    member who;
    uint8_t *has; /* a byte a unit; NULL: the trainer, who has all */
    uint64_t asked_ns, asked_bytes, read_ns;
    size_t n_asked, n_read; /* units that are awaited, and that wait for confirmation */
    uint64_t avoid_ns, avoided_ns; /* until when it is left alone, and since */
    unsigned failures;             /* one after the other */
    uint64_t periods;              /* for how many it was late when it was broken off */
    bool broken;                   /* what is asked of it is being broken off */
} source;

/* How the owner of duties gets on. */
typedef struct owner {
    member who;                 /* first: they are searched by it */
    uint64_t since_ns, last_ns; /* known, and its last duty came */
    size_t come, duties;        /* since then; dealt */
} owner;

struct schedule {
    member self;
    uint64_t began_ns;
    const uint64_t *sizes;
    unit_state *units;
    size_t n_units, n_left;
    size_t block; /* units that are dealt together */
    source *sources;
    size_t n_sources, source_capacity;
    owner *owners; /* ascending ids */
    size_t n_owners, own;
    member *members;                   /* the owners' */
    double usual_holder, usual_origin; /* ns a byte; 0: not known */
    schedule_counts counts;
};

/* ------------------------------------------------------------------------ life cycle */

schedule *schedule_create(const uint64_t *sizes, size_t n_units, const member *self,
                          uint64_t now_ns)
{
    schedule *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    *s = (schedule){.self = *self, .began_ns = now_ns, .sizes = sizes};
    s->n_units = s->n_left = n_units;
    s->units = calloc(n_units + 1, sizeof *s->units);
    if (s->units &&
        array_reserve(&s->sources, &s->source_capacity, 1, sizeof *s->sources)) {
        s->sources[SCHEDULE_ORIGIN] = (source){.used = true};
        s->n_sources = 1;
        if (schedule_list(s, NULL, 0, now_ns))
            return s;
    }
    schedule_free(s);
    return NULL;
}

void schedule_free(schedule *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->n_sources; i++)
        free(s->sources[i].has);
    free(s->sources);
    free(s->units);
    free(s->owners);
    free(s->members);
    free(s);
}

/* ------------------------------------------------------------------------------ list */

/* Sorted, each once, with the reader itself. */
static size_t sort_members(member *all, size_t n)
{
    size_t kept = 0;
    qsort(all, n, sizeof *all, member_compare);
    for (size_t i = 0; i < n; i++) {
        if (kept == 0 || member_compare(&all[kept - 1], &all[i]) != 0)
            all[kept++] = all[i];
    }
    return kept;
}

static owner *find_owner(const schedule *s, const member *who)
{
    return (owner *)array_find(who, s->owners, s->n_owners, sizeof *s->owners,
                               member_compare);
}

bool schedule_list(schedule *s, const member *members, size_t n, uint64_t now_ns)
{
    member *all = calloc(n + 1, sizeof *all);
    owner *owners = calloc(n + 1, sizeof *owners);
    uint32_t *dealt = calloc(s->n_units + n + 2, sizeof *dealt);
    if (!all || !owners || !dealt) {
        free(all);
        free(owners);
        free(dealt);
        return false;
    }
    if (n > 0)
        memcpy(all, members, n * sizeof *all);
    all[n] = s->self;
    n = sort_members(all, n + 1);
    uint32_t *load = dealt + s->n_units;
    s->block = 1 + s->n_units / (n * DUTIES_LEAST + 1);
    duty_deal(all, n, dealt, (s->n_units + s->block - 1) / s->block, load);
    for (size_t i = 0; i < n; i++) {
        const owner *before = s->owners ? find_owner(s, &all[i]) : NULL;
        owners[i] = before
                        ? *before
                        : (owner){.who = all[i], .since_ns = now_ns, .last_ns = now_ns};
        owners[i].duties = load[i] * s->block;
        if (member_compare(&all[i], &s->self) == 0)
            s->own = i;
    }
    for (size_t i = 0; i < s->n_units; i++)
        s->units[i].owner = dealt[i / s->block];
    free(dealt);
    free(s->owners);
    free(s->members);
    s->owners = owners;
    s->members = all;
    s->n_owners = n;
    return true;
}

/* --------------------------------------------------------------------------- sources */

size_t schedule_join(schedule *s, const member *who)
{
    size_t i = 1;
    while (i < s->n_sources && s->sources[i].used)
        i++;
    uint8_t *has = calloc(s->n_units + 1, 1);
    if (!has ||
        !array_reserve(&s->sources, &s->source_capacity, i + 1, sizeof *s->sources)) {
        free(has);
        return 0;
    }
    s->sources[i] = (source){.used = true, .who = *who, .has = has};
    if (i == s->n_sources)
        s->n_sources++;
    return i;
}

static void give_up_asked(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    size_t left = x->n_asked + x->n_read;
    for (size_t u = 0; u < s->n_units && left > 0; u++) {
        if (s->units[u].busy != number + 1)
            continue;
        s->units[u].busy = 0;
        left--;
    }
    x->n_asked = x->n_read = 0;
}

void schedule_forget(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    for (size_t u = 0; x->has && u < s->n_units; u++) {
        s->units[u].holders -= x->has[u];
        x->has[u] = 0;
    }
}

void schedule_leave(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    give_up_asked(s, number);
    schedule_forget(s, number);
    free(x->has);
    *x = (source){0};
}

void schedule_has(schedule *s, size_t number, size_t unit, bool first, uint64_t now_ns)
{
    source *x = &s->sources[number];
    if (!x->has || unit >= s->n_units || x->has[unit])
        return;
    x->has[unit] = 1;
    owner *o = &s->owners[s->units[unit].owner];
    if (s->units[unit].holders++ > 0 || s->units[unit].proven)
        return;
    /* Wherever it is first seen, its owner has brought it. */
    o->last_ns = now_ns;
    if (!first)
        o->come++;
    else if (o->come == 0)
        o->since_ns = now_ns;
}

/* ----------------------------------------------------------------------------- paces */

/* Nanoseconds between two duties of an owner, 0: not known. */
static uint64_t pace_of(const owner *o)
{
    return o->come > 0 ? (o->last_ns - o->since_ns) / o->come : 0;
}

static int compare_paces(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The one in the middle of those that are known, 0: none. */
static uint64_t middle_pace(const schedule *s)
{
    uint64_t paces[64];
    size_t n = 0, step = 1 + s->n_owners / (sizeof paces / sizeof *paces);
    for (size_t i = 0; i < s->n_owners; i += step) {
        paces[n] = pace_of(&s->owners[i]);
        n += paces[n] > 0;
    }
    if (n == 0)
        return pace_of(&s->owners[s->own]);
    qsort(paces, n, sizeof *paces, compare_paces);
    return paces[n / 2];
}

static bool is_avoided(const source *x, uint64_t now_ns)
{
    return now_ns < x->avoid_ns;
}

/* The source that is this member, NULL: there is none. */
static const source *source_of(const schedule *s, const member *who)
{
    for (size_t i = 1; i < s->n_sources; i++) {
        if (s->sources[i].used && member_compare(&s->sources[i].who, who) == 0)
            return &s->sources[i];
    }
    return NULL;
}

/* For how many periods the owner has been late, 0: it is not. */
static uint64_t periods_late(const schedule *s, const owner *o, uint64_t middle,
                             uint64_t now_ns)
{
    const source *x = source_of(s, &o->who);
    uint64_t pace = pace_of(o) > 0 ? pace_of(o) : middle;
    if (x && is_avoided(x, now_ns))
        return x->periods + (now_ns - x->avoided_ns) / AVOID_NS;
    if (pace == 0)
        return (now_ns - o->since_ns) / (2 * UNKNOWN_NS);
    uint64_t allowed = OWNER_LATE * pace + JITTER_NS;
    uint64_t silent = (now_ns - o->last_ns) / allowed;
    /* Nor may it take much longer for all of its duties than others do for theirs. */
    uint64_t share = middle * (o->duties + 1) / 4 * 5 + JITTER_NS;
    uint64_t slow = middle > 0 ? (now_ns - o->since_ns) / share : 0;
    return silent > slow ? silent : slow;
}

/* -------------------------------------------------------------------- what to ask for */

/* Whether some source but @p but has the unit and is not left alone. */
static bool is_held(const schedule *s, size_t unit, size_t but, uint64_t now_ns)
{
    if (s->units[unit].holders == 0)
        return false;
    for (size_t i = 1; i < s->n_sources; i++) {
        const source *x = &s->sources[i];
        if (i != but && x->used && x->has[unit] && !is_avoided(x, now_ns))
            return true;
    }
    return false;
}

/* Whether it is this reader's turn, since the owner has been late for so long. */
static bool is_next(const schedule *s, size_t unit, uint64_t periods)
{
    uint64_t turns = UINT64_C(1) << (periods > 32 ? 31 : periods - 1);
    return duty_rank(s->members, s->n_owners, s->own, s->units[unit].owner,
                     unit / s->block) < turns;
}

static bool is_free(const unit_state *u)
{
    return !u->proven && u->busy == 0;
}

/* Takes the run that begins with @p unit, as far as @p fits says. Its bytes. */
static uint64_t ask_run(schedule *s, size_t number, size_t unit, uint64_t bytes,
                        bool (*fits)(const schedule *, size_t, size_t), unit_run *out)
{
    uint64_t taken = 0;
    *out = (unit_run){.first = (uint32_t)unit};
    while (unit < s->n_units && is_free(&s->units[unit]) && fits(s, number, unit) &&
           (taken == 0 || taken + s->sizes[unit] <= bytes)) {
        s->units[unit].busy = (uint32_t)number + 1;
        taken += s->sizes[unit++];
        out->count++;
    }
    return taken;
}

static bool is_own_duty(const schedule *s, size_t number, size_t unit)
{
    (void)number;
    return s->units[unit].owner == s->own && s->units[unit].holders == 0;
}

static bool has_unit(const schedule *s, size_t number, size_t unit)
{
    return s->sources[number].has[unit] != 0;
}

static bool fits_none(const schedule *s, size_t number, size_t unit)
{
    (void)number;
    return s->units[unit].busy == 0;
}

/* Duties of the reader's own, then others' that are late. */
static size_t find_for_origin(const schedule *s, uint64_t now_ns, bool *own_out)
{
    uint64_t middle = middle_pace(s);
    size_t known = SIZE_MAX; /* the owner whose periods are known */
    uint64_t periods = 0;
    *own_out = true;
    for (size_t u = 0; u < s->n_units; u++) {
        if (is_free(&s->units[u]) && s->units[u].owner == s->own &&
            !is_held(s, u, 0, now_ns))
            return u;
    }
    *own_out = false;
    for (size_t u = 0; u < s->n_units; u++) {
        const unit_state *unit = &s->units[u];
        if (!is_free(unit) || unit->owner == s->own || is_held(s, u, 0, now_ns))
            continue;
        if (known != unit->owner)
            periods = periods_late(s, &s->owners[unit->owner], middle, now_ns);
        known = unit->owner;
        if (periods > 0 && is_next(s, u, periods))
            return u;
    }
    return s->n_units;
}

static uint64_t own_order(uint64_t unit, const member *self)
{
    uint64_t x;
    memcpy(&x, self->id, sizeof x);
    x = (x ^ unit) * UINT64_C(0x9E3779B97F4A7C15);
    return (x ^ x >> 32) * UINT64_C(0xBF58476D1CE4E5B9);
}

/* What the fewest have; of those any, and not the same for all readers. */
static size_t find_for_holder(const schedule *s, size_t number)
{
    const source *x = &s->sources[number];
    size_t best = s->n_units;
    uint64_t best_key = 0;
    for (size_t u = 0; u < s->n_units; u++) {
        const unit_state *unit = &s->units[u];
        if (!x->has[u] || !is_free(unit))
            continue;
        bool rarer = best == s->n_units || unit->holders < s->units[best].holders;
        bool equal = best < s->n_units && unit->holders == s->units[best].holders;
        uint64_t key = rarer || equal ? own_order(u / s->block, &s->self) : 0;
        if (rarer || (equal && key > best_key)) {
            best = u;
            best_key = key;
        }
    }
    return best;
}

size_t schedule_next(schedule *s, size_t number, uint64_t bytes, unit_run *runs,
                     size_t most, uint64_t now_ns, uint64_t *wake_ns)
{
    source *x = &s->sources[number];
    size_t n = 0;
    uint64_t taken = 0;
    *wake_ns = number == SCHEDULE_ORIGIN && s->n_left > 0 ? now_ns + LOOK_NS : NEVER;
    if (is_avoided(x, now_ns)) {
        *wake_ns = x->avoid_ns;
        return 0;
    }
    while (n < most && (n == 0 || taken < bytes)) {
        bool own = false;
        size_t u = number == SCHEDULE_ORIGIN ? find_for_origin(s, now_ns, &own)
                                             : find_for_holder(s, number);
        if (u == s->n_units || (n > 0 && taken + s->sizes[u] > bytes))
            break;
        bool one = number == SCHEDULE_ORIGIN && !(own && is_own_duty(s, number, u));
        taken +=
            ask_run(s, number, u, one ? 0 : bytes - (taken < bytes ? taken : bytes),
                    number != SCHEDULE_ORIGIN ? has_unit
                    : one                     ? fits_none
                                              : is_own_duty,
                    &runs[n]);
        x->n_asked += runs[n++].count;
    }
    if (n > 0) {
        x->asked_ns = now_ns;
        x->asked_bytes = taken;
    }
    return n;
}

/* ---------------------------------------------------------------------- what came of it */

static void learn(double *usual, const source *x, uint64_t now_ns)
{
    double took = (double)(now_ns - x->asked_ns) / (double)(x->asked_bytes + 1);
    *usual = *usual > 0 ? *usual + (took - *usual) / 8 : took;
}

static void prove_unit(schedule *s, size_t number, unit_state *unit, uint64_t now_ns)
{
    owner *own = &s->owners[s->own];
    unit->busy = 0;
    unit->proven = true;
    s->n_left--;
    if (number != SCHEDULE_ORIGIN)
        return;
    if (unit->owner == s->own) {
        own->come++;
        own->last_ns = now_ns;
    } else {
        s->counts.taken_over++;
    }
}

void schedule_return(schedule *s, size_t number)
{
    give_up_asked(s, number);
}

void schedule_read(schedule *s, size_t number, const unit_run *runs, size_t n,
                   uint64_t now_ns)
{
    source *x = &s->sources[number];
    learn(number == SCHEDULE_ORIGIN ? &s->usual_origin : &s->usual_holder, x, now_ns);
    for (size_t i = 0; i < n; i++) {
        x->n_asked -= runs[i].count;
        x->n_read += runs[i].count;
    }
    x->read_ns = now_ns;
    x->broken = false;
}

void schedule_confirmed(schedule *s, size_t number, const unit_run *runs, size_t n,
                        uint64_t now_ns)
{
    source *x = &s->sources[number];
    for (size_t i = 0; i < n; i++) {
        for (uint32_t u = runs[i].first; u < runs[i].first + runs[i].count; u++)
            prove_unit(s, number, &s->units[u], now_ns);
        x->n_read -= runs[i].count;
    }
    x->failures = 0;
}

void schedule_proven(schedule *s, size_t number, uint64_t now_ns)
{
    source *x = &s->sources[number];
    learn(number == SCHEDULE_ORIGIN ? &s->usual_origin : &s->usual_holder, x, now_ns);
    for (size_t u = 0; u < s->n_units && x->n_asked > 0; u++) {
        if (s->units[u].busy != number + 1)
            continue;
        prove_unit(s, number, &s->units[u], now_ns);
        x->n_asked--;
    }
    x->failures = 0;
    x->broken = false;
}

void schedule_failed(schedule *s, size_t number, uint64_t now_ns)
{
    source *x = &s->sources[number];
    give_up_asked(s, number);
    schedule_forget(s, number);
    unsigned doublings = x->failures < AVOID_DOUBLINGS ? x->failures : AVOID_DOUBLINGS;
    x->failures++;
    if (!x->broken)
        x->periods = 1;
    x->broken = false;
    x->avoided_ns = now_ns;
    x->avoid_ns = now_ns + (AVOID_NS << doublings);
}

/* Whether somebody else is to bring the unit: a holder, or this reader by the trainer. */
static bool can_pass_on(const schedule *s, size_t number, size_t unit, uint64_t periods,
                        uint64_t now_ns)
{
    if (is_held(s, unit, number, now_ns))
        return true;
    const source *origin = &s->sources[SCHEDULE_ORIGIN];
    return number != SCHEDULE_ORIGIN && origin->n_asked == 0 &&
           !is_avoided(origin, now_ns) && is_next(s, unit, periods);
}

/* For how many times what is allowed it has owed what it was asked for; 0: it is not late. */
static uint64_t periods_owed(const schedule *s, size_t number, uint64_t now_ns)
{
    const source *x = &s->sources[number];
    unsigned doublings = x->failures < AVOID_DOUBLINGS ? x->failures : AVOID_DOUBLINGS;
    double usual = number == SCHEDULE_ORIGIN || s->usual_holder <= 0 ? s->usual_origin
                                                                     : s->usual_holder;
    double allowed = LATE * usual * (double)x->asked_bytes;
    uint64_t since = x->n_asked > 0 ? x->asked_ns : x->read_ns;
    return (now_ns - since) /
           (usual > 0 ? (uint64_t)allowed + JITTER_NS : UNKNOWN_NS << doublings);
}

bool schedule_break_off(schedule *s, size_t number, uint64_t now_ns)
{
    source *x = &s->sources[number];
    size_t owed = x->n_asked + x->n_read;
    uint64_t periods =
        x->used && owed > 0 && !x->broken ? periods_owed(s, number, now_ns) : 0;
    size_t seen = 0;
    for (size_t u = 0; periods > 0 && u < s->n_units && seen < owed; u++) {
        if (s->units[u].busy != number + 1)
            continue;
        seen++;
        if (!can_pass_on(s, number, u, periods, now_ns))
            continue;
        x->broken = true;
        x->periods = periods;
        s->counts.late += owed;
        return true;
    }
    return false;
}

size_t schedule_left(const schedule *s)
{
    return s->n_left;
}

bool schedule_without_origin(const schedule *s)
{
    for (size_t u = 0; u < s->n_units; u++) {
        if (!s->units[u].proven && s->units[u].holders == 0)
            return false;
    }
    return true;
}

schedule_counts schedule_get_counts(const schedule *s)
{
    return s->counts;
}
