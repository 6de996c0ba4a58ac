/* SPDX-License-Identifier: Apache-2.0 */
#include "list.h"

#include "array.h"
#include "error_set.h"
#include "host.h"
#include "net/client_state.h"
#include "socket.h"
#include "thread.h"
#include "wake.h"
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define ASK_MS 5000     /* an offer is answered within */
#define PARKED_MS 10000 /* a request for changes waits so long at the rank */
#define AGAIN_MS 200    /* after a failure; then twice, up to ... */
#define AGAIN_MOST_MS 5000

/* What is to be offered, and to whom. */
typedef struct task {
    uint64_t serial; /* another offer has another one */
    bool wanted;
    uint8_t world_id[16];
    list_rank *ranks;
    size_t n_ranks;
    msg_offer offer;
} task;

struct holders_list {
    const fanin_client_config *config;
    logger log;
    char host[HOST_ID_SIZE];
    int changed;
    loop_source wake; /* of the thread */
    pthread_t thread;
    bool started;
    /* the thread's own */
    fanin_client *client;
    uint8_t world_id[16]; /* that the client demands */
    char rank[72];        /* it is connected to, "" none */
    uint64_t version;
    bool refused;         /* it was said that relays are not allowed */
    pthread_mutex_t lock; /* guards what follows */
    atomic_bool stop;
    task task;
    bool has_numbers, is_known;
    holder_entry *entries;
    size_t n_entries, capacity;
    uint64_t changes;
};

/* -------------------------------------------------------------------- the others' side */

static void task_clear(task *t)
{
    free(t->ranks);
    *t = (task){.serial = t->serial};
}

static bool copy_ranks(task *t, const list_rank *ranks, size_t n)
{
    t->n_ranks = n;
    t->ranks = calloc(n + 1, sizeof *ranks);
    if (t->ranks && n > 0)
        memcpy(t->ranks, ranks, n * sizeof *ranks);
    return t->ranks != NULL;
}

bool list_offer(holders_list *list, const uint8_t world_id[16], const list_rank *ranks,
                size_t n_ranks, const msg_offer *offer)
{
    task next = {.wanted = true, .offer = *offer};
    memcpy(next.world_id, world_id, sizeof next.world_id);
    if (!copy_ranks(&next, ranks, n_ranks))
        return false;
    pthread_mutex_lock(&list->lock);
    next.serial = list->task.serial + 1;
    task_clear(&list->task);
    list->task = next;
    list->is_known = false;
    list->n_entries = 0;
    list->changes++;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
    return true;
}

void list_tell(holders_list *list, const msg_offer *numbers)
{
    pthread_mutex_lock(&list->lock);
    msg_offer *o = &list->task.offer;
    o->units = numbers->units;
    o->landed = numbers->landed;
    o->bytes_origin = numbers->bytes_origin;
    o->bytes_relays = numbers->bytes_relays;
    o->bytes_handed_on = numbers->bytes_handed_on;
    o->late = numbers->late;
    o->taken_over = numbers->taken_over;
    list->has_numbers = list->task.wanted;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
}

void list_withdraw(holders_list *list)
{
    pthread_mutex_lock(&list->lock);
    list->task.serial += list->task.wanted;
    list->task.wanted = false;
    list->n_entries = 0;
    list->changes++;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->wake.fd);
}

/* Where the entry is reached from here; false: nowhere. */
static bool find_address(const holders_list *list, const holder_entry *e,
                         char out[sizeof((holder *)0)->address])
{
    bool here = list->host[0] && strcmp(list->host, e->host) == 0;
    const char *port = strrchr(e->address, ':'), *colon = strrchr(list->rank, ':');
    if (!port || (e->local && !here))
        return false;
    int host = colon ? (int)(colon - list->rank) : 0;
    size_t size = sizeof((holder *)0)->address;
    if (e->local)
        snprintf(out, size, "127.0.0.1%s", port);
    else if (port == e->address)
        snprintf(out, size, "%.*s%s", host, list->rank, port);
    else
        snprintf(out, size, "%s", e->address);
    return true;
}

