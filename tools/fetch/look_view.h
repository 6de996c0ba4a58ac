/* SPDX-License-Identifier: Apache-2.0 */
/** @file A look as lines of text that fit a terminal. */
#ifndef LOOK_VIEW_H
#define LOOK_VIEW_H

#include "fetch/look.h"

typedef struct look_view {
    const look *look;
    const problems *problems;
    const look_rates *rates;
    const char *title, *tail; /**< what the first line begins and ends with */
    int columns, lines;       /**< that there is room for; lines 0: no end */
    bool color;
} look_view;

/**
 * What is wrong on top, the worst first, then a row a rank, those with whom something is wrong
 * first. Where there is no room for all, each kind of problem keeps its first ones, and a line says
 * how many more there are; columns that matter less are left out. To be freed.
 */
char *look_view_text(const look_view *v);

#endif
