/* SPDX-License-Identifier: Apache-2.0 */
#include "socket.h"
#include "error_set.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* --------------------------------------------------------- sockets and forks */

/* A child that is forked without exec (a data loader) has copies of all descriptors: they would
   keep a killed trainer's port taken and its connections open, silent, for as long as the child
   lives. So every socket of the library is known here, and a child's copies are replaced by
   /dev/null as soon as it is there; the numbers stay taken, so that nothing else is closed by
   mistake. Children made by clone() without pthread_atfork()'s handlers keep theirs. */

/* Held while a socket is made and noted, and across every fork. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
/* By descriptor: the inode of the socket that was made under this number last, 0: none. A number
   that is closed and used again for something else has another inode now. */
static ino_t *inodes;
static int capacity;

static void before(void)
{
    pthread_mutex_lock(&lock);
}

static void socket_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static bool is_still_ours(int fd)
{
    struct stat info;
    return inodes[fd] != 0 && fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) &&
           info.st_ino == inodes[fd];
}

/* Calls nothing but what is safe between fork and exec. */
static void socket_fork_in_child(void)
{
    int nothing = -1;
    for (int fd = 0; fd < capacity; fd++) {
        if (!is_still_ours(fd))
            continue;
        if (nothing < 0)
            nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (nothing < 0 || dup3(nothing, fd, O_CLOEXEC) < 0)
            close(fd);
        inodes[fd] = 0;
    }
    if (nothing >= 0)
        close(nothing);
    pthread_mutex_unlock(&lock);
}

static void socket_fork_install(void)
{
    (void)pthread_atfork(before, socket_fork_in_parent, socket_fork_in_child);
}

static bool socket_fork_make_room(int fd)
{
    if (fd < capacity)
        return true;
    int wanted = fd < 32 ? 64 : 2 * (fd + 1);
    ino_t *grown = realloc(inodes, (size_t)wanted * sizeof *grown);
    if (!grown)
        return false;
    memset(grown + capacity, 0, (size_t)(wanted - capacity) * sizeof *grown);
    inodes = grown;
    capacity = wanted;
    return true;
}

static int socket_fork_note(int fd)
{
    struct stat info;
    if (fd < 0)
        return fd;
    if (fstat(fd, &info) == 0 && socket_fork_make_room(fd)) {
        inodes[fd] = info.st_ino;
        return fd;
    }
    close(fd);
    errno = ENOMEM;
    return -1;
}

/* socket() and accept4(), both non-blocking and close-on-exec; -1 with errno. */
static int socket_make(int family)
{
    pthread_once(&once, socket_fork_install);
    pthread_mutex_lock(&lock);
    int fd =
        socket_fork_note(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int code = errno;
    pthread_mutex_unlock(&lock);
    errno = code;
    return fd;
}

static int socket_take(int listener, struct sockaddr *peer, socklen_t *length)
{
    pthread_mutex_lock(&lock);
    int fd =
        socket_fork_note(accept4(listener, peer, length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    int code = errno;
    pthread_mutex_unlock(&lock);
    errno = code;
    return fd;
}

/* ------------------------------------------------------------- addresses */

bool socket_ip_bytes(const socket_address *a, int *family, const uint8_t **bytes)
{
    if (a->storage.ss_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)&a->storage;
        *family = AF_INET;
        *bytes = (const uint8_t *)&in->sin_addr;
        return true;
    }
    if (a->storage.ss_family != AF_INET6)
        return false;
    const struct sockaddr_in6 *in6 = (const void *)&a->storage;
    bool mapped = IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr);
    *family = mapped ? AF_INET : AF_INET6;
    *bytes = in6->sin6_addr.s6_addr + (mapped ? 12 : 0);
    return true;
}

static unsigned address_port(const socket_address *a)
{
    if (a->storage.ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)(const void *)&a->storage)->sin_port);
    if (a->storage.ss_family == AF_INET6)
        return ntohs(
            ((const struct sockaddr_in6 *)(const void *)&a->storage)->sin6_port);
    return 0;
}

