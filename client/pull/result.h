/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a pull did, gathered while it runs. */
#ifndef RESULT_H
#define RESULT_H

#include "path/path.h"

struct fanin_result {
    fanin_result_info info;
    char reason[PATH_REASON];
    char *ranks_json;
    served *served; /**< one a peer */
    size_t n_peers;
};

fanin_result *result_create(size_t n_peers); /**< NULL: out of memory */
/** What guarded the bytes that served[] counts. */
fanin_checksums result_guard(const fanin_result *r, const fanin_client *client,
                             const publication *p);
/** Fills ranks_json, path and its reason, bytes and reads from served[]. */
fanin_status result_finish(fanin_result *r, const fanin_client *client,
                           const publication *p, fanin_error *error);

#endif
