/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a comparison of two sides' tensors found, for people and as JSON. */
#ifndef DIFF_REPORT_H
#define DIFF_REPORT_H

#include "fetch/change.h"
#include "fetch/session.h"
#include "fetch/tensor_directory.h"

/** One side: a directory's tensors, or a step of what ranks publish, pulled to memory. Zero is an
    empty one. */
typedef struct diff_side {
    const char *what;       /**< the word on the command line */
    tensor_directory files; /**< of a directory */
    uint8_t *memory;        /**< of what was pulled; NULL: it is a directory */
    size_t mapped;
    char publication[OPTIONS_PUBLICATION]; /**< "": a directory */
    uint64_t step;                         /**< of what was pulled */
    whole_tensors tensors;                 /**< ascending by name, as files have it */
} diff_side;

typedef enum diff_kind {
    DIFF_SAME,
    DIFF_CHANGED,
    DIFF_DTYPE, /**< compared by value, if elements are alike enough */
    DIFF_SHAPE, /**< not compared */
    DIFF_ONLY_A,
    DIFF_ONLY_B,
} diff_kind;

typedef struct diff_row {
    const whole_tensor *of[2]; /**< NULL: that side does not have it */
    diff_kind kind;
    bool compared; /**< change is filled */
    change change;
} diff_row;

typedef struct diff_report {
    const diff_side *sides; /**< two */
    diff_row *rows;
    size_t count;
} diff_report;

/** Whether both sides have the same tensors, byte for byte. */
bool diff_report_equal(const diff_report *r);

/** Orders the rows: the largest relative change first, then dtypes, shapes, what one side has, and
    at last what is the same. */
void diff_report_sort(diff_report *r);

/** At most @p limit rows; 0: in text the first 20, in JSON all. Rows must be sorted. */
void diff_report_print(const diff_report *r, size_t limit);
void diff_report_json(const diff_report *r, size_t limit);

#endif