/* "%eth0": a link-local address is one of an interface; the interface's number if it has no name
   any more. */
static void write_scope(const socket_address *a, char out[IF_NAMESIZE + 1])
{
    const struct sockaddr_in6 *in6 = (const void *)&a->storage;
    out[0] = '\0';
    if (a->storage.ss_family != AF_INET6 || in6->sin6_scope_id == 0)
        return;
    out[0] = '%';
    if (!if_indextoname(in6->sin6_scope_id, out + 1))
        snprintf(out + 1, IF_NAMESIZE, "%u", (unsigned)in6->sin6_scope_id);
}

static void socket_write_text(socket_address *a)
{
    char host[INET6_ADDRSTRLEN] = "?", scope[IF_NAMESIZE + 1];
    int family = a->storage.ss_family;
    if (family != AF_INET && family != AF_INET6) {
        snprintf(a->text, sizeof a->text, "unix");
        return;
    }
    const struct sockaddr_in *in = (const void *)&a->storage;
    const struct sockaddr_in6 *in6 = (const void *)&a->storage;
    bool is_v4 = family == AF_INET;
    inet_ntop(family, is_v4 ? (const void *)&in->sin_addr : &in6->sin6_addr, host,
              sizeof host);
    write_scope(a, scope);
    snprintf(a->text, sizeof a->text, is_v4 ? "%.45s%s:%u" : "[%.39s%s]:%u", host,
             scope, address_port(a));
}

void socket_listen_text(const socket_address *a, char out[SOCKET_TEXT])
{
    socket_address plain = *a;
    int family;
    const uint8_t *bytes;
    if (socket_ip_bytes(a, &family, &bytes) && family != a->storage.ss_family) {
        const struct sockaddr_in6 *in6 = (const void *)&a->storage;
        struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = in6->sin6_port};
        memcpy(&in.sin_addr, bytes, sizeof in.sin_addr);
        memcpy(&plain.storage, &in, sizeof in);
    }
    socket_write_text(&plain);
    memcpy(out, plain.text, SOCKET_TEXT);
}

bool socket_split(const char *host_port, char host[SOCKET_HOST], uint16_t *port_out)
{
    const char *start = host_port, *end, *port;
    if (*host_port == '[') {
        start = host_port + 1;
        end = strchr(start, ']');
        if (!end || end[1] != ':')
            return false;
        port = end + 2;
    } else {
        end = strrchr(host_port, ':');
        if (!end || memchr(host_port, ':', (size_t)(end - host_port)))
            return false;
        port = end + 1;
    }
    size_t length = (size_t)(end - start);
    if (length == 0 || length >= SOCKET_HOST || strlen(port) > 5 ||
        strspn(port, "0123456789") != strlen(port) || *port == '\0' ||
        strtoul(port, NULL, 10) > UINT16_MAX)
        return false;
    memcpy(host, start, length);
    host[length] = '\0';
    *port_out = (uint16_t)strtoul(port, NULL, 10);
    return true;
}

static bool is_link_local(const socket_address *a)
{
    const struct sockaddr_in6 *in6 = (const void *)&a->storage;
    return a->storage.ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr);
}

/* Two interfaces may be on links of which each has the same link-local address. */
static bool same_interface(const socket_address *a, const socket_address *b)
{
    const struct sockaddr_in6 *x = (const void *)&a->storage,
                              *y = (const void *)&b->storage;
    return !is_link_local(a) || x->sin6_scope_id == y->sin6_scope_id;
}

