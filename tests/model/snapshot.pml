/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Snapshot publication: commit copies the rank's memory into one of two arenas that the server owns.
 *
 * The trainer writes its own memory whenever it likes; readers read arenas. The arena being filled is never the published
 * one, so publishing is one atomic change of `current`. With a lease on the arena that is to be reused, commit waits at
 * most the lease time, then raises the arena's generation and overwrites it; the end of a pull confirms the generation.
 *
 * Checked (each is an assertion or the absence of an invalid end state):
 *   A  an accepted pull holds, on both ranks, both halves of the very step it asked for
 *   B  commit waits at most LEASE ticks, whatever readers do; nobody deadlocks
 *   C  when the trainer has come to rest, a reader restarts at most three times and then succeeds
 *
 * Time is as in inplace.pml.
 *
 * Switches (scenarios):  RE_ADD      a rank may remove and re-add the publication between two commits
 *                        STREAM      the copy is made later, in stream order, while the trainer's host runs on; some time
 *                                    after it a thread of the server notices and publishes, unless the commit was withdrawn
 *                        READERS=1|2 whole readers;  LEASER  one more, that takes leases, drops them, hangs or dies
 * Switches (mutations):  NO_x removes rule x; BAD_x replaces it by what a plausible implementation might do.
 */
#ifndef STEPS
#define STEPS 4                     /* steps 1..STEPS; step 1 is there at the start */
#endif
#ifndef LEASE
#define LEASE 2
#endif
#ifndef READERS
#define READERS 1
#endif
#ifdef LEASER
#define HOLDERS (READERS + 1)
#else
#define HOLDERS READERS
#endif
#define JUNK 255
#define NONE 2                      /* no arena */

typedef Arena {
    byte half[2];
    byte generation;
    byte step                       /* that it holds, or held before it was overwritten */
}
typedef Rank {
    byte  source[2];                /* the trainer's own memory */
    Arena arena[2];
    byte  current;                  /* the published arena */
    byte  step;                     /* the published step */
    byte  counter;                  /* where generations come from: one per server */
    byte  target;                   /* the arena that a commit waits for */
    byte  waited;
    bool  copying;                  /* a queued copy has not been made yet */
    byte  pending;                  /* the step of a commit that has not taken effect; 0: none */
    byte  lease[HOLDERS], on[HOLDERS]
}
Rank rank[2];

byte arrived[STEPS + 1];
byte at_rest;

#define HELD(r, h, a) (rank[r].lease[h] > 0 && rank[r].on[h] == (a))
#if HOLDERS == 1
#define LEASED(r, a) HELD(r, 0, a)
#define ANY(r) (rank[r].lease[0] > 0)
#elif HOLDERS == 2
#define LEASED(r, a) (HELD(r, 0, a) || HELD(r, 1, a))
#define ANY(r) (rank[r].lease[0] > 0 || rank[r].lease[1] > 0)
#else
#define LEASED(r, a) (HELD(r, 0, a) || HELD(r, 1, a) || HELD(r, 2, a))
#define ANY(r) (rank[r].lease[0] > 0 || rank[r].lease[1] > 0 || rank[r].lease[2] > 0)
#endif

#ifdef NO_DEADLINE                  /* rule: commit waits at most the lease time from its own call */
#define MAY_REUSE(r) (!LEASED(r, rank[r].target))
#else
#ifdef NO_WAIT                      /* rule: commit waits for leases */
#define MAY_REUSE(r) true
#else
#define MAY_REUSE(r) (!LEASED(r, rank[r].target) || rank[r].waited >= LEASE)
#endif
#endif

/* ------------------------------------------------------------------ time */

proctype Clock()
{
    byte r, h;
end:
    do
    :: atomic {
        ((ANY(0) || ANY(1))
         && !(rank[0].target != NONE && MAY_REUSE(0))
         && !(rank[1].target != NONE && MAY_REUSE(1))) ->
            for (r : 0 .. 1) {
                for (h : 0 .. HOLDERS - 1) {
                    if
                    :: rank[r].lease[h] > 0 -> rank[r].lease[h]--
                    :: else
                    fi
                }
                if
                :: rank[r].target != NONE ->
                    rank[r].waited++;
                    assert(rank[r].waited <= LEASE)                             /* B */
                :: else
                fi
            }
            r = 0; h = 0
       }
    od
}

/* --------------------------------------------------------------- trainer */

