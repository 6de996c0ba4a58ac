/* SPDX-License-Identifier: Apache-2.0 */
#include "pin.h"

#include <dlfcn.h>

void pin_own_library(void)
{
    static const char here;
    Dl_info info;
    if (dladdr(&here, &info) && info.dli_fname)
        (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}