bool list_is_known(holders_list *list)
{
    pthread_mutex_lock(&list->lock);
    bool known = list->is_known;
    pthread_mutex_unlock(&list->lock);
    return known;
}

bool list_copy(holders_list *list, const member *self, uint64_t *seen, holder **out,
               size_t *n_out)
{
    pthread_mutex_lock(&list->lock);
    bool is_new = *seen != list->changes;
    holder *all = is_new ? calloc(list->n_entries + 1, sizeof *all) : NULL;
    size_t n = 0;
    for (size_t i = 0; all && i < list->n_entries; i++) {
        const holder_entry *e = &list->entries[i];
        memcpy(all[n].who.id, e->incarnation, sizeof all[n].who.id);
        if (member_compare(&all[n].who, self) != 0 &&
            find_address(list, e, all[n].address))
            n++;
    }
    if (all)
        *seen = list->changes;
    pthread_mutex_unlock(&list->lock);
    *out = all;
    *n_out = n;
    return all != NULL;
}

/* --------------------------------------------------------------------------- answers */

/* Of an offer, or of a request for changes. */
typedef struct answer {
    size_t left; /* 1: it is awaited */
    fanin_status status;
    fanin_error error;
    msg_holders_ok list;
} answer;

static void on_answer(void *cookie, connection *c, message_type type, body *b)
{
    answer *a = cookie;
    a->left = 0;
    a->status = FANIN_OK;
    if (type == MSG_OFFER_OK && decode_empty(b) == FANIN_OK)
        return;
    if (type == MSG_HOLDERS_OK && decode_holders_ok(b, &a->list) == FANIN_OK)
        return;
    holders_free(&a->list);
    a->status = connection_reply_error(c, "relays", type, b, &a->error);
}

static size_t find_entry(const holders_list *list, const holder_entry *e)
{
    size_t i = 0;
    while (i < list->n_entries && memcmp(list->entries[i].incarnation, e->incarnation,
                                         sizeof e->incarnation) != 0)
        i++;
    return i;
}

/* Lock held. False: no memory, or too many. */
static bool apply_entry(holders_list *list, const holder_entry *e)
{
    size_t at = find_entry(list, e);
    if (e->left) {
        if (at < list->n_entries)
            list->entries[at] = list->entries[--list->n_entries];
        return true;
    }
    if (at == LIMIT_HOLDERS ||
        !array_reserve(&list->entries, &list->capacity, at + 1, sizeof *list->entries))
        return false;
    list->entries[at] = *e;
    list->n_entries += at == list->n_entries;
    return true;
}

/* False: the list is to be asked for as a whole. */
static bool apply_answer(holders_list *list, uint64_t serial, const msg_holders_ok *m)
{
    bool good = true;
    pthread_mutex_lock(&list->lock);
    if (serial == list->task.serial) {
        if (m->all)
            list->n_entries = 0;
        for (uint32_t i = 0; i < m->n_entries && good; i++)
            good = apply_entry(list, &m->entries[i]);
        list->changes += m->all || m->n_entries > 0;
        list->is_known = true;
    }
    pthread_mutex_unlock(&list->lock);
    if (m->all || m->n_entries > 0)
        wake_up(list->changed);
    return good;
}

/* ------------------------------------------------------------------- the rank's side */

static void drop_client(holders_list *list)
{
    if (list->client)
        loop_remove(&list->client->loop, &list->wake);
    fanin_client_destroy(&list->client);
    list->rank[0] = '\0';
}

static fanin_status make_client(holders_list *list, const task *t, fanin_error *error)
{
    fanin_client_config config = *list->config;
    if (list->client && memcmp(list->world_id, t->world_id, sizeof t->world_id) == 0)
        return FANIN_OK;
    drop_client(list);
    memcpy(config.world_id, t->world_id, sizeof config.world_id);
    config.partial = true;
    config.no_ucx = true;
    fanin_status status = fanin_client_create(&config, &list->client, error);
    if (status == FANIN_OK)
        status = loop_add(&list->client->loop, &list->wake, error);
    memcpy(list->world_id, t->world_id, sizeof list->world_id);
    return status;
}