inline raise(r, a)
{
#ifdef BAD_GENERATION_REUSED        /* rule: a generation is never used twice */
    rank[r].arena[a].generation = 1 - rank[r].arena[a].generation
#else
    rank[r].counter++;
    rank[r].arena[a].generation = rank[r].counter
#endif
}

inline choose(r)
{
#ifdef BAD_CHOICE                   /* with every arena leased, the oldest one, even if it is the published one */
    if
    :: !LEASED(r, 0) -> rank[r].target = 0
    :: !LEASED(r, 1) -> rank[r].target = 1
    :: LEASED(r, 0) && LEASED(r, 1) ->
        rank[r].target = (rank[r].arena[0].step < rank[r].arena[1].step -> 0 : 1)
    fi
#else
    rank[r].target = (rank[r].current == 0 -> 1 : 0)
#endif
}

/* from here to publish nobody but the commit may use the arena */
inline take(r)
{
    atomic {
        choose(r); rank[r].waited = 0;
        MAY_REUSE(r);
        a = rank[r].target; rank[r].target = NONE; rank[r].waited = 0;
#ifdef UNPUBLISH                    /* with BAD_CHOICE: begins are refused while the published arena is being refilled */
        if
        :: rank[r].current == a -> rank[r].current = NONE
        :: else
        fi;
#endif
#ifndef BAD_RAISE_LATE              /* rule: the generation is raised before the first byte of reuse */
        raise(r, a)
#endif
    }
}

inline copy(r, a)
{
    rank[r].arena[a].half[0] = rank[r].source[0];
    rank[r].arena[a].half[1] = rank[r].source[1]
}

inline publish(r, a, n)
{
    atomic {
#ifdef BAD_RAISE_LATE
        raise(r, a);
#endif
        rank[r].arena[a].step = n; rank[r].step = n; rank[r].current = a;
        if
        :: n == STEPS -> at_rest++
        :: else
        fi
    }
}

#ifdef STREAM
chan stream[2] = [1] of { byte, byte };                 /* arena, step */
chan copied[2] = [STEPS] of { byte, byte };               /* the same */

proctype Stream(byte r)
{
    byte a, n;
end:
    do
    :: stream[r] ? a, n ->
        copy(r, a);
        copied[r] ! a, n;
        atomic { rank[r].copying = false; a = 0; n = 0 }
    od
}

proctype Control(byte r)            /* what lets commits take effect, at any time after their copies */
{
    byte a, n;
end:
    do
    :: atomic { copied[r] ? a, n ->
        if
        :: rank[r].pending == n -> publish(r, a, n); rank[r].pending = 0
        :: else                     /* it was withdrawn */
        fi;
        a = 0; n = 0 }
    od
}
#endif

proctype Trainer(byte r)
{
    byte n = 2, a, h;
    bool added_again;

    do
    :: n <= STEPS ->
#ifdef RE_ADD
        if
        :: !added_again && !rank[r].copying ->
            atomic {                /* remove: the arenas go; waiting for leases as in commit is left out, it only helps */
                added_again = true;
#ifndef BAD_PENDING_COMMIT          /* rule: what has not taken effect never will */
                rank[r].pending = 0;
#endif
                rank[r].current = NONE;
                for (h : 0 .. HOLDERS - 1) { rank[r].lease[h] = 0 }
                h = 0;
                rank[r].arena[0].half[0] = JUNK; rank[r].arena[0].half[1] = JUNK;
                rank[r].arena[1].half[0] = JUNK; rank[r].arena[1].half[1] = JUNK;
#ifdef BAD_RE_ADD_GENERATION         /* the new publication's generations start again */
                rank[r].arena[0].generation = 0; rank[r].arena[1].generation = 0; rank[r].counter = 0
#else
                raise(r, 0); raise(r, 1)
#endif
            }
        :: true
        fi;
#endif
#ifndef BAD_UNORDERED               /* rule: the trainer's next write comes after the copy, on the stream or by waiting */
        !rank[r].copying;
#endif
        rank[r].source[0] = n;
        arrived[n]++;
        (arrived[n] == 2);          /* the collective in the optimizer */
        rank[r].source[1] = n;
        rank[r].pending == 0;       /* commit waits for the one before */
        take(r);
#ifdef STREAM
        atomic { rank[r].copying = true; rank[r].pending = n };
        stream[r] ! a, n;
#else
        copy(r, a); publish(r, a, n);
#endif
        n++
    :: else -> break
    od
}

