/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In-place ("by reference") publication: the consistency protocol between trainer ranks and readers.
 *
 * Two ranks write the published memory in place. Readers fetch it with one-sided reads that nothing orders against the
 * writes; only begin, end and the epoch decide whether the bytes count.
 *
 * Checked (each is an assertion or the absence of an invalid end state):
 *   A  an accepted pull holds, on both ranks, both halves of the very step it asked for, of one training life
 *   B  begin_update returns within LEASE ticks of its call, whatever readers do; nobody deadlocks
 *   C  when the trainer has come to rest on a step, a reader restarts at most three times (one stale end,
 *      one catalog that moved on each rank) and then succeeds
 *   D  a pull that begins when all ranks have restarted is not refused for being of different worlds
 *
 * Time is discrete. A tick shortens every lease and lengthens every drain; a begin_update that may return does so before
 * the next tick. Everything else takes any time at all.
 *
 * A reader learns of a restart only by what a client has: what a rank said when it was connected to, and whether a
 * request on that connection is answered. A rank that dies ends its connections; of some that end is never heard, and
 * only silence tells.
 *
 * Switches (scenarios):  CRASH       a rank may die at any moment, once each, and comes back with a new incarnation
 *                        SAME_WORLD  ... under the old world id (default: another)
 *                        REPLAY      ... and its steps have the same bytes as in the first life
 *                        RE_ADD      a rank may remove and re-add the publication between two updates
 *                        ABORT       an update may be aborted
 *                        STREAM      writes, collective and commit are queued on a stream; the host runs ahead of it
 *                        EARLY       a reader may ask for leases together with the announcements
 *                        UNCOUPLED   no collective between begin_update and commit: ranks may be whole steps apart
 *                        SHARE       a holder's share of the minute may end before or while an update waits for it
 *                        READERS=1|2 whole readers;  LEASER  one more, that takes leases, drops them, hangs or dies
 * Switches (mutations):  NO_x removes rule x; BAD_x replaces it by what a plausible implementation might do.
 */
#ifndef STEPS
#define STEPS 3                     /* steps 1..STEPS; step 1 is there at the start */
#endif
#ifndef LEASE
#define LEASE 2                     /* lease time in ticks */
#endif
#ifndef READERS
#define READERS 1
#endif
#ifdef LEASER
#define HOLDERS (READERS + 1)
#else
#define HOLDERS READERS
#endif
#define JUNK 255                    /* memory that no longer belongs to the publication */
#ifdef REPLAY
#define VALUE(life, n) (n)
#else
#define VALUE(life, n) ((life) * 16 + (n))
#endif

mtype = { absent, writing, draining, stable };          /* absent: down, removed or not yet published */

typedef Rank {
    mtype state;
    byte  epoch;                    /* the publication's; odd while it is written */
    byte  counter;                  /* where epochs come from: one per server, that is per incarnation */
    byte  step;
    byte  catalog;                  /* announced catalog version */
    byte  layout;                   /* the truth: which addresses are the publication's now */
    byte  incarnation, world;
    byte  half[2];                  /* the published bytes: the value each half was written with */
    byte  drained;                  /* ticks since begin_update was called */
    byte  lease[HOLDERS]            /* ticks left; 0: none or expired */
}
Rank rank[2];

byte arrived[2 * (STEPS + 1)];      /* the collective, per life and step */
byte at_rest;                       /* trainers that have made their last commit */
bool crashed[2], die[2];
#ifdef NO_ASK_DEADLINE
bool unheard[2];                    /* nobody hears the end of the first life's connections */
#endif

#if HOLDERS == 1
#define LEASED(r) (rank[r].lease[0] > 0)
#elif HOLDERS == 2
#define LEASED(r) (rank[r].lease[0] > 0 || rank[r].lease[1] > 0)
#else
#define LEASED(r) (rank[r].lease[0] > 0 || rank[r].lease[1] > 0 || rank[r].lease[2] > 0)
#endif

#ifdef NO_DRAIN_DEADLINE            /* rule: at most the lease time from begin_update's own call */
#define MAY_RETURN(r) (!LEASED(r))
#else
#define MAY_RETURN(r) (!LEASED(r) || rank[r].drained >= LEASE)
#endif

#ifdef NO_DRAIN                     /* rule: begin_update waits for leases */
#undef  MAY_RETURN
#define MAY_RETURN(r) true
#endif

#ifdef NO_REFUSAL                   /* rule: a draining publication refuses new begins */
#define OPEN(r) (rank[r].state == stable || rank[r].state == draining)
#else
#define OPEN(r) (rank[r].state == stable)
#endif

