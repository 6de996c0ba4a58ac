/* SPDX-License-Identifier: Apache-2.0 */
#include "neighbour.h"
#include "error_set.h"
#include "load_lock.h"
#include "socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A uid tells users apart, and containers do not: root of each is root. Namespaces do. */

/* ----------------------------------------------------------------------- networks */

static unsigned address_bits(int family)
{
    return family == AF_INET ? 32 : 128;
}

/* Bits of @p address after the first @p prefix ones are all zero. */
static bool rest_is_zero(const uint8_t *address, unsigned prefix, unsigned bits)
{
    for (unsigned i = prefix; i < bits; i++)
        if (address[i / 8] & (0x80u >> (i % 8)))
            return false;
    return true;
}

/* One "address/prefix" or a single address; @p entry is a string of its own. */
static bool parse_one(char *entry, network *out)
{
    memset(out, 0, sizeof *out);
    char *slash = strchr(entry, '/');
    if (slash)
        *slash = '\0';
    if (inet_pton(AF_INET, entry, out->address) == 1)
        out->family = AF_INET;
    else if (inet_pton(AF_INET6, entry, out->address) == 1)
        out->family = AF_INET6;
    unsigned bits = address_bits(out->family);
    out->prefix = bits;
    bool good = out->family != 0;
    if (good && slash) {
        const char *digits = slash + 1;
        size_t length = strlen(digits);
        good = length >= 1 && length <= 3 && strspn(digits, "0123456789") == length;
        out->prefix = good ? (unsigned)strtoul(digits, NULL, 10) : 0;
        good = good && out->prefix <= bits;
    }
    if (slash)
        *slash = '/';
    /* "10.1.2.3/8" is more often a slip than a wish. */
    return good && rest_is_zero(out->address, out->prefix, bits);
}

fanin_status networks_parse(const char *text, network **out, size_t *count_out,
                            fanin_error *error)
{
    *out = NULL;
    *count_out = 0;
    size_t most = 1;
    for (const char *c = text; *c; c++)
        most += *c == ',';
    network *list = calloc(most, sizeof *list);
    char *copy = strdup(text);
    if (!list || !copy) {
        free(list);
        free(copy);
        return error_set_memory(error);
    }
    fanin_status status = FANIN_OK;
    size_t count = 0;
    for (char *rest = copy, *entry;
         status == FANIN_OK && (entry = strsep(&rest, ","));) {
        entry += strspn(entry, " ");
        entry[strcspn(entry, " ")] = '\0';
        if (parse_one(entry, &list[count])) {
            count++;
            continue;
        }
        error_place place = {
            .remedy = "write networks as \"10.0.0.0/8,fd00::/8\", bits after the "
                      "prefix zero"};
        status = error_set(error, FANIN_ERR_ARGUMENT, &place,
                           "\"%s\" is no network of an allow-list", entry);
    }
    free(copy);
    if (status != FANIN_OK) {
        free(list);
        return status;
    }
    *out = list;
    *count_out = count;
    return FANIN_OK;
}

static bool prefix_equal(const uint8_t *a, const uint8_t *b, unsigned bits)
{
    if (memcmp(a, b, bits / 8) != 0)
        return false;
    uint8_t mask = (uint8_t)(0xff00u >> (bits % 8));
    return bits % 8 == 0 || ((a[bits / 8] ^ b[bits / 8]) & mask) == 0;
}

bool networks_contain(const network *networks, size_t count, const socket_address *a)
{
    int family;
    const uint8_t *bytes;
    if (!socket_ip_bytes(a, &family, &bytes))
        return false;
    for (size_t i = 0; i < count; i++)
        if (networks[i].family == family &&
            prefix_equal(networks[i].address, bytes, networks[i].prefix))
            return true;
    return false;
}

/* ---------------------------------------------------------------------- neighbour */

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; the headers may be older than the kernel */
#endif

/* "pid:[4026531836]"; false: it cannot be read. Takes no descriptor. */
static bool read_link(const char *path, char out[64])
{
    ssize_t length = readlinkat(AT_FDCWD, path, out, 63);
    out[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* Whether numbers in /proc are this process's own: it may have been mounted in a pid namespace
   above. */
static bool proc_is_ours(void)
{
    char self[64];
    return read_link("/proc/self", self) && atol(self) == (long)getpid();
}

/* The namespaces of the process that has this number now against those of this process. */
static unsigned compare_spaces(pid_t pid)
{
    static const struct {
        const char *name;
        unsigned differs;
    } spaces[] = {
        {"user", NEIGHBOUR_USER_SPACE},
        {"pid", NEIGHBOUR_PID_SPACE},
        {"ipc", NEIGHBOUR_IPC_SPACE},
        {"mnt", NEIGHBOUR_MOUNT_SPACE},
    };
    unsigned differs = 0;
    for (size_t i = 0; i < sizeof spaces / sizeof spaces[0]; i++) {
        char path[48], there[64], here[64];
        snprintf(path, sizeof path, "/proc/self/ns/%s", spaces[i].name);
        if (!read_link(path, here)) {
            if (errno == ENOENT) /* a kernel that has one namespace of this kind */
                continue;
            return NEIGHBOUR_UNSEEN;
        }
        snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)pid, spaces[i].name);
        if (!read_link(path, there))
            return NEIGHBOUR_UNSEEN;
        if (strcmp(there, here) != 0)
            differs |= spaces[i].differs;
    }
    return differs;
}

