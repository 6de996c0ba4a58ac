/* SPDX-License-Identifier: Apache-2.0 */
#include "inside.h"

#include "array.h"
#include "error_set.h"
#include "handing.h"
#include "log_choice.h"
#include "pull/pull.h"
#include "versioned.h"
#include "wake.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DRAIN_MS 100 /* what a server that goes lets others end */
#define CATALOG_MS 1000

/* ----------------------------------------------------------------------- configuration */

void fanin_relay_config_init(fanin_relay_config *config, size_t size)
{
    fanin_relay_config defaults = {0};
    versioned_init(config, size, &defaults, sizeof defaults);
}

/* A copy that lasts as long as the relay; NULL of NULL, and without memory, which is noted. */
static const char *keep_text(fanin_relay *r, const char *text, bool *good)
{
    char *copy = text ? strdup(text) : NULL;
    if (text && !copy)
        *good = false;
    if (copy)
        r->texts[r->n_texts++] = copy;
    return copy;
}

static bool copy_configs(fanin_relay *r, const fanin_relay_config *from)
{
    fanin_client_config *c = &r->client_config;
    fanin_server_config *s = &r->server_config;
    bool good = true;
    fanin_client_config_init(c, sizeof *c);
    fanin_server_config_init(s, sizeof *s);
    if ((from->client && !versioned_read(c, sizeof *c, from->client, 0)) ||
        (from->server && !versioned_read(s, sizeof *s, from->server, 0)))
        return false;
    c->server_name = keep_text(r, c->server_name, &good);
    c->secret_file = keep_text(r, c->secret_file, &good);
    c->tls_cert = keep_text(r, c->tls_cert, &good);
    c->tls_key = keep_text(r, c->tls_key, &good);
    c->tls_ca = keep_text(r, c->tls_ca, &good);
    s->bind = keep_text(r, s->bind, &good);
    s->allow = keep_text(r, s->allow, &good);
    s->secret_file = keep_text(r, s->secret_file, &good);
    s->tls_cert = keep_text(r, s->tls_cert, &good);
    s->tls_key = keep_text(r, s->tls_key, &good);
    s->tls_ca = keep_text(r, s->tls_ca, &good);
    if (!from->server) /* who reads the trainer by it may read this one by it */
        s->secret_file = c->secret_file;
    s->name = "relay";
    s->rank = 0;
    s->world_size = 1;
    s->base_port = 0;
    s->flags |= FANIN_SERVER_RELAY;
    return good;
}

static bool copy_addresses(fanin_relay *r, const char *const *addresses, size_t n)
{
    r->addresses = calloc(n, sizeof *r->addresses);
    if (!r->addresses)
        return false;
    for (; r->n_addresses < n; r->n_addresses++) {
        r->addresses[r->n_addresses] = strdup(addresses[r->n_addresses]);
        if (!r->addresses[r->n_addresses])
            return false;
    }
    return true;
}

static fanin_status choose_place(fanin_relay *r, const char *given, fanin_error *error)
{
    const char *place = given ? given : getenv("FANIN_PLACE");
    error_place where = {.remedy = "name " PLACE_FORM ", or nothing"};
    if (place && !place_valid(place))
        return error_set(error, FANIN_ERR_ARGUMENT, &where, "%s '%.80s' is no place",
                         given ? "place" : "FANIN_PLACE", place);
    snprintf(r->place, sizeof r->place, "%s", place ? place : "");
    return FANIN_OK;
}

