/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls by patches. Two ranks publish copies as in snapshot.pml: two arenas each, generations from one counter. With each
 * copy a rank makes a patch, from the published arena to the new one, and keeps the last two. A reader that holds what it
 * has read under a generation reads the patches from there to the announced one, into memory of its own, and applies them
 * when both ranks have confirmed their generations. It may read the whole instead, in place, and it may give up at any
 * point before it applies.
 *
 * Step s changes word s % 2 of the two that each rank has.
 *
 * Checked:
 *   A  an accepted pull is the step, whole, of one life, on both ranks
 *   D  a delta that is not accepted leaves what the destination held, whole
 *   nobody deadlocks
 *
 * Leases delay nobody here, and an arena is filled at once: both is of snapshot.pml.
 *
 * Switches (scenarios):  WITHDRAWN  a commit may be withdrawn after its copy; the trainer goes on with what it has, or with
 *                                   what it had published
 *                        RESTART    each rank may come back once, with the same steps and generations and other bytes
 *                        DENSE      a step may have no patch: it would be too large
 *                        REACH      fails if a chain of two patches is applied on both ranks: it is
 * Switches (mutations):  BAD_ANNOUNCE     a step is announced before its patch is built
 *                        BAD_CHAIN        a patch is made from what was copied last, published or not
 *                        BAD_GAP          patches from before a step without a patch are kept
 *                        BAD_BOX          a patch's number counts from the newest one, not from the lease's generation
 *                        NO_COUNT         a patch's memory is used again while it is read
 *                        BAD_LEASE        the lease's generation need not be the announced one
 *                        BAD_APPLY_EARLY  patches are applied as they are read
 *                        BAD_APPLY_EACH   ... rank by rank, as the ends come
 *                        BAD_BASE_STEP    a base is known by its step
 *                        BAD_BASE_LIFE    ... by its generation, of whatever incarnation
 *                        BAD_BASE_KEPT    a whole pull that failed leaves the base as it was
 */
#ifndef STEPS
#define STEPS 4                     /* steps 1..STEPS; step 1 is there at the start */
#endif
#ifndef PULLS
#define PULLS 3
#endif
#define KEEP 2                      /* patches that are announced */
#ifdef NO_COUNT
#define SLOTS KEEP
#else
#define SLOTS (KEEP + 1)            /* and one that is read when it is not announced any more */
#endif
#define NONE 9
#define JUNK 255
#define VALUE(life, s) ((life) * 16 + (s))

typedef Patch {
    byte from, to, from_step;
    byte mask;                      /* its directory: which words have changed */
    byte word[2]
}
typedef Rank {
    byte  source[2];                /* the trainer's own memory */
    byte  arena[4];                 /* word w of arena a: [2 * a + w] */
    byte  generation[2];
    byte  current, step, counter, life;
    Patch patch[SLOTS];
    byte  listed[KEEP], count;      /* the announced ones, newest first */
    byte  building, reading;        /* which patch */
    byte  last[2]                   /* BAD_CHAIN: what was copied last */
}
Rank rank[2];

/* --------------------------------------------------------------- trainer */

#define LISTED(r, i) ((rank[r].count > 0 && rank[r].listed[0] == (i)) || (rank[r].count > 1 && rank[r].listed[1] == (i)))
#ifdef NO_COUNT                     /* rule: a patch is a counted object */
#define IN_USE(r, i) LISTED(r, i)
#else
#define IN_USE(r, i) (LISTED(r, i) || rank[r].reading == (i))
#endif

/* Only to have fewer states: what nobody has any more looks as it did at first. */
inline clear(r, i)
{
    rank[r].patch[i].from = 0; rank[r].patch[i].to = 0; rank[r].patch[i].from_step = 0;
    rank[r].patch[i].mask = 0; rank[r].patch[i].word[0] = JUNK; rank[r].patch[i].word[1] = JUNK
}

inline forget(r)                    /* the oldest one */
{
    rank[r].count--;
    slot = rank[r].listed[rank[r].count];
    rank[r].listed[rank[r].count] = NONE;
    if
    :: !IN_USE(r, slot) -> clear(r, slot)
    :: else
    fi
}