/* ------------------------------------------------------------------ time */

proctype Clock()
{
    byte r, h;
end:
    do
    :: atomic {
        ((LEASED(0) || LEASED(1))
         && !(rank[0].state == draining && MAY_RETURN(0))
         && !(rank[1].state == draining && MAY_RETURN(1))) ->
            for (r : 0 .. 1) {
                for (h : 0 .. HOLDERS - 1) {
                    if
                    :: rank[r].lease[h] > 0 -> rank[r].lease[h]--
                    :: else
                    fi
                }
                if
                :: rank[r].state == draining ->
                    rank[r].drained++;
                    assert(rank[r].drained <= LEASE)                            /* B */
                :: else
                fi
            }
            r = 0; h = 0
       }
    od
}

/* --------------------------------------------------------------- trainer */

inline next_odd(r)  { rank[r].counter = rank[r].counter + 1 + (rank[r].counter % 2); rank[r].epoch = rank[r].counter }
inline next_even(r) { rank[r].counter = rank[r].counter + 2 - (rank[r].counter % 2); rank[r].epoch = rank[r].counter }

inline drop_leases(r)
{
    for (h : 0 .. HOLDERS - 1) { rank[r].lease[h] = 0 }
    h = 0
}

inline drain(r)                     /* a publication that is absent or being written has no lease to wait for */
{
    atomic {
        if
        :: rank[r].state == stable -> rank[r].state = draining; rank[r].drained = 0
        :: else
        fi
    }
#ifdef SHARE
    if
    :: true -> (rank[r].state != draining || MAY_RETURN(r))
    :: true -> (rank[r].state != draining || !LEASED(r) || rank[r].drained >= 1)        /* it ends meanwhile */
    :: true                                                                             /* it was used up */
    fi
#else
    (rank[r].state != draining || MAY_RETURN(r))
#endif
}

inline begin_update(r)
{
    atomic {
        drain(r);
#ifdef BAD_EPOCH_LATE               /* rule: the epoch turns before the first byte is written */
#else
#ifdef STREAM
#ifdef BAD_PENDING_COMMIT           /* rule: begin_update takes a new odd epoch even while a commit is pending */
        if
        :: rank[r].state != writing -> next_odd(r)
        :: else
        fi;
#else
        next_odd(r);
#endif
#else
        next_odd(r);
#endif
#endif
        drop_leases(r); rank[r].drained = 0;
        rank[r].state = writing
    }
}

inline commit(r, n)
{
    atomic {
#ifdef BAD_EPOCH_REUSED             /* rule: an epoch is never used twice */
        rank[r].counter = 0;
#endif
        next_even(r); rank[r].step = n; rank[r].state = stable
    }
}

inline remove(r)                    /* the trainer frees or reuses the memory as soon as this returns */
{
    atomic {
        drain(r);
        drop_leases(r); rank[r].drained = 0;
#ifdef BAD_REMOVE_LATER             /* tokens die, but the old catalog can be begun until the next commit */
        next_even(r); rank[r].state = stable
#else
        next_odd(r); rank[r].state = absent
#endif
    }
    rank[r].half[0] = JUNK;
    rank[r].half[1] = JUNK
}

inline add(r)                       /* seen by readers at the next commit */
{
    atomic {
        rank[r].layout++;
#ifdef BAD_RE_ADD_EPOCH              /* the new publication counts from the beginning */
        rank[r].counter = 0;
#endif
#ifdef BAD_RE_ADD_CATALOG            /* ... its catalog versions do */
        rank[r].catalog = 1
#else
        rank[r].catalog++
#endif
    }
}

inline collective(r)
{
    arrived[(life - 1) * (STEPS + 1) + n]++;
#ifdef CRASH
end_collective:                     /* the peer may never come */
#endif
    (arrived[(life - 1) * (STEPS + 1) + n] == 2)
}

#ifdef STREAM
mtype = { op_write, op_collective, op_commit };
chan stream[2] = [8] of { mtype, byte, byte };          /* operation, half or step, value or epoch */

proctype Stream(byte r)
{
    byte x, y, n;
    byte life = 1;
end:
    do
    :: stream[r] ? op_write(x, y) -> rank[r].half[x] = y; x = 0; y = 0
    :: stream[r] ? op_collective(n, _) -> collective(r); n = 0
    :: atomic { stream[r] ? op_commit(x, y) ->
#ifdef BAD_PENDING_COMMIT
            commit(r, x);
#else
            if                      /* a commit closes the update that it belongs to, or does nothing */
            :: rank[r].epoch == y -> commit(r, x)
            :: else
            fi;
#endif
            if
            :: x == STEPS -> at_rest++
            :: else
            fi;
            x = 0; y = 0
       }
    od
}
#endif

