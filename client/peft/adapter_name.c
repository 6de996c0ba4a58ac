/* SPDX-License-Identifier: Apache-2.0 */
/* The public way to the names of an adapter's file. */
#include "peft/peft_names.h"

#include <fanin/client.h>
#include <string.h>

bool fanin_adapter_name(const char *name, char *out, size_t capacity)
{
    char buffer[PEFT_NAME_SIZE];
    if (name == NULL || out == NULL || strlen(name) > FANIN_MAX_NAME)
        return false;
    peft_name on_disk = peft_name_on_disk(name, buffer);
    if (on_disk.size >= capacity)
        return false;
    memcpy(out, on_disk.text, on_disk.size);
    out[on_disk.size] = '\0';
    return true;
}