static fanin_status init_relay(fanin_relay *r, const fanin_relay_config *given,
                               const char *const *addresses, size_t n,
                               fanin_error *error)
{
    fanin_relay_config config;
    fanin_relay_config_init(&config, sizeof config);
    if (given && !versioned_read(&config, sizeof config, given, 0))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the configuration's struct_size is not set");
    if (!addresses || n == 0 || n > 65536)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "give between 1 and 65536 addresses");
    for (size_t i = 0; i < n; i++) {
        if (!addresses[i])
            return error_set(error, FANIN_ERR_ARGUMENT, NULL, "address %zu is NULL", i);
    }
    r->unit_bytes = config.unit_bytes;
    if (!copy_addresses(r, addresses, n) || !copy_configs(r, &config))
        return error_set_memory(error);
    fanin_client_config *c = &r->client_config;
    fanin_status status = choose_place(r, config.place, error);
    if (status == FANIN_OK)
        status = log_choose(&c->log, &c->log_cookie, error);
    if (status != FANIN_OK)
        return status;
    r->log = log_of(c->log, c->log_cookie);
    r->wake = wake_open();
    if (r->wake < 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, errno, NULL,
                               "cannot create an eventfd");
    status = fanin_client_create(c, &r->origin, error);
    return status == FANIN_OK ? list_create(c, &r->log, r->wake, &r->list, error)
                              : status;
}

fanin_status fanin_relay_create(const fanin_relay_config *config,
                                const char *const *addresses, size_t n_addresses,
                                fanin_relay **relay_out, fanin_error *error)
{
    if (!relay_out)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "relay_out is NULL");
    fanin_relay *r = calloc(1, sizeof *r);
    if (!r)
        return error_set_memory(error);
    r->pid = getpid();
    r->wake = -1;
    pthread_mutex_init(&r->lock, NULL);
    fanin_status status = init_relay(r, config, addresses, n_addresses, error);
    if (status != FANIN_OK)
        fanin_relay_destroy(&r);
    *relay_out = r;
    return status;
}

/* ------------------------------------------------------------------------- handing on */

/* Nobody reads the parts any more, and nothing is offered. */
static void stop_handing_on(fanin_relay *r)
{
    list_withdraw(r->list);
    r->offered = (msg_offer){0};
    if (r->server && r->is_put)
        (void)!fanin_server_remove(r->server, r->publication, NULL, NULL);
    r->is_put = false;
}

static void drop_server(fanin_relay *r)
{
    r->handed_on += relay_handed_on(r->server);
    r->is_put = false;
    r->n_last = 0;
    fanin_server_destroy(&r->server, DRAIN_MS);
}

/* One of the trainer's launch: its world id says of which the bytes are. A launch that has the
   world id of the one before is another one all the same. */
static fanin_status ensure_server(fanin_relay *r, const uint8_t world_id[16],
                                  fanin_error *error)
{
    fanin_server_config config = r->server_config;
    bool same;
    fanin_status status = relay_take_ranks(r, &same, error);
    if (status != FANIN_OK ||
        (r->server && same && memcmp(r->world_id, world_id, sizeof r->world_id) == 0))
        return status;
    pthread_mutex_lock(&r->lock);
    drop_server(r);
    memcpy(r->world_id, world_id, sizeof r->world_id);
    memcpy(config.world_id, world_id, sizeof config.world_id);
    status = fanin_server_create(&config, &r->server, error);
    if (status == FANIN_OK)
        r->self = handing_member(r->server);
    pthread_mutex_unlock(&r->lock);
    return status;
}

/* The parts as they are to be read by others, none of them yet. Before that nobody may read what is
   about to be written. */
static fanin_status publish_parts(fanin_relay *r, uint64_t step, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (r->is_put)
        status = fanin_server_begin_update(r->server, r->publication, error);
    else
        status = fanin_server_put(r->server, r->publication, r->parts.own, r->parts.n,
                                  true, error);
    if (status != FANIN_OK)
        return status;
    r->is_put = true;
    return handing_fill(r->server, r->publication, step, error);
}

/* ------------------------------------------------------------------------------ the list */

/* Whether the rank has that offer. To make it anew would leave requests parked there, and it keeps
   few of a session. */
static bool is_offered(fanin_relay *r, const msg_offer *m, const digest *whole)
{
    const msg_offer *o = &r->offered;
    return m->step == o->step && m->port == o->port &&
           memcmp(m->incarnation, o->incarnation, sizeof m->incarnation) == 0 &&
           memcmp(m->holding, o->holding, sizeof m->holding) == 0 &&
           strcmp(m->publication, o->publication) == 0 &&
           digest_equal(whole, &r->offered_whole) && list_is_taken(r->list);
}

