/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/adapter_layout.h"

#include <stdlib.h>
#include <string.h>

static void forget(adapter_layout *l)
{
    tensor_files_free(&l->files);
    peft_config_free(&l->config);
    l->there = false;
}

bool adapter_layout_fits(const adapter_layout *l, const adapter_layout_key *key,
                         const char *publication)
{
    return l && l->there && digest_equal(&l->key.keys, &key->keys) &&
           l->key.dtype == key->dtype && l->key.trust_config == key->trust_config &&
           strcmp(l->publication, publication) == 0;
}

void adapter_layout_put(adapter_layout *l, const adapter_layout_key *key,
                        const char *publication, tensor_files *files,
                        peft_config *config)
{
    forget(l);
    l->files = *files;
    l->config = *config;
    *files = (tensor_files){.files = NULL};
    *config = (peft_config){.text = NULL};
    size_t size = strlen(publication);
    if (size >= sizeof l->publication) {
        forget(l);
        return;
    }
    memcpy(l->publication, publication, size + 1);
    l->key = *key;
    l->there = true;
}

void adapter_layout_take(adapter_layout *l, tensor_files *files, peft_config *config)
{
    *files = l->files;
    *config = l->config;
    l->files = (tensor_files){.files = NULL};
    l->config = (peft_config){.text = NULL};
    l->there = false;
}

void adapter_layout_free(adapter_layout **l)
{
    if (!*l)
        return;
    forget(*l);
    free(*l);
    *l = NULL;
}