proctype Trainer(byte r)
{
    byte n = 1;                     /* the step being made, or made last */
    byte life = 1;
    byte h;
again:
    {
        if
        :: life == 1 -> n++
        :: else                     /* starts over: nothing is published yet */
        fi;
        do
        :: n <= STEPS ->
#ifdef RE_ADD
            if
            :: rank[r].layout == 0 && rank[r].state == stable -> remove(r); add(r)
            :: true
            fi;
#endif
            begin_update(r);
#ifdef STREAM
            stream[r] ! op_write(0, VALUE(life, n));
#ifndef UNCOUPLED
            stream[r] ! op_collective(n, 0);
#endif
            stream[r] ! op_write(1, VALUE(life, n));
            stream[r] ! op_commit(n, rank[r].epoch);
#else
            rank[r].half[0] = VALUE(life, n);
#ifndef UNCOUPLED
            if
            :: n > 1 -> collective(r)
            :: else                 /* the first publication of a life is loaded, not computed */
            fi;
#endif
            rank[r].half[1] = VALUE(life, n);
#ifdef BAD_EPOCH_LATE
            next_odd(r);
#endif
            if
            :: true -> commit(r, n)
#ifdef ABORT
            :: n < STEPS -> atomic { rank[r].state = absent }
#endif
            fi;
#endif
            n++
        :: else -> break
        od;
#ifndef STREAM
        at_rest++;
#endif
#ifdef CRASH
end_idle:
        false
#endif
    }
#ifdef CRASH
    unless {
        atomic {
            die[r] ->
                die[r] = false;
                life = 2; n = 1;
                rank[r].state = absent; rank[r].counter = 0; rank[r].epoch = 0; rank[r].drained = 0;
                rank[r].step = 0; rank[r].incarnation++;
#ifndef SAME_WORLD
                rank[r].world = 2;
#endif
                rank[r].half[0] = JUNK; rank[r].half[1] = JUNK;
                drop_leases(r)
        }
        goto again
    }
#endif
}

#ifdef CRASH
proctype Fate()
{
    do
#ifdef NO_ASK_DEADLINE
    :: atomic { !crashed[0] -> crashed[0] = true; die[0] = true; unheard[0] = true }
    :: atomic { !crashed[1] -> crashed[1] = true; die[1] = true; unheard[1] = true }
#endif
    :: atomic { !crashed[0] -> crashed[0] = true; die[0] = true }
    :: atomic { !crashed[1] -> crashed[1] = true; die[1] = true }
    :: break
    od
}
#endif

/* --------------------------------------------------------------- readers */

/* What a session is worth: requests reach the server only while the process that was connected to still lives. */
#ifdef NO_INCARNATION               /* rule: tokens and begins belong to one incarnation */
#define ALIVE(r) true
#else
#define ALIVE(r) (rank[r].incarnation == session[r])
#endif

#ifdef NO_STEP                      /* rule: begin is conditional on the agreed step */
#define STEP_IS(r, n) true
#else
#define STEP_IS(r, n) (rank[r].step == n)
#endif

#ifdef NO_CATALOG                   /* rule: ... and on the catalog version that the plan was made from */
#define CATALOG_IS(r) true
#else
#define CATALOG_IS(r) (rank[r].catalog == catalog[r])
#endif

#ifdef NO_END_CHECK                 /* rule: end confirms the epoch */
#define STANDS(r) true
#else
#ifdef BAD_END_STEP                 /* compares the step instead */
#define STANDS(r) (ALIVE(r) && rank[r].step == want && OPEN(r))
#else
#define STANDS(r) (ALIVE(r) && rank[r].epoch == token[r])
#endif
#endif

inline connect(r)                   /* what a rank says now is believed as long as the connection seems to stand */
{
    atomic {
        if
        :: !up[r] ->
            session[r] = rank[r].incarnation;
            world[r] = rank[r].world;
            known[r] = false;
            up[r] = true
        :: else
        fi
    }
}

