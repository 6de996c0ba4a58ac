/* SPDX-License-Identifier: Apache-2.0 */
#include "library_table.h"

#include <dlfcn.h>
#include <string.h>

const char *library_table_read(void *handle, const library_function *functions,
                               size_t count, void *table)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(handle, functions[i].name);
        if (!symbol)
            return functions[i].name;
        memcpy((char *)table + functions[i].offset, &symbol, sizeof symbol);
    }
    return NULL;
}

void pin_own_library(void)
{
    static const char here;
    Dl_info info;
    if (dladdr(&here, &info) && info.dli_fname)
        (void)dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}
