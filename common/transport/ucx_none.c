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

void ucx_unload(ucx **u)
{
}

const char *ucx_version(const ucx *u)
{
    return "";
}

const char *ucx_library_path(const ucx *u)
{
    return "";
}

fanin_status ucx_server_create(ucx *u, ucx_path path, const logger *log,
                               ucx_server **out, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

void ucx_server_destroy(ucx_server **s)
{
}

const uint8_t *ucx_server_address(const ucx_server *s, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

int ucx_server_fd(const ucx_server *s)
{
    return -1;
}

bool ucx_server_progress(ucx_server *s)
{
    return true;
}

fanin_status ucx_region_create(ucx_server *s, void *base, size_t length,
                               fanin_memory memory, ucx_region **out,
                               fanin_error *error)
{
    return unreachable_without_ucx(error);
}

const uint8_t *ucx_region_rkey(const ucx_region *r, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

void ucx_region_destroy(ucx_region **r)
{
}

fanin_status ucx_client_create(ucx *u, ucx_path path, const char *gpu,
                               const logger *log, ucx_client **out, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

bool ucx_client_destroy(ucx_client **c)
{
    return true;
}

const uint8_t *ucx_client_address(const ucx_client *c, size_t *size_out)
{
    *size_out = 0;
    return NULL;
}

int ucx_client_fd(const ucx_client *c)
{
    return -1;
}

bool ucx_client_progress(ucx_client *c)
{
    return false;
}

bool ucx_client_arm(ucx_client *c)
{
    return true;
}

fanin_status ucx_endpoint_create(ucx_client *c, const uint8_t *address, size_t size,
                                 ucx_endpoint **out, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

int ucx_endpoint_failed(const ucx_endpoint *e, const char **text_out)
{
    if (text_out)
        *text_out = "";
    return 0;
}

uint64_t ucx_endpoint_outstanding(const ucx_endpoint *e)
{
    return 0;
}

const char *ucx_endpoint_transport(ucx_endpoint *e)
{
    return "";
}

bool ucx_endpoint_close(ucx_endpoint **e, deadline at)
{
    return true;
}

fanin_status ucx_rkey_unpack(ucx_endpoint *e, const uint8_t *data, size_t size,
                             ucx_rkey **out, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

void ucx_rkey_destroy(ucx_rkey **rkey)
{
}

fanin_status ucx_local_create(ucx_client *c, void *base, size_t length,
                              fanin_memory memory, ucx_local **out, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

void ucx_local_destroy(ucx_local **l)
{
}

fanin_status ucx_get(ucx_endpoint *e, ucx_rkey *rkey, uint64_t remote, void *to,
                     size_t length, const ucx_local *local, ucx_done_fn done,
                     void *cookie, uint64_t tag, fanin_error *error)
{
    return unreachable_without_ucx(error);
}

/* NOLINTEND(misc-unused-parameters) */
