/* SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"
#include <fanin/fanin.h>

TEST(version_is_that_of_the_headers)
{
    char expected[32];
    snprintf(expected, sizeof(expected), "%d.%d.%d", FANIN_VERSION_MAJOR,
             FANIN_VERSION_MINOR, FANIN_VERSION_PATCH);
    assert_string_equal(fanin_version(), expected);
}
