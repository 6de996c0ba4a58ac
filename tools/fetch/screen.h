/* SPDX-License-Identifier: Apache-2.0 */
/** @file A terminal that is drawn over again and again. One a process. */
#ifndef SCREEN_H
#define SCREEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum screen_event {
    SCREEN_TIME,    /**< the time is over */
    SCREEN_QUIT,    /**< q, or Ctrl-\ */
    SCREEN_RESIZED, /**< to be drawn anew, also after the process was stopped */
    SCREEN_LOOK,    /**< a key that asks for a look at once: blank, Enter */
} screen_event;

/** Takes standard output's terminal, and keys from standard input if that is one. False, and
    nothing has changed: it is none that lines can be drawn over (TERM unset or dumb). Whichever way
    the program exits, what it was like comes back; but not after SIGKILL. */
bool screen_open(void);
/** Gives it back as it was. Nothing is open: fine. */
void screen_close(void);

/** What there is room for; 80 and 24 if the terminal does not say. */
void screen_size(int *columns, int *lines);

/** Shows @p text, lines that end in '\n', in place of what was there. False: the terminal has gone,
    or the user interrupted. */
bool screen_draw(const char *text);

/** Waits @p ms for a key or another size; at once SCREEN_TIME if the user interrupted. Nothing
    needs to be open: then it only waits. */
screen_event screen_wait(uint32_t ms);

#endif
