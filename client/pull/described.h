/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a caller says of the memory that a pull fills, and where that memory is. A destination that
 * is described once knows nothing of clients, catalogs and plans: those are kept by what they were
 * made from, of which it gives the digest. What it has derived itself is checked whenever it is
 * used, so that nobody has to tell it anything.
 */
#ifndef DESCRIBED_H
#define DESCRIBED_H

#include "delta/delta.h"
#include "gpu_finder.h"
#include <fanin/client.h>

/** Tensors as a caller described them. */
typedef struct described {
    const fanin_tensor *tensors;
    fanin_tensor *own; /**< a copy of them, NULL: none is needed */
    size_t count;
} described;

/** Where their boxes are. Immutable once found. */
typedef struct places {
    bool on_devices; /**< some of them are */
    unsigned users;  /**< its owner's count */
    int32_t *device; /**< of each tensor, -1: host memory */
    /** of names, shapes, boxes, devices and allocations */
    digest layout;
    gpu_range *allocations; /**< of devices, in which boxes lie */
    size_t n_allocations;
    bool too_many; /**< not all are known: nothing stands */
} places;

/**
 * Checks the tensors one by one; they stay the caller's, and must stay until described_close(),
 * which is due in any case. FANIN_ERR_ARGUMENT, FANIN_ERR_MEMORY.
 */
fanin_status described_open(described *d, const fanin_tensor *tensors, size_t count,
                            fanin_error *error);
void described_close(described *d);
/** The caller's array may have larger elements than this version knows. */
const fanin_tensor *described_at(const described *d, size_t index);
bool described_box_is_empty(const fanin_tensor *t, const fanin_box *box);
/** FANIN_ERR_ARGUMENT, naming the tensor. */
fanin_status described_refuse(const fanin_tensor *t, const char *remedy,
                              fanin_error *error, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/** Finds them; @p f's driver NULL: all is host memory. *@p out, zeroed, is to be cleared in any
    case. FANIN_ERR_ARGUMENT: a box is elsewhere than its tensor says; FANIN_ERR_MEMORY. */
fanin_status places_find(const described *d, gpu_finder *f, places *out,
                         fanin_error *error);
void places_clear(places *p);

/**
 * The tensors, and where they are now: found again, by @p f, if an allocation has changed. Valid
 * until prepared_give(); several calls may have them at once. Thread: any. Errors of places_find().
 */
fanin_status prepared_take(fanin_destination *d, gpu_finder *f, const described **all,
                           const places **where, fanin_error *error);
/** What its memory holds. */
delta_base *prepared_base(fanin_destination *d);
/** @p where may be NULL. */
void prepared_give(fanin_destination *d, const places *where);

#endif