fanin_status socket_resolve(const char *host_port, socket_address *out,
                            fanin_error *error)
{
    error_place place = {.phase = "connect", .address = host_port};
    char host[SOCKET_HOST];
    uint16_t port;
    if (!host_port || !socket_split(host_port, host, &port))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "\"%s\" is no address of the form host:port or [v6]:port",
                         host_port ? host_port : "");
    /* "localhost" is not looked up: a resolver may be slow or say something else. */
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST};
    struct addrinfo *found = NULL;
    int code = getaddrinfo(name, NULL, &hints, &found);
    const char *scope = strchr(host, '%');
    if (code != 0 || !found || found->ai_addrlen > sizeof out->storage) {
        if (found)
            freeaddrinfo(found);
        place.remedy = "name an interface that `ip link` shows on this host";
        if (scope)
            return error_set(error, FANIN_ERR_ARGUMENT, &place,
                             "%s is no address of an interface of this host", host);
        place.remedy = NULL;
        return error_set(error, FANIN_ERR_NOT_FOUND, &place,
                         "%s is a name, not an address in numbers", host);
    }
    memset(out, 0, sizeof *out);
    memcpy(&out->storage, found->ai_addr, found->ai_addrlen);
    out->length = found->ai_addrlen;
    freeaddrinfo(found);
    socket_set_port(out, port);
    if (is_link_local(out) &&
        ((const struct sockaddr_in6 *)&out->storage)->sin6_scope_id == 0) {
        place.remedy = "name the interface of this host that leads there: fe80::1%eth0";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "%s is link-local and names no interface", host);
    }
    return FANIN_OK;
}

bool socket_is_loopback(const socket_address *a)
{
    int family;
    const uint8_t *bytes;
    if (a->storage.ss_family == AF_UNIX)
        return true;
    if (!socket_ip_bytes(a, &family, &bytes))
        return false;
    if (family == AF_INET)
        return bytes[0] == 127;
    return memcmp(bytes, &in6addr_loopback, 16) == 0;
}

bool socket_is_wildcard(const socket_address *a)
{
    static const uint8_t zero[16];
    int family;
    const uint8_t *bytes;
    return socket_ip_bytes(a, &family, &bytes) &&
           memcmp(bytes, zero, family == AF_INET ? 4 : 16) == 0;
}

void socket_to_connect(socket_address *a)
{
    int family;
    const uint8_t *bytes;
    if (!socket_is_wildcard(a) || !socket_ip_bytes(a, &family, &bytes))
        return;
    uint8_t *own = (uint8_t *)&a->storage + (bytes - (const uint8_t *)&a->storage);
    if (family == AF_INET)
        own[0] = 127;
    own[family == AF_INET ? 3 : 15] = 1;
    socket_write_text(a);
}

bool socket_is_local(const socket_address *a)
{
    if (socket_is_loopback(a))
        return true;
    int family;
    const uint8_t *bytes;
    struct ifaddrs *list;
    if (!socket_ip_bytes(a, &family, &bytes) || getifaddrs(&list) != 0)
        return false;
    bool local = false;
    for (struct ifaddrs *i = list; i && !local; i = i->ifa_next) {
        socket_address own = {0};
        if (!i->ifa_addr)
            continue;
        if (i->ifa_addr->sa_family == AF_INET)
            own.length = sizeof(struct sockaddr_in);
        else if (i->ifa_addr->sa_family == AF_INET6)
            own.length = sizeof(struct sockaddr_in6);
        else
            continue;
        memcpy(&own.storage, i->ifa_addr, own.length);
        int own_family;
        const uint8_t *own_bytes;
        local = socket_ip_bytes(&own, &own_family, &own_bytes) &&
                own_family == family &&
                memcmp(own_bytes, bytes, family == AF_INET ? 4 : 16) == 0 &&
                same_interface(a, &own);
    }
    freeifaddrs(list);
    return local;
}

void socket_unix_address(uid_t uid, const socket_address *tcp, socket_address *out)
{
    char where[SOCKET_TEXT];
    socket_listen_text(tcp, where);
    memset(out, 0, sizeof *out);
    struct sockaddr_un *un = (void *)&out->storage;
    un->sun_family = AF_UNIX;
    /* An abstract name begins with a NUL and is as long as the length says. */
    int length = snprintf(un->sun_path + 1, sizeof un->sun_path - 1, "fanin-%u-%s",
                          (unsigned)uid, where);
    out->length =
        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    snprintf(out->text, sizeof out->text, "unix:%u/%.48s", (unsigned)uid, where);
}