inline ask(r)                       /* whether it still lives */
{
    atomic {
        if
        :: rank[r].incarnation == session[r]            /* it answers */
#ifdef NO_ASK_DEADLINE              /* rule: the answer is waited for a limited time only */
        :: rank[r].incarnation != session[r] && !unheard[r] -> up[r] = false
#else                               /* the end of the stream is heard, or the time passes: all the same */
        :: else -> up[r] = false
#endif
        fi
    }
}

inline read_catalog(r)
{
    atomic {
        if
        :: !known[r] -> catalog[r] = rank[r].catalog; layout[r] = rank[r].layout; known[r] = true
        :: else
        fi
    }
}

#ifdef EARLY
#define BEGUN(r) begun[r]
#ifdef BAD_EARLY_CATALOG            /* rule: such a lease is conditional on the catalog version too */
#define EARLY_CATALOG_IS(r) true
#else
#define EARLY_CATALOG_IS(r) CATALOG_IS(r)
#endif

inline begin_early(r)               /* at the step that is announced, if the reader asks and the server grants */
{
    if
    :: ALIVE(r) && OPEN(r) && EARLY_CATALOG_IS(r) ->
        rank[r].lease[me] = LEASE;
        token[r] = rank[r].epoch;
        begun[r] = true
    :: true
    fi
}

inline give_back(r)                 /* what came early and is not needed, or not soon enough */
{
    atomic {
        if
        :: begun[r] && rank[r].incarnation == session[r] -> rank[r].lease[me] = 0
        :: else
        fi;
        begun[r] = false; token[r] = 0
    }
}
#else
#define BEGUN(r) false
#endif

inline wait(r)                      /* until the rank announces a stable step, not below the one wanted */
{
    if
    :: BEGUN(r) && seen[r] >= want                      /* the announcement stands */
    :: atomic { !BEGUN(r) && rank[r].state == stable && rank[r].step >= want ->
            seen[r] = rank[r].step;
#ifdef EARLY
            begin_early(r)
#endif
       }
    :: atomic { rank[r].incarnation != session[r] -> up[r] = false };                   /* no answer */
#if defined(EARLY) && !defined(BAD_EARLY_KEPT)  /* rule: what came early ends with the attempt */
       give_back(0); give_back(1);
#endif
       goto reconnect
#ifdef CRASH
    :: crashed[0] || crashed[1] -> goto give_up         /* the pull's deadline: ranks that never agree again */
#endif
    fi
}

inline begin(r)
{
    atomic {
        if
        :: BEGUN(r)
        :: !BEGUN(r) && ALIVE(r) && OPEN(r) && STEP_IS(r, want) && CATALOG_IS(r) ->
            rank[r].lease[me] = LEASE;
            token[r] = rank[r].epoch
        :: else ->
            if
            :: !ALIVE(r) -> up[r] = false
            :: ALIVE(r) && rank[r].catalog != catalog[r] -> known[r] = false
            :: else
            fi;
            goto release
        fi
    }
}

inline read(r, i)                   /* one-sided: sees whatever lies at the address it was told, at any time */
{
    atomic {
        if
#ifdef BAD_READ_EXPIRED             /* reads are refused once the lease has expired */
        :: rank[r].lease[me] == 0 -> goto release
        :: else ->
#else
        :: true ->
#endif
            if
            :: layout[r] == rank[r].layout -> got[r * 2 + i] = rank[r].half[i]
            :: else -> got[r * 2 + i] = JUNK
            fi;
            todo = todo & ~(1 << (r * 2 + i))
        fi
    }
}

inline end(r)
{
    atomic {
        if
        :: STANDS(r) ->
            if
            :: ALIVE(r) -> rank[r].lease[me] = 0
            :: else
            fi
        :: else ->
            if
            :: !ALIVE(r) -> up[r] = false
            :: else
            fi;
            goto release
        fi
    }
}

