/* SPDX-License-Identifier: Apache-2.0 */
#include "pack.h"

#include <msgpack.h>

static int write_to_buffer(void *to, const char *data, size_t size)
{
    buffer_append(to, data, size);
    return 0;
}

static msgpack_packer packer_on(buffer *b)
{
    msgpack_packer packer;
    msgpack_packer_init(&packer, b, write_to_buffer);
    return packer;
}

void pack_uint(buffer *b, uint64_t value)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_uint64(&packer, value);
}

void pack_int(buffer *b, int64_t value)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_int64(&packer, value);
}

void pack_bool(buffer *b, bool value)
{
    msgpack_packer packer = packer_on(b);
    if (value)
        msgpack_pack_true(&packer);
    else
        msgpack_pack_false(&packer);
}

void pack_text(buffer *b, const void *data, size_t size)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_str(&packer, size);
    msgpack_pack_str_body(&packer, data, size);
}

void pack_bin(buffer *b, const void *data, size_t size)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_bin(&packer, size);
    msgpack_pack_bin_body(&packer, data, size);
}

void pack_array(buffer *b, size_t count)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_array(&packer, count);
}

void pack_map(buffer *b, size_t count)
{
    msgpack_packer packer = packer_on(b);
    msgpack_pack_map(&packer, count);
}
