/* SPDX-License-Identifier: Apache-2.0 */
/* A frame's header says which decoder gets the rest. What is accepted must be encoded to
   something that decodes to the same again. */
#include "fuzz.h"
#include "recode.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    frame f;
    const char *why = NULL;
    if (size < FRAME_SIZE)
        return 0;
    fanin_status status = frame_decode(data, &f, &why);
    check(status == FANIN_OK || why != NULL);
    if (status)
        return 0;

    buffer first = {0}, second = {0};
    body in = {.data = data + FRAME_SIZE, .size = size - FRAME_SIZE};
    status = recode_message(f.type, f.request, &in, &first);
    check(status == FANIN_OK || in.why != NULL);
    if (status == FANIN_OK && !first.failed) {
        body again = {.data = first.data + FRAME_SIZE, .size = first.size - FRAME_SIZE};
        check(recode_message(f.type, f.request, &again, &second) == FANIN_OK);
        check(second.size == first.size &&
              memcmp(first.data, second.data, first.size) == 0);
    }
    buffer_free(&first);
    buffer_free(&second);
    return 0;
}
