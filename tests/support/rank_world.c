/* SPDX-License-Identifier: Apache-2.0 */
#include "rank_world.h"

#include "ends.h"
#include "fetch/pattern.h"
#include "testing.h"
#include <sys/mman.h>

static char run_zero[] = "0";
static char *default_runs[] = {run_zero};
static const fanin_pair default_pairs[] = {{"base_model_name_or_path", "test/model"},
                                           {"lora_alpha", "16"}};

void rank_world_init(rank_world *w, const char *shape, fanin_dtype dtype,
                     uint32_t world_size)
{
    fanin_error error = FANIN_ERROR_INIT;
    const adapter_shape *a = adapter_shape_find(shape);
    assert_non_null(a);
    *w = (rank_world){0};
    assert_ok(
        model_expand(model_find(a->model), a->r, a->fused, dtype, &w->tensors, &error),
        error);
    w->options = (rank_options){
        .world_size = world_size,
        .replicate = 1,
        .lease_ms = 1000,
        .data_threads = 1,
        .runs = default_runs,
        .n_runs = 1,
        .pairs = default_pairs,
        .n_pairs = 2,
        .first_step = 1,
        .update_every_ms = -1,
    };
    memset(w->options.world_id, 0x42, sizeof w->options.world_id);
}

void rank_world_describe(rank_world *w, const char *host, const uint16_t *ports)
{
    uint32_t n = w->options.world_size;
    w->addresses = calloc(n, sizeof *w->addresses);
    w->address_list = calloc(n, sizeof *w->address_list);
    w->seeds = calloc(w->tensors.count, sizeof *w->seeds);
    for (uint32_t i = 0; i < n; i++) {
        snprintf(w->addresses[i], sizeof w->addresses[i], "%s:%u", host,
                 (unsigned)ports[i]);
        w->address_list[i] = w->addresses[i];
    }
    for (size_t i = 0; i < w->tensors.count; i++)
        w->seeds[i] = rank_world_seed(&w->tensors.tensors[i]);
}

uint64_t rank_world_seed(const tensor_spec *t)
{
    char key[640];
    snprintf(key, sizeof key, "lora:0:%s", t->name);
    return pattern_seed(key);
}

void rank_world_free(rank_world *w)
{
    ranks_free(&w->ranks);
    free(w->addresses);
    free(w->address_list);
    free(w->seeds);
    tensor_list_free(&w->tensors);
}

void landing_make(const rank_world *w, landing *l)
{
    l->size = w->tensors.bytes;
    l->arena = mmap(NULL, l->size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    assert_true(l->arena != MAP_FAILED);
    l->wanted = calloc(w->tensors.count, sizeof *l->wanted);
    l->boxes = calloc(w->tensors.count, sizeof *l->boxes);
    uint64_t used = 0;
    for (size_t i = 0; i < w->tensors.count; i++) {
        const tensor_spec *t = &w->tensors.tensors[i];
        memcpy(l->boxes[i].extent, t->shape, sizeof t->shape);
        l->boxes[i].address = l->arena + used;
        l->wanted[i] = (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                                      .name = t->name,
                                      .dtype = t->dtype,
                                      .n_dims = t->n_dims,
                                      .boxes = &l->boxes[i],
                                      .n_boxes = 1};
        memcpy(l->wanted[i].shape, t->shape, sizeof t->shape);
        used += t->bytes;
    }
}

void landing_free(landing *l)
{
    munmap(l->arena, l->size);
    free(l->wanted);
    free(l->boxes);
    *l = (landing){0};
}

bool landing_is_step(const rank_world *w, const landing *l, uint64_t step)
{
    for (size_t i = 0; i < w->tensors.count; i++) {
        const tensor_spec *t = &w->tensors.tensors[i];
        size_t at = pattern_compare(l->boxes[i].address,
                                    pattern_start(w->seeds[i], step), 0, t->bytes);
        if (at < t->bytes) {
            printf("# %s differs from step %llu at byte %zu\n", t->name,
                   (unsigned long long)step, at);
            return false;
        }
    }
    return true;
}

fanin_status rank_world_pull(const rank_world *w, fanin_client *client,
                             const fanin_pull_options *options, const landing *l,
                             fanin_result_info *info_out, fanin_error *error)
{
    fanin_pull_options defaults = make_options(FANIN_STEP_NEWEST, 0);
    defaults.timeout_ms = 30000;
    fanin_result *result = NULL;
    fanin_status status =
        fanin_client_pull(client, options ? options : &defaults, l->wanted,
                          w->tensors.count, &result, error);
    if (status == FANIN_OK && info_out) {
        *info_out = (fanin_result_info){.struct_size = sizeof *info_out};
        fanin_result_get(result, info_out);
        info_out->path_reason = info_out->ranks_json = NULL;
    }
    fanin_result_free(&result);
    return status;
}