/* --------------------------------------------------------------- sockets */

void socket_set_port(socket_address *a, uint16_t port)
{
    if (a->storage.ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)&a->storage)->sin_port = htons(port);
    else if (a->storage.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)(void *)&a->storage)->sin6_port = htons(port);
    socket_write_text(a);
}

static fanin_status is_in_use(const socket_address *a, fanin_error *error)
{
    char remedy[200];
    error_place place = {.phase = "listen", .address = a->text, .remedy = remedy};
    unsigned port = address_port(a);
    if (a->storage.ss_family == AF_UNIX) {
        place.remedy = "see who has it: ss -lxp";
        return error_set_errno(error, FANIN_ERR_EXISTS, EADDRINUSE, &place,
                               "the name %s is in use", a->text);
    }
    if (port == 0) {
        place.remedy =
            "give a base_port, or widen net.ipv4.ip_local_port_range; `ss -tan` "
            "shows who has them";
        return error_set_errno(
            error, FANIN_ERR_LIMIT, EADDRINUSE, &place,
            "no port of net.ipv4.ip_local_port_range is free, cannot listen on %s",
            a->text);
    }
    snprintf(remedy, sizeof remedy,
             "choose another base_port, or see who has it: ss -ltnp 'sport = :%u'",
             port);
    return error_set_errno(error, FANIN_ERR_EXISTS, EADDRINUSE, &place,
                           "port %u is in use, cannot listen on %s", port, a->text);
}

static fanin_status listen_failed(const socket_address *a, int code, fanin_error *error)
{
    error_place place = {.phase = "listen", .address = a->text};
    if (code == EADDRINUSE)
        return is_in_use(a, error);
    if (code == EADDRNOTAVAIL) {
        place.remedy = "bind to an address that `ip address` shows";
        return error_set_errno(error, FANIN_ERR_ARGUMENT, code, &place,
                               "no interface of this host has the address %s", a->text);
    }
    place.remedy =
        code == EACCES ? "ports below 1024 need a privilege: choose another" : NULL;
    return error_set_errno(error, FANIN_ERR_IO, code, &place, "cannot listen on %s",
                           a->text);
}

fanin_status socket_listen(const socket_address *a, int backlog, int *fd_out,
                           fanin_error *error)
{
    int family = a->storage.ss_family, one = 1;
    *fd_out = -1;
    int fd = socket_make(family);
    if (fd < 0)
        return listen_failed(a, errno, error);
    /* Only what was asked for: an IPv6 address never catches IPv4 as well. */
    if ((family == AF_INET6 &&
         setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one) != 0) ||
        (family != AF_UNIX &&
         setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0) ||
        bind(fd, (const struct sockaddr *)&a->storage, a->length) != 0 ||
        listen(fd, backlog) != 0) {
        int code = errno;
        close(fd);
        return listen_failed(a, code, error);
    }
    *fd_out = fd;
    return FANIN_OK;
}

uint16_t socket_port(int fd)
{
    socket_address a = {.length = sizeof a.storage};
    if (getsockname(fd, (struct sockaddr *)&a.storage, &a.length) != 0)
        return 0;
    return (uint16_t)address_port(&a);
}

int socket_accept(int listener, socket_address *peer_out)
{
    memset(peer_out, 0, sizeof *peer_out);
    peer_out->length = sizeof peer_out->storage;
    int fd =
        socket_take(listener, (struct sockaddr *)&peer_out->storage, &peer_out->length);
    if (fd >= 0)
        socket_write_text(peer_out);
    return fd;
}

