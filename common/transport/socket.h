/* SPDX-License-Identifier: Apache-2.0 */
/** @file TCP and Unix stream sockets: non-blocking, CLOEXEC, errors with the peer's address. */
#ifndef SOCKET_H
#define SOCKET_H

#include "array.h"
#include "clock.h"
#include "tls.h"
#include <fanin/error.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

/** A peer: resolved address and text. */
#define SOCKET_TEXT 64
typedef struct socket_address {
    struct sockaddr_storage storage;
    socklen_t length;
    char text
        [SOCKET_TEXT]; /**< "127.0.0.1:6000", "[fe80::1%eth0]:6000", "unix:0/127.0.0.1:6000" */
} socket_address;

#define SOCKET_HOST 256 /**< bytes of a host's name */
/** Splits "host:port" and "[v6]:port"; false: it has no such form. */
bool socket_split(const char *host_port, char host[SOCKET_HOST], uint16_t *port_out);
/** Addresses in numbers, and "localhost"; does not block. FANIN_ERR_ARGUMENT: it is no host:port,
    or link-local ("[fe80::1%eth0]:6000") without an interface of this host; FANIN_ERR_NOT_FOUND: a
    name, which lookup.h asks for. */
fanin_status socket_resolve(const char *host_port, socket_address *out,
                            fanin_error *error);
/** The IP address as bytes: 4 of AF_INET, 16 of AF_INET6; an IPv4 address that is mapped into IPv6
    is the IPv4 address. False: it is no IP address. */
bool socket_ip_bytes(const socket_address *a, int *family, const uint8_t **bytes);
bool socket_is_loopback(const socket_address *a);
/** Whether the address belongs to this host (loopback or one of its interfaces). */
bool socket_is_local(const socket_address *a);
bool socket_is_wildcard(const socket_address *a);
/** A wildcard address becomes the loopback address that the kernel connects to for it. */
void socket_to_connect(socket_address *a);
/** Address and port as one canonical text, "127.0.0.1:6000" or "[::1]:6000": one address has one
    text, an IPv4 address that is mapped into IPv6 that of the IPv4 address. */
void socket_listen_text(const socket_address *a, char out[SOCKET_TEXT]);
/** The abstract Unix name beside a TCP address, "\0fanin-<uid>-<socket_listen_text()>": trainers on
    one port of several loopback addresses have a name each. */
void socket_unix_address(uid_t uid, const socket_address *tcp, socket_address *out);
/** Sets the port of an IP address, and its text. */
void socket_set_port(socket_address *a, uint16_t port);

/** Listens (TCP: SO_REUSEADDR). FANIN_ERR_EXISTS: in use; FANIN_ERR_LIMIT: of port 0, no port is
    free; FANIN_ERR_ARGUMENT: no address of this host; FANIN_ERR_IO. */
fanin_status socket_listen(const socket_address *a, int backlog, int *fd_out,
                           fanin_error *error);
uint16_t socket_port(int fd); /**< local TCP port, 0: none */
/** accept4: fd, -1 with errno. *peer_out: text and storage. */
int socket_accept(int listener, socket_address *peer_out);
/** Starts a non-blocking connect; finished when writable. FANIN_ERR_UNREACHABLE, IO. */
fanin_status socket_connect_start(const socket_address *a, int *fd_out,
                                  fanin_error *error);
/** 0: connected; else errno of the failed connect (SO_ERROR). */
int socket_connect_result(int fd);
/** TCP_NODELAY, keepalive 5/2/3 s, TCP_USER_TIMEOUT 10 s; nothing on Unix sockets. */
void socket_tune(int fd);
/** Uid and pid of a Unix socket's peer; false on TCP. */
bool socket_peer_credentials(int fd, uid_t *uid_out, pid_t *pid_out);
/** The addresses of both ends, without texts; false: it is not connected. */
bool socket_ends(int fd, socket_address *own_out, socket_address *peer_out);
/** Both ends are on this host: a Unix socket, or TCP to a loopback address or to the address that
    it comes from. */
bool socket_stays_here(int fd);

/* ---- networks of an allow-list ---- */
typedef struct network {
    int family;
    uint8_t address[16];
    unsigned prefix;
} network;
/** "10.0.0.0/8,fd00::/8". *out is malloc'ed. FANIN_ERR_ARGUMENT names the bad entry. */
fanin_status networks_parse(const char *text, network **out, size_t *count_out,
                            fanin_error *error);
bool networks_contain(const network *networks, size_t count, const socket_address *a);

/* -------------------------------------------------------------------- output */

/* Bytes on their way into a non-blocking socket. */

typedef struct outgoing {
    buffer bytes;
    size_t sent; /**< of them */
} outgoing;

bool outgoing_is_empty(const outgoing *o);
size_t outgoing_left(const outgoing *o); /**< bytes that were not sent yet */
void outgoing_clear(outgoing *o); /**< forgets what was not sent, keeps the memory */
void outgoing_free(outgoing *o);

/** Sends what the socket takes now, by @p t unless that is NULL. 0, or the errno of a broken
    connection. */
int outgoing_flush(outgoing *o, tls *t, int fd);
/** So many were sent by somebody else. */
void outgoing_sent(outgoing *o, size_t bytes);
/** Gives memory back: what sent bytes take if they are most of it, of an empty one all that is more
    than @p keep bytes. */
void outgoing_trim(outgoing *o, size_t keep);

#endif
