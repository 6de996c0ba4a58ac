/* SPDX-License-Identifier: Apache-2.0 */
#include "schedule.h"

#include "array.h"
#include <stdlib.h>
#include <string.h>

#define MS UINT64_C(1000000)
#define NEVER UINT64_MAX
#define LATE 3       /* so many times the usual */
#define OWNER_LATE 5 /* so many times its own pace */
#define NEAR_LATE 2  /* so many times the pace of duties: near ones bring it within */
#define JITTER_NS (100 * MS) /* below that nothing is late */
#define UNKNOWN_NS                                                                     \
    (1000 * MS)           /* a read takes less, a duty twice that: no pace is known */
#define LOOK_NS (20 * MS) /* how often owners' lateness is looked at */
#define AVOID_NS                                                                       \
    (100 * MS) /* who has failed is left alone for so long, then twice ... */
#define AVOID_DOUBLINGS 6
#define BRINGS_ALL ((uint8_t)~0u)
/* Duties of a reader, if there are so many units: neighbours are dealt together beyond that, as one
   read of several units costs less than several reads. */
#define DUTIES_LEAST 64

typedef struct unit_state {
    uint32_t owner;             /* of schedule.members */
    uint32_t holders;           /* sources that have it */
    uint32_t within[NEAR_SITE]; /* of those, at most so far away */
    uint64_t held_ns;           /* since when somebody has it */
    uint32_t busy;              /* 1 + the source that it is asked of, 0: none */
    uint8_t brings; /* bits of nearness: this reader brings it to those so near */
    bool proven;
} unit_state;

typedef struct source {
    bool used;
    member who;
    nearness near;
    uint64_t *has; /* a bit a unit; NULL: the trainer, who has all */
    uint64_t asked_ns, asked_bytes, read_ns;
    size_t n_asked, n_read; /* units that are awaited, and that wait for confirmation */
    uint64_t avoid_ns, avoided_ns; /* until when it is left alone, and since */
    unsigned failures;             /* one after the other */
    uint64_t lateness;             /* when it was broken off */
    bool broken;                   /* what is asked of it is being broken off */
} source;

/* How the owner of duties gets on. */
typedef struct owner {
    member who;                 /* first: they are searched by it */
    uint64_t since_ns, last_ns; /* known, and its last duty came */
    size_t come, duties;        /* since then; dealt */
    size_t burst;               /* of those, that came together the last time */
    size_t source;              /* that it is; SCHEDULE_ORIGIN: it is not read */
    uint64_t turns;             /* so many may take over its duties: of find_late() */
} owner;

struct schedule {
    member self;
    uint64_t began_ns;
    const uint64_t *sizes;
    unit_state *units;
    uint64_t *free;       /* a bit a unit: it is neither proven nor asked for */
    uint64_t *own_duties; /* likewise: it is the reader's own duty */
    size_t n_units, n_left, n_words;
    size_t block; /* units that are dealt together */
    bool without_trainer;
    source *sources;
    size_t n_sources, source_capacity;
    owner *owners; /* ascending ids */
    size_t n_owners, own;
    member *members;                   /* the owners' */
    double usual_holder, usual_origin; /* ns a byte; 0: not known */
    uint64_t now_ns, paced_ns; /* of schedule_next(), and when it looked at the pace */
    uint64_t near_ns;          /* so long near ones are waited for */
    schedule_counts counts;
};

/* ------------------------------------------------------------------------------ bits */

static bool bit(const uint64_t *bits, size_t unit)
{
    return bits[unit / 64] >> unit % 64 & 1;
}

static void mark_bit(uint64_t *bits, size_t unit)
{
    bits[unit / 64] |= UINT64_C(1) << unit % 64;
}

static void clear_bit(uint64_t *bits, size_t unit)
{
    bits[unit / 64] &= ~(UINT64_C(1) << unit % 64);
}

/* Takes the lowest one out. */
static size_t take_bit(uint64_t *word)
{
    size_t lowest = (size_t)__builtin_ctzll(*word);
    *word &= *word - 1;
    return lowest;
}

/* ------------------------------------------------------------------------ life cycle */