static bool is_connected_to_rank(const holders_list *list)
{
    return list->rank[0] && list->client->n_peers == 1 &&
           peer_ready(&list->client->peers[0]);
}

static fanin_status connect_rank(holders_list *list, const list_rank *rank,
                                 fanin_error *error)
{
    const char *address = rank->address;
    fanin_status status = fanin_client_connect(list->client, &address, 1,
                                               list->config->connect_timeout_ms, error);
    if (status != FANIN_OK)
        return status;
    const msg_hello_ok *hello = connection_peer(list->client->peers[0].control);
    if (memcmp(hello->incarnation, rank->incarnation, sizeof rank->incarnation) == 0)
        return FANIN_OK;
    fanin_client_disconnect(list->client);
    return error_set(error, FANIN_ERR_WORLD, NULL,
                     "the rank at %s has restarted since it was pulled from", address);
}

/* The first rank that answers. */
static fanin_status find_rank(holders_list *list, const task *t, fanin_error *error)
{
    fanin_status status = make_client(list, t, error);
    if (status == FANIN_OK && is_connected_to_rank(list))
        return FANIN_OK;
    list->rank[0] = '\0';
    for (size_t i = 0; status == FANIN_OK && i < t->n_ranks; i++) {
        fanin_status tried = connect_rank(list, &t->ranks[i], error);
        if (tried == FANIN_OK) {
            snprintf(list->rank, sizeof list->rank, "%s", t->ranks[i].address);
            return FANIN_OK;
        }
        if (i + 1 == t->n_ranks || atomic_load(&list->stop))
            return tried;
    }
    return status;
}

static connection *rank_connection(const holders_list *list)
{
    return list->client->peers[0].control;
}

/* Whether the thread has something else to do. */
static bool is_task_over(holders_list *list, uint64_t serial)
{
    pthread_mutex_lock(&list->lock);
    bool over = serial != list->task.serial;
    pthread_mutex_unlock(&list->lock);
    return over || atomic_load(&list->stop);
}

static void send_offer(holders_list *list, const msg_offer *m, answer *a)
{
    connection *c = rank_connection(list);
    uint64_t request = connection_next_request(c);
    encode_offer(connection_out(c), request, m);
    connection_ask(c, request, a ? on_answer : NULL, a);
}

static fanin_status await_answer(holders_list *list, uint64_t serial, answer *a,
                                 uint64_t ms, fanin_error *error)
{
    deadline at = deadline_in_ms(ms);
    fanin_status status = FANIN_OK;
    while (a->left > 0 && status == FANIN_OK && !is_task_over(list, serial)) {
        pthread_mutex_lock(&list->lock);
        bool has_numbers = list->has_numbers;
        msg_offer numbers = list->task.offer;
        list->has_numbers = false;
        pthread_mutex_unlock(&list->lock);
        if (has_numbers && is_connected_to_rank(list))
            send_offer(list, &numbers, NULL);
        if (a->left > 0)
            status = client_step(list->client, at, at, "relays", error);
    }
    if (a->left > 0)
        connection_forget(rank_connection(list), a);
    else if (status == FANIN_OK && a->status != FANIN_OK)
        return error_copy(error, &a->error);
    return status;
}

static fanin_status offer_to_rank(holders_list *list, const task *t, fanin_error *error)
{
    answer a = {.left = 1, .error = FANIN_ERROR_INIT};
    connection *c = rank_connection(list);
    error_place place = connection_place(c, "relays");
    place.remedy = "use the same fanin release on both ends";
    if (!(connection_peer(c)->features & FEATURE_RELAYS))
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "rank %u at %s knows no relays", connection_peer(c)->rank,
                         connection_text(c));
    send_offer(list, &t->offer, &a);
    list->version = 0;
    return await_answer(list, t->serial, &a, ASK_MS, error);
}