/* To the first of the ranks, in their order, of those that are there. A step that they have passed
   is always offered: the answer says whether it was taken back since. */
static fanin_status offer_parts(const attempt *a, fanin_error *error)
{
    fanin_relay *r = a->relay;
    msg_offer m = relay_numbers(r);
    snprintf(m.publication, sizeof m.publication, "%s", r->publication);
    m.step = a->step;
    memcpy(m.holding, r->parts.holding.bytes, sizeof m.holding);
    m.port = fanin_server_port(r->server);
    memcpy(m.incarnation, r->self.id, sizeof m.incarnation);
    snprintf(m.host, sizeof m.host, "%s", handing_host(r->server));
    snprintf(m.place, sizeof m.place, "%s", r->place);
    m.local = !(r->server_config.flags & FANIN_SERVER_OPEN);
    const digest none = {0};
    const digest *whole = r->whole.map.destination ? &r->whole.holding : NULL;
    if (!a->passed && is_offered(r, &m, whole ? whole : &none))
        return FANIN_OK;
    if (!list_offer(r->list, r->world_id, r->ranks, r->n_ranks, &m, whole))
        return error_set_memory(error);
    r->offered = m;
    r->offered_whole = whole ? *whole : none;
    return FANIN_OK;
}

/* -------------------------------------------------------------------------- the pull */

static void drop_parts(fanin_relay *r)
{
    fanin_destination_free(&r->from_origin);
    fanin_destination_free(&r->alike.destination);
    whole_free(&r->whole);
    parts_free(&r->parts);
}

static fanin_status replace_parts(fanin_relay *r, const parts *next, fanin_error *error)
{
    stop_handing_on(r);
    drop_parts(r);
    r->parts = *next;
    r->alike = (unit_map){
        .n_parts = next->n, .unit_first = next->unit_first, .used_by = next->unit_of};
    fanin_status status =
        fanin_destination_create(next->origin, next->n, &r->from_origin, error);
    return status == FANIN_OK ? fanin_destination_create(next->own, next->n,
                                                         &r->alike.destination, error)
                              : status;
}

/* The tensors' parts, unless they are those that are published. */
static fanin_status take_parts(fanin_relay *r, const fanin_pull_options *options,
                               const fanin_tensor *tensors, size_t count,
                               fanin_error *error)
{
    parts next;
    fanin_status status = parts_cut(&next, tensors, count, r->unit_bytes, error);
    if (status != FANIN_OK)
        return status;
    bool same = r->is_put && strcmp(r->publication, options->publication) == 0 &&
                parts_same_memory(&r->parts, &next);
    if (strcmp(r->publication, options->publication) != 0 ||
        !digest_equal(&r->parts.holding, &next.holding))
        r->n_last = 0;
    if (same)
        parts_free(&next);
    else
        status = replace_parts(r, &next, error);
    snprintf(r->publication, sizeof r->publication, "%s", options->publication);
    pthread_mutex_lock(&r->lock);
    r->stats.units = r->parts.n_units;
    r->stats.landed = r->stats.late = r->stats.taken_over = r->stats.holders = 0;
    pthread_mutex_unlock(&r->lock);
    return status;
}

static const msg_hello_ok *hello_of(const fanin_client *client)
{
    for (size_t i = 0; i < client->n_peers; i++) {
        if (peer_ready(&client->peers[i]))
            return &client->peers[i].control->peer;
    }
    return NULL;
}

static fanin_status connect_origin(fanin_relay *r, const attempt *a, fanin_error *error)
{
    if (r->origin->connected)
        return FANIN_OK;
    uint32_t left = attempt_left_ms(a);
    return fanin_client_connect(r->origin, (const char *const *)r->addresses,
                                r->n_addresses, left, error);
}

static bool want_no_pair(void *cookie, const char *key, const char *value)
{
    (void)cookie;
    (void)key;
    (void)value;
    return false;
}

/* What holders of all tensors whole bring, by the catalog that the trainer's ranks have told. Those
   that have passed the step may have told none yet. With many experts it takes a while, in which no
   lease is held: @p session goes, and is begun anew. */
