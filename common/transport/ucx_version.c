/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx.h"
#include <string.h>

/* Length of "major.minor", 0 if the text has no such beginning. */
static size_t minor_end(const char *version)
{
    const size_t major = strspn(version, "0123456789");
    if (major == 0 || version[major] != '.')
        return 0;
    const size_t minor = strspn(version + major + 1, "0123456789");
    return minor == 0 ? 0 : major + 1 + minor;
}

bool ucx_versions_match(const char *a, const char *b)
{
    if (!a || !b)
        return false;
    const size_t length = minor_end(a);
    return length > 0 && length == minor_end(b) && memcmp(a, b, length) == 0;
}
