/* SPDX-License-Identifier: Apache-2.0 */
/** @file config.json of a model's directory. Pure. */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "catalog.h"
#include "peft/peft_config.h"

#define MODEL_CONFIG_FILE "config.json"

/** The pair of a publication's metadata that holds the model's configuration. */
#define MODEL_CONFIG_PAIR "config"

/**
 * The text of config.json: that pair of @p keys as it is, if it names no code that a reader could
 * load (auto_map, custom_pipelines, at any depth) or is @p trusted; else without that. No such
 * pair: out->text is NULL. To be freed with peft_config_free(). FANIN_ERR_MISMATCH (it is no JSON
 * object), FANIN_ERR_MEMORY.
 */
fanin_status model_config_make(const key_table *keys, bool trusted, peft_config *out,
                               fanin_error *error);

#endif
