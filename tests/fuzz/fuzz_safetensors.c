/* SPDX-License-Identifier: Apache-2.0 */
/* A file of anybody's: what the parser accepts keeps the promises of fanin/safetensors.h. */
#include "fuzz.h"
#include "adapter/tensor_files.h"

#include <string.h>

static void check_file(const fanin_safetensors *file, uint64_t data, uint64_t end)
{
    uint64_t at = data;
    for (size_t i = 0; i < fanin_safetensors_count(file); i++) {
        fanin_safetensors_entry entry = {.struct_size = sizeof entry};
        check(fanin_safetensors_get(file, i, &entry));
        check(entry.offset == at && entry.bytes <= end - at);
        check(fanin_dtype_name(entry.dtype) && entry.n_dims <= FANIN_MAX_DIMS);
        check(fanin_safetensors_find(file, entry.name) == (int64_t)i);
        at += entry.bytes;
    }
    check(at == end);
    const fanin_pair *pairs;
    size_t n_pairs = fanin_safetensors_metadata(file, &pairs);
    for (size_t i = 0; i + 1 < n_pairs; i++)
        check(strcmp(pairs[i].key, pairs[i + 1].key) < 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < SAFETENSORS_LENGTH)
        return 0;
    uint64_t length = 0;
    for (int i = SAFETENSORS_LENGTH - 1; i >= 0; i--)
        length = length << 8 | data[i];
    uint64_t left = size - SAFETENSORS_LENGTH;
    if (length > left)
        length = left; /* so that damaged lengths reach the parser as well */
    fanin_safetensors *file = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = safetensors_parse((const char *)data + SAFETENSORS_LENGTH,
                                            (size_t)length, size, &file, &error);
    check((status == FANIN_OK) == (file != NULL));
    if (file)
        check_file(file, SAFETENSORS_LENGTH + length, size);
    else
        check(error.message[0] != '\0');
    fanin_safetensors_close(&file);
    return 0;
}
