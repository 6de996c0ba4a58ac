/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pull of several reads. Two ranks write published memory in place; a session takes a lease of each, reads the parts of
 * the memory in any order, some of them twice, and ends. Reads are one-sided: they notice nothing. A trainer may update
 * between any two of them, and may take its memory away and bring it back as it was (pause and resume: the same step under
 * a new epoch). A connection may be lost once, and with it the rank's lease.
 *
 * Checked: what is put to use has all parts of both ranks of one step, the session's; nobody deadlocks.
 *
 * Leases delay nobody here: how long an update waits for them is of inplace.pml.
 *
 * With RESTART rank 1 may be killed once and come back unheard: at the same addresses, with the same step and epochs, which
 * count from the beginning again, and other bytes.
 *
 * Switches (mutations):  NO_END         what was read is put to use without an end
 *                        BAD_USE_EARLY  ... when all parts have been read, whatever the end says later
 *                        BAD_LEASE_EACH each read is a pull of its own: leases, the newest step, an end
 *                        BAD_MEND       a rank whose end was not good is begun again and one part read again
 *                        BAD_RECONNECT  a rank that was lost is begun again at the session's step, and reads go on
 *                        BAD_LIFE       an end is answered by whoever has the rank's address now
 *
 * With CONFIRM each part is put to use by itself once both ranks have confirmed it: an end that keeps the leases, after the
 * part's last byte and before the next part. What is in use by then stays so, whatever becomes of the session later.
 *                        BAD_CONFIRM_EARLY   ... asked for before the part is read
 *                        BAD_CONFIRM_OTHERS  ... good for all that is read later, too
 */
#define RANKS 2
#define PARTS 2
#define STEPS 2
#ifndef READS
#define READS 3
#endif

byte epoch[RANKS] = 2;              /* odd: unreadable */
byte step[RANKS] = 1;
byte life[RANKS];
byte memory[4] = 1;                 /* of rank r, part p: [2 * r + p]; of the life and step, 0: something else */
#define BYTES_OF(rank, s) (life[rank] * 10 + s)
bool lost[RANKS];                   /* the client's connection */
bool may_lose = true;

active [RANKS] proctype Trainer()
{
    byte me = _pid, paused;
    do
    :: step[me] < STEPS ->
        epoch[me]++;
        memory[2 * me] = BYTES_OF(me, step[me] + 1);
        memory[2 * me + 1] = BYTES_OF(me, step[me] + 1);
        atomic { step[me]++; epoch[me]++ }
    :: me == 0 && !paused ->
        paused = 1;
        epoch[me]++;
        atomic { memory[2 * me] = 0; memory[2 * me + 1] = 0 }
        memory[2 * me] = BYTES_OF(me, step[me]);
        memory[2 * me + 1] = BYTES_OF(me, step[me]);
        epoch[me]++
#ifdef RESTART
    :: atomic {
        me == 1 && life[me] == 0 ->
        life[me]++;
        step[me] = 1;
        epoch[me] = 2;
        memory[2 * me] = BYTES_OF(me, 1);
        memory[2 * me + 1] = BYTES_OF(me, 1)
    }
#endif
    :: atomic { may_lose -> may_lose = false; lost[me] = true }
    :: break
    od
}

byte token[RANKS], of_life[RANKS], wanted, r, p, reads;
byte got[4];
bool good, used;

inline begin(rank)                  /* conditional on the step */
{
    atomic {
        if
        :: epoch[rank] % 2 == 0 && step[rank] == wanted ->
            token[rank] = epoch[rank];
            of_life[rank] = life[rank]
        :: else -> good = false     /* moved on: another session, another day */
        fi
    }
}

inline end(rank)                    /* of another life, or a lost connection, no answer comes */
{
    atomic {
        good = good && token[rank] == epoch[rank] && !lost[rank];
#ifndef BAD_LIFE
        good = good && of_life[rank] == life[rank]
#endif
    }
}

inline read(part)
{
    got[part] = memory[part];
    got[2 + part] = memory[2 + part]
}

inline use_part(part)               /* for good: what comes later changes nothing of it */
{
    atomic {
        assert(got[part] == of_life[0] * 10 + wanted);
        assert(got[2 + part] == of_life[1] * 10 + wanted)
    }
}

inline confirm(part)                /* an end that keeps the leases */
{
    good = true;
    end(0);
    end(1);
#ifndef BAD_CONFIRM_EARLY
    if
    :: good -> use_part(part); used = true
    :: else
    fi
#endif
}

inline use()
{
    atomic {
        assert(got[0] == of_life[0] * 10 + wanted && got[1] == got[0]);
        assert(got[2] == of_life[1] * 10 + wanted && got[3] == got[2]);
        goto done
    }
}

active proctype Session()
{
    good = true;
    wanted = step[0];
    begin(0);
    begin(1);
    do
    :: good && reads < READS ->
#ifdef BAD_LEASE_EACH
        wanted = step[0];
        begin(0);
        begin(1);
#endif
        if
        :: p = 0
        :: p = 1
        fi;
        if                          /* the last one reads what is still to be read */
        :: reads + 1 == READS && !got[0] -> p = 0
        :: reads + 1 == READS && !got[1] -> p = 1
        :: else
        fi;
#ifdef BAD_CONFIRM_EARLY
        confirm(p);
#endif
        read(p);
#ifdef BAD_CONFIRM_EARLY
        if
        :: good -> use_part(p)
        :: else
        fi;
#endif
#ifdef BAD_CONFIRM_OTHERS
        if
        :: used -> use_part(p)
        :: else
        fi;
#endif
#if defined(CONFIRM) && !defined(BAD_CONFIRM_EARLY)
        confirm(p);
#endif
        reads++;
#ifdef BAD_LEASE_EACH
        end(0);
        end(1);
#endif
        if
        :: lost[0] || lost[1] ->
#ifdef BAD_RECONNECT
            r = (lost[0] -> 0 : 1);
            lost[r] = false;
            begin(r)
#else
            good = false            /* the lease went with the connection */
#endif
        :: else
        fi
    :: else -> break
    od;
#ifdef BAD_USE_EARLY
    if
    :: good -> use()
    :: else
    fi;
#endif
#ifndef NO_END
    end(0);
    end(1);
#endif
#ifdef BAD_MEND
    if
    :: good || lost[0] || lost[1]
    :: else ->
        r = (token[0] == epoch[0] -> 1 : 0);
        good = true;
        begin(r);
        read(p);
        end(0);
        end(1)
    fi;
#endif
    if
    :: good -> use()
    :: else
    fi;
done:
    skip
}
