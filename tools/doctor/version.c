/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor/version.h"

#include "gpu.h"
#include "fetch/output.h"
#include "ucx.h"

#include <fanin/types.h>

static void print_ucx(void)
{
    ucx *u = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    if (ucx_load(NULL, &u, &why) == FANIN_OK) {
        terminal_print("UCX %s (%s)", ucx_version(u), ucx_library_path(u));
    } else {
        terminal_print("UCX none: %s", why.message);
    }
    ucx_unload(&u);
}

static void print_cuda(void)
{
    gpu *g = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    if (gpu_load(NULL, &g, &why) == FANIN_OK) {
        terminal_print("CUDA driver for %s", gpu_driver_version(g));
    } else {
        terminal_print("CUDA none: %s", why.message);
    }
}

void version_print(void)
{
    terminal_print("nixl-fetch %d.%d.%d (libfanin %s)", FANIN_VERSION_MAJOR,
                   FANIN_VERSION_MINOR, FANIN_VERSION_PATCH, fanin_version());
    terminal_print("revision %s", version_revision);
    terminal_print("protocol %d", FANIN_PROTOCOL_VERSION);
    print_ucx();
    print_cuda();
}
