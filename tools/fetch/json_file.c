/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/json_file.h"
#include "fetch/output.h"

#include <stdio.h>

json_t *json_file_read(int descriptor, json_error_t *why)
{
    /* Of a descriptor jansson would read each byte by a call of its own. */
    FILE *stream = output_require(fdopen(descriptor, "r"));
    json_t *root = json_loadf(stream, JSON_REJECT_DUPLICATES, why);
    fclose(stream);
    return root;
}
