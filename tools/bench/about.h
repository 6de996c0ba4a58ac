/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where, when and by which command line something was measured. */
#ifndef ABOUT_H
#define ABOUT_H

#include <jansson.h>
#include <stdint.h>

typedef struct about {
    char processor[128], kernel[160],
        devices[512]; /**< devices: "": none were asked for */
    char date[32];    /**< UTC, as in RFC 3339 */
    uint32_t cores;   /**< that this process may use */
    uint64_t memory_bytes;
    char *command; /**< as a shell would take it */
} about;

/** To be freed. */
void about_make(int argc, const char **argv, about *out);
/** Also names the CUDA devices, whose driver is loaded for it. */
void about_devices(about *a);
void about_free(about *a);
/** What of it is the machine. */
json_t *about_machine_json(const about *a);

#endif
