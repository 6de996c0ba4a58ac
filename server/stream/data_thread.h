/* SPDX-License-Identifier: Apache-2.0 */
/** @file One of a server's data threads. A connection stays with its thread until it is closed. */
#ifndef DATA_THREAD_H
#define DATA_THREAD_H

#include "stream/stream.h"

typedef struct data_thread data_thread;

/** FANIN_ERR_MEMORY, FANIN_ERR_IO, FANIN_ERR_LIMIT. */
fanin_status data_thread_start(fanin_server *s, data_thread **out, fanin_error *error);
/** Connections that it has, those on their way included. */
unsigned data_thread_load(const data_thread *t);
/** CPU time that it has taken, without that of threads that help it with checksums. Any thread. */
uint64_t data_thread_cpu_ns(const data_thread *t);
/** See stream_adopt(). */
bool data_thread_adopt(data_thread *t, const handover *h);
/** Makes it look for closed readers, if it has connections. */
void data_thread_look(data_thread *t);
/** It is to end; does not wait. */
void data_thread_stop(data_thread *t);
/** Waits until a thread that was stopped has ended; closes its connections. */
void data_thread_end(data_thread **t);

#endif
