/* SPDX-License-Identifier: Apache-2.0 */
#include "work_stop.h"

#include "error_set.h"

fanin_status work_broken_off(const work_stop *stop, const char *phase,
                             const char *doing, fanin_error *error)
{
    error_place place = {.phase = phase, .remedy = "allow more time"};
    if (!stop || !stop->stopped)
        return error_set_memory(error);
    return error_set(error, FANIN_ERR_TIMEOUT, &place, "the deadline passed while %s",
                     doing);
}
