/* SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"
#include <fanin/fanin.h>
#include <stdio.h>

static void version_is_that_of_the_headers(void **state)
{
    char expected[32];
    snprintf(expected, sizeof(expected), "%d.%d.%d", FANIN_VERSION_MAJOR,
             FANIN_VERSION_MINOR, FANIN_VERSION_PATCH);
    assert_string_equal(fanin_version(), expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(version_is_that_of_the_headers),
    };
    return cmocka_run_group_tests_name("version", tests, NULL, NULL);
}