/* --------------------------------------------------------------- readers */

#ifdef NO_END_CHECK                 /* rule: end confirms the generation */
#define STANDS(r) true
#else
#define STANDS(r) (rank[r].arena[on[r]].generation == token[r])
#endif

#ifdef NO_STEP                      /* rule: begin is conditional on the agreed step */
#define STEP_IS(r, n) true
#else
#define STEP_IS(r, n) (rank[r].step == n)
#endif

inline wait(r)
{
    atomic { rank[r].current != NONE && rank[r].step >= want -> seen[r] = rank[r].step }
}

inline begin(r)
{
    atomic {
        if
        :: rank[r].current != NONE && STEP_IS(r, want) ->
            on[r] = rank[r].current;
            rank[r].lease[me] = LEASE; rank[r].on[me] = on[r];
            token[r] = rank[r].arena[on[r]].generation
        :: else -> goto release
        fi
    }
}

inline read(r, i)
{
    atomic { got[r * 2 + i] = rank[r].arena[on[r]].half[i]; todo = todo & ~(1 << (r * 2 + i)) }
}

inline end(r)
{
    atomic {
        if
        :: STANDS(r) -> rank[r].lease[me] = 0
        :: else -> goto release
        fi
    }
}

proctype Reader(byte me)
{
    byte seen[2], token[2], on[2];
    byte got[4];
    byte todo, want, late;

restart:
    want = 0;
agree:
    wait(0);
    wait(1);
    if
    :: seen[0] == seen[1] -> want = seen[0]
    :: seen[0] <  seen[1] -> want = seen[1]; goto agree
    :: seen[0] >  seen[1] -> want = seen[0]; goto agree
    fi;

    if
    :: true -> begin(0); begin(1)
    :: true -> begin(1); begin(0)
    fi;

    todo = 15;
    do
    :: todo & 1 -> read(0, 0)
    :: todo & 2 -> read(0, 1)
    :: todo & 4 -> read(1, 0)
    :: todo & 8 -> read(1, 1)
    :: todo == 0 -> break
    od;
    if
    :: true -> end(0); end(1)
    :: true -> end(1); end(0)
    fi;

    d_step {
        assert(got[0] == got[1] && got[2] == got[3]);                           /* A: not torn */
        assert(got[0] == got[2]);                                               /* A: one step */
#ifndef NO_STEP
        assert(got[0] == want);                                                 /* A: the step that was asked for */
#endif
        assert(got[0] != JUNK)
    }
    goto done;

release:
    skip;
    d_step {
        rank[0].lease[me] = 0; rank[1].lease[me] = 0;
        got[0] = 0; got[1] = 0; got[2] = 0; got[3] = 0; todo = 0;
        token[0] = 0; token[1] = 0; seen[0] = 0; seen[1] = 0; on[0] = 0; on[1] = 0;
        if
        :: at_rest == 2 -> late++; assert(late <= 3)                            /* C */
        :: else
        fi
    }
    goto restart;

done:
    skip
}

#ifdef LEASER
proctype Leaser()
{
    do
    :: atomic { rank[0].current != NONE && rank[0].lease[READERS] == 0 ->
                rank[0].lease[READERS] = LEASE; rank[0].on[READERS] = rank[0].current }
    :: atomic { rank[1].current != NONE && rank[1].lease[READERS] == 0 ->
                rank[1].lease[READERS] = LEASE; rank[1].on[READERS] = rank[1].current }
    :: atomic { rank[0].lease[READERS] > 0 -> rank[0].lease[READERS] = 0 }
    :: atomic { rank[1].lease[READERS] > 0 -> rank[1].lease[READERS] = 0 }
    :: break
    od
}
#endif

init {
    byte r;
    atomic {
        for (r : 0 .. 1) {
            rank[r].source[0] = 1; rank[r].source[1] = 1;
            rank[r].arena[0].half[0] = 1; rank[r].arena[0].half[1] = 1; rank[r].arena[0].step = 1;
            rank[r].current = 0; rank[r].step = 1; rank[r].target = NONE
        }
        run Clock(); run Trainer(0); run Trainer(1);
#ifdef STREAM
        run Stream(0); run Stream(1); run Control(0); run Control(1);
#endif
#ifdef LEASER
        run Leaser();
#endif
        for (r : 0 .. READERS - 1) { run Reader(r) }
    }
}
