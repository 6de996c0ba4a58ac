/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Readers that hand on what they have read. A relay pulls the steps of an origin, which writes its memory in place: it
 * turns the epoch of its own publication, fills it with the step that it has agreed on, and proves box by box what the
 * origin has confirmed. A reader agrees with the origin, and takes each box of the origin or of a relay. Reads are
 * one-sided: they notice nothing.
 *
 * Checked: each box that is put to use is of the step and the world that its reader agreed on.
 *
 * Leases delay nobody here. A relay pulls twice (PULLS), a second one once. Each box is confirmed by itself: a confirmation of several is weaker
 * for none of them.
 *
 * Scenarios:             RESTART  the origin may come back as another world, whose steps begin again with other bytes
 *                        PAUSE    the origin's memory may be away between two epochs of one step
 *                        VOID     a lease may be void while its epoch stands, and what comes is padding
 *                        TWO      a second relay takes its boxes of the first
 * Switches (mutations):  NO_CONFIRM          a box is proven when it has landed
 *                        BAD_CONFIRM_EARLY   ... when it was confirmed before its last byte was in place
 *                        BAD_TAG             ... with the origin's epoch, which must still stand for a lease of the reader
 *                        NO_TURN             the relay fills anew under the epoch before
 *                        BAD_TURN_LATE       ... and turns it when it has begun to write
 *                        NO_RELAY_END        the reader puts to use what it has read of a relay without an end
 *                        NO_LANDED           it reads boxes of a relay that are not proven
 *                        NO_RELAY_STEP       begin at a relay does not mind the step
 *                        NO_RELAY_WORLD      a relay's world id is not compared
 *                        BAD_LATE_PROOF      a thread of a pull may prove a box when the next one fills, if it is of the
 *                                            same step
 */
#define STEPS 2
#define BOXES 2
#ifndef PULLS
#define PULLS 2
#endif
#define PADDING 0
#define BYTES_OF(w, s) ((w) * 10 + (s))

byte world = 1, step = 1, epoch = 2;     /* the origin's; an odd epoch is unreadable */
byte low[BOXES], high[BOXES];            /* its memory: a box has two words */
bool void_lease[3];                      /* of the relays' and the reader's lease */
bool was_away;

typedef publication {
    byte world, step, epoch;
    byte low[BOXES], high[BOXES];
    bool proven[BOXES];
    byte tag[BOXES]                      /* the origin's epoch that it was read under */
}
publication relay[2];

#define STANDS(who, w, e) (world == w && epoch == e && !void_lease[who])

proctype Origin()
{
    byte i;
end:
    do
    :: step < STEPS ->
        epoch++;
        for (i : 0 .. BOXES - 1) { low[i] = BYTES_OF(world, step + 1); high[i] = BYTES_OF(world, step + 1) }
        atomic { step++; epoch++ }
#ifdef PAUSE
    :: !was_away ->
        was_away = true;
        epoch++;
        for (i : 0 .. BOXES - 1) { low[i] = PADDING }
        for (i : 0 .. BOXES - 1) { low[i] = BYTES_OF(world, step) }
        epoch++
#endif
#ifdef RESTART
    :: world == 1 ->
        atomic { world = 2; step = 1; epoch = 1 }      /* epochs begin again, too */
        for (i : 0 .. BOXES - 1) { low[i] = BYTES_OF(2, 1); high[i] = BYTES_OF(2, 1) }
        epoch = 2
#endif
    :: break
    od
}

#define PROVES(me, of_step) (relay[me].step == of_step && relay[me].epoch % 2 == 0)

inline prove(me, box, of_step, of_epoch)
{
    atomic {
        if
        :: PROVES(me, of_step) -> relay[me].proven[box] = true; relay[me].tag[box] = of_epoch
        :: else
        fi
    }
}

inline turn(me)                          /* begin_update */
{
    atomic {
        relay[me].epoch++;
        for (i : 0 .. BOXES - 1) { relay[me].proven[i] = false }
    }
}

inline fill(me, w, s)                    /* readers may begin from here on */
{
    atomic { relay[me].world = w; relay[me].step = s; relay[me].epoch = relay[me].epoch + relay[me].epoch % 2 }
}

