/* SPDX-License-Identifier: Apache-2.0 */
/** @file Catches what is logged of one event. Thread: any. */
#ifndef LOG_CATCHER_H
#define LOG_CATCHER_H

#include <fanin/log.h>
#include <stdbool.h>

/** For the log of a configuration. */
void log_catch(void *cookie, fanin_log_level level, const char *event,
               const char *message);
/** Counts messages of @p event from now on. */
void log_listen(const char *event);
/** Waits, 30 s at most, until there are @p times of them (another thread may be the one that
    tells), and fails the test if there are not as many, or if the last one does not say @p words.
    */
void log_expect(unsigned times, const char *words);
/** The same for at least one. */
void log_await(const char *words);

#endif
