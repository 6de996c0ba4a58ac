/* SPDX-License-Identifier: Apache-2.0 */
#include "testing.h"

#include <sys/wait.h>

#define MAX_CASES 128

_Thread_local fanin_error tests_error;

static struct CMUnitTest cases[MAX_CASES];
static size_t n_cases;
static CMFixtureFunction before_all, after_all;

void tests_add(const char *name, CMUnitTestFunction run, CMFixtureFunction set_up,
               CMFixtureFunction tear_down, void *given)
{
    if (n_cases == MAX_CASES)
        abort();
    cases[n_cases++] = (struct CMUnitTest){name, run, set_up, tear_down, given};
}

void tests_between(CMFixtureFunction first, CMFixtureFunction last)
{
    before_all = first;
    after_all = last;
}

int tests_run(const char *filter)
{
    if (filter)
        cmocka_set_test_filter(filter);
    return _cmocka_run_group_tests(program_invocation_short_name, cases, n_cases,
                                   before_all, after_all);
}

int tests_await(pid_t child)
{
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* A program's own takes its place. */
__attribute__((weak)) int main(int argc, char **argv)
{
    return tests_run(argc > 1 ? argv[1] : NULL);
}
