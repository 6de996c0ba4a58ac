/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Another process's memory, which the kernel copies (process_vm_readv), and the proof that it is
 * the rank's: its incarnation lies where the rank said. A process that came after it, by exec or
 * under its number, has other bytes there, or none.
 */
#ifndef CMA_PROCESS_H
#define CMA_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CMA_IOVECS 1024 /**< of one call, on either side: the kernel's most */

/** A rank's process. */
typedef struct cma_process {
    pid_t pid;        /**< here */
    uint64_t witness; /**< where its incarnation lies, there */
    uint8_t incarnation[16];
} cma_process;

/** 0: it is the rank's. ESTALE: it is another one. Else why it cannot be read, an errno. */
int cma_prove(const cma_process *p);

/** Reads @p from, one behind the other, into @p to, of which there are as many bytes and at most
    CMA_IOVECS each; they are used up. 0, or an errno: then *from[*at].iov_base could not be read,
    or what is left of @p to not be written. */
int cma_read(pid_t pid, struct iovec *to, unsigned n_to, struct iovec *from,
             unsigned n_from, unsigned *at);

/** What an errno of these means, and what can be done; never NULL. */
const char *cma_why(int error);
const char *cma_remedy(int error);

#endif