schedule *schedule_create(const uint64_t *sizes, size_t n_units, const member *self,
                          uint64_t now_ns)
{
    schedule *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    *s = (schedule){.self = *self, .began_ns = now_ns, .sizes = sizes};
    s->n_units = s->n_left = n_units;
    s->n_words = n_units / 64 + 1;
    s->units = calloc(n_units + 1, sizeof *s->units);
    s->free = calloc(s->n_words, sizeof *s->free);
    s->own_duties = calloc(s->n_words, sizeof *s->own_duties);
    bool room = s->units && s->free && s->own_duties;
    for (size_t u = 0; room && u < n_units; u++) {
        s->units[u].brings = BRINGS_ALL;
        mark_bit(s->free, u);
    }
    if (room &&
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
    free(s->free);
    free(s->own_duties);
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

/* @p dealt: whose each block of units is. */
static void take_duties(schedule *s, const uint32_t *dealt)
{
    memset(s->own_duties, 0, s->n_words * sizeof *s->own_duties);
    for (size_t u = 0; u < s->n_units; u++) {
        s->units[u].owner = dealt[u / s->block];
        if (s->units[u].owner == s->own)
            mark_bit(s->own_duties, u);
    }
}

/* SCHEDULE_ORIGIN: it is not read. */
static size_t find_source(const schedule *s, const member *who)
{
    for (size_t i = 1; i < s->n_sources; i++)
        if (s->sources[i].used && member_compare(&s->sources[i].who, who) == 0)
            return i;
    return SCHEDULE_ORIGIN;
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
        owners[i] = before ? *before
                           : (owner){.who = all[i],
                                     .since_ns = now_ns,
                                     .last_ns = now_ns,
                                     .source = find_source(s, &all[i])};
        owners[i].duties = load[i] * s->block;
        if (member_compare(&all[i], &s->self) == 0)
            s->own = i;
    }
    take_duties(s, dealt);
    free(dealt);
    free(s->owners);
    free(s->members);
    s->owners = owners;
    s->members = all;
    s->n_owners = n;
    return true;
}

/* --------------------------------------------------------------------------- sources */

/* Which units this reader brings to those that are at most so far away: one of them does. They find
   it out alike if they read each other, and else bring some twice. Without memory it brings all. */
static void deal_bringers(schedule *s, nearness near)
{
    uint8_t own = (uint8_t)(1u << near);
    member *all = calloc(s->n_sources + 1, sizeof *all);
    uint32_t *dealt = calloc(s->n_units + s->n_sources + 2, sizeof *dealt);
    size_t n = 0;
    for (size_t i = 1; all && i < s->n_sources; i++) {
        const source *x = &s->sources[i];
        if (x->used && x->near <= near && find_owner(s, &x->who))
            all[n++] = x->who;
    }
    size_t block = 1 + s->n_units / ((n + 1) * DUTIES_LEAST + 1);
    bool alone = !all || !dealt || n == 0;
    if (!alone) {
        all[n] = s->self;
        n = sort_members(all, n + 1);
        duty_deal(all, n, dealt, (s->n_units + block - 1) / block, dealt + s->n_units);
    }
    for (size_t u = 0; u < s->n_units; u++) {
        s->units[u].brings |= own;
        if (!alone && member_compare(&all[dealt[u / block]], &s->self) != 0)
            s->units[u].brings ^= own;
    }
    free(all);
    free(dealt);
}

static void source_changes(schedule *s, nearness near)
{
    for (int i = (int)near; i < NEAR_SITE; i++)
        deal_bringers(s, (nearness)i);
}

size_t schedule_join(schedule *s, const member *who, nearness near)
{
    size_t i = 1;
    while (i < s->n_sources && s->sources[i].used)
        i++;
    uint64_t *has = calloc(s->n_words, sizeof *has);
    if (!has ||
        !array_reserve(&s->sources, &s->source_capacity, i + 1, sizeof *s->sources)) {
        free(has);
        return 0;
    }
    s->sources[i] = (source){.used = true, .who = *who, .near = near, .has = has};
    if (i == s->n_sources)
        s->n_sources++;
    owner *o = find_owner(s, who);
    if (o)
        o->source = i;
    source_changes(s, near);
    return i;
}

static void count_holder(unit_state *unit, const source *x, int more)
{
    unit->holders += (uint32_t)more;
    for (int i = (int)x->near; i < NEAR_SITE; i++)
        unit->within[i] += (uint32_t)more;
}

static void give_up_asked(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    size_t left = x->n_asked + x->n_read;
    for (size_t u = 0; u < s->n_units && left > 0; u++) {
        if (s->units[u].busy != number + 1)
            continue;
        s->units[u].busy = 0;
        mark_bit(s->free, u);
        left--;
    }
    x->n_asked = x->n_read = 0;
}

void schedule_forget(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    for (size_t w = 0; x->has && w < s->n_words; w++) {
        while (x->has[w])
            count_holder(&s->units[64 * w + take_bit(&x->has[w])], x, -1);
    }
}

void schedule_without_trainer(schedule *s)
{
    s->without_trainer = true;
}

void schedule_leave(schedule *s, size_t number)
{
    source *x = &s->sources[number];
    give_up_asked(s, number);
    schedule_forget(s, number);
    free(x->has);
    owner *o = find_owner(s, &x->who);
    nearness near = x->near;
    *x = (source){0};
    if (o && o->source == number)
        o->source = find_source(s, &o->who);
    source_changes(s, near);
}

static void duty_comes(owner *o, uint64_t now_ns)
{
    o->burst = now_ns == o->last_ns ? o->burst + 1 : 1;
    o->last_ns = now_ns;
    o->come++;
}

/* Who is read says itself what it brings: others may have taken it over. Wherever another one's
   duty is first seen, its owner has brought it; but not where nothing is dealt. */
static bool brings_duty(const schedule *s, const source *x, const owner *o, bool known)
{
    if (member_compare(&x->who, &o->who) == 0)
        return true;
    return !known && find_owner(s, &x->who) && o->source == SCHEDULE_ORIGIN;
}

void schedule_has(schedule *s, size_t number, size_t unit, bool first, uint64_t now_ns)
{
    source *x = &s->sources[number];
    if (!x->has || unit >= s->n_units || bit(x->has, unit))
        return;
    mark_bit(x->has, unit);
    unit_state *held = &s->units[unit];
    owner *o = &s->owners[held->owner];
    bool known = held->holders > 0;
    held->held_ns = known ? held->held_ns : now_ns;
    count_holder(held, x, 1);
    if (!brings_duty(s, x, o, known || held->proven))
        return;
    if (!first) {
        duty_comes(o, now_ns);
        return;
    }
    o->last_ns = now_ns;
    if (o->come == 0)
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

/* How late the owner of a duty is: in multiples of what it is allowed, 0: it is not. */
static uint64_t owner_lateness(const schedule *s, const owner *o, uint64_t middle,
                               uint64_t now_ns)
{
    const source *x = &s->sources[o->source];
    uint64_t pace = pace_of(o) > 0 ? pace_of(o) : middle;
    if (o->source != SCHEDULE_ORIGIN && is_avoided(x, now_ns))
        return x->lateness + (now_ns - x->avoided_ns) / AVOID_NS;
    if (pace == 0)
        return (now_ns - o->since_ns) / (2 * UNKNOWN_NS);
    size_t burst = o->burst > 0 ? o->burst : s->owners[s->own].burst;
    uint64_t allowed = OWNER_LATE * pace * (burst > 0 ? burst : 1) + JITTER_NS;
    uint64_t silent = (now_ns - o->last_ns) / allowed;
    /* Nor may it take much longer for all of its duties than others do for theirs. */
    uint64_t share = middle * (o->duties + 1) / 4 * 5 + JITTER_NS;
    uint64_t slow = middle > 0 ? (now_ns - o->since_ns) / share : 0;
    return silent > slow ? silent : slow;
}

/* -------------------------------------------------------------------- what to ask for */

static size_t count_avoided(const schedule *s, uint64_t now_ns)
{
    size_t n = 0;
    for (size_t i = 1; i < s->n_sources; i++)
        n += s->sources[i].used && is_avoided(&s->sources[i], now_ns);
    return n;
}

/* Whether some source but @p but has the unit and is not left alone; @p avoided: so many are. */
static bool is_held(const schedule *s, size_t unit, size_t but, size_t avoided,
                    uint64_t now_ns)
{
    if (s->units[unit].holders == 0 || s->units[unit].holders > avoided + (but > 0))
        return s->units[unit].holders > 0;
    for (size_t i = 1; i < s->n_sources; i++) {
        const source *x = &s->sources[i];
        if (i != but && x->used && bit(x->has, unit) && !is_avoided(x, now_ns))
            return true;
    }
    return false;
}

/* Readers that stand before this one to take the unit over from its owner. */
static size_t rank_of(const schedule *s, size_t unit)
{
    return duty_rank(s->members, s->n_owners, s->own, s->units[unit].owner,
                     unit / s->block);
}

/* So many readers may take over what is so late. */
static uint64_t turns_of(uint64_t lateness)
{
    return lateness == 0 ? 0 : UINT64_C(1) << (lateness > 32 ? 31 : lateness - 1);
}

/* Takes the run that begins with @p unit, as far as @p fits says. Its bytes. */
static uint64_t ask_run(schedule *s, size_t number, size_t unit, uint64_t bytes,
                        bool (*fits)(const schedule *, size_t, size_t), unit_run *out)
{
    uint64_t taken = 0;
    *out = (unit_run){.first = (uint32_t)unit};
    while (unit < s->n_units && bit(s->free, unit) && fits(s, number, unit) &&
           (taken == 0 || taken + s->sizes[unit] <= bytes)) {
        s->units[unit].busy = (uint32_t)number + 1;
        clear_bit(s->free, unit);
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

/* Whether the source has it, no nearer one has, and none that is nearer is to bring it in time. */
static bool has_unit(const schedule *s, size_t number, size_t unit)
{
    const source *x = &s->sources[number];
    const unit_state *u = &s->units[unit];
    if (x->near == NEAR_HOST || !bit(x->has, unit))
        return bit(x->has, unit);
    unsigned nearer = x->near - 1u;
    return u->within[nearer] == 0 &&
           (u->brings >> nearer & 1 || s->now_ns - u->held_ns > s->near_ns);
}

static bool fits_none(const schedule *s, size_t number, size_t unit)
{
    (void)number;
    return s->units[unit].busy == 0;
}

/* Whether anybody's duties may be taken over now. */
static bool look_at_owners(schedule *s, uint64_t now_ns)
{
    uint64_t middle = middle_pace(s), all = 0;
    for (size_t i = 0; i < s->n_owners; i++) {
        owner *o = &s->owners[i];
        o->turns = i == s->own ? 0 : turns_of(owner_lateness(s, o, middle, now_ns));
        all |= o->turns;
    }
    return all > 0;
}

/* Of what is late that for which the fewest others stand before this reader: else all would read
   the same at once. */
static size_t find_late(schedule *s, size_t avoided, uint64_t now_ns)
{
    uint64_t least = look_at_owners(s, now_ns) ? UINT64_MAX : 0;
    size_t best = s->n_units;
    for (size_t w = 0; w < s->n_words && least > 0; w++) {
        uint64_t word = s->free[w];
        while (word && least > 0) {
            size_t u = 64 * w + take_bit(&word);
            uint64_t turns = s->owners[s->units[u].owner].turns;
            uint64_t rank = turns > 0 && !is_held(s, u, 0, avoided, now_ns)
                                ? rank_of(s, u)
                                : UINT64_MAX;
            if (rank >= turns || rank >= least)
                continue;
            best = u;
            least = rank;
        }
    }
    return best;
}

/* Duties of the reader's own, then others' that are late. */
static size_t find_for_origin(schedule *s, uint64_t now_ns, bool *own_out)
{
    size_t avoided = count_avoided(s, now_ns);
    *own_out = true;
    for (size_t w = 0; w < s->n_words; w++) {
        uint64_t word = s->free[w] & s->own_duties[w];
        while (word) {
            size_t u = 64 * w + take_bit(&word);
            if (!is_held(s, u, 0, avoided, now_ns))
                return u;
        }
    }
    *own_out = false;
    return find_late(s, avoided, now_ns);
}

static uint64_t own_order(uint64_t unit, const member *self)
{
    uint64_t x;
    memcpy(&x, self->id, sizeof x);
    x = (x ^ unit) * UINT64_C(0x9E3779B97F4A7C15);
    return (x ^ x >> 32) * UINT64_C(0xBF58476D1CE4E5B9);
}

/* What the fewest have; of those any, and not the same for all readers. */
static size_t find_for_holder(const schedule *s, size_t number, bool *waits_out)
{
    const source *x = &s->sources[number];
    size_t best = s->n_units;
    uint64_t best_key = 0;
    for (size_t w = 0; w < s->n_words; w++) {
        uint64_t offered = x->has[w] & s->free[w];
        while (offered) {
            size_t u = 64 * w + take_bit(&offered);
            uint32_t least = best < s->n_units ? s->units[best].holders : UINT32_MAX;
            bool may = has_unit(s, number, u);
            *waits_out = *waits_out || !may;
            if (s->units[u].holders > least || !may)
                continue;
            uint64_t key = own_order(u / s->block, &s->self);
            if (s->units[u].holders < least || key > best_key) {
                best = u;
                best_key = key;
            }
        }
    }
    return best;
}

uint64_t schedule_offered(const schedule *s, size_t number, bool *rest_out)
{
    const uint64_t *has = s->sources[number].has;
    uint64_t bytes = 0;
    *rest_out = true;
    for (size_t w = 0; w < s->n_words; w++) {
        uint64_t offered = has[w] & s->free[w];
        *rest_out = *rest_out && offered == s->free[w];
        while (offered)
            bytes += s->sizes[64 * w + take_bit(&offered)];
    }
    return bytes;
}

static int compare_runs(const void *a, const void *b)
{
    uint32_t x = ((const unit_run *)a)->first, y = ((const unit_run *)b)->first;
    return (x > y) - (x < y);
}

static void look_at_pace(schedule *s, uint64_t now_ns)
{
    uint64_t pace = middle_pace(s);
    s->near_ns = pace > 0 ? NEAR_LATE * pace + JITTER_NS : UNKNOWN_NS;
    s->paced_ns = now_ns;
}

size_t schedule_next(schedule *s, size_t number, uint64_t bytes, unit_run *runs,
                     size_t most, uint64_t now_ns, uint64_t *wake_ns)
{
    source *x = &s->sources[number];
    size_t n = 0;
    uint64_t taken = 0;
    s->now_ns = now_ns;
    if (now_ns - s->paced_ns > LOOK_NS)
        look_at_pace(s, now_ns);
    *wake_ns = number == SCHEDULE_ORIGIN && s->n_left > 0 ? now_ns + LOOK_NS : NEVER;
    if (is_avoided(x, now_ns)) {
        *wake_ns = x->avoid_ns;
        return 0;
    }
    while (n < most && (n == 0 || taken < bytes)) {
        bool own = false, waits = false;
        size_t u = number == SCHEDULE_ORIGIN ? find_for_origin(s, now_ns, &own)
                                             : find_for_holder(s, number, &waits);
        if (waits)
            *wake_ns = now_ns + LOOK_NS; /* a nearer one may be late */
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
        qsort(runs, n, sizeof *runs, compare_runs);
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
    if (unit->owner == s->own)
        duty_comes(own, now_ns);
    else
        s->counts.taken_over++;
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
    x->broken = false;
}

/* Nobody waits for one that has failed because it is near. */
static void push_away(schedule *s, source *x)
{
    nearness near = x->near;
    x->near = NEAR_SITE;
    source_changes(s, near);
}

void schedule_failed(schedule *s, size_t number, uint64_t now_ns)
{
    source *x = &s->sources[number];
    give_up_asked(s, number);
    schedule_forget(s, number);
    push_away(s, x);
    unsigned doublings = x->failures < AVOID_DOUBLINGS ? x->failures : AVOID_DOUBLINGS;
    x->failures++;
    if (!x->broken)
        x->lateness = 1;
    x->broken = false;
    x->avoided_ns = now_ns;
    x->avoid_ns = now_ns + (AVOID_NS << doublings);
}

/* How late the source is with what it was asked for: in multiples of what it is allowed. */
static uint64_t source_lateness(const schedule *s, size_t number, uint64_t now_ns)
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

/* Whether somebody else is to bring the unit: a holder, or this reader by the trainer. */
static bool can_pass_on(const schedule *s, size_t number, size_t unit,
                        uint64_t lateness, uint64_t now_ns)
{
    if (is_held(s, unit, number, count_avoided(s, now_ns), now_ns))
        return true;
    const source *origin = &s->sources[SCHEDULE_ORIGIN];
    bool comes =
        origin->n_asked == 0 || source_lateness(s, SCHEDULE_ORIGIN, now_ns) == 0;
    return number != SCHEDULE_ORIGIN && !s->without_trainer && comes &&
           !is_avoided(origin, now_ns) && rank_of(s, unit) < turns_of(lateness);
}

bool schedule_break_off(schedule *s, size_t number, uint64_t now_ns)
{
    source *x = &s->sources[number];
    size_t owed = x->n_asked + x->n_read;
    uint64_t lateness =
        x->used && owed > 0 && !x->broken ? source_lateness(s, number, now_ns) : 0;
    size_t seen = 0;
    for (size_t u = 0; lateness > 0 && u < s->n_units && seen < owed; u++) {
        if (s->units[u].busy != number + 1)
            continue;
        seen++;
        if (!can_pass_on(s, number, u, lateness, now_ns))
            continue;
        x->broken = true;
        x->lateness = lateness;
        s->counts.late += owed;
        return true;
    }
    return false;
}

bool schedule_is_broken(const schedule *s, size_t number)
{
    return s->sources[number].broken;
}

size_t schedule_left(const schedule *s)
{
    return s->n_left;
}

size_t schedule_owed(const schedule *s, size_t number)
{
    return s->sources[number].n_asked + s->sources[number].n_read;
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
