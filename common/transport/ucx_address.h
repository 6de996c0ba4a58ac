/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What peers send for UCX, looked at before UCX gets it: it believes every length and ends the
 * process over what it does not know. What passes has the form that UCX 1.16 to 1.22 write under
 * our settings; whether it names what is there, UCX finds out.
 */
#ifndef UCX_ADDRESS_H
#define UCX_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * NULL, or why @p address is no worker address (static). @p own is this worker's: transports that
 * both have must look alike. @p same_host: down to what they can do.
 */
const char *ucx_address_check(const uint8_t *address, size_t size, const uint8_t *own,
                              size_t own_size, bool same_host);
/** NULL, or why it is no packed remote key (static). */
const char *ucx_rkey_check(const uint8_t *rkey, size_t size);

#endif
