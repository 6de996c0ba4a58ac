/* SPDX-License-Identifier: Apache-2.0 */
/* On loopback a port is anybody's who takes it first; the kernel knows whose. */
#include "socket_owner.h"

#include "socket.h"
#include <errno.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_LISTED (8 << 20) /* bytes of /proc/self/net/tcp that are looked through */

/* The two ends of a connection, as IP addresses with ports. */
typedef struct ends {
    socket_address own, peer;
} ends;

static bool ends_of(int fd, ends *e)
{
    return socket_ends(fd, &e->own, &e->peer) && (e->own.storage.ss_family == AF_INET ||
                                                  e->own.storage.ss_family == AF_INET6);
}

/* In network order; both families have it in the same place. */
static uint16_t port_of(const socket_address *a)
{
    return ((const struct sockaddr_in *)(const void *)&a->storage)->sin_port;
}

/* ------------------------------------------------------------- sock_diag */

typedef struct question {
    struct nlmsghdr head;
    struct inet_diag_req_v2 of;
} question;

/* Asks for the socket at the other end: what is its own is the peer's here. False: no such
   addresses. */
static bool socket_owner_ask_for(const ends *e, question *q)
{
    int family, peer_family;
    const uint8_t *own, *peer;
    if (!socket_ip_bytes(&e->own, &family, &own) ||
        !socket_ip_bytes(&e->peer, &peer_family, &peer) || family != peer_family)
        return false;
    *q = (question){
        .head = {.nlmsg_len = sizeof *q,
                 .nlmsg_type = SOCK_DIAG_BY_FAMILY,
                 .nlmsg_flags = NLM_F_REQUEST},
        .of = {.sdiag_family = (uint8_t)family,
               .sdiag_protocol = IPPROTO_TCP,
               .idiag_states = UINT32_MAX,
               .id = {.idiag_sport = port_of(&e->peer),
                      .idiag_dport = port_of(&e->own),
                      .idiag_cookie = {INET_DIAG_NOCOOKIE, INET_DIAG_NOCOOKIE}}}};
    size_t size = family == AF_INET ? 4 : 16;
    memcpy(q->of.id.idiag_src, peer, size);
    memcpy(q->of.id.idiag_dst, own, size);
    return true;
}

/* What is answered of a listener, or of a socket without a file, is not of who talks. */
static bool read_answer(const uint8_t *bytes, ssize_t size, const question *q,
                        uid_t *uid_out)
{
    struct nlmsghdr head;
    struct inet_diag_msg m;
    if (size < (ssize_t)NLMSG_LENGTH(sizeof m))
        return false;
    memcpy(&head, bytes, sizeof head);
    memcpy(&m, bytes + NLMSG_HDRLEN, sizeof m);
    *uid_out = m.idiag_uid;
    return head.nlmsg_type == SOCK_DIAG_BY_FAMILY && m.idiag_inode != 0 &&
           m.id.idiag_sport == q->of.id.idiag_sport &&
           m.id.idiag_dport == q->of.id.idiag_dport;
}

/* The kernel answers while it takes the question: nothing is waited for. */
static bool told_by_diag(const ends *e, uid_t *uid_out)
{
    question q;
    uint8_t answer[1024];
    const struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    if (!socket_owner_ask_for(e, &q))
        return false;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (fd < 0)
        return false;
    bool told =
        sendto(fd, &q, sizeof q, 0, (const struct sockaddr *)&kernel, sizeof kernel) ==
            (ssize_t)sizeof q &&
        read_answer(answer, recv(fd, answer, sizeof answer, MSG_DONTWAIT), &q, uid_out);
    close(fd);
    return told;
}

/* ------------------------------------------------------- /proc/self/net/tcp */

/* "0100007F:1770": an address as words of this machine, and the port. As IPv6 an IPv4 address is
   mapped. */
static bool list_text(const socket_address *a, bool as_v6, char out[48])
{
    int family;
    const uint8_t *bytes;
    uint32_t word[4] = {0, 0, htonl(0xffff), 0};
    if (!socket_ip_bytes(a, &family, &bytes) || (family == AF_INET6 && !as_v6))
        return false;
    if (family == AF_INET)
        memcpy(&word[3], bytes, 4);
    else
        memcpy(word, bytes, 16);
    unsigned port = ntohs(port_of(a));
    if (as_v6)
        snprintf(out, 48, "%08X%08X%08X%08X:%04X", word[0], word[1], word[2], word[3],
                 port);
    else
        snprintf(out, 48, "%08X:%04X", word[3], port);
    return true;
}

/* A line of the list: the socket's own address, its peer's, and seven columns on whose it is. */
static bool line_tells(const char *line, const char *local, const char *remote,
                       uid_t *uid_out)
{
    char own[48], peer[48];
    unsigned uid;
    unsigned long inode;
    if (sscanf(line, " %*u: %47s %47s %*s %*s %*s %*s %u %*s %lu", own, peer, &uid,
               &inode) != 4)
        return false;
    *uid_out = uid;
    return inode != 0 && strcmp(own, local) == 0 && strcmp(peer, remote) == 0;
}

static bool told_by_list(const ends *e, bool as_v6, uid_t *uid_out)
{
    char own[48], peer[48], line[512];
    if (!list_text(&e->own, as_v6, own) || !list_text(&e->peer, as_v6, peer))
        return false;
    FILE *list = fopen(as_v6 ? "/proc/self/net/tcp6" : "/proc/self/net/tcp", "re");
    if (!list)
        return false;
    bool told = false;
    size_t read = 0;
    while (!told && read < MOST_LISTED && fgets(line, sizeof line, list)) {
        read += strlen(line);
        told = line_tells(line, peer, own, uid_out);
    }
    (void)fclose(list);
    return told;
}

/* ------------------------------------------------------------------- whole */

/* In a user namespace all users without a name in it have the one of "nobody". */
static bool is_somebody(uid_t uid)
{
    unsigned overflow = 65534;
    unsigned long inside = 1, outside = 1, count = 0;
    FILE *f = fopen("/proc/sys/kernel/overflowuid", "re");
    if (f) {
        if (fscanf(f, "%u", &overflow) != 1)
            overflow = 65534;
        (void)fclose(f);
    }
    if (uid != overflow)
        return true;
    f = fopen("/proc/self/uid_map", "re");
    if (!f)
        return false;
    bool whole = fscanf(f, "%lu %lu %lu", &inside, &outside, &count) == 3 &&
                 inside == 0 && outside == 0 && count == UINT32_MAX;
    (void)fclose(f);
    return whole;
}

bool socket_owner(int fd, uid_t *uid_out)
{
    ends e;
    *uid_out = (uid_t)-1;
    errno = 0;
    return ends_of(fd, &e) &&
           (told_by_diag(&e, uid_out) || told_by_list(&e, false, uid_out) ||
            told_by_list(&e, true, uid_out)) &&
           is_somebody(*uid_out);
}
