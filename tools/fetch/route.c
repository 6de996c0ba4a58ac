/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/route.h"
#include "fetch/failure.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The local end of a socket that is connected there. */
static bool find_local(const struct addrinfo *there, char out[ROUTE_ADDRESS])
{
    struct sockaddr_storage own;
    socklen_t size = sizeof own;
    int probe = socket(there->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool good = probe >= 0 && connect(probe, there->ai_addr, there->ai_addrlen) == 0 &&
                getsockname(probe, (struct sockaddr *)&own, &size) == 0 &&
                getnameinfo((struct sockaddr *)&own, size, out, ROUTE_ADDRESS, NULL, 0,
                            NI_NUMERICHOST) == 0;
    if (probe >= 0) {
        close(probe);
    }
    out[good ? strcspn(out, "%") : 0] = '\0'; /* without a zone */
    return good && strncmp(out, "127.", 4) != 0 && strcmp(out, "::1") != 0;
}

/* "host:port" or "[v6]:port". */
static bool find_on_way(const char *address, char out[ROUTE_ADDRESS])
{
    const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
    struct addrinfo *all = NULL;
    char host[256];
    const char *colon = strrchr(address, ':');
    bool bracket = address[0] == '[';
    int size = colon == NULL ? 0 : (int)(colon - address) - 2 * bracket;
    snprintf(host, sizeof host, "%.*s", size > 0 ? size : 0, address + bracket);
    bool found = false;
    if (getaddrinfo(host, "9", &hints, &all) == 0) {
        for (const struct addrinfo *a = all; a != NULL && !found; a = a->ai_next) {
            found = find_local(a, out);
        }
        freeaddrinfo(all);
    }
    return found;
}

static bool is_in_network(const uint8_t *address, int family, const char *network)
{
    char text[ROUTE_ADDRESS];
    uint8_t bytes[16];
    const char *slash = strchr(network, '/');
    size_t size = slash != NULL ? (size_t)(slash - network) : strlen(network);
    int most = family == AF_INET ? 32 : 128;
    int bits = slash != NULL ? atoi(slash + 1) : most;
    snprintf(text, sizeof text, "%.*s", (int)size, network);
    if (inet_pton(family, text, bytes) != 1 || bits < 0 || bits > most) {
        return false;
    }
    for (int bit = 0; bit < bits; bit++) {
        if ((address[bit / 8] ^ bytes[bit / 8]) >> (7 - bit % 8) & 1) {
            return false;
        }
    }
    return true;
}

static bool is_in_any(const char *address, const char *networks)
{
    uint8_t bytes[16];
    int family = strchr(address, ':') != NULL ? AF_INET6 : AF_INET;
    char *list = strdup(networks), *rest = list;
    bool in = false;
    if (list != NULL && inet_pton(family, address, bytes) == 1) {
        for (char *one; !in && (one = strsep(&rest, ", ")) != NULL;) {
            in = is_in_network(bytes, family, one);
        }
    }
    free(list);
    return in;
}

fanin_status route_within(const target *t, const char *networks,
                          char out[ROUTE_ADDRESS], fanin_error *error)
{
    bool found = false;
    for (uint32_t i = 0; i < t->count && !found; i++) {
        found = find_on_way(t->addresses[i], out);
    }
    if (found && is_in_any(out, networks)) {
        return FANIN_OK;
    }
    if (!found) {
        return failure_set(error, FANIN_ERR_ARGUMENT,
                           "leave out --network, or give the trainer's address in a "
                           "network",
                           "the trainer is reached by this host's loopback, where no "
                           "other host reaches this one");
    }
    return failure_set(error, FANIN_ERR_ARGUMENT,
                       "name the network of the fleet's hosts",
                       "this host's address on the way to the trainer is %s, which is "
                       "not in --network %s",
                       out, networks);
}
