/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Requests of readers that hand on to each other, which wait for news: `landed` and `holders`. They
 * end with their time, and with the session. A session has nothing of all this before the first one
 * (relay_part). Control thread.
 */
#ifndef RELAYS_H
#define RELAYS_H

#include "control/session.h"

#define SESSION_PARKED 16 /**< requests (PROTOCOL.md, "Limits") */
#define SESSION_OFFERS 16 /**< of as many publications */
/** A session is told news at most once in a millisecond for so many that there are, and in ... */
#define NEWS_SESSIONS 8
#define NEWS_MOST_MS 20
/** ... and more of a list after ... */
#define MORE_SESSIONS 2
#define MORE_MOST_MS 256

#define LIST_EMPTY 1 /**< version of a list that nobody has entered; 0: none is known */

typedef struct parked {
    message_type type; /**< MSG_LANDED or MSG_HOLDERS; 0: this place is free */
    uint64_t request;
    deadline at;
    uint64_t version, roster; /**< that the client knows */
    uint8_t token[16];        /**< of landed */
    holder_list *list;        /**< of holders */
    deadline quiet_until;     /**< no news before */
} parked;

typedef struct offer {
    msg_offer m;
    holder_list *list; /**< that it is in; NULL: this place is free */
    size_t number;     /**< in its roster */
} offer;

/** What a session has that asks for relays. */
typedef struct relay_part {
    unsigned n_parked, n_offers;
    unsigned n_landed;    /**< of those parked: the server's listeners count them */
    bool stirred;         /**< there may be news */
    deadline quiet_until; /**< no news before */
    parked parked[SESSION_PARKED];
    offer offers[SESSION_OFFERS];
} relay_part;

/** Of it, and of what is in lists. */
size_t relay_part_memory(const session *s);
/** With the session. */
void relay_part_free(session *s);

/** When who has just heard news may hear others; 0: at once. */
deadline news_due(const struct control *c, uint64_t now_ns);
/** There may be news for the session's parked requests. False: that was known, or there are no
    requests. */
bool parked_stir(session *s);
/** Whether a change of a publication may be news for it. */
static inline bool parks_landed(const session *s)
{
    return s->relays && s->relays->n_landed > 0;
}
/** Answers what there are news for, and whose time is over. True: there is something to send. */
bool parked_look(session *s);
/** When to look; UINT64_MAX: never. */
deadline parked_due(const session *s);
/** Ends all: the server shuts down. */
void parked_cancel(session *s);
/** Whether the session is of use while it is silent. */
bool parked_lives(const session *s);

/* ------------------------------------------------------------------------ lists */

fanin_status handle_offer(session *s, uint64_t request, body *in);
fanin_status handle_holders(session *s, uint64_t request, body *in);
/** Adds what those tell that offer the publication, whose entry is number @p entry, to @p rows, of
    which there are @p n. Gives the new number. */
uint32_t offers_tell(const struct control *c, const char *publication, uint32_t entry,
                     stats_relay rows[LIMIT_STATS], uint32_t n);

/* ----------------------------------------------------------------------- landed */

fanin_status handle_landed(session *s, uint64_t request, body *in);

#endif
