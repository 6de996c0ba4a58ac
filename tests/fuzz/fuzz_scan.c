/* SPDX-License-Identifier: Apache-2.0 */
/* What the scan lets through, msgpack-c must read as one object of the same size. */
#include "fuzz.h"
#include "cursor.h"
#include <msgpack.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const scan_limits limits = {.depth = 4, .objects = 1 << 17};
    size_t used = 0, at = 0;
    const char *why = NULL;
    if (!scan_object(data, size, &limits, &used, &why)) {
        check(why != NULL);
        return 0;
    }
    check(used > 0 && used <= size);
    msgpack_unpacked object;
    msgpack_unpacked_init(&object);
    msgpack_unpack_return result =
        msgpack_unpack_next(&object, (const char *)data, used, &at);
    check(result == MSGPACK_UNPACK_SUCCESS && at == used);
    msgpack_unpacked_destroy(&object);
    return 0;
}
