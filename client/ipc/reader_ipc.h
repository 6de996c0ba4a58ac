/* SPDX-License-Identifier: Apache-2.0 */
/** @file The path cuda_ipc: kernels that read the ranks' device memory. */
#ifndef READER_IPC_H
#define READER_IPC_H

#include "ipc/device_reader.h"
#include "path/reader.h"

extern const path_reader ipc_reader;

/** See path_reader. */
fanin_status ipc_probe(path_round *r, bool *open, fanin_error *error);
void ipc_unmap(fanin_client *client, publication *p);

#endif
