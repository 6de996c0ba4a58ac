/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of ucx.h in a build without UCX's headers. Since ucx_load() always fails, no
   handle exists and the others are never reached with one. */
/* NOLINTBEGIN(misc-unused-parameters): there is nothing that arguments could change. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#include "error_set.h"
#include "ucx.h"

fanin_status ucx_load(const logger *log, ucx **out, fanin_error *error)
{
    const error_place place = {
        .phase = "load",
        .remedy =
            "build it with the headers of UCX 1.16 or newer (meson -Ducx=enabled)"};
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "this library was built without UCX");
}

static fanin_status unreachable_without_ucx(fanin_error *error)
{
    return error_set(error, FANIN_ERR_INTERNAL, NULL, "UCX used in a build without it");
}

const uint8_t *ucx_server_address(const ucx_server *s, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

const uint8_t *ucx_region_rkey(const ucx_region *r, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

const uint8_t *ucx_client_address(const ucx_client *c, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

int ucx_endpoint_failed(const ucx_endpoint *e, const char **text_out)
{
    if (text_out)
        *text_out = "";
    return 0;
}

#define STUB(type, name, parameters, value)                                            \
    type name parameters                                                               \
    {                                                                                  \
        return value;                                                                  \
    }
#define REFUSE(name, parameters)                                                       \
    STUB(fanin_status, name, parameters, unreachable_without_ucx(error))

STUB(void, ucx_unload, (ucx * *u), )
STUB(const char *, ucx_version, (const ucx *u), "")
STUB(const char *, ucx_library_path, (const ucx *u), "")
REFUSE(ucx_server_create, (ucx * u, ucx_path path, const logger *log, ucx_server **out,
                           fanin_error *error))
STUB(void, ucx_server_destroy, (ucx_server * *s), )
STUB(int, ucx_server_fd, (const ucx_server *s), -1)
STUB(bool, ucx_server_progress, (ucx_server * s), true)
REFUSE(ucx_region_create, (ucx_server * s, void *base, size_t length,
                           fanin_memory memory, ucx_region **out, fanin_error *error))
STUB(void, ucx_region_destroy, (ucx_region * *r), )
REFUSE(ucx_client_create, (ucx * u, ucx_path path, const char *gpu, const logger *log,
                           ucx_client **out, fanin_error *error))
STUB(bool, ucx_client_destroy, (ucx_client * *c), true)
STUB(int, ucx_client_fd, (const ucx_client *c), -1)
STUB(bool, ucx_client_progress, (ucx_client * c), false)
STUB(bool, ucx_client_arm, (ucx_client * c), true)
REFUSE(ucx_endpoint_create, (ucx_client * c, const uint8_t *address, size_t size,
                             ucx_endpoint **out, fanin_error *error))
STUB(uint64_t, ucx_endpoint_outstanding, (const ucx_endpoint *e), 0)
STUB(const char *, ucx_endpoint_transport, (ucx_endpoint * e), "")
STUB(bool, ucx_endpoint_close, (ucx_endpoint * *e, deadline at), true)
REFUSE(ucx_rkey_unpack, (ucx_endpoint * e, const uint8_t *data, size_t size,
                         ucx_rkey **out, fanin_error *error))
STUB(void, ucx_rkey_destroy, (ucx_rkey * *rkey), )
REFUSE(ucx_local_create, (ucx_client * c, void *base, size_t length,
                          fanin_memory memory, ucx_local **out, fanin_error *error))
STUB(void, ucx_local_destroy, (ucx_local * *l), )
REFUSE(ucx_get, (ucx_endpoint * e, ucx_rkey *rkey, uint64_t remote, void *to,
                 size_t length, const ucx_local *local, ucx_done_fn done, void *cookie,
                 uint64_t tag, fanin_error *error))

/* NOLINTEND(misc-unused-parameters) */