fanin_status socket_connect_start(const socket_address *a, int *fd_out,
                                  fanin_error *error)
{
    error_place place = {.phase = "connect", .address = a->text};
    *fd_out = -1;
    int fd = socket_make(a->storage.ss_family);
    if (fd < 0)
        return error_set_errno(error, FANIN_ERR_IO, errno, &place,
                               "cannot make a socket for %s", a->text);
    socket_tune(fd);
    if (connect(fd, (const struct sockaddr *)&a->storage, a->length) != 0 &&
        errno != EINPROGRESS) {
        int code = errno;
        close(fd);
        return error_set_errno(error, FANIN_ERR_UNREACHABLE, code, &place,
                               "cannot connect to %s", a->text);
    }
    *fd_out = fd;
    return FANIN_OK;
}

int socket_connect_result(int fd)
{
    int code = 0;
    socklen_t size = sizeof code;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &size) != 0)
        return errno;
    return code;
}

void socket_tune(int fd)
{
    int family = 0;
    socklen_t size = sizeof family;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 || family == AF_UNIX)
        return;
    int one = 1, idle = 5, interval = 2, probes = 3;
    unsigned unacknowledged_ms = 10000;
    /* Each only makes a dead peer be noticed sooner or a small message leave at once. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms,
                     sizeof unacknowledged_ms);
}

bool socket_peer_credentials(int fd, uid_t *uid_out, pid_t *pid_out)
{
    int family = 0;
    socklen_t size = sizeof family;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) != 0 || family != AF_UNIX)
        return false;
    struct ucred peer;
    size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return false;
    if (uid_out)
        *uid_out = peer.uid;
    if (pid_out)
        *pid_out = peer.pid;
    return true;
}

bool socket_ends(int fd, socket_address *own_out, socket_address *peer_out)
{
    *own_out = *peer_out = (socket_address){.length = sizeof own_out->storage};
    return getsockname(fd, (struct sockaddr *)&own_out->storage, &own_out->length) ==
               0 &&
           getpeername(fd, (struct sockaddr *)&peer_out->storage, &peer_out->length) ==
               0;
}

bool socket_stays_here(int fd)
{
    socket_address here, there;
    if (!socket_ends(fd, &here, &there))
        return false;
    if (socket_is_loopback(&there))
        return true;
    int of_here, of_there;
    const uint8_t *from, *to;
    return socket_ip_bytes(&here, &of_here, &from) &&
           socket_ip_bytes(&there, &of_there, &to) && of_here == of_there &&
           memcmp(from, to, of_here == AF_INET ? 4 : 16) == 0;
}

/* -------------------------------------------------------------------- output */

bool outgoing_is_empty(const outgoing *o)
{
    return o->sent == o->bytes.size;
}

size_t outgoing_left(const outgoing *o)
{
    return o->bytes.size - o->sent;
}

void outgoing_clear(outgoing *o)
{
    buffer_clear(&o->bytes);
    o->sent = 0;
}

void outgoing_free(outgoing *o)
{
    buffer_free(&o->bytes);
    o->sent = 0;
}

int outgoing_flush(outgoing *o, tls *t, int fd)
{
    while (!outgoing_is_empty(o)) {
        const struct iovec all = {o->bytes.data + o->sent, outgoing_left(o)};
        ssize_t n = tls_send(t, fd, &all, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0)
            return errno;
        outgoing_sent(o, (size_t)n);
    }
    return tls_flush(t);
}

void outgoing_sent(outgoing *o, size_t bytes)
{
    o->sent += bytes;
    if (o->sent == o->bytes.size)
        o->sent = o->bytes.size = 0;
}

void outgoing_trim(outgoing *o, size_t keep)
{
    size_t left = outgoing_left(o);
    if (left == 0 && o->bytes.capacity > keep) {
        free(o->bytes.data);
        o->bytes = (buffer){.sealed = o->bytes.sealed, .failed = o->bytes.failed};
        o->sent = 0;
    } else if (o->sent >= keep && o->sent >= left) {
        memmove(o->bytes.data, o->bytes.data + o->sent, left);
        o->bytes.size = left;
        o->sent = 0;
    }
}