proctype Reader(byte me)
{
    bool up[2];                     /* the connection is thought to stand */
    bool known[2];                  /* the cached catalog is thought to be good */
#ifdef CRASH
    bool whole;                     /* both ranks had restarted before they were compared */
#endif
    byte session[2], world[2], catalog[2], layout[2], seen[2], token[2];
    byte got[4];
    byte todo, want, late;
#ifdef EARLY
    bool begun[2];                  /* leases that came with the announcements */
#endif
#ifdef BAD_WORLD_ONCE
    bool connected;
#endif

reconnect:
#ifdef CRASH
    whole = (rank[0].world == 2 && rank[1].world == 2);
#endif
    connect(0);
    connect(1);
#ifndef NO_WORLD                    /* rule: one world id, checked again after every reconnect */
    if
    :: world[0] == world[1]
#ifdef BAD_WORLD_ONCE               /* checked at the first connect only */
    :: world[0] != world[1] && connected
#endif
    :: else ->
#ifndef BAD_WORLD_BELIEVED          /* rule: ranks that differ are asked whether they live before anybody is refused */
        ask(0);
        ask(1);
        if
        :: !up[0] || !up[1] -> goto reconnect
        :: else
        fi;
#endif
#ifdef CRASH
        assert(!whole);                                                         /* D */
#else
        assert(false);
#endif
        if                          /* refused; the next pull, until the other rank has been restarted too, or none */
        :: goto reconnect
        :: goto give_up
        fi
    fi;
#endif
#ifdef CRASH
    whole = false;
#endif
#ifdef BAD_WORLD_ONCE
    connected = true;
#endif
    read_catalog(0);
    read_catalog(1);
    want = 0;
agree:
    wait(0);
    wait(1);
    if
    :: seen[0] == seen[1] -> want = seen[0]
#ifdef EARLY
#ifdef BAD_EARLY_STEP               /* rule: leases count only if all are of one step */
    :: seen[0] != seen[1] && begun[0] && begun[1] -> want = seen[0]
#endif
    :: seen[0] <  seen[1] -> want = seen[1]; give_back(0); goto agree
    :: seen[0] >  seen[1] -> want = seen[0]; give_back(1); goto agree
#else
    :: seen[0] <  seen[1] -> want = seen[1]; goto agree
    :: seen[0] >  seen[1] -> want = seen[0]; goto agree
#endif
    fi;
#ifdef EARLY
    if                              /* tables or the plan had to be made, or it took too long */
    :: true -> give_back(0); give_back(1)
    :: true
    fi;
#endif

    if
    :: true -> begin(0); begin(1)
    :: true -> begin(1); begin(0)
    fi;

    todo = 15;
#ifdef BAD_END_EARLY                /* rule: end is sent after all reads have completed */
    end(0); end(1);
#endif
    do
    :: todo & 1 -> read(0, 0)
    :: todo & 2 -> read(0, 1)
    :: todo & 4 -> read(1, 0)
    :: todo & 8 -> read(1, 1)
    :: todo == 0 -> break
    od;
#ifndef BAD_END_EARLY
    if
    :: true -> end(0); end(1)
    :: true -> end(1); end(0)
    fi;
#endif

    skip;
    d_step {
        assert(got[0] == got[1] && got[2] == got[3]);                           /* A: not torn */
        assert(got[0] == got[2]);                                               /* A: one step of one life */
#ifndef NO_STEP
        assert(got[0] % 16 == want);                                            /* A: the step that was asked for */
#endif
        assert(got[0] != JUNK)
    }
    goto done;

release:                            /* refused or stale: everything goes back, then from the start */
    skip;
    d_step {
        if
        :: rank[0].incarnation == session[0] -> rank[0].lease[me] = 0
        :: else
        fi;
        if
        :: rank[1].incarnation == session[1] -> rank[1].lease[me] = 0
        :: else
        fi;
        got[0] = 0; got[1] = 0; got[2] = 0; got[3] = 0; todo = 0;
        token[0] = 0; token[1] = 0; seen[0] = 0; seen[1] = 0;
#ifdef EARLY
        begun[0] = false; begun[1] = false;
#endif
        if
        :: at_rest == 2 && !crashed[0] && !crashed[1] -> late++; assert(late <= 3)      /* C */
        :: else
        fi
    }
    goto reconnect;

give_up:
done:
    skip
}

#ifdef LEASER
proctype Leaser()            /* takes leases when it can, gives them back or not, dies holding them */
{
    do
    :: atomic { OPEN(0) && rank[0].lease[READERS] == 0 -> rank[0].lease[READERS] = LEASE }
    :: atomic { OPEN(1) && rank[1].lease[READERS] == 0 -> rank[1].lease[READERS] = LEASE }
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
            rank[r].state = stable;
            rank[r].epoch = 2; rank[r].counter = 2;
            rank[r].step = 1; rank[r].catalog = 1;
            rank[r].world = 1;
            rank[r].half[0] = VALUE(1, 1); rank[r].half[1] = VALUE(1, 1)
        }
        run Clock(); run Trainer(0); run Trainer(1);
#ifdef STREAM
        run Stream(0); run Stream(1);
#endif
#ifdef LEASER
        run Leaser();
#endif
#ifdef CRASH
        run Fate();
#endif
        for (r : 0 .. READERS - 1) { run Reader(r) }
    }
}