/* The arena is filled, under a new generation; older patches make room for the new one. */
inline take(r, s)
{
    rank[r].source[s % 2] = VALUE(rank[r].life, s);
    a = 1 - rank[r].current;
    rank[r].counter++;
    rank[r].generation[a] = rank[r].counter;
    rank[r].arena[2 * a] = rank[r].source[0];
    rank[r].arena[2 * a + 1] = rank[r].source[1];
    if
    :: rank[r].count == KEEP -> forget(r)
    :: else
    fi;
    rank[r].building = 0;
    do
    :: IN_USE(r, rank[r].building) -> rank[r].building++
    :: else -> break
    od;
    clear(r, rank[r].building)
}

#ifdef BAD_CHAIN                    /* rule: a patch is made from the published arena */
#define CHANGED(r, w) (rank[r].last[w] != rank[r].arena[2 * a + w])
#else
#define CHANGED(r, w) (rank[r].arena[2 * b + w] != rank[r].arena[2 * a + w])
#endif

inline build(r, i, a, b)            /* from arena b to arena a */
{
    rank[r].patch[i].mask = (CHANGED(r, 0) -> 1 : 0) + (CHANGED(r, 1) -> 2 : 0);
    rank[r].patch[i].word[0] = (CHANGED(r, 0) -> rank[r].arena[2 * a] : JUNK);
    rank[r].patch[i].word[1] = (CHANGED(r, 1) -> rank[r].arena[2 * a + 1] : JUNK)
}

inline publish(r, s, with_patch)
{
    slot = rank[r].building;
    rank[r].building = NONE;
    if
    :: with_patch ->
        rank[r].patch[slot].from = rank[r].generation[rank[r].current];
        rank[r].patch[slot].from_step = rank[r].step;
        rank[r].patch[slot].to = rank[r].generation[1 - rank[r].current];
        rank[r].listed[1] = rank[r].listed[0];
        rank[r].listed[0] = slot;
        rank[r].count++
    :: else ->
        clear(r, slot);
#ifndef BAD_GAP                     /* rule: patches are a chain to the announced step */
        do
        :: rank[r].count > 0 -> forget(r)
        :: else -> break
        od
#endif
    fi;
    rank[r].current = 1 - rank[r].current;
    rank[r].step = s
}

inline remember_copy(r)
{
#ifdef BAD_CHAIN
    rank[r].last[0] = rank[r].arena[2 * (1 - rank[r].current)];
    rank[r].last[1] = rank[r].arena[2 * (1 - rank[r].current) + 1]
#else
    skip
#endif
}

inline start(r, l)
{
    rank[r].life = l;
    rank[r].source[0] = VALUE(l, 0); rank[r].source[1] = VALUE(l, 1);
    rank[r].arena[0] = VALUE(l, 0); rank[r].arena[1] = VALUE(l, 1);
    rank[r].arena[2] = JUNK; rank[r].arena[3] = JUNK;
    rank[r].generation[0] = 1; rank[r].generation[1] = 0; rank[r].counter = 1;
    rank[r].current = 0; rank[r].step = 1;
    rank[r].count = 0; rank[r].listed[0] = NONE; rank[r].listed[1] = NONE;
    rank[r].building = NONE; rank[r].reading = NONE;
    slot = 0;
    do
    :: slot < SLOTS -> clear(r, slot); slot++
    :: else -> break
    od;
    slot = 0
#ifdef BAD_CHAIN
    ; rank[r].last[0] = VALUE(l, 0); rank[r].last[1] = VALUE(l, 1)
#endif
}

#define COPIED(r) (rank[r].building != NONE)

proctype Trainer(byte r)
{
    byte s = 2, a, slot;
    do
    :: d_step { s <= STEPS && !COPIED(r) -> take(r, s); a = 0; slot = 0 }
    :: COPIED(r) ->                 /* published, with its patch */
#ifdef BAD_ANNOUNCE                 /* rule: a patch is announced when it is built */
        d_step { a = rank[r].building; publish(r, s, true); slot = a };
        d_step { build(r, slot, rank[r].current, (1 - rank[r].current)); a = 0; slot = 0; s++ }
#else
        d_step {
            build(r, rank[r].building, (1 - rank[r].current), rank[r].current);
            remember_copy(r);
            publish(r, s, true);
            s++; slot = 0
        }
#endif
#ifdef DENSE
    :: d_step { COPIED(r) -> publish(r, s, false); s++; slot = 0 }
#endif
#ifdef WITHDRAWN
    :: d_step {
            COPIED(r) && s < STEPS ->
            remember_copy(r); clear(r, rank[r].building); rank[r].building = NONE; s++
        }
    :: d_step {
            COPIED(r) && s < STEPS ->
            remember_copy(r); clear(r, rank[r].building); rank[r].building = NONE; s++;
            rank[r].source[0] = rank[r].arena[2 * rank[r].current];
            rank[r].source[1] = rank[r].arena[2 * rank[r].current + 1]
        }
#endif
#ifdef RESTART
    :: d_step { rank[r].life == 1 -> start(r, 2); s = 2 }
#endif
    :: s > STEPS && !COPIED(r) -> break
    od
}

