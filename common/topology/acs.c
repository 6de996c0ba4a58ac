/* SPDX-License-Identifier: Apache-2.0 */
#include "acs.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#define CONFIG_SIZE 4096
#define EXTENDED_START 0x100
#define ACS_CAPABILITY 0x000d
#define ACS_CONTROL 6            /* offset in the capability */
#define ACS_REDIRECT_BITS 0x000c /* P2P Request Redirect, P2P Completion Redirect */
#define MOST_CAPABILITIES 64     /* a chain that loops ends here */

static uint32_t dword(const uint8_t *config, unsigned at)
{
    return config[at] | (uint32_t)config[at + 1] << 8 | (uint32_t)config[at + 2] << 16 |
           (uint32_t)config[at + 3] << 24;
}

acs_state acs_of_bridge(const char *sysfs, const char *pci)
{
    char path[PATH_MAX];
    uint8_t config[CONFIG_SIZE];
    int length =
        snprintf(path, sizeof path, "%s/bus/pci/devices/%s/config", sysfs, pci);
    FILE *file = length > 0 && length < PATH_MAX ? fopen(path, "rbe") : NULL;
    if (!file)
        return ACS_UNKNOWN;
    size_t size = fread(config, 1, sizeof config, file);
    fclose(file);
    if (size < sizeof config) /* others than root get 64 bytes */
        return ACS_UNKNOWN;
    unsigned at = EXTENDED_START;
    for (int i = 0;
         i < MOST_CAPABILITIES && at >= EXTENDED_START && at <= CONFIG_SIZE - 8; i++) {
        uint32_t header = dword(config, at);
        if ((header & 0xffff) == ACS_CAPABILITY) {
            unsigned control = config[at + ACS_CONTROL] | config[at + ACS_CONTROL + 1]
                                                              << 8;
            return control & ACS_REDIRECT_BITS ? ACS_REDIRECTS : ACS_OFF;
        }
        at = header >> 20 & ~3U;
    }
    return ACS_OFF;
}