proctype Relay()
{
    byte i, box, pulls, e, s, w, a, b, late = BOXES, late_step;
    bool good;
    do
    :: pulls < PULLS ->
        pulls++;
#if !defined(NO_TURN) && !defined(BAD_TURN_LATE)
        turn(0);
#endif
        atomic { epoch % 2 == 0 -> w = world; s = step; e = epoch; void_lease[0] = false }
        fill(0, w, s);
        box = 0;
        do
        :: box < BOXES ->
            a = low[box];
#ifdef VOID
            if
            :: void_lease[0] = true; a = PADDING
            :: true
            fi;
#endif
            b = high[box];
            relay[0].low[box] = a;
#ifdef BAD_TURN_LATE
            if
            :: box == 0 -> turn(0); fill(0, w, s)
            :: else
            fi;
#endif
            good = true;
#ifdef BAD_CONFIRM_EARLY
            good = STANDS(0, w, e);
            b = high[box];
#endif
            relay[0].high[box] = b;
#if !defined(NO_CONFIRM) && !defined(BAD_CONFIRM_EARLY) && !defined(BAD_TAG)
            good = STANDS(0, w, e);
#endif
            if
            :: !good -> break            /* the trainer has gone on: so does the relay */
#ifdef BAD_LATE_PROOF
            :: good && late == BOXES -> late = box; late_step = s
#endif
            :: good -> prove(0, box, s, e)
            fi;
            box++
        :: else -> break
        od
#ifdef BAD_LATE_PROOF
    :: late < BOXES -> prove(0, late, late_step, e); late = BOXES
#endif
    :: break
    od
}

/* What begin at a relay, the hello before it and what has landed there must say. */
#ifdef NO_RELAY_STEP
#define OF_STEP(from, s) true
#else
#define OF_STEP(from, s) (relay[from].step == s)
#endif
#ifdef NO_RELAY_WORLD
#define OF_WORLD(from, w) true
#else
#define OF_WORLD(from, w) (relay[from].world == w)
#endif
#ifdef NO_LANDED
#define LANDED(from, box) true
#else
#define LANDED(from, box) relay[from].proven[box]
#endif
#define READABLE(from) (relay[from].epoch % 2 == 0)

/* Reads a box of a relay, into a and b. */
inline read_relayed(from, box, w, s)
{
    atomic {
        good = READABLE(from) && OF_STEP(from, s) && OF_WORLD(from, w) && LANDED(from, box);
        re = relay[from].epoch
    }
    a = relay[from].low[box];
    b = relay[from].high[box];
#ifndef NO_RELAY_END
    good = good && relay[from].epoch == re
#endif
}

#ifdef TWO
proctype Second()
{
    byte i, box, s, w, a, b, re;
    bool good;
    turn(1);
    atomic { epoch % 2 == 0 -> w = world; s = step }
    fill(1, w, s);
    for (box : 0 .. BOXES - 1) {
        read_relayed(0, box, w, s);
        relay[1].low[box] = a;
        relay[1].high[box] = b;
        if
        :: good -> prove(1, box, s, 0)
        :: else
        fi
    }
}
#endif

proctype Reader()
{
    byte box, from, e, s, w, a, b, re;
    bool good;
    atomic { epoch % 2 == 0 -> w = world; s = step; e = epoch; void_lease[2] = false }
    for (box : 0 .. BOXES - 1) {
        if
        :: a = low[box];
            b = high[box];
            good = STANDS(2, w, e)
        :: from = 0;
            read_relayed(0, box, w, s)
#ifdef BAD_TAG
            ; good = good && relay[0].tag[box] == e && STANDS(2, w, e)
#endif
#ifdef TWO
        :: from = 1;
            read_relayed(1, box, w, s)
#endif
        fi;
        if
        :: good -> assert(a == BYTES_OF(w, s) && b == BYTES_OF(w, s))
        :: else -> break                 /* asked of somebody else, or begun again */
        fi
    }
}

init {
    byte i;
    atomic {
        for (i : 0 .. BOXES - 1) { low[i] = BYTES_OF(1, 1); high[i] = BYTES_OF(1, 1) }
        relay[0].epoch = 2;              /* of nothing: no box is proven */
        relay[1].epoch = 2;
        run Origin();
        run Relay();
        run Reader();
#ifdef TWO
        run Second()
#endif
    }
}
