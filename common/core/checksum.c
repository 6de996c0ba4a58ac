/* SPDX-License-Identifier: Apache-2.0 */
#include "checksum.h"

#include "digest_library.h"

uint64_t checksum_of(const void *data, size_t size)
{
    return XXH3_64bits(data, size);
}

checksum *checksum_create(void)
{
    XXH3_state_t *state = XXH3_createState();
    if (state)
        XXH3_64bits_reset(state);
    return (checksum *)state;
}

void checksum_free(checksum *c)
{
    XXH3_freeState((XXH3_state_t *)c);
}

void checksum_reset(checksum *c)
{
    XXH3_64bits_reset((XXH3_state_t *)c);
}

void checksum_copy(checksum *to, const checksum *from)
{
    XXH3_copyState((XXH3_state_t *)to, (const XXH3_state_t *)from);
}

void checksum_add(checksum *c, const void *data, size_t size)
{
    (void)XXH3_64bits_update((XXH3_state_t *)c, data, size);
}

uint64_t checksum_get(const checksum *c)
{
    return XXH3_64bits_digest((const XXH3_state_t *)c);
}
