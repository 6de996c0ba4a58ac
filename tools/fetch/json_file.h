/* SPDX-License-Identifier: Apache-2.0 */
/** @file JSON out of files that are open. */
#ifndef JSON_FILE_H
#define JSON_FILE_H

#include <jansson.h>

/** What the file says, NULL: it is no JSON, or has a key twice in one object, which @p why tells.
    Closes @p descriptor. */
json_t *json_file_read(int descriptor, json_error_t *why);

#endif
