/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker address of version 1:
 *
 *     header: u8 (version in the low half, flags in the high one), u64 uuid
 *     each device: u8 memory domain (0x80: no transports), u8 length (5 bits) and flags,
 *                  [u8 paths], [u8 system device], the device's address
 *     each of its transports: u16 checksum of the name, 3 floats, u32 what it can do,
 *                  u8 length (6 bits) and flags, the interface's address
 *
 * A remote key: u64 map of memory domains, u8 kind of memory, for each domain u8 length and its
 * key; then what UCX does not read without a length.
 */
#include "ucx_address.h"

#include <math.h>
#include <string.h>

#define HEADER 9
#define VERSION_1 0x20 /* with a uuid, as all have it, and nothing else */
#define LAST 0x80
#define NO_TRANSPORTS 0x80 /* of the memory domain */
#define HAS_PATHS 0x40
#define HAS_SYSTEM_DEVICE 0x20
#define DEVICE_LENGTH 0x1f
#define HAS_ENDPOINTS 0x40
#define INTERFACE_LENGTH 0x3f
#define TRANSPORTS_MOST 128

typedef struct reader {
    const uint8_t *at, *end;
    bool in_device;
    uint8_t domain, device_length, device_flags;
    unsigned count;
} reader;

typedef struct transport {
    uint16_t name;
    uint8_t domain, device_length, length;
    float overhead, bandwidth, latency;
    uint32_t abilities;
} transport;

static const char cut[] = "it ends in the middle";

static const uint8_t *ucx_address_take(reader *r, size_t size)
{
    const uint8_t *at = r->at;
    if (size > (size_t)(r->end - r->at))
        return NULL;
    r->at += size;
    return at;
}

static bool skip_counted(reader *r, uint8_t flag, bool *zero)
{
    if (!(r->device_flags & flag))
        return true;
    const uint8_t *value = ucx_address_take(r, 1);
    *zero = value && flag == HAS_PATHS && *value == 0;
    return value != NULL;
}

static const char *open_device(reader *r)
{
    bool zero = false;
    const uint8_t *head = ucx_address_take(r, 2);
    if (!head)
        return cut;
    r->domain = head[0];
    r->device_length = head[1] & DEVICE_LENGTH;
    r->device_flags = head[1] & (uint8_t)~DEVICE_LENGTH;
    if (!skip_counted(r, HAS_PATHS, &zero) ||
        !skip_counted(r, HAS_SYSTEM_DEVICE, &zero) ||
        !ucx_address_take(r, r->device_length))
        return cut;
    r->in_device = !(r->domain & NO_TRANSPORTS);
    return zero ? "a device without paths" : NULL;
}

/* The next transport; false at the end, with *why if it is not a good one. */
static bool ucx_address_next(reader *r, transport *out, const char **why)
{
    *why = NULL;
    while (!r->in_device) {
        if (r->device_flags & LAST) {
            *why = r->at == r->end ? NULL : "something follows its end";
            return false;
        }
        *why = open_device(r);
        if (*why)
            return false;
    }
    const uint8_t *p = ucx_address_take(r, 2 + 3 * 4 + 4 + 1);
    *why = cut;
    if (!p)
        return false;
    memcpy(&out->name, p, 2);
    memcpy(&out->overhead, p + 2, 4);
    memcpy(&out->bandwidth, p + 6, 4);
    memcpy(&out->latency, p + 10, 4);
    memcpy(&out->abilities, p + 14, 4);
    out->length = p[18] & INTERFACE_LENGTH;
    out->domain = r->domain;
    out->device_length = r->device_length;
    r->in_device = !(p[18] & LAST);
    if (!ucx_address_take(r, out->length))
        return false;
    *why = p[18] & HAS_ENDPOINTS ? "it has endpoints" : NULL;
    if (++r->count > TRANSPORTS_MOST)
        *why = "too many transports";
    return !*why;
}

static bool ucx_address_start(reader *r, const uint8_t *address, size_t size)
{
    *r = (reader){.at = address, .end = address + size};
    const uint8_t *header = ucx_address_take(r, HEADER);
    return header && *header == VERSION_1;
}

static bool is_plausible(const transport *t)
{
    return isfinite(t->overhead) && t->overhead >= 0 && isfinite(t->latency) &&
           t->latency >= 0 && isfinite(t->bandwidth) && t->bandwidth > 0;
}

/* What this worker says of the same transport; false: it has none of that name. */
static bool ucx_address_find(const uint8_t *own, size_t own_size, uint16_t name,
                             transport *out)
{
    reader r;
    const char *why;
    if (!ucx_address_start(&r, own, own_size))
        return false;
    while (ucx_address_next(&r, out, &why))
        if (out->name == name)
            return true;
    return false;
}

const char *ucx_address_check(const uint8_t *address, size_t size, const uint8_t *own,
                              size_t own_size, bool same_host)
{
    reader r;
    transport theirs, ours;
    const char *why;
    if (!ucx_address_start(&r, address, size))
        return "it does not begin like one";
    while (ucx_address_next(&r, &theirs, &why)) {
        if (!is_plausible(&theirs))
            return "a transport's speed is no number";
        if (!ucx_address_find(own, own_size, theirs.name, &ours))
            continue; /* UCX passes over what it does not know */
        if (theirs.length != ours.length ||
            (same_host &&
             (theirs.device_length != ours.device_length ||
              theirs.domain != ours.domain || theirs.abilities != ours.abilities)))
            return "a transport does not look like this end's";
    }
    if (why)
        return why;
    return r.count > 0 ? NULL : "it has no transports";
}

const char *ucx_rkey_check(const uint8_t *rkey, size_t size)
{
    reader r = {.at = rkey, .end = rkey + size};
    uint64_t domains;
    const uint8_t *head = ucx_address_take(&r, sizeof domains + 1);
    if (!head)
        return cut;
    memcpy(&domains, head, sizeof domains);
    if (head[8] > 1) /* the host's, CUDA's */
        return "it is of no kind of memory that is published";
    for (; domains; domains &= domains - 1) {
        const uint8_t *length = ucx_address_take(&r, 1);
        if (!length || !ucx_address_take(&r, *length))
            return cut;
    }
    return NULL;
}
