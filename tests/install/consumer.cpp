/* SPDX-License-Identifier: Apache-2.0 */
/* Both halves from C++: types, defaults, errors, and the objects' whole life. */
#include <fanin/fanin.h>
#include <cstring>
#include <iostream>
#include <string>

static int fail(const char *what, const fanin_error &error)
{
    std::cerr << what << ": " << fanin_status_name(error.status) << ": "
              << error.message << "\n";
    return 1;
}

int main()
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config server_config;
    fanin_server_config_init(&server_config, sizeof(server_config));
    std::memset(server_config.world_id, 7, sizeof(server_config.world_id));
    server_config.rank = 0;
    server_config.world_size = 1;
    fanin_server *server = nullptr;
    if (fanin_server_create(&server_config, &server, &error) != FANIN_OK)
        return fail("server", error);

    fanin_client_config client_config;
    fanin_client_config_init(&client_config, sizeof(client_config));
    fanin_client *client = nullptr;
    if (fanin_client_create(&client_config, &client, &error) != FANIN_OK)
        return fail("client", error);
    const std::string address =
        "127.0.0.1:" + std::to_string(fanin_server_port(server));
    const char *addresses[] = {address.c_str()};
    if (fanin_client_connect(client, addresses, 1, 5000, &error) != FANIN_OK)
        return fail("connect", error);

    fanin_client_destroy(&client);
    fanin_server_destroy(&server, 0);
    std::cout << fanin_version() << "\n";
    return 0;
}
