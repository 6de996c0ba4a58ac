/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A server of one rank in the test's process, and a peer that speaks to it frame by frame:
 * also frames that no client would send. Everything fails the test when it fails, and after
 * 10 s. A test leaves its peers and servers open: SERVER_TEST() ends them. Thread: any.
 */
#ifndef SERVER_PEER_H
#define SERVER_PEER_H

#include "catalog.h"
#include "messages.h"
#include "patch.h"
#include <fanin/server.h>

#define RUN "lora:0"

/* --------------------------------------------------------------- the server */

/** A test whose peers and servers, those that it has left open, are ended behind it. */
#define SERVER_TEST(name) TEST_WITH(name, NULL, server_tear_down)
int server_tear_down(void **state);
void server_close_peers(void); /**< all that are open */

/** Defaults: rank 0 of 1, ephemeral port, no UCX, log_catch() as log. */
fanin_server_config server_config(void);
fanin_server *server_start(const fanin_server_config *config);
fanin_server *server_start_lease(uint32_t lease_ms);
/** server_start() and RUN's tensor "a" of @p size bytes at step 1. */
fanin_server *server_publish(const fanin_server_config *config, void *memory,
                             uint64_t size);
/** fanin_server_destroy() of one that is needed no longer before the test's end. */
void server_stop(fanin_server **s, uint32_t drain_ms);
/** One packed U8 tensor of @p size bytes, at @p memory. */
fanin_tensor byte_tensor(const char *name, fanin_box *box, void *memory, uint64_t size);
void server_put(fanin_server *s, const char *publication, const char *name,
                void *memory, uint64_t size);
void server_begin(fanin_server *s);
void server_commit(fanin_server *s, uint64_t step);
void server_snapshot(fanin_server *s, uint64_t step); /**< commits a copy */
fanin_server_stats server_stats(fanin_server *s);
/** Nothing is left of sessions, which have all been closed. */
void server_expect_idle(fanin_server *s);
/** fanin_server_begin_update() of RUN, for call_start(). */
fanin_status server_begin_run(void *server);

/* ----------------------------------------------------------------- the peer */

typedef struct peer {
    int fd;
    uint64_t request; /**< of the last one sent */
    uint8_t session[16];
    uint8_t *body; /**< of the last frame received, until the next or peer_close() */
    frame frame;
} peer;

/** What a begin needs and gives. */
typedef struct grant {
    uint8_t token[16];
    uint64_t step, catalog_version, epoch;
    uint8_t key_digest[16];
    uint64_t digest_bytes; /**< as of wait_ok */
} grant;

peer peer_connect(fanin_server *s);      /**< TCP, no hello yet */
peer peer_of(int fd);                    /**< of a connection that somebody made */
peer peer_connect_unix(fanin_server *s); /**< the same over the Unix socket */
peer peer_connect_unix_at(fanin_server *s,
                          const char *bind); /**< of a server bound there */
peer peer_open(fanin_server *s);             /**< TCP and hello */
peer peer_open_at(uint16_t port); /**< the same, of a server in another process */
peer peer_open_unix(fanin_server *s);
/** A session over TCP that has these features and watches RUN. */
peer peer_watch(fanin_server *s, uint64_t features);
/** A data connection of @p control's session. */
peer peer_data(fanin_server *s, const peer *control);
peer peer_data_unix(fanin_server *s, const peer *control);
void peer_close(peer *p);

msg_hello_ok peer_hello(peer *p, role r, const uint8_t id[16]);
/** Of version 1, with what @p m says otherwise. */
msg_hello_ok peer_hello_with(peer *p, msg_hello m);
void peer_request_hello(peer *p, const msg_hello *m);
/** Sends and frees the bytes. */
void peer_send(peer *p, buffer *b);
void peer_send_raw(peer *p, const void *data, size_t size);
/** False: the connection ended before. */
bool peer_receive_raw(peer *p, void *to, size_t size);
void peer_receive(peer *p);
/** Receives a reply to the last request, which must have this type. */
body peer_expect(peer *p, message_type type);
/** Receives an error and its words. */
msg_error peer_expect_error(peer *p, fanin_status code);
/** The server closes the connection. */
void peer_expect_closed(peer *p);
bool peer_silent(peer *p, int ms); /**< nothing arrives within @p ms */

void peer_ping(peer *p);
/** Pings @p p until the server's counter at that offset of its statistics is @p value. */
void peer_await_count(peer *p, fanin_server *s, size_t counter, uint64_t value);
/** Takes events until RUN is in that state. */
void peer_await(peer *watcher, wire_state state);
msg_event peer_event(peer *watcher); /**< the next one */
msg_list_entry peer_entry(peer *p);  /**< of RUN, which must be there */
wire_state peer_state(peer *p);
void peer_request_wait(peer *p, const char *publication, wire_rule rule, uint64_t step,
                       uint32_t timeout_ms);
grant peer_wait(peer *p, wire_rule rule,
                uint64_t step); /**< of RUN, answered at once */
grant peer_newest(peer *p);     /**< the same by WIRE_RULE_NEWEST */
/** A wait that asks for patches too, and its answer; false: that says nothing of them. */
void peer_request_patches(peer *p, wire_rule rule, uint64_t step);
bool peer_patches(peer *p, patch_offers *out);
void peer_request_begin(peer *p, const grant *g);
msg_begin_ok peer_begin(peer *p, grant *g); /**< of RUN; fills in the token */
grant peer_lease(peer *p);                  /**< wait and a granted begin */
void peer_request_end(peer *p, const grant *g, bool abandon);
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
void peer_request_path(peer *p, wire_path path);
void peer_request_blob(peer *p, message_type type, const msg_blob_request *m);
/** The regions of RUN for that path. */
void peer_request_regions(peer *p, const grant *g, wire_path path);
/** A whole blob, page by page; the caller frees it. */
buffer peer_blob(peer *p, message_type type, const grant *g, int32_t path);
region_table *peer_regions(peer *p, const grant *g, wire_path path);
/** Key and box table of RUN. */
void peer_catalog(peer *p, const grant *g, key_table **keys, box_table **boxes);
uint32_t peer_count_keys(peer *p, const grant *g);

/* ---------------------------------------------------------------- the puller */

/** A control and a data connection of one session, and its lease. */
typedef struct puller {
    fanin_server *server;
    peer control, data;
    grant grant;
} puller;

puller puller_open(fanin_server *s);      /**< over TCP, without a lease */
puller puller_open_unix(fanin_server *s); /**< the same over the Unix socket */
/** Opens one by @p open, with a lease, of a server that has put and committed these. */
puller puller_serve(puller (*open)(fanin_server *), const fanin_tensor *t,
                    size_t count);
/** Waits for the newest step and takes a lease of it. */
msg_begin_ok puller_begin(puller *r);
/** Whole box @p box is @p size bytes of @p value. */
void puller_expect(puller *r, uint64_t box, uint8_t value, size_t size);
/** @p t's one box, whole and in odd pieces, is @p bytes of @p want. */
void puller_expect_box(puller *r, const uint8_t *want, size_t bytes);
void puller_end(puller *r); /**< which must be good */
void puller_close(puller *r);

#endif
