/* SPDX-License-Identifier: Apache-2.0 */
#include "place.h"

#include <string.h>

#define PART "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_"

bool place_valid(const char *place)
{
    size_t site = strspn(place, PART), rack = 0;
    if (place[site] == '/')
        rack = 1 + strspn(place + site + 1, PART);
    bool empty = place[0] != '\0' && (site == 0 || rack == 1);
    return !empty && place[site + rack] == '\0' && site + rack < PLACE_SIZE;
}

bool place_same_site(const char *a, const char *b)
{
    size_t site = strcspn(a, "/");
    return site == strcspn(b, "/") && memcmp(a, b, site) == 0;
}
