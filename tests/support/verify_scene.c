/* SPDX-License-Identifier: Apache-2.0 */
#include "verify_scene.h"

#include "ends.h"
#include "testing.h"

static void put(verify_scene *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box boxes[2];
    float *second = (float *)s->memory + SCENE_FLOATS;
    const fanin_tensor tensors[2] = {make_tensor(SCENE_A, FANIN_DTYPE_F32, SCENE_ROWS,
                                                 SCENE_COLUMNS, &boxes[0], s->memory),
                                     make_tensor(SCENE_B, FANIN_DTYPE_F32,
                                                 SCENE_COLUMNS, SCENE_ROWS, &boxes[1],
                                                 second)};
    const fanin_pair metadata[] = {{"base_model_name_or_path", "base"},
                                   {"lora_alpha", "16"}};
    assert_ok(fanin_server_put(s->server, "lora:0", tensors, 2, false, &error), error);
    assert_ok(fanin_server_set_metadata(s->server, "lora:0", metadata, 2, &error),
              error);
}

void scene_publish(verify_scene *s, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    for (size_t i = 0; i < 2 * SCENE_FLOATS; i++)
        s->floats[i] = (float)i * 1.7F + (float)step;
    assert_ok(fanin_server_commit(s->server, "lora:0", step, NULL, &error), error);
}

void scene_write_in_silence(void *scene)
{
    verify_scene *s = scene;
    float *one = &s->floats[7 * SCENE_COLUMNS + 3];
    *one = -*one;
}

void scene_update(void *scene)
{
    verify_scene *s = scene;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_begin_update(s->server, "lora:0", &error), error);
    scene_publish(s, 2);
}

void scene_leave_alone(void *scene)
{
    (void)scene;
}

void scene_start(verify_scene *s, void *memory, float *floats, void (*trigger)(void *))
{
    char direct[32];
    fanin_server_config config = make_server_config();
    *s = (verify_scene){.memory = memory, .floats = floats};
    config.lease_ms = 1; /* an update in the middle of a pull does not wait */
    s->server = make_server(&config, direct, sizeof direct);
    put(s);
    scene_publish(s, 1);
    rank_proxy_start(&s->proxy, fanin_server_port(s->server), MSG_DIGEST, trigger, s);
    const char *address = s->proxy.address;
    s->client = connect_client(NULL, &address, 1);
}

void scene_stop(verify_scene *s)
{
    fanin_client_destroy(&s->client);
    rank_proxy_stop(&s->proxy);
    fanin_server_destroy(&s->server, 0);
}

static fanin_status finish(fanin_status status, fanin_result **result,
                           fanin_result_info *info)
{
    *info = (fanin_result_info){.struct_size = sizeof *info};
    fanin_result_get(*result, info);
    fanin_result_free(result);
    info->path_reason = info->ranks_json = NULL;
    return status;
}

static fanin_pull_options options_with(bool verify)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.verify = verify;
    return options;
}

fanin_status scene_pull(verify_scene *s, fanin_dtype dtype, void *to,
                        int64_t row_stride, fanin_result_info *info, fanin_error *error)
{
    fanin_pull_options options = options_with(true);
    fanin_result *result = NULL;
    options.dtype = dtype;
    fanin_box box;
    fanin_tensor tensor = make_tensor(SCENE_A, dtype ? dtype : FANIN_DTYPE_F32,
                                      SCENE_ROWS, SCENE_COLUMNS, &box, to);
    box.stride[0] = row_stride;
    box.stride[1] = dtype ? 2 : 4;
    fanin_status status =
        fanin_client_pull(s->client, &options, &tensor, 1, &result, error);
    return finish(status, &result, info);
}

fanin_status scene_pull_directory(verify_scene *s, const char *directory, bool verify,
                                  fanin_result_info *info, fanin_error *error)
{
    const fanin_pull_options options = options_with(verify);
    fanin_result *result = NULL;
    fanin_status status =
        fanin_client_pull_adapter(s->client, &options, directory, &result, error);
    return finish(status, &result, info);
}

void scene_assert_unequal(const verify_scene *s, fanin_status status, const char *key,
                          const fanin_error *error)
{
    assert_int_equal(status, FANIN_ERR_TRANSPORT);
    assert_int_equal(error->rank, 0);
    assert_string_equal(error->key, key);
    assert_string_equal(error->address, s->proxy.address);
    assert_non_null(strstr(error->message, key));
}