static fanin_status hear_of_others(holders_list *list, const task *t,
                                   fanin_error *error)
{
    answer a = {.left = 1, .error = FANIN_ERROR_INIT};
    connection *c = rank_connection(list);
    msg_holders m = {
        .step = t->offer.step, .version = list->version, .timeout_ms = PARKED_MS};
    snprintf(m.publication, sizeof m.publication, "%s", t->offer.publication);
    memcpy(m.holding, t->offer.holding, sizeof m.holding);
    uint64_t request = connection_next_request(c);
    encode_holders(connection_out(c), request, &m);
    connection_ask(c, request, on_answer, &a);
    fanin_status status = await_answer(list, t->serial, &a, PARKED_MS + ASK_MS, error);
    if (status == FANIN_OK && a.left == 0) {
        list->version = a.list.version;
        if (!apply_answer(list, t->serial, &a.list))
            list->version = 0;
    }
    holders_free(&a.list);
    return status;
}

/* ------------------------------------------------------------------------- the thread */

static void rest_for(holders_list *list, int ms)
{
    struct pollfd fd = {list->wake.fd, POLLIN, 0};
    poll(&fd, 1, ms);
    wake_heard(list->wake.fd);
}

static void tell_failure(holders_list *list, fanin_status status,
                         const fanin_error *why)
{
    bool refused = status == FANIN_ERR_UNSUPPORTED;
    pthread_mutex_lock(&list->lock);
    list->is_known = true;
    pthread_mutex_unlock(&list->lock);
    wake_up(list->changed);
    if (refused && list->refused)
        return;
    list->refused = refused;
    log_write(&list->log, refused ? FANIN_LOG_WARNING : FANIN_LOG_INFO, "relay-list",
              "this reader hears of no other relays: %s; %s", why->message,
              why->remedy);
}

/* Until the task is another one, or something fails. */
static fanin_status serve_task(holders_list *list, const task *t, fanin_error *error)
{
    fanin_status status = find_rank(list, t, error);
    if (status == FANIN_OK)
        status = offer_to_rank(list, t, error);
    while (status == FANIN_OK && !is_task_over(list, t->serial))
        status = hear_of_others(list, t, error);
    return status;
}

static bool take_task(holders_list *list, task *t)
{
    pthread_mutex_lock(&list->lock);
    *t = list->task;
    t->ranks = NULL;
    if (t->wanted)
        (void)!copy_ranks(t, list->task.ranks, list->task.n_ranks);
    pthread_mutex_unlock(&list->lock);
    return t->ranks != NULL;
}

static void *list_run(void *cookie)
{
    holders_list *list = cookie;
    int again = AGAIN_MS;
    while (!atomic_load(&list->stop)) {
        task t;
        fanin_error error = FANIN_ERROR_INIT;
        if (!take_task(list, &t)) {
            drop_client(list); /* and with it the offer */
            rest_for(list, -1);
            continue;
        }
        fanin_status status = serve_task(list, &t, &error);
        bool over = is_task_over(list, t.serial);
        task_clear(&t);
        if (over || status == FANIN_OK) {
            again = AGAIN_MS;
            continue;
        }
        tell_failure(list, status, &error);
        rest_for(list, status == FANIN_ERR_UNSUPPORTED ? -1 : again);
        again = again < AGAIN_MOST_MS ? again * 2 : AGAIN_MOST_MS;
    }
    drop_client(list);
    return NULL;
}

fanin_status list_create(const fanin_client_config *config, const logger *log,
                         int changed, holders_list **out, fanin_error *error)
{
    holders_list *list = calloc(1, sizeof *list);
    if (!list)
        return error_set_memory(error);
    *list = (holders_list){.config = config, .log = *log, .changed = changed};
    pthread_mutex_init(&list->lock, NULL);
    host_id(NULL, list->host);
    fanin_status status = loop_source_wake(&list->wake, error);
    if (status == FANIN_OK)
        status = thread_start(&list->thread, "fanin-list", list_run, list, error);
    list->started = status == FANIN_OK;
    *out = list;
    if (status != FANIN_OK)
        list_destroy(out);
    return status;
}

void list_destroy(holders_list **list)
{
    holders_list *l = *list;
    if (!l)
        return;
    *list = NULL;
    atomic_store(&l->stop, true);
    if (l->wake.fd >= 0)
        wake_up(l->wake.fd);
    if (l->started)
        pthread_join(l->thread, NULL);
    if (l->wake.fd >= 0)
        close(l->wake.fd);
    task_clear(&l->task);
    free(l->entries);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
