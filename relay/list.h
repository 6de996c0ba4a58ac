/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The list of who holds the same of a step, which the trainer's rank 0 keeps: a thread that offers
 * what this reader holds and hears of the others. An offer lasts as long as the connection, so that
 * the thread stays connected while anything is handed on.
 */
#ifndef LIST_H
#define LIST_H

#include "digest.h"
#include "duty.h"
#include "log.h"
#include "messages.h"
#include <fanin/client.h>

/** Another reader that hands on. */
typedef struct holder {
    member who;
    char address[72];
    nearness near;
    bool is_whole; /**< it holds all tensors whole, and not what this reader holds */
    bool is_here;  /**< on this host */
    bool
        remembered; /**< of the step before: it has not said yet that it wants this one */
} holder;

/** A rank that an offer may be made to: the process that was pulled from, not a later one there. */
typedef struct list_rank {
    char address[72];
    uint8_t incarnation[16];
} list_rank;

typedef struct holders_list holders_list;

/** @p config stays until the list is destroyed. @p changed: an eventfd that is written to when the
    list has changed. FANIN_ERR_LIMIT, FANIN_ERR_MEMORY. */
fanin_status list_create(const fanin_client_config *config, const logger *log,
                         int changed, holders_list **out, fanin_error *error);
void list_destroy(holders_list **list);

/** What is offered from now on, to the first of the world's @p ranks, in their order, that answers;
    copies. The list is empty until that rank has answered. @p whole: the holding of those that hold
    all tensors whole, who are in the list, too; NULL: they are not. False: no memory. */
bool list_offer(holders_list *list, const uint8_t world_id[16], const list_rank *ranks,
                size_t n_ranks, const msg_offer *offer, const digest *whole);
/** The numbers of the offer that are told for statistics. */
void list_tell(holders_list *list, const msg_offer *numbers);
/** Nothing is offered any more. */
void list_withdraw(holders_list *list);

/** Whether the trainer forbids relays, as far as a rank has said. */
bool list_is_refused(holders_list *list);
/** The rank that has said that the step was taken back, or is not committed there yet; -1: none. */
int32_t list_stale_rank(holders_list *list);
/** Whether a rank has what is offered, as far as is known. */
bool list_is_taken(holders_list *list);
/** Whether the rank has answered what is offered, or cannot. */
bool list_is_known(holders_list *list);
/** Whether the list has changed since @p *seen, or is not known yet; then a copy of it without
    @p self and those of other sites, to be freed. NULL with *n_out 0 is an empty one. False: it has
    not, or no memory. */
bool list_copy(holders_list *list, const member *self, uint64_t *seen, holder **out,
               size_t *n_out);

#endif
