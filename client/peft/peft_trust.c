/* SPDX-License-Identifier: Apache-2.0 */
#include "peft/peft_trust.h"

#include <ctype.h>
#include <string.h>

/* Lists in lists in lists are more than any of PEFT's fields has. */
#define LIST_DEPTH 3

/* What a field may hold. */
typedef enum trusted_kind {
    TRUSTED_PLAIN,  /* a string, number or truth value, or lists of them */
    TRUSTED_TABLE,  /* an object of numbers */
    TRUSTED_TOKENS, /* a list, or an object of lists */
    TRUSTED_PARTS   /* an object with the plain parts that are listed */
} trusted_kind;

typedef struct trusted_field {
    const char *name;
    trusted_kind kind;
    const char *const *parts; /* NULL ends them */
} trusted_field;

#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

/*
 * PEFT 0.21's LoraConfig but for auto_mapping (imports a class), megatron_core and megatron_config
 * (imports a module), revision (of the base model, whose code may be remote), runtime_config (never
 * of a file), and the files that CorDA reads and writes.
 */
static const trusted_field trusted[] = {
    {.name = "alora_invocation_tokens"},
    {.name = "alpha_pattern", TRUSTED_TABLE},
    {.name = "arrow_config",
     TRUSTED_PARTS,
     PARTS("gks_adapter_names", "rng_seed", "router_temperature", "task_adapter_names",
           "top_k", "use_gks")},
    {.name = "base_model_name_or_path"},
    {.name = "bias"},
    {.name = "corda_config",
     TRUSTED_PARTS,
     PARTS("corda_method", "prune_temporary_fields", "use_float16_for_covariance",
           "verbose")},
    {.name = "ensure_weight_tying"},
    {.name = "eva_config",
     TRUSTED_PARTS,
     PARTS("adjust_scaling_factors", "label_mask_value", "rho", "tau", "use_label_mask",
           "whiten")},
    {.name = "exclude_modules"},
    {.name = "fan_in_fan_out"},
    {.name = "inference_mode"},
    {.name = "init_lora_weights"},
    {.name = "kasa_config", TRUSTED_PARTS, PARTS("beta", "gamma")},
    {.name = "layer_replication"},
    {.name = "layers_pattern"},
    {.name = "layers_to_transform"},
    {.name = "loftq_config", TRUSTED_PARTS, PARTS("loftq_bits", "loftq_iter")},
    {.name = "lora_alpha"},
    {.name = "lora_bias"},
    {.name = "lora_dropout"},
    {.name = "lora_ga_config",
     TRUSTED_PARTS,
     PARTS("direction", "scale", "stable_gamma")},
    {.name = "modules_to_save"},
    {.name = "monteclora_config",
     TRUSTED_PARTS,
     PARTS("buffer_size", "dirichlet_prior", "kl_loss_weight", "num_samples",
           "sample_scaler", "use_entropy")},
    {.name = "peft_type"},
    {.name = "peft_version"},
    {.name = "qalora_group_size"},
    {.name = "r"},
    {.name = "rank_pattern", TRUSTED_TABLE},
    {.name = "target_modules"},
    {.name = "target_parameters"},
    {.name = "task_type"},
    {.name = "trainable_token_indices", TRUSTED_TOKENS},
    {.name = "use_bdlora",
     TRUSTED_PARTS,
     PARTS("match_strict", "nblocks", "target_modules_bd_a", "target_modules_bd_b")},
    {.name = "use_dora"},
    {.name = "use_qalora"},
    {.name = "use_rslora"},
    {.name = "velora_config", TRUSTED_PARTS, PARTS("init_type", "num_groups", "scale")},
};

/* Names come from the trainer, and end in a log. */
static void note(buffer *dropped, const char *field, const char *part)
{
    const char *const texts[] = {dropped->size > 0 ? ", " : "", field, part ? "." : "",
                                 part ? part : ""};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        for (const char *at = texts[i]; *at; at++)
            buffer_append(dropped, isprint((unsigned char)*at) ? at : "?", 1);
    }
}

static bool is_plain(const json_t *value, unsigned depth)
{
    if (!json_is_array(value))
        return !json_is_object(value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (depth == 0 || !is_plain(json_array_get(value, i), depth - 1))
            return false;
    }
    return true;
}

/* An object whose values are all numbers, or all plain. */
static bool is_object_of(json_t *value, bool numbers)
{
    const char *key;
    json_t *item;
    if (!json_is_object(value))
        return false;
    json_object_foreach(value, key, item)
    {
        if (numbers ? !json_is_number(item) : !is_plain(item, LIST_DEPTH))
            return false;
    }
    return true;
}

static bool is_listed(const char *name, const char *const *names)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names != NULL;
}

/* False: a known part has no plain value. */
static bool filter_parts(json_t *object, const trusted_field *field, buffer *dropped)
{
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, key, value)
    {
        bool known = is_listed(key, field->parts);
        if (known && !is_plain(value, LIST_DEPTH))
            return false;
        if (known || json_is_null(value))
            continue;
        note(dropped, field->name, key);
        json_object_del(object, key);
    }
    return true;
}

static bool has_kind(json_t *value, trusted_kind kind)
{
    switch (kind) {
    case TRUSTED_TABLE:
        return is_object_of(value, true);
    case TRUSTED_TOKENS:
        return is_plain(value, LIST_DEPTH) || is_object_of(value, false);
    case TRUSTED_PARTS:
        return json_is_object(value);
    case TRUSTED_PLAIN:
        break;
    }
    return is_plain(value, LIST_DEPTH);
}

static const trusted_field *find(const char *name)
{
    for (size_t i = 0; i < sizeof trusted / sizeof trusted[0]; i++) {
        if (strcmp(trusted[i].name, name) == 0)
            return &trusted[i];
    }
    return NULL;
}

/* What PEFT writes into every file, and imports only where megatron_config is set. */
static bool is_default(const char *name, const json_t *value)
{
    const char *text = json_string_value(value);
    return strcmp(name, "megatron_core") == 0 && text &&
           strcmp(text, "megatron.core") == 0;
}

const char *peft_trust_filter(json_t *config, buffer *dropped)
{
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(config, next, key, value)
    {
        const trusted_field *field = find(key);
        if (json_is_null(value) || is_default(key, value))
            continue;
        if (!field) {
            note(dropped, key, NULL);
            json_object_del(config, key);
        } else if (!has_kind(value, field->kind) ||
                   (field->kind == TRUSTED_PARTS &&
                    !filter_parts(value, field, dropped))) {
            return field->name;
        }
    }
    return NULL;
}
