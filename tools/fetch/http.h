/* SPDX-License-Identifier: Apache-2.0 */
/** @file A small HTTP server for scrapers: GET and HEAD of one page, one thread, one poll loop. */
#ifndef HTTP_H
#define HTTP_H

#include <fanin/error.h>

/** The page as it is now, as long as the next call is not made; may take some seconds. */
typedef const char *(*http_page_fn)(void *cookie);

/**
 * Listens on @p address, "127.0.0.1:9470" or "[::1]:9470"; port 0: any that is free. *@p fd_out and
 * *@p port_out are set. Errors: ARGUMENT (it is no numeric address), IO.
 */
fanin_status http_listen(const char *address, int *fd_out, unsigned *port_out,
                         fanin_error *error);

/**
 * Answers until the user interrupts, then closes @p fd: GET /metrics with @p page, HEAD with its
 * head, anything else with an error. At most 16 connections, of which the oldest makes room for a
 * new one; each has 5 s to ask, and as long to take its answer.
 */
void http_serve(int fd, http_page_fn page, void *cookie);

#endif
