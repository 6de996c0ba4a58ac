/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"
#include "socket.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

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
