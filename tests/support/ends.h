/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Servers, clients, tensors and options for tests of both ends. What must work and does not fails
 * the test.
 */
#ifndef ENDS_H
#define ENDS_H

#include <fanin/fanin.h>
#include <sys/types.h>

/** One process of world 7, its defaults but for UCX, which it has not. */
fanin_server_config make_server_config(void);
/** *@p address: where it listens, of @p size bytes. */
fanin_server *make_server(const fanin_server_config *config, char *address,
                          size_t size);

/** By stream, without UCX. */
fanin_client_config make_client_config(void);
/** NULL: make_client_config(). */
fanin_client *make_client(const fanin_client_config *config);
/** The same, connected. */
fanin_client *connect_client(const fanin_client_config *config,
                             const char *const *addresses, size_t count);

/** A matrix, a vector if @p columns is 0, all of which is packed at @p memory. */
fanin_tensor make_tensor(const char *name, fanin_dtype dtype, uint64_t rows,
                         uint64_t columns, fanin_box *box, void *memory);
/** Fills @p memory with numbers that all differ and commits them as step 41 of lora:0: one matrix
    of U32, named "matrix". */
void publish_matrix(fanin_server *server, uint32_t *memory, uint32_t rows,
                    uint32_t columns);
/** Of lora:0, by this rule, in 20 s. */
fanin_pull_options make_options(fanin_step_rule rule, uint64_t step);

/** Threads of this process that have this name, and the first of them; @p first may be NULL. */
unsigned threads_named(const char *name, pid_t *first);

#endif