/* -------------------------------------------------------------- who it was */

/* A descriptor that is given back when there is no other for a moment: with none this process would
   take its own user for a stranger. */
static load_lock reserve_lock = LOAD_LOCK_INIT;
static bool is_wanted;
static int reserve = -1;

/* Another thread may have been faster the last time. Lock held. */
static void fill_reserve(void)
{
    if (is_wanted && reserve < 0)
        reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* Lock held. */
static void spend_reserve(void)
{
    close(reserve);
    reserve = -1;
}

void neighbour_prepare(void)
{
    if (!load_lock_take(&reserve_lock))
        return;
    is_wanted = true;
    fill_reserve();
    load_lock_give(&reserve_lock);
}

/* A descriptor of the peer's process itself, or -1 and what that makes of the peer. */
static int open_process(int fd, unsigned *differs)
{
    int process = -1;
    socklen_t size = sizeof process;
    *differs = 0;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &process, &size) == 0)
        return process;
    if (errno == EMFILE)
        *differs = NEIGHBOUR_NO_DESCRIPTOR;
    else if (errno == ENFILE)
        *differs = NEIGHBOUR_NO_FILE;
    else if (errno != ENOPROTOOPT)
        *differs = NEIGHBOUR_UNSEEN;
    return -1;
}

/* 0: it is alive, so that its number was its own all the time. A kernel that has no such
   descriptors takes every number for its first owner's. */
static unsigned look_for_life(int fd)
{
    unsigned differs;
    bool held = load_lock_take(&reserve_lock);
    if (held)
        fill_reserve();
    int process = open_process(fd, &differs);
    if (neighbour_lacks(differs) && held && reserve >= 0) {
        spend_reserve();
        process = open_process(fd, &differs);
    }
    if (process >= 0) {
        if (poll(&(struct pollfd){.fd = process, .events = POLLIN}, 1, 0) != 0)
            differs = NEIGHBOUR_UNSEEN;
        close(process);
    }
    if (held) {
        fill_reserve();
        load_lock_give(&reserve_lock);
    }
    return differs;
}

unsigned neighbour_differs(int fd)
{
    uid_t uid;
    pid_t pid;
    if (!socket_peer_credentials(fd, &uid, &pid) || uid != geteuid())
        return NEIGHBOUR_UID;
    /* 0: its pid namespace is neither this one nor below. */
    if (pid <= 0 || !proc_is_ours())
        return NEIGHBOUR_UNSEEN;
    unsigned differs = compare_spaces(pid);
    unsigned lifeless = look_for_life(fd);
    return lifeless ? lifeless : differs;
}

int neighbour_lacks(unsigned differs)
{
    if (differs & NEIGHBOUR_NO_DESCRIPTOR)
        return EMFILE;
    return differs & NEIGHBOUR_NO_FILE ? ENFILE : 0;
}

const char *neighbour_why(unsigned differs)
{
    static const struct {
        unsigned differs;
        const char *why;
    } reasons[] = {
        {NEIGHBOUR_UID, "the peer's process is another user's"},
        {NEIGHBOUR_UNSEEN, "the peer's process is in a pid namespace that cannot be "
                           "seen from here, has ended, or hides its namespaces"},
        {NEIGHBOUR_USER_SPACE, "the peer's process is in another user namespace"},
        {NEIGHBOUR_PID_SPACE, "the peer's process is in another pid namespace"},
        {NEIGHBOUR_IPC_SPACE, "the peer's process is in another ipc namespace"},
        {NEIGHBOUR_MOUNT_SPACE, "the peer's process is in another mount namespace"},
        {NEIGHBOUR_NO_DESCRIPTOR,
         "the peer's process cannot be seen without one more descriptor"},
        {NEIGHBOUR_NO_FILE,
         "the peer's process cannot be seen without one more open file"},
    };
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
        if (differs & reasons[i].differs)
            return reasons[i].why;
    }
    return "";
}

/* On loopback a port is anybody's who takes it first; the kernel knows whose. */

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
