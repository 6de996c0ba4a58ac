/* SPDX-License-Identifier: Apache-2.0 */
/** @file fanin.json, which says what an adapter directory holds. Pure. */
#ifndef ADAPTER_IDENTITY_H
#define ADAPTER_IDENTITY_H

#include "adapter/adapter.h"

#include <jansson.h>

#define IDENTITY_MAX 65536 /**< bytes of fanin.json */

/** Its text, to be freed; NULL: out of memory. */
char *adapter_identity_text(const adapter_identity *identity, uint64_t file_size,
                            const digest *file, const char *config, size_t config_size);
/** NULL: the text is not what adapter_identity_text() makes. */
json_t *adapter_identity_parse(const char *text, size_t size);
/** What distinguishes the content from what is asked for, in a few words; NULL: nothing. */
const char *adapter_identity_difference(const json_t *root,
                                        const adapter_identity *identity);
/** The size of one of the other files; false: it does not say. */
bool adapter_identity_bytes(const json_t *root, const char *file, uint64_t *bytes_out);
/** The digest of one of the other files in hex digits; NULL: it has none (directories of earlier
    versions have none of adapter_config.json). */
const char *adapter_identity_digest(const json_t *root, const char *file);

/** Whether @p hex are the digits of these bytes. */
bool hex_equal(const char *hex, const uint8_t bytes[16]);

/** What guarded a pull's bytes on their way: true, false or "local"; NULL: out of memory. */
json_t *guard_json(fanin_checksums guard);

#endif