/* ---------------------------------------------------------------- reader */

byte memory[4];                     /* the destination: word w of rank r is [2 * r + w] */
byte base[2], base_life[2], base_step[2];  /* what it holds, proven; a generation of 0: nothing */
byte held[4];                       /* the words of the last accepted step; 0: it holds no step */

#ifdef BAD_BASE_LIFE                /* rule: a base is of one incarnation ... */
#define HAS_BASE(r) (base[r] != 0)
#else
#define HAS_BASE(r) (base[r] != 0 && base_life[r] == rank[r].life)
#endif
#ifdef BAD_BASE_STEP                /* ... and a generation of it, no step */
#define IS_ANNOUNCED(r) (base[r] != 0 && base_step[r] == rank[r].step)
#define LEADS_FROM_BASE(r, k) (base[r] != 0 && rank[r].patch[rank[r].listed[k]].from_step == base_step[r])
#else
#define IS_ANNOUNCED(r) (HAS_BASE(r) && base[r] == rank[r].generation[rank[r].current])
#define LEADS_FROM_BASE(r, k) (HAS_BASE(r) && rank[r].patch[rank[r].listed[k]].from == base[r])
#endif

/* A step of the rank is announced, and the patches to it. */
inline wait(r)
{
    d_step {
        rank[r].step >= want ->
        seen[r] = rank[r].step;
        of_life[r] = rank[r].life;
        announced[r] = rank[r].generation[rank[r].current];
        if
        :: IS_ANNOUNCED(r) -> chain[r] = 0
        :: !IS_ANNOUNCED(r) && rank[r].count > 0 && LEADS_FROM_BASE(r, 0) -> chain[r] = 1
        :: !IS_ANNOUNCED(r) && rank[r].count > 1 && !LEADS_FROM_BASE(r, 0) && LEADS_FROM_BASE(r, 1) -> chain[r] = 2
        :: else -> chain[r] = NONE
        fi
    }
}

inline begin(r)                     /* conditional on the step; what the arena holds now is the truth */
{
    atomic {
        if
        :: of_life[r] == rank[r].life && seen[r] == rank[r].step ->
            on[r] = rank[r].current;
            lease[r] = rank[r].generation[on[r]];
            truth[2 * r] = rank[r].arena[2 * on[r]];
            truth[2 * r + 1] = rank[r].arena[2 * on[r] + 1];
#ifndef BAD_LEASE                   /* rule: the patches lead to the lease's generation */
            if
            :: lease[r] != announced[r] -> chain[r] = NONE
            :: else
            fi
#endif
        :: else -> goto given_up
        fi
    }
}

inline read_whole(r, w)
{
    d_step {
#ifndef BAD_BASE_KEPT               /* rule: what is written anew is no base */
        base[0] = 0; base[1] = 0;
#endif
        held[0] = 0; held[1] = 0; held[2] = 0; held[3] = 0;
        memory[2 * r + w] = rank[r].arena[2 * on[r] + w]
    };
    if
    :: true
    :: goto given_up
    fi
}

#ifdef BAD_BOX                      /* rule: patch k of a lease counts from its generation */
#define FIRST(r) 0
#else
#define FIRST(r) (rank[r].patch[rank[r].listed[0]].to == lease[r] -> 0 : 1)
#endif
#define HAS_PATCH(r) \
    (of_life[r] == rank[r].life && rank[r].count > 0 && FIRST(r) + k < rank[r].count \
     && (FIRST(r) == 0 || rank[r].patch[rank[r].listed[1]].to == lease[r]))

inline apply(r, w)
{
    if
    :: staged[2 * r + w] != 0 -> memory[2 * r + w] = staged[2 * r + w]
    :: else
    fi
}

inline read_changes(r, w)
{
    atomic {
        if
        :: of_life[r] != rank[r].life || rank[r].reading == NONE -> goto given_up
        :: else
        fi;
        if
        :: mask & (1 << w) -> staged[2 * r + w] = rank[r].patch[rank[r].reading].word[w]
        :: else
        fi;
#ifdef BAD_APPLY_EARLY              /* rule: nothing is applied before the ends */
        apply(r, w);
#endif
        if
        :: true
        :: goto given_up
        fi
    }
}

