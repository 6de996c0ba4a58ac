/* SPDX-License-Identifier: Apache-2.0 */
/** @file Validation of text from peers and callers. */
#ifndef UTF8_H
#define UTF8_H

#include <stdbool.h>
#include <stddef.h>

/** Whether data[0..size) is UTF-8 (shortest forms, no surrogates) without a NUL. */
bool utf8_valid(const void *data, size_t size);

#endif
