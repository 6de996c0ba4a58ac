/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory under a stream send. The data threads answer reads from the tensors' own memory, through the addresses of the
 * last commit's catalog; the trainer frees or moves that memory as soon as begin_update, remove or put has returned.
 *
 * Checked: no send touches memory that the trainer has taken back; nobody deadlocks.
 *
 * There may be several sends: a data thread makes one at a time, and one that reads device memory is a copy that a device
 * makes while the thread does other things.
 *
 * Leases are left out: they bound how long the trainer waits, not what a send may touch, so here a reader may ask at any
 * time with a token as old as it likes.
 *
 * Switches (mutations):  NO_SEND_CHECK    a read is answered without looking whether the token's epoch still stands
 *                        BAD_CHECK_EARLY  ... looked at, but not under the lock that announces the send
 *                        NO_SEND_WAIT     turning the epoch does not wait for the sends that are under way
 */
#define UPDATES 3
#define READERS 2

byte epoch = 2;                     /* odd: unreadable */
byte memory = 1;                    /* the truth: which allocation is the publication's now */
byte catalog = 1;                   /* the allocation that the last commit's catalog points at */
byte in_flight;                     /* sends that read the memory */
byte token[READERS];
bool asked[READERS];

active proctype Trainer()
{
    byte n;
    do
    :: n < UPDATES ->
        n++;
        epoch++;
#ifndef NO_SEND_WAIT                /* rule: the epoch turns first, then the running sends are waited for */
        in_flight == 0;
#endif
        if
        :: true -> memory++         /* moved: the old allocation is freed */
        :: true                     /* rewritten in place; a torn read is caught at the end of the pull */
        fi;
        atomic { catalog = memory; epoch++ }
    :: else -> break
    od
}

active [READERS] proctype Reader()
{
    byte me = _pid - 1;
    do
    :: atomic { epoch % 2 == 0 -> token[me] = epoch }
    :: atomic { token[me] > 0 && !asked[me] -> asked[me] = true }
    :: break
    od
}

active [2] proctype Data()          /* one send at a time each */
{
    byte r, address;
end:
    do
    :: atomic {
        if
        :: asked[0] -> r = 0
        :: asked[1] -> r = 1
        fi;
        asked[r] = false;
#ifdef NO_SEND_CHECK
        address = catalog; in_flight++
    }
#else
        if
        :: token[r] != epoch -> goto end        /* refused */
        :: else
        fi;
#ifdef BAD_CHECK_EARLY
    }
#endif
        address = catalog; in_flight++
#ifndef BAD_CHECK_EARLY
    }
#endif
#endif
        assert(address == memory);
        assert(address == memory);  /* ... until its last byte */
        in_flight--
    od
}
