/* SPDX-License-Identifier: Apache-2.0 */
/** @file One question to all ranks: asked as soon as each is connected, each judged by itself. */
#ifndef SURVEY_H
#define SURVEY_H

#include "catalog/tables.h"

/** What one rank made of it. */
typedef struct answer {
    struct survey *survey;
    size_t peer;
    bool asked, over;  /**< over: it answered, or was lost */
    fanin_error error; /**< its status is the answer's */
    uint64_t asked_ns, answered_ns;
    msg_list_entry *entries; /**< of a list */
    uint32_t count;
    msg_stats_ok stats;
    announcement announced; /**< of a wait */
} answer;

typedef struct survey {
    fanin_client *client;
    /** MSG_LIST, MSG_PING, MSG_WAIT (for the newest step), or MSG_STATS: a rank that does not know
        that is asked for its list */
    message_type type;
    const char *publication; /**< of a wait; of stats, NULL: all; else NULL */
    bool first;              /**< one good answer is enough */
    deadline at;
    answer *answers; /**< one a peer */
} survey;

/**
 * Connects what is down, asks, and waits until every rank has answered or failed, at most until
 * s->at; then gives up those that owe an answer. If those that are connected do not belong
 * together, they are asked whether they still live (client_ensure_connected()), and if that mends
 * it all are asked anew. client, type, publication, first and at are the caller's; survey_finish()
 * in either case. What ranks made of it is in s->answers. If nobody answered: why the first did
 * not. FANIN_ERR_WORLD, FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY.
 */
fanin_status survey_take(survey *s, fanin_error *error);
void survey_finish(survey *s);

/** Whether the peer's answer came and is good. */
bool survey_answered(const survey *s, size_t peer);
#endif
