/* SPDX-License-Identifier: Apache-2.0 */
/** @file fanin.json, which says what a directory holds. Pure. */
#ifndef ADAPTER_IDENTITY_H
#define ADAPTER_IDENTITY_H

#include "adapter/adapter.h"

#include <jansson.h>

#define IDENTITY_MAX ((uint64_t)32 << 20) /**< bytes of fanin.json */

/** One of the other files. */
typedef struct identity_file {
    const char *name;
    uint64_t bytes;
    bool in_pieces; /**< the digest is that of its pieces' digests */
    digest content;
} identity_file;

/** Its text, to be freed; NULL: out of memory. */
char *adapter_identity_text(const adapter_identity *identity,
                            const identity_file *files, size_t count);
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
/** How many other files it names. */
size_t adapter_identity_count(const json_t *root);

/** Whether @p hex are the digits of these bytes. */
bool hex_equal(const char *hex, const uint8_t bytes[16]);

/** What guarded a pull's bytes on their way: true, false or "local"; NULL: out of memory. */
json_t *guard_json(fanin_checksums guard);

#endif
