/* SPDX-License-Identifier: Apache-2.0 */
/* A peer that uses UCX as it likes fires reads and writes at a server. Each attack is first
   shown to work on a server with the features that ours must not have. */
#include "testing.h"
#include "ucx_child.h"
#include "ucx_internal.h"
#include <dlfcn.h>

#define SUCCESS_MS 5000 /* an attack that works takes well under a millisecond */
#define FAILURE_MS 300

static ucx *library;
static __typeof__(ucp_put_nbx) *put_nbx;

typedef struct attack {
    const char *settings[6][2];
    bool write;
} attack;

typedef struct attacker {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_ep_h ep;
    ucp_rkey_h rkey;
    uint64_t words[512];
    bool called_back, ep_failed;
    ucs_status_t status;
} attacker;

static void on_error(void *cookie, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep, (void)status;
    ((attacker *)cookie)->ep_failed = true;
}

static void on_done(void *request, ucs_status_t status, void *cookie)
{
    attacker *a = cookie;
    library->ucp_request_free(request);
    a->called_back = true;
    a->status = status;
}

/* Plain UCX, with a configuration of the attacker's own. */
static bool attacker_open(attacker *a, const attack *kind, const ucx_child *child)
{
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_RMA};
    const ucp_worker_params_t worker_params = {0};
    const ucp_ep_params_t ep_params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)child->address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_error, .arg = a},
    };
    ucp_config_t *config;
    assert_int_equal(library->ucp_config_read(NULL, NULL, &config), UCS_OK);
    for (size_t i = 0; kind->settings[i][0]; i++)
        if (library->ucp_config_modify(config, kind->settings[i][0],
                                       kind->settings[i][1]) != UCS_OK) {
            library->ucp_config_release(config);
            return false;
        }
    assert_int_equal(library->ucp_init_version(1, 16, &params, config, &a->context),
                     UCS_OK);
    library->ucp_config_release(config);
    assert_int_equal(library->ucp_worker_create(a->context, &worker_params, &a->worker),
                     UCS_OK);
    if (library->ucp_ep_create(a->worker, &ep_params, &a->ep) != UCS_OK)
        return false;
    assert_int_equal(library->ucp_ep_rkey_unpack(a->ep, child->rkey, &a->rkey), UCS_OK);
    return true;
}

static void attacker_close(attacker *a)
{
    const ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE};
    const ucs_status_ptr_t request = library->ucp_ep_close_nbx(a->ep, &force);
    const deadline at = deadline_in_ms(SUCCESS_MS);
    while (library->ucp_worker_progress(a->worker) > 0 || !a->called_back)
        assert_false(deadline_passed(at));
    if (UCS_PTR_IS_PTR(request))
        library->ucp_request_free(request);
    library->ucp_rkey_destroy(a->rkey);
    library->ucp_worker_destroy(a->worker);
    library->ucp_cleanup(a->context);
}

/* True: the read or write completed as far as this side can tell. */
static bool attacker_fire(attacker *a, const attack *kind, uint64_t remote, unsigned ms)
{
    const ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .cb.send = on_done,
        .user_data = a,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    memset(a->words, 0x5A, sizeof a->words);
    const ucs_status_ptr_t request =
        kind->write ? put_nbx(a->ep, a->words, sizeof a->words, remote, a->rkey, &param)
                    : library->ucp_get_nbx(a->ep, a->words, sizeof a->words, remote,
                                           a->rkey, &param);
    a->called_back = !UCS_PTR_IS_PTR(request);
    a->status = UCS_PTR_IS_ERR(request) ? UCS_PTR_STATUS(request) : UCS_OK;
    const deadline at = deadline_in_ms(ms);
    while (!a->ep_failed && !deadline_passed(at))
        if (library->ucp_worker_progress(a->worker) == 0 && a->called_back &&
            !kind->write)
            break;
    return a->called_back && a->status == UCS_OK;
}

typedef struct outcome {
    bool possible; /**< this UCX knows the settings */
    bool read;     /**< the server's words arrived */
    uint64_t changed;
    bool alive;
} outcome;

static outcome attack_child(ucx_child_kind target, const attack *kind)
{
    outcome o = {.possible = true};
    ucx_child child;
    attacker *a = calloc(1, sizeof *a);
    assert_non_null(a);
    assert_true(ucx_child_start(&child, target));
    o.possible = attacker_open(a, kind, &child);
    if (o.possible) {
        /* A write is over for this side before it is for the other: always wait. */
        attacker_fire(a, kind, child.base,
                      target == UCX_CHILD_SAFE || kind->write ? FAILURE_MS
                                                              : SUCCESS_MS);
        for (size_t i = 0; i < 512; i++)
            o.read = o.read || a->words[i] == ucx_child_word(i);
        o.changed = ucx_child_ask(&child, UCX_CHILD_COUNT_CHANGED);
        attacker_close(a);
        o.alive = ucx_child_ask(&child, UCX_CHILD_COUNT_CHANGED) == o.changed;
    }
    o.alive = ucx_child_stop(&child) && o.alive;
    free(a);
    return o;
}

static void check(const attack *kind, ucx_child_kind control)
{
    if (!library)
        skip();
    const outcome open = attack_child(control, kind);
    if (!open.possible || (kind->write ? open.changed == 0 : !open.read)) {
        print_message("UCX %s does not carry this attack out\n", ucx_version(library));
        skip();
    }
    const outcome safe = attack_child(UCX_CHILD_SAFE, kind);
    assert_true(safe.possible);
    assert_false(safe.read);
    assert_int_equal(safe.changed, 0);
    assert_true(safe.alive);
}

#define EMULATED                                                                       \
    {"TLS", "posix,sysv"}, {"POSIX_ERROR_HANDLING", "y"},                              \
    {                                                                                  \
        "SYSV_ERROR_HANDLING", "y"                                                     \
    }

TEST(emulated_reads_get_nothing)
{
    static const attack kind = {.settings = {EMULATED}};
    check(&kind, UCX_CHILD_RMA);
}

TEST(emulated_writes_change_nothing)
{
    static const attack kind = {.settings = {EMULATED}, .write = true};
    check(&kind, UCX_CHILD_RMA);
}

int main(int argc, char **argv)
{
    const int child = ucx_child_main(argc, argv);
    if (child >= 0)
        return child;
    fanin_error error = FANIN_ERROR_INIT;
    if (ucx_load(NULL, &library, &error) == FANIN_OK) {
        void *handle = dlopen(ucx_library_path(library), RTLD_NOW | RTLD_NOLOAD);
        void *symbol = handle ? dlsym(handle, "ucp_put_nbx") : NULL;
        memcpy(&put_nbx, &symbol, sizeof put_nbx);
    } else {
        print_message("skipping: %s\n", error.message);
    }
    return tests_run(NULL);
}
