/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Falling over to a replica in the middle of a pull. Rank 0 and rank 1 hold the same box. The session with rank 0 is lost
 * while a one-sided read of it is in flight (the process may well live, and write on: a lost session holds no lease); the
 * reader reads the box again from rank 1 into the same destination and asks only rank 1 to confirm.
 *
 * Checked: the accepted destination holds the step that was asked for, and nothing writes it after the pull returned.
 *
 * Switch (mutation): NO_CALLBACK  does not wait for the reads of the lost rank to call back before it reads the replica.
 */
byte memory[2] = { 1, 1 };          /* the step that each rank's bytes belong to */
byte destination;
bool in_flight, lost, returned;

active proctype Network()           /* completes or fails the read of rank 0 whenever it likes */
{
end:
    do
    :: atomic { in_flight -> destination = memory[0]; assert(!returned); in_flight = false }
    :: atomic { in_flight && lost -> in_flight = false }
    od
}

active proctype Rank0()
{
    do
    :: !lost -> lost = true
    :: lost -> memory[0] = 2; break
    :: break
    od
}

active proctype Reader()
{
    in_flight = true;
    if
    :: !in_flight && !lost          /* read, and confirmed by rank 0 */
    :: lost ->
#ifndef NO_CALLBACK
        !in_flight;
#endif
        destination = memory[1]     /* rank 1's lease stands throughout */
    fi;
    atomic { assert(destination == 1); returned = true }
}