static void find_whole(fanin_relay *r, uint32_t left_ms, fanin_session **session)
{
    const key_table *keys = pull_known_keys(r->origin, r->publication);
    if (!keys) {
        (void)!fanin_client_metadata(r->origin, r->publication,
                                     left_ms < CATALOG_MS ? left_ms : CATALOG_MS,
                                     want_no_pair, NULL, NULL);
        keys = pull_known_keys(r->origin, r->publication);
    }
    if (!keys || digest_equal(&r->whole.catalog_id, &keys->id))
        return;
    fanin_session_abandon(session);
    whole_free(&r->whole);
    whole_find(&r->whole, &r->parts, keys, r->unit_bytes);
}

/* The trainer says which step; what is published here is made ready for it. A step that the caller
   names and the trainer has passed may be had of others: there is no session then. */
static fanin_status begin_attempt(attempt *a, fanin_session **session,
                                  fanin_error *error)
{
    fanin_relay *r = a->relay;
    fanin_pull_options o = attempt_options(a);
    bool exact = o.rule == FANIN_STEP_EXACT;
    fanin_status status = exact ? attempt_look_passed(a, o.step, error) : FANIN_OK;
    o.timeout_ms = attempt_left_ms(a); /* a rank that is stopped took all of it */
    if (status == FANIN_OK && !a->passed)
        status = fanin_client_begin_into(r->origin, &o, r->from_origin, session, error);
    if (status == FANIN_ERR_SUPERSEDED && exact)
        a->passed = true;
    else if (status != FANIN_OK)
        return status;
    a->step = a->passed ? o.step : fanin_session_step(*session);
    const msg_hello_ok *hello = hello_of(r->origin);
    if (!hello)
        return error_set(error, FANIN_ERR_CLOSED, NULL, "all ranks are gone");
    status = ensure_server(r, hello->world_id, error);
    if (status == FANIN_OK)
        status = publish_parts(r, a->step, error);
    if (status != FANIN_OK)
        return status;
    find_whole(r, attempt_left_ms(a), session);
    return offer_parts(a, error);
}

static fanin_status try_once(attempt *a, fanin_error *error)
{
    fanin_session *session = NULL;
    fanin_status status = begin_attempt(a, &session, error);
    if (status == FANIN_OK)
        return attempt_run(a, session, error);
    fanin_session_abandon(&session);
    return status;
}

/* The trainer has moved on, and what others hold of the step is not all of it. */
static bool may_begin_again(const attempt *a, const fanin_result_info *so_far,
                            fanin_status why)
{
    const fanin_pull_options *o = a->options;
    if (why != FANIN_ERR_SUPERSEDED && why != FANIN_ERR_STALE &&
        why != FANIN_ERR_CLOSED && why != FANIN_ERR_UNREACHABLE)
        return false;
    bool begun = a->schedule != NULL;
    return begun && o->rule != FANIN_STEP_EXACT && !deadline_passed(a->at) &&
           (o->max_attempts == 0 || so_far->stale + 1 < o->max_attempts);
}

static fanin_status make_result(attempt *a, fanin_result_info *info, size_t tensors,
                                fanin_result **out, fanin_error *error)
{
    const parts *p = &a->relay->parts;
    uint64_t relayed = attempt_relayed(a);
    size_t from = 0;
    char how[64] = "";
    for (size_t i = 0; i < a->n_holders; i++)
        from += a->holders[i]->brought > 0;
    snprintf(how, sizeof how, "%u %% from %zu relays",
             (unsigned)(100 * (double)relayed / (double)p->bytes), from);
    info->step = a->step;
    memcpy(info->world_id, a->relay->world_id, sizeof info->world_id);
    info->bytes = p->bytes;
    info->tensors = tensors;
    info->verified = a->options->verify;
    info->total_ns = clock_ns() - a->began_ns;
    *out = result_of_several(a->origin.result, info, how);
    a->origin.result = NULL;
    return *out ? FANIN_OK : error_set_memory(error);
}

