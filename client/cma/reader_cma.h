/* SPDX-License-Identifier: Apache-2.0 */
/** @file The path cma: threads let the kernel copy from the ranks' host memory straight into place.
    */
#ifndef READER_CMA_H
#define READER_CMA_H

#include "path/reader.h"

extern const path_reader cma_reader;

/** Frees what the client keeps between pulls; no read is under way. */
void cma_disconnect(fanin_client *client);

#endif
