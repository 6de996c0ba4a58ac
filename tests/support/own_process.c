/* SPDX-License-Identifier: Apache-2.0 */
#include "own_process.h"
#include "testing.h"

#include <sys/resource.h>
#include <sys/wait.h>

fanin_error failure = FANIN_ERROR_INIT;

static void run_in_child(const own_process *p)
{
    if (p->signal != 0) { /* what it says is expected */
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        (void)!freopen("/dev/null", "w", stderr);
    }
    int status = p->before ? p->before() : PASSED;
    if (status == PASSED)
        status = p->body();
    if (p->checked)
        exit(status);
    _exit(status);
}

void own_process_run(void **state)
{
    const own_process *p = *state;
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        run_in_child(p);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (p->signal != 0) {
        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), p->signal);
        return;
    }
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == SKIPPED)
        skip();
    assert_int_equal(WEXITSTATUS(status), PASSED);
}