static fanin_status pull_by_attempts(fanin_relay *r, const fanin_pull_options *options,
                                     size_t tensors, fanin_result **result,
                                     fanin_error *error)
{
    uint64_t began = clock_ns();
    fanin_result_info info = {.struct_size = sizeof info};
    for (;;) {
        fanin_error why = FANIN_ERROR_INIT;
        attempt a = {.relay = r,
                     .options = options,
                     .began_ns = began,
                     .before = info.stale,
                     .at = began + (uint64_t)options->timeout_ms * MS};
        fanin_status status = connect_origin(r, &a, &why);
        if (status == FANIN_OK)
            status = try_once(&a, &why);
        bool again = status != FANIN_OK && may_begin_again(&a, &info, status);
        if (status == FANIN_OK)
            status = make_result(&a, &info, tensors, result, &why);
        attempt_free(&a);
        if (!again)
            return status == FANIN_OK ? FANIN_OK : error_copy(error, &why);
        info.restarts++;
        info.stale++;
        log_write(&r->log, FANIN_LOG_DEBUG, "restart", "%s", why.message);
    }
}

static fanin_status check_relay(const fanin_relay *r, fanin_error *error)
{
    error_place place = {.remedy = "create a relay of its own in the child"};
    if (!r)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the relay is NULL");
    if (r->pid == getpid())
        return FANIN_OK;
    return error_set(error, FANIN_ERR_FORKED, &place,
                     "the relay belongs to the parent process %d", (int)r->pid);
}

fanin_status fanin_relay_pull_into(fanin_relay *relay,
                                   const fanin_pull_options *options,
                                   const fanin_tensor *tensors, size_t count,
                                   fanin_result **result_out, fanin_error *error)
{
    fanin_pull_options o;
    fanin_result *result = NULL;
    fanin_status status = check_relay(relay, error);
    if (status == FANIN_OK)
        status = pull_options_read(options, &o, error);
    if (status != FANIN_OK)
        return status;
    if (atomic_exchange(&relay->busy, true))
        return error_set(error, FANIN_ERR_STATE, NULL,
                         "another thread pulls by this relay");
    status = take_parts(relay, &o, tensors, count, error);
    if (status == FANIN_OK)
        status = pull_by_attempts(relay, &o, count, &result, error);
    if (status == FANIN_OK)
        relay_tell(relay);
    else
        stop_handing_on(relay);
    if (status ==
        FANIN_ERR_CANCELLED) { /* by either of the two; the next call goes on */
        atomic_store(&relay->cancelled, false);
        atomic_store(&relay->origin->cancelled, false);
    }
    atomic_store(&relay->busy, false);
    if (result_out)
        *result_out = result;
    else
        fanin_result_free(&result);
    return status;
}

/* ------------------------------------------------------------------------------ the rest */

void fanin_relay_release(fanin_relay *relay)
{
    if (check_relay(relay, NULL) == FANIN_OK)
        stop_handing_on(relay);
}

void fanin_relay_cancel(fanin_relay *relay)
{
    if (!relay || relay->pid != getpid())
        return;
    int saved = errno;
    atomic_store(&relay->cancelled, true);
    wake_up(relay->wake);
    fanin_client_cancel(relay->origin);
    errno = saved;
}

void fanin_relay_destroy(fanin_relay **relay)
{
    if (!relay || !*relay)
        return;
    fanin_relay *r = *relay;
    *relay = NULL;
    if (r->pid != getpid())
        return;
    if (r->list)
        stop_handing_on(r);
    list_destroy(&r->list);
    fanin_server_destroy(&r->server, DRAIN_MS);
    fanin_client_destroy(&r->origin);
    relay_forget_clients(r, NULL, 0);
    free(r->idle);
    free(r->last);
    free(r->blamed);
    free(r->disbelieved);
    free(r->ranks);
    if (r->wake >= 0)
        close(r->wake);
    drop_parts(r);
    for (size_t i = 0; i < r->n_texts; i++)
        free(r->texts[i]);
    for (size_t i = 0; i < r->n_addresses; i++)
        free(r->addresses[i]);
    free(r->addresses);
    pthread_mutex_destroy(&r->lock);
    free(r);
}
