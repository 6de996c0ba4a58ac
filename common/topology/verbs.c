/* SPDX-License-Identifier: Apache-2.0 */
#include "topology.h"

#if FANIN_HAVE_VERBS
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <string.h>

/* The functions used: members and names for dlsym. */
#define VERBS_FUNCTIONS(X)                                                             \
    X(ibv_get_device_list)                                                             \
    X(ibv_free_device_list)                                                            \
    X(ibv_get_device_name)                                                             \
    X(ibv_open_device)                                                                 \
    X(ibv_close_device)                                                                \
    X(ibv_alloc_pd)                                                                    \
    X(ibv_dealloc_pd)

typedef struct verbs {
    void *library;
#define X(name) __typeof__(&name) name; /* NOLINT(bugprone-macro-parentheses) */
    VERBS_FUNCTIONS(X)
#undef X
    /* rdma-core 34 and later */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int,
                                    int);
} verbs;

static bool verbs_load(verbs *v)
{
    v->library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!v->library)
        return false;
#define X(name)                                                                        \
    *(void **)&v->name = dlsym(v->library, #name);                                     \
    if (!v->name)                                                                      \
        return false;
    VERBS_FUNCTIONS(X)
#undef X
    *(void **)&v->reg_dmabuf_mr = dlsym(v->library, "ibv_reg_dmabuf_mr");
    return true;
}

/* The kernel looks at the descriptor last: with none it says EBADF if it knows dma-bufs, and
   EOPNOTSUPP if the driver does not. */
static verbs_answer takes_dma_buf(const verbs *v, struct ibv_context *context)
{
    struct ibv_pd *pd = v->reg_dmabuf_mr ? v->ibv_alloc_pd(context) : NULL;
    if (!pd)
        return VERBS_UNKNOWN;
    errno = 0;
    (void)v->reg_dmabuf_mr(pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
    int reason = errno;
    v->ibv_dealloc_pd(pd);
    if (reason == EBADF)
        return VERBS_YES;
    return reason == EOPNOTSUPP || reason == EPROTONOSUPPORT ? VERBS_NO : VERBS_UNKNOWN;
}

static void probe_device(const verbs *v, struct ibv_device *device, verbs_facts *out)
{
    struct ibv_context *context = v->ibv_open_device(device);
    out->can_open = context ? VERBS_YES : VERBS_NO;
    out->open_errno = context ? 0 : errno;
    if (!context)
        return;
    out->dma_buf = takes_dma_buf(v, context);
    v->ibv_close_device(context);
}

verbs_facts verbs_probe(const char *nic)
{
    verbs_facts out = {.built_in = true};
    verbs v = {.library = NULL};
    out.loaded = verbs_load(&v);
    int count = 0;
    /* NULL, with some error or other, is also what it says when there are none. */
    struct ibv_device **list = out.loaded ? v.ibv_get_device_list(&count) : NULL;
    if (out.loaded)
        out.can_open = VERBS_NO;
    for (int i = 0; list && i < count; i++)
        if (strcmp(v.ibv_get_device_name(list[i]), nic) == 0)
            probe_device(&v, list[i], &out);
    if (list)
        v.ibv_free_device_list(list);
    if (v.library)
        dlclose(v.library);
    return out;
}
#else
verbs_facts verbs_probe(const char *nic)
{
    (void)nic;
    return (verbs_facts){.built_in = false};
}
#endif
