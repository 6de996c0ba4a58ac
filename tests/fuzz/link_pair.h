/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A connection of a reader's and the one to its rank. What passes is taken apart, altered by the
 * edits, and put together again: whole frames, also inside TLS if it has both ends' keys, or TLS
 * records, if it has none.
 */
#ifndef LINK_PAIR_H
#define LINK_PAIR_H

#include "edits.h"
#include "tls.h"

/** What is taken apart. */
typedef enum link_unit {
    UNIT_FRAME,  /**< only what stands in it is wrong: its checksums are made anew */
    UNIT_SEALED, /**< a frame that keeps its checksums, as if the way had altered it */
    UNIT_RECORD, /**< of TLS: the link does not know the keys */
} link_unit;

/** What the pairs of one link have in common. */
typedef struct link_talk {
    edits edits;
    unsigned passed[2]; /**< by the end that it goes to, of all pairs */
    link_unit unit;
    void (*happens)(void *cookie, edit_kind kind, uint16_t number);
    void *cookie;
} link_talk;

typedef struct link_pair {
    int fds[2];          /**< by the end that they lead to; -1: free */
    const char *address; /**< that it says to be the rank's; NULL: what the rank says */
    tls *secured[2]; /**< it plays the reader to the rank, and the rank to the reader */
    buffer come[2];  /**< not yet passed on, by the end that it goes to */
    buffer later[2]; /**< is said behind what comes next */
    bool begun[2];   /**< the hello has been passed on; its answer */
    buffer hello;    /**< as the reader said it */
    bool sealed;     /**< the ends have agreed on checksums */
} link_pair;

void link_pair_clear(link_pair *p); /**< of what never was one */
/** Takes both sockets, which do not block. @p ends: by the end that they lead to; NULL: without
    TLS, or records. */
void link_pair_open(link_pair *p, const int fds[2], const tls_end *const ends[2],
                    const char *address);
/** Passes on what has come to this end for the other one. False: the pair is to be closed. */
bool link_pair_pass(link_pair *p, int from, link_talk *talk);
/** @p at_once: without the minute that the kernel keeps the port of a connection for; what is under
    way is lost. */
void link_pair_close(link_pair *p, bool at_once);

#endif
