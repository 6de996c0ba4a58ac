/* SPDX-License-Identifier: Apache-2.0 */
/** @file The one-sided paths that UCX carries: cma, rdma. */
#ifndef READER_UCX_H
#define READER_UCX_H

#include "path/reader.h"
#include "ucx.h"

extern const path_reader ucx_reader;

/** See path_reader. */
fanin_status ucx_probe(path_round *r, bool *open, fanin_error *error);

/** The keys of the state's regions, which is one of these paths. */
ucx_rkey *const *ucx_keys_of(const path_state *s);

#endif
