#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The tutorials do and print what they say.

bats_require_minimum_version 1.5.0

setup()
{
    unset NIXL_FETCH_SERVERS NIXL_FETCH_TIMEOUT FANIN_TRAINER FANIN_TRACE FANIN_LOG
    root=$(cd "$BATS_TEST_DIRNAME/../.." && pwd)
    PATH=$(dirname "$NIXL_FETCH"):$PATH
    cd "$BATS_TEST_TMPDIR" || return 1
}

# tutorial PAGE: fails where the page does not do what it shows.
tutorial()
{
    "$FANIN_TEST_PYTHON" "$root/tests/cli/tutorial.py" "$1"
}

@test "a first pull" {
    run -0 tutorial "$root/docs/tutorials/first-pull.md"
}

@test "a stalled run, taken apart" {
    run -0 tutorial "$root/docs/tutorials/stalled-run.md"
}

@test "a page that shows what is not printed, or whose commands fail, is told" {
    printf '```sh\n%s\n```\n\n```text\n%s\n```\n' 'echo rank 2 is well' 'rank 2 is ill' >page.md
    run -1 tutorial page.md
    [[ $output == *'not printed: rank 2 is ill'* ]]
    sed -i 's/ill/well/' page.md
    run -0 tutorial page.md
    sed -i 's/rank 2 is well$/rank 3 is well/' page.md
    sed -i '0,/rank 3/s//rank 2/' page.md
    run -1 tutorial page.md
    printf '```sh\n(exit 7)\n```\n' >>page.md
    run -1 tutorial page.md
    [[ $output == *'the commands ended with 7'* ]]
}
