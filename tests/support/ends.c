/* SPDX-License-Identifier: Apache-2.0 */
#include "ends.h"

#include "testing.h"
#include <dirent.h>

fanin_server_config make_server_config(void)
{
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, 7, sizeof config.world_id);
    config.flags = FANIN_SERVER_NO_UCX;
    config.data_threads = 1;          /* the same on every machine */
    config.stranger_share_ms = 60000; /* leases last as long as they say */
    config.stranger_cpu = 16000;      /* and nobody is sent less than there is */
    return config;
}

fanin_server *make_server(const fanin_server_config *config, char *address, size_t size)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *server = NULL;
    assert_ok(fanin_server_create(config, &server, &error), error);
    snprintf(address, size, "127.0.0.1:%u", (unsigned)fanin_server_port(server));
    return server;
}

fanin_client_config make_client_config(void)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    config.path = FANIN_PATH_STREAM;
    return config;
}

fanin_client *make_client(const fanin_client_config *config)
{
    const fanin_client_config defaults = make_client_config();
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = NULL;
    assert_ok(fanin_client_create(config ? config : &defaults, &client, &error), error);
    return client;
}

fanin_client *connect_client(const fanin_client_config *config,
                             const char *const *addresses, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = make_client(config);
    assert_ok(fanin_client_connect(client, addresses, count, 20000, &error), error);
    return client;
}

fanin_tensor make_tensor(const char *name, fanin_dtype dtype, uint64_t rows,
                         uint64_t columns, fanin_box *box, void *memory)
{
    *box = (fanin_box){.extent = {rows, columns}, .address = memory};
    return (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                          .name = name,
                          .dtype = dtype,
                          .n_dims = columns ? 2 : 1,
                          .shape = {rows, columns},
                          .boxes = box,
                          .n_boxes = 1};
}

void publish_matrix(fanin_server *server, uint32_t *memory, uint32_t rows,
                    uint32_t columns)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box box;
    fanin_tensor tensor =
        make_tensor("matrix", FANIN_DTYPE_U32, rows, columns, &box, memory);
    for (uint32_t i = 0; i < rows * columns; i++)
        memory[i] = i * UINT32_C(2654435761);
    assert_ok(fanin_server_put(server, "lora:0", &tensor, 1, false, &error), error);
    assert_ok(fanin_server_commit(server, "lora:0", 41, NULL, &error), error);
}

fanin_pull_options make_options(fanin_step_rule rule, uint64_t step)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = "lora:0";
    options.rule = rule;
    options.step = step;
    options.timeout_ms = 20000;
    return options;
}

unsigned threads_named(const char *wanted, pid_t *first)
{
    unsigned n = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *e; (e = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", e->d_name);
        FILE *file = e->d_name[0] == '.' ? NULL : fopen(path, "re");
        if (file && fgets(name, sizeof name, file)) {
            name[strcspn(name, "\n")] = '\0';
            bool is = strcmp(name, wanted) == 0;
            if (is && n == 0 && first)
                *first = atoi(e->d_name);
            n += is;
        }
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return n;
}
