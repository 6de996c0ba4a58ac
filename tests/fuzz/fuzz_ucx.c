/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer sends for UCX, which believes every length of it: a remote key, or, if bit 0 of the
   first byte is set, a worker address, before which this end's own comes, its size first (two
   bytes). What passes ends where it says. */
#include "fuzz.h"
#include "ucx_address.h"

/* In memory of its own, so that a read beyond it is seen. */
static bool passes(const uint8_t *theirs, size_t size, const uint8_t *own,
                   size_t own_size, bool same_host)
{
    uint8_t *copy = malloc(size + !size);
    check(copy != NULL);
    for (size_t i = 0; i < size; i++)
        copy[i] = theirs[i];
    const char *why = own ? ucx_address_check(copy, size, own, own_size, same_host)
                          : ucx_rkey_check(copy, size);
    free(copy);
    check(!why || why[0] != '\0');
    return !why;
}

static void check_address(const uint8_t *theirs, size_t size, const uint8_t *own,
                          size_t own_size)
{
    bool near = passes(theirs, size, own, own_size, true);
    bool far = passes(theirs, size, own, own_size, false);
    check(far || !near);
    for (size_t less = 0; far && less < size; less++)
        check(!passes(theirs, less, own, own_size, false));
}

static void check_key(const uint8_t *theirs, size_t size)
{
    bool whole = passes(theirs, size, NULL, 0, false), passed = false;
    for (size_t less = 0; less <= size; less++) {
        bool now = passes(theirs, less, NULL, 0, false);
        check(now || !passed); /* UCX does not read on behind its end */
        passed = now;
    }
    check(passed == whole);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 3)
        return 0;
    size_t own = data[1] | (size_t)data[2] << 8, rest = size - 3;
    own = own < rest ? own : rest;
    if (data[0] & 1)
        check_address(data + 3 + own, rest - own, data + 3, own);
    else
        check_key(data + 1, size - 1);
    return 0;
}
