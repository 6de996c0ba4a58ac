/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A server of one rank in the test's process, and a peer that speaks to it frame by frame:
 * also frames that no client would send. Everything fails the test when it fails, and after
 * 10 s.
 */
#ifndef SERVER_PEER_H
#define SERVER_PEER_H

#include "catalog.h"
#include "messages.h"
#include <fanin/server.h>

#define RUN "lora:0"

/* --------------------------------------------------------------- the server */

/** Defaults: rank 0 of 1, ephemeral port, no UCX. */
fanin_server_config server_config(void);
fanin_server *server_start(const fanin_server_config *config);
/** One packed U8 tensor of @p size bytes, at @p memory. */
fanin_tensor byte_tensor(const char *name, fanin_box *box, void *memory, uint64_t size);
void server_put(fanin_server *s, const char *publication, const char *name,
                void *memory, uint64_t size);
void server_begin(fanin_server *s);
void server_commit(fanin_server *s, uint64_t step);
void server_snapshot(fanin_server *s, uint64_t step); /**< commits a copy */
fanin_server_stats server_stats(fanin_server *s);

/* ----------------------------------------------------------------- the peer */

typedef struct peer {
    int fd;
    uint64_t request; /**< of the last one sent */
    uint8_t session[16];
    uint8_t *body; /**< of the last frame received */
    frame frame;
} peer;

/** What a begin needs and gives. */
typedef struct grant {
    uint8_t token[16];
    uint64_t step, catalog_version, epoch;
    uint8_t key_digest[16];
} grant;

peer peer_connect(fanin_server *s);      /**< TCP, no hello yet */
peer peer_connect_unix(fanin_server *s); /**< the same over the Unix socket */
peer peer_connect_unix_at(fanin_server *s,
                          const char *bind); /**< of a server bound there */
peer peer_open(fanin_server *s);             /**< TCP and hello */
peer peer_open_at(uint16_t port); /**< the same, of a server in another process */
peer peer_open_unix(fanin_server *s);
/** A data connection of @p control's session. */
peer peer_data(fanin_server *s, const peer *control);
peer peer_data_unix(fanin_server *s, const peer *control);
void peer_close(peer *p);

msg_hello_ok peer_hello(peer *p, role r, const uint8_t id[16]);
/** Sends and frees the bytes. */
void peer_send(peer *p, buffer *b);
void peer_send_raw(peer *p, const void *data, size_t size);
void peer_receive(peer *p);
/** Receives a reply to the last request, which must have this type. */
body peer_expect(peer *p, message_type type);
/** Receives an error and its words. */
msg_error peer_expect_error(peer *p, fanin_status code);
/** The server closes the connection. */
void peer_expect_closed(peer *p);
bool peer_silent(peer *p, int ms); /**< nothing arrives within @p ms */

void peer_ping(peer *p);
void peer_request_wait(peer *p, const char *publication, wire_rule rule, uint64_t step,
                       uint32_t timeout_ms);
grant peer_wait(peer *p, wire_rule rule,
                uint64_t step);             /**< of RUN, answered at once */
msg_begin_ok peer_begin(peer *p, grant *g); /**< of RUN; fills in the token */
grant peer_lease(peer *p);                  /**< wait and a granted begin */
msg_end_ok peer_end(peer *p, const grant *g, bool abandon);
void peer_request_read(peer *p, const uint8_t token[16], uint64_t bytes,
                       const read_entry *entries, uint32_t n);
/** Reads into @p to: the reply is MSG_READ_OK with all bytes. */
void peer_read(peer *p, const grant *g, const read_entry *entries, uint32_t n, void *to,
               uint64_t bytes);
void peer_request_digest(peer *p, const grant *g, uint64_t bytes, uint32_t dtype,
                         const read_entry *entries, uint32_t n);
/** The same, answered by MSG_DIGEST_OK: to @p out, one an entry. */
void peer_digest(peer *p, const grant *g, uint64_t bytes, uint32_t dtype,
                 const read_entry *entries, uint32_t n, digest *out);
/** A whole blob, page by page; the caller frees it. */
buffer peer_blob(peer *p, message_type type, const grant *g, int32_t path);
/** Key and box table of RUN. */
void peer_catalog(peer *p, const grant *g, key_table **keys, box_table **boxes);

#endif
