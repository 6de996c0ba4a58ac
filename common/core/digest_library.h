/* SPDX-License-Identifier: Apache-2.0 */
/** @file xxhash, by the widest instructions that the CPU has where its library can tell. */
#ifndef DIGEST_LIBRARY_H
#define DIGEST_LIBRARY_H

#include <xxhash.h>
#ifdef FANIN_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#endif

#endif
