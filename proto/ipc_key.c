/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc_key.h"

#include <endian.h>
#include <string.h>

void ipc_key_encode(const ipc_key *key, uint8_t out[IPC_KEY_SIZE])
{
    uint64_t offset = htole64(key->offset), length = htole64(key->length);
    memcpy(out, key->handle, 64);
    memcpy(out + 64, key->uuid, 16);
    memcpy(out + 80, &offset, 8);
    memcpy(out + 88, &length, 8);
}

bool ipc_key_decode(const uint8_t *data, size_t size, uint64_t region_length,
                    ipc_key *out)
{
    if (size != IPC_KEY_SIZE)
        return false;
    memcpy(out->handle, data, 64);
    memcpy(out->uuid, data + 64, 16);
    memcpy(&out->offset, data + 80, 8);
    memcpy(&out->length, data + 88, 8);
    out->offset = le64toh(out->offset);
    out->length = le64toh(out->length);
    return out->offset <= out->length && region_length <= out->length - out->offset;
}
