/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the parts of device_plan.h's implementation share. */
#ifndef DEVICE_PLAN_INTERNAL_H
#define DEVICE_PLAN_INTERNAL_H

#include "ipc/device_plan.h"

/** Fills the host part of @p d, which knows what is wanted; @p pieces are sorted by the way. The
    copies are added to @p list, in the order of chunks, whose entries are counted from the list's
    beginning. FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (the list's stop). */
fanin_status device_plan_lay_out_host(device_plan *d, host_pieces *pieces,
                                      copy_list *list, fanin_error *error);
/** Deals chunks to the devices that are wanted: the same bytes to each, and what a device holds
    itself (@p owners, as in device_plan_parts) rather to that one. Chunks and @p list are put in
    the order of devices; entries are counted from where their device's begin. FANIN_ERR_MEMORY. */
fanin_status device_plan_deal(device_plan *d, const int *owners, copy_list *list,
                              fanin_error *error);

/** Why a step did not succeed: FANIN_ERR_TIMEOUT if the work was stopped, else FANIN_ERR_MEMORY. */
static inline fanin_status device_plan_broken_off(const work_stop *stop,
                                                  fanin_error *error)
{
    return work_broken_off(stop, "plan", "copies were listed", error);
}

#endif
