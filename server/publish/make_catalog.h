/* SPDX-License-Identifier: Apache-2.0 */
/** @file The catalog that a publication's shards make. */
#ifndef MAKE_CATALOG_H
#define MAKE_CATALOG_H

#include "publish/publication.h"

/**
 * The publication's catalog as @p c will have it, NULL: by reference; its last one if nothing has
 * changed. With a reference. With the writer lock, which also keeps p->catalog from changing;
 * builds outside of the server's lock. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT.
 */
fanin_status make_catalog(fanin_server *s, publication *p, const commit *c,
                          shard_catalog **out, fanin_error *error);

#endif