inline release(r)
{
    d_step {
        if
        :: rank[r].reading != NONE ->
            slot = rank[r].reading;
            rank[r].reading = NONE;
            if
            :: !IN_USE(r, slot) && rank[r].building != slot -> clear(r, slot)
            :: else
            fi
        :: else
        fi;
        slot = 0; mask = 0
    }
}

inline read_patches(r)              /* from the oldest to the newest */
{
    k = chain[r];
    do
    :: k > 0 ->
        k--;
        atomic {
            if
            :: HAS_PATCH(r) ->
                rank[r].reading = rank[r].listed[FIRST(r) + k];
                mask = rank[r].patch[rank[r].reading].mask
            :: else -> goto given_up      /* forgotten */
            fi
        };
        read_changes(r, 0);
        read_changes(r, 1);
        release(r)
    :: else -> break
    od
}

#define STANDS(r) (of_life[r] == rank[r].life && rank[r].generation[on[r]] == lease[r])

inline end(r)
{
    atomic {
        if
        :: STANDS(r)
        :: else -> goto given_up
        fi;
#ifdef BAD_APPLY_EACH               /* rule: ... of all ranks */
        apply(r, 0); apply(r, 1)
#endif
    }
}

inline accept()
{
    d_step {
#ifdef REACH
        assert(!(!whole && chain[0] == 2 && chain[1] == 2));
#endif
        apply(0, 0); apply(0, 1); apply(1, 0); apply(1, 1);
        assert(seen[0] == seen[1] && of_life[0] == of_life[1]);                        /* A: one step, one life */
        assert(memory[0] == truth[0] && memory[1] == truth[1]);                        /* A: whole */
        assert(memory[2] == truth[2] && memory[3] == truth[3]);
        base[0] = lease[0]; base_life[0] = of_life[0]; base_step[0] = seen[0];
        base[1] = lease[1]; base_life[1] = of_life[1]; base_step[1] = seen[1];
        held[0] = memory[0]; held[1] = memory[1]; held[2] = memory[2]; held[3] = memory[3]
    }
}

proctype Reader()
{
    byte announced[2], lease[2], on[2], of_life[2], seen[2], chain[2];
    byte truth[4], staged[4];
    byte pulls, want, k, mask, slot;
    bool whole;

next:
    skip;
    if
    :: pulls == PULLS -> goto done
    :: else -> pulls++
    fi;
agree:
    skip;
    wait(0);
    wait(1);
    if
    :: seen[0] < seen[1] -> want = seen[1]; goto agree
    :: seen[0] > seen[1] -> want = seen[0]; goto agree
    :: seen[0] == seen[1] && of_life[0] != of_life[1] -> goto given_up
    :: seen[0] == seen[1] && of_life[0] == of_life[1]
    fi;
    begin(0);
    begin(1);
    if
    :: whole = true                 /* by another path, or there would be too much of them */
    :: chain[0] != NONE && chain[1] != NONE -> whole = false
    fi;
    if
    :: whole -> read_whole(0, 0); read_whole(0, 1); read_whole(1, 0); read_whole(1, 1)
    :: else -> read_patches(0); read_patches(1)
    fi;
    end(0);
    end(1);
    accept();
    goto ended;

given_up:
    skip;
    release(0);
    release(1);
    d_step {
        if
        :: held[0] != 0 ->
            assert(memory[0] == held[0] && memory[1] == held[1]);                      /* D */
            assert(memory[2] == held[2] && memory[3] == held[3])
        :: else
        fi
    }
ended:
    skip;
    d_step {
        announced[0] = 0; announced[1] = 0; lease[0] = 0; lease[1] = 0; on[0] = 0; on[1] = 0;
        of_life[0] = 0; of_life[1] = 0; seen[0] = 0; seen[1] = 0; chain[0] = 0; chain[1] = 0;
        truth[0] = 0; truth[1] = 0; truth[2] = 0; truth[3] = 0;
        staged[0] = 0; staged[1] = 0; staged[2] = 0; staged[3] = 0;
        want = 0; k = 0; whole = false
    }
    goto next;

done:
    skip
}

init {
    byte slot;
    d_step { start(0, 1); start(1, 1) }
    atomic { run Trainer(0); run Trainer(1); run Reader() }
}
