/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/interrupt.h"

#include <signal.h>
#include <stdatomic.h>

static _Atomic(fanin_client *) current;
static _Atomic(fanin_relay *) relaying;
static volatile sig_atomic_t requested;

static void interrupt_on_signal(int number)
{
    requested = number;
    fanin_client *client = atomic_load(&current);
    if (client != NULL)
        fanin_client_cancel(client);
    fanin_relay_cancel(atomic_load(&relaying));
}

void interrupt_relay(fanin_relay *relay)
{
    atomic_store(&relaying, relay);
}

void interrupt_install(fanin_client *client)
{
    struct sigaction action = {.sa_handler = interrupt_on_signal};
    atomic_store(&current, client);
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction hangup;
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL); /* under nohup it is ignored, and stays so */
    /* A bench blocks both while it starts its ranks. */
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

void interrupt_with_output(void)
{
    struct sigaction action = {.sa_handler = interrupt_on_signal};
    sigemptyset(&action.sa_mask);
    sigaction(SIGPIPE, &action, NULL);
}

void interrupt_detach(void)
{
    atomic_store(&current, NULL);
}

int exit_code_of(fanin_status status)
{
    if (status >= 0)
        return 0;
    int group = -(status / 100);
    return EXIT_GROUP + (group < 1 ? 1 : group > 6 ? 6 : group);
}

int interrupt_exit_code(void)
{
    return EXIT_SIGNAL + (requested != 0 ? requested : SIGINT);
}

bool interrupt_requested(void)
{
    return requested != 0;
}
